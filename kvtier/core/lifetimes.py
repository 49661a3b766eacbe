"""How long pages live and how much they matter: the most that any lease has asked for."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from kvtier.core.leases import NEVER, LeaseRecord
from kvtier.core.residency import Residency
from kvtier.core.tree import Node

__all__ = ["Lifetimes"]


class Lifetimes:
    """Priorities and times to live."""

    __slots__ = ("_count", "_expiring", "_used", "residency")

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self._expiring: list[tuple[float, int, Node]] = []
        self._count = 0
        self._used = False

    def extend(self, nodes: Iterable[Node], rec: LeaseRecord) -> None:
        """Pages are as important, and live as long, as the lease that asks most of them."""
        self._used = self._used or rec.priority != 0 or rec.expires < NEVER
        if not self._used:
            return  # nobody has ever asked for anything
        for node in nodes:
            node.priority = max(node.priority, rec.priority)
            if node.expires < rec.expires:
                self._until(node, rec.expires)

    def born(self, node: Node, rec: LeaseRecord) -> None:
        """A page that only this lease has asked for so far."""
        node.priority = rec.priority
        if rec.expires < NEVER:
            self._used = True
            self._until(node, rec.expires)

    def _until(self, node: Node, expires: float) -> None:
        node.expires = expires
        if expires < NEVER:
            self._count += 1
            heappush(self._expiring, (expires, self._count, node))
            if len(self._expiring) > 2 * self.residency.tree.num_nodes + 64:
                self._expiring = [
                    e for e in self._expiring if e[2].run is not None and e[2].expires == e[0]
                ]
                heapify(self._expiring)

    @property
    def next(self) -> float:
        """When ``expire`` may have something to do; infinity: never."""
        return self._expiring[0][0] if self._expiring else NEVER

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
