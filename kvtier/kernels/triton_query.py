"""The query side in triton: each head normed and rotated, indexer queries quantised, outputs back.

One program a head of a token.  The bits of the references in ``query`` and ``fused``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.records import Record
from kvtier.kernels.triton_values import (
    cast,
    over_root_mean_square,
    power_of_two,
    quantised,
    rotated,
    widened,
)
from kvtier.kernels.triton_write import adjacent

__all__ = ["head_norm_rope", "index_query", "inverse_rope"]


def head_norm_rope(
    query: Tensor, cos: Tensor, sin: Tensor, *, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """``kvtier.kernels.head_norm_rope``."""
    return _turn(query, cos, sin, eps, dtype, norm=True, inverse=False)


def inverse_rope(
    values: Tensor, cos: Tensor, sin: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """``kvtier.kernels.inverse_rope`` of (n, heads, dim)."""
    return _turn(values, cos, sin, 0.0, dtype, norm=False, inverse=True)


def index_query(
    query: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, record: Record
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.index_query``, for heads of 128 values."""
    if record.pack is None:
        return _turn(query, cos, sin, 0.0, query.dtype, norm=False, inverse=False), weights
    query, cos, sin = adjacent(query), adjacent(cos), adjacent(sin)
    n, heads, dim = _check(query, cos, sin)
    if dim != 128 or weights.shape != (n, heads):
        raise ValueError(f"queries {tuple(query.shape)}, weights {tuple(weights.shape)}")
    codes = torch.empty(n, heads, dim, dtype=torch.uint8, device=query.device)
    folded = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    if n:
        _quantise[(n, heads)](
            query,
            *query.stride()[:2],
            weights,
            *weights.stride(),
            cos,
            sin,
            cos.stride(0),
            codes,
            folded,
            DIM=dim,
            PAIRS=cos.shape[1],
            num_warps=1,
            enable_fp_fusion=False,
        )
    return codes, folded


def _turn(
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    dtype: torch.dtype | None,
    *,
    norm: bool,
    inverse: bool,
) -> Tensor:
    values, cos, sin = adjacent(values), adjacent(cos), adjacent(sin)
    n, heads, dim = _check(values, cos, sin)
    out = torch.empty(n, heads, dim, dtype=dtype or torch.float32, device=values.device)
    if n:
        _turn_heads[(n, heads)](
            values,
            *values.stride()[:2],
            cos,
            sin,
            cos.stride(0),
            out,
            eps,
            DIM=dim,
            PAIRS=cos.shape[1],
            NORM=norm,
            INVERSE=inverse,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


def _check(values: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int, int]:
    n, heads, dim = values.shape
    if dim & (dim - 1):
        raise ValueError(f"heads {tuple(values.shape)}: of a power of two here")
    if cos.shape != sin.shape or cos.shape[0] != n or 2 * cos.shape[1] > dim:
        raise ValueError(f"rotation {tuple(cos.shape)} of heads {tuple(values.shape)}")
    if cos.stride() != sin.stride():
        raise ValueError(f"rotation with strides {cos.stride()}, {sin.stride()}")
    return n, heads, dim


@triton.jit(do_not_specialize=["eps"])
def _turn_heads(
    values, token_stride, head_stride, cos, sin, turn_stride, out, eps,
    DIM: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    x = widened(tl.load(values + token * token_stride + head * head_stride + at))
    if NORM:
        x = over_root_mean_square(x, eps)
    if PAIRS > 0:
        x = rotated(x, cos + token * turn_stride, sin + token * turn_stride, PAIRS, INVERSE)
    row = token * tl.num_programs(1) + head
    tl.store(out + row * DIM + at, cast(x, out.dtype.element_ty))


@triton.jit
def _quantise(
    query, token_stride, head_stride, weights, weight_stride, weight_head_stride,
    cos, sin, turn_stride, codes, folded, DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    x = widened(tl.load(query + token * token_stride + head * head_stride + at))
    if PAIRS > 0:
        x = rotated(x, cos + token * turn_stride, sin + token * turn_stride, PAIRS, False)
    code, exponents = quantised(x, DIM)
    row = token * tl.num_programs(1) + head
    tl.store(codes + row * DIM + at, tl.reshape(code, (DIM,)).to(tl.uint8))
    weight = tl.load(weights + token * weight_stride + head * weight_head_stride)
    one = tl.arange(0, 1)
    tl.store(folded + row + one, widened(weight) * power_of_two(exponents))
