"""Up to how many new tokens a sequence takes the absorbed form: counted, or measured.

Projecting a sequence's rows up costs the same whatever the number of its queries; the absorbed form
costs more for each query and row.  Where they meet depends on the kernels and on the device: a
count of operations is the guess where nothing was measured.
"""

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvtier.kernels import HeadDims, PagedBatch
from kvtier_deepseek.mla.attention import MlaAttention

__all__ = ["QUERIES", "absorb_limit", "form_times", "measured_limit"]

QUERIES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""New tokens of one sequence, of which both forms are timed."""
CONTEXT = 8192
"""Rows before them, as far as the workspace holds as many: cost that does not grow with them
should not decide."""
REPEATS = 5
ABSORBED_COST = 1.23
"""Of an operation of the absorbed form, by one of the others: what takes them to the same time on
an H200, between 128 and 144 queries of DeepSeek-V3 behind 8,192 tokens."""


def absorb_limit(dims: HeadDims) -> int:
    """The most query tokens for which attending to latent rows costs less than projecting them up
    first; 128 for the released models.

    Projecting costs 2 * latent * (nope + value) operations per row and head, whatever the number of
    queries; the absorbed form costs more per (query, row) pair, of operations that take longer.
    """
    projecting = 2 * dims.latent * (dims.nope + dims.value)
    absorbed = ABSORBED_COST * (2 * (dims.latent + dims.rope) + 2 * dims.latent)
    materialised = 2 * (dims.nope + dims.rope) + 2 * dims.value
    if absorbed <= materialised:
        return 1 << 30
    return int(projecting / (absorbed - materialised))


def measured_limit(attention: MlaAttention, page_tokens: int) -> int:
    """The most query tokens of ``QUERIES`` up to which the absorbed form of this layer was never
    the slower one, with its own kernels on its own device; 0 if it always was.

    Takes six calls of each form for a count, and scratch pages.  A layer whose projection cannot be
    absorbed now is given ``absorb_limit``.
    """
    if not attention.absorbs:
        return absorb_limit(attention.dims)
    context = min(CONTEXT, attention.workspace.rows) // page_tokens * page_tokens
    best = 0
    for queries in QUERIES:
        absorbed, materialised = form_times(attention, page_tokens, queries, context)
        if absorbed > materialised:
            break
        best = queries
    return best


@torch.no_grad()
def form_times(
    attention: MlaAttention, page_tokens: int, queries: int, context: int
) -> tuple[float, float]:
    """Seconds of one layer's attention in the absorbed and in the materialised form, medians: one
    sequence of ``queries`` new tokens behind ``context`` rows, all of them random."""
    module: Any = attention.module
    like: Tensor = module.kv_a_layernorm.weight
    d = attention.dims
    pages = -(-(queries + context) // page_tokens)
    rows = torch.randn(pages * page_tokens, d.latent + d.rope, device=like.device).to(like.dtype)
    query = torch.randn(queries, d.heads, d.nope + d.rope, device=like.device).to(like.dtype)
    q_nope, q_rope = torch.split(query, [d.nope, d.rope], dim=-1)
    batch = PagedBatch(
        query_lens=(queries,),
        kv_lens=(queries + context,),
        block_table=torch.arange(pages, dtype=torch.int32, device=like.device)[None],
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32, device=like.device),
        kv_lens_device=torch.tensor([queries + context], dtype=torch.int32, device=like.device),
        page_tokens=page_tokens,
    )
    weight = attention.up_weight(like.dtype)
    assert weight is not None
    # In turn, so that whatever else the device does meets both.
    forms: tuple[Callable[[], object], ...] = (
        lambda: attention.attend_absorbed(
            attention.kernels["mla_absorbed"].run, batch, q_nope, q_rope, rows, weight
        ),
        lambda: attention.attend_materialised(
            lambda name: attention.kernels[name].run, batch, query, rows
        ),
    )
    times: tuple[list[float], ...] = ([], [])
    for turn in range(REPEATS + 1):
        for form, samples in zip(forms, times, strict=True):
            _settle(like.device)
            began = perf_counter()
            form()
            _settle(like.device)
            if turn:  # the first compiles
                samples.append(perf_counter() - began)
    absorbed, materialised = (statistics.median(samples) for samples in times)
    return absorbed, materialised


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
