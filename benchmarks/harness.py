"""What every benchmark shares: timing, results, and the JSON file they end in.

A benchmark is a module ``benchmarks/bench_NAME.py`` with ``run(quick: bool) -> list[Result]``.
Knows nothing of what is measured.
"""

import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = [
    "Param",
    "Result",
    "lower_is_better",
    "measure",
    "meta",
    "read",
    "rounded",
    "summarise",
    "table",
    "write",
]

Param = str | int | float | bool
ROOT = Path(__file__).parents[1]
_VERSIONS = ("kvtier", "torch", "triton", "numpy", "lmdb", "zstandard", "xxhash", "transformers")
_RATES = ("GB/s", "MB/s", "TFLOP/s", "tok/s", "%", "1/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One number, with how it was spread and what it is compared with.

    ``baseline`` is the same quantity of a peer or a plain method in the same run (None: there is
    none), ``ratio`` is how many times better than the baseline the median is, whatever the
    unit's direction.
    """

    name: str
    params: Mapping[str, Param] = field(default_factory=dict)
    unit: str
    median: float
    p10: float
    p90: float
    n: int
    baseline: float | None = None
    ratio: float | None = None

    def against(self, baseline: float | None) -> "Result":
        """The same result beside ``baseline``."""
        if not baseline or not self.median:
            return replace(self, baseline=baseline, ratio=None)
        better = baseline / self.median if lower_is_better(self.unit) else self.median / baseline
        return replace(self, baseline=baseline, ratio=better)

    @property
    def key(self) -> tuple[str, tuple[tuple[str, Param], ...]]:
        """What identifies the quantity across runs."""
        return self.name, tuple(sorted(self.params.items()))


def lower_is_better(unit: str) -> bool:
    """True for times and sizes, False for rates and shares."""
    return unit not in _RATES


def summarise(
    name: str, samples: Sequence[float], *, unit: str, params: Mapping[str, Param] | None = None
) -> Result:
    """Median, p10 and p90 of samples that were taken one by one.  Raises ValueError for none."""
    if not samples:
        raise ValueError(f"{name}: no samples")
    ordered = sorted(samples)
    return Result(
        name=name,
        params=params or {},
        unit=unit,
        median=_quantile(ordered, 0.5),
        p10=_quantile(ordered, 0.1),
        p90=_quantile(ordered, 0.9),
        n=len(ordered),
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def measure(calls: Sequence[Callable[[], object]], *, batch: int = 1) -> list[float]:
    """Microseconds per call, one sample per ``batch`` consecutive calls, garbage collection off.

    Every call is made once, in order: calls that change what they work on are welcome.
    """
    clock = time.perf_counter_ns
    samples = []
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for start in range(0, len(calls) - batch + 1, batch):
            group = calls[start : start + batch]
            begin = clock()
            for call in group:
                call()
            samples.append((clock() - begin) / len(group) / 1e3)
    finally:
        if was_on:
            gc.enable()
    return samples


def meta() -> dict[str, Any]:
    """What the numbers were taken on: commit, versions, device, processor, date."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "git": _git(),
        "versions": versions,
        "device": _device(),
        "cpu": _cpu(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _device() -> str:
    torch = sys.modules.get("torch")  # a benchmark that needs no torch should not pay for it
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return "cpu"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()


def write(path: Path, results: Sequence[Result], about: Mapping[str, Any] | None = None) -> None:
    """Write ``{"meta": ..., "results": [...]}``."""
    document = {"meta": about or meta(), "results": [rounded(r) for r in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def rounded(result: Result) -> dict[str, Any]:
    """A result as it is written: five digits are more than any measurement has."""
    fields = asdict(result)
    for name in ("median", "p10", "p90", "baseline", "ratio"):
        if fields[name] is not None:
            fields[name] = float(f"{fields[name]:.5g}")
    return fields


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """What ``write`` wrote.  Raises ValueError for a file of another form."""
    try:
        document = json.loads(path.read_text())
        return document["meta"], [Result(**fields) for fields in document["results"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a benchmark file: {error!r}") from error


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A Markdown table that also reads well as plain text."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
