"""Attention of each query to its own list of latent rows (MLA with a window, or with an index).

Lists name physical slots, as in ``sparse``, so one form serves decode, prefill and several query
tokens alike, and what lies before a chunk or in a shared prefix is reached as everything else is.
A row is [latent ; rotated rope key]: all of it is the key, its latent the value.  Slots that no
list names are never read, whatever they hold.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.mla import HeadDims, UpProject, expand
from kvtier.kernels.records import Record, read_records
from kvtier.kernels.reference import merge

__all__ = ["mla_sparse", "mla_sparse_materialised"]

SPLIT_KEYS = 1024
"""Keys of each query gathered at a time, at most."""


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
    """Attention of ``query`` (n, heads, width) to the rows that ``slots`` (n, k) names, -1 for
    none; a slot listed twice counts twice.

    ``rows`` are pages (or plain rows) of ``record``; values are a row's first ``latent_dim``.
    Returns output (n, heads, latent_dim) in the query's type and natural log-sum-exp (n, heads) in
    the arithmetic's type (float32, or the query's if wider); 0 and -inf for a query without keys.
    """
    if slots.shape[0] != query.shape[0] or not 0 < latent_dim <= query.shape[2]:
        raise ValueError(f"query {tuple(query.shape)}, slots {tuple(slots.shape)}, {latent_dim=}")
    width = query.shape[2]

    def parts(found: Tensor) -> tuple[Tensor, Tensor]:
        if found.shape[1] != width:
            raise ValueError(f"queries of {width} values, rows of {found.shape[1]}")
        found = found.to(torch.promote_types(query.dtype, torch.float32))
        return found, found[:, :latent_dim]

    # A key: as found, as gathered, its values, and what unpacking takes.
    key = 4 * (3 * width + latent_dim)
    return _attend_lists(query, rows, slots, parts, latent_dim, key, scale, record, workspace_bytes)


def mla_sparse_materialised(
    query: Tensor,
    rows: Tensor,
    slots: Tensor,
    up_project: UpProject,
    *,
    dims: HeadDims,
    scale: float,
    record: Record,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """The same of ``query`` (n, heads, nope + rope) to keys and values projected up from rows, for
    projections that cannot be absorbed.  Returns output (n, heads, value) and log-sum-exp.
    """
    if slots.shape[0] != query.shape[0] or query.shape[2] != dims.nope + dims.rope:
        raise ValueError(f"query {tuple(query.shape)}, slots {tuple(slots.shape)}, {dims}")

    def parts(found: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(found.to(query.dtype), up_project, dims)
        exact = torch.promote_types(query.dtype, torch.float32)
        return keys.to(exact), values.to(exact)

    key = 8 * dims.heads * (dims.nope + dims.rope + dims.value) + 12 * (dims.latent + dims.rope)
    return _attend_lists(query, rows, slots, parts, dims.value, key, scale, record, workspace_bytes)


def _attend_lists(
    query: Tensor,
    rows: Tensor,
    slots: Tensor,
    parts: Callable[[Tensor], tuple[Tensor, Tensor]],
    value_dim: int,
    key_bytes: int,
    scale: float,
    record: Record,
    workspace_bytes: int | str,
) -> tuple[Tensor, Tensor]:
    """``parts`` makes keys and values of rows: (m, width), or per head (m, heads, width)."""
    exact = torch.promote_types(query.dtype, torch.float32)
    n, heads, _ = query.shape
    out = query.new_zeros(n, heads, value_dim, dtype=exact)
    lse = query.new_full((n, heads), -torch.inf, dtype=exact)
    split = min(SPLIT_KEYS, max(1, slots.shape[1]))
    a_query = split * (key_bytes + 12 * heads) + 16 * heads * (value_dim + query.shape[2])
    block = max(1, parse_bytes(workspace_bytes, "workspace_bytes") // a_query)
    for low in range(0, n, block):
        mine = slice(low, min(low + block, n))
        for some in torch.split(slots[mine], split, dim=1):
            # Neighbouring queries share most of their keys: each is read and unpacked once.
            distinct, which = torch.unique(some, return_inverse=True)
            keys, values = (each[which] for each in parts(read_records(rows, distinct, record)))
            per_head = "qkhd" if keys.dim() == 4 else "qkd"
            scores = torch.einsum(f"qhd,{per_head}->qhk", query[mine].to(exact), keys) * scale
            scores.masked_fill_((some < 0)[:, None], -torch.inf)
            found = torch.logsumexp(scores, dim=-1)
            scores -= found[..., None]  # NaN for a query without keys, whose part ``merge`` drops
            part = torch.einsum(f"qhk,{per_head}->qhd", scores.exp_(), values)
            out[mine], lse[mine] = merge(out[mine], lse[mine], part, found)
    return out.to(query.dtype), lse
