"""``LmdbStore``: round trips, order of publication, exact accounting, and what it refuses."""

import errno
import gc
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash

from kvtier.errors import ConfigError, InvariantError, StoreError, StoreLocked
from kvtier.seams import ENTRY, Read
from kvtier.stores import LmdbStore, fsck, list_stores, opening
from tests.crash.kit import (
    FINGERPRINT,
    FRAME,
    ROOT,
    FaultyIO,
    body,
    bytes_under,
    chain,
    checkpoint,
    fetch,
    key_of,
    keys_in,
    open_store,
    read_for,
    record,
    store_dir,
)


def damage(root: Path, slot: int, at: int, value: int = 0x01) -> None:
    """Flip bits of one byte of a slot."""
    path = store_dir(root) / "slab-00000"
    offset = slot * (4096 + FRAME) + at
    data = bytearray(path.read_bytes()[offset : offset + 1])
    data[0] ^= value
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# -- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [{}, {"history": 3, "checkpoint": 1}])
def test_what_is_put_is_read_back(tmp_path: Path, codec: dict[str, int]) -> None:
    dull = [record((1, 1), data=b"\x07" * FRAME), record((1, 1, 1), data=bytes(range(256)) * 32)]
    records = [record((1,)), *dull, checkpoint((1, 1, 1)), checkpoint((1,), size=100)]
    with open_store(tmp_path, codec=codec) as store:
        store.put_group(records)
        assert fetch(store, records) == [True] * 5
        store.check()
    with open_store(tmp_path) as store:  # what was compressed is readable without the option
        assert fetch(store, records) == [True] * 5


def test_compression_writes_fewer_bytes_and_leaves_the_incompressible(tmp_path: Path) -> None:
    io = FaultyIO()
    written: list[int] = []
    real = io.pwritev
    io.pwritev = lambda fd, buffers, offset: (  # type: ignore[method-assign]
        written.append(sum(buffer.nbytes for buffer in buffers)) or real(fd, buffers, offset)
    )
    with open_store(tmp_path, codec={"history": 1}, io=io) as store:
        written.clear()
        store.put_group([record((1,), data=b"\x07" * FRAME)])
        assert sum(written) == 2 * 4096
        written.clear()
        store.put_group([record((2,), size=FRAME)])  # random bytes
        assert sum(written) == 4096 + FRAME


@pytest.mark.parametrize("direct", [True, False])
def test_views_that_direct_io_cannot_use(tmp_path: Path, direct: bool) -> None:
    """Odd addresses and lengths are copied; without direct I/O everything is buffered."""
    io = FaultyIO()
    if not direct:
        io.fail("open_direct", OSError(errno.EINVAL, "no direct I/O"), times=100)
    wanted = record((1,))
    odd = bytearray(FRAME + 64)
    odd[64:] = body(wanted.payload, FRAME)
    moved = replace(wanted, payload=(memoryview(odd)[64:],))
    short = replace(
        record((2,), size=5000), payload=(memoryview(bytes(record((2,)).payload[0]))[:5000],)
    )
    short = replace(short, checksum=xxhash.xxh3_128_digest(short.payload[0]))
    with open_store(tmp_path, io=io) as store:
        store.put_group([moved])
        store.put_group([short])
        target = bytearray(b"\xff" * (FRAME + 64))
        view = memoryview(target)[64:]
        assert store.read_into([Read(wanted.key, ROOT, wanted.tokens, (view,), wanted.size)]) == [
            True
        ]
        assert bytes(view[: wanted.size]) == body(wanted.payload, wanted.size)
        assert fetch(store, [wanted]) == [True]
        exact = bytearray(5000)
        read = Read(short.key, ROOT, short.tokens, (memoryview(exact),), 5000)
        assert store.read_into([read]) == [True]
        assert bytes(exact) == bytes(short.payload[0])


def test_scan_says_what_is_there(tmp_path: Path) -> None:
    records = [*chain(1, 5), checkpoint((1, 1, 2))]
    with open_store(tmp_path) as store:
        assert len(store.scan()) == 0
        store.put_group(records)
        entries = store.scan()
        assert entries.dtype == ENTRY
        found = {bytes(row["key"]): row for row in entries}
        assert found.keys() == {wanted.key for wanted in records}
        for wanted in records:
            row = found[wanted.key]
            assert bytes(row["parent"]) == wanted.parent
            assert row["depth"] == wanted.depth
            assert row["frames"] == len(wanted.payload)
            assert row["checkpoint"] == (wanted.component == "checkpoint")
    with open_store(tmp_path) as store:
        first, second = store.scan(), store.scan()
        assert np.array_equal(np.sort(first["key"]), np.sort(entries["key"]))
        assert first.tobytes() == second.tobytes()


