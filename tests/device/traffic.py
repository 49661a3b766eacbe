"""Random traffic on a cache of tiny tiers: many threads of requests that share prefixes, branch,
abort, pause, fork, roll back and are refused, over streams that are late and a store that fails.

Every byte a lease may read is checked against ``DeviceModel``; whatever is free is poisoned under
the requests' feet.  A seed fixes what each thread asks for, not how the threads interleave; ``log``
says what they did last.
"""

import contextlib
import errno
import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvtier
from kvtier import Identity, OutOfPages, Tier
from kvtier.core.keys import ANONYMOUS, chain_base
from kvtier.data import records, transfer
from kvtier.data.streams import Lane
from kvtier.errors import StoreError
from kvtier.stores import LmdbStore
from kvtier.stores.files import FileIO
from tests.device.byte_model import LAYOUTS, SMALL_V4, V32, DeviceModel, sized

__all__ = ["Traffic"]

WAIT_S = 300.0
"""Longer than anything may take; past it something hangs."""
MODEL = b"bytes"
IDENTITIES = (ANONYMOUS, Identity(tenant="a"), Identity(tenant="a", salt=b"b"))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layout's tiers: too small for what is asked of them."""

    gpu_pages: int
    cpu_frames: int
    staging_frames: int
    disk_bytes: str
    most_pages: int
    """Of the longest conversation."""


SIZES = {
    "mla": Sizes(26, 34, 5, "6MiB", 9),
    "gqa": Sizes(26, 34, 5, "6MiB", 9),
    "v32": Sizes(26, 34, 5, "4MiB", 9),
    "v4": Sizes(10, 80, 42, "12MiB", 4),  # a paused tail takes 39 frames
    "v4-small": Sizes(10, 34, 15, "5MiB", 4),
}


class FaultyIO(FileIO):
    """Files that fail with EIO, as often as ``rate`` says."""

    def __init__(self, seed: int) -> None:
        self.rate = 0.0
        self.injected = 0
        self._random = random.Random(seed)

    def _fail(self, name: str) -> None:
        if self.rate and self._random.random() < self.rate:
            self.injected += 1
            raise OSError(errno.EIO, f"injected: {name}")

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        self._fail("read")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self._fail("write")
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)

    def commit(self, txn: Any) -> None:
        if self.rate and self._random.random() < self.rate:
            self.injected += 1
            txn.abort()
            raise OSError(errno.EIO, "injected: commit")
        super().commit(txn)


