"""Rows of packed pages: what a record's bytes are, and where they lie within a page.

A record packs one row of values.  Within a page of n slots its planes lie apart: first every
slot's first plane, then every slot's second, then padding; so the same record has its scales
elsewhere in pages of another n.  Plain rows ("dense") are a record too, stored as they are.

Byte for byte the definition of every packed format; other backends are held to it.  Quantised
parts are rounded to bfloat16 first, then once more to their own format, in tiles that share one
power of two as scale; rope parts are rounded once, to bfloat16.  Nothing here knows what the
values mean, or who owns a page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kvtier.kernels.casts import (
    E2M1_MOST,
    E4M3_MOST,
    bf16_bits,
    bf16_values,
    e2m1_codes,
    e2m1_values,
    e4m3_codes,
    e4m3_values,
    power_of_two,
    round_to_bf16,
    tile_exponents,
    ue8m0_values,
)
from kvtier.kernels.reference import write_rows

__all__ = [
    "RECORDS",
    "Record",
    "pack_index_fp8",
    "pack_index_mxfp4",
    "pack_mla_fp8",
    "pack_v4",
    "read_records",
    "unpack_index_fp8",
    "unpack_index_mxfp4",
    "unpack_mla_fp8",
    "unpack_v4",
    "write_records",
]

FP8_FLOOR = 1e-4
"""Least |value| a tile is scaled for: an all-zero tile has exponent byte 105."""
FP4_FLOOR = 6 * 2.0**-126


@dataclass(frozen=True, slots=True)
class Record:
    """One row format.  ``RECORDS`` has all of them, by name."""

    name: str
    dim: int | None
    """Values of a row; None: any ("dense")."""
    planes: tuple[int, ...] = ()
    """Bytes of each plane of a slot; empty for "dense", which has no bytes of its own."""
    page_align: int = 1
    """A page is padded to a multiple of this many bytes."""
    pack: Callable[[Tensor], Tensor] | None = None
    """(n, dim) float to (n, ``slot_bytes``) uint8, planes behind one another."""
    unpack: Callable[[Tensor], Tensor] | None = None
    """The way back, to float32; exact."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, without the page's padding."""
        return sum(self.planes)

    def page_bytes(self, slots: int) -> int:
        """Bytes of a page with this many slots, padded."""
        return -(-slots * self.slot_bytes // self.page_align) * self.page_align

    def slots_of(self, page_bytes: int) -> int:
        """Slots of a page with this many bytes; the one way back from ``page_bytes``.

        Raises ValueError where no number of slots has that page.
        """
        slots = page_bytes // self.slot_bytes if self.planes else 0
        # Padding is less than a slot, so this page is the only candidate.
        if slots < 1 or self.page_bytes(slots) != page_bytes:
            raise ValueError(f"{page_bytes} bytes are no page of {self.name!r} records")
        return slots


def write_records(storage: Tensor, slots: Tensor, values: Tensor, record: Record) -> None:
    """Write ``values`` (n, dim) as records to ``slots`` (n,), in place.

    ``storage`` is (pages, page_bytes) uint8, where slot s lies in page s // slots_per_page; for
    "dense" it is (slots, dim) of any float type.  Slot -1 is skipped; no byte of another slot and
    none of the padding changes.  A slot given twice in one call is the caller's mistake.  Raises
    ValueError for a shape or slot out of range, having written nothing.
    """
    if record.pack is None:
        write_rows(storage, slots, values)
        return
    if values.shape != (slots.shape[0], record.dim):
        raise ValueError(
            f"values {tuple(values.shape)} do not match {slots.shape[0]} slots of {record.dim} "
            f"values"
        )
    planes = _plane_views(storage, record)
    target = slots.to(torch.int64)
    keep = target >= 0
    if not bool(keep.all()):
        target, values = target[keep], values[keep]
    _check_inside(target, planes[0])
    packed = record.pack(values)
    per_page, at = planes[0].shape[1], 0
    for plane in planes:
        width = plane.shape[2]
        plane[target // per_page, target % per_page] = packed[:, at : at + width]
        at += width


def read_records(storage: Tensor, slots: Tensor, record: Record) -> Tensor:
    """Values (n, dim) float32 of the records at ``slots`` (n,); wider where plain rows are.

    Slot -1 reads nothing and gives a row of zeros: mask it, zeros are no key.  Raises ValueError
    for a slot out of range.
    """
    target = slots.to(torch.int64)
    keep = target >= 0
    some = target if bool(keep.all()) else target[keep]
    if record.unpack is None:
        if some.numel() and int(some.max()) >= storage.shape[0]:
            raise ValueError(f"slot {int(some.max())} lies past {storage.shape[0]} rows")
        values = storage[some].to(torch.promote_types(storage.dtype, torch.float32))
    else:
        planes = _plane_views(storage, record)
        _check_inside(some, planes[0])
        page, slot = some // planes[0].shape[1], some % planes[0].shape[1]
        values = record.unpack(torch.cat([plane[page, slot] for plane in planes], dim=1))
    if some is target:
        return values
    out = values.new_zeros(target.shape[0], values.shape[1])
    out[keep] = values
    return out


def pack_v4(values: Tensor) -> Tensor:
    """584-byte records (n, 584) uint8 of ``values`` (n, 512).

    448 e4m3, 64 bfloat16 (already rotated), 7 UE8M0 scales of 64 values each, one zero.
    """
    nope, rope = torch.split(_float32(values), [448, 64], dim=1)
    codes, exponents = _quantised(nope, 64)
    zero = exponents.new_zeros(exponents.shape[0], 1)
    return torch.cat((codes, _bf16_bytes(rope), torch.cat((exponents, zero), 1)), dim=1)


def unpack_v4(records: Tensor) -> Tensor:
    """Values (n, 512) float32 of 584-byte records (n, 584)."""
    codes, rope, exponents = torch.split(records, [448, 128, 8], dim=1)
    nope = e4m3_values(codes.contiguous()).view(records.shape[0], 7, 64)
    nope = nope * ue8m0_values(exponents[:, :7])[..., None]
    return torch.cat((nope.flatten(1), _values_of_bf16(rope)), dim=1)


def pack_index_fp8(values: Tensor) -> Tensor:
    """132-byte indexer keys (n, 132) uint8 of ``values`` (n, 128): 128 e4m3, a float32 scale.

    The scale is a power of two.
    """
    codes, exponents = _quantised(_float32(values), 128)
    return torch.cat((codes, _bytes(power_of_two(exponents))), dim=1)


def unpack_index_fp8(records: Tensor) -> Tensor:
    """Values (n, 128) float32 of 132-byte indexer keys, whatever their scale."""
    codes, scale = torch.split(records, [128, 4], dim=1)
    return e4m3_values(codes.contiguous()) * scale.contiguous().view(torch.float32)


def pack_index_mxfp4(values: Tensor) -> Tensor:
    """68-byte indexer keys (n, 68) uint8 of ``values`` (n, 128): 128 e2m1, 4 UE8M0 of 32 values.

    Value 2i lies in the low half of byte i, 2i + 1 in the high one.
    """
    tiles = round_to_bf16(_float32(values)).view(values.shape[0], 4, 32)
    exponents = tile_exponents(tiles, most=E2M1_MOST, floor=FP4_FLOOR)
    codes = e2m1_codes(tiles * power_of_two(254 - exponents)[..., None]).flatten(1)
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return torch.cat((pairs, exponents.to(torch.uint8)), dim=1)


def unpack_index_mxfp4(records: Tensor) -> Tensor:
    """Values (n, 128) float32 of 68-byte indexer keys."""
    pairs, exponents = torch.split(records, [64, 4], dim=1)
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=2).flatten(1)
    tiles = e2m1_values(codes).view(records.shape[0], 4, 32) * ue8m0_values(exponents)[..., None]
    return tiles.flatten(1)


def pack_mla_fp8(values: Tensor) -> Tensor:
    """656-byte latent rows (n, 656) uint8 of ``values`` (n, 576).

    512 e4m3, 4 float32 scales (powers of two) of 128 values each, 64 bfloat16 (already rotated).
    """
    latent, rope = torch.split(_float32(values), [512, 64], dim=1)
    codes, exponents = _quantised(latent, 128)
    return torch.cat((codes, _bytes(power_of_two(exponents)), _bf16_bytes(rope)), dim=1)


def unpack_mla_fp8(records: Tensor) -> Tensor:
    """Values (n, 576) float32 of 656-byte latent rows, whatever their scales."""
    codes, scales, rope = torch.split(records, [512, 16, 128], dim=1)
    latent = e4m3_values(codes.contiguous()).view(records.shape[0], 4, 128)
    latent = latent * scales.contiguous().view(torch.float32)[..., None]
    return torch.cat((latent.flatten(1), _values_of_bf16(rope)), dim=1)


RECORDS: Mapping[str, Record] = MappingProxyType(
    {
        record.name: record
        for record in (
            Record("dense", None),
            Record("v4_fp8", 512, (576, 8), 576, pack_v4, unpack_v4),
            Record("index_fp8", 128, (128, 4), 1, pack_index_fp8, unpack_index_fp8),
            Record("index_mxfp4", 128, (64, 4), 1, pack_index_mxfp4, unpack_index_mxfp4),
            Record("mla_fp8", 576, (656,), 1, pack_mla_fp8, unpack_mla_fp8),
        )
    }
)
"""Every record format: "dense" (rows of plain values, their type is the storage's), "v4_fp8",
"index_fp8" and "index_mxfp4" (also the indexer rows beside "mla_fp8"), "mla_fp8"."""


def _quantised(values: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes (n, dim) and their tiles' UE8M0 bytes (n, dim // tile), both uint8."""
    tiles = round_to_bf16(values).view(values.shape[0], values.shape[1] // tile, tile)
    exponents = tile_exponents(tiles, most=E4M3_MOST, floor=FP8_FLOOR)
    codes = e4m3_codes(tiles * power_of_two(254 - exponents)[..., None])
    return codes.flatten(1), exponents.to(torch.uint8)


def _float32(values: Tensor) -> Tensor:
    return values.to(torch.float32)


def _bytes(values: Tensor) -> Tensor:
    """The bytes of (n, m) values, (n, m * itemsize), as they lie in memory: little endian."""
    return values.contiguous().view(torch.uint8)


def _bf16_bytes(values: Tensor) -> Tensor:
    bits = bf16_bits(values.contiguous())
    return torch.stack((bits & 0xFF, bits >> 8), dim=2).flatten(1).to(torch.uint8)


def _values_of_bf16(pairs: Tensor) -> Tensor:
    low, high = pairs[:, 0::2].to(torch.int32), pairs[:, 1::2].to(torch.int32)
    return bf16_values(low | (high << 8))


def _plane_views(storage: Tensor, record: Record) -> list[Tensor]:
    """Each plane of a pool of pages, as (pages, slots, bytes of the plane)."""
    if storage.dim() != 2 or storage.dtype is not torch.uint8 or storage.stride(1) != 1:
        raise ValueError(
            f"{record.name!r} records lie in (pages, page_bytes) bytes, adjacent within a page, "
            f"not in {storage.dtype} {tuple(storage.shape)}"
        )
    pages, slots = storage.shape[0], record.slots_of(storage.shape[1])
    views, at = [], storage.storage_offset()
    for width in record.planes:
        views.append(storage.as_strided((pages, slots, width), (storage.stride(0), width, 1), at))
        at += slots * width
    return views


def _check_inside(slots: Tensor, plane: Tensor) -> None:
    there = plane.shape[0] * plane.shape[1]
    if slots.numel() and int(slots.max()) >= there:
        raise ValueError(f"slot {int(slots.max())} lies past the pool's {there} slots")
