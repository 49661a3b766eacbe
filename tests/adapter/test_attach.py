"""Attaching and detaching: per instance, all layers or none, reversible, and never stale."""

import copy
import functools
import inspect
import io
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvtier import ConfigError, KVTierError, LayoutMismatch
from kvtier.layouts import mla
from kvtier_deepseek import UnsupportedModel, attach, backends, layout_for
from tests.adapter.fake_step import FakeCache, FakeSequence
from tests.adapter.models import as_subclasses, full_logits, random_tokens, tiny_model

LOGITS = 5e-6
TOKENS = random_tokens(9)


def cache_for(model: Any) -> FakeCache:
    dtype = next(model.parameters()).dtype
    return FakeCache(layout_for(model.config, page_tokens=4, dtype=dtype))


def attention(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].self_attn


def adapted(model: Any) -> list[bool]:
    return ["forward" in vars(layer.self_attn) for layer in model.model.layers]


def prefill_and_decode(model: Any, adapter: Any, cache: FakeCache, tokens: list[int]) -> Tensor:
    """Logits of every token: all but the last two in one step, then one by one."""
    seq, logits = FakeSequence(), []
    for new in (tokens[:-2], tokens[-2:-1], tokens[-1:]):
        step = cache.step((seq, new))
        logits.append(adapter.forward(step, all_logits=True))
        step.commit()
    return torch.cat(logits)


class TestDetach:
    def test_leaves_the_model_as_it_was(self) -> None:
        """AT-4.11"""
        model = tiny_model("v3")
        before, keys = full_logits(model, TOKENS), list(model.state_dict())
        modules = {name: dict(vars(m)) for name, m in model.named_modules()}
        cache = cache_for(model)
        adapter = attach(model, cache)
        assert adapted(model) == [True, True]
        assert list(model.state_dict()) == keys
        prefill_and_decode(model, adapter, cache, TOKENS)
        adapter.detach()
        adapter.detach()
        assert adapted(model) == [False, False]
        assert torch.equal(full_logits(model, TOKENS), before)
        after = {name: dict(vars(m)) for name, m in model.named_modules()}
        assert {n: set(v) for n, v in after.items()} == {n: set(v) for n, v in modules.items()}

    def test_a_detached_adapter_refuses_steps(self) -> None:
        model = tiny_model("v3")
        cache = cache_for(model)
        with attach(model, cache) as adapter:
            pass
        with pytest.raises(KVTierError, match="detached"):
            adapter(cache.step((FakeSequence(), [1])))

    def test_someone_elses_override_stays_and_computes_as_the_class_does(self) -> None:
        model = tiny_model("v3")
        before = full_logits(model, TOKENS)
        adapter = attach(model, cache_for(model))
        module = attention(model)
        ours = module.forward
        module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
        adapter.detach()
        assert adapted(model) == [True, False]
        assert torch.equal(full_logits(model, TOKENS), before)

    def test_attach_again_after_detach(self) -> None:
        model = tiny_model("v3")
        for _ in range(2):
            cache = cache_for(model)
            with attach(model, cache) as adapter:
                got = prefill_and_decode(model, adapter, cache, TOKENS)
            torch.testing.assert_close(got, full_logits(model, TOKENS), atol=LOGITS, rtol=0)


