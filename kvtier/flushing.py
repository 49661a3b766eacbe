"""``Cache.flush``: waiting until what was committed is as low as it will go.

Owns the thread on which it is saved when pages on disk were last used.  Knows nothing of what is
moved, only which operations have to end.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import final

from kvtier.core.machine import CacheCore
from kvtier.core.ops import OpKind
from kvtier.errors import CacheClosed, KVTierError, StoreError
from kvtier.futures import running_future
from kvtier.pump import Pump
from kvtier.seams import Store
from kvtier.types import Tier

__all__ = ["Flushing", "settle"]

logger = logging.getLogger("kvtier")


@final
class Flushing:
    """Flushes of one cache.  ``store`` is the one whose recency is saved; None: nobody's is."""

    __slots__ = ("_pump", "_saver", "_store")

    def __init__(self, pump: Pump, store: Store | None) -> None:
        self._pump = pump
        self._store = store
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

    def close(self, core: CacheCore) -> None:
        """Wait for what is being saved, and save the rest.  The pump is closed by then."""
        with suppress(RuntimeError):  # a callback of ``flush`` closes the cache, on that thread
            self._saver.shutdown()
        if self._store is None:
            return
        try:
            self._store.touch(core.disk_ticks())
        except Exception as error:  # noqa: BLE001 - may be lost, as in a crash
            logger.warning("the recency of pages on disk was not saved: %s", error)

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
            store.touch(ticks)
        except Exception as error:  # noqa: BLE001 - whatever it is, the future carries it
            settle(future, error)
        else:
            settle(future, None)


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
