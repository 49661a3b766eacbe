"""What latent attention makes of hidden states before and after attention proper: queries, rows to
be cached, and the way into latent space and out of it.

All of it is the module's own: projections, norms, rope, scale.  Weights are read at each call, so
nothing here is stale after they change in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.kernels import HeadDims
from kvtier_deepseek.mla.structure import Rotation, plain_weight, rotate

__all__ = ["Projections"]


@dataclass(frozen=True, slots=True)
class Projections:
    """Those of one attention module.  Kinds of latent attention are made of it."""

    module: nn.Module
    index: int
    rotation: Rotation
    dims: HeadDims

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
