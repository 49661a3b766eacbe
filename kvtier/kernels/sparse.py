"""Attention of each query to its own list of slots: a window and selected entries, one softmax.

Keys are their own values (one head for all query heads).  Lists name physical slots, so that one
form serves windows, selected and dense compressed entries, decode and prefill.  Slots that no list
names are never read, whatever they hold.
"""

import torch
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.records import Record, read_records
from kvtier.kernels.reference import merge

__all__ = ["apply_sink", "check_extra", "sparse_attend"]

SPLIT_KEYS = 1024
"""Keys of each query gathered at a time, at most."""


def sparse_attend(
    query: Tensor,
    window: Tensor,
    window_slots: Tensor,
    sink: Tensor,
    *,
    scale: float,
    record: Record,
    extra: Tensor | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` (n, heads, dim) to the slots of both lists, in one softmax.

    ``window`` and ``extra`` are pages (or plain rows) of ``record``; ``window_slots`` (n, k) and
    ``extra_slots`` (n, l) their slots, -1 for none; a slot listed twice counts twice.  ``sink``
    (heads,) joins the softmax with no value: ``-inf`` for none.  ``extra_lengths`` (n,) int32 is
    for kernels that are faster with it: a query's ``extra_slots`` behind so many are all -1.  What
    they make of it they make once for all calls with the same tensor.

    Returns output (n, heads, dim) in the query's type and the natural log-sum-exp (n, heads) of
    the keys alone, without the sink, in the arithmetic's type (float32, or the query's if wider).
    So parts attended with a sink of ``-inf`` may be merged, and ``apply_sink`` ends them.  A query
    without keys gives 0 and -inf, whatever its sink.
    """
    check_extra(extra, extra_slots)
    exact = torch.promote_types(query.dtype, torch.float32)
    n, heads, dim = query.shape
    lists = [(window, window_slots)]
    if extra is not None and extra_slots is not None:
        lists.append((extra, extra_slots))
    if sink.shape != (heads,) or any(slots.shape[0] != n for _, slots in lists):
        raise ValueError(
            f"query {tuple(query.shape)}, sink {tuple(sink.shape)}, slots "
            f"{[tuple(slots.shape) for _, slots in lists]}"
        )
    out = query.new_zeros(n, heads, dim, dtype=exact)
    lse = query.new_full((n, heads), -torch.inf, dtype=exact)
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    block, split = _blocks(workspace, heads, dim, exact.itemsize)
    for low in range(0, n, block):
        mine = slice(low, min(low + block, n))
        for storage, slots in lists:
            for some in torch.split(slots[mine], split, dim=1):
                part = _attend(query[mine].to(exact), storage, some, scale, record)
                out[mine], lse[mine] = merge(out[mine], lse[mine], *part)
    return apply_sink(out, lse, sink).to(query.dtype), lse


def check_extra(extra: Tensor | None, extra_slots: Tensor | None) -> None:
    """Raises ValueError for one without the other, which would leave out keys."""
    if (extra is None) != (extra_slots is None):
        raise ValueError("extra and extra_slots come together")


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Output (n, heads, dim) as it is with ``sink`` (heads,) in its softmax's denominator.

    ``lse`` (n, heads) is the natural log-sum-exp of the keys; 0 stays where it is -inf.
    """
    sink = sink.to(lse.dtype)
    weight = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))
    return (out.to(lse.dtype) * weight[..., None]).to(out.dtype)


def _attend(
    query: Tensor, storage: Tensor, slots: Tensor, scale: float, record: Record
) -> tuple[Tensor, Tensor]:
    # Neighbouring queries share most of their keys: each is read and unpacked once.
    distinct, which = torch.unique(slots, return_inverse=True)
    keys = read_records(storage, distinct, record).to(query.dtype)[which]
    scores = torch.einsum("qhd,qkd->qhk", query, keys) * scale
    scores.masked_fill_((slots < 0)[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    scores -= lse[..., None]  # NaN for a query without keys, whose part ``merge`` drops
    return torch.einsum("qhk,qkd->qhd", scores.exp_(), keys), lse


def _blocks(workspace: int, heads: int, dim: int, itemsize: int) -> tuple[int, int]:
    """How many queries are attended at a time, and to how many of their keys."""
    split = SPLIT_KEYS

    def a_query() -> int:
        # Keys, twice (distinct ones and gathered), records being unpacked, scores, outputs.
        return (
            split * (dim * (2 * itemsize + 12) + heads * 3 * itemsize) + 6 * heads * dim * itemsize
        )

    while split > 64 and a_query() > workspace:
        split //= 2
    return max(1, workspace // a_query()), split
