"""Attention of decode steps on a GPU, beside FlashMLA in the same run.

Every contender is captured in a CUDA graph of as many calls as a model has layers, over several
sets of random inputs, together larger than the L2 cache, and the graphs are replayed in turn.  What
a backend makes once for all layers of a step, it makes once a graph.  What each backend answers is
compared with the reference first.  Parts and sizes are in ``attention_parts``.

FlashMLA is an installed one, or the extension that vLLM's wheel carries: ``flashmla`` is the path
of its library.  It is there twice: *bare*, its function alone with the schedule made outside the
graph, which is the baseline; and as a backend of the kernel table, with all that a call of it does.

FlashInfer plans each batch on the host, so no graph can hold it whose lengths change.  It is there
twice too: *bare*, its kernels in a graph under a plan that was made outside and is right for these
lengths alone; and as a backend, called without a graph, a plan for each step of as many layers.

With ``write_table`` the times go where the library picks its kernels by, see
``kvtier.kernels.measured``.  Without a GPU only toy sizes of the reference are of use, and tested.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_parts import PARTS, Call, Part, Shape
from benchmarks.harness import Result, meta, summarise, write
from kvtier.kernels import choices, select
from kvtier.kernels import flashmla as backend_flashmla

__all__ = [
    "TABLE",
    "TURNS",
    "Timed",
    "called",
    "main",
    "measure",
    "planned",
    "replayed",
    "run",
    "write_times",
]

BARE = "flashmla (bare)"
PLANNED = "flashinfer (bare)"
HOST_PLANNED = "flashinfer"
"""The backend that is called outside graphs."""
TABLE = Path(__file__).parents[1] / "kvtier" / "kernels" / "measured_h200.json"
BOUND = 8e-3
"""Largest error of an output, by the largest value there is in the reference's."""
LSE_BOUND = 2e-3
"""Largest error of a log-sum-exp, by the reference's or by 1."""
TURNS = 7
"""Samples of each contender."""
LAYERS = 60
"""Calls of a graph, at least, unless these take longer than ``GRAPH_US``."""
GRAPH_US = 10_000


@dataclass(frozen=True, slots=True)
class Timed:
    """One size of one part: samples in microseconds by contender, and who was right."""

    part: Part
    shape: Shape
    samples: Mapping[str, Sequence[float]]
    errors: Mapping[str, float]
    """Backend -> error of its output by the reference's largest value; inf where it failed."""

    def results(self) -> Iterator[Result]:
        """One a contender but the baseline."""
        medians = _medians(self.samples)
        for name, some in self.samples.items():
            if name != BARE:
                params = {**self.shape.params, "backend": name}
                result = summarise(self.part.result, some, unit="us", params=params)
                yield result.against(medians.get(BARE))


def run(
    quick: bool,
    flashmla: Path | None = None,
    write_table: Path | None = None,
    parts: Sequence[str] = tuple(PARTS),
    json_path: Path | None = None,
    seconds: float = float("inf"),
) -> list[Result]:
    """Microseconds of a call; the baseline is FlashMLA's function alone where it is there.

    The targets' sizes of all parts, then, unless ``quick``, the sweeps.  After ``seconds`` no
    further size is begun, and how many are left is told.  What has been measured is in the files
    after each size, whatever comes next.  Without a GPU, nothing.
    """
    if not torch.cuda.is_available():
        print("attention: needs a CUDA device")
        return []
    found: list[Timed] = []
    about = meta()
    end = time.monotonic() + seconds
    for part, shape in planned(parts, quick):
        if time.monotonic() > end:
            print(f"{part.result} {shape}: left out after {seconds:.0f} s")
            continue
        for timed in measure(part, [shape], flashmla):
            found.append(timed)
            if write_table is not None:
                write_times(write_table, found, about)
            if json_path is not None:
                write(json_path, _results(found), about)
    return _results(found)


def planned(parts: Sequence[str], quick: bool) -> list[tuple[Part, Shape]]:
    """What is measured, in this order: what there are targets for comes first."""
    chosen = [PARTS[name] for name in parts]
    targets = [(part, shape) for part in chosen for shape in part.targets]
    sweeps = [(part, shape) for part in chosen for shape in part.sweep]
    return targets if quick else targets + sweeps


def _results(found: Sequence[Timed]) -> list[Result]:
    """Part by part."""
    parts = dict.fromkeys(timed.part for timed in found)
    mine = [timed for part in parts for timed in found if timed.part is part]
    return [result for timed in mine for result in timed.results()]


