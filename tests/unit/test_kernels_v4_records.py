"""Packed records, byte for byte, against formats written out from their definitions (B2, B3)."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvtier.kernels import RECORDS, Record, read_records, write_records
from kvtier.kernels.casts import (
    bf16_bits,
    e2m1_codes,
    e2m1_values,
    e4m3_codes,
    e4m3_values,
    power_of_two,
    tile_exponents,
    ue8m0_values,
)
from kvtier.layouts import swa_c4_c128
from tests.unit import v4_cases
from tests.unit.v4_cases import E2M1, E4M3, PACKED, Floats, bf16, encode, scale_byte

PACKED_NAMES = sorted(PACKED)


def float32_of(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


def around(points: npt.NDArray[Any]) -> torch.Tensor:
    """Each point and its float32 neighbours, of both signs."""
    exact = points.astype(np.float32)
    inf = np.float32(np.inf)
    near = np.concatenate((exact, np.nextafter(exact, inf), np.nextafter(exact, -inf)))
    return torch.from_numpy(np.concatenate((near, -near)))


def numbers(tensor: torch.Tensor) -> Floats:
    with np.errstate(invalid="ignore"):
        return tensor.numpy().astype(np.float64)


@pytest.mark.parametrize(
    ("component", "options", "name"),
    [
        ("swa", {}, "v4_fp8"),
        ("c128", {}, "v4_fp8"),
        ("c4_index", {}, "index_fp8"),
        ("c4_index", {"index_record": "mxfp4"}, "index_mxfp4"),
    ],
)
def test_a_layout_and_a_kernel_mean_the_same_record(
    component: str, options: dict[str, Any], name: str
) -> None:
    layout = swa_c4_c128(layer_ratios=(0, 4, 128), **options)
    (c,) = (c for c in layout.components if c.name == component)
    record = RECORDS[name]
    assert (c.slot_bytes, c.planes, c.page_align) == (
        record.slot_bytes,
        record.planes,
        record.page_align,
    )
    assert c.page_bytes == record.page_bytes(c.slots_per_page)


class TestCasts:
    def test_bf16_of_every_upper_half(self) -> None:
        upper = np.arange(1 << 16, dtype=np.uint32) << 16
        lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        values = float32_of((upper[:, None] | lower).ravel())
        got = bf16_bits(values).numpy()
        finite = np.isfinite(values.numpy())
        expected = bf16(numbers(values)[finite])
        as_numbers = numbers(float32_of(got.astype(np.uint32) << 16))
        overflow = np.abs(expected) > float(torch.finfo(torch.bfloat16).max)
        assert np.array_equal(as_numbers[finite][~overflow], expected[~overflow])
        assert np.isinf(as_numbers[finite][overflow]).all()
        assert np.array_equal(got >> 15, values.numpy().view(np.uint32) >> 31)  # -0 too
        nan = np.isnan(values.numpy())
        assert np.array_equal(np.isnan(as_numbers), nan)
        assert np.array_equal(np.isinf(as_numbers[~finite & ~nan]), np.full(2, True))

    def test_e4m3_of_a_million_floats(self) -> None:
        values = float32_of(np.arange(1 << 20, dtype=np.uint32) << 12)
        values = values[values.isfinite()]
        assert np.array_equal(e4m3_codes(values).numpy(), encode(numbers(values), E4M3, 0x80))

    def test_e4m3_ties_and_their_neighbours(self) -> None:
        values = around(np.concatenate((E4M3, (E4M3[1:] + E4M3[:-1]) / 2, [464.0, 1e30])))
        assert np.array_equal(e4m3_codes(values).numpy(), encode(numbers(values), E4M3, 0x80))

    def test_e4m3_saturates_and_has_no_nan(self) -> None:
        values = torch.tensor([449.0, 480.0, 3e38, torch.inf, -torch.inf, torch.nan])
        assert e4m3_codes(values).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E]
        every = float32_of(np.arange(1 << 16, dtype=np.uint32) << 16)
        codes = e4m3_codes(every)
        assert not bool(((codes & 0x7F) == 0x7F).any())

    def test_e4m3_decodes_all_codes(self) -> None:
        got = e4m3_values(torch.arange(256, dtype=torch.uint8)).numpy()
        assert np.array_equal(got[:127], E4M3)
        assert np.array_equal(got[128:255], -E4M3)
        assert np.isnan(got[[127, 255]]).all()
        assert np.signbit(got[128])

    def test_e2m1_everywhere(self) -> None:
        values = float32_of(np.arange(1 << 20, dtype=np.uint32) << 12)
        values = values[values.isfinite()]
        assert np.array_equal(e2m1_codes(values).numpy(), encode(numbers(values), E2M1, 8))
        values = around(np.concatenate((E2M1, (E2M1[1:] + E2M1[:-1]) / 2)))
        assert np.array_equal(e2m1_codes(values).numpy(), encode(numbers(values), E2M1, 8))
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        assert e2m1_values(e2m1_codes(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
        assert e2m1_values(torch.arange(16, dtype=torch.uint8)).tolist() == [
            *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
            *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
        ]

    @pytest.mark.parametrize(("most", "floor"), [(448.0, 1e-4), (6.0, 6 * 2.0**-126)])
    def test_exponent_of_every_bf16_maximum(self, most: float, floor: float) -> None:
        largest = float32_of(np.arange(0x7F80, dtype=np.uint32) << 16)
        tiles = torch.zeros(len(largest), 3)
        tiles[:, 1] = -largest
        got = tile_exponents(tiles, most=most, floor=floor)
        assert np.array_equal(got.numpy(), scale_byte(numbers(largest), most, floor))

    @pytest.mark.parametrize(("most", "floor"), [(448.0, 1e-4), (6.0, 6 * 2.0**-126)])
    def test_exponent_of_float32_around_every_power(self, most: float, floor: float) -> None:
        largest = around(most * 2.0 ** np.arange(-130, 119)).abs()
        got = tile_exponents(largest[:, None], most=most, floor=floor)
        assert np.array_equal(got.numpy(), scale_byte(numbers(largest), most, floor))

    def test_known_exponents(self) -> None:
        def of(value: float) -> int:
            return int(tile_exponents(torch.tensor([[value]]), most=448.0, floor=1e-4))

        assert [of(v) for v in (0.0, 1.0, 448.0, 449.0, 896.0)] == [105, 119, 127, 128, 128]
        for bad in (torch.nan, torch.inf, -torch.nan):
            assert 127 < of(bad) < 255

    def test_powers_of_two(self) -> None:
        got = power_of_two(torch.arange(1, 255, dtype=torch.uint8))
        assert np.array_equal(numbers(got), 2.0 ** np.arange(-126.0, 128.0))
        got = ue8m0_values(torch.arange(256, dtype=torch.uint8))
        assert np.array_equal(numbers(got)[:255], 2.0 ** np.arange(-127.0, 128.0))
        assert got[255].isnan()


def spread(record: Record, n: int, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, with zeros, ties and tiles of nothing."""
    rng = np.random.default_rng(seed)
    dim = record.dim
    assert dim is not None
    values = rng.normal(size=(n, dim)) * 2.0 ** rng.integers(-30, 12, size=(n, 1))
    values *= 2.0 ** rng.integers(-9, 3, size=(n, dim))
    values[rng.random((n, dim)) < 0.05] = 0
    values[0] = 0
    values[1, : dim // 2] = -0.0
    values[2] = np.rint(values[2] * 1e6) / 16  # many lie between two codes
    values[3] = 1e-38 * rng.normal(size=dim)
    return torch.from_numpy(values.astype(np.float32))


class TestPages:
    @pytest.mark.parametrize("slots_per_page", [2, 64, 128])
    @pytest.mark.parametrize("name", PACKED_NAMES)
    def test_every_byte_of_every_page(self, name: str, slots_per_page: int) -> None:
        record = RECORDS[name]
        pages = 5
        storage = torch.full((pages, record.page_bytes(slots_per_page)), 0xAB, dtype=torch.uint8)
        there = pages * slots_per_page
        rng = np.random.default_rng(1)
        slots = rng.permutation(there)[: there * 2 // 3].astype(np.int32)
        slots[::5] = -1
        values = spread(record, len(slots))
        write_records(storage, torch.from_numpy(slots), values, record)

        expected = np.full((pages, record.page_bytes(slots_per_page)), 0xAB, np.uint8)
        packed = PACKED[name](numbers(values))
        for slot, row in zip(slots, packed, strict=True):
            if slot < 0:
                continue
            page, s = divmod(int(slot), slots_per_page)
            at, start = 0, 0
            for width in record.planes:
                begin = start + s * width
                expected[page, begin : begin + width] = row[at : at + width]
                start, at = start + slots_per_page * width, at + width
        assert np.array_equal(storage.numpy(), expected)

    @pytest.mark.parametrize(
        ("name", "slots", "size"),
        [
            *(("v4_fp8", n, b) for n, b in ((2, 1728), (64, 37440), (128, 74880), (256, 149760))),
            ("index_fp8", 64, 8448),
            ("index_mxfp4", 64, 4352),
            ("mla_fp8", 64, 41984),
        ],
    )
    def test_page_sizes(self, name: str, slots: int, size: int) -> None:
        record = RECORDS[name]
        assert record.page_bytes(slots) == size
        assert record.slots_of(size) == slots

    def test_offsets_of_a_v4_record(self) -> None:
        """The spec's own formulas: data at 576 s, scales at 576 n + 8 s, nothing behind 584 n."""
        record, n, s = RECORDS["v4_fp8"], 64, 37
        storage = torch.full((2, 37440), 0xAB, dtype=torch.uint8)
        values = torch.zeros(1, 512)
        values[0, 64:128] = 448.0  # tile 1: code 0x7E, scale 127
        values[0, 448:] = torch.arange(64.0)
        write_records(storage, torch.tensor([n + s]), values, record)
        page = storage[1].numpy()
        assert storage[0].eq(0xAB).all()
        row, scales = page[576 * s : 576 * s + 576], page[576 * n + 8 * s : 576 * n + 8 * s + 8]
        assert set(row[:64]) == {0} and set(row[64:128]) == {0x7E} and set(row[128:448]) == {0}
        assert np.array_equal(row[448:].view("<u2"), (np.arange(64, dtype="<f4").view("<u4") >> 16))
        assert scales.tolist() == [105, 127, 105, 105, 105, 105, 105, 0]
        assert (
            np.delete(page, np.r_[576 * s : 576 * s + 576, 36864 + 296 : 36864 + 304]) == 0xAB
        ).all()

    def test_order_of_an_mxfp4_key(self) -> None:
        storage = torch.zeros(1, 4352, dtype=torch.uint8)
        values = torch.zeros(1, 128)
        values[0, :4] = torch.tensor([6.0, -1.0, 0.5, 4.0])
        write_records(storage, torch.tensor([3]), values, RECORDS["index_mxfp4"])
        assert storage[0, 192:195].tolist() == [0xA7, 0x61, 0]  # element 2i low
        assert storage[0, 4096 + 12 : 4096 + 16].tolist() == [127, 1, 1, 1]

    def test_scale_of_an_fp8_key_is_a_float32(self) -> None:
        storage = torch.zeros(1, 8448, dtype=torch.uint8)
        write_records(storage, torch.tensor([5]), torch.full((1, 128), 3.0), RECORDS["index_fp8"])
        assert storage[0, 8192 + 20 : 8192 + 24].numpy().view("<f4") == 2.0**-7
        assert storage[0, 640:768].eq(0x7C).all()  # 3 * 2**7 = 384

    @pytest.mark.parametrize("name", PACKED_NAMES)
    def test_reads_what_the_bytes_say(self, name: str) -> None:
        record = RECORDS[name]
        values = spread(record, 40)
        storage = torch.full((3, record.page_bytes(16)), 0xFF, dtype=torch.uint8)
        slots = torch.randperm(48)[:40].to(torch.int32)
        write_records(storage, slots, values, record)
        got = read_records(storage, slots, record)
        assert got.dtype == torch.float32
        rounded = bf16(numbers(values))
        tile = {"v4_fp8": 64, "index_mxfp4": 32}.get(name, 128)
        packed = {"v4_fp8": 448, "mla_fp8": 512}.get(name, 128)
        of, floor = (E2M1, 6 * 2.0**-126) if name == "index_mxfp4" else (E4M3, 1e-4)
        codes, scales = v4_cases.quantised(numbers(values)[:, :packed], tile, of, floor)
        sign = 8 if name == "index_mxfp4" else 0x80
        decoded = of[codes & (sign - 1)] * np.where(codes & sign, -1, 1)
        decoded *= np.repeat(2.0 ** (scales - 127.0), tile, axis=1)
        assert np.array_equal(numbers(got)[:, :packed], decoded)
        assert np.array_equal(numbers(got)[:, packed:], rounded[:, packed:])
        assert got.isfinite().all()

    @pytest.mark.parametrize("name", PACKED_NAMES)
    def test_no_slot_reads_as_zeros_and_touches_nothing(self, name: str) -> None:
        record = RECORDS[name]
        storage = torch.full((2, record.page_bytes(4)), 0xFF, dtype=torch.uint8)
        assert read_records(storage, torch.tensor([0]), record).isnan().any()  # poison is poison
        write_records(storage, torch.tensor([6]), torch.ones(1, record.dim or 0), record)
        got = read_records(storage, torch.tensor([-1, 6, -1], dtype=torch.int32), record)
        assert got[[0, 2]].eq(0).all() and got[1].eq(1).all()
        assert read_records(storage, torch.tensor([-1]), record).eq(0).all()
        assert read_records(storage, torch.empty(0, dtype=torch.int32), record).shape[0] == 0

    @pytest.mark.parametrize("name", PACKED_NAMES)
    def test_packing_what_was_read_keeps_the_values(self, name: str) -> None:
        """... though not always the bytes: pages are moved and compared raw."""
        record = RECORDS[name]
        assert record.pack is not None and record.unpack is not None
        first = record.pack(spread(record, 200, seed=5))
        again = record.pack(record.unpack(first))
        assert torch.equal(record.unpack(again), record.unpack(first))
        assert not torch.equal(again, first)

    @pytest.mark.parametrize("name", PACKED_NAMES)
    def test_what_is_not_finite_reads_as_not_finite(self, name: str) -> None:
        record = RECORDS[name]
        values = torch.ones(6, record.dim or 0)
        for i, (bad, at) in enumerate(
            itertools.product((torch.nan, torch.inf, -torch.inf), (0, -1))
        ):
            values[i, at] = bad
        storage = torch.zeros(1, record.page_bytes(8), dtype=torch.uint8)
        write_records(storage, torch.arange(6), values, record)
        got = read_records(storage, torch.arange(6), record)
        for i in range(6):
            assert not bool(got[i, -(i % 2)].isfinite())
        if name != "index_mxfp4":
            codes = storage[0, : record.planes[0] * 8].view(8, -1)[:6, :128]
            assert not bool(((codes & 0x7F) == 0x7F).any())

    def test_input_types(self) -> None:
        record = RECORDS["v4_fp8"]
        values = torch.randn(3, 512).to(torch.bfloat16)
        pages = [torch.zeros(1, 1728 * 2, dtype=torch.uint8)[:, :1728] for _ in range(3)]
        for page, dtype in zip(pages, (torch.bfloat16, torch.float32, torch.float64), strict=True):
            write_records(page, torch.tensor([1, -1, 0]), values.to(dtype), record)
        assert torch.equal(pages[0], pages[1]) and torch.equal(pages[0], pages[2])
        assert pages[0].any()

    def test_layers_interleaved_in_one_block(self) -> None:
        record = RECORDS["v4_fp8"]
        block = torch.full((3, 2, 1728), 0xAB, dtype=torch.uint8)  # pages, layers, bytes
        values = torch.randn(2, 512)
        write_records(block[:, 1], torch.tensor([5, 2]), values, record)
        apart = torch.full((3, 1728), 0xAB, dtype=torch.uint8)
        write_records(apart, torch.tensor([5, 2]), values, record)
        assert torch.equal(block[:, 1], apart)
        assert block[:, 0].eq(0xAB).all()
        got = read_records(block[:, 1], torch.tensor([5, 2]), record)
        assert torch.equal(got, read_records(apart, torch.tensor([5, 2]), record))

    def test_offsets_past_two_gib(self) -> None:
        record = RECORDS["v4_fp8"]
        pages = 57_400  # page * 37,440 passes 2**31
        storage = torch.empty(pages, 37440, dtype=torch.uint8)  # never touched as a whole
        storage[0].zero_()
        last = torch.tensor([pages * 64 - 1], dtype=torch.int32)
        values = torch.randn(1, 512)
        write_records(storage, last, values, record)
        assert record.pack is not None
        packed = record.pack(values)[0]
        assert torch.equal(storage[-1, 63 * 576 : 64 * 576], packed[:576])
        assert torch.equal(storage[-1, 64 * 576 + 63 * 8 : 64 * 576 + 64 * 8], packed[576:])
        assert storage[0].eq(0).all()
        assert (read_records(storage, last, record) - values).abs().max() < 0.3

    @pytest.mark.parametrize(
        ("slots", "values", "size"),
        [
            ([0, 4], (2, 512), 1728),
            ([0], (2, 512), 1728),
            ([0], (1, 500), 1728),
            ([0], (1, 512), 1700),
        ],
    )
    def test_bad_input_writes_nothing(
        self, slots: list[int], values: tuple[int, int], size: int
    ) -> None:
        storage = torch.zeros(2, size, dtype=torch.uint8)
        with pytest.raises(ValueError):
            write_records(storage, torch.tensor(slots), torch.ones(values), RECORDS["v4_fp8"])
        assert storage.eq(0).all()

    @pytest.mark.parametrize("name", sorted(RECORDS))
    def test_reading_past_the_pool_is_refused(self, name: str) -> None:
        record = RECORDS[name]
        storage = torch.zeros(2, record.page_bytes(2), dtype=torch.uint8)
        if name == "dense":
            storage = torch.zeros(4, 7)
        with pytest.raises(ValueError, match="4"):
            read_records(storage, torch.tensor([3, 4]), record)

    def test_a_pool_of_another_kind_is_refused(self) -> None:
        for storage in (torch.zeros(2, 1728), torch.zeros(2, 864, dtype=torch.int16)):
            with pytest.raises(ValueError, match="v4_fp8"):
                read_records(storage, torch.tensor([0]), RECORDS["v4_fp8"])
        spaced = torch.zeros(2, 3456, dtype=torch.uint8)[:, ::2]
        with pytest.raises(ValueError, match="adjacent"):
            write_records(spaced, torch.tensor([0]), torch.ones(1, 512), RECORDS["v4_fp8"])


class TestDense:
    def test_rows_are_stored_as_they_are(self) -> None:
        storage = torch.full((6, 5), torch.nan)
        values = torch.randn(3, 5)
        slots = torch.tensor([4, -1, 0], dtype=torch.int32)
        write_records(storage, slots, values, RECORDS["dense"])
        assert storage[[1, 2, 3, 5]].isnan().all()
        got = read_records(storage, slots, RECORDS["dense"])
        assert torch.equal(got[[0, 2]], values[[0, 2]]) and got[1].eq(0).all()

    @pytest.mark.parametrize(
        ("stored", "read"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
    )
    def test_types(self, stored: torch.dtype, read: torch.dtype) -> None:
        storage = torch.zeros(2, 3, dtype=stored)
        write_records(storage, torch.tensor([1]), torch.full((1, 3), 1 / 3), RECORDS["dense"])
        got = read_records(storage, torch.tensor([1]), RECORDS["dense"])
        assert got.dtype == read
        assert got[0, 0].item() == torch.tensor(1 / 3).to(stored).item()


def test_unknown_scales_are_read_too() -> None:
    """Scales that are no power of two, as other writers leave them."""
    record = RECORDS["index_fp8"]
    row = torch.zeros(1, 132, dtype=torch.uint8)
    row[0, :128] = 0x38  # 1.0
    row[0, 128:] = torch.from_numpy(np.array([0.3], "<f4").view(np.uint8).copy())
    storage = torch.zeros(1, record.page_bytes(1), dtype=torch.uint8)
    storage[0] = row
    assert read_records(storage, torch.tensor([0]), record).eq(float(np.float32(0.3))).all()
