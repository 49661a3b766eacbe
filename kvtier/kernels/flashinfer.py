"""FlashInfer's absorbed attention behind the call of the table, where it is installed.

It plans each batch on the host, from lengths that are exact then: a captured graph, whose lengths
change, cannot hold it.  Its log-sum-exp is in base 2 and becomes natural here.  Results are within
rounding of the reference, as FlashMLA's are.  Has not been measured: taken by name only.
"""

import importlib
import importlib.util
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.planned import PerBatch, capturing

__all__ = ["absorbed", "missing"]

LATENT, ROPE = 512, 64
LEAST_WORKSPACE = 128 << 20
"""What FlashInfer recommends for the parts of a split."""
LN2 = 0.6931471805599453


@dataclass(slots=True, eq=False)
class _Planner(threading.local):
    """FlashInfer's object of this thread, which holds the plan of one batch at a time."""

    wrapper: Any = None
    device: torch.device | None = None
    planned: object = None


_planner = _Planner()
_plans: PerBatch[object] = PerBatch()


def missing() -> str:
    """Why it cannot be called here; empty if it can."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return "FlashInfer needs a CUDA device of capability 8.0 or later"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return ""


def absorbed(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    *,
    latent_dim: int,
    scale: float,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.absorbed`` for rows of 512 + 64 values in the query's type, bfloat16 or
    float16.

    The plan of a batch is made by its first layer; lengths are those on the host.  Scratch is at
    least 128 MiB.  Raises ConfigError while a graph is being captured, and ValueError for other
    widths and types.
    """
    if capturing():
        raise ConfigError("flashinfer plans on the host: a captured graph cannot hold it")
    n, heads, width = query.shape
    if latent_dim != LATENT or width != LATENT + ROPE or rows.shape[-1] != width:
        raise ValueError(f"query width {width}, row width {rows.shape[-1]}, {latent_dim=}")
    if query.dtype != rows.dtype:
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    out = query.new_zeros(n, heads, LATENT)
    lse = torch.full((n, heads), -torch.inf, dtype=torch.float32, device=query.device)
    seen = [b for b, kv in enumerate(batch.kv_lens) if kv and batch.query_lens[b]]
    if not seen or not heads:
        return out, lse
    key = (heads, scale, query.dtype)
    plan = _plans.get(batch, key, object)
    if _planner.planned is not plan or _planner.device != query.device:
        _make_plan(query, batch, seen, scale, parse_bytes(workspace_bytes, "workspace_bytes"))
        _planner.planned = plan
    row = rows.stride(0)
    shape = (rows.shape[0] // batch.page_tokens, batch.page_tokens, width)
    pages = rows.as_strided(shape, (batch.page_tokens * row, row, 1))
    whole = len(seen) == len(batch.kv_lens)
    mine = slice(None) if whole else _tokens_of(batch, seen).to(query.device)
    some = query if whole else query[mine]
    found, sums = _planner.wrapper.run(
        some[..., :LATENT],
        some[..., LATENT:],
        pages[..., :LATENT],
        pages[..., LATENT:],
        return_lse=True,
    )
    out[mine], lse[mine] = found, sums * LN2
    return out, lse


def _make_plan(
    query: Tensor, batch: PagedBatch, seen: list[int], scale: float, workspace: int
) -> None:
    """Plan the sequences that have keys; lengths come from the host, so nothing waits."""
    if _planner.wrapper is None or _planner.device != query.device:
        module = importlib.import_module("flashinfer.mla")
        scratch = torch.empty(
            max(workspace, LEAST_WORKSPACE), dtype=torch.uint8, device=query.device
        )
        _planner.wrapper = module.BatchMLAPagedAttentionWrapper(scratch)
        _planner.device = query.device
    queries = np.array([batch.query_lens[b] for b in seen])
    lengths = np.array([batch.kv_lens[b] for b in seen])
    pages = -(-lengths // batch.page_tokens)
    columns = batch.block_table.shape[1]
    entries = np.concatenate(
        [b * columns + np.arange(count) for b, count in zip(seen, pages, strict=True)]
    )
    table = batch.block_table.reshape(-1)[torch.from_numpy(entries).to(query.device)]
    _planner.wrapper.plan(
        _offsets(queries),
        _offsets(pages),
        table,
        torch.from_numpy(lengths.astype(np.int32)),
        query.shape[1],
        LATENT,
        ROPE,
        batch.page_tokens,
        True,
        scale,
        query.dtype,
        query.dtype,
    )


def _offsets(counts: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32))


def _tokens_of(batch: PagedBatch, sequences: list[int]) -> Tensor:
    starts = np.concatenate(([0], np.cumsum(batch.query_lens)))
    return torch.from_numpy(
        np.concatenate([np.arange(starts[b], starts[b + 1]) for b in sequences])
    )
