"""The pump between the core and the data plane: one lock, ops in order, futures.

Owns every call into ``CacheCore`` and ``Transfer.start``.  Three rules hold it together:

1. The core is entered under ``_lock`` only, which is never held over I/O, a device wait or a
   future's callbacks.
2. Ops are started in the order in which the core returned them, by the thread that made the core
   return them, before its call returns.  So it queues for its turn before ``_lock`` is let go;
   the lock is free while it waits, and while its ops are started.  Whoever is about to write to
   pages itself waits for its turn too (``catch_up``): what it was given may be the source of a
   copy that another thread has yet to start.
3. Completions, and the finalizers of forgotten leases, only append to ``_inbox``: they come from
   any thread, from within ``Transfer.start`` and out of the garbage collector in the middle of
   anything.  Whoever enters the core next empties it.

Knows nothing of layouts, tensors or what an op means.
"""

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cache, partial
from math import inf
from types import TracebackType
from typing import Any, final
from weakref import WeakSet

from kvtier.core.leases import LeaseRecord, PrefetchRecord
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Op, OpKind, Part, Shortfall
from kvtier.deadlines import Deadlines
from kvtier.errors import CacheClosed, InvariantError, KVTierError
from kvtier.futures import fail, fulfil
from kvtier.seams import DiskHangs, DropsReads, ReadDropped, TellsProgress, Transfer
from kvtier.types import LeaseState, Tier
from kvtier.watching import Watches

__all__ = ["Pump"]

logger = logging.getLogger("kvtier")

_pumps: "WeakSet[Pump]" = WeakSet()
"""All there are; a forked child finds its parent's."""


def _in_child() -> None:
    for pump in _pumps:
        pump.foreign = pump.refuses = True


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_in_child)


