"""The core, one scene at a time: what leases find, share, publish and leave behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtier.core.copies import GPU
from kvtier.core.geometry import Geometry
from kvtier.core.keys import chain_root, page_key
from kvtier.core.leases import LeaseRecord
from kvtier.core.ops import Kind, OpKind, Shortfall
from kvtier.errors import LeaseError, LeaseNotReady, LeaseReleased, OutOfPages
from kvtier.types import Identity, LeaseState, Span, Tier
from tests.property.server import FakeServer, packed, server

TENANT = Identity(tenant="b")


def plain(gpu: int = 16, cpu: int = 0, disk: int = 0, **options: Any) -> FakeServer:
    """Pages of two tokens; no tails."""
    return server(
        Geometry(page_tokens=2, gpu_pages=gpu, cpu_frames=cpu, disk_frames=disk, max_leases=8),
        **{"eviction": "lru", **options},
    )


def tails(gpu: int = 16, cpu: int = 16, disk: int = 0, **sizes: int) -> FakeServer:
    """Pages of two tokens, resumed at checkpoints."""
    sizes = {"max_leases": 4, "gpu_states": 4, "gpu_checkpoints": 4, "checkpoint_frames": 1} | sizes
    geometry = Geometry(
        page_tokens=2,
        gpu_pages=gpu,
        cpu_frames=cpu,
        disk_frames=disk,
        has_tails=True,
        parked_frames=sizes["checkpoint_frames"] + 1,
        **sizes,
    )
    return server(geometry, eviction="lru")


def lease(made: FakeServer, *args: Any, **options: Any) -> LeaseRecord:
    rec = made.open(*args, **options)
    assert rec is not None
    return rec


# ---------------------------------------------------------------------- what a lease finds
def test_the_last_token_is_never_matched() -> None:
    made = plain()
    made.serve([1, 2, 3, 4])
    assert made.core.match(packed([1, 2, 3, 4])).tokens == 2
    assert made.core.match(packed([1, 2, 3, 4, 5])).tokens == 4
    assert made.core.match(packed([])) == made.core.match(packed([1])) == (0, 0, 0, 0, 0, 0)
    assert made.core.match(packed([1, 2])).tokens == 0
    assert made.core.match(packed([1, 2])).history_tokens == 2


@pytest.mark.parametrize(
    ("limit", "found"), [(None, 6), (99, 6), (6, 6), (5, 4), (1, 0), (0, 0), (-3, 0)]
)
def test_max_reuse(limit: int | None, found: int) -> None:
    """Prompt log-probabilities need the forward pass from some position on (D7)."""
    made = plain()
    made.serve([1, 2, 3, 4, 5, 6])
    assert lease(made, [1, 2, 3, 4, 5, 6, 7], max_reuse=limit).length == found


def test_identities_share_nothing() -> None:
    """In every tier by itself: device, host, disk (★55)."""
    for cold in ((), (Tier.GPU,), (Tier.GPU, Tier.CPU)):
        made = plain(cpu=8, disk=8)
        made.serve([1, 2, 3, 4], Identity(tenant="s"))
        made.drain()
        made.cold(*cold)
        for other in (Identity(), Identity(tenant=""), Identity(adapter="s"), Identity(salt=b"s")):
            assert made.core.match(packed([1, 2, 3, 4, 5]), other).history_tokens == 0
            assert lease(made, [1, 2, 3, 4, 5], other).length == 0
        assert made.core.match(packed([1, 2, 3, 4, 5]), Identity(tenant="s")).tokens == 4


def test_restored_tells_the_tier_of_every_page() -> None:
    """One lease finds pages in all three tiers; hits and computed tokens add up (A9)."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    made.run(made.core.evict(Tier.GPU, 2)[1])
    made.run(made.core.evict(Tier.CPU, 1)[1])
    prompt = [1, 2, 3, 4, 5, 6, 7]
    assert made.core.match(packed(prompt)) == (6, 6, 2, 2, 2, 2)
    before = made.core.stats()
    rec = lease(made, prompt)
    assert rec.state is LeaseState.RESTORING and rec.waits
    made.drain()
    assert rec.restored == {Tier.GPU: 2, Tier.CPU: 2, Tier.DISK: 2}
    stats = made.core.stats()
    got = {t: stats.tiers[t].hit_tokens - before.tiers[t].hit_tokens for t in rec.restored}
    assert got == rec.restored
    assert stats.computed_tokens - before.computed_tokens == 1
    assert (stats.lookups, stats.lookup_tokens) == (before.lookups + 1, before.lookup_tokens + 7)


def test_checkpoints_on_disk_are_found_for_every_identity() -> None:
    """``match`` starts from the identity's own root, whoever else is known."""
    made = tails(disk=20)
    made.serve([1, 1, 1, 1], TENANT)
    made.drain()
    made.restart()
    made.serve([5, 5])
    found = made.core.match(packed([1, 1, 1, 1, 0]), TENANT)
    assert (found.tokens, found.disk_tokens) == (4, 4)
    made.sound()


def test_without_its_checkpoint_a_page_is_history_only() -> None:
    made = tails(gpu_checkpoints=0)
    made.serve([1, 1, 1, 1])
    found = made.core.match(packed([1, 1, 1, 1, 0]))
    assert (found.tokens, found.history_tokens) == (0, 4)
    assert [r.reason for r in made.core.explain(packed([1, 1, 1, 1, 0]))] == ["no_checkpoint"] * 2


