"""The data plane with real threads and plain memory as the device.

Everything that may not be read is 0xFF, everything that is expected was cloned before.
"""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from kvtier.config import CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.data import DeviceTransfer, HostArena, transfer
from kvtier.data.jobs import Job
from kvtier.data.streams import Lane
from kvtier.errors import CacheClosed, ConfigError, StoreError
from kvtier.layouts import Component, Layout, Share, gqa
from kvtier.seams import Read, Record
from kvtier.testing import MemoryStore
from kvtier.types import Tier

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]

GPU, CPU, DISK = Tier.GPU, Tier.CPU, Tier.DISK
PLAIN = gqa(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=16)


def component(name: str, share: Share, **sizes: object) -> Component:
    fields = {"tokens_per_slot": 1, "dtype": "uint8", "layers": (0, 2), **sizes}
    return Component(name=name, share=share, **fields)  # type: ignore[arg-type]


# Every shape there is: plain rows, packed rows with padding, a state, two kinds of windows.
TAILED = Layout(
    name="tailed",
    page_tokens=16,
    components=(
        component(
            "swa",
            Share.TAIL,
            slots_per_page=8,
            slot_bytes=10,
            planes=(8, 2),
            window=12,
            layers=(0, 1, 2),
            page_align=32,
        ),
        component("latent", Share.HISTORY, slots_per_page=16, slot_bytes=12, dtype="bfloat16"),
        component(
            "c4",
            Share.HISTORY,
            tokens_per_slot=4,
            slots_per_page=4,
            slot_bytes=13,
            planes=(12, 1),
            page_align=32,
        ),
        component("ring", Share.TAIL, slots_per_page=4, slot_bytes=500, dtype="float32"),
    ),
)
GEOMETRY = Geometry(page_tokens=16, gpu_pages=12, cpu_frames=12, disk_frames=64)
TAILED_GEOMETRY = Geometry(
    page_tokens=16,
    gpu_pages=12,
    cpu_frames=12,
    disk_frames=64,
    has_tails=True,
    checkpoint_frames=2,
    parked_frames=2,
    gpu_states=4,
    gpu_checkpoints=3,
    window=12,
    window_page=8,
    gpu_windows=10,
)


def scramble(spans: Sequence[torch.Tensor | int], seed: int) -> None:
    """Bytes from 0 to 254: nothing real looks like poison."""
    generator = torch.Generator().manual_seed(seed)
    for span in spans:
        if isinstance(span, torch.Tensor):
            noise = torch.randint(0, 255, span.shape, dtype=torch.uint8, generator=generator)
            span.copy_(noise)


@dataclass(eq=False)
class End:
    """How one op ended; counts calls, so that a second one shows."""

    op: Op
    calls: list[tuple[int, BaseException | None]] = field(default_factory=list)
    packed: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> "End":
        assert self.over.wait(300), f"{self.op.kind} did not end"
        return self

    @property
    def delivered(self) -> int:
        (n, _), *more = self.wait().calls
        assert not more, "done was called twice"
        return n

    @property
    def error(self) -> BaseException | None:
        return self.wait().calls[0][1]


class Plane:
    """A transfer under test, and short names for the ops on it."""

    def __init__(
        self,
        layout: Layout = PLAIN,
        geometry: Geometry = GEOMETRY,
        store: MemoryStore | None = None,
        device: str = "cpu",
        **options: object,
    ) -> None:
        sizes = {"gpu_bytes": 1, "cpu_bytes": 1, "io_threads": 2, **options}
        self.layout = layout
        self.store = MemoryStore() if store is None else store
        self.transfer = DeviceTransfer(
            layout,
            geometry,
            device=device,
            store=self.store,
            config=CacheConfig(**sizes),  # type: ignore[arg-type]
        )
        self.pool, self.host = self.transfer.pool, self.transfer.host
        self.ids = iter(range(1, 1 << 30))
        self.ends: list[End] = []
        for page in range(geometry.gpu_pages):
            scramble(self.pool.spans(Kind.HISTORY, [page], live=False), seed=page)

    def start(
        self,
        kind: OpKind,
        *parts: Part,
        packed: Callable[[], None] = lambda: None,
        done: Callable[[], None] = lambda: None,
        must: bool = False,
    ) -> End:
        end = End(Op(next(self.ids), kind, parts, must=must))
        self.ends.append(end)

        def on_packed() -> None:
            assert not end.calls, "packed after done"
            end.packed += 1
            packed()

        def on_done(n: int, error: BaseException | None) -> None:
            assert kind is not OpKind.PACK or end.packed == 1, "done before packed"
            end.calls.append((n, error))
            try:
                done()
            finally:
                end.over.set()

        self.transfer.start(end.op, packed=on_packed, done=on_done)
        return end

    def page(self, page: int) -> bytes:
        return b"".join(
            bytes(self.pool._storage[c.name, layer][page].tolist())
            for c in self.layout.history
            for layer in c.layers
        )

    def poison_pages(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.pool.poison(Kind.HISTORY, [page], live=False)
        self._settle()

    def poison_all(self) -> None:
        self.pool.poison_all()
        self._settle()

    def _settle(self) -> None:
        """Nothing fences what a test queues itself: left under way, it would overwrite what the
        next op restores."""
        if self.pool.device.type == "cuda":
            torch.cuda.current_stream(self.pool.device).synchronize()


@contextmanager
def plane(
    layout: Layout = PLAIN, geometry: Geometry = GEOMETRY, **options: object
) -> Iterator[Plane]:
    it = Plane(layout, geometry, **options)  # type: ignore[arg-type]
    try:
        yield it
    finally:
        it.transfer.close()
        assert not [t for t in it.transfer._threads if t.is_alive()]
        for end in it.ends:
            assert len(end.calls) == 1, f"{end.op}: done was called {len(end.calls)} times"
            assert end.packed == (end.op.kind is OpKind.PACK)
        staging = it.transfer._staging
        for slots in (staging, it.transfer._landing):
            assert sorted(slots._free) == list(range(slots.num_slots)), "a slot was lost"
        assert staging._backlog == 0


def down(page: int, frame: int) -> Part:
    return Part(Kind.HISTORY, GPU, (page,), CPU, (frame,))


def up(frame: int, page: int) -> Part:
    return Part(Kind.HISTORY, CPU, (frame,), GPU, (page,))


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def to_disk(n: int, frame: int) -> Part:
    """Page number n (1-based) of a chain."""
    return Part(
        Kind.HISTORY, CPU, (frame,), DISK, (n,), key=key(n), parent=key(n - 1), depth=n,
        tokens=bytes([n]) * 64,
    )  # fmt: skip


def from_disk(n: int, *, page: int = -1, via: tuple[int, ...] = (), frame: int = -1) -> Part:
    target, dst = (GPU, (page,)) if frame < 0 else (CPU, (frame,))
    return Part(
        Kind.HISTORY, DISK, (n,), target, dst, via=via, key=key(n), parent=key(n - 1), depth=n,
        tokens=bytes([n]) * 64,
    )  # fmt: skip


def read_counts(p: Plane) -> list[int]:
    """How many records each read asks the store for, from here on."""
    read, read_into = list[int](), p.store.read_into

    def noted(reads: Sequence[Read]) -> list[bool]:
        read.append(len(reads))
        return read_into(reads)

    p.store.read_into = noted  # type: ignore[method-assign]
    return read


def store_chain(p: Plane, length: int) -> list[bytes]:
    """Pages 0 .. length-1 to disk; what they held.  Device and host are poisoned afterwards."""
    want = [p.page(i) for i in range(length)]
    assert p.start(OpKind.PACK, *[down(i, i) for i in range(length)]).delivered == length
    assert p.start(OpKind.STORE, *[to_disk(i + 1, i) for i in range(length)]).delivered == length
    p.poison_all()
    p.host.poison(range(p.host.num_frames))
    return want


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("layout", "geometry"), [(PLAIN, GEOMETRY), (TAILED, TAILED_GEOMETRY)], ids=["gqa", "tailed"]
)
def test_every_component_survives_every_tier(
    layout: Layout, geometry: Geometry, device: str
) -> None:
    """B7: all registered components, byte-equal, from host, from disk over a host frame, from
    disk without one, and through a prefetch."""
    with plane(layout, geometry, device=device) as p:
        want = store_chain(p, 4)
        assert set(want[0]) != {255}
        assert p.start(OpKind.RESTORE, from_disk(1, page=9, via=(8,))).delivered == 1
        assert p.page(9) == want[0]
        assert p.start(OpKind.RESTORE, up(8, 3)).delivered == 1
        assert p.page(3) == want[0]
        assert p.start(OpKind.RESTORE, from_disk(2, page=0)).delivered == 1
        assert p.page(0) == want[1]
        assert p.start(OpKind.RESTORE, from_disk(3, frame=5), from_disk(4, frame=6)).delivered == 2
        assert p.start(OpKind.RESTORE, up(6, 1), up(5, 2)).delivered == 2
        assert (p.page(1), p.page(2)) == (want[3], want[2])
        for page in (4, 5, 6, 7, 8):  # 5 and 6 are frames of the host
            assert set(p.page(page)) == {255}, "a page nobody named was written"