def measure(
    part: Part,
    shapes: Sequence[Shape],
    library: Path | None = None,
    *,
    device: str = "cuda",
    turns: int = TURNS,
) -> Iterator[Timed]:
    """Check and time every backend that lists the part and is here, the reference on a CPU only.

    A size or a backend that fails is told of and left out.
    """
    if library is not None:
        _load(library)
    bare = device == "cuda" and not backend_flashmla.missing("dense_decode_fwd")
    for shape in shapes:
        try:
            timed = _measure(part, shape, device, bare, turns)
        except Exception as error:  # noqa: BLE001  one size must not lose the others
            print(f"{part.result} {shape}: {_first_line(error)}", flush=True)
            continue
        _tell(timed)
        yield timed
        if device == "cuda":
            torch.cuda.empty_cache()


@cache
def _load(library: Path) -> None:
    backend_flashmla.load(library)


def _measure(part: Part, shape: Shape, device: str, bare: bool, turns: int) -> Timed:
    torch.manual_seed(0)
    work = part.make(part, shape, device, bare)
    expected = work.kernel("torch")[0]()
    makers: dict[str, Callable[[], list[Call]]] = {
        name: partial(work.kernel, name) for name in _backends(part, device)
    }
    if work.planned is not None:
        makers[PLANNED] = work.planned
    contenders: dict[str, list[Call]] = {}
    errors = {}
    if work.bare:
        contenders[BARE] = work.bare
    for name, make in makers.items():
        try:
            calls = make()
            errors[name] = _error(calls[0](), expected)
            contenders[name] = calls
        except Exception as error:  # noqa: BLE001  nor one backend the others
            print(f"{part.result} {shape} {name}: {_first_line(error)}", flush=True)
            errors[name] = float("inf")
    del expected
    if device != "cuda":
        return Timed(part, shape, called(contenders, turns), errors)
    uncaptured = contenders.pop(HOST_PLANNED, None)
    samples = replayed(contenders, turns)
    if uncaptured is not None:
        samples[HOST_PLANNED] = _stepped(makers[HOST_PLANNED], turns)
    return Timed(part, shape, samples, errors)


def _backends(part: Part, device: str) -> list[str]:
    """Those that are here and may be captured, or plan on the host."""
    for each in choices(device):
        if (each["operation"], each["record"]) == (part.operation, part.record):
            case, here = part.case(device), each["available"]
            if device == "cpu":  # where nothing is captured
                return list(here)
            return [
                name for name in here if name == HOST_PLANNED or select(case, backend=name).captures
            ]
    return []


