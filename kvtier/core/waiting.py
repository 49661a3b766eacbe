"""Who waits for operations, and what comes of it: leases that restore or park, and prefetches.

Owns the prefetches, and tells which reads nobody waits for any more.  What a lease stands on once
it has waited is the business of ``restore`` and ``parking``.
"""

from collections.abc import Iterable, Sequence

from kvtier.core.leases import LeaseRecord, PrefetchRecord
from kvtier.core.operations import Operations, Running
from kvtier.core.ops import Op, Shortfall
from kvtier.core.parking import Parking
from kvtier.core.residency import Residency
from kvtier.core.restore import Restore
from kvtier.core.tree import Node

__all__ = ["Waiting"]


class Waiting:
    """Of the leases in ``leases``, and of prefetches."""

    __slots__ = (
        "leases",
        "operations",
        "parking",
        "prefetches",
        "residency",
        "restore",
        "unwanted",
    )

    def __init__(
        self,
        residency: Residency,
        operations: Operations,
        restore: Restore,
        parking: Parking,
        leases: dict[int, LeaseRecord],
    ) -> None:
        self.residency = residency
        self.operations = operations
        self.restore = restore
        self.parking = parking
        self.leases = leases
        self.prefetches: dict[int, PrefetchRecord] = {}
        self.unwanted: list[int] = []
        """RESTOREs from disk that nobody waits for any more."""

    def prefetch(
        self, number: int, path: Sequence[Node], whole: int, most: int | None
    ) -> tuple[PrefetchRecord, list[Op]]:
        """Begin one, of the first ``whole`` pages of a path; see ``Restore.prefetch``."""
        rec = PrefetchRecord(number, list(path), set())
        self.residency.pin(path)
        self.prefetches[rec.id] = rec
        self.residency.touch(path)
        ops = self.restore.prefetch(rec, whole, most)
        if rec.done:
            self._end_prefetch(rec)
        return rec, ops

    def cancel(self, rec: PrefetchRecord) -> None:
        """Idempotent.  What still arrives stays, and its frames can be evicted then."""
        if rec.done:
            return
        rec.done = True
        self._end_prefetch(rec)
        self.no_more(rec.waits)

    def finished(self, op_id: int, run: Running, shortfall: Shortfall) -> list[Op]:
        """An operation has ended; who waited for it alone settles."""
        ops: list[Op] = []
        short = run.failed_at >= 0
        for rec in [r for r in self.leases.values() if op_id in r.waits]:
            if any(m.tail is rec.tail for m in run.delivered) and rec.tail is not None:
                rec.tail_ok = True
            rec.waits.discard(op_id)
            rec.give_up = rec.give_up or (short and shortfall is Shortfall.FAULT)
            if rec.parked is not None and rec.parked.op_id == op_id and short:
                rec.parked.ok = False
            if not rec.waits:
                ops += self.parking.settle(rec) if rec.parked else self.restore.settle(rec)
        for pre in [p for p in self.prefetches.values() if op_id in p.waits]:
            pre.waits.discard(op_id)
            if not pre.waits:
                self.restore.settle_prefetch(pre)
                self._end_prefetch(pre)
        return ops

    def without_disk(self, rec: LeaseRecord | PrefetchRecord) -> list[Op] | None:
        """It waits for the disk no longer.  None: it is left as it is."""
        awaited = rec.waits
        if (ops := self._settled_early(rec)) is not None:
            self.no_more(awaited)
        return ops

    def no_more(self, op_ids: Iterable[int]) -> None:
        """One waits for these no longer; those that others wait for go on."""
        leases, prefetches = self.leases.values(), self.prefetches.values()
        others = [r.waits for r in leases if r.waits] + [r.waits for r in prefetches]
        self.unwanted += self.operations.reads(set(op_ids).difference(*others))

    def _settled_early(self, rec: LeaseRecord | PrefetchRecord) -> list[Op] | None:
        if isinstance(rec, PrefetchRecord):
            if rec.done:
                return None
            self.restore.settle_prefetch(rec)
            self._end_prefetch(rec)
            return []
        if not self.restore.give_up_disk(rec):
            return None
        if rec.parked is None:
            return self.restore.stand_anew(rec, rec.nodes)
        return self.parking.resume_without(rec)

    def _end_prefetch(self, rec: PrefetchRecord) -> None:
        if self.prefetches.pop(rec.id, None) is not None:
            nodes, rec.nodes = rec.nodes, []
            self.residency.unpin(nodes)
