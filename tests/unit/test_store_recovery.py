"""What opening does with an index nobody vouches for: inspect, copy, set aside, rebuild."""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvtier.errors import StoreError
from kvtier.stores import LmdbStore, fsck, list_stores
from kvtier.stores.files import write_file
from kvtier.stores.index import check_rows
from kvtier.stores.pages import _FIRST
from kvtier.stores.record import (
    ROW,
    Header,
    Row,
    pack_header,
    pack_more,
    pack_row,
    row_checks,
    store_id,
    unpack_header,
    unpack_more,
    unpack_row,
)
from kvtier.stores.recovery import Inspect, is_clean
from kvtier.stores.scan import SOUND, UNSOUND, inspect, inspect_in_child
from kvtier.stores.slabs import SlotMap
from tests.crash.kit import (
    FINGERPRINT,
    FRAME,
    Crash,
    FaultyIO,
    bytes_under,
    chain,
    checkpoint,
    fetch,
    key_of,
    keys_in,
    open_store,
    record,
    store_dir,
)

RECORDS = [*chain(1, 6), checkpoint((1, 1)), *chain(2, 3)]
STORE = store_id(FINGERPRINT, 0, 1, FRAME)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with open_store(tmp_path) as store:
        store.put_group(RECORDS)
    return tmp_path


