"""``Cache``: construction, upkeep, what it shows of itself, and how it ends."""

import gc
import os
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvtier
from kvtier import CacheClosed, ConfigError, LeaseError, StoreError, Tier
from kvtier.assembly import geometry_of
from kvtier.data.transfer import DeviceTransfer
from kvtier.testing import ManualTransfer, MemoryStore
from kvtier.types import Identity, Span
from tests.shell.kit import LAYOUT, config, ends, feed, fill, free, make, prompt


def with_disk(
    store: MemoryStore | None = None, **options: Any
) -> tuple[kvtier.Cache, ManualTransfer, MemoryStore]:
    store, transfer = store or MemoryStore(), ManualTransfer()
    cache = kvtier.Cache(
        LAYOUT, config(**options), model="m", transfer=transfer, stores={Tier.DISK: store}
    )
    return cache, transfer, store


# ------------------------------------------------------------------ construction


def test_it_takes_pages_for_its_bytes(tmp_path: Path) -> None:
    sizes = config(gpu=10, cpu=20, disk_bytes="8MiB", disk_path=tmp_path / "kv")
    with kvtier.Cache(LAYOUT, sizes, model="m", device="cpu") as cache:
        tiers = cache.stats().tiers
        assert (tiers[Tier.GPU].capacity, tiers[Tier.CPU].capacity) == (10, 20)
        assert 0 < tiers[Tier.DISK].capacity * LAYOUT.frame_bytes() <= 8 << 20
        assert (cache.layout, cache.config) == (LAYOUT, sizes)
        assert not cache.closed
        assert repr(cache) == "<Cache of 'mla' open>"
    assert cache.closed
    assert repr(cache) == "<Cache of 'mla' closed>"


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"gpu_bytes": 1}, f"set gpu_bytes to {2 * LAYOUT.page_bytes()} or more"),
        ({"gpu_bytes": LAYOUT.page_bytes() * 2 - 1}, "gpu_bytes=511 cannot hold one request"),
        ({"gpu_bytes": "1MiB", "cpu_bytes": 4095}, "cpu_bytes=4095 would keep nothing: set it to"),
    ],
)
def test_sizes_that_cannot_hold_one_request(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        kvtier.Cache(LAYOUT, kvtier.CacheConfig(**sizes), model="m", device="cpu")


def test_unaligned_sizes_round_down() -> None:
    size = 5 * LAYOUT.page_bytes() + 17
    with kvtier.Cache(
        LAYOUT,
        kvtier.CacheConfig(gpu_bytes=size, cpu_bytes=3 * LAYOUT.frame_bytes() + 1),
        model="m",
        transfer=ManualTransfer(),
    ) as cache:
        assert cache.stats().tiers[Tier.GPU].capacity == 5
        assert cache.stats().tiers[Tier.CPU].capacity == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": "mla"}, "layout must be a Layout"),
        ({"config": {"gpu_bytes": 1}}, "config must be a CacheConfig"),
        ({"model": ""}, "model must name the weights"),
        ({"model": b""}, "model must name the weights"),
        ({"model": 5}, "model must be str or bytes"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": "tpu:0"}, "device='tpu:0'"),
        ({"stores": {Tier.REMOTE: MemoryStore()}}, "Tier.DISK only"),
        ({"stores": {Tier.DISK: MemoryStore()}, "config": config(cpu=0)}, "needs cpu_bytes"),
        ({"stores": {Tier.DISK: MemoryStore(0)}}, "would keep nothing"),
    ],
)
def test_parts_that_do_not_make_a_cache(change: dict[str, Any], says: str) -> None:
    given = {"layout": LAYOUT, "config": config(), "model": "m", "device": "cpu", **change}
    with pytest.raises(ConfigError, match=re.escape(says)):
        kvtier.Cache(given.pop("layout"), given.pop("config"), **given)


def test_a_disk_path_and_a_store_exclude_each_other(tmp_path: Path) -> None:
    sizes = config(disk_bytes="8MiB", disk_path=tmp_path)
    with pytest.raises(ConfigError, match="not both"):
        kvtier.Cache(LAYOUT, sizes, model="m", stores={Tier.DISK: MemoryStore()})
    with pytest.raises(ConfigError, match="a store of your own"):
        kvtier.Cache(LAYOUT, sizes, model="m", transfer=ManualTransfer())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match='device="cpu"'):
        kvtier.Cache(LAYOUT, config(), model="m")


