"""Where the keys of a query lie: positions and entries of a sequence as physical slots.

Slot s of a component lies in page ``s // slots per page``, as records are addressed.  -1 stands for
no key.  Arithmetic on tables; nothing is read from pages.

A page that is needed and missing raises ValueError where the table lies on the host.  On a device,
which would have to be waited for, it is no key.
"""

import torch
from torch import Tensor

from kvtier.kernels.mla import PagedBatch

__all__ = [
    "c4_slots",
    "c128_slots",
    "closed_entries",
    "entry_slots",
    "token_positions",
    "token_slots",
    "window_slots",
]


def closed_entries(positions: Tensor, ratio: int) -> Tensor:
    """How many entries the query at each position sees: those closed once its token is in."""
    return (positions + 1) // ratio


def entry_slots(entries: Tensor, pages: Tensor, page_tokens: int, ratio: int) -> Tensor:
    """Slots (int64) of ``entries`` of one sequence whose pages are ``pages`` in order; -1 of -1."""
    per_page = page_tokens // ratio
    number = entries.to(torch.int64).clamp_min(0)
    return torch.where(entries < 0, -1, _lookup(pages, number, per_page, entries >= 0))


def window_slots(
    batch: PagedBatch, window_table: Tensor, *, window: int, slots_per_page: int
) -> Tensor:
    """Slots (n, window) int32 of the tokens each query sees, oldest first, then -1.

    A query at position t sees positions t - window + 1 .. t, as far as there are any: ``window``
    of them at most, its own included.  ``window_table`` (sequences, pages) holds window pages by
    number, -1 where freed.  A padding row sees nothing.
    """
    sequences, positions = token_positions(batch)
    first = (positions - window + 1).clamp_min(0)
    seen = first[:, None] + torch.arange(window, device=positions.device)
    wanted = seen <= positions[:, None]
    return _table_slots(window_table, sequences, seen, slots_per_page, wanted)


def c4_slots(entries: Tensor, batch: PagedBatch) -> Tensor:
    """Slots (n, k) int32 of C4 entry numbers (n, k); -1 stays -1."""
    return chosen_slots(entries, batch, ratio=4)


def token_slots(positions: Tensor, batch: PagedBatch) -> Tensor:
    """Slots (n, k) int32 of the tokens at ``positions`` (n, k) of each query's own sequence, where
    every token has one; -1 stays -1."""
    return chosen_slots(positions, batch, ratio=1)


def c128_slots(batch: PagedBatch) -> Tensor:
    """Slots (n, k) int32 of every C128 entry each query sees, -1 behind.

    k is the most that any query of the batch sees.
    """
    sequences, positions = token_positions(batch)
    entries = torch.arange(max(batch.kv_lens, default=0) // 128, device=positions.device)
    # A sequence's tokens see the same entries, each up to its own: look each up once.
    closed = (batch.kv_lens_device // 128)[:, None]
    rows = torch.arange(len(batch.kv_lens), device=positions.device)
    slots = _table_slots(
        batch.block_table,
        rows,
        entries.expand(len(rows), -1),
        batch.page_tokens // 128,
        entries < closed,
    )
    return torch.where(entries < closed_entries(positions, 128)[:, None], slots[sequences], -1)


def token_positions(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Sequence and position (n,) int64 of each of the batch's tokens; -1 in a padding row."""
    offsets = batch.cu_seqlens_q.to(torch.int64)
    query, stops = offsets.diff(), batch.kv_lens_device.to(torch.int64)
    n = sum(batch.query_lens)
    sequences = torch.repeat_interleave(query, output_size=n)
    tokens = torch.arange(n, device=offsets.device)
    return sequences, tokens + (stops - query - offsets[:-1])[sequences]


def chosen_slots(entries: Tensor, batch: PagedBatch, ratio: int) -> Tensor:
    """Slots (n, k) int32 of entries (n, k) of ``ratio`` tokens each; -1 stays -1."""
    sequences, _ = token_positions(batch)
    per_page = batch.page_tokens // ratio
    numbers = entries.to(torch.int64)
    return _table_slots(batch.block_table, sequences, numbers, per_page, entries >= 0)


def _table_slots(
    table: Tensor, sequences: Tensor, numbers: Tensor, per_page: int, wanted: Tensor
) -> Tensor:
    """Slots (n, k) int32 of each sequence's slot ``numbers``, -1 where not ``wanted``."""
    slots = _lookup(table, numbers.clamp_min(0), per_page, wanted, sequences[:, None])
    return torch.where(wanted, slots, -1).int()


def _lookup(
    table: Tensor, numbers: Tensor, per_page: int, wanted: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Slots (int64) of ``numbers`` by one sequence's ``table``, or by its ``rows`` one for each:
    only the pages that are named are taken out of it, whatever the length of the context."""
    if not table.shape[-1]:
        table = table.new_full((*table.shape[:-1], 1), -1)
    columns = numbers // per_page
    inside = columns.clamp_max(table.shape[-1] - 1)
    page = (table[inside] if rows is None else table[rows, inside]).to(torch.int64)
    missing = (page < 0) | (columns != inside)
    if _on_host(table) and bool((wanted & missing).any()):
        raise ValueError("the table lacks a page that is needed")
    return torch.where(missing, -1, page * per_page + numbers % per_page)


def _on_host(table: Tensor) -> bool:
    return table.device.type == "cpu"