class Looks:
    """Counts inspections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        monkeypatch.setattr(LmdbStore, "inspect", staticmethod(self))

    def __call__(self, index: str, store: bytes, copy: str | None = None) -> object:
        verdict = inspect_in_child(index, store, copy)
        self.seen.append(verdict.detail if verdict.status else "sound")
        return verdict


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


# -- marks ---------------------------------------------------------------------------------------


def test_a_clean_close_needs_no_look(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
    open_store(filled, mode="read").close()
    assert looks.seen == []


def test_after_a_kill_the_index_is_inspected_once(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    open_store(filled)._abandon()
    with open_store(filled) as store:
        assert keys_in(store) == {wanted.key for wanted in RECORDS}
        store.check()
    open_store(filled).close()
    assert looks.seen == ["sound"]


def test_an_empty_index_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    open_store(tmp_path)._abandon()
    open_store(tmp_path).close()
    assert looks.seen == ["sound"]


def test_a_changed_index_is_noticed(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    index = store_dir(filled) / "index.mdb"
    flip(index, 5000)
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
        store.check()
    assert len(looks.seen) == 1


def test_a_damaged_mark_only_costs_a_look(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    mark = store_dir(filled) / "clean"
    for damage in (b"{}", mark.read_bytes()[:-1]):
        mark.write_bytes(damage)
        with open_store(filled) as store:
            assert all(fetch(store, RECORDS))
    assert looks.seen == ["sound"] * 2


@pytest.mark.parametrize("point", ["close:digest", "open:unmarked", "open:recovered"])
def test_a_kill_while_closing_or_opening(filled: Path, point: str) -> None:
    def open_and_close() -> None:
        store = open_store(filled, io=FaultyIO(crash_at=(point, 0)))
        try:
            store.close()
        finally:
            store._abandon()

    with pytest.raises(Crash):
        open_and_close()
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
        store.check()


# -- damage --------------------------------------------------------------------------------------


def test_flips_in_every_region_of_the_index(filled: Path) -> None:
    """C5: never a wrong byte, never an untyped exception, never a dead process; and since the
    slots are whole, nothing is lost either."""
    index = store_dir(filled) / "index.mdb"
    whole = {path.name: path.read_bytes() for path in store_dir(filled).iterdir()}
    rng = random.Random(7)
    rebuilds = 0
    for page in range(index.stat().st_size // 4096):
        for name, data in whole.items():
            (store_dir(filled) / name).write_bytes(data)
        (store_dir(filled) / "index.bad").unlink(missing_ok=True)
        for _ in range(8):  # the head of every page; of every other page the rest as well
            at = page * 4096 + rng.randrange(32 if page % 2 == 0 else 4096)
            flip(index, at, 1 << rng.randrange(8))
        with open_store(filled) as store:
            assert fetch(store, RECORDS) == [True] * len(RECORDS)
            store.check()
        rebuilds += (store_dir(filled) / "index.bad").exists()
    assert rebuilds >= 2


@pytest.mark.parametrize("left", [0, 100, 4096, 8192, 5 * 4096 + 17])
def test_a_truncated_index(filled: Path, left: int) -> None:
    os.truncate(store_dir(filled) / "index.mdb", left)
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
        store.check()


def test_a_reader_refuses_a_damaged_index(filled: Path) -> None:
    os.truncate(store_dir(filled) / "index.mdb", 4096)
    with pytest.raises(StoreError, match="opening the store for writing repairs it"):
        open_store(filled, mode="read")
    assert not fsck(filled)[0].ok
    assert fsck(filled, repair=True)[0].ok
    with open_store(filled, mode="read") as store:
        assert all(fetch(store, RECORDS))


def test_a_missing_index_is_rebuilt(filled: Path) -> None:
    for name in ("index.mdb", "clean", "about.json", "index.mdb-lock"):
        (store_dir(filled) / name).unlink()
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
        assert store.counters().checkpoints == 1
        store.check()


def test_missing_and_cut_slabs_are_misses(filled: Path) -> None:
    slab = store_dir(filled) / "slab-00000"
    os.truncate(slab, 4 * (4096 + FRAME) + 5000)
    with open_store(filled) as store:
        answers = fetch(store, RECORDS)
        assert answers == [True] * 4 + [False] * 6
        store.check()
    slab.unlink()
    with open_store(filled) as store:
        assert not any(fetch(store, RECORDS))
        store.check()
    with open_store(filled) as store:
        assert store.counters().records == 0
        store.put_group(RECORDS)
        assert all(fetch(store, RECORDS))
        store.check()


def test_rubbish_in_every_file(filled: Path) -> None:
    for path in sorted(store_dir(filled).iterdir()):
        path.write_bytes(b"\x9b" * 70_000)
    with open_store(filled) as store:
        assert not any(fetch(store, RECORDS))
        store.put_group(RECORDS)
        assert all(fetch(store, RECORDS))
        store.check()


def test_recovery_keeps_to_the_limit(tmp_path: Path) -> None:
    """A full store, an index set aside, and then a copy of its successor: never both at once."""
    limit = 2 << 20
    most = 0

    class Measuring(FaultyIO):
        def point(self, name: str) -> None:
            nonlocal most
            most = max(most, bytes_under(tmp_path))
            self.points.append(name)
            if name == "recover:spare ready":
                there = {path.name for path in store_dir(tmp_path).glob("index.???")}
                assert len(there) <= 2, there  # room is kept for two

    io = Measuring()
    with open_store(tmp_path, limit_bytes=limit, io=io) as store:
        store.put_group([record((i,)) for i in range(store.capacity)])
        used = store.capacity
    with (store_dir(tmp_path) / "index.mdb").open("r+b") as file:
        file.write(b"\x5a" * 4096)
        file.truncate(260 << 10)  # and as large as the index of an open store
    open_store(tmp_path, limit_bytes=limit, io=io)._abandon()
    assert (store_dir(tmp_path) / "index.bad").exists()
    with open_store(tmp_path, limit_bytes=limit, io=io) as store:
        assert len(keys_in(store)) == used
    assert not (store_dir(tmp_path) / "index.bad").exists()
    assert io.points.count("recover:spare ready") == 2
    assert most <= limit


# -- rebuilding ----------------------------------------------------------------------------------


def rebuilt(root: Path) -> LmdbStore:
    """The store after its index was lost."""
    (store_dir(root) / "index.mdb").unlink(missing_ok=True)
    return open_store(root)


def test_the_later_of_two_lives_wins(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_group([*chain(1, 2), checkpoint((1, 1))])
        store.delete([key_of((1, 1), "checkpoint"), key_of((1, 1))])
        store.put_group([record((1, 1), life=5), checkpoint((1, 1), life=5)])
    with rebuilt(tmp_path) as store:
        assert all(fetch(store, [record((1, 1), life=5), checkpoint((1, 1), life=5)]))
        store.check()
        store.put_group([record((1, 1, 3))])  # and the next life is later still
        store.delete([key_of((1, 1, 3))])
        store.put_group([record((1, 1, 3), life=6)])
    with rebuilt(tmp_path) as store:
        assert fetch(store, [record((1, 1, 3), life=6)]) == [True]
        store.check()


def test_what_is_written_after_a_rebuild_is_later_than_what_was_found(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 3))
        store.put_group([record((2,))])  # slot 3
    with rebuilt(tmp_path) as store:
        store.delete([key_of((1, 1, 2)), key_of((2,))])
        store.put_group([record((2,), life=1)])  # slot 2; its older life stays in slot 3
        store._abandon()
    with rebuilt(tmp_path) as store:
        assert fetch(store, [record((2,), life=1)]) == [True]
        store.check()


@pytest.mark.parametrize("killed", [True, False])
def test_a_publish_that_came_to_nothing_leaves_no_life(tmp_path: Path, killed: bool) -> None:
    """Slots written for a publish that was cut off, or failed, lie on disk with whole headers; the
    one that succeeded afterwards is later, and parts of the two are never taken for one record."""
    io = FaultyIO()
    store = open_store(tmp_path, io=io)
    store.put_group([*chain(1, 1), record((9,))])
    if killed:
        io.crash_at = ("put:synced", 0)
        with pytest.raises(Crash):
            store.put_group([*chain(2, 2), checkpoint((2,))])
        store._abandon()
        store = open_store(tmp_path, io=io)
    else:
        io.fail("commit", OSError(28, "full"))
        with pytest.raises(StoreError):
            store.put_group([*chain(2, 2), checkpoint((2,))])
    wanted = [record((2,), life=1), checkpoint((2,), life=1)]
    store.delete([key_of((9,))])
    store._slots._cursor = 0  # the slot of (9,) is next, and before those of the earlier life
    store.put_group(wanted)
    store._abandon()
    with rebuilt(tmp_path) as store:
        assert fetch(store, [*chain(1, 1), *wanted]) == [True] * 3
        store.check()


def test_only_what_hangs_together_is_rebuilt(filled: Path) -> None:
    slab = store_dir(filled) / "slab-00000"
    flip(slab, 1 * (4096 + FRAME) + 60)  # header of page (1, 1)
    flip(slab, 7 * (4096 + FRAME) + 60)  # one of the checkpoint's three slots
    with rebuilt(filled) as store:
        assert keys_in(store) == {key_of((1,))} | {wanted.key for wanted in chain(2, 3)}
        assert all(fetch(store, [record((1,)), *chain(2, 3)]))
        store.check()
        store.put_group(RECORDS)
        assert all(fetch(store, RECORDS))


def test_a_torn_payload_is_found_when_read(filled: Path) -> None:
    flip(store_dir(filled) / "slab-00000", 2 * (4096 + FRAME) + 9000)
    with rebuilt(filled) as store:
        assert fetch(store, RECORDS).count(False) == 1
        store.check()


@pytest.mark.parametrize(
    "point", ["recover:set aside", "index:commit", "recover:spare ready", "recover:installed"]
)
def test_a_kill_in_the_middle_of_a_rebuild(filled: Path, point: str) -> None:
    os.truncate(store_dir(filled) / "index.mdb", 5000)
    with pytest.raises(Crash):
        open_store(filled, io=FaultyIO(crash_at=(point, 0)))
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
        store.check()
    assert not list(store_dir(filled).glob("index.new*"))


def test_what_was_cleared_does_not_come_back(filled: Path) -> None:
    """A store that was emptied has nothing that a rebuilt index could find."""
    with open_store(filled) as store:
        store.delete([wanted.key for wanted in RECORDS])
        assert fetch(store, RECORDS) == [False] * len(RECORDS)
        # The last slots of all: what is behind a record in use is cut at close anyway.
        store._slots.take(len(RECORDS), store.capacity)
        store.put_group(chain(7, 1))
        store._abandon()
    os.truncate(store_dir(filled) / "index.mdb", 5000)
    with open_store(filled) as store:
        assert keys_in(store) == {key_of((7,))}
        assert fetch(store, chain(7, 1)) == [True]
        store.check()


def test_a_deletion_that_cannot_empty_the_files_is_one(filled: Path) -> None:
    io = FaultyIO()
    with open_store(filled, io=io) as store:
        io.fail("sync", OSError(5, "broken"))  # the index syncs by itself
        store.delete([wanted.key for wanted in RECORDS])
        assert not keys_in(store)
        store.put_group(RECORDS)
        assert all(fetch(store, RECORDS))
        store.check()


def test_a_full_disk_while_rebuilding(filled: Path) -> None:
    os.truncate(store_dir(filled) / "index.mdb", 5000)
    io = FaultyIO()
    io.fail("commit", OSError(28, "full"))
    with pytest.raises(StoreError, match="full"):
        open_store(filled, io=io)
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))


# -- the inspection itself -----------------------------------------------------------------------


def test_what_the_child_says_of_a_file(filled: Path) -> None:
    index = str(store_dir(filled) / "index.mdb")
    assert inspect_in_child(index, STORE).status == SOUND
    assert inspect_in_child(index + "-none", STORE).status == UNSOUND
    assert inspect_in_child(index, b"another").status == UNSOUND


@pytest.mark.parametrize("python", ["/bin/true", "/bin/false", "/nowhere/python", ""])
def test_a_child_that_does_not_start_is_no_evidence(
    filled: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    index = store_dir(filled) / "index.mdb"
    monkeypatch.setattr("kvtier.stores.scan.sys.executable", python)
    with open_store(filled) as store:  # clean: it is not asked
        assert all(fetch(store, RECORDS))
    open_store(filled)._abandon()
    before = index.read_bytes()
    with pytest.raises(StoreError, match="cannot be inspected"):
        open_store(filled)
    assert index.read_bytes() == before
    assert not (store_dir(filled) / "index.bad").exists()
    (info,) = list_stores(filled)
    assert (info.state, info.pages) == ("unclean", None)
    (report,) = fsck(filled, repair=True)
    assert not report.ok
    assert "cannot be inspected" in report.index
    monkeypatch.undo()
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))


def test_a_child_without_room_is_no_evidence(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = str(store_dir(filled) / "index.mdb")
    with pytest.raises(StoreError, match="No space left"):
        inspect_in_child(index, STORE, "/dev/full")
    monkeypatch.setattr("kvtier.stores.scan.STARTED", "something else")  # as a shell may print
    with pytest.raises(StoreError, match="cannot be inspected"):
        inspect_in_child(index, STORE)


@pytest.mark.parametrize("last", [1 << 38, 1 << 46])
@pytest.mark.parametrize("look", [inspect, inspect_in_child])
def test_an_index_that_claims_more_than_memory_holds_is_damaged(
    filled: Path, last: int, look: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB maps as much as it is told, and lacks memory then: now and ever after."""
    open_store(filled)._abandon()
    index = store_dir(filled) / "index.mdb"
    fields = _FIRST.fields
    assert fields is not None
    with open(index, "r+b") as file:
        for page in range(2):
            file.seek(page * 4096 + fields["last"][1])
            file.write(last.to_bytes(8, "little"))
    verdict = look(str(index), STORE, None)
    assert verdict.status == UNSOUND
    assert "memory" in verdict.detail
    monkeypatch.setattr(LmdbStore, "inspect", staticmethod(look))
    with open_store(filled) as store:
        assert (store_dir(filled) / "index.bad").exists()
        assert all(fetch(store, RECORDS))


