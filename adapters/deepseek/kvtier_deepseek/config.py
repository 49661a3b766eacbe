"""From a Hugging Face configuration to the layout of its cache.

Reads only fields that say what a cached row is; whatever it does not know it refuses by name.
``head_dim`` and ``num_key_value_heads`` are not among them: for these models they describe the
expanded heads, which are never cached.
"""

from typing import Any

import torch

from kvtier.kernels import HeadDims
from kvtier.layouts import Layout, mla
from kvtier_deepseek.errors import UnsupportedModel

__all__ = ["head_dims", "layout_for"]

PAGE_TOKENS = 64
RECORDS = ("dense",)
MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose rotation of a position never changes.  Others ("dynamic", "longrope") depend on the
longest sequence seen so far: a cached key would not be a function of its prefix."""


def layout_for(
    config: Any,
    *,
    record: str | None = None,
    page_tokens: int | None = None,
    dtype: torch.dtype | str | None = None,
) -> Layout:
    """Layout of a DeepSeek-V2-Lite, V2 or V3 model's cache, from its HF configuration.

    ``record`` is the row format ("dense": plain values, the default); ``page_tokens`` defaults to
    64; ``dtype`` to the configuration's own, or bfloat16 where it has none.  Raises
    UnsupportedModel naming the field for anything else.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model_type {model_type!r} is not one of {MODEL_TYPES}")
    if record not in (None, *RECORDS):
        raise UnsupportedModel(f"record {record!r} is not one of {RECORDS} for {model_type}")
    _refuse_windows(config)
    _refuse_changing_rope(config)
    dims = head_dims(config)
    return mla(
        layers=_size(config, "num_hidden_layers"),
        latent_dim=dims.latent,
        rope_dim=dims.rope,
        dtype=_dtype_name(config, dtype),
        rope_layout=_rope_layout(config, model_type),
        page_tokens=PAGE_TOKENS if page_tokens is None else page_tokens,
    )


def head_dims(config: Any) -> HeadDims:
    """Sizes of the model's heads.  Raises UnsupportedModel naming a field that is not a size."""
    return HeadDims(
        heads=_size(config, "num_attention_heads"),
        latent=_size(config, "kv_lora_rank"),
        rope=_size(config, "qk_rope_head_dim"),
        nope=_size(config, "qk_nope_head_dim"),
        value=_size(config, "v_head_dim"),
    )


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{name} must be a positive integer, got {value!r}")
    return value


def _rope_layout(config: Any, model_type: str) -> str:
    """In which order the model's own code leaves the rotated values."""
    if model_type == "deepseek_v2":
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


def _refuse_changing_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type {rope_type!r} is not one of {ROPE_TYPES}")


def _dtype_name(config: Any, dtype: torch.dtype | str | None) -> str:
    chosen = dtype if dtype is not None else getattr(config, "dtype", None)
    return "bfloat16" if chosen is None else str(chosen).removeprefix("torch.")
