"""Index scores in triton, and the best of them, without asking the device anything.

Scores are kept as integers that are ordered as they are.  Where a sequence has few queries, a
program scores one of them against blocks of keys in turn; where it has many, it holds one block of
keys and scores queries in turn.

Of the batch the kernels read tensors; its ``kv_lens`` only bound how far they look.  In a captured
graph they are the lengths that replays may reach.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.index import check_choice
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.records import Record
from kvtier.kernels.triton_batch import tile
from kvtier.kernels.triton_select import HIGHEST, UNSEEN, row_scores, scratch_bytes, select_entries
from kvtier.kernels.triton_values import (
    bits_of,
    float_of,
    operand,
    power_of_two,
    precision,
    product,
    widened,
)
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["index_topk"]

QUERIES = 32
"""Queries of one sequence that a program scores, one after the other, where there are many."""
FEW = 4
"""Queries of a sequence, on average, that are still few."""
KEYS = {1: 64, QUERIES: 128}
"""Keys that a program holds, at most, by how many queries it scores: more of them leave room for
fewer programs, and those of one query wait for what they read."""
PROGRAMS = 1056
"""Programs that few queries are shared out to: some to each multiprocessor."""


def index_topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    batch: PagedBatch,
    *,
    ratio: int,
    topk: int,
    record: Record,
    slots: bool = False,
    workspace_bytes: int | str = "512MiB",
) -> Tensor:
    """``kvtier.kernels.index_topk``, for keys of 128 values and a ``topk`` of at most 16,384.

    Scores are summed in float32, in another order than the reference's: where two differ by that
    much, either may be chosen.  An entry whose page the block table lacks is chosen last.  Scratch
    holds one query's scores at least.
    """
    n, heads, dim = query.shape
    check_choice(query, weights, keys, batch, ratio=ratio, topk=topk, record=record)
    page_stride, per_page, there = pool_of(keys, record)
    if dim != 128:
        raise ValueError(f"query {tuple(query.shape)}")
    if query.dtype is torch.uint8 and record.pack is None:
        raise ValueError("codes are asked of packed keys")
    query = adjacent(query)
    out = torch.empty(n, topk, dtype=torch.int32, device=query.device)
    sequences = batch.kv_lens_device.shape[0]
    bound = row_scores(max(batch.kv_lens, default=0) // ratio)
    dot = _arithmetic(query, keys, record)
    queries = 1 if n <= FEW * sequences else QUERIES
    at_a_time = KEYS[queries] // {"tf32": 2, "tf32x3": 4}.get(dot, 1)
    blocks = triton.cdiv(bound, at_a_time)
    if queries == 1:
        grid = n, min(blocks, triton.cdiv(PROGRAMS, max(n, 1)))
    else:
        grid = triton.cdiv(n, QUERIES) + sequences, blocks  # more tiles there cannot be
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    block = max(1, workspace // max(scratch_bytes(bound, topk), 1))
    scores = query.new_empty(min(n, block), bound, dtype=torch.int32)
    for low in range(0, n, block):
        count = min(block, n - low)
        if bound > topk:  # else there is nothing to choose
            _score[grid](
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
                batch.cu_seqlens_q,
                batch.kv_lens_device,
                sequences,
                low,
                count,
                topk,
                scores,
                scores.stride(0),
                batch.page_tokens // ratio,
                RATIO=ratio,
                HEADS=heads,
                HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
                DIM=dim,
                QUERIES=queries,
                KEYS=at_a_time,
                RECORD=record.name,
                DOT=dot,
                ON_GPU=query.is_cuda,
                num_warps=8 if dot == "tf32x3" else 4,
                num_stages=1,
            )
        select_entries(scores[:count], batch, low, topk, out, ratio=ratio, slots=slots)
    return out


def _arithmetic(query: Tensor, keys: Tensor, record: Record) -> str:
    """``precision``, or "fp16" for codes on both sides: a device makes halves of them at once."""
    dot = precision(query, keys, record, on_gpu=query.is_cuda)
    codes = query.dtype is torch.uint8 and record.name == "index_fp8"
    return "fp16" if dot == "bf16" and codes else dot


@triton.jit(
    do_not_specialize=[
        "there",
        "columns",
        "sequences",
        "low",
        "count",
        "score_stride",
        "table_stride",
    ],
    do_not_specialize_on_alignment=["weights", "table", "offsets", "lengths"],
)
def _score(
    query, token_stride, head_stride, weights, weight_stride, weight_head_stride,
    keys, page_stride, per_page, there,
    table, table_stride, columns, offsets, lengths, sequences,
    low, count, topk, scores, score_stride, entries_a_page,
    RATIO: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """Scores of blocks of entries for some queries of one sequence, those that they see.

    Blocks that the programs of a tile have in common are dealt out in turn.
    """
    b, context, first, token, end = tile(
        tl.program_id(0).to(tl.int64), offsets, lengths, sequences, QUERIES
    )
    token = tl.maximum(token, low)
    end = tl.minimum(end, low + count)
    visible = tl.minimum((context + end - first) // RATIO, score_stride).to(tl.int32)  # by the last
    if (b >= 0) & (token < end) & (visible > topk):
        ask = (query, token_stride, head_stride, weights, weight_stride, weight_head_stride)
        pool = (keys, page_stride, per_page, there)
        pages = (table + b * table_stride, columns, entries_a_page, visible)
        kept = (context - first, low, scores, score_stride)
        q, w = _query(ask, token, HEADS, HEAD_BLOCK, DIM, DOT)  # of QUERIES 1 the only one
        block = tl.program_id(1)
        if ON_GPU:
            for begin in range(block * KEYS, visible, tl.num_programs(1) * KEYS):
                key, scale, seen, entry = _keys(pool, pages, begin, DIM, KEYS, RECORD, DOT)
                asked = (key, scale, seen, entry)
                if QUERIES == 1:
                    _store_scores(q, w, asked, kept, token, RATIO, DOT)
                else:
                    for t in range(token, end):
                        q, w = _query(ask, t, HEADS, HEAD_BLOCK, DIM, DOT)
                        _store_scores(q, w, asked, kept, t, RATIO, DOT)
        else:  # the interpreter counts up to no tensor
            begin = block * KEYS
            while begin < visible:
                key, scale, seen, entry = _keys(pool, pages, begin, DIM, KEYS, RECORD, DOT)
                asked = (key, scale, seen, entry)
                t = token
                while t < end:
                    q, w = _query(ask, t, HEADS, HEAD_BLOCK, DIM, DOT)
                    _store_scores(q, w, asked, kept, t, RATIO, DOT)
                    t += 1
                begin += tl.num_programs(1) * KEYS


@triton.jit
def _query(
    ask, t, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Heads and weights of token ``t``."""
    query, token_stride, head_stride, weights, weight_stride, weight_head_stride = ask
    head = tl.arange(0, HEAD_BLOCK)
    real = head < HEADS
    q = query + t * token_stride + (head * head_stride)[:, None] + tl.arange(0, DIM)[None, :]
    w = weights + t * weight_stride + head * weight_head_stride
    x = _operand(tl.load(q, mask=real[:, None], other=0), DOT)
    return x, widened(tl.load(w, mask=real, other=0.0))


