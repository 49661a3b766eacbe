"""Chunked prefill of one MLA layer: what a bounded workspace costs, and what it saves.

Everything is one layer's materialised attention over paged latent rows, projections up included, on
random data: gathered, projected and attended chunk by chunk.  *Whole* is a workspace that holds all
rows at once, and the baseline.  Six parts, each a generator of ``Result``, in this order:

``kernels``   attention to one chunk alone, beside torch's own on the same keys and values
``backends``  all that run the operation here, beside each other and beside dense attention in
              float32: what the kernel table picks by (``write_table``)
``forms``     the absorbed form beside the materialised one, by new tokens
``mixed``     a step behind one long context and many short ones: time and peak memory by workspace
``contexts``  the same behind contexts of one length
``prompts``   a prompt fed in pieces, or all at once: time in all, and how long a decode row waits
              that is in the same step as the last piece

On a GPU with the sizes of DeepSeek-V3; without one with toy sizes, by the reference.
"""

import argparse
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.attention_parts import Part, Shape, Work
from benchmarks.bench_attention import TABLE, Timed, write_times
from benchmarks.harness import Param, Result, meta, summarise, write
from kvtier.kernels import (
    Case,
    HeadDims,
    PagedBatch,
    Workspace,
    row_bytes,
    select,
    select_all,
)

__all__ = ["GPU", "TOY", "Sizes", "main", "run", "timed"]

WHOLE_BYTES = 90 << 30
"""A workspace for everything at once may take so much of a GPU."""
LONG_MS = 400
"""Calls that have taken so long together are enough."""
MANY_KEYS = 1 << 20
"""Of a step: in a small workspace it takes seconds, and shows what fewer keys have shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured."""

    dims: HeadDims
    dtype: torch.dtype
    device: str
    backends: tuple[str, ...]
    """The first is what everything but ``kernels`` and ``backends`` is measured with."""
    page: int
    workspaces: tuple[int, ...]
    """Rows."""
    tokens: int
    """New ones of a step, of all its sequences."""
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    long: int
    short: tuple[int, int]
    """Contexts of a mixed step: one of ``long``, 31 between these."""
    prompts: tuple[int, ...]
    pieces: tuple[int, ...]
    queries: tuple[int, ...]
    behind: int
    """New tokens, and the context before them, of which the forms are compared."""
    loads: tuple[tuple[int, int, int], ...]
    """Sequences, new tokens of each, keys of each: what backends are compared at."""
    repeats: int

    @property
    def backend(self) -> str:
        return self.backends[0]

    def quick(self) -> "Sizes":
        """A third of it, with the extremes."""
        ends = {
            name: (getattr(self, name)[0], getattr(self, name)[-1])
            for name in ("contexts", "batches", "prompts", "pieces")
        }
        fields = {name: getattr(self, name) for name in self.__slots__}
        fewer = {"queries": self.queries[::3], "loads": self.loads[::2], "repeats": 3}
        return Sizes(**{**fields, **ends, **fewer})


GPU = Sizes(
    dims=HeadDims(heads=128, latent=512, rope=64, nope=128, value=128),
    dtype=torch.bfloat16,
    device="cuda",
    backends=("gluon", "triton"),
    page=64,
    workspaces=(1024, 4096, 8192, 32768),
    tokens=2048,
    contexts=(1024, 4096, 16384, 65536, 131072),
    batches=(1, 4, 8, 32),
    long=60_000,
    short=(100, 1000),
    prompts=(8192, 32768, 131072),
    pieces=(512, 2048, 8192),
    queries=(16, 32, 64, 96, 128, 192, 256, 384, 512, 1024),
    behind=8192,
    loads=(
        (1, 8192, 8192),
        (1, 2048, 2048),
        (1, 512, 16384),
        (32, 64, 4096),
        (8, 256, 8192),
        (1, 2048, 131072),
    ),
    repeats=7,
)
TOY = Sizes(
    dims=HeadDims(heads=2, latent=16, rope=4, nope=8, value=8),
    dtype=torch.float32,
    device="cpu",
    backends=("torch",),
    page=16,
    workspaces=(32, 128),
    tokens=32,
    contexts=(64, 256),
    batches=(1, 4),
    long=600,
    short=(1, 10),
    prompts=(64, 192),
    pieces=(16, 32),
    queries=(1, 4, 16, 64),
    behind=64,
    loads=((1, 32, 64), (4, 8, 16)),
    repeats=3,
)


