"""Attention to tiles of V4 records by one multiprocessor of an H100 or H200: what runs there.

Three groups of four warps share 64 heads of one query and, one after the other, tiles of 64 of its
keys.  One group fetches a tile's bytes into registers and unpacks those of the tile before into
one of two buffers in shared memory.  The second makes scores and weights, and sums the left half of
the values; the third sums the right half by weights that it is passed.  They wait for each other
at barriers in shared memory alone, so that fetching, unpacking, products and softmax overlap.

Unpacking is integer arithmetic and one product: the bits of an e4m3 code, four places further left,
are those of a bfloat16 that is 2^120 times too small, also where the code has no leading one.  The
row's scale makes good for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvtier.kernels.gluon_parts import exp2

__all__ = ["attend"]

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""By triton 3.9."""
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LARGEST = gl.constexpr(134)
"""Exponent of the largest scale, 2^7, that is one bfloat16 together with 2^120."""
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""(keys, words) of codes: a thread has 16 codes in each 64 of one key, a warp eight keys."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
"""(keys, words) of bfloat16 pairs: the same values in the same threads.  Eight threads at a time
write to eight different columns of banks."""
PACKED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Keys, as pairs of values and as values, where the tensor cores read them."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
"""Results of the tensor cores: (heads, keys) and (heads, half of the values)."""
SUMS_REGISTERS = gl.constexpr(176)
FETCH_REGISTERS = gl.constexpr(128)
"""Registers a thread of the two groups beside the first, which has the rest of three times 168."""
UNPACK = gl.constexpr(
    """{
    .reg .b32 low, high;
    prmt.b32 low, $2, 0, 0x9180;
    prmt.b32 high, $2, 0, 0xB3A2;
    shl.b32 low, low, 4;
    shl.b32 high, high, 4;
    and.b32 low, low, 0x87F087F0;
    and.b32 high, high, 0x87F087F0;
    mul.bf16x2 $0, low, $3;
    mul.bf16x2 $1, high, $3;
}"""
)
"""Four codes, and a pair of equal factors, to two pairs of values: each byte with its sign
repeated above it, moved up, what is neither sign nor code cleared, times the factor."""


@gluon.jit
def _slots_of(tile, in_window, total, window_slots, num_window, extra_slots, num_extra):
    """Slots of a tile's keys; -1 from tile ``total`` on."""
    first = tile < in_window
    at = gl.where(first, tile, tile - in_window) * 64 + gl.arange(0, 64, gl.SliceLayout(1, WORDS))
    end = gl.where(first, num_window, num_extra)
    there = (at < end) & (tile < total)
    return gl.load(gl.where(first, window_slots, extra_slots) + at, mask=there, other=-1)


