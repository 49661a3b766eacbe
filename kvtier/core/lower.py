"""Moving down: device -> host -> disk.  Plans operations; decides admission.

A page goes down only behind its parent (I6), so what does not fit or is not let in ends the
chain.  What is skipped is counted and offered again when somebody uses the path.
"""

from collections.abc import Iterable, Sequence

from kvtier.core.checkpoints import passed_by
from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, Copy
from kvtier.core.geometry import Geometry
from kvtier.core.keys import checkpoint_key
from kvtier.core.operations import Move, Operations, history_part
from kvtier.core.ops import Op, OpKind
from kvtier.core.residency import Residency
from kvtier.core.tree import Node

__all__ = ["Lower"]


class Lower:
    """Plans PACK and STORE operations."""

    def __init__(
        self, residency: Residency, operations: Operations, *, store_after_hits: int, stores: bool
    ) -> None:
        self.residency = residency
        self.operations = operations
        self.geometry: Geometry = residency.geometry
        self.store_after_hits = store_after_hits
        self.stores = stores and residency.disk is not None
        self.dropped = 0
        """Pages not kept in a lower tier."""

    # ------------------------------------------------------------------ device -> host
    def pack(self, paths: Iterable[Sequence[Node]], *, must: bool = False) -> list[Op]:
        """One PACK for whatever of these paths is on the device but not on the host."""
        if not self.geometry.cpu_frames:
            return []
        op_id = self.operations.next_id()
        moves: list[Move] = []
        for path in paths:
            self._pack_pages(path, op_id, moves)
            if self.geometry.has_tails:
                self._pack_checkpoints(path, op_id, moves)
        return [self.operations.start(op_id, OpKind.PACK, moves, must=must)] if moves else []

    def _pack_pages(self, path: Sequence[Node], op_id: int, moves: list[Move]) -> None:
        first = len(path)
        while first and path[first - 1].copies[CPU] is None and path[first - 1].run is not None:
            first -= 1
        todo: list[Node] = []
        for node in path[first:]:
            source = node.copies[GPU]
            if node.run is None or source is None or not source.ready:
                break
            todo.append(node)
        if not todo:
            return
        above = todo[0].parent
        guard = above.copies[CPU] if above is not None else None
        fits = self._make_room((guard, self._last_checkpoint(path, first)), len(todo))
        self.dropped += len(todo) - fits
        frames = self.residency.pools[CPU].take(fits)
        for node, frame in zip(todo, frames, strict=False):
            source = node.copies[GPU]
            assert source is not None
            target = self.residency.attach(node, CPU, (frame,), op_id)
            moves.append(Move(history_part(source, target), source, (target,)))

    def _last_checkpoint(self, path: Sequence[Node], end: int) -> Copy | None:
        """The deepest one of ``path[:end]`` on the host.  A prompt longer than the host keeps it:
        for more pages without it nothing could resume there."""
        if not self.geometry.has_tails:
            return None
        tails = (n.copies[CPU + CHECKPOINT] for n in reversed(path[:end]))
        return next((c for c in tails if c is not None), None)

    def _make_room(self, guards: Sequence[Copy | None], want: int) -> int:
        """Host frames for the next pages of a path; ``guards`` must not be evicted for them."""
        with self.residency.held(*guards):
            return self.residency.evictor.make_room(CPU, want)

    def _pack_checkpoints(self, path: Sequence[Node], op_id: int, moves: list[Move]) -> None:
        frames, pool = self.geometry.checkpoint_frames, self.residency.pools[CPU]
        on_host = (n.copies[CPU] for n in reversed(path))
        leaf = next((c for c in on_host if c is not None), None)
        last: Copy | None = None
        before: Copy | None = None  # the two checkpoints above on the host
        for node in path:
            source, page = node.copies[GPU + CHECKPOINT], node.copies[CPU]
            if (there := node.copies[CPU + CHECKPOINT]) is not None:
                last, before = there, last
                continue
            if source is None or page is None or (source.expendable and pool.free < frames):
                continue
            with self.residency.held(page, leaf):
                missing = self.residency.evictor.room(CPU, frames)
            if missing and last is None:  # better a shorter path than one of no use
                with self.residency.held(page):
                    missing = self.residency.evictor.room(CPU, frames)
            if missing:
                self.dropped += 1
                continue
            target = self.residency.attach(
                node, CPU + CHECKPOINT, self.residency.pools[CPU].take(frames), op_id
            )
            target.expendable = source.expendable
            if (mark := source.mark) is not None:
                target.mark = mark
                mark.above, mark.tick = last, self.residency.tick
                for passed in passed_by(mark, (last, before)):
                    self.residency.candidates.weigh_again(passed)
            last, before = target, last
            moves.append(Move(history_part(source, target), source, (target,)))

    def again(self, nodes: Sequence[Node]) -> list[Op]:
        """A path has been found again: what was skipped of it before is offered once more."""
        if not nodes or not self.geometry.cpu_frames:
            return []
        last = nodes[-1]
        if last.copies[CPU] is None:
            return self.pack([nodes])
        return self.store([last]) if last.copies[DISK] is None else []

    def turn_end(self, nodes: Sequence[Node]) -> list[Op]:
        """A lease ends here, and its conversation will go on from here: its last checkpoint, if
        the device still has it, is kept as one at a prompt's end is."""
        node = nodes[-1] if nodes else None
        tail = None if node is None else node.copies[GPU + CHECKPOINT]
        if node is None or node.run is None or tail is None or not tail.expendable:
            return []
        tail.expendable = False
        if tail.mark is not None:
            tail.mark.prompt_end = True
        if (host := node.copies[CPU + CHECKPOINT]) is None:
            return self.pack([nodes])
        host.expendable = False
        return self.store([node])

    # ------------------------------------------------------------------ host -> disk
    def store(self, nodes: Iterable[Node]) -> list[Op]:
        """One STORE for the pages among these, and above them, that may go to disk now."""
        if not self.stores:
            return []
        op_id = self.operations.next_id()
        moves: list[Move] = []
        refused: set[Node] = set()
        for node in nodes:
            if node.run is None or node.parent in refused:
                refused.add(node)
            elif all(self._store_page(n, op_id, moves) for n in self._chain(node)):
                self._store_checkpoint(node, op_id, moves)
            else:
                refused.add(node)
        ops = self.operations.drop_op(again=bool(moves))
        return [*ops, self.operations.start(op_id, OpKind.STORE, moves)] if moves else ops

    def waiting_below(self, nodes: Sequence[Node]) -> list[Node]:
        """Descendants that arrived on the host before these did: they could not go on then."""
        out: list[Node] = []
        stack, known = list(nodes) if self.stores else [], set(nodes)
        while stack:
            for kid in stack.pop().offspring():
                copy = kid.copies[CPU]
                ready = copy is not None and copy.ready and kid.copies[DISK] is None
                if ready and kid not in known:
                    out.append(kid)
                    stack.append(kid)
        return out

    def _chain(self, node: Node) -> list[Node]:
        """The node and its ancestors that are not on disk yet, root first."""
        out: list[Node] = []
        at: Node | None = node
        while at is not None and at.depth and at.copies[DISK] is None:
            out.append(at)
            at = at.parent
        return out[::-1]

    def _store_page(self, node: Node, op_id: int, moves: list[Move]) -> bool:
        """Put one page, whose parent is on disk, into the group; False ends the chain."""
        res, disk = self.residency, self.residency.disk
        assert disk is not None and node.parent is not None
        parent_row = -1
        if node.parent.depth:
            above = node.parent.copies[DISK]
            if above is None:
                return False
            parent_row = above.frames[0]
        row = disk.find(res.digest(node))
        if row >= 0:
            res.link_row(node, row)
            return True
        source = node.copies[CPU]
        if source is None or not source.ready:
            return False
        full = disk.free < 1
        if node.hits < self.store_after_hits or not res.policy.admit(node.hits, full=full):
            self.dropped += 1
            return False
        if not self._disk_room(parent_row, 1):
            self.dropped += 1
            return False
        row = disk.add(node.digest, parent_row, self._root_key(node), node.depth, 1, node.tick)
        target = res.attach(node, DISK, (row,), op_id)
        res.disk_nodes[row] = node
        self._group(moves, source, target, node.digest, node.parent.digest, node)
        return True

    def _store_checkpoint(self, node: Node, op_id: int, moves: list[Move]) -> None:
        res, disk = self.residency, self.residency.disk
        source, page = node.copies[CPU + CHECKPOINT], node.copies[DISK]
        if source is None or not source.ready or source.expendable or page is None:
            return
        if node.copies[DISK + CHECKPOINT] is not None:
            return
        assert disk is not None
        if not self._disk_room(page.frames[0], self.geometry.checkpoint_frames):
            self.dropped += 1
            return
        key = checkpoint_key(node.digest)
        row = disk.add(
            key, page.frames[0], b"", node.depth, self.geometry.checkpoint_frames, node.tick
        )
        target = res.attach(node, DISK + CHECKPOINT, (row,), op_id)
        self._group(moves, source, target, key, node.digest, node)

    def _group(
        self, moves: list[Move], source: Copy, target: Copy, key: bytes, parent: bytes, node: Node
    ) -> None:
        tokens = node.page(self.residency.tree.stride)
        part = history_part(source, target, key=key, parent=parent, tokens=tokens)
        moves.append(Move(part, source, (target,)))

    def _disk_room(self, parent_row: int, frames: int) -> bool:
        disk = self.residency.disk
        assert disk is not None
        if parent_row < 0:
            return self.residency.evictor.disk_room(frames)
        disk.busy[parent_row] += 1
        fits = self.residency.evictor.disk_room(frames)
        disk.busy[parent_row] -= 1
        return fits

    @staticmethod
    def _root_key(node: Node) -> bytes:
        at = node
        while at.parent is not None:
            at = at.parent
        return at.digest
