"""A hash that always collides changes nothing (A1).

In memory pages are compared by their tokens.  Keys meet only in the disk's table, which compares
them in full and hashes by half of them: all halves equal is merely slow.  Two pages with one whole
128-bit key cannot be told apart by the table; their records are, by the tokens and the parent they
carry: such a page is never served, it is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.core import keys, lookup, lower, report, residency, restore
from kvtier.core.geometry import Geometry
from kvtier.types import LeaseState, Tier
from tests.property import test_core_machine
from tests.property.server import packed, server

MODULES = (keys, lookup, lower, report, residency, restore, test_core_machine)


@contextmanager
def replaced(name: str, function: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            if hasattr(module, name):
                patch.setattr(module, name, function)
        yield


@pytest.mark.timeout(600)
def test_equal_halves_change_nothing() -> None:
    """The whole state machine with keys whose hashed halves are all equal."""
    page_key, checkpoint_key = keys.page_key, keys.checkpoint_key

    def half_page(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
        return bytes(8) + page_key(parent, tokens, extra)[8:]

    def half_checkpoint(page: bytes) -> bytes:
        return bytes(8) + checkpoint_key(page)[8:]

    profile = settings.default
    assert profile is not None
    few = settings(profile, max_examples=max(25, profile.max_examples // 8))
    with replaced("page_key", half_page), replaced("checkpoint_key", half_checkpoint):
        run_state_machine_as_test(test_core_machine.CoreMachine, settings=few)


def test_equal_keys_on_disk_are_a_miss() -> None:
    """Whole keys collide: what the disk gives back is compared, refused and forgotten."""
    geometry = Geometry(page_tokens=2, gpu_pages=8, cpu_frames=8, disk_frames=8)
    with replaced("page_key", lambda parent, tokens, extra=b"": b"k" * 16):
        made = server(geometry, eviction="lru", events=False)
        made.serve([1, 2])
        made.drain()
        made.cold(Tier.GPU, Tier.CPU)
        found = made.core.match(packed([7, 7, 9]))
        assert found.disk_tokens == 2  # a match is a number, not a claim
        rec = made.open([7, 7, 9])
        assert rec is not None and rec.state is LeaseState.RESTORING
        made.drain()
        assert rec.state is LeaseState.ACTIVE and rec.length == 0
        made.plane.check_lease(made.core, rec, 0)
        assert made.core.stats().tiers[Tier.DISK].faults == 1
        assert not made.disk.records


def test_ghosts_that_look_alike_are_a_hint_only() -> None:
    """What is remembered of evicted pages is how they began: equal beginnings cost nothing but
    an explanation."""
    geometry = Geometry(page_tokens=32, gpu_pages=4)
    made = server(geometry, eviction="lru")
    page, alike = [5] * 31 + [1], [5] * 31 + [2]
    made.serve(page, chunk=32)
    made.cold(Tier.GPU)
    assert made.core.match(packed([*alike, 0])).history_tokens == 0
    assert made.core.explain(packed([*alike, 0]))[0].reason == "evicted"
    made.serve(alike, chunk=32)
    made.sound()
    assert made.core.match(packed([*page, 0])).history_tokens == 0
