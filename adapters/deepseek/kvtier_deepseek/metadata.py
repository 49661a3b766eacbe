"""The arrays of one forward pass as the adapter takes them, and the check of hand-made ones.

``kvtier.Step`` derives all of them in one place and needs no check; an engine that builds its own
gets every inconsistency named before a kernel sees it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier import ConfigError, DeviceStep, LayoutMismatch, TokenError
from kvtier.layouts import Layout

__all__ = [
    "CaptureLike",
    "DeviceStepLike",
    "LayerRows",
    "RowLens",
    "StepLike",
    "TailDeviceStepLike",
    "TailRows",
    "TailStepLike",
    "check_is_step",
    "row_lens",
    "upload",
    "validate_step",
    "validate_tail_step",
]

IntArray = npt.NDArray[np.int32]
RowLens = tuple[tuple[int, ...], tuple[int, ...]]
"""Query and KV lengths of a batch's rows, as the host knows them."""


class LayerRows(Protocol):
    """Pages of one layer."""

    def rows(self, component: str) -> Tensor:
        """(slots, width) view; slot i is row i."""


class TailRows(LayerRows, Protocol):
    """Pages, windows and states of one layer, and what checkpoints hold of it."""

    def checkpoints(self, component: str) -> Tensor:
        """Frames of the checkpoints due in this step: of a state (frames, slots, width), of
        windows (frames, pages, ...)."""


