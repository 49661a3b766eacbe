"""Threads and event loops: the lock is free while others work, ops start in order, nothing
re-enters the core."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kvtier
from kvtier.core.machine import CacheCore
from kvtier.errors import InvariantError
from kvtier.seams import Transfer
from kvtier.testing import ManualTransfer
from kvtier.tokens import pack
from kvtier.types import Tier
from tests.shell.kit import LAYOUT, config, feed, fill, make, prompt

Done = Callable[[int, BaseException | None], None]


class AtOnce(ManualTransfer):
    """Ends every op within ``start``: the callbacks come on the caller's own stack."""

    def start(self, op: kvtier.Op, *, packed: Callable[[], None], done: Done) -> None:
        self.started.append(op)
        if op.kind is kvtier.OpKind.PACK:
            packed()
        done(len(op.parts), None)


class Elsewhere(ManualTransfer):
    """Ends ops on other threads, after a moment and in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(4)

    def start(self, op: kvtier.Op, *, packed: Callable[[], None], done: Done) -> None:
        self.started.append(op)

        def run() -> None:
            time.sleep(random.random() / 500)
            if op.kind is kvtier.OpKind.PACK:
                packed()
            done(len(op.parts), None)

        self.pool.submit(run)

    def close(self) -> None:
        while self.pool._work_queue.qsize():
            time.sleep(0.001)
        self.pool.shutdown()


def cache_over(transfer: Transfer, **options: Any) -> kvtier.Cache:
    return kvtier.Cache(LAYOUT, config(**options), model="m", transfer=transfer)


def test_completions_from_within_start() -> None:
    transfer = AtOnce()
    with cache_over(transfer) as cache:
        fill(cache, prompt(9))
        assert cache.stats().packing == 0
        assert cache.evict(Tier.GPU, 9) == 2
        with cache.lease(prompt(9)) as lease:
            assert lease.ready.result(timeout=0) == 8
            assert lease.pause().done()
            assert lease.resume().result(timeout=0) == 8
        cache.check()


def test_the_lock_is_free_while_an_op_is_started() -> None:
    """Whatever ``start`` waits for, another thread can use the cache meanwhile."""
    looked: list[int] = []

    class Looks(ManualTransfer):
        def start(self, op: kvtier.Op, *, packed: Callable[[], None], done: Done) -> None:
            with ThreadPoolExecutor(1) as other:
                looked.append(other.submit(lambda: cache.match(prompt(9)).tokens).result(300))
            super().start(op, packed=packed, done=done)

    with cache_over(Looks()) as cache:
        fill(cache, prompt(9))
    assert looked == [8]


def test_the_lock_is_free_while_a_second_thread_waits_for_its_turn() -> None:
    gate, starting = threading.Event(), threading.Semaphore(0)

    class Slow(ManualTransfer):
        def start(self, op: kvtier.Op, *, packed: Callable[[], None], done: Done) -> None:
            starting.release()
            assert gate.wait(300)
            super().start(op, packed=packed, done=done)

    both = threading.Barrier(2)

    def fills(seed: int) -> None:
        with cache.lease(prompt(9, seed)) as lease, cache.step([(lease, prompt(9, seed))]):
            both.wait(300)  # whoever enters a step waits for ops that are being started

    with cache_over(Slow()) as cache, ThreadPoolExecutor(3) as pool:
        work = [pool.submit(fills, seed) for seed in (0, 1)]
        assert starting.acquire(timeout=300)
        while (
            cache._pump._core.match(pack(prompt(9, 0))).tokens
            + cache._pump._core.match(pack(prompt(9, 1))).tokens
            < 16
        ):
            time.sleep(0.001)  # until both have committed
        looked = pool.submit(cache.stats)
        try:
            assert looked.result(timeout=300).packing
        finally:
            gate.set()
        for each in work:
            each.result(timeout=300)


def test_callbacks_of_futures_may_use_the_cache() -> None:
    """They run outside every lock, on whatever thread ended the wait."""
    cache, transfer = make()
    fill(cache, prompt(9))
    transfer.finish_all()
    cache.evict(Tier.GPU, 9)
    leases: list[kvtier.Lease] = []

    def again(future: "Future[int]") -> None:
        leases.append(cache.lease(prompt(future.result() + 1)))

    with cache.lease(prompt(9)) as lease:
        lease.ready.add_done_callback(again)
        transfer.finish_all()
    assert leases[0].ready.result(timeout=0) == 8
    leases[0].release()
    cache.close()


def test_ops_start_in_the_order_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """COPY and CLEAR depend on it; so does a store on its parent's."""
    planned: list[int] = []

    def recorded(name: str) -> None:
        plain = getattr(CacheCore, name)

        def call(self: CacheCore, *args: Any, **options: Any) -> Any:
            result = plain(self, *args, **options)  # under the lock
            ops = result[-1] if isinstance(result, tuple) else result
            planned.extend(op.id for op in ops)
            return result

        monkeypatch.setattr(CacheCore, name, call)

    for name in ("open", "commit", "fork", "release", "finish", "packed", "pause", "resume"):
        recorded(name)
    transfer = Elsewhere()
    cache = cache_over(transfer, gpu=64, cpu=64, max_leases=64)

    def work(seed: int) -> None:
        for i in range(15):
            with cache.lease(prompt(10 + i, seed % 3)) as lease:
                done = lease.ready.result(timeout=300)
                feed(cache, lease, prompt(10 + i, seed % 3)[done:])
                with lease.fork() as twin:
                    feed(cache, twin, [seed])

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, seed) for seed in range(6)]:
            future.result(timeout=300)
    cache.close()
    assert [op.id for op in transfer.started] == planned
    assert len(planned) > 100