def test_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError, match="gpu_byte"):
        kvtier.CacheConfig(gpu_byte=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="page_size"):
        kvtier.Cache(LAYOUT, config(), model="m", page_size=3)  # type: ignore[call-arg]


def test_a_constructor_that_raises_has_taken_nothing(tmp_path: Path) -> None:
    """The store is opened before the data plane: it must be closed again."""
    sizes = config(disk_bytes="8MiB", disk_path=tmp_path)
    threads = threading.active_count()
    for device in ("nonsense", "meta"):
        with pytest.raises(ConfigError):
            kvtier.Cache(LAYOUT, sizes, model="m", device=device)
    assert threading.active_count() == threads
    with kvtier.Cache(LAYOUT, sizes, model="m", device="cpu"):  # not locked
        pass


@pytest.mark.parametrize("in_place", ["file", "parent"])
def test_a_path_that_cannot_be_a_store(tmp_path: Path, in_place: str) -> None:
    path = tmp_path / "kv"
    path.write_text("mine")
    where = path if in_place == "file" else path / "below"
    with pytest.raises(ConfigError, match="not a directory"):
        kvtier.Cache(LAYOUT, config(disk_bytes="8MiB", disk_path=where), model="m", device="cpu")
    assert path.read_text() == "mine"


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    sizes = config(disk_bytes="8MiB", disk_path=tmp_path)
    with kvtier.Cache(LAYOUT, sizes, model="m", device="cpu") as first:
        fill(first, prompt(9))
        first.flush().result(timeout=300)
        with pytest.raises(kvtier.StoreLocked, match="disk_mode"):
            kvtier.Cache(LAYOUT, sizes, model="m", device="cpu")
        fill(first, prompt(9, 1))


def test_another_model_shares_nothing(tmp_path: Path) -> None:
    sizes = config(disk_bytes="16MiB", disk_path=tmp_path)
    with kvtier.Cache(LAYOUT, sizes, model="m@1", device="cpu") as cache:
        fill(cache, prompt(9))
    with kvtier.Cache(LAYOUT, sizes, model="m@2", device="cpu") as cache:
        assert cache.match(prompt(9)).tokens == 0
    with kvtier.Cache(LAYOUT, sizes, model=b"m@1", device="cpu") as cache:
        assert cache.match(prompt(9)).disk_tokens == 8


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("call", ["match", "lease", "prefetch", "pin", "explain"])
def test_arguments_are_checked_at_the_edge(cache: kvtier.Cache, call: str) -> None:
    method = getattr(cache, call)
    for bad in ([-1], [1 << 31], [1.5], [[1]], 5, "text", [None]):
        with pytest.raises(kvtier.TokenError):
            method(bad)
    for identity in ("tenant", None, Identity(tenant=5), Identity(salt="s")):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="identity"):
            method([1, 2], identity=identity)
    for spans in ([Span(1, 1, b"x")], [Span(0, 3, b"x")], [Span(0, 1, b"")]):
        with pytest.raises(kvtier.TokenError, match="span"):
            method([1, 2], spans=spans)
    assert cache.leases() == []
    cache.check()


@pytest.mark.parametrize(
    "options",
    [
        {"reserve": -1},
        {"reserve": 1.5},
        {"max_reuse": -1},
        {"ttl": 0},
        {"ttl": -1.0},
        {"ttl": "1"},
        {"ttl": float("nan")},
        {"ttl": True},
        {"ttl": 1j},
        {"priority": None},
        {"priority": 1.0},
        {"priority": True},
        {"label": 5},
        {"label": None},
        {"read": 1},
        {"write": None},
    ],
)
def test_options_of_lease_are_checked(cache: kvtier.Cache, options: dict[str, Any]) -> None:
    (name,) = options
    fill(cache, prompt(9))  # a hit, which is where a priority is first compared
    with pytest.raises(ConfigError, match=name):
        cache.lease(prompt(9), **options)
    assert cache.leases() == []


