"""Absorbed attention over paged latent rows for one multiprocessor of an H100 or H200 at a time.

Three groups of four warps share a block of 64 keys.  One scores it against 64 (token, head) pairs
and turns the scores into weights; it keeps most of the queries in registers, so that shared memory
holds three blocks of keys.  The other two sum up values, half of the latent each, and fetch the
half of a coming block in place of the one they are done with.  One of them begins at once, beside
the next block's scores; the other waits for these and runs beside their softmax.

A block's rope keys are not needed once it is scored: the weights take their place.  The reference
that scores are measured against moves only when one exceeds it 256 times over, so sums are seldom
rescaled by anything but 1.

The plan of who does what is that of ``triton_mla``, which launches this and merges.
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

from kvtier.kernels.gluon_parts import barriers
from kvtier.kernels.mla import PagedBatch

__all__ = ["KEYS", "TILE", "attend"]

TILE = 64
"""(token, head) pairs of a program."""
KEYS = 64
"""Keys of a block; a page holds a multiple of it."""
LN2 = gl.constexpr(0.6931471805599453)
SCAN = gl.constexpr(128)
"""Sequences looked at together when the work is cut up."""
STAGES = gl.constexpr(3)
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Renamed by triton 3.9."""
HEADROOM = gl.constexpr(8.0)
"""By how many powers of two a score may exceed the reference."""


