"""What the copying thread is made of: turns, slots, even batches, copies of rows, late seals."""

import itertools
import threading
import time
from collections import deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_pipeline
from kvtier.core.ops import Kind, OpKind
from kvtier.data import records, transfer
from kvtier.data.copier import _Together, even_batch
from kvtier.data.host import HostArena
from kvtier.data.jobs import Turns
from kvtier.data.rows import _neighbours_joined, copy_rows
from kvtier.data.staging import Slots
from kvtier.layouts import gqa, swa_c4_c128
from tests.device.test_transfer_cpu import PLAIN, down, plane, up


class Piecewise:
    """A task of several pieces that says when it may go on."""

    def __init__(
        self, name: str, log: list[str], *, pieces: int = 1, deadline: float | None = None
    ) -> None:
        self.name, self.log, self.pieces, self.deadline = name, log, pieces, deadline
        self.open = threading.Event()
        self.over = threading.Event()

    def absorb(self, other: object) -> bool:
        return False

    def ready(self) -> bool:
        return self.open.is_set()

    def run(self) -> bool:
        self.log.append(self.name)
        self.pieces -= 1
        if not self.pieces:
            self.over.set()
        return self.pieces > 0


def test_turns_alternate_and_keep_the_order_of_each_queue() -> None:
    log: list[str] = []
    turns = Turns("test", 2)
    a, b, c = (Piecewise(n, log, pieces=2) for n in "abc")
    for number, task in ((0, a), (0, b), (1, c)):
        turns.submit(number, task)
    for task in (b, c, a):  # b is open first, and still comes after a
        task.open.set()
    time.sleep(0.05)
    turns.wake()
    turns.stop()
    turns.threads[0].join(300)
    assert not turns.threads[0].is_alive()
    assert sorted(log) == list("aabbcc")
    assert "".join(log).replace("c", "") == "aabb"


def test_a_queue_whose_head_is_not_ready_holds_up_no_other() -> None:
    log: list[str] = []
    turns = Turns("test", 2)
    stuck, free = Piecewise("stuck", log), Piecewise("free", log)
    free.open.set()
    turns.submit(0, stuck)
    turns.submit(1, free)
    assert free.over.wait(300)
    turns.stop()  # not before what is queued has run
    turns.threads[0].join(0.1)
    assert turns.threads[0].is_alive()
    stuck.open.set()
    turns.wake()
    turns.threads[0].join(300)
    assert log == ["free", "stuck"]


def test_a_deadline_runs_what_is_not_ready() -> None:
    log: list[str] = []
    turns = Turns("test", 1)
    late = Piecewise("late", log, deadline=time.monotonic() + 0.05)
    turns.submit(0, late)
    assert late.over.wait(300)
    assert time.monotonic() >= late.deadline  # type: ignore[operator]
    turns.stop()
    turns.threads[0].join(300)


def test_a_task_that_raises_is_over(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Piecewise):
        def run(self) -> bool:
            raise ZeroDivisionError

    log: list[str] = []
    turns = Turns("test", 1)
    broken, after = Broken("broken", log), Piecewise("after", log)
    broken.open.set()
    after.open.set()
    turns.submit(0, broken)
    turns.submit(0, after)
    assert after.over.wait(300)
    turns.stop()
    turns.threads[0].join(300)
    assert "ZeroDivisionError" in caplog.text


@given(st.integers(1, 10_000), st.integers(1, 500))
def test_batches_are_even_and_no_rest_is_small(frames: int, batch: int) -> None:
    size = even_batch(frames, batch)
    count = -(-frames // size)
    assert size <= max(batch * 1.5, 1) + 1
    assert count <= max(1, round(frames / batch))
    assert frames <= batch or size * 2 > batch


def test_slots_come_back() -> None:
    slots = Slots(5, 16, torch.device("cpu"))
    first = slots.take(1, 3)
    assert first is not None and first.tolist() == [0, 1, 2]
    assert slots.free == 2
    assert slots.take(3, 9) is None
    assert slots.free == 2
    assert slots.take(0, 0) is not None and slots.free == 2
    slots.give(first)
    left = slots.take(5, 9)
    assert left is not None and sorted(left) == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError):
        slots.give(range(6))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("batched", [True, False])
