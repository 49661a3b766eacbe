"""Multi-head latent attention (DeepSeek-V2, V3): one latent row per token and layer.

A row is [normed latent ; rotated rope key]; nothing in it is per head, and no layer shares
another's rows.  Layers that read only a window of them keep their rows apart, as a tail.
"""

from collections.abc import Sequence

from kvtier.config import as_int
from kvtier.errors import ConfigError
from kvtier.layouts.base import DTYPE_BYTES, ROW_DTYPES, Component, Layout, Share
from kvtier.layouts.drafts import draft_state

__all__ = ["mla"]

PACKED_DIMS = (512, 64)
"""Latent and rope values of a packed row..."""
PACKED_BYTES = 656
"""...which takes this many: 512 fp8 values, 4 float32 scales, 64 bfloat16 values."""
WINDOW_RECORDS = ("fp8", "dense")


def mla(
    *,
    layers: int,
    latent_dim: int,
    rope_dim: int,
    dtype: str = "bfloat16",
    rope_layout: str = "half",
    page_tokens: int = 64,
    draft_layers: int = 0,
    max_draft: int = 0,
    draft_state_values: int = 0,
    draft_state_dtype: str = "bfloat16",
    window_layers: Sequence[int] = (),
    window: int | None = None,
    window_record: str = "fp8",
    window_page_tokens: int | None = None,
) -> Layout:
    """Layout of an MLA model: component ``latent``, ``latent_dim + rope_dim`` values a row.

    ``rope_layout`` says in which order the rope values lie: "half" (all first elements of the
    rotated pairs, then all second) or "interleaved" (pairs adjacent).  It is part of the
    fingerprint, since the same model writes other bytes in the other order.
    ``draft_layers`` adds that many layers behind the model's own (next-n predictors); with
    ``draft_state_values`` a page also holds what they need of its last token (``draft_state``).

    ``window_layers`` are those whose queries see ``window`` tokens, their own included.  Their rows
    are no history but a tail, component ``window_latent``: with ``window_record`` "fp8" packed to
    656 bytes (latents of 512 values, 64 of rope), with "dense" as ``latent`` rows are.  They lie
    in window pages of ``window_page_tokens``, a power of two; default: ``page_tokens``, or what
    ``window - 1`` tokens fill if that is less.  Other layers keep what they had, byte for byte.

    Raises ConfigError naming the argument.
    """
    if dtype not in ROW_DTYPES:
        raise ConfigError(f"dtype must be one of {ROW_DTYPES}, got {dtype!r}")
    if rope_layout not in ("half", "interleaved"):
        raise ConfigError(f'rope_layout must be "half" or "interleaved", got {rope_layout!r}')
    layers = as_int("layers", layers, least=1)
    latent_dim = as_int("latent_dim", latent_dim, least=1)
    rope_dim = as_int("rope_dim", rope_dim, least=1)
    page_tokens = as_int("page_tokens", page_tokens, least=1)
    draft_layers = as_int("draft_layers", draft_layers, least=0)
    windowed = _window_layers(window_layers, layers + draft_layers)
    if bool(windowed) != (window is not None):
        raise ConfigError(f"{window=} and window_layers={windowed}: give both or none")
    latent = Component(
        name="latent",
        share=Share.HISTORY,
        tokens_per_slot=1,
        slots_per_page=page_tokens,
        slot_bytes=(latent_dim + rope_dim) * DTYPE_BYTES[dtype],
        layers=tuple(i for i in range(layers + draft_layers) if i not in windowed),
        dtype=dtype,
    )
    carried = draft_state(
        values=draft_state_values,
        dtype=draft_state_dtype,
        draft_layers=draft_layers,
        layer=layers,
        page_tokens=page_tokens,
    )
    components = (latent, *carried)
    meta: dict[str, str | int] = {
        "rope_layout": rope_layout,
        "latent_dim": latent_dim,
        "rope_dim": rope_dim,
    }
    if carried:
        meta["draft_state_values"] = draft_state_values
    if window is not None:
        per_page = _window_page(window, page_tokens, window_page_tokens)
        packed = _is_packed(window_record, (latent_dim, rope_dim))
        rows = Component(
            name="window_latent",
            share=Share.TAIL,
            tokens_per_slot=1,
            slots_per_page=per_page,
            slot_bytes=PACKED_BYTES if packed else latent.slot_bytes,
            layers=windowed,
            dtype="uint8" if packed else dtype,
            window=window,
            planes=(PACKED_BYTES,) if packed else (),
            checkpoint_slots=per_page if window == 1 else None,  # a checkpoint holds something
        )
        components = (latent, *carried, rows)
        meta["window_record"] = window_record
    return Layout(
        name="mla_swa" if windowed else "mla",
        page_tokens=page_tokens,
        components=components,
        meta=meta,
        draft_layers=draft_layers,
        max_draft=max_draft,
    )


def _window_layers(given: Sequence[int], layers: int) -> tuple[int, ...]:
    if any(isinstance(i, bool) or not isinstance(i, int) for i in given):
        raise ConfigError(f"window_layers must be layer numbers, got {given!r}")
    found = tuple(sorted(given))
    if len(set(found)) < len(found) or not set(found) <= set(range(layers)):
        raise ConfigError(f"window_layers {found} must be of {layers} layers, each named once")
    if len(found) == layers:
        raise ConfigError("window_layers has every layer: nothing is left that could be shared")
    return found


def _is_packed(record: str, dims: tuple[int, int]) -> bool:
    if record not in WINDOW_RECORDS:
        raise ConfigError(f"window_record must be one of {WINDOW_RECORDS}: {record!r}")
    packed = record == "fp8"
    if packed and dims != PACKED_DIMS:
        raise ConfigError(
            f"window_record='fp8' stores {PACKED_DIMS} values of latent and rope, not {dims}; "
            "use window_record='dense'"
        )
    return packed


def _window_page(window: int, page_tokens: int, given: int | None) -> int:
    if window < 1:
        raise ConfigError(f"{window=} must be at least 1 token")
    if given is None:
        most = min(page_tokens, max(1, window - 1))
        return 1 << (most.bit_length() - 1)
    if given < 1 or page_tokens % given:
        raise ConfigError(f"window_page_tokens={given} must divide {page_tokens=}")
    return given
