"""A stand-in for the cache: pages in one tensor per layer, and the arithmetic of the tables.

No tiers, no sharing: a sequence takes scattered pages from a shuffled list and keeps them.  Every
row starts as NaN, so whatever is read without having been written shows in the output.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvtier.layouts import Layout


@dataclass(eq=False)
class FakeSequence:
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class FakeLayer:
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.reads = 0

    def rows(self, component: str) -> Tensor:
        assert component == "latent"
        self.reads += 1
        return self._rows


class FakeDeviceStep:
    def __init__(self, step: "FakeStep", pad_to: int | None) -> None:
        padding = 0 if pad_to is None else pad_to - len(step.query_lens)
        assert padding >= 0

        def pad(array: np.ndarray, value: int) -> Tensor:
            rest = np.full((padding, *array.shape[1:]), value, array.dtype)
            return torch.from_numpy(np.concatenate([array, rest]))

        self.input_ids = pad(step.input_ids, 0).to(torch.int64)
        self.positions = pad(step.positions, 0)
        self.query_lens = pad(step.query_lens, 1)
        self.context_lens = pad(step.context_lens, 0)
        self.kv_lens = pad(step.kv_lens, 0)
        ends = step.cu_seqlens_q[-1] + np.arange(1, padding + 1, dtype=np.int32)
        self.cu_seqlens_q = torch.from_numpy(np.concatenate([step.cu_seqlens_q, ends]))
        self.block_table = pad(step.block_table, -1)
        self.slot_mapping = {k: pad(v, -1) for k, v in step.slot_mapping.items()}
        self._cache = step.cache

    def layer(self, layer: int) -> FakeLayer:
        return self._cache.layers[layer]


class FakeStep:
    def __init__(self, cache: "FakeCache", work: Seq[tuple[FakeSequence, Seq[int]]]) -> None:
        page = cache.layout.page_tokens
        self.cache, self.work = cache, list(work)
        tokens, positions, slots = [], [], []
        for seq, new in self.work:
            stop = seq.num_tokens + len(new)
            while len(seq.pages) * page < stop:
                seq.pages.append(cache.free.pop())
            at = np.arange(seq.num_tokens, stop)
            tokens += list(new)
            positions += at.tolist()
            slots += (np.array(seq.pages, int)[at // page] * page + at % page).tolist()
        self.input_ids = np.array(tokens, np.int32)
        self.positions = np.array(positions, np.int32)
        self.query_lens = np.array([len(new) for _, new in self.work], np.int32)
        self.context_lens = np.array([seq.num_tokens for seq, _ in self.work], np.int32)
        self.kv_lens = self.context_lens + self.query_lens
        self.cu_seqlens_q = np.cumsum([0, *self.query_lens], dtype=np.int32)
        width = max((len(seq.pages) for seq, _ in self.work), default=0) + 1
        self.block_table = np.full((len(self.work), width), -1, np.int32)
        for row, (seq, _) in enumerate(self.work):
            self.block_table[row, : len(seq.pages)] = seq.pages
        self.slot_mapping = {"latent": np.array(slots, np.int32)}

    def to_device(self, buffers: object = None, *, pad_to: int | None = None) -> FakeDeviceStep:
        return FakeDeviceStep(self, pad_to)

    def commit(self) -> None:
        for seq, new in self.work:
            seq.num_tokens += len(new)


class FakeCache:
    """As much of a cache as the adapter sees.  ``poison`` fills every row at the start."""

    def __init__(
        self, layout: Layout, pages: int = 64, *, poison: float = torch.nan, seed: int = 0
    ) -> None:
        self.layout, self.closed = layout, False
        latent = layout.components[0]
        dtype: torch.dtype = getattr(torch, latent.dtype)
        shape = (pages * layout.page_tokens, latent.slot_bytes // dtype.itemsize)
        self.layers = [FakeLayer(torch.full(shape, poison, dtype=dtype)) for _ in latent.layers]
        self.free = np.random.default_rng(seed).permutation(pages).tolist()

    def step(self, *work: tuple[FakeSequence, Seq[int]]) -> FakeStep:
        return FakeStep(self, work)

    def rows_of(self, seq: FakeSequence, layer: int, stop: int | None = None) -> Tensor:
        """The cached rows of a sequence, gathered by this file's own arithmetic."""
        page = self.layout.page_tokens
        at = np.arange(seq.num_tokens if stop is None else stop)
        slots = np.array(seq.pages, int)[at // page] * page + at % page
        return self.layers[layer]._rows[torch.from_numpy(slots)]
