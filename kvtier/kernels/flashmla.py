"""FlashMLA behind the calls of the table, where it is installed: H100 and H200 only.

It is found in DeepSeek's package ``flash_mla``, or in the extension that vLLM's wheel carries,
which is loaded by itself: vLLM is looked for, not imported.  Nothing is looked for before a backend
is asked about.

What its kernels take: keys of 576 values (512 of them the value) in pages of 64 tokens, or lists of
slots, padded to whole blocks with -1; 64 or 128 heads where keys are listed, so other numbers are
padded with heads that are dropped.  Results are within rounding of the reference: 8e-3 of the
largest value of an output in bfloat16, 1e-3 in float16.  Its natural log-sum-exp of a query without
keys is +inf, which becomes -inf here; its output of one is 0.  Its scratch is its own: 2 KiB a head
of each query of a call, and as much for each multiprocessor; lists are attended to some queries at
a time to keep that within ``workspace_bytes``.

A call launches the library's kernels and one that puts log-sum-exps right; with ``sums=False``,
for callers that look at outputs alone, nothing else.  Heads and lists that have to be padded, and
sinks that are not float32, cost a copy each, in every call: what was kept of a sink would stay as
it was, in a captured graph above all, when a model's weights are changed in place.  Sinks of a
model that transformers loaded are float32, whatever its other weights are.
"""

import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.config import parse_bytes
from kvtier.kernels.mla import PagedBatch, check_queries
from kvtier.kernels.planned import PerBatch, capturing
from kvtier.kernels.records import Record
from kvtier.kernels.slots import token_positions
from kvtier.kernels.sparse import check_extra

__all__ = ["PAGE_TOKENS", "absorbed", "load", "missing", "mla_sparse", "sparse_attend"]

PAGE_TOKENS = 64
"""Of FlashMLA's own pages; ours may be several of them."""
LATENT, ROPE = 512, 64
HEADS = (64, 128)
"""Query heads of a call with lists."""
KEYS = {"sparse_decode_fwd": 64, "sparse_prefill_fwd": 128}
"""Lists are padded to a multiple of this."""
CALLS = ("dense_decode_fwd", *KEYS)
Schedule = tuple[Tensor | None, Tensor | None]
"""What multiprocessor does which blocks, and how many parts come before a sequence's."""
NO_SCHEDULE: Schedule = (None, None)


def missing(call: str) -> str:
    """Why one of FlashMLA's functions cannot be called here; empty if it can."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "FlashMLA needs an H100 or H200"
    calls, reason = _found()
    if call in calls:
        return ""
    return reason or f"the FlashMLA that is installed has no {call}"


def load(path: str | Path) -> None:
    """Use the extension in this file instead of an installed one.  Raises OSError if it is none."""
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    _found.cache_clear()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A batch as the dense kernel takes it: as many queries of each sequence."""

    queries: int
    lengths: Tensor
    """(sequences,) keys that each one's last query sees."""
    table: Tensor
    """(sequences, pages) FlashMLA's pages; none is negative."""


_plans: PerBatch[_Plan] = PerBatch()
_dense_schedules: PerBatch[Schedule] = PerBatch()