def test_a_module_of_the_user_does_not_reach_the_child(
    filled: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path_factory.mktemp("project")
    for name in ("resource", "signal", "json", "dataclasses"):
        (project / f"{name}.py").write_text("raise RuntimeError('of the project')")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.setenv("PYTHONPATH", str(project))
    assert inspect_in_child(str(store_dir(filled) / "index.mdb"), STORE).status == SOUND


@pytest.mark.parametrize("counters", [b"{", b"[1]", b'{"rows": 1}', b"\xff"])
def test_counters_damaged_under_a_process(filled: Path, counters: bytes) -> None:
    with open_store(filled) as store:
        with store._index._env.begin(write=True) as txn:
            txn.put(b"counters", counters, db=store._index._meta)
        with pytest.raises(StoreError, match="damaged"):
            store._index.reload()
        store._abandon()


def test_a_file_written_in_pieces_is_whole(tmp_path: Path) -> None:
    class Short(FaultyIO):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().pwritev(fd, [buffers[0][:3]], offset)

    write_file(Short(), str(tmp_path / "file"), b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_damaged_rows_are_told(filled: Path) -> None:
    """A row that was changed and still has its place in the tree."""
    index = str(store_dir(filled) / "index.mdb")
    pristine = Path(index).read_bytes()
    key = key_of((1, 1))

    def change(edit: object) -> None:
        Path(index).write_bytes(pristine)
        env = lmdb.open(index, subdir=False, max_dbs=3, map_size=1 << 24)
        rows = env.open_db(b"rows")
        with env.begin(write=True) as txn:
            edit(txn, rows, txn.get(key, db=rows))  # type: ignore[operator]
        env.close()

    def row(data: bytes) -> Row:
        found = unpack_row(data)
        assert found is not None
        return found

    edits = {
        "bit": lambda t, db, d: t.put(key, bytes([*d[:40], d[40] ^ 1, *d[41:]]), db=db),
        "lost": lambda t, db, d: t.delete(key, db=db),
        "key": lambda t, db, d: (t.delete(key, db=db), t.put(b"\0" * 16, d, db=db)),
        "slot": lambda t, db, d: t.put(key, pack_row(row(d)._replace(slot=0)), db=db),
        "count": lambda t, db, d: t.put(key, pack_row(row(d)._replace(children=7)), db=db),
        "parent": lambda t, db, d: t.put(key, pack_row(row(d)._replace(parent=b"?" * 16)), db=db),
        "frames": lambda t, db, d: t.put(key, pack_row(row(d)._replace(frames=2)), db=db),
        "size": lambda t, db, d: t.put(key, pack_row(row(d)._replace(size=77)), db=db),
        "state": lambda t, db, d: t.put(key, pack_row(row(d)._replace(state=5)), db=db),
    }
    change(lambda t, db, d: None)
    assert inspect(index, STORE).status == SOUND
    for name, edit in edits.items():
        change(edit)
        verdict = inspect(index, STORE)
        assert verdict.status == UNSOUND, name
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
        store.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"store", b"[" * 1500),
        (b"store", b"{}"),
        (b"store", b'{"format": 2.5, "store": ""}'),
        (b"store", b'{"format": null, "store": ""}'),
        (b"counters", b"[" * 1500),
        (b"counters", b"[1]"),
        (b"counters", b'{"records": "ten"}'),
        (b"counters", b"\xff"),
    ],
)
def test_a_damaged_description_is_told(filled: Path, name: bytes, value: bytes) -> None:
    index = str(store_dir(filled) / "index.mdb")
    env = lmdb.open(index, subdir=False, max_dbs=3, map_size=1 << 24)
    with env.begin(write=True) as txn:
        txn.put(name, value, db=env.open_db(b"meta", txn=txn))
    env.close()
    assert inspect_in_child(index, STORE).status == UNSOUND
    with open_store(filled) as store:
        assert all(fetch(store, RECORDS))
        store.check()


