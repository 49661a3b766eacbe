"""The device pool: the pages of every component and layer, and the frames of tails.

Owns the tensors and says where a frame's bytes lie.  Knows nothing of ops, streams or threads.
"""

from collections.abc import Sequence

import torch

from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind
from kvtier.errors import ConfigError
from kvtier.kernels.pack import Sections
from kvtier.layouts.base import Component, Layout, Share

__all__ = ["DevicePool", "Spans"]

Spans = list[torch.Tensor | int]


class DevicePool:
    """Device memory of one cache, on ``device`` ("cpu" too), zero-filled.

    One uint8 storage per component and layer: its pages (history), window pages or state slots
    (tails) behind one another.  Checkpoint frames hold a packed tail each.
    """

    def __init__(self, layout: Layout, geometry: Geometry, device: str | torch.device) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self._frames = {
            "history": geometry.gpu_pages,
            "state": geometry.gpu_states,
            "window": geometry.gpu_windows,
        }
        self._check(layout, geometry)
        self._components = {c.name: c for c in layout.components}
        self._storage = {
            (c.name, layer): torch.zeros(
                (self._frames[_class_of(c)], c.page_bytes), dtype=torch.uint8, device=self.device
            )
            for c in layout.components
            for layer in c.layers
        }
        self.checkpoints = torch.zeros(
            (geometry.gpu_checkpoints, layout.checkpoint_bytes()),
            dtype=torch.uint8,
            device=self.device,
        )
        """(frames, bytes) uint8: packed tails, as ``Layout`` orders them."""
        sections = list(layout.sections())
        self.history = Sections(
            storages=tuple(self._storage[name, layer] for name, layer, _, _ in sections),
            offsets=tuple(offset for _, _, offset, _ in sections),
        )
        """All history sections of a page, for the pack kernels."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # other streams will read these zeros

    def rows(self, component: str, layer: int) -> torch.Tensor:
        """(slots, values) view of one component's rows in one layer, in its dtype.

        Slots are numbered through all pages, as ``Step`` numbers them.  A component whose slots
        are not whole and adjacent comes as (pages, page bytes) instead.  Raises ConfigError for a
        component or a layer that the layout does not have.
        """
        if (component, layer) not in self._storage:
            known = {c.name: c.layers for c in self.layout.components}
            raise ConfigError(f"the layout has no component {component!r}, layer {layer}: {known}")
        storage, c = self._storage[component, layer], self._components[component]
        if c.planes or c.page_bytes != c.slots_per_page * c.slot_bytes:
            return storage
        rows = storage.view(storage.shape[0] * c.slots_per_page, c.slot_bytes)
        return rows.view(getattr(torch, c.dtype))

    def spans(self, kind: Kind, frames: Sequence[int], *, live: bool) -> Spans:
        """Where a packed record of this kind lies, in record order; a number stands for bytes
        that are not held.

        HISTORY: one page.  Otherwise ``live`` tails (state slot, window pages oldest first, -1
        for one not held), or one checkpoint frame.
        """
        if kind is Kind.HISTORY:
            return [_frame(s, frames[0]) for s in self.history.storages]
        if not live:
            return [_frame(self.checkpoints, frames[0])]
        slot, *windows = frames
        if slot < 0:
            raise IndexError(f"state slot {slot}")
        out = self._tail_spans(self.layout.states, slot)
        for page in windows:
            out += self._tail_spans(self.layout.windows, page)
        return out

    def clear(self, frames: Sequence[int]) -> None:
        """A live tail as if no token had been seen."""
        for span in self.spans(Kind.TAIL, frames, live=True):
            if isinstance(span, torch.Tensor):
                span.zero_()

    def poison(self, kind: Kind, frames: Sequence[int], *, live: bool, byte: int = 0xFF) -> None:
        """Fill a page, tail or checkpoint with a byte that no reader may see (tests)."""
        for span in self.spans(kind, frames, live=live):
            if isinstance(span, torch.Tensor):
                span.fill_(byte)

    def poison_all(self, byte: int = 0xFF) -> None:
        for storage in (*self._storage.values(), self.checkpoints):
            storage.fill_(byte)

    def num_bytes(self) -> int:
        """Device memory held."""
        return sum(s.numel() for s in (*self._storage.values(), self.checkpoints))

    def _tail_spans(self, components: tuple[Component, ...], frame: int) -> Spans:
        if frame < 0:
            return [sum(c.page_bytes * len(c.layers) for c in components)]
        return [
            _frame(self._storage[c.name, layer], frame) for c in components for layer in c.layers
        ]

    @staticmethod
    def _check(layout: Layout, geometry: Geometry) -> None:
        """A pool that could not hold what the core will name is refused here."""
        if geometry.page_tokens != layout.page_tokens:
            raise ConfigError(
                f"page_tokens: {geometry.page_tokens} is not the layout's {layout.page_tokens}"
            )
        if geometry.has_tails != layout.has_tails:
            raise ConfigError(f"has_tails: {geometry.has_tails} is not the layout's")
        for c in layout.windows:
            if (geometry.window, geometry.window_page) != (c.window, c.slots_per_page):
                raise ConfigError(
                    f"window: {geometry.window} in pages of {geometry.window_page} is not "
                    f"{c.name!r}'s {c.window} in pages of {c.slots_per_page}"
                )


def _class_of(component: Component) -> str:
    if component.share is Share.HISTORY:
        return "history"
    return "state" if component.window is None else "window"


def _frame(storage: torch.Tensor, frame: int) -> torch.Tensor:
    if not 0 <= frame < storage.shape[0]:  # -1 would name the last one
        raise IndexError(f"frame {frame} of {storage.shape[0]}")
    return storage[frame]
