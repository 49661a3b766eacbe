"""Pause and resume: all of a lease on the host, its device pages given back.

Shared pages go down like any others and are kept in some tier meanwhile; what only the lease
has (partial page, unpublished pages, live tail) is parked in host frames of its own.
"""

from collections.abc import Sequence

from kvtier.core.copies import CHECKPOINT, CPU, GPU, Copy
from kvtier.core.leases import LeaseRecord, Parked
from kvtier.core.lower import Lower
from kvtier.core.operations import Move
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.core.residency import Residency
from kvtier.core.restore import Restore
from kvtier.errors import OutOfPages
from kvtier.types import LeaseState, Tier

__all__ = ["Parking"]


class Parking:
    """Plans the operations of ``pause`` and ``resume`` and settles leases on them."""

    def __init__(self, restore: Restore, lower: Lower) -> None:
        self.restore = restore
        self.lower = lower
        self.residency: Residency = restore.residency
        self.operations = restore.operations

    # ------------------------------------------------------------------ down
    def pause(self, rec: LeaseRecord) -> list[Op]:
        """Park the lease; it is RESTORING until that has ended, then PAUSED."""
        parked = rec.parked = Parked(rec.length, list(rec.nodes), len(rec.nodes))
        self.residency.keep(parked.nodes, 1)
        rec.state = LeaseState.RESTORING
        ops = self.lower.pack([rec.nodes], must=True)
        rec.waits |= {op.id for op in ops if op.kind is OpKind.PACK}
        op = self._park(rec, parked)
        if op is not None:
            ops.append(op)
            rec.waits.add(op.id)
        if not rec.waits:
            ops += self.settle(rec)
        return ops

    def _park(self, rec: LeaseRecord, parked: Parked) -> Op | None:
        """One PACK of what only this lease has, if the host has room for all of it."""
        g, res = self.residency.geometry, self.residency
        pages = range(len(rec.nodes), -(-rec.length // g.page_tokens))
        tail = rec.tail if rec.length else None
        need = len(pages) + (g.parked_frames if tail is not None else 0)
        if not need:
            return None
        if not g.cpu_frames or res.evictor.room(CPU, need):
            parked.ok = False
            return None
        op_id = self.operations.next_id()
        moves: list[Move] = []
        for page in pages:
            copy = parked.pages[page] = self._host_copy(1, op_id)
            part = Part(Kind.HISTORY, Tier.GPU, (rec.frames[page],), Tier.CPU, copy.frames)
            moves.append(Move(part, None, (copy,), reads=rec.frames[page]))
        if tail is not None:
            reach = g.windows_at(rec.length, g.max_draft)  # without what is only reserved
            parked.windows = range(max(reach.start, min(tail.windows, default=0)), reach.stop)
            parked.tail = self._host_copy(g.parked_frames, op_id)
            part = Part(
                Kind.TAIL,
                Tier.GPU,
                tail.frames(parked.windows),
                Tier.CPU,
                parked.tail.frames,
                live_src=True,
            )
            moves.append(Move(part, None, (parked.tail,), tail_src=tail))
        parked.op_id = op_id
        return self.operations.start(op_id, OpKind.PACK, moves, must=True)

    def _host_copy(self, frames: int, writer: int) -> Copy:
        """A host copy that belongs to a lease and to no node."""
        copy = Copy(None, CPU, self.residency.pools[CPU].take(frames), writer)
        self.residency.parked[copy] = None
        return copy

    # ------------------------------------------------------------------ up
    def resume(self, rec: LeaseRecord) -> list[Op]:
        """Bring a paused lease back; OutOfPages leaves it paused."""
        parked, res = rec.parked, self.residency
        assert parked is not None
        whole = parked.ok and all(n.run is not None for n in parked.nodes)
        if not whole:
            return self._resume_shorter(rec)
        missing = [n for n in parked.nodes if n.copies[GPU] is None]
        res.pin(parked.nodes)
        need = len(missing) + len(parked.pages)
        lacking = res.evictor.room(GPU, need)
        if lacking:
            res.unpin(parked.nodes)
            raise OutOfPages(need, need - lacking)
        if res.geometry.has_tails:
            rec.tail = self.restore.tails.take(parked.windows)
            if rec.tail is None:
                res.unpin(parked.nodes)
                raise OutOfPages(1, 0, "state slots or window pages")
        rec.nodes = list(parked.nodes)
        rec.spare = self.operations.private.take(len(parked.pages))
        rec.state, parked.pausing = LeaseState.RESTORING, False
        rec.tail_ok = parked.tail is None
        res.touch(rec.nodes)
        clear: list[Op] = []
        if rec.tail is not None and parked.tail is None:  # paused before its first token
            part = Part(Kind.TAIL, Tier.GPU, (), Tier.GPU, rec.tail.frames(range(0)))
            clear = [self.operations.in_order(OpKind.CLEAR, part)]
        ops = self.restore.plan(rec, missing, None, self._moves_up(rec, parked), clear=False)
        if not rec.waits and rec.state is LeaseState.RESTORING:
            ops += self.settle(rec)
        return clear + ops

    def _moves_up(self, rec: LeaseRecord, parked: Parked) -> Sequence[Move]:
        moves: list[Move] = []
        for copy, frame in zip(parked.pages.values(), rec.spare, strict=True):
            part = Part(Kind.HISTORY, Tier.CPU, copy.frames, Tier.GPU, (frame,))
            moves.append(Move(part, copy, writes=frame))
        if parked.tail is not None:
            assert rec.tail is not None
            part = Part(
                Kind.TAIL,
                Tier.CPU,
                parked.tail.frames,
                Tier.GPU,
                rec.tail.frames(parked.windows),
                live_dst=True,
            )
            moves.append(Move(part, parked.tail, tail=rec.tail))
        return moves

    def _resume_shorter(self, rec: LeaseRecord) -> list[Op]:
        parked = rec.parked
        assert parked is not None
        path, before = parked.nodes, (rec.limit, rec.tokens)
        rec.limit, rec.length, rec.parked = len(path), 0, None
        rec.source, rec.tokens = bytes(rec.tokens[: 4 * parked.length]), bytearray()
        try:
            ops = self.restore.bring_up(rec, path)
        except OutOfPages:
            rec.length, rec.parked = parked.length, parked
            rec.limit, rec.tokens = before
            raise
        self._give_back(parked)
        return ops

    # ------------------------------------------------------------------ settling
    def settle(self, rec: LeaseRecord) -> list[Op]:
        """Everything a pausing or resuming lease waited for has ended."""
        parked = rec.parked
        assert parked is not None
        if parked.pausing:
            parked.pausing = False
            self._keep_below(parked)
            self.restore.let_go(rec)
            rec.length = parked.length
            rec.state = LeaseState.PAUSED
            self.restore.settled.append(rec)
            return []
        copies = [n.copies[GPU] for n in rec.nodes]
        whole = parked.ok and rec.tail_ok and all(n.run is not None for n in rec.nodes)
        if not whole or not all(c is not None and c.ready for c in copies):
            return self.resume_without(rec)
        rec.frames = [c.frames[0] for c in copies if c is not None]
        rec.owned = [False] * len(rec.frames)
        rec.length = parked.length
        self.drop(rec)
        self.restore.activate(rec)
        return []

    def resume_without(self, rec: LeaseRecord) -> list[Op]:
        """A resuming lease goes on without what it has parked, on what is there."""
        for frame in rec.spare:
            self.operations.private.drop(frame)
        rec.spare = []
        self.restore.let_go(rec)
        return self._resume_shorter(rec)

    def _keep_below(self, parked: Parked) -> None:
        """Only pages that have come down are kept: a pause is there to free the device."""
        down = 0
        for node in parked.nodes:
            if not any(c is not None and c.ready for c in node.copies[CPU:CHECKPOINT]):
                break
            down += 1
        if down < len(parked.nodes) or not parked.ok:
            parked.ok = False
            self._free(parked)
        self.residency.keep(reversed(parked.nodes[down:]), -1)
        parked.kept = down

    def drop(self, rec: LeaseRecord) -> None:
        """Give back what a lease has parked; frames still in use return when that ends."""
        parked, rec.parked = rec.parked, None
        if parked is not None:
            self._give_back(parked)

    def _give_back(self, parked: Parked) -> None:
        self._free(parked)
        self.residency.keep(reversed(parked.nodes[: parked.kept]), -1)

    def _free(self, parked: Parked) -> None:
        res = self.residency
        for copy in parked.copies:
            del res.parked[copy]
            if copy.readers or copy.writer:
                res.orphans[copy] = None
            else:
                res.pools[CPU].give(copy.frames)
        parked.pages, parked.tail = {}, None
