"""The arrays of one forward pass, on the host.

Everything in them is derived from the leases' committed lengths in one function, ``build_step``,
so that positions, context lengths and slots cannot disagree.  Knows the core's tables and the
layout's slot arithmetic; not how tokens were reserved, what a commit does, nor how arrays come to
the device.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt

from kvtier.core.leases import LeaseRecord
from kvtier.core.machine import CacheCore
from kvtier.device_step import DeviceRows, DeviceStep, StepBuffers, to_device
from kvtier.errors import LeaseError
from kvtier.layouts.base import Layout
from kvtier.tokens import TOKEN_BYTES, IntArray
from kvtier.types import Capture

if TYPE_CHECKING:
    from kvtier.lease import Lease

__all__ = ["Step", "build_step"]

_MOST = np.iinfo(np.int32).max


@final
class Step:
    """Arrays for one forward pass; made by ``Cache.step``.

    Row i of the batch is ``leases[i]``.  New tokens of all rows lie packed one after another;
    ``cu_seqlens_q`` says where each row's begin.  The arrays are this step's own: what other
    threads do to the cache meanwhile does not change them.
    """

    __slots__ = (
        "__weakref__",
        "_accepted",
        "_counts",
        "_data",
        "_ended",
        "_pool",
        "_rows",
        "block_table",
        "captures",
        "context_lens",
        "cu_seqlens_q",
        "input_ids",
        "kv_lens",
        "layout",
        "leases",
        "positions",
        "query_lens",
        "slot_mapping",
        "state_slots",
        "window_table",
    )

    leases: "tuple[Lease, ...]"
    layout: Layout
    """Of the cache that made it: what slots and tables are numbered by."""
    input_ids: IntArray
    """(tokens,)"""
    positions: IntArray
    """(tokens,) The first new token of a row sits at its lease's ``num_tokens``."""
    cu_seqlens_q: IntArray
    """(batch + 1,)"""
    query_lens: IntArray
    """(batch,) New tokens of each row."""
    context_lens: IntArray
    """(batch,) ``num_tokens``, without the tokens being fed."""
    kv_lens: IntArray
    """(batch,) ``context_lens + query_lens``."""
    block_table: IntArray
    """(batch, max_pages) Device pages up to ``kv_lens``; -1 behind."""
    window_table: IntArray
    """(batch, max_window_pages) By window page number, -1 where freed; no columns without
    windows."""
    state_slots: IntArray
    """(batch,) Private state; (0,) without tails."""
    slot_mapping: Mapping[str, IntArray]
    """For each history and window component (tokens,): the row a token's state is written to;
    -1: none."""
    captures: tuple[Capture, ...]
    """Checkpoints due inside this step; empty for layouts without tails."""
    _counts: list[int]
    _accepted: list[int] | None
    _data: bytes
    _ended: bool
    _pool: DeviceRows | None
    _rows: "dict[Lease, int] | None"

    def to_device(
        self, buffers: StepBuffers | None = None, *, pad_to: int | None = None
    ) -> DeviceStep:
        """The same as tensors, queued on the current stream without waiting.

        With ``buffers`` they are views of those static arrays, at the same addresses for the same
        ``pad_to``, so that a captured CUDA graph replays with this step's mappings; what an
        earlier step put there is overwritten, and the current stream waits until all layers of
        these pages are there.  ``pad_to`` adds padding rows up to that batch size.
        Raises ConfigError if the batch does not fit, and LeaseError after the step: its pages may
        be others' by then, and what is written to them comes too late to be kept.
        """
        if self._ended:
            raise LeaseError("the step has ended: to_device() belongs inside its with block")
        return to_device(self, self._pool, buffers, pad_to)

    def accept(self, lease: "Lease", n: int) -> None:
        """Commit only the first ``n`` of this lease's new tokens (the rest were rejected drafts).

        The others leave nothing behind: the next step writes over their slots.  Raises LeaseError
        for a lease that is not in this step, for an ``n`` outside [0, its new tokens], for more
        rejected ones than ``Layout.max_rejected``, and after the step.
        """
        if self._ended:
            raise LeaseError("the step has ended: accept() belongs inside its with block")
        if self._rows is None:
            self._rows = {each: row for row, each in enumerate(self.leases)}
        try:
            row = self._rows[lease]
        except (KeyError, TypeError):  # TypeError: no lease, and not even hashable
            raise LeaseError(f"{lease!r} is not in this step") from None
        if not isinstance(n, int) or not 0 <= n <= self._counts[row]:
            raise LeaseError(
                f"cannot accept {n} of the {self._counts[row]} tokens of lease {lease.label!r}"
            )
        rejected, most = self._counts[row] - n, self.layout.max_rejected
        if most is not None and rejected > most:
            raise LeaseError(
                f"cannot reject {rejected} tokens of lease {lease.label!r}: they have overwritten "
                f"what the next one reads; max_draft={most - 1} of the layout allows {most}"
            )
        self._accept(row, n)

    def _accept(self, row: int, n: int) -> None:
        if self._accepted is None:
            self._accepted = list(self._counts)
        self._accepted[row] = n

    def _committed(self) -> tuple[list[int], bytes]:
        """How many tokens of each row to commit, and these tokens, packed."""
        if self._accepted is None:
            return self._counts, self._data
        starts = (self.cu_seqlens_q[:-1] * TOKEN_BYTES).tolist()
        parts = [
            self._data[start : start + n * TOKEN_BYTES]
            for start, n in zip(starts, self._accepted, strict=True)
        ]
        return self._accepted, b"".join(parts)


