"""DeepSeek-V4: a sliding window in every layer, compressed history in most.

Owns which components such a model keeps, and what of its tail a checkpoint holds.  Knows nothing
of how a record is quantised or how entries are pooled; only how many bytes each takes and in which
order they lie.

1. Entry j of ratio r closes with token ``r * j + r - 1``, and only that token writes it: the
   compressed components are history, a pure function of the tokens before.
2. A page ends where every ring ends, so what is read past a page's end are the *last* slots of a
   ring.
3. Of a group of 4 the next group reads the first half (``_a``) of each row again; the second half
   (``_b``) and the rows of 128 are read by their own group only, which no page's end cuts in two.
4. ``max_draft`` makes rings longer, and nothing else: pages and checkpoints stay the same bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.config import as_int
from kvtier.errors import ConfigError
from kvtier.layouts.base import Component, Layout, Share
from kvtier.layouts.drafts import draft_state

__all__ = ["swa_c4_c128"]

RATIOS = (0, 4, 128)
SPAN_4 = 8
"""Tokens that an entry of ratio 4 reads: its own group and the one before."""
ROPE = 64
"""Rotated values, the last ones, of every packed record."""
FLOAT = 4
"""Bytes of a float32."""


class _Record(NamedTuple):
    """How one entry is stored."""

    slot_bytes: int
    dtype: str = "uint8"
    planes: tuple[int, ...] = ()
    page_align: int = 1
    dims: int = 0
    """Values in an entry of this format; 0: any number."""


# 448 fp8 and 64 bfloat16 values of rope; 7 scales and a zero.
RECORDS = {"fp8": _Record(584, "uint8", (576, 8), 576, dims=512)}
INDEX_RECORDS = {
    "fp8": _Record(132, "uint8", (128, 4), dims=128),
    "mxfp4": _Record(68, "uint8", (64, 4), dims=128),
}


def swa_c4_c128(
    *,
    layer_ratios: Sequence[int],
    record: str = "fp8",
    index_record: str = "fp8",
    head_dim: int = 512,
    rope_dim: int = 64,
    index_dim: int = 128,
    window: int = 128,
    page_tokens: int = 256,
    tail: str = "minimal",
    draft_layers: int = 0,
    max_draft: int = 0,
    draft_state_values: int = 0,
    draft_state_dtype: str = "bfloat16",
) -> Layout:
    """Layout of a model whose layer i compresses ``layer_ratios[i]`` tokens into one entry: 0 (it
    has a window only), 4 or 128.

    History: ``c4`` and ``c4_index`` (layers of ratio 4), ``c128`` (ratio 128).  Tail: the windows
    ``swa`` of all layers, with ``draft_layers`` behind the model's own, in pages of ``window``
    slots; and the compressors' states, float32 rows [values ; scores with position bias] in rings:
    ``c4_state_a`` and ``c4_index_state_a`` are read by the next group again, ``c4_state_b``,
    ``c4_index_state_b`` and ``c128_state`` by the token's own group only.  What no layer has is
    left out.

    ``record`` is how windows and entries are stored, "fp8" (584 bytes) or "fp32"; ``index_record``
    likewise, "fp8", "mxfp4" or "fp32".  A checkpoint holds with ``tail="minimal"`` one window page
    and the rows that are read again, with "seed" two window pages and the rows' second halves too.
    ``max_draft`` lengthens the rings, so that rejected tokens overwrite nothing that is still read.
    With ``draft_state_values`` a page also holds what draft layers need of its last token
    (``draft_state``, history).

    Raises ConfigError naming the argument.
    """
    ratios = tuple(layer_ratios)
    _check_pages(ratios, page_tokens, window)
    if tail not in ("minimal", "seed"):
        raise ConfigError(f'tail must be "minimal" or "seed", got {tail!r}')
    draft_layers = as_int("draft_layers", draft_layers, least=0)
    max_draft = as_int("max_draft", max_draft, least=0)
    if not 0 < rope_dim <= min(head_dim, index_dim) or rope_dim % 2:
        raise ConfigError(f"{rope_dim=} must be pairs within {head_dim=} and {index_dim=}")
    entry = _stored("record", record, RECORDS, head_dim, rope_dim)
    index = _stored("index_record", index_record, INDEX_RECORDS, index_dim, rope_dim)
    layers = {ratio: tuple(i for i, r in enumerate(ratios) if r == ratio) for ratio in RATIOS}
    history: list[Component] = []
    states: list[Component] = []
    if on := layers[4]:
        history += [
            _history("c4", 4, entry, on, page_tokens),
            _history("c4_index", 4, index, on, page_tokens),
        ]
        ring = _ring(SPAN_4, max_draft, page_tokens)
        halves = 4 if tail == "seed" else 0
        states += [
            _state("c4_state_a", head_dim, on, ring, kept=4),
            _state("c4_state_b", head_dim, on, ring, kept=halves),
            _state("c4_index_state_a", index_dim, on, ring, kept=4),
            _state("c4_index_state_b", index_dim, on, ring, kept=halves),
        ]
    if on := layers[128]:
        history += [_history("c128", 128, entry, on, page_tokens)]
        ring = _ring(128, max_draft, page_tokens)
        states += [_state("c128_state", head_dim, on, ring, kept=0)]
    history += draft_state(
        values=draft_state_values,
        dtype=draft_state_dtype,
        draft_layers=draft_layers,
        layer=len(ratios),
        page_tokens=page_tokens,
    )
    swa = _window(entry, len(ratios) + draft_layers, window, pages_kept=2 if tail == "seed" else 1)
    return Layout(
        name="swa_c4_c128",
        page_tokens=page_tokens,
        components=(*history, *states, swa),
        meta={
            "record": record,
            "index_record": index_record,
            "head_dim": head_dim,
            "rope_dim": rope_dim,
            "index_dim": index_dim,
            "scores": "with position bias",
            **({"draft_state_values": draft_state_values} if draft_state_values else {}),
        },
        draft_layers=draft_layers,
        max_draft=max_draft,
    )


def _check_pages(ratios: tuple[int, ...], page_tokens: int, window: int) -> None:
    """Entries and windows end where pages do."""
    if not any(ratios) or any(ratio not in RATIOS for ratio in ratios):
        raise ConfigError(f"layer_ratios must be of {RATIOS}, not all 0, got {ratios}")
    if page_tokens < 1 or page_tokens % max(1, *ratios):
        raise ConfigError(f"{page_tokens=} must be whole groups of {max(ratios)} tokens")
    if window < 1 or page_tokens % window:
        raise ConfigError(f"{window=} must divide {page_tokens=}")


def _history(
    name: str, ratio: int, stored: _Record, layers: tuple[int, ...], page_tokens: int
) -> Component:
    return Component(
        name=name,
        share=Share.HISTORY,
        tokens_per_slot=ratio,
        slots_per_page=page_tokens // ratio,
        layers=layers,
        slot_bytes=stored.slot_bytes,
        dtype=stored.dtype,
        planes=stored.planes,
        page_align=stored.page_align,
    )


def _state(name: str, dim: int, layers: tuple[int, ...], ring: int, *, kept: int) -> Component:
    """A compressor's rows of ``dim`` values and as many scores, of which checkpoints hold the
    last ``kept``."""
    return Component(
        name=name,
        share=Share.TAIL,
        tokens_per_slot=1,
        slots_per_page=ring,
        layers=layers,
        slot_bytes=2 * dim * FLOAT,
        dtype="float32",
        checkpoint_slots=kept,
    )


def _window(stored: _Record, layers: int, window: int, *, pages_kept: int) -> Component:
    """The windows of all layers, of which checkpoints hold the last ``pages_kept`` pages."""
    return Component(
        name="swa",
        share=Share.TAIL,
        tokens_per_slot=1,
        slots_per_page=window,
        layers=tuple(range(layers)),
        window=window,
        checkpoint_slots=window * pages_kept,
        slot_bytes=stored.slot_bytes,
        dtype=stored.dtype,
        planes=stored.planes,
        page_align=stored.page_align,
    )


def _stored(name: str, kind: str, known: dict[str, _Record], dim: int, rope_dim: int) -> _Record:
    if kind == "fp32":
        return _Record(dim * FLOAT, "float32")
    if kind not in known:
        raise ConfigError(f"{name} must be one of {(*known, 'fp32')}, got {kind!r}")
    if (dim, rope_dim) != (known[kind].dims, ROPE):
        raise ConfigError(
            f"{name}={kind!r} stores {known[kind].dims} values, the last {ROPE} of them rotated, "
            f"not {dim} and {rope_dim}; use {name}='fp32'"
        )
    return known[kind]


def _ring(least: int, max_draft: int, page_tokens: int) -> int:
    """Rows that hold ``least`` tokens and as many drafts; a power of two, as a page is."""
    rows = 1 << (least + max_draft - 1).bit_length()
    if rows > page_tokens:
        raise ConfigError(
            f"{max_draft=} needs rings of {rows} rows, more than {page_tokens=} tokens"
        )
    return rows
