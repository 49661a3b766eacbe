"""Compressing into pages in triton: pool, norm, rotate and pack; then the rings move on.

Grids depend on shapes alone and nothing is asked of the device, so a captured graph may be replayed
with other lengths, slots and captures in the same tensors: of the batch only ``cu_seqlens_q`` and
``kv_lens_device`` are read.  Rings are written by a launch of their own, behind the one that reads
them.  State slots and slots out of range are skipped, not raised for.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.records import Record
from kvtier.kernels.triton_batch import closing, place
from kvtier.kernels.triton_values import (
    exp_of_negative,
    over_root_mean_square,
    rotated,
    store_record,
    sum_by_halves,
    widened,
)
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["compress_write"]

TILE_VALUES = 4096
"""Candidate values that a program pools, at most: an entry that has more is pooled by several, and
its norm then takes a launch of its own."""


def compress_write(
    kv: Tensor,
    score: Tensor,
    states: Sequence[Tensor],
    batch: PagedBatch,
    state_slots: Tensor,
    storage: Tensor,
    slots: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    record: Record,
    *,
    ratio: int,
    ring: int,
    eps: float,
    captures: Tensor | None = None,
    frames: Sequence[Tensor | None] = (),
) -> None:
    """``kvtier.kernels.compress_write``, for float32 states, groups and widths of powers of two."""
    kv, score, cos, sin = adjacent(kv), adjacent(score), adjacent(cos), adjacent(sin)
    dim = _check(kv, score, states, slots, weight, cos, sin, ratio, ring)
    page_stride, per_page, there = pool_of(storage, record)
    n = kv.shape[0]
    if not n:
        return
    parts = len(states)
    # What every launch takes: the step's rows, and where the rings' rows are.
    source = (
        kv,
        score,
        kv.stride(0),
        states[0],
        states[-1],
        states[0].stride(0),
        states[-1].stride(0),
        ring,
        states[0].shape[0] // ring,
        state_slots,
        batch.cu_seqlens_q,
        batch.kv_lens_device,
        batch.kv_lens_device.shape[0],
    )
    if captures is not None and captures.shape[0]:
        _capture_rows(source, captures, frames, parts, dim)
    entries = n // ratio + batch.kv_lens_device.shape[0]  # more cannot close
    tile = min(dim, TILE_VALUES // (parts * ratio))
    pooled = None
    if tile < dim:
        pooled = torch.empty(entries, dim, dtype=torch.float32, device=kv.device)
        _pool[(entries, dim // tile)](
            *source,
            pooled,
            RATIO=ratio,
            PARTS=parts,
            DIM=dim,
            TILE=tile,
            num_warps=4,
            enable_fp_fusion=False,
        )
    _close[(entries,)](
        *source,
        pooled,
        storage,
        page_stride,
        per_page,
        there,
        slots,
        weight,
        cos,
        sin,
        cos.stride(0),
        eps,
        RATIO=ratio,
        PARTS=parts,
        DIM=dim,
        PAIRS=cos.shape[1],
        RECORD=record.name,
        num_warps=4 if pooled is None else 1,
        enable_fp_fusion=False,
    )
    _move_on[(n,)](*source, PARTS=parts, DIM=dim)


def _check(
    kv: Tensor,
    score: Tensor,
    states: Sequence[Tensor],
    slots: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    ratio: int,
    ring: int,
) -> int:
    (n, width), parts = kv.shape, len(states)
    dim = width // parts
    if score.shape != kv.shape or score.stride() != kv.stride():
        raise ValueError(f"kv {tuple(kv.shape)} and score {tuple(score.shape)}, {kv.stride()}")
    if any(s.shape != (states[0].shape[0], 2 * dim) or s.stride(1) != 1 for s in states):
        raise ValueError(f"states {[tuple(s.shape) for s in states]} for {width} columns")
    if not 1 <= parts <= 2 or any(s.dtype != torch.float32 for s in states):
        raise ValueError(f"{parts} states of {states[0].dtype}")
    if (dim & (dim - 1)) or (parts * ratio) & (parts * ratio - 1):
        raise ValueError(f"{dim=} and {parts} groups of {ratio}: powers of two only")
    if ring < parts * ratio or states[0].shape[0] % ring:
        raise ValueError(f"{ring=} for groups of {ratio} and states of {states[0].shape[0]} rows")
    if slots.shape[0] != n or cos.shape[0] != n or cos.shape != sin.shape:
        raise ValueError(f"{n} tokens, {slots.shape[0]} slots, rotation {tuple(cos.shape)}")
    if cos.stride() != sin.stride() or weight.shape != (dim,):
        raise ValueError(f"rotation of strides {cos.stride()}, weight {tuple(weight.shape)}")
    return dim


def _capture_rows(
    source: tuple[Any, ...],
    captures: Tensor,
    frames: Sequence[Tensor | None],
    parts: int,
    dim: int,
) -> None:
    if captures.shape[1] != 3 or captures.stride(1) != 1:
        raise ValueError(f"captures {tuple(captures.shape)} with strides {captures.stride()}")
    for part, frame in enumerate(frames):
        if frame is None or not frame.shape[1]:
            continue
        if frame.shape[2] != 2 * dim or frame.stride(2) != 1:
            raise ValueError(f"frames {tuple(frame.shape)} for rows of {2 * dim}")
        _capture[(captures.shape[0], frame.shape[1])](
            *source,
            captures,
            captures.stride(0),
            frame,
            *frame.stride()[:2],
            frame.shape[0],
            frame.shape[1],
            part,
            PARTS=parts,
            DIM=dim,
        )


@triton.jit
def _candidates(
    kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring,
    slot, context, first, positions, columns, part,
    PARTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """kv and score, each (rows, columns), of one sequence at ``positions`` (rows,).

    ``part`` (rows,) says through which columns; those before the start are 0 and -inf.
    """
    new = (positions >= context) & (positions >= 0)
    old = (positions >= 0) & (positions < context)
    token = first + positions - context
    at = (token * kv_stride + part * DIM)[:, None] + columns[None, :]
    k = widened(tl.load(kv + at, mask=new[:, None], other=0.0))
    s = widened(tl.load(score + at, mask=new[:, None], other=float("-inf")))
    row = slot * ring + positions % ring
    in_b = old & (part == PARTS - 1)
    at = (row * stride_b)[:, None] + columns[None, :]
    old_k = tl.load(state_b + at, mask=in_b[:, None], other=0.0)
    old_s = tl.load(state_b + DIM + at, mask=in_b[:, None], other=float("-inf"))
    k = tl.where(in_b[:, None], old_k, k)
    s = tl.where(in_b[:, None], old_s, s)
    if PARTS == 2:
        in_a = old & (part == 0)
        at = (row * stride_a)[:, None] + columns[None, :]
        old_k = tl.load(state_a + at, mask=in_a[:, None], other=0.0)
        old_s = tl.load(state_a + DIM + at, mask=in_a[:, None], other=float("-inf"))
        k = tl.where(in_a[:, None], old_k, k)
        s = tl.where(in_a[:, None], old_s, s)
    return k, s


@triton.jit
def _mean(
    kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring,
    slot, context, first, position, columns,
    RATIO: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Some columns (1, columns) of the entry that closes at ``position``."""
    candidate = tl.arange(0, PARTS * RATIO)
    positions = position + 1 - PARTS * RATIO + candidate
    k, s = _candidates(
        kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring,
        slot, context, first, positions, columns, candidate // RATIO, PARTS, DIM,
    )  # fmt: skip
    w = exp_of_negative(s - tl.max(s, axis=0)[None, :])
    return tl.div_rn(sum_by_halves(w * k), sum_by_halves(w))


