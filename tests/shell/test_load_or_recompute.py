"""Load or recompute (D8): whatever the disk does, a prompt takes at most 5 % longer than without.

A world with a clock of its own: the disk serves one operation after the other at a speed that may
change or end, the host is quick, and the model computes tokens at a rate.  The cache sees only that
operations end, and what its clock says.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier
from kvtier import RestorePolicy, Tier
from kvtier.assembly import geometry_of
from kvtier.core.leases import LeaseRecord
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Kind, Op, OpKind
from kvtier.data import transfer
from kvtier.data.transfer import DeviceTransfer
from kvtier.deadlines import Alarm
from kvtier.layouts import Layout
from kvtier.seams import Read
from kvtier.stores.lmdb_store import LmdbStore
from kvtier.testing import ManualTransfer, MemoryStore
from tests.shell.kit import LAYOUT, PAGE, config, feed, tailed

RATE = 1000.0
"""Tokens the model computes in a second."""
PAGES = 125
"""Of a prompt; half a second to compute."""
HOST = 1e5
"""Frames a second from the host."""
Speed = Callable[[float], float]
"""Frames a second of the disk, at a time."""


class World:
    """Time passes here and nowhere else."""

    def __init__(self, layout: Layout = LAYOUT, speed: Speed = lambda now: inf) -> None:
        self.now = 0.0
        self.alarm = inf
        self.speed = speed
        self.layout = layout
        self.writes_hang = False
        self.transfer = ManualTransfer()
        self.transfer.heard_of = self.heard_of  # type: ignore[attr-defined]
        self.disk_done: dict[int, float] = {}
        self.disk_free = self.host_free = 0.0
        self.cache = kvtier.Cache(
            layout,
            kvtier.CacheConfig(
                gpu_bytes=4 * PAGES * layout.page_bytes() + 100_000 * layout.has_tails,
                cpu_bytes=6 * PAGES * layout.frame_bytes(),
                max_leases=4,
            ),
            model="m",
            transfer=self.transfer,
            stores={Tier.DISK: MemoryStore()},
        )
        deadlines = self.cache._pump.deadlines
        deadlines.clock = lambda: self.now
        deadlines.alarm = self  # type: ignore[assignment]

    # What the cache calls

    def set(self, when: float) -> None:
        self.alarm = min(self.alarm, when)

    def stop(self) -> None:
        self.alarm = inf

    def heard_of(self, op_id: int) -> float:
        return self.now if self.speed(self.now) > 0 else -inf

    # What happens

    def frames(self, op: Op, tier: Tier) -> int:
        size = self.layout.checkpoint_frames()
        return sum(1 if p.kind is Kind.HISTORY else size for p in op.parts if p.source is tier)

    def ends(self, op: Op) -> float:
        """When an operation ends; fixed when it is first asked for."""
        if op.id not in self.disk_done:
            disk, host = self.frames(op, Tier.DISK), self.frames(op, Tier.CPU)
            if op.kind is not OpKind.RESTORE:
                hangs = self.writes_hang and op.kind in (OpKind.STORE, OpKind.DROP)
                self.disk_done[op.id] = inf if hangs else self.now
            elif disk:
                self.disk_free = at = self._served(max(self.now, self.disk_free), disk)
                self.disk_done[op.id] = at
            else:
                self.host_free = max(self.now, self.host_free) + host / HOST
                self.disk_done[op.id] = self.host_free
        return self.disk_done[op.id]

    def _served(self, start: float, frames: int) -> float:
        at, step = start, 0.001
        left = float(frames)
        if start == inf:
            return inf
        while left > 0:
            speed = self.speed(at)
            if speed == 0:
                return inf
            if speed * step >= left or speed == inf:
                return at + left / speed
            left -= speed * step
            at += step
            if at > start + 1e4:
                return inf
        return at

    def pass_time(self, until: float) -> None:
        """Let everything happen that happens until then."""
        while True:
            ops = [(self.ends(op), i, op) for i, op in enumerate(self.transfer.pending)]
            when, _, op = min(ops, default=(inf, 0, None))
            if self.alarm < when and self.alarm <= until:
                self.now, self.alarm = max(self.now, self.alarm), inf
                self.set(self.cache._pump.settle_late())
                continue
            if op is None or when > until:
                self.now = max(self.now, until) if until < inf else self.now
                return
            self.now = max(self.now, when)
            self.transfer.finish(op)

    def next_event(self) -> float:
        return min([self.alarm, *map(self.ends, self.transfer.pending)])

    def idle(self) -> None:
        """Until nothing more will happen (for what hangs there is no waiting)."""
        while (when := self.next_event()) < inf:
            self.pass_time(when)

    def ready(self, lease: kvtier.Lease) -> int:
        start = self.now
        while not lease.ready.done():
            when = self.next_event()
            assert when < start + 10_000, "the lease waits for ever"
            self.pass_time(when)
        return lease.ready.result()

    def compute(self, lease: kvtier.Lease, tokens: list[int]) -> None:
        """The rest of a prompt, in chunks."""
        while lease.num_tokens < len(tokens):
            chunk = tokens[lease.num_tokens :][:64]
            with self.cache.step([(lease, chunk)]):
                self.pass_time(self.now + len(chunk) / RATE)

    def request(self, tokens: list[int], restore: RestorePolicy) -> tuple[int, float]:
        """Tokens cached, and seconds to the first token."""
        start = self.now
        with self.cache.lease(tokens, restore=restore) as lease:
            cached = self.ready(lease)
            assert sum(lease.restored.values()) == cached
            self.compute(lease, tokens)
            took = self.now - start
        self.pass_time(self.now)
        self.cache.check()
        return cached, took

    def to_disk_only(self) -> None:
        self.pass_time(self.now)
        for tier in (Tier.GPU, Tier.CPU):
            self.cache.evict(tier, 1 << 20)
            self.pass_time(self.now)


@contextmanager
def world(layout: Layout = LAYOUT, speed: Speed = lambda now: inf) -> Iterator[World]:
    made = World(layout, speed)
    yield made
    made.speed, made.writes_hang = lambda now: inf, False
    for op in list(made.transfer.pending):
        made.disk_done.pop(op.id, None)
    made.disk_free = made.now
    made.idle()
    made.cache.check()
    made.cache.close()


def prompt_of(pages: int, seed: int = 0) -> list[int]:
    return [seed * 7919 + i for i in range(pages * PAGE)] + [1]


def seconds(tokens: list[int]) -> float:
    return len(tokens) / RATE


LAYOUTS = {"dense": LAYOUT, "tailed": tailed()}
WEIGHED = RestorePolicy(prefill_tokens_per_s=RATE)
PAGES_PER_S = RATE / PAGE
"""Pages that the model computes in a second."""


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("times", [0.01, 0.2, 0.8, 1.0, 1.3, 2, 5, 12, 30, 1000])
def test_a_steady_disk_of_any_speed(name: str, times: float) -> None:
    """As fast as computing, slower, or faster: never worse than without, and better if it can."""
    tokens = prompt_of(PAGES)
    with world(LAYOUTS[name], lambda now: times * PAGES_PER_S) as w:
        w.request(tokens, WEIGHED)
        took, cached = [], 0
        for _ in range(5):
            w.to_disk_only()
            cached, last = w.request(tokens, WEIGHED)
            took.append(last / seconds(tokens))
            w.idle()
            w.now += 2
        assert max(took) <= 1.05
        if times >= (2 if name == "dense" else 5):  # the first stage ends at a checkpoint
            assert cached == PAGES * PAGE
            assert took[-1] == pytest.approx(1 / times, rel=0.3, abs=0.02)
        stats = w.cache.stats()
        hits = sum(tier.hit_tokens for tier in stats.tiers.values())
        assert hits + stats.computed_tokens == stats.lookup_tokens
        assert stats.recomputed_tokens <= stats.computed_tokens
        assert stats.recomputed_tokens > 0 or times > 1
        assert stats.recomputed_tokens == 0 or times < 2 or name == "tailed"


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    times=st.sampled_from([0.5, 1.5, 3, 10, 40, 1000]),
    pages=st.integers(1, PAGES),
    then=st.sampled_from([0.0, 0.01, 0.1]),
    after=st.floats(0, 1.2),
    learned=st.integers(0, 3),
    more=st.integers(1, 3),
)
def test_a_disk_that_stalls(
    name: str, times: float, pages: int, then: float, after: float, learned: int, more: int
) -> None:
    """Within a load it becomes a hundred times slower, or serves nothing any more."""
    tokens = prompt_of(pages)
    allowed = 1.05 * seconds(tokens) + 1e-6
    with world(LAYOUTS[name], lambda now: times * PAGES_PER_S) as w:
        w.request(tokens, WEIGHED)
        for _ in range(learned):
            w.to_disk_only()
            assert w.request(tokens, WEIGHED)[1] <= allowed
            w.idle()
        w.to_disk_only()
        from_then = w.now + after * seconds(tokens) / times
        w.speed = lambda now: times * PAGES_PER_S * (then if now >= from_then else 1.0)
        for _ in range(more):
            assert w.request(tokens, WEIGHED)[1] <= allowed
            w.to_disk_only()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_disk_is_used_again_once_it_is_quick_again(name: str) -> None:
    tokens = prompt_of(PAGES)
    with world(LAYOUTS[name], lambda now: 100 * PAGES_PER_S) as w:
        w.request(tokens, WEIGHED)
        w.to_disk_only()
        assert w.request(tokens, WEIGHED)[0] > 0.85 * PAGES * PAGE
        w.speed = lambda now: 0.1 * PAGES_PER_S
        for _ in range(12):
            w.idle()
            w.to_disk_only()
            cached, took = w.request(tokens, WEIGHED)
            assert took <= 1.05 * seconds(tokens)
            w.now += 1.5
        assert cached == 0
        w.idle()
        w.speed = lambda now: 100 * PAGES_PER_S
        for _ in range(12):
            w.idle()
            w.to_disk_only()
            cached, took = w.request(tokens, WEIGHED)
            assert took <= 1.05 * seconds(tokens)
            w.now += 1.5
        assert cached > 0.85 * PAGES * PAGE
        assert took < 0.15 * seconds(tokens)


def test_a_read_that_hangs_holds_no_state_slot() -> None:
    """Every lease there may be is open, and one of them waits for a disk that serves nothing."""
    tokens = prompt_of(PAGES)
    with world(LAYOUTS["tailed"], lambda now: 100 * PAGES_PER_S) as w:
        for _ in range(2):
            w.request(tokens, WEIGHED)
            w.to_disk_only()
        others = [w.cache.lease([n], read=False) for n in range(3)]
        w.pass_time(w.now)
        w.speed = lambda now: 0.0
        for _ in range(2):
            start = w.now
            with w.cache.lease(tokens, restore=WEIGHED) as lease:
                assert w.ready(lease) == 0
                assert w.now - start <= 0.05 * seconds(tokens)
        assert w.cache.stats().recomputed_tokens > 2 * 0.85 * PAGES * PAGE
        for other in others:
            other.release()


# --------------------------------------------------------------------------- modes


def test_without_a_rate_all_is_loaded_however_long_it_takes() -> None:
    tokens = prompt_of(PAGES)
    with world(speed=lambda now: 1.0) as w:
        w.request(tokens, RestorePolicy())
        w.to_disk_only()
        cached, took = w.request(tokens, RestorePolicy())
        assert cached == PAGES * PAGE
        assert took == pytest.approx(PAGES, abs=0.1)
        assert w.cache.stats().recomputed_tokens == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_best_effort_waits_for_no_disk_and_fetches_for_the_next(name: str) -> None:
    tokens, policy = prompt_of(PAGES), RestorePolicy("best_effort")
    with world(LAYOUTS[name], lambda now: 50 * PAGES_PER_S) as w:
        w.request(tokens, policy)
        w.to_disk_only()
        with w.cache.lease(tokens, restore=policy) as lease:
            assert w.ready(lease) == 0
        assert w.cache.stats().recomputed_tokens > 0.8 * len(tokens)
        reads = [op for op in w.transfer.pending if op.kind is OpKind.RESTORE]
        assert all(part.target is Tier.CPU for op in reads for part in op.parts)
        w.idle()
        cached, took = w.request(tokens, policy)
        assert cached > 0.85 * PAGES * PAGE
        assert took < 0.15 * seconds(tokens)
        assert w.cache.stats().tiers[Tier.CPU].hit_tokens == cached


def test_best_effort_does_not_wait_for_what_another_lease_reads() -> None:
    tokens = prompt_of(PAGES)
    with world(speed=lambda now: 1.0) as w:
        w.request(tokens, WEIGHED)
        w.to_disk_only()
        with (
            w.cache.lease(tokens) as slow,
            w.cache.lease(tokens, restore=RestorePolicy("best_effort")) as lease,
        ):
            assert w.ready(lease) == 0
            assert not slow.ready.done()


@pytest.mark.parametrize("rate", [None, RATE])
def test_a_time_limit_settles_for_what_has_arrived(rate: float | None) -> None:
    tokens = prompt_of(PAGES)
    policy = RestorePolicy("timeout", timeout_s=0.05, prefill_tokens_per_s=rate)
    with world(speed=lambda now: 4 * PAGES_PER_S) as w:
        w.request(tokens, policy)
        w.to_disk_only()
        start = w.now
        with w.cache.lease(tokens, restore=policy) as lease:
            cached = w.ready(lease)
            assert w.now - start == pytest.approx(0.05, abs=0.001)
            assert cached == lease.restored[Tier.DISK]
            assert 0.05 * 4 * PAGES_PER_S - 4 <= cached / PAGE <= 0.05 * 4 * PAGES_PER_S
        w.idle()  # what was still under way has arrived meanwhile, for the next
        with w.cache.lease(tokens, restore=policy) as lease:
            assert w.ready(lease) == PAGES * PAGE


@pytest.mark.parametrize(
    ("policy", "tier"),
    [
        (RestorePolicy("timeout", timeout_s=0.02), Tier.GPU),
        (RestorePolicy("best_effort"), Tier.CPU),
    ],
)
def test_a_disk_that_hangs_does_not_take_page_after_page(policy: RestorePolicy, tier: Tier) -> None:
    """However many different prompts give up waiting for it."""
    prompts = [prompt_of(12, seed) for seed in range(40)]
    with world(speed=lambda now: 100 * PAGES_PER_S) as w:
        for tokens in prompts:
            w.request(tokens, RestorePolicy())
        w.to_disk_only()
        w.speed = lambda now: 0.0
        for tokens in prompts:
            with w.cache.lease(tokens, restore=policy) as lease:
                assert w.ready(lease) == 0
            w.now += 0.3
        assert 0 < w.cache.stats().tiers[tier].in_flight <= 60
        w.speed = lambda now: 100 * PAGES_PER_S
        for op in list(w.transfer.pending):
            w.disk_done.pop(op.id, None)
        w.disk_free = w.now
        w.idle()
        for _ in range(3):  # those that hung are forgotten soon
            w.now += 2
            w.request(prompts[-1], RestorePolicy("timeout", timeout_s=0.2))
            w.idle()
            w.to_disk_only()
        assert w.request(prompts[-2], RestorePolicy("timeout", timeout_s=0.2))[0] == 12 * PAGE


def test_what_the_host_brings_is_waited_for() -> None:
    tokens = prompt_of(PAGES)
    with world(speed=lambda now: 0.0) as w:
        w.request(tokens, WEIGHED)
        w.pass_time(w.now)
        w.cache.evict(Tier.GPU, 1 << 20)
        with w.cache.lease(tokens, restore=RestorePolicy("timeout", timeout_s=0.0)) as lease:
            w.cache._pump.settle_late()
            assert w.ready(lease) == PAGES * PAGE
            assert lease.restored[Tier.CPU] == PAGES * PAGE


def test_who_still_has_time_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm concerns one lease: the pages of all others are not gone through once more, with
    the lock held."""
    tokens, looks = prompt_of(PAGES), []
    look = CacheCore.at_hand

    def noted(core: CacheCore, record: LeaseRecord) -> int:
        looks.append(record.id)
        return look(core, record)

    with world(speed=lambda now: 0.0) as w:
        w.request(tokens, WEIGHED)
        w.to_disk_only()
        monkeypatch.setattr(CacheCore, "at_hand", noted)
        leases = [
            w.cache.lease(tokens, restore=RestorePolicy("timeout", timeout_s=1 + n))
            for n in range(4)
        ]
        ids = [info.id for info in w.cache.leases()]
        for lease in leases:
            assert w.ready(lease) == 0
        assert looks == ids + ids
        for lease in leases:
            lease.release()


