"""Materialised attention in chunks, in triton: gathering rows, and tiles that attend to a chunk.

One program attends a tile of a sequence's queries, with one head, to the part of its keys that the
workspace holds.  It starts from what earlier chunks left of that tile, so that nothing has to be
merged afterwards, and writes results in the queries' type once the sequence's last key was met.
Rope keys are one for all heads: scores are products of the parts with and without position, and
keys are never joined.

Which tiles there are, and what each is to meet, the host has planned (``prefill_plan``).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.mla import HeadDims, PagedBatch
from kvtier.kernels.prefill import DENSE, Meet, Project, Results, Workspace, run_chunks
from kvtier.kernels.prefill_plan import Chunk, PrefillPlan
from kvtier.kernels.records import RECORDS, Record
from kvtier.kernels.triton_mla import LN2, LOG2E
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["chunked", "materialised", "meet"]

GATHERED = 16
"""Rows that one program fetches."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a tile meets keys."""

    keys: int
    """At a time."""
    warps: int
    stages: int


SHAPES = {16: Shape(64, 4, 3), 64: Shape(64, 4, 3), 128: Shape(64, 8, 3)}
"""By queries of a tile.  Chosen from what a compiler says of them."""


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
    """``kvtier.kernels.materialised`` for queries in bfloat16, float16 or float32, and rows of the
    same type or pages of "mla_fp8" records.

    Scores and sums are float32; weights are rounded to the queries' type before they meet the
    values.  A row whose page is missing from the block table comes out as NaN.  Raises ValueError
    for other types.
    """
    return chunked(query, rows, batch, project, dims, scale, workspace, record, meet)


def chunked(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    project: Project,
    dims: HeadDims,
    scale: float,
    workspace: Workspace,
    record: Record,
    meet: Meet,
) -> tuple[Tensor, Tensor]:
    """``materialised``, by another way of attending to a chunk."""
    if record.planes and record is not RECORDS["mla_fp8"]:
        raise ValueError(f"rows of {record.name!r} records have no latent")
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32) or (
        not record.planes and rows.dtype != query.dtype
    ):
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    query = adjacent(query)
    return run_chunks(query, rows, batch, project, dims, scale, workspace, record, _gather, meet)


def _gather(
    rows: Tensor,
    batch: PagedBatch,
    plan: PrefillPlan,
    chunk: Chunk,
    record: Record,
    workspace: Workspace,
) -> None:
    packed = bool(record.planes)
    spans, _ = plan.tables(chunk, rows.device)
    width = workspace.latent.shape[1]
    page_stride = pool_of(rows, record)[0] * (1 if packed else batch.page_tokens)
    latent = 512 if packed else width
    _gather_rows[(triton.cdiv(chunk.rows, GATHERED),)](
        rows,
        page_stride,
        record.slot_bytes if packed else rows.stride(0),
        batch.block_table,
        batch.block_table.stride(0),
        batch.page_tokens,
        spans,
        len(chunk.spans),
        workspace.latent,
        chunk.rows,
        WIDTH=width,
        LATENT=latent,
        BLOCK=triton.next_power_of_2(latent),
        ROWS=GATHERED,
        PACKED=packed,
        num_warps=4,
    )


