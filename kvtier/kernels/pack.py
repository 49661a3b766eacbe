"""Gather pages of all layers into contiguous packed records, and scatter them back.

Raw bytes only: what a byte means is the layout's business.  On a CUDA device where triton is there
each call is one launch (``kvtier.kernels.triton_pack``); anywhere else it is done section by
section, which is also the reference.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from kvtier.kernels.triton_pack import Chunks

__all__ = [
    "Sections",
    "clear_tails",
    "copy_spans",
    "has_triton",
    "pack_pages",
    "pack_tails",
    "unpack_pages",
    "unpack_tails",
    "warmup",
]

Ints = Sequence[int] | npt.NDArray[np.int64]

_ANY = 1 << 62
"""Pages of a member that has no section: nothing of it is read or written."""


@dataclass(frozen=True, slots=True, eq=False)
class Sections:
    """Where the sections of a packed record lie on the device.

    Section i of page p is row p of ``storages[i]``, a uint8 tensor (pages, bytes) whose rows are
    whole but need not be adjacent; in a record it starts at ``offsets[i]``.  A record may be made
    of several pages: ``members[i]`` says which of them section i is of (empty: all of the first).
    """

    storages: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    members: tuple[int, ...] = ()
    record_bytes: int = field(init=False)
    """Where the last section of a record ends."""
    num_pages: tuple[int, ...] = field(init=False)
    """Pages there are to choose from, of each member; of one without sections any number."""
    _chunks: "dict[int, Chunks]" = field(default_factory=dict, init=False, repr=False)
    """Device tables by bytes of a record's row, made when first used."""

    def __post_init__(self) -> None:
        if not self.members:
            object.__setattr__(self, "members", (0,) * len(self.storages))
        assert len(self.storages) == len(self.offsets) == len(self.members)
        for storage in self.storages:
            assert storage.dtype is torch.uint8
            assert storage.dim() == 2
            assert storage.stride(1) == 1
        ends = (at + storage.shape[1] for storage, at, _ in self)
        object.__setattr__(self, "record_bytes", max(ends, default=0))
        count = [
            min((s.shape[0] for s, _, m in self if m == member), default=_ANY)
            for member in range(1 + max(self.members, default=0))
        ]
        object.__setattr__(self, "num_pages", tuple(count))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(storage, offset, member) of each section."""
        return zip(self.storages, self.offsets, self.members, strict=True)


def pack_pages(sections: Sections, pages: Ints, records: torch.Tensor, rows: Ints) -> None:
    """Gather: row ``rows[i]`` of ``records`` becomes the packed record of page ``pages[i]``.

    ``records`` is uint8 (rows, at least ``record_bytes``), on the sections' device; bytes behind
    the record are left alone.  Rows must differ.  In stream order on CUDA.  Raises IndexError,
    having moved nothing, for a page or a row that is not there.
    """
    _check_pages(sections, pages, records, rows)
    if _one_launch(records.device):
        _launch(sections, pages, records, rows, unpack=False)
        return
    if records.device.type == "cpu":
        there = records.numpy()
        for storage, at, _ in sections:
            there[rows, at : at + storage.shape[1]] = storage.numpy()[pages]
        return
    page_ids, row_ids = _ids(pages, records), _ids(rows, records)
    for storage, at, _ in sections:
        part = records[:, at : at + storage.shape[1]]
        part.index_copy_(0, row_ids, storage.index_select(0, page_ids))


def unpack_pages(sections: Sections, pages: Ints, records: torch.Tensor, rows: Ints) -> None:
    """Scatter: page ``pages[i]`` becomes what row ``rows[i]`` of ``records`` holds, packed.

    As ``pack_pages``; pages must differ.
    """
    _check_pages(sections, pages, records, rows)
    if _one_launch(records.device):
        _launch(sections, pages, records, rows, unpack=True)
        return
    if records.device.type == "cpu":
        there = records.numpy()
        for storage, at, _ in sections:
            storage.numpy()[pages] = there[rows, at : at + storage.shape[1]]
        return
    page_ids, row_ids = _ids(pages, records), _ids(rows, records)
    for storage, at, _ in sections:
        part = records[:, at : at + storage.shape[1]]
        storage.index_copy_(0, page_ids, part.index_select(0, row_ids))


def pack_tails(
    sections: Sections,
    tails: Sequence[Sequence[int]],
    records: torch.Tensor,
    rows: Sequence[Sequence[int]],
) -> None:
    """Gather: the rows ``rows[i]`` of ``records``, one after the other, become the packed record
    made of the pages ``tails[i]``.

    A page of -1 reads as zeros.  Otherwise as ``pack_pages``; the rows of a record are filled in
    turn, each to its end.
    """
    _check_tails(sections, tails, records, rows)
    if not sections.storages:
        return
    if _one_launch(records.device):
        _launch(sections, *_flat(sections, tails, records, rows), unpack=False)
        return
    for page, storage, spans in _tail_spans(sections, tails, records, rows):
        copy_spans([storage[page] if page >= 0 else storage.shape[1]], spans)


def unpack_tails(
    sections: Sections,
    tails: Sequence[Sequence[int]],
    records: torch.Tensor,
    rows: Sequence[Sequence[int]],
) -> None:
    """Scatter: the pages ``tails[i]`` become what the rows ``rows[i]`` of ``records`` hold.

    As ``pack_tails``; a page of -1 is skipped.
    """
    _check_tails(sections, tails, records, rows)
    if not sections.storages:
        return
    if _one_launch(records.device):
        _launch(sections, *_flat(sections, tails, records, rows), unpack=True)
        return
    for page, storage, spans in _tail_spans(sections, tails, records, rows):
        if page >= 0:
            copy_spans(spans, [storage[page]])


def clear_tails(sections: Sections, tails: Sequence[Sequence[int]]) -> None:
    """All sections of the pages ``tails[i]`` become zeros; a page of -1 is skipped.

    In stream order on CUDA.  Raises IndexError, having changed nothing, for a page that is not
    there.
    """
    _check_members(sections, tails)
    if not sections.storages:
        return
    if _one_launch(sections.storages[0].device):
        from kvtier.kernels.triton_pack import clear

        clear(_chunks(sections, sections.record_bytes), [page for tail in tails for page in tail])
        return
    for tail in tails:
        for storage, _, member in sections:
            if tail[member] >= 0:
                storage[tail[member]].zero_()


def copy_spans(source: Sequence[torch.Tensor | int], target: Sequence[torch.Tensor | int]) -> None:
    """Copy one run of bytes cut into spans onto the same run cut into other spans.

    A span is a 1-D uint8 tensor, or a number of bytes that are not there: as a source they read
    as zeros, as a target they are skipped.  Stops at the end of the shorter run.
    """
    moves = list(_moves(source, target))
    device = next((dst.device for _, dst in moves), torch.device("cpu"))
    if _one_launch(device) and all(
        isinstance(src, int) or src.device == device for src, _ in moves
    ):
        from kvtier.kernels.triton_pack import copy_runs

        copy_runs(
            [
                (0 if isinstance(src, int) else src.data_ptr(), dst.data_ptr(), dst.numel())
                for src, dst in moves
            ],
            device,
        )
        return
    for src, dst in moves:
        if isinstance(src, torch.Tensor):
            dst.copy_(src, non_blocking=True)
        else:
            dst.zero_()


def warmup(device: torch.device) -> None:
    """Compile for ``device`` whatever the functions of this module launch there."""
    if _one_launch(device):
        storage = torch.zeros(1, 16, dtype=torch.uint8, device=device)
        scratch, records = Sections((storage,), (0,)), torch.zeros_like(storage)
        pack_pages(scratch, [0], records, [0])
        unpack_pages(scratch, [0], records, [0])
        clear_tails(scratch, [[0]])
        copy_spans([records[0]], [storage[0]])


def _moves(
    source: Sequence[torch.Tensor | int], target: Sequence[torch.Tensor | int]
) -> Iterator[tuple[torch.Tensor | int, torch.Tensor]]:
    """Pairs of equal length, those left out that nothing is written to."""
    sources, targets = list(source)[::-1], list(target)[::-1]
    while sources and targets:
        src, dst = sources.pop(), targets.pop()
        length = min(_length(src), _length(dst))
        if isinstance(dst, torch.Tensor) and length:
            yield src[:length] if isinstance(src, torch.Tensor) else length, dst[:length]
        if _length(src) > length:
            sources.append(_rest(src, length))
        if _length(dst) > length:
            targets.append(_rest(dst, length))


def _length(span: torch.Tensor | int) -> int:
    return span if isinstance(span, int) else span.numel()


def _rest(span: torch.Tensor | int, start: int) -> torch.Tensor | int:
    return span - start if isinstance(span, int) else span[start:]


def _ids(ids: Ints, like: torch.Tensor) -> torch.Tensor:
    # Allocated on the stream that reads it, so its memory cannot be reused before it was read.
    return torch.as_tensor(ids, dtype=torch.int64).to(like.device)


def _tail_spans(
    sections: Sections,
    tails: Sequence[Sequence[int]],
    records: torch.Tensor,
    rows: Sequence[Sequence[int]],
) -> Iterator[tuple[int, torch.Tensor, list[torch.Tensor | int]]]:
    """(page, storage, where in the record's rows it lies) of every section of every tail."""
    width = records.shape[1]
    for tail, held in zip(tails, rows, strict=True):
        for storage, at, member in sections:
            spans: list[torch.Tensor | int] = []
            stop = at + storage.shape[1]
            while at < stop:
                row, start = divmod(at, width)
                length = min(stop - at, width - start)
                spans.append(records[held[row], start : start + length])
                at += length
            yield tail[member], storage, spans


def _one_launch(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton()


@cache
def has_triton() -> bool:
    """Whether triton is installed here."""
    return importlib.util.find_spec("triton") is not None


def _flat(
    sections: Sections,
    tails: Sequence[Sequence[int]],
    records: torch.Tensor,
    rows: Sequence[Sequence[int]],
) -> tuple[list[int], torch.Tensor, list[int]]:
    used = -(-sections.record_bytes // records.shape[1])
    return (
        [page for tail in tails for page in tail],
        records,
        [row for held in rows for row in held[:used]],
    )


def _launch(
    sections: Sections,
    pages: Ints,
    records: torch.Tensor,
    rows: Ints,
    *,
    unpack: bool,
) -> None:
    """``pages`` and ``rows`` of one record after the other."""
    from kvtier.kernels.triton_pack import move

    move(_chunks(sections, records.shape[1]), pages, records, rows, unpack=unpack)


def _chunks(sections: Sections, row_bytes: int) -> "Chunks":
    from kvtier.kernels.triton_pack import cut

    chunks = sections._chunks.get(row_bytes)
    if chunks is None:
        chunks = sections._chunks.setdefault(row_bytes, cut(sections, row_bytes))
    return chunks


def _check_pages(sections: Sections, pages: Ints, records: torch.Tensor, rows: Ints) -> None:
    assert len(pages) == len(rows), (pages, rows)
    assert records.shape[-1] >= sections.record_bytes, "a record does not fit a row"
    _check_records(sections, records)
    # Out-of-range ids would wrap around (-1) or fault on a device far from here.
    (num_pages,) = sections.num_pages
    if not _within(pages, num_pages) or not _within(rows, records.shape[0]):
        raise IndexError(f"pages {pages} of {num_pages}, rows {rows} of {records.shape[0]}")


def _check_tails(
    sections: Sections,
    tails: Sequence[Sequence[int]],
    records: torch.Tensor,
    rows: Sequence[Sequence[int]],
) -> None:
    assert len(tails) == len(rows), (tails, rows)
    _check_records(sections, records)
    needed = -(-sections.record_bytes // records.shape[1])
    assert all(len(held) >= needed for held in rows), "a record does not fit its rows"
    _check_members(sections, tails)
    if not all(_within(held, records.shape[0]) for held in rows):
        raise IndexError(f"rows {rows} of {records.shape[0]}")


def _check_members(sections: Sections, tails: Sequence[Sequence[int]]) -> None:
    for tail in tails:
        if not all(-1 <= p < n for p, n in zip(tail, sections.num_pages, strict=True)):
            raise IndexError(f"tail {tail}: there are {sections.num_pages} pages")


def _check_records(sections: Sections, records: torch.Tensor) -> None:
    assert records.dtype is torch.uint8
    assert records.dim() == 2
    assert records.stride(1) == 1
    assert all(records.device == storage.device for storage in sections.storages[:1])


def _within(numbers: Ints, count: int) -> bool:
    if isinstance(numbers, np.ndarray):
        # What is negative is past the end as unsigned, so one look is enough.
        return not numbers.size or int(numbers.view(np.uint64).max()) < count
    return not numbers or (min(numbers) >= 0 and max(numbers) < count)
