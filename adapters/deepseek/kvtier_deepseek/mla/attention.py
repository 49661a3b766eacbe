"""The attention of one layer during a step: write the step's rows, read everything from pages.

Everything outside attention proper is the model's own: projections, norms, rope, scale.  Weights
are read at each call, so nothing here is stale after they change in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvtier.kernels import RECORDS, Kernel, PagedBatch
from kvtier_deepseek.family import Run
from kvtier_deepseek.mla.projections import Projections
from kvtier_deepseek.mla.workspace import SharedWorkspace

__all__ = ["COMPONENT", "Form", "Group", "MlaAttention", "MlaRun"]

Form = Literal["absorbed", "materialised"]
COMPONENT = "latent"
MANY = 256
"""Sequences, more than a device has multiprocessors."""
QUERIES = (1, 17, 65)
"""New tokens of a sequence, for each of which a kernel may take tiles of another size."""
DOUBLED = (2, 4, 8, 16, 32, 64)
"""The same where heads of a query are rows of a tile too, of 64 at most."""
PIECE = 512
"""Rows that a projection with an output of its own is given at a time."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of a step that take the same form."""

    form: Form
    batch: PagedBatch
    tokens: Tensor | None
    """Indices of their queries among the step's tokens; None: all, in order."""


@dataclass(slots=True, eq=False, kw_only=True)
class MlaRun(Run):
    """A step, and which of its sequences take which form."""

    groups: tuple[Group, ...]
    whole: Group
    """All sequences in materialised form, for layers whose projection cannot be absorbed."""


