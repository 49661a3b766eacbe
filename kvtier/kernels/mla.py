"""Attention over paged latent rows (DeepSeek-V2, V3), in the two forms the algebra allows.

A row is [normed latent ; rotated rope key].  *Absorbed*: queries are brought into the latent space
and attend to the rows themselves, one key head for all query heads; cheap for few queries.
*Materialised* (``prefill``): rows are projected up to keys and values per head first; cheap for
many.  Both read everything, the step's own tokens too, from the pages.

Both take a ``PagedBatch``: which queries belong to which sequence, and where its rows lie.  They
know nothing of models; projections come as callables.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.records import RECORDS, read_records
from kvtier.kernels.reference import attend, gather_rows, merge

__all__ = [
    "HeadDims",
    "PagedBatch",
    "absorbed",
    "check_queries",
    "expand",
]

SPLIT_ROWS = 4096
"""Rows the absorbed form gathers at a time, at most: its scratch does not grow with the context."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PagedBatch:
    """Sequences of one call: their queries, packed one after the other, and their pages.

    Query i of sequence b stands at position ``kv_lens[b] - query_lens[b] + i`` and sees every row
    up to its own.  A padding row has one query and KV length 0: it sees nothing.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    """With the queries' own rows."""
    block_table: Tensor
    """(sequences, max_pages) int32 on the device; entries past the pages needed are not read."""
    cu_seqlens_q: Tensor
    """(sequences + 1,) int32 on the device: prefix sums of ``query_lens``, for kernels."""
    kv_lens_device: Tensor
    """(sequences,) int32 on the device, for kernels."""
    page_tokens: int


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Sizes of one model's heads, in values."""

    heads: int
    latent: int
    rope: int
    nope: int
    value: int


class UpProject(Protocol):
    """Latents (m, latent) to keys without position and values, (m, heads, nope + value)."""

    def __call__(self, latent: Tensor, /) -> Tensor: ...


def absorbed(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    *,
    latent_dim: int,
    scale: float,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` (n, heads, width) to the rows themselves.

    ``rows`` (slots, width), or pages (pages, page_bytes) uint8 of "mla_fp8" records; values are a
    row's first ``latent_dim``.  Returns output (n, heads, latent_dim) in the query's type and
    log-sum-exp (n, heads) in float32.  Scratch stays within ``workspace_bytes``, as far as one
    query and a few rows at a time can.
    """
    n, heads, width = query.shape
    check_queries(n, batch)
    record = RECORDS["mla_fp8" if rows.dtype == torch.uint8 else "dense"]
    if (record.dim or rows.shape[-1]) != width or not 0 < latent_dim <= width:
        raise ValueError(f"query width {width}, row width {rows.shape[-1]}, {latent_dim=}")
    pool = rows
    if record.planes:  # gathered by their numbers, then read
        rows = torch.arange(rows.shape[0] * batch.page_tokens, device=rows.device)
    out = query.new_zeros(n, heads, latent_dim)
    lse = torch.full((n, heads), -torch.inf, dtype=torch.float32, device=query.device)
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    block, split = _absorbed_blocks(workspace, heads, width, latent_dim, query.itemsize)
    begin = 0
    for b, (q_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
        for low in range(0, q_len, block):
            high = min(low + block, q_len)
            seen = kv_len - q_len + high  # rows up to the block's last query
            mine = slice(begin + low, begin + high)
            sofar: tuple[Tensor, Tensor] | None = None
            for start in range(0, seen, split):
                stop = min(start + split, seen)
                keys = gather_rows(rows, batch.block_table[b], start, stop, batch.page_tokens)
                if record.planes:
                    keys = read_records(pool, keys, record)
                part = attend(
                    query[mine],
                    keys,
                    keys[:, :latent_dim],
                    scale=scale,
                    first_query=kv_len - q_len + low,
                    first_key=start,
                )
                sofar = part if sofar is None else merge(*sofar, *part)
            if sofar is not None:
                out[mine], lse[mine] = sofar
        begin += q_len
    return out, lse


def check_queries(n: int, batch: PagedBatch) -> None:
    """Raises ValueError unless a batch has ``n`` queries."""
    if n != sum(batch.query_lens):
        raise ValueError(f"{n} queries, in a batch of {sum(batch.query_lens)}")


def _absorbed_blocks(
    workspace_bytes: int, heads: int, width: int, latent: int, element_bytes: int
) -> tuple[int, int]:
    """How many queries the absorbed form attends at a time, and to how many rows."""
    exact = max(element_bytes, 4)
    # Rows as gathered, and the wider copies of keys and values that are computed with.
    row = width * element_bytes + (exact * (width + latent) if element_bytes < 4 else 0)
    # The query's wider copy, and the outputs that a merge has in hand.
    query = heads * exact * (width + 8 * latent)
    score = heads * exact * 3 + 1  # scores, what log-sum-exp makes of them, and the mask
    split = SPLIT_ROWS
    while split > 64 and split * (row + score) + query > workspace_bytes:
        split //= 2
    return max(1, (workspace_bytes - split * row) // (query + split * score)), split


def expand(latent_rows: Tensor, up_project: UpProject, dims: HeadDims) -> tuple[Tensor, Tensor]:
    """Keys (m, heads, nope + rope) and values (m, heads, value) of rows (m, latent + rope)."""
    up = up_project(latent_rows[:, : dims.latent])
    rope = latent_rows[:, None, dims.latent :].expand(-1, dims.heads, -1)
    return torch.cat((up[..., : dims.nope], rope), dim=-1), up[..., dims.nope :]
