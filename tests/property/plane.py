"""A data plane of fake bytes for the core: every row says for which tokens it was written.

Copies run late, in any order, wholly, partly or not at all; what is not delivered leaves garbage
behind; free frames are poisoned.  A lease that would read anything but its own prefix is the
failure every test here looks for (I8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.core.geometry import Geometry
from kvtier.core.leases import LeaseRecord
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.seams import ENTRY
from kvtier.types import LeaseState, Span, Tier

GARBAGE = "garbage"
Item = int | tuple[int, bytes, int]  # a token, or one of a span: (token, digest, place in it)
Row = tuple[int, Any, tuple[Item, ...]]  # (epoch, identity, prefix)


def items(tokens: Sequence[int], spans: Sequence[Span]) -> tuple[Item, ...]:
    """What the rows of these tokens depend on: inside a span also its content."""
    out: list[Item] = list(tokens)
    for span in spans:
        for i in range(span.start, min(span.stop, len(out))):
            out[i] = (tokens[i], span.digest, i - span.start)
    return tuple(out)


def tokens_of(rec: LeaseRecord) -> tuple[int, ...]:
    return tuple(np.frombuffer(bytes(rec.tokens), dtype="<i4").tolist())


def prefix_of(rec: LeaseRecord) -> tuple[Item, ...]:
    """What a lease stands on."""
    return items(tokens_of(rec), rec.spans)


class FakeDisk:
    """Records by key; refuses orphans, as a store must."""

    def __init__(self) -> None:
        self.records: dict[bytes, tuple[bytes, int, int, bool, bytes, Any]] = {}

    def put(self, parts: tuple[Part, ...], payloads: list[Any], frames: int) -> bool:
        group: dict[bytes, Any] = {}
        for part, payload in zip(parts, payloads, strict=True):
            tail = part.kind is Kind.CHECKPOINT
            needs = tail or part.depth > 1
            if needs and part.parent not in self.records and part.parent not in group:
                return False
            group[part.key] = (
                part.parent,
                part.depth,
                frames if tail else 1,
                tail,
                part.tokens,
                payload,
            )
        for key, record in group.items():
            if (
                self.records.get(key, (None,) * 6)[5] != record[5]
            ):  # other bytes: not "already there"
                self.records[key] = record
        return True

    def delete(self, keys: list[bytes]) -> bool:
        """Refuses to leave a record behind without its parent."""
        gone = set(keys)
        for key, (parent, depth, _, tail, _, _) in self.records.items():
            if key not in gone and (tail or depth > 1) and parent in gone:
                return False
        for key in keys:
            self.records.pop(key, None)
        return True

    def scan(self) -> np.ndarray:
        out = np.zeros(len(self.records), dtype=ENTRY)
        for i, (key, (parent, depth, frames, tail, _, _)) in enumerate(self.records.items()):
            out[i] = (np.void(key), np.void(parent), i, depth, frames, tail)
        return out

    def orphans(self) -> list[bytes]:
        return [
            k
            for k, (parent, depth, _, tail, _, _) in self.records.items()
            if (tail or depth > 1) and parent not in self.records
        ]


class FakePlane:
    """Runs the core's operations on fake bytes."""

    def __init__(self, geometry: Geometry, disk: FakeDisk) -> None:
        self.geometry = geometry
        self.disk = disk
        self.history: dict[tuple[Tier, int], Any] = {}
        self.checkpoints: dict[int, Any] = {}  # device checkpoint frames
        self.windows: dict[int, dict[int, Any]] = {}
        self.states: dict[int, Any] = {}
        self.ring = geometry.max_rejected + 1 if geometry.max_rejected is not None else 0
        """Rows of a state, by position: the one that is read and as many as may be rejected.  0: a
        state is the last token's row, and whoever rejects tokens puts it right."""
        self.live: dict[int, Op] = {}
        self.read: dict[tuple[int, int], Any] = {}  # (op, part) -> what its source held when read

    # ------------------------------------------------------------------ operations
    def start(self, ops: list[Op], *, early: bool = False) -> None:
        for op in ops:
            assert op.id not in self.live, "an op id used twice"
            self.live[op.id] = op
            if op.kind is OpKind.COPY:
                for part in op.parts:
                    self._write(part, self._source(part))
            elif op.kind is OpKind.CLEAR:
                for part in op.parts:
                    self.states[part.dst[0]] = {} if self.ring else ()
            elif op.kind in (OpKind.PACK, OpKind.RESTORE):
                for i, part in enumerate(op.parts):
                    if early and op.kind is OpKind.RESTORE:
                        self.read[op.id, i] = self._source(part)
                    self._write(part, GARBAGE)  # half-written until delivered

    def pack(self, op_id: int) -> None:
        for i, part in enumerate(self.live[op_id].parts):
            self.read[op_id, i] = value = self._source(part)
            assert value not in (None, GARBAGE), "a pack reads what is not there"

    @property
    def oldest(self) -> int:
        """The operation that was started first.  Ids do not tell: a DROP that makes room for a
        STORE is started before it and numbered after it."""
        return next(iter(self.live))

    def can_finish(self, op_id: int) -> bool:
        """STORE and DROP take effect in the order of their start."""
        disk = [i for i, op in self.live.items() if op.kind in (OpKind.STORE, OpKind.DROP)]
        return op_id not in disk or op_id == disk[0]

    def finish(self, op_id: int, delivered: int | None) -> int:
        """Carry an operation out up to ``delivered`` parts (None: all); returns how many were."""
        op = self.live[op_id]
        assert self.can_finish(op_id), "STORE and DROP take effect in the order of their start"
        self.bad_source = False
        n = len(op.parts) if delivered is None else min(delivered, len(op.parts))
        if op.kind is OpKind.DROP:
            n = len(op.parts) if n == len(op.parts) else 0
            if n and not self.disk.delete([p.key for p in op.parts]):
                n = 0
        elif op.kind is OpKind.STORE:
            n = len(op.parts) if n == len(op.parts) else 0
            payloads = [self._source(p) for p in op.parts]
            assert None not in payloads and GARBAGE not in payloads, "a store of what is not there"
            if n and not self.disk.put(op.parts, payloads, self.geometry.checkpoint_frames):
                n = 0
        elif op.kind is OpKind.RESTORE:
            for i, part in enumerate(op.parts[:n]):
                value = self.read.get((op_id, i), None) or self._source(part)
                if value is None or value == GARBAGE:
                    assert part.source is Tier.DISK, "a restore of what is not there"
                    n, self.bad_source = i, True
                    break
                self._write(part, value)
        elif op.kind is OpKind.PACK:
            for i, part in enumerate(op.parts[:n]):
                self._write(part, self.read.get((op_id, i)) or self._source(part))
        del self.live[op_id]
        for i in range(len(op.parts)):
            self.read.pop((op_id, i), None)
        return n

    def _source(self, part: Part) -> Any:
        if part.source is Tier.DISK:
            record = self.disk.records.get(part.key)
            if record is None or record[0] != part.parent or record[4] != part.tokens:
                return None
            return record[5]
        if part.live_src:
            state, *windows = part.src
            pages = {i: dict(self.windows.get(f, {})) for i, f in enumerate(windows) if f >= 0}
            content = self.states.get(state)
            return ("tail", dict(content) if isinstance(content, dict) else content, pages)
        if part.kind is Kind.CHECKPOINT and part.source is Tier.GPU:
            return self.checkpoints.get(part.src[0])
        value = self.history.get((part.source, part.src[0]))
        return list(value) if isinstance(value, list) else value

    def _write(self, part: Part, value: Any) -> None:
        if part.target is Tier.DISK:
            return
        if part.live_dst:
            self._write_tail(part, value)
        elif part.target is Tier.GPU and part.kind is Kind.CHECKPOINT:
            self.checkpoints[part.dst[0]] = value
        elif part.target is Tier.GPU:
            self.history[Tier.GPU, part.dst[0]] = list(value) if isinstance(value, list) else value
        else:
            for frame in part.dst:
                self.history[Tier.CPU, frame] = value
        for frame in part.via:
            self.history[Tier.CPU, frame] = value

    def _write_tail(self, part: Part, value: Any) -> None:
        state, *windows = part.dst
        if value == GARBAGE:
            self.states[state] = GARBAGE
            for frame in windows:
                if frame >= 0:
                    self.windows[frame] = {}
            return
        _, content, pages = value
        if isinstance(content, dict):  # of a ring a checkpoint has a part, and leaves the rest
            before = self.states.get(state)
            stays = before if part.kind is Kind.CHECKPOINT and isinstance(before, dict) else {}
            content = {**stays, **content}
        self.states[state] = content
        for index, frame in enumerate(windows):
            if frame >= 0:
                self.windows[frame] = dict(pages.get(index, {}))

    # ------------------------------------------------------------------ the "kernels"
    def write_token(self, core: CacheCore, rec: LeaseRecord, row: Row) -> None:
        """One token's rows, at position ``len(prefix) - 1``, as a forward pass writes them."""
        position, page = len(row[2]) - 1, self.geometry.page_tokens
        frame = rec.frames[position // page]
        assert rec.owned[position // page], "a kernel would write a shared page"
        assert core.operations.private.refs[frame] == 1, "a kernel would write a forked page"
        assert core.block_tables[rec.row, position // page] == frame
        held = self.history.get((Tier.GPU, frame))
        rows = list(held)[: position % page] if isinstance(held, list) else []
        self.history[Tier.GPU, frame] = [*rows, row]
        g = self.geometry
        if g.window:
            assert rec.tail is not None
            for p in range(max(0, position - g.window + 1), position + 1):
                assert p // g.window_page in rec.tail.windows, "a window page a query reads is gone"
            window = rec.tail.windows[position // g.window_page]
            assert core.window_tables[rec.row, position // g.window_page] == window
            self.windows.setdefault(window, {})[position] = row
        if g.has_tails:
            assert rec.tail is not None
            self._write_state(rec.tail.state, position, row)

    def _write_state(self, slot: int, position: int, row: Row) -> None:
        if not self.ring:
            self.states[slot] = row
            return
        held = self.states.get(slot)
        rows = dict(held) if isinstance(held, dict) else {}
        rows[position % self.ring] = row
        self.states[slot] = rows

    def _state(self, slot: int, length: int) -> Any:
        """What the next token reads of a state at ``length`` tokens."""
        held = self.states[slot]
        if not self.ring:
            return held
        if not length:
            return ()
        return held.get((length - 1) % self.ring) if isinstance(held, dict) else held

    def capture(self, rec: LeaseRecord, position: int, frame: int) -> None:
        """Copy the live tail, which stands at ``position`` tokens, to a checkpoint frame."""
        assert rec.tail is not None
        g = self.geometry
        pages: dict[int, dict[int, Any]] = {}
        first = max(0, position - g.window_kept + 1)
        for p in range(first, position) if g.window else ():
            index = p // g.window_page - first // g.window_page
            row = self.windows[rec.tail.windows[p // g.window_page]][p]
            pages.setdefault(index, {})[p] = row
        state = self._state(rec.tail.state, position)
        kept = {(position - 1) % self.ring: state} if self.ring else state
        self.checkpoints[frame] = ("tail", kept, pages)

    # ------------------------------------------------------------------ checks
    def poison(self, core: CacheCore) -> None:
        """Nothing may depend on a free frame."""
        for tier, slot in ((Tier.GPU, 0), (Tier.CPU, 1)):
            for frame in core.residency.pools[slot]._free:
                self.history[tier, frame] = GARBAGE
        for frame in core.residency.pools[3]._free:
            self.checkpoints[frame] = GARBAGE
        for frame in core.tails.windows._free:
            self.windows[frame] = {}
        for slot in core.tails.states._free:
            self.states[slot] = GARBAGE
        for rec in core.leases.values():
            if rec.state is LeaseState.ACTIVE:
                self._poison_rejected(rec)

    def _poison_rejected(self, rec: LeaseRecord) -> None:
        """Nor on rows past a lease's committed tokens, whatever was drafted there."""
        page, g = self.geometry.page_tokens, self.geometry
        for i in range(rec.length // page, len(rec.frames)):
            rows = self.history.get((Tier.GPU, rec.frames[i]))
            if isinstance(rows, list) and rec.owned[i]:
                kept = rows[: max(0, rec.length - i * page)]
                self.history[Tier.GPU, rec.frames[i]] = [
                    *kept,
                    *[GARBAGE] * (len(rows) - len(kept)),
                ]
        if rec.tail is None:
            return
        for frame in rec.tail.windows.values() if g.window else ():
            held = self.windows.get(frame, {})
            self.windows[frame] = {p: r if p < rec.length else GARBAGE for p, r in held.items()}
        held = self.states.get(rec.tail.state)
        if self.ring and isinstance(held, dict):
            last = (rec.length - 1) % self.ring if rec.length else -1
            self.states[rec.tail.state] = {k: r if k == last else GARBAGE for k, r in held.items()}

    def check_lease(self, core: CacheCore, rec: LeaseRecord, epoch: int) -> None:
        """Every byte an active lease may read was written for exactly its tokens."""
        if rec.state is not LeaseState.ACTIVE:
            return
        page = self.geometry.page_tokens
        prefix = prefix_of(rec)
        assert len(prefix) == rec.length

        def right(row: Any, upto: int) -> bool:
            return (
                isinstance(row, tuple)
                and row[0] >= epoch
                and row[1:] == (rec.identity, prefix[:upto])
            )

        for i in range(rec.length):
            rows = self.history[Tier.GPU, rec.frames[i // page]]
            assert isinstance(rows, list) and right(rows[i % page], i + 1), (
                f"I8: lease {rec.id} would read {rows!r} at {i} of {prefix}"
            )
        if self.geometry.has_tails:
            assert rec.tail is not None
            state = self._state(rec.tail.state, rec.length)
            assert right(state, rec.length) if rec.length else state == (), (
                f"I8: lease {rec.id} stands on state {state!r}, not {prefix}"
            )
        g = self.geometry
        if g.window:
            assert rec.tail is not None
            for p in range(max(0, rec.length - g.window_kept + 1), rec.length):
                row = self.windows[rec.tail.windows[p // g.window_page]].get(p)
                assert right(row, p + 1), f"I8: lease {rec.id}: window row {p} is {row!r}"
