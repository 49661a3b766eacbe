"""From a V4 configuration, in either schema, to a layout; all else is refused by name."""

import json
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from kvtier.layouts import Layout, Share, swa_c4_c128
from kvtier_deepseek import UnsupportedModel, layout_for
from kvtier_deepseek.v4.config import Attention, attention_of
from tests.adapter.v4_models import FLASH, PRO, YARN

NAMES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def raw(fields: dict[str, Any], **changes: Any) -> Any:
    """As ``json.load`` of a checkpoint's config.json would give it."""
    merged = {**fields, **changes}
    return SimpleNamespace(**{k: v for k, v in merged.items() if v is not ...})


def old(fields: dict[str, Any]) -> Any:
    return raw(fields)


def through_hf(fields: dict[str, Any]) -> Any:
    return transformers.DeepseekV4Config(**fields)


def reloaded(fields: dict[str, Any]) -> Any:
    """What HF writes back: the new schema."""
    saved = json.loads(through_hf(fields).to_json_string(use_diff=False))
    assert "compress_ratios" not in saved
    assert set(saved["rope_parameters"]) == {"main", "compress"}
    return SimpleNamespace(**saved)


def by_hand(fields: dict[str, Any]) -> Any:
    """The new schema with as little in it as there can be."""
    layers = fields["num_hidden_layers"]
    return raw(
        fields,
        compress_ratios=...,
        layer_types=[NAMES[r] for r in fields["compress_ratios"][:layers]],
        compress_rates={NAMES[4]: 4, NAMES[128]: 128},
        rope_theta=...,
        compress_rope_theta=...,
        rope_scaling=...,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {**YARN, "rope_theta": 160000.0},
        },
        qk_rope_head_dim=...,
        partial_rotary_factor=0.125,
        sliding_window=...,
        window_size=128,
    )


SCHEMAS = [old, through_hf, reloaded, by_hand]


def layers_of(layout: Layout) -> dict[str, int]:
    return {c.name: len(c.layers) for c in layout.components}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_flash(schema: Any) -> None:
    layout = layout_for(schema(FLASH))
    assert layout.page_tokens == 256
    assert layout.page_bytes() == 998_208
    assert layout.checkpoint_bytes() == 3_649_920
    counts = layers_of(layout)
    assert (counts["swa"], counts["c4"], counts["c4_index"], counts["c128"]) == (43, 21, 21, 20)
    c4 = next(c for c in layout.components if c.name == "c4")
    assert c4.layers == tuple(range(2, 43, 2))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_pro(schema: Any) -> None:
    layout = layout_for(schema(PRO))
    assert layout.page_bytes() == 1_430_208
    assert layout.checkpoint_bytes() == 5_182_080
    counts = layers_of(layout)
    assert (counts["swa"], counts["c4"], counts["c128"]) == (61, 30, 31)
    c128 = next(c for c in layout.components if c.name == "c128")
    assert c128.layers == (0, 1, *range(3, 60, 2))


def test_other_records_and_tails() -> None:
    assert layout_for(raw(FLASH), index_record="mxfp4").page_bytes() == 912_192
    assert layout_for(raw(PRO), index_record="mxfp4").page_bytes() == 1_307_328
    assert layout_for(raw(FLASH), tail="seed").checkpoint_bytes() == 7_299_840
    assert layout_for(raw(PRO), tail="seed").checkpoint_bytes() == 10_364_160
    plain = layout_for(raw(FLASH), record="fp32", index_record="fp32")
    assert plain.page_bytes() == 21 * 64 * (2048 + 512) + 20 * 2 * 2048
    assert all(c.dtype == "float32" for c in plain.components)
    wide = layout_for(raw(FLASH), page_tokens=512)
    assert {c.slots_per_page for c in wide.components if c.share is Share.HISTORY} == {128, 4}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_all_schemas_come_to_the_same(schema: Any) -> None:
    by_kvtier = swa_c4_c128(layer_ratios=FLASH["compress_ratios"][:43])
    assert layout_for(schema(FLASH)).fingerprint == by_kvtier.fingerprint
    assert attention_of(schema(PRO)) == Attention(
        ratios=(128, 128, *[4, 128] * 29, 4),
        heads=128,
        head_dim=512,
        rope_dim=64,
        window=128,
        index_heads=64,
        index_dim=128,
        index_topk=1024,
    )


def test_without_predictors_in_the_list() -> None:
    config = raw(FLASH, compress_ratios=FLASH["compress_ratios"][:43])
    assert layout_for(config).fingerprint == layout_for(raw(FLASH)).fingerprint


