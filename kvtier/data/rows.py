"""Copies of rows and pieces between device and host memory by the copy engines.

One call to the driver for all rows, where the driver has it: a row of its own costs 2 to 3 us on
the engine and 5 to 12 us on the calling thread, more than a small row takes to move.  Rows that are
neighbours on both sides are one copy.  Knows nothing of what rows hold.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Rows", "addresses", "as_rows", "copy_pieces", "copy_rows", "in_one_call"]

Rows = Sequence[int] | npt.NDArray[np.int64]
"""Numbers of rows or frames.  As an array they cost a thousandth of a loop over them."""


def as_rows(rows: Rows, count: int) -> npt.NDArray[np.int64]:
    """The same as an array.  Raises IndexError unless all lie in [0, count)."""
    numbers = np.asarray(rows, np.int64)
    # -1 would name the last; as unsigned it is past the end, so one look is enough.
    if numbers.size and numbers.view(np.uint64).max() >= count:
        raise IndexError(f"rows {rows} of {count}")
    return numbers


def copy_rows(
    source: torch.Tensor,
    source_rows: Rows,
    target: torch.Tensor,
    target_rows: Rows,
    sizes: Rows,
) -> None:
    """The first ``sizes[i]`` bytes of row ``source_rows[i]`` of ``source`` go to the same place in
    row ``target_rows[i]`` of ``target``.

    Both are uint8 (rows, bytes) with adjacent bytes; ``target_rows`` differ.  With a CUDA device on
    either side the copies are queued on the current stream, which must not be the default one,
    and the host side must be pinned.  Raises IndexError, having queued nothing, for a row that is
    not there.
    """
    assert len(sizes) == len(source_rows) == len(target_rows), (source_rows, target_rows, sizes)
    lengths = np.asarray(sizes, np.uint64)
    there = as_rows(source_rows, source.shape[0])
    here = as_rows(target_rows, target.shape[0])
    if not lengths.all():  # a record may end before its last frame
        there, here, lengths = there[lengths > 0], here[lengths > 0], lengths[lengths > 0]
    if not lengths.size:
        return
    assert source.stride(1) == target.stride(1) == 1
    most = min(source.shape[1], target.shape[1])
    assert lengths.max() <= most, "a row is shorter than what it is to hold"
    device = target.device if source.device.type == "cpu" else source.device
    batch = _batch_copy() if device.type == "cuda" else None
    if batch is None:
        for src, dst, size in zip(there.tolist(), here.tolist(), lengths.tolist(), strict=True):
            target[dst, :size].copy_(source[src, :size], non_blocking=True)
        return
    runs = _neighbours_joined(_addresses(target, here), _addresses(source, there), lengths)
    batch(*runs, torch.cuda.current_stream(device).cuda_stream)


def copy_pieces(
    targets: Sequence[npt.NDArray[np.int64]],
    sources: Sequence[npt.NDArray[np.int64]],
    sizes: Sequence[int],
    device: torch.device,
) -> None:
    """``sizes[i]`` bytes from each of the addresses ``sources[i]`` to that of ``targets[i]``, all
    in one call.  Only where ``in_one_call``; streams as for ``copy_rows``."""
    batch = _batch_copy()
    assert batch is not None
    batch(
        np.concatenate(targets).astype(np.uint64),
        np.concatenate(sources).astype(np.uint64),
        np.repeat(np.array(sizes, np.uint64), [len(some) for some in sources]),
        torch.cuda.current_stream(device).cuda_stream,
    )


def in_one_call() -> bool:
    """Whether the driver takes many copies at once."""
    return _batch_copy() is not None


Addresses = npt.NDArray[np.uint64]


def addresses(there: torch.Tensor, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where these rows begin."""
    return rows * there.stride(0) + there.data_ptr()


def _neighbours_joined(
    targets: Addresses, sources: Addresses, sizes: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies, one for all that follow one another where they begin on both sides."""
    apart = (targets[1:] != targets[:-1] + sizes[:-1]) | (sources[1:] != sources[:-1] + sizes[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    if len(first) == len(sizes):
        return targets, sources, sizes
    return targets[first], sources[first], np.add.reduceat(sizes, first)


def _addresses(there: torch.Tensor, rows: npt.NDArray[np.int64]) -> Addresses:
    return addresses(there, rows).astype(np.uint64)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


IN_STREAM_ORDER = 1
"""Sources are read when the stream gets there, not before."""


RELEASE_FROM = 128
"""Copies in one call from which on other threads may run meanwhile: it takes 0.5 us a copy, and to
get the interpreter back takes longer than a short call."""


@cache
def _batch_copy() -> Callable[[Addresses, Addresses, Addresses, int], None] | None:
    """The driver's copy of many runs at once; None before CUDA 13."""
    try:
        # torch has loaded it.
        calls = [of("libcuda.so.1").cuMemcpyBatchAsync_v2 for of in (ctypes.PyDLL, ctypes.CDLL)]
    except (OSError, AttributeError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    for call in calls:
        call.argtypes = (address, address, address, size, address, address, size, address)
        call.restype = ctypes.c_int

    def copy(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        attributes = _Attributes(source_order=IN_STREAM_ORDER)
        first = size(0)  # the attributes hold from the first copy on
        status = calls[len(sizes) >= RELEASE_FROM](
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            stream,
        )
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with status {status}")

    return copy