def run(
    quick: bool,
    sizes: Sizes | None = None,
    write_table: Path | None = None,
    json_path: Path | None = None,
) -> list[Result]:
    """All parts, of ``sizes`` (None: those of a GPU where there is one, toys otherwise).

    A case that fails, or that memory does not hold, is told of and left out.  What has been
    measured is in the files after each case, whatever comes next.
    """
    if sizes is None:
        sizes = GPU if torch.cuda.is_available() else TOY
    if quick:
        sizes = sizes.quick()
    about = meta()
    results: list[Result] = []
    compared: list[Timed] = []
    _compile(sizes)
    for part in (kernels, partial(backends, compared), mixed, forms, contexts, prompts):
        for case in part(sizes):
            try:
                for result in case():
                    _show(result)
                    results.append(result)
            except Exception as error:  # noqa: BLE001  one case must not lose the others
                name = getattr(part, "__name__", "backends")
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
            if json_path is not None:
                write(json_path, results, about)
            if write_table is not None and compared:
                write_times(write_table, compared, about)
            if sizes.device == "cuda":
                torch.cuda.empty_cache()
    return results


def _compile(sizes: Sizes) -> None:
    """Once with every size of a tile, in one chunk and in several, so that no sample compiles."""
    for backend in sizes.backends:
        for queries in (1, 17, 65, 129):
            try:
                layer = Layer(sizes, [(queries, 4 * sizes.page + queries)], backend)
                layer(layer.workspace(2 * sizes.page))
                layer.absorbed()
            except Exception as error:  # noqa: BLE001  told again where it is to be measured
                print(f"{backend}: {type(error).__name__}: {error}", flush=True)
                break


Cases = Iterator[Callable[[], Iterator[Result]]]


