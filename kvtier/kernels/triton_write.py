"""Paged writers in triton: plain rows, packed records, and norm and rotation on the way in.

One program a row.  Addresses are 64 bits wide.  The device alone looks at slots: -1 is skipped, and
so is a slot past the pool, since raising would take a wait for the device.  Shapes are checked on
the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.kernels.fused import LatentRope, check_latent
from kvtier.kernels.records import Record
from kvtier.kernels.triton_values import (
    bf16_bits,
    cast,
    over_root_mean_square,
    rotated,
    rounded,
    store_record,
    store_rope,
    widened,
)

__all__ = ["adjacent", "pool_of", "write_latent", "write_normed", "write_records", "write_rows"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_rows(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """``kvtier.kernels.write_rows``."""
    if values.shape != (slots.shape[0], rows.shape[-1]):
        raise ValueError(
            f"values {tuple(values.shape)} do not match {slots.shape[0]} slots of "
            f"{rows.shape[-1]} values"
        )
    _check_adjacent(rows)
    values = adjacent(values)
    if not values.shape[0]:
        return
    if values.dtype == rows.dtype:  # bytes as they are, whatever they mean
        rows, values = rows.view(_WORDS[rows.itemsize]), values.view(_WORDS[rows.itemsize])
    _write_rows[(values.shape[0],)](
        rows,
        rows.stride(0),
        rows.shape[0],
        slots,
        values,
        values.stride(0),
        WIDTH=values.shape[1],
        BLOCK=triton.next_power_of_2(values.shape[1]),
        num_warps=4,
    )


def write_records(storage: Tensor, slots: Tensor, values: Tensor, record: Record) -> None:
    """``kvtier.kernels.write_records``."""
    if record.pack is None:
        write_rows(storage, slots, values)
        return
    _write(storage, slots, values, record)


def write_normed(
    storage: Tensor,
    slots: Tensor,
    values: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    record: Record,
    *,
    eps: float,
) -> None:
    """``kvtier.kernels.write_normed``."""
    cos, sin = adjacent(cos), adjacent(sin)
    _check_rotation(values, weight, cos, sin)
    _write(storage, slots, values, record, weight, cos, sin, eps)


def write_latent(
    storage: Tensor,
    slots: Tensor,
    values: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    record: Record,
    *,
    eps: float,
    rotation: LatentRope,
) -> None:
    """``kvtier.kernels.write_latent``, for latents and pairs whose numbers are powers of two, of a
    type of at most 32 bits."""
    latent, pairs = check_latent(values, weight, cos, sin, rotation), cos.shape[1]
    if latent & (latent - 1) or pairs & (pairs - 1) or not pairs:
        raise ValueError(f"{latent=} and {pairs=} must be powers of two here")
    values, cos, sin = adjacent(values), adjacent(cos), adjacent(sin)
    if cos.stride() != sin.stride():
        raise ValueError(f"rotation with strides {cos.stride()}, {sin.stride()}")
    page_stride, per_page, there = _target(storage, slots, values, record)
    if not values.shape[0]:
        return
    _write_latent[(values.shape[0],)](
        storage,
        page_stride,
        per_page,
        there,
        slots,
        values,
        values.stride(0),
        weight,
        cos,
        sin,
        cos.stride(0),
        eps,
        RECORD=record.name,
        DIM=latent,
        PAIRS=pairs,
        ROTATION=rotation,
        NORM=weight is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )


def adjacent(values: Tensor) -> Tensor:
    """``values`` with its last dimension adjacent; copied where it is not."""
    return values if values.stride(-1) == 1 else values.contiguous()


def pool_of(storage: Tensor, record: Record) -> tuple[int, int, int]:
    """Elements from page to page, slots of a page and slots there are; plain rows have pages of 1.

    Raises ValueError for what is no pool of these records.
    """
    if record.pack is None:
        _check_adjacent(storage)
        return storage.stride(0), 1, storage.shape[0]
    if storage.dim() != 2 or storage.dtype is not torch.uint8 or storage.stride(1) != 1:
        raise ValueError(
            f"{record.name!r} records lie in (pages, page_bytes) bytes, adjacent within a page, "
            f"not in {storage.dtype} {tuple(storage.shape)}"
        )
    if storage.data_ptr() % 4 or storage.stride(0) % 4:
        raise ValueError("pages of records begin at multiples of 4 bytes")
    per_page = record.slots_of(storage.shape[1])
    return storage.stride(0), per_page, storage.shape[0] * per_page


def _write(
    storage: Tensor,
    slots: Tensor,
    values: Tensor,
    record: Record,
    weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    page_stride, per_page, there = _target(storage, slots, values, record)
    values = adjacent(values)
    if not values.shape[0]:
        return
    rope = values.shape[1] % 128  # what lies behind the quantised part of a latent row
    _write_records[(values.shape[0],)](
        storage,
        page_stride,
        per_page,
        there,
        slots,
        values,
        values.stride(0),
        weight,
        cos,
        sin,
        0 if cos is None else cos.stride(0),
        eps,
        RECORD=record.name,
        DIM=values.shape[1] - rope,
        ROPE=rope,
        PAIRS=0 if cos is None else cos.shape[1],
        num_warps=1,
        enable_fp_fusion=False,
    )


def _target(storage: Tensor, slots: Tensor, values: Tensor, record: Record) -> tuple[int, int, int]:
    """``pool_of`` what these values are written to.  Raises ValueError unless they fit a slot."""
    width = record.dim or storage.shape[-1]
    if values.dim() != 2 or values.shape != (slots.shape[0], width):
        raise ValueError(
            f"values {tuple(values.shape)} do not match {slots.shape[0]} slots of {width} values"
        )
    return pool_of(storage, record)


def _check_rotation(values: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    n, dim = values.shape
    if weight.shape != (dim,) or cos.shape != sin.shape or cos.shape[0] != n:
        raise ValueError(
            f"values {tuple(values.shape)}, weight {tuple(weight.shape)}, rotation "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.stride() != sin.stride() or 2 * cos.shape[1] > dim:
        raise ValueError(f"rotation {tuple(cos.shape)} of {dim} values, strides {cos.stride()}")
    if dim & (dim - 1):
        raise ValueError(f"rows of {dim} values: normed here are powers of two")


def _check_adjacent(rows: Tensor) -> None:
    if rows.dim() != 2 or rows.stride(1) != 1:
        raise ValueError(f"rows {tuple(rows.shape)} with strides {rows.stride()}")


# The counts and small vectors of a step take whatever value and alignment they have: a kernel is
# compiled once for a pool, not once for every kind of number.


@triton.jit(do_not_specialize=["there"], do_not_specialize_on_alignment=["slots"])
def _write_rows(
    rows, stride, there, slots, values, values_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < there):
        at = tl.arange(0, BLOCK)
        inside = at < WIDTH
        x = tl.load(values + row * values_stride + at, mask=inside)
        target = rows.dtype.element_ty
        if x.dtype != target:
            x = cast(widened(x), target)
        tl.store(rows + slot * stride + at, x, mask=inside)


@triton.jit(do_not_specialize=["there", "eps"], do_not_specialize_on_alignment=["slots"])
def _write_records(
    storage,
    page_stride,
    per_page,
    there,
    slots,
    values,
    values_stride,
    weight,
    cos,
    sin,
    turn_stride,
    eps,
    RECORD: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < there):
        at = tl.arange(0, DIM)
        x = widened(tl.load(values + row * values_stride + at))
        if PAIRS > 0:
            x = over_root_mean_square(x, eps) * widened(tl.load(weight + at))
            x = rotated(x, cos + row * turn_stride, sin + row * turn_stride, PAIRS, False)
        store_record(x, storage, page_stride, per_page, slot, RECORD)
        if ROPE > 0:
            tl.static_assert(RECORD == "mla_fp8")
            rope = tl.load(values + row * values_stride + DIM + tl.arange(0, ROPE))
            page = storage + slot // per_page * page_stride
            store_rope(widened(rope), page + slot % per_page * 656 + 528)


@triton.jit(do_not_specialize=["there", "eps"], do_not_specialize_on_alignment=["slots"])
def _write_latent(
    storage,
    page_stride,
    per_page,
    there,
    slots,
    values,
    values_stride,
    weight,
    cos,
    sin,
    turn_stride,
    eps,
    RECORD: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATION: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < there):
        values += row * values_stride
        type: tl.constexpr = values.dtype.element_ty
        at = tl.arange(0, DIM)
        x = widened(tl.load(values + at))
        if NORM:
            x = rounded(over_root_mean_square(x, eps), type)
            x = rounded(x * widened(tl.load(weight + at)), type)
        store_record(x, storage, page_stride, per_page, slot, RECORD)
        pair = tl.arange(0, PAIRS)
        # Where the two of a pair lie, and where they go to.
        if ROTATION == "half":
            first, second = pair, pair + PAIRS
        else:
            first, second = 2 * pair, 2 * pair + 1
        a = widened(tl.load(values + DIM + first))
        b = widened(tl.load(values + DIM + second))
        c = widened(tl.load(cos + row * turn_stride + pair))
        s = widened(tl.load(sin + row * turn_stride + pair))
        if ROTATION == "interleaved":
            a, b = rounded(a * c - b * s, type), rounded(b * c + a * s, type)
        else:
            first, second = pair, pair + PAIRS
            c, s = rounded(c, type), rounded(s, type)
            a, b = (
                rounded(rounded(a * c, type) - rounded(b * s, type), type),
                rounded(rounded(b * c, type) + rounded(a * s, type), type),
            )
        if RECORD == "dense":
            rest = storage + slot * page_stride + DIM
            target: tl.constexpr = storage.dtype.element_ty
            tl.store(rest + first, cast(a, target))
            tl.store(rest + second, cast(b, target))
        else:
            tl.static_assert(RECORD == "mla_fp8")
            rest = storage + slot // per_page * page_stride + slot % per_page * 656 + 528
            halves = rest.to(tl.pointer_type(tl.uint16))
            tl.store(halves + first, bf16_bits(a).to(tl.uint16))
            tl.store(halves + second, bf16_bits(b).to(tl.uint16))