@pytest.mark.parametrize("name", ["seq", "tick"])
@pytest.mark.parametrize("value", [-1, 0, 1.5, "7", None, [], 1 << 63, 10**30])
def test_counters_that_cannot_be_are_damage(filled: Path, name: str, value: object) -> None:
    """Also those that no row adds up to: new numbers follow from them."""
    env = lmdb.open(str(store_dir(filled) / "index.mdb"), subdir=False, max_dbs=3, map_size=1 << 24)
    with env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        counters = json.loads(txn.get(b"counters", db=meta))
        assert isinstance(counters[name], int)
        txn.put(b"counters", json.dumps({**counters, name: value}).encode(), db=meta)
    env.close()
    with open_store(filled) as store:
        assert (store_dir(filled) / "index.bad").exists()
        assert all(fetch(store, RECORDS))
        store.put_group(chain(9, 2))
        store.check()


def test_is_clean_compares_the_bytes(filled: Path) -> None:
    from kvtier.stores.directory import names_in

    (names,) = names_in(str(filled))
    assert is_clean(names)
    flip(store_dir(filled) / "index.mdb", 4096 * 2 + 10)
    assert not is_clean(names)


# -- encoding ------------------------------------------------------------------------------------

ROW_ = Row(b"k" * 16, b"p" * 16, b"c" * 16, 1, 2, 3, 4, 5, 6, 7, 8, 1, 0)
HEADER = Header(b"k" * 16, b"p" * 16, b"c" * 16, 2, 1, 3, 4, 5, 6, 7, 1, 0, b"t" * 2048)


