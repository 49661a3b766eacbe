"""Tiles of packed V4 records, unpacked for the tensor cores of an H100 or H200: what runs there.

A group of four warps has one half of the values of every tile: it unpacks one tile's bytes into one
of two buffers in shared memory, then fetches those of the next into registers.  These hold no more
than a tile, and random rows arrive late, two microseconds after they were asked for where all
multiprocessors ask: so whoever has time for it has later tiles brought to the L2 cache.

Unpacking is integer arithmetic and one product: the bits of an e4m3 code, four places further left,
are those of a bfloat16 that is 2^120 times too small, also where the code has no leading one.  The
row's scale makes good for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvtier.kernels.gluon_parts import BRING_LINE, extent

__all__ = ["bring", "lay_out", "tiles"]

LARGEST = gl.constexpr(134)
"""Exponent of the largest scale, 2^7, that is one bfloat16 together with 2^120."""
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""(keys, words) of codes: a thread has 16 codes in each 64 of one key, a warp eight keys."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
"""(keys, words) of bfloat16 pairs: the same values in the same threads.  Eight threads at a time
write to eight different columns of banks."""
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Two threads a key."""
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
BRING_ROW = gl.constexpr(
    """{
    .reg .pred there;
    setp.ne.b32 there, $2, 0;
    @there prefetch.global.L2 [$1];
    @there prefetch.global.L2 [$1 + 128];
    @there prefetch.global.L2 [$1 + 256];
    mov.b32 $0, 0;
}"""
)
"""Where a number is not 0, has the lines of half a row brought to the L2 cache."""


@gluon.jit
def _slots_of(tile, in_window, total, window_slots, num_window, extra_slots, num_extra):
    """Slots of a tile's keys; -1 from tile ``total`` on."""
    first = tile < in_window
    key = gl.arange(0, 64, gl.SliceLayout(1, WORDS))
    at = gl.where(first, tile, tile - in_window) * 64 + key
    end = gl.where(first, num_window, num_extra)
    there = (at < end) & (tile < total)
    return gl.load(gl.where(first, window_slots, extra_slots) + at, mask=there, other=-1)


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
def _beside(a, b):
    return gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def bring(
    tile, in_window, total, window_slots, num_window, extra_slots, num_extra,
    window, window_stride, window_shift, window_there,
    extra, extra_stride, extra_shift, extra_there,
):  # fmt: skip
    """Has a tile's bytes brought to the L2 cache; none from tile ``total`` on."""
    first = tile < in_window
    half = gl.arange(0, 128, LINE) & 1
    at = gl.where(first, tile, tile - in_window) * 64 + (gl.arange(0, 128, LINE) >> 1)
    there = (at < gl.where(first, num_window, num_extra)) & (tile < total)
    slot = gl.load(gl.where(first, window_slots, extra_slots) + at, mask=there, other=-1)
    seen = (slot >= 0) & (slot < gl.where(first, window_there, extra_there))
    slot = gl.where(seen, slot, 0).to(gl.int32)
    shift = gl.where(first, window_shift, extra_shift)
    page = (slot >> shift).to(gl.int64) * gl.where(first, window_stride, extra_stride)
    row = slot & ((1 << shift) - 1)
    base = gl.where(first, window, extra)
    gl.inline_asm_elementwise(
        BRING_ROW,
        "=r,l,r",
        [base + (page + row * 144 + half * 72), seen.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.inline_asm_elementwise(
        BRING_LINE,
        "=r,l,r",
        [base + (page + (144 << shift) + row * 2), (seen & (half == 0)).to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


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
def tiles(num_window, extra_slots, num_extra, extra_there):
    """Tiles that there are, and this program's number of them."""
    total = gl.cdiv(num_window, 64) + gl.cdiv(extent(extra_slots, num_extra, extra_there, 512), 64)
    part = gl.program_id(2)
    step = gl.num_programs(2)
    return total, gl.cdiv(gl.maximum(total - part, 0), step)


@gluon.jit
def lay_out(lists, pools, keys, bias, full, free, HALF: gl.constexpr):
    """Fills buffers of one half of keys with this program's tiles, and, on the left, those of what
    is added to their scores."""
    _, num_window, extra_slots, num_extra = lists
    tile = gl.program_id(2)
    step = gl.num_programs(2)
    in_window = gl.cdiv(num_window, 64)
    most = in_window + gl.cdiv(num_extra, 64)
    # All that the first two tiles need is under way before anything is waited for.
    slot = _slots_of(tile, in_window, most, *lists)
    ahead = _slots_of(tile + step, in_window, most, *lists)
    a0, a1, a2, a3, scales, hidden = _fetch(slot, tile, in_window, *pools, HALF)
    total, mine = tiles(num_window, extra_slots, num_extra, pools[7])
    tile += step
    slot = gl.where(tile < total, ahead, -1)
    for nth in range(gl.maximum(mine, 1)):
        two = nth & 1
        into = keys.index(2 * HALF + two)
        mbarrier.wait(free.index(2 * HALF + two), ((nth >> 1) & 1) ^ 1)
        _unpack(a0, a1, a2, a3, scales, into, HALF)
        if HALF == 0:
            bias.index(two).store(hidden)
        mbarrier.arrive(full.index(2 * HALF + two), count=1)
        a0, a1, a2, a3, scales, hidden = _fetch(slot, tile, in_window, *pools, HALF)
        tile += step
        slot = _slots_of(tile, in_window, total, *lists)