def _error(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """inf where log-sum-exps differ, or something is no number."""
    out, lse = (each.float() for each in found)
    right, right_lse = (each.float() for each in expected)
    if not torch.equal(lse.isinf(), right_lse.isinf()) or bool(out.isnan().any()):
        return float("inf")
    known = right_lse.isfinite()
    gap = (lse - right_lse)[known].abs() / right_lse[known].abs().clamp_min(1)
    if gap.numel() and float(gap.max()) > LSE_BOUND:
        return float("inf")
    return float((out - right).abs().max() / right.abs().max().clamp_min(1e-6))


def replayed(contenders: Mapping[str, list[Call]], turns: int) -> dict[str, list[float]]:
    """Microseconds a call of each contender: graphs over all its calls, replayed in turn."""
    graphs, rounds = {}, {}
    for name, calls in contenders.items():
        rounds[name] = _rounds(calls)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls * rounds[name]:
                call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, graph in graphs.items():
            used = _elapsed(graph.replay)
            if turn:
                times[name].append(used / rounds[name] / len(contenders[name]))
    return times


def _stepped(make: Callable[[], list[Call]], turns: int) -> list[float]:
    """Microseconds a call of one contender outside a graph, in steps of as many calls as a graph
    has; whatever is made for a step is made in it."""
    rounds = _rounds(make())
    times = []
    for _ in range(turns + 1):
        calls = make() * rounds

        def step(calls: list[Call] = calls) -> None:
            for call in calls:
                call()

        times.append(_elapsed(step) / len(calls))
    return times[1:]


def _rounds(calls: list[Call]) -> int:
    """How often all calls are made in a graph."""
    calls[0]()
    return max(1, round(min(LAYERS, GRAPH_US / _elapsed(calls[1])) / len(calls)))


def _elapsed(call: Call) -> float:
    """Microseconds on the device."""
    begin, end = _event(), _event()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def called(contenders: Mapping[str, list[Call]], turns: int) -> dict[str, list[float]]:
    """As ``replayed`` by the host's clock, without a device to replay on."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, calls in contenders.items():
            begin = time.perf_counter()
            for call in calls:
                call()
            times[name].append((time.perf_counter() - begin) * 1e6 / len(calls))
    return times


def _medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: summarise("", some, unit="us").median for name, some in samples.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _tell(timed: Timed) -> None:
    shape, part = timed.shape, timed.part
    medians = _medians(timed.samples)
    base = medians.get(BARE)
    keys = f"{shape.keys}+{shape.extra}" if shape.extra else f"{shape.keys}"
    for name, us in medians.items():
        error = timed.errors.get(name)
        told = "" if error is None else f"  error {error:.1e}{'' if error <= BOUND else ' WRONG'}"
        print(
            f"{part.result:18s}{name:16s}{shape.batch:5d} x {shape.queries} h{shape.heads:<4d}"
            f"{keys:>9s}{' ragged' if shape.ragged else '':7s}{us:9.2f} us"
            f"{part.flops(shape) / us / 1e6:7.0f} TFLOP/s{part.bytes(shape) / us / 1e3:7.0f} GB/s"
            f"{'' if base is None else f'  {base / us:5.2f} x'}{told}",
            flush=True,
        )


# ------------------------------------------------------------------ the table that ships


def write_times(path: Path, found: Sequence[Timed], about: Mapping[str, Any] | None = None) -> None:
    """Put times into a file of ``kvtier.kernels.measured``, in place of what it has of the same
    cases; other cases stay.  What no graph can hold is left out: it is taken by name only.  Raises
    ValueError where the file is of another device.

    A backend counts as checked if it was right at every size of a case.
    """
    about = about or meta()
    document: dict[str, Any] = {"device": about["device"], "taken": {}, "cases": []}
    if path.exists():
        document = json.loads(path.read_text())
        if document["device"] != about["device"]:
            raise ValueError(f"{path} is of {document['device']}, this is {about['device']}")
    versions = {name: about["versions"].get(name) for name in ("torch", "triton")}
    document["taken"] = {"git": about["git"], "date": about["date"], **versions}
    for part in dict.fromkeys(timed.part for timed in found):
        case = _case_of(part, [timed for timed in found if timed.part is part])
        same = [k for k, c in enumerate(document["cases"]) if _names(c) == _names(case)]
        if same:
            document["cases"][same[0]] = case
        else:
            document["cases"].append(case)
    path.write_text(_dumped(document))


def _names(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return case["operation"], case["record"], case["dims"], case["dtype"]


def _case_of(part: Part, found: Sequence[Timed]) -> dict[str, Any]:
    names = dict.fromkeys(name for timed in found for name in timed.errors)
    backends = [name for name in names if name not in (PLANNED, HOST_PLANNED)]
    right = [b for b in backends if all(timed.errors.get(b, 0) <= BOUND for timed in found)]
    rows = []
    for timed in found:
        shape = timed.shape
        listed = part.operation not in ("mla_absorbed", "mla_materialised")
        mean = sum(shape.kv_lens) // shape.batch
        medians = _medians(timed.samples)
        times = [round(medians[b], 1) if b in medians else None for b in backends]
        size = [shape.batch, shape.queries, shape.heads, mean]
        if listed:  # a query is what a list belongs to
            size = [shape.tokens, 1, shape.heads, shape.keys + shape.extra]
        rows.append([*size, *times])
    return {
        "operation": part.operation,
        "record": part.record,
        "dims": list(part.dims),
        "dtype": "bfloat16",
        "checked": right,
        "columns": ["batch", "queries", "heads", "keys", *backends],
        "rows": rows,
    }


def _dumped(document: Mapping[str, Any]) -> str:
    """JSON with a line a size."""
    cases = []
    for case in document["cases"]:
        names = ", ".join(
            f"{json.dumps(key)}: {json.dumps(case[key])}"
            for key in ("operation", "record", "dims", "dtype")
        )
        rows = ",\n".join(f"    {json.dumps(row)}" for row in case["rows"])
        cases.append(
            f"  {{\n   {names},\n"
            f'   "checked": {json.dumps(case["checked"])},\n'
            f'   "columns": {json.dumps(case["columns"])},\n'
            f'   "rows": [\n{rows}\n   ]\n  }}'
        )
    head = ",\n".join(f" {json.dumps(k)}: {json.dumps(document[k])}" for k in ("device", "taken"))
    return f'{{\n{head},\n "cases": [\n' + ",\n".join(cases) + "\n ]\n}\n"


def main(argv: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.bench_attention --flashmla PATH --json PATH``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flashmla", type=Path, help="vLLM's _flashmla_C.abi3.so")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--write-table", type=Path, nargs="?", const=TABLE, help=f"write times here ({TABLE.name})"
    )
    parser.add_argument("--quick", action="store_true", help="without the sweeps")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no size after so many"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(argv)
    run(
        options.quick,
        options.flashmla,
        options.write_table,
        options.parts,
        options.json,
        options.seconds,
    )


if __name__ == "__main__":
    main()
