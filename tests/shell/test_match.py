"""``Cache.match`` beside other threads: what is not there is told without waiting."""

import sys
import threading

import pytest

from kvtier import CacheClosed, pack
from kvtier.types import PrefixMatch, Tier
from tests.shell.kit import fill, make, prompt

NOTHING = PrefixMatch(0, 0, 0, 0, 0, 0)


def test_a_miss_waits_for_nobody() -> None:
    cache, _ = make(cpu=0)
    with cache:
        fill(cache, prompt(9))
        assert cache.match(prompt(9)).gpu_tokens == 8
        with cache._pump._lock:  # another thread is at work in the core
            assert cache.match(prompt(9, 1)) == NOTHING
    with pytest.raises(CacheClosed):
        cache.match(prompt(9, 1))


def test_what_is_held_is_found_whatever_others_do() -> None:
    """One thread fills and evicts all the time; a leased prefix is never missed meanwhile, and
    what was never there is never found."""
    cache, _ = make(gpu=16, cpu=0)
    held, other = pack(prompt(9)), pack(prompt(9, 1))
    going = threading.Event()
    going.set()

    def churn() -> None:
        seed = 0
        while going.is_set():
            fill(cache, prompt(9, 2 + seed % 50))
            cache.evict(Tier.GPU, 2)
            seed += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=churn)
    try:
        with cache, cache.lease(prompt(9)) as lease:
            with cache.step([(lease, prompt(9))]):
                pass
            thread.start()
            for _ in range(3000):
                assert cache.match(held).gpu_tokens == 8
                assert cache.match(other) == NOTHING
            going.clear()
            thread.join()
    finally:
        going.clear()
        sys.setswitchinterval(interval)
