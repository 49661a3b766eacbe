"""One page of everything, for running a layer once without touching a cache."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from kvtier.layouts import Component, Layout
from kvtier_deepseek.v4.attention import Captures

__all__ = ["Scratch"]


@final
class Scratch:
    """A device step of one token, and its own pages: of one each, which every table names.

    The token ends a page and is a checkpoint's last.
    """

    def __init__(self, layout: Layout, device: torch.device, pages: int) -> None:
        self._components: Mapping[str, Component] = {c.name: c for c in layout.components}
        self._device = device
        self._windows = layout.tail_windows
        self.length = pages * layout.page_tokens

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.input_ids = torch.zeros(1, dtype=torch.int64, device=device)
        self.positions = self.input_ids + (self.length - 1)
        self.cu_seqlens_q = torch.arange(2, dtype=torch.int32, device=device)
        self.kv_lens = ints(1) + self.length
        self.block_table = ints(1, pages)
        spans = self.length // layout.windows[0].slots_per_page
        self.window_table = ints(1, spans)
        self.state_slots = ints(1)
        self.slot_mapping: Mapping[str, Tensor] = {
            c.name: self.input_ids for c in (*layout.history, *layout.windows)
        }
        self.captures = Captures(
            torch.tensor([[0, self.length, 0]], device=device),
            torch.zeros(1, self._windows, dtype=torch.int64, device=device),
        )

    def layer(self, layer: int) -> "Scratch":
        return self

    def rows(self, component: str) -> Tensor:
        return self._pages(component, 1)

    def checkpoints(self, component: str) -> Tensor:
        c = self._components[component]
        if c.window is None:
            rows = self._pages(component, 1)
            return rows.new_zeros(1, c.checkpoint_slots or 0, rows.shape[1])
        pages = self._pages(component, self._windows)
        return pages[None] if c.planes else pages.view(1, self._windows, -1, pages.shape[1])

    def _pages(self, component: str, count: int) -> Tensor:
        """As a pool's ``rows`` gives them."""
        c = self._components[component]
        page = torch.zeros(count, c.page_bytes, dtype=torch.uint8, device=self._device)
        if c.planes:
            return page
        return page.view(count * c.slots_per_page, c.slot_bytes).view(getattr(torch, c.dtype))
