"""A step's arrays on the device, and the pages they point into.

Owns how they get there: grouped, so that each group is one copy, with padding rows, into tensors
of their own or into the static ones that CUDA graphs are captured with.  Knows how a model
addresses the device pool; nothing of leases or of the core.

Padding rows (``pad_to=n``) ask nothing and write nothing: one query token each, slot -1, table -1,
KV length 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtier.config import as_int
from kvtier.errors import ConfigError
from kvtier.layouts.base import Layout
from kvtier.tokens import IntArray

if TYPE_CHECKING:
    import torch

    from kvtier.step import Step

__all__ = ["DeviceRows", "DeviceStep", "LayerView", "PagedTransfer", "StepBuffers", "to_device"]

LongArray = npt.NDArray[np.int64]
_MOST_ROWS = 1 << 16
"""Padding up to more is a mistake, and would take the memory it asks for."""


class Arriving(Protocol):
    """Pages that may be used although their bytes are still on the way."""

    def wait(self, layer: int | None = None) -> None:
        """What is queued on the current stream from here on runs behind this layer (None: all)."""


class DeviceRows(Protocol):
    """The device pool, as far as a model addresses it (``DeviceTransfer.pool`` is one)."""

    device: "torch.device"
    layers: frozenset[int]
    """All that the layout has."""

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

    def __init__(
        self,
        step: "Step",
        tensors: "_Tensors",
        pool: DeviceRows | None,
        late: Sequence[Arriving] = (),
    ) -> None:
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
        self._pool = pool
        self._late = late

    def layer(self, layer: int) -> LayerView:
        """Pages of one layer.  A layer cannot be left out or mixed up by accident.

        A prefix may still be on its way from the host, layer by layer: what is queued on the
        current stream from here on waits for this one.  Raises ConfigError for a layer that the
        layout does not have.
        """
        if self._pool is None:
            raise ConfigError(
                "this cache's transfer has no device pool that a model could read and write"
            )
        if layer not in self._pool.layers:
            known = f"{min(self._pool.layers)} to {max(self._pool.layers)}"
            raise ConfigError(f"the layout has no layer {layer}: its layers are {known}")
        for arrival in self._late:
            arrival.wait(layer)
        return LayerView(self._pool, layer)


class _Padded:
    """A step's arrays with padding rows, grouped so that each group is one copy."""

    __slots__ = ("blocks", "lengths", "longs", "offsets", "windows")

    def __init__(self, step: "Step", rows: int, tokens: int) -> None:
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

    def _fill(self, step: "Step", arrays: _Padded, pool: DeviceRows | None) -> DeviceStep:
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
        return DeviceStep(step, views, pool)


def to_device(
    step: "Step", pool: DeviceRows | None, buffers: StepBuffers | None, pad_to: int | None
) -> DeviceStep:
    """What ``Step.to_device`` returns; ``pool`` is what the step's pages lie in, if a model may
    address it."""
    batch, tokens = len(step.query_lens), len(step.input_ids)
    rows = batch if pad_to is None else as_int("pad_to", pad_to)
    if rows < batch:
        raise ConfigError(f"pad_to={pad_to} is less than the batch of {batch}")
    tokens += rows - batch
    if buffers is not None:
        buffers._check_fits(rows, tokens, step.block_table.shape[1])
    elif rows > max(batch, _MOST_ROWS):
        raise ConfigError(f"pad_to={pad_to} is more than the {_MOST_ROWS} rows of any batch")
    arrays = _Padded(step, rows, tokens)
    if buffers is not None:
        if pool is not None:  # a graph that is replayed waits for nothing
            for arrival in pool.arriving(step.block_table):
                arrival.wait()
        return buffers._fill(step, arrays, pool)
    device = pool.device if pool is not None else "cpu"
    late = pool.arriving(step.block_table) if pool is not None else ()
    return DeviceStep(step, _tensors(arrays, device), pool, late)
