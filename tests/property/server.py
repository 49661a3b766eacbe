"""A server in small: a core, the plane of fake bytes under it, and a model of what must hold.

Drives requests the way a scheduler would and checks after every move what can be checked from
outside the core: rows (I8), accounting, counters, events, what was published by whom.  The state
machine adds chance; unit tests use it for one scene at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU
from kvtier.core.geometry import Geometry
from kvtier.core.keys import ANONYMOUS
from kvtier.core.leases import LeaseRecord
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Op, OpKind, Shortfall
from kvtier.core.tree import NEVER, Node
from kvtier.errors import LeaseNotReady, LeaseReleased, OutOfPages
from kvtier.seams import ENTRY
from kvtier.tokens import TokenBuffer
from kvtier.types import CacheStats, Identity, LeaseState, Span, Tier
from tests.property.plane import (
    GARBAGE,
    FakeDisk,
    FakePlane,
    Item,
    Row,
    items,
    prefix_of,
    tokens_of,
)

REACHED: Counter[str] = Counter()
Known = tuple[Identity, tuple[int, ...], tuple[Span, ...]]
Page = tuple[Identity, tuple[Item, ...]]
TIERS = (Tier.GPU, Tier.CPU, Tier.DISK)


def packed(tokens: Sequence[int]) -> TokenBuffer:
    return TokenBuffer(np.array(tokens, dtype="<i4").tobytes())


def plain(pages: set[Page]) -> set[tuple[Identity, tuple[int, ...]]]:
    """The same pages by their tokens alone."""
    return {
        (who, tuple(i if isinstance(i, int) else i[0] for i in prefix)) for who, prefix in pages
    }


class FakeServer:
    """Requests against a core over fake bytes.  ``build`` first."""

    core: CacheCore

    def build(
        self,
        geometry: Geometry,
        *,
        disk: FakeDisk | None = None,
        make: Callable[..., CacheCore] = CacheCore,
        events: bool = True,
        **options: Any,
    ) -> None:
        self.geometry, self.options, self.events_on = geometry, options, events
        self.make = make
        self.disk = FakeDisk() if disk is None else disk
        self.ever: set[Known] = set()
        """Committed by leases that write, and not cleared since."""
        self.published: set[Page] = set()
        """Page-aligned prefixes that may be in the tree."""
        self.once: set[Page] = set()
        """The same, and those cleared since."""
        self.until: dict[tuple[Identity, tuple[int, ...]], float] = {}
        """How long any lease has asked a page (by its tokens) to live at most."""
        self.epoch = self.life = 0
        self.now = 0.0
        self.boot()

    def boot(self) -> None:
        """A new process on the same disk."""
        if hasattr(self, "core"):  # what could not be deleted would be back: `clear` says so
            self.disk.delete(list(self.core.operations.undeleted))
        entries = self.disk.scan() if self.geometry.disk_frames else None
        self.core = self.make(
            self.geometry, **{"chain": b"c" * 16, "entries": entries, **self.options}
        )
        self.plane = FakePlane(self.geometry, self.disk)
        self.epochs: dict[int, int] = {}
        self.admitted: set[int] = set()
        self.unwanted: set[int] = set()
        """RESTOREs that may be cut short without its being a fault."""
        self.admitted_tokens = 0
        self.last = CacheStats()
        self.found = set(self.disk.records)
        self.seen: set[tuple[bytes, Tier]] = set()
        """What a reader of the event stream believes to be there."""
        if self.events_on:
            self.core.subscribe(1 << 12)

    # ------------------------------------------------------------------ operations
    def run(self, ops: list[Op], early: bool = False) -> None:
        for op in ops:
            REACHED[f"op {op.kind.value}"] += 1
            if op.kind is OpKind.RESTORE:
                REACHED["restore of several parts"] += len(op.parts) > 1
                REACHED["restore from disk"] += any(p.source is Tier.DISK for p in op.parts)
                REACHED["restore with via"] += any(p.via for p in op.parts)
        self.plane.start(ops, early=early)
        self.unwanted.update(self.core.unwanted)
        self.core.unwanted.clear()
        self.settle()

    def settle(self) -> None:
        """What the shell does with ``settled``: leases hand out their result once."""
        for rec in self.core.settled:
            if isinstance(rec, LeaseRecord) and rec.state is LeaseState.ACTIVE:
                assert sum(rec.restored.values()) == rec.cached_tokens
                if rec.id not in self.admitted:
                    self.admitted.add(rec.id)
                    REACHED["admitted"] += 1
                    self.admitted_tokens += len(rec.prompt)
                    assert rec.cached_tokens <= max(0, len(rec.prompt) - 1)
                    assert not any(s.start < rec.length < s.stop for s in rec.spans), (
                        "a lease resumes inside a span"
                    )
        self.core.settled.clear()

    def end(self, op_id: int, delivered: int | None = None) -> None:
        """An operation ends with its first ``delivered`` parts (None: all) carried out."""
        op = self.plane.live[op_id]
        if op.kind is OpKind.PACK and not self.core.operations.running[op_id].packed:
            self.plane.pack(op_id)
        if op.kind in (OpKind.COPY, OpKind.CLEAR):
            delivered = None  # device work in stream order does not fail by itself
        waiting = [r for r in self.core.leases.values() if op_id in r.waits]
        several = [r for r in waiting if r.id in self.waits_for_two]
        n = self.plane.finish(op_id, delivered)
        REACHED[f"partial {op.kind.value}"] += n < len(op.parts)
        short = n < len(op.parts)
        failed = short and not self.plane.bad_source
        unwanted = failed and op.kind is OpKind.RESTORE and op_id in self.unwanted
        REACHED["left out what nobody waits for"] += unwanted
        why = Shortfall.FAULT if failed else Shortfall.SOURCE
        self.run(self.core.finish(op_id, n, Shortfall.UNWANTED if unwanted else why))
        for rec in waiting:
            if op_id < min(rec.waits, default=0) and rec.state is LeaseState.RESTORING:
                REACHED["planned again"] += 1
                REACHED["planned again after two ops"] += rec in several

    @property
    def waits_for_two(self) -> set[int]:
        return {r.id for r in self.core.leases.values() if len(r.waits) > 1}

    def drain(self) -> None:
        while self.plane.live:
            self.end(self.plane.oldest)

    # ------------------------------------------------------------------ requests
    def open(
        self,
        tokens: Sequence[int],
        who: Identity = ANONYMOUS,
        *,
        spans: Sequence[Span] = (),
        early: bool = False,
        **options: Any,
    ) -> LeaseRecord | None:
        """A lease, or None if it does not fit; ``match`` and ``open`` must agree."""
        core, page = self.core, self.geometry.page_tokens
        before = core.digest()
        found = core.match(packed(tokens), who, spans)
        assert core.digest() == before, "match changed something"
        assert found.tokens <= max(0, len(tokens) - 1) and found.tokens % page == 0
        assert found.gpu_tokens + found.cpu_tokens + found.disk_tokens == found.tokens
        assert found.tokens <= found.history_tokens
        assert not any(s.start < found.tokens < s.stop for s in spans)
        roomy = self.roomy((found.tokens - found.gpu_tokens) // page, options.get("reserve", 0))
        try:
            rec, ops = core.open(packed(tokens), identity=who, spans=spans, **options)
        except OutOfPages:
            core.check()
            assert core.match(packed(tokens), who, spans) == found
            REACHED["open refused"] += 1
            return None
        assert before != core.digest()
        limit = options.get("max_reuse")
        whole = limit is None and options.get("read", True) and options.get("costs") is None
        got = (len(rec.nodes) or rec.length // page) * page
        assert got <= found.tokens, "open found more than match"
        assert got == found.tokens or not roomy or not whole, "open found less than match"
        assert limit is None or got <= max(0, limit)
        assert got == 0 or options.get("read", True)
        assert rec.recomputed == 0 or options.get("costs") is not None
        assert got + rec.recomputed * page <= found.tokens
        REACHED["dearer to load than to compute"] += rec.recomputed > 0
        REACHED["restore in stages"] += len({o.id for o in ops if o.kind is OpKind.RESTORE}) > 1
        self.epochs[rec.id] = self.epoch
        self.prolong(rec, tokens)
        REACHED["reused"] += got > 0
        REACHED["waits for two ops"] += len(rec.waits) > 1
        self.run(ops, early)
        return rec

    def roomy(self, missing: int, reserve: int) -> bool:
        """Whether a lease that misses so many pages fits without any eviction."""
        g, core = self.geometry, self.core
        pages = missing + -(-reserve // g.page_tokens)
        if core.residency.pools[GPU].free < pages:
            return False
        windows = g.window_kept // g.window_page + 2 if g.window else 0
        return not g.has_tails or (
            core.tails.states.free > 0 and core.tails.windows.free >= windows
        )

    def step(
        self,
        recs: list[LeaseRecord],
        news: list[list[int]],
        extra: list[int] | None = None,
        *,
        fail: bool = False,
    ) -> bool:
        """Reserve, let the kernels write (``extra`` tokens that will be rejected too), commit."""
        core = self.core
        extra = extra or [0] * len(recs)
        counts = [len(n) + e for n, e in zip(news, extra, strict=True)]
        before = [(r.length, r.capacity, list(r.frames)) for r in recs]
        try:
            captures, ops = core.reserve(recs, counts)
        except (LeaseReleased, LeaseNotReady):
            return False
        except OutOfPages:
            REACHED["step refused"] += 1
            assert [(r.length, r.capacity, r.frames) for r in recs] == before
            core.check()
            return False
        self.run(ops)
        for row, (rec, new, more) in enumerate(zip(recs, news, extra, strict=True)):
            due = {c.position: c.frame for c in captures if c.row == row}
            self.forward(rec, new, more, due)
        if fail:
            self.run(core.abandon(recs, counts))
            most = self.geometry.max_rejected
            for rec, n in zip(recs, counts, strict=True):
                if most is None or n <= most:  # still there: its owner puts it right
                    assert rec.state is LeaseState.ACTIVE
                    self.restore_state(rec)
                else:
                    assert rec.length % self.geometry.page_tokens == 0
                    REACHED["tail lost to a failed step"] += 1
            REACHED["step abandoned"] += 1
            return False
        self.commit(recs, news)
        return True

    def speculate(
        self,
        recs: list[LeaseRecord],
        accepted: list[list[int]],
        rejected: list[int],
        *,
        drafting: bool = False,
        fail: bool = False,
    ) -> bool:
        """One round: with ``drafting`` first a pass that writes what nobody accepts, then one that
        verifies.  Nothing but the accepted tokens may be heard of."""
        if drafting:
            nodes = self.core.residency.tree.num_nodes
            if not self.step(recs, [[] for _ in recs], rejected):
                return False
            assert self.core.residency.tree.num_nodes <= nodes, "drafts have been published"
            REACHED["drafted"] += 1
        was = [rec.length for rec in recs]
        if not self.step(recs, accepted, rejected, fail=fail):
            REACHED["speculative step failed"] += fail
            return False
        page, g = self.geometry.page_tokens, self.geometry
        for rec, before, new, more in zip(recs, was, accepted, rejected, strict=True):
            end = before + len(new)
            assert rec.length == end
            REACHED["all drafts accepted"] += bool(new) and not more
            REACHED["no draft accepted"] += bool(more) and not new
            REACHED["rejected across a page end"] += (end + more) // page > end // page
            REACHED["rejected from a page end on"] += bool(more) and end % page == 0 and end > 0
            if g.window:
                over = (end + more - 1) // g.window_page > (end - 1) // g.window_page
                REACHED["rejected across a window page"] += bool(more) and bool(end) and over
        return True

    def commit(self, recs: list[LeaseRecord], news: list[list[int]]) -> None:
        core, page = self.core, self.geometry.page_tokens
        nodes = [len(r.nodes) for r in recs]
        in_tree, flying = core.residency.tree.num_nodes, self.plane.live
        restoring = {
            c for op in flying for m in core.operations.running[op].moves for c in m.targets
        }
        flat = [t for n in news for t in n]
        for rec, new in zip(recs, news, strict=True):  # may be published from here on
            if rec.write:
                self.remember(rec, [*tokens_of(rec), *new])
        ops = core.commit(recs, [len(n) for n in news], packed(flat).data)
        REACHED["restore superseded"] += sum(
            c.node is None and c.slot == GPU and c.writer > 0
            for c in restoring & {*core.residency.orphans}
        )
        self.run(ops)
        for rec, before in zip(recs, nodes, strict=True):
            self.restore_state(rec)
            end = len(rec.nodes) * page
            assert rec.write or len(rec.nodes) == before, "a no-write lease has published"
            self.prolong(rec, tokens_of(rec))
            if len(rec.nodes) > before:
                assert not any(s.start < end and s.stop > rec.length for s in rec.spans), (
                    "a page of a span is published before the whole span is committed"
                )
                REACHED["span published"] += any(s.start < end for s in rec.spans)
                REACHED["duplicate page"] += any(rec.owned[before : len(rec.nodes)])
            REACHED["pages withheld for a span"] += (
                rec.write and bool(rec.spans) and len(rec.nodes) < rec.length // page
            )
        if not any(r.write for r in recs):
            assert core.residency.tree.num_nodes <= in_tree

    def prolong(self, rec: LeaseRecord, tokens: Sequence[int]) -> None:
        """Its pages live as long as this lease has asked for."""
        page = self.geometry.page_tokens
        for end in range(page, len(rec.nodes) * page + 1, page):
            key = (rec.identity, tuple(tokens[:end]))
            self.until[key] = max(self.until.get(key, 0.0), rec.expires)

    def check_expired(self) -> None:
        """Nobody is there: what nobody has asked for any more is gone."""
        self.run(self.core.expire(self.now))
        for page, _ in self.pages():
            assert self.until.get(page, NEVER) >= self.now, f"{page} has outlived its time"

    def remember(self, rec: LeaseRecord, tokens: list[int]) -> None:
        page = self.geometry.page_tokens
        spans = tuple(s for s in rec.spans if s.start < len(tokens))
        if spans and spans[-1].stop > len(tokens):  # nothing of an open span can be found
            tokens, spans = tokens[: spans[-1].start], spans[:-1]
        self.ever.add((rec.identity, tuple(tokens), spans))
        prefix = items(tokens, spans)
        for end in range(page, len(tokens) + 1, page):
            self.published.add((rec.identity, prefix[:end]))
            self.once.add((rec.identity, prefix[:end]))

    def serve(
        self,
        tokens: list[int],
        who: Identity = ANONYMOUS,
        *,
        chunk: int = 3,
        spans: Sequence[Span] = (),
        release: bool = True,
        **options: Any,
    ) -> LeaseRecord | None:
        """A whole request: restored, the rest computed, published; None if it does not fit."""
        rec = self.open([*tokens, 0], who, spans=spans, **options)
        if rec is None:
            return None
        while rec.state is LeaseState.RESTORING and self.plane.live:
            self.end(self.plane.oldest)
        while rec.length < len(tokens):
            if not self.step([rec], [tokens[rec.length : rec.length + chunk]]):
                break
        if release:
            self.run(self.core.release(rec))
        return rec

    def row(self, rec: LeaseRecord, prefix: tuple[Item, ...]) -> Row:
        return (self.epochs[rec.id], rec.identity, prefix)

    def forward(self, rec: LeaseRecord, new: list[int], rejected: int, due: dict[int, int]) -> None:
        tokens = list(tokens_of(rec))
        for i, token in enumerate([*new, *[9] * rejected]):
            tokens.append(token)
            self.plane.write_token(self.core, rec, self.row(rec, items(tokens, rec.spans)))
            if len(tokens) in due:
                if i < len(new):
                    self.plane.capture(rec, len(tokens), due[len(tokens)])
                else:
                    self.plane.checkpoints[due[len(tokens)]] = GARBAGE
                    REACHED["captured what was rejected"] += 1

    def restore_state(self, rec: LeaseRecord) -> None:
        """A state that is no ring: rejected tokens are undone by whoever wrote them."""
        ring = self.plane.ring
        if rec.tail is not None and rec.state is LeaseState.ACTIVE and not ring:
            prefix = prefix_of(rec)
            self.plane.states[rec.tail.state] = self.row(rec, prefix) if prefix else ()

    def fork(self, rec: LeaseRecord) -> LeaseRecord | None:
        try:
            kid, ops = self.core.fork(rec)
        except (OutOfPages, LeaseReleased, LeaseNotReady):
            self.core.check()
            return None
        self.epochs[kid.id] = self.epochs[rec.id]
        self.admitted.add(kid.id)  # a fork computes and restores nothing
        shared = kid.nodes
        REACHED["fork of a partial page"] += bool(rec.length % self.geometry.page_tokens)
        REACHED["fork with duplicates"] += any(kid.owned[: len(shared)])
        REACHED["fork with pages withheld"] += len(shared) < rec.length // self.geometry.page_tokens
        self.run(ops)
        return kid

    def pause(self, rec: LeaseRecord) -> None:
        page = self.geometry.page_tokens
        REACHED["paused"] += 1
        REACHED["paused with a partial page"] += bool(rec.length % page)
        REACHED["paused with duplicates"] += any(rec.owned[: len(rec.nodes)])
        REACHED["paused with unpublished pages"] += len(rec.nodes) < rec.length // page
        self.run(self.core.pause(rec))

    def cold(self, *tiers: Tier) -> None:
        """Nobody is there, nothing runs, and these tiers are empty."""
        for rec in list(self.core.leases.values()):
            self.run(self.core.release(rec))
        self.drain()
        for tier in tiers:
            self.run(self.core.evict(tier, 1 << 20)[1])
        self.drain()

    def restart(self) -> None:
        """The process dies wherever it is, handles and all; a new one opens what the disk has."""
        self.life += 1
        self.until = dict.fromkeys(plain(self.once), NEVER)  # the disk knows no time to live
        if any(o.kind is OpKind.DROP for o in self.plane.live.values()):
            self.epoch, self.published = 0, set(self.once)  # a clear that was not finished
            REACHED["died before a deletion"] += 1
        self.boot()
        REACHED["restarted with pages on disk"] += bool(self.disk.records)

    # ------------------------------------------------------------------ what must hold
    def sound(self) -> None:
        """Everything that can be checked from outside; poisons what is free first."""
        core = self.core
        self.plane.poison(core)
        core.check()
        assert not self.disk.orphans(), "an orphan on disk"
        assert set(core.operations.running) == set(self.plane.live)
        for rec in core.leases.values():
            self.plane.check_lease(core, rec, self.epochs[rec.id])
        self.check_published()
        self.check_counters()
        if self.events_on:
            self.check_events()

    def pages(self) -> Iterator[tuple[Page, Node]]:
        """All nodes with what they stand for, without spans' contents."""
        stride = self.geometry.page_tokens * 4
        for who, root in self.core.residency.tree.roots.items():
            paths: dict[Node, tuple[int, ...]] = {root: ()}
            for node in self.core.residency.tree.iterate(root):
                assert node.parent is not None
                own = np.frombuffer(node.page(stride), dtype="<i4").tolist()
                paths[node] = (*paths[node.parent], *own)
                yield (who, paths[node]), node

    def check_published(self) -> None:
        """Nobody but leases that write puts anything into the tree or on disk (A12)."""
        published = plain(self.published)
        for page, _ in self.pages():
            assert page in published, f"nobody has published {page}"

    def check_counters(self) -> None:
        """I1 in numbers, from first principles; what only grows; hits + computed = prompts."""
        core, res = self.core, self.core.residency
        stats, last = core.stats(), self.last
        live = [c for _, n in self.pages() for c in n.copies if c is not None]
        owned = {
            f for r in core.leases.values() for f, own in zip(r.frames, r.owned, strict=True) if own
        }
        owned |= {f for r in core.leases.values() for f in r.spare}
        for run in core.operations.running.values():
            for m in run.moves:
                owned |= {f for f in (m.writes, -1 if run.packed else m.reads) if f >= 0}
        dead = {
            n
            for r in [*core.leases.values(), *core.prefetches.values()]
            for n in r.nodes
            if n.run is None
        }
        kept = {n.copies[GPU] for n in dead} - {None}
        for tier in (Tier.GPU, Tier.CPU):
            slots = (GPU,) if tier is Tier.GPU else (CPU, CPU + CHECKPOINT)
            here = [c for c in live if c.slot in slots]
            s = stats.tiers[tier]
            filling = [c for c in [*here, *res.orphans] if not c.ready or c in res.orphans]
            assert s.in_flight == sum(len(c.frames) for c in filling if c.slot in slots), (tier, s)
            assert s.resident == sum(len(c.frames) for c in here if c.ready), (tier, s)
            parked = sum(len(c.frames) for c in res.parked)
            assert s.reserved == (len(owned) + len(kept) if tier is Tier.GPU else parked), (tier, s)
        for tier, s in stats.tiers.items():
            held = [
                c
                for _, n in self.pages()
                for c in (n.copies[tier], n.copies[tier + CHECKPOINT])
                if c is not None and c.slot != GPU + CHECKPOINT and (n.pins or n.keeps)
            ]
            rows = res.disk.frames if tier is Tier.DISK and res.disk is not None else None
            sizes = [len(c.frames) if rows is None else int(rows[c.frames[0]]) for c in held]
            assert s.pinned == sum(sizes), (tier, s)
            total = s.free + s.resident + s.reserved + s.in_flight + s.quarantined
            assert total == s.capacity and min(s.free, s.resident, s.reserved, s.in_flight) >= 0
            if tier in last.tiers:
                was = last.tiers[tier]
                assert s.hit_tokens >= was.hit_tokens and s.evictions >= was.evictions
                assert s.faults >= was.faults
        assert stats.computed_tokens >= last.computed_tokens and stats.lookups >= last.lookups
        assert stats.dropped_stores >= last.dropped_stores
        hits = sum(s.hit_tokens for s in stats.tiers.values())
        assert hits + stats.computed_tokens == self.admitted_tokens, "hits + computed != prompts"
        assert stats.lookup_tokens == self.admitted_tokens
        self.last = stats

    def check_events(self) -> None:
        """Who follows the event stream knows what is where."""
        core, disk = self.core, self.core.residency.disk
        assert core.events is not None
        for what, key, tier in core.events:
            if what == "stored":
                self.seen.add((key, tier))
            else:
                self.seen.discard((key, tier))
        core.events.clear()
        there = {
            (core.residency.digest(n), tier)
            for _, n in self.pages()
            for tier, c in zip(TIERS, n.copies[:3], strict=True)
            if c is not None and c.ready and tier is not Tier.DISK
        }
        if disk is not None:  # what was there at the start is listed, not announced
            rows = {disk.key(int(r)) for r in disk.all_rows() if not disk.is_checkpoint(int(r))}
            filling = {
                core.residency.digest(n)
                for _, n in self.pages()
                if (c := n.copies[DISK]) is not None and not c.ready
            }
            there |= {(k, Tier.DISK) for k in rows - filling - self.found}
            there |= {e for e in self.seen if e[0] in rows & self.found and e[1] is Tier.DISK}
        assert self.seen == there, (self.seen - there, there - self.seen)


def server(geometry: Geometry, **options: Any) -> FakeServer:
    made = FakeServer()
    made.build(geometry, **options)
    return made


__all__ = ["DISK", "ENTRY", "REACHED", "FakeServer", "packed", "server"]
