"""One forward pass as a ``with`` block: reserve, build the arrays, commit.

Checks a batch as a whole, without a loop of Python per lease where it can be helped: with 256
leases a decode step's bookkeeping has 300 us.
"""

import logging
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, TypeGuard, final

import numpy as np

from kvtier.core.leases import LeaseRecord
from kvtier.device_step import DeviceRows
from kvtier.errors import LeaseError, TokenError
from kvtier.layouts.base import Layout
from kvtier.lease import Lease
from kvtier.pump import Pump
from kvtier.step import Step, build_step
from kvtier.tokens import Tokens, pack

if TYPE_CHECKING:
    import torch

__all__ = ["Stepping"]

logger = logging.getLogger("kvtier")


@final
class Stepping:
    """What ``Cache.step`` returns; entered once."""

    __slots__ = ("_layout", "_pool", "_pump", "_records", "_step", "_stream", "_work")

    def __init__(
        self,
        pump: Pump,
        layout: Layout,
        pool: DeviceRows | None,
        work: Iterable[tuple[Lease, Tokens]],
        stream: "torch.cuda.Stream | None",
    ) -> None:
        self._pump = pump
        self._layout = layout
        self._pool = pool
        self._work = work
        self._stream = stream
        self._step: Step | None = None
        self._records: list[LeaseRecord] = []

    def __enter__(self) -> Step:
        if self._step is not None:
            raise LeaseError("this step has been entered before: call Cache.step again")
        leases, chunks = _pairs(self._work)
        records = self._records = [each._record for each in leases if type(each) is Lease]
        if len(records) < len(leases):
            wrong = next(type(each) for each in leases if type(each) is not Lease)
            raise LeaseError(
                f"a step takes (lease, tokens) pairs, got a {wrong.__name__} for a lease"
            )
        data, counts = _pack_all(leases, chunks)
        if self._stream is not None:
            self._pump.transfer.fence(self._stream)
        with self._pump as core:
            self._take(leases)
            try:
                captures, ops = core.reserve(records, counts)
                self._pump.plan(ops)
                self._pump.catch_up()
                self._step = build_step(
                    core, self._layout, leases, records, counts, data, captures, self._pool
                )
            except BaseException:
                for lease in leases:
                    lease._in_step = False
                raise
        try:
            # Pages that change hands were read, copied or cleared on whatever stream it was.
            self._pump.transfer.fence(self._stream)
        except BaseException:
            self._end(self._step, commit=False)
            raise
        return self._step

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._step is None:
            raise LeaseError("this step was never entered: use it in a with block")
        self._step._ended = True
        try:
            # Also after an exception: what the block has queued still runs, on pages that may
            # change hands from here on.
            fenced = False
            try:
                self._pump.transfer.fence(self._stream)
                fenced = True
            finally:  # a device that is lost keeps no lease in this step
                self._end(self._step, commit=fenced and exc_type is None)
        except Exception as error:
            if exc is None:
                raise
            logger.warning("leaving a step after %r: %s", exc, error)

    def _end(self, step: Step, *, commit: bool) -> None:
        with self._pump as core:
            gone = [row for row, lease in enumerate(step.leases) if lease._released]
            for lease in step.leases:
                lease._in_step = False
            try:
                if commit:
                    for row in gone:
                        step._accept(row, 0)
                    counts, data = step._committed()
                    self._pump.plan(core.commit(self._records, counts, data))
                else:
                    counts = [0 if row in gone else n for row, n in enumerate(step._counts)]
                    self._pump.plan(core.abandon(self._records, counts))
                    for lease in step.leases:
                        lease._restores(core)
            finally:
                for row in gone:
                    self._pump.release(self._records[row])

    def _take(self, leases: tuple[Lease, ...]) -> None:
        """Mark every lease as this step's own, or none."""
        pump = self._pump
        for row, lease in enumerate(leases):
            if lease._in_step or lease._pump is not pump:
                for taken in leases[:row]:
                    taken._in_step = False
                if lease._pump is not pump:
                    raise LeaseError(f"lease {lease.label!r} is of another cache")
                if lease in leases[:row]:
                    raise LeaseError(
                        f"lease {lease.label!r} is in the batch twice: join its tokens"
                    )
                raise LeaseError(f"lease {lease.label!r} is in another step")
            lease._in_step = True


def _pairs(
    work: Iterable[tuple[Lease, Tokens]],
) -> tuple[tuple[Lease, ...], tuple[Tokens, ...]]:
    try:
        pairs = list(work)
        if not pairs:
            return (), ()
        leases, chunks = zip(*pairs, strict=True)
    except (TypeError, ValueError) as error:
        raise LeaseError(f"a step takes (lease, tokens) pairs: {error}") from error
    return leases, chunks


def _pack_all(leases: Sequence[Lease], chunks: Sequence[Tokens]) -> tuple[bytes, list[int]]:
    """The tokens of the whole batch, packed, and how many each lease has.  Lists are checked
    together: one at a time they cost 5 us each."""
    try:
        ones = [chunk[0] for chunk in chunks if type(chunk) is list and len(chunk) == 1]
        if len(ones) == len(chunks):  # decoding
            return _pack_ints(ones), [1] * len(ones)
        if _all_lists(chunks):
            counts = list(map(len, chunks))
            return _pack_ints(list(chain.from_iterable(chunks))), counts
        counts = []
        parts: list[bytes] = []
        lists: list[int] = []
        for chunk in chunks:
            if isinstance(chunk, list):
                lists += chunk
                counts.append(len(chunk))
            else:
                packed = pack(chunk)
                parts += [_pack_ints(lists), packed.data]
                counts.append(len(packed))
                lists = []
        return b"".join((*parts, _pack_ints(lists))), counts
    except TokenError:
        for lease, chunk in zip(leases, chunks, strict=True):
            try:
                pack(chunk)
            except TokenError as error:
                raise TokenError(f"tokens of lease {lease.label!r}: {error}") from None
        raise


def _all_lists(chunks: Sequence[Tokens]) -> TypeGuard[Sequence[list[int]]]:
    return set(map(type, chunks)) == {list}


def _pack_ints(ids: list[int]) -> bytes:
    """``pack`` for a list that is most likely fine."""
    try:
        packed = np.frombuffer(array("i", ids), dtype=np.int32)
    except (TypeError, OverflowError):
        return pack(ids).data  # says what is wrong
    low = packed.min(initial=2)
    if low < 0 or (low < 2 and bool in set(map(type, ids))):  # `array` takes True for 1
        return pack(ids).data
    return packed.astype("<i4").tobytes()
