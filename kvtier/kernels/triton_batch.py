"""Where a token of a step stands, found on the device from the batch's lengths."""

import triton
import triton.language as tl

__all__ = ["place"]


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
