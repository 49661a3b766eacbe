"""Attaching V4 models: found by what they are made of, checked, and taken off again."""

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
from torch import nn

from kvtier import Cache, ConfigError, KVTierError, LayoutMismatch, TokenError
from kvtier.layouts import mla, swa_c4_c128
from kvtier_deepseek import UnsupportedModel, attach, backends, layout_for
from tests.adapter.fake_step import FakeCache, FakeSequence
from tests.adapter.models import as_subclasses, full_logits, tiny_model
from tests.adapter.test_v4_parity import USED
from tests.adapter.v4_kit import (
    expected,
    feed,
    model_of,
    near,
    open_cache,
    run,
    stream,
)
from tests.adapter.v4_models import v4_model

SMALL: dict[str, Any] = {
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "sliding_window": 64,
    "hidden_size": 32,
}


def small(ratios: tuple[int, ...] = (0, 4, 128), **changes: Any) -> Any:
    return v4_model(ratios, **{**SMALL, **changes})


class Held:
    """A cache of which only the layout is looked at."""

    closed = False

    def __init__(self, layout: Any) -> None:
        self.layout = layout


def layout_of(model: Any) -> Any:
    return layout_for(model.config, record="fp32", index_record="fp32")


def try_attach(model: Any, layout: Any = None, **options: Any) -> None:
    held: Any = Held(layout_of(model) if layout is None else layout)
    attach(model, held, **options).detach()


