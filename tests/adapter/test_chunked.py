"""Chunked prefill in the adapter: forms, mixed steps, the one workspace of all layers, and contexts
that come from other tiers; oracle: the model without any cache."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier import Cache, CacheConfig, ConfigError, KVTierError, Tier
from kvtier.data import records, transfer
from kvtier.kernels import Kernel, PrefillPlan, Workspace
from kvtier.kernels.pack import has_triton
from kvtier_deepseek import Adapter, attach, layout_for
from kvtier_deepseek.mla import threshold
from kvtier_deepseek.mla.attention import QUERIES, _scratch_batch
from tests.adapter.fake_step import FakeCache, FakeSequence
from tests.adapter.models import full_logits, random_tokens, tiny_model
from tests.device.test_arrivals import LateDevice

CPU = torch.device("cpu")
PAGE = 4
LOGITS = 5e-6
TWO_PAGES = 45_000
"""A workspace of 8 rows, for these models."""


def cache_for(model: Any, pages: int = 256) -> FakeCache:
    dtype = next(model.parameters()).dtype
    return FakeCache(layout_for(model.config, page_tokens=PAGE, dtype=dtype), pages)


def feed(adapter: Adapter, cache: FakeCache, *work: tuple[FakeSequence, list[int]]) -> Any:
    """Logits of each sequence's tokens."""
    step = cache.step(*work)
    logits = adapter.forward(step, all_logits=True)
    step.commit()
    return logits.split([len(new) for _, new in work])


