"""Pages that have been given out while their bytes are still on the way.

A large RESTORE may end when its last copy is queued.  From then on its pages, and the host frames
that they come from, may be used, change hands and be overwritten: whoever does so finds here what
to wait for, by the number of the page or frame.  Knows events and numbers; nothing of ops, leases
or how copies are made.
"""

import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvtier.data.streams import Event, Streams

__all__ = ["Arrival", "Arrivals"]

NO_LAYERS: Mapping[int, Event] = MappingProxyType({})


class Arrival:
    """Copies that are queued: into which device pages, and from which host frames."""

    __slots__ = ("_layers", "_streams", "frames", "of", "pages", "whole")

    def __init__(
        self,
        streams: Streams,
        pages: Iterable[int],
        frames: Iterable[int],
        whole: Event,
        layers: Mapping[int, Event] = NO_LAYERS,
    ) -> None:
        self.pages = frozenset(pages)
        self.frames = frozenset(frames)
        self.whole = whole
        """Behind all of it."""
        self._layers = layers
        """Behind one layer of all pages; a layer without an event is there with the last."""
        self._streams = streams
        self.of: Arrivals | None = None

    def over(self) -> None:
        """It has come: nobody need wait for it any more."""
        if self.of is not None:
            self.of.remove(self)

    def wait(self, layer: int | None = None) -> None:
        """What is queued on the current stream from here on runs behind this layer (None: all).

        Where there are no streams it has come when this returns."""
        self._streams.wait(self.whole if layer is None else self._layers.get(layer, self.whole))


class Arrivals:
    """All that is on the way."""

    def __init__(self) -> None:
        self._open: tuple[Arrival, ...] = ()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, arrival: Arrival) -> None:
        """Before anybody learns that the pages may be used."""
        arrival.of = self
        with self._lock:
            self._open += (arrival,)

    def remove(self, arrival: Arrival) -> None:
        with self._lock:
            self._open = tuple(each for each in self._open if each is not arrival)

    def touching(
        self, pages: Iterable[int] = (), frames: Iterable[int] = ()
    ) -> tuple[Arrival, ...]:
        """Those that write one of these pages or read one of these frames."""
        some = self._open
        if not some:  # as good as always
            return ()
        pages, frames = set(pages), set(frames)
        return tuple(
            each
            for each in some
            if not (each.pages.isdisjoint(pages) and each.frames.isdisjoint(frames))
        )
