"""Index scores and the best of them in triton, without asking the device anything.

Scores come out of the kernel as integers that no two entries of a query share: ordered as the
scores are, and among equal ones the smaller entry first.  So any selection of the largest is the
one that the reference makes, and what is selected says which entries it was.

Of the batch the kernels read tensors; its ``kv_lens`` only bound how far they look.  In a captured
graph they are the lengths that replays may reach.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.records import Record
from kvtier.kernels.triton_batch import place
from kvtier.kernels.triton_values import bits_of, cast, float_of, power_of_two, widened
from kvtier.kernels.triton_write import pool_of

__all__ = ["index_topk"]

KEYS = 128
"""Keys of one program."""
QUERIES = 128
"""Queries of a launch that keys are split up for rather than take fewer queries."""
NOT_SEEN = torch.iinfo(torch.int64).min
_NOT_SEEN = tl.constexpr(NOT_SEEN)


def index_topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    batch: PagedBatch,
    *,
    ratio: int,
    topk: int,
    record: Record,
    workspace_bytes: int | str = "512MiB",
) -> Tensor:
    """``kvtier.kernels.index_topk``, for keys of 128 values.

    Scores are summed in float32, in another order than the reference's: where two differ by that
    much, either may be chosen.  An entry whose page the block table lacks is not seen.
    """
    n, heads, dim = query.shape
    page_stride, per_page, there = pool_of(keys, record)
    if dim != 128 or query.stride(2) != 1 or weights.shape != (n, heads):
        raise ValueError(f"query {tuple(query.shape)}, weights {tuple(weights.shape)}")
    out = torch.empty(n, topk, dtype=torch.int32, device=query.device)
    where = (
        batch.cu_seqlens_q,
        batch.kv_lens_device,
        batch.kv_lens_device.shape[0],
    )
    bound = max(batch.kv_lens, default=0) // ratio
    if bound <= topk:  # nothing to choose
        if n:
            _all_entries[(n,)](*where, out, topk, ratio, BLOCK=triton.next_power_of_2(topk))
        return out
    dot = _dot(query, keys, record, on_gpu=query.is_cuda)
    block, split = _blocks(parse_bytes(workspace_bytes, "workspace_bytes"), n, bound, topk)
    for low in range(0, n, block):
        count = min(block, n - low)
        best = query.new_empty(count, 0, dtype=torch.int64)
        for start in range(0, bound, split):
            stop = min(start + split, bound)
            ranks = query.new_empty(count, stop - start, dtype=torch.int64)
            _score[(count, triton.cdiv(stop - start, KEYS))](
                query,
                *query.stride()[:2],
                weights,
                *weights.stride(),
                keys,
                page_stride,
                per_page,
                there,
                batch.block_table,
                batch.block_table.stride(0),
                batch.block_table.shape[1],
                *where,
                low,
                start,
                stop,
                ranks,
                batch.page_tokens // ratio,
                RATIO=ratio,
                HEADS=heads,
                HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
                DIM=dim,
                KEYS=KEYS,
                RECORD=record.name,
                DOT=dot,
                num_warps=4 if dot == "bf16" else 8,
            )
            best = torch.cat((best, ranks), dim=1)
            best = best.topk(min(topk, best.shape[1]), dim=1, sorted=False).values
        out[low : low + count] = _entries(best)
    return out


def _entries(ranks: Tensor) -> Tensor:
    """Entries (n, k) int32 of what was kept, ascending, -1 behind."""
    none = torch.iinfo(torch.int64).max
    entries = torch.where(ranks == NOT_SEEN, none, 0xFFFFFFFF - (ranks & 0xFFFFFFFF))
    entries = entries.sort(dim=1).values
    return torch.where(entries == none, -1, entries).to(torch.int32)


def _dot(query: Tensor, keys: Tensor, record: Record, *, on_gpu: bool) -> str:
    """Arithmetic of the products: holds queries and keys exactly, or float32 to its last bits."""
    if record.pack is None and (keys.dtype != query.dtype or query.dtype != torch.bfloat16):
        return "tf32x3"
    # The interpreter multiplies no bfloat16.
    if query.dtype == torch.bfloat16 and on_gpu:
        return "bf16"
    return "tf32" if query.element_size() == 2 else "tf32x3"


def _blocks(workspace: int, n: int, bound: int, topk: int) -> tuple[int, int]:
    """How many queries are scored at a time, and against how many keys."""

    def a_query(keys: int) -> int:
        return 32 * (keys + topk)  # ranks, joined with what was kept, and what selecting takes

    split = triton.cdiv(bound, KEYS) * KEYS
    while split > 1024 and a_query(split) * min(n, QUERIES) > workspace:
        split = triton.cdiv(split // 2, KEYS) * KEYS
    return max(1, workspace // a_query(split)), split


@triton.jit(
    do_not_specialize=["sequences"],
    do_not_specialize_on_alignment=["offsets", "lengths"],
)
def _all_entries(offsets, lengths, sequences, out, topk, ratio, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    _, position, _, _ = place(token, offsets, lengths, sequences)
    at = tl.arange(0, BLOCK)
    entries = tl.where(at < (position + 1) // ratio, at, -1)
    tl.store(out + token * topk + at, entries, mask=at < topk)


@triton.jit(
    do_not_specialize=["there", "columns", "sequences", "low", "start", "stop", "table_stride"],
    do_not_specialize_on_alignment=["weights", "table", "offsets", "lengths"],
)
def _score(
    query, token_stride, head_stride, weights, weight_stride, weight_head_stride,
    keys, page_stride, per_page, there,
    table, table_stride, columns, offsets, lengths, sequences,
    low, start, stop, ranks, entries_a_page,
    RATIO: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Ranks of a block of entries for one query."""
    row = tl.program_id(0).to(tl.int64)
    token = low + row
    b, position, _, _ = place(token, offsets, lengths, sequences)
    visible = tl.minimum((position + 1) // RATIO, stop)
    begin = start + tl.program_id(1).to(tl.int64) * KEYS
    entry = begin + tl.arange(0, KEYS)
    rank = tl.full((KEYS,), _NOT_SEEN, tl.int64)
    if begin < visible:
        column = entry // entries_a_page
        known = (entry < visible) & (column < columns)
        page = tl.load(table + b * table_stride + column, mask=known, other=-1).to(tl.int64)
        slot = page * entries_a_page + entry % entries_a_page
        seen = known & (page >= 0) & (slot < there)
        slot = tl.where(seen, slot, 0)
        head = tl.arange(0, HEAD_BLOCK)
        real = head < HEADS
        q = query + token * token_stride + (head * head_stride)[:, None]
        if RECORD == "index_mxfp4":
            products = _dot_mxfp4(
                q, real, keys + slot // per_page * page_stride, per_page, slot % per_page, seen,
                DIM, DOT,
            )  # fmt: skip
        else:
            at = tl.arange(0, DIM)
            x = _operand(tl.load(q + at[None, :], mask=real[:, None], other=0.0), DOT)
            if RECORD == "dense":
                rows = keys + (slot * page_stride)[:, None] + at[None, :]
                key = _operand(tl.load(rows, mask=seen[:, None], other=0.0), DOT)
                products = _product(x, key, DOT)
            else:
                tl.static_assert(RECORD == "index_fp8")
                pages = keys + slot // per_page * page_stride
                rows = pages + slot % per_page * 128
                codes = tl.load(rows[:, None] + at[None, :], mask=seen[:, None], other=0)
                scales = (pages + per_page * 128 + slot % per_page * 4).to(
                    tl.pointer_type(tl.float32)
                )
                scale = tl.load(scales, mask=seen, other=0.0)
                products = _product(x, _operand(_e4m3_values(codes), DOT), DOT) * scale[None, :]
        w = tl.load(
            weights + token * weight_stride + head * weight_head_stride, mask=real, other=0.0
        )
        score = tl.sum(tl.maximum(products, 0.0) * widened(w)[:, None], axis=0)
        bits = bits_of(tl.where(score == 0.0, 0.0, score))  # -0 and 0 are equal
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        own = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - entry)
        rank = tl.where(seen, own, rank)
    tl.store(ranks + row * (stop - start) + (entry - start), rank, mask=entry < stop)