@final
class Pump:
    """Enter the core with ``with pump as core:`` and hand what it returns to ``plan``.

    Leaving the block starts what was planned and resolves what settled.  Entering raises
    CacheClosed once the cache is closed, and in a forked child, whose threads, device and store
    are the parent's.  Blocks do not nest.
    """

    def __init__(
        self,
        core: CacheCore,
        transfer: Transfer,
        part_bytes: Callable[[Part], int],
        *,
        stall_s: float,
    ) -> None:
        """``stall_s``: so long a disk may bring nothing before nobody waits for it any more."""
        self.transfer = transfer
        self.closed = False
        self.moved: dict[tuple[Tier, str], int] = {}
        """Bytes of pages and tails "read" from and "written" to each tier, before any codec."""
        self.forgotten: Counter[str] = Counter()
        """Leases that were never released, by the line that opened them."""
        self._core = core
        self._part_bytes = part_bytes
        self._pid = os.getpid()
        self.foreign = False
        """Whether this is a forked child of the process that opened the cache."""
        self._lock = self.reading = threading.Lock()
        """To be held, unless ``refuses``, by what changes nothing and is asked often.  It sees
        what has arrived this moment the next: nobody empties the inbox for it."""
        self._turn = threading.Lock()
        """Free once every op planned so far has been started; each turn is a lock of its own."""
        self._starter = 0
        """The thread that is starting ops; 0: none."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._outcomes: deque[Callable[[], None]] = deque()
        """What to tell the world, outside every lock."""
        self._planned: list[Op] = []
        self._behind = False
        """Whoever leaves waits for its turn, even with nothing to start."""
        self._running: dict[int, Op] = {}
        self._ready: dict[int, Future[int]] = {}
        self._paused: dict[int, Future[None]] = {}
        self._prefetches: dict[int, tuple[PrefetchRecord, Future[int]]] = {}
        tells = transfer.heard_of if isinstance(transfer, TellsProgress) else None
        self.deadlines = Deadlines(core, self.settle_late, tells=tells, stall_s=stall_s)
        self._watches = Watches(self.deadlines)
        self.disk_hangs = False
        """Whether it was closed without waiting for a disk that hangs, and still uses the store."""
        self._sealed = False
        """No op is started any more: what is still planned ends at once, undelivered."""
        self._broken: BaseException | None = None
        self.refuses = False
        """Whether entering raises."""
        _pumps.add(self)
        _watch_forks()

    @property
    def broken(self) -> bool:
        """Whether the cache stopped after a bug."""
        return self._broken is not None

    def __enter__(self) -> CacheCore:
        if self.foreign:
            raise CacheClosed(
                f"this cache belongs to process {self._pid}: after a fork, open one of your own"
            )
        self._lock.acquire()
        try:
            if self.closed:
                raise CacheClosed("the cache has been closed")
            if self._broken is not None:
                raise _stopped(self._broken)
            if self._inbox:
                self._empty_inbox()
        except BaseException:
            self._leave()
            raise
        return self._core

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is not None and not isinstance(exc, KVTierError):
            self._stop(exc)
        if self._core.settled or self._planned or self._outcomes or self._inbox or self._behind:
            self._leave()
        else:
            self._lock.release()

    def refuse(self) -> None:
        """Raise what entering raises."""
        with self:
            pass

    # -- inside a block

    def plan(self, ops: Iterable[Op]) -> None:
        """Start these when the block is left, in this order."""
        for op in ops:
            self._running[op.id] = op
            self._planned.append(op)
            self.deadlines.started(op)

    def catch_up(self) -> None:
        """Leave the block only once every op planned so far has been started."""
        self._behind = self._turn.locked()

    def running(self, *kinds: OpKind) -> set[int]:
        """Ops of these kinds (none given: of any) that have not ended."""
        return {id for id, op in self._running.items() if not kinds or op.kind in kinds}

    def watch(
        self,
        ops: Iterable[int],
        then: Callable[[BaseException | None], None],
        *,
        follow: Iterable[OpKind] = (),
    ) -> None:
        """Call ``then``, outside every lock, once these ops have ended and all of the kinds in
        ``follow`` that came of them, with the first error among them; or, with StoreError, once
        the disk hangs that they wait for."""
        if waiting := {id for id in ops if id in self._running}:
            self._watches.add(waiting, then, follow)
        else:
            self._outcomes.append(partial(then, None))

    def expect_ready(self, record: LeaseRecord, future: "Future[int]") -> None:
        """Resolve ``future`` to where the lease stands once it is active."""
        self._ready[record.id] = future

    def expect_paused(self, record: LeaseRecord, future: "Future[None]") -> None:
        self._paused[record.id] = future

    def expect_prefetch(self, record: PrefetchRecord, future: "Future[int]") -> None:
        if record.done:
            self._outcomes.append(partial(fulfil, future, record.tokens))
        else:
            self._prefetches[record.id] = record, future

    def release(self, record: LeaseRecord) -> None:
        """The lease gives everything back; who still waits for it learns that nothing came."""
        self.deadlines.forget(record)
        self.plan(self._core.release(record))
        self._drop_unwanted()
        if (ready := self._ready.pop(record.id, None)) is not None:
            self._outcomes.append(partial(ready.set_result, 0))
        if (paused := self._paused.pop(record.id, None)) is not None:
            self._outcomes.append(partial(paused.set_result, None))

    def take_back(self, record: LeaseRecord) -> None:
        """A lease that was forgotten gives everything back; said once a line that opens such."""
        self.forgotten[record.opened_at] += 1
        if self.forgotten[record.opened_at] == 1:
            said = "lease %r, opened at %s, was never released (others from there are only counted)"
            say = partial(logger.warning, said, record.label, record.opened_at)
            self._outcomes.append(say)
        self.release(record)

    # -- from anywhere

    def post(self, event: Callable[[], None]) -> None:
        """Have ``event`` run in the next block.  Takes no lock: safe in a finalizer."""
        self._inbox.append(event)

    def run(self) -> None:
        """Empty the inbox and start what follows."""
        # Called from within ``start``, this leaves it to the loop below it on the stack.
        while self._inbox and self._starter != threading.get_ident():
            self._lock.acquire()
            try:
                self._empty_inbox()
            finally:
                self._leave()

    def settle_late(self) -> float:
        """Let leases that have waited long enough stand on what is there.  Returns when to look
        again."""
        try:
            with self as core:
                late, later = self.deadlines.late()
                for record in late:
                    self.plan(core.settle_early(record))
                hung, again = self.deadlines.hung()
                for each in hung:
                    self.plan(core.settle_early(each, hung=True))
                self._drop_unwanted()
                told, third = self._watches.hung()
                self._outcomes += told
                return min(later, again, third)
        except KVTierError:  # it has been closed, or has stopped after a bug
            return inf

    def cancel_prefetch(self, record: PrefetchRecord) -> None:
        """Take a prefetch's budget back, unless it is done."""
        self.post(partial(self._cancel_prefetch, record))
        self.run()

    def close(self, *, drain: bool) -> list[LeaseRecord]:
        """Take everything back, let what is under way end, and close the transfer.

        With ``drain`` what completions still ask for is done too; otherwise only what was started
        ends; and a disk that hangs is waited for no longer.  Returns the leases that were open.
        """
        self._lock.acquire()
        try:
            self.closed = self.refuses = True
            open_leases = list(self._core.leases.values())
            if self._broken is None:
                try:
                    self._empty_inbox()
                    open_leases = list(self._core.leases.values())
                    self._take_all_back()
                except Exception as bug:  # noqa: BLE001 - logged; the transfer is closed all the same
                    self._stop(bug)
            self._sealed = not drain or self._broken is not None
        finally:
            self._leave()
        self.deadlines.alarm.stop()
        try:
            self.transfer.close()
        except BaseException as error:
            with self._lock:
                self._give_up(
                    CacheClosed(f"the cache was closed, and its transfer failed: {error}")
                )
            self._tell()
            if not isinstance(error, DiskHangs):
                raise
            self.disk_hangs = True
            logger.warning("%s: the cache was closed without waiting for it", error)
        self._sealed = True
        self.run()
        return open_leases

    # -- with the lock

    def _leave(self) -> None:
        if self._core.settled and self._broken is None:
            self._settle()
        planned, self._planned = self._planned, []
        in_turn, self._behind = bool(planned) or self._behind, False
        before, after = self._turn, threading.Lock()
        if in_turn:
            after.acquire()
            self._turn = after
        self._lock.release()
        try:
            if in_turn:
                self._start(planned, before, after)
            self._tell()
        finally:
            if self._inbox:
                self.run()

    def _tell(self) -> None:
        """Tell the world what came of things: all of it, whatever a future's callback raises.

        What concerns nobody here is logged; a bug, and what asks the process to end, goes on.
        """
        first: BaseException | None = None
        while self._outcomes:
            try:
                outcome = self._outcomes.popleft()
            except IndexError:  # another thread has just told the last one
                break
            try:
                outcome()
            except (InvariantError, KeyboardInterrupt, SystemExit) as error:
                if isinstance(error, InvariantError):
                    with self._lock:
                        self._stop(error)
                first = first or error
            except BaseException:
                logger.exception("a callback of a future failed")
        if first is not None:
            raise first

    def _empty_inbox(self) -> None:
        if self._broken is not None:
            self._inbox.clear()
        try:
            while self._inbox:
                self._inbox.popleft()()
        except BaseException as error:
            self._stop(error)
            if isinstance(error, InvariantError) or not isinstance(error, Exception):
                raise
            raise _stopped(error) from error

    def _stop(self, bug: BaseException) -> None:
        """After whatever came out of the core unforeseen, it is not entered again: what it would
        say of its pages can no longer be trusted.  What runs ends; nothing more is started."""
        if self._broken is None:
            logger.critical("the cache stops after a bug", exc_info=bug)
            self._broken, self.refuses = bug, True
            self._planned.clear()
            self._give_up(_stopped(bug))

    def _give_up(self, error: KVTierError) -> None:
        """Nobody waits for ever: every future that cannot be kept carries ``error``."""
        futures: list[Future[Any]] = [*self._ready.values(), *self._paused.values()]
        self._outcomes += [partial(future.set_exception, error) for future in futures]
        self._outcomes += [partial(fail, f, error) for _, f in self._prefetches.values()]
        self._outcomes += self._watches.give_up(error)
        for waiting in (self._ready, self._paused, self._prefetches):
            waiting.clear()

    def _packed(self, op_id: int) -> None:
        self.plan(self._core.packed(op_id))

    def _done(self, op_id: int, delivered: int, error: BaseException | None) -> None:
        op = self._running.pop(op_id, None)
        if op is None:
            raise InvariantError(f"op {op_id} ended twice or was never started")
        why = Shortfall.SOURCE if error is None else Shortfall.FAULT
        if isinstance(error, ReadDropped):
            why = Shortfall.UNWANTED
        self.deadlines.ended(op, delivered if why is Shortfall.UNWANTED else len(op.parts))
        self._count(op, delivered)
        ops = self._core.finish(op_id, delivered, why)
        self.plan(ops)
        self._outcomes += self._watches.ended(op_id, ops, error)

    def _refused(self, op_id: int, error: BaseException) -> None:
        """The transfer's ``start`` raised, which is an end like any other if it was the first."""
        if (op := self._running.get(op_id)) is not None:
            logger.error("%s could not be started", op.kind.value, exc_info=error)
            self._done(op_id, 0, error)

    def _count(self, op: Op, delivered: int) -> None:
        if op.kind in (OpKind.DROP, OpKind.CLEAR):
            return
        ways: dict[tuple[Tier, Tier, bool], int] = {}
        for part in op.parts[:delivered]:
            way = part.source, part.target, bool(part.via)
            ways[way] = ways.get(way, 0) + self._part_bytes(part)
        for (source, target, via), size in ways.items():
            ends = [(source, "read"), (target, "written")]
            if via:
                ends += [(Tier.CPU, "written"), (Tier.CPU, "read")]
            for end in ends:
                self.moved[end] = self.moved.get(end, 0) + size

    def _settle(self) -> None:
        for record in self._core.settled:
            if isinstance(record, PrefetchRecord):
                _, future = self._prefetches.pop(record.id, (None, None))
                if future is not None:
                    self._outcomes.append(partial(fulfil, future, record.tokens))
            elif record.state is LeaseState.ACTIVE:
                self.deadlines.forget(record)
                if (ready := self._ready.pop(record.id, None)) is not None:
                    self._outcomes.append(partial(ready.set_result, record.length))
            elif (paused := self._paused.pop(record.id, None)) is not None:
                self._outcomes.append(partial(paused.set_result, None))
        self._core.settled.clear()

    def _cancel_prefetch(self, record: PrefetchRecord) -> None:
        if self._prefetches.pop(record.id, None) is not None:
            self.plan(self._core.cancel_prefetch(record))
            self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        if unwanted := self._core.unwanted:
            if isinstance(self.transfer, DropsReads):
                self._outcomes += [partial(self.transfer.drop, op_id) for op_id in unwanted]
            unwanted.clear()

    def _take_all_back(self) -> None:
        for lease in list(self._core.leases.values()):
            self.release(lease)
        for prefetch, future in self._prefetches.values():
            self.plan(self._core.cancel_prefetch(prefetch))
            self._outcomes.append(partial(fulfil, future, prefetch.tokens))
        self._prefetches.clear()

    # -- with the turn

    def _start(self, ops: list[Op], before: threading.Lock, after: threading.Lock) -> None:
        last: BaseException | None = None
        try:
            before.acquire()
            self._starter = threading.get_ident()
            for op in ops:
                packed, done = partial(self._on_packed, op.id), partial(self._on_done, op.id)
                if self._sealed:
                    done(0, CacheClosed("the cache was closed before this was done"))
                    continue
                try:
                    self.transfer.start(op, packed=packed, done=done)
                except BaseException as error:  # noqa: BLE001 - told by ``done``, or raised below
                    # The core counts on every op's end, and on the ops behind this one.
                    self._inbox.append(partial(self._refused, op.id, error))
                    if not isinstance(error, Exception):
                        last = error
        finally:
            if self._starter == threading.get_ident():
                self._starter = 0
            after.release()
        if last is not None:
            raise last

    # -- from the transfer, on any thread

    def _on_packed(self, op_id: int) -> None:
        self._inbox.append(partial(self._packed, op_id))
        self.run()

    def _on_done(self, op_id: int, delivered: int, error: BaseException | None) -> None:
        self._inbox.append(partial(self._done, op_id, delivered, error))
        self.run()


def _stopped(bug: BaseException) -> InvariantError:
    error = InvariantError("the cache stopped after a bug")
    error.__cause__ = bug
    return error
