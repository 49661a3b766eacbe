"""How long restoring leases may wait for the disk, and a thread that notices when that is over.

Owns the clock and what is measured by it.  Reads the core, under its caller's lock, and changes
nothing there: what settling for less means is the core's business.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection
from math import inf

from kvtier.arguments import FOREVER
from kvtier.config import RestorePolicy
from kvtier.core.leases import LeaseRecord, PrefetchRecord
from kvtier.core.load_costs import ALWAYS, SLACK, LoadCosts
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Op, OpKind
from kvtier.speeds import PROBE_S, Speeds
from kvtier.types import LeaseState

__all__ = ["Alarm", "Deadlines", "Patience"]

logger = logging.getLogger("kvtier")

_OF_TIERS = frozenset({OpKind.RESTORE, OpKind.STORE, OpKind.DROP})
"""Operations for which something waits that keeps time."""
RETRY_S = 0.01
"""A lease whose time is over, but for which there is no room yet, is asked again so soon."""
HUNG_RETRY_S = 1.0
"""What still waits for a disk that hangs is asked again so soon."""


class Patience:
    """How long one lease may wait for the disk."""

    __slots__ = ("compute_s", "limit", "opened", "over", "progress", "record", "seen")

    def __init__(
        self, record: LeaseRecord, *, opened: float, compute_s: float, timeout_s: float | None
    ) -> None:
        self.record = record
        self.opened = opened
        self.compute_s = compute_s
        self.limit = inf if timeout_s is None else opened + min(timeout_s, FOREVER)
        self.progress = opened
        """When an operation that it waits for ended last."""
        self.over = -inf
        """When it ends, as far as was known"""
        self.seen = -1
        """when so many operations of the disk had ended."""

    def ends(self, at_hand: int, awaited: int, rest_s: float) -> float:
        """When, if nothing arrives meanwhile.  It could stand on ``at_hand`` tokens now, and on
        ``awaited`` once all is there, which should be ``rest_s`` after the last progress.

        Settling then has lost no more of what computing the whole prompt takes than the slack; and
        a load is given up before that once it is late by the time it would have saved.
        """
        lost = SLACK * len(self.record.prompt) + at_hand
        spared = (awaited - at_hand) * self.compute_s
        return min(
            self.limit,
            self.opened + lost * self.compute_s,
            self.progress + rest_s + spared,
        )


class Deadlines:
    """Those of one cache.  Called with its lock held, except for ``alarm``."""

    def __init__(
        self,
        core: CacheCore,
        settle_late: Callable[[], float],
        *,
        tells: Callable[[int], float] | None,
        stall_s: float,
    ) -> None:
        """``tells``: when an operation under way last got something, on the same clock; None: it
        is known only when one ends.  A disk that brings or takes nothing for ``stall_s`` hangs."""
        self.clock: Callable[[], float] = time.monotonic
        self.alarm = Alarm(settle_late)
        self._core = core
        self._tells = tells or _unheard
        self._stall_s = min(stall_s, FOREVER)
        self._speeds = Speeds(core.geometry.page_bytes, core.geometry.checkpoint_frames)
        self._bounds: dict[int, Patience] = {}
        self._look = inf
        """When something may have waited too long for a disk that hangs."""
        self._said = False

    def started(self, op: Op) -> None:
        """An operation was planned."""
        if op.kind not in _OF_TIERS:
            return
        now = self.clock()
        self._speeds.started(op, now)
        if self._look == inf and self._speeds.disk.running:
            self._look = now + self._stall_s
            self.alarm.set(self._look)

    def ended(self, op: Op, tried: int) -> None:
        """With so many of its parts delivered, or tried; before the core is told."""
        if op.kind not in _OF_TIERS:
            return
        now = self.clock()
        self._speeds.ended(op, now, tried)
        for patience in self._bounds.values():
            if op.id in patience.record.waits:
                patience.progress, patience.seen = now, -1

    def costs(self, compute_s: float) -> LoadCosts:
        """Of loading, by what has been measured and is under way; a token takes ``compute_s``."""
        return self._speeds.costs(compute_s, self.clock())

    def weighed(self, policy: RestorePolicy) -> LoadCosts | None:
        """What a lease weighs that is opened now; None: nothing."""
        rate, hangs = policy.prefill_tokens_per_s, self.disk_hangs()
        if rate is None and policy.mode == "wait_complete" and not hangs:
            return None
        costs = self.costs(ALWAYS if rate is None else 1 / rate)
        # A disk that is late already brings nothing in time, and would take pages for it meanwhile.
        late = policy.timeout_s is not None and costs.disk_wait_s > policy.timeout_s
        return costs.without_disk() if hangs or late or policy.mode == "best_effort" else costs

    def disk_unproven(self) -> bool:
        """Whether nobody has tried lately how fast the disk is."""
        return self._speeds.disk.unproven(self.clock())

    def disk_hangs(self) -> bool:
        """Whether it has work and has brought nothing for too long."""
        disk = self._speeds.disk
        if not disk.running:
            return False
        return disk.heard(disk.running, self._tells) + self._stall_s <= self.clock()

    def disk_swamped(self) -> bool:
        """Whether the disk has so much to do, or hangs, that more would only hold frames."""
        return self._speeds.disk.ahead(self.clock())[0] > PROBE_S

    def bound(self, record: LeaseRecord, compute_s: float, timeout_s: float | None) -> None:
        """A lease opened just now with costs settles for less when waiting for the disk no longer
        pays, or has taken ``timeout_s``."""
        if record.state is LeaseState.RESTORING:
            patience = self._bounds[record.id] = Patience(
                record, opened=self.clock(), compute_s=compute_s, timeout_s=timeout_s
            )
            self.alarm.set(self._ends(patience))

    def forget(self, record: LeaseRecord) -> None:
        """It waits no longer."""
        self._bounds.pop(record.id, None)

    def late(self) -> tuple[list[LeaseRecord], float]:
        """Leases that have waited long enough, and when there may be others."""
        now, late, first = self.clock(), [], inf
        for patience in self._bounds.values():
            ends = patience.over
            if ends <= now or patience.seen != self._speeds.disk.served:
                ends = self._ends(patience)  # takes a look at every page
            if ends <= now:
                late.append(patience.record)
                ends = now + RETRY_S
            first = min(first, ends)
        return late, first

    def hung(self) -> tuple[list[LeaseRecord | PrefetchRecord], float]:
        """What has waited too long for a disk that hangs, and when there may be more."""
        now, disk = self.clock(), self._speeds.disk
        if now < self._look:
            return [], self._look
        if not disk.running:
            self._look, self._said = inf, False
            return [], inf
        first, hung = now + self._stall_s, []
        waiting: list[LeaseRecord | PrefetchRecord] = [*self._core.leases.values()]
        for record in (*waiting, *self._core.prefetches.values()):
            ends = disk.heard(record.waits, self._tells) + self._stall_s if record.waits else inf
            if ends <= now:
                hung.append(record)
                ends = now + HUNG_RETRY_S
            first = min(first, ends)
        if hung and not self._said:
            logger.warning(
                "the disk has brought nothing for %g s: what waits for it does without",
                self._stall_s,
            )
        self._said = self._said or bool(hung)
        self._look = first
        return hung, first

    def awaited(self, op_ids: Collection[int]) -> None:
        """Somebody waits for these to be written."""
        if (ends := self.writes_hang(op_ids)) < inf:
            self.alarm.set(ends)

    def writes_hang(self, op_ids: Collection[int]) -> float:
        """When a disk that writes nothing of these any more will have hung, or has; infinity:
        none of them is being written."""
        return self._speeds.writes.heard(op_ids, _unheard) + self._stall_s

    def _ends(self, patience: Patience) -> float:
        record = patience.record
        awaited = len(record.nodes) * self._core.geometry.page_tokens
        at_hand = self._core.at_hand(record) if record.waits else awaited
        ends = inf  # the host will bring the rest
        if at_hand < awaited:
            ends = patience.ends(at_hand, awaited, self._speeds.disk.rest_s(record.waits))
        patience.over, patience.seen = ends, self._speeds.disk.served
        return ends


def _unheard(op_id: int) -> float:
    """Of what is written it is known only when it has ended."""
    return -inf


class Alarm:
    """Calls ``ring`` when it is time, on a thread of its own, which is there once it is needed.

    ``ring`` returns when to be called next (infinity: not before ``set``).  Does not keep alive
    whom ``ring`` belongs to.
    """

    def __init__(self, ring: Callable[[], float]) -> None:
        self._ring = weakref.WeakMethod(ring)
        self._owner = weakref.ref(getattr(ring, "__self__", None))
        self._next = inf
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def set(self, when: float) -> None:
        """Ring at ``when``, on the monotonic clock, unless it rings before that."""
        with self._changed:
            if when >= self._next or self._stopping:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvtier-alarm", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # there are too many; the next lease tries again
                    logger.warning("leases wait for the disk without a limit: %s", error)
                    return
                self._thread = thread
                if (owner := self._owner()) is not None:
                    weakref.finalize(owner, self.stop).atexit = False
            self._next = when
            self._changed.notify()

    def stop(self) -> None:
        """Ring no more.  The thread ends by itself, soon."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            ring = self._ring()
            if ring is None:
                return
            try:
                when = ring()
            except BaseException:  # a future's callback may raise anything
                logger.exception("an alarm failed")
                when = time.monotonic() + RETRY_S
            del ring
            if when < inf:
                self.set(when)

    def _wait(self) -> bool:
        """Until it is time; whether it is, and not the end."""
        with self._changed:
            while not self._stopping:
                left = self._next - time.monotonic()
                if left <= 0:
                    self._next = inf
                    return True
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return False