class TestForms:
    def test_one_token_and_512(self) -> None:
        """AT-1.8: decode is absorbed, a chunk of 512 is materialised; each gives what the other
        would have."""
        model = tiny_model("v3", qk_nope_head_dim=8, kv_lora_rank=64)
        tokens = random_tokens(513)
        expected = full_logits(model, tokens)
        for limit, forms in (
            (None, ["materialised", "absorbed"]),
            (0, ["materialised"] * 2),
            (9999, ["absorbed"] * 2),
        ):
            cache, seq = cache_for(model), FakeSequence()
            with attach(model, cache, max_absorbed=limit) as adapter:
                if limit is None:
                    assert 1 < adapter.max_absorbed < 512
                at = 0
                for n, form in zip((512, 1), forms, strict=True):
                    (logits,) = feed(adapter, cache, (seq, tokens[at : at + n]))
                    assert adapter.report.forms == {form: 1}
                    torch.testing.assert_close(
                        logits, expected[at : at + n], atol=4 * LOGITS, rtol=0
                    )
                    at += n

    @pytest.mark.parametrize("limit", [1, 6])
    def test_as_many_tokens_as_the_limit_are_absorbed_and_one_more_is_not(self, limit: int) -> None:
        """AT-1.8, F3: one request after the other, and both in one step."""
        model = tiny_model("v3")
        streams = [random_tokens(4 * limit + 2, seed) for seed in (1, 2)]
        expected = [full_logits(model, stream) for stream in streams]
        cache, sequences = cache_for(model), [FakeSequence(), FakeSequence()]
        operations = {"absorbed": "mla_absorbed", "materialised": "mla_materialised_whole"}
        with attach(model, cache, max_absorbed=limit) as adapter:
            for counts, forms in (
                ((limit, 0), {"absorbed": 1}),
                ((0, limit + 1), {"materialised": 1}),
                ((limit + 1, limit), {"absorbed": 1, "materialised": 1}),
                ((limit, limit), {"absorbed": 2}),
                ((limit + 1, limit + 1), {"materialised": 2}),
            ):
                work, wants = [], []
                for seq, stream, want, n in zip(sequences, streams, expected, counts, strict=True):
                    if n:
                        at = slice(seq.num_tokens, seq.num_tokens + n)
                        work.append((seq, stream[at]))
                        wants.append(want[at])
                got = feed(adapter, cache, *work)
                assert adapter.report.forms == forms
                assert set(adapter.report.backends) == {
                    "write_rows",
                    *(operations[form] for form in forms),
                }
                for logits, want in zip(got, wants, strict=True):
                    torch.testing.assert_close(logits, want, atol=LOGITS, rtol=0)

    def test_the_limit_is_measured_with_the_layers_own_kernels(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("v3")
        asked = []

        def times(attention: Any, page: int, queries: int, context: int) -> tuple[float, float]:
            asked.append(queries)
            assert page == PAGE and context == 8192
            # The crossing point lies behind 96; a lucky time behind it does not count.
            return float(queries if queries != 192 else 1), 100.0

        monkeypatch.setattr(threshold, "form_times", times)
        with attach(model, cache_for(model), max_absorbed="measured") as adapter:
            assert adapter.max_absorbed == 96
        assert asked == [8, 16, 32, 64, 96, 128]

    def test_what_is_timed_are_both_forms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("v3")
        with attach(model, cache_for(model), workspace_bytes=TWO_PAGES) as adapter:
            layer: Any = adapter._family.layers[0]
            calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
            kernels = dict(layer.kernels)
            for name, kernel in kernels.items():

                def run(
                    query: Any, rows: Any, batch: Any, *args: Any,
                    name: str = name, run: Any = kernel.run, **options: Any,
                ) -> Any:  # fmt: skip
                    calls.append((name, batch.query_lens, batch.kv_lens))
                    return run(query, rows, batch, *args, **options)

                kernels[name] = type(kernel)(kernel.backend, run)
            object.__setattr__(layer, "kernels", kernels)
            absorbed, materialised = threshold.form_times(layer, PAGE, 5, 16)
            assert absorbed > 0 and materialised > 0
            turn = [("mla_absorbed", (5,), (21,)), ("mla_materialised", (5,), (21,))]
            assert calls == turn * (threshold.REPEATS + 1)

    def test_measuring_a_real_layer_gives_one_of_the_counts(self) -> None:
        model = tiny_model("v3")
        with attach(
            model, cache_for(model), workspace_bytes=1 << 20, max_absorbed="measured"
        ) as adapter:
            assert adapter.max_absorbed in (0, *threshold.QUERIES)

    def test_a_projection_that_cannot_be_absorbed_is_not_timed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("v3")
        model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
        monkeypatch.setattr(threshold, "form_times", None)
        with attach(model, cache_for(model), max_absorbed="measured") as adapter:
            assert adapter.max_absorbed == threshold.absorb_limit(adapter._family.layers[0].dims)

    def test_another_word_is_refused(self) -> None:
        model = tiny_model("v3")
        with pytest.raises(ConfigError, match="max_absorbed='fast'"):
            attach(model, cache_for(model), max_absorbed="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["v2-lite", "v3"])
def test_mixed_steps_in_two_pages_of_workspace(variant: str) -> None:
    """AT-2.5, 2.6, 2.10: prefill without context, chunks behind one, decode and padding rows, of
    one to eleven chunks of keys each; every step equals the model's own pass."""
    model = tiny_model(variant, yarn=True)
    streams = [random_tokens(60, seed) for seed in range(4)]
    expected = [full_logits(model, stream) for stream in streams]
    cache = cache_for(model)
    sequences = [FakeSequence() for _ in streams]
    with attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=1) as adapter:
        assert adapter.max_rows == 2 * PAGE
        for counts in [(9, 0, 0, 17), (30, 7, 0, 1), (1, 2, 33, 1), (5, 17, 1, 9), (9, 1, 2, 21)]:
            work = [
                (seq, stream[seq.num_tokens : seq.num_tokens + n])
                for seq, stream, n in zip(sequences, streams, counts, strict=True)
                if n
            ]
            begins = [seq.num_tokens for seq, _ in work]
            step = cache.step(*work)
            tokens = len(step.input_ids)
            logits = adapter.forward(step, all_logits=True, pad_to=len(work) + 2)
            step.commit()
            assert adapter.report.tokens == tokens
            at = 0
            for (seq, new), begin in zip(work, begins, strict=True):
                want = expected[sequences.index(seq)][begin : begin + len(new)]
                got = logits[at : at + len(new)]
                torch.testing.assert_close(got, want, atol=2 * LOGITS, rtol=0)
                at += len(new)
        assert adapter.report.backends["mla_materialised"] == "torch"


@pytest.mark.skipif(not has_triton() or torch.cuda.is_available(), reason="interprets triton")
def test_steps_by_the_triton_kernel() -> None:
    """Which the table lists for a GPU only: here it is put in by hand."""
    from kvtier.kernels import triton_prefill

    model = tiny_model("v3", num_attention_heads=2, num_key_value_heads=2)
    streams = [random_tokens(n, seed) for seed, n in ((1, 26), (2, 12))]
    expected = [full_logits(model, stream) for stream in streams]
    cache, a, b = cache_for(model), FakeSequence(), FakeSequence()
    with attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=1) as adapter:
        kernel = Kernel("triton", triton_prefill.materialised)
        for layer in adapter._family.layers:
            kernels = {**layer.kernels, "mla_materialised": kernel}
            object.__setattr__(layer, "kernels", kernels)
        for new_a, new_b in ((19, 3), (1, 7), (6, 2)):
            at = a.num_tokens, b.num_tokens
            work = (streams[0][at[0] : at[0] + new_a], streams[1][at[1] : at[1] + new_b])
            got = feed(adapter, cache, (a, work[0]), (b, work[1]))
            assert adapter.report.backends["mla_materialised"] == "triton"
            for logits, want, begin in zip(got, expected, at, strict=True):
                there = want[begin : begin + len(logits)]
                torch.testing.assert_close(logits, there, atol=2 * LOGITS, rtol=0)


