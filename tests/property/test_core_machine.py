"""The state machine against a model of fake bytes: whatever happens in whatever order, a lease
reads what was written for exactly its tokens, and nothing is lost track of.

Uniform rules rarely reach the interesting states, so some are aimed; ``REACHED`` counts what a run
came to, and ``--long`` asserts that it came everywhere.  After each step everything ``FakeServer``
can check from outside is checked: rows (I8), the numbered invariants, accounting from first
principles, counters, events, who published what.  One example in eight is recorded and replayed
into a second core, which must come to the same digest (A10).

Three times the profile's examples are run, in four parts: with the ci profile 600 of 50 steps (the
four together about 40 s on a quiet core), with the dev profile 150 of 30, with ``--long`` 60,000 of
60.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.config import Adaptive, Dense, Sparse
from kvtier.core.geometry import Geometry
from kvtier.core.keys import chain_root, page_key
from kvtier.core.leases import LeaseRecord, PinRecord, PrefetchRecord
from kvtier.core.load_costs import ALWAYS, LoadCosts
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Kind, OpKind
from kvtier.core.replay import Recorder, replay
from kvtier.errors import LeaseNotReady, LeaseReleased, OutOfPages
from kvtier.types import Identity, LeaseState, Span, Tier
from tests.property.plane import tokens_of
from tests.property.server import REACHED, FakeServer, Known, packed

EXAMPLES = 3
"""Times those of the profile."""
IDENTITIES = (Identity(), Identity(tenant="b"), Identity(adapter="b"))
TOKENS = st.lists(st.integers(0, 1), max_size=9)
FULL = st.lists(st.integers(0, 1), min_size=2, max_size=9)
MORE = st.lists(st.integers(0, 1), min_size=1, max_size=2)
MOSTLY = st.sampled_from([True, True, True, False])
ALL_TIERS = (Tier.GPU, Tier.CPU, Tier.DISK)
SECONDS = st.sampled_from([0.0, 0.001, 0.3, 1.0])
COSTS = st.one_of(
    st.none(),
    st.builds(
        LoadCosts,
        st.sampled_from([0.0, 1.0, 1.0, ALWAYS]),
        SECONDS,
        SECONDS,
        SECONDS,
        st.sampled_from([0.0, 0.001, 1.0, inf]),
    ),
)
WEIGHED = st.sampled_from([LoadCosts(ALWAYS), LoadCosts(1.0, 0.0, 0.001)])


@st.composite
def spans(draw: st.DrawFn, length: int) -> tuple[Span, ...]:
    """None, mostly; or one or two images somewhere in ``length`` tokens."""
    if length < 2 or draw(st.integers(0, 3)):
        return ()
    out, start = [], 0
    for _ in range(draw(st.integers(1, 2))):
        if start >= length:
            break
        start = draw(st.integers(start, length - 1))
        stop = draw(st.integers(start + 1, length))
        out.append(Span(start, stop, draw(st.sampled_from([b"x", b"yy"]))))
        start = stop
    return tuple(out)


class CoreMachine(FakeServer, RuleBasedStateMachine):
    prefetches = Bundle("prefetches")
    pinned = Bundle("pinned")

    @initialize(
        page=st.sampled_from([1, 2, 2, 4]),
        gpu=st.integers(2, 9),
        cpu=st.integers(0, 9),
        disk=st.integers(0, 9),
        tails=st.booleans(),
        window=st.sampled_from([0, 0, 2, 3]),
        more=st.sampled_from([0, 0, 2, 4]),
        draft=st.integers(0, 2),
        checkpoint=st.integers(1, 3),
        spaces=st.integers(0, 3),
        leases=st.integers(2, 6),
        eviction=st.sampled_from(["lru", "adaptive", "s3fifo"]),
        placement=st.sampled_from([Adaptive(every_pages=2), Dense(), Sparse(every_pages=2)]),
        after_hits=st.sampled_from([0, 0, 0, 1]),
        max_pinned=st.sampled_from([0.5, 1.0]),
        recorded=st.integers(0, 7),
        events=st.booleans(),
    )
    def start(
        self,
        page: int,
        gpu: int,
        cpu: int,
        disk: int,
        tails: bool,
        window: int,
        more: int,
        draft: int,
        checkpoint: int,
        spaces: int,
        leases: int,
        eviction: str,
        placement: Any,
        after_hits: int,
        max_pinned: float,
        recorded: int,
        events: bool,
    ) -> None:
        window = window if tails else 0
        kept = window + more if window else 0
        wide = (kept + draft + 9) // 2 + 2 if window else 0
        geometry = Geometry(
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
            window_kept=kept,
            gpu_windows=max(wide, leases * wide - leases // 2) if window else 0,
            max_draft=draft if window else 0,
            max_rejected=draft + 1 if window else None,
        )
        self.recorded, self.images = not recorded, 0
        self.build(
            geometry,
            make=self.make_core,
            events=events,
            eviction=eviction,
            checkpoints=placement,
            store_after_hits=after_hits,
            max_pinned=max_pinned,
        )

    def make_core(self, geometry: Geometry, **options: Any) -> Any:
        core = CacheCore(geometry, **options)
        self.second = lambda: CacheCore(geometry, **options)
        return Recorder(core) if self.recorded else core

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
            self.run(self.core.packed(op_id))

    @precondition(lambda self: self.plane.live)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        op_id = data.draw(st.sampled_from([i for i in self.plane.live if self.plane.can_finish(i)]))
        parts = len(self.plane.live[op_id].parts)
        self.end(op_id, data.draw(st.one_of(st.none(), st.integers(0, parts))))

    @rule()
    def all_finish(self) -> None:
        self.drain()

    # ------------------------------------------------------------------ leases
    @rule(
        data=st.data(),
        tokens=TOKENS,
        who=st.sampled_from(IDENTITIES),
        early=st.booleans(),
        reserve=st.sampled_from([0, 0, 1, 5]),
        read=MOSTLY,
        write=MOSTLY,
        reuse=st.sampled_from([None, None, None, 0, 2, 3, 8]),
        ttl=st.sampled_from([None, None, None, 0, 1, 3]),
        priority=st.integers(0, 1),
        costs=COSTS,
    )
    def open_any(
        self,
        data: Any,
        tokens: list[int],
        who: Identity,
        early: bool,
        reserve: int,
        read: bool,
        write: bool,
        reuse: int | None,
        ttl: int | None,
        priority: int,
        costs: LoadCosts | None,
    ) -> None:
        self.open(
            tokens,
            who,
            spans=data.draw(spans(len(tokens))),
            early=early,
            reserve=reserve,
            read=read,
            write=write,
            max_reuse=reuse,
            priority=priority,
            expires=None if ttl is None else self.now + ttl,
            costs=costs,
        )

    def pick(self, data: Any, state: LeaseState | None = LeaseState.ACTIVE) -> LeaseRecord:
        """A live lease, in this state if there is one."""
        live = self.core.leases
        ids = [r.id for r in live.values() if r.state is state] or list(live)
        return live[data.draw(st.sampled_from(ids))]

    def seats(self, count: int) -> None:
        """Aimed rules want room for so many leases: the oldest go."""
        short = count - len(self.core.tables.free)
        for rec in list(self.core.leases.values())[: max(0, short)]:
            self.run(self.core.release(rec))

    def crowd(self) -> None:
        """Somebody takes what there is of the device; paused leases stay."""
        self.drain()
        others = [r for r in self.core.leases.values() if r.state is not LeaseState.PAUSED]
        if not self.core.tables.free and others:
            self.run(self.core.release(others[0]))
        for pages in range(self.geometry.gpu_pages, 0, -1):
            if self.open([9], reserve=pages * self.geometry.page_tokens) is not None:
                return

    def known(self, data: Any) -> Known:
        return data.draw(st.sampled_from(sorted(self.ever, key=lambda e: (-len(e[1]), repr(e)))))

    def reopen_known(
        self, data: Any, more: list[int], early: bool = False, **options: Any
    ) -> LeaseRecord | None:
        who, tokens, placed = self.known(data)
        return self.open([*tokens, *more], who, spans=placed, early=early, **options)

    @precondition(lambda self: self.ever)
    @rule(
        data=st.data(),
        more=MORE,
        early=st.booleans(),
        reserve=st.sampled_from([0, 0, 2]),
        costs=COSTS,
    )
    def reopen(
        self, data: Any, more: list[int], early: bool, reserve: int, costs: LoadCosts | None
    ) -> None:
        """Aim: a prompt that starts with something already committed."""
        self.seats(1)
        rec = self.reopen_known(data, more, early, reserve=reserve, costs=costs)
        REACHED["restoring with a reserve"] += bool(rec and rec.spare)

    @precondition(lambda self: any(k[2] for k in self.ever))
    @rule(data=st.data())
    def reopen_other_image(self, data: Any) -> None:
        """Aim: the same tokens with another image late in them share nothing past its start."""
        self.seats(1)
        known = sorted((k for k in self.ever if k[2]), key=repr)
        who, tokens, placed = data.draw(st.sampled_from(known))
        self.images += 1
        other = Span(placed[-1].start, placed[-1].stop, b"another %d" % self.images)
        rec = self.open([*tokens, 0], who, spans=(*placed[:-1], other))
        if rec is not None:
            page = self.geometry.page_tokens
            assert len(rec.nodes) <= other.start // page
            REACHED["other image"] += 1
            REACHED["shared before another image"] += bool(rec.nodes)

    @rule(
        data=st.data(),
        who=st.sampled_from(IDENTITIES[:2]),
        tokens=FULL,
        chunk=st.integers(1, 5),
        release=st.booleans(),
    )
    def serve_one(
        self, data: Any, who: Identity, tokens: list[int], chunk: int, release: bool
    ) -> None:
        """Aim: a whole request, computed and published."""
        self.seats(1)
        placed = data.draw(spans(len(tokens)))
        self.serve(tokens, who, chunk=chunk, spans=placed, release=release)

    @rule(data=st.data(), tokens=FULL, chunk=st.integers(1, 5), count=st.integers(2, 3))
    def serve_twins(self, data: Any, tokens: list[int], chunk: int, count: int) -> None:
        """Aim: leases that compute the same pages at the same time; all but the first keep
        duplicates until they are released."""
        self.seats(count)
        placed = data.draw(spans(len(tokens)))
        made = [self.open([*tokens, 1], spans=placed, read=False) for _ in range(count)]
        twins = [r for r in made if r is not None]
        for at in range(0, len(tokens), chunk):
            todo = [r for r in twins if r.length == at]
            self.step(todo, [tokens[at : at + chunk]] * len(todo))

    @precondition(lambda self: self.ever)
    @rule(
        data=st.data(),
        cold_host=st.booleans(),
        early=st.booleans(),
        more=MORE,
        times=st.integers(1, 3),
        costs=COSTS,
    )
    def chill_and_reopen(
        self,
        data: Any,
        cold_host: bool,
        early: bool,
        more: list[int],
        times: int,
        costs: LoadCosts | None,
    ) -> None:
        """Aim: idle, cold device (and host), then requests for a known prefix."""
        self.cold(*ALL_TIERS[: 1 + cold_host])
        for _ in range(times):
            self.reopen_known(data, more, early, costs=costs)

    def disk_reads(self, waits: Iterable[int]) -> list[int]:
        running = self.core.operations.running
        return [i for i in waits if any(p.source is Tier.DISK for p in running[i].op.parts)]

    def settle_early(self, rec: LeaseRecord, *, hung: bool = False) -> None:
        hand, waits, reads = self.core.at_hand(rec), set(rec.waits), self.disk_reads(rec.waits)
        faults = self.core.stats().tiers[Tier.DISK].faults
        self.run(self.core.settle_early(rec, hung=hung))
        settles = bool(reads) and rec.waits != waits
        assert self.core.stats().tiers[Tier.DISK].faults == faults + (hung and settles)
        if not reads:
            assert rec.waits == waits, "it waits for nothing of the disk"
        elif not settles:
            assert not self.core.tails.states.free
            REACHED["could not settle early"] += 1
        else:
            assert not self.disk_reads(rec.waits), "it was to wait for the disk no longer"
            assert rec.state is LeaseState.RESTORING or rec.length <= hand
            REACHED["settled early"] += 1
            REACHED["settled early on something"] += hand > 0

    @precondition(
        lambda self: any(r.state is LeaseState.RESTORING for r in self.core.leases.values())
    )
    @rule(data=st.data(), hung=st.booleans())
    def settle_some_early(self, data: Any, hung: bool) -> None:
        self.settle_early(self.pick(data, LeaseState.RESTORING), hung=hung)

    @precondition(lambda self: self.core.prefetches)
    @rule(data=st.data())
    def end_a_prefetch(self, data: Any) -> None:
        """The disk hangs: what has come is what there is."""
        prefetch = data.draw(st.sampled_from(list(self.core.prefetches.values())))
        self.run(self.core.settle_early(prefetch, hung=True))
        assert prefetch.done
        assert not prefetch.nodes
        REACHED["prefetch ended early"] += 1

    @precondition(lambda self: self.ever and self.geometry.disk_frames)
    @rule(
        data=st.data(),
        costs=WEIGHED,
        ended=st.integers(0, 3),
        late=st.booleans(),
        early=st.booleans(),
        others=st.integers(0, 2),
    )
    def disk_too_slow(
        self, data: Any, costs: LoadCosts, ended: int, late: bool, early: bool, others: int
    ) -> None:
        """Aim: some stages arrive, the lease settles for these and computes what the others still
        bring; they end after it has been released, or at any time."""
        self.cold(Tier.GPU, Tier.CPU)
        self.seats(1 + others)
        who, tokens, placed = self.known(data)
        recs = [
            self.open([*tokens, 1], who, spans=placed, early=early, costs=costs)
            for _ in range(1 + others)
        ]
        for _ in range(ended):
            todo = [i for i, o in self.plane.live.items() if o.kind is OpKind.RESTORE]
            if todo:
                parts = len(self.plane.live[todo[0]].parts)
                self.end(todo[0], data.draw(st.sampled_from([None, None, None, parts - 1])))
        for rec in [r for r in recs if r is not None]:
            if rec.state is LeaseState.RESTORING:
                self.settle_early(rec)
            if rec.state is LeaseState.ACTIVE:
                self.step([rec], [list(tokens[rec.length :])])
        if late:
            for rec in [r for r in recs if r is not None]:
                self.run(self.core.release(rec))

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), early=st.booleans(), finish_first=st.booleans())
    def supersede(self, data: Any, early: bool, finish_first: bool) -> None:
        """Aim: one lease restores a prefix while another computes and commits it."""
        self.cold(Tier.GPU)
        who, tokens, placed = self.known(data)
        self.open([*tokens, 0], who, spans=placed, early=early)
        other = self.open([*tokens, 1], who, spans=placed, read=False)
        if other is not None and tokens:
            self.step([other], [list(tokens)])
        if finish_first and self.plane.live:
            self.end(self.plane.oldest, data.draw(st.integers(0, 2)))

    @precondition(lambda self: self.ever and self.geometry.cpu_frames)
    @rule(data=st.data(), early=st.booleans(), cold_host=st.booleans())
    def restore_in_two(self, data: Any, early: bool, cold_host: bool) -> None:
        """Aim: a lease that waits for another's operation and its own; one of them fails."""
        self.cold(*ALL_TIERS[: 1 + cold_host])
        who, tokens, placed = self.known(data)
        page = self.geometry.page_tokens
        short = tokens[: data.draw(st.integers(1, max(1, len(tokens) // page))) * page]
        kept = tuple(s for s in placed if s.stop <= len(short))
        self.open([*short, 0], who, spans=kept, early=early)
        self.open([*tokens, 1], who, spans=placed)
        todo = [i for i, o in self.plane.live.items() if o.kind is OpKind.RESTORE]
        for op_id in data.draw(st.permutations(todo)):
            if op_id in self.plane.live:  # what is planned again is not in the list
                parts = len(self.plane.live[op_id].parts)
                self.end(op_id, data.draw(st.sampled_from([None, 0, parts - 1])))

    @precondition(lambda self: self.disk.records and self.ever)
    @rule(data=st.data(), early=st.booleans())
    def found_bad(self, data: Any, early: bool) -> None:
        """Aim: a record goes bad while a prefetch and a lease are both reading it."""
        self.cold(Tier.GPU, Tier.CPU)
        who, tokens, placed = self.known(data)
        self.run(self.core.prefetch(packed(tokens), who, placed)[1], data.draw(st.booleans()))
        self.open([*tokens, 1], who, spans=placed, early=early)
        self.corrupt(data)
        todo = [i for i, o in self.plane.live.items() if o.kind is OpKind.RESTORE]
        for op_id in data.draw(st.permutations(todo)):
            if op_id in self.plane.live:
                self.end(op_id)
        REACHED["found bad by two"] += len(todo) > 1

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data(), fail=st.integers(0, 9), size=st.integers(1, 3))
    def step_some(self, data: Any, fail: int, size: int) -> None:
        """Reserve, let the kernels write (more than will be accepted), commit."""
        recs = list({self.pick(data).id: None for _ in range(size)})
        live = [self.core.leases[i] for i in recs]
        news = [data.draw(st.lists(st.integers(0, 1), max_size=5)) for _ in live]
        extra = [data.draw(st.integers(0, self.most_rejected)) for _ in live]
        self.step(live, news, extra, fail=not fail)

    @rule(
        data=st.data(),
        tokens=FULL,
        cut=st.integers(0, 9),
        rounds=st.integers(1, 4),
        others=st.integers(0, 1),
    )
    def speculate_aimed(
        self, data: Any, tokens: list[int], cut: int, rounds: int, others: int
    ) -> None:
        """Aim: rounds of drafts over every kind of edge, by one that shares its prefix with others;
        then whatever may come while rejected tokens still lie there."""
        self.seats(2 + others)
        self.serve(tokens, release=data.draw(st.booleans()))
        cut = min(cut, len(tokens))
        made = [self.open([*tokens[:cut], 1]) for _ in range(1 + others)]
        self.drain()
        live = [r for r in made if r is not None and r.state is LeaseState.ACTIVE]
        most = self.most_rejected
        for _ in range(rounds):
            drafted = data.draw(st.integers(0, most - 1))
            kept = [data.draw(st.integers(0, drafted + 1)) for _ in live]
            accepted = [
                list(tokens[r.length : r.length + n]) for r, n in zip(live, kept, strict=True)
            ]
            rejected = [drafted + 1 - len(new) for new in accepted]
            fail = not data.draw(st.integers(0, 7))
            self.speculate(live, accepted, rejected, drafting=data.draw(st.booleans()), fail=fail)
            live = [r for r in live if r.state is LeaseState.ACTIVE]
            if not live:
                return
        self.after_rejection(data, live[-1])

    @property
    def most_rejected(self) -> int:
        most = self.geometry.max_rejected
        return 3 if most is None else most

    def after_rejection(self, data: Any, rec: LeaseRecord) -> None:
        """What else a scheduler may do at that moment."""
        what = data.draw(
            st.sampled_from(["fork", "pause", "truncate", "give back", "evict", "overrun", "go"])
        )
        REACHED[f"{what} after rejection"] += 1
        if what == "fork":
            kid = self.fork(rec)
            if kid is not None:
                self.sound()
                self.step([kid, rec], [[0, 1], [1, 0]], [1, 1])
        elif what == "pause":
            self.pause(rec)
        elif what == "truncate":
            self.truncate_to(rec, data.draw(st.integers(0, rec.length)))
        elif what == "give back":
            self.truncate_to(rec, rec.length)
            page = self.geometry.page_tokens
            assert rec.capacity == -(-rec.length // page) * page, "room is kept that was not used"
            if rec.tail is not None and self.geometry.window:
                assert all(p * self.geometry.window_page < rec.length for p in rec.tail.windows)
        elif what == "evict":
            for tier in ALL_TIERS:
                self.run(self.core.evict(tier, 99)[1])
        elif what == "overrun":  # a pass that fails after more than a ring has room for
            self.step([rec], [[1] * (self.most_rejected + 1)], fail=True)
        else:
            self.run(self.core.release(rec))

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data(), n=st.integers(0, 9))
    def truncate(self, data: Any, n: int) -> None:
        rec = self.pick(data)
        self.truncate_to(rec, min(n, rec.length))

    def truncate_to(self, rec: LeaseRecord, n: int) -> None:
        shared = rec.nodes
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
        REACHED["truncated into a shared page"] += got < len(shared) * self.geometry.page_tokens
        self.run(ops)

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data())
    def fork_one(self, data: Any) -> None:
        self.fork(self.pick(data))

    @rule(data=st.data(), tokens=FULL, cut=st.integers(1, 8))
    def fork_aimed(self, data: Any, tokens: list[int], cut: int) -> None:
        """Aim: a fork with duplicates and with pages withheld for a span; both go on alike."""
        self.seats(2)
        page = self.geometry.page_tokens
        cut = min(cut, len(tokens) - 1)
        start = data.draw(st.integers(0, cut))
        placed = (Span(start, len(tokens), b"x"),) * data.draw(st.booleans())
        self.serve(tokens[: start // page * page])
        rec = self.open([*tokens, 1], spans=placed, read=False)
        if rec is None or not self.step([rec], [tokens[:cut]]):
            return
        kid = self.fork(rec)
        if kid is not None and kid.state is LeaseState.ACTIVE:
            pair = [rec, kid] if data.draw(st.booleans()) else [kid, rec]
            for one in pair:
                self.step([one], [tokens[cut:]])

    def active(self) -> list[LeaseRecord]:
        return [r for r in self.core.leases.values() if r.state is LeaseState.ACTIVE]

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def pause_one(self, data: Any) -> None:
        self.pause(self.pick(data))

    @rule(data=st.data(), tokens=FULL, write=st.booleans())
    def pause_aimed(self, data: Any, tokens: list[int], write: bool) -> None:
        """Aim: pause a lease with pages nobody else has, then let others want the room."""
        self.seats(1)
        placed = (Span(0, len(tokens) + 1, b"x"),) * (write and data.draw(st.booleans()))
        rec = self.open([*tokens, 1], spans=placed, write=write, read=False)
        if rec is not None and self.step([rec], [tokens]):
            self.pause(rec)
            if data.draw(st.booleans()):
                self.drain()
            self.run(self.core.evict(Tier.GPU, 99)[1])

    @precondition(lambda self: any(r.state is LeaseState.PAUSED for r in self.core.leases.values()))
    @rule(data=st.data(), early=st.booleans(), crowded=st.integers(0, 3))
    def resume(self, data: Any, early: bool, crowded: int) -> None:
        if not crowded:
            self.crowd()
        rec = self.pick(data, LeaseState.PAUSED)
        before, tokens, parked = rec.length, tokens_of(rec), rec.parked
        assert parked is not None
        whole = parked.ok
        try:
            self.run(self.core.resume(rec), early)
        except OutOfPages:
            assert rec.state is LeaseState.PAUSED and rec.length == before
            assert tokens_of(rec) == tokens and rec.parked is parked
            REACHED["resume refused"] += 1
            return
        REACHED["resumed whole" if whole else "resumed shorter"] += 1

    @precondition(lambda self: self.core.leases)
    @rule(data=st.data(), state=st.sampled_from(list(LeaseState)))
    def release(self, data: Any, state: LeaseState) -> None:
        rec = self.pick(data, state)
        REACHED["released while restoring"] += rec.state is LeaseState.RESTORING
        REACHED["released while paused"] += rec.state is LeaseState.PAUSED
        self.run(self.core.release(rec))
        assert not self.core.release(rec)

    # ------------------------------------------------------------------ upkeep
    @rule(tier=st.sampled_from(ALL_TIERS), n=st.integers(1, 6))
    def evict(self, tier: Tier, n: int) -> None:
        free = self.core.stats().tiers[tier].free
        freed, ops = self.core.evict(tier, n)
        assert freed <= self.core.stats().tiers[tier].free - free
        REACHED[f"evicted {tier.name}"] += freed > 0
        self.run(ops)

    @rule(
        who=st.one_of(st.none(), st.sampled_from(IDENTITIES)),
        tiers=st.one_of(st.none(), st.sets(st.sampled_from(ALL_TIERS))),
        sure=st.integers(0, 3),
    )
    def clear(self, who: Identity | None, tiers: set[Tier] | None, sure: int) -> None:
        if not sure:
            self.clear_now(who, tiers)

    def clear_now(self, who: Identity | None, tiers: set[Tier] | None) -> None:
        kinds = {o.kind for o in self.plane.live.values()}
        self.run(self.core.clear(who, tiers))
        for kind in kinds:
            REACHED[f"cleared during {kind.value}"] += 1
        if tiers is None:
            for known in [e for e in self.ever if who is None or e[0] == who]:
                gone = self.core.match(packed([*known[1], 0]), known[0], known[2])
                assert gone.history_tokens == 0
                self.ever.discard(known)
            self.published = {p for p in self.published if who is not None and p[0] != who}
            if who is None:
                self.epoch += 1

    @precondition(lambda self: self.geometry.disk_frames)
    @rule(data=st.data(), tokens=FULL, who=st.sampled_from([None, *IDENTITIES]))
    def clear_in_flight(self, data: Any, tokens: list[int], who: Identity | None) -> None:
        """Aim: everything is forgotten while it is on its way to the disk."""
        self.seats(1)
        self.serve(tokens, release=data.draw(st.booleans()))
        while not any(o.kind is OpKind.STORE for o in self.plane.live.values()) and self.plane.live:
            self.end(self.plane.oldest)
        self.clear_now(who, None)

    @rule(by=st.integers(1, 2))
    def time_passes(self, by: int) -> None:
        self.now += by
        self.run(self.core.expire(self.now))

    @rule(tokens=FULL, ttl=st.integers(0, 2), shared=st.integers(0, 4), cold_host=st.booleans())
    def expire_all(self, tokens: list[int], ttl: int, shared: int, cold_host: bool) -> None:
        """Aim: pages whose time is over, some of them prolonged, some on disk only."""
        if self.core.pins:
            return
        self.seats(1)
        self.serve(tokens, expires=self.now + ttl)
        if shared:
            self.serve(tokens[:shared], expires=self.now + 2 * ttl)
        self.cold(*ALL_TIERS[: 2 * cold_host])
        known = self.core.residency.tree.num_nodes
        self.now += ttl + 1
        self.check_expired()
        REACHED["expired"] += self.core.residency.tree.num_nodes < known

    @precondition(lambda self: self.ever)
    @rule(
        target=prefetches,
        data=st.data(),
        cold=st.booleans(),
        cancel=st.booleans(),
        most=st.sampled_from([None, None, 0, 1]),
    )
    def prefetch(
        self, data: Any, cold: bool, cancel: bool, most: int | None
    ) -> tuple[int, PrefetchRecord]:
        if cold:
            self.cold(Tier.GPU, Tier.CPU)
        who, tokens, placed = self.known(data)
        rec, ops = self.core.prefetch(packed(tokens), who, placed, most=most)
        if most is not None:
            disk = [p for o in ops for p in o.parts if p.kind is Kind.HISTORY and p.key]
            assert len(disk) <= most
        REACHED["prefetch in flight"] += not rec.done
        self.run(ops)
        if cancel:
            self.cancel_prefetch((self.life, rec))
        return self.life, rec

    @rule(made=prefetches)
    def cancel_some_prefetch(self, made: tuple[int, PrefetchRecord]) -> None:
        self.cancel_prefetch(made)

    def cancel_prefetch(self, made: tuple[int, PrefetchRecord]) -> None:
        life, rec = made
        if life == self.life:
            REACHED["prefetch cancelled"] += not rec.done
            self.run(self.core.cancel_prefetch(rec))

    @precondition(lambda self: self.ever)
    @rule(target=pinned, data=st.data(), evict=st.booleans())
    def pin(self, data: Any, evict: bool) -> tuple[int, PinRecord]:
        who, tokens, placed = self.known(data)
        rec = self.core.pin(packed(tokens), who, placed)
        if evict:  # whatever is asked for, pinned pages stay in some tier
            for tier in ALL_TIERS:
                self.run(self.core.evict(tier, 99)[1])
            assert self.core.match(packed(tokens), who, placed).history_tokens >= rec.tokens
            if rec.tail is not None:  # and so does the deepest place to resume at
                found = self.core.match(packed([*tokens, 0]), who, placed)
                assert found.tokens >= rec.tail.depth * self.geometry.page_tokens
                REACHED["pinned a checkpoint"] += 1
            REACHED["pinned and evicted"] += rec.tokens > 0
        return self.life, rec

    @rule(made=pinned)
    def unpin(self, made: tuple[int, PinRecord]) -> None:
        life, rec = made
        if life == self.life:
            self.run(self.core.unpin(rec))

    @precondition(lambda self: self.geometry.disk_frames)
    @rule(sure=st.integers(0, 4), data=st.data())
    def die(self, sure: int, data: Any) -> None:
        """The process dies wherever it is; a new one finds what the disk has, all of it."""
        if sure:
            return
        while self.plane.live and data.draw(st.booleans()):
            self.end(self.plane.oldest)
        self.replay_all()
        # With a DROP that had not come about while later STOREs had, the disk holds too much: some
        # of it is given up at once.
        used = sum(frames for _, _, frames, *_ in self.disk.records.values())
        self.restart()
        for who, tokens, placed in self.ever:
            if not placed and used <= self.geometry.disk_frames:
                self.check_found(who, tokens)

    def check_found(self, who: Identity, tokens: tuple[int, ...]) -> None:
        """A cold core knows exactly what a walk over the records finds."""
        page, records = self.geometry.page_tokens, self.disk.records
        key, count = chain_root(b"c" * 16, who), 0
        for at in range(0, (len(tokens) - 1) // page * page, page):
            above, own = key, packed(tokens[at : at + page]).data
            key = page_key(above, own)
            if key not in records:
                break
            assert records[key][0] == above and records[key][4] == own
            count += 1
        found = self.core.match(packed(tokens), who)
        assert found.history_tokens == count * page
        assert self.geometry.has_tails or found.disk_tokens == count * page
        REACHED["found after a restart"] += count

    @precondition(lambda self: self.disk.records)
    @rule(data=st.data())
    def corrupt_one(self, data: Any) -> None:
        """A record goes bad: it must become a miss, and what needs it must go too."""
        self.corrupt(data)

    def corrupt(self, data: Any) -> None:
        if not self.disk.records:
            return
        key = data.draw(st.sampled_from(sorted(self.disk.records)))
        parent, depth, frames, tail, tokens, _ = self.disk.records[key]
        self.disk.records[key] = (parent, depth, frames, tail, tokens, None)
        REACHED["corrupted"] += 1

    # ------------------------------------------------------------------ always
    @invariant()
    def all_is_sound(self) -> None:
        if hasattr(self, "core"):
            self.sound()

    def replay_all(self) -> None:
        if self.recorded:
            log, again = self.core.log, self.second()
            replay(log, again)
            assert again.digest() == self.core.digest(), "A10: the same calls, another state"
            again.check()
            unread = self.second()
            replay([call for call in log if call[0] != "subscribe"], unread)
            assert unread.digest() == self.core.digest(), "reading events changes decisions"
            REACHED["replayed"] += 1

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        core = self.core
        for pin in list(core.pins):
            self.run(core.unpin(pin))
        for rec in list(core.leases.values()):
            self.run(core.release(rec))
        self.drain()
        core.check()
        rec, ops = core.open(packed([]))
        self.run(ops)
        core.reserve([rec], [min(self.geometry.gpu_pages * self.geometry.page_tokens, 9)])
        if not self.geometry.window:
            core.reserve([rec], [self.geometry.gpu_pages * self.geometry.page_tokens])
        core.check()  # nothing leaked: the whole device fits one lease
        self.run(core.release(rec))
        self.replay_all()


SHARDS = 4

EVERYWHERE = (
    "op pack", "op restore", "op store", "op copy", "op clear", "op drop", "admitted",
    "open refused", "reused", "step refused", "step abandoned", "paused", "resumed whole",
    "resumed shorter", "released while restoring", "released while paused", "evicted GPU",
    "evicted CPU", "evicted DISK", "restore from disk", "restore of several parts",
    "restore with via", "partial restore", "partial pack", "partial store", "planned again",
    "planned again after two ops", "waits for two ops", "restore superseded", "duplicate page",
    "fork of a partial page", "fork with duplicates", "fork with pages withheld",
    "paused with a partial page", "paused with duplicates", "paused with unpublished pages",
    "truncated into a page", "truncated into a shared page", "span published",
    "pages withheld for a span", "other image", "shared before another image",
    "cleared during pack", "cleared during restore", "cleared during store",
    "cleared during drop", "prefetch in flight", "prefetch cancelled", "pinned and evicted",
    "restoring with a reserve", "restarted with pages on disk", "found after a restart",
    "corrupted", "replayed", "expired", "pinned a checkpoint", "found bad by two",
    "tail lost to a failed step", "dearer to load than to compute", "restore in stages",
    "settled early", "settled early on something", "prefetch ended early", "drafted",
    "left out what nobody waits for",
    "speculative step failed", "all drafts accepted", "no draft accepted",
    "rejected across a page end",
    "rejected from a page end on", "rejected across a window page", "captured what was rejected",
    "fork after rejection", "pause after rejection", "truncate after rejection",
    "give back after rejection", "evict after rejection", "overrun after rejection",
    "go after rejection",
)  # fmt: skip
SELDOM = {"resume refused": 20, "partial drop": 20, "died before a deletion": 20}
LEAST = dict.fromkeys(EVERYWHERE, 100) | SELDOM
"""What each shard of a long run must have come to, and how often at least."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_core_machine(shard: int, long_run: bool) -> None:
    REACHED.clear()
    profile = settings.default
    assert profile is not None
    some = settings(profile, max_examples=max(1, profile.max_examples * EXAMPLES // SHARDS))
    machine = type(f"CoreMachine{shard}", (CoreMachine,), {})
    if profile.derandomize:
        machine = seed(shard)(machine)
    run_state_machine_as_test(machine, settings=some)
    if long_run:
        missing = {name: (REACHED[name], n) for name, n in LEAST.items() if REACHED[name] < n}
        assert not missing, f"reached too rarely: {missing}"
