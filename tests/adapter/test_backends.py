"""Which kernel a step runs: picked once by its size, the same in all layers, and recorded (E9)."""

import dataclasses
import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import Cache, CacheConfig, ConfigError
from kvtier.kernels import Case, Load, absorbed, measured
from kvtier.kernels.measured import Figures
from kvtier_deepseek import attach, layout_for
from kvtier_deepseek.family import load_of, variants_of
from tests.adapter.fake_step import FakeCache, FakeSequence
from tests.adapter.models import random_tokens, tiny_model
from tests.adapter.v4_models import v4_model

TABLE = importlib.import_module("kvtier.kernels.table")
HEADS = 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Two more kernels of absorbed attention: "small" is the faster one of few sequences, "large"
    of many."""
    made: Counter[str] = Counter()
    model = tiny_model("v3")
    dims = model.config.kv_lora_rank + model.config.qk_rope_head_dim, model.config.kv_lora_rank
    mine = ("mla_absorbed", "dense", "torch")
    (like,) = (r for r in TABLE.ROWS if (r.operation, r.record, r.backend) == mine)

    def counting(name: str) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            made[name] += 1
            return absorbed(*arguments, **options)

        return run

    rows = [
        dataclasses.replace(like, backend=name, run=counting(name), by_name=True, captures=captures)
        for name, captures in (("small", True), ("large", False))
    ]
    times = {
        Load(1, HEADS, 16): {"small": 1.0, "large": 2.0},
        Load(8, HEADS, 16): {"small": 9.0, "large": 3.0},
    }
    case = Case("mla_absorbed", "dense", dims, torch.float32, "cpu")
    known = {("here", case): Figures(times, frozenset({"small", "large"}))}
    monkeypatch.setattr(TABLE, "ROWS", (*rows, *TABLE.ROWS))
    monkeypatch.setattr(measured, "_shipped", lambda: known)
    monkeypatch.setattr(measured, "device_name", lambda: "here")
    return made


def cache_for(model: Any) -> FakeCache:
    return FakeCache(layout_for(model.config, page_tokens=4, dtype=torch.float32))


def test_by_the_size_of_each_step(calls: Counter[str]) -> None:
    model = tiny_model("v3")
    layers = len(model.model.layers)
    cache, sequences = cache_for(model), [FakeSequence() for _ in range(6)]
    with attach(model, cache) as adapter:
        one = cache.step((sequences[0], [1]))
        adapter(one)
        one.commit()
        assert adapter.report.backends["mla_absorbed"] == "small"
        assert calls == {"small": layers}
        many = cache.step(*((s, [2]) for s in sequences))
        adapter(many)
        assert adapter.report.backends["mla_absorbed"] == "large"
        assert calls == {"small": layers, "large": layers}
    with attach(model, cache, backend="torch") as plain:
        plain(cache.step((FakeSequence(), [1])))
        assert plain.report.backends["mla_absorbed"] == "torch"


def test_the_answer_does_not_depend_on_it(calls: Counter[str]) -> None:
    model, logits = tiny_model("v3"), []
    for backend in ("auto", "torch"):
        cache, sequences = cache_for(model), [FakeSequence() for _ in range(5)]
        with attach(model, cache, backend=backend) as adapter:
            for tokens in ([3, 4], [5]):
                step = cache.step(*((s, tokens) for s in sequences))
                logits.append(adapter(step))
                step.commit()
    assert calls["large"] > 0
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])


def test_asked_once_a_step(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("v3")
    cache = cache_for(model)
    asked: list[Load] = []
    real = measured.fastest

    def fastest(*arguments: Any) -> str | None:
        asked.append(arguments[1])
        return real(*arguments)

    monkeypatch.setattr(measured, "fastest", fastest)
    with attach(model, cache) as adapter:
        adapter(cache.step((FakeSequence(), [1]), (FakeSequence(), [1])))
    assert asked == [Load(2, HEADS, 1, page_tokens=4)]


def test_a_graph_is_captured_with_what_may_be_in_it(calls: Counter[str]) -> None:
    model = tiny_model("v3")
    cache = cache_for(model)
    with attach(model, cache) as adapter:
        step = cache.step(*((FakeSequence(), [1]) for _ in range(8)))
        family: Any = adapter._family
        for bound, backend in ((None, "large"), (64, "small")):
            run = family.make_run(step, step.to_device(), bound)
            load = run.loads["mla_absorbed"]
            assert load == Load(8, HEADS, bound or 1, page_tokens=4, captured=bound is not None)
            run.kernel(family.layers[0], "mla_absorbed")
            assert run.backends["mla_absorbed"] == backend


def test_what_no_graph_can_hold_is_refused_before_it_is_captured(calls: Counter[str]) -> None:
    model = tiny_model("v3")
    layout = layout_for(model.config, page_tokens=4, dtype=torch.float32)
    config = CacheConfig(gpu_bytes=1 << 20, cpu_bytes=0, max_leases=2)
    with (
        Cache(layout, config, model="tiny", device="cpu") as cache,
        attach(model, cache) as adapter,
    ):
        graph = adapter.capture_decode(batch=2, pages=2)
        with cache.step([]) as step:
            # Of absorbed attention there is one that could be captured.
            with pytest.raises(ConfigError, match="cannot capture write_rows: torch, all there is"):
                graph._capture(step, graph._arrays(step))


def test_warmup_runs_every_kernel_that_may_be_picked(calls: Counter[str]) -> None:
    model = tiny_model("v3")
    with attach(model, cache_for(model)) as adapter:
        adapter.warmup()
    assert set(calls) == {"small", "large"} and calls["small"] == calls["large"]


def test_turns_that_call_every_variant() -> None:
    kernels = {
        "a": SimpleNamespace(variants=(1, 2, 3)),
        "b": SimpleNamespace(variants=(4,)),
        "c": SimpleNamespace(variants=(5, 6)),
    }
    turns: Any = list(variants_of(kernels))  # type: ignore[arg-type]
    assert turns == [{"a": 1, "b": 4, "c": 5}, {"a": 2, "b": 4, "c": 6}, {"a": 3, "b": 4, "c": 6}]
    assert list(variants_of({})) == [{}]


def test_recorded_by_kind_of_step() -> None:
    model = tiny_model("v3")
    cache, a, b = cache_for(model), FakeSequence(), FakeSequence()
    with attach(model, cache) as adapter:
        many = adapter.max_absorbed + 1
        assert adapter.backends_used == {}

        def run(*work: Any) -> str:
            step = cache.step(*work)
            adapter(step)
            step.commit()
            return adapter.report.kind

        assert run((a, random_tokens(many))) == "prefill"
        assert run((a, [1])) == "decode"
        assert run((a, [1]), (b, random_tokens(many))) == "mixed"
        assert run((a, [1]), (b, [1])) == "decode"
        used = adapter.backends_used
        assert set(used) == {"prefill", "decode", "mixed"}
        assert "mla_absorbed" not in used["prefill"] and "mla_absorbed" in used["mixed"]
        assert set(used["decode"]) == {"write_rows", "mla_absorbed"}
        assert set(used["decode"].values()) == {"torch"}


def test_checking_drafts_is_a_kind_of_its_own() -> None:
    model = v4_model((4, 128), seed=1)
    layout = layout_for(model.config, record="fp32", index_record="fp32", max_draft=2)
    size = 64 << 20
    with (
        Cache(
            layout, CacheConfig(gpu_bytes=size, cpu_bytes=0, max_leases=2), model="t", device="cpu"
        ) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as lease,
    ):
        kinds = []
        for tokens in (random_tokens(9), [1], [1, 2, 3]):
            with cache.step([(lease, tokens)]) as step:
                adapter(step)
            kinds.append(adapter.report.kind)
        assert kinds == ["prefill", "decode", "verify"]
        family: Any = adapter._family
        with cache.step([(lease, [1])]) as step:
            run = family.make_run(step, step.to_device(), None)
        heads = model.config.num_attention_heads
        keys = model.config.sliding_window + model.config.index_topk
        assert run.loads == {"sparse_attend": Load(1, heads, keys)}


def test_of_ragged_sequences() -> None:
    batch: Any = SimpleNamespace(kv_lens=(100, 0, 201), query_lens=(2, 1, 3), page_tokens=128)
    expected = Load(3, 16, 100, queries=3, page_tokens=128, captured=True)
    assert load_of(batch, 16, captured=True) == expected
    none: Any = SimpleNamespace(kv_lens=(), query_lens=(), page_tokens=64)
    assert load_of(none, 16, captured=False) == Load(1, 16, 0)