class TestAttach:
    def test_twice_is_an_error_and_changes_nothing(self) -> None:
        model = tiny_model("v3")
        cache = cache_for(model)
        with attach(model, cache) as adapter:
            with pytest.raises(KVTierError, match="attached to a cache already"):
                attach(model, cache_for(model))
            got = prefill_and_decode(model, adapter, cache, TOKENS)
            torch.testing.assert_close(got, full_logits(model, TOKENS), atol=LOGITS, rtol=0)
        assert adapted(model) == [False, False]

    def test_other_models_are_untouched(self) -> None:
        one, other = tiny_model("v3", seed=1), tiny_model("v3", seed=2)
        before = full_logits(other, TOKENS)
        forward = type(attention(one)).forward
        cache = cache_for(one)
        with attach(one, cache) as adapter:
            assert adapted(other) == [False, False]
            assert type(attention(one)).forward is forward
            prefill_and_decode(one, adapter, cache, TOKENS)
            assert torch.equal(full_logits(other, TOKENS), before)

    def test_failing_half_way_leaves_nothing_adapted(self) -> None:
        model = tiny_model("v3", num_hidden_layers=3)

        class Stubborn(type(attention(model))):  # type: ignore[misc]
            def __setattr__(self, name: str, value: Any) -> None:
                if name == "forward":
                    raise RuntimeError("no")
                super().__setattr__(name, value)

        attention(model, 2).__class__ = Stubborn
        with pytest.raises(RuntimeError, match="no"):
            attach(model, cache_for(model))
        assert adapted(model) == [False, False, False]

    def test_a_layer_that_lost_its_override_is_an_error(self) -> None:
        """AT-4.1: never a step in which a layer silently ran without the cache."""
        model = tiny_model("v3")
        cache = cache_for(model)
        with attach(model, cache) as adapter:
            del attention(model, 1).forward
            with pytest.raises(KVTierError, match=r"only layers \[0\] of 2"):
                adapter(cache.step((FakeSequence(), TOKENS)))

    def test_a_replaced_forward_is_refused(self) -> None:
        model = tiny_model("v3")
        plain, other = attention(model, 1).forward, attention(model, 0).forward
        for forward in (lambda *a, **k: plain(*a, **k), functools.partial(plain), other.__call__):
            attention(model, 1).forward = forward
            with pytest.raises(UnsupportedModel, match=r"layers.1.self_attn.forward"):
                attach(model, cache_for(model))
            assert adapted(model) == [False, True]

    @pytest.mark.parametrize("limit", [-1, True, 1.5, float("inf"), [], b"measured"], ids=repr)
    def test_a_limit_that_is_no_count_is_refused(self, limit: Any) -> None:
        model = tiny_model("v3")
        with pytest.raises(ConfigError, match=f"max_absorbed={re.escape(repr(limit))} must be"):
            attach(model, cache_for(model), max_absorbed=limit)
        assert adapted(model) == [False, False]

    def test_arguments_of_another_kind_are_refused(self) -> None:
        model: Any = tiny_model("v3")
        with pytest.raises(UnsupportedModel, match="None is no model"):
            attach(None, cache_for(model))  # type: ignore[arg-type]
        other: Any
        for other in (None, "cache", cache_for(model).layout):
            with pytest.raises(ConfigError, match="cache must be a"):
                attach(model, other)
        for other in ("mtp", object()):
            with pytest.raises(ConfigError, match="draft must be"):
                attach(model, cache_for(model), draft=other)
        assert adapted(model) == [False, False]

    def test_a_model_that_was_converted_since_is_refused(self) -> None:
        """Its rows would be of another precision than the cache says; put back, it goes on."""
        model = tiny_model("v3")
        cache = cache_for(model)
        with attach(model, cache) as adapter:
            model.bfloat16()
            with pytest.raises(
                KVTierError, match=r"as torch\.float32 on cpu and is torch\.bfloat16"
            ):
                adapter(cache.step((FakeSequence(), TOKENS)))
            model.float()
            adapter(cache.step((FakeSequence(), TOKENS)))
            model.to("meta")
            with pytest.raises(KVTierError, match=r"is torch\.float32 on meta now"):
                adapter(cache.step((FakeSequence(), TOKENS)))
        assert adapted(model) == [False, False]

    @pytest.mark.parametrize(
        "part",
        [
            "kv_a_proj_with_mqa",
            "kv_a_layernorm",
            "kv_b_proj",
            "o_proj",
            "q_a_layernorm",
            "q_b_proj",
        ],
    )
    def test_a_missing_submodule_is_named(self, part: str) -> None:
        """AT-5.2"""
        model = tiny_model("v3")
        setattr(attention(model, 1), part, None)
        with pytest.raises(UnsupportedModel, match=f"layers.1.self_attn has no submodule {part}"):
            attach(model, cache_for(model))
        assert adapted(model) == [False, False]

    def test_queries_projected_in_two_need_no_name_for_doing_it_in_one(self) -> None:
        model = tiny_model("v3")
        tokens, cache = random_tokens(9), cache_for(model)
        expected = full_logits(model, tokens)
        for layer in model.model.layers:
            del layer.self_attn.q_proj
        with attach(model, cache) as adapter:
            logits = adapter.forward(cache.step((FakeSequence(), tokens)), all_logits=True)
        torch.testing.assert_close(logits, expected, atol=LOGITS, rtol=0)

    @pytest.mark.parametrize("name", ["scaling", "layer_idx", "num_heads", "v_head_dim"])
    def test_a_missing_attribute_is_named(self, name: str) -> None:
        model = tiny_model("v3")
        delattr(attention(model, 1), name)
        with pytest.raises(UnsupportedModel, match=name):
            attach(model, cache_for(model))

    def test_a_number_of_layers_that_is_none(self) -> None:
        model = tiny_model("v3")
        cache = cache_for(model)
        vars(model.config)["num_hidden_layers"] = "2.5"
        with pytest.raises(UnsupportedModel, match=r"num_hidden_layers .* '2\.5'"):
            attach(model, cache)

    def test_a_size_that_contradicts_the_configuration(self) -> None:
        model = tiny_model("v3")
        attention(model).v_head_dim = 4
        with pytest.raises(UnsupportedModel, match=r"v_head_dim is 4, .* says 8"):
            attach(model, cache_for(model))

    def test_a_layer_without_latent_attention(self) -> None:
        model = tiny_model("v3")
        model.model.layers[1].self_attn = nn.Identity()
        with pytest.raises(UnsupportedModel, match=r"layers \[1\] have no latent attention"):
            attach(model, cache_for(model))

    def test_two_layers_of_one_index(self) -> None:
        model = tiny_model("v3")
        attention(model, 1).layer_idx = 0
        with pytest.raises(UnsupportedModel, match="both have layer_idx 0"):
            attach(model, cache_for(model))

    @pytest.mark.parametrize("flag", [None, "both"])
    def test_unknown_rope_flag(self, flag: Any) -> None:
        model = tiny_model("v3")
        cache = cache_for(model)
        object.__setattr__(model.config, "rope_interleave", flag)
        with pytest.raises(UnsupportedModel, match="rope_interleave"):
            attach(model, cache)

    def test_a_rope_that_writes_another_order_than_it_should(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("v3")
        home = inspect.getmodule(type(attention(model)))
        assert home is not None

        def swapped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            return tuple(
                torch.stack(home.rotate_half(x).chunk(2, -1), -1).flatten(-2) for x in (q, k)
            )  # type: ignore[return-value]

        monkeypatch.setattr(home, "apply_rotary_pos_emb_interleave", swapped)
        with pytest.raises(UnsupportedModel, match=r"rope"):
            attach(model, cache_for(model))

    def test_no_rope_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("v2")
        home = inspect.getmodule(type(attention(model)))
        monkeypatch.delattr(home, "apply_rotary_emb")  # type: ignore[arg-type]
        with pytest.raises(UnsupportedModel, match="apply_rotary_emb"):
            attach(model, cache_for(model))

    def test_a_subclass_defined_elsewhere_uses_its_bases_rope(self) -> None:
        model = tiny_model("v2")
        as_subclasses(model)
        cache = cache_for(model)
        with attach(model, cache) as adapter:
            got = prefill_and_decode(model, adapter, cache, TOKENS)
        torch.testing.assert_close(got, full_logits(model, TOKENS), atol=LOGITS, rtol=0)

    def test_a_model_without_a_head(self) -> None:
        model = tiny_model("v3")
        with pytest.raises(UnsupportedModel, match=r"DeepseekV3Model.forward takes no logits_to_k"):
            attach(model.model, cache_for(model))

    def test_another_family(self) -> None:
        with pytest.raises(UnsupportedModel):
            attach(nn.Linear(2, 2), cache_for(tiny_model("v3")))


class TestLayout:
    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("rope_layout", {"rope_layout": "interleaved"}),  # AT-1.7
            ("latent_dim", {"latent_dim": 17}),
            ("rope_dim", {"rope_dim": 8}),
            ("dtype", {"dtype": "bfloat16"}),
            ("layers", {"layers": 3}),
            ("layers", {"layers": 1}),
            # AT-1.6: sizes from head_dim and num_key_value_heads.
            ("latent_dim", {"latent_dim": 2 * 4 * 4, "rope_dim": 4}),
        ],
    )
    def test_a_cache_of_another_layout_is_refused(self, field: str, change: dict[str, Any]) -> None:
        model = tiny_model("v3")
        sizes = {"layers": 2, "latent_dim": 16, "rope_dim": 4, "dtype": "float32"}
        cache = FakeCache(mla(**{**sizes, **change}, page_tokens=4))  # type: ignore[arg-type]
        with pytest.raises(LayoutMismatch, match=field):
            attach(model, cache)
        assert adapted(model) == [False, False]

    def test_draft_layers_behind_the_models_own_are_fine(self) -> None:
        model = tiny_model("v3")
        layout = mla(
            layers=2, latent_dim=16, rope_dim=4, dtype="float32", page_tokens=4, draft_layers=1
        )
        cache = FakeCache(layout)
        with attach(model, cache) as adapter:
            got = prefill_and_decode(model, adapter, cache, TOKENS)
        torch.testing.assert_close(got, full_logits(model, TOKENS), atol=LOGITS, rtol=0)