@gluon.jit
def _fetch(
    slot, tile, in_window,
    window, window_stride, window_shift, window_there,
    extra, extra_stride, extra_shift, extra_there,
    HALF: gl.constexpr,
):  # fmt: skip
    """Half of a tile's bytes, as words in registers: 64 codes of each key three times, as many more
    or the rope values, scales; and what is added to its scores."""
    first = tile < in_window
    seen = (slot >= 0) & (slot < gl.where(first, window_there, extra_there))
    slot = gl.where(seen, slot, 0).to(gl.int32)
    shift = gl.where(first, window_shift, extra_shift)
    page = (slot >> shift).to(gl.int64) * gl.where(first, window_stride, extra_stride)
    row = slot & ((1 << shift) - 1)
    base = gl.where(first, window, extra)
    scales = base + (page + (144 << shift) + row * 2 + HALF)
    scales = gl.load(scales, mask=seen, other=0)
    rows = base + (page + row * 144 + 64 * HALF)
    there = seen[:, None]
    at = rows[:, None] + gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
    a0 = gl.load(at, mask=there, other=0)
    a1 = gl.load(at + 16, mask=there, other=0)
    a2 = gl.load(at + 32, mask=there, other=0)
    if HALF == 0:
        a3 = gl.load(at + 48, mask=there, other=0)
    else:
        rows = gl.convert_layout(rows, gl.SliceLayout(1, PAIRS), assert_trivial=True)
        there = gl.convert_layout(seen, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
        at = rows[:, None] + (48 + gl.arange(0, 32, gl.SliceLayout(0, PAIRS)))[None, :]
        a3 = gl.load(at, mask=there, other=0)
    return a0, a1, a2, a3, scales, gl.where(seen, 0.0, -float("inf"))


@gluon.jit
def _unpack(a0, a1, a2, a3, scales, into, HALF: gl.constexpr):
    """Half of the values of a tile that was fetched, for the tensor cores."""
    b0 = _beside(_values(a0, scales, 0), _values(a1, scales, 1))
    b1 = _beside(_values(a2, scales, 2), _values(a3, scales, 3) if HALF == 0 else a3)
    into.store(_beside(b0, b1))
    fence_async_shared()


@gluon.jit
def _values(words, scales, C: gl.constexpr):
    """64 values of each key, as pairs of bfloat16."""
    exponent = gl.minimum((scales >> (8 * C)) & 0xFF, LARGEST)
    factor = ((exponent + 120) << 7) * 0x10001
    factor, words = gl.broadcast(factor[:, None], words)
    low, high = gl.inline_asm_elementwise(
        UNPACK, "=r,=r,r,r", [words, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([64, 32])


@gluon.jit
def _as(memory, kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory as values of another type."""
    if RENAMED:
        return memory.reinterpret(kind, shape, layout)
    else:  # said for the compiler, which looks at one branch then
        return memory._reinterpret(kind, shape, layout)


@gluon.jit
def _beside(a, b):
    return gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def _half(keys, two, HALF: gl.constexpr):
    """(64, 256) values that lie in buffer ``two``."""
    return _as(keys.index(2 * HALF + two), gl.bfloat16, [64, 256], WIDE)


@gluon.jit
def _soften(score, scale, bias, top, weight, share, shrinks, passed, taken, phase):
    """Passes on a tile's weights, made from its scores, and what older sums shrink by; returns the
    largest score so far, the sum of weights, and the latter."""
    score = score * scale + bias.load(gl.SliceLayout(0, SCORES))[None, :]
    new_top = gl.maximum(top, gl.max(score, 1))
    # A row that has seen nothing yet subtracts 0, not -inf.
    base = gl.where(new_top == -float("inf"), 0.0, new_top)
    shrink = exp2(top - base)
    p = exp2(score - base[:, None])
    mbarrier.wait(taken, phase)
    share.store(p.to(gl.bfloat16))
    shrinks.store(shrink)
    fence_async_shared()
    mbarrier.arrive(passed, count=1)
    return new_top, weight * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _extent(slots, count, there):
    """How much of a list holds all slots that it has."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    end = 0
    base = 0
    while base < count:
        at = base + gl.arange(0, 512, layout)
        slot = gl.load(slots + at, mask=at < count, other=-1)
        end = gl.maximum(end, gl.max(gl.where((slot >= 0) & (slot < there), at + 1, 0), 0))
        base += 512
    return end


@gluon.jit
def _tiles(num_window, extra_slots, num_extra, extra_there):
    """Tiles that there are, and this program's number of them."""
    total = gl.cdiv(num_window, 64) + gl.cdiv(_extent(extra_slots, num_extra, extra_there), 64)
    part = gl.program_id(2)
    step = gl.num_programs(2)
    return total, gl.cdiv(gl.maximum(total - part, 0), step)


@gluon.jit
def _hold(query, token_stride, head_stride, heads, queries, HALF: gl.constexpr):
    """Half of the queries, in shared memory."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    token = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    row = (query + token * token_stride + head.to(gl.int64) * head_stride)[:, None]
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, lines))[None, :]
    queries.index(HALF).store(gl.load(row + column, mask=(head < heads)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _write(
    sofar, share, keys, out, parts, rows_a_part, heads, WHOLE: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Half of the sums times ``share``, by way of the keys' memory: in pieces of lines."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8 if WHOLE else 4], [1, 32], [4, 1], [1, 0])
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if WHOLE else 4, [1, 0])
    first = gl.program_id(0).to(gl.int64) * heads
    if WHOLE:
        to = out + first * 512
        memory = _as(keys, gl.bfloat16, [4, 64, 256], held).index(2 * HALF)
    else:
        to = parts + (gl.program_id(2).to(gl.int64) * rows_a_part + first) * 512
        memory = _as(keys, gl.float32, [2, 64, 256], held).index(HALF)
    share = gl.convert_layout(share, gl.SliceLayout(1, SUMS), assert_trivial=True)
    memory.store((sofar * share[:, None]).to(to.dtype.element_ty))
    head = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, lines))
    at = to + (head * 512)[:, None] + column[None, :]
    gl.store(at, memory.load(lines), mask=(head < heads)[:, None])


@gluon.jit
def _lay_out(
    window, window_stride, window_shift, window_there, window_slots, num_window,
    extra, extra_stride, extra_shift, extra_there, extra_slots, num_extra,
    keys, bias, full, free,
):  # fmt: skip
    """The first group: fetches tiles and unpacks them, the left half of each first."""
    lists = (window_slots, num_window, extra_slots, num_extra)
    pools = (
        window, window_stride, window_shift, window_there,
        extra, extra_stride, extra_shift, extra_there,
    )  # fmt: skip
    tile = gl.program_id(2)
    step = gl.num_programs(2)
    in_window = gl.cdiv(num_window, 64)
    most = in_window + gl.cdiv(num_extra, 64)
    # All that the first two tiles need is under way before anything is waited for.
    slot = _slots_of(tile, in_window, most, *lists)
    ahead = _slots_of(tile + step, in_window, most, *lists)
    a0, a1, a2, a3, a_scales, hidden = _fetch(slot, tile, in_window, *pools, 0)
    b0, b1, b2, b3, b_scales, _ = _fetch(slot, tile, in_window, *pools, 1)
    total, mine = _tiles(num_window, extra_slots, num_extra, extra_there)
    tile += step
    slot = gl.where(tile < total, ahead, -1)
    for nth in range(gl.maximum(mine, 1)):
        two = nth & 1
        before = ((nth >> 1) & 1) ^ 1
        mbarrier.wait(free.index(two), before)
        _unpack(a0, a1, a2, a3, a_scales, keys.index(two), 0)
        bias.index(two).store(hidden)
        mbarrier.arrive(full.index(two), count=1)
        a0, a1, a2, a3, a_scales, hidden = _fetch(slot, tile, in_window, *pools, 0)
        mbarrier.wait(free.index(2 + two), before)
        _unpack(b0, b1, b2, b3, b_scales, keys.index(2 + two), 1)
        mbarrier.arrive(full.index(2 + two), count=1)
        b0, b1, b2, b3, b_scales, _ = _fetch(slot, tile, in_window, *pools, 1)
        tile += step
        slot = _slots_of(tile, in_window, total, *lists)


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
    keys, queries, bias, share, shrinks, full, free, passed, taken, ends, WHOLE: gl.constexpr,
):  # fmt: skip
    """The second group: scores and weights of each tile, and sums of the left half of its values.
    These and the next tile's scores are queued together."""
    rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    _hold(query, token_stride, head_stride, heads, queries, 0)
    _, mine = _tiles(num_window, extra_slots, num_extra, extra_there)
    sofar = gl.full([64, 256], 0.0, gl.float32, SUMS)
    top = gl.full([64], -float("inf"), gl.float32, rows)
    weight = gl.full([64], 0.0, gl.float32, rows)
    mbarrier.wait(ends.index(0), 0)
    score = _score(queries, keys, 0, 0, full)
    score = warpgroup_mma_wait(0, deps=[score])
    for nth in range(1, mine):
        old = (nth & 1) ^ 1
        top, weight, shrink = _soften(
            score, scale, bias.index(old), top, weight, share.index(old), shrinks.index(old),
            passed.index(old), taken.index(old), (((nth - 1) >> 1) & 1) ^ 1,
        )  # fmt: skip
        sofar = _shrunk(sofar, shrink)
        sofar = warpgroup_mma(share.index(old), _half(keys, old, 0), sofar, is_async=True)
        score = _score(queries, keys, nth & 1, (nth >> 1) & 1, full)
        sofar = warpgroup_mma_wait(2, deps=[sofar])
        mbarrier.arrive(free.index(old), count=1)
        score = warpgroup_mma_wait(0, deps=[score])
    last = gl.maximum(mine, 1) - 1
    old = last & 1
    top, weight, shrink = _soften(
        score, scale, bias.index(old), top, weight, share.index(old), shrinks.index(old),
        passed.index(old), taken.index(old), ((last >> 1) & 1) ^ 1,
    )  # fmt: skip
    sofar = _shrunk(sofar, shrink)
    sofar = warpgroup_mma(share.index(old), _half(keys, old, 0), sofar, is_async=True)

    head = gl.program_id(1) * 64 + gl.arange(0, 64, rows)
    real = head < heads
    first = gl.program_id(0).to(gl.int64) * heads
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
    _write(sofar, mean, keys, out, parts, rows_a_part, heads, WHOLE, 0)


@gluon.jit
def _shrunk(sofar, shrink):
    return sofar * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS), assert_trivial=True)[:, None]


@gluon.jit
def _follow(
    query, token_stride, head_stride, num_window, extra_there, extra_slots, num_extra,
    out, parts, rows_a_part, heads,
    keys, queries, share, shrinks, free, passed, taken, ends, WHOLE: gl.constexpr,
):  # fmt: skip
    """The third group: sums of the right half of the values, by the weights that it is passed."""
    _hold(query, token_stride, head_stride, heads, queries, 1)
    mbarrier.arrive(ends.index(0), count=1)
    _, mine = _tiles(num_window, extra_slots, num_extra, extra_there)
    sofar = gl.full([64, 256], 0.0, gl.float32, SUMS)
    count = gl.maximum(mine, 1)
    for nth in range(count):
        two = nth & 1
        mbarrier.wait(passed.index(two), (nth >> 1) & 1)
        sofar = sofar * shrinks.index(two).load(gl.SliceLayout(1, SUMS))[:, None]
        sofar = warpgroup_mma(share.index(two), _half(keys, two, 1), sofar, is_async=True)
        sofar = warpgroup_mma_wait(0, deps=[sofar])
        mbarrier.arrive(free.index(2 + two), count=1)
        mbarrier.arrive(taken.index(two), count=1)
    mbarrier.wait(ends.index(1), 0)
    mean = shrinks.index(count & 1).load(gl.SliceLayout(1, SUMS))
    _write(sofar, mean, keys, out, parts, rows_a_part, heads, WHOLE, 1)


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
    # Of each buffer of keys: that it may be read, and written; of each of weights likewise.  Last:
    # that the right half of the queries lies there, and that the sums' share in the mean does.
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    passed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(passed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
        mbarrier.init(ends.index(i), count=1)
    fence_async_shared()
    token = gl.program_id(0).to(gl.int64)
    window_slots += token * window_slots_stride
    extra_slots += token * extra_slots_stride
    gl.warp_specialize(
        [
            (
                _lead,
                (
                    query, token_stride, head_stride,
                    num_window, extra_there, extra_slots, num_extra,
                    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
                    keys, queries, bias, share, shrinks, full, free, passed, taken, ends, WHOLE,
                ),
            ),
            (
                _follow,
                (
                    query, token_stride, head_stride,
                    num_window, extra_there, extra_slots, num_extra,
                    out, parts, rows_a_part, heads,
                    keys, queries, share, shrinks, free, passed, taken, ends, WHOLE,
                ),
            ),
            (
                _lay_out,
                (
                    window, window_stride, window_shift, window_there, window_slots, num_window,
                    extra, extra_stride, extra_shift, extra_there, extra_slots, num_extra,
                    keys, bias, full, free,
                ),
            ),
        ],
        [4, 4],
        [SUMS_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip
