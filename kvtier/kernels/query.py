"""What happens to a vector before it is stored or asked with: norms, partial rotation, fp8 queries.

Plain arithmetic in float32 or better.  Rotation is interleaved (pairs 2i, 2i + 1) and takes the
last ``2 * cos.shape[-1]`` values; cos and sin come as (n, pairs), float32.
"""

import torch
from torch import Tensor

from kvtier.kernels.casts import E4M3_MOST, e4m3_codes, power_of_two, round_to_bf16, tile_exponents
from kvtier.kernels.exact import one_over_root, sum_by_halves
from kvtier.kernels.records import FP8_FLOOR

__all__ = [
    "head_norm_rope",
    "inverse_rope",
    "norm_rope",
    "quantise_query",
    "rms_norm",
    "rope",
]


def rms_norm(values: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """``values`` (..., dim) over their root mean square, times ``weight`` (dim,) if any.

    Summed by halves, see ``exact``.
    """
    exact = _exact(values)
    # Times the inverse: that is what some devices make of a division by a number.
    mean = sum_by_halves(exact.square(), -1) * (1 / exact.shape[-1])
    normed = exact * one_over_root(mean + eps)[..., None]
    return normed if weight is None else normed * weight.to(normed.dtype)


def rope(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``values`` (n, dim) or (n, heads, dim) with the last values of each rotated, if any."""
    exact = _exact(values)
    if not cos.shape[-1]:
        return exact
    cos, sin = cos.to(exact.dtype), sin.to(exact.dtype)
    if values.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    width = 2 * cos.shape[-1]
    even, odd = exact[..., -width::2], exact[..., 1 - width :: 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((exact[..., :-width], rotated.flatten(-2)), dim=-1)


def inverse_rope(
    values: Tensor, cos: Tensor, sin: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """``rope`` undone: attention output whose values were keys, at the query's position.

    Rounded once to ``dtype``, if given.
    """
    back = rope(values, cos, -sin)
    return back if dtype is None else back.to(dtype)


def norm_rope(values: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> Tensor:
    """Pooled entries or window keys (n, dim) as they are stored: normed, then rotated."""
    return rope(rms_norm(values, weight, eps=eps), cos, sin)


def head_norm_rope(
    query: Tensor, cos: Tensor, sin: Tensor, *, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Queries (n, heads, dim): each head normed on its own, without weight, then rotated.

    Rounded once to ``dtype``, if given.
    """
    turned = rope(rms_norm(query, None, eps=eps), cos, sin)
    return turned if dtype is None else turned.to(dtype)


def quantise_query(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Indexer queries (n, heads, dim) as e4m3 codes (uint8), and ``weights`` (n, heads) that make
    up for their scales.

    Each head's vector has its own power of two, as an indexer key has, multiplied into its weight:
    ``weights * relu(query . key)`` stays what it was, up to the rounding.
    """
    rounded = round_to_bf16(query.to(torch.float32).contiguous())
    exponents = tile_exponents(rounded, most=E4M3_MOST, floor=FP8_FLOOR)
    codes = e4m3_codes(rounded * power_of_two(254 - exponents)[..., None])
    return codes, weights.to(torch.float32) * power_of_two(exponents)


def _exact(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
