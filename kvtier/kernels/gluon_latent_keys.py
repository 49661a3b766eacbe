"""Tiles of latent rows in shared memory, as the tensor cores of an H100 or H200 take them.

A group of four warps has one tile after the other copied into one of two buffers, as soon as nobody
needs what lies there: plain rows as they are, packed ones where their second half will be.  From
there it takes the codes into registers, and writes values.  Rows of the tile behind are asked for
in the L2 cache.  Knows pools, slots and pages of one sequence after the other, not what keys are
for.

Unpacking is integer arithmetic, a product and a sum: the bits of an e4m3 code, four places further
left, are those of a bfloat16 that is 2^120 times too small, also where the code has no leading one.
A row's scale, which is any float32, makes good for it: as two bfloat16, of which the second is what
the first leaves over, so values are rounded about once, as if from float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvtier.kernels.gluon_parts import BRING_LINE, shared_as
from kvtier.kernels.records import RECORDS

__all__ = ["LINES", "produce"]

RECORD_WORDS = gl.constexpr(RECORDS["mla_fp8"].slot_bytes // 4)
LIFT = gl.constexpr(2.0**120)
LARGEST = gl.constexpr(255.0)
"""The largest scale, nearly 2^8, that is a bfloat16 together with 2^120."""
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""(keys, words) of codes: a thread has 16 of each 64 of a key, a warp eight keys at a time.  Eight
threads at a time write their values to eight different columns of banks."""
LINES = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""(keys, words) as they are copied: eight threads copy a line of a row."""
KEYS = gl.constexpr(gl.SliceLayout(1, LINES))
EACH = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
"""(keys, lines): the same keys in the same threads."""
CODES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 2, [1, 0]))
"""(keys, words) of codes: what eight threads read at a time lies in different banks."""
FACTORS = gl.constexpr(
    """{
    .reg .b32 pair, first;
    .reg .f32 rest;
    cvt.rn.bf16x2.f32 pair, $2, $2;
    and.b32 first, pair, 0xFFFF0000;
    mov.b32 rest, first;
    sub.rn.f32 rest, $2, rest;
    cvt.rn.bf16x2.f32 $1, rest, rest;
    mov.b32 $0, pair;
}"""
)
"""A factor as pairs of equal bfloat16: the nearest, and the nearest to what that leaves over."""
UNPACK = gl.constexpr(
    """{
    .reg .b32 low, high, more, most;
    prmt.b32 low, $2, 0, 0x9180;
    prmt.b32 high, $2, 0, 0xB3A2;
    shl.b32 low, low, 4;
    shl.b32 high, high, 4;
    and.b32 low, low, 0x87F087F0;
    and.b32 high, high, 0x87F087F0;
    mul.bf16x2 more, low, $4;
    mul.bf16x2 most, high, $4;
    fma.rn.bf16x2 low, low, $3, more;
    fma.rn.bf16x2 high, high, $3, most;
    mov.b32 $0, low;
    mov.b32 $1, high;
}"""
)
"""Four codes, and pairs of factors, to two pairs of values: each byte with its sign repeated above
it, moved up, what is neither sign nor code cleared, times both factors."""


@gluon.jit
def _named(tile, there, where, count, per_page, PAGED: gl.constexpr, WHOLE: gl.constexpr):
    """Of a tile's keys, of ``count``: their slots, or their pages and places in these.  -1 where
    there are none; ``WHOLE`` tiles lie in one page each."""
    at = tile * 64 + gl.arange(0, 64, KEYS)
    there = (at < count) & there
    if PAGED:
        if WHOLE:
            nth = tile * 64 // per_page
            page = gl.load(where + nth, mask=tile * 64 < count, other=-1)
            return page, gl.where(there, at - nth * per_page, -1)
        else:
            page = gl.load(where + at // per_page, mask=there, other=-1)
            return page, gl.where(there, at % per_page, -1)
    else:
        return gl.load(where + at, mask=there, other=-1), at


@gluon.jit
def _rows_of(
    name, place, rows, page_stride, per_page, there,
    PACKED: gl.constexpr, PAGED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Where each row of a tile lies, and whether there is one."""
    if PAGED:
        page = gl.where((name >= 0) & (name * per_page < there), name, -1)
        seen = (page >= 0) & (place >= 0)
        page = gl.maximum(page, 0)
    else:
        seen = (name >= 0) & (name < there)
        slot = gl.where(seen, name, 0).to(gl.int32)
        page = slot // per_page
        place = slot - page * per_page
    row = rows + page.to(gl.int64) * page_stride
    if WHOLE:  # one page
        row = row + gl.full([64], 0, gl.int32, KEYS)
    if PACKED:
        row = row + gl.where(seen, place, 0) * RECORD_WORDS
    return row, seen


