"""Attention of decode steps on a GPU, beside FlashMLA in the same run.

Every contender is captured in a CUDA graph that runs over several sets of inputs, together larger
than the L2 cache, and the graph is replayed; contenders take turns.  Inputs are random.  A part of
this benchmark is a generator of ``Result``: ``dense`` is absorbed MLA over bf16 pages.

FlashMLA is the extension that vLLM's wheel carries; ``flashmla`` is the path of its library.  Its
schedule is made outside the graph, as it would be once a step for all layers.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Param, Result, meta, summarise, write
from kvtier.kernels import Case, PagedBatch, select

__all__ = ["Shape", "dense", "main", "run"]

PAGE = 64
ROTATE_BYTES = 256 << 20
"""Of keys, over all sets of inputs; the L2 cache of an H200 has 60 MB."""
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """One decode step: every sequence has ``queries`` new tokens and ``keys`` rows, these among
    them; ``ragged`` spreads the lengths evenly between a tenth and all of ``keys``."""

    batch: int
    heads: int
    keys: int
    queries: int = 1
    ragged: bool = False

    @property
    def kv_lens(self) -> list[int]:
        if not self.ragged:
            return [self.keys] * self.batch
        low = self.keys // 10
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(1)).tolist()
        return [low + (self.keys - low) * i // max(1, self.batch - 1) for i in order]

    @property
    def params(self) -> dict[str, Param]:
        return {
            "batch": self.batch,
            "heads": self.heads,
            "keys": self.keys,
            "queries": self.queries,
            "ragged": self.ragged,
        }

    @property
    def flops(self) -> int:
        return 2 * (576 + 512) * self.heads * self.queries * sum(self.kv_lens)

    @property
    def key_bytes(self) -> int:
        return 1152 * sum(self.kv_lens)


TARGETS = (
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
SWEEP = (
    *(Shape(b, h, 4096) for b in (1, 4, 16, 64, 256) for h in (16, 64, 128)),
    *(Shape(1, h, k) for k in (1024, 32768, 131072) for h in (16, 64)),
    *(Shape(16, 128, k) for k in (1024, 16384)),
    *(Shape(b, h, 8192, ragged=True) for b in (8, 64) for h in (16, 128)),
    *(Shape(8, 16, 8192, queries=q) for q in (2, 4, 8)),
)


def run(quick: bool, flashmla: Path | None = None) -> list[Result]:
    """Microseconds of a call; the baseline is FlashMLA where it is there.  Without a GPU, nothing.

    ``quick`` leaves the sweeps out.
    """
    if not torch.cuda.is_available():
        print("attention: needs a CUDA device")
        return []
    return list(dense(TARGETS if quick else TARGETS + SWEEP, flashmla))


def dense(
    shapes: Sequence[Shape], flashmla: Path | None, backends: Sequence[str] = ("triton",)
) -> Iterator[Result]:
    """Absorbed MLA decode over bf16 pages, by each backend of the kernel table."""
    if flashmla is not None:
        torch.ops.load_library(str(flashmla))  # type: ignore[no-untyped-call]
    for shape in shapes:
        try:
            sets = _inputs(shape)
            contenders = {}
            if flashmla is not None:
                contenders["flashmla"] = [_flashmla(i, shape) for i in sets]
            for backend in backends:
                contenders[backend] = [_ours(i, backend) for i in sets]
            times = replayed(contenders)
        except Exception as error:  # noqa: BLE001  one size must not lose the others
            print(f"{shape}: {type(error).__name__}: {error}", flush=True)
            continue
        yield from _told(shape, times)
        del sets, contenders
        torch.cuda.empty_cache()


def _told(shape: Shape, times: dict[str, list[float]]) -> Iterator[Result]:
    base = times.get("flashmla")
    reference = summarise("", base, unit="us").median if base else None
    for name, samples in times.items():
        params = {**shape.params, "backend": name}
        result = summarise("mla_decode_us", samples, unit="us", params=params)
        if name != "flashmla":
            yield result.against(reference)
        print(
            f"{name:9s} {shape.batch:4d} x {shape.queries} h{shape.heads:<4d}"
            f"{shape.keys:7d}{' ragged' if shape.ragged else '':7s}"
            f"{result.median:9.2f} us {shape.flops / result.median / 1e6:6.0f} TFLOP/s"
            f"{shape.key_bytes / result.median / 1e3:7.0f} GB/s"
            f"{'' if not reference else f'  {reference / result.median:5.2f} x'}",
            flush=True,
        )


def replayed(contenders: dict[str, list[Call]], turns: int = 7) -> dict[str, list[float]]:
    """Microseconds a call of each contender: graphs over all its calls, replayed in turn."""
    graphs = {}
    for name, calls in contenders.items():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, graph in graphs.items():
            begin, end = _event(), _event()
            repeats = 2
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            if turn:
                used = begin.elapsed_time(end) * 1e3
                times[name].append(used / repeats / len(contenders[name]))
    return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call's tensors."""

    query: Tensor
    rows: Tensor
    batch: PagedBatch
    scale: float = 0.1352


def _inputs(shape: Shape) -> list[Inputs]:
    copies = max(2, min(32, -(-ROTATE_BYTES // shape.key_bytes)))
    pages = [-(-kv // PAGE) for kv in shape.kv_lens]
    made = []
    for _ in range(copies):
        order = torch.randperm(sum(pages), device="cuda", dtype=torch.int32)
        table = torch.zeros(shape.batch, max(pages), dtype=torch.int32, device="cuda")
        for b, part in enumerate(torch.split(order, pages)):
            table[b, : pages[b]] = part
        queries = (shape.queries,) * shape.batch
        batch = PagedBatch(
            query_lens=queries,
            kv_lens=tuple(shape.kv_lens),
            block_table=table,
            cu_seqlens_q=torch.tensor([0, *queries], device="cuda").cumsum(0).to(torch.int32),
            kv_lens_device=torch.tensor(shape.kv_lens, dtype=torch.int32, device="cuda"),
            page_tokens=PAGE,
        )
        made.append(
            Inputs(
                torch.randn(sum(queries), shape.heads, 576, device="cuda").to(torch.bfloat16),
                torch.randn(sum(pages) * PAGE, 576, device="cuda", dtype=torch.bfloat16),
                batch,
            )
        )
    return made


def _ours(inputs: Inputs, backend: str) -> Call:
    case = Case("mla_absorbed", "dense", (576, 512), torch.bfloat16, "cuda")
    kernel = select(case, backend=backend).run
    return lambda: kernel(
        inputs.query, inputs.rows, inputs.batch, latent_dim=512, scale=inputs.scale
    )


def _flashmla(inputs: Inputs, shape: Shape) -> Call:
    decode: Any = torch.ops._flashmla_C.dense_decode_fwd
    query = inputs.query.view(shape.batch, shape.queries, shape.heads, 576)
    pages = inputs.rows.view(-1, PAGE, 1, 576)
    lengths, table = inputs.batch.kv_lens_device, inputs.batch.block_table
    made: list[Tensor | None] = [None, None]

    def call() -> tuple[Tensor, Tensor]:
        args = (query, pages, 512, lengths, table, inputs.scale, True, *made, None)
        out, lse, *schedule = decode(*args)
        made[:] = schedule
        return out, lse

    call()
    return call


def main(argv: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.bench_attention --flashmla PATH --json PATH``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flashmla", type=Path, help="vLLM's _flashmla_C.abi3.so")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="without the sweeps")
    options = parser.parse_args(argv)
    results = run(options.quick, options.flashmla)
    if options.json:
        write(options.json, results, meta())


if __name__ == "__main__":
    main()