def absorbed(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    *,
    latent_dim: int,
    scale: float,
    workspace_bytes: int | str = "512MiB",
    sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.absorbed`` for rows of 512 + 64 values in the query's type, bfloat16 or
    float16, in pages of a multiple of 64 tokens.

    Sequences with as many queries each are attended as such; of others each query is a sequence by
    itself.  What is made of a batch, its schedule above all, is made once for all layers.
    ``workspace_bytes`` is not looked at.  Asks the device nothing.  Raises ValueError for other
    widths, types and pages.
    """
    n, heads, width = query.shape
    check_queries(n, batch)
    if latent_dim != LATENT or width != LATENT + ROPE or rows.shape[-1] != width:
        raise ValueError(f"query width {width}, row width {rows.shape[-1]}, {latent_dim=}")
    if query.dtype != rows.dtype or rows.stride(1) != 1:
        raise ValueError(f"rows of {rows.dtype}, queries of {query.dtype}")
    if batch.page_tokens % PAGE_TOKENS:
        raise ValueError(f"pages of {batch.page_tokens} tokens are not of {PAGE_TOKENS} each")
    if not n or not heads:
        return _nothing(query, workspace_bytes)
    plan = _plans.get(batch, "", lambda: _plan(batch))
    known = _dense_schedules.find(batch, heads)
    row = rows.stride(0)
    shape = (rows.shape[0] // PAGE_TOKENS, PAGE_TOKENS, 1, width)
    out, lse, *schedule = _call("dense_decode_fwd")(
        query.reshape(-1, plan.queries, heads, width),
        rows.as_strided(shape, (PAGE_TOKENS * row, row, row, 1)),
        LATENT,
        plan.lengths,
        plan.table,
        scale,
        plan.queries > 1,
        *(known or NO_SCHEDULE),
    )
    if known is None:
        _dense_schedules.put(batch, heads, (schedule[0], schedule[1]))
    lse = lse.transpose(1, 2).reshape(n, heads)
    return out.reshape(n, heads, LATENT), _natural(lse) if sums else lse


def _plan(batch: PagedBatch) -> _Plan:
    lengths, table = batch.kv_lens_device, batch.block_table
    queries = batch.query_lens[0]
    if any(count != queries for count in batch.query_lens):
        sequences, positions = token_positions(batch)
        queries = 1
        lengths, table = (positions + 1).clamp_min(0).int(), table[sequences]
    if not table.shape[1]:
        table = table.new_zeros(table.shape[0], 1)
    # Of a sequence without keys one page is read all the same, and attended to by nothing.
    table = table.clamp_min(0)
    split = batch.page_tokens // PAGE_TOKENS
    if split > 1:
        parts = torch.arange(split, dtype=table.dtype, device=table.device)
        table = (table[:, :, None] * split + parts).flatten(1)
    return _Plan(queries, lengths, table)


def mla_sparse(
    query: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    latent_dim: int,
    scale: float,
    record: Record,
    workspace_bytes: int | str = "512MiB",
    sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.mla_sparse`` for queries in bfloat16, and rows of 512 + 64 values in it or
    "mla_fp8" records, by FlashMLA's kernel for prefill and for decoding."""
    if latent_dim != LATENT or query.shape[2] != LATENT + ROPE:
        raise ValueError(f"query {tuple(query.shape)}, {latent_dim=}")
    if not query.shape[0]:
        return _nothing(query, workspace_bytes)
    if record.name == "mla_fp8":
        return _decode(query, _pages(rows, record), slots, scale, workspace_bytes, sums)
    if record.pack is not None or rows.dtype != query.dtype or rows.shape[1] != query.shape[2]:
        raise ValueError(f"{record.name!r} rows {tuple(rows.shape)} of {rows.dtype}")
    run = _call("sparse_prefill_fwd")
    lists = _lists(slots, "sparse_prefill_fwd")
    parts = []
    for some, count in _by_heads(query):
        out, _, lse = run(some, rows[:, None], lists, scale, LATENT, None, None)
        parts.append((out[:, :count], lse[:, :count]))
    return _joined(parts, sums)


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
    sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.sparse_attend`` for queries of 512 values in bfloat16 and "v4_fp8"
    records.

    With ``extra_lengths`` no list costs more than its length; their schedule is made by the first
    call with that tensor, in every graph anew.
    """
    check_extra(extra, extra_slots)
    if record.name != "v4_fp8" or query.shape[2] != LATENT or sink.shape != query.shape[1:2]:
        raise ValueError(
            f"query {tuple(query.shape)}, sink {tuple(sink.shape)}, {record.name!r} records"
        )
    if not query.shape[0]:
        return _nothing(query, workspace_bytes)
    pages = _pages(window, record)
    if extra is None or extra_slots is None or not extra_slots.shape[1]:
        return _decode(query, pages, window_slots, scale, workspace_bytes, sums, sink)
    more = (_pages(extra, record), extra_slots, extra_lengths)
    return _decode(query, pages, window_slots, scale, workspace_bytes, sums, sink, *more)


def _decode(
    query: Tensor,
    pages: Tensor,
    slots: Tensor,
    scale: float,
    workspace_bytes: int | str,
    sums: bool,
    sink: Tensor | None = None,
    extra: Tensor | None = None,
    extra_slots: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each query is a sequence of one token; its list may have a second part, in other pages."""
    run = _call("sparse_decode_fwd")
    lists = _lists(slots, "sparse_decode_fwd")
    more = None if extra_slots is None else _lists(extra_slots, "sparse_decode_fwd")
    a_query = 4 * HEADS[-1] * (LATENT + 1)
    most = max(1, parse_bytes(workspace_bytes, "workspace_bytes") // a_query)
    if query.shape[0] > most:
        lengths = None  # parts of them would be scheduled in every layer
    parts = []
    for at, (some, count) in enumerate(_by_heads(query)):
        sinks = None
        if sink is not None:
            sinks = sink[at * HEADS[-1] :][:count].float()
            if count < some.shape[1]:
                sinks = functional.pad(sinks, (0, some.shape[1] - count))
        outs, lses = [], []
        for low in range(0, query.shape[0], most):
            which = slice(low, low + most)
            queries, first = some[which, None], lists[which]
            second = None if more is None else more[which]
            key = (queries.device, queries.shape, first.shape, second is None or second.shape)
            known = _schedules.get(key, lengths)
            out, lse, *schedule = run(
                queries, pages, first, None, sinks, *known, extra, second, lengths, LATENT, scale
            )
            _schedules.put(key, lengths, known, (schedule[0], schedule[1]))
            outs.append(out[:, 0, :count])
            lses.append(lse[:, :count, 0])
        parts.append((_cat(outs, 0), _cat(lses, 0)))
    return _joined(parts, sums)


class _Schedules:
    """Schedules by shape alone where lists are as long for every query, whatever is in them; else
    by the lengths too."""

    MOST = 64

    def __init__(self) -> None:
        self._made: OrderedDict[Any, tuple[int, Schedule]] = OrderedDict()
        self._by_lengths: PerBatch[Schedule] = PerBatch()

    def get(self, key: Any, lengths: Tensor | None) -> Schedule:
        """What work on the current stream may use; nothing if that is to be made."""
        if lengths is not None:
            return self._by_lengths.find(lengths, (_stream(), key)) or NO_SCHEDULE
        stream, schedule = self._made.get(key, (0, NO_SCHEDULE))
        # Whatever was made before a graph's capture began has ended by then.
        return schedule if capturing() or stream == _stream() else NO_SCHEDULE

    def put(self, key: Any, lengths: Tensor | None, known: Schedule, made: Schedule) -> None:
        """Keep ``made``, unless it is what was known; in a graph's memory, for the graph alone."""
        if lengths is not None:
            self._by_lengths.put(lengths, (_stream(), key), made)
        elif known is NO_SCHEDULE and not capturing():
            self._made[key] = (_stream(), made)
            self._made.move_to_end(key)
            if len(self._made) > self.MOST:
                self._made.popitem(last=False)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


_schedules = _Schedules()


def _by_heads(query: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Queries (n, 64 or 128, width), and how many of their heads are real: the others hold
    anything."""
    for low in range(0, query.shape[1], HEADS[-1]):
        some = query[:, low : low + HEADS[-1]]
        n, count, width = some.shape
        heads = next(heads for heads in HEADS if heads >= count)
        if count < heads:
            padded = query.new_empty(n, heads, width)
            padded[:, :count] = some
            some = padded
        yield some.contiguous(), count


def _nothing(query: Tensor, workspace_bytes: int | str) -> tuple[Tensor, Tensor]:
    """Of no query; a size that is none is refused all the same."""
    parse_bytes(workspace_bytes, "workspace_bytes")
    return query.new_zeros(*query.shape[:2], LATENT), query.new_zeros(
        query.shape[:2], dtype=torch.float32
    )


def _joined(parts: list[tuple[Tensor, Tensor]], sums: bool) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of some heads each as those of all."""
    lse = _cat([lse for _, lse in parts], 1)
    return _cat([out for out, _ in parts], 1), _natural(lse) if sums else lse


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _natural(sums: Tensor) -> Tensor:
    """Log-sum-exps as the table's contract has them, in float32."""
    return torch.nan_to_num(sums, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def _lists(slots: Tensor, call: str) -> Tensor:
    """(n, 1, k) int32, k a multiple of a block and not 0."""
    k = slots.shape[1]
    missing_keys = max(KEYS[call] - k, -k % KEYS[call])
    lists = slots.int()
    if missing_keys or lists.stride(1) != 1:
        lists = functional.pad(lists, (0, missing_keys), value=-1)
    return lists[:, None]


def _pages(storage: Tensor, record: Record) -> Tensor:
    """(pages, slots, 1, bytes) of pages of records, as they lie."""
    slots, width = record.slots_of(storage.shape[1]), record.slot_bytes
    strides = (storage.stride(0), width, width, 1)
    return storage.as_strided((storage.shape[0], slots, 1, width), strides)


def _call(name: str) -> Callable[..., Any]:
    calls, reason = _found()
    if name not in calls:
        raise ImportError(reason or f"the FlashMLA that is installed has no {name}")
    return calls[name]


@cache
def _found() -> tuple[dict[str, Callable[..., Any]], str]:
    """FlashMLA's functions by name, or why there are none."""
    if calls := _registered():
        return calls, ""
    reason = "neither flash_mla nor a vLLM with FlashMLA's extension is installed"
    for source in (_from_package, _from_vllm):
        try:
            if calls := source():
                return calls, ""
        except (ImportError, OSError, AttributeError) as error:
            reason = f"FlashMLA is installed, but does not load: {error}"
    return {}, reason


def _from_package() -> dict[str, Callable[..., Any]]:
    if importlib.util.find_spec("flash_mla") is None:
        return {}
    return _package(importlib.import_module("flash_mla"))


def _from_vllm() -> dict[str, Callable[..., Any]]:
    if (library := _library()) is None:
        return {}
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return _registered()


def _package(module: Any) -> dict[str, Callable[..., Any]]:
    """Those of DeepSeek's package, by its public functions: what these call is not stable.

    Raises AttributeError for a version that has no schedules of its own to hand out.
    """
    attend, lists = module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd
    made = module.get_mla_metadata()[0]
    if not hasattr(made, "tile_scheduler_metadata"):
        raise AttributeError("its version of flash_mla is too old")

    def scheduled(schedule: Schedule, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        kept = module.get_mla_metadata()[0]
        kept.tile_scheduler_metadata, kept.num_splits = schedule
        out, lse = attend(*arguments, tile_scheduler_metadata=kept, **options)
        return out, lse, kept.tile_scheduler_metadata, kept.num_splits

    def dense(
        query: Tensor, pages: Tensor, value: int, lengths: Tensor, table: Tensor, scale: float,
        causal: bool, *schedule: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        options = {"softmax_scale": scale, "causal": causal}
        return scheduled(schedule, query, pages, table, lengths, value, **options)

    def sparse(
        query: Tensor, pages: Tensor, slots: Tensor, _: None, sink: Tensor | None,
        given: Tensor | None, splits: Tensor | None, extra: Tensor | None,
        extra_slots: Tensor | None, lengths: Tensor | None, value: int, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        more = {} if lengths is None else {"extra_topk_length": lengths}
        return scheduled(
            (given, splits), query, pages, None, None, value, softmax_scale=scale,
            is_fp8_kvcache=True, indices=slots, attn_sink=sink, extra_k_cache=extra,
            extra_indices_in_kvcache=extra_slots, **more,
        )  # fmt: skip

    def prefill(
        query: Tensor, rows: Tensor, slots: Tensor, scale: float, value: int, *_: None
    ) -> Any:
        return lists(query, rows, slots, scale, d_v=value)

    return dict(zip(CALLS, (dense, sparse, prefill), strict=True))


def _registered() -> dict[str, Callable[..., Any]]:
    """Those of the extension that has been loaded, by whomever."""
    return {
        name: _filled(getattr(torch.ops._flashmla_C, name))
        for name in CALLS
        if hasattr(torch.ops._flashmla_C, name)
    }


def _filled(operation: Any) -> Callable[..., Any]:
    """Arguments behind those given here are optional in every build that has them."""
    count = len(operation.default._schema.arguments)

    def call(*arguments: Any) -> Any:
        return operation(*arguments, *(None,) * (count - len(arguments)))

    return call


def _library() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("_flashmla_C*.so")):
            return file
    return None
