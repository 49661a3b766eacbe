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

    def total(at: Boundary, more: int = 0) -> float:
        return costs.load_s(at, more) + (tokens - at.pages * page_tokens) * costs.compute_s

    places = [Boundary(0), *boundaries]
    goal = min(places, key=total)  # the first of equals
    near = [at for at in places if not at.disk]
    way = [min((at for at in near if at.pages <= goal.pages), key=total)]
    stride = -(-(goal.pages - way[0].pages) // STAGES) if even else goal.pages
    left = [at for at in boundaries if way[0].pages < at.pages <= goal.pages]
    more = 0
    while left:
        spared = SLACK * tokens + way[-1].pages * page_tokens
        allowed = MARGIN * spared * costs.compute_s
        reached = -1
        for i, at in enumerate(left):
            if costs.load_s(at, more) <= allowed:
                reached = i
                if at.pages - way[-1].pages >= stride:
                    break
            elif even:  # deeper ones take longer
                break
        if reached < 0:
            break
        way.append(left[reached])
        more += left[reached].checkpoint
        del left[: reached + 1]
    best = min(near, key=total)
    if total(way[-1], more - way[-1].checkpoint) >= total(best):
        way = [best]
    return [at.pages for at in way if at.pages]
