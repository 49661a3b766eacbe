"""Which kernel is the fastest of several, from times that were measured on a device.

The figures ship with the library, one file a device (``measured_h200.json``), and hold on devices
of that very name.  A file lists cases; of each the sizes that were timed, what each backend took of
them in microseconds, and the backends whose results were compared with the reference in that run
and were right: only those are picked for being fast, and a backend that was timed and is not among
them is not picked at all.  Knows nothing of kernels but their backends' names.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["Figures", "Load", "device_name", "fastest", "figures"]

FILES = ("measured_h200.json",)
SIZES = ("batch", "queries", "heads", "keys")
"""What a row of a case begins with; backends' times follow."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much one call has to do: what it takes depends on that."""

    batch: int
    """Sequences; queries, where each has a list of keys of its own."""
    heads: int
    keys: int
    """Of a sequence, on average; those that a captured graph has room for; slots of a list."""
    queries: int = 1
    """Tokens of each sequence, at most."""
    page_tokens: int = 64
    captured: bool = False
    """Whether it is captured in a graph, with lengths that will change."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one case on one device."""

    times: Mapping[Load, Mapping[str, float]]
    """Microseconds by backend."""
    checked: frozenset[str]
    """Backends whose results were compared with the reference's in that run, and right."""

    @property
    def timed(self) -> frozenset[str]:
        """Backends that there are times of, right or not."""
        return frozenset(name for times in self.times.values() for name in times)

    def nearest(self, load: Load, backends: Collection[str]) -> Mapping[str, float]:
        """Times of ``backends`` at the measured size that is nearest, by how often what differs
        would have to be doubled; empty where none was measured."""
        best: Mapping[str, float] = {}
        closest = math.inf
        for size, times in self.times.items():
            known = {name: us for name, us in times.items() if name in backends}
            away = sum(
                abs(math.log2(max(1, getattr(load, name)) / getattr(size, name))) for name in SIZES
            )
            if known and away < closest:
                best, closest = known, away
        return best


def device_name() -> str | None:
    """The current CUDA device's name; None without one."""
    return _name(torch.cuda.current_device()) if torch.cuda.is_available() else None


@cache
def _name(device: int) -> str:
    return torch.cuda.get_device_name(device)


def figures(
    operation: str, record: str, dims: tuple[int, ...], dtype: torch.dtype, device: str | None
) -> Figures | None:
    """What is known of a case on a device of that name; None: nothing."""
    return _shipped().get((device or "", operation, record, dims, str(dtype)))


@lru_cache(maxsize=4096)
def fastest(
    operation: str,
    record: str,
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str | None,
    load: Load,
    backends: frozenset[str],
) -> str | None:
    """The fastest of ``backends``, all of them right, at the measured size that is nearest to
    ``load``; None where nothing is known of any of them there."""
    known = figures(operation, record, dims, dtype, device)
    if known is None:
        return None
    times = known.nearest(load, backends & known.checked)
    return min(times, key=lambda name: (times[name], name)) if times else None


@cache
def _shipped() -> Mapping[tuple[Any, ...], Figures]:
    found = {}
    for name in FILES:
        document = json.loads(Path(__file__).with_name(name).read_text())
        for case in document["cases"]:
            key = (
                document["device"],
                case["operation"],
                case["record"],
                tuple(case["dims"]),
                f"torch.{case['dtype']}",
            )
            found[key] = _read(case)
    return found


def _read(case: Mapping[str, Any]) -> Figures:
    columns = case["columns"]
    times = {}
    for row in case["rows"]:
        values = dict(zip(columns, row, strict=True))
        load = Load(**{name: values.pop(name) for name in SIZES})
        times[load] = {backend: us for backend, us in values.items() if us is not None}
    return Figures(times, frozenset(case["checked"]))
