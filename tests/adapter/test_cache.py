"""The adapter on the real cache: steps, restores from every tier, restart; oracle: plain HF."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import Cache, CacheConfig, ConfigError, Lease, LeaseError, Tier, TokenError
from kvtier_deepseek import Adapter, attach, generate, layout_for, validate_step
from tests.adapter.models import VARIANTS, full_logits, hf_greedy, random_tokens, tiny_model

PAGE = 4
LOGITS = 5e-6
PAGE_BYTES = PAGE * 20 * 4 * 2  # 20 values in float32, 2 layers


def open_cache(
    model: Any, path: Path | None = None, *, gpu_pages: int = 200, cpu_pages: int = 0
) -> Cache:
    config = CacheConfig(
        gpu_bytes=gpu_pages * PAGE_BYTES,
        cpu_bytes=cpu_pages * 4096,
        disk_bytes="64MiB" if path else 0,
        disk_path=path,
        eviction="lru",
    )
    layout = layout_for(model.config, page_tokens=PAGE, dtype="float32")
    return Cache(layout, config, model="tiny", device="cpu")


def poison(cache: Cache) -> None:
    """Fill every row of every layer with NaN, before anything is cached."""
    with cache.lease([1]) as lease:
        lease.ready.result()
        with cache.step([(lease, [1])]) as step:
            device = step.to_device()
            for layer in cache.layout.components[0].layers:
                device.layer(layer).rows("latent").fill_(torch.nan)
            step.accept(lease, 0)


def feed(cache: Cache, adapter: Adapter, lease: Lease, tokens: list[int]) -> torch.Tensor:
    with cache.step([(lease, tokens)]) as step:
        return adapter.forward(step, all_logits=True)


def test_only_the_step_itself_is_taken() -> None:
    """Its device arrays, or anything else, are refused by name, and the step goes on from there."""
    model = tiny_model("v3")
    tokens = random_tokens(9)
    with (
        open_cache(model) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as lease,
        cache.step([(lease, tokens)]) as step,
    ):
        device: Any = step.to_device()
        for call in (adapter, lambda given: adapter.forward(given, all_logits=True)):
            with pytest.raises(
                ConfigError, match=r"given step.to_device\(\); pass the step itself"
            ):
                call(device)
            for other in (lease, torch.tensor(tokens), None):
                with pytest.raises(ConfigError, match=r"takes a kvtier\.Step"):
                    call(other)
        graph = adapter.capture_decode(batch=1, pages=8)
        with pytest.raises(ConfigError, match=r"pass the step itself"):
            graph.replay(device)
        torch.testing.assert_close(
            adapter(step), full_logits(model, tokens)[-1:], atol=LOGITS, rtol=0
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_interleaved_requests_and_their_tables(variant: str) -> None:
    """AT-4.2, 4.4, 4.7, 4.13: chunks and decode of two requests, packed and apart; every slot of a
    request is written once, by the step that the cache says, over a pool of NaN."""
    model = tiny_model(variant, yarn=True)
    streams = [random_tokens(53, 1), random_tokens(38, 2)]
    expected = [full_logits(model, stream) for stream in streams]
    with open_cache(model) as cache, attach(model, cache, max_absorbed=3) as adapter:
        poison(cache)
        with cache.lease([], label="a") as a, cache.lease([], label="b") as b:
            slots: dict[Lease, list[int]] = {a: [], b: []}
            for counts in [(9, 0), (5, 17), (1, 1), (1, 2), (16, 1), (PAGE, 7), (2, 2), (0, 8)]:
                plan = [(each, n) for each, n in zip((a, b), counts, strict=True) if n]
                work = [
                    (each, streams[each is b][each.num_tokens : each.num_tokens + n])
                    for each, n in plan
                ]
                with cache.step(work) as step:
                    validate_step(step, page_tokens=PAGE)
                    logits = adapter.forward(step, all_logits=True)
                    for row, (lease, n) in enumerate(plan):
                        at = int(step.context_lens[row])
                        mine = slice(step.cu_seqlens_q[row], step.cu_seqlens_q[row + 1])
                        torch.testing.assert_close(
                            logits[mine],
                            expected[lease is b][at : at + n],
                            atol=LOGITS,
                            rtol=0,
                        )
                        slots[lease] += step.slot_mapping["latent"][mine].tolist()
            for lease, written in slots.items():
                table = lease.slot_mapping(0, lease.num_tokens)["latent"]
                assert written == table.tolist()
                assert len(set(written)) == len(written)


@pytest.mark.parametrize("variant", ["v2-lite", "v3"])
def test_every_tier_restores_what_was_computed(variant: str, tmp_path: Path) -> None:
    """Three conversations through a device of one and a half, a host of two: each turn's tokens
    equal HF's, whatever mix of tiers its prefix came from; then again after a restart."""
    model = tiny_model(variant)
    prompts = [random_tokens(45, seed) for seed in (1, 2, 3)]
    seen = dict.fromkeys((Tier.GPU, Tier.CPU, Tier.DISK), 0)
    sizes = {"gpu_pages": 28, "cpu_pages": 36}
    with open_cache(model, tmp_path, **sizes) as cache, attach(model, cache) as adapter:
        poison(cache)
        for _ in range(3):
            for i, prompt in enumerate(prompts):
                got = generate(adapter, cache, prompt, 4, chunk=13)
                assert list(got.tokens) == hf_greedy(model, prompt, 4)
                assert sum(got.restored.values()) + got.computed == len(prompt)
                for tier, n in got.restored.items():
                    seen[tier] += n
                prompts[i] = [*prompt, *got.tokens, *random_tokens(3, i)]
                cache.flush().result()
                cache.check()
    assert min(seen.values()) > 0, seen
    with open_cache(model, tmp_path, **sizes) as cache, attach(model, cache) as adapter:
        poison(cache)
        for prompt in prompts:
            got = generate(adapter, cache, prompt, 4)
            assert list(got.tokens) == hf_greedy(model, prompt, 4)
            assert got.restored[Tier.DISK] > 0
            assert got.restored[Tier.GPU] == 0


