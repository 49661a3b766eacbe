"""Fakes for both seams, and what else a test of a server on kvtier needs.

``ManualTransfer`` and ``MemoryStore`` stand in for the data plane and the disk; ``FaultyTransfer``
makes a real data plane run late, out of order or not at all; ``token_streams`` draws prompts.
Importing this module imports neither torch nor hypothesis.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.errors import CacheClosed, StoreError
from kvtier.seams import ENTRY, Read, Record
from kvtier.types import Tier

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

    from kvtier.data import DevicePool, DeviceTransfer, HostArena

__all__ = ["Fate", "FaultyTransfer", "ManualTransfer", "MemoryStore", "token_streams"]

Packed = Callable[[], None]
Done = Callable[[int, BaseException | None], None]


# --------------------------------------------------------------------------- the store


@dataclass(slots=True, eq=False)
class _Kept:
    record: Record
    data: bytearray
    tick: int = 0
    bad: bool = False


class MemoryStore:
    """A ``Store`` in a dict, stricter than a real one has to be.

    Refuses records whose parent is missing or whose checksum is wrong, and to delete a record that
    another still needs; like a disk that reads in place, it leaves the bytes of a record that
    fails in the caller's views.  Thread-safe.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.capacity = capacity
        self._kept: dict[bytes, _Kept] = {}
        self._failures = 0
        self._closed = False
        self._lock = threading.Lock()

    def put_group(self, records: Sequence[Record]) -> None:
        with self._lock:
            self._check_usable()
            group: dict[bytes, _Kept] = {}
            for record in records:
                known = self._kept.get(record.key)
                same = known is not None and known.record.checksum == record.checksum
                if record.key in group or (known is not None and same and not known.bad):
                    continue
                self._check_parent(record, group)
                data = bytearray(b"".join(record.payload)[: record.size])
                if xxhash.xxh3_128_digest(data) != record.checksum:
                    raise StoreError(f"record {record.key.hex()}: payload and checksum differ")
                group[record.key] = _Kept(record, data)
            after = {**self._kept, **group}
            if sum(len(k.record.payload) for k in after.values()) > self.capacity:
                raise StoreError(f"the store is full: {self.capacity} frames")
            self._kept = after

    def read_into(self, reads: Sequence[Read]) -> list[bool]:
        with self._lock:
            self._check_usable()
            return [self._read(read) for read in reads]

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._check_usable()
            gone = {key for key in keys if key in self._kept}
            for key, kept in self._kept.items():
                parent = kept.record.parent
                if key not in gone and parent in gone:
                    raise StoreError(f"record {parent.hex()} is needed by {key.hex()}, which stays")
            for key in gone:
                del self._kept[key]

    def touch(self, ticks: Sequence[tuple[bytes, int]]) -> None:
        with self._lock:
            self._check_usable()
            for key, tick in ticks:
                if key in self._kept:
                    self._kept[key].tick = tick

    def scan(self) -> npt.NDArray[np.void]:
        with self._lock:
            self._check_usable()
            rows = [
                (
                    kept.record.key,
                    kept.record.parent,
                    kept.tick,
                    kept.record.depth,
                    len(kept.record.payload),
                    kept.record.component == "checkpoint",
                )
                for kept in self._kept.values()
                if not kept.bad
            ]
        return np.array(rows, dtype=ENTRY)

    def close(self) -> None:
        """Later calls raise StoreError.  The records stay, see ``reopen``."""
        with self._lock:
            self._closed = True

    # What a test does to it

    def reopen(self) -> None:
        """As if another process had opened the same directory."""
        with self._lock:
            self._closed = False

    def fail_next(self, calls: int = 1) -> None:
        """The next ``calls`` calls raise StoreError and change nothing."""
        with self._lock:
            self._failures = calls

    def corrupt(self, key: bytes, at: int = 0) -> None:
        """Flip one bit of a record's payload."""
        with self._lock:
            self._kept[key].data[at] ^= 1

    def keys(self, *, quarantined: bool = False) -> set[bytes]:
        """Keys that are offered, or those of records that failed."""
        with self._lock:
            return {key for key, kept in self._kept.items() if kept.bad == quarantined}

    def _read(self, read: Read) -> bool:
        kept = self._kept.get(read.key)
        if kept is None or kept.bad:
            return False
        left = memoryview(kept.data)
        for view in read.views:
            count = min(len(view), len(left), read.size)
            view[:count] = left[:count]
            left = left[count:]
        kept.bad = not (
            kept.record.parent == read.parent
            and kept.record.tokens == read.tokens
            and kept.record.size == read.size == len(kept.data)
            and xxhash.xxh3_128_digest(kept.data) == kept.record.checksum
        )
        return not kept.bad

    def _check_parent(self, record: Record, group: dict[bytes, _Kept]) -> None:
        if record.component == "history" and record.depth == 1:
            return
        parent = group.get(record.parent) or self._kept.get(record.parent)
        if parent is None or parent.bad:
            raise StoreError(f"record {record.key.hex()} has no parent here")

    def _check_usable(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")
        if self._failures:
            self._failures -= 1
            raise StoreError("injected failure")


# --------------------------------------------------------------------------- transfers


class ManualTransfer:
    """Holds every op until the test says how it ends.  No torch, no threads, no bytes."""

    def __init__(self) -> None:
        self.pending: list[Op] = []
        """Started and not finished, oldest first."""
        self.started: list[Op] = []
        """All ops ever, in order."""
        self.fences = 0
        self.closed = False
        self._packed: dict[int, Packed] = {}
        self._done: dict[int, Done] = {}

    def fence(self, stream: object | None) -> None:
        self.fences += 1

    def start(self, op: Op, *, packed: Packed, done: Done) -> None:
        if self.closed:
            if op.kind is OpKind.PACK:
                packed()
            done(0, CacheClosed("the cache has been closed"))
            return
        self.started.append(op)
        self.pending.append(op)
        self._done[op.id] = done
        if op.kind is OpKind.PACK:
            self._packed[op.id] = packed

    def pack(self, op: Op) -> None:
        """The sources of a PACK may be reused from here on."""
        if op.id not in self._packed:
            raise ValueError(f"op {op.id} is not a PACK whose sources are still needed")
        self._packed.pop(op.id)()

    def finish(
        self, op: Op, delivered: int | None = None, error: BaseException | None = None
    ) -> None:
        """End an op with its first ``delivered`` parts (None: all, or none if ``error``).

        ``packed`` is called before, if the test has not done it.
        """
        if op.id not in self._done:
            raise ValueError(f"op {op.id} is not pending")
        if delivered is None:
            delivered = 0 if error is not None else len(op.parts)
        if not 0 <= delivered <= len(op.parts):
            raise ValueError(f"op {op.id} has {len(op.parts)} parts, not {delivered}")
        if op.kind in (OpKind.STORE, OpKind.DROP) and delivered not in (0, len(op.parts)):
            raise ValueError(f"a {op.kind.value} delivers all of its parts or none")
        self.pending = [other for other in self.pending if other.id != op.id]
        if op.id in self._packed:
            self.pack(op)
        self._done.pop(op.id)(delivered, error)

    def finish_all(self) -> None:
        """End every op in full, oldest first, those included that completions start."""
        while self.pending:
            self.finish(self.pending[0])

    def close(self) -> None:
        self.finish_all()
        self.closed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one op in a ``FaultyTransfer``.  Time is counted in ticks."""

    start_after: int = 0
    """Ticks before the op is run at all."""
    report_after: int = 0
    """Ticks between its end and ``done``."""
    deliver: int | None = None
    """Run only that many leading parts (STORE, DROP: all, or none at all)."""
    error: BaseException | None = None
    """What ``done`` is told if parts are missing."""
    torn: bool = False
    """Fill the targets of what is missing with 0xFF before ``done``, as a copy cut short might."""


@dataclass(slots=True, eq=False)
class _Held:
    ticks: int
    ordered: bool
    """A write to the store: it must not overtake another."""
    run: Callable[[], None]


class FaultyTransfer:
    """A ``DeviceTransfer`` whose ops run late, are reported late, end early or fail.

    The n-th op that moves bytes between tiers gets the n-th fate; behind the last one all goes
    well.  COPY and CLEAR are left alone, and STORE and DROP keep their order among each other,
    as ``Transfer`` promises.  Every ``start`` is a tick; ``tick`` and ``drain`` let time pass
    without one.  The same fates and the same calls give the same ends, but not the same timing:
    the copies themselves run on real threads.
    """

    def __init__(self, inner: "DeviceTransfer", fates: Iterable[Fate] = ()) -> None:
        self.inner = inner
        self._fates = iter(fates)
        self._held: list[_Held] = []
        self._open_ops = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def pool(self) -> "DevicePool":
        return self.inner.pool

    @property
    def host(self) -> "HostArena":
        return self.inner.host

    def fence(self, stream: object | None) -> None:
        self.inner.fence(stream)

    def start(self, op: Op, *, packed: Packed, done: Done) -> None:
        if op.kind in (OpKind.COPY, OpKind.CLEAR):
            self.inner.start(op, packed=packed, done=done)
            return
        with self._changed:
            self._open_ops += 1
            fate = next(self._fates, Fate())
            self._held.append(self._launch(op, fate, packed, done))
        self.tick()

    def tick(self) -> None:
        """Let time pass: whatever falls due runs now, on this thread or the data plane's."""
        due: list[_Held] = []
        with self._changed:
            writes_wait = False
            for held in list(self._held):
                held.ticks -= 1
                if held.ticks > 0 or (held.ordered and writes_wait):
                    writes_wait |= held.ordered
                    continue
                self._held.remove(held)
                if held.ordered:
                    held.run()  # only queues, and under the lock, which keeps the order
                else:
                    due.append(held)
        for held in due:
            held.run()

    def drain(self, timeout_s: float = 30.0) -> None:
        """Let time pass until every op has ended, those included that completions start.

        Raises TimeoutError if some do not.
        """
        while True:
            self.tick()
            with self._changed:
                if not self._open_ops:
                    return
                if not self._held and not self._changed.wait(timeout_s):
                    raise TimeoutError(f"{self._open_ops} ops have not ended")

    def close(self) -> None:
        self.drain()
        self.inner.close()

    def _launch(self, op: Op, fate: Fate, packed: Packed, done: Done) -> _Held:
        keep = len(op.parts) if fate.deliver is None else min(fate.deliver, len(op.parts))
        write = op.kind in (OpKind.STORE, OpKind.DROP)
        if write and keep < len(op.parts):
            keep = 0

        def end(delivered: int, error: BaseException | None) -> None:
            if fate.torn and op.kind in (OpKind.PACK, OpKind.RESTORE):
                for part in op.parts[delivered:]:
                    self._spoil(part)
            if delivered < len(op.parts) and error is None:
                error = fate.error
            report = _Held(fate.report_after, False, lambda: self._report(done, delivered, error))
            if not fate.report_after:
                report.run()
                return
            with self._changed:
                self._held.append(report)
                self._changed.notify_all()

        def run() -> None:
            if keep:
                self.inner.start(replace(op, parts=op.parts[:keep]), packed=packed, done=end)
                return
            if op.kind is OpKind.PACK:
                packed()
            end(0, None)

        return _Held(fate.start_after + 1, write and keep > 0, run)

    def _report(self, done: Done, delivered: int, error: BaseException | None) -> None:
        done(delivered, error)
        with self._changed:
            self._open_ops -= 1
            self._changed.notify_all()

    def _spoil(self, part: Part) -> None:
        if part.target is Tier.GPU:
            live = part.live_dst or part.kind is Kind.TAIL
            self.pool.poison(part.kind, part.dst, live=live)
        elif part.target is Tier.CPU:
            self.host.poison(part.dst)
        self.host.poison(part.via)


# --------------------------------------------------------------------------- prompts


def token_streams(
    *, page_tokens: int = 4, max_pages: int = 6, max_prompts: int = 6, vocab: int = 4
) -> "SearchStrategy[list[list[int]]]":
    """A Hypothesis strategy for prompts that share prefixes.

    Each is new, or goes on from some place in an earlier one: at a page's edge, one token beside
    it, or anywhere; the small vocabulary makes prompts agree by chance as well.
    """
    from hypothesis import strategies as st

    longest = page_tokens * max_pages

    @st.composite
    def draw_prompts(draw: "DrawFn") -> list[list[int]]:
        prompts: list[list[int]] = []
        for _ in range(draw(st.integers(1, max_prompts))):
            base = draw(st.sampled_from([[], *prompts]))
            edges = [e + d for e in range(0, len(base) + 1, page_tokens) for d in (-1, 0, 1)]
            near = st.sampled_from([e for e in edges if 0 <= e <= len(base)])
            cut = draw(near | st.integers(0, len(base)))
            room = max(1, longest - cut)
            tail = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=room))
            prompts.append((base[:cut] + tail)[:longest])
        return prompts

    return draw_prompts()
