"""FlashInfer's absorbed attention behind the call of the table, where it is installed.

It plans each batch on the host, from lengths that are exact then: a captured graph, whose lengths
change, cannot hold it, and it is taken by name only.  Results are within rounding of the reference,
as FlashMLA's are.  On an H200 its kernels alone were the fastest at 30 of 74 sizes, 0.76 to 1.70
times as fast as FlashMLA's; but a plan takes 0.8 to 1.9 ms of the host, more than they save in 60
layers, and a call 50 to 80 us (version 0.7.2).

Its kernels see too few keys where the heads of two queries share a tile and several queries of a
sequence are attended to at once; that happens to head counts that are no power of two, and more
than 128 of them.  There each query is planned as a sequence by itself.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.kernels.mla import PagedBatch, check_queries
from kvtier.kernels.planned import PerBatch, capturing

__all__ = ["Plan", "absorbed", "missing", "plan"]

LATENT, ROPE = 512, 64
SCRATCH = 128 << 20
"""Bytes for the parts of a split, as FlashInfer recommends."""
WHOLE_TILES = frozenset({1, 2, 4, 8, 16, 32, 64, 128})
"""Heads whose queries begin where its tiles of 64 or 128 rows do."""
LN2 = 0.6931471805599453
Ints = np.ndarray[Any, np.dtype[np.int64]]

_floats: WeakValueDictionary[tuple[torch.device, int], Tensor] = WeakValueDictionary()
"""Scratch by device and stream, as long as there are plans that use it."""
_plans: PerBatch["Plan"] = PerBatch()


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

    The plan of a batch is made by its first layer; lengths are those on the host.  Scratch is 128
    MiB a stream and 8 MiB a batch, whatever ``workspace_bytes`` says.  Raises ConfigError while a
    graph is being captured, and ValueError for other widths and types, and where a batch is more
    than FlashInfer plans for.
    """
    if capturing():
        raise ConfigError("flashinfer plans on the host: a captured graph cannot hold it")
    parse_bytes(workspace_bytes, "workspace_bytes")
    check_queries(query.shape[0], batch)
    width = query.shape[2]
    if latent_dim != LATENT or width != LATENT + ROPE or rows.shape[-1] != width:
        raise ValueError(f"query width {width}, row width {rows.shape[-1]}, {latent_dim=}")
    if query.dtype != rows.dtype:
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    heads, dtype = query.shape[1], query.dtype
    key = (heads, scale, dtype, _stream(query.device))
    return _plans.get(batch, key, lambda: plan(batch, heads, dtype, scale=scale)).run(query, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What FlashInfer made of one batch, on the host, for all layers: for lengths and pages as they
    were then.  A graph may hold calls of it as long as these stay."""

    page_tokens: int
    tokens: Tensor | None
    """(tokens with keys,) int64 on the device; None: all of them."""
    wrapper: Any
    """FlashInfer's object; None where no token has keys."""
    inputs_by_name: bool
    """What its version of ``run`` takes: pairs of tensors by name, or four tensors."""

    def run(self, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and natural log-sum-exps of ``absorbed``, for one layer's queries and rows."""
        n, heads = query.shape[:2]
        if self.wrapper is not None and self.tokens is None:
            return self._attend(query, rows)
        out = query.new_zeros(n, heads, LATENT)
        lse = torch.full((n, heads), -torch.inf, dtype=torch.float32, device=query.device)
        if self.wrapper is not None:
            out[self.tokens], lse[self.tokens] = self._attend(query[self.tokens], rows)
        return out, lse

    def _attend(self, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        row, width = rows.stride(0), query.shape[2]
        shape = (rows.shape[0] // self.page_tokens, self.page_tokens, width)
        pages = rows.as_strided(shape, (self.page_tokens * row, row, 1))
        queries = query[..., :LATENT], query[..., LATENT:]
        keys = pages[..., :LATENT], pages[..., LATENT:]
        run = self.wrapper.run
        if self.inputs_by_name:
            found: tuple[Tensor, Tensor] = run(
                query=queries, kv_cache=keys, return_lse=True, return_lse_base_on_e=True
            )
            return found
        out, sums = run(*queries, *keys, return_lse=True)
        return out, sums * LN2


def plan(batch: PagedBatch, heads: int, dtype: torch.dtype, *, scale: float) -> Plan:
    """Plan a batch on its device, for the current stream.  Lengths come from the host; with
    versions that have no ``MLAPlanMetadata`` it waits for the device all the same.

    Raises ValueError where a batch is more than FlashInfer plans for.
    """
    sequences, queries, lengths, tokens = _attended(batch, heads)
    device = batch.block_table.device
    mine = None
    if len(tokens) < sum(batch.query_lens):
        mine = torch.from_numpy(tokens).to(device)
    if not len(sequences) or not heads:
        return Plan(batch.page_tokens, mine, None, False)
    pages = -(-lengths // batch.page_tokens)
    begins = sequences * batch.block_table.shape[1] - (pages.cumsum() - pages)
    entries = np.repeat(begins, pages) + np.arange(pages.sum())
    metadata = {
        "qo_indptr": _offsets(queries),
        "kv_indptr": _offsets(pages),
        "kv_indices": batch.block_table.reshape(-1)[torch.from_numpy(entries).to(device)],
        "kv_len_arr": torch.from_numpy(lengths.astype(np.int32)),
    }
    common = {
        "num_heads": heads,
        "head_dim_ckv": LATENT,
        "head_dim_kpe": ROPE,
        "page_size": batch.page_tokens,
        "causal": bool((queries > 1).any()),
        "sm_scale": scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }
    module = importlib.import_module("flashinfer.mla")
    wrapper = module.BatchMLAPagedAttentionWrapper(_scratch(device))
    described = getattr(module, "MLAPlanMetadata", None)
    if described is not None:
        told = {"metadata": described.csr(**metadata), "lse_mode": "basee"}
        layouts = {"query_layout": "split", "kv_cache_layout": "split"}
        wrapper.plan(**told, **layouts, **common)
    else:
        wrapper.plan(**metadata, **common)
        if device.type == "cuda":  # what it copies from may be written to by the next plan
            torch.cuda.current_stream(device).synchronize()
    return Plan(batch.page_tokens, mine, wrapper, described is not None)


def _attended(batch: PagedBatch, heads: int) -> tuple[Ints, Ints, Ints, Ints]:
    """What is planned as sequences: of each, which of the batch's it is, its queries and its keys;
    and the tokens of the batch that are among their queries, in order."""
    queries = np.array(batch.query_lens, np.int64)
    lengths = np.array(batch.kv_lens, np.int64)
    sequences = np.arange(len(queries))
    tokens = np.arange(queries.sum())
    of = np.repeat(sequences, queries)
    alone = queries.max(initial=0) > 1 and heads not in WHOLE_TILES
    if alone or (lengths < queries).any():
        behind = np.repeat(queries.cumsum(), queries) - tokens - 1
        sequences, queries, lengths = of, np.ones_like(of), lengths[of] - behind
        of = tokens
    seen = (lengths > 0) & (queries > 0)
    return sequences[seen], queries[seen], lengths[seen], tokens[seen[of]]


def _scratch(device: torch.device) -> Tensor:
    """For the current stream, on which its users come one after another."""
    place = device, _stream(device)
    floats = _floats.get(place)
    if floats is None:
        floats = _floats[place] = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
    return floats


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _offsets(counts: Ints) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32))
