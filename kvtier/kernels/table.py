"""Which backend runs which operation: one listed table, and the only way to pick from it.

A row names an operation, the record format its rows have, dimensions, element types and devices.
What no row names raises; nothing picks "the closest" kernel.  The ``torch`` rows are the reference
and take any dimensions.

Where several rows list a case, the first that is available is taken, unless times measured on this
very device (``measured``) say which is the fastest of a load.  A row that is taken ``by_name`` only
is passed over, unless its results were checked when it was timed.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from kvtier.errors import ConfigError
from kvtier.kernels import (
    flashinfer,
    flashmla,
    fused,
    measured,
    mla,
    pack,
    prefill,
    query,
    records,
    reference,
)
from kvtier.kernels.compress import compress
from kvtier.kernels.index import index_topk
from kvtier.kernels.kernel import Case, Dims, Kernel
from kvtier.kernels.mla_sparse import mla_sparse, mla_sparse_materialised
from kvtier.kernels.sparse import sparse_attend

__all__ = ["OPERATIONS", "choices", "select", "select_all", "table"]

OPERATIONS = (
    "write_rows",
    "mla_absorbed",
    "mla_materialised",
    "mla_materialised_whole",
    "mla_sparse",
    "mla_sparse_materialised",
    "merge",
    "write_record",
    "compress",
    "index_topk",
    "sparse_attend",
    "write_normed",
    "write_latent",
    "compress_write",
    "head_norm_rope",
    "inverse_rope",
    "index_query",
)
"""``mla_materialised_whole`` is the materialised form for sequences that fit the workspace at once:
no log-sum-exp is asked of it."""


@dataclass(frozen=True, slots=True)
class _Row:
    operation: str
    record: str
    backend: str
    run: Callable[..., Any] | None
    """None: listed, but not part of this build."""
    dims: frozenset[Dims] | None
    """None: any."""
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]
    by_name: bool = False
    """Taken only where it is asked for, or was found right and fastest on this device: a row that
    has not been measured, or that another library brings."""
    page_tokens: int = 1
    captures: bool = True
    missing: Callable[[], str] | None = None
    """Why it cannot run here, empty if it can; None: as the backend's others."""

    def lists(self, case: Case) -> bool:
        return (
            self.operation == case.operation
            and self.record == case.record
            and (self.dims is None or case.dims in self.dims)
            and case.dtype in self.dtypes
            and case.device in self.devices
        )


_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_HALVES = frozenset({torch.bfloat16, torch.float16})
_BF16 = frozenset({torch.bfloat16})
_SINGLES = _HALVES | {torch.float32}
_ANY = frozenset({"cpu", "cuda"})
_CODES = frozenset({torch.uint8})
"""What ``index_query`` makes of queries for packed keys."""
_CUDA = frozenset({"cuda"})
_ABSORBED = frozenset({(576, 512)})
_WHOLE = frozenset({(192, 128)})
_V4_ROWS = frozenset({(128,), (512,)})
"""An indexer's key; an entry, or what a window keeps of a token."""

_V4_HEADS = frozenset({(512,)})
_LATENT_ROWS = frozenset({(576,)})
_PLAIN_ROWS = _V4_ROWS | _LATENT_ROWS
"""What plain rows may be written as records."""

_DENSE = "dense"
_INDEX_RECORDS = (_DENSE, "index_fp8", "index_mxfp4")
_LATENT_RECORDS = (_DENSE, "mla_fp8")
_V4_RECORDS = (_DENSE, "v4_fp8", "index_fp8", "index_mxfp4")


def _triton(module: str, name: str) -> Callable[..., Any]:
    """A function of a module of triton kernels, which is imported when it is first called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = importlib.import_module(f"kvtier.kernels.triton_{module}")
        return getattr(found, name)(*args, **kwargs)

    return run


def _hopper(module: str, name: str) -> Callable[..., Any]:
    """A function of a module of kernels for H100 and H200, imported when it is first called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"kvtier.kernels.{module}"), name)(*args, **kwargs)

    return run


def _hopper_missing() -> str:
    if not pack.has_triton():
        return "triton is not installed"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "the kernel needs an H100 or H200"
    return ""


def _dims(record: records.Record) -> frozenset[Dims] | None:
    return None if record.dim is None else frozenset({(record.dim,)})