@triton.jit
def _operand(x, DOT: tl.constexpr):
    if DOT == "bf16":
        return cast(widened(x), tl.bfloat16)
    else:  # said for the compiler, which looks at one branch then
        return widened(x)


@triton.jit
def _product(x, keys, DOT: tl.constexpr):
    """(heads, keys) of (heads, width) and (keys, width)."""
    if DOT == "tf32x3":
        return tl.dot(x, tl.trans(keys), input_precision="tf32x3")
    else:
        return tl.dot(x, tl.trans(keys), input_precision="tf32")


@triton.jit
def _e4m3_values(codes):
    """float32 of e4m3 codes, but for NaN, which no writer leaves."""
    c = codes.to(tl.int32)
    size = c & 0x7F
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, float_of((size + 960) << 20))
    return tl.where(c >= 0x80, -value, value)


@triton.jit
def _e2m1_values(c):
    size = c & 7
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, float_of((size + 252) << 22))
    return tl.where(c >= 8, -value, value)


@triton.jit
def _dot_mxfp4(q, real, pages, per_page, s, seen, DIM: tl.constexpr, DOT: tl.constexpr):
    """Products with keys whose even values lie in low halves of bytes and odd ones in high."""
    byte = tl.arange(0, DIM // 2)
    pairs = tl.load((pages + s * 64)[:, None] + byte[None, :], mask=seen[:, None], other=0)
    scales = (pages + per_page * 64 + s * 4)[:, None] + (byte // 16)[None, :]
    power = power_of_two(tl.load(scales, mask=seen[:, None], other=127).to(tl.int32))
    pairs = pairs.to(tl.int32)
    even = tl.load(q + (2 * byte)[None, :], mask=real[:, None], other=0.0)
    odd = tl.load(q + (2 * byte + 1)[None, :], mask=real[:, None], other=0.0)
    low = _operand(_e2m1_values(pairs & 15) * power, DOT)
    high = _operand(_e2m1_values(pairs >> 4) * power, DOT)
    return _product(_operand(even, DOT), low, DOT) + _product(_operand(odd, DOT), high, DOT)
