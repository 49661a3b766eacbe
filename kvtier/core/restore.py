"""Moving up: how a lease comes to stand on a prefix, and what it falls back to.

One RESTORE a lease brings up everything it misses, disk pages with the host as a stop on the way;
where loading is weighed against computing, one for what the host has and one a stage for the disk.
A lease settles only when all operations it waits for have ended; then it stands on what arrived,
or plans again.  Every failure takes away the copy that failed, so planning again ends.
"""

from bisect import bisect_left
from collections.abc import Sequence

from kvtier.core import load_costs
from kvtier.core.boundaries import boundaries, inside_span
from kvtier.core.checkpoints import Mark
from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, TIERS, Copy
from kvtier.core.geometry import Geometry
from kvtier.core.keys import checkpoint_key
from kvtier.core.leases import LeaseRecord, LeaseTables, PrefetchRecord
from kvtier.core.load_costs import ALWAYS, LoadCosts
from kvtier.core.operations import Move, Operations, TailPools, history_part
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.core.residency import Residency
from kvtier.core.tree import Node
from kvtier.errors import OutOfPages
from kvtier.types import LeaseState, Span, Tier

__all__ = ["Restore"]


class Restore:
    """Plans RESTORE operations and settles leases on their outcome."""

    def __init__(
        self,
        residency: Residency,
        operations: Operations,
        tails: TailPools,
        tables: LeaseTables,
        settled: list[LeaseRecord | PrefetchRecord],
    ) -> None:
        self.residency = residency
        self.operations = operations
        self.tails = tails
        self.tables = tables
        self.settled = settled
        self.geometry: Geometry = residency.geometry
        self.hit_tokens = [0, 0, 0]
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.lookup_tokens = 0

    # ------------------------------------------------------------------ what is there
    def path(
        self, root: Node, data: bytes, extras: dict[int, bytes], limit: int
    ) -> tuple[list[Node], int]:
        """Nodes of the known prefix, at most ``limit`` pages, giving nodes to pages that are only
        on disk; and how many pages are known in all."""
        res = self.residency
        last = res.tree.walk(root, data, extras or None)
        nodes, known = res.tree.path(last), last.depth
        if len(nodes) > limit:
            return nodes[:limit], known
        rows = res.disk_rows(last, data, extras, limit)
        if rows and (not last.depth or last.copies[DISK] is not None or self._link(last)):
            nodes += res.load_rows(last, data, extras, rows)
        return nodes, max(known, len(nodes))

    def _link(self, node: Node) -> bool:
        """Link a node and its ancestors to their disk rows, so that a child may be; a row is
        there for each, since the child's is."""
        res = self.residency
        assert res.disk is not None
        chain: list[Node] = []
        at: Node | None = node
        while at is not None and at.depth and at.copies[DISK] is None:
            chain.append(at)
            at = at.parent
        for n in reversed(chain):
            row = res.disk.find(res.digest(n))
            if row < 0:
                return False
            res.link_row(n, row)
        return True

    def resumable(self, path: Sequence[Node], limit: int, spans: Sequence[Span]) -> int:
        """Pages of ``path`` a lease could stand on."""
        n = min(len(path), limit)
        for i, node in enumerate(path[:n]):
            if node.run is None:
                n = i
                break
        page = self.geometry.page_tokens
        while n and (
            (spans and inside_span(n * page, spans))
            or (self.geometry.has_tails and self.residency.best(path[n - 1], CHECKPOINT) is None)
        ):
            n -= 1
        return n

    def at_hand(self, rec: LeaseRecord) -> int:
        """Pages a lease that restores could stand on without waiting for the disk."""
        limit = self.resumable(rec.nodes, rec.limit, rec.spans)
        places = boundaries(self.operations, rec.nodes[:limit], rec.spans)
        return max((at.pages for at in places if not at.disk), default=0)

    # ------------------------------------------------------------------ planning
    def bring_up(self, rec: LeaseRecord, path: Sequence[Node], spare: int = 0) -> list[Op]:
        """Pin the longest resumable prefix that fits, plus ``spare`` pages of the lease's own,
        and plan what is missing.

        The lease holds no nodes and no pages of a table.  Falls back to shorter prefixes and to
        none; raises OutOfPages, having changed nothing, if even ``spare`` does not fit.
        """
        assert not rec.nodes and not rec.frames and not rec.waits, "I4"
        res = self.residency
        limit = self.resumable(path, rec.limit, rec.spans)
        if rec.costs is not None:
            limit = self._worth_loading(rec, path, limit)
        res.pin(path[:limit])  # all along: unpinned, pages only on disk would lose their nodes
        while True:
            use = list(path[:limit])
            missing = [n for n in use if n.copies[GPU] is None]
            held = [c for n in missing if (c := res.best(n)) is not None]
            checkpoint = None
            if self.geometry.has_tails and use:
                checkpoint = res.best(use[-1], CHECKPOINT)
                assert checkpoint is not None
                held.append(checkpoint)
            tail = None
            with res.held(*held):  # a source must survive the eviction made for its target
                lacking = res.evictor.room(GPU, len(missing) + spare)
            if not lacking and self.geometry.has_tails:
                tail = self.tails.take(self._windows_at(limit))
                lacking = tail is None
            if not lacking:
                break
            shorter = self.resumable(path, limit - 1, rec.spans) if limit else 0
            res.unpin(use[shorter:])
            if not limit:
                if self.geometry.has_tails and not self.tails.states.free:
                    raise OutOfPages(1, 0, "state slots")
                raise OutOfPages(spare, spare - lacking, capacity=res.geometry.gpu_pages)
            limit = shorter
        rec.spare.extend(self.operations.private.take(spare))
        rec.nodes, rec.state = use, LeaseState.RESTORING
        rec.tail, rec.tail_ok = tail, checkpoint is None
        return self.plan(rec, missing, checkpoint, [])

    def _worth_loading(self, rec: LeaseRecord, path: Sequence[Node], limit: int) -> int:
        """How many of the pages that a lease could stand on it should load."""
        assert rec.costs is not None
        rec.stages = load_costs.stages(
            boundaries(self.operations, path[:limit], rec.spans),
            len(rec.source) // 4,
            self.geometry.page_tokens,
            rec.costs,
            even=not self.geometry.has_tails,
        )
        worth = rec.stages[-1] if rec.stages else 0
        rec.recomputed += limit - worth
        return worth

    def _windows_at(self, pages: int) -> range:
        """Window pages of a lease that stands at the end of ``pages`` pages."""
        return self.geometry.windows_at(pages * self.geometry.page_tokens)

    def plan(
        self,
        rec: LeaseRecord,
        missing: list[Node],
        checkpoint: Copy | None,
        parked: Sequence[Move],
        *,
        clear: bool = True,
    ) -> list[Op]:
        """The operations that bring up ``missing`` pages and the lease's tail."""
        operations, origins = self.operations, dict[Copy, Tier]()
        for n in rec.nodes:
            copy = n.copies[GPU]
            if copy is not None and copy.writer:
                if copy.writer not in rec.waits:
                    rec.waits.add(copy.writer)
                    origins |= operations.origins(copy.writer)
                rec.origins.setdefault(n, origins[copy])
        tail_from_disk = checkpoint is not None and checkpoint.tier == DISK
        nearer, stages = self._by_stage(rec, missing, last=tail_from_disk)
        restores: list[Op] = []
        op_id = operations.next_id()
        moves = self._moves(rec, nearer, op_id)
        if checkpoint is not None and not tail_from_disk:
            moves.append(self._tail_move(rec, checkpoint))
        if parked:
            assert rec.parked is not None
            rec.parked.op_id = op_id
            moves += parked
        if moves:
            restores.append(operations.start(op_id, OpKind.RESTORE, moves))
        for end, stage in stages:
            op_id = operations.next_id()
            moves = self._moves(rec, stage, op_id)
            if end is not rec.nodes[-1]:
                moves += self._lift_checkpoint(end, op_id)
            elif checkpoint is not None:
                moves += self._tail_from_disk(rec, checkpoint, op_id)
            if moves:
                restores.append(operations.start(op_id, OpKind.RESTORE, moves))
        ops: list[Op] = []
        if self.geometry.has_tails and checkpoint is None and clear:
            assert rec.tail is not None
            part = Part(Kind.TAIL, Tier.GPU, (), Tier.GPU, rec.tail.frames(range(0)))
            ops.append(operations.in_order(OpKind.CLEAR, part))
        rec.waits.update(op.id for op in restores)
        ops += restores
        if not rec.waits and rec.parked is None:
            ops += self.settle(rec)
        return ops

    def _by_stage(
        self, rec: LeaseRecord, missing: list[Node], *, last: bool
    ) -> tuple[list[Node], list[tuple[Node, list[Node]]]]:
        """Pages that come from nearer than the disk, and those of each RESTORE from there with the
        page where it ends: all in one, unless the lease may have to settle for what the first ones
        have brought.  None waits for the disk for what is nearer.  ``last``: the last page's
        checkpoint comes from the disk."""
        nearer = [n for n in missing if (c := n.copies[CPU]) is not None and c.ready]
        if len(nearer) == len(missing) and not last:
            return missing, []
        places = rec.stages if rec.costs is not None else []
        ends = [rec.nodes[n - 1] for n in places if n < len(rec.nodes)]
        depths = [n.depth for n in ends]
        stages: list[tuple[Node, list[Node]]] = [(end, []) for end in (*ends, rec.nodes[-1])]
        there = set(nearer)
        for n in missing:
            if n not in there:
                stages[bisect_left(depths, n.depth)][1].append(n)
        return nearer, stages

    def _tail_from_disk(self, rec: LeaseRecord, checkpoint: Copy, op_id: int) -> list[Move]:
        """To the host only, where there is room: planning again takes it from there, and a read
        that hangs does not hold the lease's tail."""
        coming = rec.nodes[-1].copies[CPU + CHECKPOINT]
        if coming is not None:
            rec.waits.add(coming.writer)
            return []
        return self._lift_checkpoint(rec.nodes[-1], op_id) or [self._tail_move(rec, checkpoint)]

    def _moves(self, rec: LeaseRecord, missing: Sequence[Node], op_id: int) -> list[Move]:
        """Pages of a lease that are not on the device, up to there."""
        res = self.residency
        frames = res.pools[GPU].take(len(missing))
        targets = [res.attach(n, GPU, (f,), op_id) for n, f in zip(missing, frames, strict=True)]
        sources = [res.best(n) for n in missing]
        vias = self._vias(missing, op_id)
        moves: list[Move] = []
        for n, source, target in zip(missing, sources, targets, strict=True):
            assert source is not None, "I9"
            rec.origins.setdefault(n, TIERS[source.tier])
            moves.append(self._move(n, source, target, vias.get(n)))
        return moves

    def _lift_checkpoint(self, node: Node, op_id: int) -> list[Move]:
        """From the disk to the host, behind its page, if there is room."""
        res, frames = self.residency, self.geometry.checkpoint_frames
        source, page = res.best(node, CHECKPOINT), node.copies[CPU]
        if source is None or source.tier != DISK or page is None:
            return []
        if node.copies[CPU + CHECKPOINT] is not None:  # on its way
            return []
        with res.held(page, source):
            if res.evictor.room(CPU, frames):
                return []
        target = res.attach(node, CPU + CHECKPOINT, res.pools[CPU].take(frames), op_id)
        mark = target.mark = Mark(node.depth, prompt_end=False, branch=False)
        above = node.parent
        while above is not None and mark.above is None:
            mark.above, above = above.copies[CPU + CHECKPOINT], above.parent
        mark.tick = res.tick
        return [self._checkpoint_up(node, source, target)]

    def _checkpoint_up(self, node: Node, source: Copy, target: Copy) -> Move:
        digest = self.residency.digest(node)
        part = history_part(
            source,
            target,
            key=checkpoint_key(digest),
            parent=digest,
            tokens=node.page(self.residency.tree.stride),
        )
        return Move(part, source, (target,))

    def _vias(self, missing: Sequence[Node], op_id: int) -> dict[Node, Copy]:
        """Host copies made on the way up for pages that only the disk has."""
        res = self.residency
        todo = [n for n in missing if n.copies[CPU] is None]
        if not todo or not self.geometry.cpu_frames:
            return {}
        above = todo[0].parent
        guard = above.copies[CPU] if above is not None else None
        if above is not None and above.depth and guard is None:
            return {}
        with res.held(guard, *(res.best(n) for n in missing)):
            fits = res.evictor.make_room(CPU, len(todo))
        frames = res.pools[CPU].take(fits)
        return {n: res.attach(n, CPU, (f,), op_id) for n, f in zip(todo, frames, strict=False)}

    def _move(self, n: Node, source: Copy, target: Copy, via: Copy | None) -> Move:
        if source.tier != DISK:
            return Move(history_part(source, target), source, (target,))
        res = self.residency
        key = res.digest(n)
        assert n.parent is not None
        part = history_part(
            source, target, via, key=key, parent=n.parent.digest, tokens=n.page(res.tree.stride)
        )
        return Move(part, source, (target,) if via is None else (target, via))

    def _tail_move(self, rec: LeaseRecord, checkpoint: Copy) -> Move:
        """From a checkpoint into the lease's own tail."""
        node, tail = rec.nodes[-1], rec.tail
        assert tail is not None
        checkpoint.expendable = False  # one that served a hit has earned its place
        if checkpoint.mark is not None:
            checkpoint.mark.uses += 1
            checkpoint.mark.tick = self.residency.tick + 1  # the lease is about to be counted
            if (host := node.copies[CPU + CHECKPOINT]) is not None:
                self.residency.candidates.weigh_again(host)
        if (below := node.copies[DISK + CHECKPOINT]) is not None:
            assert self.residency.disk is not None
            self.residency.disk.touch(below.frames[0], self.residency.tick + 1)
        on_disk = checkpoint.tier == DISK
        digest = self.residency.digest(node) if on_disk else b""
        part = Part(
            Kind.CHECKPOINT,
            TIERS[checkpoint.tier],
            checkpoint.frames,
            Tier.GPU,
            tail.frames(self._windows_at(len(rec.nodes))),
            live_dst=True,
            key=checkpoint_key(digest) if on_disk else b"",
            parent=digest,
            depth=node.depth,
            tokens=node.page(self.residency.tree.stride) if on_disk else b"",
        )
        return Move(part, checkpoint, (), tail=tail)

    # ------------------------------------------------------------------ settling
    def settle(self, rec: LeaseRecord) -> list[Op]:
        """Everything this lease waited for has ended: stand on what arrived, or plan again."""
        copies = [n.copies[GPU] for n in rec.nodes]
        alive = all(n.run is not None for n in rec.nodes)
        if alive and rec.tail_ok and all(c is not None and c.ready for c in copies):
            rec.frames = [c.frames[0] for c in copies if c is not None]
            rec.owned = [False] * len(rec.frames)
            self.activate(rec)
            return []
        path = rec.nodes
        if rec.give_up:
            good = next((i for i, c in enumerate(copies) if c is None or not c.ready), len(copies))
            rec.limit = min(rec.limit, good if good < len(copies) else good - 1)
            rec.give_up = False
        return self.stand_anew(rec, path)

    def give_up_disk(self, rec: LeaseRecord) -> bool:
        """Have a lease plan for what is nearer than the disk, and whether it may: not if it waits
        for nothing of the disk, nor while there is no other tail for it."""
        if not self.operations.reads(rec.waits):
            return False
        if rec.tail is not None and rec.tail.ops and not self.tails.states.free:
            return False
        pages, known = self.at_hand(rec), len(rec.nodes)
        rec.costs = (rec.costs or LoadCosts(ALWAYS)).without_disk()
        rec.limit = min(rec.limit, pages)
        rec.recomputed += known - pages
        return True

    def stand_anew(self, rec: LeaseRecord, path: Sequence[Node]) -> list[Op]:
        """Have a lease that holds ``path``, or more, let go of all and stand on what of it there
        is and ``rec.limit`` allows."""
        self.residency.pin(path)  # so that letting go does not tidy away what is still good
        self.let_go(rec)
        ops = self.bring_up(rec, path)
        self.residency.unpin(path)
        return ops

    def activate(self, rec: LeaseRecord) -> None:
        page = self.geometry.page_tokens
        if not rec.length:
            rec.length = len(rec.nodes) * page
            rec.tokens = bytearray(rec.source[: rec.length * 4])
        rec.frames += rec.spare
        rec.owned += [True] * len(rec.spare)
        rec.spare = []
        rec.capacity = len(rec.frames) * page
        rec.state = LeaseState.ACTIVE
        self.tables.lengths[rec.row] = rec.length
        self.tables.put(rec.row, 0, rec.frames)
        if rec.tail is not None:
            for number, frame in rec.tail.windows.items():
                self.tables.put_window(rec.row, number, frame)
        if not rec.counted:
            self._count(rec)
        rec.origins, rec.costs = {}, None
        self.settled.append(rec)

    def _count(self, rec: LeaseRecord) -> None:
        """A lease is admitted: what it need not compute, by the tier each page came from."""
        page = self.geometry.page_tokens
        rec.counted, rec.cached_tokens = True, rec.length
        rec.restored = {Tier.GPU: rec.length, Tier.CPU: 0, Tier.DISK: 0}
        for tier in (rec.origins.get(n, Tier.GPU) for n in rec.nodes) if rec.origins else ():
            rec.restored[Tier.GPU] -= page
            rec.restored[tier] += page
        for tier, tokens in rec.restored.items():
            self.hit_tokens[tier] += tokens
        self.computed_tokens += len(rec.prompt) - rec.length
        self.recomputed_tokens += rec.recomputed * page
        self.lookup_tokens += len(rec.prompt)

    def let_go(self, rec: LeaseRecord) -> None:
        """The one way a lease lets go of nodes, pages and tail, whatever state it is in.  Spare
        pages stay: they are not part of what a restore can lose."""
        if True in rec.owned:
            for frame, own in zip(reversed(rec.frames), reversed(rec.owned), strict=True):
                if own:
                    self.operations.private.drop(frame)
        rec.frames, rec.owned, rec.capacity, rec.length = [], [], -1, 0
        rec.waits = set()
        nodes, rec.nodes = rec.nodes, []
        self.residency.unpin(nodes)
        if rec.tail is not None:
            self.tails.disown(rec.tail)
            rec.tail = None
        self.tables.clear(rec.row)

    # ------------------------------------------------------------------ prefetch
    def prefetch(self, rec: PrefetchRecord, limit: int, most: int | None) -> list[Op]:
        """Bring what is only on disk up to the host, at most ``most`` pages; what is already there
        counts as it is.  With tails also the deepest checkpoint within ``limit`` pages."""
        operations = self.operations
        op_id = operations.next_id()
        missing = [n for n in rec.nodes if n.copies[GPU] is None and n.copies[CPU] is None][:most]
        vias = self._vias(missing, op_id)
        moves: list[Move] = []
        for n in missing:
            source = n.copies[DISK]
            if n not in vias or source is None:
                break
            moves.append(self._move(n, source, vias[n], None))
        if self.geometry.has_tails:
            moves += self._lift_deepest(rec.nodes[:limit], op_id)
        rec.waits = {
            c.writer for n in rec.nodes for c in n.copies[:2] if c is not None and c.writer
        }
        ops: list[Op] = []
        if moves:
            ops.append(operations.start(op_id, OpKind.RESTORE, moves))
            rec.waits.add(op_id)
        if not rec.waits:
            self.settle_prefetch(rec)
        return ops

    def _lift_deepest(self, path: Sequence[Node], op_id: int) -> list[Move]:
        """The last checkpoint among pages that are on the host, or on their way there."""
        for n in reversed(path):
            if n.copies[CPU] is not None and self.residency.best(n, CHECKPOINT) is not None:
                return self._lift_checkpoint(n, op_id)
        return []

    def settle_prefetch(self, rec: PrefetchRecord) -> None:
        count = 0
        for n in rec.nodes:
            if n.run is None or not any(c is not None and c.ready for c in n.copies[:2]):
                break
            count += 1
        rec.tokens, rec.done = count * self.geometry.page_tokens, True
        self.settled.append(rec)
