"""Which backend runs which operation: the only way to pick from the listed rows.

A row names an operation, the record format its rows have, dimensions, element types and devices.
What no row names raises; nothing picks "the closest" kernel.  The ``torch`` rows are the reference
and take any dimensions.

Where several rows list a case, the first that is available is taken, unless times measured on this
very device (``measured``) say which is the fastest of a load.  A row that is taken ``by_name`` only
is passed over, unless its results were checked when it was timed.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from kvtier.errors import ConfigError
from kvtier.kernels import measured
from kvtier.kernels.case import Case, Load
from kvtier.kernels.rows import OPERATIONS, ROWS, Row

__all__ = ["OPERATIONS", "Kernel", "choices", "select", "select_all", "table"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a case was answered with: a backend, and what to call."""

    backend: str
    run: Callable[..., Any]
    page_tokens: int = 1
    """Pages it reads hold a multiple of so many tokens."""
    captures: bool = True
    """Whether a captured graph may hold it whose lengths change."""
    unsummed: Callable[..., Any] | None = field(default=None, repr=False)
    """What is called in place of ``run`` where log-sum-exps are not looked at, if anything is."""
    rivals: tuple["Kernel", ...] = field(default=(), repr=False)
    """All that may run the case, this one first, where measured times say which is the fastest of
    a load; empty where there is nothing to choose."""
    figures: measured.Figures | None = field(default=None, repr=False)
    """The times that rivals are chosen by."""

    @property
    def outputs(self) -> Callable[..., Any]:
        """``run`` for callers that look at its outputs alone: log-sum-exps may be anything."""
        return self.unsummed or self.run

    @property
    def variants(self) -> tuple["Kernel", ...]:
        """All that ``for_load`` may answer."""
        return self.rivals or (self,)

    def for_load(self, load: Load) -> "Kernel":
        """The fastest right one for this much work, on the device that it was selected for.

        The same answer for the same load, so it may be asked once a step, or once a captured
        graph: a graph runs what it was captured with.
        """
        if self.figures is None:
            return self
        able = {
            rival.backend: rival
            for rival in self.rivals
            if load.page_tokens % rival.page_tokens == 0 and (rival.captures or not load.captured)
        }
        fastest = measured.fastest(self.figures, load, frozenset(able))
        if fastest is not None:
            return able[fastest]
        return next(iter(able.values()), self)


def table() -> list[dict[str, str]]:
    """Every row, in order of preference.

    Keys: operation, record, dims, dtype, device, backend, available.  ``dims`` is "any" for a
    reference; ``available`` is "yes" or the reason why not.
    """
    return [
        {
            "operation": row.operation,
            "record": row.record,
            "dims": "any" if row.dims is None else " ".join(map(str, sorted(row.dims))),
            "dtype": " ".join(sorted(str(d).removeprefix("torch.") for d in row.dtypes)),
            "device": " ".join(sorted(row.devices)),
            "backend": row.backend,
            "available": row.missing() or "yes",
        }
        for row in ROWS
    ]


def select(case: Case, *, backend: str = "auto") -> Kernel:
    """The kernel for a case: the first available row that lists it, or the named backend's.

    With "auto" the kernel's ``for_load`` may answer another one, by measured times.  Raises
    ConfigError where no row lists the case, and where the named backend lists it but is not
    available here; never falls back from a backend that was asked for.
    """
    if case.operation not in OPERATIONS:
        raise ConfigError(f"unknown operation {case.operation!r}; there are {OPERATIONS}")
    listed = [row for row in ROWS if row.lists(case)]
    if backend == "auto":
        if able := _automatic(case):
            return _kernel(case, able)
        if listed:
            raise ConfigError(f"no backend for {case}: {listed[0].missing()}")
        raise ConfigError(f"no backend lists {case}")
    _check(backend)
    listed = [row for row in listed if row.backend == backend]
    if not listed:
        raise ConfigError(_unlisted(backend, [case]))
    if missing := listed[0].missing():
        raise ConfigError(f"backend {backend!r} for {case}: {missing}")
    return _kernel(case, listed[:1])


def select_all(cases: Mapping[str, Case], *, backend: str = "auto") -> Mapping[str, Kernel]:
    """Kernels for several cases of one model, under the same keys.

    A named backend is taken wherever it lists the case; where it does not, what "auto" takes is.
    With "torch" the references are taken and nothing else.  A case that nothing lists is left out.
    Raises ConfigError where the named backend lists none of the cases, or is not available.
    """
    _check(backend)
    named = {
        key
        for key, case in cases.items()
        if any(row.backend == backend and row.lists(case) for row in ROWS)
    }
    if backend != "auto" and not named:
        raise ConfigError(_unlisted(backend, list(cases.values())))
    chosen: dict[str, Kernel] = {}
    for key, case in cases.items():
        if key in named:
            chosen[key] = select(case, backend=backend)
        elif backend != "torch" and _automatic(case):
            chosen[key] = select(case)
    return MappingProxyType(chosen)


