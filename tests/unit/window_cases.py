"""Sequences whose latent rows lie in window pages, and what dense masked attention gives.

A call attends some stretches of some sequences, each as it would be at that moment: what lies
behind a stretch is not written yet, what no query of it reaches is freed, and both are poison.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.kernels import (
    RECORDS,
    HeadDims,
    PagedBatch,
    mla_sparse,
    mla_sparse_materialised,
    window_slots,
    write_records,
)
from kvtier.kernels.records import pack_mla_fp8, unpack_mla_fp8

DIMS = HeadDims(heads=3, latent=16, rope=4, nope=8, value=6)
PACKED_DIMS = HeadDims(heads=3, latent=512, rope=64, nope=16, value=6)
Span = tuple[int, int, int]
"""Sequence, first query, end of queries."""
PADDING: Span = (-1, 0, 0)


class WindowCase:
    """``lengths`` are how long the sequences get; queries of all positions are drawn at once."""

    def __init__(
        self,
        lengths: Sequence[int],
        window: int,
        *,
        dims: HeadDims = DIMS,
        page: int = 4,
        record: str = "dense",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.window, self.page, self.dims, self.device = window, page, dims, device
        self.record, self.dtype = RECORDS[record], dtype
        width = dims.latent + dims.rope
        self.rows = [noise(n, width).to(dtype) for n in lengths]
        self.q_nope = [noise(n, dims.heads, dims.nope).to(dtype) for n in lengths]
        self.q_rope = [noise(n, dims.heads, dims.rope).to(dtype) for n in lengths]
        weight = noise(dims.heads, dims.nope + dims.value, dims.latent) / dims.latent**0.5
        self.weight = weight.to(dtype)
        self.scale = (dims.nope + dims.rope) ** -0.5

    def call(
        self,
        *spans: Span,
        materialised: bool = False,
        kernel: Callable[..., Any] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Output (n, heads, value) and log-sum-exp (n, heads) of the spans' queries, packed."""
        pool, batch, table = self.paged(*spans)
        slots = window_slots(batch, table, window=self.window, slots_per_page=self.page)
        nope, rope = (self._queries(q, spans) for q in (self.q_nope, self.q_rope))
        weight, d = self.weight.to(self.device), self.dims
        options |= {"scale": self.scale, "record": self.record}
        if materialised:
            run = kernel or mla_sparse_materialised
            query = torch.cat((nope, rope), -1)

            def up_project(latent: Tensor) -> Tensor:
                return torch.einsum("ml,hpl->mhp", latent, weight)

            out, lse = run(query, pool, slots, up_project, dims=d, **options)
            return out, lse
        key_up, value_up = weight.split((d.nope, d.value), dim=1)
        query = torch.cat((torch.einsum("nhp,hpl->nhl", nope, key_up), rope), -1)
        run = kernel or mla_sparse
        out, lse = run(query, pool, slots, latent_dim=d.latent, **options)
        return torch.einsum("nhl,hvl->nhv", out, value_up), lse

    def paged(self, *spans: Span) -> tuple[Tensor, PagedBatch, Tensor]:
        """Pool of poison but for what these queries read, the batch, and its window table."""
        columns = max((-(-stop // self.page) for _, _, stop in spans), default=0) + 1
        table = torch.full((len(spans), columns), -1, dtype=torch.int32)
        pages = len(spans) * columns
        pool = torch.full((pages * self.page, self.dims.latent + self.dims.rope), torch.nan)
        pool = pool.to(self.dtype)
        if self.record.planes:
            pool = torch.full((pages, self.record.page_bytes(self.page)), 0xFF, dtype=torch.uint8)
        free = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
        for row, (b, start, stop) in enumerate(spans):
            first = max(0, start - self.window + 1)
            for p in range(first // self.page, -(-stop // self.page)):
                table[row, p] = free.pop()
            at = torch.arange(first, stop)
            slots = table[row][at // self.page] * self.page + at % self.page
            if len(at):
                write_records(pool, slots, self.rows[b][first:stop], self.record)
        queries = [max(1, stop - start) for _, start, stop in spans]
        lengths = [stop for _, _, stop in spans]
        offsets = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        batch = PagedBatch(
            query_lens=tuple(queries),
            kv_lens=tuple(lengths),
            block_table=torch.zeros(len(spans), 0, dtype=torch.int32, device=self.device),
            cu_seqlens_q=offsets.to(self.device),
            kv_lens_device=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            page_tokens=self.page,
        )
        return pool.to(self.device), batch, table.to(self.device)

    def _queries(self, of: list[Tensor], spans: Sequence[Span]) -> Tensor:
        """A padding row's are NaN."""
        none = torch.full_like(of[0][:1], torch.nan)
        parts = [of[b][start:stop] if b >= 0 else none for b, start, stop in spans]
        return torch.cat(parts).to(self.device)

    def expected(self, b: int) -> tuple[Tensor, Tensor]:
        """Of every position of sequence ``b``: materialised, dense, masked, in float64."""
        d, rows = self.dims, self.rows[b]
        if self.record.planes:
            rows = unpack_mla_fp8(pack_mla_fp8(rows))
        rows = rows.double()
        up = torch.einsum("ml,hpl->hmp", rows[:, : d.latent], self.weight.double())
        rope = rows[:, d.latent :].expand(d.heads, -1, -1)
        keys, values = torch.cat((up[..., : d.nope], rope), -1), up[..., d.nope :]
        query = torch.cat((self.q_nope[b], self.q_rope[b]), -1).double()
        scores = torch.einsum("qhd,hkd->hqk", query, keys) * self.scale
        i = torch.arange(len(rows))
        hidden = (i[None] > i[:, None]) | (i[None] <= i[:, None] - self.window)
        scores.masked_fill_(hidden, -torch.inf)
        out = torch.einsum("hqk,hkv->qhv", scores.softmax(-1), values)
        return out, scores.logsumexp(-1).T