# ---------------------------------------------------------------------- sharing
def test_duplicates_are_kept_until_release() -> None:
    """D7: the second to publish a page keeps its own; no table changes under a running kernel."""
    made = plain()
    one, two = lease(made, [1, 2, 3, 4, 5]), lease(made, [1, 2, 3, 4, 5])
    made.step([one, two], [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert one.owned == [False, False] and two.owned == [True, True]
    assert one.nodes == two.nodes and not set(one.frames) & set(two.frames)
    made.sound()
    assert made.core.stats().tiers[Tier.GPU].reserved == 2
    made.run(made.core.release(two))
    assert made.core.stats().tiers[Tier.GPU].reserved == 0
    made.sound()


def test_cold_requests_join_at_published_pages() -> None:
    """A13: what the first has published the others need not compute, chunk by chunk; a release
    of the first takes nothing from them."""
    made = plain()
    prompt = [1, 2, 3, 4, 5, 6, 7]
    first = lease(made, prompt)
    made.step([first], [prompt[:4]])
    others = [lease(made, prompt) for _ in range(3)]
    assert [r.length for r in others] == [4, 4, 4]
    assert all(r.frames == first.frames[:2] for r in others)
    made.run(made.core.release(first))
    made.step([others[0]], [prompt[4:6]])
    made.sound()
    late = lease(made, prompt)
    assert late.length == 6 and late.frames[2] == others[0].frames[2]
    assert made.core.stats().tiers[Tier.GPU].resident == 3


def test_requests_for_pages_on_their_way_wait_for_the_same_operation() -> None:
    """A13: one loads, the others wait for it; release of the first harms nobody."""
    made = plain(cpu=8)
    made.serve([1, 2, 3, 4])
    made.cold(Tier.GPU)
    first = lease(made, [1, 2, 3, 4, 5])
    (op,) = made.plane.live
    others = [lease(made, [1, 2, 3, 4, 6]) for _ in range(3)]
    assert list(made.plane.live) == [op] and all(r.waits == {op} for r in others)
    made.run(made.core.release(first))
    made.sound()
    made.end(op)
    assert [(r.state, r.length) for r in others] == [(LeaseState.ACTIVE, 4)] * 3
    assert others[0].restored == {Tier.GPU: 0, Tier.CPU: 4, Tier.DISK: 0}
    made.sound()


def test_a_failed_load_releases_everybody_who_waits() -> None:
    made = plain(cpu=8)
    made.serve([1, 2, 3, 4])
    made.cold(Tier.GPU)
    waiting = [lease(made, [1, 2, 3, 4, 5]) for _ in range(3)]
    (op,) = made.plane.live
    made.end(op, 1)
    made.drain()
    assert [(r.state, r.length) for r in waiting] == [(LeaseState.ACTIVE, 2)] * 3
    assert made.core.stats().tiers[Tier.CPU].faults == 1
    made.sound()


def test_no_lease_is_active_before_all_it_waits_for_has_ended() -> None:
    made = plain(cpu=8)
    made.serve([1, 2, 3, 4])
    made.cold(Tier.GPU)
    lease(made, [1, 2, 3])
    second = lease(made, [1, 2, 3, 4, 5])
    one, two = sorted(made.plane.live)
    assert second.waits == {one, two}
    made.end(two)
    assert second.state is LeaseState.RESTORING
    with pytest.raises(LeaseNotReady):
        made.core.reserve([second], [1])
    made.end(one, 0)  # the other's part, which this lease needs too, is lost
    made.drain()
    assert second.state is LeaseState.ACTIVE and second.length == 0
    made.sound()


def test_what_is_computed_supersedes_what_is_restored() -> None:
    made = plain(cpu=8)
    made.serve([1, 2, 3, 4])
    made.cold(Tier.GPU)
    waiting = lease(made, [1, 2, 3, 4, 5])
    (op,) = made.plane.live
    other = lease(made, [1, 2, 3, 4, 6], read=False)
    made.step([other], [[1, 2, 3, 4]])
    assert other.owned == [False, False], "the tree stands on what has been computed"
    made.sound()
    made.end(op, 0)
    assert waiting.state is LeaseState.ACTIVE and waiting.length == 4
    assert waiting.frames == other.frames
    made.sound()


# ---------------------------------------------------------------------- A12: leaves nothing
def everything(made: FakeServer) -> tuple[Any, ...]:
    core = made.core
    residency = core.residency
    return (
        list(core.stats().tiers.values()),
        residency.tree.num_nodes,
        dict(made.disk.records),
        [(p.key, p.tiers) for p in core.pages()],
        core.explain(packed([1, 2, 3, 4, 5, 6, 7])),
        sorted(residency.ghosts._seen),
        list(core.events or ()),
    )


def test_a_lease_that_does_not_write_leaves_nothing() -> None:
    """Not a page, a frame, a key, an event or a ghost, in any tier, whatever it did."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 9, 9])
    made.drain()
    made.core.disk_ticks()
    made.sound()  # reads the events
    before = everything(made)
    rec = lease(made, [1, 2, 3, 4, 5, 6, 7], write=False, read=False)
    made.step([rec], [[1, 2, 3, 4, 5, 6]])
    kid = made.fork(rec)
    assert kid is not None and not kid.write
    made.step([kid, rec], [[8, 8], [7]])
    made.pause(rec)
    made.drain()
    made.run(made.core.resume(rec))
    made.drain()
    made.run(made.core.truncate(rec, 3)[1])
    made.step([rec], [[4, 4, 4]])
    made.sound()
    for one in (rec, kid):
        made.run(made.core.release(one))
    made.run(made.core.evict(Tier.GPU, 0)[1])
    made.drain()
    after = everything(made)
    hits = before[0][0].hit_tokens
    assert after[0][0].hit_tokens == hits
    assert after == before


def test_a_lease_that_does_not_read_finds_nothing() -> None:
    made = plain()
    made.serve([1, 2, 3, 4])
    rec = lease(made, [1, 2, 3, 4, 5], read=False)
    assert rec.length == rec.cached_tokens == 0 and not rec.nodes


# ---------------------------------------------------------------------- spans
def test_an_image_late_in_a_page_shares_nothing_of_it() -> None:
    """F7: same text, images differing in their content only."""
    made = plain()
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    made.serve(text, spans=[Span(3, 5, b"cat")])
    for spans, found in (
        ([Span(3, 5, b"cat")], 8),
        ([Span(3, 5, b"dog")], 2),
        ([], 2),
        ([Span(3, 6, b"cat")], 2),
        ([Span(2, 5, b"cat")], 2),
        ([Span(3, 5, b"cat"), Span(7, 8, b"dog")], 6),
    ):
        assert made.core.match(packed([*text, 9]), spans=spans).tokens == found, spans


def test_no_resume_inside_an_image() -> None:
    made = plain()
    image = Span(1, 7, b"cat")
    made.serve([1, 2, 3, 4, 5, 6, 7, 8], spans=[image])
    found = made.core.match(packed([1, 2, 3, 4, 5, 6, 7, 1]), spans=[image])
    assert (found.tokens, found.history_tokens) == (0, 6)
    reasons = [
        r.reason for r in made.core.explain(packed([1, 2, 3, 4, 5, 6, 7, 8, 9]), spans=[image])
    ]
    assert reasons == ["in_span", "in_span", "in_span", "hit"]
    assert lease(made, [1, 2, 3, 4, 5, 6, 7, 1], spans=[image]).length == 0
    assert lease(made, [1, 2, 3, 4, 5, 6, 7, 8, 1], spans=[image]).length == 8


def test_pages_of_an_image_are_published_with_its_last_token() -> None:
    made = plain()
    image, prompt = Span(3, 7, b"cat"), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rec = lease(made, prompt, spans=[image])
    known = []
    for token in prompt[:8]:
        made.step([rec], [[token]])
        known.append(made.core.residency.tree.num_nodes)
        made.sound()
    assert known == [0, 1, 1, 1, 1, 1, 3, 4]


def test_fork_inside_an_image() -> None:
    """I1: both forks publish the pages that were withheld; each from a frame of its own."""
    made = plain()
    image, prompt = Span(1, 7, b"cat"), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    rec = lease(made, prompt, spans=[image])
    made.step([rec], [prompt[:5]])
    kid = made.fork(rec)
    assert kid is not None and not set(kid.frames) & set(rec.frames)
    for one in (rec, kid):
        made.step([one], [prompt[5:8]])
        made.sound()
    assert rec.nodes == kid.nodes and len(kid.nodes) == 4
    made.cold()
    made.sound()


def test_fork_inside_an_image_needs_room_for_its_pages() -> None:
    made = plain(gpu=5)
    rec = lease(made, [1] * 9, spans=[Span(0, 8, b"cat")])
    made.step([rec], [[1] * 6])
    before = made.core.digest()
    assert made.fork(rec) is None  # three pages to copy, two free
    assert made.core.digest() == before


# ---------------------------------------------------------------------- misuse
def test_misuse_has_a_name() -> None:
    made = plain(cpu=8)
    core = made.core
    rec = lease(made, [1, 2, 3])
    with pytest.raises(LeaseError, match="cannot truncate lease"):
        core.truncate(rec, 1)
    with pytest.raises(LeaseError, match="is not paused"):
        core.resume(rec)
    made.pause(rec)
    made.drain()
    assert rec.state is LeaseState.PAUSED
    for call in (core.fork, core.pause):
        with pytest.raises(LeaseNotReady, match="paused"):
            call(rec)
    made.run(core.release(rec))
    assert core.release(rec) == []
    for call in (core.fork, core.pause, core.resume):
        with pytest.raises(LeaseReleased):
            call(rec)
    with pytest.raises(LeaseReleased):
        core.truncate(rec, 0)
    with pytest.raises(LeaseReleased):
        core.reserve([rec], [0])
    assert core.reserve([], []) == ([], []) and core.commit([], [], b"") == []


def test_committing_past_the_reserve_raises() -> None:
    made = plain()
    rec = lease(made, [1, 2, 3])
    made.core.reserve([rec], [1])
    with pytest.raises(AssertionError, match="I5: committing past the reserve"):
        made.core.commit([rec], [3], packed([1, 2, 3]).data)


def test_out_of_pages_says_how_many() -> None:
    made = plain(gpu=3)
    rec = lease(made, [1, 2])
    with pytest.raises(OutOfPages) as failure:
        made.core.reserve([rec], [9])
    assert (failure.value.needed, failure.value.available) == (5, 3)
    with pytest.raises(OutOfPages) as failure:
        made.core.open(packed([1]), reserve=8)
    assert (failure.value.needed, failure.value.available) == (4, 3)
    for _ in range(7):
        lease(made, [1])
    with pytest.raises(OutOfPages, match="max_leases=8"):
        made.core.open(packed([1]))
    with pytest.raises(OutOfPages, match="max_leases=8"):
        made.core.fork(rec)


def refused(made: FakeServer, recs: list[LeaseRecord], counts: list[int]) -> OutOfPages:
    """What a reserve raises, which changes nothing."""
    before = made.core.digest()
    with pytest.raises(OutOfPages) as failure:
        made.core.reserve(recs, counts)
    assert made.core.digest() == before
    return failure.value


def test_what_can_never_fit_is_told_from_what_cannot_now() -> None:
    """By all that the leases of a call would hold, not by what they ask for beyond it."""
    made = plain(gpu=4)
    rec, other = lease(made, [1]), lease(made, [9])
    assert made.step([rec, other], [[1, 2, 3], [9]])
    now = refused(made, [rec], [5])
    assert (now.needed, now.available, now.capacity, now.never_fits) == (2, 1, 4, False)
    never = refused(made, [rec], [6])
    assert (never.needed, never.capacity, never.never_fits) == (3, 4, True)
    assert refused(made, [rec, other], [5, 1]).never_fits  # the two of them
    with pytest.raises(OutOfPages) as failure:
        made.core.open(packed([7]), reserve=8)
    assert not failure.value.never_fits
    with pytest.raises(OutOfPages) as failure:
        made.core.open(packed([7]), reserve=9)
    assert failure.value.never_fits and failure.value.capacity == 4
    made.run(made.core.release(other))
    made.core.reserve([rec], [5])
    assert made.step([rec], [[4] * 4])
    with pytest.raises(OutOfPages) as failure:
        made.core.fork(rec)
    assert failure.value.never_fits  # of seven tokens the copied page would be the fifth


@pytest.mark.parametrize("windows", [False, True])
def test_what_fits_at_all_fits_once_others_are_gone(windows: bool) -> None:
    """And what can never fit does not even then: of pages, shared and not, and of window pages."""
    rng, told = random.Random(7), []
    for _ in range(300):
        few = rng.randint(3, 6)
        made = windowed(window_page=2, gpu_windows=few) if windows else plain(gpu=few)
        recs = [lease(made, [1, 2, 3]) for _ in range(2)]
        for rec in recs:
            made.step([rec], [[rng.randint(1, 2)] * rng.randint(1, 4)])
        if not windows and (kid := made.fork(recs[0])) is not None:
            recs.append(kid)
        asked = rng.sample(recs, rng.randint(1, len(recs)))
        counts = [rng.randint(1, 7) for _ in asked]
        try:
            made.core.reserve(asked, counts)
        except OutOfPages as failure:
            told.append(failure.never_fits)
            for rec in recs:
                if rec not in asked:
                    made.run(made.core.release(rec))
            made.drain()
            if failure.never_fits:
                assert refused(made, asked, counts).never_fits
            else:
                made.core.reserve(asked, counts)
    assert 20 < sum(told) < len(told) - 20


# ---------------------------------------------------------------------- pause and resume
def test_a_paused_lease_holds_no_device_page() -> None:
    made = plain(gpu=4, cpu=8)
    rec = lease(made, [1, 2, 3, 4, 5])
    made.step([rec], [[1, 2, 3, 4, 5]])
    made.pause(rec)
    assert rec.state is LeaseState.RESTORING
    made.drain()
    assert rec.state is LeaseState.PAUSED and rec.length == 5
    made.sound()
    other = lease(made, [7] * 9)
    assert made.step([other], [[7] * 8])  # the whole device
    with pytest.raises(OutOfPages):
        made.core.resume(rec)
    made.run(made.core.release(other))
    made.drain()
    made.run(made.core.resume(rec))
    made.drain()
    assert rec.state is LeaseState.ACTIVE and rec.length == 5
    made.sound()


def test_resume_is_shorter_if_the_host_was_full() -> None:
    made = plain(gpu=8, cpu=2)
    rec = lease(made, [1, 2, 3, 4, 5])
    made.step([rec], [[1, 2, 3, 4, 5]])
    made.drain()
    assert made.core.residency.pools[1].free == 0
    made.pause(rec)
    made.drain()
    made.run(made.core.resume(rec))
    made.drain()
    assert rec.state is LeaseState.ACTIVE and rec.length == 4
    assert rec.cached_tokens == 0, "what it has computed itself is no hit"
    made.sound()


def test_resume_does_not_trust_what_was_not_parked() -> None:
    """The copy down of an open page ends with nothing done: only the whole pages come back."""
    made = plain(gpu=8, cpu=8)
    rec = lease(made, [1, 2, 3, 4, 5])
    made.step([rec], [[1, 2, 3, 4, 5]])
    made.drain()
    made.pause(rec)
    assert rec.parked is not None
    made.end(rec.parked.op_id, 0)
    made.drain()
    assert rec.state is LeaseState.PAUSED
    made.run(made.core.resume(rec))
    made.drain()
    assert rec.state is LeaseState.ACTIVE and rec.length == 4
    made.sound()


def test_resume_that_does_not_fit_stays_paused_however_often() -> None:
    """Also when what was parked is lost: nothing may be let go before there is room."""
    made = tails(gpu=8, cpu=3, max_leases=2, gpu_states=2)
    made.serve([1] * 4)
    made.drain()
    rec = lease(made, [7] * 6)
    made.step([rec], [[7] * 5])
    made.pause(rec)
    made.drain()
    assert rec.parked is not None and not rec.parked.ok
    for _ in range(2):  # state slots that late operations still write
        other = lease(made, [1] * 5)
        assert other.state is LeaseState.RESTORING
        made.run(made.core.release(other))
    for _ in range(2):
        with pytest.raises(OutOfPages, match="state slots"):
            made.core.resume(rec)
        assert rec.state is LeaseState.PAUSED and rec.length == 5
        made.sound()
    made.drain()
    made.run(made.core.resume(rec))
    made.drain()
    assert rec.state is LeaseState.ACTIVE
    made.sound()


# ---------------------------------------------------------------------- prefetch and pins
def test_prefetch_brings_pages_up_to_the_host() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    rec, ops = made.core.prefetch(packed([1, 2, 3, 4, 5, 6]))
    assert not rec.done and [o.kind for o in ops] == [OpKind.RESTORE]
    assert all(p.target is Tier.CPU for p in ops[0].parts)
    made.run(ops)
    made.drain()
    assert rec.done and rec.tokens == 6
    assert made.core.match(packed([1, 2, 3, 4, 5, 6, 0])).cpu_tokens == 6
    again, ops = made.core.prefetch(packed([1, 2, 3, 4, 5, 6]))
    assert again.done and again.tokens == 6 and not ops
    nothing, ops = made.core.prefetch(packed([9, 9, 9]))
    assert nothing.done and nothing.tokens == 0 and not ops
    made.sound()


def test_prefetch_reports_what_arrived() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    rec, ops = made.core.prefetch(packed([1, 2, 3, 4, 5, 6]))
    made.run(ops)
    made.end(ops[0].id, 2)
    assert rec.done and rec.tokens == 4
    made.drain()
    made.sound()


def test_cancelled_prefetches_give_everything_back() -> None:
    """★37: ten times the host's size of them, cancelled; the budget is whole again."""
    made = plain(cpu=4, disk=8)
    made.serve([1, 2, 3, 4, 5, 6, 7, 8])
    made.drain()
    for _ in range(10):
        made.cold(Tier.GPU, Tier.CPU)
        rec, ops = made.core.prefetch(packed([1, 2, 3, 4, 5, 6, 7, 8]))
        made.run(ops)
        made.run(made.core.cancel_prefetch(rec))
        made.run(made.core.cancel_prefetch(rec))
        assert rec.done and not made.core.prefetches
        made.sound()
    made.cold(Tier.GPU, Tier.CPU)
    assert made.core.stats().tiers[Tier.CPU].free == 4


def test_a_prefetch_of_a_disk_that_hangs_ends_and_holds_nothing() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    rec, ops = made.core.prefetch(packed([1, 2, 3, 4, 5, 6]))
    made.run(ops)
    for _ in range(2):  # the second time there is nothing to give up
        made.run(made.core.settle_early(rec, hung=True))
        assert rec.done and rec.tokens == 0 and not rec.nodes and not made.core.prefetches
        assert made.core.stats().tiers[Tier.DISK].faults == 1
        made.sound()
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    assert made.core.stats().tiers[Tier.CPU].free == 8


def test_pins_share_a_limited_part() -> None:
    made = plain(gpu=8, max_pinned=0.5)
    made.serve([1, 2, 3, 4, 5, 6])
    made.serve([7, 8, 9, 10])
    one = made.core.pin(packed([1, 2, 3, 4, 5, 6]))
    two = made.core.pin(packed([7, 8, 9, 10]), owner="me")
    assert (one.tokens, two.tokens, two.owner) == (6, 2, "me")
    made.run(made.core.evict(Tier.GPU, 99)[1])
    made.sound()
    assert made.core.match(packed([1, 2, 3, 4, 5, 6, 0])).tokens == 6
    assert made.core.match(packed([7, 8, 9, 10, 0])).tokens == 2
    for _ in range(2):
        made.run(made.core.unpin(one))
    three = made.core.pin(packed([7, 8, 9, 10]))
    assert three.tokens == 2
    for pin in (two, three):
        made.run(made.core.unpin(pin))
    made.run(made.core.evict(Tier.GPU, 99)[1])
    assert made.core.residency.tree.num_nodes == 0


def test_a_pinned_page_stays_in_the_lowest_tier_that_has_it() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4])
    made.drain()
    pin = made.core.pin(packed([1, 2, 3, 4]))
    for tier in (Tier.GPU, Tier.CPU, Tier.DISK):
        made.run(made.core.evict(tier, 99)[1])
    made.drain()
    made.sound()
    assert made.core.match(packed([1, 2, 3, 4, 0])).disk_tokens == 4
    made.run(made.core.unpin(pin))
    made.run(made.core.evict(Tier.DISK, 99)[1])
    made.drain()
    assert made.core.match(packed([1, 2, 3, 4, 0])).tokens == 0
    assert not made.disk.records


