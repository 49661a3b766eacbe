"""Attention of a layer's queries to the rows that their own lists name, in latent space if it can
be: what layers with a window and layers with an index have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtier.kernels import Record
from kvtier_deepseek.mla.projections import Projections

__all__ = ["attend_listed"]


def attend_listed(
    projections: Projections,
    kernel: Callable[[str], Callable[..., Any]],
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    record: Record,
    workspace_bytes: int | str,
) -> Tensor:
    """Values (tokens, heads, value) of queries (tokens, heads, nope) and (tokens, heads, rope).

    ``slots`` (tokens, k) of ``rows`` are what each sees, -1 for none.  ``kernel`` gives what to
    call for "mla_sparse", or "mla_sparse_materialised" where the up-projection cannot be absorbed.
    """
    options: dict[str, Any] = {
        "scale": projections.scale,
        "record": record,
        "workspace_bytes": workspace_bytes,
    }
    weight = projections.up_weight(q_nope.dtype)
    if weight is None:
        query = torch.cat((q_nope, q_rope), dim=-1)
        attend = kernel("mla_sparse_materialised")
        whole: Tensor
        whole, _ = attend(
            query, rows, slots, projections.up_project, dims=projections.dims, **options
        )
        return whole
    query, value_up = projections.absorb(q_nope, q_rope, weight)
    attend = kernel("mla_sparse")
    out, _ = attend(query, rows, slots, latent_dim=projections.dims.latent, **options)
    return torch.einsum("nhl,hvl->nhv", out, value_up)
