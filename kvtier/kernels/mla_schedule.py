"""Which blocks of keys each program of absorbed attention takes: cut up once for all layers of a
step, on the device, from the batch's lengths.

Work is the list of all sequences' blocks of 64 keys, one sequence after the other, and it is cut
into parts that follow each other.  A part costs its blocks, something for each sequence that it
meets, and more for each that it holds only some of, as that has to be merged.  Several ways to cut
are tried side by side, and that is taken whose dearest part is the cheapest: so sequences of one
length stay whole if they can.  Each way puts ``extra`` blocks that nobody has before each sequence
and makes all parts equally long, ``quota`` blocks.

What a program would have to look up before it can fetch its first keys is in its part's record.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.planned import PerBatch

__all__ = ["BLOCK", "FIELDS", "MOST_PARTS", "Schedule", "scheduled"]

BLOCK = 64
"""Keys of a block; a page holds a multiple of it."""
FIELDS = 16
"""Numbers of a part's record, see ``Schedule.parts``; some are spare."""
MOST_PARTS = 256
"""Programs side by side: more than multiprocessors of any H100 or H200, and a power of two."""
WAYS = tl.constexpr(32)
"""Ways to cut: half of them without ``extra``, each with quotas from the least on."""
SEQUENCE = tl.constexpr(2)
"""Blocks that could be met while a program turns to a sequence."""
PIECE = tl.constexpr(3)
"""Blocks that could be met while a program stores, and merges, what it found of a piece of one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What programs go by; all int32 on the batch's device."""

    parts: Tensor
    """(parts, 16): first block and the one behind the last, counted over all sequences; the
    sequence that the first is of, that sequence's first block, and the first and the last part
    that hold some of it; the last part that holds some of the sequence that the last block is of;
    how much there is, sequences and spare tokens, that has no keys; then rows of the pool at which
    the part's first four blocks begin."""
    rows: Tensor
    """(blocks,) the same of every block."""
    counts: Tensor
    """(parts, tiles, 2) zeros, and zeros again after each launch: how many programs are done."""


_schedules: PerBatch[Schedule] = PerBatch()


def scheduled(batch: PagedBatch, tokens: int, parts: int, tiles: int) -> Schedule:
    """The batch's schedule for so many query tokens, parts and programs beside each other.

    Launches of one schedule follow each other; they share its counts.  ``parts`` may be 1 to
    ``MOST_PARTS``, which is not checked.  Asks the device nothing.
    """
    return _schedules.get(
        batch, (tokens, parts, tiles), lambda: _schedule(batch, tokens, parts, tiles)
    )


def _schedule(batch: PagedBatch, tokens: int, parts: int, tiles: int) -> Schedule:
    table, lengths = batch.block_table, batch.kv_lens_device
    sequences = lengths.shape[0]
    blocks = sum(triton.cdiv(kv, BLOCK) for kv in batch.kv_lens)
    made = Schedule(
        table.new_empty(parts, FIELDS, dtype=torch.int32),
        table.new_empty(max(1, blocks), dtype=torch.int32),
        table.new_empty(parts, tiles, 2, dtype=torch.int32),
    )
    costs = table.new_empty(WAYS.value, dtype=torch.int32)
    _try[(WAYS.value,)](lengths, sequences, parts, costs, MOST=MOST_PARTS, num_warps=4)
    _plan[(parts + sequences,)](
        table,
        table.stride(0),
        batch.page_tokens // BLOCK,
        batch.cu_seqlens_q,
        lengths,
        sequences,
        tokens,
        parts,
        costs,
        made.parts,
        made.rows,
        blocks,
        made.counts,
        2 * tiles,
        num_warps=4,
    )
    return made


@triton.jit(
    do_not_specialize=["sequences", "parts"], do_not_specialize_on_alignment=["lengths", "costs"]
)
def _try(lengths, sequences, parts, costs, MOST: tl.constexpr):
    """What the dearest part would cost, cut in way ``x``."""
    x = tl.program_id(0)
    quota, extra, _ = _way(lengths, sequences, parts, x)
    part = tl.arange(0, MOST)
    at = part * 0
    begun = part * 0
    ended = part * 0
    to = part * 0
    to_begun = part * 0
    to_ended = part * 0
    lane = tl.arange(0, 16)
    virtual = x * 0
    low = x * 0
    while low < sequences:
        count = _count(lengths, low + lane, sequences)
        begin = (virtual + tl.cumsum(count + (count > 0) * extra, 0) - count)[None, :]
        met = tl.minimum(tl.maximum((part * quota)[:, None] - begin, 0), count[None, :])
        at += tl.sum(met, 1)
        begun += tl.sum((met > 0).to(tl.int32), 1)
        ended += tl.sum(((met > 0) & (met == count[None, :])).to(tl.int32), 1)
        met = tl.minimum(tl.maximum((part * quota + quota)[:, None] - begin, 0), count[None, :])
        to += tl.sum(met, 1)
        to_begun += tl.sum((met > 0).to(tl.int32), 1)
        to_ended += tl.sum(((met > 0) & (met == count[None, :])).to(tl.int32), 1)
        virtual += tl.sum(count + (count > 0) * extra, 0)
        low += 16
    met = to_begun - ended
    pieces = tl.minimum(begun - ended + to_begun - to_ended, met)
    cost = to - at + SEQUENCE * met + PIECE * pieces
    tl.store(costs + x, tl.max(tl.where((part < parts) & (to > at), cost, 0), 0))