def test_rows_notice_every_flip() -> None:
    data = pack_row(ROW_)
    assert len(data) == ROW.itemsize
    assert unpack_row(data) == ROW_
    assert unpack_row(data[:-1]) is None
    as_array = np.frombuffer(data, ROW)[0]
    for name in ROW_._fields:
        assert bytes(as_array[name]) == bytes(as_array[name].dtype.type(getattr(ROW_, name)))
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_row(bytes(flipped)) is None
        assert not row_checks(np.frombuffer(data + flipped + data, ROW))
    assert row_checks(np.frombuffer(data * 3, ROW))


def test_lists_of_slots_notice_every_flip() -> None:
    data = pack_more([5, 2**32 - 1, 0])
    assert unpack_more(data) == [5, 2**32 - 1, 0]
    assert unpack_more(b"") is None
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_more(bytes(flipped)) is None


def test_headers_notice_flips_and_foreign_stores() -> None:
    block = memoryview(bytearray(b"\xff" * 4096))
    pack_header(block, STORE, HEADER)
    assert unpack_header(block, STORE) == HEADER
    assert unpack_header(block, b"x" * 16) is None
    for at in range(4096):
        block[at] ^= 4
        assert unpack_header(block, STORE) is None, at
        block[at] ^= 4
    assert unpack_header(memoryview(bytes(4096)), STORE) is None


