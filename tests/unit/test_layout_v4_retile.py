"""Pages of packed records in other page sizes: the same slots, byte by byte, wherever they lie."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.errors import LayoutMismatch
from kvtier.layouts import Layout, retile, retile_pages, swa_c4_c128

RATIOS = (0, 4, 128, 4)
Bytes = npt.NDArray[np.uint8]


def layout(page: int = 256, **options: object) -> Layout:
    return swa_c4_c128(layer_ratios=RATIOS, page_tokens=page, **options)  # type: ignore[arg-type]


def noise(rows: int, size: int, seed: int = 0) -> Bytes:
    """Every byte there is, NaNs of e4m3, of bfloat16 and of the scales among them."""
    data = np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)
    data[:, ::7] = np.array([0xFF, 0x7F, 0x80, 0x00], np.uint8)[np.arange(len(data[0, ::7])) % 4]
    return data


def slot_of(pages: Bytes, slots: int, s: int, data: int = 576, scale: int = 8) -> bytes:
    """Slot ``s``, counted through pages of ``slots``: its data row and its scales."""
    page, at = pages[s // slots], s % slots
    begin = slots * data + scale * at
    return bytes(page[at * data : (at + 1) * data]) + bytes(page[begin : begin + scale])


@pytest.mark.parametrize(("few", "many"), [(128, 256), (64, 128), (2, 256)])
def test_windows_of_another_length(few: int, many: int) -> None:
    """Two pages of 128 slots are as long as one of 256, and not the same bytes."""
    swa = layout().windows[0]
    small = noise(
        2 * many // few, replace(swa, slots_per_page=few, checkpoint_slots=None).page_bytes
    )
    c = replace(swa, slots_per_page=few, checkpoint_slots=None)
    large = retile_pages(small, c, many)
    for s in range(2 * many):
        assert slot_of(large, many, s) == slot_of(small, few, s), s
    if (few, many) == (128, 256):
        assert large.shape == (2, 149_760)
        assert small.size == large.size
        assert not np.array_equal(small.reshape(2, -1), large)
    assert not large[:, many * 584 :].any()  # padding
    back = retile_pages(large, replace(c, slots_per_page=many), few)
    clean = small.copy()
    clean[:, few * 584 :] = 0
    assert np.array_equal(back, clean)


@pytest.mark.parametrize(("width", "planes"), [(132, (128, 4)), (68, (64, 4))])
def test_index_pages(width: int, planes: tuple[int, int]) -> None:
    kind = "fp8" if width == 132 else "mxfp4"
    c = next(c for c in layout(index_record=kind).history if c.name == "c4_index")
    small = noise(4, 64 * width, seed=width)
    large = retile_pages(small.tobytes(), c, 128)
    for s in range(256):
        assert slot_of(large, 128, s, *planes) == slot_of(small, 64, s, *planes)
    assert np.array_equal(retile_pages(large, replace(c, slots_per_page=128), 64), small)


@pytest.mark.parametrize(("few", "many"), [(128, 256), (256, 512), (128, 512)])
@pytest.mark.parametrize("index", ["fp8", "mxfp4"])
def test_whole_records(few: int, many: int, index: str) -> None:
    """Three components of two kinds of planes, in every layer that has them."""
    small, large = (layout(page, index_record=index) for page in (few, many))
    record = noise(2 * many // few, small.page_bytes(), seed=few)
    got = retile(record, small, large)
    assert got.shape == (2, large.page_bytes())
    planes = {"c4": (576, 8), "c128": (576, 8), "c4_index": (128 if index == "fp8" else 64, 4)}
    for (name, _, a, n), (_, _, b, m) in zip(small.sections(), large.sections(), strict=True):
        ratio = 128 if name == "c128" else 4
        for s in range(2 * many // ratio):
            old = slot_of(record[:, a : a + n], few // ratio, s, *planes[name])
            assert slot_of(got[:, b : b + m], many // ratio, s, *planes[name]) == old
    back = retile(got, large, small)
    assert np.array_equal(retile(back, small, large), got)


def test_float_records_keep_their_bits() -> None:
    """Signalling NaNs, denormals and negative zeros included."""
    options = {"record": "fp32", "index_record": "fp32"}
    small, large = layout(128, **options), layout(256, **options)
    record = np.full((2, small.page_bytes() // 4), 0x7F80_0001, dtype="<u4")
    record[:, 1::3] = 0x8000_0000
    record[:, 2::3] = 0x0000_0001
    got = retile(record.view(np.uint8), small, large)
    assert sorted(np.unique(got.view("<u4")).tolist()) == [1, 0x7F80_0001, 0x8000_0000]
    assert np.array_equal(retile(got, large, small), record.view(np.uint8))


def test_what_does_not_fit() -> None:
    swa = layout().windows[0]
    for pages, slots in [(noise(3, swa.page_bytes), 256), (noise(1, 100), 128)]:
        with pytest.raises(LayoutMismatch, match="whole pages"):
            retile_pages(pages, swa, slots)
    with pytest.raises(LayoutMismatch, match="whole pages"):
        retile_pages(noise(1, swa.page_bytes), swa, 0)
    record = noise(2, layout().page_bytes())
    for other, says in [
        (layout(128, index_record="mxfp4"), "meta"),
        (layout(128, draft_layers=1), "draft_layers"),
        (swa_c4_c128(layer_ratios=(4, 0, 128, 4), page_tokens=128), "components"),
    ]:
        with pytest.raises(LayoutMismatch, match=says):
            retile(record, layout(), other)


def test_tails_are_no_part_of_a_page() -> None:
    """A seed tail and longer rings make the same pages."""
    record = noise(1, layout().page_bytes())
    other = layout(128, max_draft=0)
    assert np.array_equal(
        retile(record, layout(tail="seed", max_draft=9), other), retile(record, layout(), other)
    )
