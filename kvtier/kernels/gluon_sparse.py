"""Attention to lists of packed V4 records, for one multiprocessor of an H100 or H200 at a time.

Eight warps share 64 heads of one query and, one after the other, tiles of 64 of its keys.  A tile's
bytes are fetched into registers while the tile before it is unpacked, and unpacked into one of two
buffers in shared memory while the tensor cores score the tile before it.  Values of one tile and
scores of the next are queued together, so that only the softmax has the tensor cores wait.

Unpacking is integer arithmetic and one product: the bits of an e4m3 code, four places further left,
are those of a bfloat16 that is 2^120 times too small, also where the code has no leading one.  The
row's scale makes good for it.

Queries that are few have their keys shared out among several programs, by ``triton_sparse``'s plan;
what these find is joined by a second launch.  A list costs what it has slots in it, up to its last.

Not yet run on a device, only compiled for it and followed on a CPU: taken when asked for by name.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvtier.config import parse_bytes
from kvtier.kernels.records import Record
from kvtier.kernels.triton_sparse import DIM, check_lists, join, splits_of
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["HEADS", "KEYS", "sparse_attend"]

HEADS = 64
"""Heads of a program: one tile of the tensor cores' rows."""
KEYS = 64
"""Keys of a tile."""
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""By triton 3.9."""
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LARGEST = gl.constexpr(134)
"""Exponent of the largest scale, 2^7, that is one bfloat16 together with 2^120."""
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
"""(keys, words) of codes: a thread has 16 codes in each 64 of one key, a warp eight keys."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
"""(keys, words) of bfloat16 pairs: the same values in the same threads.  Eight threads at a time
write to eight different columns of banks."""
BOTH = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 1]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)
"""(heads, halves of the keys): rows where the tensor cores have them, and both halves in each."""
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