def test_rows_are_the_bytes_that_travel() -> None:
    with plane() as p:
        rows = p.pool.rows("v", 1)
        rows[16 * 5 : 16 * 6] = torch.arange(256, dtype=torch.bfloat16).view(16, 16)
        want = rows[80:96].clone()
        p.start(OpKind.PACK, down(5, 0)).wait()
        p.poison_pages([5])
        assert rows[80:96].isnan().all()
        p.start(OpKind.RESTORE, up(0, 2)).wait()
        assert torch.equal(rows[32:48], want)


def test_host_frames_are_aligned_and_shared_not_copied() -> None:
    arena = HostArena(3, 8192)
    assert arena.frames.data_ptr() % 4096 == 0
    arena.frames[1, 5] = 7
    view = arena.view(1)
    assert (len(view), view[5], view.readonly) == (8192, 7, False)
    view[6] = 9
    assert arena.spans([1])[0][6] == 9
    assert not arena.frames[0].any()
    for frame in (-1, 3):
        with pytest.raises(IndexError):
            arena.view(frame)
    assert HostArena(0, 4096).frames.shape == (0, 4096)


def test_a_pinned_arena_is_registered_and_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("kvtier.data.host._driver", lambda *call: calls.append(call))
    gpu = torch.device("cuda", 1)
    for forgotten in (False, True):
        arena = HostArena(3, 4096, pinned=gpu)
        start = arena.frames.data_ptr()
        if not forgotten:
            arena.close()
            arena.close()
        del arena
        assert calls == [
            (gpu, "cudaHostRegister", start, 3 * 4096, 0),
            (gpu, "cudaHostUnregister", start),
        ]
        calls.clear()


def test_pinned_memory_is_not_copied_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def flags(arena: HostArena) -> list[str]:
        blocks = Path("/proc/self/smaps").read_text().split("VmFlags:")
        start = f"{arena.frames.data_ptr():x}-"
        (at,) = (i for i, block in enumerate(blocks) if f"\n{start}" in block)
        return blocks[at + 1].partition("\n")[0].split()

    monkeypatch.setattr("kvtier.data.host._driver", lambda *_: None)
    plain, pinned = HostArena(64, 4096), HostArena(64, 4096, pinned=torch.device("cuda", 0))
    assert "dc" in flags(pinned)
    assert "dc" not in flags(plain)


def test_rows_of_a_component_that_is_not_registered() -> None:
    """B7: it fails when a model attaches, not when a page comes back without it."""
    with plane(TAILED, TAILED_GEOMETRY) as p:
        for name, layer in [("rope", 0), ("latent", 1)]:
            with pytest.raises(ConfigError, match=name):
                p.pool.rows(name, layer)
        assert p.pool.rows("latent", 2).shape == (12 * 16, 6)
        assert p.pool.rows("ring", 0).dtype == torch.float32
        # Packed pages have no rows of their own: (pages, page bytes).
        assert p.pool.rows("c4", 0).shape == (12, 64)
        assert p.pool.rows("swa", 1).shape == (10, 96)
        assert p.pool.num_bytes() == (
            12 * TAILED.page_bytes()
            + 4 * TAILED.state_bytes()
            + 10 * TAILED.window_bytes()
            + 3 * TAILED.checkpoint_bytes()
        )


