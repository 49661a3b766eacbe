"""Who waits for operations is told once: when they and what came of them have ended, with the first
error; or when the disk hangs; or when nothing will come any more."""

from collections.abc import Collection
from math import inf
from typing import Any, cast

import pytest

from kvtier.core.ops import Op, OpKind
from kvtier.errors import StoreError
from kvtier.watching import Watches


class FakeDeadlines:
    """A write hangs from the time that ``hang`` says on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hang: dict[int, float] = {}
        self.alarms: list[set[int]] = []

    def clock(self) -> float:
        return self.now

    def awaited(self, op_ids: Collection[int]) -> None:
        self.alarms.append(set(op_ids))

    def writes_hang(self, op_ids: Collection[int]) -> float:
        return min((self.hang[i] for i in op_ids if i in self.hang), default=inf)


@pytest.fixture
def told() -> list[BaseException | None]:
    return []


def test_what_came_of_it_is_waited_for_too(told: list[BaseException | None]) -> None:
    times = FakeDeadlines()
    watches = Watches(cast(Any, times))
    watches.add({1, 2}, told.append, (OpKind.STORE,))
    first, second = OSError("first"), OSError("second")
    assert watches.ended(2, [Op(3, OpKind.STORE, ()), Op(4, OpKind.DROP, ())], first) == []
    assert watches.ended(4, [], None) == []
    assert watches.ended(1, [Op(5, OpKind.RESTORE, ())], second) == []
    assert times.alarms == [{1, 2}, {1, 3}, {3}]
    (outcome,) = watches.ended(3, [], None)
    assert told == []  # by the pump, later
    outcome()
    assert told == [first]
    assert watches.give_up(first) == watches.ended(3, [], None) == []


def test_a_disk_that_hangs_is_told_once(told: list[BaseException | None]) -> None:
    times = FakeDeadlines()
    watches = Watches(cast(Any, times))
    times.hang = {1: 5.0, 2: 7.0}
    watches.add({1}, told.append, ())
    watches.add({2}, told.append, ())
    assert watches.hung() == ([], 5.0)
    times.now = 5.0
    (outcome,), later = watches.hung()
    outcome()
    assert later == 7.0 and isinstance(told[0], StoreError)
    assert watches.hung() == ([], 7.0)
    assert watches.ended(1, [], None) == []
    (outcome,) = watches.give_up(KeyError())
    outcome()
    assert len(told) == 2 and isinstance(told[1], KeyError)
    times.now = 9.0
    assert watches.hung() == ([], inf)
