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
from kvtier.kernels.triton_batch import place
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

KEYS = 128
"""Keys of one program, at most."""
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
    query = adjacent(query)
    n, heads, dim = query.shape
    page_stride, per_page, there = pool_of(keys, record)
    if dim != 128 or weights.shape != (n, heads):
        raise ValueError(f"query {tuple(query.shape)}, weights {tuple(weights.shape)}")
    if query.dtype is torch.uint8 and record.pack is None:
        raise ValueError("codes are asked of packed keys")
    out = torch.empty(n, topk, dtype=torch.int32, device=query.device)
    where = (batch.cu_seqlens_q, batch.kv_lens_device, batch.kv_lens_device.shape[0])
    bound = max(batch.kv_lens, default=0) // ratio
    dot = precision(query, keys, record, on_gpu=query.is_cuda)
    tile = KEYS if dot == "bf16" else KEYS // 2
    block = _queries_at_a_time(parse_bytes(workspace_bytes, "workspace_bytes"), bound)
    scores = query.new_empty(min(n, block), bound, dtype=torch.int32)
    for low in range(0, n, block):
        count = min(block, n - low)
        if bound > topk:  # else there is nothing to choose
            _score[(count, triton.cdiv(bound, tile))](
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
                topk,
                scores,
                scores.stride(0),
                batch.page_tokens // ratio,
                RATIO=ratio,
                HEADS=heads,
                HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
                DIM=dim,
                KEYS=tile,
                STEP=dim // 2 if dot == "bf16" else dim // 4,
                RECORD=record.name,
                DOT=dot,
                num_warps=4,
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
    do_not_specialize=["there", "columns", "sequences", "low", "score_stride", "table_stride"],
    do_not_specialize_on_alignment=["weights", "table", "offsets", "lengths"],
)
def _score(
    query, token_stride, head_stride, weights, weight_stride, weight_head_stride,
    keys, page_stride, per_page, there,
    table, table_stride, columns, offsets, lengths, sequences,
    low, topk, scores, score_stride, entries_a_page,
    RATIO: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, STEP: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Scores of a block of entries for one query, those that it sees."""
    row = tl.program_id(0).to(tl.int64)
    token = low + row
    b, position, _, _ = place(token, offsets, lengths, sequences)
    visible = tl.minimum((position + 1) // RATIO, score_stride)
    begin = tl.program_id(1).to(tl.int64) * KEYS
    entry = begin + tl.arange(0, KEYS)
    if (begin < visible) & (visible > topk):
        column = entry // entries_a_page
        known = (entry < visible) & (column < columns)
        page = tl.load(table + b * table_stride + column, mask=known, other=-1).to(tl.int64)
        slot = page * entries_a_page + entry % entries_a_page
        seen = known & (page >= 0) & (slot < there)
        slot = tl.where(seen, slot, 0)
        head = tl.arange(0, HEAD_BLOCK)
        real = head < HEADS
        q = query + token * token_stride + (head * head_stride)[:, None]
        if RECORD == "dense":
            products = _dot_dense(q, real, keys + slot * page_stride, seen, DIM, STEP, DOT)
        else:
            page = keys + slot // per_page * page_stride
            s = slot % per_page
            if RECORD == "index_fp8":
                products = _dot_fp8(q, real, page, per_page, s, seen, DIM, STEP, DOT)
            else:
                tl.static_assert(RECORD == "index_mxfp4")
                products = _dot_mxfp4(q, real, page, per_page, s, seen, DIM, STEP, DOT)
        w = tl.load(
            weights + token * weight_stride + head * weight_head_stride, mask=real, other=0.0
        )
        score = tl.sum(tl.maximum(products, 0.0) * widened(w)[:, None], axis=0)
        bits = bits_of(tl.where(score == 0.0, 0.0, score))  # -0 and 0 are equal
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ordered = tl.where(seen, ordered, -0x80000000)
        tl.store(scores + row * score_stride + entry, ordered, mask=entry < visible)


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


# Products (heads, keys), some values of each at a time.


@triton.jit
def _dot_dense(
    q, real, rows, seen, DIM: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    products = tl.zeros((q.shape[0], rows.shape[0]), tl.float32)
    for begin in range(0, DIM, STEP):
        at = (begin + tl.arange(0, STEP))[None, :]
        x = tl.load(q + at, mask=real[:, None], other=0.0)
        key = tl.load(rows[:, None] + at, mask=seen[:, None], other=0.0)
        products += product(operand(x, DOT), tl.trans(operand(key, DOT)), DOT)
    return products


@triton.jit
def _dot_fp8(
    q, real, pages, per_page, s, seen,
    DIM: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    products = tl.zeros((q.shape[0], s.shape[0]), tl.float32)
    rows = (pages + s * DIM)[:, None]
    for begin in range(0, DIM, STEP):
        at = (begin + tl.arange(0, STEP))[None, :]
        x = tl.load(q + at, mask=real[:, None], other=0.0)
        codes = tl.load(rows + at, mask=seen[:, None], other=0)
        products += product(operand(x, DOT), tl.trans(operand(e4m3_values(codes), DOT)), DOT)
    scales = (pages + per_page * DIM + s * 4).to(tl.pointer_type(tl.float32))
    return products * tl.load(scales, mask=seen, other=0.0)[None, :]


@triton.jit
def _dot_mxfp4(
    q, real, pages, per_page, s, seen,
    DIM: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Even values lie in low halves of bytes and odd ones in high."""
    products = tl.zeros((q.shape[0], s.shape[0]), tl.float32)
    for begin in range(0, DIM // 2, STEP // 2):
        byte = (begin + tl.arange(0, STEP // 2))[None, :]
        pairs = tl.load((pages + s * (DIM // 2))[:, None] + byte, mask=seen[:, None], other=0)
        pairs = pairs.to(tl.int32)
        scales = (pages + per_page * (DIM // 2) + s * (DIM // 32))[:, None] + byte // 16
        power = power_of_two(tl.load(scales, mask=seen[:, None], other=127).to(tl.int32))
        even = operand(tl.load(q + 2 * byte, mask=real[:, None], other=0.0), DOT)
        odd = operand(tl.load(q + 2 * byte + 1, mask=real[:, None], other=0.0), DOT)
        products += product(even, tl.trans(operand(_e2m1_values(pairs & 15) * power, DOT)), DOT)
        products += product(odd, tl.trans(operand(_e2m1_values(pairs >> 4) * power, DOT)), DOT)
    return products