def test_sources_may_be_overwritten_when_packed_fires(device: str) -> None:
    """D1: the copy to the host is held back until the source is long gone."""
    with plane(device=device) as p:
        want = [p.page(i) for i in range(3)]
        gate = threading.Event()
        land = p.transfer._packer.land
        p.transfer._packer.land = lambda *a: (gate.wait(300), land(*a))[1]  # type: ignore[method-assign]
        packed = threading.Event()

        def overwrite() -> None:
            p.poison_pages([0, 1, 2])
            packed.set()

        end = p.start(OpKind.PACK, *[down(i, 5 + i) for i in range(3)], packed=overwrite)
        assert packed.wait(300)
        assert not end.over.is_set()
        gate.set()
        assert end.delivered == 3
        p.start(OpKind.RESTORE, *[up(5 + i, i) for i in range(3)]).wait()
        assert [p.page(i) for i in range(3)] == want


@pytest.mark.gpu
def test_a_pack_waits_for_the_work_fenced_before_it() -> None:
    """The step that writes a page is still queued when its PACK starts; the page's next owner
    is still being read when it is restored into."""
    with plane(device="cuda") as p:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        rows, out = p.pool.rows("k", 0), torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            rows[:16] = 3.0
        p.transfer.fence(stream)
        assert p.start(OpKind.PACK, down(0, 0)).delivered == 1
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            out.copy_(rows[32:48])
            want = p.pool.rows("k", 0)[32:48].clone()
        p.transfer.fence(stream)
        assert p.start(OpKind.RESTORE, up(0, 2)).delivered == 1
        assert (rows[32:48] == 3.0).all()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        assert not (out == 3.0).all()


@pytest.mark.gpu
def test_a_copy_waits_for_the_work_of_every_stream() -> None:
    """The page's last owner ran on another stream than whoever copies it now."""
    with plane(device="cuda") as p:
        writer, caller = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        rows = p.pool.rows("k", 0)
        torch.cuda.synchronize()
        with torch.cuda.stream(writer):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            rows[:16] = 3.0
        p.transfer.fence(writer)
        p.transfer.fence(caller)
        assert p.start(OpKind.COPY, Part(Kind.HISTORY, GPU, (0,), GPU, (2,))).delivered == 1
        caller.synchronize()
        assert (rows[32:48] == 3.0).all()


