"""``Lease``: a request's hold on its pages.  ``Pin``: a prefix kept without a request.

Thin: what a lease holds is its record in the core, which is touched through the pump only.  A
lease that is forgotten gives its pages back when the garbage collector finds it.
"""

import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Self, final

import numpy as np

from kvtier.config import as_int
from kvtier.core.leases import LeaseRecord, PinRecord
from kvtier.core.machine import CacheCore
from kvtier.device_step import PagedTransfer
from kvtier.errors import CacheClosed, ConfigError, LeaseError, LeaseNotReady, LeaseReleased
from kvtier.futures import running_future
from kvtier.layouts.base import Layout
from kvtier.pump import Pump
from kvtier.tokens import IntArray, Tokens, pack
from kvtier.types import LeaseState, Tier

__all__ = ["Lease", "Pin", "opened_at"]


@final
class Lease:
    """A request's hold on its pages: the shared prefix it pins and the pages it owns.

    Made by ``Cache.lease`` and ``Lease.fork`` only.  Leave the ``with`` block or call
    ``release()``; one that is garbage-collected unreleased gives its pages back with a
    ResourceWarning that names the line that opened it, and is counted
    (``CacheStats.forgotten_leases``); the log names each such line once.

    After ``release`` every method but ``release`` itself, ``state`` and ``label`` raises
    LeaseReleased.  While it is restoring or paused, whatever needs its pages raises LeaseNotReady.
    Between the start and the end of a ``Cache.step`` only that step changes the lease: other
    writers raise LeaseError, and a ``release`` takes effect when the step is left, so that no page
    changes hands under a running forward pass.
    """

    __slots__ = (
        "__weakref__",
        "_by_hand",
        "_in_step",
        "_layout",
        "_pump",
        "_ready",
        "_record",
        "_released",
    )

    def __init__(
        self, pump: Pump, layout: Layout, record: LeaseRecord, ready: "Future[int]"
    ) -> None:
        self._pump = pump
        self._layout = layout
        self._record = record
        self._ready = ready
        self._released = False
        self._in_step = False
        self._by_hand = False
        """Pages were reserved by hand and may be written at any time, with no step around it."""

    def __repr__(self) -> str:
        return f"<Lease {self._record.id} {self.label!r} {self.state.value}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._released or self._record.state is LeaseState.RELEASED:
            return
        if self._pump.closed or self._pump.foreign:
            return
        # First the pages: a warning may be turned into an error.
        self._pump.post(partial(self._pump.take_back, self._record))
        warnings.warn(
            f"lease {self.label!r} was never released; it was opened at {self._record.opened_at}",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def release(self) -> None:
        """Give everything back, in any state.  Idempotent, also after the cache was closed.

        Operations under way keep the pages that they use until they end.  A pending ``ready``
        resolves to 0.
        """
        pump = self._pump
        if self._record.state is LeaseState.RELEASED or pump.foreign or pump.broken:
            self._released = True
        if self._released:
            return
        try:
            self._fence()
        finally:
            with self._pump:
                self._released = True
                if not self._in_step:
                    self._pump.release(self._record)

    # -- where it stands

    @property
    def ready(self) -> "Future[int]":
        """Resolves to ``cached_tokens`` once the prefix may be read: by a step, or by hand where
        ``block_table`` says.  Its bytes may still be on their way then, ahead of what is queued.

        Never fails: a restore that goes wrong resolves to a shorter prefix.  (After a bug in
        kvtier this and all other futures carry InvariantError.)  It is running from the start,
        so cancelling an ``asyncio.wrap_future`` of it ends that one waiter only.
        """
        self._check_released()
        return self._ready

    @property
    def state(self) -> LeaseState:
        return LeaseState.RELEASED if self._released else self._record.state

    @property
    def label(self) -> str:
        return self._record.label

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be computed.  Raises LeaseNotReady while restoring."""
        return self._restored_record().cached_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is written and committed.  Raises LeaseNotReady while restoring."""
        return self._restored_record().length

    @property
    def capacity(self) -> int:
        """Tokens that fit without another ``reserve``, those committed included; 0 while paused."""
        record = self._restored_record()
        return 0 if record.state is LeaseState.PAUSED else record.capacity

    @property
    def restored(self) -> Mapping[Tier, int]:
        """Tokens this lease did not compute, by the tier they came from."""
        return MappingProxyType(dict(self._restored_record().restored))

    def tokens(self) -> IntArray:
        """The committed tokens (a copy)."""
        with self._pump:
            return np.frombuffer(bytes(self._restored_record().tokens), dtype="<i4")

    def chunk_end(self, start: int, limit: int) -> int:
        """The largest legal end of a chunk that begins at ``start``: at most ``limit`` and the
        prompt's end, and never inside a span.

        A span that begins the chunk is taken whole, past ``limit`` if need be.
        """
        self._check_released()
        start, limit = as_int("start", start), as_int("limit", limit)
        if not 0 <= start < limit:
            raise ConfigError(f"a chunk needs 0 <= start < limit, got {start=} {limit=}")
        prompt = len(self._record.prompt)
        end = min(limit, prompt) if start < prompt else limit
        for span in self._record.spans:
            if span.start < end < span.stop:
                return span.start if span.start > start else span.stop
        return end

    # -- waiting

    def pause(self) -> "Future[None]":
        """Move all of the lease to host memory, its partial page too, and free its device pages.

        Resolves once the device pages are free; the lease is then PAUSED.  What finds no room on
        the host is dropped: ``resume`` then stands on a shorter prefix.
        """
        future = running_future()
        self._fence()
        with self._pump as core:
            record = self._writable("pause")
            self._pump.plan(core.pause(record))
            self._pump.expect_paused(record, future)
        return future

    def resume(self) -> "Future[int]":
        """Bring a paused lease back.  Resolves to the tokens it now stands at: where it was, or
        fewer if the host could not keep all.  ``ready`` is this future from now on.

        Raises OutOfPages (and stays paused) if the device has no room, LeaseError if the lease is
        not paused.
        """
        future = running_future()
        with self._pump as core:
            record = self._between_steps("resume")
            if record.state is not LeaseState.PAUSED:
                raise LeaseError(f"lease {self.label!r} is {record.state.value}, not paused")
            self._pump.plan(core.resume(record))
            self._pump.expect_ready(record, future)
            self._ready = future
        return future

    # -- writing, for engines that do not use Cache.step

    def reserve(self, n: int) -> None:
        """Make room for ``n`` tokens past ``num_tokens``.  OutOfPages leaves all unchanged.

        For engines that do not use ``Cache.step``; checkpoints are taken by steps only.
        """
        n = as_int("n", n, least=0)
        with self._pump as core:
            record = self._writable("reserve")
            _, ops = core.reserve([record], [n])
            core.abandon([record], [0])  # only steps take checkpoints
            self._by_hand = True
            self._pump.plan(ops)
            self._pump.catch_up()
        self._fence()

    def commit(self, tokens: Tokens) -> None:
        """The KV of these tokens is written: the writes are queued on the current stream.

        Full pages become shareable and start on their way down.  What was written behind them
        leaves nothing, as with ``Step.accept``: at most ``Layout.max_rejected`` tokens.  Raises
        LeaseError, with nothing committed, if they are more than was reserved.
        """
        packed = pack(tokens)
        self._pump.transfer.fence(None)
        with self._pump as core:
            record = self._writable("commit")
            if (room := record.capacity - record.length) < len(packed):
                raise LeaseError(
                    f"lease {self.label!r} has room for {room} tokens, not {len(packed)}: "
                    f"reserve({len(packed)}) first"
                )
            self._pump.plan(core.commit([record], [len(packed)], packed.data))

    def truncate(self, n: int) -> int:
        """Roll back to at most ``n`` tokens; returns where the lease now stands.

        Exact for layouts without tails.  With tails, rolling back committed tokens lands on the
        nearest checkpoint at or before ``n``, and the lease restores: wait on ``ready`` again.
        (Drafts need no truncate: rejected ones were never committed.)  ``truncate(num_tokens)``
        gives back the room that was reserved and not used, in every layout.  Raises LeaseError
        for an ``n`` past ``num_tokens``, and OutOfPages with nothing changed where the last page
        is shared and there is no room for a copy.
        """
        n = as_int("n", n, least=0)
        self._fence()
        with self._pump as core:
            record = self._writable("truncate")
            stands, ops = core.truncate(record, n)
            self._restores(core)
            self._pump.plan(ops)
        return stands

    def _restores(self, core: CacheCore) -> None:
        """The core may have sent the lease back to a checkpoint: ``ready`` is another one then."""
        if self._record.state is LeaseState.RESTORING or self._record in core.settled:
            self._ready = running_future()
            self._pump.expect_ready(self._record, self._ready)

    def fork(self, *, label: str = "") -> "Lease":
        """A second lease on the same tokens.  Full pages are shared, the last one is copied.

        Raises OutOfPages with nothing changed.
        """
        ready = running_future()
        where = opened_at(1)
        with self._pump as core:
            record, ops = core.fork(
                self._writable("fork"), label=label or self.label, opened_at=where
            )
            self._pump.expect_ready(record, ready)
            self._pump.plan(ops)
        return Lease(self._pump, self._layout, record, ready)

    # -- addressing

    def block_table(self) -> IntArray:
        """Device page ids, one per page of ``capacity``, read-only.  Only ever grows between
        truncations.

        What is queued on the current stream from here on waits for pages that are still on their
        way from the host.
        """
        with self._pump as core:
            table = self._table(core).copy()
        self._await(table)
        table.flags.writeable = False
        return table

    def slot_mapping(self, start: int, stop: int) -> Mapping[str, IntArray]:
        """For each history component, the slot where each token in [start, stop) lies, shared
        pages too; -1 for none.  The current stream waits as for ``block_table``.  Raises LeaseError
        past ``capacity``."""
        start, stop = as_int("start", start), as_int("stop", stop)
        with self._pump as core:
            table = self._table(core)
            capacity = self._record.capacity
            if not 0 <= start <= stop <= capacity:
                raise LeaseError(
                    f"[{start}, {stop}) does not lie in the {capacity} tokens that lease "
                    f"{self.label!r} has room for: reserve first"
                )
            positions = np.arange(start, stop, dtype=np.int32)
            pages = table[positions // self._layout.page_tokens]
        self._await(pages)
        return MappingProxyType(self._layout.slots(positions, pages))

    # -- checks

    def _table(self, core: CacheCore) -> IntArray:
        record = self._active_record()
        return core.block_tables[record.row, : -(-record.capacity // self._layout.page_tokens)]

    def _await(self, pages: IntArray) -> None:
        """Who addresses pages by hand does not wait layer by layer."""
        if isinstance(transfer := self._pump.transfer, PagedTransfer):
            for arrival in transfer.pool.arriving(pages):
                arrival.wait()

    def _fence(self) -> None:
        """What was queued by hand on reserved pages still runs, and they may change hands; on
        whatever stream that was."""
        if self._by_hand:
            self._pump.transfer.fence(None)

    def _check_released(self) -> None:
        if self._released or self._record.state is LeaseState.RELEASED:
            if self._pump.closed:
                raise CacheClosed("the cache has been closed, and this lease with it")
            raise LeaseReleased(
                f"lease {self.label!r} (opened at {self._record.opened_at}) has been released"
            )

    def _restored_record(self) -> LeaseRecord:
        self._check_released()
        if self._record.state is LeaseState.RESTORING:
            raise LeaseNotReady(f"lease {self.label!r} is restoring: wait on its ready future")
        return self._record

    def _active_record(self) -> LeaseRecord:
        record = self._restored_record()
        if record.state is LeaseState.PAUSED:
            raise LeaseNotReady(f"lease {self.label!r} is paused: resume() it first")
        return record

    def _between_steps(self, verb: str) -> LeaseRecord:
        self._check_released()
        if self._in_step:
            raise LeaseError(
                f"cannot {verb} lease {self.label!r} while a step runs on it: leave the step first"
            )
        return self._record

    def _writable(self, verb: str) -> LeaseRecord:
        self._between_steps(verb)
        return self._active_record()


@final
class Pin:
    """A prefix kept in its tiers until ``close``; made by ``Cache.pin``.

    Held by the cache, not by this object: dropping it keeps the prefix until the cache closes.
    """

    __slots__ = ("_pump", "_record")

    def __init__(self, pump: Pump, record: PinRecord) -> None:
        self._pump = pump
        self._record = record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def tokens(self) -> int:
        """How many tokens are held: of the prefix known when it was pinned, as many as the
        configured share allows."""
        return self._record.tokens

    @property
    def owner(self) -> str:
        return self._record.owner

    def close(self) -> None:
        """Let the prefix be evicted again.  Idempotent, also after the cache was closed."""
        if self._pump.closed or self._pump.foreign or self._record.closed:
            return
        with self._pump as core:
            self._pump.plan(core.unpin(self._record))


def opened_at(depth: int) -> str:
    """``file:line`` of the caller, ``depth`` frames above the function that asks."""
    frame = sys._getframe(depth + 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
