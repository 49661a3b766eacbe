"""Attention to lists of packed V4 records, for one multiprocessor of an H100 or H200 at a time.

Two groups of four warps share 64 heads of one query and, one after the other, tiles of 32 of its
keys.  Each group has half of every key's values, for scores and for sums: it fetches them, unpacks
them, scores them, and the two add up their scores through shared memory, so that both have the
weights, in registers, where the tensor cores take them from.  While one tile is softened the next
is scored, the one after it unpacked, and the one after that on its way.  Half of a group's share of
the queries stays in registers, the other half in shared memory.

Unpacking is integer arithmetic and one product: the bits of an e4m3 code, four places further left,
are those of a bfloat16 that is 2^120 times too small, also where the code has no leading one.  The
row's scale makes good for it.

Queries that are few have their keys shared out among several programs, by ``triton_sparse``'s plan;
what these find is joined by a second launch.  A list costs what it has slots in it, up to its last.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
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
KEYS = gl.constexpr(32)
"""Keys of a tile."""
STAGES = gl.constexpr(4)
"""Tiles that shared memory holds: being softened, scored, unpacked, and one that is let go of."""
REGISTERS = 248
"""Of a thread: as many as two groups of four warps can have."""
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
        num_warps=4,
        maxnreg=REGISTERS,
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
    at = gl.where(first, tile, tile - in_window) * KEYS + gl.arange(
        0, KEYS, gl.SliceLayout(1, WORDS)
    )
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
    or rope values, scales; and what is added to its scores."""
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
def _unpack(a0, a1, a2, a3, scales, hidden, into, bias, HALF: gl.constexpr):
    """Values of half a tile that was fetched, and what is added to its scores."""
    b0 = _beside(_values(a0, scales, 0), _values(a1, scales, 1))
    if HALF == 0:
        b1 = _beside(_values(a2, scales, 2), _values(a3, scales, 3))
    else:
        b1 = _beside(_values(a2, scales, 2), a3)
    into.store(_beside(b0, b1))
    bias.store(hidden)
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
    return gl.join(low, high).reshape([KEYS, 32])


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
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


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
def _write(sofar, share, memory, to, heads, HALF: gl.constexpr):
    """Sums times ``share``, by way of shared memory: in pieces of lines."""
    layout: gl.constexpr = sofar.type.layout
    narrow: gl.constexpr = to.dtype.element_ty.primitive_bitwidth == 16
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if narrow else 4, [1, 0])
    lines: gl.constexpr = gl.BlockedLayout([1, 8 if narrow else 4], [1, 32], [4, 1], [1, 0])
    memory = _as(memory, to.dtype.element_ty, [64, 256], held)
    share = gl.convert_layout(share, gl.SliceLayout(1, layout), assert_trivial=True)
    memory.store((sofar * share[:, None]).to(to.dtype.element_ty))
    head = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, lines))
    at = to + (head * 512)[:, None] + column[None, :]
    gl.store(at, memory.load(lines), mask=(head < heads)[:, None])


@gluon.jit
def _idle():
    pass


