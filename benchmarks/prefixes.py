"""What benchmarks of restoring share: a cache that holds one long prefix, and a bare file.

``Prefix`` computes nothing: its pages hold noise that is compared after each restore.  ``RawFile``
is what a disk tier is measured against: the same bytes, direct I/O, as many threads.
"""

import gc
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from kvtier import Cache, CacheConfig, Lease, Tier, TokenBuffer, pack
from kvtier.config import Sparse
from kvtier.core.ops import Op, OpKind
from kvtier.data import DeviceTransfer
from kvtier.data.transfer import READ_BYTES
from kvtier.layouts import Layout

__all__ = ["Prefix", "RawFile", "Restore", "directory"]

BLOCK = 4096
TIMEOUT_S = 120.0


@contextmanager
def directory(where: str | None) -> Iterator[Path]:
    """An empty directory under ``where`` ("build" if None); it goes with all that is in it."""
    where = where or "build"  # not in version control
    os.makedirs(where, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=where))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Restore:
    """When one restore did what, in seconds from the call of ``Cache.lease``."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.planned = self.started = self.moved = self.ready = self.stepped = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.begin

    def parts(self) -> dict[str, float]:
        """Seconds of each stage; they add up to ``stepped``."""
        return {
            "plan": self.planned,
            "start": self.started - self.planned,
            "move": self.moved - self.started,
            "settle": self.ready - self.moved,
            "first step": self.stepped - self.ready,
        }


class Prefix:
    """A cache on ``device`` that holds one prefix of ``tokens``, and nothing else, once entered.

    It is fed in steps of ``pages_a_step``.  ``disk``: a directory that does not exist yet.
    """

    def __init__(
        self,
        layout: Layout,
        tokens: int,
        *,
        device: str,
        disk: Path,
        threads: int,
        pages_a_step: int = 16,
    ) -> None:
        page = layout.page_tokens
        assert tokens % page == 0, (tokens, page)
        self.layout, self.tokens, self.pages = layout, tokens, tokens // page
        self._chunk = pages_a_step * page
        room = (self.pages + 2 * pages_a_step) * layout.frame_bytes()
        room += 64 * layout.frame_bytes() * layout.checkpoint_frames()
        leases = 2 * (layout.state_bytes() + 8 * layout.window_bytes())
        config = CacheConfig(
            gpu_bytes=room + leases + 64 * layout.window_bytes(),
            cpu_bytes=room,
            disk_bytes=2 * room + (256 << 20),
            disk_path=disk,
            max_leases=2,
            checkpoints=Sparse(every_pages=1 << 20),
            on_full="wait",
            wait_s=TIMEOUT_S,
            io_threads=threads,
        )
        self._ids = np.random.default_rng(tokens).integers(0, 100_000, tokens + 1, np.int32)
        self._prompt: TokenBuffer = pack(self._ids)
        self._sums: torch.Tensor | None = None
        self._watch: Restore | None = None
        self.cache = Cache(layout, config, model="benchmark", device=device)
        plane = self.cache._pump.transfer
        assert isinstance(plane, DeviceTransfer)
        self.plane = plane
        self._watch_starts()

    def __enter__(self) -> Self:
        try:
            self._noise()
            self.store()
        except BaseException:
            self.cache.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    @property
    def num_bytes(self) -> int:
        """What a restore moves: all pages, and the tail at their end."""
        return self.pages * self.layout.page_bytes() + self.layout.checkpoint_bytes()

    @property
    def steps(self) -> int:
        """That feeding it takes; each becomes durable by itself."""
        return -(-self.tokens // self._chunk)

    def store(self) -> float:
        """Feed it, known before or not; seconds from the first step until all of it is durable."""
        self.cache.clear().result(timeout=TIMEOUT_S)
        with self.cache.lease(self._prompt) as lease:
            lease.ready.result(timeout=TIMEOUT_S)
            begin = time.perf_counter()
            for start in range(0, self.tokens, self._chunk):
                chunk = pack(self._ids[start : min(start + self._chunk, self.tokens)])
                with self.cache.step([(lease, chunk)]):
                    pass
            self.cache.flush().result(timeout=TIMEOUT_S)
            taken = time.perf_counter() - begin
            self._sums = self._sums_of(lease)
        self.cache.flush().result(timeout=TIMEOUT_S)
        return taken

    def forget(self, *tiers: Tier) -> None:
        """Drop the copies in these tiers."""
        for tier in tiers:
            self.cache.evict(tier, 1 << 20)

    def restore(self, source: Tier) -> Restore:
        """Bring the prefix up from the tier it is in, then feed one token; garbage collection is
        off meanwhile, as in ``harness.measure``."""
        gc.collect()
        gc.disable()
        try:
            return self._restore(source)
        finally:
            gc.enable()
            self._watch = None

    def _restore(self, source: Tier) -> Restore:
        seen = self._watch = Restore()
        with self.cache.lease(self._prompt) as lease:
            length = lease.ready.result(timeout=TIMEOUT_S)
            self._wait()  # a restore may end when its copies are queued
            seen.ready = seen.now()
            self._first_step(lease)
            seen.stepped = seen.now()
            assert length == self.tokens, (length, self.tokens)
            assert lease.restored[source] == self.tokens, (source, lease.restored)
            assert self._sums is not None
            assert torch.equal(self._sums_of(lease), self._sums), "a page came back changed"
        return seen

    def _first_step(self, lease: Lease) -> None:
        """The arrays of one token's step, and a read of every page by the device."""
        with self.cache.step([(lease, [7])]) as step:
            arrays = step.to_device()
            component = self.layout.history[0]
            rows = arrays.layer(component.layers[0]).rows(component.name)
            per_page = len(rows) // len(self.plane.pool.history.storages[0])
            rows[arrays.block_table[0].long() * per_page].float().sum()
            self._wait()
            step.accept(lease, 0)

    def _watch_starts(self) -> None:
        """Have ``start`` of the data plane note when a restore passes."""
        start = self.plane.start

        def watched(op: Op, *, packed: Any, done: Any) -> None:
            seen = self._watch
            if seen is None or op.kind is not OpKind.RESTORE:
                start(op, packed=packed, done=done)
                return

            def ended(delivered: int, error: BaseException | None) -> None:
                seen.moved = seen.now()
                done(delivered, error)

            seen.planned = seen.now()
            start(op, packed=packed, done=ended)
            seen.started = seen.now()

        self.plane.start = watched  # type: ignore[method-assign]

    def _wait(self) -> None:
        if self.plane.pool.device.type == "cuda":
            torch.cuda.synchronize()

    def _noise(self) -> None:
        pool = self.plane.pool
        generator = torch.Generator(pool.device).manual_seed(0)
        for storage in (*pool._storage.values(), pool.checkpoints):
            storage.random_(0, 256, generator=generator)
        self._wait()

    def _sums_of(self, lease: Lease) -> torch.Tensor:
        """Of every section of every page."""
        pages = torch.from_numpy(lease.block_table()[: self.pages].astype(np.int64))
        pages = pages.to(self.plane.pool.device)
        storages = self.plane.pool.history.storages
        return torch.stack([s.view(torch.int32)[pages].sum(1, dtype=torch.int64) for s in storages])