# ---------------------------------------------------------------------- time to live
def test_pages_live_as_long_as_whoever_asks_most() -> None:
    made = plain(gpu=16)
    made.serve([1, 2], expires=5.0)
    made.serve([1, 2, 3, 4], expires=9.0)
    made.serve([5, 6], expires=5.0)
    made.serve([5, 6])  # no limit
    made.serve([7, 8], expires=9.0)
    made.serve([7, 8], expires=3.0)

    def known(now: float) -> list[int]:
        made.run(made.core.expire(now))
        made.sound()
        prompts = ([1, 2, 3, 4, 0], [5, 6, 0], [7, 8, 0])
        return [made.core.match(packed(p)).tokens for p in prompts]

    assert known(4.0) == [4, 2, 2]
    assert known(9.0) == [4, 2, 2]  # until then, included
    assert known(9.5) == [0, 2, 0]
    assert known(1e9) == [0, 2, 0]


def test_held_pages_outlive_their_time() -> None:
    made = plain()
    made.serve([1, 2, 3, 4], expires=1.0)
    rec = lease(made, [1, 2, 9], expires=1.0)
    made.run(made.core.expire(2.0))
    assert made.core.match(packed([1, 2, 3, 4, 0])).tokens == 2
    made.run(made.core.release(rec))
    made.run(made.core.expire(2.0))
    assert made.core.match(packed([1, 2, 0])).tokens == 0
    assert made.core.residency.tree.num_nodes == 0


