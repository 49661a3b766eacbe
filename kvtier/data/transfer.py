"""The data plane: runs ops over the device pool, the host arena and a store, on its own threads.

Owns threads, staging and the order of copies.  Knows nothing of trees, leases or why an op was
asked for.  An op owns the frames it names from ``start`` until it has ended, whatever becomes of
the request behind it; so the queues are bounded by the pools.

    PACK         pack thread: pages -> staging, ``packed``; landing threads: staging -> host;
                 sealing thread, after ``done``: checksums
    RESTORE      reading threads: disk -> host, verified -> pages
    STORE, DROP  sealing thread, then writing thread, in the order of ``start``
    COPY, CLEAR  at once, on the caller's stream

The pack thread waits for staging, which landing threads free; nothing else waits for a thread.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from kvtier.config import CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Op, OpKind, Part
from kvtier.data.device import DevicePool
from kvtier.data.host import HostArena
from kvtier.data.jobs import Job, Workers
from kvtier.data.records import Loader, Packer, is_live, record_of
from kvtier.data.staging import Staging
from kvtier.data.streams import Event, Lane, streams_for
from kvtier.errors import CacheClosed, StoreError
from kvtier.layouts.base import Layout
from kvtier.seams import Record, Store
from kvtier.sizing import record_bytes
from kvtier.types import Tier

__all__ = ["DeviceTransfer"]

logger = logging.getLogger("kvtier")

BATCH_BYTES = 16 << 20
"""Records move between the device and the host in batches of about this size: what is done once a
batch takes the interpreter about 0.1 ms, and a copy of so much 0.3 ms."""
READ_BYTES = 4 << 20
"""Records are read from disk in smaller ones, so that several threads share an op."""
LANDING_THREADS = 3
"""Batches being copied to the host at once: one under way, one queued, one whose thread wakes."""
EXIT_S = 10.0
"""How long the end of the process may wait for a transfer that nobody closed."""


class DeviceTransfer:
    """Moves pages between the device, host memory and ``store`` (None: no disk).

    ``device`` is a torch device; on "cpu" the device pool is plain memory and everything else is
    the same: threads, staging, checksums.  Raises ConfigError if the sizes do not fit the layout.
    """

    def __init__(
        self,
        layout: Layout,
        geometry: Geometry,
        *,
        device: str,
        store: Store | None,
        config: CacheConfig,
    ) -> None:
        where = _indexed(torch.device(device))
        frame_bytes = layout.frame_bytes()
        most_frames = max(1, geometry.checkpoint_frames, geometry.parked_frames)
        assert isinstance(config.staging_bytes, int)
        self._layout = layout
        self._store = store
        self._wait_s = config.wait_s if config.on_full == "wait" else None
        staging_frames = config.staging_bytes // frame_bytes
        # A quarter of the staging at most: it is filled and emptied at the same time.
        self._pack_frames = max(min(BATCH_BYTES // frame_bytes, staging_frames // 4), most_frames)
        self._batch_frames = max(BATCH_BYTES // frame_bytes, most_frames)
        self._read_frames = max(READ_BYTES // frame_bytes, most_frames)
        # Worker threads will write into these tensors, so none may be an inference tensor.
        with torch.inference_mode(False), _current(where):
            self._streams = streams_for(where)
            self.pool = DevicePool(layout, geometry, where)
            pinned = where if where.type == "cuda" else None
            self.host = HostArena(geometry.cpu_frames, frame_bytes, pinned=pinned)
            self._staging = Staging(
                config.staging_bytes,
                frame_bytes,
                most_frames=most_frames,
                cpu_frames=geometry.cpu_frames,
                device=where,
            )
            self._packer = Packer(layout, self.pool, self.host, self._staging, self._streams)
            self._loaders = [
                Loader(
                    layout,
                    self.pool,
                    self.host,
                    store,
                    self._streams,
                    batch_frames=self._batch_frames,
                    read_frames=self._read_frames,
                )
                for _ in range(config.io_threads)
            ]
        if where.type == "cuda":
            torch.cuda.synchronize(where)  # the pools were zeroed on the current stream
        self._causes: set[tuple[OpKind, str]] = set()
        self._open_ops = 0
        self._closing = False
        self._stopped = False
        self._lock = threading.Lock()
        prepare = partial(_make_current, where)
        self._packing = Workers("pack", 1, prepare=prepare)
        self._landing = Workers("land", LANDING_THREADS, prepare=prepare)
        self._reading = Workers("read", config.io_threads, prepare=prepare)
        self._sealing = Workers("seal", 1)
        self._writing = Workers("write", 1)
        self._workers = (
            self._packing,
            self._landing,
            self._reading,
            self._sealing,
            self._writing,
        )
        # Nobody closed it: its threads go when it goes.  The process ends first: they end before,
        # since a thread that is killed within a copy takes the process down with it.
        self._at_exit = partial(_finish, self._workers)
        atexit.register(self._at_exit)
        weakref.finalize(self, _forget, self._workers, self._at_exit).atexit = False
        self._threads = {thread for workers in self._workers for thread in workers.threads}

    def fence(self, stream: object | None) -> None:
        """What is started after this waits for the work queued so far on ``stream``."""
        self._streams.fence(stream)

    def start(
        self,
        op: Op,
        *,
        packed: Callable[[], None],
        done: Callable[[int, BaseException | None], None],
    ) -> None:
        """Queue ``op``; see ``Transfer.start``.  Never blocks on I/O, staging or a device.

        After ``close`` an op ends at once with CacheClosed, except those that completions of
        earlier ops ask for.
        """
        deadline = None
        if self._wait_s is not None and not op.must:
            deadline = time.monotonic() + self._wait_s
        job = Job(
            op,
            packed=packed,
            done=done,
            ended=self._op_ended,
            fences=self._streams.fences(),
            deadline=deadline,
        )
        with self._lock:
            refused = self._closing and threading.current_thread() not in self._threads
            self._open_ops += 1
        if refused:
            job.cut(0, CacheClosed("the cache has been closed"))
            job.end_share()
        elif op.kind is OpKind.PACK:
            self._start_pack(job)
        elif op.kind is OpKind.RESTORE:
            self._start_restore(job)
        elif op.kind in (OpKind.STORE, OpKind.DROP):
            self._sealing.submit(lambda _: self._start_write(job))
        else:
            self._change_device(job)

    def close(self) -> None:
        """Finish what was started, then stop all threads.  Idempotent.

        From a completion callback it only asks for that and returns.
        """
        with self._lock:
            self._closing = True
            self._stop_if_idle()
            if threading.current_thread() in self._threads:
                return
        for thread in self._threads:  # they end when the last op has
            thread.join()
        atexit.unregister(self._at_exit)
        for loader in self._loaders:
            loader.close()
        self.host.close()

    # Device -> host

    def _start_pack(self, job: Job) -> None:
        frames = sum(len(part.dst) for part in job.op.parts)
        waits = job.op.must or job.deadline is not None
        if not self._staging.admit(frames, always=waits):
            job.cut(0)
            job.end_share()
            return
        job.staged = frames
        self._packing.submit(lambda _: self._pack(job))

    def _pack(self, job: Job) -> None:
        at = 0
        gathered: list[Event] = []
        try:
            while at < job.delivered:  # shrinks when a landing fails
                with self._guard(job, at):
                    at = self._pack_batch(job, at, gathered)
            if gathered:
                with self._guard(job, 0):
                    gathered[-1].synchronize()
                    self._streams.passed(job.fences)
            job.release_sources()
        finally:
            job.end_share()

    def _pack_batch(self, job: Job, start: int, gathered: list[Event]) -> int:
        """Gather the parts from ``start`` on for which staging is free; returns the next one."""
        parts = job.op.parts
        free = self._staging.take(len(parts[start].dst), self._pack_frames, job.deadline)
        if free is None:
            job.cut(start)
            return start
        slots: list[list[int]] = []
        for part in parts[start:]:
            if len(part.dst) > len(free):
                break
            slots.append(free[: len(part.dst)])
            del free[: len(part.dst)]
        self._staging.give(free)
        batch = parts[start : start + len(slots)]
        taken = [slot for held in slots for slot in held]
        event: Event | None = None
        try:
            event = self._packer.gather(batch, slots, job.fences)
        finally:
            if event is None:
                self._staging.give(taken)
        gathered.append(event)
        job.share()
        self._landing.submit(lambda _: self._land(job, start, batch, slots, event))
        return start + len(batch)

    def _land(
        self, job: Job, start: int, batch: Sequence[Part], slots: list[list[int]], gathered: Event
    ) -> None:
        try:
            try:
                with self._guard(job, start):
                    self._packer.land(batch, slots, gathered)
            finally:
                self._staging.give([slot for held in slots for slot in held])
            if self._store is not None and start < job.delivered:
                # Before the op ends, so ahead of what stores these records.
                for seal in self._packer.seals(batch):
                    self._sealing.submit(lambda _, seal=seal: seal())  # type: ignore[misc]
        finally:
            job.end_share()

    # Host or disk -> device

    def _start_restore(self, job: Job) -> None:
        start, frames = 0, 0
        parts = job.op.parts
        for i, part in enumerate(parts):
            size = -(-record_bytes(self._layout, part) // self.host.frame_bytes)
            most = self._read_frames if part.source is Tier.DISK else self._batch_frames
            if i > start and (frames + size > most or part.source is not parts[start].source):
                self._submit_load(job, start, i)
                start, frames = i, 0
            frames += size
        if parts:
            self._submit_load(job, start, len(parts))
        job.end_share()

    def _submit_load(self, job: Job, start: int, stop: int) -> None:
        job.share()

        def load(number: int) -> None:
            try:
                if start < job.delivered:  # nothing before it has failed
                    self._load(job, self._loaders[number], start, stop)
            finally:
                job.end_share()

        self._reading.submit(load)

    def _load(self, job: Job, loader: Loader, start: int, stop: int) -> None:
        batch = job.op.parts[start:stop]
        with self._guard(job, start):
            places, good = loader.read(batch)
            if good < len(batch):
                job.cut(start + good)
                self._say(job.op, start + good, "missing or damaged record")
            loader.scatter(batch[:good], places[:good], job.fences)

    # Host -> disk

    def _start_write(self, job: Job) -> None:
        """Everything but the writing: the next op's checksums are taken meanwhile."""
        records: list[Record] = []
        failed = True
        try:
            with self._guard(job, 0):
                if self._store is None:
                    raise StoreError("this cache has no disk tier")
                if job.op.kind is OpKind.STORE:
                    records = [record_of(self._layout, self.host, part) for part in job.op.parts]
                failed = False
        finally:
            if failed:
                job.end_share()
            else:
                self._writing.submit(lambda _: self._write(job, records))

    def _write(self, job: Job, records: Sequence[Record]) -> None:
        try:
            with self._guard(job, 0):
                assert self._store is not None
                if job.op.kind is OpKind.DROP:
                    self._store.delete([part.key for part in job.op.parts])
                else:
                    self._store.put_group(records)
        finally:
            job.end_share()

    # Device -> device

    def _change_device(self, job: Job) -> None:
        # Behind every fence, not only what is queued on its own stream: the last owner of these
        # frames may have run on another.
        try:
            with self._guard(job, 0), self._streams.on(Lane.COMPUTE, job.fences):
                for part in job.op.parts:
                    if job.op.kind is OpKind.CLEAR:
                        self.pool.clear(part.dst)
                    else:
                        self.pool.copy(
                            part.kind,
                            part.src,
                            part.dst,
                            live_src=is_live(part, source=True),
                            live_dst=is_live(part, source=False),
                        )
        finally:
            job.end_share()

    # Faults

    @contextmanager
    def _guard(self, job: Job, part: int) -> Iterator[None]:
        """Around one task of one op: whatever goes wrong ends that op at ``part``, and is said
        once.  The caller of ``start`` is told by ``done``; what is no Exception goes on as well."""
        try:
            yield
        except BaseException as error:
            job.cut(part, error)
            self._say(job.op, part, f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise

    def _say(self, op: Op, part: int, why: str) -> None:
        """Log a fault, the first time it has this cause."""
        cause = (op.kind, why.partition(":")[0])
        with self._lock:
            known = cause in self._causes
            self._causes.add(cause)
        if not known:
            logger.warning(
                "%s at key %s failed: %s (the next ones are only counted)",
                op.kind.value,
                "".join(p.key.hex() for p in op.parts[part : part + 1]) or "-",
                why,
            )

    def _op_ended(self, job: Job) -> None:
        if job.staged:
            self._staging.dismiss(job.staged)
        with self._lock:
            self._open_ops -= 1
            self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._closing and not self._open_ops and not self._stopped:
            self._stopped = True
            for workers in self._workers:
                workers.stop()


def _forget(pools: tuple[Workers, ...], at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    for workers in pools:
        workers.stop()


def _finish(pools: tuple[Workers, ...]) -> None:
    """Let the threads end one pool after the other, as work flows, for a bounded time."""
    deadline = time.monotonic() + EXIT_S
    for workers in pools:
        workers.stop()
        for thread in workers.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Where this device is current: nothing done here gives another one a context."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _make_current(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _indexed(device: torch.device) -> torch.device:
    """ "cuda" means the device that is current here, on every thread."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