_ROWS: tuple[_Row, ...] = (
    # The first available row that lists a case is the automatic choice.
    _Row(
        "write_rows",
        _DENSE,
        "triton",
        _triton("write", "write_rows"),
        frozenset({(576,)}),
        _FLOATS,
        _CUDA,
    ),
    _Row("write_rows", _DENSE, "torch", reference.write_rows, None, _FLOATS, _ANY),
    _Row(
        "mla_absorbed",
        _DENSE,
        "triton",
        _triton("mla", "absorbed"),
        _ABSORBED,
        _HALVES,
        _CUDA,
    ),
    _Row(
        "mla_absorbed",
        _DENSE,
        "flashmla",
        flashmla.absorbed,
        _ABSORBED,
        _HALVES,
        _CUDA,
        by_name=True,
        page_tokens=flashmla.PAGE_TOKENS,
        missing=partial(flashmla.missing, "dense_decode_fwd"),
    ),
    _Row(
        "mla_absorbed",
        _DENSE,
        "flashinfer",
        flashinfer.absorbed,
        _ABSORBED,
        _HALVES,
        _CUDA,
        by_name=True,
        captures=False,
        missing=flashinfer.missing,
    ),
    _Row("mla_absorbed", _DENSE, "torch", mla.absorbed, None, _FLOATS, _ANY),
    _Row(
        "mla_absorbed",
        "mla_fp8",
        "triton",
        _triton("mla", "absorbed"),
        _ABSORBED,
        _BF16,
        _CUDA,
        by_name=True,
    ),
    _Row("mla_absorbed", "mla_fp8", "torch", mla.absorbed, _ABSORBED, _FLOATS, _ANY),
    *(
        row
        for record, dtypes in zip(_LATENT_RECORDS, (_HALVES, _BF16), strict=True)
        for row in (
            _Row(
                "mla_materialised",
                record,
                "triton",
                _triton("prefill", "materialised"),
                _WHOLE,
                dtypes,
                _CUDA,
                by_name=True,
            ),
            _Row("mla_materialised", record, "torch", prefill.materialised, None, _FLOATS, _ANY),
            _Row(
                "mla_materialised_whole",
                record,
                "sdpa",
                prefill.materialised_sdpa,
                None,
                _FLOATS,
                _ANY,
            ),
        )
    ),
    _Row("merge", _DENSE, "torch", reference.merge, None, _FLOATS, _ANY),
    _Row("compress", _DENSE, "torch", compress, None, _FLOATS, _ANY),
    *(
        _Row(
            operation,
            record,
            "triton",
            _triton(module, name),
            _dims(records.RECORDS[record]) or plain,
            _SINGLES,
            _CUDA,
        )
        for operation, module, name, plain, of in (
            ("write_record", "write", "write_records", _PLAIN_ROWS, tuple(records.RECORDS)),
            ("write_normed", "write", "write_normed", _V4_ROWS, _V4_RECORDS),
            ("compress_write", "compress", "compress_write", _V4_ROWS, _V4_RECORDS),
            ("head_norm_rope", "query", "head_norm_rope", _V4_ROWS, (_DENSE,)),
            ("inverse_rope", "query", "inverse_rope", _V4_ROWS, (_DENSE,)),
            ("index_query", "query", "index_query", _V4_ROWS, _INDEX_RECORDS),
        )
        for record in of
    ),
    # Not measured, and its norms are not the models' own to the last bit.
    *(
        _Row(
            "write_latent",
            record,
            "triton",
            _triton("write", "write_latent"),
            _LATENT_ROWS,
            _SINGLES,
            _CUDA,
            by_name=True,
        )
        for record in _LATENT_RECORDS
    ),
    # Not measured, nor run on a device.
    _Row(
        "sparse_attend",
        "v4_fp8",
        "gluon",
        _hopper("gluon_sparse", "sparse_attend"),
        frozenset({(512,)}),
        _BF16,
        _CUDA,
        by_name=True,
        missing=_hopper_missing,
    ),
    *(
        _Row(
            "sparse_attend",
            record,
            "triton",
            _triton("sparse", "sparse_attend"),
            frozenset({(512,)}),
            _SINGLES,
            _CUDA,
        )
        for record in (_DENSE, "v4_fp8")
    ),
    *(
        _Row(
            "index_topk",
            record,
            "triton",
            _triton("index", "index_topk"),
            frozenset({(128,)}),
            _SINGLES if record == _DENSE else _SINGLES | _CODES,
            _CUDA,
        )
        for record in _INDEX_RECORDS
    ),
    *(
        _Row(
            "mla_sparse",
            record,
            "triton",
            _triton("mla_sparse", "mla_sparse"),
            _ABSORBED,
            dtypes,
            _CUDA,
        )
        for record, dtypes in zip(_LATENT_RECORDS, (_HALVES, _BF16), strict=True)
    ),
    *(
        _Row(
            operation,
            record,
            "flashmla",
            run,
            dims,
            _BF16,
            _CUDA,
            by_name=True,
            missing=partial(flashmla.missing, call),
        )
        for operation, record, run, dims, call in (
            ("mla_sparse", _DENSE, flashmla.mla_sparse, _ABSORBED, "sparse_prefill_fwd"),
            ("mla_sparse", "mla_fp8", flashmla.mla_sparse, _ABSORBED, "sparse_decode_fwd"),
            ("sparse_attend", "v4_fp8", flashmla.sparse_attend, _V4_HEADS, "sparse_decode_fwd"),
        )
    ),
    *(
        _Row("mla_sparse", record, "torch", mla_sparse, dims, _FLOATS, _ANY)
        for record, dims in zip(_LATENT_RECORDS, (None, _ABSORBED), strict=True)
    ),
    *(
        _Row(
            "mla_sparse_materialised", record, "torch", mla_sparse_materialised, None, _FLOATS, _ANY
        )
        for record in _LATENT_RECORDS
    ),
    *(
        _Row(operation, _DENSE, "torch", run, None, _FLOATS, _ANY)
        for operation, run in (
            ("head_norm_rope", query.head_norm_rope),
            ("inverse_rope", query.inverse_rope),
        )
    ),
    *(
        _Row(
            operation,
            record.name,
            "torch",
            run,
            _dims(record),
            _FLOATS | _CODES if operation == "index_topk" and record.planes else _FLOATS,
            _ANY,
        )
        for operation, run, names in (
            ("index_query", fused.index_query, _INDEX_RECORDS),
            ("write_normed", fused.write_normed, _V4_RECORDS),
            ("write_latent", fused.write_latent, _LATENT_RECORDS),
            ("compress_write", fused.compress_write, _V4_RECORDS),
            ("write_record", records.write_records, tuple(records.RECORDS)),
            ("index_topk", index_topk, _INDEX_RECORDS),
            ("sparse_attend", sparse_attend, (_DENSE, "v4_fp8")),
        )
        for record in map(records.RECORDS.__getitem__, names)
    ),
)


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
            "available": _missing(row) or "yes",
        }
        for row in _ROWS
    ]