def test_slot_map() -> None:
    slots = SlotMap(10)
    assert slots.take(3, below=10) == [0, 1, 2]
    assert slots.take(2, below=4) is None
    assert slots.take(1, below=4) == [3]
    slots.give([1])
    assert slots.take(2, below=6) == [4, 5]
    assert slots.take(2, below=7) == [6, 1]
    assert slots.used == 7
    assert slots.highest() == 6
    with pytest.raises(ValueError, match="twice"):
        slots.mark([6])
    with pytest.raises(ValueError, match="twice"):
        slots.mark([8, 8])
    with pytest.raises(AssertionError):
        slots.give([9])


def test_check_rows_scales_to_equal_halves() -> None:
    """Keys whose first halves are equal are told apart by the second."""
    from kvtier.stores.index import Counters

    keys = [b"same-8-b" + bytes([0] * 7 + [i]) for i in range(5)]
    rows = [
        Row(key, keys[i - 1] if i else b"\0" * 16, b"", 0, 1, 10, i + 1, int(i < 4), i, 1, 1, 0, 0)
        for i, key in enumerate(keys)
    ]
    table = np.frombuffer(b"".join(pack_row(row) for row in rows), ROW)
    counters = Counters(records=5, frames=5, bytes=50, seq=10, tick=10)
    assert check_rows(table, {}, counters) == []
    assert check_rows(table[1:], {}, counters)[0].startswith("1 records lack their parent")
