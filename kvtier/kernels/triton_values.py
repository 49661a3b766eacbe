"""What kernels do to one row of values: norm, rotation, the formats of packed records.

Functions that kernels are made of, each the twin of one in ``casts``, ``exact``, ``query`` or
``records`` and of the same bits: roundings in integer arithmetic, sums by halves.  For that,
kernels that use them are launched with ``enable_fp_fusion=False``.  A row is a flat block of values
whose number is a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels import exact
from kvtier.kernels.records import FP4_FLOOR, FP8_FLOOR, Record

__all__ = ["precision"]

_FP8_FLOOR = tl.constexpr(FP8_FLOOR)
_FP4_FLOOR = tl.constexpr(FP4_FLOOR)
_LOG2_E = tl.constexpr(exact.LOG2_E)
_LN2_HIGH = tl.constexpr(exact.LN2_HIGH)
_LN2_LOW = tl.constexpr(exact.LN2_LOW)
_ROUNDER = tl.constexpr(exact.ROUNDER)
_ROUNDER_BITS = tl.constexpr(exact.ROUNDER_BITS)
_LEAST = tl.constexpr(exact.LEAST)
_C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0 = map(tl.constexpr, exact.TAYLOR)


# Number formats.


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded) & 0xFFFF


@triton.jit
def round_to_bf16(x):
    return float_of(bf16_bits(x) << 16)


@triton.jit
def widened(x):
    """Values of any float type as float32."""
    if x.dtype == tl.bfloat16:
        return float_of(x.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def cast(x, to: tl.constexpr):
    """float32 values as ``to``, which may be bfloat16."""
    if to == tl.bfloat16:
        return bf16_bits(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(to)


@triton.jit
def rounded(x, to: tl.constexpr):
    """float32 values rounded to what the type can hold."""
    if to == tl.float32:
        return x
    else:
        return widened(cast(x, to))


@triton.jit
def e4m3_codes(x):
    bits = bits_of(x)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = bits_of(float_of(size) + 16384.0) - 0x46800000
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def e2m1_codes(x):
    bits = bits_of(x)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - 252
    small = bits_of(float_of(size) + 4194304.0) - 0x4A800000
    return tl.where(size < 0x3F800000, small, normal) | ((bits >> 28) & 8)


@triton.jit
def tile_exponents(tiles, CARRY: tl.constexpr, SHIFT: tl.constexpr, FLOOR: tl.constexpr):
    """(tiles,) of (tiles, width)."""
    largest = tl.max(bits_of(tiles) & 0x7FFFFFFF, axis=1)
    least = bits_of(tl.full(largest.shape, FLOOR, tl.float32))
    return ((tl.maximum(largest, least) + CARRY) >> 23) - SHIFT


@triton.jit
def power_of_two(exponents):
    return float_of(exponents << 23)


@triton.jit
def quantised(x, TILE: tl.constexpr):
    """e4m3 codes and exponents, (tiles, TILE) and (tiles,), of flat values."""
    tiles = tl.reshape(round_to_bf16(x), (x.shape[0] // TILE, TILE))
    exponents = tile_exponents(tiles, 0x1FFFFF, 8, _FP8_FLOOR)
    return e4m3_codes(tiles * power_of_two(254 - exponents)[:, None]), exponents


@triton.jit
def e4m3_values(codes):
    """float32 of e4m3 codes, but for NaN, which no writer leaves."""
    c = codes.to(tl.int32)
    size = c & 0x7F
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, float_of((size + 960) << 20))
    return tl.where(c >= 0x80, -value, value)


# Products of matrices.


def precision(query: Tensor, keys: Tensor, record: Record, *, on_gpu: bool) -> str:
    """Arithmetic of products of queries, or their e4m3 codes, and keys, the ``DOT`` of ``operand``
    and ``product``: it holds both exactly, or float32 to its last bits."""
    if record.pack is None and (keys.dtype != query.dtype or query.dtype != torch.bfloat16):
        return "tf32x3"
    # The interpreter multiplies no bfloat16.
    if query.dtype in (torch.bfloat16, torch.uint8) and on_gpu:
        return "bf16"
    return "tf32" if query.element_size() <= 2 else "tf32x3"


@triton.jit
def operand(x, DOT: tl.constexpr):
    """Values of any float type, or e4m3 codes (uint8), as a product takes them."""
    wide = e4m3_values(x) if x.dtype == tl.uint8 else widened(x)
    if DOT == "bf16":
        return cast(wide, tl.bfloat16)
    else:  # said for the compiler, which looks at one branch then
        return wide


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """float32 (m, n) of operands (m, k) and (k, n)."""
    if DOT == "tf32x3":
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b, input_precision="tf32")


# Arithmetic in a fixed order.


@triton.jit
def sum_by_halves(x):
    """Sum over a block's first dimension, a power of two of which 1 is left."""
    for _ in tl.static_range(10):  # of 1024 terms at most
        if x.shape[0] > 1:
            if len(x.shape) == 1:
                x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0)
            else:
                x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), axis=0)
    return x


