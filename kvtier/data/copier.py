"""The device ends of PACK and RESTORE: one thread queues all their copies, others wait for them.

One, because the interpreter runs one thread at a time: several that queue copies wake each other at
every call into the driver, which takes longer than the calls.  It never waits for a copy, only for
slots: of the staging, through which records leave the device, and of the landing buffer, through
which they come.  Who waits for copies gives the slots back and waits for nobody.

Knows jobs, slots and streams.  What a record is made of is the business of ``records``.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvtier.core.ops import Part
from kvtier.data.arrivals import Arrival, Arrivals
from kvtier.data.batches import Place
from kvtier.data.jobs import Job, Turns, Workers
from kvtier.data.records import LayerLoad, Loader, Packer
from kvtier.data.rows import Rows
from kvtier.data.staging import Slots
from kvtier.data.streams import Event, Fences, Streams

logger = logging.getLogger("kvtier")

__all__ = ["Copier", "Guard", "even_batch"]

Guard = Callable[[Job, int], AbstractContextManager[None]]
"""Around work for a job: what it raises cuts the job at this part."""
PACKS, LOADS, LAYERS = 0, 1, 2
W = TypeVar("W", bound="_Waiting")


def even_batch(frames: int, batch: int) -> int:
    """Frames a batch when so many are cut evenly into batches of about ``batch``, up to half as
    many more: a small rest costs the interpreter as much as a whole one."""
    return -(-frames // max(1, round(frames / batch)))


class Copier:
    """Runs packs and loads, each in the order in which they came, both at once.

    ``landed`` is called with parts whose records are on the host now, before their job ends.
    """

    def __init__(
        self,
        packer: Packer,
        loader: Loader,
        staging: Slots,
        landing: Slots,
        streams: Streams,
        arrivals: Arrivals,
        *,
        pack_frames: int,
        load_frames: int,
        guard: Guard,
        landed: Callable[[Sequence[Part]], None],
        prepare: Callable[[], None],
    ) -> None:
        self._packer = packer
        self._loader = loader
        self._staging = staging
        self._landing = landing
        self._streams = streams
        self._arrivals = arrivals
        self._pack_frames = pack_frames
        self._load_frames = load_frames
        self._guard = guard
        self._landed = landed
        self.turns = Turns("copy", 3, prepare=prepare)
        self.packed = Workers("packed", 1, prepare=prepare)
        self.drained = Workers("land", 1, prepare=prepare)
        self.loaded = Workers("loaded", 1, prepare=prepare)
        self.queued = Workers("queued", 1)
        self.workers: tuple[Workers | Turns, ...] = (
            self.turns,
            self.packed,
            self.drained,
            self.loaded,
            self.queued,
        )

    def pack(self, job: Job) -> None:
        """Queue a PACK.  Takes over the caller's share of the job."""
        task, most = _Pack(self, job), 0 if job.late else self._pack_frames
        self.turns.submit(PACKS, _Together(self._pack_together, self._staging, most, deque([task])))

    def load(
        self,
        job: Job,
        start: int,
        parts: Sequence[Part],
        places: Sequence[Place] | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue the parts of a RESTORE from ``start`` on, whose records are at ``places``; None:
        in the host frames that are their source.

        Takes over the caller's share of the job; ``over`` is called when nothing reads the places
        any more.
        """
        task = _Load(self, job, start, parts, places, over)
        most = 0 if job.early or job.late or places is not None else self._load_frames
        self.turns.submit(LOADS, _Together(self._load_together, self._landing, most, deque([task])))

    def load_layers(self, job: Job, start: int, parts: Sequence[Part]) -> None:
        """Queue those parts of an early RESTORE whose records lie in host frames, all of them one
        layer after the other.  Takes over the caller's share of the job."""
        load = None
        with self._guard(job, start):
            load = self._loader.layers(parts)
        if load is not None:
            arrival = self._loader.arrival(parts, None)
            job.hold()
            self._arrivals.add(arrival)
            self.turns.submit(LAYERS, _LoadLayers(self, job, start, load, arrival))
        self._end_share(job)

    # Device -> host

    def _pack_batch(self, task: "_Pack") -> int:
        """Queue the parts from ``task.at`` on for which there are slots; returns the next one."""
        job, start = task.job, task.at
        free = self._staging.take(len(job.op.parts[start].dst), task.batch)
        if free is None or job.blocked:  # it has waited long enough
            if free is not None:
                self._staging.give(free)
            job.cut(start)
            return start
        stop, count = task.ends(start, len(free))
        slots = free[:count]
        self._staging.give(free[count:])
        parts = job.op.parts[start:stop]
        drained: Event | None = None
        try:
            batch = self._packer.batch(parts, slots)
            task.gathered = self._packer.gather(batch, job.behind())
            drained = self._packer.drain(batch, task.gathered)
        finally:
            if drained is None:
                self._staging.give(slots)
        task.left -= count
        self._land_later(job, start, parts, slots, drained)
        return stop

    def _pack_together(self, tasks: Sequence["_Pack"]) -> bool:
        """Queue several PACKs as one batch; whether it could be done."""
        jobs = [task.job for task in tasks]
        count = sum(task.left for task in tasks)
        slots = self._staging.take(count, count)
        if slots is None:
            return False
        try:
            batch = self._packer.batch([part for job in jobs for part in job.op.parts], slots)
            gathered = self._packer.gather(batch, _fences(jobs))
            drained = self._packer.drain(batch, gathered)
        except BaseException:  # each op is told by its own try
            self._staging.give(slots)
            logger.debug("packs that waited are queued one by one", exc_info=True)
            return False
        for task in tasks:
            own, slots = slots[: task.left], slots[task.left :]
            self._land_later(task.job, 0, task.job.op.parts, own, drained)
            self.packed.submit(lambda _, job=task.job: self._release(job, gathered))  # type: ignore[misc]
        return True

    def _land_later(
        self, job: Job, start: int, parts: Sequence[Part], slots: Rows, drained: Event
    ) -> None:
        job.share()
        self.drained.submit(lambda _: self._land(job, start, parts, slots, drained))

    def _release(self, job: Job, gathered: Event | None) -> None:
        try:
            if gathered is not None:
                with self._guard(job, 0):
                    gathered.synchronize()
                    self._streams.passed(job.fences)
            job.release_sources()
        finally:
            job.end_share()

    def _land(
        self, job: Job, start: int, batch: Sequence[Part], taken: Rows, drained: Event
    ) -> None:
        try:
            try:
                with self._guard(job, start):
                    self._packer.land(drained)
            finally:
                self._staging.give(taken)
                self.turns.wake()
            if start < job.delivered:
                self._landed(batch)
        finally:
            job.end_share()

    # Host -> device

    def _load_batch(self, task: "_Load") -> None:
        job, rows = task.job, self._landing.take(task.rows, task.rows)
        assert rows is not None, "not ready"
        loaded: Event | None = None
        try:
            if task.start < job.delivered:  # nothing before it has failed
                with self._guard(job, task.start):
                    loaded = self._loader.load(task.parts, task.places, rows, job.behind())
        finally:
            if loaded is None:
                self._landing.give(rows)
                task.over()
                self._end_share(job)
            elif job.early:
                job.hold()
                arrival = self._loader.arrival(task.parts, task.places)
                arrival.queue((), loaded, last=True)
                self._arrivals.add(arrival)
                self._await(job, task.start, loaded, rows, task.over, arrival.over, job.let_go)
                self._end_share(job)
            else:
                end = partial(self._end_share, job)
                self._await(job, task.start, loaded, rows, task.over, end)

    def _load_together(self, tasks: Sequence["_Load"]) -> bool:
        """Queue loads of several jobs from host frames as one batch; whether it could be done."""
        count = sum(task.rows for task in tasks)
        rows = self._landing.take(count, count)
        if rows is None:
            return False
        jobs = [task.job for task in tasks]
        try:
            parts = [part for task in tasks for part in task.parts]
            loaded = self._loader.load(parts, None, rows, _fences(jobs))
        except BaseException:  # each op is told by its own try
            self._landing.give(rows)
            logger.debug("loads that waited are queued one by one", exc_info=True)
            return False
        for task in tasks:
            own, rows = rows[: task.rows], rows[task.rows :]
            self._await(
                task.job, task.start, loaded, own, task.over, partial(self._end_share, task.job)
            )
        return True

    def _load_group(self, task: "_LoadLayers") -> bool:
        """Queue the next layers; whether there are more."""
        job, group, loaded = task.job, task.load.groups[task.at], None
        try:
            with self._guard(job, task.start):
                loaded = self._loader.load_layers(task.load, group, job.behind())
        except BaseException as error:
            task.arrival.fail(error)
            raise
        finally:
            if loaded is None:
                job.let_go()
        if loaded is None:
            task.arrival.fail(job.error or RuntimeError("not queued"))
            return False
        task.at += 1
        last = task.at == len(task.load.groups)
        task.arrival.queue(group.layers, loaded, last=last)
        if last:
            self._await(job, task.start, loaded, [], task.arrival.over, job.let_go)
        return not last

    def _end_share(self, job: Job) -> None:
        """On a thread of its own: callbacks may take their time, and may wait for what this one
        is to queue."""
        self.queued.submit(lambda _: job.end_share())

    def _await(
        self, job: Job, start: int, loaded: Event, rows: Rows, *then: Callable[[], None]
    ) -> None:
        """Once it has come its landing rows are free, and these are called."""
        self.loaded.submit(lambda _: self._arrive(job, start, loaded, rows, *then))

    def _arrive(
        self, job: Job, start: int, loaded: Event, rows: Rows, *then: Callable[[], None]
    ) -> None:
        try:
            with self._guard(job, start):
                loaded.synchronize()
                self._streams.passed(job.fences)
        finally:
            self._landing.give(rows)
            self.turns.wake()
            for call in then:
                call()


def _fences(jobs: Sequence[Job]) -> Fences:
    """All of theirs, each once."""
    return tuple({id(event): event for job in jobs for event in job.fences}.values())


class _Waiting(Protocol):
    """What ``_Together`` holds: a task, and how many slots it takes."""

    @property
    def count(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...
    def ready(self) -> bool: ...
    def run(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Together(Generic[W]):
    """Tasks that have come while others were under way, and go in one batch if they can: its price
    is the same for few bytes as for many.  If something is wrong with one of them each has its own
    turn, as it has if it is alone."""

    queue: Callable[[Sequence[W]], bool]
    """Queue them all; false with nothing done."""
    slots: Slots
    most: int
    """Slots they may take together."""
    tasks: deque[W]

    @property
    def count(self) -> int:
        return sum(task.count for task in self.tasks)

    @property
    def deadline(self) -> float | None:
        return self.tasks[0].deadline

    def absorb(self, other: object) -> bool:
        if not isinstance(other, _Together) or self.count + other.count > min(
            self.most, other.most
        ):
            return False
        self.tasks += other.tasks
        return True

    def ready(self) -> bool:
        if len(self.tasks) > 1 and self.most:
            return self.slots.free >= min(self.count, self.slots.num_slots)
        return self.tasks[0].ready()

    def run(self) -> bool:
        if len(self.tasks) > 1 and self.most:
            if self.queue(self.tasks):
                return False
            self.most = 0
            return True  # the first may have to wait for slots
        more = False
        try:
            more = self.tasks[0].run()
        except BaseException:
            logger.exception("a task of the data plane failed")  # its op has ended; others wait
        if not more:
            self.tasks.popleft()
        return bool(self.tasks)


@dataclass(slots=True, eq=False)
class _Pack:
    """One PACK, taken up batch by batch as staging frees up."""

    copier: Copier
    job: Job
    at: int = 0
    """Parts before this one are queued."""
    gathered: Event | None = None
    """Behind the last gather."""
    batch: int = 0
    """Slots it takes at a time."""
    left: int = 0
    """Frames of the parts that are not queued yet."""
    single: bool = False
    """Every part has one frame."""

    def __post_init__(self) -> None:
        parts, self.left, longest = self.job.op.parts, self.job.staged, 1
        self.single = self.left == len(parts)
        if not self.single:
            longest = max(len(part.dst) for part in parts)
        even = even_batch(self.left, self.copier._pack_frames) + longest - 1
        self.batch = min(even, self.copier._staging.num_slots)

    @property
    def count(self) -> int:
        return self.left

    @property
    def deadline(self) -> float | None:
        return self.job.deadline

    def ends(self, start: int, frames: int) -> tuple[int, int]:
        """Behind which part so many frames are used up, and how many of them are."""
        parts = self.job.op.parts
        if self.single:
            stop = min(len(parts), start + frames)
            return stop, stop - start
        stop, count = start, 0
        while stop < len(parts) and count + len(parts[stop].dst) <= frames:
            count += len(parts[stop].dst)
            stop += 1
        return stop, count

    def ready(self) -> bool:
        if self.at >= self.job.delivered:  # shrinks when a landing fails
            return True
        return not self.job.blocked and self.copier._staging.free >= min(self.batch, self.left)

    def run(self) -> bool:
        more = False
        try:
            if self.at < self.job.delivered:
                with self.copier._guard(self.job, self.at):
                    self.at = self.copier._pack_batch(self)
            more = self.at < self.job.delivered
        finally:
            if not more:
                job, gathered = self.job, self.gathered
                self.copier.packed.submit(lambda _: self.copier._release(job, gathered))
        return more


@dataclass(slots=True, eq=False)
class _Load:
    """One batch of a RESTORE."""

    copier: Copier
    job: Job
    start: int
    parts: Sequence[Part]
    places: Sequence[Place] | None
    over: Callable[[], None]
    rows: int = 0
    """Landing rows it takes."""
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.rows = self.copier._loader.rows(self.parts, self.places)

    @property
    def count(self) -> int:
        return max(self.rows, 1)  # on a CPU they take none

    def ready(self) -> bool:
        return not self.job.blocked and self.copier._landing.free >= self.rows

    def run(self) -> bool:
        self.copier._load_batch(self)
        return False


@dataclass(slots=True, eq=False)
class _LoadLayers:
    """Parts of a RESTORE that come layer by layer."""

    copier: Copier
    job: Job
    start: int
    load: LayerLoad
    arrival: Arrival
    at: int = 0
    """Groups before this one are queued."""
    deadline: float | None = None

    def absorb(self, other: object) -> bool:
        return False

    def ready(self) -> bool:
        return True  # it needs no landing rows

    def run(self) -> bool:
        return self.copier._load_group(self)