@pytest.mark.gpu
def test_another_device_gets_no_context() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    code = """
import torch
from tests.device.test_transfer_cpu import OpKind, from_disk, plane, store_chain
with plane(device="cuda:1") as p:
    want = store_chain(p, 3)
    p.start(OpKind.RESTORE, *[from_disk(i + 1, page=i) for i in range(3)]).wait()
    assert [p.page(i) for i in range(3)] == want
print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def test_records_carry_the_checksum_taken_when_they_were_packed() -> None:
    with plane() as p:
        want = p.page(0)
        p.start(OpKind.PACK, down(0, 4)).wait()
        seen: list[Record] = []
        put = p.store.put_group

        def watch(records: Sequence[Record]) -> None:
            seen.extend(records)
            put(records)

        p.store.put_group = watch  # type: ignore[method-assign]
        assert p.start(OpKind.STORE, to_disk(1, 4)).delivered == 1
        (record,) = seen
        assert record.checksum == xxhash.xxh3_128_digest(want)
        assert (record.size, record.component, record.depth) == (len(want), "history", 1)
        assert bytes(record.payload[0][: record.size]) == want
        # A bit that flips in host memory after that is found, not stored.
        p.host.view(4)[100] ^= 4
        p.start(OpKind.DROP, to_disk(1, 4)).wait()
        refused = p.start(OpKind.STORE, to_disk(1, 4))
        assert refused.delivered == 0
        assert isinstance(refused.error, StoreError)


def test_a_reused_frame_loses_its_checksum() -> None:
    with plane() as p:
        want = store_chain(p, 2)
        p.start(OpKind.RESTORE, from_disk(2, frame=0)).wait()  # frame 0 was sealed with page 1
        p.start(OpKind.DROP, to_disk(2, 0)).wait()
        assert p.start(OpKind.STORE, to_disk(2, 0)).delivered == 1
        p.start(OpKind.RESTORE, from_disk(2, page=7)).wait()
        assert p.page(7) == want[1]


# --------------------------------------------------------------------------- tails


def fill_tail(p: Plane, frames: tuple[int, ...], seed: int) -> bytes:
    scramble(p.pool.spans(Kind.TAIL, frames, live=True), seed)
    return tail(p, frames)


def tail(p: Plane, frames: tuple[int, ...]) -> bytes:
    """A tail's bytes by name: states of its slot, then every window page's components."""
    state, *windows = frames
    out = b"".join(bytes(p.pool._storage["ring", n][state].tolist()) for n in (0, 2))
    for page in windows:
        for n in (0, 1, 2):
            row = p.pool._storage["swa", n][page] if page >= 0 else torch.zeros(96)
            out += bytes(row.to(torch.uint8).tolist())
    return out


def test_tails_through_checkpoint_frames_host_and_disk(device: str) -> None:
    assert TAILED.checkpoint_frames() == 2
    with plane(TAILED, TAILED_GEOMETRY, device=device) as p:
        want = fill_tail(p, (1, 4, 7), seed=1)
        assert len(want) == TAILED.checkpoint_bytes()
        capture = Part(Kind.CHECKPOINT, GPU, (1, 4, 7), GPU, (2,), live_src=True)
        assert p.start(OpKind.COPY, capture).delivered == 1
        assert bytes(p.pool.checkpoints[2].tolist()) == want
        p.pool.clear((1, 4, 7))
        assert set(tail(p, (1, 4, 7))) == {0}
        # Frames of a checkpoint need not be adjacent.
        pack = Part(Kind.CHECKPOINT, GPU, (2,), CPU, (9, 3))
        assert p.start(OpKind.PACK, down(0, 0), pack).delivered == 2
        ck = {"key": key(99), "parent": key(1), "depth": 1, "tokens": b"t"}
        keep = Part(Kind.CHECKPOINT, CPU, (9, 3), DISK, (7, 8), **ck)  # type: ignore[arg-type]
        assert p.start(OpKind.STORE, to_disk(1, 0), keep).delivered == 2
        p.poison_all()
        p.host.poison([f for f in range(12) if f not in (9, 3)])
        back = Part(Kind.CHECKPOINT, CPU, (9, 3), GPU, (0, 9, 2), live_dst=True)
        assert p.start(OpKind.RESTORE, back).delivered == 1
        assert tail(p, (0, 9, 2)) == want
        p.host.poison(range(12))
        for via in ((), (5, 1)):
            p.poison_all()
            part = Part(
                Kind.CHECKPOINT, DISK, (7, 8), GPU, (3, 0, 5), via=via, live_dst=True, **ck,  # type: ignore[arg-type]
            )  # fmt: skip
            assert p.start(OpKind.RESTORE, part).delivered == 1
            assert tail(p, (3, 0, 5)) == want
        to_frame = Part(Kind.CHECKPOINT, CPU, (5, 1), GPU, (1,))
        assert p.start(OpKind.RESTORE, to_frame).delivered == 1
        assert bytes(p.pool.checkpoints[1].tolist()) == want
        assert set(p.pool.checkpoints[0].tolist()) == {255}


def test_a_restore_may_begin_on_the_device() -> None:
    """Pages from the host, and the checkpoint from its device frame, in one op."""
    with plane(TAILED, TAILED_GEOMETRY) as p:
        held, page = fill_tail(p, (1, 4, 7), seed=8), p.page(0)
        capture = Part(Kind.CHECKPOINT, GPU, (1, 4, 7), GPU, (2,), live_src=True)
        p.start(OpKind.COPY, capture).wait()
        p.start(OpKind.PACK, down(0, 6)).wait()
        p.poison_pages([0])
        back = Part(Kind.CHECKPOINT, GPU, (2,), GPU, (0, 1, 2), live_dst=True)
        copy = Part(Kind.HISTORY, GPU, (8,), GPU, (9,))
        assert p.start(OpKind.RESTORE, up(6, 0), back, copy).delivered == 3
        assert tail(p, (0, 1, 2)) == held
        assert p.page(0) == page
        assert p.page(9) == p.page(8)


def test_checkpoints_near_the_start_hold_fewer_window_pages() -> None:
    """The record has its full size in every tier; the live tail takes the pages it lists."""
    with plane(TAILED, TAILED_GEOMETRY) as p:
        want = fill_tail(p, (1, 4), seed=5)
        p.pool.poison(Kind.CHECKPOINT, [0], live=False)
        capture = Part(Kind.CHECKPOINT, GPU, (1, 4), GPU, (0,), live_src=True)
        p.start(OpKind.COPY, capture).wait()
        p.start(OpKind.PACK, down(0, 0), Part(Kind.CHECKPOINT, GPU, (0,), CPU, (2, 1))).wait()
        ck = {"key": key(99), "parent": key(1), "depth": 1, "tokens": b"t"}
        keep = Part(Kind.CHECKPOINT, CPU, (2, 1), DISK, (7, 8), **ck)  # type: ignore[arg-type]
        assert p.start(OpKind.STORE, to_disk(1, 0), keep).delivered == 2
        for source, src in ((CPU, (2, 1)), (DISK, (7, 8))):
            p.poison_all()
            part = Part(Kind.CHECKPOINT, source, src, GPU, (2, 6), live_dst=True, **ck)  # type: ignore[arg-type]
            assert p.start(OpKind.RESTORE, part).delivered == 1
            assert tail(p, (2, 6)) == want


def test_a_tail_that_does_not_fit_its_frames_is_not_cut_off() -> None:
    with plane(TAILED, TAILED_GEOMETRY) as p:
        part = Part(Kind.CHECKPOINT, GPU, (0, 1, 2), CPU, (5,), live_src=True)
        assert p.start(OpKind.PACK, part).delivered == 0
        assert p.start(OpKind.PACK, down(0, 0)).delivered == 1


def test_parked_tails_keep_what_they_hold(device: str) -> None:
    """A window page that is not held (-1) is neither read nor written."""
    with plane(TAILED, TAILED_GEOMETRY, device=device) as p:
        want = fill_tail(p, (2, -1, 3, 5), seed=2)
        part = Part(Kind.TAIL, GPU, (2, -1, 3, 5), CPU, (0, 1), live_src=True)
        assert p.start(OpKind.PACK, part).delivered == 1
        p.poison_all()
        back = Part(Kind.TAIL, CPU, (0, 1), GPU, (0, -1, 8, 2), live_dst=True)
        assert p.start(OpKind.RESTORE, back).delivered == 1
        assert tail(p, (0, -1, 8, 2)) == want
        assert set(tail(p, (1, 9, 7, 0))) == {255}


def test_copy_and_clear_take_effect_within_start(device: str) -> None:
    with plane(TAILED, TAILED_GEOMETRY, device=device) as p:
        one = fill_tail(p, (0, 1), seed=3)
        fork = Part(Kind.TAIL, GPU, (0, 1), GPU, (3, 2), live_src=True, live_dst=True)
        assert p.start(OpKind.COPY, fork).over.is_set()
        assert tail(p, (3, 2)) == one
        want = p.page(4)
        page = Part(Kind.HISTORY, GPU, (4,), GPU, (5,))
        assert p.start(OpKind.COPY, page).over.is_set()
        assert p.page(5) == p.page(4) == want
        clear = Part(Kind.TAIL, GPU, (), GPU, (0, 1), live_dst=True)
        assert p.start(OpKind.CLEAR, clear).over.is_set()
        assert set(tail(p, (0, 1))) == {0}
        assert tail(p, (3, 2)) == one


# --------------------------------------------------------------------------- failures


def test_a_damaged_record_shortens_the_restore(device: str) -> None:
    with plane(device=device) as p:
        want = store_chain(p, 5)
        p.store.corrupt(key(3), at=17)
        end = p.start(OpKind.RESTORE, *[from_disk(i + 1, page=i) for i in range(5)])
        assert end.delivered == 2
        assert end.error is None
        assert [p.page(i) for i in range(2)] == want[:2]
        assert p.store.keys(quarantined=True) == {key(3)}


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_parts_count_from_the_front_whatever_ran_first(batch: int) -> None:
    """Batches of one op run on several threads; the first failure bounds what was delivered."""
    with plane(io_threads=4) as p:
        want = store_chain(p, 8)
        p.transfer._read_frames = batch
        slow, read_into = threading.Event(), p.store.read_into

        def reorder(reads: Sequence[Read]) -> list[bool]:
            if reads[0].key == key(1) and batch < 8:
                assert slow.wait(300)  # the first batch comes after the one that fails
            elif key(6) in {read.key for read in reads}:
                slow.set()
            return read_into(reads)

        p.store.read_into = reorder  # type: ignore[method-assign]
        p.store.corrupt(key(6))
        end = p.start(OpKind.RESTORE, *[from_disk(i + 1, page=i) for i in range(8)])
        assert end.delivered == 5
        assert [p.page(i) for i in range(5)] == want[:5]


def test_large_tails_do_not_make_large_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is as large as a batch should be, or as one record; else few threads would share."""
    monkeypatch.setattr(transfer, "READ_BYTES", TAILED.frame_bytes())
    assert TAILED_GEOMETRY.parked_frames > 1
    with plane(TAILED, TAILED_GEOMETRY) as p:
        want, read = store_chain(p, 4), read_counts(p)
        end = p.start(OpKind.RESTORE, *[from_disk(i + 1, page=i) for i in range(4)])
        assert end.delivered == 4
        assert read == [1, 1, 1, 1]
        assert [p.page(i) for i in range(4)] == want


