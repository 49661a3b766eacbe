"""Latent attention with an index (DeepSeek-V3.2): a latent row and an indexer key per token and
layer.

The latent row is that of ``mla``.  The indexer key is what queries are scored against to pick the
rows that they attend to; every layer has its own, of every token.
"""

from dataclasses import dataclass
from functools import partial

from kvtier.config import as_int
from kvtier.errors import ConfigError
from kvtier.layouts.base import DTYPE_BYTES, ROW_DTYPES, Component, Layout, Share

__all__ = ["mla_indexed"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A row format of bytes: what one slot has of them, plane by plane."""

    dims: tuple[int, ...]
    """Values it packs, one number for each part of a row."""
    planes: tuple[int, ...]


LATENT_FP8 = _Packed((512, 64), (656,))
"""512 e4m3 values, 4 float32 scales of 128 each, 64 bfloat16 values."""
INDEX_FP8 = _Packed((128,), (128, 4))
"""128 e4m3 values, one float32 scale; the scales of a page lie behind all of its values."""
RECORDS = ("dense", "fp8")


def mla_indexed(
    *,
    layers: int,
    latent_dim: int,
    rope_dim: int,
    index_dim: int = 128,
    dtype: str = "bfloat16",
    record: str = "dense",
    index_record: str = "fp8",
    rope_layout: str = "half",
    page_tokens: int = 64,
    max_draft: int = 0,
) -> Layout:
    """Layout of a model whose every layer keeps two rows of a token, both history: ``latent``,
    ``latent_dim + rope_dim`` values, and ``index``, ``index_dim`` values.

    ``record`` is how latent rows are stored: "dense", as values of ``dtype``, or "fp8", packed to
    656 bytes (latents of 512 values, 64 of rope); ``index_record`` likewise of indexer keys, "fp8"
    being 132 bytes (of 128 values).  ``rope_layout`` is that of ``mla`` and of latent rows alone:
    of an indexer key the first values are rotated, in halves.

    Raises ConfigError naming the argument.
    """
    if dtype not in ROW_DTYPES:
        raise ConfigError(f"dtype must be one of {ROW_DTYPES}, got {dtype!r}")
    if rope_layout not in ("half", "interleaved"):
        raise ConfigError(f'rope_layout must be "half" or "interleaved", got {rope_layout!r}')
    layers = as_int("layers", layers, least=1)
    latent_dim = as_int("latent_dim", latent_dim, least=1)
    rope_dim = as_int("rope_dim", rope_dim, least=1)
    index_dim = as_int("index_dim", index_dim, least=1)
    page_tokens = as_int("page_tokens", page_tokens, least=1)
    if rope_dim > index_dim:
        raise ConfigError(f"{rope_dim=} values of an indexer key are rotated, {index_dim=} it has")
    per_token = partial(_component, layers=layers, page_tokens=page_tokens, dtype=dtype)
    return Layout(
        name="mla_indexed",
        page_tokens=page_tokens,
        components=(
            per_token("latent", "record", record, LATENT_FP8, (latent_dim, rope_dim)),
            per_token("index", "index_record", index_record, INDEX_FP8, (index_dim,)),
        ),
        meta={
            "rope_layout": rope_layout,
            "latent_dim": latent_dim,
            "rope_dim": rope_dim,
            "index_dim": index_dim,
            "record": record,
            "index_record": index_record,
            # Others store keys turned by a Hadamard matrix: the same scores, other bytes.
            "index_hadamard": "no",
        },
        max_draft=max_draft,
    )


def _component(
    name: str,
    argument: str,
    kind: str,
    packed: _Packed,
    dims: tuple[int, ...],
    *,
    layers: int,
    page_tokens: int,
    dtype: str,
) -> Component:
    if kind not in RECORDS:
        raise ConfigError(f"{argument} must be one of {RECORDS}, got {kind!r}")
    fp8 = kind == "fp8"
    if fp8 and dims != packed.dims:
        raise ConfigError(
            f"{argument}='fp8' stores {packed.dims} values, not {dims}; use {argument}='dense'"
        )
    return Component(
        name=name,
        share=Share.HISTORY,
        tokens_per_slot=1,
        slots_per_page=page_tokens,
        layers=tuple(range(layers)),
        slot_bytes=sum(packed.planes) if fp8 else sum(dims) * DTYPE_BYTES[dtype],
        dtype="uint8" if fp8 else dtype,
        planes=packed.planes if fp8 else (),
    )
