"""Compressors that fold every 4 or 128 tokens into one cache entry, a piece at a time.

Each token gives a value and a score (its position bias already added) per channel; entry j is the
softmax-weighted sum over the tokens of group j, and, in the overlapping form, those of group j - 1
through their own columns.  Tokens of groups still open, and what the next group needs of the last,
lie in rings of the sequence's state slot: row ``position % ring``.

Rows are chosen by position alone: from the call's own tokens at and behind the context, from the
ring in front of it, and never from in front of the sequence.  So whatever rejected tokens, former
owners or a checkpoint's missing half left in other rows is never read, and how a sequence is cut
into calls changes no bit of an entry.  Norm, rotation and packing come after; nothing here knows
of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.kernels.exact import exp_of_negative, sum_by_halves
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.slots import token_positions

__all__ = ["ClosedEntries", "compress"]

ENTRY_BLOCK_VALUES = 1 << 22
"""Candidate values pooled at a time, at most (one entry at least)."""


@dataclass(frozen=True, slots=True)
class ClosedEntries:
    """The entries that one call closed, in the order of their tokens; and rows for checkpoints."""

    values: Tensor
    """(m, head_dim) pooled, before norm and rotation; float32, or wider as the state is."""
    tokens: Tensor
    """(m,) int64: which of the call's n tokens closed the entry."""
    entries: Tensor
    """(m,) int64: entry numbers j; the entry's rope position is ``ratio * j``."""
    captured: tuple[Tensor, ...]
    """For each state (captures, slots, 2 * head_dim): its rows of the ``slots`` positions before
    each capture's."""