class Talks:
    """The conversations everybody knows: of few beginnings, going on or branching off."""

    def __init__(self, page: int, most: int) -> None:
        self._page = page
        self._most = most
        self._lock = threading.Lock()
        self._known: deque[tuple[list[int], Identity]] = deque(maxlen=24)
        self._system = [self._random(random.Random(i), 3 * page // 2 + 7 * i) for i in range(3)]

    @staticmethod
    def _random(rng: random.Random, n: int) -> list[int]:
        return [rng.randrange(100_000) for _ in range(n)]

    def pick(self, rng: random.Random) -> tuple[list[int], Identity]:
        """A prompt: mostly one that somebody has seen the beginning of."""
        turn = self._random(rng, rng.randint(1, 2 * self._page))
        with self._lock:
            known = rng.choice(self._known) if self._known else None
        chance = rng.random()
        if known is None or chance < 0.2:
            tokens, who = rng.choice(self._system), rng.choice(IDENTITIES)
        else:
            tokens, who = known
            if chance < 0.3:
                return tokens, who
            if chance < 0.55:
                tokens = tokens[: rng.randint(1, len(tokens))]
            elif chance < 0.6:
                who = rng.choice(IDENTITIES)
        if len(tokens) + len(turn) > self._most:
            tokens = rng.choice(self._system)
        return [*tokens, *turn], who

    def add(self, tokens: list[int], who: Identity) -> None:
        if not tokens:
            return
        with self._lock:
            self._known.append((tokens[: self._most], who))


class Abandoned(Exception):
    """A forward pass fails."""


class Traffic:
    """One cache on ``directory`` and the threads that use it.

    ``run`` for some time, as often as wanted, then ``close``.  What went wrong is in ``failures``.
    ``early``: restores of any size end with their pages still on the way, as large ones do (None:
    by chance, as are the policies).
    """

    def __init__(
        self,
        layout: str,
        device: str,
        directory: Path,
        *,
        seed: int,
        threads: int,
        early: bool | None = None,
    ) -> None:
        self.layout = {**LAYOUTS, "v4-small": SMALL_V4, "v32": V32}[layout]
        self.sizes = sizes = SIZES[layout]
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.log: deque[str] = deque(maxlen=300)
        self.seed = seed
        self.io = FaultyIO(seed)
        self._early = (
            transfer.EARLY_BYTES,
            records.LAYERS_BYTES,
            records.FIRST_LAYERS_BYTES,
            records.PIECE_BYTES,
        )
        dice = random.Random(seed)
        if dice.random() < 0.5 if early is None else early:
            transfer.EARLY_BYTES = records.LAYERS_BYTES = 1
            records.FIRST_LAYERS_BYTES = records.PIECE_BYTES = 1
        self._threads = threads
        self._lock = threading.Lock()
        self._born = time.monotonic()
        self._rounds = 0
        config = sized(
            self.layout,
            gpu=sizes.gpu_pages,
            cpu=sizes.cpu_frames,
            max_leases=3 * threads,
            staging_bytes=sizes.staging_frames * self.layout.frame_bytes(),
            on_full=dice.choice(("wait", "skip")),
            wait_s=0.05,
            io_threads=2,
            checkpoints=dice.choice((kvtier.Dense(), kvtier.Adaptive())),
            eviction=dice.choice(("adaptive", "lru", "s3fifo")),
            codec=dice.choice(({}, {}, {"history": 1})),
        )
        self.store = LmdbStore(
            directory,
            fingerprint=chain_base(self.layout.fingerprint, MODEL),
            frame_bytes=self.layout.frame_bytes(),
            limit_bytes=kvtier.config.parse_bytes(sizes.disk_bytes),
            codec=config.codec,
            checkpoint_frames=self.layout.checkpoint_frames(),
            io=self.io,
        )
        try:
            self.cache = kvtier.Cache(
                self.layout, config, model=MODEL, device=device, stores={Tier.DISK: self.store}
            )
        except BaseException:
            self.store.close()
            raise
        self.model = DeviceModel(self.cache, several_streams=dice.random() < 0.5)
        self.talks = Talks(self.layout.page_tokens, sizes.most_pages * self.layout.page_tokens)
        self._jitter(random.Random(seed))
        with self.model.computing():
            self.model.pool.poison_all()
            self.model.transfer.host.poison(range(sizes.cpu_frames))
            self.model.transfer.fence(None)

    # ------------------------------------------------------------------ what disturbs

    def _jitter(self, rng: random.Random) -> None:
        """Now and then what is queued on a lane starts late."""
        streams = self.model.transfer._streams
        queue = type(streams).on.__get__(streams)

        @contextlib.contextmanager
        def on(lane: Lane, after: tuple[Any, ...] = ()) -> Iterator[None]:
            with queue(lane, after):
                if rng.random() < 0.1:
                    self._late(rng.random() * 0.002)
                yield

        streams.on = on

    def _late(self, seconds: float) -> None:
        if self.model.on_gpu:
            torch.cuda._sleep(int(seconds * 1.9e9))
        else:
            time.sleep(seconds)

    def _disturb(self, until: float, rng: random.Random) -> None:
        """Poison under everybody's feet, faults that come and go, invariants."""
        with self.model.computing():
            while time.monotonic() < until and not self.failures:
                self.model.poison(rng.choice((4, 4, 4, 4, 16, 1 << 30)))
                self.count("poisoned")
                if rng.random() < 0.1:
                    self.io.rate = rng.choice((0.0, 0.0, 0.0, 0.02, 0.3))
                if rng.random() < 0.2:
                    self.cache.check()
                    self.count("checks")
                time.sleep(rng.random() * 0.02)
        self.io.rate = 0.0

    # ------------------------------------------------------------------ running

    def run(self, seconds: float) -> None:
        """Requests of every kind for so long, then quiet: no lease is left."""
        until = time.monotonic() + seconds
        self._rounds += 1
        tasks: list[Callable[[], None]] = []
        for i in range(self._threads):
            rng = random.Random(f"{self.seed} {self._rounds} {i}")
            tasks.append(lambda i=i, rng=rng: Requests(self, i, rng).run(until))  # type: ignore[misc]
        tasks.append(lambda: self._disturb(until, random.Random(f"{self.seed} d {self._rounds}")))
        threads = [threading.Thread(target=self._told, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()) + 2 * WAIT_S)
            if thread.is_alive():
                self.fail("a thread hangs")
                return
        self._told(self._quiet)

    def _quiet(self) -> None:
        self.settle(self.cache.flush())
        self.cache.check()
        self.count("checks")
        stats = self.cache.stats()
        if open_leases := self.cache.leases():
            raise AssertionError(f"leases left open: {open_leases}")
        for tier, each in stats.tiers.items():
            held = (each.reserved, each.in_flight, each.pinned)
            assert held == (0, 0, 0), f"{tier.name}: reserved, in flight, pinned are {held}"

    def check_empty(self) -> None:
        """Clear everything; what then is not free, of any tier, is a failure."""
        self._told(self._empty)

    def _empty(self) -> None:
        self.settle(self.cache.clear())
        self.settle(self.cache.flush())
        self.cache.check()
        for tier, each in self.cache.stats().tiers.items():
            assert each.free == each.capacity, f"{tier.name}: {each} after clear"
        core = self.cache._core
        assert core.residency.tree.num_nodes == 0, "nodes are left after clear"
        if self.layout.has_tails:
            tails = core.tails
            assert not tails.states.taken() and not tails.windows.taken(), "tails leak"

    def close(self, *, drain: bool = True) -> None:
        transfer.EARLY_BYTES, records.LAYERS_BYTES, *rest = self._early
        records.FIRST_LAYERS_BYTES, records.PIECE_BYTES = rest
        self.io.rate = 0.0
        self._told(lambda: self.cache.close(drain=drain))

    def _told(self, task: Callable[[], None]) -> None:
        try:
            with self.model.computing():
                task()
        except BaseException:  # noqa: BLE001 - told to whoever asks for ``failures``
            self.fail(traceback.format_exc())

    def fail(self, what: str) -> None:
        with self._lock:
            self.failures.append(what)
            self.log.append(f"{self._now()} FAILED: {what.strip().splitlines()[-1]}")

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    def note(self, who: int, what: str) -> None:
        self.log.append(f"{self._now()} [{who}] {what}")

    def _now(self) -> str:
        return f"{time.monotonic() - self._born:9.4f}"

    def settle(self, future: "Future[Any]") -> Any:
        """What a future says; a medium that fails is part of the game."""
        try:
            return future.result(timeout=WAIT_S)
        except StoreError:
            self.count("store errors")
            if not self.io.injected:
                raise
            return None


class Requests:
    """One thread of requests."""

    def __init__(self, traffic: Traffic, number: int, rng: random.Random) -> None:
        self.traffic = traffic
        self.cache = traffic.cache
        self.model = traffic.model
        self.number = number
        self.rng = rng
        self.page = traffic.layout.page_tokens
        self.later: list[Future[int]] = []
        self.pins: list[kvtier.Pin] = []

    def run(self, until: float) -> None:
        try:
            while time.monotonic() < until and not self.traffic.failures:
                self.aside()
                self.request()
        finally:
            for pin in self.pins:
                pin.close()
            for future in self.later:
                future.cancel()

    def note(self, what: str) -> None:
        self.traffic.note(self.number, what)

    def count(self, what: str, n: int = 1) -> None:
        self.traffic.count(what, n)

    def some(self, chance: float) -> bool:
        return self.rng.random() < chance

    # ------------------------------------------------------------------ beside requests

    def aside(self) -> None:
        """What a server does between requests."""
        rng, cache = self.rng, self.cache
        if self.some(0.1):
            tokens, who = self.traffic.talks.pick(rng)
            self.note(f"prefetch {len(tokens)}")
            future = cache.prefetch(tokens, identity=who)
            self.count("prefetches")
            if self.some(0.3):
                self.count("prefetches cancelled", future.cancel())
            else:
                self.later.append(future)
        if self.later and self.some(0.2):
            future = self.later.pop(rng.randrange(len(self.later)))
            if self.some(0.5):
                self.count("prefetches cancelled", future.cancel())
            else:
                with contextlib.suppress(CancelledError):
                    future.result(timeout=WAIT_S)
        if self.some(0.03):
            tokens, who = self.traffic.talks.pick(rng)
            self.pins.append(cache.pin(tokens, identity=who))
        if self.pins and self.some(0.2 * len(self.pins)):
            self.pins.pop(0).close()
        if self.some(0.05):
            tier, n = rng.choice((Tier.GPU, Tier.CPU, Tier.DISK)), rng.randint(1, 12)
            self.note(f"evict {n} of {tier.name}")
            self.count("evicted", cache.evict(tier, n))
        if self.some(0.01):
            tiers = rng.choice((None, None, [Tier.GPU], [Tier.CPU], [Tier.GPU, Tier.CPU]))
            who = rng.choice((None, *IDENTITIES))
            self.note(f"clear {who} in {tiers}")
            self.count("clears")
            future = cache.clear(identity=who, tiers=tiers)
            if self.some(0.5):
                self.traffic.settle(future)
        if self.some(0.02):
            self.note("flush")
            self.traffic.settle(cache.flush(to=rng.choice((Tier.CPU, Tier.DISK))))
        if self.some(0.05):
            tokens, who = self.traffic.talks.pick(rng)
            found = cache.match(tokens, identity=who)
            assert found.tokens <= found.history_tokens <= len(tokens)
            assert found.tokens < len(tokens)
            cache.explain(tokens, identity=who)
            cache.stats()

    # ------------------------------------------------------------------ one request

    def request(self) -> None:
        rng = self.rng
        tokens, who = self.traffic.talks.pick(rng)
        options: dict[str, Any] = {}
        if self.some(0.05):
            options["read"] = False
        if self.some(0.1):
            options["write"] = False
        if self.some(0.05):
            options["max_reuse"] = rng.randrange(len(tokens))
        if self.some(0.3):
            options["reserve"] = rng.randint(0, 2 * self.page)
        if self.some(0.05):
            options["ttl"] = rng.random()
        if self.some(0.1):
            options["priority"] = rng.randint(-1, 2)
        self.note(f"lease {len(tokens)} {options}")
        try:
            lease = self.cache.lease(tokens, identity=who, **options)
        except OutOfPages:
            self.count("leases refused")
            time.sleep(rng.random() * 0.005)
            return
        self.count("requests")
        with lease:
            if self.some(0.1):
                time.sleep(rng.random() * 0.002)
                self.note("abort")
                self.count("aborts")
                return
            self.wait(lease)
            for tier, n in lease.restored.items():
                self.count(f"restored from {tier.name}", n // self.page)
            self.serve(lease, tokens, write=options.get("write", True))

    def serve(self, lease: kvtier.Lease, tokens: list[int], *, write: bool) -> None:
        """Prefill and decode, with whatever happens to a request in between."""
        goal = [*tokens, *self.fresh(self.rng.randint(1, 12))]
        while lease.num_tokens < len(goal):
            if self.some(0.03):
                self.note(f"abort at {lease.num_tokens}")
                self.count("aborts")
                return
            if self.some(0.05) and not self.pause(lease):
                return
            if self.some(0.03):
                self.truncate(lease)
            if self.some(0.06):
                self.branch(lease, goal)
            if not self.step(lease, goal):
                self.count("requests given up")
                return
        self.check(lease)
        if write:
            self.traffic.talks.add(goal, lease._record.identity)

    def step(self, lease: kvtier.Lease, goal: list[int], tries: int = 20) -> bool:
        """The next chunk of a lease; False if there is no room for long."""
        rng, start = self.rng, lease.num_tokens
        decoding = self.some(0.3) or len(goal) - start < 14
        size = rng.randint(1, 3) if decoding else rng.randint(1, 3 * self.page // 2)
        new = goal[start : start + size]
        most = self.traffic.layout.max_rejected
        rejected = self.fresh(rng.randint(0, most or 4)) if self.some(0.5) else []
        if rejected and self.some(0.2):
            new = []  # a pass that drafts, or a verification of which nothing is left
            self.count("steps with nothing accepted")
        fails = self.some(0.02)
        for _ in range(tries):
            try:
                with self.cache.step([(lease, [*new, *rejected])]) as step:
                    if self.some(0.1):
                        self.traffic._late(rng.random() * 0.002)
                    self.model.write(step)
                    if fails:
                        raise Abandoned
                    step.accept(lease, len(new))
            except OutOfPages:
                self.count("steps refused")
                if self.some(0.1) and not self.pause(lease):
                    return False
                time.sleep(rng.random() * 0.004)
                continue
            except Abandoned:
                self.note("a step fails")
                self.count("steps failed")
                self.wait(lease)
                return True
            self.count("steps")
            self.count("tokens", len(new))
            self.count("tokens rejected", len(rejected))
            if self.some(0.1):
                self.check(lease)
            return True
        return False

    def pause(self, lease: kvtier.Lease) -> bool:
        """Pause and resume; False if there is no way back for now."""
        self.note(f"pause at {lease.num_tokens}")
        self.count("pauses")
        at = lease.num_tokens
        paused = lease.pause()
        if self.some(0.1):
            return False  # released while it is on its way down
        paused.result(timeout=WAIT_S)
        for _ in range(20):
            try:
                lease.resume()
                break
            except OutOfPages:
                time.sleep(self.rng.random() * 0.004)
        else:
            return False
        if self.some(0.1):
            return False  # and on its way up
        self.wait(lease)
        assert lease.num_tokens <= at
        self.count("resumed whole", lease.num_tokens == at)
        return True

    def truncate(self, lease: kvtier.Lease) -> None:
        n = self.rng.randint(0, lease.num_tokens)
        self.note(f"truncate {lease.num_tokens} to {n}")
        self.count("truncates")
        try:
            assert lease.truncate(n) <= n
        except OutOfPages:
            self.count("truncates refused")
            self.check(lease)
            return
        self.wait(lease)
        assert lease.num_tokens <= n

    def branch(self, lease: kvtier.Lease, goal: list[int]) -> None:
        """A fork that goes its own way for a while, beside its parent in the same steps."""
        self.note(f"fork at {lease.num_tokens}")
        try:
            kid = lease.fork()
        except OutOfPages:
            self.count("forks refused")
            return
        self.count("forks")
        with kid:
            if self.some(0.1):
                return
            self.wait(kid)
            own = [*kid.tokens().tolist(), *self.fresh(2 * self.page)]
            for _ in range(self.rng.randint(1, 4)):
                a, b = lease.num_tokens, kid.num_tokens
                mine, theirs = goal[a : a + self.rng.randint(1, 5)], own[b : b + self.page // 2]
                if not mine or not theirs:
                    break
                over = self.fresh(self.rng.randint(0, self.traffic.layout.max_rejected or 4))
                try:
                    with self.cache.step([(kid, theirs), (lease, [*mine, *over])]) as step:
                        self.model.write(step)
                        step.accept(lease, len(mine))
                except OutOfPages:
                    self.count("steps refused")
                    break
                self.count("steps")
                self.count("tokens", len(mine) + len(theirs))
                self.count("tokens rejected", len(over))
            self.check(kid)
            self.check(lease)
            if self.some(0.3):
                self.traffic.talks.add(kid.tokens().tolist(), kid._record.identity)

    # ------------------------------------------------------------------ what must hold

    def wait(self, lease: kvtier.Lease) -> None:
        """Until it is ready; then all that it may read is right."""
        lease.ready.result(timeout=WAIT_S)
        self.check(lease)

    def check(self, lease: kvtier.Lease) -> None:
        try:
            self.count("rows checked", self.model.check(lease))
        except AssertionError as error:
            restored = {tier.name: n for tier, n in lease.restored.items() if n}
            raise AssertionError(f"other bytes (restored: {restored}): {error}") from error
        self.count("leases checked")

    def fresh(self, n: int) -> list[int]:
        return [self.rng.randrange(100_000) for _ in range(n)]
