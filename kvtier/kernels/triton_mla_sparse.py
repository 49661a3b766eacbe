"""Attention of each query to its own list of latent rows, in triton.

A program attends some heads of one query token to a part of its list; where there are too few of
them for the device, lists are cut into parts, and a second launch joins what these found.  Nothing
is asked of the device; slots past the pool count as none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.records import Record
from kvtier.kernels.triton_mla import LN2, LOG2E, ROPE, attend
from kvtier.kernels.triton_mla_parts import LATENT
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["PARTS", "join", "mla_sparse"]

HEADS = 64
"""Heads of one program, at most: they share the keys that it unpacks."""
KEYS = 32
"""Keys at a time."""
PROGRAMS = 256
"""There are to be so many in all, as far as lists can be cut."""
PARTS = 32
"""Parts of a list, at most."""
FEW = 8
"""Up to so many parts are joined without stepping over all the others that there might be."""


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
    """``kvtier.kernels.mla_sparse`` for rows of 512 + 64 values, bfloat16 or float16 as the
    queries are, or "mla_fp8" with queries in bfloat16.

    Scores and sums are float32; weights are rounded to the queries' type before they meet the
    values.
    """
    packed = record.pack is not None
    n, heads, width = query.shape
    if latent_dim != LATENT or width != LATENT + ROPE or slots.shape[0] != n:
        raise ValueError(f"query {tuple(query.shape)}, slots {tuple(slots.shape)}, {latent_dim=}")
    if query.dtype != (torch.bfloat16 if packed else rows.dtype):
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    if not packed and rows.shape[-1] != width:
        raise ValueError(f"queries of {width} values, rows of {rows.shape[-1]}")
    query, slots = adjacent(query), adjacent(slots)
    page_stride, per_page, there = pool_of(rows, record)
    out = torch.empty(n, heads, LATENT, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    if not n or not heads:
        return out, lse
    block = 16 if heads <= 16 else HEADS  # what lies between does not fit the registers
    blocks = triton.cdiv(heads, block)
    a_part = n * heads * (LATENT + 1) * 4
    most = min(PARTS, triton.cdiv(slots.shape[1], KEYS), PROGRAMS // (n * blocks))
    count = max(1, min(most, parse_bytes(workspace_bytes, "workspace_bytes") // a_part))
    cut = count > 1
    parts = query.new_empty(count if cut else 0, n, heads, LATENT, dtype=torch.float32)
    part_lse = query.new_empty(count if cut else 0, n, heads, dtype=torch.float32)
    _attend[(n, blocks, count)](
        query,
        *query.stride()[:2],
        rows,
        page_stride,
        per_page,
        there,
        slots,
        slots.stride(0),
        slots.shape[1],
        scale * LOG2E.value,
        parts if cut else out,
        part_lse if cut else lse,
        heads,
        HEADS=block,
        KEYS=KEYS,
        PACKED=packed,
        ON_GPU=query.is_cuda,
        num_warps=4 if block == 16 and not packed else 8,
        num_stages=2,
    )
    if cut:
        join(parts, part_lse, out, lse)
    return out, lse


def join(parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Fills ``out`` (n, heads, 512) and ``lse`` (n, heads) by what each of up to ``PARTS`` parts
    found: (parts, n, heads, 512) means of values and (parts, n, heads) natural log-sum-exps, -inf
    where the means are not written."""
    _join[(lse.numel(),)](parts, part_lse, parts.shape[0], out, lse, PARTS=PARTS, FEW=FEW)


