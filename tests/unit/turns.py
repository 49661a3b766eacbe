"""Threads that take turns, and barriers that they wait at: the groups of warps of one program.

Whose turn it is, is drawn from a seed whenever one waits or arrives; if all wait, that is an error.
Copies come in between, when it suits them.
"""

import random
import threading
from collections.abc import Callable
from typing import Any


class Deadlock(AssertionError):
    pass


class Turns:
    """Which of several threads runs: one at a time, the next one drawn whenever one stops."""

    def __init__(self, seed: int, count: int) -> None:
        self.copies: list[Callable[[], None]] = []
        self.random = random.Random(seed)
        self.condition = threading.Condition()
        self.ready: list[Callable[[], bool] | None] = [lambda: True] * count
        self.running = -1
        self.broken: BaseException | None = None
        with self.condition:
            self._draw()

    def _draw(self) -> None:
        while self.copies:
            can = any(ready is not None and ready() for ready in self.ready)
            if can and self.random.random() < 0.5:
                break
            self.copies.pop(self.random.randrange(len(self.copies)))()
        some = [i for i, ready in enumerate(self.ready) if ready is not None and ready()]
        if some:
            self.running = self.random.choice(some)
        elif any(self.ready):
            self.broken = self.broken or Deadlock(f"all wait: {self.ready}")
        self.condition.notify_all()

    def wait(self, me: int, ready: Callable[[], bool]) -> None:
        """Gives the turn away; returns when it is this thread's and ``ready``."""
        with self.condition:
            self.ready[me] = ready
            self._draw()
            self.condition.wait_for(lambda: self.running == me or self.broken is not None)
            if self.broken is not None:
                raise self.broken

    def start(self, me: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.running == me or self.broken is not None)
            if self.broken is not None:
                raise self.broken

    def end(self, me: int, error: BaseException | None) -> None:
        with self.condition:
            self.ready[me] = None
            self.broken = self.broken or error
            self._draw()


class Barrier:
    """An mbarrier: a phase ends with its last arrival."""

    def __init__(self) -> None:
        self.count = self.left = 0
        self.phase = self.bytes = 0

    def arrive(self, count: int, expected: int = 0) -> None:
        """``expected`` bytes are still to come in this phase; negative: they have come."""
        assert self.count, "not initialised"
        assert self.left >= count, "more arrivals than a phase has"
        self.left -= count
        self.bytes += expected
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity, now under way or the last one, has ended."""
        return (self.phase & 1) != parity


class Barriers:
    """Several of them in shared memory."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers

    def index(self, i: Any) -> "Barriers":
        return Barriers([self.barriers[int(i)]])
