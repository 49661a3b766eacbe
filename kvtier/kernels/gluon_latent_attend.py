"""Attention to tiles of latent rows by one multiprocessor of an H100 or H200: what runs there.

Three groups of four warps share 64 rows of queries and, one after the other, tiles of 64 keys:
those that a query lists, or those of a sequence's pages.  One fills two buffers with keys.  One
scores them and turns the scores into weights; values of one tile and scores of the next are queued
together.  It sums up one half of the values, the third group the other half, beside the softmax.
A tile's rope keys are not needed once it is scored: the weights take their place.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvtier.kernels.gluon_latent_keys import LINES, produce
from kvtier.kernels.gluon_parts import LN2, barriers, exp2, extent, shared_as

__all__ = ["attend_lists", "attend_pages"]

SCAN = gl.constexpr(128)
"""Sequences looked at together when the work is cut up."""
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _soften(
    score, scale, block, sees_all, offsets, lengths, b, low_pair, bias, top, weight, share, shrinks,
    HEADS: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Weights of a tile from its scores; the largest score so far, sums of weights, and what older
    sums shrink by."""
    rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    columns: gl.constexpr = gl.SliceLayout(0, SCORES)
    score = score * scale
    if PAGED:
        if block * 64 + 63 > sees_all:
            # Loaded again, as registers are what this group is short of.
            first = gl.load(offsets + b)
            q_len = gl.load(offsets + b + 1) - first
            token = (low_pair + gl.arange(0, 64, rows)) // HEADS
            last = gl.where(token < q_len, gl.load(lengths + b) - q_len + token, -1)
            key = block * 64 + gl.arange(0, 64, columns)
            score = gl.where(key[None, :] <= last[:, None], score, -float("inf"))
    else:
        # Not by a sum: queries without keys may hold NaN.
        score = gl.where((bias.load(columns) == 0)[None, :], score, -float("inf"))
    new_top = gl.maximum(top, gl.max(score, 1))
    # A row that has seen nothing yet subtracts 0, not -inf.
    base = gl.where(new_top == -float("inf"), 0.0, new_top)
    shrink = exp2(top - base)
    p = exp2(score - base[:, None])
    shrinks.store(shrink)
    share.store(p.to(gl.bfloat16))
    fence_async_shared()
    return new_top, weight * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _queries(query, token_stride, head_stride, first, low_pair, pairs, queries, q_rope,
             HEADS: gl.constexpr):  # fmt: skip
    """Rows of queries, to shared memory."""
    pair = gl.arange(0, 64, gl.SliceLayout(1, LINES))
    mask = (pair < pairs)[:, None]
    pair += low_pair
    row = query + (first + pair // HEADS).to(gl.int64) * token_stride
    row = (row + (pair % HEADS).to(gl.int64) * head_stride)[:, None]
    column = gl.arange(0, 256, gl.SliceLayout(0, LINES))[None, :]
    async_copy.async_copy_global_to_shared(queries, row + column, mask)
    column = (256 + gl.arange(0, 32, gl.SliceLayout(0, LINES)))[None, :]
    async_copy.async_copy_global_to_shared(q_rope, row + column, mask)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def _score_left(queries, q_rope, left, rope, none):
    """Scores of a tile by what comes first of it, under way."""
    q = shared_as(q_rope, gl.bfloat16, [64, 64], HALVES)
    score = warpgroup_mma(q, _transposed(rope, 64), none, use_acc=False, is_async=True)
    q = shared_as(queries, gl.bfloat16, [64, 512], HALVES).slice(0, 256, 1)
    return warpgroup_mma(q, _transposed(left, 256), score, is_async=True)


@gluon.jit
def _score_right(queries, right, score):
    """The rest of them."""
    q = shared_as(queries, gl.bfloat16, [64, 512], HALVES).slice(256, 256, 1)
    return warpgroup_mma(q, _transposed(right, 256), score, is_async=True)


@gluon.jit
def _transposed(keys, WIDTH: gl.constexpr):
    return shared_as(keys, gl.bfloat16, [64, WIDTH], HALVES).permute((1, 0))


@gluon.jit
def _segment(offsets, lengths, b, begin, stop, at, PAGED: gl.constexpr):
    """Of a sequence: KV length, first token, tokens, tiles, and which tiles lie in this part."""
    if PAGED:
        kv_len = gl.load(lengths + b)
        first = gl.load(offsets + b)
        q_len = gl.load(offsets + b + 1) - first
        count = gl.cdiv(kv_len, 64)
        return kv_len, first, q_len, count, at - begin, gl.minimum(count, stop - begin)
    else:
        return 0, b, 1, stop, at, stop


@gluon.jit
def _after(lengths, begin, count, high, stop, b):
    """Where the next segment starts: its tile, the first one of its sequence, and that."""
    at = begin + high
    b += 1
    if at < stop:
        while gl.load(lengths + b) <= 0:
            b += 1
    return at, begin + count, b


@gluon.jit
def _row_of(first, low, high, count, part, low_pair, HEADS: gl.constexpr, PAGED: gl.constexpr):
    """The first row of what is written, and whether it is the whole of it."""
    if PAGED:
        whole = (low == 0) & (high == count)
        slot = (part * 2 + (low == 0).to(gl.int32)) * gl.num_programs(0) + gl.program_id(0)
        return gl.where(whole, first.to(gl.int64) * HEADS + low_pair, slot.to(gl.int64) * 64), whole
    else:
        tokens = gl.num_programs(0) // ((HEADS + 63) // 64)
        return (part.to(gl.int64) * tokens + first) * HEADS + low_pair, True


@gluon.jit
def _scores(
    query, token_stride, head_stride, offsets, lengths, scale, at, stop, quota, b, begin, part,
    low_pair, out, lse, parts, part_lse, plan, left, right, rope, queries, q_rope, bias, shrinks,
    finals, left_ready, right_ready, free, share_ready, final_ready,
    HEADS: gl.constexpr, BY_PART: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Weights of every tile, weighted sums of the first half of the values, log-sum-exps, and what
    is to be merged."""
    rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    out_rows: gl.constexpr = gl.SliceLayout(1, VALUES)
    none = gl.full([64, 64], 0.0, gl.float32, SCORES)
    nth = 0
    segment = 0
    if BY_PART & (gl.program_id(0) == 0):
        gl.store(plan + 4 * part, -1)
    while at < stop:
        kv_len, first, q_len, count, low, high = _segment(
            offsets, lengths, b, begin, stop, at, PAGED
        )
        pairs = q_len * HEADS - low_pair
        _queries(
            query, token_stride, head_stride, first, low_pair, pairs, queries, q_rope, HEADS
        )  # fmt: skip
        sees_all = kv_len - q_len
        top = gl.full([64], -float("inf"), gl.float32, rows)
        weight = gl.full([64], 0.0, gl.float32, rows)
        sofar = gl.full([64, 256], 0.0, gl.float32, VALUES)
        two = nth & 1
        mbarrier.wait(left_ready.index(two), (nth // 2) & 1)
        score = _score_left(queries, q_rope, left.index(two), rope.index(two), none)
        mbarrier.wait(right_ready.index(two), (nth // 2) & 1)
        score = _score_right(queries, right.index(two), score)
        score = warpgroup_mma_wait(0, deps=[score])
        top, weight, shrink = _soften(
            score, scale, low, sees_all, offsets, lengths, b, low_pair, bias.index(two), top,
            weight, shared_as(rope.index(two), gl.bfloat16, [64, 64], HALVES), shrinks.index(two),
            HEADS, PAGED,
        )  # fmt: skip
        mbarrier.arrive(share_ready.index(two), count=1)
        for block in range(low + 1, high):
            share = shared_as(rope.index(two), gl.bfloat16, [64, 64], HALVES)
            mine = shared_as(left.index(two), gl.bfloat16, [64, 256], HALVES)
            sofar = warpgroup_mma(share, mine, sofar, is_async=True)
            nth += 1
            two = nth & 1
            mbarrier.wait(left_ready.index(two), (nth // 2) & 1)
            score = _score_left(queries, q_rope, left.index(two), rope.index(two), none)
            sofar = warpgroup_mma_wait(2, deps=[sofar])
            mbarrier.arrive(free.index(two ^ 1), count=1)
            mbarrier.wait(right_ready.index(two), (nth // 2) & 1)
            score = _score_right(queries, right.index(two), score)
            score = warpgroup_mma_wait(0, deps=[score])
            top, weight, shrink = _soften(
                score, scale, block, sees_all, offsets, lengths, b, low_pair, bias.index(two), top,
                weight, shared_as(rope.index(two), gl.bfloat16, [64, 64], HALVES),
                shrinks.index(two), HEADS, PAGED,
            )  # fmt: skip
            mbarrier.arrive(share_ready.index(two), count=1)
            sofar = sofar * gl.convert_layout(shrink, out_rows, assert_trivial=True)[:, None]
        share = shared_as(rope.index(two), gl.bfloat16, [64, 64], HALVES)
        mine = shared_as(left.index(two), gl.bfloat16, [64, 256], HALVES)
        sofar = warpgroup_mma(share, mine, sofar, is_async=True)
        safe = gl.where(weight > 0, weight, 1.0)
        finals.index(segment & 3).store(1 / safe)
        mbarrier.arrive(final_ready.index(segment & 3), count=1)
        found = gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))
        sofar = warpgroup_mma_wait(0, deps=[sofar])
        mbarrier.arrive(free.index(two), count=1)
        nth += 1
        kv_len, first, q_len, count, low, high = _segment(
            offsets, lengths, b, begin, stop, at, PAGED
        )
        to, whole = _row_of(first, low, high, count, part, low_pair, HEADS, PAGED)
        pairs = q_len * HEADS - low_pair
        row = gl.arange(0, 64, rows)
        sofar = sofar * gl.convert_layout(1 / safe, out_rows, assert_trivial=True)[:, None]
        if whole:
            gl.store(lse + to + row, found, mask=row < pairs)
            _write(sofar, queries, out + to * 512, pairs)
        else:
            gl.store(part_lse + to + row, found, mask=row < pairs)
            _write(sofar, queries, parts + to * 512, pairs)
        if PAGED:
            if (gl.program_id(0) == 0) & (low == 0):
                goes_on = high < count
                if goes_on | (not BY_PART):
                    to_plan = plan + 4 * (part if BY_PART else b)
                    gl.store(to_plan, gl.where(goes_on, part, -1))
                    gl.store(to_plan + 1, (begin + count - 1) // quota)
                    gl.store(to_plan + 2, first)
                    gl.store(to_plan + 3, q_len)
            at, begin, b = _after(lengths, begin, count, high, stop, b)
        else:
            at = stop
        segment += 1


@gluon.jit
def _values(
    offsets, lengths, at, stop, b, begin, part, low_pair, out, parts, right, rope, shrinks, finals,
    right_ready, free, share_ready, final_ready, HEADS: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Weighted sums of the second half of the values."""
    rows: gl.constexpr = gl.SliceLayout(1, VALUES)
    nth = 0
    segment = 0
    while at < stop:
        _, first, q_len, count, low, high = _segment(offsets, lengths, b, begin, stop, at, PAGED)
        sofar = gl.full([64, 256], 0.0, gl.float32, VALUES)
        for _ in range(low, high):
            two = nth & 1
            mbarrier.wait(right_ready.index(two), (nth // 2) & 1)
            mbarrier.wait(share_ready.index(two), (nth // 2) & 1)
            sofar = sofar * shrinks.index(two).load(rows)[:, None]
            share = shared_as(rope.index(two), gl.bfloat16, [64, 64], HALVES)
            mine = shared_as(right.index(two), gl.bfloat16, [64, 256], HALVES)
            sofar = warpgroup_mma(share, mine, sofar, is_async=True)
            sofar = warpgroup_mma_wait(0, deps=[sofar])
            mbarrier.arrive(free.index(two), count=1)
            nth += 1
        mbarrier.wait(final_ready.index(segment & 3), (segment // 4) & 1)
        sofar = sofar * finals.index(segment & 3).load(rows)[:, None]
        to, whole = _row_of(first, low, high, count, part, low_pair, HEADS, PAGED)
        pairs = q_len * HEADS - low_pair
        if PAGED:
            row = gl.arange(0, 64, rows)
            column = 256 + gl.arange(0, 256, gl.SliceLayout(0, VALUES))
            offset = to * 512 + ((row * 512)[:, None] + column[None, :])
            if whole:
                gl.store(out + offset, sofar.to(out.dtype.element_ty), mask=(row < pairs)[:, None])
            else:
                gl.store(parts + offset, sofar, mask=(row < pairs)[:, None])
            at, begin, b = _after(lengths, begin, count, high, stop, b)
        else:  # nobody needs these keys any more
            _write(sofar, right, out + (to * 512 + 256), pairs)
            at = stop
        segment += 1


@gluon.jit
def _write(sums, memory, to, count):
    """Half of ``count`` rows, by way of shared memory: in pieces of lines."""
    narrow: gl.constexpr = to.dtype.element_ty.primitive_bitwidth == 16
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if narrow else 4, [1, 0])
    lines: gl.constexpr = gl.BlockedLayout([1, 8 if narrow else 4], [1, 32], [4, 1], [1, 0])
    memory = shared_as(memory, to.dtype.element_ty, [64, 256], held)
    memory.store(sums.to(to.dtype.element_ty))
    row = gl.arange(0, 64, gl.SliceLayout(1, lines))
    column = gl.arange(0, 256, gl.SliceLayout(0, lines))
    at = to + (row * 512)[:, None] + column[None, :]
    gl.store(at, memory.load(lines), mask=(row < count)[:, None])


@gluon.jit
def _attend(
    query, token_stride, head_stride, rows, page_stride, per_page, there, where, where_stride,
    offsets, lengths, list_len, scale, at, stop, quota, b, begin, part, low_pair, out, lse, parts,
    part_lse, plan,
    HEADS: gl.constexpr, BY_PART: gl.constexpr, PACKED: gl.constexpr, PAGED: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """64 rows of queries against tiles ``at`` to ``stop``, by three groups of warps."""
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    rows_of_four: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    left = gl.allocate_shared_memory(gl.int32, [2, 64, 128], words)
    right = gl.allocate_shared_memory(gl.int32, [2, 64, 128], words)
    rope = gl.allocate_shared_memory(gl.int32, [2, 64, 32], words)
    queries = gl.allocate_shared_memory(gl.int32, [64, 256], words)
    q_rope = gl.allocate_shared_memory(gl.int32, [64, 32], words)
    scales = gl.allocate_shared_memory(gl.float32, [2, 64, 4], rows_of_four)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    finals = gl.allocate_shared_memory(gl.float32, [4, 64], plain)
    left_ready = barriers(2, 1)
    right_ready = barriers(2, 1)
    free = barriers(2, 2)
    share_ready = barriers(2, 1)
    final_ready = barriers(4, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    query, token_stride, head_stride, offsets, lengths, scale, at, stop, quota, b,
                    begin, part, low_pair, out, lse, parts, part_lse, plan, left, right, rope,
                    queries, q_rope, bias, shrinks, finals, left_ready, right_ready, free,
                    share_ready, final_ready, HEADS, BY_PART, PAGED,
                ),
            ),
            (
                _values,
                (
                    offsets, lengths, at, stop, b, begin, part, low_pair, out, parts, right, rope,
                    shrinks, finals, right_ready, free, share_ready, final_ready, HEADS, PAGED,
                ),
            ),
            (
                produce,
                (
                    rows, page_stride, per_page, there, where, where_stride, lengths, list_len, at,
                    stop, b, begin, left, right, rope, scales, bias, left_ready, right_ready, free,
                    PACKED, PAGED, WHOLE,
                ),
            ),
        ],
        [4, 4],
        [160, 136],
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["per_page", "there", "slots_stride", "count", "scale"],
    do_not_specialize_on_alignment=["slots"],
)
def attend_lists(
    query, token_stride, head_stride, rows, page_stride, per_page, there, slots, slots_stride,
    count, scale, out, lse, HEADS: gl.constexpr, PACKED: gl.constexpr, TRIM: gl.constexpr,
):  # fmt: skip
    """Up to 64 heads of one query against a part of its list."""
    # Programs that share a list are next to each other, so that they share what they read of it.
    blocks: gl.constexpr = (HEADS + 63) // 64
    token = gl.program_id(0) // blocks
    part = gl.program_id(1)
    slots += token.to(gl.int64) * slots_stride
    total = gl.cdiv(count, 64)
    if TRIM:
        total = gl.cdiv(extent(slots, count, there, 2048), 64)
    quota = gl.cdiv(total, gl.num_programs(1))
    at = part * quota
    # What there is nothing for has one tile of nothing, so that its results are written.
    stop = gl.maximum(gl.minimum(at + quota, total), at + 1)
    _attend(
        query, token_stride, head_stride, rows, page_stride, per_page, there, slots, slots_stride,
        slots, slots, count, scale, at, stop, quota, token, 0, part,
        gl.program_id(0) % blocks * 64,
        out, lse, out, lse, slots, HEADS, False, PACKED, False, False,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cut(lengths, sequences):
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
    quota = gl.maximum(gl.cdiv(total, gl.num_programs(1)), 1)
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
    return at, stop, quota, gl.minimum(b, sequences - 1), begin


@gluon.jit(
    do_not_specialize=["per_page", "there", "table_stride", "sequences", "scale"],
    do_not_specialize_on_alignment=["table", "offsets", "lengths"],
)
def attend_pages(
    query, token_stride, head_stride, rows, page_stride, per_page, there, table, table_stride,
    offsets, lengths, sequences, scale, out, lse, parts, part_lse, plan,
    HEADS: gl.constexpr, BY_PART: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """One part of the keys, for one tile of each sequence's (token, head) pairs."""
    at, stop, quota, b, begin = _cut(lengths, sequences)
    _attend(
        query, token_stride, head_stride, rows, page_stride, per_page, there, table, table_stride,
        offsets, lengths, 0, scale, at, stop, quota, b, begin, gl.program_id(1),
        gl.program_id(0) * 64, out, lse, parts, part_lse, plan, HEADS, BY_PART, True, True, WHOLE,
    )  # fmt: skip
