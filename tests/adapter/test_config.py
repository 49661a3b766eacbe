"""From a configuration to a layout: the released sizes, and refusal by name of all else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kvtier.layouts import mla
from kvtier_deepseek import UnsupportedModel, layout_for
from tests.adapter.models import config_of

V2_LITE: dict[str, Any] = {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "hidden_size": 2048,
    "q_lora_rank": None,
}


def v2_lite() -> Any:
    return transformers.DeepseekV2Config(**V2_LITE)


@pytest.mark.parametrize(
    ("config", "layers", "rope_layout"),
    [
        (v2_lite(), 27, "interleaved"),
        (transformers.DeepseekV2Config(num_hidden_layers=60), 60, "interleaved"),
        (transformers.DeepseekV3Config(), 61, "half"),
        (transformers.DeepseekV3Config(rope_interleave=False), 61, "half"),
    ],
    ids=["v2-lite", "v2", "v3", "v3-half"],
)
def test_released_sizes(config: Any, layers: int, rope_layout: str) -> None:
    layout = layout_for(config)
    (latent,) = layout.components
    assert latent.slot_bytes == 1152  # AT-1.6: bytes per token and layer, bf16
    assert latent.layers == tuple(range(layers))
    assert layout.page_tokens == 64
    assert layout.page_bytes() == 64 * 1152 * layers
    assert layout.meta == {"rope_layout": rope_layout, "latent_dim": 512, "rope_dim": 64}


def test_nothing_comes_from_the_fields_that_describe_expanded_heads() -> None:
    """``head_dim`` says 64 and ``num_key_value_heads`` 128: neither is what is cached."""
    config = transformers.DeepseekV3Config()
    config.head_dim, config.num_key_value_heads = 4096, 1
    assert layout_for(config).components[0].slot_bytes == 1152


@pytest.mark.parametrize(
    ("wanted", "dtype", "slot_bytes"),
    [
        (None, "bfloat16", 40),
        ("float32", "float32", 80),
        (torch.float16, "float16", 40),
    ],
)
def test_dtype(wanted: Any, dtype: str, slot_bytes: int) -> None:
    (latent,) = layout_for(config_of("v3"), dtype=wanted).components
    assert (latent.dtype, latent.slot_bytes) == (dtype, slot_bytes)


def test_dtype_of_the_configuration_itself() -> None:
    config = config_of("v2")
    config.dtype = torch.float32
    assert layout_for(config).components[0].dtype == "float32"


def test_same_as_the_layout_made_by_hand() -> None:
    made = layout_for(config_of("v2"), page_tokens=16, dtype="float32")
    by_hand = mla(
        layers=2,
        latent_dim=16,
        rope_dim=4,
        dtype="float32",
        rope_layout="interleaved",
        page_tokens=16,
    )
    assert made.fingerprint == by_hand.fingerprint


def test_rope_order_changes_the_fingerprint() -> None:
    """AT-1.7: pages of one order are never matched by a reader of the other."""
    v2, v3 = (layout_for(config_of(v), dtype="float32") for v in ("v2", "v3"))
    assert v2.page_bytes() == v3.page_bytes()
    assert v2.fingerprint != v3.fingerprint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("model_type", "deepseek_v32"),
        ("model_type", None),
        ("kv_lora_rank", None),
        ("kv_lora_rank", 0),
        ("kv_lora_rank", True),
        ("qk_rope_head_dim", "64"),
        ("qk_nope_head_dim", None),
        ("v_head_dim", None),
        ("num_attention_heads", None),
        ("num_hidden_layers", 0),
        ("rope_interleave", None),
        ("rope_interleave", "yes"),
        ("sliding_window", 128),
        ("compress_ratios", [0, 4]),
        ("index_topk", 2048),
    ],
)
def test_unknown_fields_are_refused_by_name(field: str, value: Any) -> None:
    fields = config_of("v3").to_dict() | {"model_type": "deepseek_v3", field: value}
    with pytest.raises(UnsupportedModel, match=field):
        layout_for(SimpleNamespace(**fields))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "later"])
def test_rope_that_changes_with_length_is_refused(rope_type: str) -> None:
    config = SimpleNamespace(
        **{
            **config_of("v3").to_dict(),
            "model_type": "deepseek_v3",
            "rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0},
        }
    )
    with pytest.raises(UnsupportedModel, match=f"rope_type '{rope_type}'"):
        layout_for(config)
    config.rope_parameters = None
    assert layout_for(config) == layout_for(config_of("v3"))


def test_a_configuration_without_any_known_field() -> None:
    with pytest.raises(UnsupportedModel, match="model_type"):
        layout_for(object())


def test_other_record_formats_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="record 'fp8'"):
        layout_for(config_of("v3"), record="fp8")
    assert layout_for(config_of("v3"), record="dense") == layout_for(config_of("v3"))
