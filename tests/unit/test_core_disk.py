"""The disk table against a dictionary of rows: found by key, whatever comes, goes and is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core import disk as disk_module
from kvtier.core.disk import DiskTable
from kvtier.seams import ENTRY

ROOTS = [bytes([9]) * 15 + bytes([i]) for i in range(3)]


def key_of(number: int, heads: int = 1 << 32) -> bytes:
    """A key; with few ``heads`` the halves that the index hashes by are mostly equal."""
    return (number % heads).to_bytes(8, "little") + number.to_bytes(8, "little")


def entries(rows: list[tuple[bytes, bytes, int, int, int]]) -> Any:
    """``Store.scan`` of (key, parent, tick, depth, frames), checkpoints by their parent's depth."""
    out = np.zeros(len(rows), dtype=ENTRY)
    depths = {key: depth for key, _, _, depth, _ in rows}
    for i, (key, parent, tick, depth, frames) in enumerate(rows):
        tail = depths.get(parent) == depth
        out[i] = (np.void(key), np.void(parent), tick, depth, frames, tail)
    return out


def table(*specs: tuple[int, int, int], capacity: int = 1 << 20) -> tuple[DiskTable, list[int]]:
    """A table of one-frame rows (index of the parent or -1, depth, tick)."""
    disk = DiskTable(capacity)
    rows: list[int] = []
    for i, (parent, depth, tick) in enumerate(specs):
        above = rows[parent] if parent >= 0 else -1
        rows.append(disk.add(key_of(i), above, ROOTS[0], depth, 1, tick))
    return disk, rows


@dataclass
class Row:
    parent: bytes
    root: bytes
    depth: int
    frames: int
    tick: int
    checkpoint: bool
    busy: int = 0