def contexts(sizes: Sizes) -> Cases:
    """``chunk_ms`` and ``chunk_mb``: a step of ``tokens`` new tokens behind equal contexts."""
    for context in sizes.contexts:
        for batch in sizes.batches:
            lengths = [(sizes.tokens // batch, sizes.tokens // batch + context)] * batch
            params: dict[str, Param] = {"batch": batch, "context": context}
            yield partial(_by_workspace, sizes, lengths, params)


def mixed(sizes: Sizes) -> Cases:
    """The same of one long context and 31 short ones, with as many new tokens each."""
    low, high = sizes.short
    behind = [sizes.long, *(low + (high - low) * i // 30 for i in range(31))]
    new = max(1, sizes.tokens // 32)
    params: dict[str, Param] = {"batch": 32, "context": f"{sizes.long} and 31 of {low}-{high}"}
    lengths = [(new, new + context) for context in behind]
    yield partial(_by_workspace, sizes, lengths, params)


def prompts(sizes: Sizes) -> Cases:
    """``prompt_ms``: a prompt in pieces, summed up from steps at up to nine places.  ``stall_ms``:
    what a decode row behind a context of the prompt's length waits longer for its step than alone.
    """
    for prompt in sizes.prompts:
        yield partial(_prompt, sizes, prompt)


def forms(sizes: Sizes) -> Cases:
    """``form_us`` of a sequence's new tokens behind a context; the baseline of the materialised
    form is the absorbed one."""
    for queries in sizes.queries:
        yield partial(_forms, sizes, queries, sizes.behind)


def kernels(sizes: Sizes) -> Cases:
    """``attend_ms`` of queries to one chunk of keys, gathering included and projecting not: to
    their own tokens, and to keys before these too.  The baseline is the faster of torch's, which is
    given keys and values joined and does not merge what it finds of the two."""
    rows = sizes.workspaces[-1]
    for queries, keys, causal in (
        (rows // 4, rows // 4, True),
        (rows, rows, True),
        (sizes.tokens, rows, False),
    ):
        yield partial(_kernels, sizes, queries, keys, causal)


def backends(compared: list[Timed], sizes: Sizes) -> Cases:
    """``materialised_us``: the whole operation by each backend; the baseline is the first's."""
    d = sizes.dims
    dims = (d.nope + d.rope, d.value)
    part = Part("materialised_us", "mla_materialised", "dense", dims, _no_work, 0, (), ())
    for load in sizes.loads:
        yield partial(_backends, sizes, load, part, compared)


def _by_workspace(
    sizes: Sizes, lengths: Sequence[tuple[int, int]], params: dict[str, Param]
) -> Iterator[Result]:
    call = Layer(sizes, lengths)
    keys = sum(kv for _, kv in lengths)
    whole = -(-keys // sizes.page) * sizes.page
    base: tuple[float, float] | None = None
    spaces = [("whole", whole), *((str(n), n) for n in reversed(sizes.workspaces) if n < whole)]
    for name, rows in spaces:
        if rows * row_bytes(sizes.dims, sizes.dtype.itemsize) > WHOLE_BYTES:
            continue
        if keys > MANY_KEYS and rows == min(sizes.workspaces):
            continue
        mine = {**params, "workspace": name, "backend": sizes.backend}
        with Peak(sizes.device) as peak:
            workspace = call.workspace(rows)
            call(workspace)
        memory = summarise("chunk_mb", [peak.bytes / 1e6], unit="MB", params=mine)
        took = timed(partial(call, workspace), sizes, warm=True)
        spent = summarise("chunk_ms", took, unit="ms", params=mine)
        yield spent.against(base[0] if base else None)
        yield memory.against(base[1] if base else None)
        if name == "whole":
            base = spent.median, memory.median
        del workspace


def _prompt(sizes: Sizes, prompt: int) -> Iterator[Result]:
    decode = Decode(sizes, prompt)
    decode()  # may compile
    alone = statistics.median(timed(decode, sizes, warm=True))
    base: tuple[float, float] | None = None
    for piece in (prompt, *(p for p in reversed(sizes.pieces) if p < prompt)):
        steps = prompt // piece
        at = sorted({round(i * (steps - 1) / 8) for i in range(9)})
        times: list[float] = []
        for step in at:
            call = Layer(sizes, [(piece, (step + 1) * piece)])
            rows = min(sizes.workspaces[-2], call.padded)
            workspace = call.workspace(rows)
            times.append(statistics.median(timed(partial(call, workspace), sizes)))
        together = timed(partial(_both, partial(call, workspace), decode), sizes)
        mine: dict[str, Param] = {"prompt": prompt, "piece": piece, "backend": sizes.backend}
        total = summarise("prompt_ms", [_sum(at, times, steps)], unit="ms", params=mine)
        stall = [t - alone for t in together]
        waits = summarise("stall_ms", stall, unit="ms", params=mine)
        yield total.against(base[0] if base else None)
        yield waits.against(base[1] if base else None)
        base = base or (total.median, waits.median)


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


def _sum(at: Sequence[int], times: Sequence[float], steps: int) -> float:
    """Of times at all steps, from those at some: between two of them they grow evenly."""
    total, place = 0.0, 0
    for step in range(steps):
        while place + 1 < len(at) - 1 and at[place + 1] <= step:
            place += 1
        if len(at) == 1:
            total += times[0]
            continue
        share = (step - at[place]) / (at[place + 1] - at[place])
        total += times[place] * (1 - share) + times[place + 1] * share
    return total


def _forms(sizes: Sizes, queries: int, context: int) -> Iterator[Result]:
    layer = Layer(sizes, [(queries, queries + context)])
    rows = min(sizes.workspaces[-2], layer.padded)
    workspace = layer.workspace(rows)
    params: dict[str, Param] = {"queries": queries, "context": context}
    samples: dict[str, Callable[[], object]] = {
        "absorbed": layer.absorbed,
        "materialised": partial(layer, workspace),
    }
    base = None
    for form, call in samples.items():
        call()  # may compile
        took = [1e3 * ms for ms in timed(call, sizes, warm=True)]
        result = summarise("form_us", took, unit="us", params={**params, "form": form})
        yield result.against(base)
        base = result.median


def _kernels(sizes: Sizes, queries: int, keys: int, causal: bool) -> Iterator[Result]:
    d = sizes.dims
    context = 0 if causal else keys
    pairs = queries * (queries + 1) // 2 + queries * context
    flops = 2 * pairs * d.heads * (d.nope + d.rope + d.value)
    params: dict[str, Param] = {"queries": queries, "context": context}
    layer = Layer(sizes, [(queries, queries + context)])
    workspace = layer.workspace(layer.padded)
    workspace.latent.normal_()
    workspace.projected.normal_()
    base = _torch_times(sizes, layer.query, workspace, queries, context)
    found = dict(base)
    for backend in sizes.backends:
        layer.choose(backend)
        layer.project = lambda latent, out: None
        found[backend] = timed(partial(layer, workspace), sizes)
    for name, samples in found.items():
        result = summarise("attend_ms", samples, unit="ms", params={**params, "backend": name})
        if name in sizes.backends and base:
            fastest = min(statistics.median(times) for times in base.values())
            result = result.against(fastest)
        print(f"{name}: {flops / result.median / 1e9:.0f} TFLOP/s", flush=True)
        yield result


def _backends(
    sizes: Sizes, load: tuple[int, int, int], part: Part, compared: list[Timed]
) -> Iterator[Result]:
    batch, queries, keys = load
    layer = Layer(sizes, [(queries, keys)] * batch)
    rows = min(sizes.workspaces[-2], layer.padded)
    workspace = layer.workspace(rows)
    samples: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    for backend in sizes.backends:
        try:
            layer.choose(backend)
            errors[backend] = layer.error(layer(workspace))
            samples[backend] = [
                1e3 * ms for ms in timed(partial(layer, workspace), sizes, warm=True)
            ]
        except Exception as error:  # noqa: BLE001  the others are still wanted
            print(f"{backend}: {type(error).__name__}: {error}", flush=True)
            errors[backend] = float("inf")
    shape = Shape(batch, sizes.dims.heads, keys, queries)
    compared.append(Timed(part, shape, samples, errors))
    base = None
    for backend, some in samples.items():
        params: dict[str, Param] = {"batch": batch, "queries": queries, "keys": keys}
        result = summarise(
            "materialised_us", some, unit="us", params={**params, "backend": backend}
        )
        print(f"{backend}: error {errors[backend]:.1e}", flush=True)
        yield result.against(base)
        base = base or result.median


def _no_work(*_: object) -> Work:
    raise NotImplementedError


def _torch_times(
    sizes: Sizes, query: Tensor, workspace: Workspace, queries: int, context: int
) -> dict[str, list[float]]:
    """By each of torch's kernels that takes these: keys joined, values padded to their width."""
    d = sizes.dims
    keys = queries + context
    up = workspace.projected[:keys].transpose(0, 1)[None]
    rope = workspace.latent[:keys, d.latent :].expand(1, d.heads, -1, -1)
    k, v = torch.cat((up[..., : d.nope], rope), -1), up[..., d.nope :].contiguous()
    q = query.transpose(0, 1)[None].contiguous()
    found = {}
    ways: dict[str, tuple[SDPBackend, Tensor]] = {
        "flash": (SDPBackend.FLASH_ATTENTION, pad(v, (0, d.nope + d.rope - d.value))),
        "cudnn": (SDPBackend.CUDNN_ATTENTION, v),
    }
    if sizes.device == "cpu":
        ways = {"sdpa": (SDPBackend.MATH, v)}
    for name, (way, values) in ways.items():
        # Its causal mask is for as many queries as keys.
        pieces = [(k[..., context:, :], values[..., context:, :], True)]
        if context:
            pieces.append((k[..., :context, :], values[..., :context, :], False))

        def call(pieces: Any = tuple(pieces), way: SDPBackend = way) -> None:
            with sdpa_kernel(way):
                for keys, values, causal in pieces:
                    scaled_dot_product_attention(q, keys, values, is_causal=causal, scale=0.1)

        try:
            call()  # cuDNN may look for its kernel, for longer than it then runs
            found[name] = timed(call, sizes, warm=True)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    return found


class Layer:
    """One call's tensors: queries, rows in scattered pages, and the projection."""

    def __init__(
        self, sizes: Sizes, lengths: Sequence[tuple[int, int]], backend: str | None = None
    ) -> None:
        d = self._dims = sizes.dims
        self._sizes = sizes
        like: dict[str, Any] = {"dtype": sizes.dtype, "device": sizes.device}
        self.batch = _batch(lengths, sizes)
        pages = int(self.batch.block_table.max()) + 1
        self.padded = pages * sizes.page
        self.rows = torch.randn(self.padded, d.latent + d.rope, **like)
        self.query = torch.randn(sum(self.batch.query_lens), d.heads, d.nope + d.rope, **like)
        self.weight = torch.randn(d.heads * (d.nope + d.value), d.latent, **like)
        self.weight *= d.latent**-0.5
        self.project: Callable[[Tensor, Tensor], object] = self._project
        self.choose(backend or sizes.backend)

    def choose(self, backend: str) -> None:
        """From here on by this backend.  Raises ConfigError where it is not available."""
        d, sizes = self._dims, self._sizes
        self._materialised = select(
            Case(
                "mla_materialised", "dense", (d.nope + d.rope, d.value), sizes.dtype, sizes.device
            ),
            backend=backend,
        )
        latent = (d.latent + d.rope, d.latent)
        case = Case("mla_absorbed", "dense", latent, sizes.dtype, sizes.device)
        self._absorbed = select_all({"absorbed": case})["absorbed"]

    def error(self, out: Tensor) -> float:
        """Of some queries and heads, against dense attention in float32, by the largest value."""
        d, batch = self._dims, self.batch
        worst, largest = 0.0, 1e-6
        offsets = [0, *itertools.accumulate(batch.query_lens)]
        for b in {0, len(batch.query_lens) - 1}:
            n, kv = batch.query_lens[b], batch.kv_lens[b]
            slots = batch.block_table[b, : -(-kv // batch.page_tokens)].long()
            page = torch.arange(batch.page_tokens, device=slots.device)
            latent = self.rows[(slots[:, None] * batch.page_tokens + page).flatten()[:kv]].float()
            for h in {0, d.heads - 1}:
                weight = self.weight.view(d.heads, d.nope + d.value, d.latent)[h]
                up = (latent[:, : d.latent] @ weight.float().t()).to(out.dtype).float()
                for i in {0, n // 2, n - 1}:
                    seen = kv - n + i + 1
                    query = self.query[offsets[b] + i, h].float()
                    keys = torch.cat((up[:seen, : d.nope], latent[:seen, d.latent :]), -1)
                    want = (keys @ query * 0.1).softmax(0) @ up[:seen, d.nope :]
                    worst = max(worst, float((out[offsets[b] + i, h] - want).abs().max()))
                    largest = max(largest, float(want.abs().max()))
        return worst / largest

    def workspace(self, rows: int) -> Workspace:
        return Workspace.allocate(rows, self._dims, self._sizes.dtype, self._sizes.device)

    def _project(self, latent: Tensor, out: Tensor) -> None:
        torch.mm(latent, self.weight.t(), out=out.flatten(1))

    def __call__(self, workspace: Workspace) -> Tensor:
        """(n, heads, value)"""
        out: Tensor
        out, _ = self._materialised.run(
            self.query,
            self.rows,
            self.batch,
            self.project,
            dims=self._dims,
            scale=0.1,
            workspace=workspace,
        )
        return out

    def absorbed(self) -> Tensor:
        """The same by the other form, into latent space and out of it."""
        d = self._dims
        per_head = self.weight.view(d.heads, d.nope + d.value, d.latent)
        key_up, value_up = torch.split(per_head, [d.nope, d.value], dim=1)
        latent = torch.einsum("nhp,hpl->nhl", self.query[..., : d.nope], key_up)
        query = torch.cat((latent, self.query[..., d.nope :]), -1)
        out, _ = self._absorbed.run(query, self.rows, self.batch, latent_dim=d.latent, scale=0.1)
        return torch.einsum("nhl,hvl->nhv", out, value_up)


class Decode:
    """A decode row in the absorbed form, behind a context."""

    def __init__(self, sizes: Sizes, context: int) -> None:
        self._layer = Layer(sizes, [(1, context + 1)])

    def __call__(self) -> Tensor:
        return self._layer.absorbed()


def _batch(lengths: Sequence[tuple[int, int]], sizes: Sizes) -> PagedBatch:
    needed = [-(-kv // sizes.page) for _, kv in lengths]
    order = torch.randperm(sum(needed), dtype=torch.int32)
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for row, pages in zip(table, torch.split(order, needed), strict=True):
        row[: len(pages)] = pages
    queries = [q for q, _ in lengths]
    return PagedBatch(
        query_lens=tuple(queries),
        kv_lens=tuple(kv for _, kv in lengths),
        block_table=table.to(sizes.device),
        cu_seqlens_q=torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(sizes.device),
        kv_lens_device=torch.tensor([kv for _, kv in lengths], dtype=torch.int32).to(sizes.device),
        page_tokens=sizes.page,
    )


def timed(call: Callable[[], object], sizes: Sizes, *, warm: bool = False) -> list[float]:
    """Milliseconds of up to ``repeats`` calls, after one if it is not ``warm`` yet; of long ones
    the first has to do."""
    samples = [] if warm else [_milliseconds(call, sizes)]
    if not warm and samples[0] < LONG_MS:
        samples.clear()
    while not samples or (len(samples) < sizes.repeats and sum(samples) < LONG_MS):
        samples.append(_milliseconds(call, sizes))
    return samples


def _milliseconds(call: Callable[[], object], sizes: Sizes) -> float:
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


class Peak:
    """The most bytes that were held at once beyond those before, of tensors made meanwhile."""

    def __init__(self, device: str) -> None:
        self.bytes = 0
        self._cpu = _Live() if device == "cpu" else None
        self._before = 0

    def __enter__(self) -> "Peak":
        if self._cpu is not None:
            self._cpu.__enter__()  # type: ignore[no-untyped-call]
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._cpu is not None:
            self._cpu.__exit__(*exc)  # type: ignore[no-untyped-call]
            self.bytes = self._cpu.peak
        else:
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self._before


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What the CPU's allocator does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._bytes = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, Tensor):
                storage = out.untyped_storage()
                if storage._cdata in self._users or storage._cdata not in given:
                    self._hold(out, storage._cdata, storage.nbytes())
        return result

    def _hold(self, tensor: Tensor, storage: int, size: int) -> None:
        if not self._users.get(storage):
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
        self._users[storage] = self._users.get(storage, 0) + 1
        weakref.finalize(tensor, self._drop, storage, size).atexit = False

    def _drop(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            del self._users[storage]
            self._bytes -= size


def _show(result: Result) -> None:
    params = " ".join(f"{k}={v}" for k, v in result.params.items())
    ratio = "" if result.ratio is None else f"{result.ratio:7.2f} x"
    print(f"{result.name:10s} {params:60s} {result.median:11.3f} {result.unit}{ratio}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.bench_prefill --json PATH``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--write-table", type=Path, nargs="?", const=TABLE, help=f"write times here ({TABLE.name})"
    )
    parser.add_argument("--quick", action="store_true", help="the extremes only")
    options = parser.parse_args(argv)
    run(options.quick, write_table=options.write_table, json_path=options.json)


if __name__ == "__main__":
    main()
