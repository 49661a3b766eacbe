"""Gather pages of all layers into contiguous packed records, and scatter them back.

Raw bytes only: what a byte means is the layout's business.  The reference in torch; every other
backend has the same signatures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Sections", "copy_spans", "pack_pages", "unpack_pages"]


@dataclass(frozen=True, slots=True)
class Sections:
    """Where the sections of a packed record lie on the device.

    Section i of page p is row p of ``storages[i]``, a contiguous uint8 tensor (pages, bytes); in a
    record it starts at ``offsets[i]``.
    """

    storages: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.storages) == len(self.offsets)
        for storage in self.storages:
            assert storage.dtype is torch.uint8
            assert storage.dim() == 2
            assert storage.is_contiguous()

    @property
    def record_bytes(self) -> int:
        return max(
            (at + s.shape[1] for at, s in zip(self.offsets, self.storages, strict=True)), default=0
        )


def pack_pages(
    sections: Sections, pages: Sequence[int], records: torch.Tensor, rows: Sequence[int]
) -> None:
    """Gather: row ``rows[i]`` of ``records`` becomes the packed record of page ``pages[i]``.

    ``records`` is uint8 (rows, at least ``record_bytes``), on the sections' device; bytes behind
    the record are left alone.  Rows must differ.  In stream order on CUDA.
    """
    _check(sections, pages, records, rows)
    if records.device.type == "cpu":
        there = records.numpy()
        for storage, at in zip(sections.storages, sections.offsets, strict=True):
            there[rows, at : at + storage.shape[1]] = storage.numpy()[pages]
        return
    page_ids, row_ids = _ids(pages, records), _ids(rows, records)
    for storage, at in zip(sections.storages, sections.offsets, strict=True):
        part = records[:, at : at + storage.shape[1]]
        part.index_copy_(0, row_ids, storage.index_select(0, page_ids))


def unpack_pages(
    sections: Sections, pages: Sequence[int], records: torch.Tensor, rows: Sequence[int]
) -> None:
    """Scatter: page ``pages[i]`` becomes what row ``rows[i]`` of ``records`` holds, packed.

    Shapes as for ``pack_pages``.  Pages must differ.  In stream order on CUDA.
    """
    _check(sections, pages, records, rows)
    if records.device.type == "cpu":
        there = records.numpy()
        for storage, at in zip(sections.storages, sections.offsets, strict=True):
            storage.numpy()[pages] = there[rows, at : at + storage.shape[1]]
        return
    page_ids, row_ids = _ids(pages, records), _ids(rows, records)
    for storage, at in zip(sections.storages, sections.offsets, strict=True):
        part = records[:, at : at + storage.shape[1]]
        storage.index_copy_(0, page_ids, part.index_select(0, row_ids))


def copy_spans(source: Sequence[torch.Tensor | int], target: Sequence[torch.Tensor | int]) -> None:
    """Copy one run of bytes cut into spans onto the same run cut into other spans.

    A span is a 1-D uint8 tensor, or a number of bytes that are not there: as a source they read
    as zeros, as a target they are skipped.  Stops at the end of the shorter run.
    """
    sources, targets = list(source)[::-1], list(target)[::-1]
    while sources and targets:
        src, dst = sources.pop(), targets.pop()
        length = min(_length(src), _length(dst))
        if isinstance(dst, torch.Tensor):
            if isinstance(src, torch.Tensor):
                dst[:length].copy_(src[:length], non_blocking=True)
            else:
                dst[:length].zero_()
        if _length(src) > length:
            sources.append(_rest(src, length))
        if _length(dst) > length:
            targets.append(_rest(dst, length))


def _length(span: torch.Tensor | int) -> int:
    return span if isinstance(span, int) else span.numel()


def _rest(span: torch.Tensor | int, start: int) -> torch.Tensor | int:
    return span - start if isinstance(span, int) else span[start:]


def _ids(ids: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    # Allocated on the stream that reads it, so its memory cannot be reused before it was read.
    return torch.tensor(ids, dtype=torch.int64, device=like.device)


def _check(
    sections: Sections, pages: Sequence[int], records: torch.Tensor, rows: Sequence[int]
) -> None:
    assert len(pages) == len(rows), (pages, rows)
    assert records.dtype is torch.uint8
    assert records.dim() == 2
    assert records.shape[1] >= sections.record_bytes, "a record does not fit a row"
    # Out-of-range ids would wrap around (-1) or fault on a device far from here.
    num_pages = sections.storages[0].shape[0]
    if any(not 0 <= p < num_pages for p in pages) or any(
        not 0 <= r < records.shape[0] for r in rows
    ):
        raise IndexError(f"pages {pages} of {num_pages}, rows {rows} of {records.shape[0]}")