def sparse_attend(
    query: Tensor,
    window: Tensor,
    window_slots: Tensor,
    sink: Tensor,
    *,
    scale: float,
    record: Record,
    extra: Tensor | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.sparse_attend`` for "v4_fp8" records and queries in bfloat16.

    Pages begin at multiples of 16 bytes and have a power of two of slots.  Scales above 2^7 are
    taken as 2^7: rows hold values below 57,344.  Weights are rounded to bfloat16 before they meet
    the values; scores and sums are float32.  Asks the device nothing; slots past the pool count as
    none.  Raises ValueError for other queries, records and pages.
    """
    query, sink = adjacent(query), adjacent(sink)
    n, heads, _ = query.shape
    if extra is None or extra_slots is None:
        extra, extra_slots = window, window_slots[:, :0]
    window_slots, extra_slots = adjacent(window_slots), adjacent(extra_slots)
    check_lists(query, sink, window_slots, extra_slots)
    if record.name != "v4_fp8" or query.dtype != torch.bfloat16:
        raise ValueError(f"{record.name!r} records, queries in {query.dtype}")
    blocks = triton.cdiv(heads, HEADS)
    a_split = max(1, n * heads * (DIM + 1) * 4)
    most = parse_bytes(workspace_bytes, "workspace_bytes") // a_split
    splits = max(1, min(splits_of(n * blocks, _processors(query.device)), most))
    out = torch.empty(n, heads, DIM, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    if n == 0 or heads == 0:
        return out, lse
    parts_of = splits if splits > 1 else 0
    parts = query.new_empty(parts_of * n * heads, DIM, dtype=torch.float32)
    part_lse = query.new_empty(parts_of * n * heads, dtype=torch.float32)
    _attend[(n, blocks, splits)](
        query,
        *query.stride()[:2],
        *_words_of(window, record),
        window_slots,
        window_slots.stride(0),
        window_slots.shape[1],
        *_words_of(extra, record),
        extra_slots,
        extra_slots.stride(0),
        extra_slots.shape[1],
        scale * LOG2E.value,
        sink,
        out,
        lse,
        parts,
        part_lse,
        n * heads,
        heads,
        WHOLE=splits == 1,
        num_warps=8,
    )
    if splits > 1:
        join(parts, part_lse, splits, sink, out, lse)
    return out, lse


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _words_of(storage: Tensor, record: Record) -> tuple[Tensor, int, int, int]:
    """Pages in words, words from page to page, the power of two that is a page's slots, and slots
    there are."""
    stride, per_page, there = pool_of(storage, record)
    if storage.data_ptr() % 16 or stride % 16 or per_page & (per_page - 1):
        raise ValueError(
            f"pages of {per_page} slots, {stride} bytes apart, at {storage.data_ptr():#x}: pages "
            "have a power of two of slots and begin at multiples of 16 bytes"
        )
    return storage.view(torch.int32), stride // 4, per_page.bit_length() - 1, there


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
):  # fmt: skip
    """A tile's bytes, as words in registers: 64 codes of each key seven times, rope values, scales;
    and what is added to its scores."""
    first = tile < in_window
    seen = (slot >= 0) & (slot < gl.where(first, window_there, extra_there))
    slot = gl.where(seen, slot, 0).to(gl.int32)
    shift = gl.where(first, window_shift, extra_shift)
    page = (slot >> shift).to(gl.int64) * gl.where(first, window_stride, extra_stride)
    row = slot & ((1 << shift) - 1)
    base = gl.where(first, window, extra)
    scales = (base + (page + (144 << shift) + row * 2)).to(gl.pointer_type(gl.int64))
    scales = gl.load(scales, mask=seen, other=0)
    rows = base + (page + row * 144)
    there = seen[:, None]
    at = rows[:, None] + gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
    a0 = gl.load(at, mask=there, other=0)
    a1 = gl.load(at + 16, mask=there, other=0)
    a2 = gl.load(at + 32, mask=there, other=0)
    a3 = gl.load(at + 48, mask=there, other=0)
    a4 = gl.load(at + 64, mask=there, other=0)
    a5 = gl.load(at + 80, mask=there, other=0)
    a6 = gl.load(at + 96, mask=there, other=0)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, PAIRS), assert_trivial=True)
    there = gl.convert_layout(seen, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
    at = rows[:, None] + (112 + gl.arange(0, 32, gl.SliceLayout(0, PAIRS)))[None, :]
    rope = gl.load(at, mask=there, other=0)
    return a0, a1, a2, a3, a4, a5, a6, rope, scales, gl.where(seen, 0.0, -float("inf"))


@gluon.jit
def _unpack(a0, a1, a2, a3, a4, a5, a6, rope, scales, hidden, into, bias):
    """Values of a tile that was fetched, for the tensor cores, and what is added to its scores."""
    b0 = _beside(_values(a0, scales, 0), _values(a1, scales, 1))
    b1 = _beside(_values(a2, scales, 2), _values(a3, scales, 3))
    b2 = _beside(_values(a4, scales, 4), _values(a5, scales, 5))
    b3 = _beside(_values(a6, scales, 6), rope)
    into.store(_beside(_beside(b0, b1), _beside(b2, b3)))
    bias.store(hidden)
    fence_async_shared()


@gluon.jit
def _values(words, scales, C: gl.constexpr):
    """64 values of each key, as pairs of bfloat16."""
    exponent = gl.minimum(((scales >> (8 * C)) & 0xFF).to(gl.int32), LARGEST)
    factor = ((exponent + 120) << 7) * 0x10001
    factor, words = gl.broadcast(factor[:, None], words)
    low, high = gl.inline_asm_elementwise(
        UNPACK, "=r,=r,r,r", [words, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([64, 32])


@gluon.jit
def _as(memory, kind: gl.constexpr, layout: gl.constexpr):
    """Shared memory as (64, 512) values of another type."""
    if RENAMED:
        return memory.reinterpret(kind, [64, 512], layout)
    else:  # said for the compiler, which looks at one branch then
        return memory._reinterpret(kind, [64, 512], layout)


@gluon.jit
def _beside(a, b):
    return gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def _soften(score, scale, bias, top, weight, share, tops):
    """Weights of a tile from its scores; the largest score so far, sums of weights, and what older
    sums shrink by.  ``weight`` has a sum for each thread's keys."""
    layout: gl.constexpr = score.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    score = score * scale + bias.load(gl.SliceLayout(0, layout))[None, :]
    # Each four warps have the scores of half of the keys.
    tops.store(gl.max(gl.max(score.reshape([64, 2, 4, 8]), 2), 2))
    new_top = gl.convert_layout(gl.max(tops.load(BOTH), 1), rows, assert_trivial=True)
    new_top = gl.maximum(top, new_top)
    # A row that has seen nothing yet subtracts 0, not -inf.
    base = gl.where(new_top == -float("inf"), 0.0, new_top)
    shrink = _exp2(top - base)
    p = _exp2(score - base[:, None])
    share.store(p.to(gl.bfloat16))
    fence_async_shared()
    of_weight: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, weight.type.layout))
    less = gl.convert_layout(shrink, of_weight, assert_trivial=True)[:, None, None]
    return new_top, weight * less + gl.sum(p.reshape([64, 2, 4, 8]), 2), shrink


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _extent(slots, count, there):
    """How much of a list holds all slots that it has."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    end = 0
    base = 0
    while base < count:
        at = base + gl.arange(0, 1024, layout)
        slot = gl.load(slots + at, mask=at < count, other=-1)
        end = gl.maximum(end, gl.max(gl.where((slot >= 0) & (slot < there), at + 1, 0), 0))
        base += 1024
    return end


@gluon.jit
def _write(sofar, share, memory, to, heads):
    """Sums times ``share``, by way of shared memory: in pieces of lines."""
    layout: gl.constexpr = sofar.type.layout
    narrow: gl.constexpr = to.dtype.element_ty.primitive_bitwidth == 16
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if narrow else 4, [1, 0])
    lines: gl.constexpr = gl.BlockedLayout([1, 8 if narrow else 4], [1, 32], [8, 1], [1, 0])
    memory = _as(memory, to.dtype.element_ty, held)
    share = gl.convert_layout(share, gl.SliceLayout(1, layout), assert_trivial=True)
    memory.store((sofar * share[:, None]).to(to.dtype.element_ty))
    head = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    column = gl.arange(0, 512, gl.SliceLayout(0, lines))
    at = to + (head * 512)[:, None] + column[None, :]
    gl.store(at, memory.load(lines), mask=(head < heads)[:, None])


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
def _attend(
    query, token_stride, head_stride,
    window, window_stride, window_shift, window_there,
    window_slots, window_slots_stride, num_window,
    extra, extra_stride, extra_shift, extra_there,
    extra_slots, extra_slots_stride, num_extra,
    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Up to 64 heads of one query against every so manieth tile of its keys."""
    packed: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    keys = gl.allocate_shared_memory(gl.int32, [2, 64, 256], packed)
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], wide)
    share = gl.allocate_shared_memory(gl.bfloat16, [64, 64], wide)
    tops = gl.allocate_shared_memory(gl.float32, [64, 2], plain)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    token = gl.program_id(0).to(gl.int64)
    part = gl.program_id(2)
    step = gl.num_programs(2)
    window_slots += token * window_slots_stride
    extra_slots += token * extra_slots_stride
    lists = (window_slots, num_window, extra_slots, num_extra)
    pools = (
        window, window_stride, window_shift, window_there,
        extra, extra_stride, extra_shift, extra_there,
    )  # fmt: skip
    in_window = gl.cdiv(num_window, 64)
    most = in_window + gl.cdiv(num_extra, 64)

    # Everything that the first two tiles need is under way before anything is waited for.
    slot = _slots_of(part, in_window, most, *lists)
    slot_1 = _slots_of(part + step, in_window, most, *lists)
    head = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    row = (query + token * token_stride + head.to(gl.int64) * head_stride)[:, None]
    column = gl.arange(0, 512, gl.SliceLayout(0, lines))[None, :]
    q = gl.load(row + column, mask=(head < heads)[:, None], other=0.0)
    tile_0 = _fetch(slot, part, in_window, *pools)
    a0, a1, a2, a3, a4, a5, a6, rope, scales, hidden = _fetch(
        slot_1, part + step, in_window, *pools
    )
    total = in_window + gl.cdiv(_extent(extra_slots, num_extra, extra_there), 64)
    mine = gl.cdiv(gl.maximum(total - part, 0), step)
    tile = part + 2 * step
    slot = _slots_of(tile, in_window, total, *lists)
    queries.store(q)
    _unpack(*tile_0, keys.index(0), bias.index(0))

    none = gl.full([64, 64], 0.0, gl.float32, score_layout)
    here = _as(keys.index(0), gl.bfloat16, wide)
    score = warpgroup_mma(queries, here.permute((1, 0)), none, use_acc=False, is_async=True)
    if mine > 1:
        _unpack(
            a0, a1, a2, a3, a4, a5, a6, rope, scales, hidden, keys.index(1), bias.index(1)
        )  # fmt: skip
    score = warpgroup_mma_wait(0, deps=[score])
    top = gl.full([64], -float("inf"), gl.float32, rows)
    weight = gl.sum(none.reshape([64, 2, 4, 8]), 2)
    top, weight, shrink = _soften(score, scale, bias.index(0), top, weight, share, tops)
    sofar = gl.full([64, 512], 0.0, gl.float32, out_layout)
    a0, a1, a2, a3, a4, a5, a6, rope, scales, hidden = _fetch(slot, tile, in_window, *pools)
    tile += step
    slot = _slots_of(tile, in_window, total, *lists)
    for nth in range(1, mine):
        two = nth & 1
        here = _as(keys.index(two), gl.bfloat16, wide)
        before = _as(keys.index(two ^ 1), gl.bfloat16, wide)
        sofar = warpgroup_mma(share, before, sofar, is_async=True)
        score = warpgroup_mma(queries, here.permute((1, 0)), none, use_acc=False, is_async=True)
        sofar = warpgroup_mma_wait(1, deps=[sofar])
        _unpack(
            a0, a1, a2, a3, a4, a5, a6, rope, scales, hidden,
            keys.index(two ^ 1), bias.index(two ^ 1),
        )  # fmt: skip
        a0, a1, a2, a3, a4, a5, a6, rope, scales, hidden = _fetch(slot, tile, in_window, *pools)
        tile += step
        slot = _slots_of(tile, in_window, total, *lists)
        score = warpgroup_mma_wait(0, deps=[score])
        top, weight, shrink = _soften(score, scale, bias.index(two), top, weight, share, tops)
        sofar = sofar * gl.convert_layout(shrink, out_rows, assert_trivial=True)[:, None]
    last = _as(keys.index(gl.maximum(mine - 1, 0) & 1), gl.bfloat16, wide)
    sofar = warpgroup_mma(share, last, sofar, is_async=True)
    sofar = warpgroup_mma_wait(0, deps=[sofar])

    head = gl.program_id(1) * 64 + gl.arange(0, 64, rows)
    real = head < heads
    weight = gl.convert_layout(gl.sum(gl.sum(weight, 2), 1), rows)
    safe = gl.where(weight > 0, weight, 1.0)
    found = gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))
    if WHOLE:
        held = gl.load(sink + head, mask=real, other=0.0).to(gl.float32)
        mean = 1 / (safe * (1 + gl.exp2((held - found) * LOG2E)))
        first = token * heads
        gl.store(lse + first + head, found, mask=real)
        mean = gl.where(weight > 0, mean, 0.0)
        _write(sofar, mean, keys.index(0), out + first * 512, heads)
    else:
        first = part.to(gl.int64) * rows_a_part + token * heads
        gl.store(part_lse + first + head, found, mask=real)
        if mine > 0:  # what is not written has no weight
            _write(sofar, 1 / safe, keys, parts + first * 512, heads)
