"""``check()`` itself: each invariant, broken by hand, is reported by its number; all violations of
a state are collected before raising."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, Copy
from kvtier.core.geometry import Geometry
from kvtier.core.leases import LeaseRecord
from kvtier.core.machine import CacheCore
from kvtier.core.tree import Node
from kvtier.errors import InvariantError
from kvtier.types import Identity, LeaseState
from tests.property.server import FakeServer, packed, server

Damage = Callable[[CacheCore, LeaseRecord], object]


def scene() -> tuple[FakeServer, LeaseRecord]:
    """A lease with shared pages, a duplicate, a partial page and a tail; something on every tier,
    operations of each kind in flight."""
    geometry = Geometry(
        page_tokens=2,
        gpu_pages=16,
        cpu_frames=16,
        disk_frames=16,
        max_leases=6,
        has_tails=True,
        checkpoint_frames=1,
        parked_frames=2,
        gpu_states=6,
        gpu_checkpoints=6,
        window=3,
        window_page=2,
        gpu_windows=32,
    )
    made = server(geometry, eviction="lru")
    made.serve([1, 1, 2, 2])
    made.drain()
    rec = made.open([1, 1, 2, 2, 3, 3, 4])
    twin = made.open([1, 1, 2, 2, 3, 3, 4])
    assert rec is not None and twin is not None
    made.drain()
    made.step([rec, twin], [[3, 3, 4], [3, 3, 4]])
    paused = made.open([6, 6, 6])
    assert paused is not None
    made.step([paused], [[6, 6, 6]])
    made.pause(paused)
    made.core.pin(packed([1, 1]))
    made.sound()
    return made, twin


def node_at(core: CacheCore, depth: int) -> Node:
    nodes = core.residency.tree.iterate(core.residency.root(Identity()))
    return next(n for n in nodes if n.depth == depth and n.page(8)[0] != 6)


def copy_at(core: CacheCore, depth: int, slot: int) -> Copy:
    copy = node_at(core, depth).copies[slot]
    assert copy is not None
    return copy


def pop_free(core: CacheCore, slot: int) -> int:
    return core.residency.pools[slot].take(1)[0]


def set_(thing: object, **values: object) -> None:
    for name, value in values.items():
        setattr(thing, name, value)


def double(core: CacheCore, rec: LeaseRecord) -> None:
    one, two = copy_at(core, 1, CPU), copy_at(core, 2, CPU)
    two.frames = one.frames


def dead_wait(core: CacheCore, rec: LeaseRecord) -> None:
    rec.state, rec.waits = LeaseState.RESTORING, {10**6}


def lonely(core: CacheCore, rec: LeaseRecord) -> None:
    """A node without any copy, child or pin."""
    core.residency.tree.extend(core.residency.root(Identity()), packed([8, 8]).data, 0)


def orphan_page(core: CacheCore, rec: LeaseRecord) -> None:
    node = node_at(core, 1)
    core.residency.pools[CPU].give(copy_at(core, 1, CPU).frames)
    node.copies[CPU] = None


def foreign_row(core: CacheCore, rec: LeaseRecord) -> None:
    one, two = copy_at(core, 1, DISK), copy_at(core, 2, DISK)
    one.frames, two.frames = two.frames, one.frames


def two_writers(core: CacheCore, rec: LeaseRecord) -> None:
    one, two = list(core.operations.running.values())[:2]
    two.moves = [*two.moves, one.moves[0]]


DAMAGES: list[tuple[str, Damage]] = [
    ("I1: pool 0 differs", lambda c, r: pop_free(c, GPU)),
    ("I1: pool 1 differs", lambda c, r: pop_free(c, CPU)),
    ("I1: pool 3 differs", lambda c, r: pop_free(c, GPU + CHECKPOINT)),
    ("I1: frames", double),
    ("I1: state slots differ", lambda c, r: c.tails.states.take()),
    ("I1: window pages differ", lambda c, r: c.tails.windows.take()),
    ("I1: pool 0 has lost", lambda c, r: c.residency.pools[GPU]._free.pop()),
    ("I1: window pages are lost", lambda c, r: c.tails.windows._free.pop()),
    ("I1: private frames", lambda c, r: c.operations.private.hold(r.frames[-1])),
    ("I1: private frames", lambda c, r: r.owned.__setitem__(-1, False)),
    ("I1: disk rows", lambda c, r: set_(c.residency.disk, used=1)),
    ("I1: disk over capacity", lambda c, r: set_(c.residency.disk, capacity=1)),
    ("I1: 1 disk frames quarantined", lambda c, r: set_(c.residency.disk, quarantined=1)),
    ("I2: node 2: pins", lambda c, r: set_(node_at(c, 2), pins=7)),
    ("I2: node 2: pins 2/2, keeps 1/0", lambda c, r: set_(node_at(c, 2), keeps=1)),
    ("I2: node 2: pins or tick above", lambda c, r: set_(node_at(c, 2), tick=10**9)),
    ("I2: the root of", lambda c, r: set_(r.root, pins=9)),
    ("readers", lambda c, r: set_(copy_at(c, 1, CPU), readers=2)),
    ("I3: copy in 0 filled by 77", lambda c, r: set_(copy_at(c, 1, GPU), writer=77)),
    ("I3: copy in 0 ready=False", lambda c, r: set_(copy_at(c, 1, GPU), ready=False)),
    ("belongs elsewhere", lambda c, r: set_(copy_at(c, 1, GPU), node=node_at(c, 2))),
    ("I3: two operations fill one copy", two_writers),
    ("I3: tail of state", lambda c, r: set_(r.tail, ops=3)),
    ("I3: disk row", lambda c, r: c.residency.disk.busy.__setitem__(0, 4)),
    ("waits for {4}", lambda c, r: set_(r, waits={4})),
    ("waits for set()", lambda c, r: set_(r, state=LeaseState.RESTORING)),
    ("waits for an op that has ended", dead_wait),
    ("active on a stale tail", lambda c, r: set_(r, tail_ok=False)),
    ("I5: lease 3: 7 tokens", lambda c, r: r.tokens.pop()),
    ("I5: lease 3: length 7, capacity 99", lambda c, r: set_(r, capacity=99)),
    ("block table differs", lambda c, r: c.block_tables.__setitem__((r.row, 0), 15)),
    ("block table differs", lambda c, r: c.block_tables.__setitem__((r.row, 9), 0)),
    ("length row differs", lambda c, r: c.lengths.__setitem__(r.row, 1)),
    ("names a frame it does not pin", lambda c, r: r.frames.__setitem__(0, 15)),
    ("in tier 1, its parent is not", orphan_page),
    ("checkpoint of node 1 is in tier 1 without its page", orphan_page),
    ("I6: node 1 counts 5 in 1", lambda c, r: set_(node_at(c, 1), branches=[0, 4, 0])),
    ("names a disk row that is not its own", foreign_row),
    ("linked differently", lambda c, r: c.residency.disk_nodes.clear()),
    ("I7: ", lambda c, r: set_(c.residency.tree, num_nodes=99)),
    ("is kept for nothing", lonely),
    ("I9: node 1 has no READY copy", lonely),
    ("stand under roots that are gone", lambda c, r: c.residency.tree.roots.clear()),
]


def test_nothing_is_reported_of_a_sound_state() -> None:
    made, _ = scene()
    made.core.check()


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_damage_is_reported(message: str, damage: Damage) -> None:
    made, rec = scene()
    damage(made.core, rec)
    with pytest.raises(InvariantError) as failure:
        made.core.check()
    assert message in str(failure.value)


def test_all_violations_are_listed() -> None:
    made, rec = scene()
    pop_free(made.core, GPU)
    rec.tail_ok = False
    node_at(made.core, 2).pins = 7
    with pytest.raises(InvariantError) as failure:
        made.core.check()
    lines = str(failure.value).splitlines()
    assert len(lines) >= 3 and {line[:2] for line in lines} >= {"I1", "I2", "I4"}
