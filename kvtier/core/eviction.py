"""Which copy leaves a tier first: policies, and the order that applies them.

Recency is a counter; a touched path has one tick, so an ancestor is never older than a
descendant, and among equals the deepest goes first.  Copies are queued by kind: found again or
never, and how much they are worth per frame.  Of the heads of all queues that one leaves whose
time without use is the longest for what it is worth.  Leaves only is ``residency``'s rule; an
order merely proposes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain
from math import exp
from typing import TYPE_CHECKING

from kvtier.config import EvictionPolicy
from kvtier.core.checkpoints import LEVEL
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.core.copies import Copy

__all__ = ["EvictionOrder", "Lru", "S3Fifo", "SecondTouch", "policy_for"]

Entry = tuple[int, float, int, int, "Copy"]
"""Priority, minus the time without use by worth, minus the depth, a serial number: lowest first."""
Queued = tuple[int, int, int, "Copy"]
"""Rank, minus the depth, a serial number."""
QueueKind = tuple[int, bool, int]
"""Priority, found again, class of worth."""


class Lru(EvictionPolicy):
    """Least recently used first; everything is let in."""


class SecondTouch(EvictionPolicy):
    """Least recently used first, pages found again ``ratio`` times as late as others.

    The ratio follows what comes back just after it was evicted: pages found again before make it
    grow, others make it shrink towards 1, which is LRU.  Where it is high a full disk takes in
    only what was found again.
    """

    GAIN, STEP, MOST, CHOOSY = 8.0, 0.05, 64.0, 4.0
    """How fast it follows, how far in one request, its limit, and from where on a full disk is
    choosy."""

    def __init__(self) -> None:
        self.ratio = 2.0

    def weight(self, again: bool) -> float:
        return self.ratio if again else 1.0

    def returned(self, first: float, again: float) -> None:
        step = max(-self.STEP, min(self.STEP, self.GAIN * (again - first)))
        self.ratio = max(1.0, min(self.MOST, self.ratio * exp(step)))

    def admit(self, hits: int, *, full: bool) -> bool:
        return hits > 0 or not full or self.ratio < self.CHOOSY


class S3Fifo(EvictionPolicy):
    """Pages never found again leave first, in order of arrival; each hit (three at most) counts
    like ``generation`` younger ticks, after the idea of a small and a main queue."""

    def __init__(self, generation: int = 4096) -> None:
        self._generation = generation

    def rank(self, tick: int, hits: int) -> int:
        return tick + min(hits, 3) * self._generation


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


def _level(copy: "Copy") -> int:
    return LEVEL


class _Queue:
    """Candidates of one kind, lowest rank first.  Most come in that order (the younger, the
    later) and stand in line, whatever the length; the others are in a heap."""

    __slots__ = ("_heap", "_line")

    def __init__(self) -> None:
        self._line: deque[Queued] = deque()
        self._heap: list[Queued] = []

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    def __iter__(self) -> Iterator[Queued]:
        """In no order."""
        return chain(self._line, self._heap)

    def push(self, entry: Queued) -> None:
        if not self._line or self._line[-1] < entry:
            self._line.append(entry)
        else:
            heappush(self._heap, entry)

    def head(self) -> Queued | None:
        line, heap = self._line, self._heap
        if line and not (heap and heap[0] < line[0]):
            return line[0]
        return heap[0] if heap else None

    def pop(self) -> Queued:
        line, heap = self._line, self._heap
        return heappop(heap) if not line or (heap and heap[0] < line[0]) else line.popleft()

    def compact(self) -> None:
        """Forget entries that no longer count."""
        live = (e for e in self if e[3].queued == e[2] and e[3].node is not None)
        self._line, self._heap = deque(sorted(live)), []


class EvictionOrder:
    """Candidates of one pool of frames; ``top`` is the next to go.

    One queue per kind, lowest rank first.  Entries may be stale: a copy has one that counts
    (``Copy.queued``), and what its kind and rank are is looked at again when it comes to the top.
    ``standing`` tells a copy's class of worth (half octaves); ``weighed=False`` makes no
    difference between pages found again and others, as in a tier above another.
    """

    __slots__ = (
        "_best",
        "_entries",
        "_evictable",
        "_heads",
        "_limit",
        "_now",
        "_policy",
        "_queues",
        "_seq",
        "_settled",
        "_standing",
        "_weighed",
    )

    def __init__(
        self,
        policy: EvictionPolicy,
        evictable: "Callable[[Copy], bool]",
        size: int,
        standing: "Callable[[Copy], int]" = _level,
        *,
        weighed: bool = True,
    ) -> None:
        self._policy = policy
        self._evictable = evictable
        self._standing = standing
        self._weighed = weighed
        self._queues: dict[QueueKind, _Queue] = {}
        self._best: QueueKind = (0, False, 0)
        self._entries = 0
        self._limit = 2 * size + 64
        self._seq = 0
        self._now = 0
        self._heads: dict[QueueKind, Entry] = {}
        """Of the queues, since ``begin``; up to date where ``_settled``."""
        self._settled: set[QueueKind] = set()

    def __len__(self) -> int:
        return self._entries

    def begin(self, now: int) -> None:
        """Victims are to be chosen at tick ``now``; nothing changes until all have been."""
        self._now = now
        self._heads.clear()
        self._settled.clear()

    def entry(self, copy: "Copy") -> Entry:
        """Where a copy stands among all others."""
        kind, rank = self._place(copy)
        assert copy.node is not None
        self._seq += 1
        return self._entry(kind, (rank, -copy.node.depth, self._seq, copy))

    def _entry(self, kind: QueueKind, queued: Queued) -> Entry:
        rank, depth, seq, copy = queued
        priority, again, standing = kind
        late: float = self._now - rank + 1
        if again or standing:
            weight = 2.0 ** (standing / 2)
            if again:
                weight *= self._policy.weight(True)
            late = late / weight if late > 0 else late * weight
        return priority, -late, depth, seq, copy

    def _place(self, copy: "Copy") -> tuple[QueueKind, int]:
        node, mark = copy.node, copy.mark
        assert node is not None
        tick = node.tick if mark is None or not mark.tick else mark.tick
        kind = node.priority, self._weighed and node.hits > 0, self._standing(copy)
        return kind, self._policy.rank(tick, node.hits)

    def push(self, copy: "Copy") -> None:
        """Offer a copy that may have become evictable."""
        if not copy.queued:
            kind, rank = self._place(copy)
            assert copy.node is not None
            self._seq += 1
            copy.queued = self._seq
            entry = rank, -copy.node.depth, self._seq, copy
            if (queue := self._queues.get(kind)) is None:
                queue = self._queues[kind] = _Queue()
            queue.push(entry)
            self._heads.pop(kind, None)
            self._settled.discard(kind)
            self._entries += 1
            if self._entries > self._limit:
                self._compact()

    def again(self, copy: "Copy") -> None:
        """Queue a copy anew: its kind may have changed."""
        copy.queued = 0
        self.push(copy)

    def top(self) -> Entry | None:
        """The best candidate, left where it is; None if there is none."""
        heads, queues, settled = self._heads, self._queues, self._settled
        while queues:
            if len(heads) != len(queues):
                self._look()
            best = min(heads, key=heads.__getitem__) if len(heads) > 1 else next(iter(heads))
            if best in settled:
                self._best = best
                return heads[best]
            # A head that is out of date stands too far in front, so only the first is looked at.
            head = self._settle(best, queues[best])
            if head is None:
                queues.pop(best, None)
                heads.pop(best, None)
            else:
                settled.add(best)
                heads[best] = self._entry(best, head)
        return None

    def _look(self) -> None:
        """Where the queues' heads stand, as far as is known."""
        heads = self._heads
        for kind, queue in self._queues.items():
            if kind not in heads and (head := queue.head()) is not None:
                heads[kind] = self._entry(kind, head)

    def _settle(self, kind: QueueKind, queue: "_Queue") -> Queued | None:
        """Bring the head of a queue up to date; copies may move to other queues."""
        while (head := queue.head()) is not None:
            rank, depth, seq, copy = head
            if copy.queued != seq:
                self._drop(queue)
                continue
            if copy.node is None or not self._evictable(copy):
                self._drop(queue)
                copy.queued = 0
                continue
            now, fresh = self._place(copy)
            if now != kind:
                self._drop(queue)
                self.again(copy)
            elif fresh > rank:
                self._seq += 1
                copy.queued = self._seq
                queue.pop()
                queue.push((fresh, depth, self._seq, copy))
            else:
                break
        return head

    def _drop(self, queue: "_Queue") -> None:
        queue.pop()
        self._entries -= 1

    def pop(self) -> "Copy":
        """Take the candidate that ``top`` has just shown."""
        del self._heads[self._best]
        self._settled.discard(self._best)
        queue = self._queues[self._best]
        copy = queue.pop()[3]
        if not queue:
            del self._queues[self._best]
        self._entries -= 1
        copy.queued = 0
        return copy

    def _compact(self) -> None:
        """Forget stale entries: at least half, a pool has no more copies."""
        self._entries = 0
        self._heads.clear()
        self._settled.clear()
        for kind, queue in list(self._queues.items()):
            queue.compact()
            self._entries += len(queue)
            if not queue:
                del self._queues[kind]

    def extend(self, copies: "Iterable[Copy]") -> None:
        for copy in copies:
            self.push(copy)
