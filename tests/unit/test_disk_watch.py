"""When a store is taken to hang, by a clock of the test's."""

from math import inf
from types import SimpleNamespace

import pytest

from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.data import disk_watch
from kvtier.data.disk_watch import DiskWatch
from kvtier.types import Tier


def op(number: int, kind: OpKind, source: Tier, target: Tier) -> Op:
    return Op(number, kind, (Part(Kind.HISTORY, source, (0,), target, (0,)),))


READ = op(1, OpKind.RESTORE, Tier.DISK, Tier.GPU)
WRITE = op(2, OpKind.STORE, Tier.CPU, Tier.DISK)
DROP = op(3, OpKind.DROP, Tier.DISK, Tier.DISK)
OTHERS = (
    op(4, OpKind.RESTORE, Tier.CPU, Tier.GPU),
    op(5, OpKind.PACK, Tier.GPU, Tier.CPU),
    op(6, OpKind.COPY, Tier.GPU, Tier.GPU),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(disk_watch, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


@pytest.mark.parametrize("work", [READ, WRITE, DROP])
def test_what_comes_of_anything_counts(work: Op, clock: SimpleNamespace) -> None:
    watch = DiskWatch(30.0)
    for other in OTHERS:
        watch.started(other)
    assert watch.patience() == inf, "nothing of it is the disk's"
    watch.started(work)
    clock.now += 10
    for other in OTHERS:
        watch.ended(other)
    watch.started(op(7, OpKind.STORE, Tier.CPU, Tier.DISK))  # more work is no progress
    assert watch.patience() == 20
    watch.heard()
    assert watch.patience() == 30
    clock.now += 29
    watch.ended(work)
    assert watch.patience() == 30, "the other has its turn"
    clock.now += 31
    assert watch.patience() == -1
    watch.ended(op(7, OpKind.STORE, Tier.CPU, Tier.DISK))
    assert watch.patience() == inf
    clock.now += 100
    watch.started(work)  # after a rest it has all of its time
    assert watch.patience() == 30


def test_for_ever(clock: SimpleNamespace) -> None:
    watch = DiskWatch(inf)
    watch.started(READ)
    clock.now += 1e9
    assert watch.patience() == inf
