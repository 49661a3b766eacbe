"""Configurations of V3.2 models, and attaching the models: checked, refused by name, taken off."""

import copy
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvtier import ConfigError, KVTierError, LayoutMismatch
from kvtier.layouts import mla, mla_indexed
from kvtier_deepseek import UnsupportedModel, attach, backends, layout_for
from tests.adapter.models import as_subclasses, full_logits, random_tokens, tiny_model
from tests.adapter.swa_kit import feed, near, run
from tests.adapter.test_memory import Largest
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
            ({"layer_types": 61}, {}, "layer_types"),
            ({"layer_types": [["indexed_attention"]] * 61}, {}, "layer_types"),
            ({"rope_scaling": {"type": "dynamic"}}, {}, "rope_type 'dynamic'"),
            ({"rope_scaling": "yarn"}, {}, "rope_scaling must be a mapping, got 'yarn'"),
            ({}, {"record": "mxfp4"}, "record 'mxfp4'"),
            ({}, {"index_record": "fp32"}, "index_record 'fp32'"),
            ({}, {"tail": "seed"}, "tail 'seed'"),
            ({}, {"window_record": "fp8"}, "window_record 'fp8'"),
            ({}, {"draft": "mtp"}, "draft 'mtp'"),
            ({}, {"page_tokens": 48}, "page_tokens"),
            ({}, {"page_tokens": "64"}, "page_tokens must be an int"),
            ({}, {"max_draft": None}, "max_draft must be an int"),
        ],
        ids=str,
    )
    def test_refused_by_name(
        self, change: dict[str, Any], options: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=says):
            layout_for(SimpleNamespace(**{**RELEASED, **change}), **options)


class TestDetach:
    def test_leaves_the_model_as_it_was(self) -> None:
        model, tokens = new_model(index_topk=8), random_tokens(30)
        before, keys = full_logits(model, tokens), list(model.state_dict())
        modules = {name: set(vars(m)) for name, m in model.named_modules()}
        with open_cache(model) as cache:
            adapter = attach(model, cache)
            assert adapted(model) == [True] * 2
            assert list(model.state_dict()) == keys
            assert (adapter.max_absorbed, adapter.max_rows) == (0, 0)
            # Outside a step the model computes what it always did.
            assert torch.equal(full_logits(model, tokens), before)
            with cache.lease([]) as lease:
                near(run(cache, adapter, lease, tokens, [20, 10]), before, LOGITS)
            adapter.detach()
            adapter.detach()
            with cache.step([]) as step, pytest.raises(KVTierError, match="detached"):
                adapter(step)
        assert adapted(model) == [False] * 2
        assert torch.equal(full_logits(model, tokens), before)
        assert {name: set(vars(m)) for name, m in model.named_modules()} == modules

    def test_a_copy_of_an_attached_model_is_not_attached(self) -> None:
        model, tokens = new_model(index_topk=8), random_tokens(20)
        native = full_logits(model, tokens)
        with open_cache(model) as cache, attach(model, cache):
            twin = copy.deepcopy(model)
            model.lm_head.weight.data.zero_()
            assert torch.equal(full_logits(twin, tokens), native)
        try_attach(twin)

    def test_a_call_within_a_step_is_native(self) -> None:
        """A hook that calls the model: its own index runs, on its own keys."""
        model, tokens, inner = new_model(index_topk=8), random_tokens(20), []
        native = full_logits(model, tokens[:9])

        def call(*_: Any) -> None:
            if not inner:
                inner.append(None)
                inner[0] = full_logits(model, tokens[:9])

        with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
            hook = attention(model, 1).register_forward_hook(call)
            got = feed(cache, adapter, (lease, tokens))[0]
            hook.remove()
        near(got, full_logits(model, tokens), LOGITS)
        assert torch.equal(inner[0], native)


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
        as_subclasses(model)
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
                "write_record latent",
                "write_record index",
                "index_query",
                "index_topk",
                "mla_sparse",
            }
            operations = {row["operation"] for row in backends() if row["available"] == "yes"}
            assert {name.split()[0] for name in names} <= operations

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


def test_threads_in_the_middle_of_their_steps() -> None:
    """Two leases of one adapter, and a second model, all at once: meet before every layer."""
    models = [v32_model(index_topk=8), v32_model(index_topk=3, seed=1)]
    barrier = threading.Barrier(3, timeout=300)
    caches = [open_cache(model) for model in models]
    adapters = [attach(model, cache) for model, cache in zip(models, caches, strict=True)]
    streams = [random_tokens(40, seed) for seed in range(3)]
    got: list[Any] = [None] * 3

    def meet(*_: Any) -> None:
        barrier.wait()

    hooks = [
        attention(model, layer).register_forward_pre_hook(meet)
        for model in models
        for layer in (0, 1)
    ]

    def serve(i: int) -> None:
        torch.set_num_threads(1)
        mine = caches[i // 2]
        with mine.lease([], label=str(i)) as lease:
            logits = []
            for at, stop in ((0, 21), (21, 22), (22, 40)):
                with mine.step([(lease, streams[i][at:stop])]) as step:
                    logits.append(adapters[i // 2].forward(step, all_logits=True))
            got[i] = torch.cat(logits)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    for adapter, cache in zip(adapters, caches, strict=True):
        adapter.detach()
        cache.close()
    for i, logits in enumerate(got):
        near(logits, full_logits(models[i // 2], streams[i]), LOGITS)


@pytest.mark.parametrize("wrapped", [False, True], ids=["absorbed", "not absorbable"])
def test_what_a_step_allocates_does_not_grow_with_the_context(wrapped: bool) -> None:
    """AT-5.4: of 8 times the context no more than its scores, one at a time, and its keys in
    pieces; expanded, 4 heads of it would be 80 values a token."""
    model = new_model(max_position_embeddings=1 << 20, index_topk=64)
    if wrapped:
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: None)

    def largest(context: int, new: int) -> int:
        with (
            open_cache(model, page=512, gpu=context // 512 + 4) as cache,
            attach(model, cache, workspace_bytes=2_000_000) as adapter,
            cache.lease([]) as lease,
        ):
            pool: Any = cache._pool
            for pages in pool._storage.values():
                pages.zero_()
            with cache.step([(lease, [0] * context)]):
                pass  # takes pages, computes nothing
            with cache.step([(lease, random_tokens(new))]) as step, Largest() as found:
                adapter(step)
        return found.values

    for new in (1, 40):
        assert largest(1 << 11, new) * 4 <= 2_000_000
        assert largest(1 << 14, new) * 4 <= 2_000_000


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
