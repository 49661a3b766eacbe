"""What a kernel makes once of a batch, for all layers of a step to use; or of another value that
these share, such as the lengths of their lists.

Kept as long as the batch itself, and apart for each graph that is being captured: what is made in
one holds in that one only, and what was made before it would stay as it was in every replay.
"""

import ctypes
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

__all__ = ["PerBatch", "capturing"]

T = TypeVar("T")


class PerBatch(Generic[T]):
    """Values by batch, by what else they depend on, and by the graph that is being captured."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[weakref.ref[Any], dict[Hashable, T]]] = {}

    def __len__(self) -> int:
        """Batches that something is kept of."""
        return len(self._made)

    def get(self, batch: object, key: Hashable, make: Callable[[], T]) -> T:
        """What was made of this very batch under ``key``; made now if nothing was."""
        value = self.find(batch, key)
        return self.put(batch, key, make()) if value is None else value

    def find(self, batch: object, key: Hashable) -> T | None:
        """What was put for this very batch under ``key``."""
        known = self._made.get((id(batch), _capture()))
        return known[1].get(key) if known is not None and known[0]() is batch else None

    def put(self, batch: object, key: Hashable, value: T) -> T:
        """Keep ``value`` as long as the batch lives; returns it."""
        place = (id(batch), _capture())
        known = self._made.get(place)
        if known is None or known[0]() is not batch:
            made = self._made

            def forget(_: Any) -> None:
                made.pop(place, None)

            known = made[place] = (weakref.ref(batch, forget), {})
        known[1][key] = value
        return value


def capturing() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _capture() -> int:
    """A number of the capture that the current stream is in; 0 if it is in none."""
    if not capturing():
        return 0
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    except (OSError, AttributeError):  # by another driver: all captures count as one
        return 1
    return number.value or 1