def test_duplicates_prolong_too() -> None:
    made = plain()
    one, two = lease(made, [1, 2, 3], expires=1.0), lease(made, [1, 2, 3])
    for rec in (one, two):
        made.step([rec], [[1, 2]])
        made.run(made.core.release(rec))
    made.run(made.core.expire(99.0))
    assert made.core.match(packed([1, 2, 3])).tokens == 2


def test_time_to_live_holds_on_disk() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4], expires=1.0)
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    made.sound()
    assert made.core.match(packed([1, 2, 3, 4, 0])).disk_tokens == 4
    made.run(made.core.expire(2.0))
    made.drain()
    assert made.core.match(packed([1, 2, 3, 4, 0])).tokens == 0
    assert not made.disk.records
    made.sound()


# ---------------------------------------------------------------------- looking inside
def reasons(made: FakeServer, tokens: list[int], *args: Any) -> list[str]:
    before = made.core.digest()
    out = [r.reason for r in made.core.explain(packed(tokens), *args)]
    assert made.core.digest() == before, "explain changed something"
    return out


def test_explain_hits_and_misses() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4])
    made.drain()
    report = made.core.explain(packed([1, 2, 3, 4, 5, 6]))
    assert [r.reason for r in report] == ["hit", "hit", "never_seen"]
    assert [r.start for r in report] == [0, 2, 4]
    assert report[1].tiers == {Tier.GPU, Tier.CPU, Tier.DISK} and report[2].tiers == frozenset()
    assert reasons(made, [1, 2, 3, 4]) == ["hit", "last_token"]
    assert reasons(made, [1]) == [] and reasons(made, []) == []
    assert reasons(made, [1, 2, 3, 4, 5], TENANT) == ["other_identity"] * 2
    made.cold(Tier.GPU, Tier.CPU)
    report = made.core.explain(packed([1, 2, 3, 4, 5, 6]))
    assert [r.tiers for r in report[:2]] == [{Tier.DISK}] * 2