@triton.jit
def _keys(
    pool, pages, begin,
    DIM: tl.constexpr, KEYS: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Keys (KEYS, DIM) from entry ``begin`` on, what their scores are to be multiplied by, which of
    them have a page, and their entries."""
    keys, page_stride, per_page, there = pool
    table, columns, entries_a_page, visible = pages
    entry = begin + tl.arange(0, KEYS)
    column = entry // entries_a_page
    known = (entry < visible) & (column < columns)
    page = tl.load(table + column, mask=known, other=-1).to(tl.int64)
    slot = page * entries_a_page + entry % entries_a_page
    seen = known & (page >= 0) & (slot < there)
    slot = tl.where(seen, slot, 0)
    if RECORD == "dense":
        rows = (keys + slot * page_stride)[:, None]
        values = tl.load(rows + tl.arange(0, DIM)[None, :], mask=seen[:, None], other=0.0)
        key, scale = operand(values, DOT), tl.full((KEYS,), 1.0, tl.float32)
    else:
        start = keys + slot // per_page * page_stride
        s = slot % per_page
        if RECORD == "index_fp8":
            key, scale = _fp8_keys(start, per_page, s, seen, DIM, DOT)
        else:
            tl.static_assert(RECORD == "index_mxfp4")
            key, scale = _mxfp4_keys(start, per_page, s, seen, DIM, DOT)
    return key, scale, seen, entry


@triton.jit
def _store_scores(q, w, asked, kept, t, RATIO: tl.constexpr, DOT: tl.constexpr):
    """Scores of a block of entries for token ``t``."""
    key, scale, seen, entry = asked
    offset, low, scores, score_stride = kept
    products = product(key, tl.trans(q), DOT)
    score = tl.sum(tl.maximum(products, 0.0) * w[None, :], axis=1) * scale
    bits = bits_of(tl.where(score == 0.0, 0.0, score))  # -0 and 0 are equal
    ordered = tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), HIGHEST)
    ordered = tl.where(seen, tl.maximum(ordered, UNSEEN), UNSEEN)
    mine = tl.minimum((offset + t + 1) // RATIO, score_stride)
    tl.store(scores + (t - low) * score_stride + entry, ordered, mask=entry < mine)


@triton.jit
def _operand(x, DOT: tl.constexpr):
    """``operand``, of e4m3 codes by what the device has for them."""
    if DOT == "fp16":
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif (DOT == "bf16") & (x.dtype == tl.uint8):
        return x.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        return operand(x, DOT)


@triton.jit
def _e2m1_values(c):
    size = c & 7
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, float_of((size + 252) << 22))
    return tl.where(c >= 8, -value, value)


# Keys (keys, DIM) of a block, and what their scores are to be multiplied by.


@triton.jit
def _fp8_keys(pages, per_page, s, seen, DIM: tl.constexpr, DOT: tl.constexpr):
    rows = (pages + s * DIM)[:, None]
    codes = tl.load(rows + tl.arange(0, DIM)[None, :], mask=seen[:, None], other=0)
    scales = (pages + per_page * DIM + s * 4).to(tl.pointer_type(tl.float32))
    return _operand(codes, DOT), tl.load(scales, mask=seen, other=0.0)


@triton.jit
def _mxfp4_keys(pages, per_page, s, seen, DIM: tl.constexpr, DOT: tl.constexpr):
    """Even values lie in low halves of bytes and odd ones in high."""
    byte = tl.arange(0, DIM // 2)[None, :]
    pairs = tl.load((pages + s * (DIM // 2))[:, None] + byte, mask=seen[:, None], other=0)
    pairs = pairs.to(tl.int32)
    scales = (pages + per_page * (DIM // 2) + s * (DIM // 32))[:, None] + byte // 16
    power = power_of_two(tl.load(scales, mask=seen[:, None], other=127).to(tl.int32))
    both = tl.join(_e2m1_values(pairs & 15) * power, _e2m1_values(pairs >> 4) * power)
    values = tl.reshape(both, (s.shape[0], DIM))
    return operand(values, DOT), tl.full((s.shape[0],), 1.0, tl.float32)
