"""``Lease``: every state, every misuse, and what its futures promise."""

import asyncio
import gc
import linecache
import re
import warnings
from collections.abc import Callable
from concurrent.futures import Future

import pytest

import kvtier
from kvtier import ConfigError, LeaseError, LeaseNotReady, LeaseReleased, LeaseState, OutOfPages
from kvtier.testing import ManualTransfer
from kvtier.types import Span, Tier
from tests.shell.kit import PAGE, ends, feed, fill, free, make, prompt, tailed

USES: dict[str, Callable[[kvtier.Lease], object]] = {
    "ready": lambda lease: lease.ready,
    "cached_tokens": lambda lease: lease.cached_tokens,
    "num_tokens": lambda lease: lease.num_tokens,
    "capacity": lambda lease: lease.capacity,
    "restored": lambda lease: lease.restored,
    "tokens": lambda lease: lease.tokens(),
    "chunk_end": lambda lease: lease.chunk_end(0, 1),
    "pause": lambda lease: lease.pause(),
    "resume": lambda lease: lease.resume(),
    "reserve": lambda lease: lease.reserve(1),
    "commit": lambda lease: lease.commit([1]),
    "truncate": lambda lease: lease.truncate(0),
    "fork": lambda lease: lease.fork(),
    "block_table": lambda lease: lease.block_table(),
    "slot_mapping": lambda lease: lease.slot_mapping(0, 1),
}
NEED_PAGES = set(USES) - {"ready", "chunk_end", "resume"}
NUMBERS = {"cached_tokens", "num_tokens", "capacity", "restored", "tokens"}


def evicted(cache: kvtier.Cache, transfer: ManualTransfer, tokens: list[int]) -> None:
    """Compute a prompt and leave it in host memory only."""
    fill(cache, tokens)
    transfer.finish_all()
    cache.evict(Tier.GPU, 100)
    assert cache.match([*tokens, 1]).gpu_tokens == 0


def test_every_method_is_listed() -> None:
    public = {name for name in vars(kvtier.Lease) if not name.startswith("_")}
    assert public == set(USES) | {"release", "state", "label"}


# ------------------------------------------------------------------ a life


def test_a_cold_lease_is_ready_at_once(cache: kvtier.Cache) -> None:
    with cache.lease(prompt(10), label="chat") as lease:
        assert lease.ready.result(timeout=0) == 0
        assert (lease.state, lease.label) == (LeaseState.ACTIVE, "chat")
        assert (lease.num_tokens, lease.cached_tokens, lease.capacity) == (0, 0, 0)
        assert lease.tokens().tolist() == []
        assert lease.block_table().tolist() == []
    assert lease.state is LeaseState.RELEASED