def test_explain_evicted() -> None:
    made = plain()
    made.serve([1, 2, 3, 4])
    made.run(made.core.evict(Tier.GPU, 1)[1])
    assert reasons(made, [1, 2, 3, 4, 5]) == ["hit", "evicted"]
    made.run(made.core.clear())
    assert reasons(made, [1, 2, 3, 4, 5]) == ["never_seen"] * 2


def test_explain_quarantined() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4])
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    key = page_key(chain_root(b"c" * 16, Identity()), packed([1, 2]).data)
    parent, depth, frames, tail, tokens, _ = made.disk.records[key]
    made.disk.records[key] = (parent, depth, frames, tail, tokens, None)
    rec = lease(made, [1, 2, 3, 4, 5])
    made.end(min(made.plane.live))
    assert rec.length == 0 and rec.state is LeaseState.ACTIVE
    assert reasons(made, [1, 2, 3, 4, 5])[0] == "quarantined"
    assert made.core.stats().tiers[Tier.DISK].quarantined == 1
    assert made.core.stats().tiers[Tier.DISK].faults == 1
    made.sound()
    made.drain()
    assert made.core.stats().tiers[Tier.DISK].quarantined == 0
    made.serve([1, 2, 3, 4])  # rewritable
    made.drain()
    assert reasons(made, [1, 2, 3, 4, 5]) == ["hit", "hit"]


def test_explain_checkpoints_by_tier() -> None:
    made = tails(disk=16)
    made.serve([1, 1, 1, 1])
    made.drain()
    report = made.core.explain(packed([1, 1, 1, 1, 0]))
    assert [r.reason for r in report] == ["hit", "hit"]
    assert report[1].checkpoint_tiers == {Tier.GPU, Tier.CPU, Tier.DISK}
    made.cold(Tier.GPU, Tier.CPU)
    assert made.core.explain(packed([1, 1, 1, 1, 0]))[1].checkpoint_tiers == {Tier.DISK}


def test_stats_count_operations() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4], chunk=4, release=False)
    stats = made.core.stats()
    assert (stats.packing, stats.storing, stats.leases, stats.restoring) == (1, 0, 1, 0)
    assert stats.tiers[Tier.GPU].pinned == 2 and stats.tiers[Tier.CPU].in_flight == 2
    assert not made.core.idle and made.core.busy(Tier.CPU) and made.core.busy(Tier.DISK)
    made.end(min(made.plane.live))
    stats = made.core.stats()
    assert (stats.packing, stats.storing) == (0, 1)
    assert stats.tiers[Tier.DISK].in_flight == 2
    assert not made.core.busy(Tier.CPU) and made.core.busy(Tier.DISK)
    made.drain()
    assert made.core.idle and not made.core.busy(Tier.DISK)
    assert made.core.stats().tiers[Tier.DISK].resident == 2
    made.run(made.core.evict(Tier.CPU, 1)[1])
    assert made.core.stats().tiers[Tier.CPU].evictions == 1


def test_host_frames_left_to_an_operation_are_not_counted_on_the_device() -> None:
    """I1: free + resident + reserved + in flight = capacity, in each tier by itself."""
    made = plain(cpu=8)
    made.serve([1, 2, 3, 4, 5, 6])
    made.run(made.core.clear())
    made.ever.clear()
    made.sound()
    tiers = made.core.stats().tiers
    assert (tiers[Tier.GPU].in_flight, tiers[Tier.CPU].in_flight) == (3, 3)
    made.drain()
    assert (made.core.stats().tiers[Tier.GPU].free, made.core.stats().tiers[Tier.CPU].free) == (
        16,
        8,
    )


def test_pages_lists_parents_first() -> None:
    made = plain(cpu=8)
    made.serve([1, 2, 3, 4])
    made.serve([1, 2, 5, 6], TENANT)
    pages = made.core.pages()
    assert [(p.depth, p.identity, p.children) for p in pages] == [
        (1, Identity(), 1),
        (2, Identity(), 0),
        (1, TENANT, 1),
        (2, TENANT, 0),
    ]
    assert pages[0].key == page_key(chain_root(b"c" * 16, Identity()), packed([1, 2]).data)
    assert [p.identity for p in made.core.pages(TENANT)] == [TENANT, TENANT]
    assert pages[0].tiers == {Tier.GPU} and pages[0].pins == 0


def test_pages_on_their_way_to_the_device_go_down_only_once_they_are_there() -> None:
    """A lease finds pages that another's restore brings from the disk past a host that was full:
    a pack would read frames that nothing has been written to yet."""
    made = plain(cpu=2, disk=8)
    made.serve([1, 2, 3, 4])
    made.cold(Tier.GPU, Tier.CPU)
    made.serve([5, 6, 7, 8])
    made.end(made.plane.oldest)  # packed; what stores them still reads the host's frames
    first = lease(made, [1, 2, 3, 4, 0])
    (restore,) = first.waits
    assert not any(part.via for part in made.plane.live[restore].parts)
    while others := made.plane.live.keys() - {restore}:
        made.end(min(others))
    second = lease(made, [1, 2, 3, 4, 0])
    assert [op.kind for op in made.plane.live.values()] == [OpKind.RESTORE]
    made.drain()
    assert first.length == second.length == 4
    lease(made, [1, 2, 3, 4, 0])
    assert [op.kind for op in made.plane.live.values()] == [OpKind.PACK]
    made.sound()


