"""Operations in flight: what each holds, and the one place where they end.

An operation holds copies (sources and targets), private device frames and live tails, never a
lease: whoever goes away meanwhile leaves these behind, and they return here, exactly once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.core.copies import CPU, DISK, TIERS, Copy
from kvtier.core.frames import FramePool
from kvtier.core.leases import Tail
from kvtier.core.ops import Kind, Op, OpKind, Part, Shortfall
from kvtier.core.residency import Residency
from kvtier.types import Tier

__all__ = ["Move", "Operations", "PrivateFrames", "Running"]


@dataclass(slots=True, eq=False)
class Move:
    """One part together with what it holds."""

    part: Part
    source: Copy | None = None
    targets: tuple[Copy, ...] = ()
    """Copies this part fills: the destination, and the host copy on the way."""
    reads: int = -1
    """A private device frame held while it is read,"""
    writes: int = -1
    """or written."""
    tail: Tail | None = None
    tail_src: Tail | None = None


@dataclass(slots=True, eq=False)
class Running:
    op: Op
    moves: Sequence[Move]
    packed: bool = False
    failed_at: int = -1
    """First part that was not delivered, once ended; -1: all were."""
    drops: dict[bytes, int] = field(default_factory=dict)
    """DROP: frames by key."""

    @property
    def delivered(self) -> Sequence[Move]:
        """Once ended."""
        return self.moves if self.failed_at < 0 else self.moves[: self.failed_at]


class PrivateFrames:
    """Device pages that belong to leases, counted: forks share them until one writes."""

    __slots__ = ("pool", "refs")

    def __init__(self, pool: FramePool) -> None:
        self.pool = pool
        self.refs: dict[int, int] = {}

    def take(self, n: int) -> list[int]:
        frames = list(self.pool.take(n))
        for f in frames:
            self.refs[f] = 1
        return frames

    def adopt(self, frame: int) -> None:
        """The tree takes the page over."""
        assert self.refs.pop(frame) == 1, "I1: adopting a page that others hold"

    def hold(self, frame: int) -> None:
        self.refs[frame] += 1

    def drop(self, frame: int) -> None:
        self.refs[frame] -= 1
        if not self.refs[frame]:
            del self.refs[frame]
            self.pool.give((frame,))


class Operations:
    """Starts operations and ends them."""

    def __init__(self, residency: Residency, tails: "TailPools") -> None:
        self.residency = residency
        self.private = PrivateFrames(residency.pools[0])
        self.tails = tails
        self.running: dict[int, Running] = {}
        self.last_id = 0
        self.bad_keys: dict[bytes, int] = {}
        """Quarantined keys -> frames, until their deletion is confirmed."""
        self.undeleted: dict[bytes, int] = {}
        """Keys whose DROP has failed."""
        self.read_only_disk = False
        self.suspects: dict[bytes, None] = {}
        """Keys quarantined lately, for ``explain``; bounded."""

    def next_id(self) -> int:
        """The id of the operation being planned; its targets are attached with it."""
        self.last_id += 1
        return self.last_id

    def start(
        self,
        op_id: int,
        kind: OpKind,
        moves: Sequence[Move],
        tokens: int = 0,
        *,
        must: bool = False,
    ) -> Op:
        op = Op(op_id, kind, tuple(m.part for m in moves), tokens, must)
        for m in moves:
            if m.source is not None:
                self.residency.use(m.source)
            for frame in (m.reads, m.writes):
                if frame >= 0:
                    self.private.hold(frame)
            for tail in (m.tail, m.tail_src):
                if tail is not None:
                    tail.ops += 1
        self.running[op_id] = Running(op, moves)
        return op

    def in_order(self, kind: OpKind, part: Part, tokens: int = 0) -> Op:
        """A COPY or CLEAR: done in stream order, before whatever uses these frames next, so it
        holds nothing."""
        return self.start(self.next_id(), kind, [Move(part)], tokens)

    def drop_op(self, *, again: bool = False) -> list[Op]:
        """A DROP for every key the disk should forget by now; with ``again`` also for those that
        it could not delete before."""
        keys, self.residency.drops = self.residency.drops, {}
        if again:
            keys, self.undeleted = {**self.undeleted, **keys}, {}
        if not keys or self.read_only_disk:
            return []
        parts = [Move(Part(Kind.HISTORY, Tier.DISK, (), Tier.DISK, (), key=k)) for k in keys]
        op = self.start(self.next_id(), OpKind.DROP, parts)
        self.running[op.id].drops = keys
        return [op]

    def origins(self, op_id: int) -> dict[Copy, Tier]:
        """Where each copy comes from that a running operation fills."""
        return {copy: m.part.source for m in self.running[op_id].moves for copy in m.targets}

    def reads(self, op_ids: Iterable[int]) -> list[int]:
        """Those that still read from the disk."""
        found = [self.running[i].op for i in sorted(op_ids) if i in self.running]
        return [op.id for op in found if any(part.source is Tier.DISK for part in op.parts)]

    # ------------------------------------------------------------------ endings
    def packed(self, op_id: int) -> None:
        """The device side of a PACK has been read: its sources may be reused."""
        run = self.running[op_id]
        assert run.op.kind is OpKind.PACK and not run.packed, "an op is packed once"
        run.packed = True
        for m in run.moves:
            self._release_sources(m)

    def finish(self, op_id: int, delivered: int, shortfall: Shortfall) -> Running:
        """An operation has ended with its first ``delivered`` parts done."""
        run = self.running.pop(op_id)
        kind, moves = run.op.kind, run.moves
        if kind in (OpKind.STORE, OpKind.DROP) and delivered < len(moves):
            delivered = 0
        if delivered < len(moves):
            run.failed_at = delivered
        for m in moves[:delivered]:
            for copy in m.targets:
                if copy.node is None:
                    copy.writer = 0
                else:
                    self.residency.arrived(copy)
                    if copy.tier == DISK:
                        self._overwritten(copy)
                self.residency.let_go(copy)
        if kind is OpKind.DROP:
            self._dropped(run.drops, done=run.failed_at < 0)
        unfilled = [c for m in moves[delivered:] for c in m.targets]
        for copy in unfilled:
            if copy.node is not None and copy.tier == DISK:
                self.residency.unfill(copy)
            copy.writer = 0
        for copy in unfilled:
            self.residency.lose(copy)
            self.residency.let_go(copy)
        if run.failed_at >= 0:
            source = moves[run.failed_at].source
            tier = CPU if kind is OpKind.PACK else DISK
            if kind is OpKind.RESTORE and source is not None:
                tier = source.tier
                if shortfall is Shortfall.SOURCE:
                    self._suspect(source)
            self.residency.faults[tier] += shortfall is not Shortfall.UNWANTED
        for m in moves:
            if not run.packed:
                self._release_sources(m)
            if m.writes >= 0:
                self.private.drop(m.writes)
            if m.tail is not None:
                self.tails.unuse(m.tail)
        return run

    def _release_sources(self, m: Move) -> None:
        if m.source is not None:
            self.residency.unuse(m.source)
        if m.reads >= 0:
            self.private.drop(m.reads)
        if m.tail_src is not None:
            self.tails.unuse(m.tail_src)

    def _suspect(self, source: Copy) -> None:
        """A bad source is not offered again."""
        if source.node is None or source.node.run is None:
            return
        if source.tier == DISK:
            disk = self.residency.disk
            assert disk is not None
            row = source.frames[0]
            key = disk.key(row)
            self.bad_keys[key] = int(disk.frames[row])
            self.suspects[key] = None
            while len(self.suspects) > 4096:
                del self.suspects[next(iter(self.suspects))]
            self.residency.quarantine.add(row)
        self.residency.lose(source)

    def _overwritten(self, copy: Copy) -> None:
        """What was bad or could not be deleted of a record is gone once it is stored again."""
        disk = self.residency.disk
        assert disk is not None
        if self.bad_keys and (frames := self.bad_keys.pop(disk.key(copy.frames[0]), 0)):
            disk.quarantined -= frames

    def _dropped(self, drops: dict[bytes, int], *, done: bool) -> None:
        """Frames of deleted records are free for good; of those that could not be deleted they
        stay counted, and the deletion is asked for again before the next STORE."""
        disk = self.residency.disk
        assert disk is not None
        for key, frames in drops.items():
            if done:
                disk.quarantined -= self.bad_keys.pop(key, 0)
            elif disk.find(key) < 0:  # else it has been stored again: that overwrites it
                if key not in self.bad_keys:
                    self.bad_keys[key] = frames
                    disk.quarantined += frames
                self.undeleted[key] = frames


class TailPools:
    """State slots and window pages: private device frames of layouts with tails."""

    __slots__ = ("states", "windows")

    def __init__(self, states: int, windows: int) -> None:
        self.states = FramePool(states)
        self.windows = FramePool(windows)

    def take(self, windows: range) -> Tail | None:
        """A new tail with these window pages, or None if there is no room."""
        if not self.states.free or self.windows.free < len(windows):
            return None
        (state,) = self.states.take()
        return Tail(state, dict(zip(windows, self.windows.take(len(windows)), strict=True)))

    def grow(self, tail: Tail, pages: range) -> None:
        missing = [p for p in pages if p not in tail.windows]
        tail.windows |= dict(zip(missing, self.windows.take(len(missing)), strict=True))

    def take_like(self, other: Tail, pages: range) -> Tail | None:
        """A new tail with those of ``pages`` that ``other`` holds, or None if there is no room."""
        held = [p for p in other.windows if p in pages]
        tail = self.take(range(0)) if self.windows.free >= len(held) else None
        if tail is not None:
            tail.windows = dict(zip(held, self.windows.take(len(held)), strict=True))
        return tail

    def cut(self, tail: Tail, below: int, stop: int | None = None) -> list[int]:
        """Free the window pages before page ``below``, and from ``stop`` on; returns them."""
        gone = [p for p in tail.windows if p < below or (stop is not None and p >= stop)]
        self.windows.give(tail.windows.pop(p) for p in gone)
        return gone

    def unuse(self, tail: Tail) -> None:
        tail.ops -= 1
        self._settle(tail)

    def disown(self, tail: Tail) -> None:
        tail.owned = False
        self._settle(tail)

    def _settle(self, tail: Tail) -> None:
        if not tail.owned and not tail.ops:
            self.states.give((tail.state,))
            self.windows.give(tail.windows.values())
            tail.windows = {}


def history_part(
    source: Copy,
    target: Copy,
    via: Copy | None = None,
    *,
    key: bytes = b"",
    parent: bytes = b"",
    tokens: bytes = b"",
) -> Part:
    """A page's history, or a checkpoint, from one copy to another."""
    node = target.node
    assert node is not None
    return Part(
        source.kind,
        TIERS[source.tier],
        source.frames,
        TIERS[target.tier],
        target.frames,
        via=() if via is None else via.frames,
        key=key,
        parent=parent,
        depth=node.depth,
        tokens=tokens,
    )
