"""Grouped-query and multi-head attention: separate keys and values, one row per token and layer.

A row is the concatenation of all KV heads, [head 0 ; head 1 ; ...], keys already rotated.
"""

from kvtier.config import as_int
from kvtier.errors import ConfigError
from kvtier.layouts.base import DTYPE_BYTES, ROW_DTYPES, Component, Layout, Share

__all__ = ["gqa"]


def gqa(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str = "bfloat16",
    page_tokens: int = 64,
) -> Layout:
    """Layout of a model with separate K and V: components ``k`` and ``v``, each
    ``kv_heads * head_dim`` values a row.

    ``kv_heads`` are those this rank holds.  Both counts are part of the fingerprint: 8 heads of
    64 and 4 of 128 make rows of equal length and different meaning.
    """
    if dtype not in ROW_DTYPES:
        raise ConfigError(f"dtype must be one of {ROW_DTYPES}, got {dtype!r}")
    layers = as_int("layers", layers, least=1)
    kv_heads = as_int("kv_heads", kv_heads, least=1)
    head_dim = as_int("head_dim", head_dim, least=1)
    page_tokens = as_int("page_tokens", page_tokens, least=1)
    keys, values = (
        Component(
            name=name,
            share=Share.HISTORY,
            tokens_per_slot=1,
            slots_per_page=page_tokens,
            slot_bytes=kv_heads * head_dim * DTYPE_BYTES[dtype],
            layers=tuple(range(layers)),
            dtype=dtype,
        )
        for name in ("k", "v")
    )
    return Layout(
        name="gqa",
        page_tokens=page_tokens,
        components=(keys, values),
        meta={"kv_heads": kv_heads, "head_dim": head_dim},
    )
