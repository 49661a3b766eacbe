"""Where every page and checkpoint lives: copies, frames, and which may leave.

A *copy* is a page's history or a checkpoint in one tier.  It belongs to its node while the node
can be matched, and its frames belong to whatever operation still reads or writes them: a copy
leaves the tree at once, its frames return when the last operation has let go.  So nothing late
can make a page visible, and nothing freed is still being written.

Every tier is prefix-closed (I6): a page has a copy in a tier only if its parent has one there, a
checkpoint only if its page has.  Eviction therefore takes leaves, and no tier ever holds a page
that cannot be reached.  Every node in the tree has a history copy that is READY somewhere (I9).

Knows nothing of leases beyond the counts ``pins`` and ``keeps`` on nodes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvtier.config import CheckpointPolicy, EvictionPolicy
from kvtier.core.candidates import Candidates
from kvtier.core.checkpoints import Scale
from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, TIERS, Copy
from kvtier.core.disk import DiskTable
from kvtier.core.eviction import policy_for
from kvtier.core.evictor import Evictor
from kvtier.core.frames import FramePool
from kvtier.core.geometry import Geometry
from kvtier.core.ghosts import GHOST_BYTES, Ghosts
from kvtier.core.keys import chain_root, checkpoint_key, page_key
from kvtier.core.tree import NEVER, Node, RadixTree
from kvtier.types import Identity, Tier

__all__ = ["Residency"]


class Residency:
    """The tree together with the frames of all tiers."""

    def __init__(
        self,
        geometry: Geometry,
        chain: bytes,
        eviction: str | EvictionPolicy,
        disk: DiskTable | None,
        checkpoints: CheckpointPolicy,
    ) -> None:
        self.geometry = geometry
        self.chain = chain
        self.tree = RadixTree(geometry.page_tokens)
        self.evictor = Evictor(self)
        self.policy = policy_for(eviction)
        self.pools = {
            GPU: FramePool(geometry.gpu_pages),
            CPU: FramePool(geometry.cpu_frames),
            GPU + CHECKPOINT: FramePool(geometry.gpu_checkpoints),
        }
        self.pools[CPU + CHECKPOINT] = self.pools[CPU]  # history and tails share one budget
        self.disk = disk
        self.disk_nodes: dict[int, Node] = {}
        """Disk rows whose page has a node, by row."""
        self.kept_tails: dict[Node, int] = {}
        """Nodes whose checkpoint stays in some tier."""
        scale = Scale(checkpoints, geometry.checkpoint_frames)
        self.candidates = Candidates(geometry, self.policy, scale, self.kept_tails)
        self.quarantine: set[int] = set()
        """Rows found bad, on their way out."""
        self.drops: dict[bytes, int] = {}
        """Keys the disk should forget; drained into a DROP."""
        self.orphans: dict[Copy, None] = {}
        """Copies that left the tree while an operation still held their frames."""
        self.parked: dict[Copy, None] = {}
        """Host copies that belong to paused leases."""
        self._bare: tuple[Identity, Node] | None = None
        self.ghosts = Ghosts(
            geometry.cpu_frames or geometry.gpu_pages,
            limit=1024 + 2 * (geometry.gpu_pages + geometry.cpu_frames),
        )
        self.tick = 0
        self.evictions = [0, 0, 0]
        self.faults = [0, 0, 0]
        self.events: deque[tuple[str, bytes, Tier]] | None = None
        self.events_dropped = 0

    # ------------------------------------------------------------------ keys
    def root(self, identity: Identity) -> Node:
        root = self.tree.root(identity)
        if not root.digest:
            root.digest = self.root_key(identity)
        return root

    def bare_root(self, identity: Identity) -> Node:
        """A root that is not in the tree, for reading: what only the disk knows hangs below it."""
        if self._bare is None or self._bare[0] is not identity:
            self._bare = identity, Node(None, None, 0, 0)
            self._bare[1].digest = self.root_key(identity)
        return self._bare[1]

    def root_key(self, identity: Identity) -> bytes:
        return chain_root(self.chain, identity)

    def digest(self, node: Node) -> bytes:
        """The node's chained key; computed along the path once, then kept."""
        missing: list[Node] = []
        at = node
        while not at.digest:
            missing.append(at)
            assert at.parent is not None
            at = at.parent
        key, stride = at.digest, self.tree.stride
        for n in reversed(missing):
            key = n.digest = page_key(key, n.page(stride), n.extra)
        return key

    # ------------------------------------------------------------------ copies
    def attach(
        self,
        node: Node,
        slot: int,
        frames: tuple[int, ...],
        writer: int = 0,
        *,
        silent: bool = False,
    ) -> Copy:
        """Give a node a copy; READY at once unless an operation still has to write it."""
        assert node.copies[slot] is None, "I3: a second copy in one tier"
        copy = node.copies[slot] = Copy(node, slot, frames, writer)
        if slot < CHECKPOINT:
            parent, run = node.parent, node.run
            assert parent is not None and run is not None
            if node.index:
                run.held[slot] = node.index + 1
            else:
                run.hold(slot, 1)
            assert parent.depth == 0 or parent.copies[slot] is not None, "I6: parent not in tier"
        if slot % 3 == DISK:
            kept = node.keeps if slot == DISK else self.kept_tails.get(node, 0)
            self._hold_row(copy, bool(writer) + bool(kept))
        if not writer:
            self._ready(copy, silent=silent)
        return copy

    def arrived(self, copy: Copy) -> None:
        """The operation that fills the copy has delivered it."""
        copy.writer = 0
        if copy.slot % 3 == DISK:
            self._hold_row(copy, -1)
        self._ready(copy)

    def unfill(self, copy: Copy) -> None:
        """The operation that was to fill a disk copy has failed."""
        self._hold_row(copy, -1)

    def _ready(self, copy: Copy, *, silent: bool = False) -> None:
        copy.ready = True
        if self.events is not None and copy.slot < CHECKPOINT and not silent:
            assert copy.node is not None
            if copy.node.run is not None:  # what arrives too late is nobody's news
                self.note("stored", self.digest(copy.node), copy.tier)
        self.candidates.offer(copy)
        self.candidates.offer_above(copy.node, copy.slot)

    def supersede(self, copy: Copy, frames: tuple[int, ...]) -> None:
        """What a restore still writes is here already: the node stands on ``frames`` instead."""
        node = copy.node
        assert node is not None and copy.writer
        copy.node = None
        self.orphans[copy] = None
        fresh = node.copies[copy.slot] = Copy(node, copy.slot, frames, 0)
        self._ready(fresh)

    def detach(self, copy: Copy) -> None:
        """Take a copy that nothing else needs out of the tree, and tidy up what that leaves."""
        node = copy.node
        assert node is not None
        if copy.slot == GPU and (tail := node.copies[GPU + CHECKPOINT]) is not None:
            self._unlink(tail, node)  # on the device a checkpoint goes with its page
        self._unlink(copy, node)
        if node.run is None:
            return
        if copy.slot < CHECKPOINT:
            self._after_loss(node)
        elif (page := node.copies[copy.slot - CHECKPOINT]) is not None:
            self.candidates.offer(page)

    def _unlink(self, copy: Copy, node: Node) -> None:
        slot = copy.slot
        if self.events is not None and slot < CHECKPOINT and copy.ready:
            self.note("removed", self.digest(node), copy.tier)
        node.copies[slot] = None
        copy.node = None
        if slot < CHECKPOINT:
            parent = node.parent
            assert parent is not None
            if node.run is not None:
                node.run.hold(slot, node.index)
            if (up := parent.copies[slot]) is not None and not parent.kids(slot):
                self.candidates.became_leaf(parent, up)
            self.candidates.offer_above(node, slot)
        if copy.tier == DISK:
            self._forget_row(copy)
        elif copy.readers or copy.writer:
            self.orphans[copy] = None
        else:
            self.pools[slot].give(copy.frames)

    def _forget_row(self, copy: Copy) -> None:
        """A disk copy's row goes with it; what is only on disk below it must have gone before."""
        assert self.disk is not None
        row = copy.frames[0]
        if copy.slot == DISK:
            self.disk_nodes.pop(row, None)
        self.disk.busy[row] = 0
        for below in self.disk.below(row) if self.disk.kids[row] else ():
            self.drop_row(below)
        bad = row in self.quarantine
        self.quarantine.discard(row)
        frames = int(self.disk.frames[row])
        self.drops[self.disk.remove(row, quarantine=bad)] = frames

    def drop_row(self, row: int) -> None:
        """Forget a row whose page has no node."""
        assert self.disk is not None
        if self.events is not None and not self.disk.is_checkpoint(row):
            self.note("removed", self.disk.key(row), DISK)
        frames = int(self.disk.frames[row])
        self.drops[self.disk.remove(row)] = frames

    def lose(self, copy: Copy) -> None:
        """A copy turned out bad or was never made: whatever needs it in its tier goes too."""
        node = copy.node
        if node is None or node.run is None:
            return
        if copy.slot < CHECKPOINT:
            stack, below = [node], []
            while stack:
                n = stack.pop()
                kids = [k for k in n.offspring() if k.copies[copy.slot] is not None]
                below.extend(kids)
                stack.extend(kids)
            for n in [*reversed(below), node]:
                for slot in (copy.slot + CHECKPOINT, copy.slot):
                    if (c := n.copies[slot]) is not None:
                        self.detach(c)
        else:
            self.detach(copy)

    def let_go(self, copy: Copy) -> None:
        """An operation has ended its use of a copy (its counts are already down)."""
        if copy.readers or copy.writer:
            return
        if copy.node is None:
            if copy in self.orphans:
                del self.orphans[copy]
                self.pools[copy.slot].give(copy.frames)
        else:
            self.candidates.offer(copy)
            if copy.slot == GPU + CHECKPOINT and (page := copy.node.copies[GPU]) is not None:
                self.candidates.offer(page)
            if copy.node.run is not None:
                self.prune(copy.node)

    def best(self, node: Node, kind: int = 0) -> Copy | None:
        """The fastest READY copy of a page (or, with ``CHECKPOINT``, of its checkpoint)."""
        for slot in (kind, kind + 1, kind + 2):
            copy = node.copies[slot]
            if copy is not None and copy.ready:
                return copy
        return None

    # ------------------------------------------------------------------ nodes
    def pin(self, nodes: Iterable[Node]) -> None:
        for n in nodes:
            n.pins += 1

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Drop one pin each; deepest first, so that what falls free is tidied up."""
        leaf = self.geometry.has_tails and bool(nodes)
        for n in reversed(nodes):
            n.pins -= 1
            if leaf and (host := n.copies[CPU]) is not None:
                leaf = False  # nothing may be able to resume behind it any more
                self.candidates.weigh_again(host)
            if not n.pins:
                if n.run is None:
                    if (copy := n.copies[GPU]) is not None:
                        n.copies[GPU], copy.node = None, None
                        if copy.readers or copy.writer:
                            self.orphans[copy] = None
                        else:
                            self.pools[GPU].give(copy.frames)
                    continue
                if (copy := n.copies[GPU]) is None:
                    self.prune(n)
                elif n.branches is not None or n.run.held[GPU] == n.index + 1:  # else: a child
                    self.candidates.offer(copy)

    def touch(self, nodes: Sequence[Node], hits: int = 0) -> None:
        """Stamp a whole path with one new tick; ``hits`` is 1 when it was found again."""
        if hits and (back := self.ghosts.returned()) is not None:
            self.policy.returned(*back)
        self.tick += 1
        tick = self.tick
        for n in nodes:
            n.tick = tick
            n.hits += hits
        if self.disk is not None:
            for n in nodes:
                if (copy := n.copies[DISK]) is not None:
                    self.disk.touch(copy.frames[0], tick)

    def prune(self, node: Node) -> None:
        """Forget nodes that nothing refers to any more, from here upwards."""
        while node.depth and not node.pins and not node.keeps and node.run is not None:
            copies = node.copies
            if copies[GPU] is not None or copies[CPU] is not None:
                return
            if node.children or node.successor() is not None:
                return
            on_disk = copies[DISK]
            if on_disk is not None:
                if node.expires < NEVER:
                    return  # rows know no time to live
                tail = copies[DISK + CHECKPOINT]
                if on_disk.readers or on_disk.writer or (tail and (tail.readers or tail.writer)):
                    return
                assert self.disk is not None
                del self.disk_nodes[on_disk.frames[0]]
                on_disk.node = None
                if tail is not None:
                    tail.node = None
                copies[DISK] = copies[DISK + CHECKPOINT] = None
            else:
                self.ghosts.remember([node.page(self.tree.stride)[:GHOST_BYTES]], node.hits > 0)
            self.tree.remove_leaf(node)
            assert node.parent is not None
            node = node.parent

    def _after_loss(self, node: Node) -> None:
        if self.best(node) is None:
            self.kill(node)
        else:
            self.prune(node)

    def kill(self, node: Node) -> None:
        """Nobody may match this page, or anything below it, again.  Device pages that leases
        still pin stay theirs until unpinned."""
        parent = node.parent
        if self.events is not None:
            for n in (node, *self.tree.iterate(node)):
                self.digest(n)  # its key cannot be computed once it has left the tree
        for n in self.tree.remove_subtree(node):
            for slot in reversed(range(len(n.copies))):  # checkpoints first, and what is slower
                copy = n.copies[slot]
                if copy is None:
                    continue
                if slot == GPU and n.pins:
                    if self.events is not None and copy.ready:
                        self.note("removed", n.digest, GPU)
                    continue
                self._unlink(copy, n)
        if parent is not None and parent.depth and parent.run is not None:
            self.prune(parent)

    # ------------------------------------------------------------------ disk rows and nodes
    def load_rows(
        self, parent: Node, data: bytes, extras: dict[int, bytes], rows: Sequence[int]
    ) -> list[Node]:
        """Nodes for the pages of ``data`` behind ``parent`` that lie in ``rows`` of the disk."""
        stop = (parent.depth + len(rows)) * self.tree.stride
        nodes = self.tree.extend(parent, data[:stop], parent.depth, extras or None)
        for node, row in zip(nodes, rows, strict=True):
            self.link_row(node, row)
        return nodes

    def link_row(self, node: Node, row: int) -> None:
        assert self.disk is not None
        node.digest = self.disk.key(row)
        self.attach(node, DISK, (row,), silent=True)  # it has been there all the time
        self.disk_nodes[row] = node
        tail = self.disk.find(checkpoint_key(node.digest)) if self.geometry.has_tails else -1
        if tail >= 0:
            self.attach(node, DISK + CHECKPOINT, (tail,))

    def disk_rows(
        self, parent: Node, data: bytes, extras: dict[int, bytes], limit: int
    ) -> list[int]:
        """Rows of the pages of ``data`` behind ``parent``, up to page ``limit``."""
        rows: list[int] = []
        if self.disk is None or not self.disk.rows or parent.depth >= limit:
            return rows
        key, stride = self.digest(parent), self.tree.stride
        for page in range(parent.depth, limit):
            tokens = data[page * stride : (page + 1) * stride]
            key = page_key(key, tokens, extras.get(page, b"") if extras else b"")
            row = self.disk.find(key)
            if row < 0:
                break
            rows.append(row)
        return rows

    # ------------------------------------------------------------------ who holds what
    def use(self, copy: Copy) -> None:
        """An operation reads this copy until ``unuse``."""
        copy.readers += 1
        if copy.slot % 3 == DISK:
            self._hold_row(copy, 1)

    def unuse(self, copy: Copy) -> None:
        copy.readers -= 1
        assert copy.readers >= 0, "I3"
        if copy.slot % 3 == DISK and copy.node is not None:
            self._hold_row(copy, -1)
        self.let_go(copy)

    @contextmanager
    def held(self, *copies: Copy | None) -> Iterator[None]:
        """These stay where they are while room is made beside them."""
        kept = [c for c in copies if c is not None]
        for c in kept:
            c.readers += 1
        try:
            yield
        finally:
            for c in kept:
                c.readers -= 1
                self.candidates.offer(c)  # an order that came across one meanwhile has forgotten it

    def keep(self, nodes: Iterable[Node], by: int) -> None:
        """Hold (+1) or free (-1) pages so that each stays in some tier."""
        for n in nodes:
            before, n.keeps = n.keeps, n.keeps + by
            if bool(before) == bool(n.keeps) or n.run is None:
                continue
            for copy in n.copies[:3]:
                if copy is not None and copy.slot == DISK:
                    self._hold_row(copy, by)
                elif copy is not None and by < 0:
                    self.candidates.offer(copy)
            if by < 0:
                self.prune(n)

    def keep_tail(self, node: Node, by: int) -> None:
        """The same for the checkpoint at the end of a page."""
        before = self.kept_tails.pop(node, 0)
        if before + by:
            self.kept_tails[node] = before + by
        if bool(before) == bool(before + by) or node.run is None:
            return
        for copy in node.copies[CHECKPOINT:]:
            if copy is not None and copy.tier == DISK:
                self._hold_row(copy, by)
            elif copy is not None and by < 0:
                self.candidates.offer(copy)
                if (page := node.copies[copy.tier]) is not None:
                    self.candidates.offer(page)

    def _hold_row(self, copy: Copy, by: int) -> None:
        assert self.disk is not None
        row = copy.frames[0]
        self.disk.busy[row] = int(self.disk.busy[row]) + by

    # ------------------------------------------------------------------ events and checks
    def note(self, what: str, key: bytes, tier: int) -> None:
        assert self.events is not None
        if self.events.maxlen is not None and len(self.events) == self.events.maxlen:
            self.events_dropped += 1
        self.events.append((what, key, TIERS[tier]))

    def nodes(self) -> Iterator[Node]:
        for root in self.tree.roots.values():
            yield from self.tree.iterate(root)
