"""The highest of many scores in triton: which entries they are of, ascending, and where these lie.

A program holds a block of scores in registers and halves the range that the smallest chosen one
lies in until it is known; of equal scores the smaller entries are taken.  Rows longer than a block
are cut: every part keeps its best, and what is kept is chosen from again, until one block holds it.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.triton_batch import place
from kvtier.kernels.triton_values import bits_of, float_of

__all__ = ["HIGHEST", "UNSEEN", "row_scores", "scratch_bytes", "select_entries"]

WARPS = {4096: 8, 8192: 8, 16384: 16, 32768: 32}
"""Of a program, by how many scores it selects from."""
MANY = 512
"""Programs that are so many that two should fit on a multiprocessor, whatever each then spills."""
SHARE = 4
"""A part keeps one of so many scores, at most."""

ABSENT = tl.constexpr(-0x80000000)
"""Score of no entry: never chosen."""
UNSEEN = tl.constexpr(-0x7FFFFFFF)
"""Lowest score of an entry, chosen where others do not suffice."""
HIGHEST = tl.constexpr(0x7FFFFFFE)


def select_entries(
    scores: Tensor,
    batch: PagedBatch,
    low: int,
    topk: int,
    out: Tensor,
    *,
    ratio: int,
    slots: bool,
) -> None:
    """Write to ``out`` (n, topk) int32 what tokens ``low`` and further choose by ``scores``.

    ``scores`` (count, bound) int32, one row a token, of as many as ``row_scores`` says; an entry's
    lie between UNSEEN and HIGHEST.  They are looked at where a token sees more than ``topk``
    entries, and as far as it sees; else all that it sees are chosen.  ``slots``: physical slots
    instead of entries, -1 where the block table lacks the page.
    """
    count, bound = scores.shape
    block = _block(bound, topk)
    values, entries, width = scores, None, bound
    while True:
        parts = max(1, triton.cdiv(width, block))
        kept = None if parts == 1 else out.new_empty(2, count, row_scores(parts * topk))
        target = out[low:] if kept is None else kept[1]
        _select[(count, parts)](
            batch.cu_seqlens_q,
            batch.kv_lens_device,
            batch.kv_lens_device.shape[0],
            batch.block_table,
            batch.block_table.stride(0),
            batch.block_table.shape[1],
            batch.page_tokens // ratio,
            low,
            topk,
            values,
            entries,
            values.stride(0),
            width,
            target,
            target.stride(0),
            None if kept is None else kept[0],
            RATIO=ratio,
            TOPK_BLOCK=triton.next_power_of_2(topk),
            BLOCK=block,
            SLOTS=slots,
            num_warps=WARPS[block],
            maxnreg=128 if count * parts > MANY and WARPS[block] == 8 else None,
        )
        if kept is None:
            return
        values, entries, width = kept[0], kept[1], parts * topk


def row_scores(entries: int) -> int:
    """Scores that a row of so many entries holds: its rows begin where four are read at once."""
    return -(-entries // 4) * 4


def scratch_bytes(bound: int, topk: int) -> int:
    """Of one token's scores and what is kept of them on the way, at most."""
    block, width, total = _block(bound, topk), bound, 4 * bound
    while width > block:
        width = triton.cdiv(width, block) * topk
        total += 8 * row_scores(width)
    return total


def _block(bound: int, topk: int) -> int:
    """Scores that a program selects from: few that hold all there are, or keep few of theirs.

    Raises ValueError for a ``topk`` past half of the largest block.
    """
    for block in WARPS:
        if topk < bound <= block or SHARE * topk <= block:
            return block
    if 2 * topk <= max(WARPS):
        return max(WARPS)
    raise ValueError(f"{topk=}: {max(WARPS) // 2} entries at most are chosen here")


