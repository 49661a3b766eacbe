"""The state machine against a model of fake bytes: whatever happens in whatever order, a lease
reads what was written for exactly its tokens, and nothing is lost track of.

Uniform rules rarely reach the interesting states, so some are aimed; ``REACHED`` counts what a run
came to, and the long profile asserts that it came everywhere.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvtier.config import Adaptive, Dense, Sparse
from kvtier.core.geometry import Geometry
from kvtier.core.leases import LeaseRecord, PinRecord, PrefetchRecord
from kvtier.core.machine import CacheCore
from kvtier.core.ops import OpKind
from kvtier.errors import LeaseNotReady, LeaseReleased, OutOfPages
from kvtier.tokens import TokenBuffer
from kvtier.types import Identity, LeaseState, Span, Tier
from tests.property.plane import FakeDisk, FakePlane

REACHED: Counter[str] = Counter()
IDENTITIES = (Identity(), Identity(tenant="b"), Identity(adapter="b"))
TOKENS = st.lists(st.integers(0, 1), max_size=9)
MORE = st.lists(st.integers(0, 1), min_size=1, max_size=2)
MOSTLY = st.sampled_from([True, True, True, False])


def packed(tokens: list[int] | tuple[int, ...]) -> TokenBuffer:
    return TokenBuffer(np.array(tokens, dtype="<i4").tobytes())


class CoreMachine(RuleBasedStateMachine):
    prefetches = Bundle("prefetches")
    pinned = Bundle("pinned")

    @initialize(
        page=st.sampled_from([1, 2, 2, 4]),
        gpu=st.integers(2, 9),
        cpu=st.integers(0, 9),
        disk=st.integers(0, 9),
        tails=st.booleans(),
        window=st.sampled_from([0, 0, 2, 3]),
        draft=st.integers(0, 2),
        checkpoint=st.integers(1, 3),
        spaces=st.integers(0, 3),
        leases=st.integers(2, 6),
        eviction=st.sampled_from(["lru", "adaptive", "s3fifo"]),
        placement=st.sampled_from([Adaptive(every_pages=2), Dense(), Sparse(every_pages=2)]),
    )
    def start(
        self,
        page: int,
        gpu: int,
        cpu: int,
        disk: int,
        tails: bool,
        window: int,
        draft: int,
        checkpoint: int,
        spaces: int,
        leases: int,
        eviction: str,
        placement: Any,
    ) -> None:
        window = window if tails else 0
        wide = (window + draft + 9) // 2 + 2 if window else 0
        self.geometry = Geometry(
            page_tokens=page,
            gpu_pages=gpu,
            cpu_frames=cpu,
            disk_frames=disk if cpu else 0,
            max_leases=leases,
            has_tails=tails,
            checkpoint_frames=checkpoint if tails else 0,
            parked_frames=checkpoint + 1 if tails else 0,
            gpu_states=leases if tails else 0,
            gpu_checkpoints=spaces if tails else 0,
            window=window,
            window_page=2 if window else 0,
            gpu_windows=max(wide, leases * wide - leases // 2) if window else 0,
            max_draft=draft if window else 0,
        )
        self.eviction, self.placement = eviction, placement
        self.disk = FakeDisk()
        self.ever: set[tuple[Identity, tuple[int, ...]]] = set()
        self.epoch = 0
        self.now = 0.0
        self.boot()

    def boot(self) -> None:
        self.core = CacheCore(
            self.geometry,
            chain=b"c" * 16,
            eviction=self.eviction,
            checkpoints=self.placement,
            entries=self.disk.scan() if self.geometry.disk_frames else None,
        )
        self.plane = FakePlane(self.geometry, self.disk)
        self.epochs: dict[int, int] = {}

    # ------------------------------------------------------------------ the shell's part
    def run_ops(self, ops: list[Any], early: bool = False) -> None:
        for op in ops:
            REACHED[f"op {op.kind.value}"] += 1
            if op.kind is OpKind.RESTORE:
                REACHED["restore of several parts"] += len(op.parts) > 1
                REACHED["restore from disk"] += any(p.source is Tier.DISK for p in op.parts)
                REACHED["restore with via"] += any(p.via for p in op.parts)
        self.plane.start(ops, early=early)

    def end(self, op_id: int, delivered: int | None) -> None:
        op = self.plane.live[op_id]
        if op.kind is OpKind.PACK and not self.core.operations.running[op_id].packed:
            self.plane.pack(op_id)
        if op.kind in (OpKind.COPY, OpKind.CLEAR, OpKind.DROP):
            delivered = None  # device work in stream order does not fail by itself
        n = self.plane.finish(op_id, delivered)
        REACHED[f"partial {op.kind.value}"] += n < len(op.parts)
        self.run_ops(self.core.finish(op_id, n, n < len(op.parts)))

    # ------------------------------------------------------------------ completions
    @precondition(lambda self: any(o.kind is OpKind.PACK for o in self.plane.live.values()))
    @rule(data=st.data())
    def packed(self, data: Any) -> None:
        todo = [
            i
            for i, r in self.core.operations.running.items()
            if r.op.kind is OpKind.PACK and not r.packed
        ]
        if todo:
            op_id = data.draw(st.sampled_from(todo))
            self.plane.pack(op_id)
            self.run_ops(self.core.packed(op_id))

    @precondition(lambda self: self.plane.live)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        op_id = data.draw(st.sampled_from([i for i in self.plane.live if self.plane.can_finish(i)]))
        parts = len(self.plane.live[op_id].parts)
        self.end(op_id, data.draw(st.one_of(st.none(), st.integers(0, parts))))

    @rule()
    def drain(self) -> None:
        while self.plane.live:
            self.end(min(self.plane.live), None)

    # ------------------------------------------------------------------ leases
    def open(self, tokens: list[int], who: Identity, early: bool = False, **options: Any) -> Any:
        found = self.core.match(packed(tokens), who, options.get("spans", ()))
        assert found.tokens <= max(0, len(tokens) - 1)
        assert found.gpu_tokens + found.cpu_tokens + found.disk_tokens == found.tokens
        before = self.core.digest()
        try:
            rec, ops = self.core.open(packed(tokens), identity=who, **options)
        except OutOfPages:
            self.core.check()
            assert self.core.match(packed(tokens), who, options.get("spans", ())) == found
            REACHED["open refused"] += 1
            return None
        assert before != self.core.digest()
        self.epochs[rec.id] = self.epoch
        REACHED["reused"] += bool(rec.nodes)
        self.run_ops(ops, early)
        return rec

    @rule(
        tokens=TOKENS,
        who=st.sampled_from(IDENTITIES),
        early=st.booleans(),
        reserve=st.sampled_from([0, 0, 1, 5]),
        read=MOSTLY,
        write=MOSTLY,
        reuse=st.sampled_from([None, None, None, 0, 2, 3, 8]),
        ttl=st.sampled_from([None, None, None, 0, 1, 3]),
        priority=st.integers(0, 1),
    )
    def open_any(
        self,
        tokens: list[int],
        who: Identity,
        early: bool,
        reserve: int,
        read: bool,
        write: bool,
        reuse: int | None,
        ttl: int | None,
        priority: int,
    ) -> None:
        rec = self.open(
            tokens,
            who,
            early,
            reserve=reserve,
            read=read,
            write=write,
            max_reuse=reuse,
            priority=priority,
            expires=None if ttl is None else self.now + ttl,
        )
        if rec is None:
            return
        if reuse is not None:
            assert len(rec.nodes) * self.geometry.page_tokens <= reuse
        assert read or not rec.nodes

    def pick(self, data: Any, state: LeaseState | None = LeaseState.ACTIVE) -> LeaseRecord:
        """A live lease, in this state if there is one."""
        live = list(self.core.leases.values())
        return data.draw(st.sampled_from([r for r in live if r.state is state] or live))

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), more=MORE, early=st.booleans())
    def reopen(self, data: Any, more: list[int], early: bool) -> None:
        """Aim: a prompt that starts with something already committed."""
        self.open_known(data, more, early)

    @rule(
        data=st.data(),
        who=st.sampled_from(IDENTITIES[:2]),
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=9),
        release=st.booleans(),
    )
    def serve(self, data: Any, who: Identity, tokens: list[int], release: bool) -> None:
        """Aim: a whole request, computed and published."""
        rec = self.open([*tokens, 0], who)
        if rec is None:
            return
        if rec.state is LeaseState.RESTORING:
            self.drain()
        while rec.length < len(tokens):
            before = rec.length
            new = tokens[before : before + data.draw(st.integers(1, 5))]
            self.step_once([rec], [new], [0], fail=False)
            if rec.length == before:
                break
        if release:
            self.run_ops(self.core.release(rec))

    def open_known(self, data: Any, more: list[int], early: bool = False) -> Any:
        known = sorted(self.ever, key=lambda e: (-len(e[1]), repr(e)))
        who, tokens = data.draw(st.sampled_from(known))
        return self.open([*tokens, *more], who, early)

    @precondition(lambda self: self.ever)
    @rule(
        data=st.data(),
        cold_host=st.booleans(),
        early=st.booleans(),
        more=MORE,
        times=st.integers(1, 3),
    )
    def chill_and_reopen(
        self, data: Any, cold_host: bool, early: bool, more: list[int], times: int
    ) -> None:
        """Aim: idle, cold device (and host), then requests for a known prefix."""
        for rec in list(self.core.leases.values()):
            self.run_ops(self.core.release(rec))
        self.drain()
        for tier in (Tier.GPU, Tier.CPU)[: 1 + cold_host]:
            self.run_ops(self.core.evict(tier, 99)[1])
        for _ in range(times):
            self.open_known(data, more, early)

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data(), fail=st.integers(0, 9), size=st.integers(1, 3))
    def step(self, data: Any, fail: int, size: int) -> None:
        """Reserve, let the kernels write (more than will be accepted), commit."""
        recs = list({self.pick(data).id: None for _ in range(size)})
        live = [self.core.leases[i] for i in recs]
        news = [data.draw(st.lists(st.integers(0, 1), max_size=5)) for _ in live]
        extra = [data.draw(st.integers(0, self.geometry.max_draft or 2)) for _ in live]
        self.step_once(live, news, extra, fail=not fail)

    def step_once(
        self, recs: list[LeaseRecord], news: list[list[int]], extra: list[int], *, fail: bool
    ) -> None:
        core = self.core
        counts = [len(n) + e for n, e in zip(news, extra, strict=True)]
        before = [(r.capacity, r.length, list(r.frames)) for r in recs]
        try:
            captures, ops = core.reserve(recs, counts)
        except (LeaseReleased, LeaseNotReady):
            return
        except OutOfPages:
            REACHED["step refused"] += 1
            assert [r.length for r in recs] == [b[1] for b in before]
            core.check()
            return
        self.run_ops(ops)
        for row, (rec, new, more) in enumerate(zip(recs, news, extra, strict=True)):
            due = {c.position: c.frame for c in captures if c.row == row}
            self.forward(rec, new, more, due)
        if fail:
            core.abandon(recs)
            for rec in recs:  # what the failed pass did to the state is undone by its owner
                self.restore_state(rec)
            REACHED["step abandoned"] += 1
            return
        flat = [t for n in news for t in n]
        self.run_ops(core.commit(recs, [len(n) for n in news], packed(flat).data))
        for rec in recs:
            self.restore_state(rec)
            if rec.write:
                self.ever.add((rec.identity, self.tokens_of(rec)))

    def tokens_of(self, rec: LeaseRecord) -> tuple[int, ...]:
        return tuple(np.frombuffer(bytes(rec.tokens), dtype="<i4").tolist())

    def row(self, rec: LeaseRecord, prefix: tuple[int, ...]) -> Any:
        return (self.epochs[rec.id], rec.identity, prefix)

    def forward(self, rec: LeaseRecord, new: list[int], rejected: int, due: dict[int, int]) -> None:
        prefix = self.tokens_of(rec)
        for i, token in enumerate([*new, *[9] * rejected]):
            prefix = (*prefix, token)
            self.plane.write_token(self.core, rec, self.row(rec, prefix))
            if len(prefix) in due:
                if i < len(new):
                    self.plane.capture(rec, len(prefix), due[len(prefix)])
                else:
                    self.plane.checkpoints[due[len(prefix)]] = "garbage"

    def restore_state(self, rec: LeaseRecord) -> None:
        """State is addressed by position: rejected tokens are undone by whoever wrote them."""
        if rec.tail is not None and rec.state is LeaseState.ACTIVE:
            prefix = self.tokens_of(rec)
            self.plane.states[rec.tail.state] = self.row(rec, prefix) if prefix else ()

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data(), n=st.integers(0, 9))
    def truncate(self, data: Any, n: int) -> None:
        rec = self.pick(data)
        n = min(n, rec.length)
        try:
            got, ops = self.core.truncate(rec, n)
        except (LeaseReleased, LeaseNotReady):
            return
        except OutOfPages:
            self.core.check()
            return
        assert got <= n
        assert self.geometry.has_tails or got == n
        REACHED["truncated into a page"] += bool(got % self.geometry.page_tokens)
        self.run_ops(ops)

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        rec = self.pick(data)
        try:
            kid, ops = self.core.fork(rec)
        except (OutOfPages, LeaseReleased, LeaseNotReady):
            return
        self.epochs[kid.id] = self.epochs[rec.id]
        REACHED["fork of a partial page"] += bool(rec.length % self.geometry.page_tokens)
        self.run_ops(ops)

    @precondition(lambda self: any(r.state is LeaseState.ACTIVE for r in self.core.leases.values()))
    @rule(data=st.data())
    def pause(self, data: Any) -> None:
        active = [r for r in self.core.leases.values() if r.state is LeaseState.ACTIVE]
        rec = data.draw(st.sampled_from(active))
        self.run_ops(self.core.pause(rec))
        REACHED["paused"] += 1

    @precondition(lambda self: any(r.state is LeaseState.PAUSED for r in self.core.leases.values()))
    @rule(data=st.data(), early=st.booleans())
    def resume(self, data: Any, early: bool) -> None:
        paused = [r for r in self.core.leases.values() if r.state is LeaseState.PAUSED]
        rec = data.draw(st.sampled_from(paused))
        before, whole = rec.length, rec.parked is not None and rec.parked.ok
        try:
            self.run_ops(self.core.resume(rec), early)
        except OutOfPages:
            assert rec.state is LeaseState.PAUSED and rec.length == before
            return
        REACHED["resumed whole" if whole else "resumed shorter"] += 1

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data(), state=st.sampled_from(list(LeaseState)))
    def release(self, data: Any, state: LeaseState) -> None:
        rec = self.pick(data, state)
        REACHED["released while restoring"] += rec.state is LeaseState.RESTORING
        self.run_ops(self.core.release(rec))
        assert not self.core.release(rec)

    # ------------------------------------------------------------------ upkeep
    @rule(tier=st.sampled_from([Tier.GPU, Tier.CPU, Tier.DISK]), n=st.integers(1, 6))
    def evict(self, tier: Tier, n: int) -> None:
        freed, ops = self.core.evict(tier, n)
        REACHED[f"evicted {tier.name}"] += freed > 0
        self.run_ops(ops)

    @rule(
        who=st.one_of(st.none(), st.sampled_from(IDENTITIES)),
        tiers=st.one_of(st.none(), st.sets(st.sampled_from([Tier.GPU, Tier.CPU, Tier.DISK]))),
        sure=st.integers(0, 3),
    )
    def clear(self, who: Identity | None, tiers: set[Tier] | None, sure: int) -> None:
        if sure:
            return
        self.run_ops(self.core.clear(who, tiers))
        REACHED["cleared in flight"] += bool(self.plane.live)
        if tiers is None:
            for known in [e for e in self.ever if who is None or e[0] == who]:
                assert self.core.match(packed([*known[1], 0]), known[0]).tokens == 0
                self.ever.discard(known)
            if who is None:
                self.epoch += 1

    @rule(by=st.integers(1, 2))
    def time_passes(self, by: int) -> None:
        self.now += by
        self.run_ops(self.core.expire(self.now))

    @precondition(lambda self: self.ever)
    @rule(target=prefetches, data=st.data())
    def prefetch(self, data: Any) -> PrefetchRecord:
        who, tokens = data.draw(st.sampled_from(sorted(self.ever, key=repr)))
        rec, ops = self.core.prefetch(packed(tokens), who)
        REACHED["prefetch in flight"] += not rec.done
        self.run_ops(ops)
        return rec

    @rule(rec=prefetches)
    def cancel_prefetch(self, rec: PrefetchRecord) -> None:
        self.run_ops(self.core.cancel_prefetch(rec))

    @precondition(lambda self: self.ever)
    @rule(target=pinned, data=st.data())
    def pin(self, data: Any) -> PinRecord:
        who, tokens = data.draw(st.sampled_from(sorted(self.ever, key=repr)))
        return self.core.pin(packed(tokens), who)

    @rule(rec=pinned)
    def unpin(self, rec: PinRecord) -> None:
        self.run_ops(self.core.unpin(rec))

    @precondition(lambda self: self.geometry.disk_frames)
    @rule(sure=st.integers(0, 4), data=st.data())
    def restart(self, sure: int, data: Any) -> None:
        """The process dies wherever it is; a new one opens what the disk has."""
        if sure:
            return
        while self.plane.live and data.draw(st.booleans()):
            self.end(min(self.plane.live), None)
        for rec in self.core.leases.values():
            rec.state = LeaseState.RELEASED  # handles of a process that is gone
        for pin in self.core.pins:
            pin.closed = True
        for pre in self.core.prefetches.values():
            pre.done = True
        self.boot()
        REACHED["restarted with pages on disk"] += bool(self.disk.records)

    @precondition(lambda self: self.disk.records)
    @rule(data=st.data())
    def corrupt(self, data: Any) -> None:
        """A record goes bad: it must become a miss, and what needs it must go too."""
        key = data.draw(st.sampled_from(sorted(self.disk.records)))
        parent, depth, frames, tail, tokens, _ = self.disk.records[key]
        self.disk.records[key] = (parent, depth, frames, tail, tokens, None)
        REACHED["corrupted"] += 1

    # ------------------------------------------------------------------ always
    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "core"):
            return
        core = self.core
        core.settled.clear()
        self.plane.poison(core)
        core.check()
        assert not self.disk.orphans(), "an orphan on disk"
        assert set(core.operations.running) == set(self.plane.live)
        for rec in core.leases.values():
            self.plane.check_lease(core, rec, self.epochs[rec.id])
        for tier, s in core.stats().tiers.items():
            total = s.free + s.resident + s.reserved + s.in_flight + s.quarantined
            assert total == s.capacity, (tier, s)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        core = self.core
        for pin in list(core.pins):
            self.run_ops(core.unpin(pin))
        for rec in list(core.leases.values()):
            self.run_ops(core.release(rec))
        while self.plane.live:
            self.end(min(self.plane.live), None)
        core.check()
        rec, ops = core.open(packed([]))
        self.run_ops(ops)
        core.reserve([rec], [min(self.geometry.gpu_pages * self.geometry.page_tokens, 9)])
        if not self.geometry.window:
            core.reserve([rec], [self.geometry.gpu_pages * self.geometry.page_tokens])
        core.check()  # nothing leaked: the whole device fits one lease
        self.run_ops(core.release(rec))


TestCoreMachine = CoreMachine.TestCase
_ = Span
