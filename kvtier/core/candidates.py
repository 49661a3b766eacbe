"""Which copies may leave a tier, and the queues they wait in for it.

Every copy that may leave is queued (I10): whoever takes away what held one offers it here.  In
which order they go is the policies' business, carrying it out the evictor's.
"""

from kvtier.config import EvictionPolicy
from kvtier.core.checkpoints import HOPELESS, LEVEL, Scale, hopeless
from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, Copy, promised
from kvtier.core.eviction import EvictionOrder
from kvtier.core.geometry import Geometry
from kvtier.core.tree import Node

__all__ = ["Candidates"]


class Candidates:
    """Copies in device and host memory that may be evicted, by pool of frames."""

    __slots__ = ("_has_tails", "_kept_tails", "_scale", "orders")

    def __init__(
        self,
        geometry: Geometry,
        policy: EvictionPolicy,
        scale: Scale,
        kept_tails: dict[Node, int],
    ) -> None:
        self._has_tails = geometry.has_tails
        self._kept_tails = kept_tails
        self._scale = scale
        host = EvictionOrder(policy, self.evictable, geometry.cpu_frames, self.standing)
        self.orders = {CPU: host, CPU + CHECKPOINT: host}
        sizes = {GPU: geometry.gpu_pages, GPU + CHECKPOINT: geometry.gpu_checkpoints}
        for slot, size in sizes.items():
            self.orders[slot] = EvictionOrder(
                policy, self.evictable, size, weighed=not geometry.cpu_frames
            )

    def evictable(self, copy: Copy, gone: int = 0) -> bool:
        """Whether this copy may leave its tier now: READY, idle, not held, and a leaf there once
        ``gone`` of its children have left."""
        node, slot = copy.node, copy.slot
        if node is None or not copy.ready or copy.readers:
            return False
        if slot >= CHECKPOINT:
            return self._tail_spare(copy)
        if slot == GPU and node.pins:
            return False
        if node.kids(slot) != gone:
            return False
        tail = node.copies[slot + CHECKPOINT]
        if tail is not None and (slot != GPU or not self.evictable(tail)):
            return False
        if promised(node.copies, slot):
            return False
        return not node.keeps or any(c is not None and c.ready for c in node.copies[slot + 1 : 3])

    def _tail_spare(self, tail: Copy) -> bool:
        """Whether a checkpoint may go: nobody keeps it, or a slower tier has it too."""
        node = tail.node
        assert node is not None
        return node not in self._kept_tails or any(
            c is not None and c.ready for c in node.copies[tail.slot + 1 :]
        )

    def standing(self, copy: Copy) -> int:
        """How much a copy on the host is worth, as a class of ``checkpoints``."""
        if not self._has_tails:
            return LEVEL
        node = copy.node
        assert node is not None
        if copy.mark is not None:
            return self._scale.standing(copy.mark, deepest=not node.kids(CPU))
        return HOPELESS if hopeless(node) else LEVEL

    def became_leaf(self, node: Node, copy: Copy) -> None:
        """The last child of a page has left its tier: its checkpoint is the deepest there now."""
        tail = node.copies[CPU + CHECKPOINT]
        if copy.slot == CPU and tail is not None:
            self.weigh_again(tail)
        else:
            self.offer(copy)

    def weigh_again(self, copy: Copy) -> None:
        """A copy that may leave has become worth more or less."""
        if copy.queued and copy.slot % 3 == CPU:
            self.orders[CPU].again(copy)

    def offer(self, copy: Copy) -> None:
        """Queue a copy for eviction if it may leave."""
        if copy.slot % 3 != DISK and not copy.queued and self.evictable(copy):
            self.orders[copy.slot].push(copy)

    def offer_above(self, node: Node | None, slot: int) -> None:
        """A copy below has arrived or gone: the faster ones may be free to leave now."""
        if node is not None and slot % 3:
            for copy in node.copies[slot - slot % 3 : slot]:
                if copy is not None:
                    self.offer(copy)
                    if copy.slot == GPU + CHECKPOINT and (page := node.copies[GPU]) is not None:
                        self.offer(page)
