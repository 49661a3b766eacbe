"""Copies of whole rows between device and host memory by the copy engines.

One call to the driver for all rows, where the driver has it: a row of its own costs 2 to 3 us on
the engine and 5 to 12 us on the calling thread, more than a small row takes to move.  Knows nothing
of what rows hold.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

__all__ = ["copy_rows"]


def copy_rows(
    source: torch.Tensor,
    source_rows: Sequence[int],
    target: torch.Tensor,
    target_rows: Sequence[int],
    sizes: Sequence[int],
) -> None:
    """The first ``sizes[i]`` bytes of row ``source_rows[i]`` of ``source`` go to the same place in
    row ``target_rows[i]`` of ``target``.

    Both are uint8 (rows, bytes) with adjacent bytes; ``target_rows`` differ.  With a CUDA device on
    either side the copies are queued on the current stream, which must not be the default one,
    and the host side must be pinned.  Raises IndexError, having queued nothing, for a row that is
    not there.
    """
    assert len(sizes) == len(source_rows) == len(target_rows), (source_rows, target_rows, sizes)
    if 0 in sizes:  # a record may end before its last frame
        kept = [i for i, size in enumerate(sizes) if size]
        source_rows, target_rows = [source_rows[i] for i in kept], [target_rows[i] for i in kept]
        sizes = [sizes[i] for i in kept]
    if not sizes:
        return
    for rows, there in ((source_rows, source), (target_rows, target)):
        if min(rows) < 0 or max(rows) >= there.shape[0]:  # -1 would name the last one
            raise IndexError(f"rows {rows} of {there.shape[0]}")
        assert there.stride(1) == 1
        assert max(sizes) <= there.shape[1], "a row is shorter than what it is to hold"
    device = target.device if source.device.type == "cpu" else source.device
    batch = _batch_copy() if device.type == "cuda" else None
    if batch is None:
        for src, dst, size in zip(source_rows, target_rows, sizes, strict=True):
            target[dst, :size].copy_(source[src, :size], non_blocking=True)
        return
    batch(
        _addresses(target, target_rows),
        _addresses(source, source_rows),
        np.array(sizes, np.uint64),
        torch.cuda.current_stream(device).cuda_stream,
    )


Addresses = np.ndarray[tuple[int], np.dtype[np.uint64]]


def _addresses(there: torch.Tensor, rows: Sequence[int]) -> Addresses:
    return np.array(rows, np.uint64) * np.uint64(there.stride(0)) + np.uint64(there.data_ptr())


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


@cache
def _batch_copy() -> Callable[[Addresses, Addresses, Addresses, int], None] | None:
    """The driver's copy of many runs at once; None before CUDA 13."""
    try:
        # torch has loaded it.  PyDLL: a call takes less than it does to get the interpreter back.
        call = ctypes.PyDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = (address, address, address, size, address, address, size, address)
    call.restype = ctypes.c_int

    def copy(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        attributes = _Attributes(source_order=IN_STREAM_ORDER)
        first = size(0)  # the attributes hold from the first copy on
        status = call(
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