def _unlisted(backend: str, cases: list[Case]) -> str:
    """What to say where ``backend`` lists none of ``cases``: which devices, or else which rows of
    the first operation that both have, it is for."""
    asked = sorted({case.operation for case in cases})
    rows = [row for row in ROWS if row.backend == backend and row.operation in asked]
    text = f"backend {backend!r} lists none of {', '.join(asked)} as they are needed here"
    if len(cases) == 1:
        text = f"backend {backend!r} does not list {cases[0]}"
    if not rows:
        return f"{text}: it has no such operation"
    devices = sorted({device for row in rows for device in row.devices})
    if cases[0].device not in devices:
        return f"{text}: it runs on {', '.join(devices)} only, not on {cases[0].device}"
    wanted = next(case for case in cases if case.operation == rows[0].operation)
    has = "; ".join(
        f"{row.record!r}, {'any' if row.dims is None else sorted(row.dims)}, "
        f"{' or '.join(sorted(str(dtype) for dtype in row.dtypes))}"
        for row in rows
        if row.operation == wanted.operation
    )
    return f"{text}: {wanted} was asked for, it has (record, dims, dtype) {has}"


def _check(backend: str) -> None:
    known = sorted({row.backend for row in ROWS})
    if backend not in ("auto", *known):
        raise ConfigError(f"unknown backend {backend!r}; known: {', '.join(known)}")


def choices(device: str) -> list[dict[str, Any]]:
    """Of each operation on each record that a device type lists: what would be taken, and why.

    Keys: operation, record, dims, dtype (of the case that is told of: the widest a kernel is made
    for, in bfloat16 where it is listed), chosen (None: nothing), why, available and missing
    (backend -> reason).
    """
    told = []
    for operation, record in dict.fromkeys((row.operation, row.record) for row in ROWS):
        rows = [
            row
            for row in ROWS
            if (row.operation, row.record) == (operation, record) and device in row.devices
        ]
        if not rows:
            continue
        case = _widest(rows, device)
        able = _automatic(case)
        listed = [row for row in rows if row.lists(case)]
        missing = {row.backend: why for row in listed if (why := row.missing())}
        told.append(
            {
                "operation": operation,
                "record": record,
                "dims": case.dims,
                "dtype": str(case.dtype).removeprefix("torch."),
                "chosen": able[0].backend if able else None,
                "why": _why(case, able),
                "available": [row.backend for row in listed if row.backend not in missing],
                "missing": missing,
            }
        )
    return told


def _widest(rows: list[Row], device: str) -> Case:
    """Of what rows of one operation and record list: the widest that a kernel is made for, in
    bfloat16 where it is listed."""
    dims = max((max(row.dims) for row in rows if row.dims is not None), default=(1,))
    dtypes = [torch.bfloat16, *sorted(rows[0].dtypes, key=str)]
    dtype = next(d for d in dtypes if any(d in row.dtypes for row in rows))
    return Case(rows[0].operation, rows[0].record, dims, dtype, device)


def _why(case: Case, able: list[Row]) -> str:
    if not able:
        return "nothing is available"
    names = [row.backend for row in able]
    known = measured.figures(case)
    if len(names) == 1:
        return "the only one"
    if known is None or not known.checked.intersection(names):
        return f"first of {', '.join(names)}"
    kernel = _kernel(case, able)
    wins = Counter(kernel.for_load(load).backend for load in known.times)
    sizes = ", ".join(f"{name} at {count}" for name, count in wins.most_common())
    return f"fastest of those measured: {sizes} of {len(known.times)} sizes"


def _automatic(case: Case) -> list[Row]:
    """Available rows that list the case and may be taken unasked, in order of preference."""
    able = [row for row in ROWS if row.lists(case) and not row.missing()]
    known = measured.figures(case)
    if known is None or len(able) < 2:
        return [row for row in able if not row.by_name]
    # What was timed and not found right is not taken, whatever its place.
    return [
        row
        for row in able
        if row.backend in known.checked or not (row.by_name or row.backend in known.timed)
    ]


def _kernel(case: Case, rows: list[Row]) -> Kernel:
    """The first of ``rows``, with the others as rivals where there are times to go by."""
    kernels = tuple(
        Kernel(row.backend, row.run, row.page_tokens, row.captures, row.unsummed) for row in rows
    )
    known = measured.figures(case)
    if len(kernels) == 1 or known is None:
        return kernels[0]
    return replace(kernels[0], rivals=kernels, figures=known)
