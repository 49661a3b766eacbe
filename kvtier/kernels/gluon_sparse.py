"""Attention to lists of packed V4 records on an H100 or H200.

Queries that are few have their keys shared out among several programs, by ``triton_sparse``'s plan;
what these find is joined by a second launch.  A list costs what it has slots in it, up to its last.
What runs on the device is in ``gluon_sparse_attend``.
"""

import torch
import triton
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.gluon_parts import LOG2E
from kvtier.kernels.gluon_sparse_attend import attend
from kvtier.kernels.records import Record
from kvtier.kernels.sparse import check_extra
from kvtier.kernels.triton_sparse import DIM, check_lists, join, splits_of
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["HEADS", "sparse_attend"]

HEADS = 64
"""Heads of a program: one tile of the tensor cores' rows."""
GRID = 65_535
"""Queries of a launch, at most."""
Words = tuple[Tensor, int, int, int]
"""What ``_words_of`` answers."""


def sparse_attend(
    query: Tensor,
    window: Tensor,
    window_slots: Tensor,
    sink: Tensor,
    *,
    scale: float,
    record: Record,
    extra: Tensor | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.sparse_attend`` for "v4_fp8" records and queries in bfloat16.

    Pages begin at multiples of 16 bytes and have a power of two of slots.  Scales above 2^7 are
    taken as 2^7: rows hold values below 57,344.  Weights are rounded to bfloat16 before they meet
    the values; scores and sums are float32.  Asks the device nothing; slots past the pool count as
    none, and ``extra_lengths`` are not looked at.  Raises ValueError for other queries, records and
    pages, and for one of ``extra`` and ``extra_slots`` without the other.
    """
    query, sink = adjacent(query), adjacent(sink)
    check_extra(extra, extra_slots)
    if extra is None or extra_slots is None:
        extra, extra_slots = window, window_slots[:, :0]
    window_slots, extra_slots = adjacent(window_slots), adjacent(extra_slots)
    check_lists(query, sink, window_slots, extra_slots)
    if record.name != "v4_fp8" or query.dtype != torch.bfloat16:
        raise ValueError(f"{record.name!r} records, queries in {query.dtype}")
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    n, heads, _ = query.shape
    if n == 0 or heads == 0:  # pages are not looked at, and may be none
        return query.new_empty(n, heads, DIM), query.new_empty(n, heads, dtype=torch.float32)
    pools = _words_of(window, record), _words_of(extra, record)
    if n <= GRID:
        return _launch(query, pools, (window_slots, extra_slots), sink, scale, workspace)
    done = [
        _launch(
            query[i : i + GRID],
            pools,
            (window_slots[i : i + GRID], extra_slots[i : i + GRID]),
            sink,
            scale,
            workspace,
        )
        for i in range(0, n, GRID)
    ]
    return torch.cat([out for out, _ in done]), torch.cat([lse for _, lse in done])


def _launch(
    query: Tensor,
    pools: tuple[Words, Words],
    slots: tuple[Tensor, Tensor],
    sink: Tensor,
    scale: float,
    workspace: int,
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of up to ``GRID`` queries; pools and lists of the window come first,
    then those beside it."""
    n, heads, _ = query.shape
    window_slots, extra_slots = slots
    blocks = triton.cdiv(heads, HEADS)
    most = workspace // (n * heads * (DIM + 1) * 4)
    splits = max(1, min(splits_of(n * blocks, _processors(query.device)), most))
    out = torch.empty(n, heads, DIM, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    parts_of = splits if splits > 1 else 0
    parts = query.new_empty(parts_of * n * heads, DIM, dtype=torch.float32)
    part_lse = query.new_empty(parts_of * n * heads, dtype=torch.float32)
    attend[(blocks, n, splits)](
        query,
        *query.stride()[:2],
        *pools[0],
        window_slots,
        window_slots.stride(0),
        window_slots.shape[1],
        *pools[1],
        extra_slots,
        extra_slots.stride(0),
        extra_slots.shape[1],
        scale * LOG2E.value,
        sink,
        out,
        lse,
        parts,
        part_lse,
        n * heads,
        heads,
        WHOLE=splits == 1,
        num_warps=4,
        maxnreg=128,
    )
    if splits > 1:
        join(parts, part_lse, splits, sink, out, lse)
    return out, lse


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _words_of(storage: Tensor, record: Record) -> Words:
    """Pages in words, words from page to page, the power of two that is a page's slots, and slots
    there are."""
    stride, per_page, there = pool_of(storage, record)
    if storage.data_ptr() % 16 or stride % 16 or per_page & (per_page - 1):
        raise ValueError(
            f"pages of {per_page} slots, {stride} bytes apart, at {storage.data_ptr():#x}: pages "
            "have a power of two of slots and begin at multiples of 16 bytes"
        )
    return storage.view(torch.int32), stride // 4, per_page.bit_length() - 1, there
