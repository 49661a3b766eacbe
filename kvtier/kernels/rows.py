"""The rows of the kernel table: which backend runs which operation on what, in order of preference.

Data only; ``table`` picks from it.  The first row that lists a case and is available is the
automatic choice, as far as no measured times say otherwise.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvtier.kernels import (
    flashinfer,
    flashmla,
    fused,
    mla,
    pack,
    prefill,
    query,
    records,
    reference,
)
from kvtier.kernels.compress import compress
from kvtier.kernels.index import index_topk
from kvtier.kernels.kernel import Case, Dims
from kvtier.kernels.mla_sparse import mla_sparse, mla_sparse_materialised
from kvtier.kernels.sparse import sparse_attend

__all__ = ["OPERATIONS", "ROWS", "Row"]

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
class Row:
    """What one backend runs, and what it asks for."""

    operation: str
    record: str
    backend: str
    run: Callable[..., Any]
    dims: frozenset[Dims] | None
    """None: any."""
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]
    by_name: bool = False
    """Taken only where it is asked for, or was found right and fastest on this device: a row that
    has not been measured, or that another library brings."""
    page_tokens: int = 1
    """Pages it reads hold a multiple of so many tokens."""
    captures: bool = True
    """Whether a captured graph may hold it whose lengths change; no reference may be held."""
    missing: Callable[[], str] | None = None
    """Why it cannot run here, empty if it can; None: as the backend's others."""

    def why_missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        if self.missing is not None:
            return self.missing()
        if self.backend == "triton" and not pack.has_triton():
            return "triton is not installed"
        return ""

    def lists(self, case: Case) -> bool:
        """Whether it is for this case, here or elsewhere."""
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


ROWS: tuple[Row, ...] = (
    # The first available row that lists a case is the automatic choice.
    Row(
        "write_rows",
        _DENSE,
        "triton",
        _triton("write", "write_rows"),
        frozenset({(576,)}),
        _FLOATS,
        _CUDA,
    ),
    Row("write_rows", _DENSE, "torch", reference.write_rows, None, _FLOATS, _ANY),
    Row(
        "mla_absorbed",
        _DENSE,
        "triton",
        _triton("mla", "absorbed"),
        _ABSORBED,
        _HALVES,
        _CUDA,
    ),
    Row(
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
    Row(
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
    Row("mla_absorbed", _DENSE, "torch", mla.absorbed, None, _FLOATS, _ANY),
    Row(
        "mla_absorbed",
        "mla_fp8",
        "triton",
        _triton("mla", "absorbed"),
        _ABSORBED,
        _BF16,
        _CUDA,
        by_name=True,
    ),
    Row("mla_absorbed", "mla_fp8", "torch", mla.absorbed, _ABSORBED, _FLOATS, _ANY),
    *(
        row
        for record, dtypes in zip(_LATENT_RECORDS, (_HALVES, _BF16), strict=True)
        for row in (
            Row(
                "mla_materialised",
                record,
                "triton",
                _triton("prefill", "materialised"),
                _WHOLE,
                dtypes,
                _CUDA,
                by_name=True,
            ),
            Row("mla_materialised", record, "torch", prefill.materialised, None, _FLOATS, _ANY),
            Row(
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
    Row("merge", _DENSE, "torch", reference.merge, None, _FLOATS, _ANY),
    Row("compress", _DENSE, "torch", compress, None, _FLOATS, _ANY),
    *(
        Row(
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
        Row(
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
    Row(
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
        Row(
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
        Row(
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
        Row(
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
        Row(
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
        Row("mla_sparse", record, "torch", mla_sparse, dims, _FLOATS, _ANY)
        for record, dims in zip(_LATENT_RECORDS, (None, _ABSORBED), strict=True)
    ),
    *(
        Row(
            "mla_sparse_materialised", record, "torch", mla_sparse_materialised, None, _FLOATS, _ANY
        )
        for record in _LATENT_RECORDS
    ),
    *(
        Row(operation, _DENSE, "torch", run, None, _FLOATS, _ANY)
        for operation, run in (
            ("head_norm_rope", query.head_norm_rope),
            ("inverse_rope", query.inverse_rope),
        )
    ),
    *(
        Row(
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