@triton.jit
def _way(lengths, sequences, parts, x):
    """Blocks of a part, and those before a sequence, in way ``x``; how many sequences are empty."""
    total, there = _totals(lengths, sequences, x)
    extra = tl.where(x < WAYS // 2, 0, SEQUENCE)
    least = tl.maximum(tl.cdiv(total + there * extra, parts), 1)
    return least + x % (WAYS // 2), extra, sequences - there


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "pages_of",
        "sequences",
        "tokens",
        "parts",
        "blocks",
        "counts_each",
    ],
    do_not_specialize_on_alignment=["table", "offsets", "lengths", "costs"],
)
def _plan(
    table, table_stride, pages_of, offsets, lengths, sequences, tokens, parts, costs, records,
    rows, blocks, counts, counts_each,
):  # fmt: skip
    """The record of part ``x``, or the rows of sequence ``x - parts``."""
    x = tl.program_id(0)
    if x < parts:
        way = tl.arange(0, WAYS)
        way = tl.min(tl.load(costs + way) * WAYS + way, 0) % WAYS
        quota, extra, without = _way(lengths, sequences, parts, way)
        at = _met(lengths, sequences, x * quota, extra)
        stop = _met(lengths, sequences, (x + 1) * quota, extra)
        b, begin, rank = _find(lengths, sequences, at, x, True)
        to = records + x * 16
        tl.store(to, at)
        tl.store(to + 1, stop)
        tl.store(to + 2, b)
        tl.store(to + 3, begin)
        end = begin + _count(lengths, b, sequences)
        before = (rank + 1) * extra
        tl.store(to + 4, (begin + before) // quota)
        tl.store(to + 5, (end - 1 + before) // quota)
        last, last_begin, rank = _find(lengths, sequences, stop - 1, x, True)
        last_end = last_begin + _count(lengths, last, sequences)
        tl.store(to + 6, (last_end - 1 + (rank + 1) * extra) // quota)
        spare = tl.load(offsets + sequences) < tokens
        tl.store(to + 7, without + spare.to(tl.int32))
        lane = tl.arange(0, 64)
        i = x * 0
        while i < counts_each:
            tl.store(counts + x * counts_each + i + lane, 0, mask=i + lane < counts_each)
            i += 64
        i = x * 0
        while (i < 4) & (at + i < stop):
            while at + i >= end:
                b += 1
                begin = end
                end = begin + _count(lengths, b, sequences)
            row = _row(table, table_stride, pages_of, b, at + i - begin, i >= 0)
            tl.store(to + 8 + i, row)
            i += 1
    else:
        b, begin, _ = _find(lengths, sequences, x, x - parts, False)
        count = _count(lengths, b, sequences)
        block = x * 0 + tl.arange(0, 128)
        low = x * 0
        while low < count:
            there = (low + block < count) & (begin + low + block < blocks)
            row = _row(table, table_stride, pages_of, b, low + block, there)
            tl.store(rows + begin + low + block, row, mask=there)
            low += 128


@triton.jit
def _count(lengths, b, sequences):
    """Blocks of a sequence."""
    length = tl.load(lengths + b, mask=b < sequences, other=0)
    return tl.cdiv(tl.maximum(length, 0), 64)


@triton.jit
def _row(table, table_stride, pages_of, b, block, there):
    """Row of the pool at which a sequence's block begins."""
    page = tl.load(table + b.to(tl.int64) * table_stride + block // pages_of, mask=there, other=0)
    return (page * pages_of + block % pages_of) * 64


@triton.jit
def _totals(lengths, sequences, x):
    """Blocks of all sequences, and how many sequences have some."""
    lane = tl.arange(0, 128)
    total = x * 0
    there = x * 0
    low = x * 0
    while low < sequences:
        count = _count(lengths, low + lane, sequences)
        total += tl.sum(count, 0)
        there += tl.sum((count > 0).to(tl.int32), 0)
        low += 128
    return total, there


@triton.jit
def _met(lengths, sequences, stop, extra):
    """Blocks before place ``stop`` of the list in which each sequence has ``extra`` more."""
    lane = tl.arange(0, 128)
    found = stop * 0
    virtual = stop * 0
    low = stop * 0
    while low < sequences:
        count = _count(lengths, low + lane, sequences)
        begin = virtual + tl.cumsum(count + (count > 0) * extra, 0) - count
        found += tl.sum(tl.minimum(tl.maximum(stop - begin, 0), count), 0)
        virtual += tl.sum(count + (count > 0) * extra, 0)
        low += 128
    return found


@triton.jit
def _find(lengths, sequences, at, wanted, of_block):
    """The sequence that block ``at`` is of, or else the ``wanted``-th; its first block, and how
    many before it have some."""
    lane = tl.arange(0, 128)
    b = at * 0
    begin = at * 0
    rank = at * 0
    before = at * 0
    low = at * 0
    while low < sequences:
        there = low + lane < sequences
        count = _count(lengths, low + lane, sequences)
        ends = before + tl.cumsum(count, 0)
        passed = there & tl.where(of_block, ends <= at, low + lane < wanted)
        b += tl.sum(passed.to(tl.int32), 0)
        rank += tl.sum((passed & (count > 0)).to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(passed, ends, 0), 0))
        before += tl.sum(count, 0)
        low += 128
    return tl.minimum(b, sequences - 1), begin, rank
