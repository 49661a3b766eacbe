"""Attention to tiles of V4 records by one multiprocessor of an H100 or H200: what runs there.

Four groups of four warps share 64 heads of one query and, one after the other, tiles of 64 of its
keys.  Two fetch and unpack, each one half of the values, see ``gluon_sparse_keys``.  One makes
scores and weights, and sums the left half of the values; one sums the right half by weights that it
is passed.  They wait for each other at barriers in shared memory alone, so that fetching,
unpacking, products and softmax overlap.

Groups may have more than a fourth of the registers, but no product of 512 threads may need more
than that: values are summed 128 columns at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvtier.kernels.gluon_parts import LN2, LOG2E, barriers, exp2, shared_as
from kvtier.kernels.gluon_sparse_keys import bring, lay_out, tiles

__all__ = ["attend"]

PACKED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Keys, as pairs of values and as values, where the tensor cores read them."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""Results of the tensor cores: (heads, keys) and (heads, some of the values)."""
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))
REGISTERS = gl.constexpr([160, 72, 72])
"""Registers a thread of the groups beside the first, which has the rest of four times 128."""

AHEAD = gl.constexpr(2)
"""Tiles that the L2 cache is asked for at first; then one whenever one is summed up."""


@gluon.jit
def _half(keys, two, HALF: gl.constexpr):
    """(64, 256) values that lie in buffer ``two``."""
    return shared_as(keys.index(2 * HALF + two), gl.bfloat16, [64, 256], WIDE)


@gluon.jit
def _soften(score, scale, bias, top):
    """The largest score so far, a tile's weights, and what older sums shrink by."""
    score = score * scale + bias.load(gl.SliceLayout(0, SCORES))[None, :]
    new_top = gl.maximum(top, gl.max(score, 1))
    # A row that has seen nothing yet subtracts 0, not -inf.
    base = gl.where(new_top == -float("inf"), 0.0, new_top)
    return new_top, exp2(score - base[:, None]), exp2(top - base)


@gluon.jit
def _sum_up(sofar, weight, p, shrink, values, share, shrinks, passed, taken, phase):
    """Begins a tile's sums by its weights, from registers, and passes these on meanwhile; adds them
    to those before, in eight columns, as a thread has them."""
    sofar = sofar * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS), assert_trivial=True)[:, None]
    p16 = p.to(gl.bfloat16)
    held = gl.convert_layout(p16, WEIGHTS, assert_trivial=True)
    sofar = warpgroup_mma(held, values, sofar, is_async=True)
    mbarrier.wait(taken, phase)
    share.store(p16)
    shrinks.store(shrink)
    fence_async_shared()
    mbarrier.arrive(passed, count=1)
    rows: gl.constexpr = gl.SliceLayout(1, weight.type.layout)
    shrink = gl.convert_layout(shrink, rows, assert_trivial=True)
    return sofar, weight * shrink[:, None] + _narrowed(p)


@gluon.jit
def _narrowed(p):
    return gl.sum(p.reshape([64, 8, 8]), 1)


@gluon.jit
def _hold(query, token_stride, head_stride, heads, queries, HALF: gl.constexpr):
    """Half of the queries, in shared memory."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    token = gl.program_id(1).to(gl.int64)
    head = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    row = (query + token * token_stride + head.to(gl.int64) * head_stride)[:, None]
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, lines))[None, :]
    queries.index(HALF).store(gl.load(row + column, mask=(head < heads)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _write(
    sofar, share, keys, out, parts, rows_a_part, heads, mine,
    WHOLE: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Half of the sums times ``share``, by way of the keys' memory: in pieces of lines.  A part
    that had no tiles is not written."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8 if WHOLE else 4], [1, 32], [4, 1], [1, 0])
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if WHOLE else 4, [1, 0])
    head = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    first = gl.program_id(1).to(gl.int64) * heads
    if WHOLE:
        to = out + first * 512
        memory = shared_as(keys, gl.bfloat16, [4, 64, 256], held).index(2 * HALF)
        real = head < heads
    else:
        to = parts + (gl.program_id(2).to(gl.int64) * rows_a_part + first) * 512
        memory = shared_as(keys, gl.float32, [2, 64, 256], held).index(HALF)
        real = (head < heads) & (mine > 0)
    share = gl.convert_layout(share, gl.SliceLayout(1, SUMS), assert_trivial=True)
    memory.store((sofar * share[:, None]).to(to.dtype.element_ty))
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, lines))
    at = to + (head * 512)[:, None] + column[None, :]
    gl.store(at, memory.load(lines), mask=real[:, None])


@gluon.jit
def _score(queries, keys, two, phase, full):
    """Begins a tile's scores, each half as soon as it lies there."""
    none = gl.full([64, 64], 0.0, gl.float32, SCORES)
    mbarrier.wait(full.index(two), phase)
    left = _half(keys, two, 0).permute((1, 0))
    score = warpgroup_mma(queries.index(0), left, none, use_acc=False, is_async=True)
    mbarrier.wait(full.index(2 + two), phase)
    right = _half(keys, two, 1).permute((1, 0))
    return warpgroup_mma(queries.index(1), right, score, is_async=True)


