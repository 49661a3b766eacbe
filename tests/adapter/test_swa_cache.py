"""Windows as tails: checkpoints in every tier, pages freed while decoding, tiny pools, graphs.

A hit resumes only where a checkpoint holds the rows that the next token's window reaches.
"""

from collections.abc import Iterator
from functools import cache as memo
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier import Cache, LayoutMismatch, OutOfPages, Sparse, Tier
from kvtier.kernels import PagedBatch, window_slots
from kvtier_deepseek import attach
from kvtier_deepseek.metadata import validate_tail_step
from tests.adapter.models import random_tokens
from tests.adapter.swa_kit import (
    PAGE,
    cut,
    every_boundary_of_every_tier,
    expected,
    feed,
    near,
    open_cache,
    poison_free,
    resume,
    run,
    swa_model,
)
from tests.adapter.test_v4_metadata import copied
from tests.device.byte_model import DeviceModel

LENGTH = 45


@memo
def wanted(window: int, tokens: tuple[int, ...]) -> Tensor:
    return expected(swa_model(window), tokens)


@pytest.mark.parametrize("window", [1, 2, 6, PAGE, PAGE + 1, 20, 100])
def test_resume_from_every_boundary_of_every_tier(window: int, tmp_path: Path) -> None:
    """B5, D3: any window; near the start of a sequence it is longer than what there is."""
    model, tokens = swa_model(window), random_tokens(LENGTH)
    opened = partial(open_cache, model, tmp_path, gpu=60, cpu=150)
    every_boundary_of_every_tier(model, opened, tokens, wanted(window, tuple(tokens)))


@pytest.mark.parametrize("window", [1, 6, 20])
def test_resume_after_decoding(window: int) -> None:
    """A conversation goes on from the last page end of its answer."""
    model, tokens = swa_model(window), random_tokens(60)
    want = expected(model, tokens)
    with open_cache(model, cpu=60) as cache, attach(model, cache) as adapter:
        with resume(cache, adapter, tokens[:20], 0, 20, want[:20]) as lease:
            near(run(cache, adapter, lease, tokens[:41], [1] * 21), want[20:41])
        with resume(cache, adapter, tokens, 40, 11, want) as lease:
            assert lease.restored[Tier.GPU] == 40


def test_without_a_checkpoint_there_is_no_hit() -> None:
    """Pages of the full layers are known further than a lease can go on from."""
    model, tokens = swa_model(6), random_tokens(LENGTH)
    policy = Sparse(every_pages=3)
    with (
        open_cache(model, cpu=60, checkpoints=policy) as cache,
        attach(model, cache) as adapter,
    ):
        resume(cache, adapter, tokens, 0, LENGTH, wanted(6, tuple(tokens))).release()
        cache.flush().result(timeout=300)
        found = cache.match(tokens)
        assert (found.tokens, found.history_tokens) == (40, 40)
        shorter = cache.match([*tokens[:33], 1, 2])
        assert (shorter.tokens, shorter.history_tokens) == (32, 32)
        cut_short = cache.match([*tokens[:20], 1, 2])
        assert (cut_short.tokens, cut_short.history_tokens) == (0, 16)
        with cache.lease([*tokens[:20], 1, 2]) as lease:
            assert lease.ready.result() == 0


