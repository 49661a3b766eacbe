"""Making room: which copies leave a tier, leaves only, and in one go or not at all.

Proposes by the policies' order and carries out; what may leave is ``Residency.evictable``'s word.
"""

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from kvtier.core.checkpoints import hopeless
from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, Copy, promised
from kvtier.core.eviction import Entry
from kvtier.core.ghosts import GHOST_BYTES
from kvtier.core.tree import Node

if TYPE_CHECKING:
    from kvtier.core.residency import Residency

__all__ = ["Evictor"]


class Evictor:
    """Frees frames of every tier."""

    __slots__ = ("residency",)

    def __init__(self, residency: "Residency") -> None:
        self.residency = residency

    def room(self, slot: int, need: int) -> int:
        """Free frames until ``need`` fit.  Returns how many are missing; if not 0, nothing has
        changed."""
        pool = self.residency.pools[slot]
        if pool.free >= need:
            return 0
        if need > pool.size:
            return need - pool.size
        victims, missing = self._victims(slot, need - pool.free)
        if missing:
            self.residency.orders[slot].extend(c for c in victims if self.residency.evictable(c))
            return missing
        self._evict(victims)
        return 0

    def make_room(self, slot: int, want: int) -> int:
        """Free up to ``want`` frames; returns how many can be taken."""
        pool = self.residency.pools[slot]
        if pool.free < want:
            self.evict(slot, want - pool.free)
        return min(want, pool.free)

    def evict(self, slot: int, frames: int) -> int:
        """Drop up to ``frames`` frames' worth; returns how many frames were freed."""
        victims, _ = self._victims(slot, frames)
        freed = sum(len(c.frames) for c in victims)
        self._evict(victims)
        return freed

    def _evict(self, victims: list[Copy]) -> None:
        """Drop these copies, children before parents.  The common case, a page without a
        checkpoint here, is done in place; the rest goes through ``detach``."""
        above: Node | None = None
        frames: list[int] = []
        ghosts: list[tuple[bytes, bool]] = []
        gone = 0
        stride = self.residency.tree.stride
        slot = victims[0].tier if victims else GPU  # one pool, so one tier
        self.residency.evictions[slot] += sum(len(c.frames) for c in victims)
        for copy in victims:
            node = copy.node
            assert node is not None and node.parent is not None
            if copy.slot != slot or node.copies[slot + CHECKPOINT]:
                if copy.slot == slot and sum(c is not None for c in node.copies[:CHECKPOINT]) == 1:
                    ghosts.append((node.page(stride)[:GHOST_BYTES], node.hits > 0))
                self.residency.detach(copy)
                continue
            if self.residency.events is not None:
                self.residency.note("removed", self.residency.digest(node), slot)
            if above is not None and above is not node:
                self._fell_free(above, slot)
            above = node.parent
            above.kids[slot] -= 1
            copies = node.copies
            copies[slot] = copy.node = None
            frames.append(copy.frames[0])
            if copies[GPU] is None and copies[CPU] is None:
                run = node.run
                assert run is not None
                if copies[DISK] is not None or node.pins:
                    self.residency.prune(node)
                    continue
                run.nodes.pop()  # a leaf of its tier without other copies is a leaf of the tree
                node.run = None
                gone += 1
                start = node.index * stride
                ghosts.append((run.tokens[start : start + GHOST_BYTES], node.hits > 0))
                if above.run is not run:
                    self.residency.tree.shrunk(run)
        if gone:
            self.residency.tree.num_nodes -= gone
            if above is not None and above.run is not None:
                self.residency.tree.shrunk(above.run)
        if ghosts:
            self.residency.ghosts.remember(ghosts)
        if frames:
            self.residency.pools[slot].give(frames)
        if above is not None:
            self._fell_free(above, slot)

    def _fell_free(self, node: Node, slot: int) -> None:
        """The last child of ``node`` may have left this tier."""
        if node.kids[slot] == 0 and (copy := node.copies[slot]) is not None:
            self.residency.became_leaf(node, copy)
        if node.depth:
            self.residency.prune(node)

    def _victims(self, slot: int, need: int) -> tuple[list[Copy], int]:
        """Copies that free ``need`` frames, children before parents; and what is missing."""
        order = self.residency.orders[slot]
        order.begin(self.residency.tick)
        out: list[Copy] = []
        gone: dict[Copy, int] = {}
        local: list[Entry] = []
        while need > 0:
            top = order.top()
            if local and (top is None or local[0] < top):
                copy = heappop(local)[4]
            elif top is not None:
                copy = order.pop()
            else:
                break
            while True:
                out.append(copy)
                need -= len(copy.frames)
                if need > 0 and copy.slot < CHECKPOINT:
                    need -= self._line_above(copy, out, need)
                    copy = out[-1]
                up = self._needed_by(copy)
                if need <= 0 or up is None:
                    break
                gone[up] = gone.get(up, 0) + 1
                if not self._free_after(up, gone[up]):
                    break
                if self._hopeless_after(up, copy, gone[up]):
                    copy = up
                    continue
                entry = order.entry(up)
                best = order.top()
                if (best is not None and best < entry) or (local and local[0] < entry):
                    heappush(local, entry)
                    break
                copy = up
        return out, max(0, need)

    def _line_above(self, copy: Copy, out: list[Copy], need: int) -> int:
        """Ancestors of a victim that nothing else needs and that rank as it does: taken without
        asking the order, since nothing can come between."""
        slot, node = copy.slot, copy.node
        assert node is not None
        tick, hits, priority, taken = node.tick, node.hits, node.priority, 0
        while taken < need:
            node = node.parent
            assert node is not None
            copies = node.copies
            up = copies[slot]
            if (
                up is None
                or node.tick != tick
                or node.hits != hits
                or node.priority != priority
                or node.kids[slot] != 1
                or node.pins
                or node.keeps
                or up.readers
                or not up.ready
                or copies[slot + CHECKPOINT] is not None
                or promised(copies, slot)
            ):
                break
            out.append(up)
            taken += 1
        return taken

    def _needed_by(self, copy: Copy) -> Copy | None:
        """The copy in the same pool that this one keeps from being a leaf."""
        node = copy.node
        assert node is not None
        if copy.slot >= CHECKPOINT:
            return node.copies[copy.slot - CHECKPOINT] if copy.slot == CPU + CHECKPOINT else None
        assert node.parent is not None
        return node.parent.copies[copy.slot]

    def _free_after(self, up: Copy, gone: int) -> bool:
        """Whether ``up`` could leave once ``gone`` of what needs it has left."""
        node, slot = up.node, up.slot
        assert node is not None
        kids, tail = node.kids[slot], node.copies[slot + CHECKPOINT]
        if kids + (slot == CPU and tail is not None) != gone:
            return False
        node.kids[slot] = 0
        if slot == CPU:
            node.copies[slot + CHECKPOINT] = None
        free = self.residency.evictable(up)
        node.kids[slot], node.copies[slot + CHECKPOINT] = kids, tail
        return free

    def _hopeless_after(self, up: Copy, copy: Copy, gone: int) -> bool:
        """Whether nothing can resume at ``up`` any more once ``copy`` and its likes are gone."""
        if up.slot != CPU or not self.residency.geometry.has_tails:
            return False
        assert up.node is not None
        checkpoint = copy.slot == CPU + CHECKPOINT
        return hopeless(up.node, kids=0 if checkpoint else gone, checkpoint=checkpoint)

    def disk_room(self, frames: int) -> bool:
        """Free disk frames until ``frames`` fit, or change nothing."""
        disk = self.residency.disk
        assert disk is not None
        if disk.used + disk.quarantined + frames <= disk.capacity:
            return True
        victims = disk.victims(frames)
        if victims is None:
            return False
        for row in victims:
            self.residency.evictions[DISK] += int(disk.frames[row])
            node = self.residency.disk_nodes.get(row)
            if node is None:
                self._drop_tail_copy(row)
                self.residency.drop_row(row)
            else:
                copy = node.copies[DISK]
                assert copy is not None
                self.residency.detach(copy)
        return True

    def _drop_tail_copy(self, row: int) -> None:
        """If ``row`` is a checkpoint whose page has a node, unlink its copy."""
        assert self.residency.disk is not None
        node = self.residency.disk_nodes.get(int(self.residency.disk.parent[row]))
        if node is not None:
            tail = node.copies[DISK + CHECKPOINT]
            if tail is not None and tail.frames[0] == row:
                node.copies[DISK + CHECKPOINT] = None
                tail.node = None
