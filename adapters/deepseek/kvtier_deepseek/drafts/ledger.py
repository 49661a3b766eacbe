"""Which rows of its layers a draft has, lease by lease, and what it carries to the next position.

Bookkeeping only: positions, lengths and one small tensor a lease.  What lies in pages comes back
with them; what lies between page ends is remembered here, for as long as the lease lives.  Knows
nothing of how rows are made.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvtier.layouts import drafts_from
from kvtier_deepseek.fields import DRAFT_STATE
from kvtier_deepseek.metadata import DeviceStepLike, StepLike

if TYPE_CHECKING:
    from kvtier import Lease

__all__ = ["Ledger", "Stand"]


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a draft stands at ``length`` tokens of a lease."""

    length: int
    gapless: int
    """First position from which all rows up to ``length`` are there; ``length``: none."""
    carry: Tensor | None
    """(values,) of position ``length - 1``, zeros before the first; None: lost."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trace:
    """What a lease's last step left."""

    stop: int
    gapless: int
    hidden: Tensor
    """(n, values) of positions ``stop - n`` .. ``stop - 1``; nothing where nothing is carried."""


@final
class Ledger:
    """Where each lease's draft stands.  Leases that are gone are forgotten."""

    def __init__(
        self,
        *,
        page_tokens: int,
        layer: int | None,
        values: int,
        keep: int,
        carries: bool,
        reach: int | None,
    ) -> None:
        """``layer`` is where pages keep the last token's state; None: they do not."""
        self._page_tokens = page_tokens
        self._layer = layer
        self._values = values
        self._keep = keep
        self._carries = carries
        self._reach = reach
        self._traces: WeakKeyDictionary[Lease, _Trace] = WeakKeyDictionary()

    def begin(self, step: StepLike, device: DeviceStepLike, like: Tensor) -> list[Stand]:
        """Where each row stands before its tokens; ``like`` says type and device of a carry."""
        return [
            self._before(step, device, row, int(length), like)
            for row, length in enumerate(step.context_lens)
        ]

    def stand(self, step: StepLike, device: DeviceStepLike, row: int, length: int) -> Stand:
        """Where a row stands at ``length``, once its step has been taken in."""
        lease = _lease(step, row)
        trace = self._traces.get(lease) if lease is not None else None
        if trace is not None and (found := self._remembered(trace, length)) is not None:
            return found
        return Stand(length, length, None)

    def end(
        self, step: StepLike, device: DeviceStepLike, hidden: Tensor, stands: list[Stand]
    ) -> None:
        """Rows of the step's tokens have been written: remember, and fill in closed pages."""
        starts = step.cu_seqlens_q.tolist()
        gapless = []
        for row, stand in enumerate(stands):
            count = starts[row + 1] - starts[row]
            lost = stand.carry is None and count > 0
            gapless.append(stand.length + 1 if lost else stand.gapless)
            lease = _lease(step, row)
            if lease is None:
                continue
            kept = hidden[:0]
            if self._carries:
                kept = hidden[starts[row] : starts[row + 1]]
                if stand.carry is not None:
                    kept = torch.cat((stand.carry[None], kept))
                kept = kept[-self._keep :].clone()
            self._traces[lease] = _Trace(stand.length + count, gapless[row], kept)
        if self._layer is not None:
            self._fill_pages(step, device, hidden, gapless)

    def gapless(self, lease: "Lease") -> int | None:
        trace = self._traces.get(lease)
        return None if trace is None else trace.gapless

    def stop(self, lease: "Lease") -> int | None:
        trace = self._traces.get(lease)
        return None if trace is None else trace.stop

    def fork(self, lease: "Lease", other: "Lease") -> None:
        if (trace := self._traces.get(lease)) is not None:
            self._traces[other] = trace

    def _before(
        self, step: StepLike, device: DeviceStepLike, row: int, length: int, like: Tensor
    ) -> Stand:
        if length == 0:
            return Stand(0, 0, like.new_zeros(self._values))
        lease = _lease(step, row)
        trace = self._traces.get(lease) if lease is not None else None
        if trace is not None and (found := self._remembered(trace, length)) is not None:
            return found
        if self._layer is None or length % self._page_tokens:
            return self._unknown(length, like)
        return self._stored(step, device, row, length, like)

    def _remembered(self, trace: _Trace, length: int) -> Stand | None:
        if length > trace.stop:
            return None
        gapless = min(trace.gapless, length)
        if not self._carries:
            return Stand(length, gapless, trace.hidden.new_zeros(self._values))
        at = length - 1 - (trace.stop - trace.hidden.shape[0])
        return Stand(length, gapless, trace.hidden[at]) if at >= 0 else None

    def _unknown(self, length: int, like: Tensor) -> Stand:
        return Stand(length, length, None if self._carries else like.new_zeros(self._values))

    def _stored(
        self, step: StepLike, device: DeviceStepLike, row: int, length: int, like: Tensor
    ) -> Stand:
        """What the pages of a hit say.  Waits for the device, once a lease."""
        assert self._layer is not None
        states = device.layer(self._layer).rows(DRAFT_STATE)
        pages = length // self._page_tokens
        # A page that is one token short is as good as a whole one to a window that ends with it.
        first = 0 if self._reach is None else max(0, pages - 1 - self._reach // self._page_tokens)
        table = torch.from_numpy(step.block_table[row, first:pages].astype(np.int64))
        marks = states.view(torch.int32)[table.to(states.device), -1].tolist()
        if not 0 <= marks[-1] <= self._page_tokens:
            return self._unknown(length, like)
        gapless = first * self._page_tokens + drafts_from(marks, self._page_tokens)
        carry = states[int(table[-1]), : self._values].to(like.dtype).clone()
        return Stand(length, gapless, carry)

    def _fill_pages(
        self, step: StepLike, device: DeviceStepLike, hidden: Tensor, gapless: list[int]
    ) -> None:
        slots = step.slot_mapping[DRAFT_STATE]
        closing = np.flatnonzero(slots >= 0)
        if not len(closing):
            return
        assert self._layer is not None
        states = device.layer(self._layer).rows(DRAFT_STATE)
        rows = np.searchsorted(step.cu_seqlens_q, closing, side="right") - 1
        counts = step.positions[closing] + 1 - np.array(gapless)[rows]
        marks = np.clip(counts, 0, self._page_tokens).astype(np.int32)
        at = torch.from_numpy(np.stack((closing, slots[closing])).astype(np.int64))
        at = at.to(states.device)
        filled = states.new_zeros(len(closing), states.shape[1])
        filled[:, : self._values] = hidden[at[0]].to(states.dtype)
        filled.view(torch.int32)[:, -1] = torch.from_numpy(marks).to(states.device)
        states[at[1]] = filled


def _lease(step: StepLike, row: int) -> "Lease | None":
    """Hand-made steps have none: then only page ends are known."""
    leases = getattr(step, "leases", None)
    return cast("Lease", cast(Any, leases)[row]) if leases else None