def test_tiers_are_checked(cache: kvtier.Cache) -> None:
    for tier in (Tier.REMOTE, 7, "gpu", np.array([0, 1])):
        with pytest.raises(ConfigError, match="tier"):
            cache.evict(tier, 1)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="tier"):
            cache.clear(tiers=[tier])  # type: ignore[list-item]
    for tiers in (1, Tier.GPU, "gpu"):
        with pytest.raises(ConfigError, match="tier"):
            cache.clear(tiers=tiers)  # type: ignore[arg-type]
    for to in (Tier.GPU, Tier.REMOTE, np.array([0, 1])):
        with pytest.raises(ConfigError, match=r"Tier.CPU or Tier.DISK"):
            cache.flush(to=to)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pages"):
        cache.evict(Tier.GPU, -1)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_prompts_shorter_than_a_page(cache: kvtier.Cache, length: int) -> None:
    assert cache.match(prompt(length)).tokens == 0
    fill(cache, prompt(length))
    assert cache.match(prompt(length)).tokens == 0
    assert cache.explain(prompt(length)) == [] or length
    assert cache.prefetch(prompt(length)).result(timeout=0) == 0
    assert cache.pin(prompt(length)).tokens == 0


def test_more_leases_than_configured() -> None:
    cache, _ = make(max_leases=2)
    with cache.lease([1]), cache.lease([2]), pytest.raises(kvtier.OutOfPages, match="max_leases=2"):
        cache.lease([3])
    with cache.lease([3]):
        pass
    cache.close()


# ------------------------------------------------------------------ the end


def test_close_finishes_what_is_on_its_way() -> None:
    cache, transfer, store = with_disk()
    fill(cache, prompt(9))
    cache.close()
    assert transfer.closed
    assert ends(transfer.started) == ["pack", "store"]
    with pytest.raises(StoreError, match="closed"):
        store.scan()


def test_close_without_drain_abandons_what_was_not_started() -> None:
    cache, transfer, _ = with_disk()
    fill(cache, prompt(9))
    cache.close(drain=False)
    assert ends(transfer.started) == ["pack"]


def test_close_lists_the_leases_that_were_open() -> None:
    cache, transfer = make()
    lease = cache.lease([1], label="one")
    fork = lease.fork(label="two")
    with pytest.raises(LeaseError, match=r"2 open leases.*'one'.*test_cache.py:\d+, 'two'.*:\d+"):
        cache.close()
    assert transfer.closed
    assert cache.closed
    cache.close()
    lease.release()
    del lease, fork
    gc.collect()  # no ResourceWarning on top


def test_a_with_block_that_fails_keeps_its_own_exception(caplog: pytest.LogCaptureFixture) -> None:
    cache, transfer = make()
    leases = []

    def body() -> None:
        with cache:
            leases.append(cache.lease([1], label="open"))
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        body()
    assert transfer.closed
    assert "'open'" in caplog.text


def test_a_closed_cache_answers_nothing() -> None:
    cache, _ = make()
    pin = cache.pin([1])
    cache.close()
    pin.close()
    calls = [
        lambda: cache.match([1]),
        lambda: cache.lease([1]),
        lambda: cache.prefetch([1]),
        lambda: cache.pin([1]),
        lambda: cache.flush(),
        lambda: cache.evict(Tier.GPU, 1),
        lambda: cache.clear(),
        cache.stats,
        cache.prometheus,
        lambda: cache.explain([1]),
        cache.events,
        cache.leases,
        cache.pages,
        cache.check,
        lambda: cache.step([]).__enter__(),
    ]
    for call in calls:
        with pytest.raises(CacheClosed):
            call()


def test_an_unclosed_cache_is_reported() -> None:
    def forget() -> None:
        make()
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed <Cache"):
        forget()


def test_a_constructor_that_raised_is_no_unclosed_cache() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError):
            kvtier.Cache(LAYOUT, config(), model="", device="cpu")
        gc.collect()


def test_a_forked_child_is_told_and_the_parent_unharmed(tmp_path: Path) -> None:
    """C7: also with the lock held by another thread at that moment."""
    sizes = config(disk_bytes="8MiB", disk_path=tmp_path)
    with kvtier.Cache(LAYOUT, sizes, model="m", device="cpu") as cache:
        lease, pin = cache.lease(prompt(9)), cache.pin([1])
        cache._pump._lock.acquire()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads
            child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (lambda: cache.lease([1]), cache.stats, lambda: lease.reserve(1)):
                    with pytest.raises(CacheClosed, match="fork"):
                        call()
                lease.release()
                pin.close()
                cache.close()
                del lease, cache
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        cache._pump._lock.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        feed(cache, lease, prompt(9))
        lease.release()
        cache.flush().result(timeout=300)
        cache.check()
        assert cache.stats().tiers[Tier.DISK].resident == 2