def test_touch_is_remembered_and_new_records_are_the_youngest(tmp_path: Path) -> None:
    records = chain(1, 3)
    with open_store(tmp_path) as store:
        store.put_group(records)
        store.touch([(records[0].key, 50), (records[1].key, 49), (b"?" * 16, 99)])
    with open_store(tmp_path) as store:
        ticks = {bytes(row["key"]): int(row["tick"]) for row in store.scan()}
        assert ticks[records[0].key] == 50
        assert ticks[records[1].key] == 49
        store.put_group(chain(2, 1))
        ticks = {bytes(row["key"]): int(row["tick"]) for row in store.scan()}
        assert ticks[key_of((2,))] > 50
        store.check()


def test_a_key_already_there_counts_as_done(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 2))
        before = store.counters().frames
        store.put_group(chain(1, 3))
        assert fetch(store, chain(1, 3)) == [True] * 3
        assert store.counters().frames == before + 1
        store.put_group([*chain(2, 1), *chain(2, 1)])  # twice in one group
        store.check()


def test_other_bytes_replace_those_of_the_same_key(tmp_path: Path) -> None:
    """After a deletion that failed, what is computed anew is served, never what was there."""
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 3))
        anew = [record((1,), life=1), *chain(1, 3, start=2)]
        store.put_group([*anew, *chain(1, 4, start=4)])
        assert fetch(store, [*anew, *chain(1, 4, start=4)]) == [True] * 4  # with the right bytes
        assert store.counters().frames == 4
        store.check()
    with open_store(tmp_path) as store:
        assert fetch(store, anew) == [True] * 3
        store.check()


def test_reads_of_what_is_not_quite_there(tmp_path: Path) -> None:
    """Other tokens or another parent under the same key: a miss, and no harm to the record."""
    wanted = record((1, 1))
    with open_store(tmp_path) as store:
        store.put_group([record((1,)), wanted])
        read = read_for(wanted)
        others = [
            replace(read, tokens=bytes(256)),
            replace(read, parent=b"?" * 16),
            replace(read, size=read.size - 1),
            replace(read, key=b"?" * 16),
            replace(read, views=read.views * 2),
        ]
        assert store.read_into(others) == [False] * 5
        assert store.counters().quarantined == 0
        assert fetch(store, [wanted]) == [True]


# -- publication and deletion ------------------------------------------------------------------


def test_a_record_needs_its_parent(tmp_path: Path) -> None:
    """I6"""
    with open_store(tmp_path) as store:
        for orphan in ([record((1, 1))], [checkpoint((1,))], [record((1, 1)), record((1,))]):
            with pytest.raises(StoreError, match="not stored"):
                store.put_group(orphan)
            assert store.counters().records == 0
        store.put_group([record((1,)), record((1, 1)), checkpoint((1,))])
        store.check()


def test_a_parent_is_not_deleted_before_its_children(tmp_path: Path) -> None:
    """I6"""
    records = [*chain(1, 3), checkpoint((1,))]
    with open_store(tmp_path) as store:
        store.put_group(records)
        for keys in ([(1,)], [(1, 1)], [(1,), (1, 1), (1, 1, 2)]):
            with pytest.raises(StoreError, match="hang on it"):
                store.delete([key_of(prefix) for prefix in keys])
        assert fetch(store, records) == [True] * 4
        store.delete([key_of((1, 1, 2)), b"unknown-key-0000", key_of((1, 1))])
        store.check()
        store.delete([key_of((1,)), key_of((1,), "checkpoint")])
        store.check()
        assert store.counters().frames == 0


