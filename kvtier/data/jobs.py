"""One started op: how far it got, and that it ends exactly once.  And the threads that run it."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Protocol

from kvtier.core.ops import Op, OpKind
from kvtier.data.arrivals import Arrival
from kvtier.data.streams import Fences

__all__ = ["Job", "Task", "Turns", "Workers"]

logger = logging.getLogger("kvtier")

Done = Callable[[int, BaseException | None], None]


class Job:
    """An op under way, cut into tasks that may run on several threads.

    Whoever starts it holds one share of it and takes another for every task; with the last share
    given back it ends.  What was delivered is the leading run of parts before the first failure,
    whatever the order in which tasks ran.
    """

    __slots__ = (
        "_done",
        "_ended",
        "_error",
        "_holds",
        "_lock",
        "_packed",
        "_shares",
        "begun",
        "deadline",
        "delivered",
        "early",
        "fences",
        "heard",
        "late",
        "op",
        "staged",
    )

    def __init__(
        self,
        op: Op,
        *,
        packed: Callable[[], None],
        done: Done,
        ended: Callable[["Job"], None],
        fences: Fences = (),
        late: tuple[Arrival, ...] = (),
        deadline: float | None = None,
    ) -> None:
        self.op = op
        self.fences = fences
        self.deadline = deadline
        self.delivered = len(op.parts)
        """Parts before the first that failed so far."""
        self.late = late
        """What it has to run behind, and may not be queued yet."""
        self.begun = 0
        """Parts that tasks have taken on, from the front."""
        self.heard = -inf
        """When something was last read for it, on the monotonic clock."""
        self.early = False
        """It ends before its copies do."""
        self.staged = 0
        """Frames counted into the staging backlog."""
        self._packed: Callable[[], None] | None = packed
        self._done = done
        self._ended = ended
        self._error: BaseException | None = None
        self._shares = 1
        self._holds = 0
        self._lock = threading.Lock()

    def share(self) -> None:
        """One more task is under way."""
        with self._lock:
            assert self._shares > 0, "the op has ended"
            self._shares += 1

    def cut(self, part: int, error: BaseException | None = None) -> None:
        """``part`` and those behind it are not delivered; ``error`` is why, if it is the first."""
        with self._lock:
            if part < self.delivered:
                self.delivered, self._error = part, error

    def begin(self, start: int, stop: int) -> bool:
        """A task takes these parts on.  False: there is no need any more."""
        with self._lock:
            if start >= self.delivered:
                return False
            self.begun = max(self.begun, stop)
            return True

    def drop(self, error: BaseException) -> None:
        """Parts that no task has taken on are not delivered, because of ``error``."""
        with self._lock:
            if self.begun < self.delivered:
                self.delivered, self._error = self.begun, error

    @property
    def error(self) -> BaseException | None:
        return self._error

    def release_sources(self) -> None:
        """Tell the caller, once, that a PACK's source frames may be reused."""
        with self._lock:
            packed, self._packed = self._packed, None
        if packed is not None:
            self._call(packed)

    def end_share(self) -> None:
        """A task is over.  The last one reports the op's end."""
        with self._lock:
            assert self._shares > 0, "the op has ended"
            self._shares -= 1
            if self._shares:
                return
            self._holds += 1
        try:
            if self.op.kind is OpKind.PACK:
                self.release_sources()
            delivered, error = self.delivered, self._error
            self._call(lambda: self._done(delivered, error))
        finally:
            self.let_go()

    def hold(self) -> None:
        """It has not ended for its transfer, whatever its caller is told, until ``let_go``."""
        with self._lock:
            self._holds += 1

    def let_go(self) -> None:
        with self._lock:
            self._holds -= 1
            over = not self._holds and not self._shares
        if over:
            self._ended(self)

    def behind(self) -> Fences:
        """All it has to run behind.  Blocks until what is late is queued."""
        return (*self.fences, *(arrival.whole for arrival in self.late))

    @property
    def blocked(self) -> bool:
        """Whether ``behind`` would block."""
        return not all(arrival.queued for arrival in self.late)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except BaseException:
            # The op itself has ended properly, and other ops need this thread.  Everything counts:
            # a future's callback may raise CancelledError, which is no Exception.
            logger.exception("a completion callback of op %d failed", self.op.id)


