"""Plain torch forms of what every backend does: write rows, gather rows, attend, merge.

They define the meaning of the kernels and are the oracle of their tests, so they favour the obvious
form: one sequence after the other, float32 (or better) arithmetic, selection instead of
multiplication by zero.  Nothing here knows of models, tiers or leases.

Conventions, shared by every backend: log-sum-exp is natural; a query that sees no key gives output
0 and -inf; rows past a sequence's KV length and slots of no sequence are never read, whatever they
hold.
"""

import torch
from torch import Tensor

__all__ = ["attend", "gather_rows", "merge", "write_rows"]


def write_rows(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write ``values`` (n, width) to ``rows[slots]``, in place.

    ``rows`` (slots, width) may be strided between rows.  Slot -1 is skipped; no other row changes.
    A slot given twice in one call is the caller's mistake and leaves one of the two values.
    Raises ValueError for a shape or slot out of range, having written nothing.
    """
    if values.shape != (slots.shape[0], rows.shape[-1]):
        raise ValueError(
            f"values {tuple(values.shape)} do not match {slots.shape[0]} slots of "
            f"{rows.shape[-1]} values"
        )
    target = slots.to(torch.int64)  # a pool can hold more than 2**31 values, and 2**31 rows
    keep = target >= 0
    if not bool(keep.all()):
        target, values = target[keep], values[keep]
    if target.numel() and int(target.max()) >= rows.shape[0]:
        raise ValueError(f"slot {int(target.max())} lies past the pool's {rows.shape[0]} rows")
    rows[target] = values.to(rows.dtype)


def gather_rows(rows: Tensor, pages: Tensor, start: int, stop: int, page_tokens: int) -> Tensor:
    """Rows of positions [start, stop) of one sequence whose pages are ``pages`` in order.

    Entries of ``pages`` past the last page needed are not looked at.  Raises ValueError where one
    that is needed is missing or -1: negative indices would silently wrap around.
    """
    first, last = start // page_tokens, -(-stop // page_tokens)
    needed = pages[first:last].to(torch.int64)
    if needed.numel() < last - first or (needed.numel() and int(needed.min()) < 0):
        raise ValueError(f"the block table has no page for some of positions {start}..{stop - 1}")
    positions = torch.arange(start, stop, device=rows.device)
    return rows[needed[positions // page_tokens - first] * page_tokens + positions % page_tokens]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, first_query: int, first_key: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence's queries to a stretch of its keys.

    ``query`` (q, heads, k_dim) stand at positions ``first_query``...; ``keys`` and ``values``
    (m, k_dim) or (m, heads, k_dim) at ``first_key``....  Returns output (q, heads, v_dim) and
    log-sum-exp (q, heads), both in the arithmetic's type: float32, or the inputs' own if wider.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    query, keys, values = query.to(exact), keys.to(exact), values.to(exact)
    one_head = keys.dim() == 2
    scores = torch.einsum("qhd,md->hqm" if one_head else "qhd,mhd->hqm", query, keys)
    scores *= scale
    if first_query < first_key + keys.shape[0] - 1:  # some key lies in some query's future
        q = torch.arange(first_query, first_query + query.shape[0], device=query.device)
        m = torch.arange(first_key, first_key + keys.shape[0], device=query.device)
        scores.masked_fill_(m[None, :] > q[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # exp(-inf - -inf) is NaN: for a query without keys use any finite number instead.
    scores -= torch.where(lse == -torch.inf, 0.0, lse)[..., None]
    scores.exp_()
    out = torch.einsum("hqm,md->qhd" if one_head else "hqm,mhd->qhd", scores, values)
    return out, lse.transpose(0, 1).contiguous()


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys, from the attention to each.

    ``out`` (..., v_dim) and ``lse`` (...).  An empty side (-inf; some kernels report +inf) leaves
    the other unchanged bit for bit, whatever its own output holds; two empty sides give 0 and -inf.
    """
    exact = torch.promote_types(out_a.dtype, torch.float32)
    a = torch.where(lse_a == torch.inf, -torch.inf, lse_a).to(exact)
    b = torch.where(lse_b == torch.inf, -torch.inf, lse_b).to(exact)
    no_a, no_b = a == -torch.inf, b == -torch.inf
    top = torch.where(no_a & no_b, 0.0, torch.maximum(a, b))
    weight_a, weight_b = torch.exp(a - top), torch.exp(b - top)
    total = weight_a + weight_b
    # The weights are divided first: outputs are then only ever scaled down.
    mixed = (
        out_a.to(exact) * (weight_a / total)[..., None]
        + out_b.to(exact) * (weight_b / total)[..., None]
    ).to(out_a.dtype)
    out = torch.where(no_b[..., None], out_a, torch.where(no_a[..., None], out_b, mixed))
    out = torch.where((no_a & no_b)[..., None], 0.0, out)
    lse = torch.where(no_b, a, torch.where(no_a, b, top + torch.log(total)))
    return out, lse.to(lse_a.dtype)
