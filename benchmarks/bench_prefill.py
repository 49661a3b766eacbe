"""Chunked prefill of one MLA layer: what a bounded workspace costs, and what it saves.

Everything is one layer's materialised attention over paged latent rows, projections up included, on
random data: gathered, projected and attended chunk by chunk.  *Whole* is a workspace that holds all
rows at once, and the baseline.  Six parts, each a generator of ``Cases``, in this order:

``kernels``   attention to one chunk alone, beside torch's own on the same keys and values
``backends``  all that run the operation here, beside each other and beside dense attention in
              float32: what the kernel table picks by (``write_table``)
``mixed``     a step behind one long context and many short ones: time and peak memory by workspace
``forms``     the absorbed form beside the materialised one, by new tokens
``contexts``  as ``mixed``, behind contexts of one length
``prompts``   a prompt fed in pieces, or all at once: time in all, and how long a decode row waits
              that is in the same step as the last piece

On a GPU with the sizes of DeepSeek-V3; without one with toy sizes, by the reference.  Sizes and
tensors are in ``prefill_parts``.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.attention_parts import Part, Shape, Work
from benchmarks.bench_attention import TABLE, Timed, write_times
from benchmarks.harness import Param, Result, meta, summarise, write
from benchmarks.memory import Peak
from benchmarks.prefill_parts import GPU, SCALE, TOY, Layer, Sizes
from kvtier.kernels import Workspace, row_bytes

__all__ = ["in_turn", "main", "run", "timed"]

WHOLE_BYTES = 90 << 30
"""A workspace for everything at once may take so much of a GPU."""
LONG_MS = 400
"""Calls that have taken so long together are enough."""
HEAD_START = 2_000_000
"""Cycles, about a millisecond, that the host has to launch a call's kernels."""
MANY_KEYS = 1 << 20
"""Of a step: in a small workspace it takes seconds, and shows what fewer keys have shown."""


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
"""Each may fail by itself."""


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
    decode = Layer(sizes, [(1, prompt + 1)]).absorbed
    decode()  # may compile
    alone = statistics.median(timed(decode, sizes, warm=True))
    base: tuple[float, float] | None = None
    for piece in (prompt, *(p for p in reversed(sizes.pieces) if p < prompt)):
        steps = prompt // piece
        at = sorted({round(i * (steps - 1) / 8) for i in range(9)})
        times: list[float] = []
        for step in at:
            call = Layer(sizes, [(piece, (step + 1) * piece)])
            workspace = call.usual_workspace()
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
    workspace = layer.usual_workspace()
    params: dict[str, Param] = {"queries": queries, "context": context}
    calls: dict[str, Callable[[], object]] = {
        "absorbed": layer.absorbed,
        "materialised": partial(layer, workspace),
    }
    base = None
    for form, took in in_turn(calls, sizes).items():
        spent = [1e3 * ms for ms in took]
        result = summarise("form_us", spent, unit="us", params={**params, "form": form})
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
    layer.project = lambda latent, out: None
    torchs = _torch_calls(sizes, layer.query, workspace, queries, context)
    ours = {backend: partial(_by, layer, backend, workspace) for backend in sizes.backends}
    took = in_turn({**torchs, **ours}, sizes)
    fastest = min((statistics.median(took[name]) for name in torchs), default=None)
    for name, samples in took.items():
        result = summarise("attend_ms", samples, unit="ms", params={**params, "backend": name})
        if name in ours:
            result = result.against(fastest)
        print(f"{name}: {flops / result.median / 1e9:.0f} TFLOP/s", flush=True)
        yield result


def _backends(
    sizes: Sizes, load: tuple[int, int, int], part: Part, compared: list[Timed]
) -> Iterator[Result]:
    batch, queries, keys = load
    layer = Layer(sizes, [(queries, keys)] * batch)
    workspace = layer.usual_workspace()
    calls: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    for backend in sizes.backends:
        try:
            errors[backend] = layer.error(_by(layer, backend, workspace))
            calls[backend] = partial(_by, layer, backend, workspace)
        except Exception as error:  # noqa: BLE001  the others are still wanted
            print(f"{backend}: {type(error).__name__}: {error}", flush=True)
            errors[backend] = float("inf")
    took = in_turn(calls, sizes)
    samples = {backend: [1e3 * ms for ms in some] for backend, some in took.items()}
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


def _by(layer: Layer, backend: str, workspace: Workspace) -> Tensor:
    layer.choose(backend)
    return layer(workspace)


def _no_work(*_: object) -> Work:
    raise NotImplementedError


def _torch_calls(
    sizes: Sizes, query: Tensor, workspace: Workspace, queries: int, context: int
) -> dict[str, Callable[[], object]]:
    """By each of torch's kernels that takes these: keys joined, values padded to their width."""
    d = sizes.dims
    keys = queries + context
    up = workspace.projected[:keys].transpose(0, 1)[None]
    rope = workspace.latent[:keys, d.latent :].expand(1, d.heads, -1, -1)
    k, v = torch.cat((up[..., : d.nope], rope), -1), up[..., d.nope :].contiguous()
    q = query.transpose(0, 1)[None].contiguous()
    found: dict[str, Callable[[], object]] = {}
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
                    scaled_dot_product_attention(q, keys, values, is_causal=causal, scale=SCALE)

        try:
            call()  # cuDNN may look for its kernel, for longer than it then runs
            found[name] = call
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    return found


def timed(call: Callable[[], object], sizes: Sizes, *, warm: bool = False) -> list[float]:
    """Milliseconds of up to ``repeats`` calls, after one if it is not ``warm`` yet; of long ones
    the first has to do."""
    samples = [] if warm else [_milliseconds(call, sizes)]
    if not warm and samples[0] < LONG_MS:
        samples.clear()
    while not samples or (len(samples) < sizes.repeats and sum(samples) < LONG_MS):
        samples.append(_milliseconds(call, sizes))
    return samples


def in_turn(calls: Mapping[str, Callable[[], object]], sizes: Sizes) -> dict[str, list[float]]:
    """Milliseconds of each, as ``timed``: after one call of each, all take turns, so that a device
    that grows hot or slow does so for all of them."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(sizes.repeats):
        for name, call in calls.items():
            if not samples[name] or sum(samples[name]) < LONG_MS:
                samples[name].append(_milliseconds(call, sizes))
    return samples


def _milliseconds(call: Callable[[], object], sizes: Sizes) -> float:
    """Of the device, which begins when the host has said all that is to be done."""
    if sizes.device != "cuda":
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


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