def select(case: Case, *, backend: str = "auto") -> Kernel:
    """The kernel for a case: the first available row that lists it, or the named backend's.

    With "auto" the kernel's ``for_load`` may answer another one, by measured times.  Raises
    ConfigError where no row lists the case, and where the named backend lists it but is not
    available here; never falls back from a backend that was asked for.
    """
    if case.operation not in OPERATIONS:
        raise ConfigError(f"unknown operation {case.operation!r}; there are {OPERATIONS}")
    listed = [row for row in _ROWS if row.lists(case)]
    if backend == "auto":
        if able := _automatic(case):
            return _kernel(case, able)
        if listed:
            raise ConfigError(f"no backend for {case}: {_missing(listed[0])}")
        raise ConfigError(f"no backend lists {case}")
    listed = [row for row in listed if row.backend == backend]
    if not listed:
        known = sorted({row.backend for row in _ROWS})
        what = "does not list" if backend in known else f"is unknown ({known}), so not for"
        raise ConfigError(f"backend {backend!r} {what} {case}")
    if missing := _missing(listed[0]):
        raise ConfigError(f"backend {backend!r} for {case}: {missing}")
    return _kernel(case, listed[:1])


def select_all(cases: Mapping[str, Case], *, backend: str = "auto") -> Mapping[str, Kernel]:
    """Kernels for several cases of one model, under the same keys.

    A named backend is taken wherever it lists the case; where it does not, what "auto" takes is.
    With "torch" the references are taken and nothing else.  A case that nothing lists is left out.
    Raises ConfigError where the named backend lists none of the cases, or is not available.
    """
    chosen: dict[str, Kernel] = {}
    named = 0
    for key, case in cases.items():
        if backend != "auto" and any(r.backend == backend and r.lists(case) for r in _ROWS):
            chosen[key] = select(case, backend=backend)
            named += 1
            continue
        fallback = "torch" if backend == "torch" else "auto"
        if any(fallback in ("auto", row.backend) for row in _automatic(case)):
            chosen[key] = select(case, backend=fallback)
    if backend != "auto" and not named:
        raise ConfigError(
            f"backend {backend!r} lists none of: {'; '.join(str(c) for c in cases.values())}"
        )
    return MappingProxyType(chosen)


