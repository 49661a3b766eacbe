"""Parts that break: a transfer whose calls raise, a core with a bug.  Nothing leaks or hangs."""

from collections.abc import Callable
from typing import Any

import pytest

import kvtier
from kvtier.testing import ManualTransfer
from kvtier.tokens import pack
from kvtier.types import Tier
from tests.shell.kit import LAYOUT, config, ends, feed, fill, free, make, prompt

Done = Callable[[int, BaseException | None], None]


class Refusing(ManualTransfer):
    """Raises from ``start`` as often as told, before it takes the op or after it has ended it."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[BaseException] = []
        self.ends_it_first = False

    def start(self, op: kvtier.Op, *, packed: Callable[[], None], done: Done) -> None:
        if not self.refusals:
            super().start(op, packed=packed, done=done)
            return
        if self.ends_it_first:
            done(len(op.parts), None)
        raise self.refusals.pop(0)


def refusing() -> tuple[kvtier.Cache, Refusing]:
    """A cache with one prompt of two pages in host memory alone."""
    transfer = Refusing()
    cache = kvtier.Cache(LAYOUT, config(), model="m", transfer=transfer)
    fill(cache, prompt(9))
    transfer.finish_all()
    assert cache.evict(Tier.GPU, 9) == 2
    return cache, transfer


# ------------------------------------------------------------------ a start that raises


def test_an_op_that_cannot_be_started_is_an_op_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache, transfer = refusing()
    transfer.refusals = [RuntimeError("device lost")]
    with cache.lease(prompt(9)) as lease:
        assert lease.ready.result(timeout=0) == 0
        assert "device lost" in caplog.text
    assert cache.stats().tiers[Tier.GPU].in_flight == 0
    assert free(cache) == 16
    with cache.lease(prompt(9)) as lease:  # and the next one may work
        transfer.finish_all()
        assert lease.ready.result(timeout=0) == 8
    cache.check()
    cache.close()


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_ops_behind_one_that_cannot_be_started_are_started(error: BaseException) -> None:
    cache, transfer = refusing()
    fill(cache, prompt(9, 1))
    transfer.finish_all()
    cache.evict(Tier.GPU, 9)
    transfer.refusals = [error]
    told: list[BaseException | None] = []

    def two_at_once() -> None:
        with cache._pump as core:
            for seed in (0, 1):
                record, ops = core.open(pack(prompt(9, seed)), opened_at="")
                cache._pump.plan(ops)
                cache._pump.watch([op.id for op in ops], told.append)
                records.append(record)

    records: list[Any] = []
    if isinstance(error, Exception):
        two_at_once()
    else:  # what ends the process goes on, once the others are started
        with pytest.raises(KeyboardInterrupt):
            two_at_once()
    assert told == [error]
    assert ends(transfer.pending) == ["restore"]
    transfer.finish_all()
    assert told == [error, None]
    assert [(r.state.value, r.length) for r in records] == [("active", 0), ("active", 8)]
    with cache._pump:
        for record in records:
            cache._pump.release(record)
    cache.check()
    cache.close()


def test_an_op_that_ended_before_its_start_raised_ends_once() -> None:
    cache, transfer = refusing()
    transfer.refusals, transfer.ends_it_first = [RuntimeError("too late")], True
    with cache.lease(prompt(9)) as lease:
        assert lease.ready.result(timeout=0) == 8
    cache.check()
    cache.close()


# ------------------------------------------------------------------ a step that cannot be left


def broken_fence(_: object) -> None:
    raise RuntimeError("illegal memory access")


@pytest.mark.parametrize("body_raises", [False, True])
def test_leaving_a_step_gives_its_leases_back_whatever_the_fence_says(
    body_raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, transfer = make()
    kept, gone = cache.lease(prompt(9)), cache.lease(prompt(9, 1))

    def body() -> None:
        with cache.step([(kept, prompt(9)), (gone, prompt(9, 1))]):
            gone.release()
            monkeypatch.setattr(transfer, "fence", broken_fence)
            if body_raises:
                _ = 1 // 0

    with pytest.raises(ZeroDivisionError if body_raises else RuntimeError):
        body()
    monkeypatch.undo()
    assert [info.id for info in cache.leases()] == [kept._record.id]
    assert kept.num_tokens == 0  # what was queued may not have run
    feed(cache, kept, prompt(9))
    kept.release()
    transfer.finish_all()
    assert cache.match(prompt(9)).tokens == 8
    cache.check()
    cache.close()


def test_a_commit_that_fails_releases_what_was_released_in_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, transfer = make()
    kept, gone = cache.lease(prompt(9)), cache.lease(prompt(9, 1))

    def refuse(*_: object) -> Any:
        raise kvtier.LeaseError("not now")

    def body() -> None:
        with cache.step([(kept, prompt(9)), (gone, prompt(9, 1))]):
            gone.release()
            monkeypatch.setattr(cache._core, "commit", refuse)

    with pytest.raises(kvtier.LeaseError, match="not now"):
        body()
    monkeypatch.undo()
    assert [info.id for info in cache.leases()] == [kept._record.id]
    kept.release()
    transfer.finish_all()
    cache.check()
    cache.close()
