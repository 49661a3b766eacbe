"""Making room: which copies leave a tier, leaves only, and in one go or not at all.

Proposes by the policies' order and carries out; what may leave is ``Candidates.evictable``'s word.
"""

from collections.abc import Sequence
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

Line = list[Copy]
"""Copies of consecutive pages of one run, deepest first, each needed by nothing but the one before
it, and all ranked alike: nothing can come between them, so one look at the order does for all.
Either none of these pages has another copy anywhere, or each has.  A checkpoint is a line of its
own."""

_ONE_COPY = 5
"""Empty slots of a page that has one copy in all."""


def _alone(node: Node) -> bool:
    """Whether a page has one copy in all, of whatever kind."""
    return node.copies.count(None) == _ONE_COPY


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
        lines, missing = self._victims(slot, need - pool.free)
        if missing:
            victims = (copy for line in lines for copy in line)
            candidates = self.residency.candidates
            candidates.orders[slot].extend(c for c in victims if candidates.evictable(c))
            return missing
        self._evict(lines)
        return 0

    def make_room(self, slot: int, want: int) -> int:
        """Free up to ``want`` frames; returns how many can be taken."""
        pool = self.residency.pools[slot]
        if pool.free < want:
            self.evict(slot, want - pool.free)
        return min(want, pool.free)

    def evict(self, slot: int, frames: int) -> int:
        """Drop up to ``frames`` frames' worth; returns how many frames were freed."""
        free = self.residency.pools[slot].free
        lines, _ = self._victims(slot, frames)
        self._evict(lines)
        return self.residency.pools[slot].free - free

    def _evict(self, lines: Sequence[Line]) -> None:
        """Drop these copies, children before parents.  The common case, pages without a
        checkpoint here, is done in place; the rest goes through ``detach``."""
        res = self.residency
        above: Node | None = None
        frames: list[int] = []
        ghosts: tuple[list[bytes], list[bytes]] = [], []  # never found again, and others
        slot = lines[0][0].tier if lines else GPU  # one pool, so one tier
        for line in lines:
            copy = line[0]
            node = copy.node
            assert node is not None
            if above is not None and above is not node:
                self._fell_free(above, slot)
                above = None
            if copy.slot != slot or node.copies[slot + CHECKPOINT] is not None:
                res.evictions[slot] += len(copy.frames)
                if copy.slot == slot and sum(c is not None for c in node.copies[:CHECKPOINT]) == 1:
                    ghosts[node.hits > 0].append(node.page(res.tree.stride)[:GHOST_BYTES])
                res.detach(copy)
                continue
            if res.events is not None:
                self._note(line)
            frames += [c.frames[0] for c in line]
            gone = _alone(node) and not node.pins
            above = self._cut(line, ghosts[node.hits > 0]) if gone else self._thin(line)
        if above is not None:
            self._fell_free(above, slot)
        res.evictions[slot] += len(frames)
        res.pools[slot].give(frames)
        for again in (False, True):
            if ghosts[again]:
                res.ghosts.remember(ghosts[again], again)

    def _note(self, line: Line) -> None:
        for copy in line:
            assert copy.node is not None
            self.residency.note("removed", self.residency.digest(copy.node), copy.slot)

    def _cut(self, line: Line, ghosts: list[bytes]) -> Node:
        """Take pages that are nowhere else out of the tree; returns the one above."""
        tree, leaf = self.residency.tree, line[0].node
        assert leaf is not None and leaf.run is not None
        run, stop = leaf.run, leaf.index + 1
        first = stop - len(line)
        above = run.nodes[first - 1] if first else run.parent
        for copy in line:
            copy.node = None
        pages = range(first * tree.stride, stop * tree.stride, tree.stride)
        ghosts += [run.tokens[at : at + GHOST_BYTES] for at in pages]
        tree.cut(run, first)
        return above

    def _thin(self, line: Line) -> Node:
        """Take copies of pages that are in other tiers too; returns the page above."""
        slot, last = line[0].slot, line[-1].node
        assert last is not None and last.run is not None
        last.run.hold(slot, last.index)
        for copy in line:
            node, copy.node = copy.node, None
            assert node is not None and node.parent is not None
            node.copies[slot] = None
            above = node.parent
            if node.copies[GPU] is None and node.copies[CPU] is None:
                self.residency.prune(node)
        return above

    def _fell_free(self, node: Node, slot: int) -> None:
        """The last child of ``node`` may have left this tier."""
        if not node.kids(slot) and (copy := node.copies[slot]) is not None:
            self.residency.candidates.became_leaf(node, copy)
        if node.depth:
            self.residency.prune(node)

    def _victims(self, slot: int, need: int) -> tuple[list[Line], int]:
        """Copies that free ``need`` frames, children before parents; and what is missing."""
        order = self.residency.candidates.orders[slot]
        order.begin(self.residency.tick)
        out: list[Line] = []
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
                line = [copy]
                out.append(line)
                need -= len(copy.frames)
                if need > 0 and copy.slot < CHECKPOINT:
                    self._line_above(copy, line, need)
                    need -= len(line) - 1
                last = line[-1]
                up = self._needed_by(last)
                if need <= 0 or up is None:
                    break
                gone[up] = gone.get(up, 0) + 1
                if not self._free_after(up, gone[up]):
                    break
                if self._hopeless_after(up, last, gone[up]):
                    copy = up
                    continue
                entry = order.entry(up)
                best = order.top()
                if (best is not None and best < entry) or (local and local[0] < entry):
                    heappush(local, entry)
                    break
                copy = up
        return out, max(0, need)

    def _line_above(self, copy: Copy, line: Line, need: int) -> None:
        """Put the pages before a victim, up to ``need`` of them, behind it in its line."""
        slot, node = copy.slot, copy.node
        assert node is not None and node.run is not None
        if not node.index or node.copies[slot + CHECKPOINT] is not None:
            return
        tick, hits, priority, alone = node.tick, node.hits, node.priority, _alone(node)
        append = line.append
        for above in reversed(node.run.nodes[max(0, node.index - need) : node.index]):
            copies = above.copies
            up = copies[slot]
            if (
                up is None
                or above.tick != tick
                or above.hits != hits
                or above.priority != priority
                or above.pins
                or above.keeps
                or up.readers
                or not up.ready
                or ((branches := above.branches) is not None and branches[slot])
                or (copies.count(None) == _ONE_COPY) != alone
            ):
                return
            if not alone and (copies[slot + CHECKPOINT] is not None or promised(copies, slot)):
                return
            append(up)

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
        kids, tail = node.kids(slot), node.copies[slot + CHECKPOINT]
        if kids + (slot == CPU and tail is not None) != gone:
            return False
        if slot == CPU:
            node.copies[slot + CHECKPOINT] = None
        free = self.residency.candidates.evictable(up, gone=kids)
        node.copies[slot + CHECKPOINT] = tail
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