def choices(device: str) -> list[dict[str, Any]]:
    """Of each operation on each record that a device type lists: what would be taken, and why.

    Keys: operation, record, dims, dtype (of the case that is told of: the widest a kernel is made
    for, in bfloat16 where it is listed), chosen (None: nothing), why, available and missing
    (backend -> reason).
    """
    told = []
    for operation, record in dict.fromkeys((row.operation, row.record) for row in _ROWS):
        rows = [
            row
            for row in _ROWS
            if (row.operation, row.record) == (operation, record) and device in row.devices
        ]
        if not rows:
            continue
        dims = max((max(row.dims) for row in rows if row.dims is not None), default=(1,))
        dtypes = [torch.bfloat16, *sorted(rows[0].dtypes, key=str)]
        dtype = next(d for d in dtypes if any(d in row.dtypes for row in rows))
        case = Case(operation, record, dims, dtype, device)
        able = _automatic(case)
        listed = [row for row in rows if row.lists(case)]
        told.append(
            {
                "operation": operation,
                "record": record,
                "dims": dims,
                "dtype": str(dtype).removeprefix("torch."),
                "chosen": able[0].backend if able else None,
                "why": _why(case, able),
                "available": [row.backend for row in listed if not _missing(row)],
                "missing": {row.backend: _missing(row) for row in listed if _missing(row)},
            }
        )
    return told


def _why(case: Case, able: list[_Row]) -> str:
    if not able:
        return "nothing is available"
    names = [row.backend for row in able]
    known = measured.figures(*case.key, measured.device_name())
    if len(names) == 1:
        return "the only one"
    if known is None or not known.checked.intersection(names):
        return f"first of {', '.join(names)}"
    kernel = _kernel(case, able)
    wins = Counter(kernel.for_load(load).backend for load in known.times)
    sizes = ", ".join(f"{name} at {count}" for name, count in wins.most_common())
    return f"fastest of those measured: {sizes} of {len(known.times)} sizes"


def _automatic(case: Case) -> list[_Row]:
    """Available rows that list the case and may be taken unasked, in order of preference."""
    able = [row for row in _ROWS if row.lists(case) and not _missing(row)]
    if len(able) < 2:
        return [row for row in able if not row.by_name]
    known = measured.figures(*case.key, measured.device_name())
    if known is None:
        return [row for row in able if not row.by_name]
    # What was timed and not found right is not taken, whatever its place.
    return [
        row
        for row in able
        if row.backend in known.checked or not (row.by_name or row.backend in known.timed)
    ]


def _kernel(case: Case, rows: list[_Row]) -> Kernel:
    """The first of ``rows``, with the others as rivals where there are times to go by."""
    kernels = []
    for row in rows:
        assert row.run is not None
        # References ask the device, or go by lengths of the host; a captured graph can do neither.
        captures = row.captures and row.backend not in ("torch", "sdpa")
        kernels.append(Kernel(row.backend, row.run, row.page_tokens, captures))
    if len(kernels) == 1 or measured.figures(*case.key, measured.device_name()) is None:
        return kernels[0]
    return replace(kernels[0], rivals=tuple(kernels), case=case)


def _missing(row: _Row) -> str:
    """Why a row cannot run here; empty if it can."""
    if row.missing is not None:
        return row.missing()
    if row.run is None:
        return f"the {row.backend} kernel is not part of this build"
    if row.backend == "triton" and not pack.has_triton():
        return "triton is not installed"
    return ""
