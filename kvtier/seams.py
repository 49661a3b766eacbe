"""The two seams of the library: what moves bytes (``Transfer``) and what keeps them (``Store``).

Tests, engines that own the device and other storage systems implement these; nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtier.core.ops import Op

__all__ = [
    "ENTRY",
    "DiskHangs",
    "DropsReads",
    "Read",
    "ReadDropped",
    "Record",
    "Store",
    "TellsProgress",
    "Transfer",
]


class Transfer(Protocol):
    """Moves page bytes.  The only code that knows about streams and events.

    One that reads from a store may also say how reads get on, and leave some out: ``TellsProgress``
    and ``DropsReads``, both in ``kvtier.seams``.
    """

    def fence(self, stream: object | None) -> None:
        """Whatever is started after this waits for the work queued so far on ``stream``
        (None: the current one), and what is queued there after this for the work that was fenced
        on others.  The cache calls it when a step begins and when it ends."""

    def start(
        self,
        op: Op,
        *,
        packed: Callable[[], None],
        done: Callable[[int, BaseException | None], None],
    ) -> None:
        """Queue ``op`` and return.

        ``packed()`` is called once, before ``done``, when the sources of a PACK may be reused.
        ``done(n, error)`` is called exactly once, with the number of leading parts that were
        delivered.  A RESTORE that ends early without an error found the first source that it did
        not deliver missing or not verified: that copy is not offered again.  An error (of the
        medium, the device, a lack of memory) is no verdict on any source.  COPY and CLEAR take
        effect in the order of ``start`` calls, before anything the caller queues on its compute
        stream afterwards and before any later operation touches their frames: these may already
        belong to somebody else when ``done`` comes.  Callbacks may come from any thread and from
        within ``start``.  If it raises, it must not have taken ``op``, which ends with that error
        and nothing delivered.
        """

    def close(self) -> None:
        """Finish what was started, then stop all threads.  Idempotent.

        One that reads from a store or writes to it should not wait for ever where that hangs: it
        raises DiskHangs then, with everything else ended.
        """


class DiskHangs(Exception):
    """A store was not waited for any longer: it is still in use, and is not closed therefore."""


@runtime_checkable
class TellsProgress(Protocol):
    """A ``Transfer`` that knows how reads get on, so that a slow one is not taken to hang."""

    def heard_of(self, op_id: int) -> float:
        """When a RESTORE under way last got something from the store, on the monotonic clock;
        minus infinity: nothing yet.  Must not block."""


@runtime_checkable
class DropsReads(Protocol):
    """A ``Transfer`` that can leave out reads that nobody waits for any more."""

    def drop(self, op_id: int) -> None:
        """What of a RESTORE has not begun to be read from the store is not: it ends as soon as
        what has begun is done, with ReadDropped if something is missing.  Does nothing for an op
        that is not under way.  Must not block, and calls nobody back."""


class ReadDropped(Exception):
    """Told to ``done`` of an operation that was dropped."""


@dataclass(frozen=True, slots=True)
class Record:
    """One page's history or checkpoint, as a store keeps it."""

    key: bytes
    """16-byte chain digest."""
    parent: bytes
    """Key of the record this one needs: the page before, or a checkpoint's own page; for a first
    page (history, depth 1) the identity's chain root, which is no record."""
    depth: int
    component: str
    """"history" or "checkpoint"."""
    tokens: bytes
    """The page's own packed tokens (int32, little-endian)."""
    payload: tuple[memoryview, ...]
    """Frames of equal size, in order."""
    checksum: bytes
    """xxh3-128 over the payload's ``size`` bytes."""
    size: int
    """Payload bytes; the last frame may be used in part."""


@dataclass(frozen=True, slots=True)
class Read:
    """One record wanted back, with what must agree for it to be the right one."""

    key: bytes
    parent: bytes
    tokens: bytes
    views: tuple[memoryview, ...]
    """Writable frames that receive the payload, in order."""
    size: int


ENTRY = np.dtype(
    [
        ("key", "V16"),
        ("parent", "V16"),
        ("tick", "<u8"),  # recency: larger is younger
        ("depth", "<u4"),
        ("frames", "<u2"),
        ("checkpoint", "u1"),  # 1: a checkpoint, whose parent is its own page
    ]
)
"""One row of ``Store.scan``.  An array, because a million objects would take a second."""


class Store(Protocol):
    """Page records by key.  Calls may block; the cache makes them from its own threads.

    ``put_group`` and ``delete`` come from one thread, in the order in which the core asked for
    them (STORE and DROP ops take effect in the order of ``start``); ``read_into`` from any number.
    Implementations raise StoreError (or OSError) when the medium fails; the cache turns that into
    a miss and a counter.
    """

    capacity: int
    """Frames of the layout's page size that fit; a hard limit."""

    def put_group(self, records: Sequence[Record]) -> None:
        """All or nothing, durable when it returns.  Refuses (StoreError) a record whose parent is
        neither stored nor earlier in the group (first pages have none).

        A key already there with this checksum counts as done.  One with another checksum, or
        quarantined, is replaced, and what hangs on it stays: its bytes were computed anew after a
        ``delete`` that failed, and the old ones must never be served again."""

    def read_into(self, reads: Sequence[Read]) -> list[bool]:
        """True where the record was there, whole, verified and with these tokens and parent.
        A record that fails is quarantined: not offered again, its frames still counted until
        deleted."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget these records, in one transaction; unknown keys are ignored.  Refuses (StoreError,
        nothing changes) a record that another one needs which stays."""

    def touch(self, ticks: Sequence[tuple[bytes, int]]) -> None:
        """Remember the recency of records, for the next open.  May be lost in a crash."""

    def scan(self) -> npt.NDArray[np.void]:
        """Everything stored and not quarantined, in any order, as an array of ``ENTRY``."""

    def close(self) -> None: ...