def meet(
    query: Tensor,
    plan: PrefillPlan,
    chunk: Chunk,
    workspace: Workspace,
    dims: HeadDims,
    scale: float,
    results: Results,
) -> None:
    """Lets a chunk's tiles attend to what the workspace holds: one launch."""
    _, tiles = plan.tables(chunk, query.device)
    shape = SHAPES[plan.tile]
    _attend[(len(chunk.tiles), dims.heads)](
        query,
        *query.stride()[:2],
        workspace.latent,
        workspace.projected,
        tiles,
        results.out,
        results.lse,
        results.carry,
        results.carry_lse,
        scale * LOG2E.value,
        HEADS=dims.heads,
        LATENT=dims.latent,
        NOPE=dims.nope,
        ROPE=dims.rope,
        VALUE=dims.value,
        NOPE_BLOCK=_block(dims.nope),
        ROPE_BLOCK=_block(dims.rope),
        VALUE_BLOCK=_block(dims.value),
        TILE=plan.tile,
        KEYS=shape.keys,
        ON_GPU=query.is_cuda,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def _block(width: int) -> int:
    """Columns of a product, of which it takes no fewer."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit(
    do_not_specialize=["table_stride", "count", "total"],
    do_not_specialize_on_alignment=["table", "spans"],
)
def _gather_rows(
    rows, page_stride, row_stride, table, table_stride, page_tokens, spans, count, out, total,
    WIDTH: tl.constexpr, LATENT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Some rows of a chunk, each from where its page is."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = r < total
    which = tl.zeros([ROWS], tl.int32) - 1
    low = 0 * count
    while low < count:
        j = low + tl.arange(0, 128)
        first = tl.load(spans + 3 * j + 2, mask=j < count, other=0x7FFFFFFF)
        which += tl.sum((first[None, :] <= r[:, None]).to(tl.int32), 1)
        low += 128
    sequence = tl.load(spans + 3 * which, mask=real, other=0)
    start = tl.load(spans + 3 * which + 1, mask=real, other=0)
    position = start + r - tl.load(spans + 3 * which + 2, mask=real, other=0)
    pages = table + sequence.to(tl.int64) * table_stride
    page = tl.load(pages + position // page_tokens, mask=real, other=-1).to(tl.int64)
    known = (real & (page >= 0))[:, None]
    row = rows + (page * page_stride + position % page_tokens * row_stride)[:, None]
    to = out + r.to(tl.int64)[:, None] * WIDTH
    c = tl.arange(0, BLOCK)[None, :]
    if PACKED:
        codes = tl.load(row + c, mask=known, other=0x7F).to(tl.float8e4nv, bitcast=True)
        scales = (row + LATENT).to(tl.pointer_type(tl.float32)) + c // 128
        values = codes.to(tl.float32) * tl.load(scales, mask=known, other=float("nan"))
        tl.store(to + c, values.to(out.dtype.element_ty), mask=real[:, None])
        rope = (row + LATENT + 16).to(tl.pointer_type(tl.bfloat16))
        at = tl.arange(0, 64)[None, :]
        turned = tl.load(rope + at, mask=known, other=float("nan"))
        tl.store(to + LATENT + at, turned.to(out.dtype.element_ty), mask=real[:, None])
    else:
        wide = c < WIDTH
        values = tl.load(row + c, mask=known & wide, other=float("nan"))
        tl.store(to + c, values, mask=real[:, None] & wide)


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["tiles"])
def _attend(
    query, token_stride, head_stride, latent, projected, tiles, out, lse, carry, carry_lse, scale,
    HEADS: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One head of one tile of queries."""
    at = tiles + 8 * tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(at).to(tl.int64)
    count = tl.load(at + 1)
    position = tl.load(at + 2)
    key = tl.load(at + 3).to(tl.int64)
    keys = tl.load(at + 4)
    key_position = tl.load(at + 5)
    kept = tl.load(at + 6).to(tl.int64)
    state = tl.load(at + 7)
    i = tl.arange(0, TILE)
    real = i < count
    p = tl.arange(0, NOPE_BLOCK)
    r = tl.arange(0, ROPE_BLOCK)
    v = tl.arange(0, VALUE_BLOCK)
    row = query + (token + i)[:, None] * token_stride + head * head_stride
    q = tl.load(row + p[None, :], mask=real[:, None] & (p < NOPE)[None, :], other=0.0)
    q_rope = tl.load(row + NOPE + r[None, :], mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    top = tl.full([TILE], -float("inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    sofar = tl.zeros([TILE, VALUE_BLOCK], tl.float32)
    before = tl.full([TILE], -float("inf"), tl.float32)
    held = (kept + i) * HEADS + head
    goes_on = state % 2 == 1
    if goes_on:
        before = tl.load(carry_lse + held, mask=real, other=-float("inf"))
        before = tl.where(before == float("inf"), -float("inf"), before)
        some = before > -float("inf")
        top = before * LOG2E
        weight = some.to(tl.float32)
        inside = some[:, None] & (v < VALUE)[None, :]
        sofar = tl.load(carry + held[:, None] * VALUE + v[None, :], mask=inside, other=0.0)
    # Of the span: keys that every query of the tile sees, and those that any does.
    common = tl.minimum(tl.maximum(position + 1 - key_position, 0), keys) // KEYS
    seen = tl.minimum(position + count - key_position, keys)
    last = position - key_position + i
    k_row = projected + (key * HEADS + head) * (NOPE + VALUE)
    k_rope_row = latent + key * (LATENT + ROPE) + LATENT
    pool = (q, q_rope, k_row, k_rope_row, seen, last, scale)
    if ON_GPU:
        for block in range(0, common):
            top, weight, sofar = _block_of_keys(
                *pool, block, top, weight, sofar, HEADS, LATENT, NOPE, ROPE, VALUE,
                NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, KEYS, False, ON_GPU,
            )  # fmt: skip
        for block in range(common, tl.cdiv(seen, KEYS)):
            top, weight, sofar = _block_of_keys(
                *pool, block, top, weight, sofar, HEADS, LATENT, NOPE, ROPE, VALUE,
                NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, KEYS, True, ON_GPU,
            )  # fmt: skip
    else:  # the interpreter counts up to no tensor
        block = 0 * common
        while block < common:
            top, weight, sofar = _block_of_keys(
                *pool, block, top, weight, sofar, HEADS, LATENT, NOPE, ROPE, VALUE,
                NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, KEYS, False, ON_GPU,
            )  # fmt: skip
            block += 1
        while block < tl.cdiv(seen, KEYS):
            top, weight, sofar = _block_of_keys(
                *pool, block, top, weight, sofar, HEADS, LATENT, NOPE, ROPE, VALUE,
                NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, KEYS, True, ON_GPU,
            )  # fmt: skip
            block += 1
    safe = tl.where(weight > 0, weight, 1.0)
    result = sofar / safe[:, None]
    found = tl.where(weight > 0, (top + tl.log2(safe)) * LN2, -float("inf"))
    # A query that lies in front of the span keeps what it had, bit for bit.
    found = tl.where(goes_on & (last < 0), before, found)
    inside = real[:, None] & (v < VALUE)[None, :]
    if state >= 2:
        to = (token + i) * HEADS + head
        tl.store(out + to[:, None] * VALUE + v[None, :], result.to(out.dtype.element_ty), inside)
        tl.store(lse + to, found, mask=real)
    else:
        tl.store(carry + held[:, None] * VALUE + v[None, :], result, mask=inside)
        tl.store(carry_lse + held, found, mask=real)


@triton.jit
def _block_of_keys(
    q, q_rope, k_row, k_rope_row, seen, last, scale, block, top, weight, sofar,
    HEADS: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A block of keys more: the largest score so far (base 2), the sum of weights and that of
    weighted values.  ``MASKED``: not every query sees all of them, or there are fewer."""
    p = tl.arange(0, NOPE_BLOCK)
    r = tl.arange(0, ROPE_BLOCK)
    v = tl.arange(0, VALUE_BLOCK)
    j = block * KEYS + tl.arange(0, KEYS)
    row = k_row + j.to(tl.int64)[:, None] * (HEADS * (NOPE + VALUE))
    rope = k_rope_row + j[:, None] * (LATENT + ROPE)
    if MASKED:
        there = (j < seen)[:, None]
        k = tl.load(row + p[None, :], mask=there & (p < NOPE)[None, :], other=0.0)
        k_rope = tl.load(rope + r[None, :], mask=there & (r < ROPE)[None, :], other=0.0)
        values = tl.load(row + NOPE + v[None, :], mask=there & (v < VALUE)[None, :], other=0.0)
    else:
        k = _columns(row + p[None, :], p, NOPE, NOPE_BLOCK)
        k_rope = _columns(rope + r[None, :], r, ROPE, ROPE_BLOCK)
        values = _columns(row + NOPE + v[None, :], v, VALUE, VALUE_BLOCK)
    score = _product(q_rope, tl.trans(k_rope), None, ON_GPU)
    score = _product(q, tl.trans(k), score, ON_GPU) * scale
    if MASKED:
        score = tl.where((j[None, :] <= last[:, None]) & (j < seen)[None, :], score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # A row that has seen nothing yet subtracts 0, not -inf.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    share = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    weight = weight * shrink + tl.sum(share, 1)
    sofar = _product(share.to(values.dtype), values, sofar * shrink[:, None], ON_GPU)
    return new_top, weight, sofar


@triton.jit
def _columns(address, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if WIDTH == BLOCK:
        return tl.load(address)
    else:  # said for the compiler, which looks at one branch then
        return tl.load(address, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def _product(a, b, sofar, ON_GPU: tl.constexpr):
    if ON_GPU:
        return tl.dot(a, b, sofar, input_precision="tf32x3")  # means nothing to narrower types
    # The interpreter multiplies no bfloat16.
    return tl.dot(a.to(tl.float32), b.to(tl.float32), sofar, input_precision="ieee")