# ------------------------------------------------------------------ upkeep


def test_flush_follows_pages_down() -> None:
    cache, transfer, _store = with_disk()
    fill(cache, prompt(9))
    to_cpu, to_disk = cache.flush(to=Tier.CPU), cache.flush()
    (pack,) = transfer.pending
    transfer.finish(pack)
    assert to_cpu.result(timeout=300) is None
    assert not to_disk.done()
    (stored,) = transfer.pending
    fill(cache, prompt(9, 1))  # committed later: not waited for
    transfer.finish(stored)
    assert to_disk.result(timeout=300) is None
    assert len(transfer.pending) == 1
    transfer.finish_all()
    assert cache.flush().result(timeout=300) is None
    cache.close()


def test_flush_alone_carries_a_stores_failure() -> None:
    cache, transfer, _ = with_disk()
    fill(cache, prompt(9))
    flushed = cache.flush()
    transfer.finish(transfer.pending[0])
    transfer.finish(transfer.pending[0], error=OSError(28, "No space left on device"))
    with pytest.raises(StoreError, match="No space left"):
        flushed.result(timeout=300)
    assert cache.match(prompt(9)).tokens == 8
    assert cache.stats().tiers[Tier.DISK].faults == 1
    assert cache.flush().result(timeout=300) is None
    cache.close()


def test_recency_is_handed_to_the_store() -> None:
    cache, transfer, store = with_disk()
    fill(cache, prompt(9))
    transfer.finish_all()
    touched: list[Any] = []
    store.touch = lambda ticks: touched.extend(ticks)  # type: ignore[method-assign]
    fill(cache, prompt(9))
    transfer.finish_all()
    cache.flush().result(timeout=300)
    assert {key for key, _ in touched} == {page.key for page in cache.pages()}
    touched.clear()
    cache.flush().result(timeout=300)
    assert touched == []
    fill(cache, prompt(9))
    transfer.finish_all()
    cache.close()
    assert len(touched) == 2


class OwnThread(MemoryStore):
    """Says on which thread recency was saved, and fails as told."""

    def __init__(self) -> None:
        super().__init__()
        self.on: list[threading.Thread] = []
        self.error: Exception | None = None
        self.before: Callable[[], object] = bool

    def touch(self, ticks: Any) -> None:
        self.on.append(threading.current_thread())
        self.before()
        if self.error is not None:
            raise self.error
        super().touch(ticks)


def test_flush_writes_on_no_callers_thread() -> None:
    store = OwnThread()
    cache, transfer, _ = with_disk(store)
    fill(cache, prompt(9))
    transfer.finish_all()
    fill(cache, prompt(9))
    assert cache.flush().result(timeout=300) is None
    assert len(store.on) == 1
    assert store.on.pop() is not threading.current_thread()
    fill(cache, prompt(9))
    flushed = cache.flush()
    cache.close()  # waits for it
    assert flushed.done()
    assert len(store.on) >= 1


@pytest.mark.parametrize("error", [ValueError("odd store"), OSError(5, "odd store")])
def test_flush_resolves_whatever_the_store_raises(error: Exception) -> None:
    store = OwnThread()
    cache, transfer, _ = with_disk(store)
    fill(cache, prompt(9))
    transfer.finish_all()
    fill(cache, prompt(9))
    store.error = error
    with pytest.raises(StoreError, match="odd store"):
        cache.flush().result(timeout=300)
    fill(cache, prompt(9))
    cache.close()  # recency may be lost


def test_a_callback_of_flush_may_close_the_cache() -> None:
    store = OwnThread()
    cache, transfer, _ = with_disk(store)
    fill(cache, prompt(9))
    transfer.finish_all()
    fill(cache, prompt(9))
    closed = threading.Event()

    def close(_: object) -> None:
        cache.close()
        closed.set()

    store.before = lambda: hooked.wait(300)
    hooked = threading.Event()
    cache.flush().add_done_callback(close)
    hooked.set()
    assert closed.wait(300)
    assert cache.closed


