"""The layout of a V4 cache from its configuration, in either schema.

The released checkpoints say ``compress_ratios`` and flat rope fields; Hugging Face says
``layer_types``, ``compress_rates`` and nested ``rope_parameters``.  Both come to one
``Attention``.  No default of a model class is relied upon: layer kinds and the rope of compressed
layers must be stated, since a configuration without them describes no released model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.layouts import Layout, swa_c4_c128
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.fields import count, is_size, refuse_rope_type, size

__all__ = ["KINDS", "MODEL_TYPES", "Attention", "attention_of", "dspark_stages", "layout_for"]

MODEL_TYPES = ("deepseek_v4",)
PAGE_TOKENS = 256
KINDS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
"""HF's layer type -> tokens of one compressed entry; 0: none, the window only."""
RECORDS = ("fp8", "fp32")
INDEX_RECORDS = ("fp8", "mxfp4", "fp32")
TAILS = ("minimal", "seed")
DRAFTS = ("mtp", "dspark")
DSPARK_STAGES = 3
# What the packed formats hold; plain float32 rows may be of any size.
PACKED_DIMS = {"head_dim": 512, "qk_rope_head_dim": 64}
PACKED_INDEX_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What a V4 configuration says of its attention."""

    ratios: tuple[int, ...]
    """Of each layer: 0, 4 or 128."""
    heads: int
    head_dim: int
    rope_dim: int
    """The last values of a head that are rotated."""
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    """0, as the other two, where no layer has an index."""


def layout_for(
    config: Any,
    *,
    record: str | None,
    index_record: str | None,
    page_tokens: int | None,
    tail: str | None,
    draft: str | None = None,
    max_draft: int = 0,
) -> Layout:
    """See ``kvtier_deepseek.layout_for``; ``model_type`` is one of MODEL_TYPES."""
    record = _one_of("record", record, RECORDS)
    index_record = _one_of("index_record", index_record, INDEX_RECORDS)
    tail = _one_of("tail", tail, TAILS)
    model = attention_of(config)
    if record == "fp8":
        for name, wanted in PACKED_DIMS.items():
            found = model.head_dim if name == "head_dim" else model.rope_dim
            if found != wanted:
                raise UnsupportedModel(
                    f"{name} is {found}; fp8 records have {wanted}: use record='fp32'"
                )
    if index_record != "fp32" and model.index_dim not in (0, PACKED_INDEX_DIM):
        raise UnsupportedModel(
            f"index_head_dim is {model.index_dim}; {index_record} index records have "
            f"{PACKED_INDEX_DIM}: use index_record='fp32'"
        )
    page = PAGE_TOKENS if page_tokens is None else page_tokens
    if not is_size(page):
        raise UnsupportedModel(f"page_tokens must be a positive integer, got {page!r}")
    if page % model.window:
        raise UnsupportedModel(
            f"sliding_window {model.window}: pages of {page} tokens do not end where a window does"
        )
    return swa_c4_c128(
        layer_ratios=model.ratios,
        record=record,
        index_record=index_record,
        head_dim=model.head_dim,
        rope_dim=model.rope_dim,
        index_dim=model.index_dim or PACKED_INDEX_DIM,
        window=model.window,
        page_tokens=page,
        tail=tail,
        max_draft=max_draft,
        **_draft_options(config, draft, record),
    )


def _draft_options(config: Any, draft: str | None, record: str) -> dict[str, Any]:
    if draft is None:
        return {}
    dtype = "float32" if record == "fp32" else "bfloat16"
    if draft == "mtp":
        values = size(config, "hc_mult") * size(config, "hidden_size")
        return {"draft_layers": 1, "draft_state_values": values, "draft_state_dtype": dtype}
    if draft == "dspark":  # it carries nothing over, but a page says whether its rows are there
        return {
            "draft_layers": dspark_stages(config),
            "draft_state_values": 1,
            "draft_state_dtype": dtype,
        }
    raise UnsupportedModel(f"draft {draft!r} is not one of {DRAFTS} for deepseek_v4")


def dspark_stages(config: Any) -> int:
    """Layers of a DSpark draft: those that ``compress_ratios`` lists behind the model's own, or as
    many as the released ones have."""
    listed = getattr(config, "compress_ratios", None)
    behind = len(listed) - size(config, "num_hidden_layers") if listed else 0
    return behind if behind > 1 else DSPARK_STAGES


def attention_of(config: Any) -> Attention:
    """What ``config`` says, whichever schema it is in.  Raises UnsupportedModel naming a field."""
    ratios = _ratios(config)
    if (heads := getattr(config, "num_key_value_heads", 1)) != 1:
        raise UnsupportedModel(f"num_key_value_heads is {heads!r}; all heads share one KV row")
    _check_ropes(config, compressed=any(ratios))
    head_dim = size(config, "head_dim")
    indexed = 4 in ratios
    return Attention(
        ratios=ratios,
        heads=size(config, "num_attention_heads"),
        head_dim=head_dim,
        rope_dim=_rope_dim(config, head_dim),
        window=_window(config),
        index_heads=size(config, "index_n_heads") if indexed else 0,
        index_dim=size(config, "index_head_dim") if indexed else 0,
        index_topk=size(config, "index_topk") if indexed else 0,
    )


def _ratios(config: Any) -> tuple[int, ...]:
    layers = size(config, "num_hidden_layers")
    by_name = getattr(config, "layer_types", None)
    by_ratio = getattr(config, "compress_ratios", None)
    if by_name is None and by_ratio is None:
        raise UnsupportedModel("neither layer_types nor compress_ratios says what each layer is")
    _check_rates(config)
    found: list[tuple[int, ...]] = []
    if by_name is not None:
        _check_length("layer_types", by_name, layers, layers)
        if unknown := [name for name in by_name if name not in [*KINDS]]:
            raise UnsupportedModel(
                f"layer_types has {unknown[0]!r}, which is not one of {[*KINDS]}"
            )
        found.append(tuple(KINDS[name] for name in by_name))
    if by_ratio is not None:
        drafts = count(config, "num_nextn_predict_layers")
        if getattr(config, "dspark_block_size", None):
            drafts = max(drafts, DSPARK_STAGES)
        _check_length("compress_ratios", by_ratio, layers, layers + drafts)
        if unknown := [r for r in by_ratio if isinstance(r, bool) or r not in KINDS.values()]:
            raise UnsupportedModel(f"compress_ratios has {unknown[0]!r}; there are 0, 4 and 128")
        if any(by_ratio[layers:]):
            raise UnsupportedModel(
                f"compress_ratios: next-n predictors have windows only, got {by_ratio[layers:]}"
            )
        found.append(tuple(by_ratio[:layers]))
    if found[0] != found[-1]:
        raise UnsupportedModel("layer_types and compress_ratios disagree")
    return found[0]


def _check_length(name: str, values: object, least: int, most: int) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UnsupportedModel(f"{name} must be a list, got {values!r}")
    if len(values) not in (least, most):
        raise UnsupportedModel(
            f"{name} has {len(values)} entries for num_hidden_layers={least}"
            + f" and num_nextn_predict_layers={most - least}" * (most > least)
        )


def _check_rates(config: Any) -> None:
    """Other rates than the released ones close their groups elsewhere in a page."""
    rates = getattr(config, "compress_rates", None) or {}
    if not isinstance(rates, Mapping):
        raise UnsupportedModel(f"compress_rates must be a mapping, got {rates!r}")
    stated: dict[str, tuple[object, int | None]] = {
        f"compress_rates[{name!r}]": (rate, KINDS.get(name)) for name, rate in rates.items()
    }
    for name, ratio in (("compress_rate_csa", 4), ("compress_rate_hca", 128)):
        if (rate := getattr(config, name, None)) is not None:
            stated[name] = rate, ratio
    for name, (rate, served) in stated.items():
        if rate != served:
            raise UnsupportedModel(f"{name} is {rate!r}, and only {served} can be served")


def _window(config: Any) -> int:
    names = [n for n in ("sliding_window", "window_size") if getattr(config, n, None) is not None]
    if not names:
        raise UnsupportedModel("sliding_window is missing")
    windows = {size(config, name) for name in names}
    if len(windows) > 1:
        raise UnsupportedModel(f"sliding_window and window_size disagree: {sorted(windows)}")
    return windows.pop()


def _rope_dim(config: Any, head_dim: int) -> int:
    if getattr(config, "qk_rope_head_dim", None) is not None:
        rope = size(config, "qk_rope_head_dim")
    else:
        factor = getattr(config, "partial_rotary_factor", None)
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise UnsupportedModel(
                f"qk_rope_head_dim is missing, and partial_rotary_factor is {factor!r}"
            )
        rope = int(head_dim * factor)
    if rope % 2 or rope > head_dim:
        raise UnsupportedModel(f"qk_rope_head_dim is {rope}, of a head_dim of {head_dim}")
    return rope


def _check_ropes(config: Any, *, compressed: bool) -> None:
    """Window layers are rotated plainly, compressed ones with YaRN at another base."""
    name, main, compress = _ropes(config)
    if main is None or not _is_number(main.get("rope_theta")):
        raise UnsupportedModel(f"{name}: rope_theta of window layers is missing")
    if (kind := _rope_type(main)) != "default":
        raise UnsupportedModel(f"{name}: rope_type of window layers is {kind!r}, not 'default'")
    if not compressed:
        return
    if compress is None or not _is_number(compress.get("rope_theta")):
        raise UnsupportedModel(f"{name}: compress_rope_theta of compressed layers is missing")
    refuse_rope_type(kind := _rope_type(compress))
    if kind != "yarn":
        raise UnsupportedModel(f"{name}: rope_type of compressed layers is {kind!r}, not 'yarn'")
    for needed in ("factor", "original_max_position_embeddings"):
        if not _is_number(compress.get(needed)):
            raise UnsupportedModel(f"{name}: yarn needs {needed}, got {compress.get(needed)!r}")


def _ropes(config: Any) -> tuple[str, Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """(field, rope of window layers, rope of compressed ones)."""
    for name in ("rope_parameters", "rope_scaling"):
        fields = getattr(config, name, None)
        if fields is None:
            continue
        if not isinstance(fields, Mapping):
            raise UnsupportedModel(f"{name} must be a mapping, got {fields!r}")
        if {"main", "compress"} & set(fields):
            main, compress = fields.get("main"), fields.get("compress")
            for each in (main, compress):
                if each is not None and not isinstance(each, Mapping):
                    raise UnsupportedModel(f"{name} has {each!r} where a mapping belongs")
            return name, main, compress
        break
    else:
        name, fields = "rope_scaling", {}
    theta = getattr(config, "rope_theta", None)
    compress_theta = getattr(config, "compress_rope_theta", None)
    return name, {"rope_theta": theta}, {**fields, "rope_theta": compress_theta}


def _rope_type(fields: Mapping[str, Any]) -> object:
    return fields.get("rope_type", fields.get("type", "default"))


def _is_number(value: object) -> bool:
    return is_size(value) or (isinstance(value, float) and value > 0)


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> str:
    if value is None:
        return known[0]
    if value not in known:
        raise UnsupportedModel(f"{name} {value!r} is not one of {known} for deepseek_v4")
    return value
