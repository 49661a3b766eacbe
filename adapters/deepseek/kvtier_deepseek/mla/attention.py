"""The attention of one layer during a step: write the step's rows, read everything from pages.

Everything outside attention proper is the model's own: projections, norms, rope, scale.  Weights
are read at each call, so nothing here is stale after they change in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvtier.kernels import HeadDims, Kernel, PagedBatch
from kvtier_deepseek.family import Run
from kvtier_deepseek.mla.structure import Rotation, plain_weight, rotate

__all__ = ["COMPONENT", "Form", "Group", "MlaAttention", "MlaRun"]

Form = Literal["absorbed", "materialised"]
COMPONENT = "latent"
MANY = 256
"""Sequences, more than a device has multiprocessors."""


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
class MlaAttention:
    """Paged attention of one module.  All but the first two are the same in every layer."""

    module: nn.Module
    index: int
    rotation: Rotation
    dims: HeadDims
    kernels: Mapping[str, Kernel]
    max_rows: int
    """Rows projected up at a time."""
    workspace_bytes: int | str

    def __call__(self, run: MlaRun, hidden: Tensor, embeddings: Any) -> Tensor:
        """Attention output (1, tokens, hidden) for the step's packed tokens."""
        run.check(self.index, hidden)
        rows = run.step.layer(self.index).rows(COMPONENT)
        q_nope, q_rope, latent = self.project(hidden, embeddings)
        run.kernel(self, "write_rows")(rows, run.step.slot_mapping[COMPONENT], latent)
        run.written.append(self.index)
        out = hidden.new_empty(hidden.shape[1], self.dims.heads, self.dims.value)
        weight = self.up_weight(hidden.dtype)
        reports = not run.forms  # the first layer that has forms
        for group in run.groups if weight is not None else (run.whole,):
            pick = slice(None) if group.tokens is None else group.tokens
            if group.form == "absorbed" and weight is not None:
                part = self._absorbed(run, group, q_nope[pick], q_rope[pick], rows, weight)
            else:
                query = torch.cat((q_nope[pick], q_rope[pick]), dim=-1)
                part = self._materialised(run, group, query, rows)
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
        self.kernels["write_rows"].run(rows, batch.cu_seqlens_q[:1].long(), rows[:1].clone())
        for sequences in (1, MANY):  # a kernel may cut a large batch up in another way
            query = norm.new_zeros(sequences, d.heads, d.latent + d.rope)
            many = _scratch_batch(sequences, page_tokens, norm.device)
            run = self.kernels["mla_absorbed"].run
            run(query, rows, many, latent_dim=d.latent, scale=self.scale)
        query = norm.new_zeros(1, d.heads, d.nope + d.rope)
        run = self.kernels["mla_materialised"].run
        up = self.up_project
        run(query, rows, batch, up, dims=d, scale=self.scale, max_rows=page_tokens)
        if whole := self.kernels.get("mla_materialised_whole"):
            whole.run(query, rows, batch, up, dims=d, scale=self.scale)

    def project(
        self, hidden: Tensor, embeddings: Any, query_latent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries without and with position, (n, heads, nope) and (n, heads, rope), and the rows
        to be cached, (n, latent + rope), by the module's own submodules.

        ``query_latent`` is what queries are projected up from, where the caller has it already.
        """
        m: Any = self.module
        d, n = self.dims, hidden.shape[1]
        if query_latent is not None:
            query = m.q_b_proj(query_latent)
        elif m.q_proj is not None:
            query = m.q_proj(hidden)
        else:
            query = m.q_b_proj(m.q_a_layernorm(m.q_a_proj(hidden)))
        query = query.view(1, n, d.heads, d.nope + d.rope).transpose(1, 2)
        q_nope, q_rope = query.split((d.nope, d.rope), dim=-1)
        latent, k_rope = m.kv_a_proj_with_mqa(hidden).split((d.latent, d.rope), dim=-1)
        latent = m.kv_a_layernorm(latent)
        q_rope, k_rope = rotate(self.rotation, q_rope, k_rope.view(1, 1, n, d.rope), embeddings)
        return (
            q_nope[0].transpose(0, 1),
            q_rope[0].transpose(0, 1),
            torch.cat((latent[0], k_rope[0, 0]), dim=-1),
        )

    def absorb(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Queries in the latent space, (n, heads, latent + rope), and what brings outputs from it
        back to values, (heads, value, latent)."""
        d = self.dims
        per_head = weight.reshape(d.heads, d.nope + d.value, d.latent)
        key_up, value_up = torch.split(per_head, [d.nope, d.value], dim=1)
        return torch.cat((torch.einsum("nhp,hpl->nhl", q_nope, key_up), q_rope), dim=-1), value_up

    def _absorbed(
        self,
        run: MlaRun,
        group: Group,
        q_nope: Tensor,
        q_rope: Tensor,
        rows: Tensor,
        weight: Tensor,
    ) -> Tensor:
        query, value_up = self.absorb(q_nope, q_rope, weight)
        out, _ = run.kernel(self, "mla_absorbed")(
            query,
            rows,
            group.batch,
            latent_dim=self.dims.latent,
            scale=self.scale,
            workspace_bytes=self.workspace_bytes,
        )
        return torch.einsum("nhl,hvl->nhv", out, value_up)

    def _materialised(self, run: MlaRun, group: Group, query: Tensor, rows: Tensor) -> Tensor:
        longest = max(group.batch.kv_lens, default=0)
        if longest <= self.max_rows and "mla_materialised_whole" in self.kernels:
            whole: Tensor = run.kernel(self, "mla_materialised_whole")(
                query, rows, group.batch, self.up_project, dims=self.dims, scale=self.scale
            )
            return whole
        out: Tensor
        out, _ = run.kernel(self, "mla_materialised")(
            query,
            rows,
            group.batch,
            self.up_project,
            dims=self.dims,
            scale=self.scale,
            max_rows=self.max_rows,
        )
        return out

    def up_project(self, latent: Tensor) -> Tensor:
        """Keys without position and values (m, heads, nope + value) of latents (m, latent)."""
        up: Tensor = self.module.kv_b_proj(latent)  # type: ignore[operator]
        return up.view(latent.shape[0], self.dims.heads, self.dims.nope + self.dims.value)

    @property
    def absorbs(self) -> bool:
        """Whether decode steps take the absorbed form, as the module is now."""
        norm: Any = self.module.kv_a_layernorm
        return self.up_weight(norm.weight.dtype) is not None

    def up_weight(self, dtype: torch.dtype) -> Tensor | None:
        """The up-projection's weight where it may be absorbed, asked anew at every call."""
        d = self.dims
        linear = self.module.kv_b_proj
        assert isinstance(linear, nn.Module)
        weight = plain_weight(linear, (d.heads * (d.nope + d.value), d.latent))
        return weight if weight is not None and weight.dtype == dtype else None

    @property
    def scale(self) -> float:
        """Of scores, as the module has it now."""
        scale: float = self.module.scaling  # type: ignore[assignment]
        return scale


def _scratch_batch(sequences: int, page_tokens: int, device: torch.device) -> PagedBatch:
    """Sequences of one token each, all in page 0."""
    return PagedBatch(
        query_lens=(1,) * sequences,
        kv_lens=(1,) * sequences,
        block_table=torch.zeros(sequences, 1, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32, device=device),
        kv_lens_device=torch.ones(sequences, dtype=torch.int32, device=device),
        page_tokens=page_tokens,
    )
