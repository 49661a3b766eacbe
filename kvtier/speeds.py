"""How fast the tiers are: measured operation by operation, for deciding whether loading pays.

Pure: whoever starts operations says when they start and end.  Frames are the unit, since that is
what the core counts.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import inf

from kvtier.core.load_costs import LoadCosts
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.types import Tier

__all__ = ["PROBE_S", "Pace", "Speeds"]

SAMPLES = 8
"""Operations that an estimate rests on, the latest: what they say of another time is soon gone."""
ROBUST = 4
"""From so many on, the slowest is left out: one hiccup says nothing of the rest."""
PROBE_S = 1.0
"""Where loading is found too slow, so often it is tried whether that is still so."""
PROBES = 3
"""Operations under way at most, those that hang included, when another try is made."""
ENDS = 64
"""How many ends are remembered, the latest, to tell those of older operations from newer ones."""
UNMEASURED = {Tier.CPU: 10e9, Tier.DISK: 1e9}
"""Bytes a second, until something has been measured."""


class Pace:
    """What the operations of one tier take: they queue for it, first in, first out."""

    __slots__ = ("_ended", "_ends", "_running", "_samples", "_started", "_unmeasured", "served")

    def __init__(self, frame_s: float) -> None:
        """``frame_s``: seconds a frame, until something has been measured."""
        self._unmeasured = frame_s
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self._running: dict[int, tuple[int, float]] = {}
        """By operation: frames, and when it was started."""
        self._started = self._ended = -inf
        """When the last one was."""
        self._ends: deque[tuple[int, float]] = deque(maxlen=ENDS)
        """Operations, and when they ended."""
        self.served = 0
        """Operations that have ended."""

    def started(self, op_id: int, frames: int, now: float) -> None:
        self._running[op_id] = frames, now
        self._started = now

    def ended(self, op_id: int, frames: int, now: float) -> None:
        """The seconds since it was its turn are what its frames took, whether all have come or
        not: what fails slowly is slow too.  Nothing happens if it was not of this tier."""
        if op_id not in self._running:
            return
        _, started = self._running.pop(op_id)
        if frames:
            self._samples.append((frames, max(now - max(started, self._ended), 0.0)))
        self._ended = now
        self._ends.append((op_id, now))
        self.served += 1

    def estimate(self) -> tuple[float, float]:
        """Seconds an operation takes besides its frames, and seconds a frame."""
        samples = sorted(self._samples, key=lambda s: s[1] / s[0])
        if len(samples) >= ROBUST:
            samples.pop()
        if not samples:
            return 0.0, self._unmeasured
        n, frames, seconds = len(samples), sum(x for x, _ in samples), sum(y for _, y in samples)
        spread = n * sum(x * x for x, _ in samples) - frames * frames
        if 10 * spread > frames * frames:  # of sizes so different that they tell the two apart
            slope = (n * sum(x * y for x, y in samples) - frames * seconds) / spread
            latency = (seconds - slope * frames) / n
            if slope > 0 and latency > 0:
                return latency, slope
        return 0.0, seconds / frames

    def ahead(self, now: float) -> tuple[float, float]:
        """Seconds before an operation that is started now gets its first frame, and seconds a
        frame then.  One that takes longer than it should tells that all does, and may take as
        long again."""
        latency, frame_s = self.estimate()
        if not self._running:
            return latency, frame_s
        (first, started), *_ = self._running.values()
        spent = now - max(started, self._ended)
        late = spent - (latency + first * frame_s)
        if late > 0:
            frame_s = max(frame_s, spent / first)
        queued = sum(frames for frames, _ in self._running.values()) * frame_s
        return latency + (queued + late if late > 0 else max(queued - spent, 0.0)), frame_s

    def rest_s(self, op_ids: Collection[int]) -> float:
        """Seconds until these have ended, from when the last operation did, if all goes on as it
        has been."""
        latency, frame_s = self.estimate()
        queued = rest = 0
        for op_id, (frames, _) in self._running.items():
            queued += frames
            if op_id in op_ids:
                rest = queued
        return latency + rest * frame_s if rest else 0.0

    @property
    def running(self) -> Collection[int]:
        """Operations under way."""
        return self._running.keys()

    def heard(self, op_ids: Collection[int], tells: Callable[[int], float]) -> float:
        """Until when there was nothing to complain of: when something last came of these
        operations or of those started before them, or should have come.  ``tells`` knows when an
        operation under way last got something.  Infinity: none of these is under way."""
        last = max((i for i in op_ids if i in self._running), default=None)
        if last is None:
            return inf
        waits = [i for i in self._running if i <= last]
        began = max([self._running[waits[0]][1], *(at for i, at in self._ends if i <= last)])
        return max(began + self.rest_s((last,)), *map(tells, waits))

    def unproven(self, now: float) -> bool:
        """Whether it is time to try anew how fast this tier is."""
        return now - self._started >= PROBE_S and len(self._running) < PROBES


class Speeds:
    """The paces of the host and the disk, and of what is written to the disk."""

    __slots__ = ("_checkpoint_frames", "disk", "host", "writes")

    def __init__(self, frame_bytes: int, checkpoint_frames: int) -> None:
        self._checkpoint_frames = checkpoint_frames
        self.host = Pace(frame_bytes / UNMEASURED[Tier.CPU])
        self.disk = Pace(frame_bytes / UNMEASURED[Tier.DISK])
        self.writes = Pace(frame_bytes / UNMEASURED[Tier.DISK])

    def started(self, op: Op, now: float) -> None:
        """A RESTORE, STORE or DROP.  Where a RESTORE is from the disk, too, the disk is what it
        waits for."""
        if op.kind is not OpKind.RESTORE:
            self.writes.started(op.id, 1 + self._frames(op.parts, Tier.CPU), now)
            return
        disk, host = self._frames(op.parts, Tier.DISK), self._frames(op.parts, Tier.CPU)
        if disk:
            self.disk.started(op.id, disk, now)
        elif host:
            self.host.started(op.id, host, now)

    def ended(self, op: Op, now: float, tried: int) -> None:
        """With its first ``tried`` parts delivered, or tried."""
        self.writes.ended(op.id, 1 + self._frames(op.parts, Tier.CPU), now)
        self.disk.ended(op.id, self._frames(op.parts[:tried], Tier.DISK), now)
        self.host.ended(op.id, self._frames(op.parts[:tried], Tier.CPU), now)

    def costs(self, compute_s: float, now: float) -> LoadCosts:
        """For a lease that is opened now."""
        host_wait_s, host_s = self.host.ahead(now)
        disk_wait_s, disk_s = self.disk.ahead(now)
        return LoadCosts(
            compute_s=compute_s,
            host_s=host_s,
            disk_s=disk_s,
            host_wait_s=host_wait_s,
            disk_wait_s=disk_wait_s,
        )

    def _frames(self, parts: Sequence[Part], tier: Tier) -> int:
        return sum(
            1 if part.kind is Kind.HISTORY else self._checkpoint_frames
            for part in parts
            if part.source is tier
        )
