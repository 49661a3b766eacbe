"""Attention to latent rows of 512 + 64 values on an H100 or H200: lists of slots, and pages.

Queries that are few have their keys shared out among several programs; a second launch joins what
these found.  Pages are cut and merged as ``triton_mla_parts`` does it.  What runs on the
device is in ``gluon_latent_attend``.
"""

import torch
import triton
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels import triton_mla, triton_mla_parts, triton_mla_sparse
from kvtier.kernels.gluon_latent_attend import attend_lists, attend_pages
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.records import RECORDS, Record
from kvtier.kernels.triton_mla import LOG2E, ROPE
from kvtier.kernels.triton_mla_parts import LATENT
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["TILE", "absorbed", "mla_sparse", "splits_of"]

TILE = 64
"""Rows of queries of a program: heads, or pairs of a token and a head; and keys of a tile."""
MOST_SPLITS = triton_mla_sparse.PARTS
AROUND, JOINING, BESIDE = 1.3, 1.5, 3.0
"""What a program takes beside its tiles, what joining parts takes, and what that takes more if all
multiprocessors wrote some, in tiles."""


def mla_sparse(
    query: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    latent_dim: int,
    scale: float,
    record: Record,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.mla_sparse`` for queries in bfloat16 and rows of 512 + 64 values, plain ones
    in bfloat16 or "mla_fp8".

    Scales from 2^8 on are taken as 255: packed rows hold values below 114,240.  Weights are rounded
    to bfloat16 before they meet the values; scores and sums are float32.  Asks the device nothing;
    slots past the pool count as none.  Rows that do not begin at multiples of 16 bytes are left to
    ``triton_mla_sparse``.  Raises ValueError for other queries, rows and pages.
    """
    n, heads, width = query.shape
    if latent_dim != LATENT or width != LATENT + ROPE or slots.shape[0] != n:
        raise ValueError(f"query {tuple(query.shape)}, slots {tuple(slots.shape)}, {latent_dim=}")
    pool = _pool_words(query, rows, record)
    if pool is None:
        return triton_mla_sparse.mla_sparse(
            query,
            rows,
            slots,
            latent_dim=latent_dim,
            scale=scale,
            record=record,
            workspace_bytes=workspace_bytes,
        )
    slots = adjacent(slots)
    out = torch.empty(n, heads, LATENT, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    if not n or not heads:
        return out, lse
    blocks = triton.cdiv(heads, TILE)
    a_part = n * heads * (LATENT + 1) * 4
    most = parse_bytes(workspace_bytes, "workspace_bytes") // a_part
    tiles = triton.cdiv(slots.shape[1], TILE)
    count = max(1, min(splits_of(n * blocks, tiles, _processors(query.device)), most))
    cut = count > 1
    parts = query.new_empty(count if cut else 0, n, heads, LATENT, dtype=torch.float32)
    part_lse = query.new_empty(count if cut else 0, n, heads, dtype=torch.float32)
    attend_lists[(n * blocks, count)](
        *_query_words(query),
        *pool,
        slots,
        slots.stride(0),
        slots.shape[1],
        scale * LOG2E.value,
        parts if cut else out,
        part_lse if cut else lse,
        HEADS=heads,
        PACKED=record.pack is not None,
        TRIM=slots.shape[1] > 4 * TILE,
        num_warps=4,
    )
    if cut:
        triton_mla_sparse.join(parts, part_lse, out, lse)
    return out, lse


def absorbed(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    *,
    latent_dim: int,
    scale: float,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.absorbed`` for pages (pages, page_bytes) uint8 of "mla_fp8" records and
    queries in bfloat16; what ``mla_sparse`` says of rows, sums and the device is true here too.

    Query tokens that belong to no sequence get output 0 and log-sum-exp -inf, as those without
    keys; ValueError where there are fewer queries than the batch has.
    """
    record = RECORDS["mla_fp8"]
    n, heads, width = query.shape
    if n < (asked := sum(batch.query_lens)):
        raise ValueError(f"{n} queries, in a batch of {asked}")
    if latent_dim != LATENT or width != LATENT + ROPE:
        raise ValueError(f"query {tuple(query.shape)}, {latent_dim=}")
    pool = _pool_words(query, rows, record)
    if record.slots_of(rows.shape[1]) != batch.page_tokens:
        raise ValueError(f"pages of {rows.shape[1]} bytes, of {batch.page_tokens} tokens")
    if pool is None:
        return triton_mla.absorbed(
            query,
            rows,
            batch,
            latent_dim=latent_dim,
            scale=scale,
            workspace_bytes=workspace_bytes,
        )
    out = torch.empty(n, heads, LATENT, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    sequences = batch.kv_lens_device.shape[0]
    if not (n and heads and sequences):  # kernels look at a sequence before they know it is there
        return out.zero_(), lse.fill_(-torch.inf)
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    grid = triton_mla_parts.grid_of(batch, heads, _processors(query.device), workspace, fast=True)
    parts, part_lse, plan = triton_mla_parts.scratch(query, sequences, grid)
    attend_pages[(grid.tiles, grid.parts)](
        *_query_words(query),
        *pool,
        batch.block_table,
        batch.block_table.stride(0),
        batch.cu_seqlens_q,
        batch.kv_lens_device,
        sequences,
        scale * LOG2E.value,
        out,
        lse,
        parts,
        part_lse,
        plan,
        HEADS=heads,
        BY_PART=sequences > grid.parts,
        WHOLE=batch.page_tokens % TILE == 0,
        num_warps=4,
    )
    lengths = (batch.cu_seqlens_q, batch.kv_lens_device, sequences)
    triton_mla_parts.finish(lengths, out, lse, parts, part_lse, plan, grid)
    return out, lse


def splits_of(units: int, tiles: int, processors: int) -> int:
    """Programs that share a list of so many tiles, where a program fills a multiprocessor: what
    ends soonest for ``units`` queries (or groups of their heads)."""

    def cost(splits: int) -> float:
        programs = units * splits
        joining = JOINING + BESIDE * programs / processors if splits > 1 else 0.0
        return -(-programs // processors) * (-(-tiles // splits) + AROUND) + joining

    return min(range(1, max(1, min(MOST_SPLITS, tiles)) + 1), key=cost)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _query_words(query: Tensor) -> tuple[Tensor, int, int]:
    """Queries as words, and words from token to token and head to head."""
    if query.stride(2) != 1 or any(x % 2 for x in query.stride()[:2]) or query.data_ptr() % 4:
        # ``contiguous`` would leave as it is what begins between words, or is one row of odd width.
        query = query.clone(memory_format=torch.contiguous_format)
    query = query.view(torch.int32)
    return query, query.stride(0), query.stride(1)


def _pool_words(query: Tensor, rows: Tensor, record: Record) -> tuple[Tensor, int, int, int] | None:
    """The pool in words, words from page to page, a page's slots, and slots there are; plain rows
    have pages of one.  None where rows do not begin at multiples of 16 bytes."""
    packed = record.pack is not None
    if query.dtype != torch.bfloat16 or (not packed and rows.dtype != torch.bfloat16):
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    if record.name not in ("dense", "mla_fp8"):
        raise ValueError(f"{record.name!r} records")
    if not packed and rows.shape[-1] != LATENT + ROPE:
        raise ValueError(f"rows of {rows.shape[-1]} values")
    stride, per_page, there = pool_of(rows, record)
    if rows.data_ptr() % 16 or stride * rows.itemsize % 16:
        return None
    return rows.view(torch.int32), stride * rows.itemsize // 4, per_page, there
