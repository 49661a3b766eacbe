"""Absorbed attention over paged latent rows for one multiprocessor of an H100 or H200 at a time.

Three groups of four warps share a block of 64 keys.  One scores it against 64 (token, head) pairs
and turns the scores into weights; it keeps most of the queries in registers, so that shared memory
holds three blocks of keys.  The other two sum up values, half of the latent each, and fetch the
half of a coming block in place of the one they are done with.  One of them begins at once, beside
the next block's scores; the other waits for these and runs beside their softmax.

A block's rope keys are not needed once it is scored: the weights take their place.  The reference
that scores are measured against moves only when one exceeds it 256 times over, so sums are seldom
rescaled by anything but 1.

Who does what is in ``mla_schedule``; that sequences held by several programs are merged at the end
of the same launch, in ``gluon_join``.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvtier.kernels.gluon_join import arrive, join, place_of, slot_of
from kvtier.kernels.gluon_parts import LN2, barriers
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.mla_schedule import BLOCK, Schedule

__all__ = ["TILE", "attend"]

TILE = 64
"""(token, head) pairs of a program."""
STAGES = gl.constexpr(3)
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Renamed by triton 3.9."""
HEADROOM = gl.constexpr(8.0)
"""By how many powers of two a score may exceed the reference."""


def attend(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    schedule: Schedule,
    *,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fills ``out`` (n, heads, 512) and ``lse`` (n, heads) float32; ``scale`` holds log2(e).

    Needs rows that lie 16 bytes aligned, pages of a multiple of 64 rows, a positive scale, and of
    ``schedule`` either a single part or room for all programs on the device at the same time:
    they wait for each other, so the launch is a cooperative one, which starts all of them or fails.
    """
    parts, tiles, _ = schedule.counts.shape
    found = query.new_empty(2 * parts, tiles, TILE, 512, dtype=torch.float32)
    found_lse = query.new_empty(2 * parts, tiles, TILE, dtype=torch.float32)
    kind = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    wide, narrow = (
        TensorDescriptor(
            rows,
            list(rows.shape),
            list(rows.stride()),
            [BLOCK, width],
            gl.NVMMASharedLayout.get_default_for([BLOCK, width], kind),
        )
        for width in (256, 64)
    )
    _attend[(tiles, parts)](
        query,
        *query.stride()[:2],
        wide,
        narrow,
        batch.cu_seqlens_q,
        batch.kv_lens_device,
        batch.kv_lens_device.shape[0],
        query.shape[0],
        scale,
        out,
        lse,
        found,
        found_lse,
        schedule.parts,
        schedule.rows,
        schedule.counts,
        HEADS=query.shape[1],
        num_warps=4,
        launch_cooperative_grid=parts > 1,
    )


@gluon.jit
def _segment(offsets, lengths, b, begin, stop, at):
    """Of a sequence: KV length, first token, tokens, blocks, and which blocks lie in this part."""
    kv_len = gl.load(lengths + b)
    first = gl.load(offsets + b)
    q_len = gl.load(offsets + b + 1) - first
    count = gl.cdiv(kv_len, 64)
    return kv_len, first, q_len, count, at - begin, gl.minimum(count, stop - begin)


@gluon.jit
def _scores(
    query, token_stride, head_stride, offsets, lengths, sequences, tokens, scale, at, stop, b,
    begin, empty, out, lse, part_lse, left, right, rope, q_last, q_rope, shrinks, finals,
    left_ready, right_ready, rope_ready, share_ready, scored, final_ready,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Weights of every block, log-sum-exp of every segment, and what is to be merged."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    nth = 0
    segment = 0
    while at < stop:
        kv_len, first, q_len, count, low, high = _segment(offsets, lengths, b, begin, stop, at)
        pair = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, q_layout))
        there = (pair < q_len * HEADS)[:, None]
        q_row = query + (first + pair // HEADS).to(gl.int64) * token_stride
        q_row = (q_row + (pair % HEADS).to(gl.int64) * head_stride)[:, None]
        d64 = gl.arange(0, 64, gl.SliceLayout(0, q_layout))[None, :]
        d128 = gl.arange(0, 128, gl.SliceLayout(0, q_layout))[None, :]
        d256 = gl.arange(0, 256, gl.SliceLayout(0, q_layout))[None, :]
        q_last.store(gl.load(q_row + (448 + d64), mask=there, other=0.0))
        q_rope.store(gl.load(q_row + (512 + d64), mask=there, other=0.0))
        q0 = gl.load(q_row + d256, mask=there, other=0.0)
        q1 = gl.load(q_row + (256 + d128), mask=there, other=0.0)
        q2 = gl.load(q_row + (384 + d64), mask=there, other=0.0)
        fence_async_shared()
        sees_all = kv_len - q_len
        top = gl.full([64], -float("inf"), gl.float32, row_layout)
        weight = gl.full([64], 0.0, gl.float32, row_layout)
        for block in range(low, high):
            slot = nth % STAGES
            two = nth & 1
            phase = (nth // STAGES) & 1
            k_left = left.index(slot)
            k_right = right.index(slot)
            score = gl.full([64, 64], 0.0, gl.float32, layout)
            mbarrier.wait(left_ready.index(slot), phase)
            score = warpgroup_mma(q0, k_left.permute((1, 0)), score, use_acc=False, is_async=True)
            mbarrier.wait(right_ready.index(slot), phase)
            k1 = k_right.slice(0, 128, 1).permute((1, 0))
            score = warpgroup_mma(q1, k1, score, is_async=True)
            k2 = k_right.slice(128, 64, 1).permute((1, 0))
            score = warpgroup_mma(q2, k2, score, is_async=True)
            k3 = k_right.slice(192, 64, 1).permute((1, 0))
            score = warpgroup_mma(q_last, k3, score, is_async=True)
            mbarrier.wait(rope_ready.index(two), (nth // 2) & 1)
            score = warpgroup_mma(q_rope, rope.index(two).permute((1, 0)), score, is_async=True)
            score = warpgroup_mma_wait(0, deps=[score])
            mbarrier.arrive(scored.index(two), count=1)
            if block * 64 + 63 > sees_all:
                # Loaded again, as registers are what this group is short of.
                first = gl.load(offsets + b)
                q_len = gl.load(offsets + b + 1) - first
                token = (gl.program_id(0) * 64 + gl.arange(0, 64, row_layout)) // HEADS
                last = gl.where(token < q_len, gl.load(lengths + b) - q_len + token, -1)
                key = block * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))
                score = gl.where(key[None, :] <= last[:, None], score, -float("inf"))
            new_top = gl.max(score, 1) * scale
            new_top = gl.where(new_top > top + HEADROOM, new_top, top)
            # A row that has seen nothing yet subtracts 0, not -inf.
            base = gl.where(new_top == -float("inf"), 0.0, new_top)
            shrink = gl.exp2(top - base)
            shrinks.index(two).store(shrink)
            share = gl.exp2(score * scale - base[:, None])
            weight = weight * shrink + gl.sum(share, 1)
            top = new_top
            rope.index(two).store(share.to(rope.dtype))
            fence_async_shared()
            mbarrier.arrive(share_ready.index(two), count=1)
            nth += 1
        safe = gl.where(weight > 0, weight, 1.0)
        finals.index(segment & 3).store(1 / safe)
        found = gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))
        kv_len, first, q_len, count, low, high = _segment(offsets, lengths, b, begin, stop, at)
        row = gl.arange(0, 64, row_layout)
        pair = gl.program_id(0) * 64 + row
        if (low == 0) & (high == count):
            gl.store(lse + first * HEADS + pair, found, mask=pair < q_len * HEADS)
        else:
            slot = slot_of(gl.program_id(1), low == 0)
            gl.store(part_lse + slot * 64 + row, found, mask=pair < q_len * HEADS)
        mbarrier.arrive(final_ready.index(segment & 3), count=1)
        segment += 1
        at = begin + high
        begin += count
        b += 1
    if (empty > 0) & (gl.program_id(0) == 0):
        b = gl.program_id(1)
        while b < sequences:
            if gl.load(lengths + b) <= 0:
                _nothing(out, lse, gl.load(offsets + b), gl.load(offsets + b + 1), HEADS)
            b += gl.num_programs(1)
        if gl.program_id(1) == 0:
            _nothing(out, lse, gl.load(offsets + sequences), tokens, HEADS)


@gluon.jit
def _nothing(out, lse, token, stop, HEADS: gl.constexpr):
    """Tokens from ``token`` to ``stop`` attend to nothing."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    column = gl.arange(0, 512, gl.SliceLayout(0, layout))
    zero = gl.full([8, 512], 0.0, gl.float32, layout)
    none = gl.full([8], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    row = token * HEADS
    while row < stop * HEADS:
        rows = row + gl.arange(0, 8, gl.SliceLayout(1, layout))
        there = rows < stop * HEADS
        to = out + (rows.to(gl.int64) * 512)[:, None] + column[None, :]
        gl.store(to, zero.to(out.dtype.element_ty), mask=there[:, None])
        gl.store(lse + rows, none, mask=there)
        row += 8


@gluon.jit
def _fetch(keys, row, column, into, ready, BYTES: gl.constexpr, pred):
    mbarrier.expect(ready, BYTES, pred)
    copy_tile(keys, [row, column], ready, into, pred)


@gluon.jit
def _values(
    wide, narrow, row_of, offsets, lengths, record, at, stop, b, begin,
    out, lse, parts, part_lse, counts,
    mine, rope, shrinks, finals, ready, rope_ready, share_ready, share_free, scored, final_ready,
    HALF: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Weighted sums of one half of the values; fetches that half, and the second also rope keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    nth = 0
    segment = 0
    # What is fetched runs ahead, into the next sequences too, as blocks are numbered over all.
    own = at
    own_b = b
    own_begin = begin
    # The first block came first, so that it is there first.
    mbarrier.wait(ready.index(0), 0, pred=at < stop)
    for i in gl.static_range(1, STAGES):
        row = gl.load(record + 8 + i)
        there = at + i < stop
        _fetch(wide, row, HALF * 256, mine.index(i), ready.index(i), 64 * 512, there)
        if (HALF == 1) & (i < 2):
            _fetch(narrow, row, 512, rope.index(i), rope_ready.index(i), 64 * 128, there)
    ahead = at + 3
    before = gl.load(record + 10)
    row = gl.load(record + 11)
    goes_on = 0
    while at < stop:
        kv_len, first, q_len, count, low, high = _segment(offsets, lengths, b, begin, stop, at)
        rows_left = kv_len - low * 64
        sofar = gl.full([64, 256], 0.0, gl.float32, layout)
        for block in range(low, high):
            slot = nth % STAGES
            two = nth & 1
            mbarrier.wait(ready.index(slot), (nth // STAGES) & 1)
            mbarrier.wait(share_ready.index(two), (nth // 2) & 1)
            sofar = sofar * shrinks.index(two).load(row_layout)[:, None]
            if rows_left < 64:
                _clear(mine.index(slot), rows_left)
            if (HALF == 1) & (block + 1 < high):  # beside the softmax of the next block
                mbarrier.wait(scored.index(two ^ 1), ((nth + 1) // 2) & 1)
            sofar = warpgroup_mma(rope.index(two), mine.index(slot), sofar, is_async=True)
            sofar = warpgroup_mma_wait(0, deps=[sofar])
            mbarrier.arrive(share_free.index(two), count=1)
            there = ahead < stop
            _fetch(wide, row, HALF * 256, mine.index(slot), ready.index(slot), 64 * 512, there)
            if HALF == 1:
                mbarrier.wait(share_free.index(two), (nth // 2) & 1)
                there = ahead - 1 < stop
                _fetch(narrow, before, 512, rope.index(two), rope_ready.index(two), 64 * 128, there)
                before = row
            ahead += 1
            row = gl.load(row_of + ahead, mask=ahead < stop, other=0)
            rows_left -= 64
            nth += 1
        mbarrier.wait(final_ready.index(segment & 3), (segment // 4) & 1)
        sofar = sofar * finals.index(segment & 3).load(row_layout)[:, None]
        kv_len, first, q_len, count, low, high = _segment(offsets, lengths, b, begin, stop, at)
        in_tile = gl.arange(0, 64, row_layout)
        real = (gl.program_id(0) * 64 + in_tile < q_len * HEADS)[:, None]
        column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
        if (low == 0) & (high == count):
            to = out + (first.to(gl.int64) * HEADS + gl.program_id(0) * 64) * 512
            to = to + (in_tile * 512)[:, None] + column[None, :]
            gl.store(to, sofar.to(out.dtype.element_ty), mask=real)
        else:
            of_row, of_column = place_of(in_tile, column)
            found = parts + slot_of(gl.program_id(1), low == 0).to(gl.int64) * (64 * 512)
            gl.store(found + of_row[:, None] + of_column[None, :], sofar, mask=real)
            goes_on = (low == 0).to(gl.int32)
            arrive(counts, gl.where(low == 0, gl.program_id(1), gl.load(record + 4)), HALF)
        segment += 1
        at = begin + high
        begin += count
        b += 1
    # First what an earlier part began, then what the next one goes on with.
    turn = gl.where(own_begin < own, 0, 1)
    turns = gl.where(own < stop, 1 + goes_on, 0)
    while turn < turns:
        joined = own_b
        one = gl.load(record + 4)
        last = gl.load(record + 5)
        if turn == 1:
            joined = b - 1
            one = gl.program_id(1)
            last = gl.load(record + 6)
        join(joined, one, last, offsets, out, lse, parts, part_lse, counts, HALF, HEADS)
        turn += 1


@gluon.jit
def _clear(values, rows):
    """Zeroes behind the first ``rows`` rows: 0 does not cancel the NaN that may lie there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for i in gl.static_range(8):
        part = values.slice(i * 32, 32, 1)
        part.store(gl.where((row < rows)[:, None], part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit(
    do_not_specialize=["sequences", "tokens", "scale"],
    do_not_specialize_on_alignment=["offsets", "lengths", "plan", "row_of", "counts"],
)
def _attend(
    query, token_stride, head_stride, wide, narrow, offsets, lengths, sequences, tokens, scale,
    out, lse, parts, part_lse, plan, row_of, counts,
    HEADS: gl.constexpr,
):  # fmt: skip
    """One part of the keys, for one tile of each sequence's (token, head) pairs."""
    record = plan + 16 * gl.program_id(1)
    at = gl.load(record)
    stop = gl.load(record + 1)
    b = gl.load(record + 2)
    begin = gl.load(record + 3)
    empty = gl.load(record + 7)
    row = gl.load(record + 8)
    dtype: gl.constexpr = wide.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    left = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], wide.layout)
    right = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], wide.layout)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], narrow.layout)
    q_last = gl.allocate_shared_memory(dtype, [64, 64], narrow.layout)
    q_rope = gl.allocate_shared_memory(dtype, [64, 64], narrow.layout)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    finals = gl.allocate_shared_memory(gl.float32, [4, 64], plain)
    left_ready = barriers(STAGES, 1)
    right_ready = barriers(STAGES, 1)
    rope_ready = barriers(2, 1)
    share_ready = barriers(2, 1)
    share_free = barriers(2, 2)
    scored = barriers(2, 1)
    final_ready = barriers(4, 1)
    fence_async_shared()
    _fetch(wide, row, 0, left.index(0), left_ready.index(0), 64 * 512, at < stop)
    _fetch(wide, row, 256, right.index(0), right_ready.index(0), 64 * 512, at < stop)
    _fetch(narrow, row, 512, rope.index(0), rope_ready.index(0), 64 * 128, at < stop)
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    query, token_stride, head_stride, offsets, lengths, sequences, tokens, scale,
                    at, stop, b, begin, empty, out, lse, part_lse, left, right, rope,
                    q_last, q_rope, shrinks, finals,
                    left_ready, right_ready, rope_ready, share_ready, scored, final_ready, HEADS,
                ),
            ),
            (
                _values,
                (
                    wide, narrow, row_of, offsets, lengths, record, at, stop, b, begin,
                    out, lse, parts, part_lse, counts,
                    left, rope, shrinks, finals, left_ready, rope_ready,
                    share_ready, share_free, scored, final_ready, 0, HEADS,
                ),
            ),
            (
                _values,
                (
                    wide, narrow, row_of, offsets, lengths, record, at, stop, b, begin,
                    out, lse, parts, part_lse, counts,
                    right, rope, shrinks, finals, right_ready, rope_ready,
                    share_ready, share_free, scored, final_ready, 1, HEADS,
                ),
            ),
        ],
        [4, 4],
        [168, 160],
    )  # fmt: skip