def test_rows_are_copied_and_nothing_else(
    device: str, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, with the driver's batch and without."""
    if not batched:
        monkeypatch.setattr("kvtier.data.rows._batch_copy", lambda: None)
    pinned = torch.device("cuda", 0) if device == "cuda" else None
    host = HostArena(6, 4096, pinned=pinned)
    host.frames.copy_(torch.randint(0, 255, (6, 4096), dtype=torch.uint8))
    there = torch.full((8, 5000), 0xFF, dtype=torch.uint8, device=device)[:, :4096]
    want = there.cpu().clone()
    for row, frame, size in ((7, 2, 4096), (0, 5, 1), (3, 0, 4095)):
        want[row, :size] = host.frames[frame, :size]

    def run(*args: object) -> None:
        if device == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                copy_rows(*args)  # type: ignore[arg-type]
            stream.synchronize()
        else:
            copy_rows(*args)  # type: ignore[arg-type]

    run(host.frames, [2, 5, 1, 0], there, [7, 0, 4, 3], [4096, 1, 0, 4095])
    assert torch.equal(there.cpu(), want)
    back = host.frames.clone()
    back[1, :9], back[4] = want[7, :9], want[3]
    run(there, [7, 3], host.frames, [1, 4], [9, 4096])
    assert torch.equal(host.frames, back)
    run(there, [], host.frames, [], [])
    for bad in (([8], [0]), ([-1], [0]), ([0], [6]), ([0], [-1])):
        with pytest.raises(IndexError):
            run(there, bad[0], host.frames, bad[1], [16])
    assert torch.equal(host.frames, back)
    host.close()


def test_neighbours_are_copied_whole(device: str) -> None:
    """Runs of rows on both sides, on one side only, and one that ends in a short row."""
    pinned = torch.device("cuda", 0) if device == "cuda" else None
    host = HostArena(12, 4096, pinned=pinned)
    host.frames.copy_(torch.randint(0, 255, (12, 4096), dtype=torch.uint8))
    there = torch.full((12, 4096), 0xFF, dtype=torch.uint8, device=device)
    frames, rows = [1, 2, 3, 5, 6, 8, 9, 11], [0, 1, 2, 4, 8, 9, 10, 3]
    sizes = [4096, 4096, 4096, 4096, 4096, 4096, 17, 4096]
    want = there.cpu().clone()
    for frame, row, size in zip(frames, rows, sizes, strict=True):
        want[row, :size] = host.frames[frame, :size]

    def run(*args: object) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            copy_rows(*args, sizes)  # type: ignore[arg-type]
        if device == "cuda":
            torch.cuda.synchronize()

    run(host.frames, frames, there, rows)
    assert torch.equal(there.cpu(), want)
    held = host.frames.clone()
    host.frames.fill_(0x11)
    run(there, rows, host.frames, frames)
    back = torch.full_like(held, 0x11)
    for frame, size in zip(frames, sizes, strict=True):
        back[frame, :size] = held[frame, :size]
    assert torch.equal(host.frames, back)
    host.close()


@given(st.data())
def test_neighbours_joined_are_the_same_bytes(data: st.DataObject) -> None:
    """As few copies as can be, in the same order, and no byte more or less."""
    count = data.draw(st.integers(1, 12))
    number = st.integers(0, 12)
    targets = data.draw(st.lists(number, min_size=count, max_size=count, unique=True))
    if data.draw(st.booleans()):
        targets.sort()
    sources = data.draw(st.lists(number, min_size=count, max_size=count))
    if data.draw(st.booleans()):
        sources = [at + 1 for at in targets]
    sizes = data.draw(st.lists(st.sampled_from([5, 8, 8, 8]), min_size=count, max_size=count))
    copies = [(8 * t, 1000 + 8 * s, n) for t, s, n in zip(targets, sources, sizes, strict=True)]

    def moved(some: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(t + i, s + i) for t, s, n in some for i in range(n)]

    joined = _neighbours_joined(*(np.array(each, np.uint64) for each in zip(*copies, strict=True)))
    found = list(zip(*(each.tolist() for each in joined), strict=True))
    assert moved(found) == moved(copies)
    for (t, s, n), (after, behind, _) in itertools.pairwise(found):
        assert (t + n, s + n) != (after, behind)


def test_a_seal_that_comes_late_says_nothing_of_what_was_written_since() -> None:
    arena = HostArena(2, 4096)
    arena.unseal([0, 1])
    arena.view(0)[:] = b"a" * 4096
    written = arena.written([0, 1])
    arena.seal([0, 1], 4096, written)
    assert arena._checksums[0] == xxhash.xxh3_128_digest(b"a" * 4096)
    arena.unseal([1])  # one frame of the record is enough
    arena.seal([0, 1], 4096, written)
    arena.unseal([0])
    arena.view(0)[:] = b"b" * 4096
    arena.seal([0, 1], 4096, written)
    assert arena._checksums.tolist() == [None, None]
    assert arena.checksum_of([0, 1], 4096) == xxhash.xxh3_128_digest(b"b" * 4096)


def test_the_benchmark_moves_what_it_says() -> None:
    """Its own check is the oracle: every record is the same on both sides afterwards."""
    tails = swa_c4_c128(layer_ratios=(0, 4, 128))
    small = gqa(layers=2, kv_heads=2, head_dim=64)
    for case in (
        bench_pipeline.Case("small", small),
        bench_pipeline.Case("tails", tails, Kind.CHECKPOINT),
    ):
        bench = bench_pipeline._Bench(case, device="cpu", in_flight=2_000_000)
        try:
            rates = bench.plane("both", 12)
            assert rates
            assert min(rates) > 0
            bench.check()
            bench.plane_.host.frames[bench.ends[0][1][0], 5] ^= 1
            with pytest.raises(AssertionError):
                bench.check()
        finally:
            bench.close()


class Counted:
    """Holds up the first call, so that others come meanwhile; counts all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls = 0
        self.go, self.inside = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def call(*args: object) -> object:
            self.calls += 1
            if self.calls == 1:
                self.inside.set()
                assert self.go.wait(300)
            return real(*args)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("bad", [False, True])
def test_small_packs_that_wait_go_together(bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gather and one copy for all of them, each with ends of its own; one that cannot be done
    takes no other with it."""
    with plane(io_threads=1) as p:
        gathers = Counted(monkeypatch, records.Packer, "gather")
        ends = [p.start(OpKind.PACK, down(0, 0))]
        assert gathers.inside.wait(300)
        ends += [p.start(OpKind.PACK, down(i, i)) for i in range(1, 6)]
        wrong = [p.start(OpKind.PACK, down(-1, 9))] if bad else []
        ends += [p.start(OpKind.PACK, down(i, i)) for i in (6, 7)]
        gathers.go.set()
        assert [end.delivered for end in ends] == [1] * 8
        for i in range(8):
            assert bytes(p.host.frames[i][: PLAIN.page_bytes()].tolist()) == p.page(i)
        for end in wrong:
            assert end.delivered == 0
            assert isinstance(end.error, IndexError)
        # The first, then up to four, a third of the staging, at once; or each by itself.
        assert gathers.calls == (1 + 1 + 1 + 4 if bad else 1 + 1 + 1)


@pytest.mark.parametrize("bad", [False, True])
def test_small_loads_that_wait_go_together(bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with plane(io_threads=1) as p:
        want = [p.page(i) for i in range(8)]
        assert p.start(OpKind.PACK, *[down(i, i) for i in range(8)]).delivered == 8
        p.poison_all()
        loads = Counted(monkeypatch, records.Loader, "load")
        ends = [p.start(OpKind.RESTORE, up(0, 11))]
        assert loads.inside.wait(300)
        ends += [p.start(OpKind.RESTORE, up(i, 11 - i)) for i in range(1, 6)]
        wrong = [p.start(OpKind.RESTORE, up(6, 12))] if bad else []
        ends += [p.start(OpKind.RESTORE, up(i, 11 - i)) for i in (6, 7)]
        loads.go.set()
        assert [end.delivered for end in ends] == [1] * 8
        assert [p.page(11 - i) for i in range(8)] == want
        for end in wrong:
            assert end.delivered == 0
            assert isinstance(end.error, IndexError)
        assert loads.calls == (1 + 1 + 8 if bad else 1 + 1)


def test_what_waits_together_waits_for_slots_of_all() -> None:
    slots = Slots(4, 16, torch.device("cpu"))
    taken = slots.take(1, 1)
    assert taken is not None
    tried: list[int] = []

    class Two(Piecewise):
        count = 2

    log: list[str] = []
    one, two = (
        _Together(lambda tasks: bool(tried.append(len(tasks))), slots, 4, deque([Two(name, log)]))
        for name in "ab"
    )
    assert not one.ready()
    assert one.absorb(two)
    assert not one.absorb(two), "more than may go together"
    assert not one.ready(), "three of four are free"
    slots.give(taken)
    assert one.ready()
    assert one.run(), "it could not be done: each has its own turn"
    assert tried == [2]
    assert not one.ready()
    one.tasks[0].open.set()
    assert one.ready()
    assert one.run()
    assert not one.run()
    assert log == ["a", "b"]


def test_the_benchmark_waits_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "EARLY_BYTES", 1)
    monkeypatch.setattr(bench_pipeline, "RESTORED", 2_000_000)
    case = bench_pipeline.Case("small", gqa(layers=2, kv_heads=2, head_dim=64))
    results = bench_pipeline._first_layer(case, repeats=3, device="cpu")
    assert [r.name for r in results] == ["restore_ready", "restore_first_layer", "restore_whole"]
    assert 0 < results[0].median <= results[1].median <= results[2].median
