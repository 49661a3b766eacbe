"""Index scores and the best of them in triton, without asking the device anything.

Scores are kept as integers that are ordered as they are.  A program finds the smallest score that
is still chosen eight bits at a time, and then passes over the entries in their order: what it
writes ascends, and of equal scores the smaller entries are taken.

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
from kvtier.kernels.triton_batch import place, tile
from kvtier.kernels.triton_values import (
    bits_of,
    e4m3_values,
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
"""Queries of one sequence that a program scores, one after the other."""
KEYS = 128
"""Keys that it holds meanwhile, at most."""
SCORES = 4096
"""Scores that a program selects from at a time."""


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
    much, either may be chosen.  An entry whose page the block table lacks is chosen last.  Scratch
    holds one query's scores at least.
    """
    n, heads, dim = query.shape
    page_stride, per_page, there = pool_of(keys, record)
    if dim != 128 or weights.shape != (n, heads):
        raise ValueError(f"query {tuple(query.shape)}, weights {tuple(weights.shape)}")
    if query.dtype is torch.uint8 and record.pack is None:
        raise ValueError("codes are asked of packed keys")
    if query.dtype is torch.uint8:  # once for all blocks of keys
        query = query.contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)
    query = adjacent(query)
    out = torch.empty(n, topk, dtype=torch.int32, device=query.device)
    where = (batch.cu_seqlens_q, batch.kv_lens_device, batch.kv_lens_device.shape[0])
    bound = max(batch.kv_lens, default=0) // ratio
    dot = precision(query, keys, record, on_gpu=query.is_cuda)
    at_a_time = {"bf16": KEYS, "tf32": KEYS // 2, "tf32x3": KEYS // 4}[dot]
    tiles = triton.cdiv(n, QUERIES) + batch.kv_lens_device.shape[0]  # more there cannot be
    block = _queries_at_a_time(parse_bytes(workspace_bytes, "workspace_bytes"), bound)
    scores = query.new_empty(min(n, block), bound, dtype=torch.int32)
    for low in range(0, n, block):
        count = min(block, n - low)
        if bound > topk:  # else there is nothing to choose
            _score[(tiles, triton.cdiv(bound, at_a_time))](
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
                count,
                topk,
                scores,
                scores.stride(0),
                batch.page_tokens // ratio,
                RATIO=ratio,
                HEADS=heads,
                HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
                DIM=dim,
                QUERIES=QUERIES,
                KEYS=at_a_time,
                RECORD=record.name,
                DOT=dot,
                ON_GPU=query.is_cuda,
                num_warps=8,
            )
        _select[(count,)](
            *where,
            low,
            topk,
            scores,
            scores.stride(0),
            out,
            RATIO=ratio,
            TOPK_BLOCK=triton.next_power_of_2(topk),
            BLOCK=SCORES,
            num_warps=8,
        )
    return out


def _queries_at_a_time(workspace: int, bound: int) -> int:
    return max(1, workspace // (4 * max(bound, 1)))


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
    """Scores of a block of entries for some queries of one sequence, those that they see."""
    b, context, first, token, end = tile(
        tl.program_id(0).to(tl.int64), offsets, lengths, sequences, QUERIES
    )
    token = tl.maximum(token, low)
    end = tl.minimum(end, low + count)
    visible = tl.minimum((context + end - first) // RATIO, score_stride)  # by the last
    begin = tl.program_id(1).to(tl.int64) * KEYS
    if (b >= 0) & (token < end) & (begin < visible) & (visible > topk):
        entry = begin + tl.arange(0, KEYS)
        column = entry // entries_a_page
        known = (entry < visible) & (column < columns)
        page = tl.load(table + b * table_stride + column, mask=known, other=-1).to(tl.int64)
        slot = page * entries_a_page + entry % entries_a_page
        seen = known & (page >= 0) & (slot < there)
        slot = tl.where(seen, slot, 0)
        if RECORD == "dense":
            at = tl.arange(0, DIM)[None, :]
            rows = (keys + slot * page_stride)[:, None]
            key = operand(tl.load(rows + at, mask=seen[:, None], other=0.0), DOT)
            scale = tl.full((KEYS,), 1.0, tl.float32)
        else:
            page = keys + slot // per_page * page_stride
            s = slot % per_page
            if RECORD == "index_fp8":
                key, scale = _fp8_keys(page, per_page, s, seen, DIM, DOT)
            else:
                tl.static_assert(RECORD == "index_mxfp4")
                key, scale = _mxfp4_keys(page, per_page, s, seen, DIM, DOT)
        ask = (query, token_stride, head_stride, weights, weight_stride, weight_head_stride)
        asked = (key, scale, seen, entry, context - first, low, scores, score_stride)
        if ON_GPU:
            for t in range(token, end):
                _score_one(ask, asked, t, RATIO, HEADS, HEAD_BLOCK, DIM, DOT)
        else:  # the interpreter counts up to no tensor
            while token < end:
                _score_one(ask, asked, token, RATIO, HEADS, HEAD_BLOCK, DIM, DOT)
                token += 1


@triton.jit
def _score_one(
    ask, asked, t,
    RATIO: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Scores of a block of entries for token ``t``."""
    query, token_stride, head_stride, weights, weight_stride, weight_head_stride = ask
    key, scale, seen, entry, offset, low, scores, score_stride = asked
    head = tl.arange(0, HEAD_BLOCK)
    real = head < HEADS
    q = query + t * token_stride + (head * head_stride)[:, None] + tl.arange(0, DIM)[None, :]
    x = operand(tl.load(q, mask=real[:, None], other=0.0), DOT)
    w = weights + t * weight_stride + head * weight_head_stride
    w = widened(tl.load(w, mask=real, other=0.0))
    products = product(key, tl.trans(x), DOT)
    score = tl.sum(tl.maximum(products, 0.0) * w[None, :], axis=1) * scale
    bits = bits_of(tl.where(score == 0.0, 0.0, score))  # -0 and 0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(seen, ordered, -0x80000000)
    mine = tl.minimum((offset + t + 1) // RATIO, score_stride)
    tl.store(scores + (t - low) * score_stride + entry, ordered, mask=entry < mine)


@triton.jit
def _unsigned(scores, at, inside):
    """Scores as unsigned numbers of the same order; 0 where there are none."""
    signed = tl.load(scores + at, mask=inside, other=-0x80000000)
    return signed.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit(
    do_not_specialize=["sequences", "low", "score_stride"],
    do_not_specialize_on_alignment=["offsets", "lengths"],
)
def _select(
    offsets, lengths, sequences, low, topk, scores, score_stride, out,
    RATIO: tl.constexpr, TOPK_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The entries of one query, ascending, -1 behind."""
    row = tl.program_id(0).to(tl.int64)
    token = low + row
    _, position, _, _ = place(token, offsets, lengths, sequences)
    visible = (tl.maximum(position + 1, 0) // RATIO).to(tl.int32)
    out += token * topk
    if visible <= topk:
        entry = tl.arange(0, TOPK_BLOCK)
        tl.store(out + entry, tl.where(entry < visible, entry, -1), mask=entry < topk)
    else:
        visible = tl.minimum(visible, score_stride.to(tl.int32))
        scores += row * score_stride
        at = tl.arange(0, BLOCK)
        digit = tl.arange(0, 256)
        none = visible * 0
        least = none.to(tl.uint32)  # the smallest score chosen, from its highest bits on
        wanted = none + topk  # of those that share these bits
        for i in tl.static_range(4):
            counts = tl.zeros((256,), tl.int32)
            begin = none
            while begin < visible:
                inside = begin + at < visible
                score = _unsigned(scores, begin + at, inside)
                if i > 0:
                    inside = inside & ((score >> (32 - 8 * i)) == least)
                mine = ((score >> (24 - 8 * i)) & 0xFF).to(tl.int32)
                counts += tl.histogram(mine, 256, mask=inside)
                begin += BLOCK
            upto = tl.cumsum(counts, axis=0)
            above = tl.max(upto, axis=0) - upto  # of higher digits
            chosen = tl.max(tl.where(above + counts >= wanted, digit, 0), axis=0)
            wanted -= tl.sum(tl.where(digit == chosen, above, 0), axis=0)
            least = (least << 8) | chosen.to(tl.uint32)
        begin = none
        done = none
        while begin < visible:
            inside = begin + at < visible
            score = _unsigned(scores, begin + at, inside)
            equal = (inside & (score == least)).to(tl.int32)
            nth = tl.cumsum(equal, axis=0)
            takes = (inside & (score > least)) | ((equal > 0) & (nth <= wanted))
            which = done + tl.cumsum(takes.to(tl.int32), axis=0) - 1
            tl.store(out + which, begin + at, mask=takes)
            done += tl.sum(takes.to(tl.int32), axis=0)
            wanted -= tl.sum(equal, axis=0)
            begin += BLOCK


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
    return operand(e4m3_values(codes), DOT), tl.load(scales, mask=seen, other=0.0)


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
