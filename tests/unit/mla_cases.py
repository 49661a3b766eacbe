"""Sequences in scattered pages for the MLA kernels, and what dense attention in float64 gives."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.kernels import (
    RECORDS,
    HeadDims,
    PagedBatch,
    Workspace,
    absorbed,
    materialised,
    materialised_sdpa,
)
from kvtier.kernels.records import pack_mla_fp8, unpack_mla_fp8

DIMS = HeadDims(heads=3, latent=16, rope=4, nope=8, value=6)
PAGE = 4


class MlaCase:
    """Sequences with (query, KV) lengths, rows in scattered pages of a pool full of NaN."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        dims: HeadDims = DIMS,
        dtype: torch.dtype = torch.float32,
        page: int = PAGE,
        device: str = "cpu",
        record: str = "dense",
    ) -> None:
        torch.manual_seed(7)
        self.lengths, self.dims, self.record = list(lengths), dims, RECORDS[record]
        width = dims.latent + dims.rope
        needed = [-(-kv // page) for _, kv in lengths]
        pages = torch.randperm(sum(needed) + 3).tolist()
        self.rows = torch.full(((sum(needed) + 3) * page, width), torch.nan, dtype=dtype)
        table = np.full((len(lengths), max(needed, default=0) + 2), -1, np.int32)
        self.stored = []
        for b, (_, kv) in enumerate(lengths):
            mine = [pages.pop() for _ in range(needed[b])]
            table[b, : len(mine)] = mine
            rows = torch.randn(kv, width).to(dtype)
            self.stored.append(rows)
            for t in range(kv):
                self.rows[mine[t // page] * page + t % page] = rows[t]
        query_lens = [q for q, _ in lengths]
        kv_lens = [kv for _, kv in lengths]
        self.batch = PagedBatch(
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            block_table=torch.from_numpy(table),
            cu_seqlens_q=torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32)),
            kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32),
            page_tokens=page,
        )
        n = sum(query_lens)
        self.q_nope = torch.randn(n, dims.heads, dims.nope).to(dtype)
        self.q_rope = torch.randn(n, dims.heads, dims.rope).to(dtype)
        weight = torch.randn(dims.heads, dims.nope + dims.value, dims.latent) / dims.latent**0.5
        self.weight = weight.to(dtype)
        self.scale = (dims.nope + dims.rope) ** -0.5
        self.projected: list[int] = []
        """Rows of each call of the up-projection."""
        if record == "mla_fp8":
            packed = pack_mla_fp8(self.rows.nan_to_num(0.0))
            packed[self.rows.isnan().any(-1)] = 0xFF
            self.rows = packed.view(-1, page * packed.shape[1])
            self.stored = [unpack_mla_fp8(pack_mla_fp8(rows)) for rows in self.stored]
        self._move(device)

    def _move(self, device: str) -> None:
        for name in ("rows", "q_nope", "q_rope", "weight"):
            setattr(self, name, getattr(self, name).to(device))
        self.stored = [rows.to(device) for rows in self.stored]
        batch = self.batch
        self.batch = replace(
            batch,
            block_table=batch.block_table.to(device),
            cu_seqlens_q=batch.cu_seqlens_q.to(device),
            kv_lens_device=batch.kv_lens_device.to(device),
        )

    @property
    def absorbed_query(self) -> Tensor:
        latent = torch.einsum("nhp,hpl->nhl", self.q_nope, self.weight[:, : self.dims.nope])
        return torch.cat((latent, self.q_rope), -1)

    @property
    def query(self) -> Tensor:
        return torch.cat((self.q_nope, self.q_rope), -1)

    def project(self, latent: Tensor, out: Tensor) -> None:
        self.projected.append(latent.shape[0])
        out.copy_(torch.einsum("ml,hpl->mhp", latent, self.weight))

    def workspace(self, rows: int) -> Workspace:
        """Of exactly so many rows, full of NaN."""
        made = Workspace.allocate(rows, self.dims, self.weight.dtype, self.weight.device)
        made.latent.fill_(torch.nan)
        made.projected.fill_(torch.nan)
        return made

    def run(
        self, form: str, max_rows: int = 8, kernel: Callable[..., Any] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(n, heads, value) by one of the forms, and the log-sum-exp where it has one.

        The materialised ones work in ``max_rows`` rows; "sdpa" takes more where it must.
        """
        if form == "absorbed":
            out, lse = (kernel or absorbed)(
                self.absorbed_query,
                self.rows,
                self.batch,
                latent_dim=self.dims.latent,
                scale=self.scale,
            )
            return torch.einsum("nhl,hvl->nhv", out, self.weight[:, self.dims.nope :]), lse
        page = self.batch.page_tokens
        if form == "sdpa":
            max_rows = max(max_rows, -(-max(self.batch.kv_lens, default=1) // page) * page, page)
        space = self.workspace(max_rows)

        def project(latent: Tensor, out: Tensor) -> None:
            # What an earlier chunk left behind this one's rows is nobody's.
            space.latent[latent.shape[0] :] = torch.nan
            space.projected[latent.shape[0] :] = torch.nan
            self.project(latent, out)

        args = (self.query, self.rows, self.batch, project)
        options: dict[str, Any] = {"dims": self.dims, "scale": self.scale, "record": self.record}
        options["workspace"] = space
        if form == "sdpa":
            return (kernel or materialised_sdpa)(*args, **options), None
        result: tuple[Tensor, Tensor] = (kernel or materialised)(*args, **options)
        return result

    def expected(self) -> tuple[Tensor, Tensor]:
        """One query, head and key set at a time, in float64, from the rows as they were made."""
        d, weight = self.dims, self.weight.double()
        outs, lses, at = [], [], 0
        for (q_len, kv_len), rows in zip(self.lengths, self.stored, strict=True):
            rows = rows.double()
            up = torch.einsum("ml,hpl->hmp", rows[:, : d.latent], weight)
            rope = rows[:, d.latent :].expand(d.heads, -1, -1)
            keys, values = torch.cat((up[..., : d.nope], rope), -1), up[..., d.nope :]
            for i in range(q_len):
                seen = max(kv_len - q_len + i + 1, 0)
                query = self.query[at + i].double()
                scores = torch.einsum("hd,hmd->hm", query, keys[:, :seen]) * self.scale
                lses.append(torch.logsumexp(scores, -1))
                outs.append(torch.einsum("hm,hmv->hv", scores.softmax(-1), values[:, :seen]))
            at += q_len
        return torch.stack(outs), torch.stack(lses)