def compress(
    kv: Tensor,
    score: Tensor,
    states: Sequence[Tensor],
    batch: PagedBatch,
    state_slots: Tensor,
    *,
    ratio: int,
    ring: int,
    captures: Sequence[tuple[int, int]] = (),
    capture_slots: Sequence[int] = (),
) -> ClosedEntries:
    """Take the call's tokens in: return the entries they close, and put them into the rings.

    ``kv`` and ``score`` (n, len(states) * head_dim), new tokens packed as in ``batch``, score with
    the position bias.  ``states`` (state slots * ring, 2 * head_dim) hold [kv | score] of a
    token's columns: one for compressors without overlap; two, for the columns that the next group
    reads and for those that the token's own group does, with it.  ``state_slots`` (sequences,);
    -1 for padding rows, which close nothing and write nothing.

    ``captures`` are (row of the batch, position) of checkpoints due: positions inside the row's
    new tokens or at their end; ``capture_slots`` says how many rows each state gives to one.  They
    are read as the state is at that position, so before the rings move on.

    Only the last ``ring`` tokens of a row are written.  A ring must hold a group's state and the
    tokens that may yet be rejected: ``len(states) * ratio + max_draft``.  Raises ValueError for
    shapes that do not fit and for state slots out of range, having written nothing.
    """
    head_dim = _check(kv, score, states, batch, state_slots, ratio, ring)
    sequences, positions = token_positions(batch)
    offsets = batch.cu_seqlens_q.to(torch.int64)
    rows = _Rows(
        kv=kv.to(states[0].dtype),
        score=score.to(states[0].dtype),
        states=states,
        head_dim=head_dim,
        ring=ring,
        sequences=sequences,
        positions=positions,
        starts=offsets[:-1],
        context=batch.kv_lens_device.to(torch.int64) - offsets.diff(),
        slots=state_slots.to(torch.int64),
    )
    captured = _capture(rows, captures, capture_slots or [0] * len(states))
    closing = (positions >= 0) & ((positions + 1) % ratio == 0)
    tokens = torch.nonzero(closing).flatten()
    values = [kv.new_empty(0, head_dim, dtype=states[0].dtype)]
    block = max(1, ENTRY_BLOCK_VALUES // (len(states) * ratio * head_dim))
    if tokens.numel():
        values += [_pool(rows, some, ratio) for some in torch.split(tokens, block)]
    _write(rows, batch)
    return ClosedEntries(torch.cat(values), tokens, positions[tokens] // ratio, captured)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of any sequence at any position: from the call's tokens, or from the rings."""

    kv: Tensor
    score: Tensor
    states: Sequence[Tensor]
    head_dim: int
    ring: int
    sequences: Tensor
    """(n,) Which sequence a token is of."""
    positions: Tensor
    """(n,); -1 of a padding row."""
    starts: Tensor
    """(sequences,) First token of each."""
    context: Tensor
    """(sequences,) Tokens in front of this call's."""
    slots: Tensor
    """(sequences,) State slots."""

    def columns(self, part: int) -> slice:
        return slice(part * self.head_dim, (part + 1) * self.head_dim)

    def at(self, part: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Value and score, each (m, w, head_dim), of one state's columns at ``positions`` (m, w).

        Before the sequence's start: 0 and -inf, so that they weigh nothing.
        """
        columns = self.columns(part)
        context = self.context[sequences][:, None]
        shape = (*positions.shape, self.head_dim)
        kv, score = self.kv.new_zeros(shape), self.kv.new_full(shape, -torch.inf)
        new = positions >= context
        token = (self.starts[sequences][:, None] + positions - context)[new]
        kv[new], score[new] = self.kv[token, columns], self.score[token, columns]
        old = (positions >= 0) & ~new
        slot = self.slots[sequences][:, None] * self.ring + positions % self.ring
        kv[old], score[old] = torch.split(self.states[part][slot[old]], self.head_dim, dim=1)
        return kv, score


def _pool(rows: _Rows, tokens: Tensor, ratio: int) -> Tensor:
    """The entries (m, head_dim) that ``tokens`` close."""
    sequences, closing = rows.sequences[tokens], rows.positions[tokens][:, None]
    group = torch.arange(1 - ratio, 1, device=tokens.device)
    parts = len(rows.states)  # the earlier group's columns come first
    found = [
        rows.at(part, sequences, closing + group - (parts - 1 - part) * ratio)
        for part in range(parts)
    ]
    kv, score = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
    weights = exp_of_negative(score - score.amax(dim=1, keepdim=True))
    return sum_by_halves(weights * kv, 1) / sum_by_halves(weights, 1)


def _write(rows: _Rows, batch: PagedBatch) -> None:
    stops = batch.kv_lens_device.to(torch.int64)
    last = rows.positions >= (stops - rows.ring).clamp_min(0)[rows.sequences]
    tokens = torch.nonzero(last).flatten()
    slots = rows.slots[rows.sequences[tokens]]
    target = slots * rows.ring + rows.positions[tokens] % rows.ring
    for part, state in enumerate(rows.states):
        columns = rows.columns(part)
        state[target] = torch.cat((rows.kv[tokens, columns], rows.score[tokens, columns]), dim=1)


def _capture(
    rows: _Rows, captures: Sequence[tuple[int, int]], slots: Sequence[int]
) -> tuple[Tensor, ...]:
    if not captures:
        return tuple(rows.kv.new_empty(0, count, 2 * rows.head_dim) for count in slots)
    which = torch.tensor(captures, dtype=torch.int64, device=rows.kv.device)
    captured = []
    for part, count in enumerate(slots):
        positions = which[:, 1:] + torch.arange(-count, 0, device=which.device)
        captured.append(torch.cat(rows.at(part, which[:, 0], positions), dim=2))
    return tuple(captured)


def _check(
    kv: Tensor,
    score: Tensor,
    states: Sequence[Tensor],
    batch: PagedBatch,
    state_slots: Tensor,
    ratio: int,
    ring: int,
) -> int:
    n, width = kv.shape
    head_dim, rest = divmod(width, len(states))
    if rest or score.shape != kv.shape or any(s.shape[1] != 2 * head_dim for s in states):
        raise ValueError(
            f"kv {tuple(kv.shape)}, score {tuple(score.shape)} and states "
            f"{[tuple(s.shape) for s in states]} do not fit together"
        )
    if sum(batch.query_lens) != n or state_slots.shape[0] != len(batch.query_lens):
        raise ValueError(
            f"{n} tokens and {state_slots.shape[0]} state slots for {len(batch.query_lens)} rows "
            f"of {sum(batch.query_lens)} tokens"
        )
    if ring < len(states) * ratio or any(s.shape[0] % ring for s in states):
        raise ValueError(f"{ring=} for groups of {ratio} and states of {states[0].shape[0]} rows")
    there = states[0].shape[0] // ring
    real = batch.kv_lens_device > 0  # negative indices would silently wrap around
    if bool((real & ((state_slots < 0) | (state_slots >= there))).any()):
        raise ValueError(f"state slots {state_slots.tolist()} of {there}")
    return head_dim