_FULL, _BROKEN = OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *[(call, error) for call in ("pwritev", "sync", "allocate") for error in (_FULL, _BROKEN)],
        *[("commit", error) for error in (_FULL, lmdb.MapFullError("x"), lmdb.DiskError("x"))],
    ],
)
def test_a_failed_publish_leaves_nothing(tmp_path: Path, call: str, error: Exception) -> None:
    io = FaultyIO()
    with open_store(tmp_path, io=io) as store:
        if call != "allocate":
            store.put_group(chain(1, 1))
        before = store.counters()
        io.fail(call, error, times=4)
        for _ in range(2):
            with pytest.raises(StoreError):
                store.put_group(chain(2, 3))
        io.errors.clear()
        assert store.counters() == before
        store.check()
        if call == "commit":
            io.fail(call, error)
            with pytest.raises(StoreError):
                store.delete([key_of((1,))])
            assert fetch(store, chain(1, 1)) == [True]
        store.put_group(chain(2, 3))
        assert fetch(store, chain(2, 3)) == [True] * 3
        store.check()
    with open_store(tmp_path) as store:
        assert all(fetch(store, chain(2, 3)))


class Late(FaultyIO):
    """A commit that raises does so after it took effect."""

    def commit(self, txn: object) -> None:
        super(FaultyIO, self).commit(txn)
        self._due("commit")


def test_a_commit_that_failed_and_took_effect_all_the_same(tmp_path: Path) -> None:
    """The slots must not be given to another record."""
    io = Late()
    with open_store(tmp_path, io=io) as store:
        io.fail("commit", OSError(errno.EIO, "late"))
        with pytest.raises(StoreError):
            store.put_group(chain(1, 2))
        store.check()
        store.put_group(chain(2, 2))
        assert fetch(store, [*chain(1, 2), *chain(2, 2)]) == [True] * 4
        store.check()


@pytest.mark.parametrize("change", ["delete", "touch", "quarantine"])
def test_counters_after_a_change_that_failed_and_took_effect(tmp_path: Path, change: str) -> None:
    io = Late()
    with open_store(tmp_path, io=io) as store:
        store.put_group([*chain(1, 2), *chain(2, 2)])
        if change == "quarantine":
            io.fail("preadv", OSError(errno.EIO, "bad block"), times=3)
        io.fail("commit", OSError(errno.EIO, "late"))
        if change == "delete":
            with pytest.raises(StoreError):
                store.delete([key_of((1, 1)), key_of((1,))])
            assert store.counters().records == 2
        elif change == "touch":
            with pytest.raises(StoreError):
                store.touch([(key_of((1,)), 7)])
        else:
            assert fetch(store, chain(1, 1)) == [False]
            assert store.counters().quarantined == 1
        store.check()
        store.put_group(chain(3, store.capacity - store.counters().frames))  # all that is free
        store.check()
    with open_store(tmp_path, io=io) as store:
        store.check()
    assert not (store_dir(tmp_path) / "index.bad").exists()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("call", ["preadv", "open"])
def test_an_error_that_passes_judges_no_record(tmp_path: Path, call: str, number: int) -> None:
    io = FaultyIO()
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 3))
    with open_store(tmp_path, io=io) as store:
        store._slabs.close()  # they are opened again by the read
        io.fail(call, OSError(number, "not now"), times=2 if call == "preadv" else 1)  # it probes
        with pytest.raises(StoreError) as caught:
            fetch(store, chain(1, 3))
        assert caught.value.errno == number
        assert store.counters().quarantined == 0
        assert fetch(store, chain(1, 3)) == [True] * 3


def test_nobody_vouches_for_an_index_that_failed(tmp_path: Path) -> None:
    io = FaultyIO()
    with open_store(tmp_path, io=io) as store:
        store.put_group(chain(1, 1))
        io.fail("commit", OSError(errno.EIO, "broken"))
        with pytest.raises(StoreError):
            store.put_group(chain(2, 1))
    assert not (store_dir(tmp_path) / "clean").exists()
    with open_store(tmp_path) as store:
        assert fetch(store, chain(1, 1)) == [True]
    assert (store_dir(tmp_path) / "clean").exists()


def test_slots_are_reused_only_after_the_commit(tmp_path: Path) -> None:
    io = FaultyIO()
    with open_store(tmp_path, io=io) as store:
        full = [record((i,)) for i in range(store.capacity)]
        store.put_group(full)
        io.fail("commit", OSError(errno.EIO, "broken"))
        with pytest.raises(StoreError):
            store.delete([full[0].key])
        with pytest.raises(StoreError, match="full"):
            store.put_group([record((-1,))])
        store.delete([full[0].key])
        store.put_group([record((-1,))])
        assert all(fetch(store, [*full[1:], record((-1,))]))
        store.check()