def test_many_threads_on_the_real_data_plane() -> None:
    """Prefill, decode, fork, pause, release and evict at once; every row read is the right one."""
    torch.set_num_threads(1)
    failures: list[str] = []
    done = [0]

    def expect(tokens: list[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.float32)

    with kvtier.Cache(LAYOUT, config(gpu=40, cpu=24), model="m", device="cpu") as cache:

        def run(lease: kvtier.Lease, tokens: list[int]) -> None:
            with cache.step([(lease, tokens)]) as step:
                device = step.to_device()
                for layer in range(2):
                    rows = device.layer(layer).rows("latent")
                    rows[device.slot_mapping["latent"]] = (
                        device.input_ids[:, None].float() + layer / 2
                    )
                    pages = device.block_table[0, :, None] * 4 + torch.arange(4)
                    known = pages.flatten()[: int(device.kv_lens[0])].long()
                    everything = [*lease.tokens().tolist(), *tokens]
                    if not torch.equal(rows[known][:, 3] - layer / 2, expect(everything)):
                        failures.append(f"{everything}: {rows[known][:, 3]}")

        def request(rng: random.Random) -> None:
            tokens = prompt(rng.randint(1, 18), rng.randint(0, 3))
            with cache.lease(tokens, write=rng.random() < 0.9) as lease:
                at = lease.ready.result(timeout=300)
                while at < len(tokens):
                    chunk = tokens[at : at + rng.randint(1, 9)]
                    run(lease, chunk)
                    at += len(chunk)
                if rng.random() < 0.3:
                    lease.pause().result(timeout=300)
                    at = lease.resume().result(timeout=300)
                if rng.random() < 0.3:
                    with lease.fork() as twin:
                        run(twin, [rng.randint(0, 9)])
                run(lease, [rng.randint(0, 9)])
                if rng.random() < 0.2:
                    cache.evict(rng.choice([Tier.GPU, Tier.CPU]), 5)
            done[0] += 1

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(80):
                with contextlib.suppress(kvtier.OutOfPages):
                    request(rng)

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, seed) for seed in range(4)]:
                future.result(timeout=300)
        cache.check()
        assert not failures, failures[:3]
        assert done[0] > 50
        stats = cache.stats()
        assert stats.tiers[Tier.CPU].hit_tokens > 0


def test_event_loops_are_not_blocked() -> None:
    """D6: a loop waits on leases whose restores end on other threads."""

    ticked = threading.Event()

    async def main(cache: kvtier.Cache) -> int:
        async def tick() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            ticked.set()

        ticker = asyncio.create_task(tick())

        async def one(seed: int) -> int:
            with cache.lease(prompt(9, seed)) as lease:
                return await asyncio.wait_for(asyncio.wrap_future(lease.ready), 300)

        got = await asyncio.gather(*(one(seed) for seed in range(4)))
        await ticker
        return sum(got)

    class OnceTicked(Elsewhere):
        """Restores end once the loop has gone round some times while they were under way."""

        def start(self, op: kvtier.Op, *, packed: Callable[[], None], done: Done) -> None:
            def wait(delivered: int, error: BaseException | None) -> None:
                assert op.kind is not kvtier.OpKind.RESTORE or ticked.wait(300)
                done(delivered, error)

            super().start(op, packed=packed, done=wait)

    with cache_over(OnceTicked(), gpu=32, cpu=32) as cache:
        for seed in range(4):
            fill(cache, prompt(9, seed))
        cache.flush(to=Tier.CPU).result(timeout=300)
        cache.evict(Tier.GPU, 99)
        assert asyncio.run(main(cache)) == 32


