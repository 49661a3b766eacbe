"""The real ``Cache`` over a data plane whose copies run late, out of order, partly or not at all:
every byte a lease may read was written for exactly its tokens, whatever happens in between.

A row holds a digest of all tokens up to its own, of the tenant and of the weights' epoch, so any
row of anything else is seen.  Free frames and slots behind a lease's last token are poisoned after
every rule.  The data plane's own threads move the bytes, but the ends of its ops are told by the
test's thread, in order, and time passes only where a rule says so: the same choices lead to the
same state.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvtier
from kvtier import LeaseState, Tier
from kvtier.assembly import geometry_of
from kvtier.core.geometry import Geometry
from kvtier.core.leases import LeaseRecord
from kvtier.core.ops import Kind, OpKind
from kvtier.data.transfer import DeviceTransfer
from kvtier.errors import LeaseError, LeaseNotReady, OutOfPages, StoreError
from kvtier.layouts import Layout
from kvtier.layouts.base import Component, Share
from kvtier.seams import Record
from kvtier.testing import Fate, FaultyTransfer, MemoryStore
from kvtier.types import Identity

REACHED: Counter[str] = Counter()
PAGE, ROW = 4, 8
STATES = {"last": 1, "group": 0}
"""Rings of a page's length, and how many rows a checkpoint holds: of one the last row is read, of
the other those of an open group of 2."""
WHO = (Identity(), Identity(tenant="b"))
IN_STAGES = kvtier.RestorePolicy(prefill_tokens_per_s=1e-3)
"""All is worth loading, whatever the clock says, and nobody loses patience by himself."""
RESTORES = (None, IN_STAGES, kvtier.RestorePolicy("best_effort"))
Rows = npt.NDArray[np.uint8]


def layout_of(window: int | None, more: int) -> Layout:
    """History of two strides; with a window also rings of states, of which checkpoints hold the
    last row or nothing, and window pages of 2, of which they hold ``more`` than are read."""

    def part(
        name: str,
        share: Share,
        stride: int,
        slots: int,
        window: int | None = None,
        kept: int | None = None,
    ) -> Component:
        return Component(
            name=name,
            share=share,
            tokens_per_slot=stride,
            slots_per_page=slots,
            slot_bytes=ROW,
            layers=(0, 1),
            dtype="uint8",
            window=window,
            checkpoint_slots=kept,
        )

    parts = [part("full", Share.HISTORY, 1, PAGE), part("half", Share.HISTORY, 2, 2)]
    if window is not None:
        parts += [part(name, Share.TAIL, 1, PAGE, kept=kept) for name, kept in STATES.items()]
        if window:
            kept = window // 2 * 2 + 2 * more if more else None
            parts.append(part("window", Share.TAIL, 1, 2, window, kept))
    return Layout(name="digests", page_tokens=PAGE, components=tuple(parts), max_draft=2)


class WatchedStore(MemoryStore):
    """Remembers when it was asked for what the core must never ask for."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.violations: list[str] = []
        self.tampered = False
        self.forgets = True
        """Every deletion so far was done."""
        self.withheld: set[bytes] = set()
        """Keys of records that an op was to bring and did not.  What was queued behind it, as
        their children, is refused then, and rightly so."""

    def put_group(self, records: Any) -> None:
        failing = self._failures
        keys = {record.key for record in records}
        try:
            super().put_group(records)
        except StoreError as error:
            orphans = any(record.parent in self.withheld for record in records)
            if not failing and not self.tampered and self.forgets and not orphans:
                self.violations.append(str(error))
            self.withheld |= keys
            raise
        self.withheld -= keys

    def delete(self, keys: Any) -> None:
        self.forgets &= not self._failures
        super().delete(keys)

    def record(self, index: int) -> Record | None:
        keys = sorted(self.keys())
        return self._kept[keys[index % len(keys)]].record if keys else None


