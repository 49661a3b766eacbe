"""Attention of a layer's queries to the rows that their own lists name, in latent space if it can
be: what layers with a window and layers with an index have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtier.kernels import Record
from kvtier_deepseek.mla.attention import MlaAttention

__all__ = ["attend_listed"]


def attend_listed(
    full: MlaAttention,
    kernel: Callable[[str], Callable[..., Any]],
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    record: Record,
) -> Tensor:
    """Values (tokens, heads, value) of queries (tokens, heads, nope) and (tokens, heads, rope).

    ``slots`` (tokens, k) of ``rows`` are what each sees, -1 for none.  ``kernel`` gives what to
    call for "mla_sparse", or "mla_sparse_materialised" where the up-projection cannot be absorbed.
    """
    options: dict[str, Any] = {
        "scale": full.scale,
        "record": record,
        "workspace_bytes": full.workspace_bytes,
    }
    weight = full.up_weight(q_nope.dtype)
    if weight is None:
        query = torch.cat((q_nope, q_rope), dim=-1)
        attend = kernel("mla_sparse_materialised")
        whole: Tensor
        whole, _ = attend(query, rows, slots, full.up_project, dims=full.dims, **options)
        return whole
    query, value_up = full.absorb(q_nope, q_rope, weight)
    attend = kernel("mla_sparse")
    out, _ = attend(query, rows, slots, latent_dim=full.dims.latent, **options)
    return torch.einsum("nhl,hvl->nhv", out, value_up)
