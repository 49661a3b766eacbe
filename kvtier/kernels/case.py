"""What is asked of the kernel table: the kind of work, and how much of it."""

from dataclasses import dataclass

import torch

__all__ = ["Case", "Dims", "Load"]

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

    def __str__(self) -> str:
        return (
            f"{self.operation}(record={self.record!r}, dims={self.dims}, dtype={self.dtype}, "
            f"device={self.device!r})"
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How much one call has to do: what it takes depends on that."""

    batch: int
    """Sequences; queries, where each has a list of keys of its own."""
    heads: int
    keys: int
    """Of a sequence, on average; those that a captured graph has room for; slots of a list."""
    queries: int = 1
    """Tokens of each sequence, at most."""
    page_tokens: int = 64
    captured: bool = False
    """Whether it is captured in a graph, with lengths that will change."""
