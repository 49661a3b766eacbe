"""Parts that break: a transfer whose calls raise, a core with a bug.  Nothing leaks or hangs."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import kvtier
from kvtier.assembly import geometry_of
from kvtier.data.transfer import DeviceTransfer
from kvtier.seams import DiskHangs
from kvtier.testing import ManualTransfer, MemoryStore
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


def test_a_step_that_cannot_begin_keeps_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, transfer = make()
    with cache.lease(prompt(9)) as lease:
        monkeypatch.setattr(transfer, "fence", broken_fence)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            with cache.step([(lease, prompt(9))]):
                raise AssertionError("entered")
        monkeypatch.undo()
        assert lease.num_tokens == 0
        feed(cache, lease, prompt(9))
    transfer.finish_all()
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


# ------------------------------------------------------------------ a bug in the core


Waiting = tuple[kvtier.Cache, ManualTransfer, dict[str, "Future[Any]"], list[kvtier.Lease]]


def waiting_for_everything() -> Waiting:
    """A cache with futures that have not resolved, and the leases behind them."""
    cache, transfer = make(gpu=32, cpu=32)
    for seed in (0, 1):
        fill(cache, prompt(9, seed))
    transfer.finish_all()
    cache.evict(Tier.GPU, 9)
    restoring = cache.lease(prompt(9))
    parked = cache.lease(prompt(9, 2))
    feed(cache, parked, prompt(9, 2))
    futures: dict[str, Future[Any]] = {
        "ready": restoring.ready,
        "paused": parked.pause(),
        "flush": cache.flush(to=Tier.CPU),
    }
    assert not any(future.done() for future in futures.values())
    return cache, transfer, futures, [restoring, parked]


@pytest.mark.parametrize("bug", [AssertionError("I3"), KeyError(5), kvtier.InvariantError("I3")])
def test_a_bug_met_by_a_completion_stops_the_cache_and_wakes_everybody(
    bug: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, transfer, futures, leases = waiting_for_everything()

    def finish(*_: object) -> Any:
        raise bug

    monkeypatch.setattr(cache._core, "finish", finish)
    with pytest.raises(kvtier.InvariantError):
        transfer.finish(transfer.pending[0])
    monkeypatch.undo()
    started = len(transfer.started)
    for name, future in futures.items():
        with pytest.raises(kvtier.InvariantError):
            future.result(timeout=0)
        assert future.exception(timeout=0).__cause__ is bug, name  # type: ignore[union-attr]
    transfer.finish_all()  # what is under way ends in peace
    for call in (lambda: cache.match([1]), lambda: cache.lease([1]), cache.stats, cache.check):
        with pytest.raises(kvtier.InvariantError, match="stopped after a bug"):
            call()
    leases[0].release()
    with pytest.raises(kvtier.LeaseError, match="2 open"):
        cache.close()
    leases[1].release()
    assert transfer.closed
    assert len(transfer.started) == started


def test_a_bug_met_by_a_caller_stops_the_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, transfer, futures, leases = waiting_for_everything()

    def evict(*_: object) -> Any:
        raise KeyError(7)

    monkeypatch.setattr(cache._core, "evict", evict)
    with pytest.raises(KeyError, match="7"):
        cache.evict(Tier.GPU, 1)
    for future in futures.values():
        with pytest.raises(kvtier.InvariantError):
            future.result(timeout=0)
    with pytest.raises(kvtier.InvariantError, match="stopped after a bug"):
        cache.stats()
    transfer.finish_all()
    with pytest.raises(kvtier.LeaseError, match="2 open"):
        cache.close()
    assert [lease.state.value for lease in leases] == ["restoring", "restoring"]


def test_a_caller_that_meets_the_bug_of_a_completion_is_told_and_lets_go_of_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, _ = make()

    def bug() -> None:
        raise AssertionError("I3")

    cache._pump.post(bug)
    with pytest.raises(kvtier.InvariantError) as caught:
        cache.stats()
    assert isinstance(caught.value.__cause__, AssertionError)
    assert not cache._pump._lock.locked()
    cache.close()


def test_a_bug_met_while_closing_closes_the_transfer_and_wakes_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, transfer, futures, leases = waiting_for_everything()

    def release(*_: object) -> Any:
        raise AssertionError("I4")

    monkeypatch.setattr(cache._core, "release", release)
    with pytest.raises(kvtier.LeaseError, match="2 open"):
        cache.close()
    assert transfer.closed
    for future in futures.values():
        with pytest.raises(kvtier.InvariantError):
            future.result(timeout=0)
    assert len(leases) == 2


def test_a_mistake_of_the_caller_is_no_bug(cache: kvtier.Cache) -> None:
    with cache.lease(prompt(9), reserve=9) as lease:
        for bad in ("a", None, 1.5):
            with pytest.raises(kvtier.ConfigError):
                lease.slot_mapping(bad, 2)  # type: ignore[arg-type]
            with pytest.raises(kvtier.ConfigError):
                lease.slot_mapping(0, bad)  # type: ignore[arg-type]
        with pytest.raises(kvtier.LeaseError):
            lease.slot_mapping(2, 1)
        assert len(lease.slot_mapping(0, 2)["latent"]) == 2


def test_a_transfer_that_cannot_be_closed_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, transfer, futures, leases = waiting_for_everything()

    def close() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(transfer, "close", close)
    with pytest.raises(RuntimeError, match="device lost"):
        cache.close()
    assert {lease.state.value for lease in leases} == {"released"}
    assert futures["ready"].result(timeout=0) == 0
    assert futures["paused"].result(timeout=0) is None
    with pytest.raises(kvtier.CacheClosed):
        futures["flush"].result(timeout=0)


# ------------------------------------------------------------------ a disk that hangs


def test_a_disk_that_hangs_costs_what_it_was_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on: the device waits for host copies, and those for nobody."""
    goes_on = threading.Event()
    store = MemoryStore()
    put_group = store.put_group

    def hang(records: Any) -> None:
        assert goes_on.wait(300)
        put_group(records)

    monkeypatch.setattr(store, "put_group", hang)
    parts = config(gpu=6, cpu=64)
    transfer = DeviceTransfer(
        LAYOUT, geometry_of(LAYOUT, parts, store), device="cpu", store=store, config=parts
    )
    stores = {Tier.DISK: store}
    with kvtier.Cache(LAYOUT, parts, model="m", transfer=transfer, stores=stores) as cache:
        try:
            for seed in range(8):  # four pages each
                fill(cache, prompt(17, seed))
                cache.flush(to=Tier.CPU).result(timeout=300)
            assert cache.stats().storing > 0
            assert not store.keys()
            assert cache.match(prompt(18, 0)).cpu_tokens == 16
        finally:
            goes_on.set()
        cache.flush().result(timeout=300)
        assert len(store.keys()) == 8 * 4
        cache.check()