@gluon.jit
def _codes(right):
    """What will be the second half of a tile's values, as codes of each key."""
    return shared_as(right, gl.int32, [64, 128], CODES)


@gluon.jit
def _copy(
    row, seen, left, right, rope, scales, bias, wanted, PACKED: gl.constexpr, PAGED: gl.constexpr
):
    """Has a tile copied to shared memory if it is ``wanted``, codes to ``right``; zeros where there
    is no row.  In two groups, the first of what rope keys and half of the values are made of."""
    mask = seen[:, None]
    line = row[:, None] + gl.arange(0, 32, gl.SliceLayout(0, LINES))[None, :]
    at = row[:, None] + gl.arange(0, 64 if PACKED else 128, gl.SliceLayout(0, LINES))[None, :]
    codes = _codes(right)
    if wanted:
        if not PAGED:
            bias.store(gl.where(seen, 0.0, -float("inf")))
        if PACKED:
            async_copy.async_copy_global_to_shared(codes.slice(0, 64, 1), at, mask)
            four = row[:, None] + (128 + gl.arange(0, 4, gl.SliceLayout(0, LINES)))[None, :]
            four = four.to(gl.pointer_type(gl.float32))
            async_copy.async_copy_global_to_shared(scales, four, mask)
            async_copy.async_copy_global_to_shared(rope, line + 132, mask)
        else:
            async_copy.async_copy_global_to_shared(left, at, mask)
            async_copy.async_copy_global_to_shared(rope, line + 256, mask)
    async_copy.commit_group()
    if wanted:
        if PACKED:
            async_copy.async_copy_global_to_shared(codes.slice(64, 64, 1), at + 64, mask)
        else:
            async_copy.async_copy_global_to_shared(right, at + 128, mask)
    async_copy.commit_group()


