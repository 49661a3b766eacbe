"""Materialised attention in chunks on an H100 or H200: tiles of 128 queries, half of them for each
of two groups of four warps.

A group scores the next block of keys while it sums up the values of the one before, so that a
softmax runs beside products; a third group does nothing but fetch.  Blocks are met from the last to
the first: those that need a mask come first, and the loop over the others has none.

Tiles, what they are to meet, and how rows come into the workspace are those of ``triton_prefill``,
which also attends with tiles of fewer queries.
"""

import math

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

from kvtier.kernels import triton_prefill
from kvtier.kernels.gluon_parts import LN2, LOG2E, barriers
from kvtier.kernels.mla import HeadDims, PagedBatch
from kvtier.kernels.prefill import DENSE, Project, Results, Workspace
from kvtier.kernels.prefill_plan import Chunk, PrefillPlan
from kvtier.kernels.records import Record

__all__ = ["materialised"]

TILE = 128
"""Queries of a program."""
KEYS, STAGES = 128, 2
"""Keys of a block, 64 or 128, and blocks in shared memory."""
HEADS_AT_ONCE = 16
"""Tiles of so many heads begin by length, before those of other heads: the shorter ones fill up
what the longer ones leave, and tiles of a head that run together share keys in the L2 cache."""


def materialised(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    project: Project,
    *,
    dims: HeadDims,
    scale: float,
    workspace: Workspace,
    record: Record = DENSE,
) -> tuple[Tensor, Tensor]:
    """As of ``triton_prefill``, for bfloat16 and float16, 128 columns of keys without position and
    of values, 64 with, and latents of 512."""
    return triton_prefill.chunked(
        query, rows, batch, project, dims, scale, workspace, record, _meet
    )


def _meet(
    query: Tensor,
    plan: PrefillPlan,
    chunk: Chunk,
    workspace: Workspace,
    dims: HeadDims,
    scale: float,
    results: Results,
) -> None:
    # Of scores that a negative scale turns round the largest is another.
    if plan.tile != TILE or scale <= 0:
        triton_prefill.meet(query, plan, chunk, workspace, dims, scale, results)
        return
    _, tiles = plan.tables(chunk, query.device)
    kind = gl.bfloat16 if query.dtype == torch.bfloat16 else gl.float16
    up, latent = (
        TensorDescriptor(
            rows,
            list(rows.shape),
            list(rows.stride()),
            [KEYS, width],
            gl.NVMMASharedLayout.get_default_for([KEYS, width], kind),
        )
        for rows, width in ((workspace.projected.flatten(1), 128), (workspace.latent, 64))
    )
    _attend[(len(chunk.tiles) * dims.heads,)](
        query,
        *query.stride()[:2],
        latent,
        up,
        tiles,
        results.out,
        results.lse,
        results.carry,
        results.carry_lse,
        scale * LOG2E.value,
        HEADS=dims.heads,
        HEADS_AT_ONCE=math.gcd(dims.heads, HEADS_AT_ONCE),
        KEYS=KEYS,
        STAGES=STAGES,
        num_warps=4,
    )


@gluon.jit
def _extent(at, KEYS: gl.constexpr):
    """Of a tile: blocks, how many of these need no mask, keys that its last query sees, and the
    span's first row in the workspace."""
    count = gl.load(at + 1)
    position = gl.load(at + 2)
    keys = gl.load(at + 4)
    key_position = gl.load(at + 5)
    seen = gl.minimum(position + count - key_position, keys)
    common = gl.minimum(gl.maximum(position + 1 - key_position, 0), keys) // KEYS
    return gl.cdiv(seen, KEYS), common, seen, gl.load(at + 3)


