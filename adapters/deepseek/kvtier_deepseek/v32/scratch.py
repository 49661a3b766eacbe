"""One page of everything, for running a layer once without touching a cache."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from kvtier.layouts import Component, Layout

__all__ = ["Scratch"]


@final
class Scratch:
    """A device step of the last tokens of ``length``, all of whose pages are the same one."""

    def __init__(self, layout: Layout, device: torch.device, length: int, tokens: int) -> None:
        self._components: Mapping[str, Component] = {c.name: c for c in layout.components}
        self._device = device
        pages = -(-length // layout.page_tokens)
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.arange(length - tokens, length, device=device)
        self.cu_seqlens_q = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self.kv_lens = torch.full((1,), length, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(1, pages, dtype=torch.int32, device=device)
        self.slot_mapping: Mapping[str, Tensor] = dict.fromkeys(self._components, self.input_ids)

    def layer(self, layer: int) -> "Scratch":
        return self

    def rows(self, component: str) -> Tensor:
        """As a pool's ``rows`` gives them."""
        c = self._components[component]
        page = torch.zeros(1, c.page_bytes, dtype=torch.uint8, device=self._device)
        if c.planes:
            return page
        return page.view(c.slots_per_page, c.slot_bytes).view(getattr(torch, c.dtype))
