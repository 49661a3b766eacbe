"""The layout of a V2 or V3 cache from its configuration.

Reads only fields that say what a cached row is; whatever it does not know it refuses by name.
``head_dim`` and ``num_key_value_heads`` are not among them: for these models they describe the
expanded heads, which are never cached.

Which layers have a window is taken from a list with an entry for each, or not at all: a number
("every n-th") means different layers to different projects.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.kernels import HeadDims
from kvtier.layouts import Layout, mla
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.fields import count, mapping, refuse_rope_type, size

__all__ = ["MODEL_TYPES", "head_dims", "layout_for", "window_layers"]

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
PAGE_TOKENS = 64
RECORDS = ("dense",)
WINDOW_RECORDS = ("fp8", "dense")
PACKED_DIMS = (512, 64)
"""Latent and rope values of an fp8 record."""
KINDS = {"full_attention": False, "sliding_attention": True}
"""Layer type -> whether it has a window."""


def layout_for(
    config: Any,
    *,
    record: str | None,
    window_record: str | None,
    page_tokens: int | None,
    dtype: torch.dtype | str | None,
    draft: str | None = None,
    max_draft: int = 0,
) -> Layout:
    """See ``kvtier_deepseek.layout_for``; ``model_type`` is one of MODEL_TYPES."""
    if record not in (None, *RECORDS):
        raise UnsupportedModel(f"record {record!r} is not one of {RECORDS} for {config.model_type}")
    for name in ("index_topk", "compress_ratios"):
        if getattr(config, name, None) not in (None, False):
            raise UnsupportedModel(f"{name}={getattr(config, name)!r} is not supported")
    refuse_rope_type(mapping(config, "rope_parameters").get("rope_type", "default"))
    dims = head_dims(config)
    values = _dtype_name(config, dtype)
    return mla(
        layers=size(config, "num_hidden_layers"),
        latent_dim=dims.latent,
        rope_dim=dims.rope,
        dtype=values,
        max_draft=max_draft,
        rope_layout=_rope_layout(config),
        page_tokens=PAGE_TOKENS if page_tokens is None else page_tokens,
        **_window_options(config, dims, window_record),
        **_draft_options(config, draft, values),
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


def window_layers(config: Any) -> tuple[int, ...]:
    """Layers with a window, by ``window_attn_skip_freq`` (1 for those, 0 for others) or
    ``layer_types``; entries of next-n predictors, which may follow, are checked and left out.

    Raises UnsupportedModel naming the field for anything but such a list, for two that disagree
    and for a window without a list.
    """
    layers = size(config, "num_hidden_layers")
    stated: dict[str, tuple[bool, ...]] = {}
    if (entries := getattr(config, "window_attn_skip_freq", None)) is not None:
        entries = _listed("window_attn_skip_freq", entries, config, layers)
        if wrong := [e for e in entries if isinstance(e, bool) or e not in (0, 1)]:
            raise UnsupportedModel(f"window_attn_skip_freq has {wrong[0]!r}; entries are 0 or 1")
        stated["window_attn_skip_freq"] = tuple(e == 1 for e in entries[:layers])
    if (kinds := getattr(config, "layer_types", None)) is not None:
        kinds = _listed("layer_types", kinds, config, layers)
        if wrong := [kind for kind in kinds if kind not in [*KINDS]]:
            raise UnsupportedModel(f"layer_types has {wrong[0]!r}, which is none of {[*KINDS]}")
        stated["layer_types"] = tuple(KINDS[kind] for kind in kinds[:layers])
    if len(set(stated.values())) > 1:
        raise UnsupportedModel("window_attn_skip_freq and layer_types disagree")
    if not stated:
        if (window := getattr(config, "sliding_window", None)) not in (None, False):
            raise UnsupportedModel(
                f"sliding_window={window!r}: neither window_attn_skip_freq nor layer_types says "
                "which layers have it"
            )
        return ()
    name, windowed = next(iter(stated.items()))
    if all(windowed):
        raise UnsupportedModel(f"{name} gives every layer a window: there is no history to keep")
    return tuple(i for i, has in enumerate(windowed) if has)


def _listed(name: str, entries: object, config: Any, layers: int) -> Sequence[Any]:
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise UnsupportedModel(f"{name} must be a list with an entry per layer, got {entries!r}")
    drafts = count(config, "num_nextn_predict_layers")
    if len(entries) not in (layers, layers + drafts):
        raise UnsupportedModel(
            f"{name} has {len(entries)} entries for num_hidden_layers={layers} and "
            f"num_nextn_predict_layers={drafts}"
        )
    return entries


def _window_options(config: Any, dims: HeadDims, record: str | None) -> dict[str, Any]:
    layers = window_layers(config)
    if not layers:
        if record is not None:
            raise UnsupportedModel(f"window_record {record!r}: no layer has a window")
        return {}
    if record not in (None, *WINDOW_RECORDS):
        raise UnsupportedModel(f"window_record {record!r} is not one of {WINDOW_RECORDS}")
    record = record or WINDOW_RECORDS[0]
    window = size(config, "sliding_window")
    if record == "fp8" and (dims.latent, dims.rope) != PACKED_DIMS:
        raise UnsupportedModel(
            f"kv_lora_rank and qk_rope_head_dim are {dims.latent} and {dims.rope}; fp8 records "
            f"have {PACKED_DIMS}: use window_record='dense'"
        )
    return {"window_layers": layers, "window": window, "window_record": record}


def _draft_options(config: Any, draft: str | None, dtype: str) -> dict[str, Any]:
    if draft is None:
        return {}
    if draft != "mtp" or config.model_type != "deepseek_v3":
        raise UnsupportedModel(f"draft {draft!r}: {config.model_type} has none of that kind")
    layers = size(config, "num_hidden_layers")
    for name, windowed in (("window_attn_skip_freq", 1), ("layer_types", "sliding_attention")):
        if windowed in (getattr(config, name, None) or ())[layers:]:
            raise UnsupportedModel(f"{name}: a next-n predictor with a window cannot be served")
    return {
        "draft_layers": 1,
        "draft_state_values": size(config, "hidden_size"),
        "draft_state_dtype": dtype,
    }


def _dtype_name(config: Any, dtype: torch.dtype | str | None) -> str:
    chosen = dtype if dtype is not None else getattr(config, "dtype", None)
    return "bfloat16" if chosen is None else str(chosen).removeprefix("torch.")