def test_a_graph_without_a_gpu_is_the_model_itself() -> None:
    model = tiny_model("v3")
    tokens = random_tokens(6)
    expected = full_logits(model, tokens)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        graph = adapter.capture_decode(batch=2, pages=8)  # more rows and pages than there are
        with cache.lease(tokens) as lease:
            for call, start in ((graph.replay, 4), (graph.eager, 5)):
                feed(cache, adapter, lease, tokens[lease.num_tokens : start])
                with cache.step([(lease, tokens[start : start + 1])]) as step:
                    got = call(step)
                torch.testing.assert_close(got[0], expected[start], atol=LOGITS, rtol=0)


def test_rejected_tokens_leave_no_trace() -> None:
    """Four tokens are fed, some are accepted, over and over, across page ends."""
    model = tiny_model("v3")
    tokens = random_tokens(40)
    expected = full_logits(model, tokens)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        poison(cache)
        with cache.lease([]) as lease:
            for accepted in [4, 0, 1, 3, 2, 4, 1, 0, 3, 3, 1]:
                at = lease.num_tokens
                right = tokens[at : at + accepted]
                wrong = [(t + 1) % 97 for t in tokens[at + accepted : at + 4]]
                with cache.step([(lease, right + wrong)]) as step:
                    logits = adapter.forward(step, all_logits=True)
                    step.accept(lease, accepted)
                torch.testing.assert_close(
                    logits[:accepted], expected[at : at + accepted], atol=LOGITS, rtol=0
                )
            assert lease.num_tokens == 22
            assert lease.tokens().tolist() == tokens[:22]


def test_an_exception_in_a_step_commits_nothing() -> None:
    model = tiny_model("v3")
    tokens = random_tokens(11)
    expected = full_logits(model, tokens)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        with cache.lease(tokens) as lease:
            lease.ready.result()
            feed(cache, adapter, lease, tokens[:6])
            hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                feed(cache, adapter, lease, tokens[6:])
            hook.remove()
            assert lease.num_tokens == 6
            logits = feed(cache, adapter, lease, tokens[6:])
        torch.testing.assert_close(logits, expected[6:], atol=LOGITS, rtol=0)