# ---------------------------------------------------------------------- events
def test_events_say_what_is_where() -> None:
    made = plain(cpu=2, disk=4)
    core = made.core
    keys = [page_key(chain_root(b"c" * 16, Identity()), packed([1, 2]).data)]
    keys.append(page_key(keys[0], packed([3, 4]).data))
    made.serve([1, 2, 3, 4])
    assert list(core.events or ()) == [("stored", k, Tier.GPU) for k in keys]
    made.drain()
    assert [e[0::2] for e in core.events or ()][2:] == [("stored", t) for t in (1, 1, 2, 2)]
    core.events.clear()  # type: ignore[union-attr]
    made.run(core.evict(Tier.GPU, 2)[1])
    assert list(core.events or ()) == [("removed", k, Tier.GPU) for k in reversed(keys)]


def test_events_are_bounded_and_say_what_they_dropped() -> None:
    made = plain(events=False)
    core = made.core
    made.serve([9, 9])
    assert core.events is None
    core.subscribe(3)
    core.subscribe(99)  # the first one counts
    made.serve([1, 2, 3, 4, 5, 6, 7, 8])
    assert core.events is not None and len(core.events) == 3
    assert core.events_dropped == 1
    assert [e[0] for e in core.events] == ["stored"] * 3


def test_clear_in_flight_is_news_once() -> None:
    """A8: whoever follows the events sees cleared pages go, also those that leases still hold,
    and nothing that arrives later."""
    made = plain(cpu=8, events=False)
    made.serve([1, 2, 3, 4])
    made.cold(Tier.GPU)
    made.core.subscribe(99)
    rec = lease(made, [1, 2, 3, 4, 5])
    made.run(made.core.clear())
    made.drain()
    assert rec.state is LeaseState.ACTIVE and rec.length == 0
    assert [e[0::2] for e in made.core.events or ()] == [("removed", Tier.CPU)] * 2
    made = plain(cpu=8)
    rec = lease(made, [1, 2, 3, 4, 5])
    made.step([rec], [[1, 2, 3, 4]])
    made.run(made.core.clear())
    made.check_events()
    assert made.seen == set()
    made.published.clear()
    made.drain()
    made.sound()
    made.step([rec], [[5, 6]])  # goes on, unpublished
    assert made.core.residency.tree.num_nodes == 0 and made.seen == set()


def test_pages_that_only_the_disk_has_are_announced_when_they_go() -> None:
    made = plain(gpu=4, cpu=4, disk=4)
    for i in range(6):
        made.serve([i, i, i, i])
        made.drain()
        made.sound()
    assert sum(t is Tier.DISK for _, t in made.seen) == 4
    made.cold(Tier.GPU, Tier.CPU)
    made.sound()
    made.run(made.core.clear(tiers=[Tier.DISK]))
    made.ever.clear()
    made.sound()
    assert made.seen == set()


# ---------------------------------------------------------------------- lower tiers
def test_children_packed_first_are_stored_with_their_parents() -> None:
    made = plain(cpu=8, disk=8)
    rec = lease(made, [1, 1, 2, 2, 3, 3, 4])
    for pair in ([1, 1], [2, 2], [3, 3]):
        made.step([rec], [pair])
    first, *others = sorted(made.plane.live)
    for op in reversed(others):
        made.end(op)
        made.sound()
    assert list(made.plane.live) == [first], "a store of what is not on the host yet"
    made.end(first)
    made.drain()
    assert len(made.disk.records) == 3


