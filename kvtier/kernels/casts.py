"""Number formats of packed records, in integer arithmetic on the bits of float32.

Every rounding that ends up in a stored byte happens here, without a float cast: what an integer
operation does is the same on every device and in every interpreter, so other backends can be held
to these bytes.  All round to nearest, ties to even.  Knows nothing of records or pages.
"""

import torch
from torch import Tensor

__all__ = [
    "bf16_bits",
    "bf16_values",
    "e2m1_codes",
    "e2m1_values",
    "e4m3_codes",
    "e4m3_values",
    "power_of_two",
    "round_to_bf16",
    "tile_exponents",
    "ue8m0_values",
]

E4M3_MOST = 448.0
E2M1_MOST = 6.0

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 0x7FFFFFFF
"""Clears the sign bit."""
_INFINITY = 0x7F800000


def bf16_bits(values: Tensor) -> Tensor:
    """bfloat16 of float32 ``values``, as the 16 bits (int32).  NaN stays NaN."""
    bits = values.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding could carry a NaN's mantissa over into zero; its high bits with the quiet bit cannot.
    is_nan = (bits & _SIGN) > _INFINITY
    return torch.where(is_nan, (bits >> 16) | 0x40, rounded) & 0xFFFF


def bf16_values(bits: Tensor) -> Tensor:
    """float32 values of bfloat16 bits (any integer type), exact."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def round_to_bf16(values: Tensor) -> Tensor:
    """``values`` rounded to what bfloat16 can hold, as float32."""
    return bf16_values(bf16_bits(values))


def e4m3_codes(values: Tensor) -> Tensor:
    """float8 e4m3 (OCP "fn") of float32 ``values``, as uint8.

    Saturates at 448, infinities and NaN too, so 0x7F and 0xFF never come out.
    """
    bits = values.contiguous().view(torch.int32)
    size = (bits & _SIGN).clamp_max(0x43E00000)  # 448.0
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the codes count multiples of 2**-9: adding 2**14 leaves that count, rounded, in
    # the lowest bits.
    small = (size.view(torch.float32) + 16384.0).view(torch.int32) - 0x46800000
    code = torch.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


def e4m3_values(codes: Tensor) -> Tensor:
    """float32 values of e4m3 codes (uint8), exact; 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def e2m1_codes(values: Tensor) -> Tensor:
    """float4 e2m1 of float32 ``values``, as uint8 in 0..15 (bit 3 the sign).  Saturates at 6."""
    bits = values.contiguous().view(torch.int32)
    size = (bits & _SIGN).clamp_max(0x40C00000)  # 6.0
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - (126 << 1)
    # Below 1 the codes count halves.
    small = (size.view(torch.float32) + 4194304.0).view(torch.int32) - 0x4A800000
    code = torch.where(size < 0x3F800000, small, normal)
    return (code | ((bits >> 28) & 0x8)).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of e2m1 codes (uint8, 0..15)."""
    grid = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=codes.device)
    return grid[codes.to(torch.int64)]


def tile_exponents(tiles: Tensor, *, most: float, floor: float) -> Tensor:
    """Biased exponent (int32) of the power of two that scales each tile (..., n) into a format.

    The smallest power of two p, as a UE8M0 byte, with max(|tile|, ``floor``) / p <= ``most``, for
    ``most`` 448 or 6.  At most 254, whatever the tile holds: infinities and NaN count as largest.
    """
    mantissa, shift = {E4M3_MOST: (0x600000, 8), E2M1_MOST: (0x400000, 2)}[most]
    size = tiles.contiguous().view(torch.int32) & _SIGN  # ordered as the numbers are
    largest = size.amax(dim=-1)
    least = torch.tensor(floor, dtype=torch.float32).view(torch.int32).item()
    # ``most`` is 1.75 * 2**8 or 1.5 * 2**2: beyond its mantissa the exponent is one more.
    carry = 0x7FFFFF - mantissa
    return ((largest.clamp_min(least) + carry) >> 23) - shift


def power_of_two(exponents: Tensor) -> Tensor:
    """float32 2**(e - 127) of biased exponents (any integer type), 1 <= e <= 254."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def ue8m0_values(codes: Tensor) -> Tensor:
    """float32 values of UE8M0 bytes (uint8): 2**(e - 127), 0 included; 255 is NaN."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, 0x00400000, torch.where(codes == 255, 0x7FC00000, bits))
    return bits.to(torch.int32).view(torch.float32)
