"""How absorbed attention is cut into parts, and the launch that merges what these found.

Work is the list of all sequences' blocks of keys, one sequence after the other.  It is cut into
equal parts, whatever the sequences' lengths.  A sequence that lies in one part is finished there.
What several parts found of one is merged here, and what has no keys at all is written here too.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.mla_schedule import MOST_PARTS

__all__ = ["LATENT", "Grid", "finish", "grid_of", "scratch"]

LATENT = 512
"""Values of a row that are key and value both."""


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


def grid_of(
    batch: PagedBatch,
    heads: int,
    processors: int,
    workspace: int,
    *,
    fast: bool,
    packed: bool = False,
) -> Grid:
    """Parts for one program a multiprocessor, as far as there are blocks and the scratch allows.

    ``fast``: for kernels in gluon, whose tiles and blocks are of 64; ``packed``: for packed rows in
    triton, whose blocks are of 64 keys too, whatever the tile.  ``workspace`` is in bytes.
    """
    pairs = heads * max(batch.query_lens, default=1)
    tile = 64 if fast else min(64, max(16, triton.next_power_of_2(pairs)))
    tiles = triton.cdiv(pairs, tile)
    keys = 32 if tile == 64 and not fast and not packed else 64
    blocks = sum(triton.cdiv(kv, keys) for kv in batch.kv_lens)
    most = workspace // (2 * tiles * tile * (LATENT + 1) * 4)
    parts = min(processors // tiles, blocks, most, MOST_PARTS)
    return Grid(tile, tiles, max(1, parts), keys)


def scratch(query: Tensor, sequences: int, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Of the first launch, not filled: what parts find, (2 parts, tiles, tile, 512) float32, and
    log-sum-exps of it without the 512; and the plan of what is merged, (n, 4) int32, a line a part
    or a sequence, whichever are fewer."""
    parts = query.new_empty(2 * grid.parts, grid.tiles, grid.tile, LATENT, dtype=torch.float32)
    part_lse = query.new_empty(2 * grid.parts, grid.tiles, grid.tile, dtype=torch.float32)
    plan = query.new_empty(min(grid.parts, sequences), 4, dtype=torch.int32)
    return parts, part_lse, plan


def finish(
    lengths: tuple[Tensor, Tensor, int],
    out: Tensor,
    lse: Tensor,
    parts: Tensor,
    part_lse: Tensor,
    plan: Tensor,
    grid: Grid,
) -> None:
    """Second launch: merges what several parts found of a sequence into ``out`` (n, heads, 512) and
    ``lse`` (n, heads), and writes what none did.

    ``lengths``: offsets of queries, KV lengths, sequences; then what ``scratch`` made.
    """
    n, heads, _ = out.shape
    sequences, count = lengths[2], plan.shape[0]
    by_part = sequences > grid.parts
    scanners = min(sequences, 64) if by_part else 1
    units = grid.tiles * grid.tile * (LATENT // 32)
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
        grid.tiles * grid.tile,
        HEADS=heads,
        BY_PART=by_part,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["sequences", "tokens", "count", "scanners", "stride"],
    do_not_specialize_on_alignment=["offsets", "lengths"],
)
def _merge(
    offsets, lengths, sequences, tokens, count, scanners, out, lse, parts, part_lse, plan, stride,
    HEADS: tl.constexpr, BY_PART: tl.constexpr,
):  # fmt: skip
    """Outputs of sequences that several parts hold, by sequence or by the part that it starts in;
    the last ``scanners`` programs write those of tokens that see no keys."""
    x = tl.program_id(0)
    y = tl.program_id(1)
    if x >= count:
        if y == 0:
            if BY_PART:
                b = x - count
                while b < sequences:
                    if tl.load(lengths + b) <= 0:
                        _clear(out, lse, tl.load(offsets + b), tl.load(offsets + b + 1), HEADS)
                    b += scanners
            if x == count:
                _clear(out, lse, tl.load(offsets + sequences), tokens, HEADS)
    else:
        one = tl.load(plan + 4 * x)
        last = tl.load(plan + 4 * x + 1)
        first = tl.load(plan + 4 * x + 2)
        pairs = tl.load(plan + 4 * x + 3) * HEADS
        if not BY_PART:
            nothing = tl.load(lengths + x) <= 0
            if nothing:
                one = -1  # the plan says nothing of it
                if y == 0:
                    _clear(out, lse, tl.load(offsets + x), tl.load(offsets + x + 1), HEADS)
        if one >= 0:
            held = last - one + 1
            keep = (out, lse, parts, part_lse, stride, one, last, first, pairs, y)
            if held <= 4:
                _merge_rows(*keep, tl.num_programs(1), HEADS, 4, 512)
            elif held <= 16:
                _merge_rows(*keep, tl.num_programs(1), HEADS, 16, 128)
            else:
                _merge_rows(*keep, tl.num_programs(1), HEADS, 128, 32)


@triton.jit
def _merge_rows(
    out, lse, parts, part_lse, stride, one, last, first, pairs, unit, step,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every ``step``-th piece of a sequence's outputs: some columns of one head of one token."""
    while unit < pairs * (512 // COLUMNS):
        pair = unit // (512 // COLUMNS)
        column = unit % (512 // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        at_out = first.to(tl.int64) * HEADS + pair
        _merge_row(
            out, lse, parts, part_lse, stride, one, last, pair, at_out, column, BLOCK, COLUMNS
        )
        unit += step


@triton.jit
def _merge_row(
    out, lse, parts, part_lse, stride, one, last, pair, at_out, column,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's output, of one token."""
    top = tl.full([1], -float("inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    sofar = tl.zeros([COLUMNS], tl.float32)
    at = one
    while at <= last:
        part = at + tl.arange(0, BLOCK)
        there = part <= last
        row = (part.to(tl.int64) * 2 + (part == one)) * stride + pair
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