class InOrder:
    """A ``DeviceTransfer`` whose completions wait until ``tell``, which calls them one by one in
    the order in which the ops were started."""

    def __init__(self, inner: DeviceTransfer) -> None:
        self.inner = inner
        self.pool, self.host, self.fence = inner.pool, inner.host, inner.fence
        self._started = 0
        self._told: list[tuple[tuple[int, int], Callable[[], None]]] = []
        self._changed = threading.Condition()

    def start(self, op: kvtier.Op, *, packed: Any, done: Any) -> None:
        if op.kind in (OpKind.COPY, OpKind.CLEAR):
            self.inner.start(op, packed=packed, done=done)
            return
        if op.kind is OpKind.PACK or any(Tier.DISK in (p.source, p.target) for p in op.parts):
            self.wait()  # whether staging has room, and whom a fault of the store hits
        self._started += 1
        number = self._started
        self.inner.start(
            op,
            packed=lambda: self._note((number, 0), packed),
            done=lambda *end: self._note((number, 1), partial(done, *end)),
        )

    def _note(self, turn: tuple[int, int], call: Callable[[], None]) -> None:
        with self._changed:
            self._told.append((turn, call))

    def wait(self) -> None:
        """Until the threads have done all they were given."""
        deadline = time.monotonic() + 300
        while self.inner._open_ops:
            assert time.monotonic() < deadline, "an op does not end"
            time.sleep(0.0001)

    def tell(self) -> bool:
        """Whether there was something to tell."""
        self.wait()
        with self._changed:
            told, self._told = sorted(self._told, key=lambda each: each[0]), []
        for _, call in told:
            call()
        return bool(told)

    def close(self) -> None:
        self.inner.close()


class Plane(FaultyTransfer):
    """Takes each op's fate from a queue, and counts them."""

    inner: InOrder  # type: ignore[assignment]

    def __init__(
        self, inner: DeviceTransfer, fates: deque[Fate], store: WatchedStore | None
    ) -> None:
        super().__init__(InOrder(inner), self._next())  # type: ignore[arg-type]
        self._queue = fates
        self._store = store
        self._op: kvtier.Op | None = None

    def start(self, op: kvtier.Op, *, packed: Any, done: Any) -> None:
        self._op = op  # ops are started one at a time
        super().start(op, packed=packed, done=done)

    def drain(self, timeout_s: float = 30.0) -> None:
        while self._open_ops:
            self.tick()
            while self.inner.tell():
                pass

    def _next(self) -> Iterator[Fate]:
        while True:
            fate = self._queue.popleft() if self._queue else Fate()
            op = self._op
            if op is not None and op.kind is OpKind.DROP and fate.deliver is not None:
                assert self._store is not None
                self._store.forgets = False
                REACHED["not forgotten"] += 1
            if op is not None and op.kind is OpKind.STORE and fate.deliver is not None:
                assert self._store is not None
                self._store.withheld.update(part.key for part in op.parts)
                REACHED["not stored"] += 1
            REACHED["late"] += bool(fate.start_after)
            REACHED["reported late"] += bool(fate.report_after)
            REACHED["cut short"] += fate.deliver is not None
            yield fate


class Silent:
    """An alarm that never rings: ``lose_patience`` does."""

    def set(self, when: float) -> None:
        pass

    def stop(self) -> None:
        pass


@dataclass(eq=False)
class Held:
    """A lease and what the test knows of it."""

    lease: kvtier.Lease
    identity: Identity
    epoch: int
    tokens: tuple[int, ...]
    """As it was opened; what is committed is asked of the lease."""


def digests(epoch: int, identity: Identity, tokens: tuple[int, ...]) -> Rows:
    """(tokens, 8) One row per prefix."""
    out, value = np.zeros((len(tokens), ROW), dtype=np.uint8), f"{epoch} {identity}".encode()
    for i, token in enumerate(tokens):
        value = blake2b(value + b"%d" % token, digest_size=ROW).digest()
        out[i] = np.frombuffer(value, dtype=np.uint8)
    return out