class TestWindowPages:
    """AT-3.9"""

    @pytest.mark.parametrize("window", [1, 3, 6, PAGE + 1, 20])
    def test_decoding_holds_no_more_than_it_reads(self, window: int) -> None:
        model, tokens = swa_model(window), random_tokens(80)
        with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
            core, size = cache._core, cache.layout.windows[0].slots_per_page
            most = (window - 1) // size + 2
            used: set[int] = set()
            want = expected(model, tokens)
            for t, token in enumerate(tokens):
                (logits,) = feed(cache, adapter, (lease, [token]))
                near(logits[0], want[t])
                table = core.window_tables[lease._record.row]
                held = table[table >= 0].tolist()
                assert len(held) <= most
                # Those that the next token reaches are held.
                first = max(0, t + 2 - window) // size
                assert (table[first : t // size + 1] >= 0).all()
                used |= set(held)
            assert core.tails.windows.free > 0
            cache.check()

    def test_freed_pages_go_to_another_request(self) -> None:
        model = swa_model(6)
        streams = [random_tokens(70, seed) for seed in (1, 2)]
        wants = [expected(model, s) for s in streams]
        with open_cache(model, max_leases=2) as cache, attach(model, cache) as adapter:
            core = cache._core
            with cache.lease([]) as a, cache.lease([]) as b:
                owners: dict[int, set[int]] = {}
                for t in range(70):
                    got = feed(cache, adapter, *((x, [s[t]]) for x, s in zip((a, b), streams)))  # noqa: B905
                    for logits, want, lease in zip(got, wants, (a, b), strict=True):
                        near(logits[0], want[t])
                        for page in core.window_tables[lease._record.row].tolist():
                            owners.setdefault(page, set()).add(id(lease))
                assert any(len(who) == 2 for page, who in owners.items() if page >= 0)

    @pytest.mark.parametrize("window", [1, 6, 20])
    def test_a_chunk_keeps_every_page_until_it_is_committed(self, window: int) -> None:
        """Its first token reads the window before it, whatever its last one does."""
        model, tokens = swa_model(window), random_tokens(70)
        with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
            feed(cache, adapter, (lease, tokens[:25]))
            size = cache.layout.windows[0].slots_per_page
            with cache.step([(lease, tokens[25:70])]) as step:
                poison_free(cache)
                first = max(0, 25 - window + 1) // size
                assert (step.window_table[0, first : 69 // size + 1] >= 0).all()
                logits = adapter.forward(step, all_logits=True)
            near(logits, expected(model, tokens)[25:])
            table = cache._core.window_tables[lease._record.row]
            assert (table[: max(0, 71 - cache.layout.window_kept) // size] == -1).all()

    def test_rejected_drafts_keep_what_is_read_again(self) -> None:
        """AT-6.5: a step of many drafts none of which is accepted, across a page end."""
        model, tokens = swa_model(3), random_tokens(40)
        want = expected(model, tokens)
        with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
            feed(cache, adapter, (lease, tokens[:14]))
            for accepted in (0, 1, 0, 7, 0, 12):
                at = lease.num_tokens
                wrong = [(t + 1) % 97 for t in tokens[at + accepted : at + 13]]
                with cache.step([(lease, tokens[at : at + accepted] + wrong)]) as step:
                    logits = adapter.forward(step, all_logits=True)
                    step.accept(lease, accepted)
                poison_free(cache)
                near(logits[:accepted], want[at : at + accepted])
            assert lease.num_tokens == 34

    def test_a_pool_that_is_too_small_says_so(self) -> None:
        """Nothing is changed, and the same request goes on in smaller chunks."""
        model, tokens = swa_model(2), random_tokens(50)
        with open_cache(model, gpu=900) as cache, attach(model, cache) as adapter:
            with cache.lease([]) as lease:
                free = cache._core.tails.windows.free
                with pytest.raises(OutOfPages, match="window pages"):
                    cache.step([(lease, [1] * (free + 1))]).__enter__()
                assert cache._core.tails.windows.free == free
                near(run(cache, adapter, lease, tokens, [30, 20]), expected(model, tokens))


def test_tiny_pools(tmp_path: Path) -> None:
    """Four conversations through a device of little more than one, and a host of two: whatever
    mix of tiers a turn's prefix came from, its logits are those of a pass without a cache."""
    model = swa_model(6)
    prompts = [random_tokens(30, seed) for seed in range(4)]
    seen = dict.fromkeys(Tier, 0)
    with (
        open_cache(model, tmp_path, gpu=8, cpu=24, max_leases=2) as cache,
        attach(model, cache) as adapter,
    ):
        for _ in range(3):
            for i, prompt in enumerate(prompts):
                with cache.lease(prompt) as lease:
                    done = lease.ready.result(timeout=300)
                    poison_free(cache)
                    got = run(cache, adapter, lease, prompt, cut(len(prompt), 11, done))
                    near(got, expected(model, prompt)[done:])
                    for tier, n in lease.restored.items():
                        seen[tier] += n
                prompts[i] = [*prompt, *random_tokens(5, i)]
                cache.flush().result(timeout=300)
                cache.check()
    assert seen[Tier.CPU] > 0 and seen[Tier.DISK] > 0, seen


def test_forks_and_pauses() -> None:
    model, trunk = swa_model(11), random_tokens(21, 1)
    tails = [random_tokens(9, 2), random_tokens(9, 3)]
    with open_cache(model, cpu=60) as cache, attach(model, cache) as adapter:
        one = cache.lease([])
        feed(cache, adapter, (one, trunk))
        one.pause().result(timeout=300)
        poison_free(cache)
        assert one.resume().result(timeout=300) == 21
        with one, one.fork() as two:
            two.ready.result(timeout=300)
            got = feed(cache, adapter, (one, tails[0]), (two, tails[1]))
            for logits, tail in zip(got, tails, strict=True):
                near(logits, expected(model, trunk + tail)[21:])


def test_checkpoints_copied_behind_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the replay of a graph, in which nothing can be copied; leases resume from them."""
    model = swa_model(6)
    streams = [random_tokens(44, seed) for seed in (1, 2)]
    wants = [expected(model, s) for s in streams]
    with open_cache(model, cpu=60) as cache, attach(model, cache) as adapter:
        family = adapter._family
        make_run = family.make_run

        def uncaptured(step: Any, device: Any, bound: int | None) -> Any:
            assert make_run(step, device, 64).captures is None
            run = make_run(step, device, None)
            run.captures = None
            return run

        leases = [cache.lease([]) for _ in streams]
        feed(cache, adapter, (leases[0], streams[0][:13]), (leases[1], streams[1][:3]))
        monkeypatch.setattr(type(family), "make_run", staticmethod(uncaptured))
        while leases[0].num_tokens < 44:
            work = [(x, [s[x.num_tokens]]) for x, s in zip(leases, streams, strict=True)]
            with cache.step(work) as step:
                logits = adapter(step)
                family.capture(step, step.to_device(pad_to=4))
            poison_free(cache)
            for got, want, lease in zip(logits, wants, leases, strict=True):
                near(got, want[lease.num_tokens - 1])
        monkeypatch.undo()
        for lease in leases:
            lease.release()
        for i, start in ((0, 40), (0, 24), (1, 32)):
            resume(cache, adapter, streams[i], start, 5, wants[i]).release()


def test_what_a_captured_step_would_run() -> None:
    model = swa_model(6)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        names = set(adapter._family.decoding)
        assert names == {"write_rows", "mla_absorbed", "write_window", "mla_sparse"}


# ------------------------------------------------------------------ hand-made metadata


@pytest.fixture
def made() -> Iterator[Any]:
    """(layout, step) of two requests: 10 new tokens after 20, and 3 after none; windows of 6."""
    with open_cache(swa_model(6)) as cache, cache.lease([]) as one, cache.lease([]) as two:
        with cache.step([(one, random_tokens(20))]):
            pass
        with cache.step([(one, random_tokens(10)), (two, [1, 2, 3])]) as step:
            yield cache.layout, step


def test_hand_made_steps_are_checked(made: Any) -> None:
    layout, step = made
    assert layout.windows[0].slots_per_page == 4
    validate_tail_step(step, layout, num_pages=40, num_windows=2000)
    without = copied(step)
    without.state_slots = np.empty(0, np.int32)  # there are no states
    validate_tail_step(without, layout)
    for name, index, value, says in (
        ("window_latent", 3, 7, r"row 0: slot_mapping\['window_latent'\] puts position 23"),
        ("window_table", (0, 3), -1, r"row 0: window_table lacks pages of 3..7"),
        ("window_table", (1, 0), -1, r"row 1: window_table lacks pages of 0..0"),
        ("window_table", (0, 7), 99999, "row 0: window_table names page 99999"),
        ("block_table", (0, 1), -1, "row 0: block_table needs 4 pages"),
    ):
        wrong = copied(step)
        (wrong.slot_mapping if name in wrong.slot_mapping else vars(wrong))[name][index] = value
        with pytest.raises(LayoutMismatch, match=says):
            validate_tail_step(wrong, layout, num_windows=2000)


def test_the_adapter_checks_steps_that_kvtier_did_not_make() -> None:
    model = swa_model(6)
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        with cache.step([(lease, [1, 2, 3, 4])]) as step:
            mine = copied(step)
            mine.captures, mine.to_device = (), step.to_device
            native = adapter(step)
            assert torch.equal(adapter(mine), native)
            mine.window_table = np.array([[-1]], np.int32)
            with pytest.raises(LayoutMismatch, match="window_table lacks pages"):
                adapter(mine)


def test_lists_of_real_steps(made: Any) -> None:
    """AT-3.3 on a step as the cache makes it, padding rows behind."""
    layout, step = made
    device = step.to_device(pad_to=4)
    batch = PagedBatch(
        query_lens=(10, 3, 1, 1),
        kv_lens=(30, 3, 0, 0),
        block_table=device.block_table,
        cu_seqlens_q=device.cu_seqlens_q,
        kv_lens_device=device.kv_lens,
        page_tokens=layout.page_tokens,
    )
    got = window_slots(batch, device.window_table, window=6, slots_per_page=4)
    own = step.slot_mapping["window_latent"]
    for i, position in enumerate(step.positions.tolist()):
        seen = min(position + 1, 6)
        assert got[i, seen - 1] == own[i]
        assert (got[i, :seen] >= 0).all() and (got[i, seen:] == -1).all()
    assert (got[13:] == -1).all()


def test_bytes_of_both_kinds_are_those_of_their_tokens(tmp_path: Path) -> None:
    """The byte model: packed rows in every tier, whatever was computed beside them."""
    from kvtier.layouts import mla
    from tests.device.byte_model import prompt, sized

    for window in (1, 5, 17):
        layout = mla(
            layers=3,
            latent_dim=512,
            rope_dim=64,
            page_tokens=8,
            window_layers=(1,),
            window=window,
        )
        config = sized(layout, gpu=30, cpu=60, disk_path=tmp_path / str(window), disk_bytes="1GiB")
        tokens = prompt(59)
        with Cache(layout, config, model="bytes", device="cpu") as cache:
            model = DeviceModel(cache)
            model.pool.poison_all()
            with cache.lease(tokens) as lease:
                model.prefill(lease, tokens, chunk=5)
                for i in range(10):
                    model.feed(lease, [i], rejected=i % 4)
                    model.poison()
                    model.check(lease)
            cache.flush().result(timeout=300)
            for tiers in ((), (Tier.GPU,), (Tier.GPU, Tier.CPU)):
                model.evict(*tiers)
                with cache.lease(tokens) as lease:
                    assert lease.ready.result(timeout=300) == 56
                    assert model.check(lease) == 2 * 56 + min(window - 1, 56)
                cache.flush().result(timeout=300)
            cache.check()