def test_layers_without_an_index_need_no_index_fields() -> None:
    config = raw(
        FLASH,
        num_hidden_layers=2,
        compress_ratios=[0, 128],
        index_n_heads=...,
        index_head_dim=...,
        index_topk=...,
        num_nextn_predict_layers=0,
    )
    assert set(layers_of(layout_for(config))) == {"c128", "c128_state", "swa"}
    # Nor do windows alone need the other rope.
    config.compress_ratios, config.rope_scaling = [0, 0], None
    with pytest.raises(UnsupportedModel, match=r"not all 0, got \(0, 0\)"):
        layout_for(config)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("model_type", {"model_type": "deepseek_v4_1"}),
        ("num_hidden_layers", {"num_hidden_layers": 0}),
        ("neither layer_types nor compress_ratios", {"compress_ratios": None}),
        ("compress_ratios has 5", {"compress_ratios": [5] * 44}),
        ("compress_ratios has True", {"compress_ratios": [True] * 44}),
        ("compress_ratios has 42 entries", {"compress_ratios": [4] * 42}),
        ("compress_ratios has 45 entries", {"compress_ratios": [4] * 45}),
        ("compress_ratios must be a list", {"compress_ratios": 4}),
        ("compress_ratios: next-n", {"compress_ratios": [4] * 44}),
        ("layer_types has 'full_attention'", {"layer_types": ["full_attention"] * 43}),
        ("layer_types has 44 entries", {"layer_types": ["sliding_attention"] * 44}),
        ("layer_types and compress_ratios", {"layer_types": ["sliding_attention"] * 43}),
        (r"compress_rates\['heavily_com", {"compress_rates": {NAMES[4]: 4, NAMES[128]: 64}}),
        (r"compress_rates\['other", {"compress_rates": {"other": 4}}),
        ("compress_rates must be a mapping", {"compress_rates": [4, 128]}),
        ("compress_rates must be a mapping", {"compress_rates": 4}),
        ("num_nextn_predict_layers is '1'", {"num_nextn_predict_layers": "1"}),
        ("num_nextn_predict_layers is -1", {"num_nextn_predict_layers": -1}),
        (r"layer_types has \['sliding", {"layer_types": [["sliding_attention"]] * 43}),
        ("rope_scaling has 3 where", {"rope_scaling": {"main": 3, "compress": YARN}}),
        ("compress_rate_csa", {"compress_rate_csa": 8}),
        ("compress_rate_hca", {"compress_rate_hca": 64}),
        ("num_key_value_heads", {"num_key_value_heads": 8}),
        ("num_attention_heads", {"num_attention_heads": None}),
        ("head_dim is 256; fp8", {"head_dim": 256}),
        ("head_dim must be", {"head_dim": None}),
        ("qk_rope_head_dim is 32; fp8", {"qk_rope_head_dim": 32}),
        ("qk_rope_head_dim is 63", {"qk_rope_head_dim": 63}),
        ("partial_rotary_factor", {"qk_rope_head_dim": ...}),
        ("partial_rotary_factor", {"qk_rope_head_dim": ..., "partial_rotary_factor": 2}),
        ("index_head_dim is 64; fp8", {"index_head_dim": 64}),
        ("index_n_heads", {"index_n_heads": None}),
        ("index_topk", {"index_topk": 0}),
        ("sliding_window is missing", {"sliding_window": ...}),
        ("sliding_window must", {"sliding_window": 0}),
        ("sliding_window and window_size", {"window_size": 64}),
        ("sliding_window 96", {"sliding_window": 96}),
        ("sliding_window 512", {"sliding_window": 512}),
        ("rope_scaling: rope_type of compressed layers is 'default'", {"rope_scaling": None}),
        ("rope_scaling: rope_type of compressed", {"rope_scaling": {**YARN, "type": "linear"}}),
        ("rope_type 'longrope'", {"rope_scaling": {**YARN, "type": "longrope"}}),
        ("rope_scaling: yarn needs factor", {"rope_scaling": {**YARN, "factor": None}}),
        ("yarn needs original_max", {"rope_scaling": {"type": "yarn", "factor": 16}}),
        ("rope_theta of window", {"rope_theta": ...}),
        ("compress_rope_theta", {"compress_rope_theta": ...}),
        ("rope_scaling must be a mapping", {"rope_scaling": "yarn"}),
        (
            "rope_parameters: rope_type of window layers is 'yarn'",
            {"rope_parameters": {"main": {**YARN, "rope_theta": 1e4}, "compress": YARN}},
        ),
        (
            "rope_parameters: compress_rope_theta",
            {"rope_parameters": {"main": {"rope_theta": 1e4}}},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        layout_for(raw(FLASH, **changes))


def test_hfs_defaults_describe_no_released_model() -> None:
    """Its empty configuration has other layer kinds than any checkpoint, and no YaRN."""
    with pytest.raises(UnsupportedModel, match="'default', not 'yarn'"):
        layout_for(transformers.DeepseekV4Config())


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("record 'dense'", {"record": "dense"}),
        ("index_record 'fp4'", {"index_record": "fp4"}),
        ("tail 'all'", {"tail": "all"}),
        ("dtype 'float32': leave it out; .*record='fp32'", {"dtype": "float32"}),
        ("pages of 1000 tokens", {"page_tokens": 1000}),
        ("page_tokens must be", {"page_tokens": 256.0}),
        ("page_tokens must be", {"page_tokens": "256"}),
        ("page_tokens must be", {"page_tokens": 0}),
    ],
)
def test_arguments(named: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        layout_for(raw(FLASH), **options)


@pytest.mark.parametrize("model", ["V3", "V32", "V4"])
def test_a_mistake_is_told_once(model: str) -> None:
    """Not as two exceptions, one within the other."""
    config = raw(FLASH) if model == "V4" else getattr(transformers, f"Deepseek{model}Config")()
    with pytest.raises(UnsupportedModel, match="page_tokens must be") as told:
        layout_for(config, page_tokens=0)
    assert "".join(traceback.format_exception(told.value)).count("Traceback") == 1


@pytest.mark.parametrize("option", ["index_record", "tail"])
def test_dense_models_have_neither_index_nor_tail(option: str) -> None:
    with pytest.raises(UnsupportedModel, match=option):
        layout_for(transformers.DeepseekV3Config(), **{option: "fp8"})