def test_reads_grow_while_much_is_left_and_end_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "READ_BYTES", 1)
    monkeypatch.setattr(transfer, "LARGE_READ_BYTES", 2 * PLAIN.frame_bytes())
    with plane(io_threads=1) as p:
        want, read = store_chain(p, 10), read_counts(p)
        parts = [from_disk(i + 1, page=i, via=(11 - i,)) for i in range(7)]
        parts += [from_disk(i + 1, page=i) for i in range(7, 10)]  # these pass the reader's own
        assert p.start(OpKind.RESTORE, *parts).delivered == 10
        assert read == [2, 2, 1, 1, 1, *(1, 1, 1)]
        assert [p.page(i) for i in range(10)] == want


def test_the_first_reads_of_several_threads_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read alike would verify at once, and the disk would stand still."""
    monkeypatch.setattr(transfer, "READ_BYTES", 1)
    monkeypatch.setattr(transfer, "LARGE_READ_BYTES", 2 * PLAIN.frame_bytes())
    with plane(io_threads=2) as p:
        want, read = store_chain(p, 12), read_counts(p)
        parts = [from_disk(i + 1, page=i, via=(11 - i,)) for i in range(12)]
        assert p.start(OpKind.RESTORE, *parts).delivered == 12
        assert sorted(read) == sorted([1, 2, 2, 1, 1, 1, 1, 1, 1, 1])
        assert [p.page(i) for i in range(12)] == want


def test_a_store_that_raises_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with plane() as p, caplog.at_level(logging.WARNING, logger="kvtier"):
        want = store_chain(p, 2)
        for _ in range(3):
            p.store.fail_next()
            end = p.start(OpKind.RESTORE, from_disk(1, page=0))
            assert end.delivered == 0
            assert isinstance(end.error, StoreError)
        p.store.fail_next()
        assert p.start(OpKind.STORE, to_disk(1, 0)).delivered == 0
        assert [r.getMessage().split(" at")[0] for r in caplog.records] == ["restore", "store"]
        assert key(1).hex() in caplog.text
        assert p.start(OpKind.RESTORE, from_disk(1, page=0)).delivered == 1
        assert p.page(0) == want[0]


def test_untyped_exceptions_end_the_op_too() -> None:
    with plane(io_threads=1) as p:
        store_chain(p, 1)

        def broken(reads: Sequence[Read]) -> list[bool]:
            raise ZeroDivisionError

        good, p.store.read_into = p.store.read_into, broken  # type: ignore[method-assign]
        assert isinstance(p.start(OpKind.RESTORE, from_disk(1, page=0)).error, ZeroDivisionError)
        p.store.read_into = good  # type: ignore[method-assign]
        assert p.start(OpKind.RESTORE, from_disk(1, page=0)).delivered == 1


def test_frames_out_of_range_fail_the_op_and_touch_nothing() -> None:
    """-1 must not name the last page."""
    with plane() as p:
        before = [p.page(i) for i in range(12)]
        for kind, part in [
            (OpKind.PACK, down(-1, 0)),
            (OpKind.PACK, down(0, -1)),
            (OpKind.PACK, down(12, 0)),
            (OpKind.RESTORE, up(0, -1)),
            (OpKind.RESTORE, up(-1, 0)),
            (OpKind.RESTORE, up(12, 0)),
            (OpKind.COPY, Part(Kind.HISTORY, GPU, (0,), GPU, (-1,))),
            (OpKind.COPY, Part(Kind.HISTORY, GPU, (-1,), GPU, (0,))),
        ]:
            end = p.start(kind, part)
            assert end.delivered == 0, part
            assert isinstance(end.error, IndexError)
        assert [p.page(i) for i in range(12)] == before
        assert not p.host.frames.any()
        assert p.start(OpKind.PACK, down(0, 0)).delivered == 1


def test_a_landing_that_fails_cuts_the_pack_there() -> None:
    with plane(staging_bytes=2 * PLAIN.frame_bytes()) as p:
        end = p.start(OpKind.PACK, down(0, 0), down(1, 1), down(2, 99), down(3, 3), down(4, 4))
        assert end.delivered == 2
        p.poison_pages([0])
        assert p.start(OpKind.PACK, down(5, 5)).delivered == 1


def test_no_disk_tier_is_a_typed_miss() -> None:
    with plane() as p:
        p.transfer._store = p.transfer._publisher._store = None
        for reader in p.transfer._readers:
            reader._store = None
        assert isinstance(p.start(OpKind.STORE, to_disk(1, 0)).error, StoreError)
        assert isinstance(p.start(OpKind.RESTORE, from_disk(1, page=0)).error, StoreError)


class Lanes:
    """Streams that remember what was asked of them."""

    def __init__(self) -> None:
        self.fence_events: tuple[Any, ...] = ("step on s1", "step on s2")
        self.log: list[tuple[object, ...]] = []

    def fence(self, stream: object | None) -> None: ...

    def fences(self) -> tuple[Any, ...]:
        return self.fence_events

    @contextmanager
    def on(self, lane: Lane, after: tuple[Any, ...] = ()) -> Iterator[None]:
        self.log.append((lane, after))
        yield

    def passed(self, fences: tuple[Any, ...]) -> None:
        self.log.append(("passed", fences))

    def mark(self, lane: Lane) -> Any:
        class Mark:
            def synchronize(it) -> None:
                self.log.append(("synchronize", lane))

        return Mark()


def with_lanes(p: Plane) -> Lanes:
    lanes = Lanes()
    it = p.transfer
    for owner in (it, it._packer, it._loader, it._copier):
        owner._streams = lanes  # type: ignore[attr-defined]
    return lanes


def test_every_op_waits_for_all_fences_and_drops_them_once_they_have_passed() -> None:
    with plane(TAILED, TAILED_GEOMETRY, io_threads=1) as p:
        lanes = with_lanes(p)
        fences = lanes.fence_events
        p.start(OpKind.COPY, Part(Kind.HISTORY, GPU, (4,), GPU, (5,))).wait()
        clear = Part(Kind.TAIL, GPU, (), GPU, (0, 1), live_dst=True)
        p.start(OpKind.CLEAR, clear).wait()
        # In stream order: the host waits for neither, so no fence has passed.
        assert lanes.log == [(Lane.COMPUTE, fences)] * 2
        lanes.log.clear()
        p.start(OpKind.PACK, down(0, 0)).wait()
        p.start(OpKind.RESTORE, up(0, 2)).wait()
        for lane in (Lane.PACK, Lane.LOAD):
            at = lanes.log.index((lane, fences))
            waited = lanes.log.index(("synchronize", lane))
            passed = lanes.log.index(("passed", fences), at)
            assert at < waited < passed


def test_a_device_that_fails_does_not_look_like_a_bad_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A source is to blame for what is missing (no error) and for an OSError, for nothing else."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("device is full")

    with plane(io_threads=1) as p:
        want = store_chain(p, 2)
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.data.records.unpack_pages", full)
            for part in (from_disk(1, page=0), from_disk(1, page=0, via=(3,)), up(0, 1)):
                error = p.start(OpKind.RESTORE, part).error
                assert isinstance(error, torch.OutOfMemoryError)
                assert not isinstance(error, OSError)
        assert p.store.keys(quarantined=True) == set()
        assert p.start(OpKind.RESTORE, from_disk(1, page=0)).delivered == 1
        assert p.page(0) == want[0]
        p.store.fail_next()
        assert isinstance(p.start(OpKind.RESTORE, from_disk(2, page=0)).error, OSError)


def test_restores_allocate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with plane(io_threads=1) as p:
        want = store_chain(p, 2)

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("allocated during a restore")

        monkeypatch.setattr("kvtier.data.records.HostArena", refuse)
        monkeypatch.setattr(torch, "empty", refuse)
        end = p.start(OpKind.RESTORE, from_disk(1, page=0), from_disk(2, page=1))
        assert (end.delivered, end.error) == (2, None)
        assert [p.page(0), p.page(1)] == want


def test_a_callback_that_raises_stops_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise RuntimeError("bug in the caller")

    with plane(io_threads=1) as p:
        for kind, part in [(OpKind.PACK, down(0, 0)), (OpKind.RESTORE, up(0, 1))]:
            p.start(kind, part, done=bug).wait()
        p.start(OpKind.STORE, to_disk(1, 0), done=bug).wait()
        p.start(OpKind.PACK, down(0, 1), packed=bug).wait()
        assert p.start(OpKind.PACK, down(2, 2)).delivered == 1
        assert p.start(OpKind.RESTORE, from_disk(1, page=4)).delivered == 1
    assert caplog.text.count("completion callback") == 4


def test_a_callback_that_is_cancelled_ends_its_op_all_the_same() -> None:
    """CancelledError is no Exception; ``close`` in the fixture waits for every op."""

    def bug() -> None:
        raise asyncio.CancelledError

    with plane(io_threads=1) as p:
        p.start(OpKind.PACK, down(0, 0), packed=bug, done=bug).wait()
        p.start(OpKind.STORE, to_disk(1, 0), done=bug).wait()
        p.start(OpKind.RESTORE, up(0, 1), done=bug).wait()
        assert p.start(OpKind.COPY, Part(Kind.HISTORY, GPU, (0,), GPU, (2,)), done=bug).calls
        assert p.start(OpKind.PACK, down(2, 2)).delivered == 1
        assert p.start(OpKind.RESTORE, from_disk(1, page=4)).delivered == 1


def test_a_task_that_raises_anything_ends_its_op_and_no_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with plane(io_threads=1) as p:
        store_chain(p, 1)
        read_into, put_group = p.store.read_into, p.store.put_group

        def bug(_: object) -> list[bool]:
            raise SystemExit

        p.store.read_into = p.store.put_group = bug  # type: ignore[method-assign,assignment]
        for end in (
            p.start(OpKind.RESTORE, from_disk(1, page=0)),
            p.start(OpKind.STORE, to_disk(2, 0)),
        ):
            assert end.delivered == 0
            assert isinstance(end.error, (SystemExit, StoreError))
        p.store.read_into, p.store.put_group = read_into, put_group  # type: ignore[method-assign]
        assert p.start(OpKind.RESTORE, from_disk(1, page=0)).delivered == 1
    assert "a task of the data plane failed" in caplog.text


# --------------------------------------------------------------------------- bounds


def blocked(p: Plane) -> threading.Event:
    """Landing stands still until the event is set."""
    gate, land = threading.Event(), p.transfer._packer.land
    p.transfer._packer.land = lambda *a: (gate.wait(300), land(*a))[1]  # type: ignore[method-assign]
    return gate


def test_full_staging_skips() -> None:
    with plane(staging_bytes=PLAIN.frame_bytes()) as p:
        gate = blocked(p)
        first = p.start(OpKind.PACK, down(0, 0))
        second = p.start(OpKind.PACK, down(1, 1))
        assert second.over.is_set()  # at once, from within start
        assert (second.delivered, second.error, second.packed) == (0, None, 1)
        assert not first.over.is_set()
        gate.set()
        assert first.delivered == 1
        deadline = time.monotonic() + 300
        while p.start(OpKind.PACK, down(1, 1)).delivered == 0:  # the slot comes back
            assert time.monotonic() < deadline


@pytest.mark.parametrize("on_full", ["skip", "wait"])
def test_what_must_go_down_is_never_skipped(on_full: str) -> None:
    with plane(staging_bytes=PLAIN.frame_bytes(), on_full=on_full, wait_s=0.05) as p:
        want, gate = p.page(1), blocked(p)
        first = p.start(OpKind.PACK, down(0, 0))
        second = p.start(OpKind.PACK, down(1, 1), must=True)
        time.sleep(0.2)
        assert not first.over.is_set()
        assert not second.over.is_set()
        gate.set()
        assert (first.delivered, second.delivered) == (1, 1)
        p.start(OpKind.RESTORE, up(1, 2)).wait()
        assert p.page(2) == want


def test_full_staging_waits_for_its_turn() -> None:
    with plane(staging_bytes=PLAIN.frame_bytes(), on_full="wait", wait_s=300) as p:
        want = [p.page(i) for i in range(12)]
        gate = blocked(p)
        ends = [
            p.start(OpKind.PACK, down(i, i), packed=lambda i=i: p.poison_pages([i]))  # type: ignore[misc]
            for i in range(12)
        ]
        threading.Timer(0.05, gate.set).start()
        assert [end.delivered for end in ends] == [1] * 12
        p.start(OpKind.RESTORE, *[up(i, i) for i in range(12)]).wait()
        assert [p.page(i) for i in range(12)] == want


def test_waiting_for_staging_ends() -> None:
    with plane(staging_bytes=PLAIN.frame_bytes(), on_full="wait", wait_s=0.1) as p:
        gate = blocked(p)
        first, second = p.start(OpKind.PACK, down(0, 0)), p.start(OpKind.PACK, down(1, 1))
        assert second.delivered == 0
        assert second.error is None
        assert not first.over.is_set()  # so it did not wait for that one
        gate.set()
        assert first.delivered == 1


@pytest.mark.parametrize("on_full", ["skip", "wait"])
def test_an_op_larger_than_staging_streams_through(on_full: str) -> None:
    with plane(
        TAILED, TAILED_GEOMETRY, staging_bytes=3 * TAILED.frame_bytes(), on_full=on_full
    ) as p:
        want = [p.page(i) for i in range(8)]
        held = fill_tail(p, (1, 2, 3), seed=4)
        parts = [down(i, i) for i in range(8)]
        parts.insert(4, Part(Kind.CHECKPOINT, GPU, (1, 2, 3), CPU, (10, 9), live_src=True))
        assert p.start(OpKind.PACK, *parts, packed=p.poison_all).delivered == 9
        back = Part(Kind.CHECKPOINT, CPU, (10, 9), GPU, (0, 0, 1), live_dst=True)
        p.start(OpKind.RESTORE, back, *[up(i, i) for i in range(8)]).wait()
        assert [p.page(i) for i in range(8)] == want
        assert tail(p, (0, 0, 1)) == held


def test_staging_that_fits_no_record_is_refused() -> None:
    with pytest.raises(ConfigError, match="staging_bytes"):
        Plane(staging_bytes=PLAIN.frame_bytes() - 1)
    with pytest.raises(ConfigError, match="staging_bytes"):
        Plane(TAILED, TAILED_GEOMETRY, staging_bytes=TAILED.frame_bytes())


def test_geometry_of_another_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_tokens"):
        Plane(gqa(layers=1, kv_heads=1, head_dim=8, page_tokens=32))
    with pytest.raises(ConfigError, match="has_tails"):
        Plane(TAILED, GEOMETRY)


def test_writes_keep_the_order_of_start() -> None:
    """STORE and DROP of one key, alternating, end as the last one says."""
    with plane(io_threads=4) as p:
        p.start(OpKind.PACK, down(0, 0)).wait()
        put = p.store.put_group

        def slow(records: Sequence[Record]) -> None:
            time.sleep(0.002)  # time for a DROP to overtake, if it could
            put(records)

        p.store.put_group = slow  # type: ignore[method-assign]
        for _ in range(10):
            p.start(OpKind.STORE, to_disk(1, 0))
            p.start(OpKind.DROP, to_disk(1, 0))
        p.start(OpKind.DROP, to_disk(1, 0)).wait()
        assert p.store.keys() == set()
        p.start(OpKind.DROP, to_disk(1, 0))
        p.start(OpKind.STORE, to_disk(1, 0)).wait()
        assert p.store.keys() == {key(1)}


@pytest.mark.parametrize("cuts", [[(5, 5), (3, 3), (4, 4)], [(3, 3), (3, 9), (5, 5)]])
def test_a_job_ends_with_its_first_failure(cuts: list[tuple[int, int]]) -> None:
    """Whatever the order in which failures are seen, and with the error that belongs to it."""
    ends: list[object] = []
    job = Job(
        Op(1, OpKind.RESTORE, tuple(up(i, i) for i in range(8))),
        packed=lambda: ends.append("packed"),
        done=lambda n, error: ends.append((n, str(error))),
        ended=lambda job: ends.append("ended"),
    )
    for part, why in cuts:
        job.share()
        job.cut(part, OSError(why))
        job.end_share()
    assert ends == []
    job.end_share()
    assert ends == [(3, "3"), "ended"]
    with pytest.raises(AssertionError, match="has ended"):
        job.end_share()


def test_completions_may_start_ops_on_a_single_thread() -> None:
    """Every done starts the next op: no thread waits for itself."""
    with plane(io_threads=1, staging_bytes=PLAIN.frame_bytes(), on_full="wait") as p:
        left, over = [60], threading.Event()

        def again() -> None:
            left[0] -= 1
            if not left[0]:
                over.set()
            elif left[0] % 2:
                p.start(OpKind.RESTORE, up(0, 1), done=again)
            else:
                p.start(OpKind.PACK, down(0, 0), done=again)

        p.start(OpKind.PACK, down(0, 0), done=again)
        assert over.wait(300)


# --------------------------------------------------------------------------- close


def test_close_finishes_what_was_started() -> None:
    with plane(staging_bytes=PLAIN.frame_bytes(), on_full="wait", wait_s=300) as p:
        want = store_chain(p, 3)
        gate = blocked(p)
        packs = [p.start(OpKind.PACK, down(3 + i, 3 + i)) for i in range(4)]
        loads = [p.start(OpKind.RESTORE, from_disk(i + 1, page=i)) for i in range(3)]
        threading.Timer(0.05, gate.set).start()
        p.transfer.close()
        assert [end.delivered for end in packs] == [1] * 4
        assert [end.delivered for end in loads] == [1] * 3
        assert [p.page(i) for i in range(3)] == want
        p.transfer.close()


def test_close_lets_completions_start_what_follows() -> None:
    """PACK -> STORE -> STORE: a page on its way down when close is called arrives on disk."""
    with plane() as p:
        gate = blocked(p)

        def second() -> None:
            p.start(OpKind.STORE, to_disk(2, 1))

        def first() -> None:
            p.start(OpKind.STORE, to_disk(1, 0), done=second)

        p.start(OpKind.PACK, down(0, 0), down(1, 1), done=first)
        threading.Timer(0.05, gate.set).start()
        p.transfer.close()
        assert p.store.keys() == {key(1), key(2)}


def test_after_close_every_op_ends_at_once() -> None:
    with plane() as p:
        p.transfer.close()
        for kind, part in [
            (OpKind.PACK, down(0, 0)),
            (OpKind.RESTORE, up(0, 0)),
            (OpKind.STORE, to_disk(1, 0)),
            (OpKind.COPY, Part(Kind.HISTORY, GPU, (0,), GPU, (1,))),
        ]:
            end = p.start(kind, part)
            assert end.over.is_set()
            assert end.delivered == 0
            assert isinstance(end.error, CacheClosed)


def test_close_from_a_callback_and_from_two_threads() -> None:
    with plane() as p:
        gate = blocked(p)
        end = p.start(OpKind.PACK, down(0, 0), done=p.transfer.close)
        closers = [threading.Thread(target=p.transfer.close) for _ in range(2)]
        for thread in closers:
            thread.start()
        gate.set()
        for thread in closers:
            thread.join(300)
            assert not thread.is_alive()
        assert end.delivered == 1


def test_threads_end_with_a_transfer_nobody_closed() -> None:
    p = Plane()
    p.start(OpKind.PACK, down(0, 0)).wait()
    threads = p.transfer._threads
    del p
    gc.collect()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def test_a_process_that_forgot_to_close_ends_well() -> None:
    """A thread killed within a copy would take the process down ("terminate called ...")."""
    code = f"""