@gluon.jit
def _lead(
    query, token_stride, head_stride, num_window, extra_there, extra_slots, num_extra,
    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
    keys, queries, bias, share, shrinks, full, free, passed, taken, ends,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """The first group: scores and weights of each tile, and sums of the left half of its
    values.  These and the next tile's scores are queued together."""
    rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    _hold(query, token_stride, head_stride, heads, queries, 0)
    _, mine = tiles(num_window, extra_slots, num_extra, extra_there)
    sofar = gl.full([64, 256], 0.0, gl.float32, SUMS)
    top = gl.full([64], -float("inf"), gl.float32, rows)
    weight = _narrowed(gl.full([64, 64], 0.0, gl.float32, SCORES))
    mbarrier.wait(ends.index(0), 0)
    score = _score(queries, keys, 0, 0, full)
    score = warpgroup_mma_wait(0, deps=[score])
    for nth in range(1, mine):
        old = (nth & 1) ^ 1
        top, p, shrink = _soften(score, scale, bias.index(old), top)
        sofar, weight = _sum_up(
            sofar, weight, p, shrink, _half(keys, old, 0),
            share.index(old), shrinks.index(old),
            passed.index(old), taken.index(old), (((nth - 1) >> 1) & 1) ^ 1,
        )  # fmt: skip
        score = _score(queries, keys, nth & 1, (nth >> 1) & 1, full)
        sofar = warpgroup_mma_wait(2, deps=[sofar])
        mbarrier.arrive(free.index(old), count=1)
        score = warpgroup_mma_wait(0, deps=[score])
    last = gl.maximum(mine, 1) - 1
    old = last & 1
    top, p, shrink = _soften(score, scale, bias.index(old), top)
    sofar, weight = _sum_up(
        sofar, weight, p, shrink, _half(keys, old, 0),
        share.index(old), shrinks.index(old),
        passed.index(old), taken.index(old), ((last >> 1) & 1) ^ 1,
    )  # fmt: skip
    weight = gl.convert_layout(gl.sum(weight, 1), rows)

    head = gl.program_id(0) * 64 + gl.arange(0, 64, rows)
    real = head < heads
    first = gl.program_id(1).to(gl.int64) * heads
    safe = gl.where(weight > 0, weight, 1.0)
    found = gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))
    if WHOLE:
        held = gl.load(sink + head, mask=real, other=0.0).to(gl.float32)
        mean = 1 / (safe * (1 + gl.exp2((held - found) * LOG2E)))
        mean = gl.where(weight > 0, mean, 0.0)
        gl.store(lse + first + head, found, mask=real)
    else:
        mean = 1 / safe
        first += gl.program_id(2).to(gl.int64) * rows_a_part
        gl.store(part_lse + first + head, found, mask=real)
    mbarrier.wait(taken.index(old ^ 1), (((last + 1) >> 1) & 1) ^ 1)
    shrinks.index(old ^ 1).store(mean)
    mbarrier.arrive(ends.index(1), count=1)
    sofar = warpgroup_mma_wait(0, deps=[sofar])
    _write(sofar, mean, keys, out, parts, rows_a_part, heads, mine, WHOLE, 0)


