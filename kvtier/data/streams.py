"""What orders copies on the device: streams and events on CUDA, nothing on the CPU.

The only module that names CUDA streams.  Knows nothing of ops.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Protocol

import torch

__all__ = ["CpuStreams", "CudaStreams", "Fences", "Lane", "Streams", "streams_for"]


class Lane(Enum):
    """Device work that may overlap with other lanes, in order within one."""

    COMPUTE = "compute"
    """The caller's own stream: what runs here takes effect before whatever it queues next."""
    PACK = "pack"
    """Gathers into staging."""
    DRAIN = "drain"
    """Staging to the host."""
    FETCH = "fetch"
    """Host to landing buffers."""
    LOAD = "load"
    """Landing buffers to pages."""


class Event(Protocol):
    def synchronize(self) -> None: ...


Fences = tuple[Event, ...]
"""Events that an op has to run behind."""


class Streams(Protocol):
    def fence(self, stream: object | None) -> None:
        """Later ``fences()`` include the work queued so far on ``stream`` (None: the current);
        what it queues from here on runs behind the fences of other streams."""

    def fences(self) -> Fences:
        """All fences so far, the latest of every stream."""

    def on(self, lane: Lane, after: Fences = ()) -> AbstractContextManager[None]:
        """Queue what the body does on this lane, behind ``after``.

        Nothing that a body which raises has queued is still under way when the error comes out:
        its frames go back to their pools then.
        """

    def passed(self, fences: Fences) -> None:
        """These have been waited for on the host: ``fences()`` may leave them out from now on."""

    def mark(self, lane: Lane) -> Event:
        """An event behind all that was queued on the lane; ``synchronize`` waits on the host."""

    def wait(self, event: Event) -> None:
        """What is queued on the current stream from here on runs behind ``event``."""


class _Done:
    def synchronize(self) -> None:
        return None


class CpuStreams:
    """A CPU has finished by the time a call returns, so there is nothing to order."""

    def fence(self, stream: object | None) -> None:
        return None

    def fences(self) -> Fences:
        return ()

    def on(self, lane: Lane, after: Fences = ()) -> AbstractContextManager[None]:
        return nullcontext()

    def passed(self, fences: Fences) -> None:
        return None

    def mark(self, lane: Lane) -> Event:
        return _Done()

    def wait(self, event: Event) -> None:
        event.synchronize()


class CudaStreams:
    """A stream of our own for each lane but the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: dict[Lane, torch.cuda.Stream] = {}
        for lane in (Lane.PACK, Lane.DRAIN, Lane.FETCH, Lane.LOAD):
            self._own[lane] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._compute: torch.cuda.Stream | None = None
        self._fences: dict[int, torch.cuda.Event] = {}

    def fence(self, stream: object | None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(f"stream must be a torch.cuda.Stream or None, got {stream!r}")
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        with self._lock:
            others = [e for s, e in self._fences.items() if s != stream.cuda_stream]
            self._compute = stream
            self._fences[stream.cuda_stream] = event
        for other in others:  # pages that this one may be given were theirs
            stream.wait_event(other)

    def fences(self) -> Fences:
        with self._lock:
            return tuple(self._fences.values())

    def on(self, lane: Lane, after: Fences = ()) -> AbstractContextManager[None]:
        return _On(self, lane, self._stream(lane), after)

    def passed(self, fences: Fences) -> None:
        gone = set(map(id, fences))
        with self._lock:
            self._fences = {s: e for s, e in self._fences.items() if id(e) not in gone}

    def mark(self, lane: Lane) -> Event:
        # Blocking: a waiting worker must not burn a core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(lane))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        if lane is not Lane.COMPUTE:
            return self._own[lane]
        # Ops may be started by a worker thread, whose current stream is not the caller's.
        with self._lock:
            known = self._compute
        return torch.cuda.current_stream(self._device) if known is None else known


class _On:
    """A class of its own and no generator around ``torch.cuda.stream``: half of what a batch's
    calls into torch cost was this."""

    __slots__ = ("_after", "_before", "_lane", "_stream", "_streams")

    def __init__(
        self, streams: CudaStreams, lane: Lane, stream: torch.cuda.Stream, after: Fences
    ) -> None:
        self._streams = streams
        self._lane = lane
        self._stream = stream
        self._after = after

    def __enter__(self) -> None:
        # What was current there, and what is current now: setting a stream sets its device too.
        self._before = (torch.cuda.current_stream(self._stream.device), torch.cuda.current_stream())
        torch.cuda.set_stream(self._stream)
        try:
            for event in self._after:
                assert isinstance(event, torch.cuda.Event)
                self._stream.wait_event(event)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._restore()
        if kind is not None:
            self._stream.synchronize()
        elif self._lane is Lane.COMPUTE:
            # Later packs of what was copied here have to see it.
            self._streams.fence(self._stream)

    def _restore(self) -> None:
        for stream in self._before:
            torch.cuda.set_stream(stream)


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