def test_cold_requests_of_one_prefix_share_one_restore() -> None:
    """A13: the first loads, the others wait for the same operation."""
    cache, transfer = make()
    fill(cache, prompt(13))
    transfer.finish_all()
    cache.evict(Tier.GPU, 99)
    leases = [cache.lease(prompt(13)) for _ in range(5)]
    (restore,) = transfer.pending
    assert len(restore.parts) == 3
    leases[0].release()  # the first goes away: the others still get theirs
    assert not any(lease.ready.done() for lease in leases[1:])
    transfer.finish(restore, 2, OSError("the third page is bad"))
    transfer.finish_all()
    assert [lease.ready.result(timeout=0) for lease in leases[1:]] == [8] * 4
    assert len({tuple(lease.block_table()) for lease in leases[1:]}) == 1
    for lease in leases:
        lease.release()
    cache.close()


def test_a_request_joins_what_another_has_published() -> None:
    """A13: a request that comes in the middle of another's prefill starts at its last page."""
    cache, _ = make()
    with cache.lease(prompt(13)) as first:
        for start in range(0, 12, 4):
            with cache.lease(prompt(13)) as second:
                assert second.ready.result(timeout=0) == start
            feed(cache, first, prompt(13)[start : start + 4])
    cache.close()


def test_closing_from_a_completion_does_not_wait_for_itself() -> None:
    """D4: no thread can wait for itself."""
    cache = kvtier.Cache(LAYOUT, config(), model="m", device="cpu")
    fill(cache, prompt(9))
    cache.flush(to=Tier.CPU).result(timeout=300)
    cache.evict(Tier.GPU, 99)
    closed = threading.Event()

    def close(_: object) -> None:
        with pytest.raises(kvtier.LeaseError, match="1 open"):
            cache.close()
        closed.set()

    lease = cache.lease(prompt(9))
    lease.ready.add_done_callback(close)
    assert closed.wait(timeout=300)
    assert cache.closed


def test_an_op_that_ends_twice_stops_the_cache() -> None:
    """A broken transfer is a bug, and loud."""
    cache, transfer = make()
    fill(cache, prompt(9))
    (pack,) = transfer.pending
    done = transfer._done[pack.id]
    transfer.finish(pack)
    with pytest.raises(kvtier.InvariantError, match="ended twice"):
        done(2, None)
    with pytest.raises(kvtier.InvariantError):
        cache.match([1])
    cache.close()
    assert transfer.closed


def test_outcomes_behind_a_callback_that_raises_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A CancelledError out of one future's callback: the other futures resolve, close returns."""
    cache = kvtier.Cache(LAYOUT, config(gpu=16, cpu=16), model="m", device="cpu")
    fill(cache, prompt(16))
    landing = cache._pump.transfer._copier.drained  # type: ignore[attr-defined]
    gates = [threading.Event() for _ in landing.threads]
    for gate in gates:
        landing.submit(lambda _, gate=gate: gate.wait(300) and None)
    fill(cache, prompt(16, seed=1))

    def bug(_: object) -> None:
        raise asyncio.CancelledError

    flushes = [cache.flush(to=Tier.CPU) for _ in range(3)]
    for flush in flushes:
        assert not flush.done()
        flush.add_done_callback(bug)
    for gate in gates:
        gate.set()
    for flush in flushes:
        assert flush.result(timeout=300) is None
    closing = threading.Thread(target=cache.close, daemon=True)
    closing.start()
    closing.join(300)
    assert not closing.is_alive(), "close() hangs"
    assert caplog.text.count("a callback of a future failed") == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, InvariantError])
def test_what_ends_the_process_and_bugs_go_on_once_all_is_told(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    cache, transfer = make()
    fill(cache, prompt(8))
    first, second = cache.flush(to=Tier.CPU), cache.flush(to=Tier.CPU)
    told: list[str] = []

    def bug(_: object) -> None:
        raise error("from a callback")

    first.add_done_callback(bug)
    second.add_done_callback(lambda _: told.append("second"))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            transfer.finish_all()
    else:  # an Exception: concurrent.futures logs it, and nothing else happens
        transfer.finish_all()
        assert "exception calling callback" in caplog.text
    assert told == ["second"]
    cache.close()


def test_a_bug_met_while_telling_stops_the_cache() -> None:
    cache, _ = make()
    told: list[str] = []

    def bug() -> None:
        raise InvariantError("I0")

    cache._pump._outcomes += [bug, lambda: told.append("behind it")]
    with pytest.raises(InvariantError), cache._pump:
        pass
    assert told == ["behind it"]
    with pytest.raises(InvariantError, match="stopped after a bug"):
        cache.lease(prompt(4))
    cache.close()
