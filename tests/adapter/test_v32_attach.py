"""Configurations of V3.2 models, and attaching the models: checked, refused by name, taken off."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvtier import ConfigError, LayoutMismatch
from kvtier.layouts import mla, mla_indexed
from kvtier_deepseek import UnsupportedModel, attach, backends, layout_for
from tests.adapter.models import full_logits, random_tokens, tiny_model
from tests.adapter.swa_kit import feed, near, run
from tests.adapter.test_v4_attach import Held
from tests.adapter.test_v4_metadata import copied
from tests.adapter.v32_kit import LOGITS, PACKED, new_model, open_cache, v32_model

MINE: dict[str, Any] = {
    "layers": 2,
    "latent_dim": 16,
    "rope_dim": 4,
    "index_dim": 16,
    "dtype": "float32",
    "index_record": "dense",
}
RELEASED: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}


def try_attach(model: Any, layout: Any = None, **options: Any) -> None:
    held: Any = Held(mla_indexed(**MINE) if layout is None else layout)
    attach(model, held, **options).detach()


def attention(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn


def adapted(model: Any) -> list[bool]:
    return ["forward" in vars(layer.self_attn) for layer in model.model.layers]


class TestConfiguration:
    def test_released_sizes(self) -> None:
        """B2, F1: as the checkpoint has them, and as HF's defaults do."""
        import transformers

        for config in (SimpleNamespace(**RELEASED), transformers.DeepseekV32Config()):
            assert layout_for(config) == mla_indexed(layers=61, latent_dim=512, rope_dim=64)
            packed = layout_for(config, record="fp8", page_tokens=32, max_draft=2)
            assert packed.page_bytes() == 61 * 32 * (656 + 132)
            assert packed.max_draft == 2

    def test_of_a_tiny_model(self) -> None:
        config = v32_model().config
        got = layout_for(config, dtype=torch.float32, index_record="dense")
        assert got == mla_indexed(**MINE)
        # Both names that layers with an index have had.
        config = SimpleNamespace(**{**RELEASED, "layer_types": ["deepseek_sparse_attention"] * 61})
        assert layout_for(config) == layout_for(SimpleNamespace(**RELEASED))

    @pytest.mark.parametrize(
        ("change", "options", "says"),
        [
            ({"index_topk": None}, {}, "index_topk must be a positive integer"),
            ({"index_n_heads": 0}, {}, "index_n_heads"),
            ({"index_head_dim": "128"}, {}, "index_head_dim"),
            ({"index_head_dim": 32}, {}, "qk_rope_head_dim is 64"),
            ({"index_head_dim": 64}, {}, "index_record='fp8' stores"),
            ({"q_lora_rank": None}, {}, "q_lora_rank"),
            ({"kv_lora_rank": 256}, {"record": "fp8"}, "record='fp8' stores"),
            ({"layer_types": ["full_attention"] * 61}, {}, "layer_types"),
            ({"layer_types": ["indexed_attention"] * 60}, {}, "layer_types"),
            ({"rope_scaling": {"type": "dynamic"}}, {}, "rope_type 'dynamic'"),
            ({}, {"record": "mxfp4"}, "record 'mxfp4'"),
            ({}, {"index_record": "fp32"}, "index_record 'fp32'"),
            ({}, {"tail": "seed"}, "tail 'seed'"),
            ({}, {"window_record": "fp8"}, "window_record 'fp8'"),
            ({}, {"draft": "mtp"}, "draft 'mtp'"),
            ({}, {"page_tokens": 48}, "page_tokens"),
        ],
        ids=str,
    )
    def test_refused_by_name(
        self, change: dict[str, Any], options: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=says):
            layout_for(SimpleNamespace(**{**RELEASED, **change}), **options)