import torch
from kvtier.config import CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.data import DeviceTransfer
from kvtier.layouts import gqa
from kvtier.types import Tier

layout = gqa(layers=4, kv_heads=8, head_dim=128, page_tokens=512)
transfer = DeviceTransfer(
    layout, Geometry(page_tokens=512, gpu_pages=2, cpu_frames=2), device="cpu", store=None,
    config=CacheConfig(gpu_bytes=1, cpu_bytes=1, on_full="wait", wait_s=300),
)
part = Part(Kind.HISTORY, Tier.GPU, (1,), Tier.CPU, (1,))
for i in range(5):
    for kind in ({OpKind.PACK!s}, {OpKind.RESTORE!s}):
        transfer.start(Op(i, kind, (part,)), packed=lambda: None, done=lambda n, error: None)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_it_may_be_made_under_inference_mode() -> None:
    """The tensors are written by other threads, which are under none."""
    with torch.inference_mode():
        p = Plane(TAILED, TAILED_GEOMETRY)
        rows = p.pool.rows("latent", 0)
        rows[:16] = 2
    want = fill_tail(p, (0, 1, 2), seed=6)
    part = Part(Kind.CHECKPOINT, GPU, (0, 1, 2), CPU, (1, 2), live_src=True)
    assert p.start(OpKind.PACK, down(0, 0), part).delivered == 2
    p.poison_all()
    back = Part(Kind.CHECKPOINT, CPU, (1, 2), GPU, (1, 2, 3), live_dst=True)
    assert p.start(OpKind.RESTORE, up(0, 0), back).delivered == 2
    assert tail(p, (1, 2, 3)) == want
    with torch.inference_mode():
        assert (rows[:16] == 2).all()
    p.transfer.close()