def attend(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    least: int,
    grid: tuple[int, int],
    out: Tensor,
    lse: Tensor,
    parts: Tensor,
    part_lse: Tensor,
    plan: Tensor,
    by_part: bool,
) -> None:
    """First launch: ``grid`` is tiles and parts; ``scale`` holds log2(e); ``least`` blocks a part.

    Needs rows that lie 16 bytes aligned, pages of a multiple of 64 rows, a positive scale.
    """
    kind = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    wide, narrow = (
        TensorDescriptor(
            rows,
            list(rows.shape),
            list(rows.stride()),
            [KEYS, width],
            gl.NVMMASharedLayout.get_default_for([KEYS, width], kind),
        )
        for width in (256, 64)
    )
    _attend[grid](
        query,
        *query.stride()[:2],
        wide,
        narrow,
        batch.block_table,
        batch.block_table.stride(0),
        batch.page_tokens // KEYS,
        batch.cu_seqlens_q,
        batch.kv_lens_device,
        batch.kv_lens_device.shape[0],
        least,
        scale,
        out,
        lse,
        parts,
        part_lse,
        plan,
        HEADS=query.shape[1],
        BY_PART=by_part,
        num_warps=4,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cut(lengths, sequences, least):
    """This part's first block and the one behind its last, blocks of a part, the sequence that it
    starts in and the block that this begins with."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, SCAN, layout)
    total = 0
    base = 0
    while base < sequences:
        there = base + lane < sequences
        total += gl.sum(gl.cdiv(gl.load(lengths + base + lane, mask=there, other=0), 64), 0)
        base += SCAN
    quota = gl.maximum(gl.cdiv(total, gl.num_programs(1)), least)
    at = gl.program_id(1) * quota
    stop = gl.minimum(at + quota, total)
    b = 0
    begin = 0
    before = 0
    base = 0
    while base < sequences:
        there = base + lane < sequences
        count = gl.cdiv(gl.load(lengths + base + lane, mask=there, other=0), 64)
        ends = before + gl.associative_scan(count, 0, _add)
        past = there & (ends <= at)
        b += gl.sum(past.to(gl.int32), 0)
        begin = gl.maximum(begin, gl.max(gl.where(past, ends, 0), 0))
        before += gl.sum(count, 0)
        base += SCAN
    b = gl.minimum(b, sequences - 1)
    return at, stop, quota, b, begin


@gluon.jit
def _segment(offsets, lengths, b, begin, stop, at):
    """Of a sequence: KV length, first token, tokens, blocks, and which blocks lie in this part."""
    kv_len = gl.load(lengths + b)
    first = gl.load(offsets + b)
    q_len = gl.load(offsets + b + 1) - first
    count = gl.cdiv(kv_len, 64)
    return kv_len, first, q_len, count, at - begin, gl.minimum(count, stop - begin)


@gluon.jit
def _slot():
    """Where a part keeps what it found of a sequence that starts in an earlier one."""
    return gl.program_id(1) * 2 * gl.num_programs(0) + gl.program_id(0)


@gluon.jit
def _scores(
    query, token_stride, head_stride, offsets, lengths, scale, at, stop, quota, b, begin, lse,
    part_lse, plan, left, right, rope, q_last, q_rope, shrinks, finals,
    left_ready, right_ready, rope_ready, share_ready, scored, final_ready,
    HEADS: gl.constexpr, BY_PART: gl.constexpr,
):  # fmt: skip
    """Weights of every block, log-sum-exp of every segment, and what is to be merged."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    nth = 0
    segment = 0
    if BY_PART & (gl.program_id(0) == 0):
        gl.store(plan + 4 * gl.program_id(1), -1)
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
        mbarrier.arrive(final_ready.index(segment & 3), count=1)
        found = gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))
        kv_len, first, q_len, count, low, high = _segment(offsets, lengths, b, begin, stop, at)
        row = gl.arange(0, 64, row_layout)
        pair = gl.program_id(0) * 64 + row
        if (low == 0) & (high == count):
            gl.store(lse + first * HEADS + pair, found, mask=pair < q_len * HEADS)
        else:
            slot = _slot() + (low == 0).to(gl.int32) * gl.num_programs(0)
            gl.store(part_lse + slot * 64 + row, found, mask=pair < q_len * HEADS)
        if (gl.program_id(0) == 0) & (low == 0):
            goes_on = high < count
            if goes_on | (not BY_PART):
                to = plan + 4 * (gl.program_id(1) if BY_PART else b)
                gl.store(to, gl.where(goes_on, gl.program_id(1), -1))
                gl.store(to + 1, (begin + count - 1) // quota)
                gl.store(to + 2, first)
                gl.store(to + 3, q_len)
        segment += 1
        at = begin + high
        begin += count
        b += 1


@gluon.jit
def _row_of(table, table_stride, pages_of, lengths, b, begin, end, at, stop):
    """Row of the pool at which block ``at`` of all blocks begins; moves on to its sequence."""
    row = 0
    if at < stop:
        while at >= end:
            b += 1
            begin = end
            end = begin + gl.cdiv(gl.load(lengths + b), 64)
        block = at - begin
        page = gl.load(table + b.to(gl.int64) * table_stride + block // pages_of)
        row = (page * pages_of + block % pages_of) * 64
    return row, b, begin, end


@gluon.jit
def _fetch(keys, row, column, into, ready, BYTES: gl.constexpr, pred):
    mbarrier.expect(ready, BYTES, pred)
    copy_tile(keys, [row, column], ready, into, pred)


@gluon.jit
def _values(
    wide, narrow, table, table_stride, pages_of, offsets, lengths, at, stop, b, begin, out, parts,
    mine, rope, shrinks, finals, ready, rope_ready, share_ready, share_free, scored, final_ready,
    HALF: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Weighted sums of one half of the values; fetches that half, and the first also rope keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    nth = 0
    segment = 0
    # What is fetched runs ahead, into the next sequences too, as blocks are numbered over all.
    ahead = at
    next_b = b
    next_begin = begin
    next_end = begin + gl.cdiv(gl.load(lengths + b), 64)
    before = 0
    row = 0
    for i in gl.static_range(STAGES + 1):
        before = row
        row, next_b, next_begin, next_end = _row_of(
            table, table_stride, pages_of, lengths, next_b, next_begin, next_end, ahead, stop
        )
        if i < STAGES:
            there = ahead < stop
            _fetch(wide, row, HALF * 256, mine.index(i), ready.index(i), 64 * 512, there)
            if (HALF == 0) & (i < 2):
                _fetch(narrow, row, 512, rope.index(i), rope_ready.index(i), 64 * 128, there)
            ahead += 1
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
            if HALF == 0:
                mbarrier.wait(share_free.index(two), (nth // 2) & 1)
                there = ahead - 1 < stop
                _fetch(narrow, before, 512, rope.index(two), rope_ready.index(two), 8192, there)
                before = row
            ahead += 1
            row, next_b, next_begin, next_end = _row_of(
                table, table_stride, pages_of, lengths, next_b, next_begin, next_end, ahead, stop
            )
            rows_left -= 64
            nth += 1
        mbarrier.wait(final_ready.index(segment & 3), (segment // 4) & 1)
        sofar = sofar * finals.index(segment & 3).load(row_layout)[:, None]
        kv_len, first, q_len, count, low, high = _segment(offsets, lengths, b, begin, stop, at)
        in_tile = gl.arange(0, 64, row_layout)
        real = (gl.program_id(0) * 64 + in_tile < q_len * HEADS)[:, None]
        column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
        offset = (in_tile * 512)[:, None] + column[None, :]
        if (low == 0) & (high == count):
            to = out + (first.to(gl.int64) * HEADS + gl.program_id(0) * 64) * 512
            gl.store(to + offset, sofar.to(out.dtype.element_ty), mask=real)
        else:
            slot = _slot() + (low == 0).to(gl.int32) * gl.num_programs(0)
            gl.store(parts + slot.to(gl.int64) * (64 * 512) + offset, sofar, mask=real)
        segment += 1
        at = begin + high
        begin += count
        b += 1


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
    do_not_specialize=["table_stride", "pages_of", "sequences", "least", "scale"],
    do_not_specialize_on_alignment=["table", "offsets", "lengths"],
)
def _attend(
    query, token_stride, head_stride, wide, narrow, table, table_stride, pages_of,
    offsets, lengths, sequences, least, scale, out, lse, parts, part_lse, plan,
    HEADS: gl.constexpr, BY_PART: gl.constexpr,
):  # fmt: skip
    """One part of the keys, for one tile of each sequence's (token, head) pairs."""
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
    at, stop, quota, b, begin = _cut(lengths, sequences, least)
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    query, token_stride, head_stride, offsets, lengths, scale, at, stop, quota, b,
                    begin, lse, part_lse, plan, left, right, rope, q_last, q_rope, shrinks, finals,
                    left_ready, right_ready, rope_ready, share_ready, scored, final_ready, HEADS,
                    BY_PART,
                ),
            ),
            (
                _values,
                (
                    wide, narrow, table, table_stride, pages_of, offsets, lengths, at, stop, b,
                    begin, out, parts, left, rope, shrinks, finals, left_ready, rope_ready,
                    share_ready, share_free, scored, final_ready, 0, HEADS,
                ),
            ),
            (
                _values,
                (
                    wide, narrow, table, table_stride, pages_of, offsets, lengths, at, stop, b,
                    begin, out, parts, right, rope, shrinks, finals, right_ready, rope_ready,
                    share_ready, share_free, scored, final_ready, 1, HEADS,
                ),
            ),
        ],
        [4, 4],
        [168, 160],
    )  # fmt: skip
