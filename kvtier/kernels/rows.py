"""The rows of the kernel table: which backend runs which operation on what, in order of preference.

Data only; ``table`` picks from it.  Of the rows that list a case the first that is available is the
automatic choice, as far as no measured times say otherwise.
"""

import importlib
from collections.abc import Callable, Iterator
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
from kvtier.kernels.case import Case, Dims
from kvtier.kernels.compress import compress
from kvtier.kernels.index import index_topk
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


def _nothing() -> str:
    return ""


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
    """Whether a captured graph may hold it whose lengths change."""
    missing: Callable[[], str] = _nothing
    """Why it cannot run here; empty if it can."""
    unsummed: Callable[..., Any] | None = None
    """``run`` with less work, where log-sum-exps are not looked at."""

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
_CODES = frozenset({torch.uint8})
"""What ``index_query`` makes of queries for packed keys."""

_ANY = frozenset({"cpu", "cuda"})
_CUDA = frozenset({"cuda"})

_ABSORBED = frozenset({(576, 512)})
_WHOLE = frozenset({(192, 128)})
_LATENT = frozenset({(576,)})
_INDEX_KEY = frozenset({(128,)})
_V4_ENTRY = frozenset({(512,)})
"""An entry, or what a window keeps of a token."""
_V4 = _INDEX_KEY | _V4_ENTRY

_DENSE = "dense"
_PACKED_KEYS = ("index_fp8", "index_mxfp4")
_LATENT_RECORDS = (_DENSE, "mla_fp8")
_ENTRY_RECORDS = (_DENSE, "v4_fp8")
_V4_RECORDS = (*_ENTRY_RECORDS, *_PACKED_KEYS)


def _lazy(module: str, name: str) -> Callable[..., Any]:
    """A function of a module of kernels, which is imported when it is first called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"kvtier.kernels.{module}"), name)(*args, **kwargs)

    return run


def _no_triton() -> str:
    return "" if pack.has_triton() else "triton is not installed"


def _no_hopper() -> str:
    if missing := _no_triton():
        return missing
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "the kernel needs an H100 or H200"
    return ""


def _reference(
    operation: str,
    record: str,
    run: Callable[..., Any],
    dims: frozenset[Dims] | None = None,
    dtypes: frozenset[torch.dtype] = _FLOATS,
    *,
    backend: str = "torch",
) -> Row:
    """Asks the device, or goes by lengths of the host: a captured graph can do neither."""
    return Row(operation, record, backend, run, dims, dtypes, _ANY, captures=False)


def _triton(
    operation: str,
    record: str,
    run: tuple[str, str],
    dims: frozenset[Dims],
    dtypes: frozenset[torch.dtype],
) -> Row:
    """``run``: a module's name behind "triton_", and the function's."""
    module, name = run
    return Row(
        operation,
        record,
        "triton",
        _lazy(f"triton_{module}", name),
        dims,
        dtypes,
        _CUDA,
        missing=_no_triton,
    )


def _gluon(
    operation: str,
    record: str,
    run: tuple[str, str],
    dims: frozenset[Dims],
    dtypes: frozenset[torch.dtype] = _BF16,
) -> Row:
    """``run``: a module's name behind "gluon_", and the function's."""
    module, name = run
    return Row(
        operation,
        record,
        "gluon",
        _lazy(f"gluon_{module}", name),
        dims,
        dtypes,
        _CUDA,
        missing=_no_hopper,
    )


def _flashmla(
    operation: str,
    record: str,
    run: Callable[..., Any],
    call: str,
    dims: frozenset[Dims],
    dtypes: frozenset[torch.dtype] = _BF16,
    *,
    page_tokens: int = 1,
) -> Row:
    """``call``: the library's function that it needs."""
    return Row(
        operation,
        record,
        "flashmla",
        run,
        dims,
        dtypes,
        _CUDA,
        by_name=True,
        page_tokens=page_tokens,
        missing=partial(flashmla.missing, call),
        unsummed=partial(run, sums=False),
    )


def _pairs(
    operation: str,
    names: tuple[str, ...],
    run: tuple[str, str],
    reference: Callable[..., Any],
    plain: frozenset[Dims],
    *,
    more: frozenset[torch.dtype] = frozenset(),
) -> Iterator[Row]:
    """Triton's kernel and the reference, of each of these records.

    ``plain``: the kernel's dimensions where a record leaves them open; ``more``: element types
    besides the usual ones.
    """
    for name in names:
        dim = records.RECORDS[name].dim
        dims = None if dim is None else frozenset({(dim,)})
        yield _triton(operation, name, run, dims or plain, _SINGLES | more)
        yield _reference(operation, name, reference, dims, _FLOATS | more)