def test_form_of_records(tmp_path: Path) -> None:
    good = record((1,))
    with open_store(tmp_path) as store:
        for wrong in (
            replace(good, payload=()),
            replace(good, payload=good.payload * 2),
            replace(good, size=FRAME + 1),
            replace(good, size=0),
            replace(good, tokens=bytes(2052)),
            replace(good, key=b"short"),
        ):
            with pytest.raises(StoreError):
                store.put_group([wrong])
        store.check()
        assert store.counters().records == 0
        store.put_group([replace(good, tokens=bytes(2048))])


# -- limits ------------------------------------------------------------------------------------


def test_the_limit_is_hard(tmp_path: Path) -> None:
    """AT-58: three times the limit is offered; files never exceed it, at any step."""
    root = tmp_path / "disk"
    limit = 3 << 19
    most = 0

    class Measuring(FaultyIO):
        def point(self, name: str) -> None:
            nonlocal most
            most = max(most, bytes_under(root))

    io = Measuring()
    with open_store(root, limit_bytes=limit, io=io) as store:
        assert store.capacity * (FRAME + 4096) > limit // 2  # and it is used, not given away
        stored: list[int] = []
        for i in range(0, 3 * limit // FRAME, 4):
            fresh = [record((j,)) for j in range(i, i + 4)]
            if len(stored) + 4 > store.capacity:
                with pytest.raises(StoreError, match="full"):
                    store.put_group(fresh)
                store.delete([key_of((old,)) for old in stored[:10]])
                del stored[:10]
            store.put_group(fresh)
            stored += range(i, i + 4)
        store.check()
        assert all(fetch(store, [record((i,)) for i in stored]))
    assert bytes_under(root) <= limit
    assert 0 < most <= limit
    with open_store(root, limit_bytes=limit, io=io) as store:
        assert len(store.scan()) == len(stored)
    store = open_store(root, limit_bytes=limit, io=io)
    store._abandon()
    with open_store(root, limit_bytes=limit, io=io) as store:  # with an inspection
        assert len(store.scan()) == len(stored)
    assert most <= limit


def test_sizes_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least"):
        open_store(tmp_path, limit_bytes=500_000)
    with pytest.raises(ConfigError, match="at least"):
        open_store(tmp_path, limit_bytes=700_000, checkpoint_frames=20)
    with pytest.raises(ConfigError):
        open_store(tmp_path, rank=2, world=2)
    with pytest.raises(ConfigError):
        open_store(tmp_path, frame_bytes=0)
    with pytest.raises(ConfigError):
        open_store(tmp_path, fingerprint=b"")
    with pytest.raises(ConfigError):
        open_store(tmp_path, mode="append")


def test_ranks_share_the_limit(tmp_path: Path) -> None:
    """Two ranks, the same tokens, different bytes: each reads back its own (AT-18)."""
    limit = 8 << 20
    alone = open_store(tmp_path / "alone", limit_bytes=limit)
    alone.close()
    stores = [open_store(tmp_path / "d", limit_bytes=limit, rank=r, world=2) for r in (0, 1)]
    for store in stores:
        assert store.capacity <= alone.capacity // 2 + 1
        assert store.capacity > alone.capacity // 3
    for rank, store in enumerate(stores):
        store.put_group([record((1,), life=rank)])
        store.put_group([record((i,), life=rank) for i in range(2, store.capacity + 1)])
    assert bytes_under(tmp_path / "d") <= limit
    for rank, store in enumerate(stores):
        assert fetch(store, [record((1,), life=rank)]) == [True]
        store.close()


def test_other_stores_count_and_are_left_alone(tmp_path: Path) -> None:
    """f -> f' -> f (B6): the other layout's bytes are a miss, untouched, and part of the limit."""
    limit = 4 << 20
    with open_store(tmp_path, limit_bytes=limit) as store:
        whole = store.capacity
        store.put_group(chain(1, 20))
    first = store_dir(tmp_path)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    with open_store(tmp_path, limit_bytes=limit, fingerprint=b"another-layout--") as other:
        assert other.capacity < whole
        assert fetch(other, chain(1, 20)) == [False] * 20
        other.put_group([record((i,), life=1) for i in range(other.capacity)])
        assert bytes_under(tmp_path) <= limit
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    with open_store(tmp_path, limit_bytes=limit) as store:
        assert all(fetch(store, chain(1, 20)))
        assert bytes_under(tmp_path) <= limit
        store.check()


def test_an_open_store_counts_with_its_quota(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, limit_bytes=4 << 20),
        pytest.raises(ConfigError, match="other stores there hold"),
    ):
        open_store(tmp_path, limit_bytes=4 << 20, fingerprint=b"another-layout--")
    with open_store(tmp_path, limit_bytes=12 << 20, fingerprint=b"another-layout--"):
        pass