class TestBackend:
    @pytest.mark.parametrize("backend", ["triton", "flashmla", "flashinfer", "nonsense"])
    def test_one_that_cannot_run_this_model_is_refused(self, backend: Any) -> None:
        model = tiny_model("v3")
        with pytest.raises(ConfigError, match=backend):
            attach(model, cache_for(model), backend=backend)
        assert adapted(model) == [False, False]

    def test_workspace_below_a_page(self) -> None:
        """AT-2.8"""
        model = tiny_model("v3")
        with pytest.raises(ConfigError, match="workspace_bytes"):
            attach(model, cache_for(model), workspace_bytes=1000)
        assert adapted(model) == [False, False]

    def test_the_table_is_public(self) -> None:
        assert {"operation", "backend", "available"} <= set(backends()[0])

    @pytest.mark.parametrize("backend", ["auto", "torch"])
    def test_warmup_touches_no_page(self, backend: Any) -> None:
        model = tiny_model("v3")
        cache = cache_for(model)
        with attach(model, cache, backend=backend) as adapter:
            adapter.warmup()
        assert all(layer._rows.isnan().all() for layer in cache.layers)


class TestContext:
    """AT-4.8: metadata of a step is gone when the step is, and belongs to that step alone."""

    def test_an_unpaged_call_after_a_step_is_native(self) -> None:
        model = tiny_model("v3")
        native = full_logits(model, TOKENS)
        cache = cache_for(model)
        with attach(model, cache) as adapter:
            assert torch.equal(full_logits(model, TOKENS), native)
            adapter(cache.step((FakeSequence(), TOKENS)))
            assert torch.equal(full_logits(model, TOKENS), native)

    def test_nor_after_an_exception_inside_a_step(self) -> None:
        model = tiny_model("v3")
        native = full_logits(model, TOKENS)
        cache = cache_for(model)

        def explode(*_: Any) -> None:
            raise RuntimeError("boom")

        with attach(model, cache) as adapter:
            hook = model.model.layers[1].mlp.register_forward_hook(explode)
            with pytest.raises(RuntimeError, match="boom"):
                adapter(cache.step((FakeSequence(), TOKENS)))
            hook.remove()
            assert torch.equal(full_logits(model, TOKENS), native)
            got = prefill_and_decode(model, adapter, cache, TOKENS)
            torch.testing.assert_close(got, native, atol=LOGITS, rtol=0)

    @pytest.mark.parametrize("length", [len(TOKENS), 4])
    @pytest.mark.parametrize("where", ["embed", "attention"])
    def test_an_unpaged_call_inside_a_step_is_native(self, where: str, length: int) -> None:
        """Even of the same length, and before the step's first layer has run."""
        model = tiny_model("v3")
        other = random_tokens(length, 5)
        native, expected = full_logits(model, other), full_logits(model, TOKENS)
        inner: list[Tensor] = []

        def call(*_: Any) -> None:
            if not inner:
                inner.append(torch.empty(0))
                inner[0] = full_logits(model, other)

        module = model.model.embed_tokens if where == "embed" else attention(model)
        cache = cache_for(model)
        with attach(model, cache) as adapter:
            hook = module.register_forward_hook(call)
            outer = adapter.forward(cache.step((FakeSequence(), TOKENS)), all_logits=True)
            hook.remove()
        assert torch.equal(inner[0], native)
        torch.testing.assert_close(outer, expected, atol=LOGITS, rtol=0)

    def test_a_layer_called_twice_in_a_step_is_an_error(self) -> None:
        """A shared or recomputed layer would write and read rows that are not its own."""
        model = tiny_model("v3")
        cache = cache_for(model)

        def again(module: Any, args: Any, kwargs: Any) -> None:
            attention(model, 0)(*args, **kwargs)

        with attach(model, cache) as adapter:
            hook = attention(model, 1).register_forward_pre_hook(again, with_kwargs=True)
            with pytest.raises(RuntimeError, match="layer 0 was called twice"):
                adapter(cache.step((FakeSequence(), TOKENS)))
            hook.remove()

    def test_a_step_inside_a_step(self) -> None:
        """Of the same adapter and of another one: each sees its own metadata."""
        model, draft = tiny_model("v3", seed=1), tiny_model("v2", seed=2)
        cache, draft_cache = cache_for(model), cache_for(draft)
        other = random_tokens(5, 5)
        inner: list[Tensor] = []

        with attach(model, cache) as adapter, attach(draft, draft_cache) as draft_adapter:

            def call(*_: Any) -> None:
                if not inner:
                    inner.append(torch.empty(0))
                    step = draft_cache.step((FakeSequence(), other))
                    inner[0] = draft_adapter.forward(step, all_logits=True)
                    step = cache.step((FakeSequence(), other))
                    inner.append(adapter.forward(step, all_logits=True))

            hook = attention(model).register_forward_hook(call)
            outer = adapter.forward(cache.step((FakeSequence(), TOKENS)), all_logits=True)
            hook.remove()
        for got, who, tokens in (
            (outer, model, TOKENS),
            (inner[0], draft, other),
            (inner[1], model, other),
        ):
            torch.testing.assert_close(got, full_logits(who, tokens), atol=LOGITS, rtol=0)

    @pytest.mark.parametrize("shared", [True, False], ids=["one adapter", "two models"])
    def test_two_threads_in_the_middle_of_their_steps(self, shared: bool) -> None:
        one = tiny_model("v3", seed=1)
        models = [one, one if shared else tiny_model("v2", seed=2)]
        streams = [random_tokens(9, 1), random_tokens(9 if shared else 6, 2)]
        expected = [full_logits(m, s) for m, s in zip(models, streams, strict=True)]
        first = cache_for(models[0])
        caches = [first, first if shared else cache_for(models[1])]
        adapters = [attach(models[0], caches[0])]
        adapters.append(adapters[0] if shared else attach(models[1], caches[1]))
        steps = [c.step((FakeSequence(), s)) for c, s in zip(caches, streams, strict=True)]
        barrier = threading.Barrier(2, timeout=300)

        def meet(*_: Any) -> None:
            barrier.wait()

        hooks = [
            attention(m, layer).register_forward_pre_hook(meet)
            for m in models[: 1 if shared else 2]
            for layer in (0, 1)
        ]
        got: list[Any] = [None, None]

        def run(i: int) -> None:
            got[i] = adapters[i].forward(steps[i], all_logits=True)

        threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for hook in hooks:
            hook.remove()
        for adapter in adapters:
            adapter.detach()
        for logits, want in zip(got, expected, strict=True):
            torch.testing.assert_close(logits, want, atol=LOGITS, rtol=0)