ROWS: tuple[Row, ...] = (
    _triton("write_rows", _DENSE, ("write", "write_rows"), _LATENT, _FLOATS),
    _reference("write_rows", _DENSE, reference.write_rows),
    _triton("mla_absorbed", _DENSE, ("mla", "absorbed"), _ABSORBED, _HALVES),
    _flashmla(
        "mla_absorbed",
        _DENSE,
        flashmla.absorbed,
        "dense_decode_fwd",
        _ABSORBED,
        _HALVES,
        page_tokens=flashmla.PAGE_TOKENS,
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
    _reference("mla_absorbed", _DENSE, mla.absorbed),
    _gluon("mla_absorbed", "mla_fp8", ("latent", "absorbed"), _ABSORBED),
    _triton("mla_absorbed", "mla_fp8", ("mla", "absorbed"), _ABSORBED, _BF16),
    _reference("mla_absorbed", "mla_fp8", mla.absorbed, _ABSORBED),
    *(
        row
        for record, dtypes in zip(_LATENT_RECORDS, (_HALVES, _BF16), strict=True)
        for row in (
            _gluon("mla_materialised", record, ("prefill", "materialised"), _WHOLE, dtypes),
            _triton("mla_materialised", record, ("prefill", "materialised"), _WHOLE, dtypes),
            _reference("mla_materialised", record, prefill.materialised),
            _reference("mla_materialised_whole", record, prefill.materialised_sdpa, backend="sdpa"),
        )
    ),
    *(_gluon("mla_sparse", name, ("latent", "mla_sparse"), _ABSORBED) for name in _LATENT_RECORDS),
    _triton("mla_sparse", _DENSE, ("mla_sparse", "mla_sparse"), _ABSORBED, _HALVES),
    _flashmla("mla_sparse", _DENSE, flashmla.mla_sparse, "sparse_prefill_fwd", _ABSORBED),
    _reference("mla_sparse", _DENSE, mla_sparse),
    _triton("mla_sparse", "mla_fp8", ("mla_sparse", "mla_sparse"), _ABSORBED, _BF16),
    _flashmla("mla_sparse", "mla_fp8", flashmla.mla_sparse, "sparse_decode_fwd", _ABSORBED),
    _reference("mla_sparse", "mla_fp8", mla_sparse, _ABSORBED),
    _reference("mla_sparse_materialised", _DENSE, mla_sparse_materialised),
    _reference("mla_sparse_materialised", "mla_fp8", mla_sparse_materialised),
    _triton("sparse_attend", _DENSE, ("sparse", "sparse_attend"), _V4_ENTRY, _SINGLES),
    _reference("sparse_attend", _DENSE, sparse_attend),
    _gluon("sparse_attend", "v4_fp8", ("sparse", "sparse_attend"), _V4_ENTRY),
    _triton("sparse_attend", "v4_fp8", ("sparse", "sparse_attend"), _V4_ENTRY, _SINGLES),
    _flashmla("sparse_attend", "v4_fp8", flashmla.sparse_attend, "sparse_decode_fwd", _V4_ENTRY),
    _reference("sparse_attend", "v4_fp8", sparse_attend, _V4_ENTRY),
    _reference("merge", _DENSE, reference.merge),
    _reference("compress", _DENSE, compress),
    *_pairs(
        "write_record",
        tuple(records.RECORDS),
        ("write", "write_records"),
        records.write_records,
        _V4 | _LATENT,
    ),
    *_pairs("write_normed", _V4_RECORDS, ("write", "write_normed"), fused.write_normed, _V4),
    # Rows that come normed are the models' own to the last bit; those normed here may not be.
    *_pairs(
        "write_latent",
        _LATENT_RECORDS,
        ("write", "write_latent"),
        fused.write_latent,
        _LATENT,
    ),
    *_pairs(
        "compress_write", _V4_RECORDS, ("compress", "compress_write"), fused.compress_write, _V4
    ),
    *_pairs("head_norm_rope", (_DENSE,), ("query", "head_norm_rope"), query.head_norm_rope, _V4),
    *_pairs("inverse_rope", (_DENSE,), ("query", "inverse_rope"), query.inverse_rope, _V4),
    *_pairs(
        "index_query", (_DENSE, *_PACKED_KEYS), ("query", "index_query"), fused.index_query, _V4
    ),
    *_pairs("index_topk", (_DENSE,), ("index", "index_topk"), index_topk, _INDEX_KEY),
    *_pairs(
        "index_topk", _PACKED_KEYS, ("index", "index_topk"), index_topk, _INDEX_KEY, more=_CODES
    ),
)
