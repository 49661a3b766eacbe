"""Gather, scatter and copy of raw bytes on a GPU, each in one launch.

Sections are cut once, when they are first used, into chunks that a program moves at a time; the
table of chunks lies on the device.  What a launch is about it fetches from pinned memory, whatever
the layout.  Addresses are 64 bits wide.  Owns no check of its arguments: ``kvtier.kernels.pack``,
whose functions these carry out, has made them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kvtier.kernels.pack import Sections

__all__ = ["CHUNK", "Chunks", "clear", "copy_runs", "cut", "move"]

Numbers = npt.NDArray[np.int64]
Ints = Sequence[int] | Numbers
CHUNK = 16384
"""Bytes a program moves at most: enough loads in flight at once, enough programs a page."""
_BLOCK = tl.constexpr(CHUNK)
_WORDS = tl.constexpr(1024)
"""Numbers that a program fetches."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the sections of a record come to, for records whose rows have ``row_bytes``."""

    table: torch.Tensor
    """(chunks, 6) int64 on the device: address in page 0, bytes from page to page, row of the
    record, first byte in that row, bytes, which of an item's numbers is the page."""
    members: int
    """Page numbers of an item."""
    rows: int
    """Rows of a record."""


def cut(sections: "Sections", row_bytes: int) -> Chunks:
    """Chunks of ``sections``: none is longer than ``CHUNK`` or crosses the end of a row.

    Blocks until the table is on the device, so that any stream may read it.
    """
    lines: list[tuple[int, ...]] = []
    for storage, offset, member in zip(
        sections.storages, sections.offsets, sections.members, strict=True
    ):
        address, size = storage.data_ptr(), storage.shape[1]
        done = 0
        while done < size:
            row, start = divmod(offset + done, row_bytes)
            length = min(CHUNK, size - done, row_bytes - start)
            lines.append((address + done, storage.stride(0), row, start, length, member))
            done += length
    device = sections.storages[0].device
    return Chunks(
        table=torch.tensor(lines, dtype=torch.int64, device=device),
        members=1 + max(sections.members),
        rows=-(-sections.record_bytes // row_bytes),
    )


def move(
    chunks: Chunks,
    pages: Ints,
    records: torch.Tensor,
    rows: Ints,
    *,
    unpack: bool,
) -> None:
    """Gather records from pages or (``unpack``) scatter them, all of them in one launch.

    ``pages`` are the page numbers of one item after the other, ``rows`` likewise their rows of
    ``records``, uint8 (any, row bytes) with adjacent bytes.  A page of -1 reads as zeros and is
    not written.
    """
    _over_chunks(
        _unpack if unpack else _pack, chunks, pages, (records.data_ptr(), records.stride(0)), rows
    )


def clear(chunks: Chunks, pages: Sequence[int]) -> None:
    """Zeros into all sections of these pages, those of one item after the other, in one launch.

    A page of -1 is skipped.
    """
    _over_chunks(_clear, chunks, pages, (0, 0), [0] * (len(pages) // chunks.members * chunks.rows))


def _over_chunks(
    kernel: Any,
    chunks: Chunks,
    pages: Ints,
    records: tuple[int, int],
    rows: Ints,
) -> None:
    """One program a chunk and item.  ``records`` are address and bytes of a row."""
    count = len(pages) // chunks.members
    if not count:
        return
    num_chunks, width = chunks.table.shape[0], chunks.members + chunks.rows
    numbers = np.empty(6 + count * width, np.int64)
    numbers[:6] = (chunks.table.data_ptr(), num_chunks, chunks.members, width, *records)
    items = numbers[6:].reshape(count, width)
    items[:, : chunks.members] = np.reshape(pages, (count, chunks.members))
    items[:, chunks.members :] = np.reshape(rows, (count, chunks.rows))
    _run(kernel, num_chunks * count, numbers, chunks.table.device)


def copy_runs(runs: Sequence[tuple[int, int, int]], device: torch.device) -> None:
    """Copy runs of (source address, target address, bytes) in one launch; source 0 means zeros."""
    numbers = [
        (source and source + at, target + at, min(CHUNK, size - at))
        for source, target, size in runs
        for at in range(0, size, CHUNK)
    ]
    if numbers:
        _run(_copy_runs, len(numbers), np.array(numbers, np.int64).ravel(), device)


_compiled: dict[tuple[object, int | None], Any] = {}
"""What a kernel compiled to, by kernel and device: each takes one pointer, so there is one."""

_lent: dict[int, deque[tuple[torch.Tensor, torch.cuda.Event]]] = {}
"""Pinned buffers that numbers went through, by device, and what tells that they have arrived."""


def _run(kernel: Any, programs: int, numbers: Numbers, device: torch.device) -> None:
    launch = _on_device(numbers, device)
    _start(kernel, programs, launch, device)


def _start(kernel: Any, programs: int, launch: torch.Tensor, device: torch.device) -> None:
    compiled = _compiled.get((kernel, device.index))
    if compiled is None:  # the interpreter compiles nothing
        _compiled[kernel, device.index] = kernel[(programs,)](launch)
    else:  # past the look-up by types and values of the arguments, half of a launch
        compiled[programs, 1, 1](launch)


def _on_device(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """These numbers for the current stream.  A kernel fetches them: a copy would wait, on the one
    engine that brings bytes to a device, for the records that are on their way there."""
    if device.type != "cuda":
        return torch.from_numpy(numbers)
    # Allocated on the stream that reads it, so its memory cannot be reused before it was read.
    there = torch.empty(numbers.size, dtype=torch.int64, device=device)
    lent = _lent.setdefault(there.get_device(), deque())
    pinned = _free_buffer(lent, 2 + numbers.size)
    words = pinned.numpy()
    words[:2] = there.data_ptr(), numbers.size
    words[2 : 2 + numbers.size] = numbers
    _start(_fetch, triton.cdiv(numbers.size, _WORDS.value), pinned, device)
    fetched = torch.cuda.Event()
    fetched.record()
    lent.append((pinned, fetched))
    return there


def _free_buffer(lent: deque[tuple[torch.Tensor, torch.cuda.Event]], words: int) -> torch.Tensor:
    """A pinned buffer for so many, whose last numbers have been fetched."""
    try:
        pinned, fetched = lent.popleft()
    except IndexError:
        pass
    else:
        if not fetched.query():
            lent.appendleft((pinned, fetched))
        elif pinned.numel() >= words:
            return pinned
    return torch.empty(max(4096, triton.next_power_of_2(words)), dtype=torch.int64, pin_memory=True)


@triton.jit
def _fetch(pinned):
    """Numbers out of pinned host memory: (address on the device, how many), then themselves."""
    target = tl.load(pinned).to(tl.pointer_type(tl.int64))
    at = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    there = at < tl.load(pinned + 1)
    tl.store(target + at, tl.load(pinned + 2 + at, mask=there), mask=there)


@triton.jit
def _copy(source, target, size, held, BLOCK: tl.constexpr):
    """``size`` bytes (up to CHUNK) from one address to another; zeros unless ``held``."""
    if ((source | target | size) & 15) == 0:
        _copy_words(source, target, size, held, BLOCK)
    else:
        _copy_bytes(source, target, size, held)


@triton.jit
def _copy_words(source, target, size, held, BLOCK: tl.constexpr):
    # The hints make of every two words one access of 16 bytes.
    there = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    here = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    words = tl.arange(0, BLOCK // 8)
    inside = words < tl.multiple_of(size // 8, 2)
    tl.store(here + words, tl.load(there + words, mask=inside & held, other=0), mask=inside)


@triton.jit
def _copy_bytes(source, target, size, held):
    there = source.to(tl.pointer_type(tl.uint8))
    here = target.to(tl.pointer_type(tl.uint8))
    at = tl.arange(0, 1024).to(tl.int64)
    left = size
    while left > 0:
        inside = at < size
        tl.store(here + at, tl.load(there + at, mask=inside & held, other=0), mask=inside)
        at += 1024
        left -= 1024


# What a launch is about comes as numbers, all together: handing over each by itself costs more
# than the launch.  (table, chunks, members, numbers an item, records, bytes of a row), then items.


@triton.jit
def _places(launch):
    """(paged address, packed address, bytes, page) of this program's chunk."""
    num_chunks = tl.load(launch + 1)
    program = tl.program_id(0).to(tl.int64)
    line = tl.load(launch).to(tl.pointer_type(tl.int64)) + program % num_chunks * 6
    item = launch + 6 + program // num_chunks * tl.load(launch + 3)
    page = tl.load(item + tl.load(line + 5))
    row = tl.load(item + tl.load(launch + 2) + tl.load(line + 2))
    paged = tl.load(line) + page * tl.load(line + 1)
    packed = tl.load(launch + 4) + row * tl.load(launch + 5) + tl.load(line + 3)
    return paged, packed, tl.load(line + 4), page


@triton.jit
def _pack(launch):
    paged, packed, size, page = _places(launch)
    _copy(paged, packed, size, page >= 0, _BLOCK)


@triton.jit
def _unpack(launch):
    paged, packed, size, page = _places(launch)
    if page >= 0:
        _copy(packed, paged, size, True, _BLOCK)


@triton.jit
def _clear(launch):
    paged, _, size, page = _places(launch)
    if page >= 0:
        _copy(paged, paged, size, False, _BLOCK)


@triton.jit
def _copy_runs(table):
    line = table + tl.program_id(0) * 3
    source = tl.load(line)
    _copy(source, tl.load(line + 1), tl.load(line + 2), source != 0, _BLOCK)