class TestCopies:
    def test_a_deep_copy_is_not_attached(self) -> None:
        model = tiny_model("v3")
        native = full_logits(model, TOKENS)
        with attach(model, cache_for(model)):
            twin = copy.deepcopy(model)
            for layer in twin.model.layers:
                assert layer.self_attn.forward.__self__ is layer.self_attn
            model.lm_head.weight.data.zero_()
            assert torch.equal(full_logits(twin, TOKENS), native)

    def test_a_copy_of_an_attached_model_can_be_attached(self) -> None:
        """And is as free as any other model once it is detached."""
        model = tiny_model("v3")
        native = full_logits(model, TOKENS)
        with attach(model, cache_for(model)) as first:
            twin = copy.deepcopy(model)
            model.lm_head.weight.data.zero_()
            cache = cache_for(twin)
            with attach(twin, cache) as second:
                logits = second.forward(cache.step((FakeSequence(), TOKENS)), all_logits=True)
                torch.testing.assert_close(logits, native, atol=LOGITS, rtol=0)
                assert second.report.layers == 2
            assert first.report.layers == 0
            assert torch.equal(full_logits(twin, TOKENS), native)
            assert adapted(twin) == [False, False]

    def test_a_pickled_model_is_not_attached(self) -> None:
        model = tiny_model("v3")
        native = full_logits(model, TOKENS)
        with attach(model, cache_for(model)):
            file = io.BytesIO()
            torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(full_logits(loaded, TOKENS), native)