class DiskMachine(RuleBasedStateMachine):
    """Rows by key in a dictionary; quarantined frames in a number."""

    @initialize(
        capacity=st.integers(1, 24),
        heads=st.sampled_from([1, 2, 4, 1 << 32]),
        start=st.sampled_from([1, 2, 64]),
    )
    def start(self, capacity: int, heads: int, start: int) -> None:
        self.was, disk_module._START = disk_module._START, start
        self.disk = DiskTable(capacity)
        self.capacity, self.heads = capacity, heads
        self.model: dict[bytes, Row] = {}
        self.used = self.quarantined = self.clock = self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "was"):
            disk_module._START = self.was

    # ------------------------------------------------------------------ the model
    def kids(self, key: bytes) -> list[bytes]:
        return [k for k, r in self.model.items() if r.parent == key]

    def under(self, key: bytes) -> set[bytes]:
        out = set()
        for kid in self.kids(key):
            out |= {kid} | self.under(kid)
        return out

    def row(self, key: bytes) -> int:
        found = self.disk.find(key)
        assert found >= 0
        return found

    def drop(self, key: bytes) -> None:
        self.used -= self.model.pop(key).frames

    # ------------------------------------------------------------------ changes
    @rule(data=st.data(), tail=st.booleans(), frames=st.integers(1, 3))
    def add(self, data: Any, tail: bool, frames: int) -> None:
        self.count += 1
        self.clock += data.draw(st.integers(0, 1))
        key = key_of(self.count, self.heads)
        pages = sorted(k for k, r in self.model.items() if not r.checkpoint)
        parent = data.draw(st.sampled_from([*pages, *([] if tail and pages else ROOTS)]))
        above = self.model.get(parent)
        if above is not None and tail and any(self.model[k].checkpoint for k in self.kids(parent)):
            tail = False
        tail = tail and above is not None
        frames = frames if tail else 1
        if self.capacity - self.used - self.quarantined < frames:
            return
        depth = 1 if above is None else above.depth + (not tail)
        root = parent if above is None else above.root
        tick = max(self.clock, 0) if above is None else min(self.clock, above.tick)
        row = Row(parent, root, depth, frames, tick, tail)
        self.disk.add(key, -1 if above is None else self.row(parent), root, depth, frames, tick)
        self.model[key] = row
        self.used += frames

    @precondition(lambda self: self.model)
    @rule(data=st.data(), bad=st.booleans())
    def remove(self, data: Any, bad: bool) -> None:
        leaves = sorted(k for k in self.model if not self.kids(k))
        key = data.draw(st.sampled_from(leaves))
        frames = self.model[key].frames
        assert self.disk.remove(self.row(key), quarantine=bad) == key
        self.drop(key)
        self.quarantined += frames * bad

    @precondition(lambda self: self.quarantined)
    @rule()
    def deletion_confirmed(self) -> None:
        self.disk.quarantined = self.quarantined = 0

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def use_path(self, data: Any) -> None:
        self.clock += 1
        key = data.draw(st.sampled_from(sorted(self.model)))
        while key in self.model:
            self.model[key].tick = self.clock
            self.disk.touch(self.row(key), self.clock)
            key = self.model[key].parent

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.model[key].busy = 1 - self.model[key].busy
        self.disk.busy[self.row(key)] = self.model[key].busy

    @rule(frames=st.integers(1, 12))
    def make_room(self, frames: int) -> None:
        """All or nothing, idle leaves only, and whatever could be freed is."""
        idle = {k for k in self.model if not any(self.model[b].busy for b in {k} | self.under(k))}
        free = self.capacity - self.used - self.quarantined
        possible = free + sum(self.model[k].frames for k in idle)
        victims = self.disk.victims(frames)
        if victims is None:
            assert possible < frames
            return
        assert possible >= frames
        for row in victims:
            key = self.disk.key(row)
            assert key in idle and not self.kids(key), "not a leaf, or in use"
            assert free < frames, "one more than needed"
            free += self.model[key].frames
            self.disk.remove(row)
            self.drop(key)
        assert free >= frames

    @rule(who=st.sampled_from([None, *ROOTS]))
    def clear(self, who: bytes | None) -> None:
        rows = self.disk.rows_of(who)
        keys = [self.disk.key(int(r)) for r in rows]
        assert set(keys) == {k for k, r in self.model.items() if who in (None, r.root)}
        if who is None and len(keys) < 8:
            return
        for row, key in zip(rows, keys, strict=True):
            assert not self.kids(key), "a parent before its child"
            self.disk.remove(int(row))
            self.drop(key)

    @rule(data=st.data())
    def reopen(self, data: Any) -> None:
        rows = [(k, r.parent, r.tick, r.depth, r.frames) for k, r in self.model.items()]
        self.disk = DiskTable(self.capacity, entries(data.draw(st.permutations(rows))))
        for r in self.model.values():
            r.busy = 0
        self.quarantined = 0

    # ------------------------------------------------------------------ always
    @invariant()
    def same(self) -> None:
        if not hasattr(self, "model"):
            return
        disk = self.disk
        assert list(disk.errors()) == []
        assert disk.rows == len(self.model) and disk.used == self.used
        assert disk.free == self.capacity - self.used - self.quarantined
        for key, r in self.model.items():
            row = self.row(key)
            assert disk.key(row) == key
            assert (disk.depth[row], disk.frames[row], disk.tick[row]) == (
                r.depth,
                r.frames,
                r.tick,
            )
            assert disk.busy[row] == r.busy and disk.kids[row] == len(self.kids(key))
            above = int(disk.parent[row])
            assert (disk.key(above) == r.parent) if r.parent in self.model else above == -1
            assert disk.is_checkpoint(row) == r.checkpoint
            below = [disk.key(b) for b in disk.below(row)]
            assert set(below) == self.under(key) and len(set(below)) == len(below)
            places = {k: i for i, k in enumerate(below)}
            assert all(places[k] < places.get(self.model[k].parent, 99) for k in below)
            assert disk.root_keys[disk.root[row]] == r.root
        for absent in range(self.count + 1, self.count + 4):
            assert disk.find(key_of(absent, self.heads)) == -1
        for other in ROOTS:
            assert disk.find(other) == -1


DiskMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestDisk = DiskMachine.TestCase


def test_order_of_a_fresh_scan() -> None:
    """Least recently used first; a page's checkpoint before the page, a child before its parent."""
    disk, rows = table((-1, 1, 5), (0, 2, 3), (0, 1, 5), (-1, 1, 4), (3, 2, 4), (-1, 1, 9))
    disk.capacity = disk.used
    order = disk.victims(len(rows))
    assert order is not None
    assert [rows.index(r) for r in order] == [1, 4, 3, 2, 0, 5]


def test_used_since_the_scan_is_passed_over() -> None:
    disk, rows = table(*((-1, 1, i) for i in range(6)), capacity=6)
    assert disk.victims(1) == [rows[0]]  # fills the queue of candidates
    disk.remove(rows[0])
    disk.touch(rows[1], 7)
    disk.touch(rows[3], 8)
    assert disk.victims(5) == [rows[2], rows[4], rows[5], rows[1]]


def test_a_reused_row_is_not_an_old_candidate() -> None:
    disk, rows = table(*((-1, 1, i) for i in range(4)), capacity=4)
    assert disk.victims(1) == [rows[0]]
    for row in (rows[0], rows[1]):
        disk.remove(row)
    again = disk.add(key_of(77), -1, ROOTS[0], 1, 1, 9)
    assert again in rows[:2]
    assert disk.victims(2) == [rows[2]]


