"""``Cache``: the face of the library.

Owns the parts (core, pump, transfer, store) from construction to ``close`` and checks arguments
at the public edge, once.  Decides nothing: where pages live is the core's business, how bytes
move the transfer's.
"""

import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self, final

from kvtier.arguments import (
    check_identity,
    check_prompt,
    check_tier,
    check_tiers,
    check_ttl,
    check_type,
)
from kvtier.assembly import check_parts, geometry_of, make_core, make_transfer, open_store
from kvtier.config import CacheConfig, RestorePolicy, as_int
from kvtier.core import lookup, report
from kvtier.core.keys import ANONYMOUS, chain_base
from kvtier.core.leases import LeaseRecord
from kvtier.core.load_costs import ALWAYS
from kvtier.core.machine import CacheCore
from kvtier.device_step import PagedTransfer, StepBuffers
from kvtier.errors import ConfigError, LeaseError
from kvtier.flushing import Flushing, settle
from kvtier.futures import running_future
from kvtier.layouts.base import Layout
from kvtier.lease import Lease, Pin, opened_at
from kvtier.metrics import prometheus_text
from kvtier.pump import Pump
from kvtier.seams import Store, Transfer
from kvtier.sizing import geometry_for, record_sizes
from kvtier.step import Step
from kvtier.stepping import Stepping
from kvtier.tokens import TokenBuffer, Tokens, pack
from kvtier.types import (
    CacheStats,
    Identity,
    LeaseInfo,
    PageInfo,
    PageReport,
    PrefixMatch,
    Span,
    Tier,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Cache", "Pin"]

logger = logging.getLogger("kvtier")

_EVENTS_KEPT = 1 << 16
"""Events between two calls of ``Cache.events``; older ones are dropped, and that is reported."""
_NO_STORES: Mapping[Tier, Store] = MappingProxyType({})


@final
class Cache:
    """The cache.  Open once constructed; use it as a context manager.

    Thread-safe: one lock, never held over I/O or a device wait.  Work is finished by the
    transfer's own threads, so futures resolve without anyone polling and ``asyncio.wrap_future``
    works on them.  Callbacks added to a future may run on such a thread: keep them short.

    After ``close``, and in a forked child, every call raises CacheClosed.
    """

    def __init__(
        self,
        layout: Layout,
        config: CacheConfig,
        *,
        model: bytes | str,
        device: str = "cuda",
        transfer: Transfer | None = None,
        stores: Mapping[Tier, Store] = _NO_STORES,
    ) -> None:
        """Takes every page and opens the store, or raises having taken nothing.

        ``model`` names everything else that changes what the bytes mean: weights id, revision,
        rope.  A cache of another model shares nothing with this one, on disk either.

        ``transfer`` and ``stores`` are for tests, for other storage systems and for engines that
        own the device; the defaults are CUDA streams and LMDB.  What is passed in is closed with
        the cache.  A transfer that moves pages to a disk tier needs the same store as
        ``stores[Tier.DISK]``.

        Raises ConfigError for sizes that cannot hold one request, naming the field and the least
        that works, and StoreError (StoreLocked) for a directory that cannot be opened.
        """
        check_parts(layout, config, model, transfer, stores)
        self._layout = layout
        self._config = config
        self._model = model.encode() if isinstance(model, str) else model
        geometry_for(layout, config)  # refuses bad sizes before anything is opened
        chain = chain_base(layout.fingerprint, self._model)
        opened = None if config.disk_path is None else open_store(layout, config, chain)
        self._store = stores.get(Tier.DISK, opened)
        try:
            geometry = geometry_of(layout, config, self._store)
            self._core = make_core(geometry, config, chain, self._store)
            if transfer is None:
                transfer = make_transfer(layout, geometry, device, self._store, config)
        except BaseException:
            if opened is not None:
                opened.close()
            raise
        self._pool = transfer.pool if isinstance(transfer, PagedTransfer) else None
        self._pump = Pump(self._core, transfer, record_sizes(layout), stall_s=config.disk_stall_s)
        written = self._store if config.disk_mode == "write" else None
        self._flushing = Flushing(self._pump, written, stall_s=config.disk_stall_s)
        self._events_missed = 0

    def __repr__(self) -> str:
        return f"<Cache of {self._layout.name!r} {'closed' if self.closed else 'open'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except LeaseError as error:
            # The body's exception is the news; its leases were left open because of it.
            if exc is None:
                raise
            logger.warning("%s", error)

    def __del__(self) -> None:
        pump: Pump | None = getattr(self, "_pump", None)  # None: the constructor raised
        if pump is not None and not pump.closed and not pump.foreign:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)

    def close(self, *, drain: bool = True) -> None:
        """Finish (or, with ``drain=False``, abandon) queued stores and give everything back.

        Idempotent, and nothing at all in a forked child.  A disk that hangs is not waited for
        (``CacheConfig.disk_stall_s``): a warning is logged, and the store stays open until the
        process ends.  With leases outstanding it raises LeaseError that lists them, after closing:
        nothing is leaked, and the bug is loud.
        """
        if self._pump.closed or self._pump.foreign:
            return
        try:
            survivors = self._pump.close(drain=drain)
        finally:
            self._close_store()
        if survivors:
            listed = ", ".join(f"{r.label!r} opened at {r.opened_at}" for r in survivors)
            leases = "1 open lease" if len(survivors) == 1 else f"{len(survivors)} open leases"
            raise LeaseError(f"the cache was closed with {leases}, now released: {listed}")

    @property
    def closed(self) -> bool:
        return self._pump.closed

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def config(self) -> CacheConfig:
        return self._config

    # -- requests

    def match(
        self, tokens: Tokens, *, identity: Identity = ANONYMOUS, spans: Sequence[Span] = ()
    ) -> PrefixMatch:
        """Longest reusable prefix.  Reads only: no pin, no recency change."""
        if type(tokens) is not TokenBuffer:
            tokens = pack(tokens)
        if identity is not ANONYMOUS:
            check_identity(identity)
        res, pump = self._core.residency, self._pump
        if pump.refuses:
            pump.refuse()
        if not spans and lookup.absent(res, tokens, identity):
            return lookup.NOTHING
        lock = pump.reading
        lock.acquire()  # twice as fast as ``with``
        try:
            return lookup.match(res, tokens, identity, spans)
        finally:
            lock.release()

    def lease(
        self,
        tokens: Tokens,
        *,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        max_reuse: int | None = None,
        read: bool = True,
        write: bool = True,
        reserve: int = 0,
        priority: int = 0,
        ttl: float | None = None,
        restore: RestorePolicy | None = None,
        label: str = "",
    ) -> Lease:
        """Pin the longest reusable prefix and start bringing it up.  Returns at once.

        At most ``len(tokens) - 1`` tokens are reused, so there is always one to compute.  Falls
        back to shorter prefixes when the device is full.  ``max_reuse`` caps what is reused
        (prompt log-probabilities from a position on); ``read=False`` starts cold; ``write=False``
        leaves nothing behind in any tier.  ``reserve`` makes room for that many tokens past the
        reused prefix.  Pages of higher ``priority`` are evicted later; pages of a lease with a
        ``ttl`` may be dropped that many seconds from now.  ``restore`` (None: that of the
        configuration) says how much is worth loading, and how long to wait for it.

        Raises OutOfPages if ``reserve`` cannot be met or ``max_leases`` are open; then nothing has
        changed.
        """
        packed, placed = check_prompt(tokens, identity, spans)
        reserve = as_int("reserve", reserve, least=0)
        if max_reuse is not None:
            max_reuse = as_int("max_reuse", max_reuse, least=0)
        check_type("label", label, str)
        check_type("read", read, bool)
        check_type("write", write, bool)
        priority = as_int("priority", priority)
        expires = None if ttl is None else time.monotonic() + check_ttl(ttl)
        policy = self._config.restore if restore is None else restore
        check_type("restore", policy, RestorePolicy)
        ready = running_future()
        where = opened_at(1)
        with self._pump as core:
            self._expire(core)
            costs = self._pump.deadlines.weighed(policy)
            record, ops = core.open(
                packed,
                identity=identity,
                spans=placed,
                max_reuse=max_reuse,
                read=read,
                write=write,
                reserve=reserve,
                priority=priority,
                expires=expires,
                costs=costs,
                label=label,
                opened_at=where,
            )
            lease = Lease(self._pump, self._layout, record, ready)
            self._pump.expect_ready(record, ready)
            self._pump.plan(ops)
            if costs is not None:
                self._pump.deadlines.bound(record, costs.compute_s, policy.timeout_s)
                self._load_behind(core, record, policy)
        return lease

    def step(
        self,
        work: Iterable[tuple[Lease, Tokens]],
        *,
        stream: "torch.cuda.Stream | None" = None,
    ) -> AbstractContextManager[Step]:
        """One forward pass over these leases, each with the tokens to feed it.

        Entering reserves room for the whole batch or raises OutOfPages with nothing changed.
        Leaving it normally commits every token given (or what ``Step.accept`` said): their KV is
        written by what the block queued on ``stream`` (None: the current one).  Leaving it with an
        exception commits none and lets that exception through; what was reserved stays as the
        leases' capacity.  (A lease that was fed more than ``Layout.max_rejected`` tokens has lost
        its tail by then: it restores at its last checkpoint, so wait on ``ready`` again.)  A lease
        that was released meanwhile is left out, and its pages return then.  An empty batch is a
        step too.

        Raises LeaseError for a lease that is in the batch twice, in another step or of another
        cache, LeaseReleased, LeaseNotReady, and TokenError.
        """
        return Stepping(self._pump, self._layout, self._pool, work, stream)

    def prefetch(
        self, tokens: Tokens, *, identity: Identity = ANONYMOUS, spans: Sequence[Span] = ()
    ) -> "Future[int]":
        """Bring a prefix up to the host.  Resolves to the tokens now there or on the device.

        Cancelling the future (also through ``asyncio.wrap_future``) returns its budget; what has
        arrived stays.  It fails never: a page that cannot be read ends the prefix, and so does a
        disk that hangs (``CacheConfig.disk_stall_s``).
        """
        packed, placed = check_prompt(tokens, identity, spans)
        future: Future[int] = Future()
        with self._pump as core:
            most = 1 if self._pump.deadlines.disk_hangs() else None
            record, ops = core.prefetch(packed, identity, placed, most=most)
            self._pump.expect_prefetch(record, future)
            self._pump.plan(ops)

        def ended(future: "Future[int]") -> None:
            if future.cancelled():
                self._pump.cancel_prefetch(record)

        future.add_done_callback(ended)
        return future

    def pin(
        self,
        tokens: Tokens,
        *,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        owner: str = "",
    ) -> Pin:
        """Keep the known part of a prefix in its tiers until the pin is closed.

        Never more than ``CacheConfig.max_pinned`` of a tier: ``Pin.tokens`` says how much is held.
        """
        packed, placed = check_prompt(tokens, identity, spans)
        with self._pump as core:
            return Pin(self._pump, core.pin(packed, identity, placed, owner))

    def buffers(self, *, max_batch: int, max_tokens: int, max_pages: int) -> StepBuffers:
        """Static device arrays for CUDA graphs; see ``Step.to_device``."""
        return StepBuffers(
            self._layout,
            "cpu" if self._pool is None else self._pool.device,
            max_batch=max_batch,
            max_tokens=max_tokens,
            max_pages=max_pages,
        )

    # -- upkeep

    def flush(self, *, to: Tier = Tier.DISK) -> "Future[None]":
        """Resolves once everything committed so far is as low as it will go.

        ``to=Tier.CPU`` waits for host copies only.  Carries StoreError if something could not be
        stored, or the disk hangs (``CacheConfig.disk_stall_s``); elsewhere a store that fails is a
        page that is not kept, and a counter.
        """
        if not isinstance(to, int) or to not in (Tier.CPU, Tier.DISK):
            raise ConfigError(f"flush goes to Tier.CPU or Tier.DISK, not {to!r}")
        return self._flushing.flush(Tier(to))

    def evict(self, tier: Tier, pages: int) -> int:
        """Drop up to ``pages`` unpinned pages, in the policy's order; returns how many."""
        pages = as_int("pages", pages, least=0)
        with self._pump as core:
            self._expire(core)
            count, ops = core.evict(check_tier(tier), pages)
            self._pump.plan(ops)
        return count

    def clear(
        self, *, identity: Identity | None = None, tiers: Iterable[Tier] | None = None
    ) -> "Future[None]":
        """Forget everything (e.g. after a weight update), or one identity, or some tiers.

        At once nothing of it can be matched any more, and what is on its way will not appear;
        open leases keep their pages.  Resolves when the disk has forgotten it too, and carries
        StoreError if it would not: then the old pages may be found again after a restart.
        """
        if identity is not None:
            check_identity(identity)
        chosen = None if tiers is None else check_tiers(tiers)
        future = running_future()
        with self._pump as core:
            ops = core.clear(identity, chosen)
            self._pump.plan(ops)
            self._pump.watch((op.id for op in ops), partial(settle, future))
        return future

    # -- looking inside

    def stats(self) -> CacheStats:
        """A consistent snapshot.  Bytes are those of pages and tails moved, before any codec."""
        with self._pump as core:
            self._expire(core)
            stats, moved = core.stats(), dict(self._pump.moved)
            forgotten = self._pump.forgotten.total()
        tiers = {
            tier: replace(
                each,
                read_bytes=moved.get((tier, "read"), 0),
                written_bytes=moved.get((tier, "written"), 0),
            )
            for tier, each in stats.tiers.items()
        }
        return replace(stats, tiers=MappingProxyType(tiers), forgotten_leases=forgotten)

    def prometheus(self) -> str:
        """``stats`` as Prometheus text: what a ``/metrics`` endpoint returns."""
        stats = self.stats()
        with self._pump as core:
            dropped = core.events_dropped
        info = {
            "layout": self._layout.name,
            "model": self._model.decode(errors="backslashreplace"),
            "rank": f"{self._config.rank}/{self._config.world}",
        }
        return prometheus_text(stats, info=info, events_dropped=dropped)

    def explain(
        self,
        tokens: Tokens,
        *,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        restore: RestorePolicy | None = None,
    ) -> list[PageReport]:
        """For each page of these tokens: the tiers that have it, or why it is not a hit; and what
        a lease with this policy (None: that of the configuration) would do now, by the speeds
        measured lately.  Reads only."""
        packed, placed = check_prompt(tokens, identity, spans)
        policy = self._config.restore if restore is None else restore
        check_type("restore", policy, RestorePolicy)
        with self._pump as core:
            deadlines = self._pump.deadlines
            costs = deadlines.weighed(policy) or deadlines.costs(ALWAYS)
            return core.explain(packed, identity, placed, costs=costs)

    def events(self) -> Iterator[tuple[str, bytes, Tier]]:
        """What happened since the last call: ("stored" | "removed", page key, tier), in order.

        Recording starts with the first call, which yields nothing; ``pages`` is the state to start
        from.  Neither lists pages that were on disk when the cache was opened until they are used.
        Never blocks.  At most 65,536 events are kept: if some were lost, the first item is
        ("dropped", b"", Tier.GPU), and a reader has to start from ``pages`` again.
        """
        with self._pump as core:
            if core.events is None:
                core.subscribe(_EVENTS_KEPT)
                return iter(())
            happened = list(core.events)
            core.events.clear()
            if core.events_dropped > self._events_missed:
                self._events_missed = core.events_dropped
                happened.insert(0, ("dropped", b"", Tier.GPU))
        return iter(happened)

    def leases(self) -> list[LeaseInfo]:
        """The open leases, oldest first."""
        with self._pump as core:
            return report.leases(core)

    def pages(self, *, identity: Identity | None = None) -> Iterator[PageInfo]:
        """A snapshot of the radix tree, parents before children."""
        if identity is not None:
            check_identity(identity)
        with self._pump as core:
            return iter(core.pages(identity))

    def check(self) -> None:
        """Check every invariant; O(pages).  Raises InvariantError."""
        with self._pump as core:
            core.check()

    # -- inside

    def _load_behind(self, core: CacheCore, record: LeaseRecord, policy: RestorePolicy) -> None:
        """Nobody waits for what the lease has left on the disk.  On best effort all of it is
        brought to the host, if the disk has time for it; else a page now and then, to see whether
        the disk is still so slow."""
        deadlines = self._pump.deadlines
        most = None if policy.mode == "best_effort" and not deadlines.disk_swamped() else 1
        if record.recomputed and (most is None or deadlines.disk_unproven()):
            identity, spans = record.identity, record.spans
            _, ops = core.prefetch(record.prompt, identity, spans, most=most)
            self._pump.plan(ops)

    def _expire(self, core: CacheCore) -> None:
        if core.next_expiry < inf and core.next_expiry < (now := time.monotonic()):
            self._pump.plan(core.expire(now))

    def _close_store(self) -> None:
        if self._store is not None and not self._pump.disk_hangs:
            self._flushing.close(self._core, self._store)