@triton.jit(
    do_not_specialize=["there", "num", "slots_stride"],
    do_not_specialize_on_alignment=["slots"],
)
def _attend(
    query, token_stride, head_stride, rows, page_stride, per_page, there, slots, slots_stride, num,
    scale, out, lse, heads,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Some heads of one query against one part of its list."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = (head < heads)[:, None]
    d = tl.arange(0, 512)
    r = tl.arange(0, 64)
    at = query + token * token_stride + (head.to(tl.int64) * head_stride)[:, None]
    q = tl.load(at + d[None, :], mask=real, other=0.0)
    q_rope = tl.load(at + 512 + r[None, :], mask=real, other=0.0)
    top = tl.full([HEADS], -float("inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    sofar = tl.zeros([HEADS, 512], tl.float32)
    tiles = tl.cdiv(num, KEYS)
    share = tl.cdiv(tiles, tl.num_programs(2))
    low = tl.program_id(2) * share
    high = tl.minimum(low + share, tiles)
    mine = slots + token * slots_stride
    pool = (rows, page_stride, per_page, there, mine, num, scale)
    if ON_GPU:
        for tile in range(low, high):
            top, weight, sofar = _meet(
                q, q_rope, *pool, tile, top, weight, sofar, KEYS, PACKED, ON_GPU
            )
    else:  # the interpreter counts up to no tensor
        tile = low
        while tile < high:
            top, weight, sofar = _meet(
                q, q_rope, *pool, tile, top, weight, sofar, KEYS, PACKED, ON_GPU
            )
            tile += 1
    safe = tl.where(weight > 0, weight, 1.0)
    row = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + token) * heads + head
    result = (sofar / safe[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * 512 + d[None, :], result, mask=real)
    found = tl.where(weight > 0, (top + tl.log2(safe)) * LN2, -float("inf"))
    tl.store(lse + row, found, mask=head < heads)


@triton.jit
def _meet(
    q, q_rope, rows, page_stride, per_page, there, slots, num, scale, tile, top, weight, sofar,
    KEYS: tl.constexpr, PACKED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A tile of keys more: the largest score so far, sum of weights and of weighted values."""
    d = tl.arange(0, 512)
    r = tl.arange(0, 64)
    at = tile * KEYS + tl.arange(0, KEYS)
    slot = tl.load(slots + at, mask=at < num, other=-1).to(tl.int64)
    seen = (slot >= 0) & (slot < there)
    slot = tl.where(seen, slot, 0)
    if PACKED:
        row = (rows + (slot // per_page * page_stride + slot % per_page * 656))[:, None]
        codes = tl.load(row + d[None, :], mask=seen[:, None], other=0)
        codes = tl.reshape(codes.to(tl.float8e4nv, bitcast=True), (KEYS, 4, 128))
        scales = (row + 512).to(tl.pointer_type(tl.float32)) + tl.arange(0, 4)[None, :]
        scales = tl.load(scales, mask=seen[:, None], other=0.0)
        k = tl.reshape((codes.to(tl.float32) * scales[:, :, None]).to(q.dtype), (KEYS, 512))
        rope = (row + 528).to(tl.pointer_type(q.dtype))
    else:
        row = (rows + slot * page_stride)[:, None]
        k = tl.load(row + d[None, :], mask=seen[:, None], other=0.0)
        rope = row + 512
    k_rope = tl.load(rope + r[None, :], mask=seen[:, None], other=0.0)
    return attend(q, q_rope, k, k_rope, seen[None, :], scale, top, weight, sofar, ON_GPU)


@triton.jit(do_not_specialize=["count"])
def _join(parts, part_lse, count, out, lse, PARTS: tl.constexpr, FEW: tl.constexpr):
    """One head of one query, of the parts of its list."""
    row = tl.program_id(0).to(tl.int64)
    if count <= FEW:
        _join_row(parts, part_lse, count, row, out, lse, FEW)
    else:
        _join_row(parts, part_lse, count, row, out, lse, PARTS)


@triton.jit
def _join_row(parts, part_lse, count, row, out, lse, MOST: tl.constexpr):
    part = tl.arange(0, MOST)
    where = part * tl.num_programs(0).to(tl.int64) + row
    each = tl.load(part_lse + where, mask=part < count, other=-float("inf"))
    top = tl.max(each, axis=0)
    none = top == -float("inf")
    weights = tl.exp(each - tl.where(none, 0.0, top))
    total = tl.where(none, 1.0, tl.sum(weights, axis=0))
    d = tl.arange(0, 512)
    found = (each > -float("inf"))[:, None]
    values = tl.load(parts + where[:, None] * 512 + d[None, :], mask=found, other=0.0)
    mean = tl.sum(values * (weights / total)[:, None], axis=0)
    tl.store(out + row * 512 + d, mean.to(out.dtype.element_ty))
    tl.store(lse + row, tl.where(none, -float("inf"), top + tl.log(total)))
