"""What a checkpoint in host memory is worth beside pages of history.

A checkpoint takes the room of several pages, and history is of use only up to the deepest
checkpoint behind it.  So each one is weighed by what would be lost with it: the pages back to the
next shallower checkpoint, times the policy's guess that somebody resumes just there.  Weights are
kept as half octaves: copies of one class form one queue (``eviction``).

Knows the policy and the links between checkpoints of one path; nothing of queues.
"""

from collections.abc import Sequence
from math import log2
from typing import TYPE_CHECKING

from kvtier.config import CheckpointFacts, CheckpointPolicy
from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, Copy

if TYPE_CHECKING:
    from kvtier.core.tree import Node

__all__ = ["HOPELESS", "LEVEL", "Mark", "Scale", "hopeless", "passed_by"]

LEVEL = 0
"""The class of a page of history that something can resume behind."""
HOPELESS = -128
"""The class of history that nothing can resume behind; it goes before everything else."""
_LEAST = 2.0**-60
"""Worth nothing, but still more than what is hopeless."""


class Mark:
    """What is known of a checkpoint besides its place."""

    __slots__ = ("above", "branch", "depth", "passed", "prompt_end", "tick", "uses")

    def __init__(self, depth: int, *, prompt_end: bool, branch: bool) -> None:
        self.depth = depth
        self.prompt_end = prompt_end
        self.branch = branch
        self.above: Copy | None = None
        """The next shallower one on the host when this came there; it may have left since."""
        self.passed = False
        """Another was kept at least two pages deeper, so most will resume there."""
        self.uses = 0
        """How often a lease resumed here."""
        self.tick = 0
        """When that was last, or when it was captured."""

    @property
    def gap(self) -> int:
        """Pages back to the next shallower checkpoint on the host, or to the root."""
        above = self.above
        while above is not None and above.node is None:  # gone: so is what it stood for
            above = self.above = above.mark.above if above.mark is not None else None
        return self.depth if above is None or above.mark is None else self.depth - above.mark.depth

    @property
    def state(self) -> tuple[int | bool, ...]:
        """For ``digest()``."""
        return (self.prompt_end, self.branch, self.passed, self.uses, self.tick, self.gap)


class Scale:
    """Classes of checkpoints of ``frames`` frames on the host, as a policy sees them."""

    __slots__ = ("_frames", "_known", "_policy")

    def __init__(self, policy: CheckpointPolicy, frames: int) -> None:
        self._policy = policy
        self._frames = frames
        self._known: dict[tuple[int, int, bool, bool, int, bool, bool], int] = {}

    def standing(self, mark: Mark, *, deepest: bool) -> int:
        """The class of one; ``deepest`` if nothing is known below it."""
        uses, end = min(mark.uses, 9), mark.prompt_end
        facts = mark.gap, self._frames, deepest, mark.passed, uses, end, mark.branch
        known = self._known.get(facts)  # a plain tuple is cheaper to make, and equal to its like
        if known is None:
            if len(self._known) > 4096:
                self._known.clear()
            worth = self._policy.worth(CheckpointFacts(*facts))
            known = round(2 * log2(worth)) if worth > _LEAST else HOPELESS + 1
            self._known[facts] = known
        return known


def hopeless(node: "Node", *, kids: int = 0, checkpoint: bool = False) -> bool:
    """Whether no lease can resume at or below a page: then its history is dead weight.

    With ``kids`` of its children on the host, or its ``checkpoint`` there, taken for gone.
    """
    host = node.copies[CPU + CHECKPOINT]
    return (
        not node.pins
        and node.kids(CPU) == kids
        and not node.kids(GPU)
        and not node.kids(DISK)
        and (host is None or checkpoint)
        and node.copies[GPU + CHECKPOINT] is None
        and node.copies[DISK + CHECKPOINT] is None
    )


def passed_by(mark: Mark, shallower: Sequence[Copy | None]) -> list[Copy]:
    """A checkpoint has been kept below these, nearest first; those whose class that changes."""
    out = []
    for copy in shallower:
        if copy is None or copy.mark is None or copy.node is None:
            continue
        if not copy.mark.passed and mark.depth - copy.mark.depth >= 2:
            copy.mark.passed = True
            out.append(copy)
    return out