def test_one_transaction_for_a_chain() -> None:
    """C4: parents before children, in one STORE."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4, 5, 6], chunk=6)
    made.end(min(made.plane.live))
    (store,) = made.plane.live.values()
    assert store.kind is OpKind.STORE and [p.depth for p in store.parts] == [1, 2, 3]
    assert [p.parent for p in store.parts[1:]] == [p.key for p in store.parts[:2]]


def test_a_failed_store_is_a_counter_and_can_be_done_again() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4], chunk=4)
    made.end(min(made.plane.live))
    made.end(min(made.plane.live), 0)
    made.drain()
    made.sound()
    assert made.core.stats().tiers[Tier.DISK].faults == 1 and not made.disk.records
    made.serve([1, 2, 3, 4])
    made.drain()
    assert len(made.disk.records) == 2


def test_a_disk_for_reading_is_never_written() -> None:
    writer = plain(cpu=8, disk=8)
    writer.serve([1, 2, 3, 4])
    writer.drain()
    reader = server(writer.geometry, disk=writer.disk, eviction="lru", read_only_disk=True)
    records = dict(writer.disk.records)
    reader.published = set(writer.published)
    reader.serve([1, 2, 3, 4, 5, 6])
    reader.drain()
    reader.run(reader.core.evict(Tier.DISK, 9)[1])
    reader.sound()
    assert writer.disk.records == records
    assert reader.core.stats().tiers[Tier.DISK].hit_tokens == 4


def test_disk_ticks_are_what_was_used_since() -> None:
    made = plain(cpu=8, disk=8)
    made.serve([1, 2])
    made.serve([3, 4])
    made.drain()
    made.core.disk_ticks()
    made.serve([1, 2])
    ((key, tick),) = made.core.disk_ticks()
    assert key == page_key(chain_root(b"c" * 16, Identity()), packed([1, 2]).data)
    assert tick == made.core.residency.tick and made.core.disk_ticks() == []


# ---------------------------------------------------------------------- growth
def test_nothing_grows_with_the_number_of_requests() -> None:
    """★57: many short requests of many identities, aborted ones among them; what is kept depends
    on the sizes of the tiers only."""
    made = plain(gpu=4, cpu=4, disk=4)
    core = made.core
    for i in range(1500):
        who = Identity(tenant=str(i))
        rec = made.open([i, i, i], who, expires=float(i + 1 << 20))
        assert rec is not None
        if i % 3:
            made.step([rec], [[i, i]])
        made.run(core.release(rec))
        if i % 5 == 0:
            made.drain()
        made.ever.clear()
        core.events.clear()  # type: ignore[union-attr]
    made.drain()
    residency = core.residency
    assert residency.disk is not None
    sizes = {
        "roots": len(residency.tree.roots),
        "identities on disk": len(residency.disk.root_keys),
        "nodes": residency.tree.num_nodes,
        "ghosts": len(residency.ghosts) // 16,
        "ghost ring": len(residency.ghosts._ring) // 16,
        "device queue": len(residency.candidates.orders[GPU]),
        "expiring": len(core.lifetimes._expiring),
        "touched": len(residency.disk.touched),
        "candidates": len(residency.disk._victims),
        "bad keys": len(core.operations.bad_keys),
        "leases": len(core.leases),
        "running": len(core.operations.running),
        "orphans": len(residency.orphans),
    }
    assert max(sizes.values()) <= 90, sizes


def windowed(*, window_page: int, gpu_windows: int, max_draft: int = 0) -> FakeServer:
    """Two leases of a layout whose tail has a window of 3 tokens."""
    geometry = Geometry(
        page_tokens=2,
        gpu_pages=16,
        max_leases=2,
        has_tails=True,
        checkpoint_frames=1,
        parked_frames=2,
        gpu_states=2,
        window=3,
        window_page=window_page,
        gpu_windows=gpu_windows,
        max_draft=max_draft,
    )
    return server(geometry, eviction="lru")


def test_refused_for_want_of_windows_keeps_what_was_reserved() -> None:
    """A refused reserve changes nothing: room promised at the open is still there."""
    made = windowed(window_page=2, gpu_windows=3)
    rec = lease(made, [1, 2, 3], reserve=6)
    before = made.core.digest()
    assert rec.capacity == 6
    with pytest.raises(OutOfPages, match="window pages"):
        made.core.reserve([rec], [8])
    assert rec.capacity == 6 and made.core.digest() == before
    assert made.step([rec], [[1] * 6])


def test_a_disk_opened_smaller_is_cut_to_size() -> None:
    """A7: the limit is hard, also for what was stored under a larger one; old pages go first."""
    made = plain(cpu=8, disk=8)
    for i in range(4):
        made.serve([i, i, i, i])
        made.drain()
    small = server(
        Geometry(page_tokens=2, gpu_pages=8, cpu_frames=8, disk_frames=3),
        disk=made.disk,
        eviction="lru",
    )
    small.published = set(made.published)
    assert small.core.residency.disk is not None and small.core.residency.disk.used == 3
    assert small.core.stats().tiers[Tier.DISK].free == 0
    small.serve([9, 9])
    small.drain()
    small.sound()
    assert len(small.disk.records) == 3


def test_a_lease_settles_when_all_it_waits_for_has_ended() -> None:
    """D4: the disk has failed, and it stands on what the host brings, which is still on its way."""
    made = plain(gpu=16, cpu=16, disk=16)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    made.run(made.core.evict(Tier.GPU, 16)[1])
    made.run(made.core.evict(Tier.CPU, 1)[1])
    rec = lease(made, [1, 2, 3, 4, 5, 6, 7])
    near, far = sorted(rec.waits)
    sources = [{part.source for part in made.plane.live[op].parts} for op in (near, far)]
    assert sources == [{Tier.CPU}, {Tier.DISK}]
    made.end(far, 0)
    assert rec.waits == {near} == set(made.plane.live)
    made.end(near)
    assert rec.state is LeaseState.ACTIVE
    assert rec.length == 4
    made.sound()


def test_reads_that_nobody_waits_for_are_unwanted() -> None:
    made = plain(gpu=16, cpu=16, disk=16)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    for tier in (Tier.GPU, Tier.CPU):
        made.run(made.core.evict(tier, 16)[1])
    one, two = (lease(made, [1, 2, 3, 4, 5, 6, 7]) for _ in range(2))
    (read,) = [op for op in made.plane.live.values() if op.kind is OpKind.RESTORE]
    made.run(made.core.release(one))
    assert not made.unwanted, "another waits for it"
    made.run(made.core.release(two))
    assert made.unwanted == {read.id}
    late = lease(made, [1, 2, 3, 4, 5, 6, 7])  # comes to wait for it all the same
    assert late.waits == {read.id}
    made.end(read.id, 1)
    stats = made.core.stats().tiers[Tier.DISK]
    assert (stats.faults, stats.quarantined) == (0, 0)
    assert late.state is LeaseState.RESTORING, "it plans again for what was left out"
    made.drain()
    assert late.length == 6
    assert [r.reason for r in made.core.explain(packed([1, 2, 3, 4, 5, 6, 7]))] == ["hit"] * 3


def test_a_page_stays_known_while_its_checkpoint_is_read_from_disk() -> None:
    """I7: everything else of it may leave meanwhile."""
    made = tails(gpu=8, cpu=8, disk=8, gpu_checkpoints=1)
    for prompt in ([1, 2], [5, 6]):  # the second takes the only device checkpoint
        made.serve(prompt)
        made.drain()
    made.run(made.core.evict(Tier.CPU, 1)[1])
    rec = lease(made, [1, 2, 3])
    (op,) = made.plane.live.values()
    assert [(p.kind, p.source) for p in op.parts] == [(Kind.CHECKPOINT, Tier.DISK)]
    made.run(made.core.release(rec))
    for tier in (Tier.GPU, Tier.CPU):
        made.run(made.core.evict(tier, 9)[1])
        made.sound()
    assert made.core.residency.tree.num_nodes == 1
    made.drain()
    made.run(made.core.evict(Tier.CPU, 9)[1])  # where the checkpoint has come
    assert made.core.residency.tree.num_nodes == 0
    made.sound()


def test_other_weights_find_nothing_on_the_same_disk() -> None:
    """A8: the chain starts from layout and model; nothing of another one's can match."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4])
    made.drain()
    other = server(made.geometry, disk=made.disk, eviction="lru", chain=b"d" * 16)
    assert other.core.match(packed([1, 2, 3, 4, 5])).history_tokens == 0
    assert lease(other, [1, 2, 3, 4, 5]).length == 0
    again = server(made.geometry, disk=made.disk, eviction="lru")
    assert again.core.match(packed([1, 2, 3, 4, 5])).disk_tokens == 4


@pytest.mark.parametrize("draft", [0, 1, 3])
def test_window_pages_go_as_tokens_are_committed(draft: int) -> None:
    """B4: kept for the queries to come and for as many drafts as may be rejected; by committed
    tokens, never by scheduled ones."""
    made = windowed(window_page=1, gpu_windows=16, max_draft=draft)
    rec = lease(made, [1, 2, 3])
    assert made.step([rec], [[1] * 6], [2])
    assert rec.tail is not None
    assert sorted(rec.tail.windows) == list(range(6 - 3 + 1 - draft, 8))
    table = made.core.window_tables[rec.row]
    assert [p for p in range(len(table)) if table[p] >= 0] == sorted(rec.tail.windows)
    assert made.step([rec], [[1] * 4])
    assert sorted(rec.tail.windows) == list(range(10 - 3 + 1 - draft, 10))
    made.sound()


def test_host_pages_on_the_way_up_stay_behind_their_parent() -> None:
    """I6: room for them is made elsewhere."""
    made = plain(gpu=4, cpu=3, disk=8)
    made.serve([1, 1, 2, 2, 3, 3])
    made.drain()
    made.run(made.core.evict(Tier.GPU, 2)[1])
    made.run(made.core.evict(Tier.CPU, 2)[1])
    made.serve([7, 7])  # what is younger fills the host
    made.drain()
    rec = lease(made, [1, 1, 2, 2, 3, 3, 4])  # its first page is on the device and the host
    made.sound()
    made.drain()
    made.sound()
    assert rec.length == 6


