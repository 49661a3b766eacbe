"""F1 for models with windows and for V3.2: attached per instance, all layers or none, taken off
without a trace, bounded in memory.  ``test_attach`` has the same of plain V2 and V3 models."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier import Cache, KVTierError
from kvtier.kernels import Kernel
from kvtier_deepseek import attach
from tests.adapter import swa_kit, v32_kit
from tests.adapter.models import full_logits, random_tokens, tiny_model
from tests.adapter.swa_kit import near, run
from tests.adapter.test_memory import Largest

TOKENS = random_tokens(30)
kinds = pytest.mark.parametrize("kind", ["windows", "v32"])


def model_of(kind: str, **changes: Any) -> Any:
    if kind == "v32":
        return v32_kit.new_model(num_hidden_layers=3, **{"index_topk": 8, **changes})
    fields = {"window_attn_skip_freq": [0, 1, 0], "sliding_window": 6}
    return tiny_model("v3", num_hidden_layers=3, **fields, **changes)


def opened(kind: str, model: Any, **options: Any) -> Cache:
    return (v32_kit if kind == "v32" else swa_kit).open_cache(model, **options)


def expected(kind: str, model: Any) -> Tensor:
    return (full_logits if kind == "v32" else swa_kit.expected)(model, TOKENS)


def adapted(model: Any) -> list[bool]:
    return ["forward" in vars(layer.self_attn) for layer in model.model.layers]


@kinds
def test_attached_twice_and_taken_off_twice(kind: str) -> None:
    """AT-4.11"""
    model, other = model_of(kind), model_of(kind)
    want, before = expected(kind, model), full_logits(model, TOKENS)
    keys = list(model.state_dict())
    modules = {name: set(vars(m)) for name, m in model.named_modules()}
    with opened(kind, model) as cache, opened(kind, model) as second:
        adapter = attach(model, cache)
        assert adapted(model) == [True] * 3 and adapted(other) == [False] * 3
        assert list(model.state_dict()) == keys
        with pytest.raises(KVTierError, match="attached to a cache already"):
            attach(model, second)
        with cache.lease([]) as lease:
            near(run(cache, adapter, lease, TOKENS, [13, 1, 1, 15]), want)
        assert adapter.report.layers == 3
        adapter.detach()
        adapter.detach()
    assert adapted(model) == [False] * 3
    assert torch.equal(full_logits(model, TOKENS), before)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == modules


@kinds
@pytest.mark.parametrize("layer", [1, 2])
def test_failing_half_way_leaves_nothing_adapted(kind: str, layer: int) -> None:
    """AT-4.11"""
    model = model_of(kind)
    last = model.model.layers[layer].self_attn

    class Stubborn(type(last)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "forward":
                raise RuntimeError("no")
            super().__setattr__(name, value)

    last.__class__ = Stubborn
    with opened(kind, model) as cache, pytest.raises(RuntimeError, match="no"):
        attach(model, cache)
    assert adapted(model) == [False] * 3


@kinds
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_lost_its_override_is_an_error(kind: str, layer: int) -> None:
    """AT-4.1: never a step in which a layer silently ran without the cache."""
    model = model_of(kind)
    with opened(kind, model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        del model.model.layers[layer].self_attn.forward
        with cache.step([(lease, TOKENS)]) as step:
            with pytest.raises(KVTierError, match="of 3 used the cache"):
                adapter(step)


@kinds
@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_both_names_of_hfs_cache(kind: str, keyword: str) -> None:
    """AT-5.3: calls outside a step are HF's own, under either name; bit for bit."""
    from transformers import DynamicCache

    model = model_of(kind)
    if keyword not in inspect.signature(model.forward).parameters:
        pytest.importorskip("transformers", "5.24")  # older ones know the old name only

    @torch.no_grad()
    def native() -> Tensor:
        held, ids = DynamicCache(config=model.config), torch.tensor([TOKENS])
        model(input_ids=ids[:, :5], **{keyword: held}, use_cache=True)
        logits: Tensor = model(input_ids=ids[:, 5:], **{keyword: held}, use_cache=True).logits
        assert held.get_seq_length() == len(TOKENS)
        return logits

    before = native()
    with opened(kind, model) as cache, attach(model, cache):
        assert torch.equal(native(), before)


@kinds
def test_a_warm_up_runs_every_kernel_and_touches_no_page(kind: str) -> None:
    """E9: those of decode steps, and of chunks where they are others."""
    model, called = model_of(kind), set()

    def listening(name: str, kernel: Kernel) -> Kernel:
        def run(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return kernel.run(*arguments, **options)

        return replace(kernel, run=run)

    with opened(kind, model) as cache, attach(model, cache) as adapter:
        for layer in adapter._family.layers:
            mine = getattr(layer, "full", layer)
            heard = {name: listening(name, kernel) for name, kernel in mine.kernels.items()}
            object.__setattr__(mine, "kernels", heard)
        adapter.warmup()
        chunks = {"mla_materialised"} if kind == "windows" else set()
        assert called >= {*adapter._family.decoding, *chunks}
        pool: Any = cache._pool
        assert all(bool((pages == 0xFF).all()) for pages in pool._storage.values())


@pytest.mark.parametrize("wrapped", [False, True], ids=["absorbed", "not absorbable"])
@pytest.mark.parametrize("new", [1, 40])
def test_what_a_step_with_windows_allocates_does_not_grow_with_the_context(
    wrapped: bool, new: int
) -> None:
    """AT-5.4: 16 times the context is nothing to a window, and goes through the workspace in the
    full layers; expanded, 4 heads of it would be 80 values a token."""
    model = model_of("windows", max_position_embeddings=1 << 20)
    if wrapped:
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    found = []
    for context in (1 << 10, 1 << 14):
        with (
            opened("windows", model, page=64, gpu=context // 64 + 4, poison=False) as cache,
            attach(model, cache, workspace_bytes=1_000_000) as adapter,
            cache.lease([]) as lease,
        ):
            pool: Any = cache._pool
            for pages in pool._storage.values():
                pages.zero_()
            while lease.num_tokens < context:
                with cache.step([(lease, [0] * 512)]):
                    pass  # takes pages, computes nothing
            with cache.step([(lease, random_tokens(new))]) as step, Largest() as largest:
                adapter(step)
            found.append(largest.values)
    assert max(found) * 4 <= 1_000_000
