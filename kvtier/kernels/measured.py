"""Which kernel is the fastest of several, from times that were measured on a device.

The figures ship with the library, one file a device (``measured_h200.json``), and hold on devices
of that very name.  A file lists cases; of each the sizes that were timed, what each backend took of
them in microseconds, and the backends whose results were compared with the reference on it and were
right: only those are picked for being fast, and a backend that was timed and is not among them is
not picked at all.  Knows nothing of kernels but their backends' names.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import ConfigError
from kvtier.kernels.case import Case, Load

__all__ = ["Figures", "device_name", "fastest", "figures"]

FILES = ("measured_h200.json",)
SIZES = ("batch", "queries", "heads", "keys")
"""What a row of a case begins with; backends' times follow."""


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What was measured of one case on one device."""

    times: Mapping[Load, Mapping[str, float]]
    """Microseconds by backend."""
    checked: frozenset[str]
    """Backends whose results were compared with the reference's on that device, and right."""

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


def figures(case: Case) -> Figures | None:
    """What is known of a case on the current device; None: nothing.

    Raises ConfigError where a file of figures is missing or damaged: without it a kernel might be
    taken that was found wrong.
    """
    name = device_name()
    return None if name is None else _shipped().get((name, case))


@lru_cache(maxsize=4096)
def fastest(known: Figures, load: Load, backends: frozenset[str]) -> str | None:
    """The fastest right one of ``backends`` at the measured size that is nearest to ``load``; None
    where nothing is known of any of them there."""
    times = known.nearest(load, backends & known.checked)
    return min(times, key=lambda name: (times[name], name)) if times else None


@cache
def _shipped() -> Mapping[tuple[str, Case], Figures]:
    found: dict[tuple[str, Case], Figures] = {}
    for name in FILES:
        path = Path(__file__).parent / name
        try:
            found |= _parse(path.read_text())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is missing or damaged, install again: {error!r}") from error
    return found


def _parse(text: str) -> dict[tuple[str, Case], Figures]:
    document = json.loads(text)
    found = {}
    for told in document["cases"]:
        dims, dtype = tuple(told["dims"]), getattr(torch, told["dtype"])
        case = Case(told["operation"], told["record"], dims, dtype, "cuda")
        found[document["device"], case] = _read(told)
    return found


def _read(told: Mapping[str, Any]) -> Figures:
    times = {}
    for row in told["rows"]:
        values = dict(zip(told["columns"], row, strict=True))
        load = Load(**{name: values.pop(name) for name in SIZES})
        times[load] = {backend: us for backend, us in values.items() if us is not None}
    return Figures(times, frozenset(told["checked"]))