class CaptureLike(Protocol):
    """A checkpoint due inside a step."""

    @property
    def row(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def frame(self) -> int: ...


class DeviceStepLike(Protocol):
    """A step's arrays on the device, padding rows included, and the pages they point into."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def cu_seqlens_q(self) -> Tensor: ...
    @property
    def kv_lens(self) -> Tensor: ...
    @property
    def block_table(self) -> Tensor: ...
    @property
    def slot_mapping(self) -> Mapping[str, Tensor]: ...
    def layer(self, layer: int) -> LayerRows: ...


class TailDeviceStepLike(DeviceStepLike, Protocol):
    """The same of a layout with tails."""

    @property
    def state_slots(self) -> Tensor: ...
    @property
    def window_table(self) -> Tensor: ...
    def layer(self, layer: int) -> TailRows: ...


class StepLike(Protocol):
    """What ``kvtier.Step`` offers, as far as the adapter needs it."""

    @property
    def input_ids(self) -> IntArray: ...
    @property
    def positions(self) -> IntArray: ...
    @property
    def cu_seqlens_q(self) -> IntArray: ...
    @property
    def query_lens(self) -> IntArray: ...
    @property
    def context_lens(self) -> IntArray: ...
    @property
    def kv_lens(self) -> IntArray: ...
    @property
    def block_table(self) -> IntArray: ...
    @property
    def slot_mapping(self) -> Mapping[str, IntArray]: ...
    def to_device(self, buffers: Any = None, *, pad_to: int | None = None) -> DeviceStepLike: ...


class TailStepLike(StepLike, Protocol):
    """The same of a layout with tails."""

    @property
    def window_table(self) -> IntArray: ...
    @property
    def state_slots(self) -> IntArray: ...
    @property
    def captures(self) -> Sequence[CaptureLike]: ...


def row_lens(step: StepLike, device: DeviceStepLike, bound: int | None) -> RowLens:
    """Lengths of ``device``'s rows; padding rows have as many queries each and KV length 0.

    With ``bound``, of any step of that many rows and tokens in which each row has as many queries
    as any other: the KV length that none exceeds.
    """
    rows = int(device.kv_lens.shape[0])
    if bound is not None:
        return (device.input_ids.shape[0] // rows,) * rows, (bound,) * rows
    padding = rows - int(step.kv_lens.shape[0])
    queries = (device.input_ids.shape[0] - len(step.input_ids)) // max(1, padding)
    return (
        (*step.query_lens.tolist(), *[queries] * padding),
        (*step.kv_lens.tolist(), *[0] * padding),
    )


def upload(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy on ``device``, queued on its current stream without waiting."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def check_is_step(step: object) -> None:
    """Raises ConfigError for anything else: a step's arrays are read on the host first, so those on
    the device alone would not do."""
    if isinstance(step, DeviceStep):
        raise ConfigError(
            "the adapter was given step.to_device(); pass the step itself, adapter(step): it makes "
            "the device arrays"
        )
    if not isinstance(getattr(step, "query_lens", None), np.ndarray):
        raise ConfigError(
            f"the adapter takes a kvtier.Step, or arrays on the host like one's, got {step!r:.80}"
        )


def validate_step(
    step: StepLike,
    *,
    page_tokens: int,
    num_pages: int | None = None,
    component: str = "latent",
) -> None:
    """Check hand-made metadata against itself, and against a pool of ``num_pages``.

    ``step`` has int32 numpy arrays: ``input_ids``, ``positions`` and ``slot_mapping[component]``
    (tokens,), ``cu_seqlens_q`` (batch + 1,), ``query_lens``, ``context_lens`` and ``kv_lens``
    (batch,), ``block_table`` (batch, pages).  An empty batch is fine.

    Raises LayoutMismatch naming the array and row: wrong shape or type, sums that do not add up,
    positions that do not follow the context, a KV length shorter than its queries, a block table
    too short for it or with a page that the pool does not have (None: not checked), a slot used
    twice or outside its sequence's own pages.  TokenError for a negative id.
    """
    _check_rows(step, (component,), page_tokens, num_pages)
    slots = step.slot_mapping[component]
    pages = _page_of_token(step.block_table, step, page_tokens)
    _check_slots(step, component, slots, pages * page_tokens + step.positions % page_tokens)


def validate_tail_step(
    step: TailStepLike,
    layout: Layout,
    *,
    num_pages: int | None = None,
    num_windows: int | None = None,
    num_states: int | None = None,
) -> None:
    """The same for a layout with tails: also every slot of its components, the window table and
    the state slots.

    Raises LayoutMismatch naming the array and row, TokenError for a negative id.
    """
    names = tuple(c.name for c in (*layout.history, *layout.windows))
    page_tokens = layout.page_tokens
    _check_rows(step, names, page_tokens, num_pages)
    _check_window_table(step, layout, num_windows)
    if layout.states:
        _check_state_slots(step, num_states)
    windows = None
    if layout.windows:
        windows = _page_of_token(step.window_table, step, layout.windows[0].slots_per_page)
    pages = _page_of_token(step.block_table, step, page_tokens)
    for name, own in layout.slots(step.positions, pages, windows).items():
        _check_slots(step, name, step.slot_mapping[name], own)


def _check_rows(
    step: StepLike, components: Sequence[str], page_tokens: int, num_pages: int | None
) -> None:
    """Lengths, offsets, positions and the block table."""
    batch, tokens = step.query_lens.shape[0], step.input_ids.shape[0]
    _check_shapes(step, batch, tokens, components)
    if (smallest := int(step.input_ids.min(initial=0))) < 0:
        raise TokenError(f"input_ids has a negative token id, {smallest}")
    query, context, kv = step.query_lens, step.context_lens, step.kv_lens
    offsets = np.concatenate(([0], np.cumsum(query)))
    if not np.array_equal(step.cu_seqlens_q, offsets) or offsets[-1] != tokens:
        raise LayoutMismatch(
            f"cu_seqlens_q {step.cu_seqlens_q.tolist()} is not the prefix sum of query_lens "
            f"{query.tolist()} over {tokens} tokens"
        )
    for b in range(batch):
        if query[b] < 1 or context[b] < 0 or kv[b] != context[b] + query[b]:
            raise LayoutMismatch(
                f"row {b}: kv_lens {kv[b]} is not context_lens {context[b]} + query_lens {query[b]}"
            )
        _check_row(step, b, int(offsets[b]), page_tokens, num_pages)


def _check_slots(step: StepLike, component: str, slots: IntArray, own: IntArray) -> None:
    """Each of ``slots`` is its token's own, or -1, and none is written twice."""
    wrong = np.flatnonzero((slots != own) & (slots != -1))
    if wrong.size:
        at = int(wrong[0])
        b = int(np.searchsorted(step.cu_seqlens_q, at, side="right")) - 1
        raise LayoutMismatch(
            f"row {b}: slot_mapping[{component!r}] puts position {step.positions[at]} into slot "
            f"{slots[at]}, its page has it at {own[at]}"
        )
    used, counts = np.unique(slots[slots >= 0], return_counts=True)
    if counts.size and counts.max() > 1:
        raise LayoutMismatch(
            f"slot {used[counts.argmax()]} of {component!r} is written twice in one step"
        )


def _page_of_token(table: IntArray, step: StepLike, page_tokens: int) -> IntArray:
    """(tokens,) what ``table`` says of the page that each new token lies in."""
    rows = np.repeat(np.arange(len(step.query_lens)), step.query_lens)
    return table[rows, step.positions // page_tokens]


def _check_shapes(step: StepLike, batch: int, tokens: int, components: Sequence[str]) -> None:
    if missing := [name for name in components if name not in step.slot_mapping]:
        raise LayoutMismatch(f"slot_mapping has no component {missing[0]!r}")
    wanted: dict[str, tuple[IntArray, tuple[int, ...]]] = {
        "input_ids": (step.input_ids, (tokens,)),
        "positions": (step.positions, (tokens,)),
        "cu_seqlens_q": (step.cu_seqlens_q, (batch + 1,)),
        "query_lens": (step.query_lens, (batch,)),
        "context_lens": (step.context_lens, (batch,)),
        "kv_lens": (step.kv_lens, (batch,)),
        **{f"slot_mapping[{c!r}]": (step.slot_mapping[c], (tokens,)) for c in components},
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise LayoutMismatch(f"{name} has shape {array.shape}, expected {shape}")
    if step.block_table.ndim != 2 or step.block_table.shape[0] != batch:
        raise LayoutMismatch(f"block_table has shape {step.block_table.shape} for {batch} rows")
    wanted["block_table"] = (step.block_table, step.block_table.shape)
    for name, (array, _) in wanted.items():
        if array.dtype != np.int32:
            raise LayoutMismatch(f"{name} must be int32, got {array.dtype}")


def _check_row(step: StepLike, b: int, begin: int, page_tokens: int, num_pages: int | None) -> None:
    context, kv = int(step.context_lens[b]), int(step.kv_lens[b])
    mine = slice(begin, begin + kv - context)
    positions = np.arange(context, kv)
    if not np.array_equal(step.positions[mine], positions):
        raise LayoutMismatch(f"row {b}: positions are not {context}..{kv - 1}")
    needed = -(-kv // page_tokens)
    pages = step.block_table[b]
    if pages.shape[0] < needed or (pages[:needed] < 0).any():
        raise LayoutMismatch(f"row {b}: block_table needs {needed} pages for {kv} tokens")
    if num_pages is not None and (largest := int(pages[:needed].max(initial=0))) >= num_pages:
        raise LayoutMismatch(f"row {b}: block_table names page {largest} of a pool of {num_pages}")


def _check_window_table(step: TailStepLike, layout: Layout, num_windows: int | None) -> None:
    """Every window page that a query of this step reaches back to is there."""
    batch = len(step.query_lens)
    table = step.window_table
    if table.ndim != 2 or table.shape[0] != batch or table.dtype != np.int32:
        raise LayoutMismatch(f"window_table is {table.dtype} {table.shape} for {batch} rows")
    for c in layout.windows[:1]:
        assert c.window is not None
        for b in range(batch):
            first = max(0, int(step.context_lens[b]) - c.window + 1) // c.slots_per_page
            stop = -(-int(step.kv_lens[b]) // c.slots_per_page)
            pages = table[b, first:stop]
            if len(pages) < stop - first or (pages < 0).any():
                raise LayoutMismatch(f"row {b}: window_table lacks pages of {first}..{stop - 1}")
            if num_windows is not None and pages.max() >= num_windows:
                raise LayoutMismatch(
                    f"row {b}: window_table names page {pages.max()} of a pool of {num_windows}"
                )


def _check_state_slots(step: TailStepLike, num_states: int | None) -> None:
    slots, batch = step.state_slots, len(step.query_lens)
    if slots.shape != (batch,) or slots.dtype != np.int32:
        raise LayoutMismatch(f"state_slots is {slots.dtype} {slots.shape} for {batch} rows")
    if len(np.unique(slots)) < batch or (slots < 0).any():
        raise LayoutMismatch(f"state_slots {slots.tolist()} must be one of its own for each row")
    if num_states is not None and slots.max(initial=0) >= num_states:
        raise LayoutMismatch(f"state_slots names {slots.max()} of a pool of {num_states}")
