"""Pages that were evicted: how they began, for a while, and how many of them came back.

A hint only: pages that begin alike are taken for one another, which costs nothing but a little
precision.  What comes back soon after it was evicted tells the eviction policy which kind of page
it should have kept (``EvictionPolicy.returned``).
"""

from collections import deque
from collections.abc import Sequence

__all__ = ["GHOST_BYTES", "Ghosts"]

GHOST_BYTES = 64
"""How much of a page's beginning is remembered of it."""
_SOON = 8
"""Soon: before a tier's worth of pages divided by this has been evicted of the same kind."""


class Ghosts:
    """Beginnings of the last evicted pages of a memory tier of ``frames`` pages."""

    __slots__ = ("_evicted", "_frames", "_limit", "_returned", "_ring", "_ringed", "_seen")

    def __init__(self, frames: int, limit: int) -> None:
        self._frames = max(1, frames)
        self._limit = limit
        self._seen: dict[bytes, int] = {}
        """Beginning -> twice its number among the evicted of its kind, plus the kind."""
        self._ring: deque[tuple[Sequence[bytes], range]] = deque()
        """What was remembered, oldest first: pages evicted together and their marks."""
        self._ringed = 0
        self._evicted = [0, 0]
        self._returned = [0, 0]

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, page: bytes) -> bool:
        """Whether a page that begins like this one was evicted lately."""
        return page[:GHOST_BYTES] in self._seen

    def remember(self, pages: Sequence[bytes], again: bool) -> None:
        """Beginnings of evicted pages, and whether these had been found again before."""
        seen = self._seen
        before = self._evicted[again]
        after = self._evicted[again] = before + len(pages)
        marks = range(2 * before + 2 + again, 2 * after + 2 + again, 2)
        seen.update(zip(pages, marks, strict=True))
        self._ring.append((pages, marks))
        self._ringed += len(pages)
        while self._ringed > self._limit:
            pages, marks = self._ring.popleft()
            self._ringed -= len(pages)
            for page, mark in zip(pages, marks, strict=True):
                if seen.get(page) == mark:
                    del seen[page]

    def back(self, page: bytes) -> bool:
        """A page is being made anew: whether it was evicted lately; counts if it was just now."""
        mark = self._seen.get(page[:GHOST_BYTES])
        if mark is None:
            return False
        again = mark & 1
        if (self._evicted[again] - (mark >> 1)) * _SOON < self._frames:
            self._returned[again] += 1
        return True

    def returned(self) -> tuple[float, float] | None:
        """What came back just after it had been evicted, since the last call, in shares of the
        tier: pages never found again before, and others.  None: nothing did."""
        first, again = self._returned
        if not first and not again:
            return None
        self._returned = [0, 0]
        return first / self._frames, again / self._frames

    def clear(self) -> None:
        self._seen.clear()
        self._ring.clear()
        self._ringed = 0
        self._returned = [0, 0]
