"""Packed pages of one page size as packed pages of another: bytes move, nothing is computed."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtier.errors import LayoutMismatch
from kvtier.layouts.base import Component, Layout

__all__ = ["retile", "retile_pages"]

Bytes = npt.NDArray[np.uint8]
Packed = Bytes | bytes | bytearray | memoryview


def retile(record: Packed, layout_from: Layout, layout_to: Layout) -> Bytes:
    """The history of consecutive pages, packed for another page size.

    ``record`` holds one or more packed pages of ``layout_from`` behind one another, in the order
    of their tokens; the result, a new array of shape (pages, ``layout_to.page_bytes()``), holds
    the same slots as pages of ``layout_to``, padding zeroed.  Exact both ways.  Raises
    LayoutMismatch if the layouts differ in anything but the page size, or if ``record`` is no
    whole number of pages of both.
    """
    _check_same_slots(layout_from, layout_to)
    data = np.frombuffer(record, dtype=np.uint8)
    pages, rest = divmod(data.size, layout_from.page_bytes())
    tokens = pages * layout_from.page_tokens
    if rest or tokens % layout_to.page_tokens:
        raise LayoutMismatch(
            f"record: {data.size} bytes are not whole pages of {layout_from.page_tokens} and of "
            f"{layout_to.page_tokens} tokens"
        )
    source = data.reshape(pages, -1)
    target = np.zeros((tokens // layout_to.page_tokens, layout_to.page_bytes()), dtype=np.uint8)
    for (name, _, read_at, read), (_, _, write_at, written) in zip(
        layout_from.sections(), layout_to.sections(), strict=True
    ):
        _move(
            source[:, read_at : read_at + read],
            _component(layout_from, name),
            target[:, write_at : write_at + written],
            _component(layout_to, name),
        )
    return target


def retile_pages(pages: Packed, component: Component, slots_per_page: int) -> Bytes:
    """Pages of one component in one layer, windows too, as pages of another number of slots.

    ``pages`` lie behind one another, each ``component.page_bytes`` long; the result is a new array
    (pages, bytes of such a page), padding zeroed.  Raises LayoutMismatch if they do not make whole
    pages.
    """
    data = np.frombuffer(pages, dtype=np.uint8)
    count, rest = divmod(data.size, component.page_bytes)
    slots = count * component.slots_per_page
    if rest or slots_per_page < 1 or slots % slots_per_page:
        raise LayoutMismatch(
            f"pages: {data.size} bytes are not whole pages of {component.slots_per_page} and of "
            f"{slots_per_page} slots of {component.name!r}"
        )
    other = replace(component, slots_per_page=slots_per_page, checkpoint_slots=None)
    target = np.zeros((slots // slots_per_page, other.page_bytes), dtype=np.uint8)
    _move(data.reshape(count, -1), component, target, other)
    return target


def _move(source: Bytes, c_from: Component, target: Bytes, c_to: Component) -> None:
    """All slots of one section of every page, plane by plane."""
    start = 0
    for width in c_from.planes or (c_from.slot_bytes,):
        taken = _plane(source, c_from, start, width)
        placed = _plane(target, c_to, start, width)
        placed[:] = taken.reshape(placed.shape)
        start += width


def _plane(pages: Bytes, c: Component, start: int, width: int) -> Bytes:
    """One plane of every page, ``width`` bytes wide and ``start`` into a slot."""
    at = c.slots_per_page * start
    return pages[:, at : at + c.slots_per_page * width]


def _component(layout: Layout, name: str) -> Component:
    return next(c for c in layout.history if c.name == name)


def _check_same_slots(layout_from: Layout, layout_to: Layout) -> None:
    for name in ("name", "meta", "draft_layers"):
        ours, theirs = getattr(layout_from, name), getattr(layout_to, name)
        if ours != theirs:
            raise LayoutMismatch(f"{name}: {ours!r} is not {theirs!r}")
    ours = [replace(c, slots_per_page=1) for c in layout_from.history]
    theirs = [replace(c, slots_per_page=1) for c in layout_to.history]
    if ours != theirs:
        raise LayoutMismatch(f"components: {ours!r} are not {theirs!r}")