def test_a_smaller_limit_shrinks_the_store(tmp_path: Path) -> None:
    records = [r for name in range(40) for r in chain(name, 5)]
    with open_store(tmp_path, limit_bytes=8 << 20) as store:
        store.put_group(records)
    with open_store(tmp_path, limit_bytes=2 << 20) as store:
        assert bytes_under(tmp_path) <= 2 << 20
        assert 0 < len(keys_in(store)) <= store.capacity < len(records)
        answers = fetch(store, records)
        assert answers == [r.key in keys_in(store) for r in records]
        store.check()
    with open_store(tmp_path, limit_bytes=8 << 20) as store:
        store.put_group(records)
        assert all(fetch(store, records))
        store.check()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_much_smaller_limit(tmp_path: Path, damaged: bool) -> None:
    """The index of before is larger than the one the limit now has room for."""
    frame, limit = 4096, 2 << 20
    records = [record((i,), size=frame - 96, frame=frame) for i in range(3000)]
    with open_store(tmp_path, frame_bytes=frame, limit_bytes=64 << 20) as store:
        store.put_group(records)
    if damaged:
        with (store_dir(tmp_path) / "index.mdb").open("r+b") as file:
            file.write(bytes(8192))
    with open_store(tmp_path, frame_bytes=frame, limit_bytes=limit) as store:
        there = keys_in(store)
        assert store.capacity // 2 < len(there) <= store.capacity
        assert fetch(store, records) == [r.key in there for r in records]
        store.delete([next(iter(there))])
        store.put_group([record((-1,), size=frame - 96, frame=frame)])
        store.check()
    (store_dir(tmp_path) / "index.bad").unlink(missing_ok=True)
    assert bytes_under(tmp_path) <= limit


def test_new_directories_are_durable(tmp_path: Path) -> None:
    class Synced(FaultyIO):
        def sync_directory(self, path: str) -> None:
            synced.add(Path(path))
            super().sync_directory(path)

    root = tmp_path / "new" / "deeper" / "kv"
    synced: set[Path] = set()
    with open_store(root, io=Synced()) as store:
        store.put_group(chain(1, 1))
        assert synced == {tmp_path, tmp_path / "new", root.parent, root, store_dir(root)}


def test_modes_of_files(tmp_path: Path) -> None:
    """C11: nobody else may look, whatever the umask."""
    old = os.umask(0)
    try:
        with open_store(tmp_path / "d") as store:
            store.put_group(chain(1, 2))
        store = open_store(tmp_path / "d")
        store._abandon()
        open_store(tmp_path / "d").close()  # copies the index
    finally:
        os.umask(old)
    found = list((tmp_path / "d").rglob("*"))
    assert len(found) > 5
    for path in [tmp_path / "d", *found]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_an_open_directory_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.mkdir(mode=0o755)
    open_store(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


# -- paths -------------------------------------------------------------------------------------


def test_paths_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="not a directory"):
            open_store(path)
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home" / "letter.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        open_store(tmp_path / "home")
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o755
    with pytest.raises(StoreError, match="does not exist"):
        open_store(tmp_path / "none", mode="read")
    assert not (tmp_path / "none").exists()


_AS_NOBODY = """
import os, sys
sys.path[:0] = {path!r}
from kvtier.errors import *
from tests.crash.kit import open_store
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
for mode in ("write", "read"):
    try:
        open_store({root!r}, mode=mode)
    except KVTierError as error:
        print(type(error).__name__, error)
"""


def test_a_directory_without_permission(tmp_path: Path) -> None:
    root = tmp_path / "d"
    open_store(root).close()
    root.chmod(0o500)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if os.getuid() == 0 and parent != Path("/tmp"):
            parent.chmod(0o755)
    said = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY.format(path=sys.path, root=str(root))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout.splitlines()
    assert len(said) == 2, said
    assert said[0].startswith("ConfigError")
    assert "disk_path" in said[0]
    assert said[1].startswith(("StoreError", "ConfigError"))


