"""Attention to latent rows of 512 + 64 values, for one multiprocessor of an H100 or H200 at a time.

Eight warps share 64 rows of queries and, one after the other, tiles of 64 keys: those that a query
lists, or those of a sequence's pages.  A tile's bytes are fetched into registers while the tile
before it is unpacked, and unpacked into one of two buffers in shared memory while the tensor cores
score the tile before it.  Values of one tile and scores of the next are queued together, so that
only the softmax has the tensor cores wait.  A tile's rope keys are not needed once it is scored:
the weights take their place.

Unpacking is integer arithmetic, a product and a sum: the bits of an e4m3 code, four places further
left, are those of a bfloat16 that is 2^120 times too small, also where the code has no leading one.
A row's scale, which is any float32, makes good for it: as two bfloat16, of which the second is what
the first leaves over, so values are rounded once, as if from float32.

Queries that are few have their keys shared out among several programs; a second launch joins what
these found.  Of pages, the plan is that of ``triton_mla``, which merges too.

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
from kvtier.kernels import triton_mla, triton_mla_sparse
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.records import RECORDS, Record
from kvtier.kernels.triton_mla import LATENT, ROPE
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["TILE", "absorbed", "mla_sparse", "splits_of"]

TILE = 64
"""Rows of queries of a program: heads, or pairs of a token and a head; and keys of a tile."""
MOST_SPLITS = triton_mla_sparse.PARTS
AROUND, JOINING = 1.5, 2.5
"""What a program takes beside its tiles, and what joining parts takes, in tiles."""
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""By triton 3.9."""
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RECORD_WORDS = gl.constexpr(RECORDS["mla_fp8"].slot_bytes // 4)
LIFT = gl.constexpr(2.0**120)
LARGEST = gl.constexpr(255.0)
"""The largest scale, nearly 2^8, that is a bfloat16 together with 2^120."""
SCAN = gl.constexpr(256)
"""Sequences looked at together when the work is cut up."""
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
"""(rows, halves of the keys): rows where the tensor cores have them, and both halves in each."""
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


def mla_sparse(
    query: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    latent_dim: int,
    scale: float,
    record: Record,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.mla_sparse`` for queries in bfloat16 and rows of 512 + 64 values, plain ones
    in bfloat16 or "mla_fp8".

    Rows begin at multiples of 16 bytes.  Scales from 2^8 on are taken as 255: packed rows hold
    values below 114,240.  Weights are rounded to bfloat16 before they meet the values; scores and
    sums are float32.  Asks the device nothing; slots past the pool count as none.  Raises
    ValueError for other queries, rows and pages.
    """
    n, heads, width = query.shape
    if latent_dim != LATENT or width != LATENT + ROPE or slots.shape[0] != n:
        raise ValueError(f"query {tuple(query.shape)}, slots {tuple(slots.shape)}, {latent_dim=}")
    pool = _words_of(query, rows, record)
    query, slots = adjacent(query), adjacent(slots)
    out = torch.empty(n, heads, LATENT, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    if not n or not heads:
        return out, lse
    blocks = triton.cdiv(heads, TILE)
    a_part = n * heads * (LATENT + 1) * 4
    most = parse_bytes(workspace_bytes, "workspace_bytes") // a_part
    tiles = triton.cdiv(slots.shape[1], TILE)
    count = max(1, min(splits_of(n * blocks, tiles, _processors(query.device)), most))
    cut = count > 1
    parts = query.new_empty(count if cut else 0, n, heads, LATENT, dtype=torch.float32)
    part_lse = query.new_empty(count if cut else 0, n, heads, dtype=torch.float32)
    _attend_lists[(n, blocks, count)](
        query,
        *query.stride()[:2],
        *pool,
        slots,
        slots.stride(0),
        slots.shape[1],
        scale * LOG2E.value,
        parts if cut else out,
        part_lse if cut else lse,
        heads,
        PACKED=record.pack is not None,
        TRIM=slots.shape[1] > 4 * TILE,
        num_warps=8,
    )
    if cut:
        triton_mla_sparse.join(parts, part_lse, out, lse)
    return out, lse


def absorbed(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    *,
    latent_dim: int,
    scale: float,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.absorbed`` for pages (pages, page_bytes) uint8 of "mla_fp8" records and
    queries in bfloat16; what ``mla_sparse`` says of rows, sums and the device is true here too.

    Query tokens that belong to no sequence get output 0 and log-sum-exp -inf, as those without
    keys.
    """
    record = RECORDS["mla_fp8"]
    n, heads, width = query.shape
    if latent_dim != LATENT or width != LATENT + ROPE:
        raise ValueError(f"query {tuple(query.shape)}, {latent_dim=}")
    pool = _words_of(query, rows, record)
    if record.slots_of(rows.shape[1]) != batch.page_tokens:
        raise ValueError(f"pages of {rows.shape[1]} bytes, of {batch.page_tokens} tokens")
    query = adjacent(query)
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    grid = triton_mla._grid(batch, heads, _processors(query.device), workspace, fast=True)
    sequences = batch.kv_lens_device.shape[0]
    out = torch.empty(n, heads, LATENT, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    parts = query.new_empty(2 * grid.parts, grid.tiles, grid.tile, LATENT, dtype=torch.float32)
    part_lse = query.new_empty(2 * grid.parts, grid.tiles, grid.tile, dtype=torch.float32)
    by_part = sequences > grid.parts
    plan = query.new_empty(grid.parts if by_part else sequences, 4, dtype=torch.int32)
    if n == 0 or heads == 0:
        return out, lse
    _attend_pages[(grid.tiles, grid.parts)](
        query,
        *query.stride()[:2],
        *pool,
        batch.block_table,
        batch.block_table.stride(0),
        batch.cu_seqlens_q,
        batch.kv_lens_device,
        sequences,
        scale * LOG2E.value,
        out,
        lse,
        parts,
        part_lse,
        plan,
        HEADS=heads,
        BY_PART=by_part,
        num_warps=8,
    )
    lengths = (batch.cu_seqlens_q, batch.kv_lens_device, sequences)
    triton_mla._finish(lengths, out, lse, parts, part_lse, plan, grid)
    return out, lse


def splits_of(units: int, tiles: int, processors: int) -> int:
    """Programs that share a list of so many tiles, where a program fills a multiprocessor: what
    ends soonest for ``units`` queries (or groups of their heads)."""

    def cost(splits: int) -> float:
        joining = JOINING if splits > 1 else 0.0
        return -(-units * splits // processors) * (-(-tiles // splits) + AROUND) + joining

    return min(range(1, max(1, min(MOST_SPLITS, tiles)) + 1), key=cost)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _words_of(query: Tensor, rows: Tensor, record: Record) -> tuple[Tensor, int, int, int]:
    """The pool in words, words from page to page, a page's slots, and slots there are; plain rows
    have pages of one."""
    packed = record.pack is not None
    if query.dtype != torch.bfloat16 or (not packed and rows.dtype != torch.bfloat16):
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    if record.name not in ("dense", "mla_fp8"):
        raise ValueError(f"{record.name!r} records")
    if not packed and rows.shape[-1] != LATENT + ROPE:
        raise ValueError(f"rows of {rows.shape[-1]} values")
    stride, per_page, there = pool_of(rows, record)
    if rows.data_ptr() % 16 or stride * rows.itemsize % 16:
        raise ValueError(
            f"rows or pages {stride * rows.itemsize} bytes apart, at {rows.data_ptr():#x}: they "
            "begin at multiples of 16 bytes"
        )
    return rows.view(torch.int32), stride * rows.itemsize // 4, per_page, there


@gluon.jit
def _slots_of(tile, stop, where, count, per_page, PAGED: gl.constexpr):
    """Slots of a tile's keys, of ``count``; -1 from tile ``stop`` on."""
    at = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, WORDS))
    there = (at < count) & (tile < stop)
    if PAGED:
        page = gl.load(where + at // per_page, mask=there, other=-1)
        return gl.where(page >= 0, page * per_page + at % per_page, -1)
    else:
        return gl.load(where + at, mask=there, other=-1)


@gluon.jit
def _fetch(slot, rows, page_stride, per_page, there, PACKED: gl.constexpr):
    """A tile's bytes, as words in registers: 64 values of each key eight times, rope values,
    scales; and what is added to its scores."""
    seen = (slot >= 0) & (slot < there)
    slot = gl.where(seen, slot, 0).to(gl.int32)
    page = slot // per_page
    row = rows + page.to(gl.int64) * page_stride
    if PACKED:
        row = row + (slot - page * per_page) * RECORD_WORDS
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
        row = gl.convert_layout(row, gl.SliceLayout(1, PAIRS), assert_trivial=True)
        mask = gl.convert_layout(seen, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
        at = row[:, None] + (132 + gl.arange(0, 32, gl.SliceLayout(0, PAIRS)))[None, :]
        rope = gl.load(at, mask=mask, other=0)
    else:
        row = gl.convert_layout(row, gl.SliceLayout(1, PAIRS), assert_trivial=True)
        mask = gl.convert_layout(seen, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
        at = row[:, None] + gl.arange(0, 32, gl.SliceLayout(0, PAIRS))[None, :]
        a0 = gl.load(at, mask=mask, other=0)
        a1 = gl.load(at + 32, mask=mask, other=0)
        a2 = gl.load(at + 64, mask=mask, other=0)
        a3 = gl.load(at + 96, mask=mask, other=0)
        a4 = gl.load(at + 128, mask=mask, other=0)
        a5 = gl.load(at + 160, mask=mask, other=0)
        a6 = gl.load(at + 192, mask=mask, other=0)
        a7 = gl.load(at + 224, mask=mask, other=0)
        rope = gl.load(at + 256, mask=mask, other=0)
        s0 = 0.0
        s1 = 0.0
        s2 = 0.0
        s3 = 0.0
    hidden = gl.where(seen, 0.0, -float("inf"))
    return a0, a1, a2, a3, a4, a5, a6, a7, rope, s0, s1, s2, s3, hidden


@gluon.jit
def _unpack(
    a0, a1, a2, a3, a4, a5, a6, a7, rope, s0, s1, s2, s3, hidden, into, rope_into, bias,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Values of a tile that was fetched, for the tensor cores, and what is added to its scores."""
    if PACKED:
        _store_values(into, 0, a0, a1, s0)
        _store_values(into, 2, a2, a3, s1)
        _store_values(into, 4, a4, a5, s2)
        _store_values(into, 6, a6, a7, s3)
    else:
        into.slice(0, 32, 1).store(a0)
        into.slice(32, 32, 1).store(a1)
        into.slice(64, 32, 1).store(a2)
        into.slice(96, 32, 1).store(a3)
        into.slice(128, 32, 1).store(a4)
        into.slice(160, 32, 1).store(a5)
        into.slice(192, 32, 1).store(a6)
        into.slice(224, 32, 1).store(a7)
    rope_into.store(rope)
    bias.store(hidden)
    fence_async_shared()


@gluon.jit
def _store_values(into, C: gl.constexpr, a, b, scale):
    """128 values of each key, of which each has one scale."""
    factor = gl.minimum(scale, LARGEST) * LIFT
    first, rest = gl.inline_asm_elementwise(
        FACTORS, "=r,=r,f", [factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    first = first[:, None]
    rest = rest[:, None]
    into.slice(32 * C, 32, 1).store(_values(a, first, rest))
    into.slice(32 * C + 32, 32, 1).store(_values(b, first, rest))


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
def _as(memory, kind: gl.constexpr, layout: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory as (64, WIDTH) values of another type."""
    if RENAMED:
        return memory.reinterpret(kind, [64, WIDTH], layout)
    else:  # said for the compiler, which looks at one branch then
        return memory._reinterpret(kind, [64, WIDTH], layout)


@gluon.jit
def _soften(
    score, scale, tile, last, bias, top, weight, share, tops, PAGED: gl.constexpr
):  # fmt: skip
    """Weights of a tile from its scores; the largest score so far, sums of weights, and what older
    sums shrink by.  ``weight`` has a sum for each thread's keys."""
    layout: gl.constexpr = score.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if PAGED:
        key = tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))
        score = gl.where(key[None, :] <= last[:, None], score * scale, -float("inf"))
    else:
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
def _queries(row, real, queries, q_rope):
    """Rows of queries, to shared memory."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    at = gl.convert_layout(row, gl.SliceLayout(1, wide))[:, None]
    mask = gl.convert_layout(real, gl.SliceLayout(1, wide))[:, None]
    q = gl.load(at + gl.arange(0, 512, gl.SliceLayout(0, wide))[None, :], mask=mask, other=0.0)
    at = gl.convert_layout(row, gl.SliceLayout(1, narrow))[:, None]
    mask = gl.convert_layout(real, gl.SliceLayout(1, narrow))[:, None]
    column = 512 + gl.arange(0, 64, gl.SliceLayout(0, narrow))
    r = gl.load(at + column[None, :], mask=mask, other=0.0)
    queries.store(q)
    q_rope.store(r)


@gluon.jit
def _memory():
    """Two buffers of keys, of rope keys, queries, rope queries, and two of small things."""
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    halves: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    keys = gl.allocate_shared_memory(gl.int32, [2, 64, 256], words)
    rope = gl.allocate_shared_memory(gl.int32, [2, 64, 32], words)
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], halves)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], halves)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tops = gl.allocate_shared_memory(gl.float32, [64, 2], plain)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return keys, rope, queries, q_rope, tops, bias


@gluon.jit
def _score(queries, q_rope, keys, rope, none):
    """Scores of a tile, under way."""
    halves: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k = _as(keys, gl.bfloat16, halves, 512).permute((1, 0))
    k_rope = _as(rope, gl.bfloat16, halves, 64).permute((1, 0))
    score = warpgroup_mma(q_rope, k_rope, none, use_acc=False, is_async=True)
    return warpgroup_mma(queries, k, score, is_async=True)


@gluon.jit
def _course(
    row, real, last, keys, rope, queries, q_rope, tops, bias,
    rows, page_stride, per_page, there, where, count, tile, step, stop, scale,
    PACKED: gl.constexpr, PAGED: gl.constexpr, TRIM: gl.constexpr,
):  # fmt: skip
    """Queries against each ``step``-th tile from ``tile`` to ``stop``: largest scores, sums of
    weights by thread, sums of values, and how many tiles there were."""
    halves: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    score_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    # Everything that the first two tiles need is under way before anything is waited for.
    slot = _slots_of(tile, stop, where, count, per_page, PAGED)
    slot_1 = _slots_of(tile + step, stop, where, count, per_page, PAGED)
    tile_0 = _fetch(slot, rows, page_stride, per_page, there, PACKED)
    _queries(row, real, queries, q_rope)
    a0, a1, a2, a3, a4, a5, a6, a7, ar, s0, s1, s2, s3, hidden = _fetch(
        slot_1, rows, page_stride, per_page, there, PACKED
    )
    if TRIM:
        stop = gl.cdiv(_extent(where, count, there), 64)
    mine = gl.cdiv(gl.maximum(stop - tile, 0), step)
    scored = tile
    tile += 2 * step
    slot = _slots_of(tile, stop, where, count, per_page, PAGED)
    _unpack(*tile_0, keys.index(0), rope.index(0), bias.index(0), PACKED)

    none = gl.full([64, 64], 0.0, gl.float32, score_layout)
    score = _score(queries, q_rope, keys.index(0), rope.index(0), none)
    if mine > 1:
        _unpack(
            a0, a1, a2, a3, a4, a5, a6, a7, ar, s0, s1, s2, s3, hidden,
            keys.index(1), rope.index(1), bias.index(1), PACKED,
        )  # fmt: skip
    score = warpgroup_mma_wait(0, deps=[score])
    top = gl.full([64], -float("inf"), gl.float32, score_rows)
    weight = gl.sum(none.reshape([64, 2, 4, 8]), 2)
    share = _as(rope.index(0), gl.bfloat16, halves, 64)
    top, weight, shrink = _soften(
        score, scale, scored, last, bias.index(0), top, weight, share, tops, PAGED
    )
    sofar = gl.full([64, 512], 0.0, gl.float32, out_layout)
    a0, a1, a2, a3, a4, a5, a6, a7, ar, s0, s1, s2, s3, hidden = _fetch(
        slot, rows, page_stride, per_page, there, PACKED
    )
    tile += step
    slot = _slots_of(tile, stop, where, count, per_page, PAGED)
    for nth in range(1, mine):
        two = nth & 1
        before = _as(keys.index(two ^ 1), gl.bfloat16, halves, 512)
        share = _as(rope.index(two ^ 1), gl.bfloat16, halves, 64)
        sofar = warpgroup_mma(share, before, sofar, is_async=True)
        score = _score(queries, q_rope, keys.index(two), rope.index(two), none)
        sofar = warpgroup_mma_wait(2, deps=[sofar])
        _unpack(
            a0, a1, a2, a3, a4, a5, a6, a7, ar, s0, s1, s2, s3, hidden,
            keys.index(two ^ 1), rope.index(two ^ 1), bias.index(two ^ 1), PACKED,
        )  # fmt: skip
        a0, a1, a2, a3, a4, a5, a6, a7, ar, s0, s1, s2, s3, hidden = _fetch(
            slot, rows, page_stride, per_page, there, PACKED
        )
        tile += step
        slot = _slots_of(tile, stop, where, count, per_page, PAGED)
        score = warpgroup_mma_wait(0, deps=[score])
        scored += step
        share = _as(rope.index(two), gl.bfloat16, halves, 64)
        top, weight, shrink = _soften(
            score, scale, scored, last, bias.index(two), top, weight, share, tops, PAGED
        )
        sofar = sofar * gl.convert_layout(shrink, out_rows, assert_trivial=True)[:, None]
    final = gl.maximum(mine - 1, 0) & 1
    share = _as(rope.index(final), gl.bfloat16, halves, 64)
    sofar = warpgroup_mma(
        share, _as(keys.index(final), gl.bfloat16, halves, 512), sofar, is_async=True
    )
    sofar = warpgroup_mma_wait(0, deps=[sofar])
    return top, weight, sofar, mine


@gluon.jit
def _found(top, weight):
    """Sums of weights that may be divided by, and log-sum-exps."""
    weight = gl.convert_layout(gl.sum(gl.sum(weight, 2), 1), top.type.layout)
    safe = gl.where(weight > 0, weight, 1.0)
    return safe, gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))


@gluon.jit
def _write(sofar, safe, memory, to, count):
    """Sums over ``safe``, by way of shared memory, to ``count`` rows: in pieces of lines."""
    layout: gl.constexpr = sofar.type.layout
    narrow: gl.constexpr = to.dtype.element_ty.primitive_bitwidth == 16
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if narrow else 4, [1, 0])
    lines: gl.constexpr = gl.BlockedLayout([1, 8 if narrow else 4], [1, 32], [8, 1], [1, 0])
    memory = _as(memory, to.dtype.element_ty, held, 512)
    share = gl.convert_layout(1 / safe, gl.SliceLayout(1, layout), assert_trivial=True)
    memory.store((sofar * share[:, None]).to(to.dtype.element_ty))
    row = gl.arange(0, 64, gl.SliceLayout(1, lines))
    column = gl.arange(0, 512, gl.SliceLayout(0, lines))
    at = to + (row * 512)[:, None] + column[None, :]
    gl.store(at, memory.load(lines), mask=(row < count)[:, None])


@gluon.jit(
    do_not_specialize=["per_page", "there", "slots_stride", "count", "scale"],
    do_not_specialize_on_alignment=["slots"],
)
def _attend_lists(
    query, token_stride, head_stride, rows, page_stride, per_page, there, slots, slots_stride,
    count, scale, out, lse, heads, PACKED: gl.constexpr, TRIM: gl.constexpr,
):  # fmt: skip
    """Up to 64 heads of one query against every so manieth tile of its list."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    keys, rope, queries, q_rope, tops, bias = _memory()
    token = gl.program_id(0).to(gl.int64)
    low = gl.program_id(1) * 64
    head = low + gl.arange(0, 64, gl.SliceLayout(1, lines))
    row = query + token * token_stride + head.to(gl.int64) * head_stride
    top, weight, sofar, mine = _course(
        row, head < heads, 0, keys, rope, queries, q_rope, tops, bias,
        rows, page_stride, per_page, there, slots + token * slots_stride, count,
        gl.program_id(2), gl.num_programs(2), gl.cdiv(count, 64), scale, PACKED, False, TRIM,
    )  # fmt: skip
    safe, found = _found(top, weight)
    first = (gl.program_id(2).to(gl.int64) * gl.num_programs(0) + token) * heads + low
    head = gl.arange(0, 64, top.type.layout)
    gl.store(lse + first + head, found, mask=low + head < heads)
    narrow: gl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    if narrow:
        _write(sofar, safe, keys.index(0), out + first * 512, heads - low)
    elif mine > 0:  # what is not written has no weight
        _write(sofar, safe, keys, out + first * 512, heads - low)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cut(lengths, sequences):
    """This part's first block and the one behind its last, blocks of a part, the sequence that it
    starts in and the block that this begins with."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
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
def _attend_pages(
    query, token_stride, head_stride, rows, page_stride, per_page, there, table, table_stride,
    offsets, lengths, sequences, scale, out, lse, parts, part_lse, plan,
    HEADS: gl.constexpr, BY_PART: gl.constexpr,
):  # fmt: skip
    """One part of the keys, for one tile of each sequence's (token, head) pairs."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    keys, rope, queries, q_rope, tops, bias = _memory()
    at, stop, quota, b, begin = _cut(lengths, sequences)
    tiles = gl.num_programs(0)
    part = gl.program_id(1)
    low_pair = gl.program_id(0) * 64
    if BY_PART & (gl.program_id(0) == 0):
        gl.store(plan + 4 * part, -1)
    while at < stop:
        kv_len = gl.load(lengths + b)
        first = gl.load(offsets + b)
        q_len = gl.load(offsets + b + 1) - first
        count = gl.cdiv(kv_len, 64)
        low = at - begin
        high = gl.minimum(count, stop - begin)
        pairs = q_len * HEADS - low_pair
        pair = low_pair + gl.arange(0, 64, gl.SliceLayout(1, lines))
        row = query + (first + pair // HEADS).to(gl.int64) * token_stride
        row = row + (pair % HEADS).to(gl.int64) * head_stride
        in_tile = gl.arange(0, 64, gl.SliceLayout(1, score_layout))
        last = kv_len - q_len + (low_pair + in_tile) // HEADS
        last = gl.where(in_tile < pairs, last, -1)
        top, weight, sofar, _ = _course(
            row, pair < q_len * HEADS, last, keys, rope, queries, q_rope, tops, bias,
            rows, page_stride, per_page, there, table + b.to(gl.int64) * table_stride, kv_len,
            low, 1, high, scale, True, True, False,
        )  # fmt: skip
        safe, found = _found(top, weight)
        if (low == 0) & (high == count):
            to = first.to(gl.int64) * HEADS + low_pair
            gl.store(lse + to + in_tile, found, mask=in_tile < pairs)
            _write(sofar, safe, keys.index(0), out + to * 512, pairs)
        else:
            slot = (part * 2 + (low == 0).to(gl.int32)) * tiles + gl.program_id(0)
            gl.store(part_lse + slot * 64 + in_tile, found, mask=in_tile < pairs)
            _write(sofar, safe, keys, parts + slot.to(gl.int64) * (64 * 512), pairs)
        if (gl.program_id(0) == 0) & (low == 0):
            goes_on = high < count
            if goes_on | (not BY_PART):
                to_plan = plan + 4 * (part if BY_PART else b)
                gl.store(to_plan, gl.where(goes_on, part, -1))
                gl.store(to_plan + 1, (begin + count - 1) // quota)
                gl.store(to_plan + 2, first)
                gl.store(to_plan + 3, q_len)
        at = begin + high
        begin += count
        b += 1