@dataclass(frozen=True, slots=True)
class MlaAttention(Projections):
    """Paged attention of one module.  All but the first two are the same in every layer."""

    kernels: Mapping[str, Kernel]
    workspace: SharedWorkspace
    workspace_bytes: int
    """Of scratch beside the workspace."""

    def __call__(self, run: MlaRun, hidden: Tensor, embeddings: Any) -> Tensor:
        """Attention output (1, tokens, hidden) for the step's packed tokens."""
        run.check(self.index, hidden)
        rows = run.step.layer(self.index).rows(COMPONENT)
        slots, kernels = run.step.slot_mapping[COMPONENT], partial(run.kernel, self)
        q_nope, q_rope = self.project_and_write(
            kernels,
            lambda values: kernels("write_rows")(rows, slots, values),
            (rows, slots, RECORDS["dense"]),
            hidden,
            embeddings,
        )
        run.written.append(self.index)
        out = hidden.new_empty(hidden.shape[1], self.dims.heads, self.dims.value)
        weight = self.up_weight(hidden.dtype)
        reports = not run.forms  # the first layer that has forms
        for group in run.groups if weight is not None else (run.whole,):
            pick = slice(None) if group.tokens is None else group.tokens
            if group.form == "absorbed" and weight is not None:
                kernel = run.kernel(self, "mla_absorbed")
                queries = (q_nope[pick], q_rope[pick])
                part = self.attend_absorbed(kernel, group.batch, *queries, rows, weight)
            else:
                query = torch.cat((q_nope[pick], q_rope[pick]), dim=-1)
                part = self.attend_materialised(kernels, group.batch, query, rows)
            out[pick] = part
            if reports:
                taken = run.forms.get(group.form, 0)
                run.forms[group.form] = taken + len(group.batch.query_lens)
        result: Tensor = self.module.o_proj(out.flatten(1)[None])  # type: ignore[operator]
        return result

    def warmup(self, page_tokens: int) -> None:
        """Run every kernel of this layer once on a scratch page."""
        m: Any = self.module
        d, norm = self.dims, m.kv_a_layernorm.weight
        rows = norm.new_zeros(page_tokens, d.latent + d.rope)
        batch = _scratch_batch(1, page_tokens, norm.device)
        slots, row = batch.cu_seqlens_q[:1].long(), rows[:1].clone()
        self.kernels["write_rows"].run(rows, slots, row)
        if self.latent_rope is not None:
            turns = row[:, : d.rope // 2]
            self.kernels["write_latent"].run(
                *(rows, slots, row, None, turns, turns, RECORDS["dense"]),
                eps=0.0,
                rotation=self.latent_rope,
            )
        more = [1, *(q for q in DOUBLED if d.heads * q < 2 * DOUBLED[-1])]
        # A kernel may cut a large batch up in another way, and more queries into larger tiles.
        for sequences, queries in ((s, q) for q in more for s in (1, MANY)):
            query = norm.new_zeros(sequences * queries, d.heads, d.latent + d.rope)
            some = _scratch_batch(sequences, page_tokens, norm.device, queries)
            for kernel in self.kernels["mla_absorbed"].variants:
                kernel.run(query, rows, some, latent_dim=d.latent, scale=self.scale)
        for queries in QUERIES:
            query = norm.new_zeros(queries, d.heads, d.nope + d.rope)
            self._chunked_warmup(query, rows, _scratch_batch(1, page_tokens, norm.device, queries))

    def _chunked_warmup(self, query: Tensor, rows: Tensor, batch: PagedBatch) -> None:
        options: dict[str, Any] = {"dims": self.dims, "scale": self.scale}
        with self.workspace.taken() as options["workspace"]:
            for name in ("mla_materialised", "mla_materialised_whole"):
                fits = name == "mla_materialised" or batch.kv_lens[0] <= self.workspace.rows
                if fits and (kernel := self.kernels.get(name)):
                    for variant in kernel.variants:
                        variant.run(query, rows, batch, self.project_up, **options)

    def attend_absorbed(
        self,
        kernel: Callable[..., Any],
        batch: PagedBatch,
        q_nope: Tensor,
        q_rope: Tensor,
        rows: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """(n, heads, value), by a kernel of "mla_absorbed"; ``weight`` is that of ``up_weight``."""
        query, value_up = self.absorb(q_nope, q_rope, weight)
        out, _ = kernel(
            query,
            rows,
            batch,
            latent_dim=self.dims.latent,
            scale=self.scale,
            workspace_bytes=self.workspace_bytes,
        )
        return torch.einsum("nhl,hvl->nhv", out, value_up)

    def attend_materialised(
        self,
        kernel: Callable[[str], Callable[..., Any]],
        batch: PagedBatch,
        query: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """(n, heads, value), by the kernel of whichever operation fits the batch."""
        # torch's own attention is ahead of the reference only, and takes whole sequences only.
        fits = max(batch.kv_lens, default=0) <= self.workspace.rows
        whole = fits and self.kernels["mla_materialised"].backend == "torch"
        options: dict[str, Any] = {"dims": self.dims, "scale": self.scale}
        with self.workspace.taken() as options["workspace"]:
            args = (query, rows, batch, self.project_up)
            if whole and "mla_materialised_whole" in self.kernels:
                found: Tensor = kernel("mla_materialised_whole")(*args, **options)
                return found
            out: Tensor
            out, _ = kernel("mla_materialised")(*args, **options)
            return out

    def project_up(self, latent: Tensor, out: Tensor) -> None:
        """``up_project`` into ``out``, without as much memory again."""
        weight = self.up_weight(latent.dtype)
        if weight is not None:
            torch.mm(latent, weight.detach().t(), out=out.flatten(1))
            return
        for low in range(0, latent.shape[0], PIECE):
            out[low : low + PIECE] = self.up_project(latent[low : low + PIECE])


def _scratch_batch(
    sequences: int, page_tokens: int, device: torch.device, queries: int = 1
) -> PagedBatch:
    """Sequences of so many tokens each, all in page 0."""
    pages = -(-queries // page_tokens)
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    return PagedBatch(
        query_lens=(queries,) * sequences,
        kv_lens=(queries,) * sequences,
        block_table=torch.zeros(sequences, pages, dtype=torch.int32, device=device),
        cu_seqlens_q=offsets * queries,
        kv_lens_device=torch.full((sequences,), queries, dtype=torch.int32, device=device),
        page_tokens=page_tokens,
    )