@triton.jit(
    do_not_specialize=["ring_slots", "sequences"],
    do_not_specialize_on_alignment=["state_slots", "offsets", "lengths"],
)
def _pool(
    kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring, ring_slots,
    state_slots, offsets, lengths, sequences, pooled,
    RATIO: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of the columns of this program's entry, where one program has no room for all."""
    entry = tl.program_id(0).to(tl.int64)
    b, position, context, first = closing(entry, offsets, lengths, sequences, RATIO)
    slot = tl.load(state_slots + tl.maximum(b, 0)).to(tl.int64)
    if (b >= 0) & (slot >= 0) & (slot < ring_slots):
        columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
        mean = _mean(
            kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring,
            slot, context, first, position, columns, RATIO, PARTS, DIM,
        )  # fmt: skip
        tl.store(pooled + entry * DIM + columns, tl.reshape(mean, (TILE,)))


@triton.jit(
    do_not_specialize=["ring_slots", "sequences", "there", "eps"],
    do_not_specialize_on_alignment=["state_slots", "offsets", "lengths", "slots"],
)
def _close(
    kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring, ring_slots,
    state_slots, offsets, lengths, sequences, pooled,
    storage, page_stride, per_page, there, slots, weight, cos, sin, turn_stride, eps,
    RATIO: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """This program's entry into its page; pooled here, unless that was done before."""
    entry = tl.program_id(0).to(tl.int64)
    b, position, context, first = closing(entry, offsets, lengths, sequences, RATIO)
    slot = tl.load(state_slots + tl.maximum(b, 0)).to(tl.int64)
    if (b >= 0) & (slot >= 0) & (slot < ring_slots):
        token = first + position - context
        target = tl.load(slots + token).to(tl.int64)
        if (target >= 0) & (target < there):
            at = tl.arange(0, DIM)
            if pooled is None:
                x = _mean(
                    kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring,
                    slot, context, first, position, at, RATIO, PARTS, DIM,
                )  # fmt: skip
                x = tl.reshape(x, (DIM,))
            else:
                x = tl.load(pooled + entry * DIM + at)
            x = over_root_mean_square(x, eps) * widened(tl.load(weight + at))
            x = rotated(x, cos + token * turn_stride, sin + token * turn_stride, PAIRS, False)
            store_record(x, storage, page_stride, per_page, target, RECORD)


@triton.jit(
    do_not_specialize=["ring_slots", "sequences"],
    do_not_specialize_on_alignment=["state_slots", "offsets", "lengths"],
)
def _move_on(
    kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring, ring_slots,
    state_slots, offsets, lengths, sequences,
    PARTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """This program's token into the rings, if it is one of its sequence's last."""
    token = tl.program_id(0).to(tl.int64)
    b, position, _, _ = place(token, offsets, lengths, sequences)
    slot = tl.load(state_slots + b).to(tl.int64)
    last = (position >= 0) & (position >= tl.load(lengths + b).to(tl.int64) - ring)
    if last & (slot >= 0) & (slot < ring_slots):
        at = tl.arange(0, DIM)
        row = slot * ring + position % ring
        for part in tl.static_range(PARTS):
            k = widened(tl.load(kv + token * kv_stride + part * DIM + at))
            s = widened(tl.load(score + token * kv_stride + part * DIM + at))
            there = state_b + row * stride_b if part == PARTS - 1 else state_a + row * stride_a
            tl.store(there + at, k)
            tl.store(there + DIM + at, s)


@triton.jit(
    do_not_specialize=["ring_slots", "sequences", "num_frames", "part"],
    do_not_specialize_on_alignment=["state_slots", "offsets", "lengths", "captures"],
)
def _capture(
    kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring, ring_slots,
    state_slots, offsets, lengths, sequences,
    captures, capture_stride, frames, frame_stride, row_stride, num_frames, count, part,
    PARTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One row of one checkpoint's frame."""
    capture = captures + tl.program_id(0).to(tl.int64) * capture_stride
    b = tl.load(capture).to(tl.int64)
    frame = tl.load(capture + 2).to(tl.int64)
    if (b >= 0) & (b < sequences) & (frame >= 0) & (frame < num_frames):
        nth = tl.program_id(1)
        first = tl.load(offsets + b).to(tl.int64)
        context = tl.load(lengths + b).to(tl.int64) - (tl.load(offsets + b + 1) - first)
        slot = tl.load(state_slots + b).to(tl.int64)
        at = tl.arange(0, DIM)
        one = tl.zeros((1,), tl.int64)
        position = tl.load(capture + 1).to(tl.int64) - count + nth + one
        k, s = _candidates(
            kv, score, kv_stride, state_a, state_b, stride_a, stride_b, ring,
            slot, context, first, position, at, part + one, PARTS, DIM,
        )  # fmt: skip
        there = frames + frame * frame_stride + nth * row_stride
        tl.store(there + at, tl.reshape(k, (DIM,)))
        tl.store(there + DIM + at, tl.reshape(s, (DIM,)))
