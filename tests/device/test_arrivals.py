"""Pages given out while they are still on the way: with a device that runs late, whoever touches
them or the host frames they come from has to wait for what it needs, and for no more.

Everything is 0xFF before it is restored; what is expected was cloned before.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import Cache, CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind, OpKind, Part
from kvtier.data import records, transfer
from kvtier.data.arrivals import Arrival, Arrivals
from kvtier.data.streams import CpuStreams, Event, Fences, Lane
from kvtier.layouts import Layout, gqa, mla
from kvtier.types import Tier
from tests.device.test_transfer_cpu import (
    GEOMETRY,
    PLAIN,
    Plane,
    down,
    from_disk,
    plane,
    store_chain,
    up,
)

LAYERS = 3


class Flag:
    def __init__(self) -> None:
        self.event = threading.Event()

    def synchronize(self) -> None:
        assert self.event.wait(300)


class LateDevice(CpuStreams):
    """What is queued on the LOAD lane runs later, on a thread of its own; other lanes at once."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.credits = threading.Semaphore(0)
        """One for each copy that may run."""
        self.free = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            task()

    def on(self, lane: Lane, after: Fences = ()) -> AbstractContextManager[None]:
        for event in after:
            if lane is Lane.LOAD:
                self.tasks.put(event.synchronize)
            else:
                event.synchronize()
        return nullcontext()

    def mark(self, lane: Lane) -> Event:
        flag = Flag()
        if lane is Lane.LOAD:
            self.tasks.put(flag.event.set)
        else:
            flag.event.set()
        return flag

    def unpack(self, *args: Any) -> None:
        def run() -> None:
            if not self.free:
                assert self.credits.acquire(timeout=300)
            else:
                time.sleep(random.random() / 500)
            unpack_pages(*args)

        self.tasks.put(run)

    def let(self, copies: int) -> None:
        self.credits.release(copies)

    def let_all(self) -> None:
        self.free = True
        self.credits.release(1000)

    def stop(self) -> None:
        self.let_all()
        self.tasks.put(None)
        self.thread.join(300)


unpack_pages = records.unpack_pages


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    device = LateDevice()
    monkeypatch.setattr(transfer, "EARLY_BYTES", 1)
    monkeypatch.setattr(records, "LAYERS_BYTES", 1)
    monkeypatch.setattr(records, "FIRST_LAYERS_BYTES", 1)
    monkeypatch.setattr(transfer, "streams_for", lambda _: device)
    monkeypatch.setattr(records, "unpack_pages", device.unpack)
    yield device
    device.stop()


@contextmanager
def running(late: LateDevice, **options: object) -> Iterator[Plane]:
    with plane(**options) as p:  # type: ignore[arg-type]
        try:
            yield p
        finally:
            late.let_all()  # or ``close`` would wait for ever


def layer_bytes(p: Plane, page: int, layer: int) -> bytes:
    return b"".join(bytes(p.pool._storage[c.name, layer][page].tolist()) for c in p.layout.history)


