"""How long pages live and how much they matter: the most that any lease has asked for."""

from heapq import heappop, heappush

from kvtier.core.leases import NEVER, LeaseRecord
from kvtier.core.residency import Residency
from kvtier.core.tree import Node

__all__ = ["Lifetimes"]


class Lifetimes:
    """Priorities and times to live."""

    __slots__ = ("_count", "_expiring", "residency")

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self._expiring: list[tuple[float, int, Node]] = []
        self._count = 0

    def extend(self, node: Node, rec: LeaseRecord) -> None:
        """A page is as important, and lives as long, as the lease that asks most of it."""
        node.priority = max(node.priority, rec.priority)
        if node.expires < rec.expires:
            node.expires = rec.expires
            if rec.expires < NEVER:
                self._count += 1
                heappush(self._expiring, (rec.expires, self._count, node))

    def expire(self, now: float) -> None:
        """Drop pages whose time to live has passed and that nobody holds."""
        again: list[tuple[float, int, Node]] = []
        due = []
        while self._expiring and self._expiring[0][0] < now:
            due.append(heappop(self._expiring))
        for entry in sorted(due, key=lambda e: -e[2].depth):
            node = entry[2]
            if node.run is None or node.expires >= now:
                continue  # gone, or somebody has prolonged it (and queued that)
            busy = any(c is not None and (c.readers or c.writer) for c in node.copies)
            if busy or node.pins or node.keeps or node.offspring():
                again.append(entry)
            else:
                self.residency.kill(node)
        for entry in again:
            heappush(self._expiring, entry)
