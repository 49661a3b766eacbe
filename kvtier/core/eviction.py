"""Which copy leaves a tier first: policies, and the order that applies them.

Recency is a counter; a touched path has one tick, so an ancestor is never older than a
descendant, and among equals the deepest goes first.  Leaves only is ``residency``'s rule; an
order merely proposes.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from kvtier.config import EvictionPolicy
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.core.copies import Copy

__all__ = ["EvictionOrder", "Lru", "S3Fifo", "SecondTouch", "policy_for"]

Entry = tuple[int, int, int, "Copy"]
_PRIORITY = 1 << 56
_EXPENDABLE = 1 << 54


class Lru:
    """Least recently used first; everything is let in."""

    def rank(self, tick: int, hits: int) -> int:
        return tick

    def admit(self, hits: int, *, full: bool) -> bool:
        return True


class SecondTouch(Lru):
    """Least recently used first; a full tier lets in only what was found again once."""

    def admit(self, hits: int, *, full: bool) -> bool:
        return hits > 0 or not full


class S3Fifo:
    """Pages never found again leave first, in order of arrival; each hit (three at most) counts
    like ``generation`` younger ticks, after the idea of a small and a main queue."""

    def __init__(self, generation: int = 4096) -> None:
        self._generation = generation

    def rank(self, tick: int, hits: int) -> int:
        return tick + min(hits, 3) * self._generation

    def admit(self, hits: int, *, full: bool) -> bool:
        return True


def policy_for(name: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by its name in ``CacheConfig.eviction``."""
    if not isinstance(name, str):
        return name
    if name == "lru":
        return Lru()
    if name == "s3fifo":
        return S3Fifo()
    if name == "adaptive":
        return SecondTouch()
    raise ConfigError(f"unknown eviction policy {name!r}")


class EvictionOrder:
    """Candidates of one pool of frames, lowest rank first.

    A heap whose entries may be stale: a copy is queued at most once, and what its rank is worth
    is looked at again when it comes to the top.
    """

    __slots__ = ("_evictable", "_heap", "_limit", "_policy", "_seq")

    def __init__(
        self, policy: EvictionPolicy, evictable: "Callable[[Copy], bool]", size: int
    ) -> None:
        self._policy = policy
        self._evictable = evictable
        self._heap: list[Entry] = []
        self._limit = 2 * size + 64
        self._seq = 0

    def __len__(self) -> int:
        return len(self._heap)

    def entry(self, copy: "Copy") -> Entry:
        node = copy.node
        assert node is not None
        rank = self._policy.rank(node.tick, node.hits) + node.priority * _PRIORITY
        if copy.expendable:
            rank -= _EXPENDABLE
        self._seq += 1
        return rank, -node.depth, self._seq, copy

    def push(self, copy: "Copy") -> None:
        """Offer a copy that may have become evictable."""
        if not copy.queued:
            copy.queued = True
            heappush(self._heap, self.entry(copy))
            if len(self._heap) > self._limit:
                self._compact()

    def top(self) -> Entry | None:
        """The best candidate, left where it is; None if there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            copy = entry[3]
            if copy.node is None or not self._evictable(copy):
                heappop(heap)
                copy.queued = False
                continue
            fresh = self.entry(copy)
            if fresh[0] > entry[0]:
                heapreplace(heap, fresh)
                continue
            return entry
        return None

    def pop(self) -> "Copy":
        """Take the candidate that ``top`` has just shown."""
        copy = heappop(self._heap)[3]
        copy.queued = False
        return copy

    def _compact(self) -> None:
        """Forget entries of copies that are gone: at least half, a pool has no more copies."""
        self._heap = [e for e in self._heap if e[3].node is not None]
        heapify(self._heap)

    def extend(self, copies: "Iterable[Copy]") -> None:
        for copy in copies:
            self.push(copy)
