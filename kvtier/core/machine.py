"""``CacheCore``: the whole state machine, without I/O, threads, clock or tensors.

Every public method returns the operations the shell must start, in order, or raises having
changed nothing.  Completions come back through ``packed`` and ``finish``.  The same calls in the
same order lead to the same state (``digest``), in any process.

Invariants, checked by ``check()``:

* I1  every frame is free, in exactly one copy, private with a counted number of holders, or left
      behind to an operation;
* I2  pins count the leases whose path has the node, and never grow towards the leaves;
* I3  a filling copy has exactly one writer, a READY one none; readers are the operations reading;
* I4  a RESTORING lease waits for at least one operation, an ACTIVE one for none;
* I5  a block table names READY copies the lease pins, or frames it owns;
* I6  a page is in a tier only if its parent is;
* I7  a node lives only with a copy, a child, a pin or a keep;
* I9  every node in the tree has a READY history copy;
* I10 whatever may leave a tier is queued for it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.config import Adaptive, CheckpointPolicy, EvictionPolicy
from kvtier.core import check, lookup, report
from kvtier.core.branching import Branching
from kvtier.core.copies import CPU, DISK
from kvtier.core.disk import DiskTable
from kvtier.core.geometry import Geometry
from kvtier.core.keys import ANONYMOUS, check_spans, page_extras
from kvtier.core.leases import NEVER, LeaseRecord, LeaseTables, PinRecord, PrefetchRecord
from kvtier.core.lifetimes import Lifetimes
from kvtier.core.load_costs import LoadCosts
from kvtier.core.lower import Lower
from kvtier.core.operations import Operations, TailPools
from kvtier.core.ops import Op, OpKind, Shortfall
from kvtier.core.parking import Parking
from kvtier.core.pinning import Pinning
from kvtier.core.residency import Residency
from kvtier.core.restore import Restore
from kvtier.core.tree import Node
from kvtier.core.upkeep import Upkeep
from kvtier.core.waiting import Waiting
from kvtier.core.writing import Writing
from kvtier.errors import LeaseError, OutOfPages
from kvtier.tokens import TokenBuffer
from kvtier.types import (
    CacheStats,
    Capture,
    Identity,
    LeaseState,
    PageInfo,
    PageReport,
    PrefixMatch,
    Span,
    Tier,
)

__all__ = ["CacheCore"]


class CacheCore:
    """Decides where pages live and what leases may read.  See the module's invariants."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        chain: bytes,
        eviction: str | EvictionPolicy = "adaptive",
        checkpoints: CheckpointPolicy | None = None,
        entries: npt.NDArray[Any] | None = None,
        read_only_disk: bool = False,
        store_after_hits: int = 0,
        max_pinned: float = 0.5,
    ) -> None:
        self.geometry = geometry
        self.chain = chain
        disk = None if entries is None else DiskTable(geometry.disk_frames, entries)
        checkpoints = checkpoints or Adaptive()
        self.residency = Residency(geometry, chain, eviction, disk, checkpoints)
        self.tails = TailPools(geometry.gpu_states, geometry.gpu_windows)
        self.operations = Operations(self.residency, self.tails)
        self.operations.read_only_disk = read_only_disk
        self.tables = LeaseTables(geometry.max_leases, windows=geometry.window > 0)
        self.settled: list[LeaseRecord | PrefetchRecord] = []
        self.restore = Restore(
            self.residency, self.operations, self.tails, self.tables, self.settled
        )
        self.lower = Lower(
            self.residency,
            self.operations,
            store_after_hits=store_after_hits,
            stores=not read_only_disk,
        )
        self.parking = Parking(self.restore, self.lower)
        self.lifetimes = Lifetimes(self.residency)
        self.writing = Writing(
            self.residency,
            self.operations,
            self.tails,
            self.tables,
            self.lower,
            self.lifetimes,
            checkpoints,
        )
        self._ids = count(1)
        self.branching = Branching(self.restore, self.writing, self._ids)
        self.leases: dict[int, LeaseRecord] = {}
        self.upkeep = Upkeep(self.residency, self.leases, stores=self.lower.stores)
        self.waiting = Waiting(
            self.residency, self.operations, self.restore, self.parking, self.leases
        )
        self.prefetches = self.waiting.prefetches
        self.unwanted = self.waiting.unwanted
        """RESTOREs from disk that nobody waits for any more: whoever runs them may leave out what
        has not begun.  To be taken out of here."""
        self.pins: list[PinRecord] = []
        self.pinning = Pinning(self.residency, self.pins, share=max_pinned)
        self.lookups = 0
        if disk is not None:
            self.residency.tick = int(disk.tick[disk.all_rows()].max(initial=0))
            if not read_only_disk and disk.used > disk.capacity:  # opened with a smaller limit
                self.residency.evictor.disk_room(0)

    # ------------------------------------------------------------------ tables for steps
    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Committed tokens by ``LeaseRecord.row``."""
        return self.tables.lengths

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """Device page ids by ``LeaseRecord.row``; -1 past the end."""
        return self.tables.blocks

    @property
    def window_tables(self) -> npt.NDArray[np.int32]:
        """Window page ids by row and window page number; -1 where not held."""
        return self.tables.windows

    # ------------------------------------------------------------------ reading
    def match(
        self, tokens: TokenBuffer, identity: Identity = ANONYMOUS, spans: Sequence[Span] = ()
    ) -> PrefixMatch:
        """What a lease opened now would find.  Reads only: no pin, no recency change."""
        return lookup.match(self.residency, tokens, identity, spans)

    # ------------------------------------------------------------------ leases
    def open(
        self,
        tokens: TokenBuffer,
        *,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        max_reuse: int | None = None,
        read: bool = True,
        write: bool = True,
        reserve: int = 0,
        priority: int = 0,
        expires: float | None = None,
        costs: LoadCosts | None = None,
        label: str = "",
        opened_at: str = "",
    ) -> tuple[LeaseRecord, list[Op]]:
        """Pin the longest prefix a lease may stand on (with ``costs``: as far as loading it is
        worth its while) and plan what is missing of it.

        Raises OutOfPages, having changed nothing, if ``reserve`` tokens past it do not fit or
        ``max_leases`` are open.
        """
        page = self.geometry.page_tokens
        spans = check_spans(spans, len(tokens)) if spans else ()
        extras = page_extras(spans, page) if spans else {}
        if not self.tables.free:
            raise OutOfPages(1, 0, f"leases (max_leases={self.geometry.max_leases})")
        limit = self._reusable(len(tokens), max_reuse) if read else 0
        root = self.residency.root(identity)
        path, known = self.restore.path(root, tokens.data, extras, limit)
        rec = LeaseRecord(
            id=next(self._ids),
            row=self.tables.free[-1],
            identity=identity,
            spans=spans,
            extras=extras,
            root=root,
            prompt=tokens,
            source=tokens.data,
            read=read,
            write=write,
            limit=limit,
            priority=priority,
            expires=NEVER if expires is None else expires,
            label=label,
            opened_at=opened_at,
            known_pages=known,
            costs=costs,
        )
        try:
            ops = self.restore.bring_up(rec, path, -(-reserve // page))
        finally:
            for n in reversed(path[len(rec.nodes) :]):
                self.residency.prune(n)
        self.tables.free.pop()
        root.pins += 1
        self.leases[rec.id] = rec
        self.lookups += 1
        self.residency.touch(rec.nodes, hits=1)
        self.lifetimes.extend(rec.nodes, rec)
        if write:
            ops += self.lower.again(rec.nodes)
        return rec, ops

    def _reusable(self, num_tokens: int, max_reuse: int | None) -> int:
        """Full pages that a lease may stand on: at least the last token is computed."""
        page = self.geometry.page_tokens
        limit = max(0, num_tokens - 1) // page
        if max_reuse is not None:
            limit = min(limit, max(0, max_reuse) // page)
        return limit

    def settle_early(self, rec: LeaseRecord | PrefetchRecord, *, hung: bool = False) -> list[Op]:
        """Stop waiting for the disk: a lease stands on what is nearer, a prefetch ends with what
        has come.  What is under way still arrives, in frames of its own, for whoever comes next.
        A lease that waits for nothing of the disk is left as it is, and so is one for which there
        is no other state slot than the one that is still being written.  ``hung``: it is a fault
        of the disk, and counted."""
        if (ops := self.waiting.without_disk(rec)) is None:
            return self._drops()
        self.residency.faults[DISK] += hung
        return ops + self._drops()

    def at_hand(self, rec: LeaseRecord) -> int:
        """Tokens that a RESTORING lease could stand on without waiting for the disk."""
        return self.restore.at_hand(rec) * self.geometry.page_tokens

    # ------------------------------------------------------------------ writing
    def reserve(
        self, recs: Sequence[LeaseRecord], counts: Sequence[int]
    ) -> tuple[list[Capture], list[Op]]:
        """Room for ``counts[i]`` tokens past the committed ones of ``recs[i]``, for all or (raising
        OutOfPages) none; with tails also the captures that fall due."""
        return self.writing.reserve(recs, counts), self._drops()

    def commit(self, recs: Sequence[LeaseRecord], counts: Sequence[int], data: bytes) -> list[Op]:
        """These tokens' rows are written (in stream order).  ``data`` holds them packed, lease
        after lease.  Full pages become shareable and start on their way down: one PACK for all."""
        return self.writing.commit(recs, counts, data)

    def abandon(self, recs: Sequence[LeaseRecord], counts: Sequence[int]) -> list[Op]:
        """A step that was to write ``counts[i]`` tokens of ``recs[i]`` was left with an exception:
        captures go back, the reserve stays.  Where that many may not be rejected, the lease
        restores at its last checkpoint: nobody knows how far the pass came in its tail."""
        self.writing.abandon(recs)
        most, ops = self.geometry.max_rejected, []
        for rec, n in zip(recs, counts, strict=True):
            if most is not None and n > most and rec.state is LeaseState.ACTIVE:
                ops += self.branching.to_checkpoint(rec, rec.length)[1]
        return ops

    def truncate(self, rec: LeaseRecord, n: int) -> tuple[int, list[Op]]:
        """Roll back to at most ``n`` committed tokens; returns where the lease now stands."""
        return self.branching.truncate(rec, n)

    def fork(
        self, rec: LeaseRecord, label: str = "", opened_at: str = ""
    ) -> tuple[LeaseRecord, list[Op]]:
        """A second lease on the same tokens: full pages shared, the partial one and the tail
        copied.  Raises OutOfPages, having changed nothing."""
        kid, ops = self.branching.fork(rec, label, opened_at)
        kid.root.pins += 1
        self.leases[kid.id] = kid
        return kid, ops

    def pause(self, rec: LeaseRecord) -> list[Op]:
        """Park all of a lease on the host and free its device pages; settles as PAUSED."""
        rec.check_active()
        self.writing.return_captures(rec)
        return self.parking.pause(rec)

    def resume(self, rec: LeaseRecord) -> list[Op]:
        """Bring a paused lease back; settles as ACTIVE, where it stood or (if the host was full)
        shorter.  OutOfPages leaves it paused."""
        if rec.state is not LeaseState.PAUSED:
            rec.check_active()
            raise LeaseError(f"lease {rec.id} {rec.label!r} is not paused")
        return self.parking.resume(rec)

    def release(self, rec: LeaseRecord) -> list[Op]:
        """Let go of everything, in any state.  Idempotent."""
        if rec.state is LeaseState.RELEASED:
            return []
        self.writing.return_captures(rec)
        awaited = rec.waits
        ends = rec.write and rec.state is LeaseState.ACTIVE
        ops = self.lower.turn_end(rec.nodes) if ends else []
        self.parking.drop(rec)
        self.restore.let_go(rec)
        for frame in rec.spare:
            self.operations.private.drop(frame)
        rec.spare = []
        rec.origins = {}
        rec.root.pins -= 1
        rec.state = LeaseState.RELEASED
        self.tables.free.append(rec.row)
        del self.leases[rec.id]
        if awaited:
            self.waiting.no_more(awaited)
        return ops + self._drops()

    # ------------------------------------------------------------------ upkeep
    def prefetch(
        self,
        tokens: TokenBuffer,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        *,
        most: int | None = None,
    ) -> tuple[PrefetchRecord, list[Op]]:
        """Bring a prefix up to the host; of pages that only the disk has ``most`` (None: all)."""
        path = self._known(tokens, identity, spans)
        whole = max(0, len(tokens) - 1) // self.geometry.page_tokens
        return self.waiting.prefetch(next(self._ids), path, whole, most)

    def _known(self, tokens: TokenBuffer, identity: Identity, spans: Sequence[Span]) -> list[Node]:
        """All known pages of a prompt; those that are only on disk are given nodes."""
        page = self.geometry.page_tokens
        extras = page_extras(check_spans(spans, len(tokens)), page) if spans else {}
        root = self.residency.root(identity)
        return self.restore.path(root, tokens.data, extras, len(tokens) // page)[0]

    def cancel_prefetch(self, rec: PrefetchRecord) -> list[Op]:
        """Stop waiting; what still arrives stays, and its frames can be evicted then."""
        self.waiting.cancel(rec)
        return self._drops()

    def pin(
        self,
        tokens: TokenBuffer,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        owner: str = "",
    ) -> PinRecord:
        """Keep what is known of a prefix in some tier until ``unpin``; stops where all pins
        together would hold more than ``max_pinned`` of the device and host pages."""
        return self.pinning.pin(self._known(tokens, identity, spans), owner)

    def unpin(self, rec: PinRecord) -> list[Op]:
        """Idempotent."""
        self.pinning.unpin(rec)
        return self._drops()

    def evict(self, tier: Tier, pages: int) -> tuple[int, list[Op]]:
        """Drop up to ``pages`` frames of a tier, least recently used first; returns how many."""
        return self.upkeep.evict(tier, pages), self._drops()

    def clear(
        self, identity: Identity | None = None, tiers: Iterable[Tier] | None = None
    ) -> list[Op]:
        """Forget an identity (None: all) in these tiers (None: all).  Open leases keep their
        pages; with all tiers they can no longer be matched and publish nothing more.  What is in
        flight becomes visible to nobody."""
        self.upkeep.clear(identity, tiers)
        return self.operations.drop_op(again=True)

    @property
    def next_expiry(self) -> float:
        """The earliest time at which ``expire`` may have something to do; infinity: never."""
        return self.lifetimes.next

    def expire(self, now: float) -> list[Op]:
        """Drop pages whose time to live has passed and that nobody holds."""
        self.lifetimes.expire(now)
        return self._drops()

    # ------------------------------------------------------------------ completions
    def packed(self, op_id: int) -> list[Op]:
        """The device side of a PACK has been read; its sources may be reused."""
        self.operations.packed(op_id)
        return self._drops()

    def finish(
        self, op_id: int, delivered: int, shortfall: Shortfall = Shortfall.SOURCE
    ) -> list[Op]:
        """An operation has ended with its first ``delivered`` parts done; ``shortfall`` is why
        not with all, if so.

        A RESTORE whose next part has a bad or missing ``SOURCE``: that copy is not offered again.
        After a ``FAULT`` the leases waiting settle for what arrived.  If it was ``UNWANTED``, who
        has come to wait for it meanwhile plans again.
        """
        run = self.operations.finish(op_id, delivered, shortfall)
        ops = self.waiting.finished(op_id, run, shortfall)
        if run.op.kind is OpKind.PACK:
            targets = (copy for move in run.delivered for copy in move.targets)
            arrived = [c.node for c in targets if c.slot % 3 == CPU and c.node is not None]
            if arrived:
                ops += self.lower.store([*arrived, *self.lower.waiting_below(arrived)])
        return ops + self._drops()

    def _drops(self) -> list[Op]:
        return self.operations.drop_op()

    # ------------------------------------------------------------------ looking inside
    @property
    def idle(self) -> bool:
        return not self.operations.running

    def busy(self, tier: Tier) -> bool:
        """Whether operations run that lower something to ``tier`` or above it."""
        kinds = {OpKind.PACK} if tier is Tier.CPU else {OpKind.PACK, OpKind.STORE, OpKind.DROP}
        return any(r.op.kind in kinds for r in self.operations.running.values())

    def subscribe(self, maxlen: int) -> None:
        """Record page events from now on, the last ``maxlen`` of them."""
        if self.residency.events is None:
            self.residency.events = deque(maxlen=maxlen)

    @property
    def events(self) -> "deque[tuple[str, bytes, Tier]] | None":
        return self.residency.events

    @property
    def events_dropped(self) -> int:
        return self.residency.events_dropped

    def disk_ticks(self) -> list[tuple[bytes, int]]:
        """Recency of the disk records used since the last call, for ``Store.touch``."""
        disk = self.residency.disk
        if disk is None:
            return []
        touched, disk.touched = disk.touched, set()
        return [(disk.key(r), int(disk.tick[r])) for r in sorted(touched)]

    def explain(
        self,
        tokens: TokenBuffer,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        *,
        costs: LoadCosts | None = None,
    ) -> list[PageReport]:
        """Page by page: where it is, or why it is not a hit; with ``costs`` also what a lease that
        weighs them would do."""
        return report.explain(self, tokens, identity, spans, costs)

    def stats(self) -> CacheStats:
        """A consistent snapshot of the core's counters."""
        return report.stats(self)

    def pages(self, identity: Identity | None = None) -> list[PageInfo]:
        """The radix tree, parents before children."""
        return report.pages(self, identity)

    def check(self) -> None:
        """Raises InvariantError naming every violated invariant; O(pages)."""
        check.check(self)

    def digest(self) -> bytes:
        """16 bytes over the whole state."""
        return report.digest(self)