def test_a_newer_format(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 2))
    about = store_dir(tmp_path) / "about.json"
    text = about.read_text()
    about.write_text(text.replace('"format": 1', '"format": 2'))
    for mode in ("write", "read"):
        with pytest.raises(StoreError, match="upgrade kvtier"):
            open_store(tmp_path, mode=mode)
    about.write_text(text)
    index = str(store_dir(tmp_path) / "index.mdb")
    env = lmdb.open(index, subdir=False, max_dbs=3, map_size=1 << 30)
    meta = env.open_db(b"meta")
    with env.begin(write=True) as txn:
        said = txn.get(b"store", db=meta)
        txn.put(b"store", said.replace(b'"format": 1', b'"format": 2'), db=meta)
    env.close()
    for mode in ("write", "read"):
        with pytest.raises(StoreError, match="upgrade kvtier"):
            open_store(tmp_path, mode=mode)


def test_frames_of_another_size(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with pytest.raises(StoreError, match="fingerprint must change"):
        open_store(tmp_path, frame_bytes=2 * FRAME)


# -- verification ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 9, 13, 30, 50, 70, 90, 100, 110, 140, 2500, 4090, 4096, 9000])
def test_a_flipped_bit_is_a_miss_and_quarantined(tmp_path: Path, at: int) -> None:
    records = chain(1, 3)
    with open_store(tmp_path) as store:
        store.put_group(records)
        damage(tmp_path, slot=1, at=at)
        assert fetch(store, records) == [True, False, True]
        assert store.counters().quarantined == 1
        assert key_of((1, 1)) not in keys_in(store)
        damage(tmp_path, slot=1, at=at)  # repaired behind its back: stays quarantined
        assert fetch(store, [records[1]]) == [False]
        store.check()
        store.delete([records[2].key, records[1].key])
        assert store.counters().quarantined == 0
        store.put_group(records)
        assert all(fetch(store, records))
        store.check()


def test_quarantine_outlives_the_process_and_is_cleared_at_the_next_open(tmp_path: Path) -> None:
    """What hangs on a quarantined record cannot be reached: it goes too, and all frames count."""
    records = [*chain(1, 4), checkpoint((1, 1, 2)), *chain(2, 2)]
    with open_store(tmp_path) as store:
        store.put_group(records)
        damage(tmp_path, slot=1, at=5000)
        assert fetch(store, [records[1]]) == [False]
        with pytest.raises(StoreError, match="not stored"):
            store.put_group([record((1, 1, 7))])
    with open_store(tmp_path) as store:
        assert keys_in(store) == {records[0].key, key_of((2,)), key_of((2, 1))}
        assert store.counters().frames == 3
        store.check()
        store.put_group(records)
        assert all(fetch(store, records))


def test_a_quarantined_record_is_written_anew(tmp_path: Path) -> None:
    records = [*chain(1, 3), checkpoint((1, 1))]
    with open_store(tmp_path) as store:
        store.put_group(records)
        damage(tmp_path, slot=1, at=5000)
        damage(tmp_path, slot=4, at=5000)
        assert fetch(store, records) == [True, False, True, False]
        store.put_group([record((1, 1), life=3), checkpoint((1, 1))])
        assert fetch(store, [record((1, 1), life=3), *records[2:]]) == [True] * 3
        assert store.counters().quarantined == 0
        store.check()


def test_damage_that_cannot_be_recorded_is_still_not_offered(tmp_path: Path) -> None:
    io = FaultyIO()
    with open_store(tmp_path, io=io) as store:
        store.put_group(chain(1, 1))
        damage(tmp_path, slot=0, at=5000)
        io.fail("commit", OSError(errno.ENOSPC, "full"))
        assert fetch(store, chain(1, 1)) == [False]
        damage(tmp_path, slot=0, at=5000)
        assert fetch(store, chain(1, 1)) == [False]
        store.put_group(chain(1, 1))
        assert fetch(store, chain(1, 1)) == [True]
        store.check()


def test_a_read_that_fails_once_gets_a_second_look(tmp_path: Path) -> None:
    io = FaultyIO()
    with open_store(tmp_path, io=io) as store:
        store.put_group(chain(1, 3))
        io.fail("preadv", OSError(errno.EIO, "broken"))
        assert fetch(store, chain(1, 3)) == [True] * 3
        io.fail("preadv", OSError(errno.EIO, "broken"), times=5)  # together, one by one, once more
        answers = fetch(store, chain(1, 3))
        assert answers.count(False) == 1
        assert store.counters().quarantined == 1
        store.check()


def test_the_second_look_is_taken_with_nobody_writing(tmp_path: Path) -> None:
    """A slot may change hands between look-up and read; that must not be taken for damage."""
    locked: list[bool] = []

    class Watching(FaultyIO):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            locked.append(store._changing.locked())
            return super().preadv(fd, buffers, offset)

    io = Watching()
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 1))
    with open_store(tmp_path, io=FaultyIO()) as store:
        store._slabs._io = io
        io.fail("preadv", OSError(errno.EIO, "torn"))
        assert fetch(store, chain(1, 1)) == [True]
    assert locked == [False, True]


