"""Tiles of latent rows in shared memory, as the tensor cores of an H100 or H200 take them.

A group of four warps fetches one tile's bytes into registers and unpacks them into one of two
buffers as soon as nobody needs what lies there; plain rows are copied there.  Knows pools, slots
and pages of one sequence after the other, not what keys are for.

Unpacking is integer arithmetic, a product and a sum: the bits of an e4m3 code, four places further
left, are those of a bfloat16 that is 2^120 times too small, also where the code has no leading one.
A row's scale, which is any float32, makes good for it: as two bfloat16, of which the second is what
the first leaves over, so values are rounded about once, as if from float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvtier.kernels.records import RECORDS

__all__ = ["produce", "shared_as"]

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""By triton 3.9."""
RECORD_WORDS = gl.constexpr(RECORDS["mla_fp8"].slot_bytes // 4)
LIFT = gl.constexpr(2.0**120)
LARGEST = gl.constexpr(255.0)
"""The largest scale, nearly 2^8, that is a bfloat16 together with 2^120."""
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""(keys, words) of codes: a thread has 16 of each 64 of a key, a warp eight keys at a time."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
"""(keys, words) of bfloat16 pairs: the same values in the same threads.  Eight threads at a time
write to eight different columns of banks."""
LINES = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""(keys, words) of plain rows: eight threads copy a line of one."""
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
def shared_as(memory, kind: gl.constexpr, layout: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory as (64, WIDTH) values of another type."""
    if RENAMED:
        return memory.reinterpret(kind, [64, WIDTH], layout)
    else:  # said for the compiler, which looks at one branch then
        return memory._reinterpret(kind, [64, WIDTH], layout)


@gluon.jit
def _slots_of(tile, there, where, count, per_page, PAGED: gl.constexpr, layout: gl.constexpr):
    """Slots of a tile's keys, of ``count``; -1 unless ``there``."""
    at = tile * 64 + gl.arange(0, 64, layout)
    there = (at < count) & there
    if PAGED:
        page = gl.load(where + at // per_page, mask=there, other=-1)
        return gl.where(page >= 0, page * per_page + at % per_page, -1)
    else:
        return gl.load(where + at, mask=there, other=-1)


@gluon.jit
def _rows_of(slot, rows, page_stride, per_page, there, PACKED: gl.constexpr):
    """Where each row of a tile lies, and whether there is one."""
    seen = (slot >= 0) & (slot < there)
    slot = gl.where(seen, slot, 0).to(gl.int32)
    page = slot // per_page
    row = rows + page.to(gl.int64) * page_stride
    if PACKED:
        row = row + (slot - page * per_page) * RECORD_WORDS
    return row, seen


@gluon.jit
def _fetch(row, seen):
    """A tile's bytes, as words in registers: 64 values of each key eight times, rope values and
    scales."""
    mask = seen[:, None]
    at = row[:, None] + gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
    a0 = gl.load(at, mask=mask, other=0)
    a1 = gl.load(at + 16, mask=mask, other=0)
    a2 = gl.load(at + 32, mask=mask, other=0)
    a3 = gl.load(at + 48, mask=mask, other=0)
    a4 = gl.load(at + 64, mask=mask, other=0)
    a5 = gl.load(at + 80, mask=mask, other=0)
    a6 = gl.load(at + 96, mask=mask, other=0)
    a7 = gl.load(at + 112, mask=mask, other=0)
    scales = (row + 128).to(gl.pointer_type(gl.float32))
    s0 = gl.load(scales, mask=seen, other=0.0)
    s1 = gl.load(scales + 1, mask=seen, other=0.0)
    s2 = gl.load(scales + 2, mask=seen, other=0.0)
    s3 = gl.load(scales + 3, mask=seen, other=0.0)
    return a0, a1, a2, a3, a4, a5, a6, a7, _rope_of(row, seen), s0, s1, s2, s3


@gluon.jit
def _exchange(
    a0, a1, a2, a3, a4, a5, a6, a7, r, s0, s1, s2, s3, row, seen, left, right, rope
):  # fmt: skip
    """Unpacks a tile that was fetched for the tensor cores, and fetches the next one, by parts: a
    part's registers are free once it is unpacked."""
    mask = seen[:, None]
    at = row[:, None] + gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
    scales = (row + 128).to(gl.pointer_type(gl.float32))
    # Warps wait for each other between two pieces of the same memory: by turns left and right.
    left.slice(0, 64, 1).store(_unpacked(a0, a1, s0))
    a0 = gl.load(at, mask=mask, other=0)
    a1 = gl.load(at + 16, mask=mask, other=0)
    s0 = gl.load(scales, mask=seen, other=0.0)
    right.slice(0, 64, 1).store(_unpacked(a4, a5, s2))
    a4 = gl.load(at + 64, mask=mask, other=0)
    a5 = gl.load(at + 80, mask=mask, other=0)
    s2 = gl.load(scales + 2, mask=seen, other=0.0)
    rope.store(r)
    r = _rope_of(row, seen)
    left.slice(64, 64, 1).store(_unpacked(a2, a3, s1))
    a2 = gl.load(at + 32, mask=mask, other=0)
    a3 = gl.load(at + 48, mask=mask, other=0)
    s1 = gl.load(scales + 1, mask=seen, other=0.0)
    right.slice(64, 64, 1).store(_unpacked(a6, a7, s3))
    a6 = gl.load(at + 96, mask=mask, other=0)
    a7 = gl.load(at + 112, mask=mask, other=0)
    s3 = gl.load(scales + 3, mask=seen, other=0.0)
    return a0, a1, a2, a3, a4, a5, a6, a7, r, s0, s1, s2, s3


@gluon.jit
def _rope_of(row, seen):
    row = gl.convert_layout(row, gl.SliceLayout(1, PAIRS), assert_trivial=True)
    mask = gl.convert_layout(seen, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
    at = row[:, None] + (132 + gl.arange(0, 32, gl.SliceLayout(0, PAIRS)))[None, :]
    return gl.load(at, mask=mask, other=0)


@gluon.jit
def _unpacked(a, b, scale):
    """128 values of each key, of which each has one scale."""
    factor = gl.minimum(scale, LARGEST) * LIFT
    first, rest = gl.inline_asm_elementwise(
        FACTORS, "=r,=r,f", [factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    first = first[:, None]
    rest = rest[:, None]
    both = gl.join(_values(a, first, rest), _values(b, first, rest))
    return both.permute((0, 2, 1)).reshape([64, 64])


@gluon.jit
def _values(words, first, rest):
    """64 values of each key, as pairs of bfloat16."""
    first, words = gl.broadcast(first, words)
    rest, words = gl.broadcast(rest, words)
    low, high = gl.inline_asm_elementwise(
        UNPACK, "=r,=r,r,r,r", [words, first, rest], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.join(low, high).reshape([64, 32])


@gluon.jit
def _copy(row, seen, left, right, rope):
    """A tile of plain rows, to shared memory; zeros where there is none."""
    mask = seen[:, None]
    at = row[:, None] + gl.arange(0, 32, gl.SliceLayout(0, LINES))[None, :]
    for i in gl.static_range(4):
        async_copy.async_copy_global_to_shared(left.slice(32 * i, 32, 1), at + 32 * i, mask)
        behind = at + (128 + 32 * i)
        async_copy.async_copy_global_to_shared(right.slice(32 * i, 32, 1), behind, mask)
    async_copy.async_copy_global_to_shared(rope, at + 256, mask)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _next(where, where_stride, lengths, count, b, begin, end, at, stop, per_page,
          PAGED: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Slots of tile ``at`` of all tiles; moves on to its sequence."""
    if PAGED:
        if at < stop:
            while at >= end:
                b += 1
                begin = end
                count = gl.load(lengths + b)
                end = begin + gl.cdiv(count, 64)
        where = where + b.to(gl.int64) * where_stride
    slot = _slots_of(at - begin, at < stop, where, count, per_page, PAGED, layout)
    return slot, count, b, begin, end


@gluon.jit
def produce(
    rows, page_stride, per_page, there, where, where_stride, lengths, count, at, stop, b, begin,
    left, right, rope, bias, ready, free, PACKED: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Fills buffers with tiles of keys."""
    layout: gl.constexpr = gl.SliceLayout(1, WORDS if PACKED else LINES)
    end = begin
    if PAGED:
        count = gl.load(lengths + b)
        end = begin + gl.cdiv(count, 64)
    slot, count, b, begin, end = _next(
        where, where_stride, lengths, count, b, begin, end, at, stop, per_page, PAGED, layout
    )
    row, seen = _rows_of(slot, rows, page_stride, per_page, there, PACKED)
    slot, count, b, begin, end = _next(
        where, where_stride, lengths, count, b, begin, end, at + 1, stop, per_page, PAGED, layout
    )
    if PACKED:
        a0, a1, a2, a3, a4, a5, a6, a7, r, s0, s1, s2, s3 = _fetch(row, seen)
    for nth in range(0, stop - at):
        two = nth & 1
        # Before the next tile is fetched, behind which these would have to wait.
        next_row, next_seen = _rows_of(slot, rows, page_stride, per_page, there, PACKED)
        slot, count, b, begin, end = _next(
            where, where_stride, lengths, count, b, begin, end, at + nth + 2, stop, per_page,
            PAGED, layout,
        )  # fmt: skip
        mbarrier.wait(free.index(two), ((nth // 2) & 1) ^ 1, nth > 1)
        if not PAGED:
            bias.index(two).store(gl.where(seen, 0.0, -float("inf")))
        if PACKED:
            a0, a1, a2, a3, a4, a5, a6, a7, r, s0, s1, s2, s3 = _exchange(
                a0, a1, a2, a3, a4, a5, a6, a7, r, s0, s1, s2, s3, next_row, next_seen,
                left.index(two), right.index(two), rope.index(two),
            )  # fmt: skip
        else:
            _copy(row, seen, left.index(two), right.index(two), rope.index(two))
        fence_async_shared()
        mbarrier.arrive(ready.index(two), count=1)
        row, seen = next_row, next_seen