def test_a_lease_released_early_has_no_deadline() -> None:
    tokens = prompt_of(PAGES)
    with world(speed=lambda now: 1.0) as w:
        w.request(tokens, WEIGHED)
        w.to_disk_only()
        lease = w.cache.lease(tokens, restore=WEIGHED)
        assert w.alarm < inf
        lease.release()
        assert lease.state is kvtier.LeaseState.RELEASED
        assert not w.cache._pump.deadlines._bounds


@pytest.mark.parametrize("most", [1e300, 10**400])
def test_a_time_limit_that_never_comes(most: float) -> None:
    tokens = prompt_of(PAGES)
    policy = RestorePolicy("timeout", timeout_s=most, prefill_tokens_per_s=1e-300)
    with world(speed=lambda now: 1.0) as w:
        w.request(tokens, RestorePolicy())
        w.to_disk_only()
        with w.cache.lease(tokens, restore=policy) as lease:
            assert w.ready(lease) == PAGES * PAGE


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mode": "later"}, "mode"),
        ({"mode": "timeout"}, "timeout_s"),
        ({"timeout_s": 1.0}, "timeout_s"),
        ({"mode": "timeout", "timeout_s": -1.0}, "timeout_s"),
        ({"mode": "timeout", "timeout_s": inf}, "timeout_s"),
        ({"mode": "timeout", "timeout_s": "1"}, "timeout_s"),
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s"),
        ({"prefill_tokens_per_s": float("nan")}, "prefill_tokens_per_s"),
        ({"prefill_tokens_per_s": True}, "prefill_tokens_per_s"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(kvtier.ConfigError, match=field):
        RestorePolicy(**options)


def test_a_policy_must_be_one() -> None:
    with pytest.raises(kvtier.ConfigError, match="restore"):
        kvtier.CacheConfig(gpu_bytes=1, restore="wait")  # type: ignore[arg-type]
    with world() as w, pytest.raises(kvtier.ConfigError, match="restore"):
        w.cache.lease([1], restore="wait")  # type: ignore[arg-type]


# --------------------------------------------------------------------------- explained


def reasons(said: list[kvtier.PageReport]) -> set[str]:
    """Of pages where a lease could stand."""
    return {page.reason for page in said} - {"no_checkpoint"}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("times", [0.2, 0.8, 2, 6, 30])
def test_explain_says_what_a_lease_would_do(name: str, times: float) -> None:
    tokens = prompt_of(PAGES)
    with world(LAYOUTS[name], lambda now: times * PAGES_PER_S) as w:
        for _ in range(3):
            w.request(tokens, WEIGHED)
            w.idle()
            w.to_disk_only()
            w.now += 2
        state = w.cache._core.digest()
        said = w.cache.explain(tokens, restore=WEIGHED)
        assert w.cache._core.digest() == state
        hits = [i for i, page in enumerate(said, start=1) if page.reason == "hit"]
        start = w.now
        with w.cache.lease(tokens, restore=WEIGHED) as lease:
            assert max(hits, default=0) == len(lease._record.nodes)
            assert reasons(said[max(hits, default=0) :]) <= {"recomputed"}
            assert said[9].compute_s == pytest.approx(10 * PAGE / RATE)
            load_s = [page.load_s for page in said if page.load_s is not None]
            assert load_s == sorted(load_s)
            assert load_s[-1] == pytest.approx(PAGES / (times * PAGES_PER_S), rel=0.3)
            if hits:
                w.ready(lease)
                took = said[hits[-1] - 1].load_s
                assert took == pytest.approx(w.now - start, rel=0.3, abs=0.01)
        assert bool(hits) == (times >= (2 if name == "dense" else 6))


@pytest.mark.parametrize("name", LAYOUTS)
def test_explain_without_a_rate_and_on_best_effort(name: str) -> None:
    tokens = prompt_of(12)
    with world(LAYOUTS[name], lambda now: PAGES_PER_S) as w:
        known_on_disk(w, tokens)
        said = w.cache.explain(tokens)
        assert reasons(said) == {"hit"}
        assert {page.compute_s for page in said} == {None}
        assert 0 < min(page.load_s for page in said if page.load_s is not None) < inf
        said = w.cache.explain(tokens, restore=RestorePolicy("best_effort"))
        assert reasons(said) == {"recomputed"}
        assert {page.load_s for page in said if page.reason == "recomputed"} == {inf}
        assert {(p.reason, p.load_s) for p in w.cache.explain([5] * 9)} == {("never_seen", None)}
        with w.cache.lease(tokens) as lease:
            w.ready(lease)
        assert reasons(w.cache.explain(tokens)) == {"recomputed"}, "it hangs"


# --------------------------------------------------------------------------- a disk that hangs

STALL = 30.0
"""As ``CacheConfig.disk_stall_s`` has it, if nobody says otherwise."""


def known_on_disk(w: World, tokens: list[int]) -> None:
    """And nowhere else; then the disk hangs."""
    w.request(tokens, RestorePolicy())
    w.to_disk_only()
    w.now += 100
    w.speed = lambda now: 0.0


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_lease_waits_for_a_hanging_disk_only_so_long(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word about how long: a miss, a counter, and one line for all of them."""
    tokens = prompt_of(12)
    with world(LAYOUTS[name], lambda now: 100 * PAGES_PER_S) as w:
        known_on_disk(w, tokens)
        start, faults = w.now, w.cache.stats().tiers[Tier.DISK].faults
        leases = [w.cache.lease(tokens) for _ in range(4)]  # all there can be
        assert [w.ready(lease) for lease in leases] == [0] * 4
        assert w.now - start == pytest.approx(STALL, abs=0.5)
        stats = w.cache.stats()
        assert stats.tiers[Tier.DISK].faults == faults + 4
        assert stats.recomputed_tokens == 4 * 12 * PAGE
        for lease in leases:
            w.compute(lease, tokens)
            w.cache.check()
            lease.release()
    assert caplog.text.count("the disk has brought nothing for 30 s") == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_nearer_than_a_hanging_disk_is_not_lost(name: str) -> None:
    tokens = prompt_of(12)
    with world(LAYOUTS[name], lambda now: 100 * PAGES_PER_S) as w:
        w.request(tokens[: 6 * PAGE + 1], RestorePolicy())
        w.pass_time(w.now)
        known_on_disk(w, tokens)
        w.speed = lambda now: 100 * PAGES_PER_S
        w.request(tokens[: 6 * PAGE + 1], RestorePolicy())  # is on the host now, and further on not
        w.cache.evict(Tier.GPU, 1 << 20)
        w.pass_time(w.now)
        w.speed = lambda now: 0.0
        with w.cache.lease(tokens) as lease:
            assert w.ready(lease) == 6 * PAGE
            assert lease.restored[Tier.CPU] == 6 * PAGE
            w.compute(lease, tokens)
            w.cache.check()


@pytest.mark.parametrize("name", LAYOUTS)
def test_new_leases_ask_nothing_of_a_disk_that_hangs(name: str) -> None:
    """It would take the device page by page otherwise.  Now and then one page is asked for, and
    once it moves again so does everything."""
    prompts = [prompt_of(12, seed) for seed in range(12)]
    with world(LAYOUTS[name], lambda now: 100 * PAGES_PER_S) as w:
        for tokens in prompts:
            w.request(tokens, RestorePolicy())
        known_on_disk(w, prompts[0])
        with w.cache.lease(prompts[0]) as lease:
            w.ready(lease)
        for tokens in prompts:
            start = w.now
            with w.cache.lease(tokens) as lease:
                assert w.ready(lease) == 0
                assert w.now == start
            w.now += 2
        flying = w.cache.stats().tiers
        assert 0 < flying[Tier.GPU].in_flight <= 12
        assert flying[Tier.CPU].in_flight <= 12 + 6
        w.speed = lambda now: 100 * PAGES_PER_S
        for op in list(w.transfer.pending):
            w.disk_done.pop(op.id, None)
        w.disk_free = w.now
        w.idle()
        w.to_disk_only()
        assert w.request(prompts[1], RestorePolicy())[0] == 12 * PAGE


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prefetch_ends_where_the_disk_hangs(name: str) -> None:
    tokens = prompt_of(12)
    with world(LAYOUTS[name], lambda now: 100 * PAGES_PER_S) as w:
        known_on_disk(w, tokens)
        start = w.now
        found = w.cache.prefetch(tokens)
        while not found.done():
            w.pass_time(w.next_event())
        assert found.result() == 0
        assert w.now - start == pytest.approx(STALL, abs=0.5)
        assert w.cache.stats().tiers[Tier.DISK].faults == 1
        w.cache.check()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("asked", ["before", "after", "long after"])
def test_a_flush_waits_for_a_hanging_disk_only_so_long(name: str, asked: str) -> None:
    """The host has it all, and whoever asks next is told at once, until the disk moves again."""
    with world(LAYOUTS[name]) as w:
        w.writes_hang = True
        start, lease, tokens = w.now, w.cache.lease(prompt_of(12)), prompt_of(12)
        w.compute(lease, tokens[: 6 * PAGE])
        if asked == "before":
            flushed = w.cache.flush()
        w.compute(lease, tokens)
        began = w.now
        w.pass_time(w.now + {"before": 0, "after": 10, "long after": 100}[asked])
        if asked != "before":
            flushed = w.cache.flush()
        while not flushed.done():
            assert w.next_event() < began + 1000, "the flush waits for ever"
            w.pass_time(w.next_event())
        with pytest.raises(kvtier.StoreError, match="hangs"):
            flushed.result(0)
        if asked == "long after":
            assert w.now == began + 100
        else:
            assert start + STALL <= w.now <= began + STALL + 0.5
        assert w.cache.flush(to=Tier.CPU).result(0) is None
        lease.release()
        w.writes_hang = False
        for op in list(w.transfer.pending):
            w.disk_done.pop(op.id, None)
        w.idle()
        assert w.cache.flush().result(300) is None
        assert w.cache.match(tokens).tokens == 12 * PAGE


def test_a_flush_waits_for_a_disk_that_moves() -> None:
    """Group after group, for longer than it may be still."""
    with world() as w:
        w.writes_hang = True
        lease, tokens = w.cache.lease(prompt_of(40)), prompt_of(40)
        w.compute(lease, tokens)
        lease.release()
        w.pass_time(w.now)
        flushed = w.cache.flush()
        stores = [op for op in w.transfer.pending if op.kind is OpKind.STORE]
        assert len(stores) > 2
        for op in stores:
            w.pass_time(w.now + 0.9 * STALL)
            assert not flushed.done()
            w.transfer.finish(op)
        w.pass_time(w.now)
        assert flushed.result(300) is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_paused_lease_comes_back_without_the_disk(name: str) -> None:
    tokens = prompt_of(12)
    with world(LAYOUTS[name], lambda now: 100 * PAGES_PER_S) as w:
        lease = w.cache.lease(tokens)
        w.compute(lease, tokens)
        lease.pause()
        w.pass_time(w.now + 1)
        assert lease.state is kvtier.LeaseState.PAUSED
        w.to_disk_only()
        w.speed = lambda now: 0.0
        lease.resume()
        assert lease.state is kvtier.LeaseState.RESTORING, "nothing of it was on the disk"
        assert w.ready(lease) == 0
        w.compute(lease, tokens)
        w.cache.check()
        lease.release()


def test_a_disk_that_is_only_slow_is_waited_for() -> None:
    """Where it is known that it moves; and one operation behind another has its turn."""
    prompts = [prompt_of(40, seed) for seed in range(3)]
    with world(speed=lambda now: 1.0) as w:
        for tokens in prompts:
            w.request(tokens, RestorePolicy())
        w.to_disk_only()
        start = w.now
        leases = [w.cache.lease(tokens) for tokens in prompts]
        assert [w.ready(lease) for lease in leases] == [40 * PAGE] * 3
        assert w.now - start == pytest.approx(120, abs=1)
        for lease in leases:
            lease.release()
        assert w.cache.stats().tiers[Tier.DISK].faults == 0


@pytest.mark.parametrize("stall", [0, -1.0, True, "30", float("nan")])
def test_a_stall_that_cannot_be_is_refused(stall: Any) -> None:
    with pytest.raises(kvtier.ConfigError, match="disk_stall_s"):
        kvtier.CacheConfig(gpu_bytes=1, disk_stall_s=stall)


# --------------------------------------------------------------------------- real threads


class SlowStore:
    """An ``LmdbStore`` whose reads take as long as the test says; None: until it says otherwise."""

    def __init__(self, path: Path) -> None:
        self.store = LmdbStore(
            path, fingerprint=b"f" * 16, frame_bytes=LAYOUT.frame_bytes(), limit_bytes=1 << 24
        )
        self.read_s: float | None = 0.0
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read_into(self, reads: Sequence[Read]) -> list[bool]:
        if self.read_s is None:
            self.go_on.wait(300)
        else:
            self.go_on.wait(self.read_s * len(reads))
        return self.store.read_into(reads)


@pytest.mark.parametrize(("read_s", "loaded"), [(0.0, True), (2.0, False), (None, False)])
def test_a_real_disk(read_s: float | None, loaded: bool, tmp_path: Path) -> None:
    """Over the data plane, its threads and LMDB, and the cache's own alarm."""
    tokens = prompt_of(32)
    # What is to be loaded has a minute for it, on a busy machine too; what is not, half a second.
    policy = RestorePolicy(prefill_tokens_per_s=0.1 if loaded else 10)
    sizes = config(gpu=128, cpu=128)
    store = SlowStore(tmp_path)
    geometry = geometry_of(LAYOUT, sizes, store)
    plane = DeviceTransfer(LAYOUT, geometry, device="cpu", store=store, config=sizes)
    parts: dict[str, Any] = {"transfer": plane, "stores": {Tier.DISK: store}}
    with kvtier.Cache(LAYOUT, sizes, model="m", **parts) as cache:
        for restored in (0, 32 * PAGE):
            cache.flush().result(300)
            cache.evict(Tier.GPU, 999)
            cache.evict(Tier.CPU, 999)
            with cache.lease(tokens) as lease:
                assert lease.ready.result(300) == restored
                feed(cache, lease, tokens[restored:])
        cache.evict(Tier.GPU, 999)
        cache.evict(Tier.CPU, 999)
        store.read_s = read_s
        with cache.lease(tokens, restore=policy) as lease:
            cached = lease.ready.result(300)  # not of the disk, which takes a minute or more
            assert (cached == 32 * PAGE) == loaded
            feed(cache, lease, tokens[cached:])
            cache.check()
        store.go_on.set()
        cache.flush().result(300)
        cache.check()
        assert cache.match([*tokens, 1]).tokens == 32 * PAGE
    assert not [t for t in threading.enumerate() if t.name == "kvtier-alarm" and _lives_on(t)]


@pytest.mark.parametrize("way", ["release", "cancel", "settle"])
def test_what_has_not_begun_to_be_read_is_left_out(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once nobody waits for it: the disk, and the pages, are there for others."""
    monkeypatch.setattr(transfer, "READ_BYTES", 1)
    monkeypatch.setattr(transfer, "LARGE_READ_BYTES", 1)
    tokens, began = prompt_of(32), threading.Event()
    read: list[Read] = []
    sizes = config(gpu=128, cpu=128, io_threads=1)
    store = SlowStore(tmp_path)
    read_into = store.read_into

    def noted(reads: Sequence[Read]) -> list[bool]:
        read.extend(reads)
        began.set()
        return read_into(reads)

    store.read_into = noted  # type: ignore[method-assign]
    geometry = geometry_of(LAYOUT, sizes, store)
    plane = DeviceTransfer(LAYOUT, geometry, device="cpu", store=store, config=sizes)
    parts: dict[str, Any] = {"transfer": plane, "stores": {Tier.DISK: store}}
    with kvtier.Cache(LAYOUT, sizes, model="m", **parts) as cache:
        with cache.lease(tokens) as lease:
            feed(cache, lease, tokens[lease.ready.result(300) :])
        cache.flush().result(300)
        for tier in (Tier.GPU, Tier.CPU):
            cache.evict(tier, 999)
        store.read_s = None
        if way == "cancel":
            found = cache.prefetch(tokens)
            assert began.wait(300)
            assert found.cancel()
        else:
            policy = RestorePolicy("timeout", timeout_s=0.05) if way == "settle" else None
            with cache.lease(tokens, restore=policy) as lease:
                assert began.wait(300)
                assert way == "release" or lease.ready.result(300) == 0
        store.go_on.set()
        while cache._pump.running():
            time.sleep(0.001)
        assert len(read) == 1
        assert cache.stats().tiers[Tier.DISK].faults == 0
        cache.check()
        store.read_s = 0.0
        with cache.lease(tokens) as lease:
            assert lease.ready.result(300) == 32 * PAGE


def _lives_on(thread: threading.Thread) -> bool:
    thread.join(300)
    return thread.is_alive()


def test_an_alarm_survives_what_a_callback_raises() -> None:
    class Owner:
        rung = 0

        def ring(self) -> float:
            self.rung += 1
            if self.rung < 3:
                raise SystemExit
            return inf

    owner = Owner()
    alarm = Alarm(owner.ring)
    alarm.set(time.monotonic())
    deadline = time.monotonic() + 300
    while owner.rung < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owner.rung == 3
    alarm.stop()


def test_without_a_thread_for_its_alarm_a_lease_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt_of(PAGES)
    with world(speed=lambda now: 100 * PAGES_PER_S) as w:
        w.request(tokens, WEIGHED)
        w.to_disk_only()
        w.cache._pump.deadlines.alarm = alarm = Alarm(w.cache._pump.settle_late)

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            lease = w.cache.lease(tokens, restore=WEIGHED)
        assert w.ready(lease) > 0
        lease.release()
        assert alarm._thread is None
        alarm.set(time.monotonic() + 60)
        assert alarm._thread is not None
        alarm.stop()


def test_the_alarm_thread_goes_with_its_owner() -> None:
    class Owner:
        rung: list[float]

        def ring(self) -> float:
            self.rung.append(time.monotonic())
            return inf

    owner = Owner()
    rung = owner.rung = []
    alarm = Alarm(owner.ring)
    assert alarm._thread is None
    start = time.monotonic()
    alarm.set(start + 1e18)  # further off than a thread may sleep
    time.sleep(0.02)
    alarm.set(start + 3600)
    alarm.set(start + 0.05)
    alarm.set(start + 3600)  # it rings before that
    thread = alarm._thread
    assert thread is not None
    while not rung and time.monotonic() < start + 300:
        time.sleep(0.01)
    assert len(rung) == 1
    assert rung[0] >= start + 0.05
    del owner
    gc.collect()
    thread.join(300)
    assert not thread.is_alive()