@gluon.jit
def _follow(
    query, token_stride, head_stride, num_window, extra_there, extra_slots, num_extra,
    out, parts, rows_a_part, heads,
    keys, queries, share, shrinks, free, passed, taken, ends, lists, pools, WHOLE: gl.constexpr,
):  # fmt: skip
    """The second group: sums of the right half of the values, by the weights that it is passed; has
    tiles that are to come brought near beside it."""
    _hold(query, token_stride, head_stride, heads, queries, 1)
    mbarrier.arrive(ends.index(0), count=1)
    total, mine = tiles(num_window, extra_slots, num_extra, extra_there)
    sofar = gl.full([64, 256], 0.0, gl.float32, SUMS)
    count = gl.maximum(mine, 1)
    in_window = gl.cdiv(num_window, 64)
    step = gl.num_programs(2)
    far = gl.program_id(2) + step
    for _ in gl.static_range(AHEAD):
        bring(far, in_window, total, *lists, *pools)
        far += step
    for nth in range(count):
        two = nth & 1
        mbarrier.wait(passed.index(two), (nth >> 1) & 1)
        sofar = sofar * shrinks.index(two).load(gl.SliceLayout(1, SUMS))[:, None]
        sofar = warpgroup_mma(share.index(two), _half(keys, two, 1), sofar, is_async=True)
        bring(far, in_window, total, *lists, *pools)
        far += step
        sofar = warpgroup_mma_wait(0, deps=[sofar])
        mbarrier.arrive(free.index(2 + two), count=1)
        mbarrier.arrive(taken.index(two), count=1)
    mbarrier.wait(ends.index(1), 0)
    mean = shrinks.index(count & 1).load(gl.SliceLayout(1, SUMS))
    _write(sofar, mean, keys, out, parts, rows_a_part, heads, mine, WHOLE, 1)


@gluon.jit(
    do_not_specialize=[
        "window_shift",
        "window_there",
        "window_slots_stride",
        "num_window",
        "extra_shift",
        "extra_there",
        "extra_slots_stride",
        "num_extra",
        "scale",
        "rows_a_part",
    ],
    do_not_specialize_on_alignment=["window_slots", "extra_slots", "sink"],
)
def attend(
    query, token_stride, head_stride,
    window, window_stride, window_shift, window_there,
    window_slots, window_slots_stride, num_window,
    extra, extra_stride, extra_shift, extra_there,
    extra_slots, extra_slots_stride, num_extra,
    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Up to 64 heads of one query against every so manieth tile of its keys."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Two buffers for the left halves of keys, two for the right.
    keys = gl.allocate_shared_memory(gl.int32, [4, 64, 128], PACKED)
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], WIDE)
    share = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], WIDE)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], line)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], line)
    # Of each buffer of keys: that it may be read, and written; of each of weights likewise.
    full = barriers(4, 1)
    free = barriers(4, 1)
    passed = barriers(2, 1)
    taken = barriers(2, 1)
    # That the right half of the queries lies there, and that the sums' share in the mean does.
    ends = barriers(2, 1)
    fence_async_shared()
    token = gl.program_id(1).to(gl.int64)
    window_slots += token * window_slots_stride
    extra_slots += token * extra_slots_stride
    lists = (window_slots, num_window, extra_slots, num_extra)
    pools = (
        window, window_stride, window_shift, window_there,
        extra, extra_stride, extra_shift, extra_there,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _lead,
                (
                    query, token_stride, head_stride,
                    num_window, extra_there, extra_slots, num_extra,
                    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
                    keys, queries, bias, share, shrinks,
                    full, free, passed, taken, ends, WHOLE,
                ),
            ),
            (
                _follow,
                (
                    query, token_stride, head_stride,
                    num_window, extra_there, extra_slots, num_extra,
                    out, parts, rows_a_part, heads,
                    keys, queries, share, shrinks, free, passed, taken, ends, lists, pools, WHOLE,
                ),
            ),
            (lay_out, (lists, pools, keys, bias, full, free, 0)),
            (lay_out, (lists, pools, keys, bias, full, free, 1)),
        ],
        [4, 4, 4],
        REGISTERS,
    )  # fmt: skip
