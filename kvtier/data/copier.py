"""The device ends of PACK and RESTORE: one thread queues all their copies, others wait for them.

One, because the interpreter runs one thread at a time: several that queue copies wake each other at
every call into the driver, which takes longer than the calls.  It never waits for a copy, only for
slots: of the staging, through which records leave the device, and of the landing buffer, through
which they come.  Who waits for copies gives the slots back and waits for nobody.

Knows jobs, slots and streams.  What a record is made of is the business of ``records``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvtier.core.ops import Part
from kvtier.data.arrivals import Arrival, Arrivals
from kvtier.data.device import LayerGroup
from kvtier.data.jobs import Job, Turns, Workers
from kvtier.data.records import Loader, Packer, Place
from kvtier.data.staging import Slots
from kvtier.data.streams import Event, Streams

__all__ = ["Copier", "Guard", "even_batch"]

Guard = Callable[[Job, int], AbstractContextManager[None]]
"""Around work for a job: what it raises cuts the job at this part."""
PACKS, LOADS = 0, 1


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
        self._guard = guard
        self._landed = landed
        self.turns = Turns("copy", 2, prepare=prepare)
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
        self.turns.submit(PACKS, _Pack(self, job))

    def load(
        self,
        job: Job,
        start: int,
        parts: Sequence[Part],
        places: Sequence[Place],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue the parts of a RESTORE from ``start`` on, whose records are at ``places``.

        Takes over the caller's share of the job; ``over`` is called when nothing reads the places
        any more.
        """
        self.turns.submit(LOADS, _Load(self, job, start, parts, places, over))

    def load_layers(self, job: Job, start: int, parts: Sequence[Part]) -> None:
        """Queue those parts of an early RESTORE whose records lie in host frames, all of them one
        layer after the other.  Takes over the caller's share of the job."""
        groups = self._loader.layer_groups(len(parts))
        self.turns.submit(LOADS, _LoadLayers(self, job, start, parts, groups))

    # Device -> host

    def _pack_batch(self, task: "_Pack") -> int:
        """Queue the parts from ``task.at`` on for which there are slots; returns the next one."""
        job, start = task.job, task.at
        free = self._staging.take(len(job.op.parts[start].dst), task.batch)
        if free is None:  # it has waited long enough
            job.cut(start)
            return start
        stop, count = start, 0
        for part in job.op.parts[start:]:
            if count + len(part.dst) > len(free):
                break
            stop, count = stop + 1, count + len(part.dst)
        slots = free[:count]
        self._staging.give(free[count:])
        batch = job.op.parts[start:stop]
        drained: Event | None = None
        try:
            task.gathered = self._packer.gather(batch, slots, job.fences)
            drained = self._packer.drain(batch, slots, task.gathered)
        finally:
            if drained is None:
                self._staging.give(slots)
        task.left -= count
        job.share()
        self.drained.submit(lambda _: self._land(job, start, batch, slots, drained))
        return stop

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
        self, job: Job, start: int, batch: Sequence[Part], taken: list[int], drained: Event
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
                    loaded = self._loader.load(task.parts, task.places, rows, job.fences)
        finally:
            if loaded is None:
                self._end_load(task, rows)
                job.end_share()
            else:
                arrival = None
                if job.early:
                    arrival = self._loader.arrival(task.parts, task.places, loaded)
                self._await(job, task.start, loaded, arrival, lambda: self._end_load(task, rows))

    def _load_group(self, task: "_LoadLayers") -> bool:
        """Queue the next layers; whether there are more."""
        job, group, loaded = task.job, task.groups[len(task.events)], None
        if task.start < job.delivered:
            with self._guard(job, task.start):
                loaded = self._loader.load_layers(group, task.parts, job.fences)
        if loaded is None:
            job.end_share()
            return False
        task.events.append(loaded)
        if len(task.events) < len(task.groups):
            return True
        layers = {
            layer: event
            for group, event in zip(task.groups, task.events, strict=True)
            for layer in group.layers
        }
        places = [self._loader.place(part) for part in task.parts]
        arrival = self._loader.arrival(task.parts, places, loaded, layers)
        self._await(job, task.start, loaded, arrival, lambda: None)
        return False

    def _await(
        self,
        job: Job,
        start: int,
        loaded: Event,
        arrival: Arrival | None,
        over: Callable[[], None],
    ) -> None:
        """What was queued is over with ``loaded``; the job's share of it too, or if it is one that
        ends early, now.  On a thread of its own: its callbacks may take their time."""
        if arrival is not None:
            self._arrivals.add(arrival)
            self.queued.submit(lambda _: job.end_share())
        self.loaded.submit(lambda _: self._arrive(job, start, loaded, arrival, over))

    def _arrive(
        self,
        job: Job,
        start: int,
        loaded: Event,
        arrival: Arrival | None,
        over: Callable[[], None],
    ) -> None:
        try:
            with self._guard(job, start):
                loaded.synchronize()
                self._streams.passed(job.fences)
        finally:
            over()
            self.turns.wake()
            if arrival is None:
                job.end_share()
            else:
                self._arrivals.over(arrival)

    def _end_load(self, task: "_Load", rows: list[int]) -> None:
        self._landing.give(rows)
        task.over()


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

    def __post_init__(self) -> None:
        self.left = sum(len(part.dst) for part in self.job.op.parts)
        longest = max((len(part.dst) for part in self.job.op.parts), default=1)
        even = even_batch(self.left, self.copier._pack_frames) + longest - 1
        self.batch = min(even, self.copier._staging.num_slots)

    @property
    def deadline(self) -> float | None:
        return self.job.deadline

    def ready(self) -> bool:
        if self.at >= self.job.delivered:  # shrinks when a landing fails
            return True
        return self.copier._staging.free >= min(self.batch, self.left)

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
    places: Sequence[Place]
    over: Callable[[], None]
    rows: int = 0
    """Landing rows it takes."""
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.rows = self.copier._loader.rows(self.parts, self.places)

    def ready(self) -> bool:
        return self.copier._landing.free >= self.rows

    def run(self) -> bool:
        self.copier._load_batch(self)
        return False


@dataclass(slots=True, eq=False)
class _LoadLayers:
    """Parts of a RESTORE that come layer by layer; needs no landing rows."""

    copier: Copier
    job: Job
    start: int
    parts: Sequence[Part]
    groups: Sequence[LayerGroup]
    events: list[Event] = field(default_factory=list)
    """Behind each of the groups that are queued."""
    deadline: float | None = None

    def ready(self) -> bool:
        return True

    def run(self) -> bool:
        return self.copier._load_group(self)
