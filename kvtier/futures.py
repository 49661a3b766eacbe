"""Futures of the public API: those that nobody but the cache ends, and those that their owner may
cancel.  Knows nothing of what they wait for.
"""

from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["fail", "fulfil", "running_future"]

T = TypeVar("T")


def running_future() -> "Future[Any]":
    """A future nobody can cancel: cancelling an ``asyncio.wrap_future`` of it ends that waiter
    alone, and setting its result never fails."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def fulfil(future: "Future[T]", value: T) -> None:
    """Resolve a future that its owner may have cancelled meanwhile."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def fail(future: "Future[T]", error: BaseException) -> None:
    """The same with an error."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
