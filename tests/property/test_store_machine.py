"""The disk store as a state machine: it publishes, deletes, loses power and opens again.

The model knows for every page which bytes it was last given.  A power cut happens at a named point
inside a call, and takes a random part of what was written and not yet synced with it, block by
block; the index commits atomically, as LMDB does.  After every step: no wrong byte, no orphan
(I6), accounting exact (I1).
"""

import logging
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.errors import StoreError
from kvtier.seams import Record
from kvtier.stores import LmdbStore
from kvtier.stores.files import BLOCK
from kvtier.stores.record import slot_bytes
from tests.crash.kit import (
    Crash,
    FaultyIO,
    Prefix,
    body,
    bytes_under,
    inspect_here,
    key_of,
    open_store,
    read_for,
    record,
    store_dir,
)

FRAME = 4096
LIMIT = 1300 << 10
SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
POINTS = [
    *["put:reserved", "slab:grown", "slab:written", "put:written", "put:synced"],
    *["index:commit", "index:committed", "put:done", "delete:done"],
]
OPENING = [
    *["open:recovered", "open:unmarked", "slab:grown", "index:commit", "index:committed"],
    *["recover:set aside", "recover:spare ready", "recover:installed"],
]
Name = tuple[Prefix, str]
"""(prefix, "history" or "checkpoint")."""