@triton.jit
def exp_of_negative(x):
    small = x < _LEAST
    inside = tl.where(small, _LEAST, x)
    shifted = inside * _LOG2_E + _ROUNDER
    whole = shifted - _ROUNDER
    rest = (inside - whole * _LN2_HIGH) - whole * _LN2_LOW
    power = _C7 * rest + _C6
    power = power * rest + _C5
    power = power * rest + _C4
    power = power * rest + _C3
    power = power * rest + _C2
    power = power * rest + _C1
    power = power * rest + _C0
    scale = (bits_of(shifted) - (_ROUNDER_BITS - 127)) << 23
    return tl.where(small, 0.0, power * float_of(scale))


@triton.jit
def over_root_mean_square(x, eps):
    mean = sum_by_halves(x * x) * (1.0 / x.shape[0])
    return x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def rotated(x, cos, sin, PAIRS: tl.constexpr, INVERSE: tl.constexpr):
    """``x`` with its last ``PAIRS`` pairs turned by what lies at ``cos`` and ``sin``."""
    DIM: tl.constexpr = x.shape[0]
    even, odd = tl.split(tl.reshape(x, (DIM // 2, 2)))
    pair = tl.arange(0, DIM // 2) - (DIM // 2 - PAIRS)
    turns = pair >= 0
    c = widened(tl.load(cos + pair, mask=turns, other=1.0))
    s = widened(tl.load(sin + pair, mask=turns, other=0.0))
    if INVERSE:
        s = -s
    # Chosen, not multiplied by one: that would make +0 of -0.
    new_even = tl.where(turns, even * c - odd * s, even)
    new_odd = tl.where(turns, odd * c + even * s, odd)
    return tl.reshape(tl.join(new_even, new_odd), (DIM,))


# Records.


@triton.jit
def store_record(x, storage, page_stride, per_page, slot, RECORD: tl.constexpr):
    """Values of one row into its slot (int64) of a pool of pages; "dense": of a pool of rows.

    "mla_fp8" takes the latent part alone, see ``store_rope``.
    """
    DIM: tl.constexpr = x.shape[0]
    at = tl.arange(0, DIM)
    if RECORD == "dense":
        tl.store(storage + slot * page_stride + at, cast(x, storage.dtype.element_ty))
    else:
        page = storage + slot // per_page * page_stride
        s = slot % per_page
        if RECORD == "v4_fp8":
            _store_v4(x, page, per_page, s)
        elif RECORD == "index_fp8":
            codes, exponents = quantised(x, 128)
            tl.store(page + s * 128 + at, tl.reshape(codes, (DIM,)).to(tl.uint8))
            _store_scales(page + per_page * 128 + s * 4, exponents)
        elif RECORD == "index_mxfp4":
            _store_mxfp4(x, page, per_page, s)
        else:
            tl.static_assert(RECORD == "mla_fp8")
            codes, exponents = quantised(x, 128)
            tl.store(page + s * 656 + at, tl.reshape(codes, (DIM,)).to(tl.uint8))
            _store_scales(page + s * 656 + 512, exponents)


@triton.jit
def store_rope(x, row):
    """bfloat16 of values at an even address (uint8 pointer)."""
    at = tl.arange(0, x.shape[0])
    tl.store(row.to(tl.pointer_type(tl.uint16)) + at, bf16_bits(x).to(tl.uint16))


@triton.jit
def _store_scales(address, exponents):
    words = address.to(tl.pointer_type(tl.int32))
    tl.store(words + tl.arange(0, exponents.shape[0]), exponents << 23)


@triton.jit
def _store_v4(x, page, per_page, s):
    at = tl.arange(0, 512)
    row = page + s * 576
    codes, exponents = quantised(x, 64)
    tl.store(row + at, tl.reshape(codes, (512,)).to(tl.uint8), mask=at < 448)
    halves = (row + 448).to(tl.pointer_type(tl.uint16))
    tl.store(halves + (at - 448), bf16_bits(x).to(tl.uint16), mask=at >= 448)
    tile = tl.arange(0, 8)
    scales = tl.where(tile < 7, exponents, 0)
    tl.store(page + per_page * 576 + s * 8 + tile, scales.to(tl.uint8))


@triton.jit
def _store_mxfp4(x, page, per_page, s):
    tiles = tl.reshape(round_to_bf16(x), (4, 32))
    exponents = tile_exponents(tiles, 0x3FFFFF, 2, _FP4_FLOOR)
    codes = e2m1_codes(tiles * power_of_two(254 - exponents)[:, None])
    low, high = tl.split(tl.reshape(codes, (64, 2)))
    tl.store(page + s * 64 + tl.arange(0, 64), (low | (high << 4)).to(tl.uint8))
    tl.store(page + per_page * 64 + s * 4 + tl.arange(0, 4), exponents.to(tl.uint8))