@gluon.jit
def _fetch(
    latent, up, at, head, k_smem, r_smem, v_smem, k_ready, v_ready, k_free, v_free,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys of every block, from the last, each followed by the values of the block before."""
    blocks, _, _, key = _extent(at, KEYS)
    column = head * 256
    for i in range(blocks + 1):
        if i < blocks:
            row = key + (blocks - 1 - i) * KEYS
            slot = i % STAGES
            mbarrier.wait(k_free.index(slot), ((i // STAGES) & 1) ^ 1)
            ready = k_ready.index(slot)
            mbarrier.expect(ready, KEYS * 384)
            tma.async_copy_global_to_shared(up, [row, column], ready, k_smem.index(slot))
            tma.async_copy_global_to_shared(latent, [row, 512], ready, r_smem.index(slot))
        if i > 0:
            n = i - 1
            row = key + (blocks - 1 - n) * KEYS
            slot = n % STAGES
            mbarrier.wait(v_free.index(slot), ((n // STAGES) & 1) ^ 1)
            ready = v_ready.index(slot)
            mbarrier.expect(ready, KEYS * 256)
            tma.async_copy_global_to_shared(up, [row, column + 128], ready, v_smem.index(slot))


@gluon.jit
def _score(q_smem, qr_smem, k, r, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    score = gl.full([64, KEYS], 0.0, gl.float32, LAYOUT)
    score = warpgroup_mma(q_smem, k.permute((1, 0)), score, use_acc=False, is_async=True)
    return warpgroup_mma(qr_smem, r.permute((1, 0)), score, is_async=True)


@gluon.jit
def _soften(
    score, block, seen, last, scale, top, weight,
    KEYS: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of a block's keys, the largest score so far, the sum of weights, and by what sums so
    far shrink."""
    if MASKED:
        j = block * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        score = gl.where((j[None, :] <= last[:, None]) & (j < seen)[None, :], score, -float("inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    base = new_top
    if MASKED:  # a row that has seen nothing yet subtracts 0, not -inf
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
    shrink = gl.exp2(top - base)
    share = gl.exp2(score * scale - base[:, None])
    weight = weight * shrink + gl.sum(share, 1)
    return share, new_top, weight, shrink


@gluon.jit
def _step(
    i, block, share, shrink, seen, last, scale, top, weight, sofar,
    q_smem, qr_smem, k_smem, r_smem, v_smem, k_ready, v_ready, k_free, v_free,
    KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    SCORE: gl.constexpr, SUM: gl.constexpr,
):  # fmt: skip
    """Scores of block ``i`` in order of fetching, beside the sums of the one before."""
    slot = i % STAGES
    was = (i - 1) % STAGES
    sofar = sofar * gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None]
    # Nothing may be waited for between two products: the assembler would let them run in turn.
    mbarrier.wait(k_ready.index(slot), (i // STAGES) & 1)
    mbarrier.wait(v_ready.index(was), ((i - 1) // STAGES) & 1)
    score = _score(q_smem, qr_smem, k_smem.index(slot), r_smem.index(slot), KEYS, SCORE)
    sofar = warpgroup_mma(share, v_smem.index(was), sofar, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(k_free.index(slot), count=1)
    soft, top, weight, shrink = _soften(
        score, block, seen, last, scale, top, weight, KEYS, MASKED, SCORE
    )
    sofar, share = warpgroup_mma_wait(0, deps=[sofar, share])
    mbarrier.arrive(v_free.index(was), count=1)
    share = gl.convert_layout(soft.to(v_smem.dtype), gl.DotOperandLayout(0, SUM, 2))
    return share, shrink, top, weight, sofar


@gluon.jit
def _attend_half(
    query, token_stride, head_stride, at, head, out, lse, carry, carry_lse, scale,
    q_smem, qr_smem, k_smem, r_smem, v_smem, k_ready, v_ready, k_free, v_free, clean,
    HALF: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries of a tile, with one head."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.load(at).to(gl.int64)
    count = gl.load(at + 1)
    q_i = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, Q))
    row = query + ((token + q_i) * token_stride + head * head_stride)[:, None]
    d64 = gl.arange(0, 64, gl.SliceLayout(0, Q))[None, :]
    d128 = gl.arange(0, 128, gl.SliceLayout(0, Q))[None, :]
    there = (q_i < count)[:, None]
    q_smem.store(gl.load(row + d128, mask=there, other=0.0))
    qr_smem.store(gl.load(row + (128 + d64), mask=there, other=0.0))
    fence_async_shared()
    blocks, common, seen, _ = _extent(at, KEYS)
    state = gl.load(at + 7)
    kept = gl.load(at + 6).to(gl.int64)
    i = HALF * 64 + gl.arange(0, 64, SCORE_ROW)
    last = gl.load(at + 2) - gl.load(at + 5) + i
    o_i = HALF * 64 + gl.arange(0, 64, SUM_ROW)
    v = gl.arange(0, 128, gl.SliceLayout(0, SUM))[None, :]
    top = gl.full([64], -float("inf"), gl.float32, SCORE_ROW)
    weight = gl.full([64], 0.0, gl.float32, SCORE_ROW)
    sofar = gl.full([64, 128], 0.0, gl.float32, SUM)
    goes_on = state % 2 == 1
    if goes_on:
        before = gl.load(carry_lse + (kept + i) * HEADS + head, mask=i < count, other=-float("inf"))
        some = (before > -float("inf")) & (before < float("inf"))
        top = gl.where(some, before * LOG2E, -float("inf"))
        weight = some.to(gl.float32)
        held = ((kept + o_i) * HEADS + head)[:, None] * 128 + v
        inside = gl.convert_layout(some, SUM_ROW)[:, None]
        sofar = gl.load(carry + held, mask=inside, other=0.0)
    # The first block, which has none before it.
    mbarrier.wait(k_ready.index(0), 0)
    score = _score(q_smem, qr_smem, k_smem.index(0), r_smem.index(0), KEYS, SCORE)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(k_free.index(0), count=1)
    soft, top, weight, shrink = _soften(
        score, blocks - 1, seen, last, scale, top, weight, KEYS, True, SCORE
    )
    share = gl.convert_layout(soft.to(v_smem.dtype), gl.DotOperandLayout(0, SUM, 2))
    if seen % KEYS != 0:
        if HALF == 0:
            mbarrier.wait(v_ready.index(0), 0)
            _clear(v_smem.index(0), seen % KEYS, KEYS)
            mbarrier.arrive(clean, count=1)
        else:
            mbarrier.wait(clean, 0)
    masked = gl.maximum(blocks - common, 1)
    for n in range(1, masked):
        share, shrink, top, weight, sofar = _step(
            n, blocks - 1 - n, share, shrink, seen, last, scale, top, weight, sofar,
            q_smem, qr_smem, k_smem, r_smem, v_smem, k_ready, v_ready, k_free, v_free,
            KEYS, STAGES, True, SCORE, SUM,
        )  # fmt: skip
    for n in range(masked, blocks):
        share, shrink, top, weight, sofar = _step(
            n, blocks - 1 - n, share, shrink, seen, last, scale, top, weight, sofar,
            q_smem, qr_smem, k_smem, r_smem, v_smem, k_ready, v_ready, k_free, v_free,
            KEYS, STAGES, False, SCORE, SUM,
        )  # fmt: skip
    was = (blocks - 1) % STAGES
    sofar = sofar * gl.convert_layout(shrink, SUM_ROW)[:, None]
    mbarrier.wait(v_ready.index(was), ((blocks - 1) // STAGES) & 1)
    sofar = warpgroup_mma(share, v_smem.index(was), sofar, is_async=True)
    sofar = warpgroup_mma_wait(0, deps=[sofar])
    safe = gl.where(weight > 0, weight, 1.0)
    found = gl.where(weight > 0, (top + gl.log2(safe)) * LN2, -float("inf"))
    if goes_on:
        # A query that lies in front of the span keeps what it had, bit for bit.
        before = gl.load(carry_lse + (kept + i) * HEADS + head, mask=i < count, other=-float("inf"))
        before = gl.where(before == float("inf"), -float("inf"), before)
        found = gl.where(last < 0, before, found)
    sofar = sofar / gl.convert_layout(safe, SUM_ROW)[:, None]
    real = (o_i < count)[:, None]
    if state >= 2:
        to = (token + o_i) * HEADS + head
        gl.store(out + to[:, None] * 128 + v, sofar.to(out.dtype.element_ty), mask=real)
        gl.store(lse + (token + i) * HEADS + head, found, mask=i < count)
    else:
        gl.store(carry + ((kept + o_i) * HEADS + head)[:, None] * 128 + v, sofar, mask=real)
        gl.store(carry_lse + (kept + i) * HEADS + head, found, mask=i < count)


@gluon.jit
def _clear(values, rows, KEYS: gl.constexpr):
    """Zeroes behind the first ``rows`` rows: a weight of 0 does not cancel NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    for i in gl.static_range(4):
        part = values.slice(i * 32, 32, 1)
        part.store(gl.where((row < rows)[:, None], part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["tiles"])
def _attend(
    query, token_stride, head_stride, latent, up, tiles, out, lse, carry, carry_lse, scale,
    HEADS: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One head of one tile of queries."""
    in_turn = gl.num_programs(0) // HEADS * HEADS_AT_ONCE
    at = tiles + 8 * (gl.program_id(0) % in_turn // HEADS_AT_ONCE)
    head = gl.program_id(0) // in_turn * HEADS_AT_ONCE + gl.program_id(0) % HEADS_AT_ONCE
    dtype: gl.constexpr = up.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, 128], up.layout)
    qr_smem = gl.allocate_shared_memory(dtype, [2, 64, 64], latent.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 128], up.layout)
    r_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 64], latent.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 128], up.layout)
    k_ready = barriers(STAGES, 1)
    v_ready = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    clean = barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend_half,
                (
                    query, token_stride, head_stride, at, head, out, lse, carry, carry_lse, scale,
                    q_smem.index(0), qr_smem.index(0), k_smem, r_smem, v_smem,
                    k_ready, v_ready, k_free, v_free, clean.index(0),
                    0, HEADS, KEYS, STAGES,
                ),
            ),
            (
                _attend_half,
                (
                    query, token_stride, head_stride, at, head, out, lse, carry, carry_lse, scale,
                    q_smem.index(1), qr_smem.index(1), k_smem, r_smem, v_smem,
                    k_ready, v_ready, k_free, v_free, clean.index(0),
                    1, HEADS, KEYS, STAGES,
                ),
            ),
            (
                _fetch,
                (
                    latent, up, at, head, k_smem, r_smem, v_smem,
                    k_ready, v_ready, k_free, v_free, KEYS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
