"""The data plane: runs ops over the device pool, the host arena and a store, on its own threads.

Owns threads, staging and the order of copies.  Knows nothing of trees, leases or why an op was
asked for.  An op owns the frames it names from ``start`` until it has ended, whatever becomes of
the request behind it; so the queues are bounded by the pools.

    PACK         copier: pages -> staging, ``packed``, -> host; sealing thread: checksums
    RESTORE      reading threads: disk -> host, verified; copier: host -> pages
    STORE, DROP  sealing thread, then writing thread, in the order of ``start``; STOREs that wait
                 for it go together
    COPY, CLEAR  at once, on the caller's stream

Reading threads wait for the copier, which waits for slots; those who wait for copies give slots
back and wait for nobody else.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from math import inf

import torch

from kvtier.config import CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Op, OpKind, Part
from kvtier.data.arrivals import Arrival
from kvtier.data.batches import Sizes, kept_on_host, num_frames
from kvtier.data.copier import Copier, even_batch
from kvtier.data.device import DevicePool
from kvtier.data.disk_watch import DiskWatch
from kvtier.data.host import HostArena
from kvtier.data.jobs import Job, Turns, Workers
from kvtier.data.publishing import Publisher
from kvtier.data.records import Loader, Packer, Reader, copy_part, record_of
from kvtier.data.staging import Slots, Staging
from kvtier.data.streams import Lane, streams_for
from kvtier.errors import CacheClosed
from kvtier.kernels.pack import warmup
from kvtier.layouts.base import Layout
from kvtier.seams import DiskHangs, ReadDropped, Store
from kvtier.types import Tier

__all__ = ["DeviceTransfer"]

logger = logging.getLogger("kvtier")

BATCH_BYTES = 64 << 20
"""Records move between the device and the host in batches of up to this size: what is done once a
batch takes the interpreter about 0.3 ms, a copy of so much 1.2 ms."""
READ_BYTES = 4 << 20
"""Records are read from disk in smaller ones, so that several threads share an op: of this size,
or of one record that is larger."""
LARGE_READ_BYTES = 32 << 20
"""While there is much left to read into frames of the host's a batch may grow to this: what a batch
takes besides its bytes counts less then.  The first ones differ in size, as threads that end a read
together leave the disk idle while they verify it together; the last ones are small again, so that
no thread ends long after the others."""
BATCHES = 3
"""Of each direction at once: one being copied, one queued behind it, one whose end is being told.
"""
EARLY_BYTES = 128 << 20
"""A RESTORE of at least this size, 2.4 ms of copying, into pages of a layout without tails ends
when its records are in host memory and verified, and comes layer by layer from there."""
LOOK_S = 1.0
"""So often it is looked, while closing, whether the disk hangs."""
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
        self._sizes = Sizes(layout)
        self._store = store
        self._wait_s = config.wait_s if config.on_full == "wait" else None
        # Worker threads will write into these tensors, so none may be an inference tensor.
        with torch.inference_mode(False), _current(where):
            self._take_memory(layout, geometry, where, config)
            warmup(where)
        if where.type == "cuda":
            torch.cuda.synchronize(where)  # the pools were zeroed on the current stream
        self._causes: set[tuple[OpKind, str]] = set()
        self._disk = DiskWatch(config.disk_stall_s)
        self._reads: dict[int, Job] = {}
        """RESTOREs from the store that are under way, by number."""
        self._open_ops = 0
        self._closing = False
        self._stopped = False
        self._lock = threading.Lock()
        self._start_threads(partial(_make_current, where))

    def _take_memory(
        self, layout: Layout, geometry: Geometry, where: torch.device, config: CacheConfig
    ) -> None:
        """Pools, buffers and who moves bytes between them."""
        frame_bytes = layout.frame_bytes()
        longest = self._longest = max(1, geometry.checkpoint_frames, geometry.parked_frames)
        self._batch_frames = max(BATCH_BYTES // frame_bytes, longest)
        self._read_frames = max(READ_BYTES // frame_bytes, 1)
        self._large_read_frames = LARGE_READ_BYTES // frame_bytes
        largest_read = max(self._read_frames, longest)
        pinned = where if where.type == "cuda" else None
        self._streams = streams_for(where)
        self.pool = DevicePool(layout, geometry, where)
        self.host = HostArena(geometry.cpu_frames, frame_bytes, pinned=pinned)
        assert isinstance(config.staging_bytes, int)
        self._staging = Staging(
            config.staging_bytes,
            frame_bytes,
            most_frames=longest,
            cpu_frames=geometry.cpu_frames,
            device=where,
        )
        reads = config.io_threads * largest_read
        rows = self._landing_rows(geometry, longest, reads) if pinned else 0
        self._landing = Slots(rows, frame_bytes, where)
        self._packer = Packer(self._sizes, self.pool, self.host, self._staging, self._streams)
        self._loader = Loader(self._sizes, self.pool, self._landing, self.host, self._streams)
        self._readers = [
            Reader(self._sizes, self.host, self._store, read_frames=largest_read, pinned=pinned)
            for _ in range(config.io_threads)
        ]

    def _start_threads(self, prepare: Callable[[], None]) -> None:
        self._reading = Workers("read", len(self._readers), prepare=prepare)
        batch = min(self._batch_frames, self._staging.num_slots // BATCHES)
        self._copier = Copier(
            self._packer,
            self._loader,
            self._staging,
            self._landing,
            self._streams,
            self.pool.arrivals,
            pack_frames=max(batch, self._longest),
            load_frames=self._batch_frames,
            guard=self._guard,
            landed=self._landed,
            prepare=prepare,
        )
        self._publisher = Publisher(
            self._store, record=partial(record_of, self._sizes, self.host), guard=self._guard
        )
        self._workers: tuple[Workers | Turns, ...] = (
            self._reading,
            *self._copier.workers,
            *self._publisher.workers,
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
            late=self._late(op),
            deadline=deadline,
        )
        with self._lock:
            refused = self._closing and threading.current_thread() not in self._threads
            self._open_ops += 1
        self._disk.started(op)
        if refused:
            job.cut(0, CacheClosed("the cache has been closed"))
            job.end_share()
        elif op.kind is OpKind.PACK:
            self._start_pack(job)
        elif op.kind is OpKind.RESTORE:
            self._start_restore(job)
        elif op.kind in (OpKind.STORE, OpKind.DROP):
            self._publisher.start(job)
        else:
            self._change_device(job)

    def heard_of(self, op_id: int) -> float:
        job = self._reads.get(op_id)
        return -inf if job is None else job.heard

    def drop(self, op_id: int) -> None:
        if (job := self._reads.get(op_id)) is not None:
            job.drop(ReadDropped("nobody waits for it any more"))

    def close(self) -> None:
        """Finish what was started, then stop all threads.  Idempotent.

        From a completion callback it only asks for that and returns.  Raises DiskHangs if the store
        brings and takes nothing for ``disk_stall_s``: the threads that wait for it are left alone,
        and so is the memory that it may yet write to.
        """
        with self._lock:
            self._closing = True
            self._stop_if_idle()
            if threading.current_thread() in self._threads:
                return
        for thread in self._threads:  # they end when the last op has
            while thread.is_alive():
                if (left := self._disk.patience()) <= 0:
                    raise DiskHangs(f"the disk has done nothing for {self._disk.stall_s:g} s")
                thread.join(min(left, LOOK_S))
        atexit.unregister(self._at_exit)
        for reader in self._readers:
            reader.close()
        self.host.close()

    # Device -> host

    def _start_pack(self, job: Job) -> None:
        frames = num_frames(job.op.parts, source=False)
        waits = job.op.must or job.deadline is not None
        if not self._staging.admit(frames, always=waits):
            job.cut(0)
            job.end_share()
            return
        job.staged = frames
        self._copier.pack(job)

    def _landed(self, parts: Sequence[Part]) -> None:
        """Checksums are taken before the op ends, or at least ahead of what stores its records."""
        if self._store is not None:
            self._publisher.ahead(self._packer.sealing(parts))

    # Host or disk -> device

    def _start_restore(self, job: Job) -> None:
        parts = job.op.parts
        job.early = self._may_end_early(job.op)
        if all(part.source is Tier.DISK for part in parts):
            self._reads[job.op.id] = job
        start = 0
        for (source, kept), count in _runs(parts):
            stop = start + count
            if job.early and source is Tier.CPU and self._loader.by_layer():
                job.share()
                self._copier.load_layers(job, start, parts[start:stop])
            else:
                self._submit_loads(job, start, stop, large=kept)
            start = stop
        job.end_share()

    def _submit_loads(self, job: Job, start: int, stop: int, *, large: bool) -> None:
        """Parts of one source, batch by batch; ``large`` reads need no memory of the reader's."""
        frames = self._sizes.all_frames(job.op.parts[start:stop])
        left, copied = sum(frames), 0
        if job.op.parts[start].source is not Tier.DISK:
            copied = even_batch(left, self._batch_frames)
            copied += max(frames) - 1  # so that none but the last falls short
            copied = min(copied, self._landing.num_slots or copied)
            if left == len(frames):  # one each, so there is nothing to add up
                for at in range(start, stop, copied):
                    self._submit_load(job, at, min(at + copied, stop))
                return
        begin, held, reads = start, 0, 1
        most = copied or self._read_most(left, reads, large=large)
        for at, count in enumerate(frames, start):
            if held and held + count > most:
                self._submit_load(job, begin, at)
                begin, left, held = at, left - held, 0
                reads += 1
                most = copied or self._read_most(left, reads, large=large)
            held += count
        self._submit_load(job, begin, stop)

    def _read_most(self, left: int, number: int, *, large: bool) -> int:
        """Frames of the ``number``-th read from 1 on, when so many are left."""
        if not large:
            return self._read_frames
        threads = len(self._readers)
        most = min(self._large_read_frames, left // (2 * threads))
        return max(self._read_frames, most * min(number, threads) // threads)

    def _may_end_early(self, op: Op) -> bool:
        """Whether all that may yet go wrong is the device itself once its copies are queued, and
        it pays.  A live tail is written by whoever holds it, in no order with other streams."""
        return (
            not self.pool.layout.has_tails
            and self.pool.num_layers > 1
            and len(op.parts) * self._sizes.page >= EARLY_BYTES
            and all(part.target is Tier.GPU and part.source is not Tier.GPU for part in op.parts)
        )

    def _late(self, op: Op) -> tuple[Arrival, ...]:
        """What is still on its way from or into the frames of this op."""
        arrivals = self.pool.arrivals
        if not arrivals:
            return ()
        ends = [(p.source, p.src) for p in op.parts] + [(p.target, p.dst) for p in op.parts]
        return arrivals.touching(
            pages=(f for tier, frames in ends if tier is Tier.GPU for f in frames),
            frames=(f for tier, frames in ends if tier is Tier.CPU for f in frames),
        )

    def _await_readers(self, parts: Sequence[Part]) -> None:
        """The device still reads some host frames that have changed hands: before the disk is read
        into them that is over."""
        frames = (
            frame for part in parts for frame in (part.dst if part.target is Tier.CPU else part.via)
        )
        for arrival in self.pool.arrivals.touching(frames=frames):
            arrival.whole.synchronize()

    def _submit_load(self, job: Job, start: int, stop: int) -> None:
        job.share()
        batch = job.op.parts[start:stop]
        if batch[0].source is Tier.DISK:
            self._reading.submit(lambda number: self._read(job, self._readers[number], start, stop))
        else:
            host = batch[0].source is Tier.CPU
            self._copier.load(job, start, batch, None if host else [(self.host, ())] * len(batch))

    def _read(self, job: Job, reader: Reader, start: int, stop: int) -> None:
        batch = job.op.parts[start:stop]
        over = threading.Event()
        try:
            if not job.begin(start, stop):  # something before it has failed
                return
            with self._guard(job, start):
                self._await_readers(batch)
                places, good = reader.read(batch)
                job.heard = time.monotonic()
                self._disk.heard()
                if good < len(batch):
                    job.cut(start + good)
                    self._say(job.op, start + good, "missing or damaged record")
                if any(part.target is Tier.GPU for part in batch[:good]):
                    job.share()
                    self._copier.load(job, start, batch[:good], places[:good], over.set)
                    if reader.bounces(places):
                        over.wait()
        finally:
            job.end_share()

    # Device -> device

    def _change_device(self, job: Job) -> None:
        # Behind every fence, not only what is queued on its own stream: the last owner of these
        # frames may have run on another.
        try:
            with self._guard(job, 0), self._streams.on(Lane.COMPUTE, job.behind()):
                for part in job.op.parts:
                    if job.op.kind is OpKind.CLEAR:
                        self.pool.clear(part.dst)
                    else:
                        copy_part(self.pool, part)
        finally:
            job.end_share()

    def _landing_rows(self, geometry: Geometry, most_frames: int, read_frames: int) -> int:
        """Enough for the largest batches, but not for more frames than there are to load."""
        most = geometry.cpu_frames + (0 if self._store is None else read_frames)
        return min(BATCHES * self._batch_frames, most + most_frames) if most else 0

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
        self._reads.pop(job.op.id, None)
        self._disk.ended(job.op)
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


def _runs(parts: Sequence[Part]) -> Iterator[tuple[tuple[Tier, bool], int]]:
    """Parts of one source, all kept on the host or none, and how many there are."""
    if [part.source for part in parts].count(Tier.CPU) == len(parts):  # by far the most
        yield (Tier.CPU, False), len(parts)
        return
    for key, run in groupby(parts, key=lambda part: (part.source, kept_on_host(part))):
        yield key, len(list(run))


def _forget(pools: tuple[Workers | Turns, ...], at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    for workers in pools:
        workers.stop()


def _finish(pools: tuple[Workers | Turns, ...]) -> None:
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
