"""What the attention benchmark times: kinds of decode attention, their sizes, and random inputs.

A part is one operation on one record.  For a size it makes several sets of inputs, which together
are larger than a GPU's L2 cache, and calls on them: of a backend of the kernel table, and of
FlashMLA's function alone, whose schedule is made once as it would be for all layers of a step, and
likewise of FlashInfer's, which plans on the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Param, Result
from kvtier.kernels import RECORDS, Case, PagedBatch, Record, flashinfer, select, write_records

__all__ = [
    "PAGE",
    "PARTS",
    "ROTATE_BYTES",
    "Call",
    "Part",
    "Shape",
    "Work",
    "paged_batch",
    "targets",
]

PAGE = 64
ROTATE_BYTES = 256 << 20
"""Of keys, over all sets of inputs; the L2 cache of an H200 has 60 MB."""
MOST_SETS = 192
SCALE = 0.1352
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One decode step: every sequence has ``queries`` new tokens and ``keys`` rows, these among
    them; ``ragged`` spreads the lengths evenly between a tenth and all of ``keys``.  Where keys
    are listed, each query has ``keys`` slots, and ``extra`` more in other pages."""

    batch: int
    heads: int
    keys: int
    queries: int = 1
    ragged: bool = False
    extra: int = 0

    @property
    def kv_lens(self) -> list[int]:
        if not self.ragged:
            return [self.keys] * self.batch
        low = self.keys // 10
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(1)).tolist()
        return [low + (self.keys - low) * i // max(1, self.batch - 1) for i in order]

    @property
    def tokens(self) -> int:
        return self.batch * self.queries

    @property
    def params(self) -> dict[str, Param]:
        return {
            "batch": self.batch,
            "heads": self.heads,
            "keys": self.keys + self.extra,
            "queries": self.queries,
            "ragged": self.ragged,
        }


@dataclass(slots=True, eq=False)
class Work:
    """Calls on all sets of inputs of one shape."""

    kernel: Callable[[str], list[Call]]
    """By backend of the table."""
    bare: list[Call] = field(default_factory=list)
    """FlashMLA's function alone; empty where it is not there."""
    planned: Callable[[], list[Call]] | None = None
    """Makes a plan with FlashInfer, for these very lengths, and answers with calls of its kernels;
    None where they are not there."""


@dataclass(frozen=True, slots=True)
class Part:
    """One operation on one record."""

    result: str
    """Name of its results."""
    operation: str
    record: str
    dims: tuple[int, ...]
    make: Callable[["Part", Shape, str, bool], Work]
    """(part, shape, device, whether FlashMLA's function is wanted) -> calls."""
    key_bytes: int
    targets: tuple[Shape, ...]
    sweep: tuple[Shape, ...]

    def case(self, device: str) -> Case:
        return Case(self.operation, self.record, self.dims, torch.bfloat16, device)

    @property
    def of(self) -> Record:
        return RECORDS[self.record]

    def flops(self, shape: Shape) -> int:
        width = sum(self.dims) if len(self.dims) == 2 else 2 * self.dims[0]
        if self.operation == "mla_absorbed":
            return 2 * width * shape.heads * shape.queries * sum(shape.kv_lens)
        return 2 * width * shape.heads * shape.tokens * (shape.keys + shape.extra)

    def bytes(self, shape: Shape) -> int:
        """Of keys that a call reads."""
        if self.operation == "mla_absorbed":
            return self.key_bytes * sum(shape.kv_lens)
        return self.key_bytes * shape.tokens * (shape.keys + shape.extra)

    def sets(self, shape: Shape, device: str) -> int:
        if device == "cpu":
            return 2
        return max(2, min(MOST_SETS, -(-ROTATE_BYTES // max(1, self.bytes(shape)))))


# ------------------------------------------------------------------ pages of random rows


def paged_batch(lengths: Sequence[tuple[int, int]], page_tokens: int, device: str) -> PagedBatch:
    """Sequences of (new tokens, keys), these among them, with their pages in no order."""
    queries, keys = ([pair[i] for pair in lengths] for i in (0, 1))
    pages = [-(-kv // page_tokens) for kv in keys]
    order = torch.randperm(sum(pages), device=device, dtype=torch.int32)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=device)
    for row, mine in zip(table, torch.split(order, pages), strict=True):
        row[: len(mine)] = mine
    return PagedBatch(
        query_lens=tuple(queries),
        kv_lens=tuple(keys),
        block_table=table,
        cu_seqlens_q=torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32),
        kv_lens_device=torch.tensor(keys, dtype=torch.int32, device=device),
        page_tokens=page_tokens,
    )


def _pages(record: Record, slots: int, device: str) -> Tensor:
    """Pages of ``PAGE`` slots: rows of noise, the same few of them again and again."""
    if not record.planes:
        return torch.randn(slots, 576, device=device, dtype=torch.bfloat16)
    pages = -(-slots // PAGE)
    few = min(pages, 64)
    some = torch.zeros(few, record.page_bytes(PAGE), dtype=torch.uint8, device=device)
    assert record.dim is not None
    values = torch.randn(few * PAGE, record.dim, device=device)
    write_records(some, torch.arange(few * PAGE, device=device), values, record)
    return some.repeat(-(-pages // few), 1)[:pages].contiguous()


@cache
def _pool(record: str, pages: int, device: str) -> Tensor:
    """One for all shapes: lists pick from it."""
    return _pages(RECORDS[record], pages * PAGE, device)


def _as_flashmla(storage: Tensor, record: Record) -> Tensor:
    if not record.planes:
        return storage.view(-1, PAGE, 1, storage.shape[1])
    width = record.slot_bytes
    shape = (storage.shape[0], PAGE, 1, width)
    return storage.as_strided(shape, (storage.stride(0), width, width, 1))


def _scheduled(call: Callable[..., Any], *before: Any, behind: tuple[Any, ...] = ()) -> Call:
    """A call whose schedule, the last two of what it answers, was made by a first one."""
    made = call(*before, None, None, *behind)[-2:]
    return partial(call, *before, *made, *behind)


# ------------------------------------------------------------------ attention to whole sequences


def _whole(part: Part, shape: Shape, device: str, bare: bool) -> Work:
    """Layers of a step: rows of their own, the step's lengths and pages."""
    batch = paged_batch([(shape.queries, kv) for kv in shape.kv_lens], PAGE, device)
    slots = sum(-(-kv // PAGE) for kv in shape.kv_lens) * PAGE
    count = part.sets(shape, device)
    queries = [
        torch.randn(shape.tokens, shape.heads, 576, device=device).to(torch.bfloat16)
        for _ in range(count)
    ]
    pools = [_pages(part.of, slots, device) for _ in range(count)]

    def kernel(backend: str) -> list[Call]:
        run = select(part.case(device), backend=backend).outputs
        run = partial(run, latent_dim=512, scale=SCALE)
        step = replace(batch)  # what is made of a batch is made anew
        return [partial(run, q, rows, step) for q, rows in zip(queries, pools, strict=True)]

    def planned() -> list[Call]:
        made = flashinfer.plan(batch, shape.heads, torch.bfloat16, scale=SCALE)
        return [partial(made.run, q, rows) for q, rows in zip(queries, pools, strict=True)]

    work = Work(kernel)
    if not part.of.planes and not flashinfer.missing():
        work.planned = planned
    if bare and not part.of.planes:
        decode: Any = torch.ops._flashmla_C.dense_decode_fwd
        work.bare = [
            _scheduled(
                decode,
                q.view(shape.batch, shape.queries, shape.heads, 576),
                _as_flashmla(rows, part.of),
                512,
                batch.kv_lens_device,
                batch.block_table,
                SCALE,
                True,
                behind=(None,),
            )
            for q, rows in zip(queries, pools, strict=True)
        ]
    return work


# ------------------------------------------------------------------ attention to lists


def _lists(shape: Shape, keys: int, slots: int, device: str) -> Tensor:
    """(tokens, keys) int32: slots in no order, few of them twice."""
    return torch.randint(slots, (shape.tokens, keys), device=device, dtype=torch.int32)


def _listed(part: Part, shape: Shape, device: str, bare: bool) -> Work:
    """Latent rows of a window, or chosen by an index."""
    pool = _pool(part.record, 32 if device == "cpu" else 8192, device)
    slots = pool.shape[0] * (PAGE if part.of.planes else 1)
    sets = [
        (
            torch.randn(shape.tokens, shape.heads, 576, device=device).to(torch.bfloat16),
            _lists(shape, shape.keys, slots, device),
        )
        for _ in range(part.sets(shape, device))
    ]

    def kernel(backend: str) -> list[Call]:
        run = select(part.case(device), backend=backend).outputs
        run = partial(run, latent_dim=512, scale=SCALE, record=part.of)
        return [partial(run, q, pool, lists) for q, lists in sets]

    work = Work(kernel)
    if bare and shape.heads in (64, 128):
        operations: Any = torch.ops._flashmla_C
        if part.of.planes:
            pages = _as_flashmla(pool, part.of)
            for q, lists in sets:
                before = (q[:, None], pages, lists[:, None], None, None)
                behind = (None, None, None, 512, SCALE, None)
                work.bare.append(_scheduled(operations.sparse_decode_fwd, *before, behind=behind))
        else:
            rows, run = pool[:, None], operations.sparse_prefill_fwd
            for q, lists in sets:
                options = (SCALE, 512, None, None, None)
                work.bare.append(partial(run, q, rows, lists[:, None], *options))
    return work


def _v4(part: Part, shape: Shape, device: str, bare: bool) -> Work:
    """A window of V4 records and chosen entries, with a sink."""
    window = _pool(part.record, 16 if device == "cpu" else 2048, device)
    entries = _pool(part.record, 32 if device == "cpu" else 8192, device)
    sets = [
        (
            torch.randn(shape.tokens, shape.heads, 512, device=device).to(torch.bfloat16),
            _lists(shape, shape.keys, window.shape[0] * PAGE, device),
            _lists(shape, shape.extra, entries.shape[0] * PAGE, device),
        )
        for _ in range(part.sets(shape, device))
    ]
    sink = torch.randn(shape.heads, device=device)

    def kernel(backend: str) -> list[Call]:
        run = select(part.case(device), backend=backend).outputs
        run = partial(run, scale=512**-0.5, record=part.of, extra=entries)
        return [partial(run, q, window, near, sink, extra_slots=far) for q, near, far in sets]

    work = Work(kernel)
    if bare and shape.heads in (64, 128):
        decode: Any = torch.ops._flashmla_C.sparse_decode_fwd
        first, second = (_as_flashmla(pool, part.of) for pool in (window, entries))
        for q, near, far in sets:
            before = (q[:, None], first, near[:, None], None, sink)
            behind = (second, far[:, None], None, 512, 512**-0.5, None)
            work.bare.append(_scheduled(decode, *before, behind=behind))
    return work


# ------------------------------------------------------------------ what there is

_DENSE = (
    Shape(1, 16, 8192),
    Shape(1, 128, 8192),
    Shape(1, 128, 131072),
    Shape(8, 128, 32768),
    Shape(32, 16, 4096),
    Shape(32, 128, 4096),
    Shape(128, 16, 4096),
    Shape(128, 128, 4096),
    Shape(64, 128, 16384),
    Shape(128, 128, 4096, queries=2),
)
_MOST_ROWS = 1 << 20
_DENSE_SWEEP = (
    *(
        Shape(b, h, k)
        for b in (1, 4, 16, 64, 256)
        for k in (1024, 4096, 16384, 65536, 131072)
        for h in (16, 64, 128)
        if b * k <= _MOST_ROWS and Shape(b, h, k) not in _DENSE
    ),
    *(Shape(b, h, 8192, ragged=True) for b in (8, 64) for h in (16, 128)),
    *(Shape(8, 16, 8192, queries=q) for q in (2, 4, 8)),
    *(Shape(32, 128, 4096, queries=q) for q in (2, 4)),
)
_PACKED = tuple(s for s in _DENSE if s.keys < 131072 and s.batch * s.keys < _MOST_ROWS)
_PACKED_SWEEP = (
    *(Shape(b, h, k) for b, k in ((1, 1024), (4, 16384), (64, 4096)) for h in (16, 64, 128)),
    *(Shape(64, h, 8192, ragged=True) for h in (16, 128)),
    Shape(1, 128, 131072),
    Shape(8, 16, 8192, queries=4),
)
_V4 = (
    *(Shape(b, 64, 128, extra=512) for b in (1, 32, 128, 256)),
    Shape(128, 128, 128, extra=1024),
)
_V4_SWEEP = (
    *(Shape(b, 64, 128, extra=512) for b in (2, 4, 8, 16, 64)),
    *(Shape(b, 128, 128, extra=1024) for b in (1, 8, 32)),
    *(Shape(b, 64, 128, extra=256) for b in (1, 64)),
    *(Shape(b, 64, 128, extra=512, queries=2) for b in (8, 64)),
    Shape(1024, 64, 128, extra=512),
)
_SWA = tuple(Shape(b, 128, k) for k in (128, 512) for b in (1, 32, 128))
_SWA_SWEEP = (
    *(Shape(b, h, 512) for b in (8, 64, 256) for h in (16, 64)),
    *(Shape(b, 128, 2048) for b in (1, 32, 128)),
    Shape(1024, 128, 512),
)
PARTS: Mapping[str, Part] = {
    "dense": Part(
        "mla_decode_us", "mla_absorbed", "dense", (576, 512), _whole, 1152, _DENSE, _DENSE_SWEEP
    ),
    "packed": Part(
        "mla_fp8_decode_us",
        "mla_absorbed",
        "mla_fp8",
        (576, 512),
        _whole,
        656,
        _PACKED,
        _PACKED_SWEEP,
    ),
    "v4": Part("v4_sparse_us", "sparse_attend", "v4_fp8", (512,), _v4, 584, _V4, _V4_SWEEP),
    "window": Part(
        "mla_swa_us", "mla_sparse", "mla_fp8", (576, 512), _listed, 656, _SWA, _SWA_SWEEP
    ),
    "window_dense": Part(
        "mla_swa_dense_us", "mla_sparse", "dense", (576, 512), _listed, 1152, _SWA, _SWA_SWEEP[-4:]
    ),
}
"""``dense`` and ``packed``: absorbed MLA decode.  ``v4``: V4's sparse decode.  ``window`` and
``window_dense``: latent rows that each query lists, as MLA_SWA and V3.2 have them."""


def targets(result: Result) -> bool:
    """Whether a result is of a size that there are targets for, not of the sweeps."""
    size = {name: value for name, value in result.params.items() if name != "backend"}
    return any(
        part.result == result.name and shape.params == size
        for part in PARTS.values()
        for shape in part.targets
    )