def test_slots_of_another_rank_are_foreign(tmp_path: Path) -> None:
    """A slab copied from another rank's store verifies by itself, but not here."""
    for rank in (0, 1):
        with open_store(tmp_path, rank=rank, world=2, limit_bytes=8 << 20) as store:
            store.put_group([record((1,), life=rank)])
    mine, theirs = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    (mine / "slab-00000").write_bytes((theirs / "slab-00000").read_bytes())
    with open_store(tmp_path, rank=0, world=2, limit_bytes=8 << 20) as store:
        assert fetch(store, [record((1,), life=0)]) == [False]
    for path in (mine / "index.mdb", mine / "clean"):
        path.unlink()
    with open_store(tmp_path, rank=0, world=2, limit_bytes=8 << 20) as store:
        assert len(store.scan()) == 0  # nothing to rebuild from


# -- several at once ---------------------------------------------------------------------------


def test_one_writer(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(StoreLocked, match="disk_mode"):
            open_store(tmp_path)
        with pytest.raises(StoreError):  # LMDB allows one environment a process
            open_store(tmp_path, mode="read")
        store.put_group(chain(1, 2))
        assert all(fetch(store, chain(1, 2)))
    open_store(tmp_path).close()


def test_calls_after_close(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    store.close()
    for call in (
        lambda: store.put_group([]),
        lambda: store.read_into([]),
        lambda: store.delete([]),
        lambda: store.touch([]),
        store.scan,
        store.check,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        capacity = store.capacity
        store.put_group(chain(1, 2))
    before = {path.name: path.read_bytes() for path in store_dir(tmp_path).iterdir()}
    with open_store(tmp_path, mode="read") as reader:
        assert reader.capacity == capacity
        assert fetch(reader, chain(1, 3)) == [True, True, False]
        assert len(reader.scan()) == 2
        for call in (reader.put_group, reader.delete, reader.touch):
            with pytest.raises(StoreError, match="read"):
                call([])
        damage(tmp_path, slot=1, at=5000)
        assert fetch(reader, chain(1, 2)) == [True, False]
        damage(tmp_path, slot=1, at=5000)
        assert fetch(reader, chain(1, 2)) == [True, False]  # remembered
        reader.check()
    after = {path.name: path.read_bytes() for path in store_dir(tmp_path).iterdir()}
    before.pop("index.mdb-lock"), after.pop("index.mdb-lock")
    assert after == before


def test_a_reader_follows_the_writer_to_a_new_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and a failure on the way is one call's, not the reader's end."""
    writer = open_store(tmp_path)
    writer.put_group(chain(1, 1))
    writer._abandon()
    with open_store(tmp_path, mode="read") as reader:
        assert fetch(reader, [*chain(1, 1), *chain(2, 1)]) == [True, False]
        with open_store(tmp_path) as writer:  # puts a copy in the place of the index
            writer.put_group(chain(2, 1))
        reopen, raised = opening.reopen_index, [StoreError(errno.EMFILE, "not now")]

        def fails_once(*given: Any) -> Any:
            if raised:
                raise raised.pop()
            return reopen(*given)

        monkeypatch.setattr(opening, "reopen_index", fails_once)
        with pytest.raises(StoreError, match="not now"):
            fetch(reader, chain(1, 1))
        assert fetch(reader, [*chain(1, 1), *chain(2, 1)]) == [True] * 2
        assert reader.counters().records == 2


def test_a_store_dropped_unclosed_gives_its_lock_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put_group(chain(1, 1))
    with pytest.warns(ResourceWarning, match="never closed"):
        del store
        gc.collect()
    with open_store(tmp_path) as store:
        assert fetch(store, chain(1, 1)) == [True]


def test_close_waits_for_reads(tmp_path: Path) -> None:
    """Threads in the middle of reads when the store closes get answers or StoreError."""
    records = chain(1, 30)
    store = open_store(tmp_path)
    store.put_group(records)
    started = threading.Barrier(5)

    def read() -> str:
        started.wait()
        for _ in range(1_000_000):
            try:
                assert fetch(store, records[:10]) == [True] * 10
            except StoreError as error:
                return str(error)
        return "never closed"

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(read) for _ in range(4)]
        started.wait()
        store.close()
        assert {future.result() for future in futures} == {"this store is closed"}
    open_store(tmp_path).close()


def test_check_can_fail(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 2))
        store._slots.take(1, 5)
        with pytest.raises(InvariantError, match="I1"):
            store.check()


# -- listing and checking ----------------------------------------------------------------------


def test_list_and_fsck(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a directory"):
        list_stores(tmp_path / "none")
    assert list_stores(tmp_path) == []
    with open_store(tmp_path) as store:
        store.put_group([*chain(1, 5), checkpoint((1, 1))])
        assert [info.state for info in list_stores(tmp_path)] == ["open"]
        (report,) = fsck(tmp_path)
        assert (report.state, report.ok) == ("open", False)
    (info,) = list_stores(tmp_path)
    assert (info.pages, info.checkpoints, info.state) == (5, 1, "clean")
    assert (info.fingerprint, info.rank, info.world) == (FINGERPRINT, 0, 1)
    assert info.bytes == pytest.approx(bytes_under(store_dir(tmp_path)), rel=0.01)
    (report,) = fsck(tmp_path)
    assert report.ok
    assert (report.records, report.repairable) == (6, False)
    damage(tmp_path, slot=2, at=5000)
    seen: list[tuple[int, int]] = []
    (report,) = fsck(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert not report.ok
    assert (report.repairable, report.dropped) == (True, 0)
    assert report.damaged == (key_of((1, 1, 2)),)
    assert seen[-1] == (6, 6)
    (report,) = fsck(tmp_path, repair=True)
    assert report.ok
    assert report.repaired
    assert (report.repairable, report.dropped, report.records) == (False, 3, 3)
    assert report.damaged == (key_of((1, 1, 2)),)
    assert fsck(tmp_path)[0].ok
    with open_store(tmp_path) as store:
        assert keys_in(store) == {key_of((1,)), key_of((1, 1)), key_of((1, 1), "checkpoint")}
        store.check()
        store._closed = False
    store = open_store(tmp_path)
    store._abandon()
    (info,) = list_stores(tmp_path)
    assert (info.pages, info.checkpoints, info.state) == (2, 1, "unclean")


def test_fsck_of_a_store_without_index_beside_a_newer_one(tmp_path: Path) -> None:
    newer = FINGERPRINT[::-1]  # its name sorts first or last: the others are checked all the same
    for fingerprint in (newer, FINGERPRINT):
        with open_store(tmp_path, fingerprint=fingerprint) as store:
            store.put_group(chain(1, 3))
    about = tmp_path / f"{newer.hex()}-0of1" / "about.json"
    about.write_text(about.read_text().replace('"format": 1', '"format": 2'))
    (tmp_path / f"{FINGERPRINT.hex()}-0of1" / "index.mdb").unlink()
    reports = {Path(r.path).name[:32]: r for r in fsck(tmp_path)}
    assert not any(report.ok for report in reports.values())
    assert "newer kvtier" in reports[newer.hex()].index
    assert "missing" in reports[FINGERPRINT.hex()].index
    assert not reports[newer.hex()].repairable
    assert reports[FINGERPRINT.hex()].repairable
    reports = {Path(r.path).name[:32]: r for r in fsck(tmp_path, repair=True)}
    assert not reports[newer.hex()].repaired
    assert reports[FINGERPRINT.hex()].repaired
    with open_store(tmp_path) as store:
        assert fetch(store, chain(1, 3)) == [True] * 3


def test_fsck_of_an_empty_store_without_index(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (store_dir(tmp_path) / "index.mdb").unlink()
    assert [report.ok for report in fsck(tmp_path)] == [False]
    assert [report.ok for report in fsck(tmp_path, repair=True)] == [True]
    assert [report.ok for report in fsck(tmp_path)] == [True]


def test_repr_names_the_place(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert str(tmp_path) in repr(store)
        assert isinstance(store, LmdbStore)