def test_a_fork_goes_its_own_way() -> None:
    model = tiny_model("v3")
    trunk, left, right = random_tokens(10, 1), random_tokens(5, 2), random_tokens(5, 3)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        poison(cache)
        with cache.lease(trunk) as one:
            one.ready.result()
            feed(cache, adapter, one, trunk)
            with one.fork() as two:
                two.ready.result()
                with cache.step([(one, left), (two, right)]) as step:
                    logits = adapter.forward(step, all_logits=True)
    for got, branch in ((logits[:5], left), (logits[5:], right)):
        want = full_logits(model, trunk + branch)[10:]
        torch.testing.assert_close(got, want, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("pad_to", [2, 3, 8])
def test_padded_batches(pad_to: int) -> None:
    model = tiny_model("v3")
    streams = [random_tokens(9, 1), random_tokens(14, 2)]
    with (
        open_cache(model) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as a,
        cache.lease([]) as b,
    ):
        feed(cache, adapter, a, streams[0][:-1])
        feed(cache, adapter, b, streams[1][:-1])
        with cache.step([(a, streams[0][-1:]), (b, streams[1][-1:])]) as step:
            logits = adapter.forward(step, pad_to=pad_to)
    assert logits.shape == (2, 97)
    for got, stream in zip(logits, streams, strict=True):
        torch.testing.assert_close(got, full_logits(model, stream)[-1], atol=LOGITS, rtol=0)


def test_an_empty_step() -> None:
    model = tiny_model("v3")
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.step([]) as step:
        assert adapter(step).shape == (0, 97)


def test_real_steps_pass_the_check_of_hand_made_ones() -> None:
    """Every page boundary, alone and packed."""
    model = tiny_model("v3")
    with open_cache(model) as cache:
        for length in (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE):
            with cache.lease([]) as lease, cache.lease([]) as other:
                with cache.step([(lease, random_tokens(length)), (other, [1])]) as step:
                    validate_step(step, page_tokens=PAGE)
                with cache.step([(other, [2, 3]), (lease, [4])]) as step:
                    validate_step(step, page_tokens=PAGE)
                    assert step.context_lens.tolist() == [1, length]


class TestGenerate:
    @pytest.mark.parametrize("chunk", [1, 3, PAGE, 7, 1000])
    def test_equals_hf_and_counts_add_up(self, chunk: int) -> None:
        model = tiny_model("v3")
        prompt = random_tokens(18)
        with open_cache(model) as cache, attach(model, cache) as adapter:
            for turn in range(2):
                progress: list[int] = []
                got = generate(adapter, cache, prompt, 6, chunk=chunk, progress=progress.append)
                assert list(got.tokens) == hf_greedy(model, prompt, 6)
                assert got.prompt_tokens == 18
                assert got.restored[Tier.GPU] == (16 if turn else 0)
                assert got.computed == (2 if turn else 18)
                assert progress[0] == 18 - got.computed
                assert progress[-1] == 18 + 5  # the last token is not fed
                assert progress == sorted(progress)
                assert got.seconds >= 0
            assert not cache.leases()

    def test_stops_after_a_stop_token(self) -> None:
        model = tiny_model("v3")
        prompt = random_tokens(9)
        full = hf_greedy(model, prompt, 8)
        end = full[3]
        with open_cache(model) as cache, attach(model, cache) as adapter:
            got = generate(adapter, cache, prompt, 8, stop={end})
        assert list(got.tokens) == full[: full.index(end) + 1]

    @pytest.mark.parametrize(
        ("prompt", "max_new", "chunk", "error"),
        [
            ([], 4, 8, TokenError),
            ([1, -2], 4, 8, TokenError),
            ([1.5], 4, 8, TokenError),
            ([1, 97], 4, 8, TokenError),  # not in the vocabulary
            ([1], 0, 8, ConfigError),
            ([1], 1, 0, ConfigError),
        ],
    )
    def test_bad_arguments(
        self, prompt: Any, max_new: int, chunk: int, error: type[Exception]
    ) -> None:
        model = tiny_model("v3")
        with open_cache(model) as cache, attach(model, cache) as adapter:
            with pytest.raises(error):
                generate(adapter, cache, prompt, max_new, chunk=chunk)
            assert not cache.leases()

    def test_a_failing_model_leaves_no_lease(self) -> None:
        model = tiny_model("v3")
        with open_cache(model) as cache, attach(model, cache) as adapter:
            model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                generate(adapter, cache, [1, 2, 3], 2)
            assert not cache.leases()
            cache.check()

    def test_array_prompts(self) -> None:
        model = tiny_model("v3")
        prompt = random_tokens(7)
        with open_cache(model) as cache, attach(model, cache) as adapter:
            got = generate(adapter, cache, np.array(prompt, np.int64), 3)
        assert list(got.tokens) == hf_greedy(model, prompt, 3)


def test_a_released_lease_cannot_be_stepped() -> None:
    model = tiny_model("v3")
    with open_cache(model) as cache, attach(model, cache) as adapter:
        lease = cache.lease([1, 2])
        lease.release()
        with pytest.raises(LeaseError):
            feed(cache, adapter, lease, [1])