def build_step(
    core: CacheCore,
    layout: Layout,
    leases: "tuple[Lease, ...]",
    records: Sequence[LeaseRecord],
    counts: list[int],
    data: bytes,
    captures: Sequence[Capture],
    pool: DeviceRows | None,
) -> Step:
    """The one place that turns committed lengths into arrays.  Call it under the cache's lock,
    after the reserve."""
    rows = np.array([r.row for r in records], dtype=np.intp)
    context = core.lengths[rows]
    if counts.count(1) == len(counts):  # decoding: one token of every row
        query, offsets = np.ones_like(context), np.arange(len(rows) + 1, dtype=np.int32)
        of_token, positions = rows, context.copy()
    else:
        query, offsets = np.array(counts, np.int32), np.zeros(len(rows) + 1, np.int32)
        np.cumsum(query, out=offsets[1:])
        of_token = rows.repeat(query)
        positions = np.arange(offsets[-1], dtype=np.int32) + (context - offsets[:-1]).repeat(query)
    kv = context + query
    step = Step()
    step.leases = leases
    step.layout = layout
    step.input_ids = np.frombuffer(data, dtype="<i4")
    step.positions = positions
    step.cu_seqlens_q = offsets
    step.query_lens = query
    step.context_lens = context
    step.kv_lens = kv
    step.block_table = _table(core.block_tables, rows, kv, layout.page_tokens)
    step.window_table = _window_table(core, rows, kv, layout)
    step.state_slots = np.array(
        [r.state_slot for r in records] if layout.has_tails else [], dtype=np.int32
    )
    pages = core.block_tables[of_token, positions // layout.page_tokens]
    windows = None
    if layout.windows:
        windows = core.window_tables[of_token, positions // layout.windows[0].slots_per_page]
    step.slot_mapping = MappingProxyType(layout.slots(positions, pages, windows))
    step.captures = tuple(captures)
    step._counts = counts
    step._data = data
    step._ended = False
    step._pool = pool
    step._accepted = None
    step._rows = None
    return step


def _table(tables: IntArray, rows: npt.NDArray[np.intp], kv: IntArray, page: int) -> IntArray:
    """Block-table rows up to the pages that ``kv`` tokens need; what is reserved behind is not
    this step's business."""
    columns = -(-int(kv.max(initial=0)) // page)
    table = tables[:, :columns].take(rows, axis=0)
    if -(-int(kv.min(initial=_MOST)) // page) < columns:
        table[np.arange(columns, dtype=np.int32) * page >= kv[:, None]] = -1
    return table


def _window_table(
    core: CacheCore, rows: npt.NDArray[np.intp], kv: IntArray, layout: Layout
) -> IntArray:
    if not layout.windows:
        return np.empty((len(rows), 0), dtype=np.int32)
    return _table(core.window_tables, rows, kv, layout.windows[0].slots_per_page)