def test_no_room_changes_nothing() -> None:
    disk, rows = table(*((-1, 1, i) for i in range(5)), capacity=5)
    disk.busy[rows[2]] = 1
    assert disk.victims(5) is None
    for _ in range(2):
        assert disk.victims(4) == [rows[i] for i in (0, 1, 3, 4)]
    assert disk.victims(5) is None and disk.rows == 5
    disk.busy[rows[2]] = 0
    assert sorted(disk.victims(5) or []) == sorted(rows)


def test_the_oldest_chain_goes_as_a_whole() -> None:
    """Row by row, as room is needed: a page that has become a leaf is as old as it was, and does
    not outlive what was used after it because that was queued first."""
    specs = [(-1, 1, 1), (0, 2, 1), (1, 3, 1), (-1, 1, 5), (3, 2, 5), (-1, 1, 9), (5, 2, 9)]
    disk, rows = table(*specs, capacity=len(specs))
    gone = []
    for _ in range(5):
        (victim,) = disk.victims(1)
        gone.append(rows.index(victim))
        disk.remove(victim)
        disk.capacity -= 1
    assert gone == [2, 1, 0, 4, 3]


def test_many_more_than_one_batch() -> None:
    """Room for more than one scan's candidates, leaves and parents of leaves."""
    disk = DiskTable(6000)
    for i in range(3000):
        above = disk.add(key_of(2 * i), -1, ROOTS[i % 3], 1, 1, i)
        disk.add(key_of(2 * i + 1), above, b"", 2, 1, i)
    victims = disk.victims(5000)
    assert victims is not None and len(victims) == len(set(victims)) == 5000
    for row in victims:
        disk.remove(row)
    assert disk.rows == 1000 and disk.tick[disk.all_rows()].min() >= 2500
    assert list(disk.errors()) == []


def test_finding_is_exact_among_equal_hashes() -> None:
    """Keys that differ in the half that is not hashed are told apart."""
    disk = DiskTable(4000)
    rows = [disk.add(key_of(i, heads=1), -1, ROOTS[0], 1, 1, 0) for i in range(1, 2000)]
    assert [disk.find(key_of(i, heads=1)) for i in range(1, 2000)] == rows
    assert disk.find(key_of(2000, heads=1)) == -1
    for row in rows[::2]:
        disk.remove(row)
    assert [disk.find(key_of(i, heads=1)) for i in range(2, 2000, 2)] == rows[1::2]
    assert all(disk.find(key_of(i, heads=1)) == -1 for i in range(1, 2000, 2))


def test_removing_under_a_child_raises() -> None:
    disk, rows = table((-1, 1, 1), (0, 2, 1))
    with pytest.raises(AssertionError, match="I6"):
        disk.remove(rows[0])


def test_identities_come_and_go() -> None:
    """Ten thousand identities of one page each: what is kept of them stays bounded."""
    disk = DiskTable(16)
    for i in range(10_000):
        if disk.free < 1:
            (victim,) = disk.victims(1) or [-1]
            disk.remove(victim)
        disk.add(key_of(i), -1, i.to_bytes(16, "little"), 1, 1, i)
        assert len(disk.root_keys) <= 2 * 16 + 65
    for i in range(9_984, 10_000):
        assert list(disk.rows_of(i.to_bytes(16, "little"))) == [disk.find(key_of(i))]
    assert len(disk.rows_of((3).to_bytes(16, "little"))) == 0


def test_deep_chains_below() -> None:
    disk = DiskTable(1 << 16)
    above, rows = -1, []
    for i in range(3000):
        above = disk.add(key_of(i), above, ROOTS[0], i + 1, 1, 0)
        rows.append(above)
    assert disk.below(rows[10]) == rows[:10:-1]
    assert disk.below(rows[-1]) == []


def damaged(change: Callable[[DiskTable, list[int]], None]) -> str:
    disk, rows = table((-1, 1, 1), (0, 2, 1), (-1, 1, 1), capacity=3)
    assert not list(disk.errors())
    change(disk, rows)
    return "\n".join(disk.errors())


def test_errors_are_seen() -> None:
    def set_used(disk: DiskTable, rows: list[int]) -> None:
        disk.used = 2

    def shrink(disk: DiskTable, rows: list[int]) -> None:
        disk.capacity = 2

    def count(disk: DiskTable, rows: list[int]) -> None:
        disk.kids[rows[2]] = 1

    def orphan(disk: DiskTable, rows: list[int]) -> None:
        disk.live[rows[0]] = 0

    def lost(disk: DiskTable, rows: list[int]) -> None:
        disk._keys[rows[1] * 16] ^= 64

    assert "frames used 2" in damaged(set_used)
    assert "over capacity by 1" in damaged(shrink)
    assert "counts 1 children, has 0" in damaged(count)
    assert "without its parent" in damaged(orphan)
    assert "not found by its key" in damaged(lost)
