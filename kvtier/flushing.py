"""``Cache.flush``: waiting until what was committed is as low as it will go.

Owns the thread on which it is saved when pages on disk were last used, and closes the store;
neither waits forever for a store that hangs.  Knows nothing of what is moved, only which operations
have to end.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import final

from kvtier.core.machine import CacheCore
from kvtier.core.ops import OpKind
from kvtier.errors import CacheClosed, KVTierError, StoreError
from kvtier.futures import running_future
from kvtier.pump import Pump
from kvtier.seams import DiskHangs, Store
from kvtier.types import Tier

__all__ = ["Flushing", "settle"]

logger = logging.getLogger("kvtier")


@final
class Flushing:
    """Flushes of one cache.  ``store`` is the one whose recency is saved; None: nobody's is."""

    __slots__ = ("_pump", "_saver", "_stall_s", "_store", "_under_way")

    def __init__(self, pump: Pump, store: Store | None, *, stall_s: float) -> None:
        """``stall_s``: a call of the store that takes more seconds is taken to hang."""
        self._pump = pump
        self._store = store
        self._stall_s = stall_s
        self._under_way = running_future()
        """The call of the store that began last."""
        self._under_way.set_result(None)
        self._saver = ThreadPoolExecutor(1, "kvtier-flush")
        """Has no thread until there is something to save."""

    def flush(self, to: Tier) -> "Future[None]":
        """Resolves once what is on its way to the host, or to the disk, has arrived."""
        future = running_future()
        with self._pump:
            if to is Tier.DISK:
                running = self._pump.running(OpKind.PACK, OpKind.STORE)
                then = partial(self._stored, future)
                self._pump.watch(running, then, follow=(OpKind.STORE,))
            else:
                self._pump.watch(self._pump.running(OpKind.PACK), partial(settle, future))
        return future

    def close(self, core: CacheCore, store: Store) -> None:
        """Wait for what is being saved, save the rest and close ``store``: unless it hangs, which
        is logged.  The pump is closed by then.  Raises what closing the store raises."""
        with suppress(RuntimeError):  # a callback of ``flush`` closes the cache, on that thread
            self._saver.shutdown()
        try:
            try:
                if self._store is not None:
                    self._within(partial(self._store.touch, core.disk_ticks()))
            except Exception as error:  # noqa: BLE001 - may be lost, as in a crash
                logger.warning("the recency of pages on disk was not saved: %s", error)
            finally:
                self._within(store.close)
        except DiskHangs as error:
            logger.warning("%s: the cache was closed without waiting for it", error)

    def _stored(self, future: "Future[None]", error: BaseException | None) -> None:
        """On whatever thread ended the wait; the store is written on another."""
        if error is not None:  # of a disk that hangs there is nothing more to be asked
            settle(future, error)
            return
        try:
            with self._pump as core:
                ticks = core.disk_ticks()
            if ticks and self._store is not None:
                self._saver.submit(self._save, self._store, ticks, future)
                return
        except CacheClosed:
            pass  # close does the same
        except BaseException as failed:
            settle(future, failed)
            if not isinstance(failed, Exception):
                raise
            return
        settle(future, None)

    def _save(
        self, store: Store, ticks: Sequence[tuple[bytes, int]], future: "Future[None]"
    ) -> None:
        try:
            self._within(partial(store.touch, ticks))
        except Exception as error:  # noqa: BLE001 - whatever it is, the future carries it
            settle(future, error)
        else:
            settle(future, None)

    def _within(self, call: Callable[[], None]) -> None:
        """What ``call`` raises; or DiskHangs, if it or the one before it does not end."""
        if self._under_way.done():
            ended = self._under_way = running_future()
            run = partial(_run, call, ended)
            try:
                threading.Thread(target=run, name="kvtier-store", daemon=True).start()
            except RuntimeError:  # there are no more threads, as at the end of a process
                run()
            if wait([ended], min(self._stall_s, threading.TIMEOUT_MAX)).done:
                ended.result()
                return
        raise DiskHangs(f"the disk has done nothing for {self._stall_s:g} s")


def _run(call: Callable[[], None], ended: "Future[None]") -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        ended.set_exception(error)
    else:
        ended.set_result(None)


def settle(future: "Future[None]", error: BaseException | None) -> None:
    """Resolve a future of the public API; what went wrong elsewhere arrives as StoreError."""
    if error is None:
        future.set_result(None)
    elif isinstance(error, KVTierError):
        future.set_exception(error)
    else:
        failed = StoreError(f"the disk did not do all of it: {error}")
        failed.__cause__ = error
        future.set_exception(failed)
