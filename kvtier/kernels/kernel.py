"""What a kernel is wanted for, and the one that answers: the terms of the table."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier.kernels import measured
from kvtier.kernels.measured import Load

__all__ = ["Case", "Dims", "Kernel"]

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What a kernel is wanted for."""

    operation: str
    record: str
    """Format of a row: "dense" (plain values of one element type), or another of ``RECORDS``."""
    dims: Dims
    """Key and value width of attention; row width of a writer, compressor, indexer, of a query's
    head, or where keys are their own values."""
    dtype: torch.dtype
    """Of queries and of values to write, whatever they are packed into; uint8: e4m3 codes."""
    device: str
    """Device type: "cpu", "cuda"."""

    @property
    def key(self) -> tuple[str, str, Dims, torch.dtype]:
        """What figures of it are filed under."""
        return self.operation, self.record, self.dims, self.dtype

    def __str__(self) -> str:
        return (
            f"{self.operation}(record={self.record!r}, dims={self.dims}, dtype={self.dtype}, "
            f"device={self.device!r})"
        )


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row's answer: which backend, and what to call."""

    backend: str
    run: Callable[..., Any]
    page_tokens: int = 1
    """Pages it reads hold a multiple of so many tokens."""
    captures: bool = True
    """Whether a captured graph may hold it whose lengths change."""
    rivals: tuple["Kernel", ...] = field(default=(), repr=False)
    """All that may run the case, this one first, where measured times say which is the fastest of
    a load; empty where there is nothing to choose."""
    case: Case | None = field(default=None, repr=False)
    """What there is a choice of rivals for."""

    @property
    def variants(self) -> tuple["Kernel", ...]:
        """All that ``for_load`` may answer."""
        return self.rivals or (self,)

    def for_load(self, load: Load) -> "Kernel":
        """The fastest right one for this much work, on the device as it is now.

        The same answer for the same load, so it may be asked once a step, or once a captured
        graph: a graph runs what it was captured with.
        """
        if self.case is None:
            return self
        able = {
            rival.backend: rival
            for rival in self.rivals
            if load.page_tokens % rival.page_tokens == 0 and (rival.captures or not load.captured)
        }
        fastest = measured.fastest(*self.case.key, measured.device_name(), load, frozenset(able))
        if fastest is not None:
            return able[fastest]
        return next(iter(able.values()), self)