def test_evict_says_how_many(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    fill(cache, prompt(13))
    transfer.finish_all()
    assert cache.evict(Tier.GPU, 2) == 2
    assert cache.evict(Tier.GPU, 9) == 1
    assert cache.evict(Tier.CPU, 0) == 0
    assert cache.evict(Tier.CPU, 1) == 1
    assert cache.match(prompt(13)).tokens == 8


def test_clear_forgets_at_once_and_for_good() -> None:
    """A8: with a pack, a store and a restore on their way."""
    cache, transfer, _store = with_disk()
    fill(cache, prompt(9))
    transfer.finish_all()
    fill(cache, prompt(9, 1))
    transfer.finish(transfer.pending[0])  # packed; its store is under way
    fill(cache, prompt(9, 2))  # its pack is under way
    cleared = cache.clear()
    for seed in range(3):
        assert cache.match(prompt(9, seed)).tokens == 0
    assert not cleared.done()
    transfer.finish_all()
    assert cleared.result(timeout=0) is None
    assert cache.stats().tiers[Tier.DISK].resident == 0
    assert {tier: free(cache, tier) for tier in (Tier.GPU, Tier.CPU)} == {0: 16, 1: 16}
    assert list(cache.pages()) == []
    cache.close()


def test_clear_waits_for_a_store_it_has_to_undo() -> None:
    cache, transfer, _ = with_disk()
    fill(cache, prompt(9))
    transfer.finish(transfer.pending[0])
    (stored,) = transfer.pending
    cleared = cache.clear()
    assert ends(transfer.pending) == ["store", "drop"]
    transfer.finish(stored)
    assert ends(transfer.pending) == ["drop"]
    assert not cleared.done()
    transfer.finish_all()
    assert cleared.done()
    cache.close()


def test_a_disk_that_will_not_forget_is_loud() -> None:
    """Old pages would be found again after a restart: nobody may think they are gone."""
    cache, transfer, _ = with_disk()
    fill(cache, prompt(9))
    transfer.finish_all()
    cleared = cache.clear()
    (drop,) = transfer.pending
    transfer.finish(drop, error=OSError(5, "Input/output error"))
    with pytest.raises(StoreError, match="Input/output error"):
        cleared.result(timeout=0)
    assert cache.match(prompt(9)).tokens == 0
    cache.close()


def test_clear_of_nothing_is_done() -> None:
    cache, _ = make()
    assert cache.clear().done()
    cache.close()


def test_clear_one_tenant(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    """A6, A8."""
    alice, bob = Identity(tenant="alice"), Identity(tenant="bob")
    for who in (alice, bob):
        fill(cache, prompt(9), identity=who)
    assert cache.match(prompt(9)).tokens == 0
    cache.clear(identity=alice)
    assert cache.match(prompt(9), identity=alice).tokens == 0
    assert cache.match(prompt(9), identity=bob).tokens == 8
    with pytest.raises(ConfigError, match="identity"):
        cache.clear(identity="alice")  # type: ignore[arg-type]


def test_clear_one_tier(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    fill(cache, prompt(9))
    transfer.finish_all()
    cache.clear(tiers=[Tier.GPU])
    found = cache.match(prompt(9))
    assert (found.gpu_tokens, found.cpu_tokens) == (0, 8)


def test_open_leases_survive_a_clear(cache: kvtier.Cache) -> None:
    with cache.lease(prompt(9)) as lease:
        feed(cache, lease, prompt(9))
        cache.clear()
        feed(cache, lease, prompt(4, 5))
        assert lease.num_tokens == 13
        assert cache.match(prompt(9)).tokens == 0


# ------------------------------------------------------------------ prefetch, pin, ttl


def on_disk_only(**options: Any) -> tuple[kvtier.Cache, ManualTransfer]:
    cache, transfer, _ = with_disk(**options)
    fill(cache, prompt(17))
    transfer.finish_all()
    cache.evict(Tier.GPU, 99)
    cache.evict(Tier.CPU, 99)
    assert cache.match(prompt(17)).disk_tokens == 16
    return cache, transfer


def test_prefetch_brings_pages_to_the_host() -> None:
    cache, transfer = on_disk_only()
    future = cache.prefetch(prompt(17))
    assert not future.done()
    transfer.finish_all()
    assert future.result(timeout=0) == 16
    assert cache.match(prompt(17)).cpu_tokens == 16
    assert cache.prefetch(prompt(17)).result(timeout=0) == 16
    assert cache.prefetch([5] * 9).result(timeout=0) == 0
    cache.close()


def test_a_cancelled_prefetch_gives_its_budget_back() -> None:
    """★37: many times the host's size, cancelled at every point."""
    cache, transfer = on_disk_only(cpu=4)
    for i in range(40):
        future = cache.prefetch(prompt(17))
        if i % 3 == 1:
            transfer.finish_all()
            assert future.result(timeout=0) == 16
            assert not future.cancel()
        else:
            assert future.cancel()
            assert not cache._core.prefetches  # at once, not when it would have ended
            with pytest.raises(CancelledError):
                future.result(timeout=0)
            transfer.finish_all()
        cache.check()
        cache.evict(Tier.CPU, 99)
        assert free(cache, Tier.CPU) == 4
    assert not cache._pump._prefetches
    cache.close()


def test_a_failing_prefetch_is_a_shorter_prefix() -> None:
    cache, transfer = on_disk_only()
    future = cache.prefetch(prompt(17))
    (op,) = transfer.pending
    transfer.finish(op, 2, StoreError("bad record"))
    transfer.finish_all()
    assert future.result(timeout=0) == 8
    cache.close()


def test_closing_ends_a_prefetch() -> None:
    cache, _ = on_disk_only()
    future = cache.prefetch(prompt(17))
    cache.close()
    assert future.result(timeout=0) == 0


def test_pins_hold_and_have_a_share(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    fill(cache, prompt(33))
    transfer.finish_all()
    with cache.pin(prompt(33), owner="system prompt") as pin:
        assert (pin.tokens, pin.owner) == (32, "system prompt")
        again = cache.pin(prompt(33))
        assert again.tokens == 0  # half of 16 pages are pinned already
        cache.evict(Tier.GPU, 99)
        cache.evict(Tier.CPU, 99)
        assert cache.match(prompt(33)).tokens == 32
    pin.close()
    again.close()
    cache.evict(Tier.GPU, 99)
    cache.evict(Tier.CPU, 99)
    assert cache.match(prompt(33)).tokens == 0


def test_pages_expire(
    cache: kvtier.Cache, transfer: ManualTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("kvtier.cache.time.monotonic", lambda: now)
    fill(cache, prompt(9), ttl=10)
    fill(cache, prompt(9, 1))
    transfer.finish_all()
    now = 109.0
    cache.stats()
    assert cache.match(prompt(9)).tokens == 8
    now = 111.0
    cache.stats()
    assert cache.match(prompt(9)).tokens == 0
    assert cache.match(prompt(9, 1)).tokens == 8


def test_pages_due_while_a_lease_holds_them_go_when_it_is_released(
    cache: kvtier.Cache, transfer: ManualTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("kvtier.cache.time.monotonic", lambda: now)
    with cache.lease(prompt(9), ttl=10) as lease:
        feed(cache, lease, prompt(9))
        transfer.finish_all()
        now = 111.0
        cache.stats()
        assert cache.match(prompt(9)).tokens == 8
    cache.stats()
    assert cache.match(prompt(9)).tokens == 0


# ------------------------------------------------------------------ looking inside


def test_stats_count_bytes_of_every_tier() -> None:
    cache, transfer, _ = with_disk()
    page = LAYOUT.page_bytes()
    fill(cache, prompt(9))
    transfer.finish_all()
    cache.evict(Tier.GPU, 9)
    cache.evict(Tier.CPU, 9)
    fill(cache, prompt(9))
    transfer.finish_all()

    with cache.lease(prompt(9)) as lease:
        transfer.finish_all()
        assert lease.ready.result(timeout=0) == 8
    tiers = cache.stats().tiers
    moved = {t: (tiers[t].read_bytes // page, tiers[t].written_bytes // page) for t in tiers}
    # Down: 2 pages packed and stored.  Up: 2 from disk, through the host.
    assert moved[Tier.DISK] == (2, 2)
    assert moved[Tier.CPU] == (4, 4)
    assert moved[Tier.GPU] == (2, 2)
    cache.close()


def test_hits_and_computed_tokens_make_the_prompts(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    """A9."""
    for n in (9, 13, 13, 1, 22, 0):
        fill(cache, prompt(n))
        transfer.finish_all()
        cache.evict(Tier.GPU, 2)
    stats = cache.stats()
    assert stats.lookup_tokens == 58
    assert stats.computed_tokens + sum(t.hit_tokens for t in stats.tiers.values()) == 58
    assert stats.lookups == 6


def test_leases_pages_and_explain(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    who = Identity(tenant="t")
    with cache.lease(prompt(9), identity=who, label="chat") as lease:
        feed(cache, lease, prompt(9))
        transfer.finish_all()
        (info,) = cache.leases()
        assert (info.label, info.num_tokens, info.pages) == ("chat", 9, 3)
        assert info.state is kvtier.LeaseState.ACTIVE
        assert "test_cache.py:" in info.opened_at
    pages = list(cache.pages(identity=who))
    assert [page.depth for page in pages] == [1, 2]
    assert all(page.tiers == {Tier.GPU, Tier.CPU} and page.identity == who for page in pages)
    assert list(cache.pages(identity=Identity(tenant="u"))) == []
    reports = cache.explain(prompt(13), identity=who)
    assert [(r.start, r.reason) for r in reports] == [
        (0, "hit"),
        (4, "hit"),
        (8, "never_seen"),
    ]
    assert {r.reason for r in cache.explain(prompt(9))} == {"other_identity"}


def test_events_in_order_and_what_was_lost(
    cache: kvtier.Cache, transfer: ManualTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache._EVENTS_KEPT", 6)
    fill(cache, prompt(5, 9))
    assert list(cache.events()) == []  # recording starts here
    fill(cache, prompt(9))
    transfer.finish_all()
    keys = [page.key for page in cache.pages() if page.depth == 1], list(cache.pages())
    happened = list(cache.events())
    assert [(what, tier) for what, _, tier in happened] == [
        *[("stored", Tier.GPU)] * 2,
        *[("stored", Tier.CPU)] * (len(happened) - 2),
    ]
    assert {key for _, key, _ in happened} <= {page.key for page in keys[1]}
    assert list(cache.events()) == []
    for seed in range(1, 5):
        fill(cache, prompt(9, seed))
        transfer.finish_all()
    lost = list(cache.events())
    assert lost[0] == ("dropped", b"", Tier.GPU)
    assert len(lost) == 7
    assert "kvtier_events_dropped_total 0" not in cache.prometheus()
    fill(cache, prompt(9, 5))
    assert next(cache.events())[0] != "dropped"


def test_a_lease_without_writes_leaves_no_event(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    """A12."""
    cache.events()
    fill(cache, prompt(9), write=False)
    transfer.finish_all()
    assert list(cache.events()) == []
    assert list(cache.pages()) == []


def test_check_finds_damage(cache: kvtier.Cache) -> None:
    cache.check()
    frames = cache._core.residency.pools[0]
    taken = frames.take(1)
    with pytest.raises(kvtier.InvariantError, match="I1"):
        cache.check()
    frames.give(taken)


def test_what_the_disk_would_not_forget_is_not_served() -> None:
    """The deletion fails; new weights' pages under the same keys must win all the same."""
    store, sizes = MemoryStore(), config()
    geometry = geometry_of(LAYOUT, sizes, store)
    plane = DeviceTransfer(LAYOUT, geometry, device="cpu", store=store, config=sizes)

    with kvtier.Cache(LAYOUT, sizes, model="m", transfer=plane, stores={Tier.DISK: store}) as cache:

        def serve(value: float) -> list[float]:
            """Compute what is missing as ``value``; returns what was there."""
            with cache.lease(prompt(9)) as lease:
                done = lease.ready.result(timeout=300)
                with cache.step([(lease, prompt(9)[done:])]) as step:
                    device = step.to_device()
                    rows = device.layer(0).rows("latent")
                    rows[device.slot_mapping["latent"]] = value
                known = torch.from_numpy(lease.slot_mapping(0, done)["latent"]).long()
                cache.flush().exception(timeout=300)
                found: list[float] = rows[known][:, 0].tolist()
                return found

        assert serve(1.0) == []
        store.fail_next(1)
        assert isinstance(cache.clear().exception(timeout=300), StoreError)
        assert serve(2.0) == []
        cache.evict(Tier.GPU, 99)
        cache.evict(Tier.CPU, 99)
        assert set(serve(2.0)) <= {2.0}
