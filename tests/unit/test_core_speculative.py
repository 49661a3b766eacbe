"""F6, B4, D5: tokens that are fed and not accepted leave nothing behind, wherever the edges lie.

Over the plane of fake bytes: every row says for which tokens it was written, and ``sound`` turns
all rows past a lease's committed tokens into garbage before it checks what may be read.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kvtier.core.copies import CHECKPOINT, GPU
from kvtier.core.geometry import Geometry
from kvtier.core.leases import LeaseRecord
from kvtier.core.ops import Kind, OpKind
from kvtier.errors import OutOfPages
from kvtier.types import LeaseState, Span, Tier
from tests.property.plane import tokens_of
from tests.property.server import FakeServer, packed, server

PAGE, WINDOW_PAGE, WINDOW = 4, 2, 3
TOKENS = [(i * 7 + i // 3) % 5 for i in range(40)]


def made(draft: int, *, tails: bool = True, window: int = WINDOW, **sizes: Any) -> FakeServer:
    window = window if tails else 0
    geometry = Geometry(
        **{
            "page_tokens": PAGE,
            "gpu_pages": 24,
            "cpu_frames": 40,
            "max_leases": 4,
            "has_tails": tails,
            "checkpoint_frames": 1 if tails else 0,
            "parked_frames": 3 if tails else 0,
            "gpu_states": 4 if tails else 0,
            "gpu_checkpoints": 8 if tails else 0,
            "window": window,
            "window_page": WINDOW_PAGE if window else 0,
            "gpu_windows": 60 if window else 0,
            "max_draft": draft,
            "max_rejected": draft + 1 if tails else None,
            **sizes,
        }
    )
    return server(geometry, eviction="lru")


KINDS = [
    pytest.param({"tails": False}, id="dense"),
    pytest.param({"window": 0}, id="rings"),
    pytest.param({}, id="rings-and-windows"),
    pytest.param({"window_kept": 6}, id="wider-checkpoints"),
]


def lease(it: FakeServer, tokens: list[int], **options: Any) -> LeaseRecord:
    rec = it.open(tokens, **options)
    assert rec is not None
    it.drain()
    return rec


def at(it: FakeServer, start: int, **options: Any) -> LeaseRecord:
    """A lease that stands at ``start`` tokens."""
    rec = lease(it, [*TOKENS[:start], 9], **options)
    while rec.length < start:
        assert it.step([rec], [TOKENS[rec.length : min(start, rec.length + 5)]])
    return rec


def keys(it: FakeServer) -> set[bytes]:
    """Whatever anybody may find: pages of the tree, and of the disk."""
    return {it.core.residency.digest(node) for _, node in it.pages()} | set(it.disk.records)


# ---------------------------------------------------------------------- every edge
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("draft", "twice"), [(0, False), (1, True), (3, False), (3, True)], ids=str
)
def test_speculative_rounds_at_every_position(
    kind: dict[str, Any], draft: int, twice: bool
) -> None:
    """Every number of drafts, every number accepted, at every place of a page and of a window;
    beside a lease that shares the prefix.  Then on for three tokens, one by one."""
    it = made(draft, **kind)
    other = at(it, 11)
    for start, drafted in product(range(1, 2 * PAGE + 3), range(draft + 1)):
        for kept in range(drafted + 2):
            rec = at(it, start)
            new = TOKENS[start : start + kept]
            assert it.speculate([rec], [new], [drafted + 1 - kept], drafting=twice)
            assert rec.length == start + kept and tokens_of(rec)[start:] == tuple(new)
            assert len(rec.nodes) == rec.length // PAGE
            it.sound()
            for _ in range(3):
                assert it.speculate([rec], [TOKENS[rec.length : rec.length + 1]], [draft])
                it.sound()
            it.run(it.core.release(rec))
            it.drain()
    it.sound()
    assert other.state is LeaseState.ACTIVE and tokens_of(other) == tuple(TOKENS[:11])


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_tokens_are_found_by_nobody(kind: dict[str, Any]) -> None:
    """No page of theirs is matched, hashed, packed, stored or told of: before the commit, after
    it, and after an exception."""
    it = made(3, disk_frames=40, **kind)
    rec = at(it, PAGE - 1)
    drafts = [3, 3, 3, 3]
    before = keys(it)
    captures, ops = it.core.reserve([rec], [4])
    it.run(ops)
    due = {c.position: c.frame for c in captures}
    it.forward(rec, [], 4, due)
    assert not [o for o in it.plane.live.values() if o.kind in (OpKind.PACK, OpKind.STORE)]
    assert keys(it) == before
    for end in ("commit", "abandon", "commit"):
        if end == "abandon":
            it.run(it.core.reserve([rec], [4])[1])
            it.forward(rec, [], 4, {})
            it.run(it.core.abandon([rec], [4]))
        else:
            it.commit([rec], [[]])
        it.drain()
        it.sound()
        assert keys(it) == before
        found = it.core.match(packed([*TOKENS[: PAGE - 1], *drafts, 9]))
        assert found.history_tokens == 0
        assert not it.core.events and not it.plane.live
    assert it.step([rec], [TOKENS[PAGE - 1 : PAGE]], [3])  # one is accepted, and fills a page
    it.drain()
    it.sound()
    (page,) = [node for _, node in it.pages()]
    assert keys(it) - before >= {it.core.residency.digest(page)} and it.disk.records
    assert it.core.match(packed([*TOKENS[:PAGE], 9])).history_tokens == PAGE


def test_speculative_captures_of_rejected_page_ends_go_back() -> None:
    it = made(3)
    pool = it.core.residency.pools[GPU + CHECKPOINT]
    free = pool.free
    rec = at(it, PAGE - 2)
    assert pool.free == free
    captures, ops = it.core.reserve([rec], [4])
    it.run(ops)
    assert [c.position for c in captures] == [PAGE] and pool.free == free - 1
    it.forward(rec, TOKENS[2:3], 3, {c.position: c.frame for c in captures})
    it.commit([rec], [TOKENS[2:3]])
    assert pool.free == free and not rec.captures
    it.sound()
    assert it.step([rec], [TOKENS[3:4]], [2])  # reached now: captured anew
    assert pool.free == free - 1
    it.sound()
    it.drain()
    again = lease(it, [*TOKENS[:PAGE], 9])
    assert again.length == PAGE
    it.sound()


# ---------------------------------------------------------------------- room
@pytest.mark.parametrize("kind", KINDS)
def test_speculative_room_comes_back_once(kind: dict[str, Any]) -> None:
    """AT-6.5: the page that only rejected tokens touched stays reserved for the next round, and
    returns with ``truncate`` or the release, once."""
    it = made(3, **kind)
    pages, windows = it.core.residency.pools[GPU], it.core.tails.windows
    rec = at(it, PAGE - 1)
    before = pages.free, windows.free
    held = len(rec.frames)
    for _ in range(3):
        assert it.step([rec], [[]], [3])
        assert len(rec.frames) == held + 1, "the same page in every round"
    for _ in range(2):  # idempotent
        got, ops = it.core.truncate(rec, rec.length)
        assert got == PAGE - 1 and not ops
        assert (pages.free, windows.free) == before
        it.sound()
    assert it.step([rec], [TOKENS[PAGE - 1 : PAGE + 1]], [1])
    it.run(it.core.release(rec))
    it.drain()
    it.run(it.core.evict(Tier.GPU, 99)[1])
    assert pages.free == pages.size and windows.free == windows.size
    it.sound()


@pytest.mark.parametrize("draft", [0, 1, 3, 6])
@pytest.mark.parametrize("kept", [0, 6])
def test_speculative_windows_are_held_for_the_drafts(draft: int, kept: int) -> None:
    """By committed tokens: from any place, with any number rejected, the pages of the last
    ``window_kept - 1 + max_draft`` tokens are there, and no older ones."""
    it = made(draft, window_kept=kept)
    rec = at(it, 1)
    assert rec.tail is not None
    reach = (kept or WINDOW) - 1 + draft
    for i in range(30):
        n = i % (draft + 2)
        was = rec.length
        assert it.step([rec], [TOKENS[was : was + n]], [draft + 1 - n])
        needed = {t // WINDOW_PAGE for t in range(max(0, rec.length - reach), rec.length)}
        drafted = {t // WINDOW_PAGE for t in range(rec.length, was + draft + 1)}
        assert needed <= set(rec.tail.windows) <= needed | drafted, rec.length
        it.sound()
        if rec.length > 30:
            break


# ---------------------------------------------------------------------- what comes in between
@pytest.mark.parametrize("kind", KINDS)
def test_speculative_forks_leave_rejected_tokens_behind(kind: dict[str, Any]) -> None:
    """At every place: the fork holds what is committed, no page or window of a draft."""
    for start in range(1, 2 * PAGE + 2):
        it = made(3, **kind)
        rec = at(it, start)
        assert it.step([rec], [[]], [4])
        kid = it.fork(rec)
        assert kid is not None
        it.sound()
        assert len(kid.frames) == -(-start // PAGE) and kid.capacity == len(kid.frames) * PAGE
        if kid.tail is not None and it.geometry.window:
            assert set(kid.tail.windows) == set(it.geometry.windows_at(start, 3))
        assert it.step([kid, rec], [[1, 1], [2]], [2, 3])
        it.sound()
        assert tokens_of(kid)[start:] == (1, 1) and tokens_of(rec)[start:] == (2,)


def test_speculative_forks_need_no_room_for_drafts() -> None:
    """Window pages that only hold rejected tokens are not asked for a second time."""
    it = made(7, gpu_windows=9)
    rec = at(it, 4)
    assert it.step([rec], [[]], [8])
    assert rec.tail is not None and len(rec.tail.windows) == 6
    kid = it.fork(rec)
    assert kid is not None and kid.tail is not None and len(kid.tail.windows) == 2
    it.sound()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chill", [False, True])
def test_speculative_leases_pause_and_resume(kind: dict[str, Any], chill: bool) -> None:
    """With open groups, partial pages and rejected tokens behind, at every place."""
    for start, kept in product(range(1, 2 * PAGE + 1), (0, 1, 3)):
        it = made(3, **kind)
        rec = at(it, start)
        assert it.step([rec], [TOKENS[start : start + kept]], [4 - kept])
        length = rec.length
        it.pause(rec)
        parked = [p for o in it.plane.live.values() for p in o.parts if p.kind is Kind.TAIL]
        for part in parked:  # what is only reserved or rejected stays
            assert len(part.src) - 1 <= len(it.geometry.windows_at(length, 3))
        it.drain()
        assert rec.state is LeaseState.PAUSED
        if chill:
            it.run(it.core.evict(Tier.GPU, 99)[1])
        it.sound()
        it.run(it.core.resume(rec))
        it.drain()
        assert rec.state is LeaseState.ACTIVE and rec.length == length
        it.sound()
        assert it.step([rec], [TOKENS[length : length + 2]], [2])
        it.sound()


@pytest.mark.parametrize("shared", [False, True])
def test_speculative_truncation_to_every_earlier_length(shared: bool) -> None:
    """Dense pages: exact, and what others share stays theirs."""
    for start, to in product(range(1, 2 * PAGE + 2), range(2 * PAGE + 2)):
        if to > start:
            continue
        it = made(3, tails=False)
        rec = at(it, start)
        other = it.fork(rec) if shared else None
        assert it.step([rec], [[]], [4])
        got, ops = it.core.truncate(rec, to)
        it.run(ops)
        assert got == rec.length == to
        it.sound()
        assert it.speculate([rec], [[4, 4]], [2])
        it.sound()
        if other is not None:
            assert tokens_of(other) == tuple(TOKENS[:start])
            assert it.step([other], [TOKENS[start : start + 1]], [3])
            it.sound()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_speculative_truncation_lands_on_a_checkpoint(kind: dict[str, Any]) -> None:
    for start, to in product((PAGE + 1, 2 * PAGE + 2), range(2 * PAGE + 3)):
        if to >= start:
            continue
        it = made(3, **kind)
        rec = at(it, start)
        assert it.step([rec], [[]], [4])
        got, ops = it.core.truncate(rec, to)
        it.run(ops)
        it.drain()
        assert rec.state is LeaseState.ACTIVE
        assert got == rec.length == to // PAGE * PAGE
        it.sound()
        assert it.speculate([rec], [[4, 4]], [2])
        it.sound()


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_steps_that_fail_or_are_aborted(kind: dict[str, Any]) -> None:
    """D5: an exception after tokens were accepted, a release after an exception or instead of a
    commit: nothing became visible, all comes back."""
    it = made(3, **kind)
    pools = it.core.residency.pools
    for start, end in product(range(1, 2 * PAGE + 1), ("go on", "release", "release in the step")):
        rec = at(it, start, write=False)
        known = keys(it)
        captures, ops = it.core.reserve([rec], [4])
        assert not captures
        it.run(ops)
        it.forward(rec, TOKENS[start : start + 2], 2, {})
        if end != "release in the step":
            it.run(it.core.abandon([rec], [4]))
            it.restore_state(rec)
            it.sound()
            assert tokens_of(rec) == tuple(TOKENS[:start])
        if end == "go on":
            assert it.step([rec], [TOKENS[start : start + 2]], [2])
            it.sound()
        it.run(it.core.release(rec))
        it.drain()
        assert keys(it) == known
        it.sound()
    it.run(it.core.evict(Tier.GPU, 99)[1])
    assert pools[GPU].free == pools[GPU].size
    assert it.core.tails.windows.free == it.core.tails.windows.size
    assert it.core.tails.states.free == it.core.tails.states.size


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_steps_that_do_not_fit_change_nothing(kind: dict[str, Any]) -> None:
    it = made(3, gpu_pages=4, **kind)
    rec, other = at(it, PAGE, write=False), at(it, 1, read=False, write=False)
    it.drain()
    before = it.core.digest()
    with pytest.raises(OutOfPages):
        it.core.reserve([rec, other], [2 * PAGE, PAGE])
    assert it.core.digest() == before
    assert it.step([rec], [[]], [4])
    it.sound()


def test_speculative_spans_wait_for_their_committed_end() -> None:
    """A span that only drafts complete publishes nothing."""
    it = made(3, tails=False)
    spans = (Span(2, 6, b"x"),)
    rec = lease(it, [*TOKENS[:6], 9], spans=spans)
    assert it.step([rec], [TOKENS[:5]], [3])
    assert not rec.nodes
    it.sound()
    assert it.step([rec], [TOKENS[5:6]], [3])
    assert len(rec.nodes) == 1
    it.sound()
