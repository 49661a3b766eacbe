"""Pages that have been given out while their bytes are still on the way.

A large RESTORE may end before its copies do, or are even queued.  From then on its pages, and the
host frames that they come from, may be used, change hands and be overwritten: whoever does so finds
here what to wait for, by the number of the page or frame.  Knows events and numbers; nothing of
ops, leases or how copies are made.
"""

import threading
from collections.abc import Iterable

from kvtier.data.streams import Event, Streams

__all__ = ["Arrival", "Arrivals"]


class Arrival:
    """Copies under way: into which device pages, and from which host frames.

    One that fails is lost with its device: it is never over, and raises for whoever waits.
    """

    __slots__ = ("_changed", "_error", "_layers", "_streams", "_whole", "frames", "of", "pages")

    def __init__(self, streams: Streams, pages: Iterable[int], frames: Iterable[int]) -> None:
        self.pages = frozenset(pages)
        self.frames = frozenset(frames)
        self.of: Arrivals | None = None
        self._streams = streams
        self._layers: dict[int, Event] = {}
        self._whole: Event | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def queue(self, layers: Iterable[int], event: Event, *, last: bool) -> None:
        """Behind ``event`` these layers of all pages are there; the ``last``: all are."""
        with self._changed:
            self._layers.update(dict.fromkeys(layers, event))
            if last:
                self._whole = event
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def over(self) -> None:
        """It has come: nobody need wait for it any more."""
        if self.of is not None:
            self.of.remove(self)

    @property
    def queued(self) -> bool:
        """Whether nothing blocks until more of it is queued."""
        return self._whole is not None or self._error is not None

    @property
    def whole(self) -> Event:
        """Behind all of it.  Blocks until the last copy is queued."""
        return self._event(None)

    def wait(self, layer: int | None = None) -> None:
        """What is queued on the current stream from here on runs behind this layer (None: all).

        Blocks until its copies are queued; where there are no streams, until it has come.  Raises
        RuntimeError if the device has failed.
        """
        self._streams.wait(self._event(layer))

    def _event(self, layer: int | None) -> Event:
        with self._changed:
            self._changed.wait_for(lambda: self.queued or layer in self._layers)
            if self._error is not None:
                raise RuntimeError("a restore could not be queued on its device") from self._error
            event = self._whole if layer is None else self._layers.get(layer, self._whole)
            assert event is not None
            return event


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