class Made(TorchDispatchMode):
    """Bytes of each tensor that operations put out, not counting views."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, each.nbytes)
        return out


class TestWorkspace:
    def test_taken_once_for_all_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """E7: latent rows and projected ones, when the model is attached and never again."""
        model = tiny_model("v3", num_hidden_layers=5)
        made = []
        allocate = Workspace.allocate.__func__  # type: ignore[attr-defined]

        def counted(cls: Any, *args: Any) -> Workspace:
            made.append(allocate(cls, *args))
            return made[-1]

        monkeypatch.setattr(Workspace, "allocate", classmethod(counted))
        cache = cache_for(model)
        with attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=0) as adapter:
            assert len({id(layer.workspace) for layer in adapter._family.layers}) == 1
            (workspace,) = made
            assert workspace.latent.shape == (8, 20)
            assert workspace.projected.shape == (8, 4, 16)
            assert adapter.reserved_bytes == 8 * 4 * (20 + 4 * 16)
            tokens = random_tokens(30)
            (logits,) = feed(adapter, cache, (FakeSequence(), tokens))
            torch.testing.assert_close(logits, full_logits(model, tokens), atol=2e-5, rtol=0)
        assert len(made) == 1

    def test_what_is_left_of_the_bytes_is_for_other_scratch(self) -> None:
        model = tiny_model("v3")
        with attach(model, cache_for(model), workspace_bytes=TWO_PAGES) as adapter:
            layer: Any = adapter._family.layers[0]
            assert layer.workspace_bytes + adapter.reserved_bytes == TWO_PAGES

    @pytest.mark.parametrize("rows", [1, 3, 8])
    def test_a_projection_with_an_output_of_its_own_is_called_piece_by_piece(
        self, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvtier_deepseek.mla.attention.PIECE", rows)
        model = tiny_model("v3")
        given = []
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_pre_hook(
                lambda _, args: given.append(args[0].shape[0])
            )
        tokens, cache = random_tokens(30), cache_for(model)
        expected = full_logits(model, tokens)
        given.clear()
        with attach(model, cache, workspace_bytes=TWO_PAGES) as adapter:
            (logits,) = feed(adapter, cache, (FakeSequence(), tokens))
        torch.testing.assert_close(logits, expected, atol=LOGITS, rtol=0)
        assert max(given) == rows and sum(given) == 2 * 30

    def test_warming_up_meets_every_size_of_tile(self) -> None:
        tiles = {PrefillPlan.of(_scratch_batch(1, PAGE, CPU, n), 2 * PAGE).tile for n in QUERIES}
        every = {
            PrefillPlan.of(_scratch_batch(1, PAGE, CPU, n), 2 * PAGE).tile for n in range(1, 300, 3)
        }
        assert tiles == every == {16, 64, 128}

    def test_nothing_as_large_as_the_context_is_made_in_a_step(self) -> None:
        """Peak memory does not depend on the context: 32 and 64 chunks of it."""
        model = tiny_model("v3", max_position_embeddings=1 << 16)
        found = []
        for context in (256, 512):
            cache, seq = cache_for(model), FakeSequence()
            with attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=0) as adapter:
                feed(adapter, cache, (seq, random_tokens(context)))
                step = cache.step((seq, random_tokens(5)))
                with Made() as live:
                    adapter.forward(step)
                found.append(live.largest)
        # The step's logits, experts and 8 rows of keys are all there is; tables name pages.
        assert found[0] == found[1] <= TWO_PAGES

    def test_what_the_device_has_no_room_for_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("v3")

        def full(*_: Any) -> Workspace:
            raise torch.OutOfMemoryError("out of memory, 3 bytes free")

        monkeypatch.setattr(Workspace, "allocate", full)
        with pytest.raises(ConfigError, match=r"smaller workspace_bytes: .* 3 bytes free"):
            attach(model, cache_for(model))
        assert "forward" not in vars(model.model.layers[0].self_attn)

    def test_counted_in_the_devices_budget(self) -> None:
        model = tiny_model("v3")
        layout = layout_for(model.config, page_tokens=PAGE, dtype="float32")
        config = CacheConfig(gpu_bytes=1 << 20)
        with Cache(layout, config, model="tiny", device="cpu") as cache:
            with pytest.raises(ConfigError, match=r"device pool of 1048576 bytes.* 1098576"):
                attach(model, cache, workspace_bytes=50_000, device_bytes=1_098_575)
            with attach(
                model, cache, workspace_bytes=50_000, device_bytes=1_098_576
            ) as adapter:  # to the byte
                assert 0 < adapter.reserved_bytes <= 50_000

    def test_made_in_inference_mode_and_used_outside(self) -> None:
        model = tiny_model("v3")
        tokens = random_tokens(30)
        cache = cache_for(model)
        with torch.inference_mode():
            adapter = attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=0)
        with adapter:
            (logits,) = feed(adapter, cache, (FakeSequence(), tokens))
        torch.testing.assert_close(logits, full_logits(model, tokens), atol=LOGITS, rtol=0)

    def test_two_threads_take_turns(self) -> None:
        """One holds the workspace, in the middle of a projection, until the other wants it."""
        model = tiny_model("v3")
        streams = [random_tokens(23, seed) for seed in (1, 2)]
        expected = [full_logits(model, stream) for stream in streams]
        cache = cache_for(model)
        steps = [cache.step((FakeSequence(), stream)) for stream in streams]
        holding, wanted = threading.Event(), threading.Event()
        got: list[Any] = [None, None]

        def held(*_: Any) -> None:
            if threading.current_thread().name == "first" and not holding.is_set():
                holding.set()
                assert wanted.wait(300)

        linear = model.model.layers[0].self_attn.kv_b_proj
        with attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=0) as adapter:
            hook = linear.register_forward_hook(held)
            taken = adapter._family.layers[0].workspace

            class Asking:
                """The lock, which tells when it is asked for while it is held."""

                def __init__(self, lock: Any) -> None:
                    self.lock = lock

                def __enter__(self) -> None:
                    if self.lock.locked():
                        wanted.set()
                    self.lock.acquire()

                def __exit__(self, *_: Any) -> None:
                    self.lock.release()

            taken._lock = Asking(taken._lock)

            def run(i: int) -> None:
                got[i] = adapter.forward(steps[i], all_logits=True)

            first = threading.Thread(target=run, args=(0,), name="first")
            first.start()
            assert holding.wait(300)
            second = threading.Thread(target=run, args=(1,))
            second.start()
            for thread in (first, second):
                thread.join(300)
            hook.remove()
        assert wanted.is_set()
        for logits, want in zip(got, expected, strict=True):
            torch.testing.assert_close(logits, want, atol=LOGITS, rtol=0)

    def test_a_projection_that_runs_a_step_is_an_error_and_leaves_the_workspace_free(self) -> None:
        model = tiny_model("v3")
        cache = cache_for(model)
        tokens = random_tokens(9)
        with attach(model, cache, max_absorbed=0) as adapter:
            inner = cache.step((FakeSequence(), tokens))
            linear = model.model.layers[0].self_attn.kv_b_proj
            hook = linear.register_forward_hook(lambda *_: adapter.forward(inner))
            with pytest.raises(KVTierError, match="may not run a step"):
                adapter.forward(cache.step((FakeSequence(), tokens)))
            hook.remove()
            (logits,) = feed(adapter, cache, (FakeSequence(), tokens))
        torch.testing.assert_close(logits, full_logits(model, tokens), atol=LOGITS, rtol=0)


PAGE_BYTES = PAGE * 20 * 4 * 2  # 20 values in float32, 2 layers


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.DISK])
def test_context_from_another_tier(tier: Tier, tmp_path: Path) -> None:
    """AT-2.9: the same bits as with a context that never left the device, over eight chunks."""
    model = tiny_model("v3")
    prompt = random_tokens(70)
    context = 64
    config = CacheConfig(
        gpu_bytes=40 * PAGE_BYTES,
        cpu_bytes=64 * 4096,
        disk_bytes="64MiB",
        disk_path=tmp_path,
        eviction="lru",
    )
    layout = layout_for(model.config, page_tokens=PAGE, dtype="float32")
    with (
        Cache(layout, config, model="tiny", device="cpu") as cache,
        attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=0) as adapter,
    ):

        def suffix() -> tuple[torch.Tensor, dict[Tier, int]]:
            with cache.lease(prompt, max_reuse=context) as lease:
                lease.ready.result(300)
                assert lease.num_tokens == context
                with cache.step([(lease, prompt[context:])]) as step:
                    return adapter.forward(step, all_logits=True), {
                        t: n for t, n in lease.restored.items() if n
                    }

        with cache.lease(prompt) as lease:
            lease.ready.result(300)
            with cache.step([(lease, prompt[:context])]) as step:
                adapter.forward(step)
        cache.flush().result(300)
        here, restored = suffix()
        assert restored == {Tier.GPU: context}
        cache.flush().result(300)
        for each in (Tier.GPU, Tier.CPU)[: 1 if tier is Tier.CPU else 2]:
            cache.evict(each, 1000)
        poison(cache)
        there, restored = suffix()
        assert restored == {tier: context}
        assert torch.equal(here, there)
        torch.testing.assert_close(there, full_logits(model, prompt)[context:], atol=LOGITS, rtol=0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """A device that restores one layer at a time, each when it is told to."""
    device = LateDevice()
    monkeypatch.setattr(transfer, "EARLY_BYTES", 1)
    monkeypatch.setattr(records, "LAYERS_BYTES", 1)
    monkeypatch.setattr(records, "FIRST_LAYERS_BYTES", 1)
    monkeypatch.setattr(transfer, "streams_for", lambda _: device)
    monkeypatch.setattr(records, "unpack_pages", device.unpack)
    yield device
    device.stop()


def test_a_layer_waits_for_its_own_pages_only(late: LateDevice) -> None:
    """AT-2.9: while a layer's pages are on their way the layers before it have run, and it has not;
    nothing is read before it has come."""
    model = tiny_model("v3", num_hidden_layers=4)
    prompt, context = random_tokens(70), 64
    layout = layout_for(model.config, page_tokens=PAGE, dtype="float32")
    config = CacheConfig(gpu_bytes=40 * PAGE_BYTES * 2, cpu_bytes=64 * 8192, eviction="lru")
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_hook(lambda *_, i=index: ended.put(i))
    with (
        Cache(layout, config, model="tiny", device="cpu") as cache,
        attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=0) as adapter,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            with cache.lease(prompt) as lease:
                lease.ready.result(300)
                with cache.step([(lease, prompt[:context])]) as step:
                    adapter.forward(step)
            cache.flush().result(300)
            cache.evict(Tier.GPU, 1000)
            poison(cache)
            while not ended.empty():
                ended.get()
            with cache.lease(prompt, max_reuse=context) as lease:
                lease.ready.result(300)  # with no page on the device yet
                assert lease.restored[Tier.CPU] == context
                with cache.step([(lease, prompt[context:])]) as step:
                    logits = pool.submit(adapter.forward, step, all_logits=True)
                    for index in range(4):
                        late.let(1)
                        assert ended.get(timeout=300) == index
                        time.sleep(0.05)  # a layer that did not wait would be over by then
                        assert index == 3 or (ended.empty() and not logits.done())
                    torch.testing.assert_close(
                        logits.result(300),
                        full_logits(model, prompt)[context:],
                        atol=LOGITS,
                        rtol=0,
                    )
        finally:
            late.let_all()


def poison(cache: Cache) -> None:
    """Fill every row of the device pool with NaN, while nothing lies there."""
    with cache.lease([1]) as lease:
        lease.ready.result(300)
        with cache.step([(lease, [1])]) as step:
            device = step.to_device()
            for layer in cache.layout.components[0].layers:
                device.layer(layer).rows("latent").fill_(torch.nan)
            step.accept(lease, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_take_turns() -> None:
    """A step on another stream projects into the workspace only when the one before has read it."""
    model = tiny_model("v3")
    streams = [random_tokens(30, seed) for seed in (1, 2)]
    expected = [full_logits(model, stream) for stream in streams]
    model.cuda()
    layout = layout_for(model.config, page_tokens=PAGE, dtype="float32")
    slow = True

    def dawdle(*_: Any) -> None:
        if slow:
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]

    model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(dawdle)
    with (
        Cache(layout, CacheConfig(gpu_bytes="1MiB"), model="tiny", device="cuda") as cache,
        attach(model, cache, workspace_bytes=TWO_PAGES, max_absorbed=0) as adapter,
        cache.lease([]) as first,
        cache.lease([]) as second,
    ):
        got = []
        for lease, tokens in ((first, streams[0]), (second, streams[1])):
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                with cache.step([(lease, tokens)]) as step:
                    got.append(adapter.forward(step, all_logits=True))
            slow = False
        torch.cuda.synchronize()
    for logits, want in zip(got, expected, strict=True):
        torch.testing.assert_close(logits.cpu(), want, atol=5e-5, rtol=0)