@gluon.jit
def _spread(x):
    """(heads, keys) scores as (threads, KEYS / 2): what each thread has lies together."""
    x = x.reshape([4, 2, 8, KEYS // 8, 4, 2]).permute((0, 2, 4, 1, 3, 5))
    return x.reshape([128, KEYS // 2])


@gluon.jit
def _gather(x, layout: gl.constexpr):
    """``_spread`` undone."""
    x = x.reshape([4, 8, 4, 2, KEYS // 8, 2]).permute((0, 3, 1, 4, 2, 5))
    return gl.convert_layout(x.reshape([64, KEYS]), layout, assert_trivial=True)


@gluon.jit
def _score(held, queries, keys, none):
    """A group's part of a tile's scores, on its way: ``held`` are queries in registers."""
    first = keys.slice(0, 128, 1).permute((1, 0))
    second = keys.slice(128, 128, 1).permute((1, 0))
    score = warpgroup_mma(held, first, none, use_acc=False, is_async=True)
    return warpgroup_mma(queries, second, score, is_async=True)


@gluon.jit
def _half(
    query, token_stride, head_stride,
    window, window_stride, window_shift, window_there,
    window_slots, num_window,
    extra, extra_stride, extra_shift, extra_there,
    extra_slots, num_extra,
    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
    keys, queries, bias, mine_out, other_in, mine_ready, mine_free, other_ready, other_free,
    WHOLE: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Half of the values of each key: their part of the scores, and their sums."""
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    share_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    held_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, KEYS // 2], [32, 1], [4, 1], [1, 0])
    token = gl.program_id(0).to(gl.int64)
    part = gl.program_id(2)
    step = gl.num_programs(2)
    lists = (window_slots, num_window, extra_slots, num_extra)
    pools = (
        window, window_stride, window_shift, window_there,
        extra, extra_stride, extra_shift, extra_there,
    )  # fmt: skip
    in_window = gl.cdiv(num_window, KEYS)
    most = in_window + gl.cdiv(num_extra, KEYS)

    slot = _slots_of(part, in_window, most, *lists)
    slot_1 = _slots_of(part + step, in_window, most, *lists)
    head = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    row = (query + token * token_stride + head.to(gl.int64) * head_stride)[:, None]
    column = HALF * 256 + 128 + gl.arange(0, 128, gl.SliceLayout(0, lines))[None, :]
    q = gl.load(row + column, mask=(head < heads)[:, None], other=0.0)
    tile_0 = _fetch(slot, part, in_window, *pools, HALF)
    a0, a1, a2, a3, scales, hidden = _fetch(slot_1, part + step, in_window, *pools, HALF)
    total = in_window + gl.cdiv(_extent(extra_slots, num_extra, extra_there), KEYS)
    mine = gl.cdiv(gl.maximum(total - part, 0), step)
    tile = part + 2 * step
    slot = _slots_of(tile, in_window, total, *lists)
    queries.store(q)
    head = gl.program_id(1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, held_layout))
    row = (query + token * token_stride + head.to(gl.int64) * head_stride)[:, None]
    column = HALF * 256 + gl.arange(0, 128, gl.SliceLayout(0, held_layout))[None, :]
    held = gl.load(row + column, mask=(head < heads)[:, None], other=0.0)
    _unpack(*tile_0, keys.index(0), bias.index(0), HALF)

    none = gl.full([64, KEYS], 0.0, gl.float32, score_layout)
    here = _as(keys.index(0), gl.bfloat16, [KEYS, 256], wide)
    score = _score(held, queries, here, none)
    _unpack(a0, a1, a2, a3, scales, hidden, keys.index(1), bias.index(1), HALF)
    a0, a1, a2, a3, scales, hidden = _fetch(slot, tile, in_window, *pools, HALF)
    tile += step
    slot = _slots_of(tile, in_window, total, *lists)
    top = gl.full([64], -float("inf"), gl.float32, rows)
    weight = gl.full([64], 0.0, gl.float32, rows)
    sofar = gl.full([64, 256], 0.0, gl.float32, out_layout)
    score = warpgroup_mma_wait(0, deps=[score])
    for nth in range(mine):
        turn = nth & 1
        here = _as(keys.index(nth % STAGES), gl.bfloat16, [KEYS, 256], wide)
        ahead = _as(keys.index((nth + 1) % STAGES), gl.bfloat16, [KEYS, 256], wide)
        coming = _score(held, queries, ahead, none)
        mbarrier.wait(mine_free, turn ^ 1)
        mine_out.store(gl.convert_layout(_spread(score), flat, assert_trivial=True))
        mbarrier.arrive(mine_ready, count=1)
        hidden_here = bias.index(nth % STAGES).load(gl.SliceLayout(0, score_layout))
        mbarrier.wait(other_ready, turn)
        score += _gather(other_in.load(flat), score_layout)
        mbarrier.arrive(other_free, count=1)
        score = score * scale + hidden_here[None, :]
        new_top = gl.maximum(top, gl.max(score, 1))
        # A row that has seen nothing yet subtracts 0, not -inf.
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = _exp2(top - base)
        p = _exp2(score - base[:, None])
        weight = weight * shrink + gl.sum(p, 1)
        top = new_top
        share = gl.convert_layout(p.to(gl.bfloat16), share_layout, assert_trivial=True)
        sofar = sofar * gl.convert_layout(shrink, out_rows, assert_trivial=True)[:, None]
        sofar = warpgroup_mma(share, here, sofar, is_async=True)
        _unpack(
            a0, a1, a2, a3, scales, hidden,
            keys.index((nth + 2) % STAGES), bias.index((nth + 2) % STAGES), HALF,
        )  # fmt: skip
        a0, a1, a2, a3, scales, hidden = _fetch(slot, tile, in_window, *pools, HALF)
        tile += step
        slot = _slots_of(tile, in_window, total, *lists)
        score, sofar = warpgroup_mma_wait(0, deps=[coming, sofar])

    head = gl.program_id(1) * 64 + gl.arange(0, 64, rows)
    real = head < heads
    safe = gl.where(weight > 0, weight, 1.0)
    found = gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))
    if WHOLE:
        of_sink = gl.load(sink + head, mask=real, other=0.0).to(gl.float32)
        mean = 1 / (safe * (1 + gl.exp2((of_sink - found) * LOG2E)))
        first = token * heads
        if HALF == 0:
            gl.store(lse + first + head, found, mask=real)
        _write(sofar, gl.where(weight > 0, mean, 0.0), keys, out + first * 512, heads, HALF)
    else:
        first = part.to(gl.int64) * rows_a_part + token * heads
        if HALF == 0:
            gl.store(part_lse + first + head, found, mask=real)
        if mine > 0:  # what is not written has no weight
            _write(sofar, 1 / safe, keys, parts + first * 512, heads, HALF)


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
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    passed: gl.constexpr = gl.SwizzledSharedLayout(4, 64 // KEYS, KEYS // 8, [1, 0])
    left_keys = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, 128], packed)
    right_keys = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, 128], packed)
    left_queries = gl.allocate_shared_memory(gl.bfloat16, [64, 128], wide)
    right_queries = gl.allocate_shared_memory(gl.bfloat16, [64, 128], wide)
    left_bias = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], line)
    right_bias = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], line)
    left_score = gl.allocate_shared_memory(gl.float32, [128, KEYS // 2], passed)
    right_score = gl.allocate_shared_memory(gl.float32, [128, KEYS // 2], passed)
    barriers = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()
    token = gl.program_id(0).to(gl.int64)
    window_slots += token * window_slots_stride
    extra_slots += token * extra_slots_stride
    left_ready = barriers.index(0)
    left_free = barriers.index(1)
    right_ready = barriers.index(2)
    right_free = barriers.index(3)
    gl.warp_specialize(
        [
            (
                _half,
                (
                    query, token_stride, head_stride,
                    window, window_stride, window_shift, window_there,
                    window_slots, num_window,
                    extra, extra_stride, extra_shift, extra_there,
                    extra_slots, num_extra,
                    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
                    left_keys, left_queries, left_bias, left_score, right_score,
                    left_ready, left_free, right_ready, right_free, WHOLE, 0,
                ),
            ),
            (
                _half,
                (
                    query, token_stride, head_stride,
                    window, window_stride, window_shift, window_there,
                    window_slots, num_window,
                    extra, extra_stride, extra_shift, extra_there,
                    extra_slots, num_extra,
                    scale, sink, out, lse, parts, part_lse, rows_a_part, heads,
                    right_keys, right_queries, right_bias, right_score, left_score,
                    right_ready, right_free, left_ready, left_free, WHOLE, 1,
                ),
            ),
        ],
        [4],
        [248],  # REGISTERS
    )  # fmt: skip
