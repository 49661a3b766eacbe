"""Arithmetic in one fixed order of operations, so that every backend arrives at the same bits.

A library's own sums and exponentials differ from device to device and from shape to shape in their
last bits, which quantising then turns into other bytes.  What is pooled or normed on its way into a
page is computed from these instead: additions, multiplications, divisions and square roots that
each round once (no fused multiply-add), in the order given here.  Knows nothing of what is summed.
"""

import torch
from torch import Tensor

__all__ = ["exp_of_negative", "one_over_root", "sum_by_halves"]

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375
"""Nine significant bits: times an exponent it is exact."""
LN2_LOW = -2.12194440e-4
ROUNDER = 12582912.0
"""1.5 * 2**23: added to a float32, it leaves the nearest integer in the lowest bits."""
ROUNDER_BITS = 0x4B400000
LEAST = -87.0
"""Below it the exponential counts as 0, before it would be subnormal."""
TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def sum_by_halves(terms: Tensor, dim: int) -> Tensor:
    """Sum over ``dim``, which goes: the second half is added to the first, again and again.

    An odd term at the end waits for the next round.  The order depends on the number of terms
    alone, so a sum has the same bits whatever else a call holds.
    """
    terms = terms.movedim(dim, 0)
    while (count := terms.shape[0]) > 1:
        half = count // 2
        folded = terms[:half] + terms[half : 2 * half]
        terms = torch.cat((folded, terms[2 * half :])) if count % 2 else folded
    return terms[0]


def exp_of_negative(values: Tensor) -> Tensor:
    """``exp`` of float32 ``values`` that are at most 0, within 2 units in the last place.

    0 below -87, -inf included; NaN stays NaN.  Wider values are torch's to compute.
    """
    if values.dtype != torch.float32:
        return torch.exp(values)
    small = values < LEAST
    inside = torch.where(small, LEAST, values)
    shifted = inside * LOG2_E + ROUNDER
    whole = shifted - ROUNDER
    rest = (inside - whole * LN2_HIGH) - whole * LN2_LOW
    power = torch.full_like(rest, TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        power = power * rest + coefficient
    scale = (shifted.view(torch.int32) - (ROUNDER_BITS - 127)) << 23
    return torch.where(small, 0.0, power * scale.view(torch.float32))


def one_over_root(values: Tensor) -> Tensor:
    """1 over the square root of ``values``, each step rounded to the nearest."""
    # torch's own float32 root is off by one now and then; twice the digits, rounded, are not.
    return 1 / torch.sqrt(values.to(torch.float64)).to(values.dtype)