# --------------------------------------------------------------------------- soak


@pytest.mark.parametrize("on_full", ["skip", "wait"])
def test_many_threads_tiny_pools(on_full: str, device: str) -> None:
    """Six callers, each with two pages and two host frames of its own, over one staging slot and
    two reading threads, with a store that fails now and then.  Each checks its own bytes."""
    faulty = MemoryStore()
    with plane(
        staging_bytes=PLAIN.frame_bytes(), on_full=on_full, store=faulty, device=device
    ) as p:
        problems: list[str] = []
        counts = {"packed": 0, "stored": 0, "lost": 0}

        def caller(me: int) -> None:
            a, b = 2 * me, 2 * me + 1
            for turn in range(30):
                want = p.page(a)
                number = 1 + me * 1000 + turn
                part = {"key": key(number), "depth": 1, "tokens": b"x"}
                packed = p.start(OpKind.PACK, down(a, a), packed=lambda: p.poison_pages([a]))
                if packed.delivered:
                    counts["packed"] += 1
                    if turn % 5 == me % 5:
                        faulty.fail_next()
                    disk = Part(Kind.HISTORY, CPU, (a,), DISK, (0,), **part)  # type: ignore[arg-type]
                    stored = p.start(OpKind.STORE, disk).delivered
                    back = up(a, b)
                    if stored:
                        counts["stored"] += 1
                        p.host.poison([a])
                        via = (b,) if turn % 2 else ()
                        back = Part(Kind.HISTORY, DISK, (0,), GPU, (b,), via=via, **part)  # type: ignore[arg-type]
                    p.poison_pages([b])
                    if not p.start(OpKind.RESTORE, back).delivered:
                        counts["lost"] += 1
                    elif p.page(b) != want:
                        problems.append(f"caller {me}, turn {turn}: other bytes")
                scramble(p.pool.spans(Kind.HISTORY, [a], live=False), seed=number)

        threads = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "stuck"
        assert not problems
        if on_full == "wait":  # how much is skipped depends on the threads' timing
            assert counts["packed"] == 180
        assert counts["stored"] > 0
