"""Load or compute: how much of a known prefix is worth bringing up, and in which stages.

Arithmetic over speeds that the caller has measured.  Knows boundaries and seconds; nothing of
trees, leases or clocks.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import inf
from typing import NamedTuple, Self

__all__ = ["ALWAYS", "SLACK", "Boundary", "LoadCosts", "stages"]

ALWAYS = 1e9
"""Seconds a token, for a server that did not say how fast it computes: everything is loaded."""
SLACK = 0.04
"""Share of the time to compute a whole prompt that may be waited for nothing."""
MARGIN = 0.8
"""Share of the time allowed that a load may be expected to take: it may take longer."""
STAGES = 32
"""Where a stage costs nothing, so many: what has arrived is known that finely, and the first is
there well before the slack is used up."""


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Seconds, as measured just before a lease is opened.  A frame is a page's worth of bytes."""

    compute_s: float
    """To compute one token anew."""
    host_s: float = 0.0
    """To bring one frame from the host to the device,"""
    disk_s: float = 0.0
    """or from the disk."""
    host_wait_s: float = 0.0
    """Before the first one moves: what is queued already."""
    disk_wait_s: float = 0.0
    """Infinite: nothing is waited for that the disk has to bring."""

    def load_s(self, at: "Boundary", more: int = 0) -> float:
        """Until a lease stands there; ``more`` frames are read from disk before.  What comes from
        the host does not wait for the disk, nor the other way."""
        host = self.host_wait_s + at.host_frames * self.host_s if at.host else 0.0
        disk = self.disk_wait_s + (at.disk_frames + more) * self.disk_s if at.disk else 0.0
        return max(host, disk)

    def without_disk(self) -> Self:
        return replace(self, disk_wait_s=inf, disk_s=0.0)

    def plain(self) -> tuple[float, ...]:
        """All of it, in order, for a log."""
        return astuple(self)


class Boundary(NamedTuple):
    """A page end where a lease could resume, and what is missing on the device before it does."""

    pages: int
    host: bool = False
    """Something comes from the host, or is on its way from there;"""
    disk: bool = False
    """or from the disk."""
    host_frames: int = 0
    """To be moved: all pages up to here, and the checkpoint."""
    disk_frames: int = 0
    checkpoint: int = 0
    """Of ``disk_frames``: those needed for this boundary alone."""


def stages(
    boundaries: Sequence[Boundary], tokens: int, page_tokens: int, costs: LoadCosts, *, even: bool
) -> list[int]:
    """Where a lease on a prompt of ``tokens`` should resume, in pages, preceded by the places where
    it can stop on the way there; empty: nowhere, compute all.

    Of all ``boundaries`` (ascending) it is the one with the least time to load up to there and to
    compute the rest; a deeper one only if that takes less time.  It is given up for a nearer one
    where the load could not be left half-way: at every moment what would be lost by settling for
    the last stage that should have come is within the slack.  ``even``: stages cost nothing, so
    there are many.
    """
    start, goal = Boundary(0), Boundary(0)
    least = tokens * costs.compute_s
    for at in boundaries:
        total = costs.load_s(at) + (tokens - at.pages * page_tokens) * costs.compute_s
        if total < least:
            goal, least = at, total
            if not at.disk:
                start = at
    chosen = _way(boundaries, start, goal, tokens, page_tokens, costs, even)
    return [at.pages for at in chosen if at.pages]


def _way(
    boundaries: Sequence[Boundary],
    start: Boundary,
    goal: Boundary,
    tokens: int,
    page_tokens: int,
    costs: LoadCosts,
    even: bool,
) -> list[Boundary]:
    """Stages from ``start`` as far towards ``goal`` as is safe."""
    way, more = [start], 0
    stride = -(-(goal.pages - start.pages) // STAGES) if even else goal.pages
    left = [at for at in boundaries if start.pages < at.pages <= goal.pages]
    while left:
        stands = way[-1]
        allowed = MARGIN * costs.compute_s * (SLACK * tokens + stands.pages * page_tokens)
        reached = 0
        for i, at in enumerate(left, start=1):
            if costs.load_s(at, more) <= allowed:
                reached = i
                if at.pages - stands.pages >= stride:
                    break
            elif even:  # deeper ones take longer
                break
        if not reached:
            break
        way.append(left[reached - 1])
        more += left[reached - 1].checkpoint
        del left[:reached]
    end = way[-1]
    loaded = costs.load_s(end, more - end.checkpoint) if end.disk else 0.0
    spared = (end.pages - start.pages) * page_tokens * costs.compute_s
    return way if not end.disk or loaded < spared + costs.load_s(start) else [start]