class TestStructure:
    @pytest.mark.parametrize(
        "part",
        [
            "q_a_proj",
            "kv_b_proj",
            *[f"indexer.{p}" for p in ("wq_b", "wk", "k_norm", "weights_proj")],
        ],
    )
    def test_a_missing_submodule_is_named(self, part: str) -> None:
        model = new_model()
        *path, last = part.split(".")
        module = attention(model, 1)
        for name in path:
            module = getattr(module, name)
        setattr(module, last, None)
        where = ".".join(["layers.1.self_attn", *path])
        with pytest.raises(UnsupportedModel, match=f"{where} has no submodule {last}"):
            try_attach(model)
        assert adapted(model) == [False] * 2

    @pytest.mark.parametrize(
        ("where", "value", "says"),
        [
            ("indexer", None, "layers.1.self_attn has no submodule indexer"),
            ("indexer.n_heads", 8, "n_heads is 8, the configuration says 16"),
            ("indexer.head_dim", 8, "head_dim is 8"),
            ("indexer.index_topk", 7, "index_topk is 7, the configuration says 4096"),
            ("indexer.qk_rope_head_dim", 8, "qk_rope_head_dim is 8"),
            ("indexer.softmax_scale", None, "has no number softmax_scale"),
            ("indexer.softmax_scale", -1.0, "softmax_scale is -1.0, not positive"),
            ("indexer.weights_proj", nn.Identity(), "weights_proj has no weight"),
            ("indexer.forward", lambda *_: None, "indexer.forward is already replaced"),
            ("num_heads", 8, "num_heads is 8"),
            ("layer_idx", 0, "both have layer_idx 0"),
        ],
    )
    def test_what_contradicts_the_configuration(self, where: str, value: Any, says: str) -> None:
        model = new_model()
        *path, last = where.split(".")
        module = attention(model, 1)
        for name in path:
            module = getattr(module, name)
        setattr(module, last, value)
        with pytest.raises(UnsupportedModel, match=says):
            try_attach(model)
        assert adapted(model) == [False] * 2

    @pytest.mark.parametrize("fault", ["missing", "adjacent pairs", "other arguments"])
    def test_an_index_rotated_otherwise(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = new_model()
        home = inspect.getmodule(type(attention(model, 0)))
        assert home is not None
        wrong = {
            "adjacent pairs": lambda q, k, cos, sin, unsqueeze_dim: (q + q.roll(1, -1), k),
            "other arguments": lambda x, cos, sin: x,
        }
        if fault == "missing":
            monkeypatch.delattr(home, "apply_rotary_pos_emb")
        else:
            monkeypatch.setattr(home, "apply_rotary_pos_emb", wrong[fault])
        with pytest.raises(UnsupportedModel, match="apply_rotary_pos_emb"):
            try_attach(model)

    def test_a_subclass_defined_elsewhere(self) -> None:
        model = new_model()

        class Mine(type(attention(model, 0))):  # type: ignore[misc]
            pass

        for layer in model.model.layers:
            layer.self_attn.__class__ = Mine
        try_attach(model)


class TestLayout:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"layers": 3}, "latent: layers is"),
            ({"latent_dim": 12}, "latent_dim is 12, the model has 16"),
            ({"rope_dim": 2}, "rope_dim is 2"),
            ({"index_dim": 32}, "index_dim is 32"),
            ({"rope_layout": "interleaved"}, "rope_layout is 'interleaved'"),
            ({"dtype": "bfloat16"}, "latent: dtype is 'bfloat16'"),
        ],
        ids=str,
    )
    def test_of_another_model(self, change: dict[str, Any], says: str) -> None:
        model = v32_model()
        try_attach(model)
        try_attach(model, mla_indexed(**MINE, page_tokens=16, max_draft=3))
        with pytest.raises(LayoutMismatch, match=says):
            try_attach(model, mla_indexed(**{**MINE, **change}))
        assert adapted(model) == [False] * 2

    def test_of_another_architecture(self) -> None:
        dense = mla(layers=2, latent_dim=16, rope_dim=4, dtype="float32")
        with pytest.raises(LayoutMismatch, match="'mla', the model needs 'mla_indexed'"):
            try_attach(v32_model(), dense)
        with pytest.raises(LayoutMismatch, match="'mla_indexed', the model needs 'mla'"):
            try_attach(tiny_model("v3"))


class TestOptions:
    def test_refused(self) -> None:
        model = v32_model()
        with pytest.raises(ConfigError, match="max_absorbed=4"):
            try_attach(model, max_absorbed=4)
        with pytest.raises(ConfigError, match="workspace_bytes"):
            try_attach(model, workspace_bytes="much")
        with pytest.raises(ConfigError, match="sdpa"):
            try_attach(model, backend="sdpa")

    def test_little_workspace_gives_the_same(self) -> None:
        model, tokens = v32_model(index_topk=8), random_tokens(45)
        with (
            open_cache(model) as cache,
            attach(model, cache, workspace_bytes=20_000) as adapter,
            cache.lease([]) as lease,
        ):
            near(run(cache, adapter, lease, tokens, [45]), full_logits(model, tokens), LOGITS)

    @pytest.mark.parametrize("packed", [False, True])
    def test_warmup_touches_no_page_and_runs_every_kernel(self, packed: bool) -> None:
        model = v32_model(index_topk=20, **(PACKED if packed else {}))
        record = "fp8" if packed else "dense"
        with (
            open_cache(model, record=record, index_record=record) as cache,
            attach(model, cache) as adapter,
        ):
            adapter.warmup()
            pool: Any = cache._pool
            assert all(bool((s == 0xFF).all()) for s in pool._storage.values())
            names = set(adapter._family.decoding)
            assert names == {
                "write_latent",
                "write_index",
                "index_query",
                "index_topk",
                "mla_sparse",
            }
            operations = {row["operation"] for row in backends() if row["available"] == "yes"}
            assert {n.replace("write_latent", "write_record") for n in names} - {
                "write_index"
            } <= operations

    def test_a_projection_that_cannot_be_captured_is_named(self) -> None:
        model = new_model()
        attention(model, 1).kv_b_proj.register_forward_hook(lambda *args: args[2])
        with open_cache(model) as cache, attach(model, cache) as adapter:
            with pytest.raises(ConfigError, match="layer 1: its kv_b_proj"):
                _ = adapter._family.decoding


def test_hand_made_steps_are_checked_in_both_components() -> None:
    model = v32_model(index_topk=8)
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        with cache.step([(lease, random_tokens(11))]) as step:
            mine = copied(step)
            mine.to_device = step.to_device
            native = adapter(step)
            assert torch.equal(adapter(mine), native)
            for name in ("latent", "index"):
                wrong = copied(step)
                wrong.to_device = step.to_device
                wrong.slot_mapping[name][3] += 1
                with pytest.raises(LayoutMismatch, match=f"slot_mapping\\['{name}'\\] puts"):
                    adapter(wrong)
            del mine.slot_mapping["index"]
            with pytest.raises(LayoutMismatch, match="no component 'index'"):
                adapter(mine)


def test_a_v32_and_a_v3_model_in_one_process() -> None:
    one, other, tokens = v32_model(index_topk=8), tiny_model("v3"), random_tokens(20)
    with (
        open_cache(one) as cache,
        attach(one, cache) as adapter,
        cache.lease([]) as lease,
    ):
        native = full_logits(other, tokens)
        near(feed(cache, adapter, (lease, tokens))[0], full_logits(one, tokens), LOGITS)
        assert torch.equal(full_logits(other, tokens), native)
    assert adapted(one) == [False] * 2