@triton.jit(
    do_not_specialize=[
        "sequences",
        "columns",
        "low",
        "value_stride",
        "width",
        "out_stride",
        "table_stride",
    ],
    do_not_specialize_on_alignment=["offsets", "lengths", "table", "out"],
)
def _select(
    offsets, lengths, sequences, table, table_stride, columns, entries_a_page,
    low, topk, values, entries, value_stride, width, out, out_stride, kept,
    RATIO: tl.constexpr, TOPK_BLOCK: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The best of one part of a row, ascending; what is missing of ``topk`` is -1 or ABSENT.

    ``values`` (tokens, width) are those of ``entries``, or of all entries in order without them;
    ``kept`` gets those chosen, where they will be chosen from again.
    """
    LAST: tl.constexpr = kept is None
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, position, _, _ = place(low + row, offsets, lengths, sequences)
    visible = (tl.maximum(position + 1, 0) // RATIO).to(tl.int32)
    pages = (table + b * table_stride, columns, entries_a_page)
    target = row * out_stride + part * topk
    out += target
    if visible <= topk:
        if LAST:
            every = tl.arange(0, TOPK_BLOCK)
            chosen = _placed(every, every < visible, pages, SLOTS)
            tl.store(out + every, chosen, mask=every < topk)
    else:
        at = part * BLOCK + tl.arange(0, BLOCK)
        limit = tl.minimum(visible, width) if entries is None else width
        inside = at < limit
        values += tl.multiple_of(row * value_stride, 4)
        value = tl.load(values + at, mask=inside, other=ABSENT)
        least, wanted = _smallest_chosen(value, topk)
        # Counts of both kinds up to each in one: a block has less than 2^16 of either.
        equal = value == least
        upto = tl.cumsum(tl.where(equal, 1, tl.where(value > least, 0x10000, 0)), axis=0)
        above, alike = upto >> 16, upto & 0xFFFF
        takes = (value > least) | (equal & (alike <= wanted))
        which = above + tl.minimum(alike, wanted) - 1
        if entries is None:
            entry = at
        else:
            entry = tl.load(entries + row * value_stride + at, mask=takes, other=0)
        if LAST:
            tl.store(out + which, _placed(entry, takes, pages, SLOTS), mask=takes)
        else:
            tl.store(out + which, entry, mask=takes)
            kept += target
            tl.store(kept + which, value, mask=takes)
            there = tl.minimum(tl.max(above, axis=0) + tl.minimum(tl.max(alike), wanted), topk)
            rest = tl.arange(0, TOPK_BLOCK)
            tl.store(kept + rest, ABSENT, mask=(rest >= there) & (rest < topk))


@triton.jit
def _smallest_chosen(value, topk):
    """The smallest of the ``topk`` highest scores, and how many that are equal to it are taken.

    Of fewer scores all are taken.
    """
    present = value != ABSENT
    reached = tl.sum(present.to(tl.int32), axis=0)  # of scores from low on
    low = tl.min(tl.where(present, value, HIGHEST), axis=0)
    high = tl.max(value, axis=0) + 1
    above = reached * 0  # of scores from high on
    turn = reached * 0
    while (reached > topk) & (high - 1 > low):
        middle = _between(low, high, turn)
        count = tl.sum((value >= middle).to(tl.int32), axis=0)
        enough = count >= topk
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached = tl.where(enough, count, reached)
        above = tl.where(enough, above, count)
        turn += 1
    return low, tl.where(reached > topk, topk - above, topk)


@triton.jit
def _between(low, high, turn):
    """A score between, neither of which it is but perhaps the lower: half way as numbers, which is
    the shorter way for scores that lie near each other, and every third time half way among all
    numbers there are, which is never a long one.  So is it where one of them is no number."""
    half = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
    number = float_of(_reordered(low)) * 0.5 + float_of(_reordered(high)) * 0.5
    near = _reordered(bits_of(number))
    return tl.where((turn % 3 < 2) & (near > low) & (near < high), near, half)


@triton.jit
def _reordered(bits):
    """Bits of a float32 as an integer that is ordered as it is, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _placed(entry, real, pages, SLOTS: tl.constexpr):
    """Entries as they are or as slots, -1 for what is not ``real``."""
    if SLOTS:
        table, columns, entries_a_page = pages
        column = entry // entries_a_page
        page = tl.load(table + column, mask=real & (column < columns), other=-1)
        slot = page.to(tl.int32) * entries_a_page + entry % entries_a_page
        return tl.where(page >= 0, slot, -1)
    else:
        return tl.where(real, entry, -1)
