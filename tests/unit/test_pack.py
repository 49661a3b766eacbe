"""Gather and scatter of pages and tails: raw bytes, checked one by one in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.kernels.pack import (
    Sections,
    clear_tails,
    copy_spans,
    pack_pages,
    pack_tails,
    unpack_pages,
    unpack_tails,
)

WIDTHS = (5, 16, 1, 1152)


def sections(pages: int, seed: int = 0) -> Sections:
    generator = torch.Generator().manual_seed(seed)
    storages = tuple(
        torch.randint(0, 256, (pages, width), dtype=torch.uint8, generator=generator)
        for width in WIDTHS
    )
    offsets = tuple(sum(WIDTHS[:i]) for i in range(len(WIDTHS)))
    return Sections(storages, offsets)


def page_bytes(it: Sections, page: int) -> list[int]:
    return [byte for storage in it.storages for byte in storage[page].tolist()]


distinct = st.lists(st.integers(0, 6), unique=True, max_size=7)


@given(distinct, st.permutations(range(7)))
def test_pack_then_unpack(pages: list[int], places: list[int]) -> None:
    it, rows = sections(7), places[: len(pages)]
    records = torch.full((7, it.record_bytes + 3), 0xFF, dtype=torch.uint8)
    pack_pages(it, pages, records, rows)
    for row in range(7):
        want = [0xFF] * records.shape[1]
        if row in rows:
            want[: it.record_bytes] = page_bytes(it, pages[rows.index(row)])
        assert records[row].tolist() == want
    other = Sections(tuple(torch.full_like(s, 0xFF) for s in it.storages), it.offsets)
    unpack_pages(other, pages, records, rows)
    for page in range(7):
        want = page_bytes(it, page) if page in pages else [0xFF] * it.record_bytes
        assert page_bytes(other, page) == want


def test_no_value_is_interpreted() -> None:
    """All 65,536 bfloat16 patterns, signalling NaNs among them, survive as they are."""
    storage = (
        torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(64, -1)
    )
    it = Sections((storage.clone(),), (0,))
    records = torch.zeros_like(storage)
    pack_pages(it, range(64), records, range(63, -1, -1))
    unpack_pages(it, range(64), records, range(63, -1, -1))
    assert torch.equal(it.storages[0], storage)
    assert torch.equal(records.flip(0), storage)


@pytest.mark.parametrize(("page", "row"), [(-1, 0), (0, -1), (7, 0), (0, 7)])
def test_ids_out_of_range(page: int, row: int) -> None:
    """A wrapped -1 would move the last page."""
    it, records = sections(7), torch.zeros((7, sum(WIDTHS)), dtype=torch.uint8)
    before = [s.clone() for s in it.storages]
    for move in (pack_pages, unpack_pages):
        with pytest.raises(IndexError):
            move(it, [1, page], records, [1, row])
    assert not records.any()
    assert all(torch.equal(a, b) for a, b in zip(before, it.storages, strict=True))


def test_shapes_are_checked() -> None:
    it = sections(7)
    with pytest.raises(AssertionError):
        pack_pages(it, [0], torch.zeros((1, it.record_bytes - 1), dtype=torch.uint8), [0])
    with pytest.raises(AssertionError):
        pack_pages(it, [0, 1], torch.zeros((2, it.record_bytes), dtype=torch.uint8), [0])
    with pytest.raises(AssertionError):
        pack_pages(it, [0], torch.zeros((1, it.record_bytes)), [0])
    with pytest.raises(AssertionError):
        Sections((torch.zeros((4, 8), dtype=torch.uint8).t(),), (0,))


lengths = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6)


@given(lengths, lengths)
def test_copy_spans(sources: list[tuple[int, bool]], targets: list[tuple[int, bool]]) -> None:
    """Against one flat list: holes read as zeros and swallow what is written to them."""
    value = iter(range(1, 250))
    flat: list[int] = []
    src: list[torch.Tensor | int] = []
    for length, there in sources:
        held = [next(value) for _ in range(length)] if there else [0] * length
        src.append(torch.tensor(held, dtype=torch.uint8) if there else length)
        flat += held
    dst: list[torch.Tensor | int] = [
        torch.full((n,), 0xFF, dtype=torch.uint8) if there else n for n, there in targets
    ]
    copy_spans(src, dst)
    at = 0
    for (length, there), span in zip(targets, dst, strict=True):
        if there:
            assert isinstance(span, torch.Tensor)
            got = flat[at : at + length]
            assert span.tolist() == got + [0xFF] * (length - len(got))
        at += length


def test_a_tail_that_holds_nothing_yet() -> None:
    """A lease without tokens, of a layout whose tails are windows only."""
    nothing, records = Sections((), ()), torch.full((2, 8), 7, dtype=torch.uint8)
    clear_tails(nothing, [(3,)])
    pack_tails(nothing, [(3,)], records, [(1,)])
    unpack_tails(nothing, [(3,)], records, [(1,)])
    assert (records == 7).all()