class Wrapped(nn.Module):
    """A linear layer with a low-rank term, as fine-tuning adapters put there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def wrap(module: Any) -> None:
    torch.manual_seed(3)
    module.kv_b_proj = Wrapped(module.kv_b_proj)


def hook(module: Any) -> None:
    module.kv_b_proj.register_forward_hook(lambda m, args, out: out * 1.25)


def add_bias(module: Any) -> None:
    module.kv_b_proj.bias = nn.Parameter(torch.linspace(-1, 1, module.kv_b_proj.out_features))


def override(module: Any) -> None:
    linear = module.kv_b_proj
    linear.forward = lambda x: 0.5 * nn.functional.linear(x, linear.weight)


def parametrize(module: Any) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    nn.utils.parametrize.register_parametrization(module.kv_b_proj, "weight", Double())


def subclass(module: Any) -> None:
    """What quantised linear layers look like: a Linear by type, another one by what it computes."""

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.75

    module.kv_b_proj.__class__ = Rounded


def update_in_place(module: Any) -> None:
    with torch.no_grad():
        module.kv_b_proj.weight.mul_(-0.5)


def new_parameter(module: Any) -> None:
    module.kv_b_proj.weight = nn.Parameter(module.kv_b_proj.weight.detach() * 3)


class TestProjection:
    """AT-5.5: the up-projection is whatever the module is now, never a copy of what it was."""

    @pytest.mark.parametrize(
        ("change", "absorbs"),
        [
            (wrap, False),
            (hook, False),
            (add_bias, False),
            (override, False),
            (parametrize, False),
            (subclass, False),
            (update_in_place, True),
            (new_parameter, True),
        ],
        ids=lambda x: getattr(x, "__name__", str(x)),
    )
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_change(self, change: Callable[[Any], None], absorbs: bool, when: str) -> None:
        model = tiny_model("v3")
        original = full_logits(model, TOKENS)
        cache = cache_for(model)
        if when == "before":
            change(attention(model))
        with attach(model, cache, max_absorbed=1000) as adapter:
            if when == "after":
                prefill_and_decode(model, adapter, cache, TOKENS)
                change(attention(model))
            got = prefill_and_decode(model, adapter, cache, TOKENS)
            first_layer = adapter.report.forms
        expected = full_logits(model, TOKENS)
        assert (expected - original).abs().max() > 1e-2
        torch.testing.assert_close(got, expected, atol=LOGITS, rtol=0)
        assert first_layer == {"absorbed" if absorbs else "materialised": 1}


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_both_names_of_hfs_cache(keyword: str) -> None:
    """AT-5.3: an attached layer passes on calls outside a step under either name."""
    from transformers import DynamicCache

    model = tiny_model("v3")
    if keyword not in inspect.signature(model.forward).parameters:
        pytest.importorskip("transformers", "5.24")  # older ones know the old name only
    native = full_logits(model, TOKENS)
    with attach(model, cache_for(model)), torch.no_grad():
        held = DynamicCache(config=model.config)
        ids = torch.tensor([TOKENS])
        model(input_ids=ids[:, :5], **{keyword: held}, use_cache=True)
        out = model(input_ids=ids[:, 5:], **{keyword: held}, use_cache=True)
    torch.testing.assert_close(out.logits[0], native[5:], atol=LOGITS, rtol=0)
    assert held.get_seq_length() == len(TOKENS)