class Hanging(ManualTransfer):
    """Ends what has nothing to do with the disk, and tells that this hangs."""

    def close(self) -> None:
        for op in list(self.pending):
            if op.kind is kvtier.OpKind.PACK:
                self.finish(op)
        self.closed = True
        raise DiskHangs("the disk has done nothing for 30 s")


class Watched(MemoryStore):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


def test_close_does_not_wait_for_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """Everything that waits is told, and a store that is in use stays open."""
    transfer, store = Hanging(), Watched()
    cache = kvtier.Cache(LAYOUT, config(), model="m", transfer=transfer, stores={Tier.DISK: store})
    fill(cache, prompt(9))
    transfer.finish_all()
    cache.evict(Tier.GPU, 9)
    cache.evict(Tier.CPU, 9)
    lease = cache.lease(prompt(9))
    ready = lease.ready
    prefetch = cache.prefetch(prompt(9))
    fill(cache, prompt(9, 1))
    flushed = cache.flush()
    with pytest.raises(kvtier.LeaseError, match="closed with 1 open lease, now released"):
        cache.close()
    assert cache.closed
    assert not store.closed
    assert "done nothing for 30 s: the cache was closed without waiting" in caplog.text
    assert ready.result(0) == 0
    assert prefetch.result(0) == 0
    with pytest.raises(kvtier.CacheClosed):
        flushed.result(0)
    for op in list(transfer.pending):  # it moves again, for nobody
        transfer.finish(op)
    cache.close()


