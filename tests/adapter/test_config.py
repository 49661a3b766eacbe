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
        ("model_type", "deepseek_v33"),
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


@pytest.mark.parametrize(
    "argument", [{"page_tokens": 3}, {"page_tokens": "8"}, {"max_draft": -1}, {"dtype": "int8"}]
)
def test_arguments_that_no_layout_has_are_refused_as_fields_are(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(UnsupportedModel, match=name):
        layout_for(config_of("v3"), **argument)


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


class TestWindows:
    """F4, AT-3.10: layers with a window, from a list with an entry for each and nothing else."""

    @staticmethod
    def config(**changes: Any) -> Any:
        fields = {
            **config_of("v3", num_hidden_layers=3).to_dict(),
            "model_type": "deepseek_v3",
            "sliding_window": 128,
            "num_nextn_predict_layers": 1,
            **changes,
        }
        return SimpleNamespace(**fields)

    @pytest.mark.parametrize(
        "fields",
        [
            {"window_attn_skip_freq": [0, 1, 1]},
            {"window_attn_skip_freq": (0, 1, 1)},
            {"window_attn_skip_freq": [0, 1, 1, 0]},  # with the next-n predictor's
            {"window_attn_skip_freq": [0, 1, 1, 1]},
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            {
                "window_attn_skip_freq": [0, 1, 1],
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
        ],
        ids=str,
    )
    def test_lists(self, fields: dict[str, Any]) -> None:
        made = layout_for(self.config(**fields), window_record="dense")
        assert [(c.name, c.layers) for c in made.components] == [
            ("latent", (0,)),
            ("window_latent", (1, 2)),
        ]
        assert made.windows[0].window == 128
        by_hand = mla(
            layers=3,
            latent_dim=16,
            rope_dim=4,
            window_layers=(1, 2),
            window=128,
            window_record="dense",
        )
        assert made == by_hand and made.fingerprint == by_hand.fingerprint

    def test_predictors(self) -> None:
        """One with history is added behind; one with a window is refused where it is used."""
        plain = self.config(window_attn_skip_freq=[0, 1, 1, 0])
        made = layout_for(plain, window_record="dense", draft="mtp")
        layers = {c.name: c.layers for c in made.components}
        assert (layers["latent"], layers["window_latent"]) == ((0, 3), (1, 2))
        for fields in (
            {"window_attn_skip_freq": [0, 1, 1, 1]},
            {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
        ):
            layout_for(self.config(**fields), window_record="dense")
            with pytest.raises(UnsupportedModel, match=f"{next(iter(fields))}: a next-n"):
                layout_for(self.config(**fields), window_record="dense", draft="mtp")

    @pytest.mark.parametrize("fields", [{"window_attn_skip_freq": [0, 0, 0]}, {}], ids=str)
    def test_no_windows(self, fields: dict[str, Any]) -> None:
        plain = layout_for(config_of("v3", num_hidden_layers=3))
        assert layout_for(self.config(**fields, sliding_window=None)) == plain
        kinds = ["full_attention"] * 3
        assert layout_for(self.config(layer_types=kinds, sliding_window=None)) == plain
        with pytest.raises(UnsupportedModel, match="window_record 'dense': no layer"):
            layout_for(self.config(**fields, sliding_window=None), window_record="dense")

    def test_released_sizes_are_packed(self) -> None:
        config = transformers.DeepseekV3Config(
            window_attn_skip_freq=[int(i % 4 > 0) for i in range(61)], sliding_window=128
        )
        latent, windows = layout_for(config).components
        assert (latent.slot_bytes, windows.slot_bytes, windows.dtype) == (1152, 656, "uint8")
        assert (len(latent.layers), len(windows.layers)) == (16, 45)
        assert layout_for(config, window_record="dense").windows[0].slot_bytes == 1152

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"window_attn_skip_freq": 4}, "window_attn_skip_freq must be a list"),
            ({"window_attn_skip_freq": True}, "window_attn_skip_freq must be a list"),
            ({"window_attn_skip_freq": False}, "window_attn_skip_freq must be a list"),
            ({"window_attn_skip_freq": 0}, "window_attn_skip_freq must be a list"),
            ({"window_attn_skip_freq": "011"}, "window_attn_skip_freq must be a list"),
            ({"window_attn_skip_freq": {0: 1}}, "window_attn_skip_freq must be a list"),
            ({"window_attn_skip_freq": [0, 1]}, "has 2 entries for num_hidden_layers=3"),
            ({"window_attn_skip_freq": []}, "has 0 entries"),
            ({"window_attn_skip_freq": [0, 1, 1, 0, 0]}, "has 5 entries"),
            ({"window_attn_skip_freq": [0, 1, 2]}, "has 2; entries are 0 or 1"),
            ({"window_attn_skip_freq": [0, -1, 1]}, "has -1"),
            ({"window_attn_skip_freq": [0, True, 1]}, "has True"),
            ({"window_attn_skip_freq": [0, "1", 1]}, "has '1'"),
            ({"window_attn_skip_freq": [0, None, 1]}, "has None"),
            ({"window_attn_skip_freq": [0, 1, 1, 7]}, "has 7"),
            ({"window_attn_skip_freq": [1, 1, 1]}, "every layer a window"),
            ({"window_attn_skip_freq": [0, 1, 1], "sliding_window": None}, "sliding_window"),
            ({"window_attn_skip_freq": [0, 1, 1], "sliding_window": 0}, "sliding_window"),
            ({"window_attn_skip_freq": [0, 1, 1], "sliding_window": [128, 0]}, "sliding_window"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 2"),
            ({"layer_types": ["full_attention", "sliding_attention", "linear"]}, "'linear'"),
            ({"layer_types": ["sliding_attention"] * 3}, "every layer a window"),
            (
                {
                    "window_attn_skip_freq": [0, 1, 0],
                    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                },
                "disagree",
            ),
            (
                {"window_attn_skip_freq": [0, 1, 1], "num_nextn_predict_layers": "1"},
                "num_nextn_predict_layers is '1'",
            ),
            (
                {"window_attn_skip_freq": [0, 1, 1], "num_nextn_predict_layers": [1]},
                r"num_nextn_predict_layers is \[1\]",
            ),
            ({}, "sliding_window=128: neither"),
        ],
        ids=lambda each: str(each) if isinstance(each, dict) else "",
    )
    def test_anything_else_is_refused_by_name(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(UnsupportedModel, match=says):
            layout_for(self.config(**fields), window_record=None)

    @pytest.mark.parametrize(
        ("record", "says"), [(None, "kv_lora_rank"), ("fp8", "kv_lora_rank"), ("fp4", "'fp4'")]
    )
    def test_record_formats(self, record: str | None, says: str) -> None:
        with pytest.raises(UnsupportedModel, match=says):
            layout_for(self.config(window_attn_skip_freq=[0, 1, 1]), window_record=record)
