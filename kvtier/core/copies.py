"""A copy: a page's history or a checkpoint in one tier, and what holds it there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.core.ops import Kind
from kvtier.core.tree import Node
from kvtier.types import Tier

if TYPE_CHECKING:
    from kvtier.core.checkpoints import Mark

__all__ = ["CHECKPOINT", "CPU", "DISK", "GPU", "TIERS", "Copy", "promised"]

GPU, CPU, DISK = 0, 1, 2  # history slots of Node.copies; a checkpoint's slot is CHECKPOINT higher
CHECKPOINT = 3
TIERS = (Tier.GPU, Tier.CPU, Tier.DISK)


class Copy:
    """One kind of one page in one tier."""

    __slots__ = (
        "expendable",
        "frames",
        "mark",
        "node",
        "queued",
        "readers",
        "ready",
        "slot",
        "writer",
    )

    def __init__(self, node: Node | None, slot: int, frames: tuple[int, ...], writer: int) -> None:
        self.node = node
        """None once it has left the tree; its operations then own the frames."""
        self.slot = slot
        self.frames = frames
        """Frame numbers; on disk the row of the record."""
        self.writer = writer
        """The operation that fills it; 0 when READY (I3)."""
        self.ready = not writer
        self.readers = 0
        self.expendable = False
        self.mark: Mark | None = None
        """Of a checkpoint on the device or the host."""
        self.queued = 0
        """Its entry in the order of eviction; 0: none."""

    @property
    def tier(self) -> int:
        return self.slot % 3

    @property
    def kind(self) -> Kind:
        return Kind.CHECKPOINT if self.slot >= CHECKPOINT else Kind.HISTORY


def promised(copies: Sequence[Copy | None], slot: int) -> bool:
    """Whether the next slower copy of a page is still being made: then the one in ``slot`` stays,
    so that one of them is READY at any time (I9).  What is slower still does not matter: it is
    made from the next one, which stays for it."""
    for below in copies[slot + 1 : CHECKPOINT]:
        if below is not None:
            return below.writer > 0
    return False