class RawFile:
    """A preallocated file, direct I/O where the file system has it, in pieces of ``READ_BYTES``."""

    def __init__(self, path: Path, size: int, *, depth: int, piece: int = READ_BYTES) -> None:
        self.size = -(-size // BLOCK) * BLOCK
        self.piece = piece // BLOCK * BLOCK
        flags = os.O_RDWR | os.O_CREAT
        try:
            self.fd, self.direct = os.open(path, flags | os.O_DIRECT), True
        except OSError:
            self.fd, self.direct = os.open(path, flags), False
        os.posix_fallocate(self.fd, 0, self.size)
        pages = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # as the cache's own
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(pages)
        self.memory[:] = np.random.default_rng(0).bytes(self.size)
        self.pool = ThreadPoolExecutor(depth)
        self._spans = [
            (at, min(at + self.piece, self.size)) for at in range(0, self.size, self.piece)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        os.close(self.fd)

    def write(self, groups: int = 1) -> float:
        """Seconds to write all of it, durable ``groups`` times on the way."""
        begin = time.perf_counter()
        each = -(-len(self._spans) // groups)
        for first in range(0, len(self._spans), each):
            self._all(os.pwritev, self._spans[first : first + each])
            os.fdatasync(self.fd)
        return time.perf_counter() - begin

    def read(self) -> float:
        """Seconds to read all of it."""
        begin = time.perf_counter()
        self._all(os.preadv, self._spans)
        return time.perf_counter() - begin

    def _all(self, call: Any, spans: Sequence[tuple[int, int]]) -> None:
        def move(span: tuple[int, int]) -> None:
            start, stop = span
            while start < stop:
                start += call(self.fd, [self.memory[start:stop]], start)

        list(self.pool.map(move, spans))