@gluon.jit
def _foresee(row, seen, PACKED: gl.constexpr):
    """Has rows brought to the L2 cache."""
    width: gl.constexpr = 8 if PACKED else 16
    last: gl.constexpr = (RECORD_WORDS if PACKED else 288) - 1
    line = gl.arange(0, width, gl.SliceLayout(0, EACH)) * 32
    row = gl.convert_layout(row, gl.SliceLayout(1, EACH), assert_trivial=True)
    seen = gl.convert_layout(seen, gl.SliceLayout(1, EACH), assert_trivial=True).to(gl.int32)
    at = row[:, None] + gl.minimum(line, last)[None, :]
    seen, _ = gl.broadcast(seen[:, None], at)
    gl.inline_asm_elementwise(
        BRING_LINE, "=r,l,r", [at, seen], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _unpack(codes, scales, half, HALF: gl.constexpr):
    """One half of a tile's values from its codes."""
    a = codes.slice(HALF * 64, 32, 1).load(WORDS)
    b = codes.slice(HALF * 64 + 32, 32, 1).load(WORDS)
    even, odd = gl.split(scales.load(WORDS).reshape([64, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    half.slice(0, 64, 1).store(_unpacked(a, third if HALF else first))
    half.slice(64, 64, 1).store(_unpacked(b, fourth if HALF else second))


@gluon.jit
def _tell(ready):
    """Says that half a tile is there."""
    fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _unpacked(words, scale):
    """128 values of each key, of which each has one scale, as pairs of bfloat16."""
    scale = gl.convert_layout(scale, gl.SliceLayout(1, WORDS), assert_trivial=True)
    factor = gl.minimum(scale, LARGEST) * LIFT
    first, rest = gl.inline_asm_elementwise(
        FACTORS, "=r,=r,f", [factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    first, words = gl.broadcast(first[:, None], words)
    rest, words = gl.broadcast(rest[:, None], words)
    low, high = gl.inline_asm_elementwise(
        UNPACK, "=r,=r,r,r,r", [words, first, rest], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.join(low, high).reshape([64, 64])


@gluon.jit
def _next(where, where_stride, lengths, count, b, begin, end, at, stop, per_page,
          PAGED: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """Names of the keys of tile ``at`` of all tiles; moves on to its sequence."""
    if PAGED:
        if at < stop:
            while at >= end:
                b += 1
                begin = end
                count = gl.load(lengths + b)
                end = begin + gl.cdiv(count, 64)
        where = where + b.to(gl.int64) * where_stride
    name, place = _named(at - begin, at < stop, where, count, per_page, PAGED, WHOLE)
    return name, place, count, b, begin, end


@gluon.jit
def produce(
    rows, page_stride, per_page, there, where, where_stride, lengths, count, at, stop, b, begin,
    left, right, rope, scales, bias, left_ready, right_ready, free,
    PACKED: gl.constexpr, PAGED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Fills buffers with tiles of keys."""
    tiles = stop - at
    end = begin
    if PAGED:
        count = gl.load(lengths + b)
        end = begin + gl.cdiv(count, 64)
    name, place, count, b, begin, end = _next(
        where, where_stride, lengths, count, b, begin, end, at, stop, per_page, PAGED, WHOLE
    )  # fmt: skip
    row, seen = _rows_of(name, place, rows, page_stride, per_page, there, PACKED, PAGED, WHOLE)
    for i in gl.static_range(2):
        name, place, count, b, begin, end = _next(
            where, where_stride, lengths, count, b, begin, end, at + i + 1, stop, per_page, PAGED,
            WHOLE,
        )  # fmt: skip
        _copy(
            row, seen, left.index(i), right.index(i), rope.index(i), scales.index(i),
            bias.index(i), i < tiles, PACKED, PAGED,
        )  # fmt: skip
        row, seen = _rows_of(name, place, rows, page_stride, per_page, there, PACKED, PAGED, WHOLE)
    name, place, count, b, begin, end = _next(
        where, where_stride, lengths, count, b, begin, end, at + 3, stop, per_page, PAGED, WHOLE
    )  # fmt: skip
    for nth in range(0, tiles):
        two = nth & 1
        codes = _codes(right.index(two))
        # Four groups are under way at first, two later.
        if nth == 0:
            async_copy.wait_group(3)
        else:
            async_copy.wait_group(1)
        if PACKED:
            _unpack(codes, scales.index(two), left.index(two), 0)
        _tell(left_ready.index(two))
        if nth == 0:
            async_copy.wait_group(2)
        else:
            async_copy.wait_group(0)
        if PACKED:
            _unpack(codes, scales.index(two), right.index(two), 1)
        _tell(right_ready.index(two))
        if nth > 0:
            more = nth + 1 < tiles
            mbarrier.wait(free.index(two ^ 1), (((nth + 1) // 2) & 1) ^ 1, more)
            _copy(
                row, seen, left.index(two ^ 1), right.index(two ^ 1), rope.index(two ^ 1),
                scales.index(two ^ 1), bias.index(two ^ 1), more, PACKED, PAGED,
            )  # fmt: skip
            row, seen = _rows_of(
                name, place, rows, page_stride, per_page, there, PACKED, PAGED, WHOLE
            )  # fmt: skip
            _foresee(row, seen, PACKED)
            name, place, count, b, begin, end = _next(
                where, where_stride, lengths, count, b, begin, end, at + nth + 3, stop, per_page,
                PAGED, WHOLE,
            )  # fmt: skip
