"""The most memory that tensors took at once, on a GPU or, where nothing counts it, on the CPU."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Peak"]


class Peak:
    """The most bytes that were held at once beyond those before, of tensors made meanwhile."""

    def __init__(self, device: str) -> None:
        self.bytes = 0
        self._cpu = _Live() if device == "cpu" else None
        self._before = 0

    def __enter__(self) -> "Peak":
        gc.collect()  # what goes meanwhile would be taken off
        if self._cpu is not None:
            self._cpu.__enter__()  # type: ignore[no-untyped-call]
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._cpu is not None:
            self._cpu.__exit__(*exc)  # type: ignore[no-untyped-call]
            self.bytes = self._cpu.peak
        else:
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self._before


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What the CPU's allocator does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._bytes = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, Tensor):
                storage = out.untyped_storage()
                if storage._cdata in self._users or storage._cdata not in given:
                    self._hold(out, storage._cdata, storage.nbytes())
        return result

    def _hold(self, tensor: Tensor, storage: int, size: int) -> None:
        if not self._users.get(storage):
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
        self._users[storage] = self._users.get(storage, 0) + 1
        weakref.finalize(tensor, self._drop, storage, size).atexit = False

    def _drop(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            del self._users[storage]
            self._bytes -= size