class PowerCut(FaultyIO):
    """Remembers what was not synced, and takes some of it away."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[str, int, bytes]] = []
        self.lengths: list[tuple[str, int]] = []
        self.names: list[dict[str, bytes | None]] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        size = sum(buffer.nbytes for buffer in buffers)
        with open(path, "rb") as file:
            file.seek(offset)
            old = file.read(size)
        for at in range(0, len(old), BLOCK):
            self.blocks.append((path, offset + at, old[at : at + BLOCK]))
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.blocks = [entry for entry in self.blocks if entry[0] != path]
        self.lengths = [entry for entry in self.lengths if entry[0] != path]

    def allocate(self, fd: int, size: int) -> None:
        self.lengths.append((os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size))
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        # Shrinking only: what is cut off is not needed any more, whether or not it comes back.
        super().truncate(fd, size)

    def replace(self, source: str, target: str) -> None:
        self._remember(source, target)
        super().replace(source, target)

    def unlink(self, path: str) -> None:
        self._remember(path)
        super().unlink(path)

    def _remember(self, *paths: str) -> None:
        found = {}
        for path in paths:
            found[path] = Path(path).read_bytes() if os.path.exists(path) else None
        self.names.append(found)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self.names.clear()

    def power_off(self, rng: random.Random) -> None:
        """Undo a random part of the blocks, and the latest of the changes of names."""
        # Several threads write, in an order of their own; the same seed must lose the same blocks.
        for path, offset, old in sorted(self.blocks, key=lambda block: block[:2]):
            if rng.random() < 0.5 and os.path.exists(path):
                with open(path, "r+b") as file:
                    file.seek(offset)
                    file.write(old)
        for path, length in reversed(self.lengths):
            if rng.random() < 0.5 and os.path.exists(path):
                os.truncate(path, length)
        for found in reversed(self.names[rng.randint(0, len(self.names)) :]):
            for path, data in found.items():
                if data is None:
                    Path(path).unlink(missing_ok=True)
                else:
                    Path(path).write_bytes(data)
        self.blocks, self.lengths, self.names = [], [], []
        self.crash_at = None


class StoreMachine(RuleBasedStateMachine):
    """Reach counters are class attributes: the long run asserts them."""

    reached: dict[str, int] = {}  # noqa: RUF012  shared by all runs on purpose

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(dir=SHM)
        self.real_inspect = LmdbStore.inspect
        LmdbStore.inspect = inspect_here
        self.io = PowerCut()
        self.lives: dict[Name, int] = {}
        """What must be there: the life each record was last written with."""
        self.ever: dict[Name, set[int]] = {}
        self.broken: dict[Name, str] = {}
        """Records whose slots were damaged: "header" or "payload"."""
        self.quarantined: set[Name] = set()
        self.next_life = 0
        self.store: LmdbStore

    def reach(self, what: str) -> None:
        event(what)
        StoreMachine.reached[what] = StoreMachine.reached.get(what, 0) + 1

    @initialize()
    def first_open(self) -> None:
        self.open()

    def open(self) -> None:
        self.store = open_store(self.root, frame_bytes=FRAME, limit_bytes=LIMIT, io=self.io)
        # What was quarantined is purged at opening, with all that hangs on it.
        self.forget(self.quarantined)

    def forget(self, names: set[Name]) -> None:
        for name in list(self.lives):
            if any(name == gone or self.hangs_on(name, gone) for gone in names):
                del self.lives[name]
                self.broken.pop(name, None)
        self.quarantined -= self.quarantined - set(self.lives)

    @staticmethod
    def hangs_on(name: Name, other: Name) -> bool:
        (prefix, kind), (stem, stem_kind) = name, other
        if stem_kind == "checkpoint" or prefix[: len(stem)] != stem:
            return False
        return len(prefix) > len(stem) or kind == "checkpoint"

    def make(self, name: Name, life: int) -> Record:
        prefix, kind = name
        size = 2 * FRAME + 77 if kind == "checkpoint" else FRAME - len(prefix)
        return record(prefix, kind=kind, size=size, frame=FRAME, life=life)

    # -- rules ---------------------------------------------------------------------------------

    def pick_group(self, data: st.DataObject) -> list[Name]:
        pages = sorted(
            {p for p, kind in self.lives if kind == "history" and (p, kind) not in self.quarantined}
        )
        prefix = data.draw(st.sampled_from([(), *pages]))
        names: list[Name] = []
        for step in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)):
            prefix = (*prefix, step)
            names.append((prefix, "history"))
            if data.draw(st.booleans()):
                names.append((prefix, "checkpoint"))
        return names

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        """Some groups bring other bytes for what is there; those replace it."""
        self.try_put(self.pick_group(data), replace=data.draw(st.booleans()))

    def try_put(self, names: list[Name], *, replace: bool = False) -> None:
        self.next_life += 1
        fresh = [n for n in names if replace or n not in self.lives or n in self.quarantined]
        for name in fresh:
            self.ever.setdefault(name, set()).add(self.next_life)
        records = [
            self.make(name, self.next_life if name in fresh else self.lives[name]) for name in names
        ]
        try:
            self.store.put_group(records)
        except StoreError as error:
            if "full" not in str(error):
                assert any(self.hangs_on(n, q) for n in names for q in self.quarantined), (
                    f"refused: {error}"
                )
            else:
                self.reach("full")
            return
        self.took_effect(fresh)

    def took_effect(self, fresh: list[Name]) -> None:
        for name in fresh:
            self.lives[name] = self.next_life
            self.quarantined.discard(name)
            self.broken.pop(name, None)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        names = self.pick_subtree(data)
        self.store.delete([key_of(*name) for name in names])
        for name in names:
            self.gone(name)

    def gone(self, name: Name) -> None:
        self.lives.pop(name, None)
        self.broken.pop(name, None)
        self.quarantined.discard(name)

    def pick_subtree(self, data: st.DataObject) -> list[Name]:
        name = data.draw(st.sampled_from(sorted(self.lives)))
        return [name, *[other for other in self.lives if self.hangs_on(other, name)]]

    @precondition(lambda self: any(k == "history" for _, k in self.lives))
    @rule(data=st.data())
    def delete_too_little(self, data: st.DataObject) -> None:
        names = self.pick_subtree(data)
        if len(names) > 1:
            with pytest.raises(StoreError):
                self.store.delete([key_of(*names[0])])

    @rule(
        data=st.data(), point=st.sampled_from(POINTS), passes=st.integers(0, 2), seed=st.integers(0)
    )
    def power_cut(self, data: st.DataObject, point: str, passes: int, seed: int) -> None:
        """A change is under way; afterwards it happened, or it did not."""
        self.io.crash_at = (point, passes)
        before = dict(self.lives)
        names: list[Name] = []
        fresh: list[Name] = []
        deleting = bool(self.lives) and data.draw(st.booleans())
        try:
            if deleting:
                names = self.pick_subtree(data)
                self.store.delete([key_of(*name) for name in names])
                for name in names:
                    self.gone(name)
            else:
                names = self.pick_group(data)
                fresh = [n for n in names if n not in self.lives or n in self.quarantined]
                self.try_put(names)
        except Crash:
            self.reach(f"cut at {point}")
        self.io.crash_at = None
        self.store._abandon()
        self.io.power_off(random.Random(seed))
        quarantined = set(self.quarantined)
        self.open()
        there = self.keys()
        if deleting and self.lives == {n: v for n, v in before.items() if n in self.lives}:
            left = [key_of(*name) in there for name in names if name in self.lives]
            if left and not any(left):
                for name in names:
                    self.gone(name)
        elif not deleting:
            pending = [n for n in fresh if n not in before or n in quarantined]
            arrived = [key_of(*name) in there for name in pending]
            assert all(arrived) or not any(arrived[:1]) or quarantined, "half a group"
            if pending and all(arrived) and any(n not in self.lives for n in pending):
                self.took_effect([n for n in pending if n not in self.lives])
        self.compare()

    @rule(seed=st.integers(0), clean=st.booleans())
    def reopen(self, seed: int, clean: bool) -> None:
        if clean:
            self.store.close()
        else:
            self.store._abandon()
        self.io.power_off(random.Random(seed))
        self.open()
        self.compare()

    @rule(data=st.data(), point=st.sampled_from(OPENING), lose=st.booleans(), seed=st.integers(0))
    def power_cut_while_opening(
        self, data: st.DataObject, point: str, lose: bool, seed: int
    ) -> None:
        self.store._abandon()
        self.io.power_off(random.Random(seed))
        if lose:
            self.damage_index()
        self.io.crash_at = (point, 0)
        try:
            self.open()
        except Crash:
            self.reach(f"cut opening at {point}")
            self.io.power_off(random.Random(seed + 1))
            self.open()
        self.io.crash_at = None
        self.adopt() if lose else self.compare()

    @rule()
    def lose_the_index(self) -> None:
        self.store._abandon()
        self.damage_index()
        self.open()
        self.adopt()

    def damage_index(self) -> None:
        index = store_dir(self.root) / "index.mdb"
        if index.exists():
            os.truncate(index, 4096)
            self.reach("index lost")

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), at=st.integers(0, 2 * BLOCK - 1))
    def damage(self, data: st.DataObject, at: int) -> None:
        """Flip a bit of one slot of a record, header or payload."""
        name = data.draw(st.sampled_from(sorted(self.lives)))
        found = self.store._index.find([key_of(*name)])[0]
        assert found is not None
        row, slots = found
        index = data.draw(st.integers(0, len(slots) - 1))
        if at >= BLOCK + min(FRAME, row.size - index * FRAME):
            return  # behind the payload
        path = store_dir(self.root) / "slab-00000"
        with path.open("r+b") as file:
            file.seek(slots[index] * slot_bytes(FRAME) + at)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())
        if self.broken.pop(name, None) is not None:
            self.broken[name] = "header"  # perhaps flipped back: anything may be read
            self.store.read_into([read_for(self.make(name, self.lives[name]))])
            if key_of(*name) not in self.keys():
                self.quarantined.add(name)
            else:
                self.broken.pop(name)
        else:
            self.broken[name] = "header" if at < BLOCK else "payload"

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.lives)), min_size=1, max_size=5))
        self.expect(names)

    def expect(self, names: Sequence[Name]) -> None:
        reads = [read_for(self.make(name, self.lives[name])) for name in names]
        answers = self.store.read_into(reads)
        for name, read, answer in zip(names, reads, answers, strict=True):
            bad = name in self.broken or name in self.quarantined
            assert answer == (not bad), (name, answer)
            if answer:
                wanted = self.make(name, self.lives[name])
                assert body(read.views, read.size) == body(wanted.payload, wanted.size)
            else:
                self.quarantined.add(name)
                self.reach("quarantined")

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.lives) or [((9,), "history")])))
        self.store.touch([(key_of(*name), i) for i, name in enumerate(names)])

    # -- comparing -----------------------------------------------------------------------------

    def keys(self) -> set[bytes]:
        return {bytes(key) for key in self.store.scan()["key"]}

    def compare(self) -> None:
        """Exactly the model's records are there, with the right bytes."""
        there = {key_of(*name) for name in self.lives if name not in self.quarantined}
        assert self.keys() == there
        names = sorted(self.lives)
        sound = [n for n in names if n not in self.broken and n not in self.quarantined]
        self.expect(sound)

    def adopt(self) -> None:
        """After a rebuild: everything whose headers are whole is there; records deleted earlier
        may be back, with bytes that were once theirs."""
        by_key = {key_of(*name): name for name in self.ever}
        there = {by_key[key] for key in self.keys()}
        lost = {name for name, where in self.broken.items() if where == "header"}
        for name in self.lives:
            if name not in lost and not any(self.hangs_on(name, other) for other in lost):
                assert name in there, f"{name} was lost"
        old, self.lives = self.lives, {}
        for name in sorted(there):
            for life in sorted(self.ever[name]):
                read = read_for(self.make(name, life))
                if self.store.read_into([read]) == [True]:
                    wanted = self.make(name, life)
                    given = {
                        alike: body(w.payload, w.size)
                        for alike in self.ever[name]
                        for w in [self.make(name, alike)]
                    }
                    match = [
                        alike
                        for alike, data in given.items()
                        if data == body(read.views, wanted.size)
                    ]
                    assert match, "bytes that were never written"
                    if name in old and name not in self.broken:
                        # A newer one may: its slots were written when the power went off.
                        assert match[0] >= old[name], "an older life came back over a newer one"
                    self.lives[name] = match[0]
                    break
            else:
                self.lives[name] = min(self.ever[name])
                self.quarantined.add(name)
        self.quarantined &= set(self.lives)
        self.broken = {n: w for n, w in self.broken.items() if n in self.quarantined}
        note(f"after the rebuild: {sorted(self.lives)}")

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "store"):
            self.store.check()
            entries = self.store.scan()
            keys = {bytes(key) for key in entries["key"]}
            alive = {key_of(*name) for name in self.quarantined} | keys
            for row in entries:
                if row["depth"] > 1 or row["checkpoint"]:
                    assert bytes(row["parent"]) in alive, "I6"
            assert bytes_under(self.root) <= LIMIT

    def teardown(self) -> None:
        LmdbStore.inspect = self.real_inspect
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root, ignore_errors=True)


def test_the_store_as_a_state_machine(long_run: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "kvtier")
    StoreMachine.reached.clear()
    run_state_machine_as_test(StoreMachine)
    if long_run:
        for what in [*[f"cut at {p}" for p in POINTS], "index lost", "quarantined", "full"]:
            assert StoreMachine.reached.get(what, 0) >= 20, (what, StoreMachine.reached)
        for point in OPENING:
            assert StoreMachine.reached.get(f"cut opening at {point}", 0) >= 20, point
