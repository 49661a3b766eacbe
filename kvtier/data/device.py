"""The device pool: the pages of every component and layer, and the frames of tails.

Owns the tensors and says where a frame's bytes lie.  Knows nothing of ops, streams or threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind
from kvtier.data.arrivals import Arrival, Arrivals
from kvtier.errors import ConfigError
from kvtier.kernels.pack import Sections, clear_tails, copy_spans, pack_tails, unpack_tails
from kvtier.layouts.base import Component, Layout, Share

__all__ = ["DevicePool", "LayerGroup", "Spans"]

CHECKPOINT_ALIGN = 16

Spans = list[torch.Tensor | int]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Some layers of a history page, and where they lie in its packed record."""

    layers: tuple[int, ...]
    sections: Sections


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
        self.layers = frozenset(layer for _, layer in self._storage)
        """All that the layout has, those without history too."""
        # Each frame starts aligned, whatever its length, so that a section may have any dtype.
        stride = -(-layout.checkpoint_bytes() // CHECKPOINT_ALIGN) * CHECKPOINT_ALIGN
        self.checkpoints = torch.zeros(
            (geometry.gpu_checkpoints, stride), dtype=torch.uint8, device=self.device
        )[:, : layout.checkpoint_bytes()]
        """(frames, bytes) uint8: checkpoints, as ``Layout`` orders them."""
        self._kept: dict[tuple[str, int], int] = {}
        for name, layer, offset, _ in layout.sections(Share.TAIL):
            self._kept.setdefault((name, layer), offset)
        sections = list(layout.sections())
        self.history = Sections(
            storages=tuple(self._storage[name, layer] for name, layer, _, _ in sections),
            offsets=tuple(offset for _, _, offset, _ in sections),
        )
        """All history sections of a page, for the pack kernels."""
        self._pieces = sections
        self._layers = tuple(sorted({layer for _, layer, _, _ in sections}))
        self.arrivals = Arrivals()
        """Pages that may be used although their bytes are still on the way."""
        self._tail_windows = layout.tail_windows
        self._whole = Sections((self.checkpoints,), (0,))
        self._tails: dict[tuple[Kind, int], Sections] = {}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # other streams will read these zeros

    @property
    def num_layers(self) -> int:
        """Layers that have history."""
        return len(self._layers)

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
        if not _is_plain(c):
            return storage
        rows = storage.view(storage.shape[0] * c.slots_per_page, c.slot_bytes)
        return rows.view(getattr(torch, c.dtype))

    def checkpoint_rows(self, component: str, layer: int) -> torch.Tensor:
        """View of what the checkpoint frames hold of one component in one layer, in its dtype.

        Of a state (frames, slots, values): the last ``checkpoint_slots`` of its ring.  Of a window
        (frames, pages, slots, values), the oldest page first.  Where slots are not whole and
        adjacent, page bytes stand in place of the last two.  Raises ConfigError for what no
        checkpoint holds.
        """
        if (component, layer) not in self._kept:
            raise ConfigError(f"a checkpoint holds nothing of {component!r}, layer {layer}")
        c, start = self._components[component], self._kept[component, layer]
        frames, shape, strides = self.checkpoints, [c.kept_bytes], [1]
        if _is_plain(c):
            shape, strides = [c.kept_bytes // c.slot_bytes, c.slot_bytes], [c.slot_bytes, 1]
        if c.window is not None:
            shape = [self.layout.tail_windows, *shape]
            strides = [self.layout.window_bytes(), *strides]
        held = frames.as_strided((frames.shape[0], *shape), (frames.stride(0), *strides), start)
        return held.view(getattr(torch, c.dtype)) if _is_plain(c) else held

    def arriving(self, pages: npt.NDArray[np.int32]) -> tuple[Arrival, ...]:
        """What is still on the way to any of these history pages; -1 names none."""
        return self.arrivals.touching(pages.ravel().tolist()) if self.arrivals else ()

    def layer_group(self, start: int, stop: int) -> LayerGroup:
        """Of the layers that have history those from number ``start`` to ``stop``."""
        layers = self._layers[start:stop]
        found = [
            (storage, at)
            for (_, layer, _, _), (storage, at, _) in zip(self._pieces, self.history, strict=True)
            if layer in layers
        ]
        storages, offsets = zip(*found, strict=True)
        return LayerGroup(layers, Sections(storages, offsets))

    def spans(self, kind: Kind, frames: Sequence[int], *, live: bool) -> Spans:
        """Where a packed record of this kind lies, in record order; a number stands for bytes
        that are not held.

        HISTORY: one page.  Otherwise ``live`` tails (state slot, window pages oldest first, -1
        for one not held), of which a CHECKPOINT is a part; or one checkpoint frame.
        """
        if kind is Kind.HISTORY:
            return [_frame(s, frames[0]) for s in self.history.storages]
        if not live:
            return [_frame(self.checkpoints, frames[0])]
        slot, *windows = frames
        if slot < 0:
            raise IndexError(f"state slot {slot}")
        out: Spans = []
        for c in self.layout.states:
            kept = c.kept_bytes if kind is Kind.CHECKPOINT else c.page_bytes
            for layer in c.layers if kept else ():
                out.append(_frame(self._storage[c.name, layer], slot)[c.page_bytes - kept :])
        for page in windows:
            out += self._window_spans(page)
        return out

    def sections(
        self, kind: Kind, frames: Sequence[int], *, live: bool
    ) -> tuple[Sections, tuple[int, ...]]:
        """What ``spans`` says, for the pack kernels: sections, and the page of each member.

        The same object for the same kind and number of window pages.
        """
        first, *windows = frames
        if first < 0:  # only a window page may be one that is not held
            raise IndexError(f"frame {first}")
        if kind is Kind.HISTORY:
            return self.history, (first,)
        if not live:
            return self._whole, (first,)
        if kind is Kind.CHECKPOINT:
            del windows[self._tail_windows :]
        key = kind, len(windows)
        if key not in self._tails:
            self._tails.setdefault(key, self._tail_sections(*key))
        return self._tails[key], (first, *windows)

    def copy(
        self, kind: Kind, src: Sequence[int], dst: Sequence[int], *, live_src: bool, live_dst: bool
    ) -> None:
        """A page, tail or checkpoint onto another, on the current stream."""
        if live_src and not live_dst:
            tail, pages = self.sections(kind, src, live=True)
            pack_tails(tail, [pages], self.checkpoints, [dst[:1]])
        elif live_dst and not live_src:
            tail, pages = self.sections(kind, dst, live=True)
            unpack_tails(tail, [pages], self.checkpoints, [src[:1]])
        else:
            copy_spans(
                self.spans(kind, src, live=live_src), list(self.spans(kind, dst, live=live_dst))
            )

    def clear(self, frames: Sequence[int]) -> None:
        """A live tail as if no token had been seen."""
        sections, pages = self.sections(Kind.TAIL, frames, live=True)
        clear_tails(sections, [pages])

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

    def _tail_sections(self, kind: Kind, windows: int) -> Sections:
        """A live tail: member 0 is its state slot, the others are its window pages in order."""
        storages: list[torch.Tensor] = []
        members: list[int] = []
        for c in self.layout.states:
            kept = c.kept_bytes if kind is Kind.CHECKPOINT else c.page_bytes
            for layer in c.layers if kept else ():
                storages.append(self._storage[c.name, layer][:, c.page_bytes - kept :])
                members.append(0)
        for page in range(windows):
            for c in self.layout.windows:
                storages += [self._storage[c.name, layer] for layer in c.layers]
                members += [1 + page] * len(c.layers)
        ends = list(accumulate((s.shape[1] for s in storages), initial=0))
        return Sections(tuple(storages), tuple(ends[:-1]), tuple(members))

    def _window_spans(self, page: int) -> Spans:
        if page < 0:
            return [self.layout.window_bytes()]
        return [
            _frame(self._storage[c.name, layer], page)
            for c in self.layout.windows
            for layer in c.layers
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
            if geometry.window_kept != layout.window_kept:
                raise ConfigError(
                    f"window_kept: {geometry.window_kept} tokens are not {c.name!r}'s "
                    f"{layout.window_kept}"
                )


def _class_of(component: Component) -> str:
    if component.share is Share.HISTORY:
        return "history"
    return "state" if component.window is None else "window"


def _is_plain(c: Component) -> bool:
    """Slots are whole and adjacent."""
    return not c.planes and c.page_bytes == c.slots_per_page * c.slot_bytes


def _frame(storage: torch.Tensor, frame: int) -> torch.Tensor:
    if not 0 <= frame < storage.shape[0]:  # -1 would name the last one
        raise IndexError(f"frame {frame} of {storage.shape[0]}")
    return storage[frame]