@pytest.mark.parametrize("what", ["put_group", "read_into"])
@pytest.mark.parametrize("drain", [True, False])
def test_close_over_threads_that_hang_in_the_store(
    what: str, drain: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, began = threading.Event(), threading.Event()
    store = Watched()
    parts = config(disk_stall_s=1.5)
    transfer = DeviceTransfer(
        LAYOUT, geometry_of(LAYOUT, parts, store), device="cpu", store=store, config=parts
    )
    stores = {Tier.DISK: store}
    cache = kvtier.Cache(LAYOUT, parts, model="m", transfer=transfer, stores=stores)
    fill(cache, prompt(9))
    cache.flush().result(timeout=300)
    for tier in (Tier.GPU, Tier.CPU):
        cache.evict(tier, 9)
    call = getattr(store, what)

    def hang(*args: Any) -> Any:
        began.set()
        assert goes_on.wait(300)
        return call(*args)

    monkeypatch.setattr(store, what, hang)
    if what == "put_group":
        fill(cache, prompt(9, 1))
        ended: Future[Any] = cache.flush()
    else:
        ended = cache.prefetch(prompt(9))
    assert began.wait(300)
    try:
        cache.close(drain=drain)
        assert ended.done()
        assert not store.closed
        assert "closed without waiting" in caplog.text
        assert any(thread.is_alive() for thread in transfer._threads)
    finally:
        goes_on.set()
    for thread in transfer._threads:
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.parametrize("what", ["touch", "close"])
def test_saving_recency_and_closing_wait_for_no_disk_that_hangs(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is under way any more when the disk begins to hang."""
    goes_on = threading.Event()
    transfer, store = ManualTransfer(), Watched()
    parts = config(disk_stall_s=0.2)
    cache = kvtier.Cache(LAYOUT, parts, model="m", transfer=transfer, stores={Tier.DISK: store})
    for _ in range(2):  # the second one uses what is on disk by then
        fill(cache, prompt(9))
        transfer.finish_all()
    call = getattr(store, what)

    def hang(*args: Any) -> None:
        assert goes_on.wait(300)
        call(*args)

    monkeypatch.setattr(store, what, hang)
    try:
        if what == "touch":
            with pytest.raises(kvtier.StoreError, match="disk has done nothing"):
                cache.flush().result(timeout=300)
        cache.close()
        assert cache.closed
        assert not store.closed
        assert "closed without waiting" in caplog.text
    finally:
        goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "kvtier-store":
            thread.join(300)


def test_a_call_that_ends_at_last_is_not_taken_for_the_one_that_waits_for_it() -> None:
    class Late(Future[None]):
        """Ends between two looks at it."""

        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return self.looks > 1

    cache, _ = refusing()
    cache._flushing._under_way = late = Late()
    late.set_result(None)
    calls: list[int] = []
    with pytest.raises(DiskHangs):
        cache._flushing._within(lambda: calls.append(1))
    assert not calls
    cache._flushing._within(lambda: calls.append(2))
    assert calls == [2]
    cache.close()


def test_close_waits_for_a_disk_that_is_only_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group takes less than a disk may be still; all of them take longer."""
    store = Watched()
    parts = config(gpu=64, cpu=64, disk_stall_s=2.0)
    transfer = DeviceTransfer(
        LAYOUT, geometry_of(LAYOUT, parts, store), device="cpu", store=store, config=parts
    )
    stores = {Tier.DISK: store}
    cache = kvtier.Cache(LAYOUT, parts, model="m", transfer=transfer, stores=stores)
    put_group = store.put_group

    def slowly(records: Any) -> None:
        time.sleep(0.7)
        put_group(records)

    monkeypatch.setattr(store, "put_group", slowly)
    monkeypatch.setattr("kvtier.data.publishing.PUBLISH_BYTES", 1)  # none goes with another
    for seed in range(4):
        fill(cache, prompt(5, seed))
    start = time.monotonic()
    cache.close()
    assert time.monotonic() - start > 2.0
    assert store.closed
    assert len(store.keys()) == 4
