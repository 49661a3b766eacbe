"""What benchmarks of restoring share: a cache that holds one long prefix, and a bare file.

``Prefix`` computes nothing: its pages hold noise that is compared after each restore.  ``RawFile``
is what a disk tier is measured against: the same bytes, direct I/O, as many threads.
"""

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

__all__ = ["CHUNK", "Prefix", "RawFile", "Restore", "wait_for_device"]

CHUNK = 4096
"""Tokens a step is fed."""
BLOCK = 4096
TIMEOUT_S = 120.0


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
    """A cache on ``device`` that holds one prefix of ``tokens``, and nothing else.

    ``disk``: a directory that does not exist yet, or None for a host tier alone.
    """

    def __init__(
        self, layout: Layout, tokens: int, *, device: str, disk: Path | None, threads: int = 4
    ) -> None:
        page = layout.page_tokens
        assert tokens % page == 0, (tokens, page)
        self.layout, self.tokens, self.pages = layout, tokens, tokens // page
        spare = 16 + 2 * CHUNK // page
        held = (self.pages + spare) * layout.frame_bytes() + 8 * layout.checkpoint_bytes()
        tails = 64 * layout.checkpoint_bytes() + 8 * layout.state_bytes()
        config = CacheConfig(
            gpu_bytes=held + tails + (CHUNK // page + 64) * layout.window_bytes(),
            cpu_bytes=held,
            disk_bytes=0 if disk is None else 3 * held + (256 << 20),
            disk_path=disk,
            max_leases=4,
            checkpoints=Sparse(every_pages=1 << 20),
            on_full="wait",
            wait_s=TIMEOUT_S,
            io_threads=threads,
        )
        self.cache = Cache(layout, config, model="benchmark", device=device)
        plane = self.cache._pump.transfer
        assert isinstance(plane, DeviceTransfer)
        self.plane = plane
        self._watch: Restore | None = None
        self._watch_starts()
        rng = np.random.default_rng(tokens)
        self.ids = rng.integers(0, 100_000, tokens + 1, np.int32)
        self.prompt: TokenBuffer = pack(self.ids)
        self._sums: torch.Tensor | None = None
        self._noise()
        self.stored_s = self._store()
        """Seconds from the first step until all of it was in the lowest tier."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    @property
    def num_bytes(self) -> int:
        """What a restore moves: all pages, and the tail at their end."""
        return self.pages * self.layout.page_bytes() + self.layout.checkpoint_bytes()

    def forget(self, *tiers: Tier) -> None:
        """Drop the copies in these tiers."""
        for tier in tiers:
            self.cache.evict(tier, 1 << 20)

    def restore(self, source: Tier) -> Restore:
        """Bring the prefix up from the tier it is in, then feed one token."""
        seen = self._watch = Restore()
        with self.cache.lease(self.prompt) as lease:
            length = lease.ready.result(timeout=TIMEOUT_S)
            seen.ready = seen.now()
            self._first_step(lease)
            seen.stepped = seen.now()
            self._watch = None
            assert length == self.tokens, (length, self.tokens)
            assert lease.restored[source] == self.tokens, (source, lease.restored)
            self._check(lease)
        return seen

    def _first_step(self, lease: Lease) -> None:
        """The arrays of one token's step, and a read of every page by the device."""
        with self.cache.step([(lease, [7])]) as step:
            arrays = step.to_device()
            component = self.layout.history[0]
            rows = arrays.layer(component.layers[0]).rows(component.name)
            per_page = len(rows) // len(self.plane.pool.history.storages[0])
            rows[arrays.block_table[0].long() * per_page].float().sum()
            wait_for_device()
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

    def _noise(self) -> None:
        pool = self.plane.pool
        generator = torch.Generator(pool.device).manual_seed(0)
        for storage in (*pool._storage.values(), pool.checkpoints):
            storage.random_(0, 256, generator=generator)
        wait_for_device()

    def _store(self) -> float:
        begin = time.perf_counter()
        with self.cache.lease(self.prompt) as lease:
            lease.ready.result(timeout=TIMEOUT_S)
            for start in range(0, self.tokens, CHUNK):
                chunk = pack(self.ids[start : min(start + CHUNK, self.tokens)])
                with self.cache.step([(lease, chunk)]):
                    pass
            self._check(lease)
        self.cache.flush().result(timeout=TIMEOUT_S)
        return time.perf_counter() - begin

    def _check(self, lease: Lease) -> None:
        """What the pages hold is what was stored."""
        pages = torch.from_numpy(lease.block_table()[: self.pages].astype(np.int64))
        pages = pages.to(self.plane.pool.device)
        sums = torch.stack(
            [
                storage.view(torch.int32)[pages].sum(1, dtype=torch.int64)
                for storage in self.plane.pool.history.storages
            ]
        )
        if self._sums is None:
            self._sums = sums
        assert torch.equal(sums, self._sums), "a page came back changed"


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
        self.memory = memoryview(mmap.mmap(-1, self.size))
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