def test_a_hit_says_where_it_came_from(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    fill(cache, prompt(10))
    with cache.lease(prompt(10)) as lease:
        assert lease.ready.result(timeout=0) == lease.cached_tokens == 8
        assert lease.restored == {Tier.GPU: 8, Tier.CPU: 0, Tier.DISK: 0}
        assert lease.tokens().tolist() == prompt(8)
    transfer.finish_all()
    cache.evict(Tier.GPU, 100)
    with cache.lease(prompt(10)) as lease:
        assert lease.state is LeaseState.RESTORING
        assert not lease.ready.done()
        (restore,) = transfer.pending
        transfer.finish(restore)
        assert lease.ready.result(timeout=0) == 8
        assert lease.restored == {Tier.GPU: 0, Tier.CPU: 8, Tier.DISK: 0}


def test_a_failing_restore_is_a_shorter_prefix(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    """A2: never an exception."""
    evicted(cache, transfer, prompt(12))
    with cache.lease(prompt(14)) as lease:
        (restore,) = transfer.pending
        transfer.finish(restore, 1, OSError("bad frame"))
        transfer.finish_all()
        assert lease.ready.result(timeout=0) == lease.num_tokens == 4
        assert cache.stats().tiers[Tier.CPU].faults == 1


def test_match_promises_nothing(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    """★10: what was counted may be gone when it is claimed; the lease says what there is."""
    evicted(cache, transfer, prompt(12))
    assert cache.match(prompt(13)).tokens == 12
    cache.evict(Tier.CPU, 2)
    with cache.lease(prompt(13)) as lease:
        transfer.finish_all()
        assert lease.ready.result(timeout=0) == 4


def test_at_most_all_but_one_token_are_reused(cache: kvtier.Cache) -> None:
    fill(cache, prompt(12))
    for length, reused in ((1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)):
        with cache.lease(prompt(length)) as lease:
            assert lease.ready.result(timeout=0) == reused
        assert cache.match(prompt(length)).tokens == reused


def test_options_cap_what_is_read_and_written(cache: kvtier.Cache) -> None:
    """A12, D7."""
    fill(cache, prompt(12), write=False)
    assert cache.match(prompt(13)).tokens == 0
    fill(cache, prompt(12))
    for max_reuse, reused in ((0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (99, 12)):
        with cache.lease(prompt(13), max_reuse=max_reuse) as lease:
            assert lease.ready.result(timeout=0) == reused
    with cache.lease(prompt(13), read=False) as lease:
        assert lease.ready.result(timeout=0) == 0
    with cache.lease(prompt(13), reserve=9) as lease:
        assert lease.capacity == 12 + 3 * PAGE


def test_tokens_may_be_committed_by_hand(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    with cache.lease(prompt(6)) as lease:
        lease.reserve(6)
        fences = transfer.fences
        lease.commit(prompt(6))
        assert transfer.fences == fences + 1
        assert ends(transfer.pending) == ["pack"]
        with pytest.raises(LeaseError, match=re.escape("reserve(3) first")):
            lease.commit([1, 2, 3])
        lease.commit([6, 7])
        assert lease.tokens().tolist() == prompt(8)
        with pytest.raises(LeaseError, match="room for 0"):
            lease.commit([1])
    assert cache.match(prompt(9)).tokens == 8


def test_truncate_and_fork(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    with cache.lease(prompt(10), label="main") as lease:
        feed(cache, lease, prompt(10))
        with lease.fork() as twin, lease.fork(label="b") as other:
            assert (twin.label, other.label) == ("main", "b")
            assert twin.ready.result(timeout=0) == twin.num_tokens == 10
            assert twin.block_table()[:2].tolist() == lease.block_table()[:2].tolist()
            assert twin.block_table()[2] != lease.block_table()[2]
            assert ends(transfer.started).count("copy") == 2  # started before fork returned
            feed(cache, twin, [77])
            assert lease.tokens().tolist() == prompt(10)
            assert lease.truncate(9) == lease.num_tokens == 9
            assert other.truncate(0) == 0
        with pytest.raises(LeaseError, match="cannot truncate"):
            lease.truncate(10)


def test_pause_gives_the_device_back(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    with cache.lease(prompt(10)) as lease:
        feed(cache, lease, prompt(10))
        transfer.finish_all()
        paused = lease.pause()
        assert not paused.done()
        with pytest.raises(LeaseNotReady):
            feed(cache, lease, [1])
        transfer.finish_all()
        assert paused.result(timeout=0) is None
        assert lease.state is LeaseState.PAUSED
        assert lease.label == ""
        with pytest.raises(LeaseNotReady, match="resume"):
            lease.block_table()
        with pytest.raises(LeaseNotReady, match="resume"):
            lease.pause()
        cache.evict(Tier.GPU, 100)
        assert free(cache) == 16
        resumed = lease.resume()
        assert lease.ready is resumed
        transfer.finish_all()
        assert resumed.result(timeout=0) == lease.num_tokens == 10
        assert lease.tokens().tolist() == prompt(10)
        with pytest.raises(LeaseError, match="active, not paused"):
            lease.resume()


def test_resume_without_room_stays_paused() -> None:
    cache, transfer = make(gpu=4)
    with cache.lease(prompt(10)) as lease:
        feed(cache, lease, prompt(10))
        paused = lease.pause()
        transfer.finish_all()
        paused.result(timeout=0)
        with cache.lease(prompt(14, 1)) as other:
            feed(cache, other, prompt(14, 1))
            transfer.finish_all()
            with pytest.raises(OutOfPages):
                lease.resume()
            assert lease.state is LeaseState.PAUSED
        resumed = lease.resume()
        transfer.finish_all()
        assert resumed.result(timeout=0) == 10
    cache.close()


# ------------------------------------------------------------------ addressing


def test_block_tables_are_copies_that_cannot_be_written(cache: kvtier.Cache) -> None:
    with cache.lease([1]) as lease:
        lease.reserve(2 * PAGE + 1)
        table = lease.block_table()
        assert table.shape == (3,)
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0
        lease.reserve(4 * PAGE)
        assert lease.block_table()[:3].tolist() == table.tolist()


def test_slots_of_any_range(cache: kvtier.Cache) -> None:
    fill(cache, prompt(9))
    with cache.lease(prompt(12)) as lease:
        feed(cache, lease, prompt(12)[8:10])
        table = lease.block_table().tolist()
        slots = lease.slot_mapping(0, 12)["latent"].tolist()
        assert slots == [table[i // PAGE] * PAGE + i % PAGE for i in range(12)]
        assert lease.slot_mapping(5, 5)["latent"].tolist() == []
        assert lease.slot_mapping(7, 9)["latent"].tolist() == slots[7:9]
        for start, stop in ((-1, 2), (3, 2), (0, 13)):
            with pytest.raises(LeaseError, match=rf"\[{start}, {stop}\)"):
                lease.slot_mapping(start, stop)


def test_chunks_never_end_inside_a_span(cache: kvtier.Cache) -> None:
    """F7's ground: [3, 9) and [12, 30) are images in a prompt of 32 tokens."""
    spans = [Span(12, 30, b"b"), Span(3, 9, b"a")]
    with cache.lease(prompt(32), spans=spans) as lease:
        for start, limit, end in (
            (0, 2, 2),
            (0, 3, 3),
            (0, 4, 3),  # before the span
            (0, 8, 3),
            (0, 9, 9),
            (3, 5, 9),  # past the limit: the span begins the chunk
            (4, 5, 9),
            (3, 12, 12),
            (3, 13, 12),
            (9, 29, 12),
            (12, 13, 30),
            (30, 40, 32),  # never past the prompt
            (32, 40, 40),  # but decoding may go on
        ):
            assert lease.chunk_end(start, limit) == end, (start, limit)
        for start, limit in ((-1, 3), (3, 3), (4, 3)):
            with pytest.raises(ConfigError, match="start < limit"):
                lease.chunk_end(start, limit)


# ------------------------------------------------------------------ misuse


@pytest.mark.parametrize("use", USES)
def test_after_release_everything_raises(cache: kvtier.Cache, use: str) -> None:
    lease = cache.lease(prompt(5), label="gone")
    lease.release()
    lease.release()
    with pytest.raises(LeaseReleased, match=r"'gone'.*test_lease.py:"):
        USES[use](lease)
    with pytest.raises(LeaseReleased), cache.step([(lease, [1])]):
        raise AssertionError("not reached")
    assert lease.state is LeaseState.RELEASED
    assert lease.label == "gone"


@pytest.mark.parametrize("use", USES)
def test_while_restoring(cache: kvtier.Cache, transfer: ManualTransfer, use: str) -> None:
    evicted(cache, transfer, prompt(8))
    with cache.lease(prompt(9), label="slow") as lease:
        if use in NEED_PAGES:
            with pytest.raises(LeaseNotReady, match="'slow' is restoring"):
                USES[use](lease)
        elif use == "resume":
            with pytest.raises(LeaseError, match="restoring, not paused"):
                lease.resume()
        else:
            USES[use](lease)
        with pytest.raises(LeaseNotReady), cache.step([(lease, [1])]):
            raise AssertionError("not reached")


@pytest.mark.parametrize("use", sorted(set(USES) - {"resume"}))
def test_while_paused(cache: kvtier.Cache, transfer: ManualTransfer, use: str) -> None:
    with cache.lease(prompt(6)) as lease:
        feed(cache, lease, prompt(6))
        lease.pause()
        transfer.finish_all()
        if use in NEED_PAGES - NUMBERS:
            with pytest.raises(LeaseNotReady, match="is paused"):
                USES[use](lease)
        else:
            USES[use](lease)
        with pytest.raises(LeaseNotReady), cache.step([(lease, [1])]):
            raise AssertionError("not reached")


@pytest.mark.parametrize("use", USES)
def test_after_close_everything_raises(use: str) -> None:
    cache, _ = make()
    lease = cache.lease(prompt(5))
    with pytest.raises(LeaseError):
        cache.close()
    with pytest.raises(kvtier.CacheClosed):
        USES[use](lease)
    lease.release()


@pytest.mark.parametrize("count", [-1, 1.5, True, None])
def test_counts_are_checked(cache: kvtier.Cache, count: int) -> None:
    with cache.lease([1]) as lease:
        for call in (lease.reserve, lease.truncate):
            with pytest.raises(ConfigError, match="n must be an int of at least 0"):
                call(count)


def test_a_forgotten_lease_comes_back_with_its_line(cache: kvtier.Cache) -> None:
    lease = cache.lease(prompt(10), label="lost")
    feed(cache, lease, prompt(10))
    held = free(cache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del lease
        gc.collect()
    (warning,) = [w for w in caught if w.category is ResourceWarning]
    assert "'lost'" in str(warning.message)
    match = re.search(r"opened at (.*):(\d+)$", str(warning.message))
    assert match is not None
    assert 'cache.lease(prompt(10), label="lost")' in linecache.getline(match[1], int(match[2]))
    assert cache.leases() == []
    assert free(cache) == held + 1  # the partial page; the full ones stay, cached


def test_forgotten_leases_are_counted_and_said_once_a_line(
    cache: kvtier.Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """Python hides the warning, in a server's log it must be seen all the same."""

    def forget(count: int) -> None:
        for _ in range(count):
            cache.lease([1, 2, 3], label="lost")
            gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forget(3)
        assert cache.stats().forgotten_leases == 3
        cache.lease([1, 2, 3], label="another")
        gc.collect()
    assert cache.stats().forgotten_leases == 4
    assert "kvtier_forgotten_leases_total 4" in cache.prometheus()
    assert caplog.text.count("was never released") == 2
    assert caplog.text.count("lease 'lost', opened at ") == 1
    assert caplog.text.count("lease 'another', opened at ") == 1
    with cache.lease([1]):
        pass
    assert cache.stats().forgotten_leases == 4


def test_a_forgotten_fork_names_the_fork(cache: kvtier.Cache) -> None:
    with cache.lease(prompt(5)) as lease:
        feed(cache, lease, prompt(5))

        def forget() -> None:
            lease.fork()
            gc.collect()

        with pytest.warns(ResourceWarning, match=r"test_lease.py:"):
            forget()


def test_a_lease_collected_inside_the_core_deadlocks_nobody() -> None:
    """The finalizer may run anywhere, also where this thread holds the cache's lock."""
    cache, _ = make()
    held = [cache.lease(prompt(5))]

    def forget() -> None:
        held.clear()
        gc.collect()

    with cache._pump, pytest.warns(ResourceWarning):
        forget()
    assert cache.leases() == []
    cache.close()


def test_a_released_lease_warns_about_nothing(cache: kvtier.Cache) -> None:
    with cache.lease(prompt(5)):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()


# ------------------------------------------------------------------ waiting


def test_cancelling_one_waiter_harms_no_other(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    """★10: an asyncio waiter that is cancelled leaves the shared future alone."""
    evicted(cache, transfer, prompt(8))

    async def wait() -> int:
        with cache.lease(prompt(9)) as lease:
            first = asyncio.ensure_future(asyncio.wrap_future(lease.ready))
            second = asyncio.ensure_future(asyncio.wrap_future(lease.ready))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert not lease.ready.cancel()
            transfer.finish_all()
            return await second

    assert asyncio.run(wait()) == 8


def test_releasing_while_restoring_wakes_the_waiters(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    """D5: the restore still owns its frames; they come back once, when it ends."""
    evicted(cache, transfer, prompt(8))
    lease = cache.lease(prompt(9))
    ready = lease.ready
    lease.release()
    assert ready.result(timeout=0) == 0
    cache.check()
    assert free(cache) == 14
    transfer.finish_all()
    assert cache.match(prompt(9)).gpu_tokens == 8


def test_releasing_while_pausing_wakes_the_waiters(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    lease = cache.lease(prompt(6))
    feed(cache, lease, prompt(6))
    paused: Future[None] = lease.pause()
    lease.release()
    assert paused.result(timeout=0) is None
    transfer.finish_all()
    assert cache.leases() == []


def test_what_waits_on_a_closing_cache_wakes_up() -> None:
    cache, transfer = make()
    evicted(cache, transfer, prompt(8))
    lease = cache.lease(prompt(9))
    ready = lease.ready
    with pytest.raises(LeaseError, match="closed with 1 open"):
        cache.close()
    assert ready.result(timeout=0) == 0


def test_reserving_by_hand_takes_no_checkpoints() -> None:
    """Only a step can tell a model where to capture: what nobody fills must not be kept."""
    sizes = kvtier.CacheConfig(gpu_bytes="80KiB", cpu_bytes="1MiB", max_leases=4)
    transfer = ManualTransfer()
    with kvtier.Cache(tailed(), sizes, model="m", transfer=transfer) as cache:
        lease = cache.lease([1] * 20)
        transfer.finish_all()
        frames = cache._core.residency.pools[3].free
        lease.reserve(9)
        assert cache._core.residency.pools[3].free == frames
        lease.commit([1] * 9)
        assert not any(part.kind.value != "history" for op in transfer.pending for part in op.parts)
        lease.release()
        transfer.finish_all()
        cache.check()
        found = cache.match([1] * 20)
        assert (found.tokens, found.history_tokens) == (0, 8)


def test_truncating_with_tails_restores_a_checkpoint() -> None:
    """Rolled-back tokens land on a page end whose tail was kept, and ``ready`` starts anew."""
    sizes = kvtier.CacheConfig(
        gpu_bytes="80KiB", cpu_bytes="1MiB", max_leases=4, checkpoints=kvtier.Dense()
    )
    transfer = ManualTransfer()
    with kvtier.Cache(tailed(), sizes, model="m", transfer=transfer) as cache:
        with cache.lease([1] * 20) as lease:
            transfer.finish_all()
            feed(cache, lease, [1] * 11)
            transfer.finish_all()
            first = lease.ready
            assert lease.truncate(10) == 8
            assert lease.state is LeaseState.RESTORING
            assert lease.ready is not first
            assert not lease.ready.done()
            transfer.finish_all()
            assert lease.ready.result(timeout=0) == lease.num_tokens == 8
            assert lease.truncate(3) == 0
            transfer.finish_all()
            assert lease.ready.result(timeout=0) == 0


@pytest.mark.parametrize("end", ["release", "pause", "truncate"])
def test_pages_written_by_hand_change_hands_behind_a_fence(
    cache: kvtier.Cache, transfer: ManualTransfer, end: str
) -> None:
    with cache.lease(prompt(9)) as lease:
        lease.reserve(9)
        assert transfer.fences == 1  # behind those who had these pages
        getattr(lease, end)(*([0] if end == "truncate" else []))
        assert transfer.fences == 2
        transfer.finish_all()


def test_pages_written_by_steps_need_no_other_fence(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    with cache.lease(prompt(9)) as lease:
        feed(cache, lease, prompt(9))
    assert transfer.fences == 2  # as the step begins and as it ends


def test_a_lost_device_keeps_no_lease(
    cache: kvtier.Cache, transfer: ManualTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fence(_: object) -> None:
        raise RuntimeError("device lost")

    lease = cache.lease(prompt(9))
    lease.reserve(9)
    monkeypatch.setattr(transfer, "fence", fence)
    with pytest.raises(RuntimeError, match="device lost"):
        lease.release()
    assert cache.leases() == []


def test_a_paused_lease_has_no_capacity(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    with cache.lease(prompt(9)) as lease:
        feed(cache, lease, prompt(9))
        assert lease.capacity >= 9
        lease.pause()
        transfer.finish_all()
        assert lease.state is kvtier.LeaseState.PAUSED
        assert lease.capacity == 0
