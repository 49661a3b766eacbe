"""Absorbed attention over paged latent rows in triton: one launch over all rows, one that merges.

Work is the list of all sequences' blocks of keys, one sequence after the other.  It is cut into
equal parts, whatever the sequences' lengths; a part walks over the segments of sequences that it
holds.  A sequence that lies in one part is finished there; what several parts found of one is
merged by the second launch, which also writes what has no keys at all.

Of the batch the kernels read tensors; its ``query_lens`` and ``kv_lens`` only bound the grid.  In a
captured graph they are the lengths that replays may reach.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvtier.config import parse_bytes
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.triton_write import adjacent

__all__ = ["absorbed"]

LATENT, ROPE = 512, 64
"""Values of a row: its latent, which is key and value, and its rotated key."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class Grid:
    """How one call is cut up."""

    tile: int
    """Rows of a program: pairs of a query token and a head, of one sequence."""
    tiles: int
    """Programs beside each other, which share a sequence's keys."""
    parts: int
    """Parts that the keys of all sequences are cut into."""
    keys: int
    """Keys of a block."""


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

    Scores and sums are float32; weights are rounded to the rows' type before they meet the values.
    Query tokens that belong to no sequence get output 0 and log-sum-exp -inf, as those without
    keys.  Asks the device nothing.
    """
    if latent_dim != LATENT or rows.shape[-1] != LATENT + ROPE or query.shape[-1] != LATENT + ROPE:
        raise ValueError(
            f"query width {query.shape[-1]}, row width {rows.shape[-1]}, {latent_dim=}"
        )
    if rows.dtype != query.dtype:
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    query, rows = adjacent(query), adjacent(rows)
    n, heads, _ = query.shape
    grid = _grid(batch, heads, query, parse_bytes(workspace_bytes, "workspace_bytes"))
    sequences = batch.kv_lens_device.shape[0]
    out = torch.empty(n, heads, LATENT, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    parts = query.new_empty(2 * grid.parts, grid.tiles, grid.tile, LATENT, dtype=torch.float32)
    part_lse = query.new_empty(2 * grid.parts, grid.tiles, grid.tile, dtype=torch.float32)
    plan = query.new_empty(2 + sequences + grid.parts, dtype=torch.int32)
    if n == 0 or heads == 0:
        return out, lse
    lengths = (batch.cu_seqlens_q, batch.kv_lens_device, sequences)
    _attend[(grid.tiles, grid.parts)](
        query,
        *query.stride()[:2],
        rows,
        rows.stride(0),
        batch.block_table,
        batch.block_table.stride(0),
        batch.page_tokens,
        *lengths,
        scale * LOG2E.value,
        out,
        lse,
        parts,
        part_lse,
        plan,
        HEADS=heads,
        TILE=grid.tile,
        KEYS=grid.keys,
        SEQUENCES=triton.next_power_of_2(sequences),
        ON_GPU=query.is_cuda,
        num_warps=8 if grid.tile == 64 else 4,
        num_stages=2,
    )
    merge(lengths, out, lse, parts, part_lse, plan, grid)
    return out, lse


def merge(
    lengths: tuple[Tensor, Tensor, int],
    out: Tensor,
    lse: Tensor,
    parts: Tensor,
    part_lse: Tensor,
    plan: Tensor,
    grid: Grid,
    *,
    pdl: bool = False,
) -> None:
    """Second launch: merges what several parts found of a sequence, and writes what none did."""
    n, heads, _ = out.shape
    sequences = lengths[2]
    by_part = sequences > grid.parts
    count = grid.parts if by_part else sequences
    scanners = min(sequences, 64)
    columns = 128
    units = grid.tiles * grid.tile * (LATENT // columns)
    beside = max(1, min(units, 4096 // count)) if out.is_cuda else 2
    _merge[(count + scanners, beside)](
        *lengths,
        n,
        count,
        scanners,
        out,
        lse,
        parts,
        part_lse,
        plan,
        HEADS=heads,
        TILE=grid.tile,
        TILES=grid.tiles,
        BY_PART=by_part,
        BLOCK=16,
        COLUMNS=columns,
        EARLY=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def _grid(batch: PagedBatch, heads: int, query: Tensor, workspace: int) -> Grid:
    """Parts for one program a multiprocessor, as far as there are blocks and the scratch allows."""
    pairs = heads * max(batch.query_lens, default=1)
    tile = min(64, max(16, triton.next_power_of_2(pairs)))
    tiles = triton.cdiv(pairs, tile)
    keys = 32 if tile == 64 else 64
    processors = (
        torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 4
    )
    blocks = sum(triton.cdiv(kv, keys) for kv in batch.kv_lens)
    most = workspace // (2 * tiles * tile * (LATENT + 1) * 4)
    return Grid(tile, tiles, max(1, min(processors // tiles, blocks, most)), keys)


@triton.jit(
    do_not_specialize=["table_stride", "sequences", "scale"],
    do_not_specialize_on_alignment=["table", "offsets", "lengths"],
)
def _attend(
    query, token_stride, head_stride, rows, row_stride, table, table_stride, page_tokens,
    offsets, lengths, sequences, scale, out, lse, parts, part_lse, plan,
    HEADS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """One part of the keys, for one tile of each sequence's (token, head) pairs."""
    m = tl.program_id(0)
    p = tl.program_id(1)
    sequence = tl.arange(0, SEQUENCES)
    counts = tl.cdiv(tl.load(lengths + sequence, mask=sequence < sequences, other=0), KEYS)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    quota = tl.maximum(tl.cdiv(total, tl.num_programs(1)), 1)
    at = p * quota
    stop = tl.minimum(at + quota, total)
    b = tl.sum((ends <= at).to(tl.int32), 0)
    begin = tl.max(tl.where(ends <= at, ends, 0), 0)
    if m == 0:  # for the second launch
        tl.store(plan + 2 + sequences + p, tl.where((begin < at) & (at < stop), b, -1))
        if p == 0:
            tl.store(plan + 2 + sequence, ends, mask=sequence < sequences)
            tl.store(plan + 1, 0)
            tl.store(plan, quota)
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
            keys = (rows, row_stride, pages, page_tokens, kv_len, position, scale)
            if ON_GPU:
                for block in range(low, high):
                    top, weight, sofar = _meet(
                        q, q_rope, *keys, block, top, weight, sofar, KEYS, ON_GPU
                    )
            else:  # the interpreter counts up to no tensor
                block = low
                while block < high:
                    top, weight, sofar = _meet(
                        q, q_rope, *keys, block, top, weight, sofar, KEYS, ON_GPU
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
        at = begin + high
        begin += count
        b += 1


@triton.jit
def _meet(
    q, q_rope, rows, row_stride, pages, page_tokens, kv_len, position, scale,
    block, top, weight, sofar, KEYS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A block of keys more: the largest score so far, sum of weights and of weighted values."""
    d = tl.arange(0, 512)
    r = tl.arange(0, 64)
    key = block * KEYS + tl.arange(0, KEYS)
    there = key < kv_len
    page = tl.load(pages + key // page_tokens, mask=there, other=0).to(tl.int64)
    row = rows + (page * page_tokens + key % page_tokens)[:, None] * row_stride
    k = tl.load(row + d[None, :], mask=there[:, None], other=0.0)
    k_rope = tl.load(row + 512 + r[None, :], mask=there[:, None], other=0.0)
    score = _product(q_rope, tl.trans(k_rope), None, ON_GPU)
    score = _product(q, tl.trans(k), score, ON_GPU) * scale
    score = tl.where(key[None, :] <= position[:, None], score, -float("inf"))
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


@triton.jit(
    do_not_specialize=["sequences", "tokens", "count", "scanners"],
    do_not_specialize_on_alignment=["offsets", "lengths"],
)
def _merge(
    offsets, lengths, sequences, tokens, count, scanners, out, lse, parts, part_lse, plan,
    HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BY_PART: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs of sequences that several parts hold, one after the other or by the part that one
    goes on into; the last ``scanners`` programs write those of tokens that see no keys."""
    x = tl.program_id(0)
    y = tl.program_id(1)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if x >= count:
        if y == 0:
            b = x - count
            while b < sequences:
                if tl.load(lengths + b) <= 0:
                    _clear(out, lse, tl.load(offsets + b), tl.load(offsets + b + 1), HEADS)
                b += scanners
            if x == count:
                _clear(out, lse, tl.load(offsets + sequences), tokens, HEADS)
    else:
        quota = tl.load(plan)
        b = x
        if BY_PART:
            b = tl.load(plan + 2 + sequences + x)
        if b >= 0:
            begin = tl.load(plan + 1 + b)
            one = begin // quota
            last = (tl.load(plan + 2 + b) - 1) // quota
            first = tl.load(offsets + b)
            units = (tl.load(offsets + b + 1) - first) * HEADS * (512 // COLUMNS)
            mine = one < last
            if BY_PART:  # it may go on into several
                mine = mine & (one == x - 1)
            units = tl.where(mine, units, 0)
            unit = y
            while unit < units:
                pair = unit // (512 // COLUMNS)
                column = unit % (512 // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
                _merge_row(
                    out, lse, parts, part_lse, one, last, pair,
                    first.to(tl.int64) * HEADS + pair, column, TILE, TILES, BLOCK, COLUMNS,
                )  # fmt: skip
                unit += tl.num_programs(1)


@triton.jit
def _merge_row(
    out, lse, parts, part_lse, one, last, pair, at_out, column,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's output, of one token."""
    top = tl.full([1], -float("inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    sofar = tl.zeros([COLUMNS], tl.float32)
    at = one
    while at <= last:
        part = at + tl.arange(0, BLOCK)
        there = part <= last
        row = (part.to(tl.int64) * 2 + (part == one)) * (TILES * TILE) + pair
        value = tl.load(part_lse + row, mask=there, other=-float("inf"))
        found = tl.load(
            parts + row[:, None] * 512 + column[None, :], mask=there[:, None], other=0.0
        )
        new_top = tl.maximum(top, tl.max(value, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        share = tl.exp(value - base)
        shrink = tl.exp(top - base)
        sofar = sofar * shrink + tl.sum(found * share[:, None], 0)
        weight = weight * shrink + tl.sum(share, 0)
        top = new_top
        at += BLOCK
    safe = tl.where(weight > 0, weight, 1.0)
    tl.store(out + at_out * 512 + column, (sofar / safe).to(out.dtype.element_ty))
    found_lse = tl.where(weight > 0, top + tl.log(safe), -float("inf"))
    tl.store(lse + at_out + tl.arange(0, 1), found_lse)


@triton.jit
def _clear(out, lse, token, stop, HEADS: tl.constexpr):
    """Tokens from ``token`` to ``stop`` attend to nothing."""
    row = token.to(tl.int64) * HEADS
    end = stop * HEADS
    d = tl.arange(0, 512)
    while row < end:
        rows = row + tl.arange(0, 8)
        there = rows < end
        none = tl.zeros([8, 512], out.dtype.element_ty)
        tl.store(out + rows[:, None] * 512 + d[None, :], none, mask=there[:, None])
        tl.store(lse + rows, tl.full([8], -float("inf"), tl.float32), mask=there)
        row += 8
