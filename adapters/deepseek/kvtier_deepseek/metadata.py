"""The arrays of one forward pass as the adapter takes them, and the check of hand-made ones.

``kvtier.Step`` derives all of them in one place and needs no check; an engine that builds its own
gets every inconsistency named before a kernel sees it.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvtier import LayoutMismatch, TokenError

__all__ = ["DeviceStepLike", "LayerRows", "StepLike", "validate_step"]

IntArray = npt.NDArray[np.int32]


class LayerRows(Protocol):
    """Pages of one layer."""

    def rows(self, component: str) -> Tensor:
        """(slots, width) view; slot i is row i."""


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


def validate_step(
    step: StepLike,
    *,
    page_tokens: int,
    num_pages: int | None = None,
    component: str = "latent",
) -> None:
    """Check hand-made metadata against itself, and against a pool of ``num_pages``.

    An empty batch is fine.  Raises LayoutMismatch naming the array and row: wrong shape or type,
    sums that do not add up, positions that do not follow the context, a KV length shorter than its
    queries, a block table too short for it or with a page that the pool does not have (None: not
    checked), a slot used twice or outside its sequence's own pages.  TokenError for a negative id.
    """
    batch, tokens = step.query_lens.shape[0], step.input_ids.shape[0]
    _check_shapes(step, batch, tokens, component)
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
        _check_row(step, b, int(offsets[b]), page_tokens, num_pages, component)
    slots = step.slot_mapping[component]
    used, counts = np.unique(slots[slots >= 0], return_counts=True)
    if counts.size and counts.max() > 1:
        raise LayoutMismatch(f"slot {used[counts.argmax()]} is written twice in one step")


def _check_shapes(step: StepLike, batch: int, tokens: int, component: str) -> None:
    if component not in step.slot_mapping:
        raise LayoutMismatch(f"slot_mapping has no component {component!r}")
    wanted: dict[str, tuple[IntArray, tuple[int, ...]]] = {
        "input_ids": (step.input_ids, (tokens,)),
        "positions": (step.positions, (tokens,)),
        "cu_seqlens_q": (step.cu_seqlens_q, (batch + 1,)),
        "query_lens": (step.query_lens, (batch,)),
        "context_lens": (step.context_lens, (batch,)),
        "kv_lens": (step.kv_lens, (batch,)),
        "slot_mapping": (step.slot_mapping[component], (tokens,)),
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


def _check_row(
    step: StepLike, b: int, begin: int, page_tokens: int, num_pages: int | None, component: str
) -> None:
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
    slots = step.slot_mapping[component][mine]
    own = pages[positions // page_tokens] * page_tokens + positions % page_tokens
    wrong = (slots != own) & (slots != -1)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise LayoutMismatch(
            f"row {b}: slot_mapping puts position {positions[at]} into slot {slots[at]}, "
            f"its page has it at {own[at]}"
        )