def attention(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn


def adapted(model: Any) -> list[bool]:
    return ["forward" in vars(layer.self_attn) for layer in model.model.layers]


class TestDetach:
    def test_leaves_the_model_as_it_was(self) -> None:
        model = small()
        tokens = stream()[:200]
        before, keys = full_logits(model, tokens), list(model.state_dict())
        modules = {name: set(vars(m)) for name, m in model.named_modules()}
        with open_cache(model) as cache:
            adapter = attach(model, cache)
            assert adapted(model) == [True] * 3
            assert list(model.state_dict()) == keys
            assert (adapter.max_absorbed, adapter.max_rows) == (0, 0)
            # Outside a step the model computes what it always did.
            assert torch.equal(full_logits(model, tokens), before)
            with cache.lease([]) as lease:
                got = run(cache, adapter, lease, tokens, [150, 50])
            adapter.detach()
            adapter.detach()
            with cache.step([]) as step, pytest.raises(KVTierError, match="detached"):
                adapter(step)
        near(got, before)
        assert adapted(model) == [False] * 3
        assert torch.equal(full_logits(model, tokens), before)
        assert {name: set(vars(m)) for name, m in model.named_modules()} == modules

    def test_a_copy_of_an_attached_model_is_not_attached(self) -> None:
        model = small()
        native = full_logits(model, stream()[:20])
        with open_cache(model) as cache, attach(model, cache):
            twin = copy.deepcopy(model)
            model.lm_head.weight.data.zero_()
            assert torch.equal(full_logits(twin, stream()[:20]), native)
        try_attach(twin)

    def test_a_layer_that_lost_its_override_is_an_error(self) -> None:
        model = small()
        with open_cache(model) as cache, attach(model, cache) as adapter:
            del attention(model, 0).forward
            with cache.lease([]) as lease:
                with pytest.raises(KVTierError, match=r"only layers \[1, 2\] of 3"):
                    feed(cache, adapter, (lease, [1, 2, 3]))

    def test_a_layer_called_twice_in_a_step_is_an_error(self) -> None:
        """Its compressor would take the same tokens in twice."""
        model = small()

        def again(module: Any, args: Any, kwargs: Any) -> None:
            attention(model, 1)(*args, **kwargs)

        with open_cache(model) as cache, attach(model, cache) as adapter:
            hook = attention(model, 2).register_forward_pre_hook(again, with_kwargs=True)
            with cache.lease([]) as lease, pytest.raises(RuntimeError, match="layer 1 was called"):
                feed(cache, adapter, (lease, [1, 2, 3]))
            hook.remove()


class TestStructure:
    @pytest.mark.parametrize(
        ("layer", "part"),
        [
            *[(0, p) for p in ("q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm")],
            *[(1, f"compressor.{p}") for p in ("kv_proj", "gate_proj", "kv_norm", "rotary_emb")],
            *[(1, f"compressor.indexer.{p}") for p in ("gate_proj", "q_b_proj", "scorer")],
            (1, "compressor.indexer.scorer.weights_proj"),
            (2, "compressor.gate_proj"),
            (2, "o_b_proj"),
        ],
    )
    def test_a_missing_submodule_is_named(self, layer: int, part: str) -> None:
        model = small()
        *path, last = part.split(".")
        module = attention(model, layer)
        for name in path:
            module = getattr(module, name)
        setattr(module, last, None)
        where = ".".join([f"layers.{layer}.self_attn", *path])
        with pytest.raises(UnsupportedModel, match=f"{where} has no submodule {last}"):
            try_attach(model)
        assert adapted(model) == [False] * 3

    @pytest.mark.parametrize(
        ("where", "value", "says"),
        [
            ("0.num_heads", 8, "num_heads is 8, the configuration says 4"),
            ("0.head_dim", 64, "head_dim is 64, the configuration says 32"),
            ("1.sliding_window", 128, "sliding_window is 128, the configuration says 64"),
            ("1.scaling", None, "has no number scaling"),
            ("1.layer_idx", 0, "both have layer_idx 0"),
            ("2.layer_idx", 5, "outside num_hidden_layers=3"),
            ("2.layer_idx", None, "has no number layer_idx"),
            ("0.rope_layer_type", "compress", "rope_layer_type is 'compress', not 'main'"),
            ("1.rope_layer_type", "main", "rope_layer_type is 'main', not 'compress'"),
            ("1.compressor", None, "compressor is NoneType, its ratio is 4"),
            ("1.compressor.compress_rate", 8, "compress_rate is 8, the configuration says 4"),
            ("1.compressor.indexer", None, "there is no module .*indexer"),
            ("1.compressor.indexer.index_topk", 7, "index_topk is 7, the configuration says 24"),
            ("1.compressor.indexer.num_heads", 7, "num_heads is 7"),
            ("2.compressor.rope_layer_type", "main", "rope_layer_type is 'main'"),
            ("2.sinks", nn.Parameter(torch.zeros(3)), r"sinks has shape \(3,\)"),
            ("2.compressor.position_bias", nn.Parameter(torch.zeros(4, 4)), "position_bias has"),
        ],
    )
    def test_what_contradicts_the_configuration(self, where: str, value: Any, says: str) -> None:
        model = small()
        layer, *path, last = where.split(".")
        module = attention(model, int(layer))
        for name in path:
            module = getattr(module, name)
        setattr(module, last, value)
        with pytest.raises(UnsupportedModel, match=says):
            try_attach(model)
        assert adapted(model) == [False] * 3

    def test_a_layer_that_is_no_attention(self) -> None:
        model = small()
        model.model.layers[1].self_attn = nn.Identity()
        with pytest.raises(UnsupportedModel, match=r"layers \[1\] have no attention"):
            try_attach(model)

    def test_a_replaced_forward(self) -> None:
        model = small()
        attention(model, 2).forward = lambda *args, **kwargs: None
        with pytest.raises(UnsupportedModel, match=r"layers.2.self_attn.forward is already"):
            try_attach(model)

    def test_a_model_without_a_head(self) -> None:
        with pytest.raises(UnsupportedModel, match="takes no logits_to_keep"):
            try_attach(small().model)

    @pytest.mark.parametrize("fault", ["missing", "halves", "leading", "other arguments"])
    def test_a_rope_of_another_kind(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = small()
        home = inspect.getmodule(type(attention(model, 0)))
        assert home is not None
        right = home.apply_rotary_pos_emb

        def halves(x: Any, cos: Any, sin: Any) -> Any:
            pairs = x[..., -2 * cos.shape[-1] :]
            turned = right(pairs.unflatten(-1, (2, -1)).mT.flatten(-2), cos, sin)
            return torch.cat((x[..., : -pairs.shape[-1]], turned), -1)

        wrong = {
            "halves": halves,
            "leading": lambda x, cos, sin: right(x.flip(-1), cos, sin).flip(-1),
            "other arguments": lambda q, k, cos, sin: (q, k),
        }
        if fault == "missing":
            monkeypatch.delattr(home, "apply_rotary_pos_emb")
        else:
            monkeypatch.setattr(home, "apply_rotary_pos_emb", wrong[fault])
        with pytest.raises(UnsupportedModel, match="apply_rotary_pos_emb"):
            try_attach(model)

    @pytest.mark.parametrize(
        ("where", "fault", "says"),
        [
            ("0.q_b_norm", "eps", "q_b_norm has no number variance_epsilon"),
            ("0.kv_norm", "apart", "different epsilons"),
            ("1.compressor.kv_norm", "offset", "compressor.kv_norm is no root mean square norm"),
            ("1.compressor.indexer.kv_norm", "mean", "indexer.kv_norm is no root mean square norm"),
            ("2.compressor.kv_norm", "twice", "compressor.kv_norm is no root mean square norm"),
        ],
    )
    def test_norms_that_are_others(self, where: str, fault: str, says: str) -> None:
        model = small()
        layer, *path = where.split(".")
        norm = attention(model, int(layer))
        for name in path:
            norm = getattr(norm, name)
        right = norm.forward
        wrong: dict[str, Any] = {
            "offset": lambda x: right(x) * (1 + 1 / norm.weight),  # weights that begin at 0
            "mean": lambda x: right(x - x.mean(-1, keepdim=True)),
            "twice": lambda x: 2 * right(x),
        }
        if fault == "eps":
            del norm.eps
        elif fault == "apart":
            norm.variance_epsilon = 1e-5
        else:
            norm.forward = wrong[fault]
        with pytest.raises(UnsupportedModel, match=says):
            try_attach(model)

    def test_a_subclass_defined_elsewhere(self) -> None:
        model = small()
        as_subclasses(model)
        try_attach(model)


class TestLayout:
    @pytest.mark.parametrize(
        ("says", "change"),
        [
            ("head_dim is 64", {"head_dim": 64}),
            ("rope_dim is 16", {"rope_dim": 16}),
            ("index_dim is 32", {"index_dim": 32}),
            ("components are", {"layer_ratios": (0, 4, 4)}),
            ("c4: layers is", {"layer_ratios": (4, 0, 128)}),
            ("swa: layers is", {"layer_ratios": (0, 4, 128, 0)}),
            ("swa: window is 128", {"window": 128}),
        ],
    )
    def test_of_another_model(self, says: str, change: dict[str, Any]) -> None:
        model = small()
        mine = {
            "layer_ratios": (0, 4, 128),
            "head_dim": 32,
            "rope_dim": 8,
            "index_dim": 16,
            "window": 64,
            "record": "fp32",
            "index_record": "fp32",
        }
        try_attach(model, swa_c4_c128(**mine))
        try_attach(model, swa_c4_c128(**mine, page_tokens=512, tail="seed", draft_layers=2))
        with pytest.raises(LayoutMismatch, match=says):
            try_attach(model, swa_c4_c128(**{**mine, **change}))
        assert adapted(model) == [False] * 3

    def test_of_another_architecture(self) -> None:
        dense = mla(layers=3, latent_dim=16, rope_dim=4, dtype="float32", page_tokens=256)
        with pytest.raises(LayoutMismatch, match="'mla', the model needs 'swa_c4_c128'"):
            try_attach(small(), dense)
        v3 = tiny_model("v3")
        with pytest.raises(LayoutMismatch, match="'swa_c4_c128', the model needs 'mla'"):
            try_attach(v3, layout_of(small()))


class TestOptions:
    def test_refused(self) -> None:
        model = small()
        with pytest.raises(ConfigError, match="max_absorbed=4"):
            try_attach(model, max_absorbed=4)
        with pytest.raises(ConfigError, match="workspace_bytes"):
            try_attach(model, workspace_bytes="much")
        with pytest.raises(ConfigError, match="sdpa"):
            try_attach(model, backend="sdpa")

    def test_the_table_lists_what_is_used(self) -> None:
        operations = {row["operation"] for row in backends() if row["available"] == "yes"}
        assert {case.split()[0] for case in USED} <= operations

    def test_little_workspace_gives_the_same(self) -> None:
        model = small()
        tokens = stream()[:300]
        with (
            open_cache(model) as cache,
            attach(model, cache, workspace_bytes=200_000) as adapter,
            cache.lease([]) as lease,
        ):
            got = run(cache, adapter, lease, tokens, [300])
        near(got, full_logits(model, tokens))

    def test_warmup_touches_no_page(self) -> None:
        for layout in (None, {}):
            model = small() if layout is None else model_of()
            with open_cache(model, layout=layout) as cache, attach(model, cache) as adapter:
                adapter.warmup()
                pool: Any = cache._pool
                assert all(bool((s == 0xFF).all()) for s in pool._storage.values())

    def test_router_logits_in_the_configuration_are_no_obstacle(self) -> None:
        model = small(output_router_logits=True)
        with open_cache(model) as cache, attach(model, cache) as adapter:
            with cache.lease([]) as lease:
                got = feed(cache, adapter, (lease, [1, 2, 3]))[0]
        want = full_logits(small(), [1, 2, 3])
        near(got, want)

    def test_ids_outside_the_vocabulary(self) -> None:
        model = small()
        with open_cache(model) as cache, attach(model, cache) as adapter:
            with cache.lease([]) as lease, pytest.raises(TokenError, match="97"):
                feed(cache, adapter, (lease, [1, 97]))


def test_weights_are_read_anew_at_every_step() -> None:
    model = small()
    tokens = stream()[:140]
    with open_cache(model) as cache, attach(model, cache) as adapter:
        with cache.lease([]) as lease:
            run(cache, adapter, lease, tokens, [140])
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.add_(1.0)
                if layer.self_attn.compressor is not None:
                    layer.self_attn.compressor.position_bias.mul_(-1.0)
        want = full_logits(model, tokens)
        with cache.lease([]) as lease:
            got = run(cache, adapter, lease, tokens, [140])
    near(got, want)


def test_two_models_of_two_families_in_each_others_steps() -> None:
    """A V3 model called from within a V4 step, and the other way: each sees its own."""
    v4, v3 = small(), tiny_model("v3")
    tokens, other = stream()[:130], stream(1)[:9]
    dense = FakeCache(layout_for(v3.config, page_tokens=4, dtype="float32"))
    inner: list[Any] = []
    with open_cache(v4) as cache, attach(v4, cache) as adapter, attach(v3, dense) as draft:

        def call(*_: Any) -> None:
            if not inner:
                inner.append(None)
                inner[0] = draft.forward(dense.step((FakeSequence(), other)), all_logits=True)

        hook = attention(v4, 1).register_forward_hook(call)
        with cache.lease([]) as lease:
            outer = run(cache, adapter, lease, tokens, [130])
        hook.remove()
    near(outer, full_logits(v4, tokens))
    near(inner[0], full_logits(v3, other))


def test_threads_in_the_middle_of_their_steps() -> None:
    """Two leases of one adapter, and a second model, all at once: meet before every layer."""
    one, two = model_of(), small()
    models, which = (one, one, two), (0, 1, 2)
    barrier = threading.Barrier(3, timeout=300)
    caches = [open_cache(one), open_cache(two)]
    adapters = [attach(one, caches[0]), attach(two, caches[1])]
    got: list[Any] = [None] * 3

    def meet(*_: Any) -> None:
        barrier.wait()

    hooks = [
        attention(m, layer).register_forward_pre_hook(meet) for m in (one, two) for layer in (0, 1)
    ]

    def serve(i: int) -> None:
        torch.set_num_threads(1)
        mine: Cache = caches[i // 2]
        with mine.lease([], label=str(i)) as lease:
            got[i] = run(mine, adapters[i // 2], lease, stream(which[i])[:300], [130, 126, 44])

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
        want = expected(i)[:300] if i < 2 else full_logits(models[i], stream(2)[:300])
        near(logits, want)
