"""The layout of a V3.2 cache from its configuration.

Reads only fields that say what a cached row is, and refuses by name what it does not know.  What
is the same as in V3 is read as there.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kvtier.kernels import HeadDims
from kvtier.layouts import Layout, mla_indexed
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.fields import mapping, refuse_rope_type, size
from kvtier_deepseek.mla.config import head_dims

__all__ = ["MODEL_TYPES", "Attention", "attention_of", "layout_for"]

MODEL_TYPES = ("deepseek_v32",)
PAGE_TOKENS = 64
RECORDS = ("dense", "fp8")
INDEX_RECORDS = ("fp8", "dense")
LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
"""What a layer with an index of its own is called."""
ROPE_LAYOUT = "half"
"""Pairs of latent rows are read adjacent and written half a row apart."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of a model's attention and of its index."""

    heads: HeadDims
    query_latent: int
    """Values that queries, and the index's too, are projected up from."""
    index_heads: int
    index_dim: int
    index_topk: int
    """Tokens that a query attends to, at most."""


def layout_for(
    config: Any,
    *,
    record: str | None,
    index_record: str | None,
    page_tokens: int | None,
    dtype: torch.dtype | str | None,
    draft: str | None = None,
    max_draft: int = 0,
) -> Layout:
    """See ``kvtier_deepseek.layout_for``; ``model_type`` is one of MODEL_TYPES."""
    if draft is not None:
        raise UnsupportedModel(f"draft {draft!r}: {config.model_type} has none of that kind")
    for name, value, known in (
        ("record", record, RECORDS),
        ("index_record", index_record, INDEX_RECORDS),
    ):
        if value not in (None, *known):
            raise UnsupportedModel(f"{name} {value!r} is not one of {known} for deepseek_v32")
    model = attention_of(config)
    values = dtype if dtype is not None else getattr(config, "dtype", None)
    return mla_indexed(
        layers=size(config, "num_hidden_layers"),
        latent_dim=model.heads.latent,
        rope_dim=model.heads.rope,
        index_dim=model.index_dim,
        dtype="bfloat16" if values is None else str(values).removeprefix("torch."),
        record=record or RECORDS[0],
        index_record=index_record or INDEX_RECORDS[0],
        rope_layout=ROPE_LAYOUT,
        page_tokens=PAGE_TOKENS if page_tokens is None else page_tokens,
        max_draft=max_draft,
    )


def attention_of(config: Any) -> Attention:
    """What ``config`` says.  Raises UnsupportedModel naming a field."""
    layers = size(config, "num_hidden_layers")
    kinds = getattr(config, "layer_types", None)
    listed = isinstance(kinds, list | tuple) and all(kind in LAYER_TYPES for kind in kinds)
    if kinds is not None and not (listed and len(kinds) == layers):
        raise UnsupportedModel(
            f"layer_types must name one of {LAYER_TYPES} for each of {layers} layers, got {kinds!r}"
        )
    for name in ("rope_parameters", "rope_scaling"):
        fields = mapping(config, name)
        refuse_rope_type(fields.get("rope_type", fields.get("type", "default")))
    dims = head_dims(config)
    index_dim = size(config, "index_head_dim")
    if dims.rope > index_dim:
        raise UnsupportedModel(
            f"qk_rope_head_dim is {dims.rope}: that many of index_head_dim={index_dim} are rotated"
        )
    return Attention(
        heads=dims,
        query_latent=size(config, "q_lora_rank"),
        index_heads=size(config, "index_n_heads"),
        index_dim=index_dim,
        index_topk=size(config, "index_topk"),
    )
