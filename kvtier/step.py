"""The arrays of one forward pass, on the host and on the device.

Everything in them is derived from the leases' committed lengths in one function, ``build_step``,
so that positions, context lengths and slots cannot disagree.  Knows the core's tables and the
layout's slot arithmetic; not how tokens were reserved, nor what a commit does.

Padding rows (``to_device(pad_to=n)``) ask nothing and write nothing: one query token each, slot
-1, table -1, KV length 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtier.config import as_int
from kvtier.core.leases import LeaseRecord
from kvtier.core.machine import CacheCore
from kvtier.errors import ConfigError, LeaseError
from kvtier.layouts.base import Layout
from kvtier.tokens import TOKEN_BYTES, IntArray
from kvtier.types import Capture

if TYPE_CHECKING:
    import torch

    from kvtier.lease import Lease

__all__ = [
    "DeviceRows",
    "DeviceStep",
    "LayerView",
    "PagedTransfer",
    "Step",
    "StepBuffers",
    "build_step",
]

LongArray = npt.NDArray[np.int64]
_MOST = np.iinfo(np.int32).max
_MOST_ROWS = 1 << 16
"""Padding up to more is a mistake, and would take the memory it asks for."""


class Arriving(Protocol):
    """Pages that may be used although their bytes are still on the way."""

    def wait(self, layer: int | None = None) -> None:
        """What is queued on the current stream from here on runs behind this layer (None: all)."""


class DeviceRows(Protocol):
    """The device pool, as far as a model addresses it (``DeviceTransfer.pool`` is one)."""

    device: "torch.device"

    def rows(self, component: str, layer: int) -> "torch.Tensor":
        """(slots, values) view of one component in one layer; slot i is row i."""

    def checkpoint_rows(self, component: str, layer: int) -> "torch.Tensor":
        """View of what the checkpoint frames hold of it, frame by frame."""

    def arriving(self, pages: IntArray) -> Sequence[Arriving]:
        """What is still on its way into any of these pages; -1 names none."""


@runtime_checkable
class PagedTransfer(Protocol):
    """A transfer whose device pool a model may address."""

    @property
    def pool(self) -> DeviceRows: ...


@final
class Step:
    """Arrays for one forward pass; made by ``Cache.step``.

    Row i of the batch is ``leases[i]``.  New tokens of all rows lie packed one after another;
    ``cu_seqlens_q`` says where each row's begin.  The arrays are this step's own: what other
    threads do to the cache meanwhile does not change them.
    """

    __slots__ = (
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
        self, buffers: "StepBuffers | None" = None, *, pad_to: int | None = None
    ) -> "DeviceStep":
        """The same as tensors, queued on the current stream without waiting.

        With ``buffers`` they are views of those static arrays, at the same addresses for the same
        ``pad_to``, so that a captured CUDA graph replays with this step's mappings; what an
        earlier step put there is overwritten, and the current stream waits until all layers of
        these pages are there.  ``pad_to`` adds padding rows up to that batch size.
        Raises ConfigError if the batch does not fit.
        """
        batch, tokens = len(self.query_lens), len(self.input_ids)
        rows = batch if pad_to is None else as_int("pad_to", pad_to)
        if rows < batch:
            raise ConfigError(f"pad_to={pad_to} is less than the batch of {batch}")
        tokens += rows - batch
        if buffers is not None:
            buffers._check_fits(rows, tokens, self.block_table.shape[1])
        elif rows > max(batch, _MOST_ROWS):
            raise ConfigError(f"pad_to={pad_to} is more than the {_MOST_ROWS} rows of any batch")
        arrays = _Padded(self, rows, tokens)
        if buffers is not None:
            if self._pool is not None:  # a graph that is replayed waits for nothing
                for arrival in self._pool.arriving(self.block_table):
                    arrival.wait()
            return buffers._fill(self, arrays)
        device = self._pool.device if self._pool is not None else "cpu"
        late = self._pool.arriving(self.block_table) if self._pool is not None else ()
        return DeviceStep(self, _tensors(arrays, device), late)

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


@final
@dataclass(frozen=True, slots=True)
class LayerView:
    """The pages of one layer; there is no view without a layer."""

    _pool: DeviceRows
    _layer: int

    def rows(self, component: str) -> "torch.Tensor":
        """(slots, width) view; slot i of ``slot_mapping`` is row i.  Writes go to the pages.

        A state slot's ring is rows ``state_slots[i] * ring ..``.  A component of packed records
        comes as (pages, page bytes).
        """
        return self._pool.rows(component, self._layer)

    def checkpoints(self, component: str) -> "torch.Tensor":
        """View of the device's checkpoint frames, which the model fills for ``Step.captures``.

        Of a state (frames, slots, width): the last rows of its ring before the capture's
        position.  Of a window (frames, pages, slots, width): its last pages, oldest first; packed
        records come as (frames, pages, page bytes).  Raises ConfigError for what no checkpoint
        holds.
        """
        return self._pool.checkpoint_rows(component, self._layer)


@final
class DeviceStep:
    """A ``Step`` as tensors, padding rows included, and the pages they point into.

    ``input_ids``, ``positions`` and slots are int64 (what indexing takes), lengths and tables
    int32 (what kernels take).
    """

    __slots__ = (
        "_late",
        "_pool",
        "block_table",
        "captures",
        "context_lens",
        "cu_seqlens_q",
        "input_ids",
        "kv_lens",
        "max_kv_len",
        "max_query_len",
        "positions",
        "query_lens",
        "slot_mapping",
        "state_slots",
        "window_table",
    )

    def __init__(self, step: Step, tensors: "_Tensors", late: Sequence[Arriving] = ()) -> None:
        self.input_ids = tensors.longs[0]
        self.positions = tensors.longs[1]
        self.slot_mapping: Mapping[str, torch.Tensor] = MappingProxyType(
            {name: tensors.longs[2 + i] for i, name in enumerate(step.slot_mapping)}
        )
        self.cu_seqlens_q = tensors.offsets
        self.query_lens = tensors.lengths[0]
        self.context_lens = tensors.lengths[1]
        self.kv_lens = tensors.lengths[2]
        self.state_slots = tensors.lengths[3] if step.layout.has_tails else tensors.lengths[3][:0]
        self.block_table = tensors.blocks
        self.window_table = tensors.windows
        self.captures = step.captures
        self.max_query_len: int = int(step.query_lens.max(initial=1))
        """Known on the host: the longest row of new tokens."""
        self.max_kv_len: int = int(step.kv_lens.max(initial=0))
        self._pool = step._pool
        self._late = late

    def layer(self, layer: int) -> LayerView:
        """Pages of one layer.  A layer cannot be left out or mixed up by accident.

        A prefix may still be on its way from the host, layer by layer: what is queued on the
        current stream from here on waits for this one.
        """
        if self._pool is None:
            raise ConfigError(
                "this cache's transfer has no device pool that a model could read and write"
            )
        for arrival in self._late:
            arrival.wait(layer)
        return LayerView(self._pool, layer)


class _Padded:
    """A step's arrays with padding rows, grouped so that each group is one copy."""

    __slots__ = ("blocks", "lengths", "longs", "offsets", "windows")

    def __init__(self, step: Step, rows: int, tokens: int) -> None:
        batch, used = len(step.query_lens), len(step.input_ids)
        self.longs: LongArray = np.zeros((2 + len(step.slot_mapping), tokens), dtype=np.int64)
        self.longs[0, :used] = step.input_ids
        self.longs[1, :used] = step.positions
        for row, slots in enumerate(step.slot_mapping.values(), start=2):
            self.longs[row, :used] = slots
            self.longs[row, used:] = -1
        self.lengths: IntArray = np.zeros((4, rows), dtype=np.int32)
        self.lengths[0, batch:] = 1
        self.lengths[0, :batch] = step.query_lens
        self.lengths[1, :batch] = step.context_lens
        self.lengths[2, :batch] = step.kv_lens
        self.lengths[3] = -1
        self.lengths[3, : len(step.state_slots)] = step.state_slots
        self.offsets: IntArray = np.empty(rows + 1, dtype=np.int32)
        self.offsets[: batch + 1] = step.cu_seqlens_q
        self.offsets[batch:] = np.arange(used, tokens + 1)
        self.blocks = _pad_rows(step.block_table, rows)
        self.windows = _pad_rows(step.window_table, rows)


