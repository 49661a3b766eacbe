"""Multi-head latent attention (DeepSeek-V2, V3): one latent row per token and layer.

A row is [normed latent ; rotated rope key]; nothing in it is per head, and no layer shares
another's rows.
"""

from kvtier.errors import ConfigError
from kvtier.layouts.base import DTYPE_BYTES, ROW_DTYPES, Component, Layout, Share

__all__ = ["mla"]


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
) -> Layout:
    """Layout of a dense MLA model: component ``latent``, ``latent_dim + rope_dim`` values a row.

    ``rope_layout`` says in which order the rope values lie: "half" (all first elements of the
    rotated pairs, then all second) or "interleaved" (pairs adjacent).  It is part of the
    fingerprint, since the same model writes other bytes in the other order.
    ``draft_layers`` adds that many layers behind the model's own (next-n predictors).
    """
    if dtype not in ROW_DTYPES:
        raise ConfigError(f"dtype must be one of {ROW_DTYPES}, got {dtype!r}")
    if rope_layout not in ("half", "interleaved"):
        raise ConfigError(f'rope_layout must be "half" or "interleaved", got {rope_layout!r}')
    if min(layers, latent_dim, rope_dim) < 1 or min(draft_layers, max_draft) < 0:
        raise ConfigError(f"bad sizes: {layers=} {latent_dim=} {rope_dim=} {draft_layers=}")
    latent = Component(
        name="latent",
        share=Share.HISTORY,
        tokens_per_slot=1,
        slots_per_page=page_tokens,
        slot_bytes=(latent_dim + rope_dim) * DTYPE_BYTES[dtype],
        layers=tuple(range(layers + draft_layers)),
        dtype=dtype,
    )
    return Layout(
        name="mla",
        page_tokens=page_tokens,
        components=(latent,),
        meta={"rope_layout": rope_layout, "latent_dim": latent_dim, "rope_dim": rope_dim},
        draft_layers=draft_layers,
        max_draft=max_draft,
    )