class Workers:
    """Daemon threads that take tasks from one queue, first in, first out.

    ``prepare`` is called once on each.  A task that raises ends no thread.
    """

    def __init__(
        self, name: str, count: int, *, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._prepare = prepare
        self._tasks: queue.SimpleQueue[Callable[[int], None] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._run, args=(i,), name=f"kvtier-{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, task: Callable[[int], None]) -> None:
        """Queue a task; it is called with the number of the thread that runs it."""
        self._tasks.put(task)

    def stop(self) -> None:
        """Let every thread end once the queue is empty.  Does not wait."""
        for _ in self.threads:
            self._tasks.put(None)

    def _run(self, number: int) -> None:
        _guarded(self._prepare)
        while (task := self._tasks.get()) is not None:
            _guarded(partial(task, number))
            del task  # while this thread waits, it must not keep alive whom it worked for


class Task(Protocol):
    """What ``Turns`` runs, a piece at a time."""

    @property
    def deadline(self) -> float | None:
        """On the monotonic clock: from then on it runs whether it is ready or not."""

    def ready(self) -> bool:
        """Whether the next piece can be done without waiting.  Must not block."""

    def run(self) -> bool:
        """Do the next piece; whether there are more.  One that raises is over."""

    def absorb(self, other: Any) -> bool:
        """Whether it has taken over the task that was to come behind it.  Not asked once its own
        turn may have come."""


class Turns:
    """One daemon thread that takes tasks from several queues in turn, each first in, first out.

    Where the first task of a queue is not ready the other queues go on.
    """

    def __init__(
        self, name: str, queues: int, *, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._prepare = prepare
        self._queues: tuple[deque[Task], ...] = tuple(deque() for _ in range(queues))
        self._changed = threading.Condition()
        self._stopping = False
        self.threads = [threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)]
        self.threads[0].start()

    def submit(self, number: int, task: Task) -> None:
        """Queue a task behind those of the same queue, or have the last of them absorb it."""
        with self._changed:
            queue = self._queues[number]
            if len(queue) < 2 or not queue[-1].absorb(task):
                queue.append(task)
            self._changed.notify()

    def wake(self) -> None:
        """Something that tasks wait for has changed."""
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """Let the thread end once the queues are empty.  Does not wait."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _run(self) -> None:
        _guarded(self._prepare)
        number = 0
        while (number := self._next(number)) >= 0:
            more: list[bool] = []
            task = self._queues[number][0]
            _guarded(lambda task=task, more=more: more.append(task.run()))  # type: ignore[misc]
            if not any(more):
                with self._changed:
                    self._queues[number].popleft()
            number += 1
            del task  # as above

    def _next(self, first: int) -> int:
        """The queue whose turn it is, from ``first`` on; -1 when all is done.  Blocks."""
        count = len(self._queues)
        with self._changed:
            while True:
                deadlines = []
                for number in ((first + i) % count for i in range(count)):
                    if not self._queues[number]:
                        continue
                    deadline = self._queues[number][0].deadline
                    late = deadline is not None and deadline <= time.monotonic()
                    if late or self._queues[number][0].ready():
                        return number
                    if deadline is not None:
                        deadlines.append(deadline)
                if self._stopping and not any(self._queues):
                    return -1
                left = min(deadlines) - time.monotonic() if deadlines else None
                self._changed.wait(left)


def _guarded(call: Callable[[], None]) -> None:
    try:
        call()
    except BaseException:
        # Its op has ended already; without this thread ``close`` would wait for ever.
        logger.exception("a task of the data plane failed")
