"""What is asked of CUDA, on a CUDA that only takes notes."""

from typing import Any

import pytest
import torch

from kvtier.data.jobs import Workers
from kvtier.data.streams import CudaStreams, Lane
from kvtier.data.transfer import _make_current

Log = list[tuple[Any, ...]]


class Stream:
    def __init__(self, device: object = None) -> None:
        self.cuda_stream = id(self)
        self.device = device
        self.log: Log = []

    def wait_event(self, event: object) -> None:
        self.log.append(("wait", event))

    def synchronize(self) -> None:
        self.log.append(("synchronize",))


class Event:
    def __init__(self, blocking: bool = False) -> None: ...

    def record(self, stream: Stream) -> None:
        stream.log.append(("record", self))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    current = [Stream()]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    return CudaStreams(torch.device("cuda", 0))


def test_compute_waits_for_the_fences_of_other_streams(cuda: CudaStreams) -> None:
    one, two = Stream(), Stream()
    cuda.fence(one)
    cuda.fence(two)  # the caller's stream now
    fences = cuda.fences()
    assert len(fences) == 2
    two.log.clear()
    with cuda.on(Lane.COMPUTE, fences):
        two.log.append(("copy",))
    assert two.log[:3] == [("wait", fences[0]), ("wait", fences[1]), ("copy",)]
    # What was copied is fenced itself, in place of what that stream had queued before.
    (kind, event), after = two.log[3], cuda.fences()
    assert kind == "record"
    assert set(after) == {fences[0], event}


@pytest.mark.parametrize("lane", list(Lane))
def test_what_a_body_that_raises_has_queued_is_over_when_it_has_raised(
    cuda: CudaStreams, lane: Lane
) -> None:
    mine = Stream()
    cuda.fence(mine)
    stream = cuda._stream(lane)
    before = torch.cuda.current_stream()
    with pytest.raises(ZeroDivisionError), cuda.on(lane):
        assert torch.cuda.current_stream() is stream
        stream.log.append(("copy",))  # type: ignore[attr-defined]
        raise ZeroDivisionError
    assert torch.cuda.current_stream() is before
    assert stream.log[-2:] == [("copy",), ("synchronize",)]  # type: ignore[attr-defined]
    stream.log.clear()  # type: ignore[attr-defined]
    with cuda.on(lane):
        pass
    assert ("synchronize",) not in stream.log  # type: ignore[attr-defined]


def test_a_stream_waits_for_the_fences_of_others(cuda: CudaStreams) -> None:
    """Its pages may have been theirs: read there until now, or the target of a copy there."""
    one, two = Stream(), Stream()
    cuda.fence(one)
    with cuda.on(Lane.COMPUTE):
        pass  # a copy, on the stream that was fenced last
    ((_, copied),) = one.log[1:]
    cuda.fence(two)
    assert [entry for entry in two.log if entry[0] == "wait"] == [("wait", copied)]
    one.log.clear()
    cuda.fence(one)
    assert [entry for entry in one.log if entry[0] == "wait"] == [("wait", two.log[0][1])]
    cuda.passed(cuda.fences())
    two.log.clear()
    cuda.fence(two)
    assert [entry[0] for entry in two.log] == ["record"]


def test_fences_that_have_passed_are_left_out_and_later_ones_are_not(cuda: CudaStreams) -> None:
    one, two = Stream(), Stream()
    cuda.fence(one)
    cuda.fence(two)
    old = cuda.fences()
    cuda.fence(one)  # the next step, queued while an op waited for the last one
    cuda.passed(old)
    (left,) = cuda.fences()
    assert left not in old
    assert ("record", left) in one.log


def test_workers_make_their_device_current_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    ran: list[int] = []
    device = torch.device("cuda", 1)
    workers = Workers("test", 2, prepare=lambda: _make_current(device))
    for _ in range(8):
        workers.submit(ran.append)
    workers.stop()
    for thread in workers.threads:
        thread.join(300)
        assert not thread.is_alive()
    assert len(ran) == 8
    assert asked == [device, device]
