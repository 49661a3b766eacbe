"""Where tokens of a step stand, found on the device from the batch's lengths."""

import triton
import triton.language as tl

__all__ = ["closing", "place", "tile"]


@triton.jit
def _sequence_of(token, offsets, sequences):
    """The sequence whose tokens ``token`` is one of."""
    low = token * 0
    high = low + sequences
    while low + 1 < high:
        middle = (low + high) // 2
        mine = tl.load(offsets + middle) <= token
        low = tl.where(mine, middle, low)
        high = tl.where(mine, high, middle)
    return low


@triton.jit
def place(token, offsets, lengths, sequences):
    """Sequence, position (negative in a padding row), context and first token, of a token."""
    b = _sequence_of(token, offsets, sequences)
    first = tl.load(offsets + b).to(tl.int64)
    stop = tl.load(lengths + b).to(tl.int64)
    context = stop - (tl.load(offsets + b + 1).to(tl.int64) - first)
    return b, context + token - first, context, first


@triton.jit
def _sequence_with(
    nth, offsets, lengths, sequences, RATIO: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The sequence that has the batch's ``nth`` of something (-1: there are not so many), and how
    many of them are in front of it: entries that close, or with ``TOKENS`` tiles of so many tokens.
    """
    b = nth * 0 - 1
    before = nth * 0
    begin = nth * 0
    while (begin < sequences) & (b < 0):
        row = begin + tl.arange(0, 128)
        real = row < sequences
        new = tl.load(offsets + row + 1, mask=real, other=0)
        new -= tl.load(offsets + row, mask=real, other=0)
        stop = tl.load(lengths + row, mask=real, other=0)
        if TOKENS > 0:
            count = tl.cdiv(new, TOKENS)
        else:
            count = tl.where(stop > 0, stop // RATIO - tl.maximum(stop - new, 0) // RATIO, 0)
        upto = before + tl.cumsum(count.to(tl.int64), axis=0)
        mine = (nth < upto) & (nth >= upto - count)
        b = tl.max(tl.where(mine, row, -1), axis=0)
        before = tl.where(
            b < 0, tl.max(upto, axis=0), tl.max(tl.where(mine, upto - count, 0), axis=0)
        )
        begin += 128
    return b, before


@triton.jit
def _extent(b, offsets, lengths):
    """Context, first token and the one behind the last, of sequence ``b``; -1 as 0."""
    row = tl.maximum(b, 0)
    first = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    return tl.load(lengths + row).to(tl.int64) - (end - first), first, end


@triton.jit
def closing(nth, offsets, lengths, sequences, RATIO: tl.constexpr):
    """The batch's ``nth`` token that closes an entry: sequence (-1: there are not so many),
    position, context and first token."""
    b, before = _sequence_with(nth, offsets, lengths, sequences, RATIO, 0)
    context, first, _ = _extent(b, offsets, lengths)
    position = (context // RATIO + 1 + nth - before) * RATIO - 1
    return b, position, context, first


@triton.jit
def tile(nth, offsets, lengths, sequences, TOKENS: tl.constexpr):
    """The ``nth`` tile of up to ``TOKENS`` tokens of one sequence: sequence (-1: there are not so
    many), its context and first token, and the tile's first token and the one behind its last."""
    b, before = _sequence_with(nth, offsets, lengths, sequences, 1, TOKENS)
    context, first, end = _extent(b, offsets, lengths)
    begin = first + (nth - before) * TOKENS
    return b, context, first, begin, tl.minimum(begin + TOKENS, end)
