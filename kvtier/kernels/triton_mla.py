"""Absorbed attention over paged latent rows in triton: one launch over all rows, one that merges.

How the work is cut up and merged says ``triton_mla_parts``; a part walks over the segments of
sequences that it holds.

H100 and H200 have a kernel of their own, ``gluon_mla``, which does all of it in one launch.

Of the batch the kernels read tensors; its ``query_lens`` and ``kv_lens`` only bound the grid.  In a
captured graph they are the lengths that replays may reach.
"""

import importlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.mla_schedule import scheduled
from kvtier.kernels.records import RECORDS
from kvtier.kernels.triton_mla_parts import LATENT, Grid, finish, grid_of, scratch
from kvtier.kernels.triton_write import adjacent

__all__ = ["LN2", "LOG2E", "ROPE", "absorbed", "attend"]

ROPE = 64
"""Values of a row's rotated key, behind its latent."""
PACKED_BYTES = RECORDS["mla_fp8"].slot_bytes
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def absorbed(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    *,
    latent_dim: int,
    scale: float,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.absorbed`` for rows of 512 + 64 values in the query's type, bf16 or fp16.

    ``rows`` may also be pages (pages, page_bytes) uint8 of "mla_fp8" records, with queries in bf16.
    Scores and sums are float32; weights are rounded to the rows' type before they meet the values.
    Query tokens that belong to no sequence get output 0 and log-sum-exp -inf, as those without
    keys.  Asks the device nothing.  Raises ValueError for other widths and types, and fewer
    queries than the batch has.
    """
    if query.shape[0] < (asked := sum(batch.query_lens)):
        raise ValueError(f"{query.shape[0]} queries, in a batch of {asked}")
    packed = rows.dtype == torch.uint8
    width = PACKED_BYTES * batch.page_tokens if packed else LATENT + ROPE
    if latent_dim != LATENT or rows.shape[-1] != width or query.shape[-1] != LATENT + ROPE:
        raise ValueError(
            f"query width {query.shape[-1]}, row width {rows.shape[-1]}, {latent_dim=}"
        )
    if query.dtype != (torch.bfloat16 if packed else rows.dtype):
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    query, rows = adjacent(query), adjacent(rows)
    n, heads, _ = query.shape
    out = torch.empty(n, heads, LATENT, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    sequences = batch.kv_lens_device.shape[0]
    if not (n and heads and sequences):  # kernels look at a sequence before they know it is there
        return out.zero_(), lse.fill_(-torch.inf)
    fast = _for_hopper(query, rows, batch, scale)
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    grid = grid_of(batch, heads, _processors(query.device), workspace, fast=fast, packed=packed)
    if fast:
        hopper = importlib.import_module("kvtier.kernels.gluon_mla")
        schedule = scheduled(batch, n, grid.parts, grid.tiles)
        hopper.attend(query, rows, batch, schedule, scale=scale * LOG2E.value, out=out, lse=lse)
    else:
        _in_two_launches(query, rows, batch, grid, scale=scale * LOG2E.value, out=out, lse=lse)
    return out, lse


def _in_two_launches(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    grid: Grid,
    *,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """On any GPU, and packed rows too; ``scale`` holds log2(e)."""
    packed = rows.dtype == torch.uint8
    sequences = batch.kv_lens_device.shape[0]
    parts, part_lse, plan = scratch(query, sequences, grid)
    lengths = (batch.cu_seqlens_q, batch.kv_lens_device, sequences)
    _attend[(grid.tiles, grid.parts)](
        query,
        *query.stride()[:2],
        rows,
        rows.stride(0) * (1 if packed else batch.page_tokens),
        PACKED_BYTES if packed else rows.stride(0),
        batch.block_table,
        batch.block_table.stride(0),
        batch.page_tokens,
        *lengths,
        scale,
        out,
        lse,
        parts,
        part_lse,
        plan,
        BY_PART=sequences > grid.parts,
        HEADS=query.shape[1],
        TILE=grid.tile,
        KEYS=grid.keys,
        PACKED=packed,
        ON_GPU=query.is_cuda,
        num_warps=8 if packed or grid.tile == 64 else 4,
        num_stages=2,
    )
    finish(lengths, out, lse, parts, part_lse, plan, grid)


def _for_hopper(query: Tensor, rows: Tensor, batch: PagedBatch, scale: float) -> bool:
    """Whether the kernel made for H100 and H200 takes this."""
    return (
        query.is_cuda
        and rows.dtype != torch.uint8
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and batch.page_tokens % 64 == 0
        and rows.data_ptr() % 16 == 0
        and rows.stride(0) % 8 == 0
        and scale > 0
    )


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(
    do_not_specialize=["table_stride", "sequences", "scale"],
    do_not_specialize_on_alignment=["table", "offsets", "lengths"],
)
def _attend(
    query, token_stride, head_stride, rows, page_stride, row_stride, table, table_stride,
    page_tokens,
    offsets, lengths, sequences, scale, out, lse, parts, part_lse, plan,
    HEADS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    BY_PART: tl.constexpr, PACKED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One part of the keys, for one tile of each sequence's (token, head) pairs."""
    m = tl.program_id(0)
    p = tl.program_id(1)
    at, stop, quota, b, begin = _cut(lengths, sequences, p, tl.num_programs(1), KEYS)
    if BY_PART & (m == 0):
        tl.store(plan + 4 * p, -1)
    pair = m * TILE + tl.arange(0, TILE)
    d = tl.arange(0, 512)
    r = tl.arange(0, 64)
    while at < stop:
        kv_len = tl.load(lengths + b)
        first = tl.load(offsets + b)
        q_len = tl.load(offsets + b + 1) - first
        count = tl.cdiv(kv_len, KEYS)
        low = at - begin
        high = tl.minimum(count, stop - begin)
        token = pair // HEADS
        head = pair % HEADS
        real = token < q_len
        position = tl.where(real, kv_len - q_len + token, -1)
        q_row = query + (first + token).to(tl.int64)[:, None] * token_stride
        q_row += head.to(tl.int64)[:, None] * head_stride
        q = tl.load(q_row + d[None, :], mask=real[:, None], other=0.0)
        q_rope = tl.load(q_row + 512 + r[None, :], mask=real[:, None], other=0.0)
        top = tl.full([TILE], -float("inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        sofar = tl.zeros([TILE, 512], tl.float32)
        pages = table + b.to(tl.int64) * table_stride
        if m * TILE < q_len * HEADS:
            keys = (rows, page_stride, row_stride, pages, page_tokens, kv_len, position, scale)
            if ON_GPU:
                for block in range(low, high):
                    top, weight, sofar = _meet(
                        q, q_rope, *keys, block, top, weight, sofar, KEYS, PACKED, ON_GPU
                    )
            else:  # the interpreter counts up to no tensor
                block = low
                while block < high:
                    top, weight, sofar = _meet(
                        q, q_rope, *keys, block, top, weight, sofar, KEYS, PACKED, ON_GPU
                    )
                    block += 1
        safe = tl.where(weight > 0, weight, 1.0)
        result = sofar / safe[:, None]
        result_lse = tl.where(weight > 0, (top + tl.log2(safe)) * LN2, -float("inf"))
        if (low == 0) & (high == count):
            at_out = (first + token).to(tl.int64) * HEADS + head
            tl.store(
                out + at_out[:, None] * 512 + d[None, :],
                result.to(out.dtype.element_ty),
                mask=real[:, None],
            )
            tl.store(lse + at_out, result_lse, mask=real)
        else:
            slot = _slot(p, low == 0, m, tl.num_programs(0)) * TILE + tl.arange(0, TILE)
            tl.store(parts + slot[:, None] * 512 + d[None, :], result, mask=real[:, None])
            tl.store(part_lse + slot, result_lse, mask=real)
        if (m == 0) & (low == 0):
            goes_on = high < count
            if goes_on | (not BY_PART):
                to = plan + 4 * (p if BY_PART else b)
                tl.store(to, tl.where(goes_on, p, -1))
                tl.store(to + 1, (begin + count - 1) // quota)
                tl.store(to + 2, first)
                tl.store(to + 3, q_len)
        at = begin + high
        begin += count
        b += 1


@triton.jit
def _cut(lengths, sequences, p, parts, KEYS: tl.constexpr):
    """Of part ``p``: its first block and the one behind its last, the blocks of a part; and the
    sequence that its first block is of, with that sequence's first."""
    row = tl.arange(0, 128)
    total = p * 0
    low = p * 0
    while low < sequences:
        total += tl.sum(_blocks(lengths, low + row, sequences, KEYS), 0)
        low += 128
    quota = tl.maximum(tl.cdiv(total, parts), 1)
    at = p * quota
    b = p * 0
    begin = p * 0
    before = p * 0
    low = p * 0
    while low < sequences:
        counts = _blocks(lengths, low + row, sequences, KEYS)
        ends = before + tl.cumsum(counts, 0)
        passed = (low + row < sequences) & (ends <= at)
        b += tl.sum(passed.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(passed, ends, 0), 0))
        before += tl.sum(counts, 0)
        low += 128
    return at, tl.minimum(at + quota, total), quota, b, begin


@triton.jit
def _blocks(lengths, row, sequences, KEYS: tl.constexpr):
    return tl.cdiv(tl.load(lengths + row, mask=row < sequences, other=0), KEYS)


@triton.jit
def _meet(
    q, q_rope, rows, page_stride, row_stride, pages, page_tokens, kv_len, position, scale,
    block, top, weight, sofar, KEYS: tl.constexpr, PACKED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A block of keys more: the largest score so far, sum of weights and of weighted values."""
    d = tl.arange(0, 512)
    r = tl.arange(0, 64)
    key = block * KEYS + tl.arange(0, KEYS)
    there = key < kv_len
    page = tl.load(pages + key // page_tokens, mask=there, other=0).to(tl.int64)
    row = rows + (page * page_stride + key % page_tokens * row_stride)[:, None]
    there = there[:, None]
    if PACKED:
        codes = tl.load(row + d[None, :], mask=there, other=0).to(tl.float8e4nv, bitcast=True)
        scales = (row + 512).to(tl.pointer_type(tl.float32)) + tl.arange(0, 4)[None, :]
        scales = tl.load(scales, mask=there, other=0.0)[:, :, None]
        k = tl.reshape(codes.to(tl.float32), (KEYS, 4, 128)) * scales
        k = tl.reshape(k.to(q.dtype), (KEYS, 512))
        rope = (row + 528).to(tl.pointer_type(q.dtype))
    else:
        k = tl.load(row + d[None, :], mask=there, other=0.0)
        rope = row + 512
    k_rope = tl.load(rope + r[None, :], mask=there, other=0.0)
    seen = key[None, :] <= position[:, None]
    return attend(q, q_rope, k, k_rope, seen, scale, top, weight, sofar, ON_GPU)


@triton.jit
def attend(
    q, q_rope, k, k_rope, seen, scale, top, weight, sofar, ON_GPU: tl.constexpr
):  # fmt: skip
    """Queries meet some keys more, whose latents ``k`` are their values: the largest score so far
    (base 2), the sum of weights and that of weighted values."""
    score = _product(q_rope, tl.trans(k_rope), None, ON_GPU)
    score = _product(q, tl.trans(k), score, ON_GPU) * scale
    score = tl.where(seen, score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # A row that has seen nothing yet subtracts 0, not -inf.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    share = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    weight = weight * shrink + tl.sum(share, 1)
    sofar = _product(share.to(k.dtype), k, sofar * shrink[:, None], ON_GPU)
    return new_top, weight, sofar


@triton.jit
def _product(a, b, sofar, ON_GPU: tl.constexpr):
    if ON_GPU:
        return tl.dot(a, b, sofar)
    # The interpreter multiplies no bfloat16.
    return tl.dot(a.to(tl.float32), b.to(tl.float32), sofar, input_precision="ieee")


@triton.jit
def _slot(part, starts, tile, tiles):
    """Where a part keeps what it found of a sequence that others hold too.

    Such a sequence is the part's last, if it starts here, or else its first.
    """
    return (part.to(tl.int64) * 2 + starts.to(tl.int64)) * tiles + tile
