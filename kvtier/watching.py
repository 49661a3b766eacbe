"""Who waits until operations have ended, with what is to be told then: flushes, and clears.

Called with the pump's lock held, and tells nobody itself.  Knows nothing of pages or bytes.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from kvtier.core.ops import Op, OpKind
from kvtier.deadlines import Deadlines
from kvtier.errors import StoreError

__all__ = ["Watches"]

Then = Callable[[BaseException | None], None]
Outcome = Callable[[], None]


class _Watch:
    """Waits until some ops have ended, and those of certain kinds that followed from them."""

    __slots__ = ("error", "follow", "then", "waiting")

    def __init__(self, waiting: set[int], follow: frozenset[OpKind], then: Then) -> None:
        self.waiting = waiting
        self.follow = follow
        self.then = then
        self.error: BaseException | None = None


class Watches:
    """All of one cache.  What is to be told is returned, for the pump to tell."""

    __slots__ = ("_deadlines", "_open")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._open: list[_Watch] = []

    def add(self, ops: set[int], then: Then, follow: Iterable[OpKind]) -> None:
        """These are under way; with the first error among them, ``then`` is to be told."""
        self._open.append(_Watch(ops, frozenset(follow), then))
        self._deadlines.awaited(ops)

    def ended(self, op_id: int, ops: Iterable[Op], error: BaseException | None) -> list[Outcome]:
        """One has ended, and ``ops`` came of it."""
        told: list[Outcome] = []
        for watch in [w for w in self._open if op_id in w.waiting]:
            watch.waiting.remove(op_id)
            watch.waiting.update(op.id for op in ops if op.kind in watch.follow)
            watch.error = watch.error or error
            if watch.waiting:
                self._deadlines.awaited(watch.waiting)
            else:
                told.append(self._end(watch, watch.error))
        return told

    def hung(self) -> tuple[list[Outcome], float]:
        """Of those who wait for a disk that hangs; and when there may be others."""
        told: list[Outcome] = []
        now, first = self._deadlines.clock(), inf
        for watch in list(self._open):
            ends = self._deadlines.writes_hang(watch.waiting)
            if ends > now:
                first = min(first, ends)
            else:
                told.append(self._end(watch, StoreError("the disk hangs: it has written nothing")))
        return told, first

    def give_up(self, error: BaseException) -> list[Outcome]:
        """Nothing that they wait for will come."""
        return [self._end(watch, error) for watch in list(self._open)]

    def _end(self, watch: _Watch, error: BaseException | None) -> Outcome:
        self._open.remove(watch)
        return partial(watch.then, error)