def _pad_rows(table: IntArray, rows: int) -> IntArray:
    if len(table) == rows:
        return table
    padded = np.full((rows, table.shape[1]), -1, dtype=np.int32)
    padded[: len(table)] = table
    return padded


@dataclass(frozen=True, slots=True)
class _Tensors:
    longs: "torch.Tensor"
    """(2 + components, tokens)"""
    lengths: "torch.Tensor"
    """(4, rows)"""
    offsets: "torch.Tensor"
    blocks: "torch.Tensor"
    windows: "torch.Tensor"


def _tensors(arrays: _Padded, device: "torch.device | str") -> _Tensors:
    return _Tensors(
        longs=_upload(arrays.longs, device),
        lengths=_upload(arrays.lengths, device),
        offsets=_upload(arrays.offsets, device),
        blocks=_upload(arrays.blocks, device),
        windows=_upload(arrays.windows, device),
    )


def _upload(
    array: npt.NDArray[np.int32] | LongArray, device: "torch.device | str"
) -> "torch.Tensor":
    """A copy on the device, queued.  Pinned pages come from torch's own allocator, which keeps
    them until the copy has run."""
    import torch

    device = torch.device(device)
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@final
class StepBuffers:
    """Static device arrays that steps are copied into; made by ``Cache.buffers``.

    One step at a time: the next ``to_device(buffers)`` overwrites what the last one returned, in
    stream order.
    """

    __slots__ = ("_tensors", "max_batch", "max_pages", "max_tokens")

    def __init__(
        self,
        layout: Layout,
        device: "torch.device | str",
        *,
        max_batch: int,
        max_tokens: int,
        max_pages: int,
    ) -> None:
        import torch

        self.max_batch = as_int("max_batch", max_batch, least=1)
        self.max_tokens = as_int("max_tokens", max_tokens, least=1)
        self.max_pages = as_int("max_pages", max_pages, least=1)
        windows = 0
        if layout.windows:
            windows = -(-max_pages * layout.page_tokens // layout.windows[0].slots_per_page)
        mappings, ints = len(layout.history) + len(layout.windows), torch.int32
        longs = (2 + mappings, max_tokens)
        self._tensors = _Tensors(
            longs=torch.zeros(longs, dtype=torch.int64, device=device),
            lengths=torch.zeros((4, max_batch), dtype=ints, device=device),
            offsets=torch.zeros(max_batch + 1, dtype=ints, device=device),
            blocks=torch.full((max_batch, max_pages), -1, dtype=ints, device=device),
            windows=torch.full((max_batch, windows), -1, dtype=ints, device=device),
        )

    def _check_fits(self, rows: int, tokens: int, pages: int) -> None:
        for name, needed, limit in (
            ("max_batch", rows, self.max_batch),
            ("max_tokens", tokens, self.max_tokens),
            ("max_pages", pages, self.max_pages),
        ):
            if needed > limit:
                raise ConfigError(f"the step needs {name}={needed}, the buffers have {limit}")

    def _fill(self, step: Step, arrays: _Padded) -> DeviceStep:
        rows, tokens = len(arrays.blocks), arrays.longs.shape[1]
        static = self._tensors
        new = _tensors(arrays, static.blocks.device)
        views = _Tensors(
            longs=static.longs[:, :tokens],
            lengths=static.lengths[:, :rows],
            offsets=static.offsets[: rows + 1],
            blocks=static.blocks[:rows],
            windows=static.windows[:rows],
        )
        views.longs.copy_(new.longs)
        views.lengths.copy_(new.lengths)
        views.offsets.copy_(new.offsets)
        for table, columns in ((views.blocks, new.blocks), (views.windows, new.windows)):
            table.fill_(-1)
            table[:, : columns.shape[1]].copy_(columns)
        return DeviceStep(step, views)
