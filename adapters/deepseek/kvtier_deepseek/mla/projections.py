"""What latent attention makes of hidden states before and after attention proper: queries, rows to
be cached, and the way into latent space and out of it.

All of it is the module's own: projections, norms, rope, scale.  Weights are read at each call, so
nothing here is stale after they change in place.  One thing may be done elsewhere: rows are rotated
as they are written, by a kernel that was found to give the module's very bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.kernels import HeadDims, LatentRope, Record
from kvtier_deepseek.mla.structure import Rotation, plain_weight, rotate

__all__ = ["Projections"]


@dataclass(frozen=True, slots=True)
class Projections:
    """Those of one attention module.  Kinds of latent attention are made of it."""

    module: nn.Module
    index: int
    rotation: Rotation
    dims: HeadDims
    latent_rope: LatentRope | None
    """How "write_latent" rotates rows as the module would; None: rows come rotated."""

    def project(
        self, hidden: Tensor, embeddings: Any, query_latent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries without and with position, (n, heads, nope) and (n, heads, rope), and the rows
        to be cached, (n, latent + rope), by the module's own submodules.

        ``query_latent`` is what queries are projected up from, where the caller has it already.
        """
        d, n = self.dims, hidden.shape[1]
        q_nope, q_rope, latent, k_rope = self._project(hidden, query_latent)
        key = k_rope.view(1, 1, n, d.rope)
        q_rope, key = rotate(self.rotation, q_rope, key, embeddings)
        rows = torch.cat((latent[0], key[0, 0]), dim=-1)
        return q_nope[0].transpose(0, 1), q_rope[0].transpose(0, 1), rows

    def project_and_write(
        self,
        kernel: Callable[[str], Callable[..., Any]],
        write: Callable[[Tensor], None],
        target: tuple[Tensor, Tensor, Record],
        hidden: Tensor,
        embeddings: Any,
        query_latent: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The queries of ``project``; its rows are written.

        ``target``: storage, slots and record, for the kernel "write_latent" where rows are rotated
        as they are written; elsewhere ``write`` is given them.
        """
        if self.latent_rope is None:
            q_nope, q_rope, rows = self.project(hidden, embeddings, query_latent)
            write(rows)
            return q_nope, q_rope
        d = self.dims
        q_nope, q_rope, latent, k_rope = self._project(hidden, query_latent)
        q_rope, _ = rotate(self.rotation, q_rope, q_rope[:, :0], embeddings)
        cos, sin = (turns[0, :, : d.rope // 2] for turns in embeddings)
        storage, slots, record = target
        kernel("write_latent")(
            storage,
            slots,
            torch.cat((latent[0], k_rope[0]), dim=-1),
            None,
            cos,
            sin,
            record,
            eps=0.0,
            rotation=self.latent_rope,
        )
        return q_nope[0].transpose(0, 1), q_rope[0].transpose(0, 1)

    def _project(
        self, hidden: Tensor, query_latent: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (1, heads, n, nope) and (1, heads, n, rope), normed latents (1, n, latent) and
        the rest of rows (1, n, rope); nothing is rotated."""
        m: Any = self.module
        d, n = self.dims, hidden.shape[1]
        if query_latent is not None:
            query = m.q_b_proj(query_latent)
        elif (whole := getattr(m, "q_proj", None)) is not None:
            query = whole(hidden)
        else:
            query = m.q_b_proj(m.q_a_layernorm(m.q_a_proj(hidden)))
        query = query.view(1, n, d.heads, d.nope + d.rope).transpose(1, 2)
        q_nope, q_rope = query.split((d.nope, d.rope), dim=-1)
        latent, k_rope = m.kv_a_proj_with_mqa(hidden).split((d.latent, d.rope), dim=-1)
        return q_nope, q_rope, m.kv_a_layernorm(latent), k_rope

    def absorb(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Queries in the latent space, (n, heads, latent + rope), and what brings outputs from it
        back to values, (heads, value, latent)."""
        d = self.dims
        per_head = weight.reshape(d.heads, d.nope + d.value, d.latent)
        key_up, value_up = torch.split(per_head, [d.nope, d.value], dim=1)
        return torch.cat((torch.einsum("nhp,hpl->nhl", q_nope, key_up), q_rope), dim=-1), value_up

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