class CacheMachine(RuleBasedStateMachine):
    # ------------------------------------------------------------------ making
    @initialize(
        window=st.sampled_from([None, None, None, 0, 3, 6]),
        more=st.integers(0, 2),
        gpu=st.integers(4, 12),
        cpu=st.integers(2, 12),
        disk=st.sampled_from([0, 4, 9, 99]),
        staging=st.sampled_from([1, 3, 99]),
        wait=st.booleans(),
        eviction=st.sampled_from(["adaptive", "lru", "s3fifo"]),
        dense=st.booleans(),
    )
    def start(
        self,
        window: int | None,
        more: int,
        gpu: int,
        cpu: int,
        disk: int,
        staging: int,
        wait: bool,
        eviction: Any,
        dense: bool,
    ) -> None:
        torch.set_num_threads(1)
        self.layout = layout_of(window, more)
        tails = 0
        if window is not None:
            with pytest.raises(kvtier.ConfigError) as told:
                geometry_of(self.layout, kvtier.CacheConfig(gpu_bytes=1, max_leases=5), None)
            tails = int(str(told.value).split("set gpu_bytes to ")[1].split()[0])
        frame = self.layout.frame_bytes()
        self.config = kvtier.CacheConfig(
            gpu_bytes=tails + gpu * self.layout.page_bytes(),
            cpu_bytes=cpu * frame,
            max_leases=5,
            staging_bytes=max(staging, self.layout.tail_frames(9)) * frame,
            on_full="wait" if wait else "skip",
            wait_s=300.0,
            eviction=eviction,
            checkpoints=kvtier.Dense() if dense else kvtier.Sparse(every_pages=2),
            io_threads=1,
        )
        self.store = WatchedStore(disk) if disk else None
        self.fates: deque[Fate] = deque()
        self.epoch = 0
        self.fresh = 100
        self.now = 0.0
        self.known: list[tuple[Identity, tuple[int, ...]]] = []
        self.open()

    def open(self) -> None:
        stores = {Tier.DISK: self.store} if self.store is not None else {}
        self.geometry: Geometry = geometry_of(self.layout, self.config, self.store)
        inner = DeviceTransfer(
            self.layout, self.geometry, device="cpu", store=self.store, config=self.config
        )
        self.transfer = Plane(inner, self.fates, self.store)
        self.cache = kvtier.Cache(
            self.layout, self.config, model="m", transfer=self.transfer, stores=stores
        )
        self.core, self.pool, self.host = self.cache._core, inner.pool, inner.host
        deadlines = self.cache._pump.deadlines
        deadlines.clock, deadlines.alarm = lambda: self.now, Silent()  # type: ignore[assignment]
        self.held: list[Held] = []
        self.stepping = False
        self.pins: list[kvtier.Pin] = []
        self.prefetches: list[Any] = []

    def settle(self) -> None:
        """Let everything end that is under way; what is held back stays so."""
        while self.transfer.inner.tell():
            pass

    # ------------------------------------------------------------------ what happens to ops
    @rule(
        late=st.integers(0, 4),
        report=st.integers(0, 4),
        deliver=st.sampled_from([None, None, 0, 1, 2]),
        torn=st.booleans(),
        error=st.booleans(),
    )
    def doom(self, late: int, report: int, deliver: int | None, torn: bool, error: bool) -> None:
        failed = OSError("injected") if error else None
        self.fates.append(
            Fate(start_after=late, report_after=report, deliver=deliver, torn=torn, error=failed)
        )

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5, 2.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.transfer.tick()

    @rule()
    def drain(self) -> None:
        self.transfer.drain()

    # ------------------------------------------------------------------ leases
    @rule(
        base=st.integers(0, 30),
        cut=st.integers(0, 3),
        more=st.lists(st.integers(0, 2), max_size=7),
        who=st.integers(0, 1),
        write=st.sampled_from([True, True, True, False]),
        reuse=st.sampled_from([None, None, None, 5]),
        reserve=st.sampled_from([0, 0, 6]),
        restore=st.sampled_from(RESTORES),
    )
    def lease(
        self,
        base: int,
        cut: int,
        more: list[int],
        who: int,
        write: bool,
        reuse: int | None,
        reserve: int,
        restore: kvtier.RestorePolicy | None,
    ) -> None:
        """A new prompt, or one that goes on from something that was committed."""
        identity, tokens = WHO[who], ()
        if self.known and base < 24:
            identity, tokens = self.known[base % len(self.known)]
        prompt = (*tokens[: len(tokens) - cut], *more)
        self.lease_for(identity, prompt, write, reuse, reserve, restore)

    def lease_for(
        self,
        identity: Identity,
        tokens: tuple[int, ...],
        write: bool = True,
        reuse: int | None = None,
        reserve: int = 0,
        restore: kvtier.RestorePolicy | None = None,
    ) -> Held | None:
        while len(self.held) > 3 and not self.stepping:
            self.release(0)
        before = len(self.cache.leases())
        try:
            lease = self.cache.lease(
                list(tokens),
                identity=identity,
                write=write,
                max_reuse=reuse,
                reserve=reserve,
                restore=restore,
            )
        except OutOfPages:
            assert len(self.cache.leases()) == before
            return None
        self.held.append(Held(lease, identity, self.epoch, tokens))
        REACHED["restoring"] += lease.state is LeaseState.RESTORING
        return self.held[-1]

    @rule()
    def lose_patience(self) -> None:
        """All that wait for the disk settle for what they have."""
        deadlines = self.cache._pump.deadlines
        for patience in deadlines._bounds.values():
            patience.limit = 0.0
        waiting = [h for h in self.held if h.lease.state is LeaseState.RESTORING]
        self.cache._pump.settle_late()
        REACHED["settled early"] += any(h.lease.state is LeaseState.ACTIVE for h in waiting)

    @precondition(lambda self: self.store is not None)
    @rule(
        pages=st.integers(1, 4),
        late=st.lists(st.sampled_from([0, 99]), max_size=4),
        who=st.integers(0, 1),
    )
    def disk_too_slow(self, pages: int, late: list[int], who: int) -> None:
        """Aim: some stages arrive, the lease settles for these and computes what the others are
        still bringing."""
        self.fates.clear()
        self.fresh += 1
        prompt = (self.fresh, *[1, 0, 2] * pages, 1, 2)
        for _ in range(2):
            self.transfer.drain()
            for tier in (Tier.GPU, Tier.CPU):
                self.cache.evict(tier, 99)
            held = self.lease_for(WHO[who], prompt, restore=IN_STAGES)
            self.settle()
            self.lose_patience()
            self.settle()
            while held is not None and held.lease.state is LeaseState.ACTIVE:
                done = held.lease.num_tokens
                self.step_on([held], [])
                if held.lease.state is LeaseState.ACTIVE and held.lease.num_tokens == done:
                    break
            if held in self.held and late:
                self.release(self.held.index(held))
            self.transfer.drain()
            self.fates += [Fate(start_after=ticks) for ticks in late]

    @precondition(lambda self: self.held)
    @rule(
        picks=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        tokens=st.lists(st.integers(0, 2), max_size=9),
        rejected=st.integers(0, 2),
        fails=st.integers(0, 5),
        gone=st.integers(0, 3),
    )
    def step(
        self, picks: list[int], tokens: list[int], rejected: int, fails: int, gone: int
    ) -> None:
        batch = list({id(h): h for p in picks if (h := self.held[p % len(self.held)])}.values())
        self.step_on(batch, tokens, rejected, fails=not fails, gone=not gone)

    @precondition(lambda self: self.held)
    @rule(
        picks=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        tokens=st.lists(st.integers(0, 2), min_size=3, max_size=3),
        rounds=st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.booleans()),
            min_size=1,
            max_size=4,
        ),
        fails=st.integers(0, 5),
        after=st.sampled_from(["fork", "pause", "truncate", "release", "evict", None]),
    )
    def speculate(
        self,
        picks: list[int],
        tokens: list[int],
        rounds: list[tuple[int, int, int, bool]],
        fails: int,
        after: str | None,
    ) -> None:
        """Aim: rounds of drafts, each lease accepting as many as it likes; a round may begin with a
        pass that is wholly rejected; then something else while rejected rows still lie there."""
        batch = list({id(h): h for p in picks if (h := self.held[p % len(self.held)])}.values())
        for drafts, first, then, drafting in rounds:
            batch = [h for h in batch if h.lease.state is LeaseState.ACTIVE]
            if not batch:
                return
            if drafting:
                self.step_on(batch, [], [drafts + 1] * len(batch), most=0)
                REACHED["drafted"] += 1
            kept = [min(drafts + 1, n) for n in (first, then, first)][: len(batch)]
            news = [self.next_tokens(h, tokens)[:n] for h, n in zip(batch, kept, strict=True)]
            rejected = [drafts + 1 - len(new) for new in news]
            REACHED["all drafts accepted"] += not all(rejected)
            REACHED["no draft accepted"] += not all(news)
            self.step_on(batch, tokens, rejected, most=[*map(len, news)], fails=not fails)
        batch = [h for h in batch if h in self.held and h.lease.state is LeaseState.ACTIVE]
        if not batch or after is None:
            return
        pick = self.held.index(batch[0])
        REACHED[f"{after} after rejection"] += 1
        if after == "truncate":
            self.truncate(pick, max(0, batch[0].lease.num_tokens - then % 2))
        elif after == "evict":
            self.evict(Tier.GPU, 99)
        else:
            getattr(self, after)(pick)

    def step_on(
        self,
        batch: list[Held],
        tokens: list[int],
        rejected: int | Sequence[int] = 0,
        *,
        most: int | Sequence[int] = 99,
        fails: bool = False,
        gone: bool = False,
    ) -> None:
        """Each row is fed the rest of its prompt (or ``tokens``), at most ``most``, and drafts that
        are rejected."""
        over = [rejected] * len(batch) if isinstance(rejected, int) else rejected
        cuts = [most] * len(batch) if isinstance(most, int) else most
        try:
            news = [self.next_tokens(h, tokens)[:n] for h, n in zip(batch, cuts, strict=True)]
            work = [
                (h.lease, [*new, *[9] * more])
                for h, new, more in zip(batch, news, over, strict=True)
            ]
            with self.cache.step(work) as step:
                before = [tuple(h.lease.tokens().tolist()) for h in batch]
                if gone:
                    REACHED["released in a step"] += 1
                    batch[0].lease.release()
                    self.stepping = True
                    self.serve_another()
                    self.stepping = False
                self.forward(step, batch, news, before)
                if fails:
                    raise ZeroDivisionError
                for held, new in zip(batch, news, strict=True):
                    step.accept(held.lease, len(new))
        except LeaseNotReady:
            REACHED["step on a lease that is not ready"] += 1
            return
        except OutOfPages:
            REACHED["step refused"] += 1
            return
        except ZeroDivisionError:
            REACHED["step failed"] += 1
            for held, context, new, more in zip(batch, before, news, over, strict=True):
                if self.loses_its_tail(len(new) + more):
                    REACHED["tail lost to a failed step"] += 1
                elif held.lease.state is LeaseState.ACTIVE:
                    assert held.lease.num_tokens == len(context)
        self.held = [h for h in self.held if h.lease.state is not LeaseState.RELEASED]
        for held in batch:
            if held in self.held and held.lease.state is LeaseState.ACTIVE:
                entry = held.identity, tuple(held.lease.tokens().tolist())
                if held.lease._record.write and entry not in self.known:
                    self.known.append(entry)
        del self.known[:-12]

    def loses_its_tail(self, fed: int) -> bool:
        most = self.layout.max_rejected
        return most is not None and fed > most

    def serve_another(self) -> None:
        """In the middle of a step: its pages must not be the ones of a lease that has gone."""
        self.fresh += 1
        other = self.lease_for(WHO[0], (self.fresh, 1, 2, 0, 1))
        if other is not None:
            self.settle()
            if other.lease.state is LeaseState.ACTIVE:
                self.step_on([other], [])

    def next_tokens(self, held: Held, tokens: list[int]) -> list[int]:
        done = held.lease.num_tokens
        rest = held.tokens[done : done + 7]
        room = 40 - done
        return list(rest or tokens)[: max(0, room)]

    # ------------------------------------------------------------------ the "kernels"
    def forward(
        self,
        step: kvtier.Step,
        batch: list[Held],
        news: list[list[int]],
        contexts: list[tuple[int, ...]],
    ) -> None:
        """Write every new row, then leave the states where the accepted tokens end, and the
        captures where they fall due."""
        device = step.to_device()
        for row, (held, new, before) in enumerate(zip(batch, news, contexts, strict=True)):
            start, stop = step.cu_seqlens_q[row : row + 2].tolist()
            assert step.context_lens[row] == len(before)
            rows = digests(held.epoch, held.identity, (*before, *step.input_ids[start:stop]))
            for name in ("full", "half"):
                slots = device.slot_mapping[name][start:stop]
                kept = slots >= 0
                self.write(name, slots[kept], rows[len(before) :][kept.numpy()])
            if self.layout.windows:
                at = step.positions[start:stop]
                pages = step.window_table[row][at // 2]
                assert (pages >= 0).all(), "a token's window page is missing"
                self.write("window", torch.from_numpy(pages * 2 + at % 2).long(), rows[at])
            if self.layout.has_tails:
                slot, at = int(step.state_slots[row]), len(before)
                for capture in step.captures:
                    if capture.row == row and capture.position <= len(before) + len(new):
                        self.write_states(slot, rows, at, capture.position)
                        self.capture(capture, slot, step.window_table[row])
                        at = capture.position
                self.write_states(slot, rows, at, len(rows))  # rejected ones too

    def write(self, component: str, slots: torch.Tensor, rows: Rows) -> None:
        for layer in range(2):
            self.pool.rows(component, layer)[slots] = torch.from_numpy(rows ^ np.uint8(layer))

    def write_states(self, slot: int, rows: Rows, start: int, stop: int) -> None:
        """The last of these positions' rows, each in the slot of its position."""
        at = np.arange(max(start, stop - PAGE), stop)
        slots = torch.from_numpy(slot * PAGE + at % PAGE).long()
        for name in STATES:
            self.write(name, slots, rows[at])

    def capture(self, capture: kvtier.Capture, slot: int, windows: npt.NDArray[np.int32]) -> None:
        pages: list[int] = []
        if self.layout.windows:
            end = capture.position // 2
            pages = windows[max(0, end - self.layout.tail_windows) : end].tolist()
            assert min(pages, default=0) >= 0, "a window page of a checkpoint is gone"
        spans = self.pool.spans(Kind.CHECKPOINT, (slot, *pages), live=True)
        packed = torch.cat([span.flatten() for span in spans if isinstance(span, torch.Tensor)])
        self.pool.checkpoints[capture.frame] = 0xFF
        self.pool.checkpoints[capture.frame][: len(packed)] = packed
        REACHED["captured"] += 1

    # ------------------------------------------------------------------ what leases do besides
    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9), n=st.integers(0, 20))
    def truncate(self, pick: int, n: int) -> None:
        held = self.held[pick % len(self.held)]
        try:
            n = min(n, held.lease.num_tokens)
            stands = held.lease.truncate(n)
        except (LeaseNotReady, OutOfPages):
            return
        assert stands <= n
        assert stands == n or self.layout.has_tails
        held.tokens = held.tokens[:n]
        REACHED["truncated"] += 1

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9))
    def fork(self, pick: int) -> None:
        held = self.held[pick % len(self.held)]
        try:
            twin = held.lease.fork()
        except (LeaseNotReady, OutOfPages):
            return
        self.held.append(Held(twin, held.identity, held.epoch, held.tokens))
        REACHED["forked"] += 1

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9))
    def pause(self, pick: int) -> None:
        held = self.held[pick % len(self.held)]
        try:
            held.lease.pause()
        except LeaseNotReady:
            return
        REACHED["paused"] += 1

    @precondition(lambda self: any(h.lease.state is LeaseState.PAUSED for h in self.held))
    @rule()
    def resume(self) -> None:
        for held in self.held:
            if held.lease.state is LeaseState.PAUSED:
                before = held.lease.num_tokens
                try:
                    future = held.lease.resume()
                except OutOfPages:
                    assert held.lease.state is LeaseState.PAUSED
                    assert held.lease.num_tokens == before
                    continue
                self.settle()
                if future.done():
                    assert future.result() <= before
                    REACHED["resumed whole"] += future.result() == before > 0
                return

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        held = self.held.pop(pick % len(self.held))
        REACHED["released while restoring"] += held.lease.state is LeaseState.RESTORING
        ready = held.lease.ready
        held.lease.release()
        assert ready.done(), "a waiter was left behind"

    # ------------------------------------------------------------------ upkeep
    @rule(tier=st.sampled_from([Tier.GPU, Tier.CPU, Tier.DISK]), n=st.integers(1, 12))
    def evict(self, tier: Tier, n: int) -> None:
        REACHED[f"evicted {tier.name}"] += self.cache.evict(tier, n) > 0

    @rule(who=st.sampled_from([None, None, 0, 1]), tier=st.sampled_from([None, None, 0, 1, 2]))
    def clear(self, who: int | None, tier: int | None) -> None:
        identity = None if who is None else WHO[who]
        self.cache.clear(identity=identity, tiers=None if tier is None else [Tier(tier)])
        if tier is not None:
            return
        gone = [k for k in self.known if identity is None or k[0] == identity]
        for whose, tokens in gone:
            assert self.cache.match([*tokens, 1], identity=whose).tokens == 0
        self.known = [k for k in self.known if k not in gone]
        if identity is None:
            self.epoch += 1  # as after a weight update

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 11), cancel=st.booleans())
    def prefetch(self, pick: int, cancel: bool) -> None:
        identity, tokens = self.known[pick % len(self.known)]
        future = self.cache.prefetch(list(tokens), identity=identity)
        REACHED["prefetching"] += not future.done()
        if cancel:
            future.cancel()
        else:
            self.prefetches.append(future)

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 11))
    def pin(self, pick: int) -> None:
        identity, tokens = self.known[pick % len(self.known)]
        self.pins.append(self.cache.pin(list(tokens), identity=identity))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.pins.pop().close()

    @precondition(lambda self: self.store is not None)
    @rule(index=st.integers(0, 99), at=st.integers(0, 63))
    def corrupt(self, index: int, at: int) -> None:
        """A record on disk goes bad: a miss, never other bytes."""
        assert self.store is not None
        record = self.store.record(index)
        if record is not None:
            self.store.corrupt(record.key, at % record.size)
            self.store.tampered = True
            REACHED["corrupted"] += 1

    @precondition(lambda self: self.store is not None)
    @rule(calls=st.integers(1, 2))
    def disk_fails(self, calls: int) -> None:
        assert self.store is not None
        self.store.fail_next(calls)
        self.store.tampered = True

    # ------------------------------------------------------------------ aimed
    @rule(
        who=st.integers(0, 1),
        tokens=st.lists(st.integers(0, 2), min_size=5, max_size=17),
        again=st.integers(0, 2),
        chill=st.sampled_from([0, 1, 1, 2]),
    )
    def serve(self, who: int, tokens: list[int], again: int, chill: int) -> None:
        """Aim: a request from start to end, then the same prefix from a colder tier."""
        held = self.lease_for(WHO[who], tuple(tokens))
        for _ in range(4):
            if held is None or held not in self.held:
                return
            self.settle()
            self.step_on([held], [1])
        self.held.remove(held)
        held.lease.release()
        if chill:
            self.transfer.drain()
            for tier in (Tier.GPU, Tier.CPU)[:chill]:
                self.cache.evict(tier, 99)
        for extra in range(again):
            if self.lease_for(WHO[who], (*tokens, extra)) is not None:
                REACHED["asked again"] += 1

    @precondition(lambda self: self.known)
    @rule(
        pick=st.integers(0, 11),
        host_too=st.booleans(),
        first=st.sampled_from(["prefetch", "lease", "lease"]),
        late=st.integers(0, 5),
        deliver=st.sampled_from([None, None, 0, 1, 2]),
        times=st.integers(1, 3),
        spoil=st.sampled_from([None, None, 0, 1, 2]),
    )
    def ask_cold(
        self,
        pick: int,
        host_too: bool,
        first: str,
        late: int,
        deliver: int | None,
        times: int,
        spoil: int | None,
    ) -> None:
        """Aim: restores that take their time, several leases on one, and what comes of parts."""
        identity, tokens = self.known[pick % len(self.known)]
        self.transfer.drain()
        for tier in (Tier.GPU, Tier.CPU)[: 1 + host_too]:
            self.cache.evict(tier, 99)
        if spoil is not None and self.store is not None:
            self.corrupt(spoil, 3)
        self.fates.append(Fate(start_after=late, deliver=deliver, torn=True))
        if first == "prefetch":
            self.prefetches.append(self.cache.prefetch(list(tokens), identity=identity))
            REACHED["prefetching"] += not self.prefetches[-1].done()
        for extra in range(times):
            self.lease_for(identity, (*tokens, extra))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9), chill=st.booleans())
    def pause_and_resume(self, pick: int, chill: bool) -> None:
        """Aim: a lease that goes down and comes back whole, its partial page too."""
        held = self.held[pick % len(self.held)]
        if held.lease.state is not LeaseState.ACTIVE:
            return
        before = held.lease.num_tokens
        paused = held.lease.pause()
        self.transfer.drain()
        assert paused.done()
        assert held.lease.state is LeaseState.PAUSED
        if chill:
            self.cache.evict(Tier.GPU, 99)
        try:
            resumed = held.lease.resume()
        except OutOfPages:
            return
        self.transfer.drain()
        assert resumed.result(timeout=0) <= before
        REACHED["resumed whole"] += resumed.result() == before > 0
        REACHED["resumed a partial page"] += resumed.result() == before and before % PAGE > 0

    @precondition(lambda self: self.store is not None)
    @rule(sure=st.integers(0, 3), drain=st.booleans())
    def restart(self, sure: int, drain: bool) -> None:
        """Close, whatever is under way, and open again on what the store has."""
        if sure:
            return
        self.end(drain)
        assert self.store is not None
        if self.store.forgets:
            self.store.reopen()
            self.store.fail_next(0)
        else:  # a process that starts now knows nothing of what was to be forgotten
            self.store = WatchedStore(self.store.capacity)
        REACHED["restarted"] += bool(self.store.keys())
        self.open()

    def end(self, drain: bool) -> None:
        waiting = [h.lease.ready for h in self.held]
        still_open = bool(self.cache.leases())
        self.fates.clear()
        if still_open:
            with pytest.raises(LeaseError, match=r"open leases?, now"):
                self.cache.close(drain=drain)
        else:
            self.cache.close(drain=drain)
        assert all(future.done() for future in (*waiting, *self.prefetches))
        for thread in self.transfer.inner.inner._threads:
            assert not thread.is_alive()

    # ------------------------------------------------------------------ always
    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.settle()
        self.cache.check()
        self.poison()
        for held in self.held:
            if held.lease.state is LeaseState.ACTIVE:
                self.check_rows(held)
        for tier in self.cache.stats().tiers.values():
            states = (tier.free, tier.resident, tier.reserved, tier.in_flight, tier.quarantined)
            assert sum(states) == tier.capacity
        if self.store is not None:
            assert not self.store.violations, self.store.violations

    def poison(self) -> None:
        """Whatever nobody may read: free frames, and slots behind each lease's last token."""
        pools = self.core.residency.pools
        for frame in set(range(pools[0].size)) - pools[0].taken():
            self.pool.poison(Kind.HISTORY, (frame,), live=False)
        self.host.poison(sorted(set(range(pools[1].size)) - pools[1].taken()))
        for record in self.core.leases.values():
            if record.state is LeaseState.ACTIVE:
                self.poison_rejected(record)
        if not self.layout.has_tails:
            return
        for frame in set(range(pools[3].size)) - pools[3].taken():
            self.pool.checkpoints[frame] = 0xFF
        states = self.core.tails.states
        for slot in set(range(states.size)) - states.taken():
            for name, layer in product(STATES, range(2)):
                self.pool.rows(name, layer)[slot * PAGE : (slot + 1) * PAGE] = 0xFF

    def poison_rejected(self, record: LeaseRecord) -> None:
        """Slots past a lease's committed tokens, and ring rows that the next one does not read."""
        at = np.arange(record.length, record.capacity, dtype=np.int32)
        pages = self.core.block_tables[record.row][at // PAGE]
        assert all(record.owned[-(-record.length // PAGE) :]), "a shared page would be written"
        windows = None
        if self.layout.windows:
            table = np.append(self.core.window_tables[record.row], np.int32(-1))
            windows = table[np.minimum(at // 2, len(table) - 1)]
        for (name, slots), layer in product(
            self.layout.slots(at, pages, windows).items(), range(2)
        ):
            self.pool.rows(name, layer)[torch.from_numpy(slots[slots >= 0]).long()] = 0xFF
        for name, layer in product(STATES if self.layout.has_tails else (), range(2)):
            first = record.length // 2 * 2 if name == "group" else max(0, record.length - 1)
            unread = np.ones(PAGE, dtype=bool)
            unread[np.arange(first, record.length) % PAGE] = False
            ring = torch.from_numpy(record.state_slot * PAGE + np.flatnonzero(unread))
            self.pool.rows(name, layer)[ring] = 0xFF

    def check_rows(self, held: Held) -> None:
        lease = held.lease
        tokens = tuple(lease.tokens().tolist())
        right = [digests(e, held.identity, tokens) for e in range(held.epoch, self.epoch + 1)]
        mapping = lease.slot_mapping(0, len(tokens))
        for name in ("full", "half"):
            slots = mapping[name]
            kept = slots >= 0
            for layer in range(2):
                rows = self.pool.rows(name, layer)[torch.from_numpy(slots[kept]).long()].numpy()
                self.compare(rows ^ np.uint8(layer), [r[kept] for r in right], name, tokens)
        if self.layout.has_tails and tokens:
            record = lease._record
            for name, layer in product(STATES, range(2)):
                first = len(tokens) // 2 * 2 if name == "group" else len(tokens) - 1
                at = np.arange(first, len(tokens))
                slots = torch.from_numpy(record.state_slot * PAGE + at % PAGE).long()
                rows = self.pool.rows(name, layer)[slots].numpy()
                self.compare(rows ^ np.uint8(layer), [r[at] for r in right], name, tokens)
            if self.layout.windows:
                at = np.arange(max(0, len(tokens) - self.geometry.window + 1), len(tokens))
                pages = self.core.window_tables[record.row][at // 2]
                assert (pages >= 0).all()
                slots = torch.from_numpy(pages * 2 + at % 2).long()
                rows = self.pool.rows("window", 1)[slots].numpy()
                self.compare(rows ^ np.uint8(1), [r[at] for r in right], "window", tokens)

    def compare(self, rows: Rows, right: list[Rows], what: str, tokens: tuple[int, ...]) -> None:
        good = np.zeros(len(rows), dtype=bool)
        for each in right:
            good |= (rows == each).all(axis=1)
        assert good.all(), f"I8: {what} rows {np.flatnonzero(~good).tolist()} of {tokens} are wrong"

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for pin in self.pins:
            pin.close()
        for held in self.held:
            held.lease.release()
        self.transfer.drain()
        self.cache.check()
        assert all(future.done() for future in self.prefetches)
        with self.cache.lease([1]) as lease:  # nothing leaked: the whole device fits one lease
            self.settle()
            assert lease.ready.done()
            lease.reserve(self.geometry.gpu_pages * PAGE)
        self.held = []
        self.end(drain=True)


TestCacheMachine = CacheMachine.TestCase
# Each example starts a data plane with its threads: a quarter of what the pure core can afford.
TestCacheMachine.settings = settings(max_examples=max(25, settings.default.max_examples // 4))


@pytest.mark.slow
def test_the_machine_gets_around(long_run: bool) -> None:
    """Reach: what a run of the machine must have seen, or it tests less than it says."""
    if not long_run:
        pytest.skip("asserted with --long")
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=500))
    for what in (
        *("late", "reported late", "cut short", "restoring", "step failed", "step refused"),
        *("released in a step", "step on a lease that is not ready", "captured", "truncated"),
        *("forked", "paused", "resumed whole", "resumed a partial page", "prefetching"),
        *("released while restoring", "evicted GPU", "evicted CPU", "evicted DISK"),
        *("corrupted", "restarted", "asked again", "tail lost to a failed step"),
        *("settled early", "drafted", "all drafts accepted", "no draft accepted"),
        *(f"{what} after rejection" for what in ("fork", "pause", "truncate", "release", "evict")),
    ):
        assert REACHED[what] >= 5, (what, REACHED)