def test_a_store_that_failed_half_way_has_stored_nothing() -> None:
    """C4: all or none, whatever number of parts is reported."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4, 5, 6], chunk=6)
    made.end(min(made.plane.live))
    ((op_id, store),) = made.plane.live.items()
    assert store.kind is OpKind.STORE and len(store.parts) == 3
    made.plane.finish(op_id, 0)
    made.run(made.core.finish(op_id, 2, Shortfall.FAULT))
    made.sound()
    assert made.core.residency.disk is not None and made.core.residency.disk.rows == 0
    assert made.core.stats().tiers[Tier.DISK].faults == 1


def test_a_failed_read_says_nothing_of_its_source() -> None:
    """D11: the lease settles for less, and the next one may find the pages again."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4])
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    rec = lease(made, [1, 2, 3, 4, 5])
    made.end(min(made.plane.live), 1)  # the medium failed
    made.drain()
    assert rec.state is LeaseState.ACTIVE and rec.length == 2
    disk = made.core.stats().tiers[Tier.DISK]
    assert (disk.faults, disk.quarantined, disk.resident) == (1, 0, 2)
    again = lease(made, [1, 2, 3, 4, 6])
    made.drain()
    assert again.length == 4
    made.sound()


def test_a_failed_deletion_is_asked_for_again() -> None:
    """Its frames stay counted until then: the limit is hard."""
    made = plain(cpu=8, disk=2)
    made.serve([1, 2])
    made.drain()
    made.run(made.core.evict(Tier.DISK, 1)[1])
    ((op_id, drop),) = made.plane.live.items()
    assert drop.kind is OpKind.DROP
    made.end(op_id, 0)
    made.sound()
    assert len(made.disk.records) == 1
    assert made.core.stats().tiers[Tier.DISK].quarantined == 1
    made.serve([3, 4])
    made.end(min(made.plane.live))
    assert [o.kind for o in made.plane.live.values()] == [OpKind.DROP, OpKind.STORE]
    made.drain()
    made.sound()
    assert made.core.stats().tiers[Tier.DISK].quarantined == 0
    assert len(made.disk.records) == 1


@pytest.mark.parametrize("bad", [False, True])
def test_a_page_that_could_not_be_deleted_is_stored_again(bad: bool) -> None:
    """What is stored again overwrites it, so its frames are not counted twice; nor are they when it
    is found bad then."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2])
    made.drain()
    for _ in range(2):
        made.run(made.core.evict(Tier.DISK, 1)[1])
        ((op_id, drop),) = made.plane.live.items()
        assert drop.kind is OpKind.DROP
        made.end(op_id, 0)
        made.sound()
        assert made.core.stats().tiers[Tier.DISK].quarantined == 1
        made.cold(Tier.GPU, Tier.CPU)
        made.serve([1, 2])
        made.end(min(made.plane.live))
        again, store = made.plane.live
        assert made.plane.live[again].kind is OpKind.DROP
        made.end(again, 0)
        made.end(store)
        made.sound()
        tier = made.core.stats().tiers[Tier.DISK]
        assert (tier.quarantined, tier.resident, tier.free) == (0, 1, 7)
    if bad:
        made.cold(Tier.GPU, Tier.CPU)
        ((key, record),) = made.disk.records.items()
        made.disk.records[key] = (*record[:-1], None)
        lease(made, [1, 2, 3])
        made.end(min(made.plane.live))
        assert made.core.stats().tiers[Tier.DISK].quarantined == 1
        made.drain()
        tier = made.core.stats().tiers[Tier.DISK]
        assert (tier.quarantined, tier.free) == (0, 8)
    made.sound()


def test_a_page_found_bad_by_one_while_another_restores_it() -> None:
    """I6: what nobody can match any more is nobody's child, though a lease still holds it."""
    made = plain(cpu=8, disk=8)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    pre, ops = made.core.prefetch(packed([1, 2, 3, 4, 5, 6]))
    made.run(ops)
    rec = lease(made, [1, 2, 3, 4, 5, 6, 7], early=True)  # has read the record before it went bad
    first, second = sorted(made.plane.live)
    key = page_key(chain_root(b"c" * 16, Identity()), packed([1, 2]).data)
    key = page_key(key, packed([3, 4]).data)
    parent, depth, frames, tail, tokens, _ = made.disk.records[key]
    made.disk.records[key] = (parent, depth, frames, tail, tokens, None)
    made.end(first)
    assert pre.done and pre.tokens == 2
    made.sound()
    made.end(second)
    made.sound()
    assert rec.length == 2
    made.drain()
    made.sound()


@pytest.mark.parametrize(("cpu", "disk"), [(0, 0), (12, 0), (12, 12)])
def test_a_pin_keeps_its_deepest_checkpoint(cpu: int, disk: int) -> None:
    """Pages that nobody could resume at would be kept for nothing."""
    made = tails(gpu=8, cpu=cpu, disk=disk)
    made.serve([1, 2, 3, 4, 5, 6])
    made.drain()
    pin = made.core.pin(packed([1, 2, 3, 4]))
    for tier in (Tier.GPU, Tier.CPU, Tier.DISK):
        made.run(made.core.evict(tier, 99)[1])
        made.sound()
    found = made.core.match(packed([1, 2, 3, 4, 9]))
    assert found.tokens == found.history_tokens == 4
    rec = lease(made, [1, 2, 3, 4, 9])
    made.drain()
    assert rec.length == 4
    made.run(made.core.release(rec))
    made.run(made.core.unpin(pin))
    made.cold(Tier.GPU, Tier.CPU, Tier.DISK)
    assert made.core.residency.tree.num_nodes == 0 and not made.disk.records


def test_only_checkpoints_worth_keeping_go_to_disk() -> None:
    """H1: what Sparse would not keep stays in host memory."""
    made = tails(cpu=16, disk=16, gpu_checkpoints=8)
    made.serve([1] * 12, chunk=12)
    made.drain()
    report = made.core.explain(packed([1] * 13))
    assert [Tier.CPU in page.checkpoint_tiers for page in report] == [True] * 6
    on_disk = [page.start // 2 + 1 for page in report if Tier.DISK in page.checkpoint_tiers]
    assert on_disk == [5, 6]  # the prompt's end and the page before
    assert made.core.stats().tiers[Tier.DISK].resident == 6 + 2


def test_a_lease_publishes_for_its_identity_however_many_others_come_by() -> None:
    made = plain(gpu=8)
    rec = lease(made, [1, 2, 3], TENANT)
    for i in range(200):
        made.run(made.core.release(lease(made, [1], Identity(tenant=str(i)))))
    made.step([rec], [[1, 2]])
    made.sound()
    assert made.core.match(packed([1, 2, 3]), TENANT).tokens == 2