def ids(*pages: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(pages, np.int32)


def packed(p: Plane, count: int) -> list[list[bytes]]:
    """Pages 0 .. count-1 on the host, the device poisoned; what each layer of them held."""
    want = [[layer_bytes(p, page, layer) for layer in range(LAYERS)] for page in range(count)]
    assert p.start(OpKind.PACK, *[down(i, i) for i in range(count)]).delivered == count
    p.poison_all()
    return want


def test_each_layer_is_there_when_it_has_been_waited_for(late: LateDevice) -> None:
    with running(late) as p:
        want = packed(p, 4)
        assert p.start(OpKind.RESTORE, *[up(i, 11 - i) for i in range(4)]).delivered == 4
        assert set(p.page(11)) == {0xFF}, "it ended early, and nothing has come"
        (arrival,) = p.pool.arriving(ids(-1, 9, 3))
        for layer in range(LAYERS):
            late.let(1)
            arrival.wait(layer)
            for page in range(4):
                for other in range(LAYERS):
                    held = layer_bytes(p, 11 - page, other)
                    assert held == want[page][other] if other <= layer else set(held) == {0xFF}
        arrival.wait()
        assert not p.pool.arriving(ids(7))
        deadline = time.monotonic() + 300
        while p.pool.arriving(ids(8)) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not p.pool.arriving(ids(8)), "it has come"


def test_only_large_restores_of_pages_alone_end_early(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(late) as p:
        packed(p, 2)
        monkeypatch.setattr(transfer, "EARLY_BYTES", 2 * PLAIN.page_bytes())
        small = p.start(OpKind.RESTORE, up(0, 4))
        large = p.start(OpKind.RESTORE, up(0, 5), up(1, 6))
        time.sleep(0.05)
        assert large.wait()
        assert not small.calls
        late.let_all()
        assert small.delivered == 1


def test_a_pack_of_a_page_on_its_way_waits(late: LateDevice) -> None:
    with running(late) as p:
        want = packed(p, 2)
        p.start(OpKind.RESTORE, up(0, 7), up(1, 8)).wait()
        pack = p.start(OpKind.PACK, down(8, 5))
        other = p.start(OpKind.PACK, down(3, 6))  # of a page that nothing is on the way to
        time.sleep(0.05)
        assert not pack.packed
        late.let_all()
        assert pack.delivered == other.delivered == 1
        assert bytes(p.host.frames[5][: PLAIN.page_bytes()].tolist()) == joined(p, want[1])


def joined(p: Plane, layers: list[bytes]) -> bytes:
    """A packed record of what each layer holds: component by component."""
    out = b""
    sizes = [c.page_bytes for c in p.layout.history]
    for i, size in enumerate(sizes):
        start = sum(sizes[:i])
        for held in layers:
            out += held[start : start + size]
    return out


def test_a_copy_of_a_page_on_its_way_waits(late: LateDevice) -> None:
    with running(late) as p:
        want = packed(p, 2)
        p.start(OpKind.RESTORE, up(0, 7), up(1, 8)).wait()
        threading.Timer(0.05, late.let_all).start()
        copy = p.start(OpKind.COPY, Part(Kind.HISTORY, Tier.GPU, (7,), Tier.GPU, (2,)))
        assert copy.delivered == 1
        assert p.page(2) == joined(p, want[0])


def test_frames_that_are_still_read_are_not_overwritten(late: LateDevice) -> None:
    """The host copies may be evicted, and their frames packed and read into, once a restore has
    ended."""
    with running(late) as p:
        want = store_chain(p, 3)
        assert p.start(OpKind.RESTORE, *[from_disk(i + 1, frame=i) for i in (0, 1)]).delivered == 2
        p.start(OpKind.RESTORE, up(0, 7), up(1, 8)).wait()
        pack = p.start(OpKind.PACK, down(3, 0))
        read = p.start(OpKind.RESTORE, from_disk(3, frame=1))
        time.sleep(0.05)
        assert not pack.calls
        assert not read.calls
        late.let_all()
        assert pack.delivered == read.delivered == 1
        assert (p.page(7), p.page(8)) == (want[0], want[1])
        assert set(p.host.frames[0][: PLAIN.page_bytes()].tolist()) == {0xFF}
        assert bytes(p.host.frames[1][: PLAIN.page_bytes()].tolist()) == want[2]


def test_pages_from_disk_are_verified_before_it_ends(late: LateDevice) -> None:
    with running(late) as p:
        want = store_chain(p, 4)
        p.store.corrupt((3).to_bytes(16, "big"))
        end = p.start(OpKind.RESTORE, *[from_disk(i + 1, page=8 + i, via=(8 + i,)) for i in (0, 1)])
        bad = p.start(OpKind.RESTORE, from_disk(3, page=5), from_disk(4, page=6))
        threading.Timer(0.05, late.let_all).start()
        assert end.delivered == 2
        assert bad.delivered == 0
        for arrival in p.pool.arriving(ids(8, 9)):
            arrival.wait()
        assert (p.page(8), p.page(9)) == (want[0], want[1])


def test_a_page_restored_twice_holds_the_last(late: LateDevice) -> None:
    with running(late) as p:
        want = packed(p, 2)
        p.start(OpKind.RESTORE, up(0, 7)).wait()
        p.start(OpKind.RESTORE, up(1, 7)).wait()
        arrivals = p.pool.arriving(ids(7))
        assert len(arrivals) == 2
        late.let_all()
        for arrival in arrivals:
            arrival.wait(1)
        assert layer_bytes(p, 7, 1) == want[1][1]


def test_a_device_that_fails_is_told_to_all_who_wait(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op has ended by then, and its pages may be anybody's: nobody takes them for good."""
    calls, ended = iter(range(10)), threading.Event()

    def fails(*args: Any) -> None:
        assert ended.wait(300)
        if next(calls) == 1:  # the second layer
            raise RuntimeError("lost")
        late.unpack(*args)

    with running(late) as p:
        packed(p, 2)
        monkeypatch.setattr(records, "unpack_pages", fails)
        assert p.start(OpKind.RESTORE, up(0, 7), up(1, 8)).delivered == 2
        ended.set()
        (arrival,) = p.pool.arriving(ids(7))
        with pytest.raises(RuntimeError, match="could not be queued"):
            arrival.wait(1)
        pack = p.start(OpKind.PACK, down(8, 5))
        copy = p.start(OpKind.COPY, Part(Kind.HISTORY, Tier.GPU, (7,), Tier.GPU, (2,)))
        for end in (pack, copy):
            assert end.delivered == 0
            assert isinstance(end.error, RuntimeError)
        assert p.pool.arriving(ids(8)) == (arrival,)


class Held:
    """Keeps the copying thread from queueing layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: LateDevice) -> None:
        self.go = threading.Event()

        def unpack(*args: Any) -> None:
            assert self.go.wait(300)
            late.unpack(*args)

        monkeypatch.setattr(records, "unpack_pages", unpack)


def test_it_ends_before_anything_is_queued(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits does so until it is, wherever that is; and the copying thread for nothing."""
    with running(late) as p:
        want = packed(p, 3)
        held = Held(monkeypatch, late)
        late.let_all()
        p.start(OpKind.RESTORE, up(0, 7), up(1, 8)).wait()
        (arrival,) = p.pool.arriving(ids(7))
        assert not arrival.queued
        monkeypatch.setattr(transfer, "EARLY_BYTES", 1 << 40)
        again = p.start(OpKind.RESTORE, up(2, 8))  # the page has changed hands
        pack = p.start(OpKind.PACK, down(7, 5))
        other = p.start(OpKind.PACK, down(3, 6))
        threading.Timer(0.05, held.go.set).start()
        copy = p.start(OpKind.COPY, Part(Kind.HISTORY, Tier.GPU, (7,), Tier.GPU, (2,)))
        assert arrival.queued
        assert [end.delivered for end in (again, pack, other, copy)] == [1] * 4
        assert p.page(2) == joined(p, want[0])
        assert bytes(p.host.frames[5][: PLAIN.page_bytes()].tolist()) == joined(p, want[0])
        assert p.page(8) == joined(p, want[2])


def test_close_waits_for_what_is_not_even_queued(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(late) as p:
        want = packed(p, 1)
        held = Held(monkeypatch, late)
        late.let_all()
        p.start(OpKind.RESTORE, up(0, 7)).wait()
        threading.Timer(0.05, held.go.set).start()
        p.transfer.close()
        assert p.page(7) == joined(p, want[0])
        assert not p.pool.arrivals


def test_frames_that_are_not_there_fail_it_before_anything_is_queued(late: LateDevice) -> None:
    with running(late) as p:
        packed(p, 1)
        for part in (up(0, 12), up(0, -1), up(12, 0), up(-1, 0)):
            end = p.start(OpKind.RESTORE, up(0, 3), part)
            assert end.delivered == 0
            assert isinstance(end.error, IndexError)
        assert late.tasks.empty()


def test_close_waits_for_what_is_on_the_way(late: LateDevice) -> None:
    with running(late) as p:
        want = packed(p, 1)
        p.start(OpKind.RESTORE, up(0, 7)).wait()
        threading.Timer(0.05, late.let_all).start()
        p.transfer.close()
        assert p.page(7) == joined(p, want[0])
        assert not p.pool.arrivals


def test_touching_is_told_apart_by_pages_and_frames() -> None:
    arrivals = Arrivals()
    assert not arrivals
    one = Arrival(CpuStreams(), (1, 2), (8,))
    two = Arrival(CpuStreams(), (3,), ())
    arrivals.add(one)
    arrivals.add(two)
    assert arrivals.touching(pages=[2, 3]) == (one, two)
    assert arrivals.touching(pages=[8], frames=[3]) == ()
    assert arrivals.touching(frames=iter([8])) == (one,)
    one.over()
    one.over()
    assert arrivals.touching(pages=[1, 2, 3], frames=[8]) == (two,)


# --------------------------------------------------------------------------- the whole cache

PAGE = 16
WIDE = mla(layers=LAYERS, latent_dim=32, rope_dim=16, page_tokens=PAGE)


def open_cache(device: str, layout: Layout = WIDE, pages: int = 12) -> Cache:
    size = layout.page_bytes()
    config = CacheConfig(gpu_bytes=pages * size, cpu_bytes=64 * layout.frame_bytes())
    return Cache(layout, config, model="test", device=device)


def value(position: int, layer: int) -> float:
    return float((position * 7 + layer * 3) % 101 + 1)


def write(cache: Cache, lease: Any, tokens: list[int]) -> None:
    with cache.step([(lease, tokens)]) as step:
        device = step.to_device()
        for layer in range(LAYERS):
            rows = device.layer(layer).rows("latent")
            values = [value(p, layer) for p in step.positions.tolist()]
            column = torch.tensor(values, dtype=rows.dtype, device=rows.device)
            rows[device.slot_mapping["latent"]] = column[:, None].expand(-1, rows.shape[1])


def evict_all(cache: Cache, pages: int) -> None:
    """Nothing of what was cached before is left on the device, and what is there is poison."""
    cache.flush(to=Tier.CPU).result(300)
    with cache.lease([5] * (pages * PAGE - 1)) as other:
        other.ready.result(300)
        other.reserve(pages * PAGE - 1)
        pool = cache._pump.transfer.pool  # type: ignore[attr-defined]
        pool.poison_all()
        if pool.device.type == "cuda":
            torch.cuda.synchronize()


def read(step: Any, layer: int, positions: int) -> torch.Tensor:
    """Column 0 of the first ``positions`` rows of the only lease, queued behind the layer."""
    rows = step.layer(layer).rows("latent")
    at = torch.arange(positions, device=rows.device)
    pages = step.block_table[0].to(torch.int64)
    return rows[pages[at // PAGE] * PAGE + at % PAGE, 0].clone()


def expected(positions: int, layer: int) -> torch.Tensor:
    return torch.tensor([value(p, layer) for p in range(positions)], dtype=torch.bfloat16)


@pytest.mark.parametrize("way", ["layers", "buffers", "by hand", "fork", "pause", "abandon"])
def test_a_lease_is_active_while_its_pages_come(late: LateDevice, way: str) -> None:
    prompt = list(range(100, 100 + 4 * PAGE + 1))
    with open_cache("cpu") as cache:
        late.let_all()
        with cache.lease(prompt) as first:
            first.ready.result(300)
            write(cache, first, prompt)
        evict_all(cache, 12)
        late.free, late.credits = False, threading.Semaphore(0)
        with cache.lease(prompt) as lease:
            assert lease.ready.result(300) == 4 * PAGE  # while nothing has come
            if way == "layers":
                with cache.step([(lease, prompt[-1:])]) as step:
                    device = step.to_device()
                    for layer in range(LAYERS):
                        late.let(1)
                        assert torch.equal(read(device, layer, 64), expected(64, layer))
                return
            threading.Timer(0.05, late.let_all).start()
            if way == "buffers":
                buffers = cache.buffers(max_batch=2, max_tokens=4, max_pages=8)
                with cache.step([(lease, prompt[-1:])]) as step:
                    device = step.to_device(buffers, pad_to=2)
                    assert torch.equal(read(device, 2, 64), expected(64, 2))
            elif way == "by hand":
                table = lease.block_table()
                pool = cache._pump.transfer.pool  # type: ignore[attr-defined]
                held = pool.rows("latent", 2).view(-1, PAGE, 48)[table[:4].tolist(), :, 0]
                assert torch.equal(held.flatten(), expected(64, 2))
            elif way == "fork":
                with lease.fork() as other, cache.step([(other, prompt[-1:])]) as step:
                    assert torch.equal(read(step.to_device(), 2, 64), expected(64, 2))
            elif way == "pause":
                lease.pause().result(300)
                pool = cache._pump.transfer.pool  # type: ignore[attr-defined]
                assert lease.resume().result(300) == 64
                with cache.step([(lease, prompt[-1:])]) as step:
                    assert torch.equal(read(step.to_device(), 2, 64), expected(64, 2))
            else:  # gone before it has come: its pages belong to somebody else now
                lease.release()
                with cache.lease([9] * (11 * PAGE)) as other:
                    other.ready.result(300)
                    write(cache, other, [9] * (11 * PAGE))
                    with cache.step([(other, [9])]) as step:
                        for layer in range(LAYERS):
                            got = read(step.to_device(), layer, 11 * PAGE)
                            assert torch.equal(got, expected(11 * PAGE, layer))
        cache.check()


# --------------------------------------------------------------------------- a device that is late


@pytest.mark.gpu
def test_layers_on_a_gpu_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies sleep before they run; what a stream reads of a layer it has waited for is right."""
    rng = random.Random(1)
    monkeypatch.setattr(transfer, "EARLY_BYTES", 1)
    monkeypatch.setattr(records, "LAYERS_BYTES", 1)
    monkeypatch.setattr(records, "FIRST_LAYERS_BYTES", 1)

    def sleepy(*args: Any) -> None:
        torch.cuda._sleep(rng.randrange(1, 20_000_000))  # type: ignore[no-untyped-call]
        copy_pieces(*args)

    copy_pieces = records.copy_pieces
    monkeypatch.setattr(records, "copy_pieces", sleepy)
    monkeypatch.setattr(records, "PIECE_BYTES", 1)
    layout = gqa(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=16)
    with plane(layout, Geometry(**{**GEOMETRY_FIELDS, "gpu_pages": 24}), device="cuda") as p:
        early = 0
        for turn in range(20):
            for page in range(8):
                for span in p.pool.spans(Kind.HISTORY, [page], live=False):
                    assert isinstance(span, torch.Tensor)
                    span.fill_(turn * 8 + page)
            torch.cuda.synchronize()
            assert p.start(OpKind.PACK, *[down(i, i) for i in range(8)]).delivered == 8
            p.poison_pages(range(8, 24))
            targets = rng.sample(range(8, 24), 8)
            end = p.start(OpKind.RESTORE, *[up(i, t) for i, t in enumerate(targets)])
            assert end.delivered == 8
            late = p.pool.arriving(ids(*targets))
            early += bool(late) and not late[0].whole.query()  # type: ignore[attr-defined]
            seen = []
            for layer in range(3):
                for arrival in late:
                    arrival.wait(layer)
                storage = p.pool._storage["k", layer]
                seen.append(torch.stack([storage[target] for target in targets]))
            # Its frames are packed over, its pages copied away, before it has come.
            pack = p.start(OpKind.PACK, *[down(t, 11 - i) for i, t in enumerate(targets[:4])])
            for layer in range(3):
                want = torch.arange(turn * 8, turn * 8 + 8, dtype=torch.uint8)[:, None]
                assert torch.equal(seen[layer].cpu(), want.expand(-1, seen[layer].shape[1]))
            assert pack.delivered == 4
            size = layout.page_bytes()
            for i in range(4):
                assert set(p.host.frames[11 - i][:size].tolist()) == {turn * 8 + i}
        assert early > 10


GEOMETRY_FIELDS: dict[str, Any] = {
    "page_tokens": GEOMETRY.page_tokens,
    "gpu_pages": GEOMETRY.gpu_pages,
    "cpu_frames": GEOMETRY.cpu_frames,
    "disk_frames": GEOMETRY.disk_frames,
}
