"""The layout of a V2 or V3 cache from its configuration.

Reads only fields that say what a cached row is; whatever it does not know it refuses by name.
``head_dim`` and ``num_key_value_heads`` are not among them: for these models they describe the
expanded heads, which are never cached.
"""

from typing import Any

import torch

from kvtier.kernels import HeadDims
from kvtier.layouts import Layout, mla
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.fields import refuse_rope_type, size

__all__ = ["MODEL_TYPES", "head_dims", "layout_for"]

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
PAGE_TOKENS = 64
RECORDS = ("dense",)


def layout_for(
    config: Any, *, record: str | None, page_tokens: int | None, dtype: torch.dtype | str | None
) -> Layout:
    """See ``kvtier_deepseek.layout_for``; ``model_type`` is one of MODEL_TYPES."""
    if record not in (None, *RECORDS):
        raise UnsupportedModel(f"record {record!r} is not one of {RECORDS} for {config.model_type}")
    _refuse_windows(config)
    refuse_rope_type((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    dims = head_dims(config)
    return mla(
        layers=size(config, "num_hidden_layers"),
        latent_dim=dims.latent,
        rope_dim=dims.rope,
        dtype=_dtype_name(config, dtype),
        rope_layout=_rope_layout(config),
        page_tokens=PAGE_TOKENS if page_tokens is None else page_tokens,
    )


def head_dims(config: Any) -> HeadDims:
    """Sizes of the model's heads.  Raises UnsupportedModel naming a field that is not a size."""
    return HeadDims(
        heads=size(config, "num_attention_heads"),
        latent=size(config, "kv_lora_rank"),
        rope=size(config, "qk_rope_head_dim"),
        nope=size(config, "qk_nope_head_dim"),
        value=size(config, "v_head_dim"),
    )


def _rope_layout(config: Any) -> str:
    """In which order the model's own code leaves the rotated values."""
    if config.model_type == "deepseek_v2":
        return "interleaved"
    flag = getattr(config, "rope_interleave", None)
    if not isinstance(flag, bool):
        raise UnsupportedModel(f"rope_interleave must be true or false, got {flag!r}")
    # Pairs are read adjacent or half a row apart, but written half a row apart in both cases.
    return "half"


def _refuse_windows(config: Any) -> None:
    for name in ("sliding_window", "window_attn_skip_freq", "index_topk", "compress_ratios"):
        if getattr(config, name, None) not in (None, False):
            raise UnsupportedModel(f"{name}={getattr(config, name)!r} is not supported")
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) != {"full_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(set(kinds))} has more than full_attention")


def _dtype_name(config: Any, dtype: torch.dtype | str | None) -> str:
    chosen = dtype if dtype is not None else getattr(config, "dtype", None)
    return "bfloat16" if chosen is None else str(chosen).removeprefix("torch.")
