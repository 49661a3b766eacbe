"""Media that fail under a running store: flips in every region, a full file system, a read-only
one, no room in the index."""

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, KVTierError, StoreError
from kvtier.stores import LmdbStore
from tests.crash.kit import (
    FRAME,
    FaultyIO,
    bytes_under,
    chain,
    checkpoint,
    fetch,
    inspect_here,
    key_of,
    open_store,
    record,
    store_dir,
)

SLOT = 4096 + FRAME
RECORDS = [*chain(1, 4), checkpoint((1, 1)), *chain(2, 2)]


@pytest.mark.parametrize("seed", range(4))
def test_flips_in_payload_files_while_open(tmp_path: Path, seed: int) -> None:
    """Never a wrong byte; a flip where nothing is stored harms nothing."""
    rng = random.Random(seed)
    with open_store(tmp_path) as store:
        store.put_group(RECORDS)
        slab = store_dir(tmp_path) / "slab-00000"
        regions = {
            "header": (0, 128),
            "tokens": (128, 384),
            "rest": (384, 4080),
            "check": (4080, 4096),
        }
        regions |= {"payload": (4096, SLOT - 100), "behind": (SLOT - 100, SLOT)}
        hit: set[int] = set()
        for name, (start, stop) in regions.items():
            slot = rng.randrange(4)  # of the first chain: one frame each
            with slab.open("r+b") as file:
                at = slot * SLOT + rng.randrange(start, stop)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ (1 << rng.randrange(8))]))
                os.fsync(file.fileno())
            if name != "behind":
                hit.add(slot)
            answers = fetch(store, RECORDS)
            assert answers == [slot not in hit for slot in range(4)] + [True] * 3
            store.check()


@pytest.mark.slow
def test_every_byte_of_a_small_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of the payload file and of the marks, flipped while the store is closed."""
    monkeypatch.setattr(LmdbStore, "inspect", inspect_here)
    with open_store(tmp_path) as store:
        store.put_group(RECORDS[:2])
    whole = {path.name: path.read_bytes() for path in store_dir(tmp_path).iterdir()}
    for name in ("slab-00000", "clean", "about.json", "writer.lock", "gate.lock"):
        step = 1 if len(whole[name]) < 1000 else 61
        for at in range(0, len(whole[name]), step):
            for other, data in whole.items():
                (store_dir(tmp_path) / other).write_bytes(data)
            flipped = bytearray(whole[name])
            flipped[at] ^= 0x21
            (store_dir(tmp_path) / name).write_bytes(flipped)
            try:
                with open_store(tmp_path) as store:
                    fetch(store, RECORDS[:2])
                    store.check()
            except StoreError:
                assert name == "about.json", (name, at)  # says other frames, or a newer format


# -- real file systems -----------------------------------------------------------------------------


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """An ext4 file system of 6 MiB.  It lies outside of the directories that the test runner keeps
    and cleans: a mount left there by a kill would be in its way."""
    if os.getuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a small file system needs root and mkfs.ext4")
    place = Path(tempfile.mkdtemp(prefix="kvtier-mount-"))
    image, mount = place / "image", place / "mount"
    try:
        with image.open("wb") as file:
            file.truncate(6 << 20)
        mount.mkdir()
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
        made = subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=False)
        if made.returncode:
            pytest.skip("this system does not allow loop mounts")
        yield mount
    finally:
        while os.path.ismount(mount):  # also when interrupted, and whatever is still open there
            subprocess.run(["umount", "--lazy", str(mount)], check=True)
        shutil.rmtree(place)


def fill_up(mount: Path) -> Path:
    """Take all the room there is left."""
    path = mount / "lost+found" / "filler"
    with path.open("wb", buffering=0) as file:
        chunk = 1 << 20
        while chunk:
            try:
                file.write(b"x" * chunk)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                chunk //= 2
    return path


def test_a_real_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AT-27: the file system fills up under the store."""
    monkeypatch.setattr("kvtier.stores.slabs.GROW_BYTES", 8 * SLOT)
    store = open_store(small_disk, limit_bytes=4 << 20)
    store.put_group(chain(1, 3))
    filler = fill_up(small_disk)
    stored = 0
    with pytest.raises(StoreError, match="No space left"):
        for i in range(store.capacity):
            store.put_group([record((10 + i,))])
            stored += 1
    assert 0 < stored < store.capacity - 3
    store.check()
    assert all(fetch(store, [*chain(1, 3), *[record((10 + i,)) for i in range(stored)]]))
    # Deleting works at 100 %, and what is given back can be used.
    store.delete([key_of((1, 1, 2))])
    store.put_group([record((1, 1, 7))])
    assert fetch(store, [record((1, 1, 7))]) == [True]
    filler.unlink()
    store.put_group(chain(3, 5))
    assert all(fetch(store, chain(3, 5)))
    store.check()
    store.close()
    filler = fill_up(small_disk)
    with pytest.raises(StoreError, match="No space left"):  # not even for the index
        open_store(small_disk, limit_bytes=4 << 20)
    filler.unlink()
    with open_store(small_disk, limit_bytes=4 << 20) as store:
        assert all(fetch(store, [*chain(3, 5), *[record((10 + i,)) for i in range(stored)]]))
        store.check()


def test_a_limit_beyond_the_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The capacity is what the file system can hold, so that eviction runs before it is full."""
    with open_store(small_disk, limit_bytes=1 << 30) as store:
        assert store.capacity * SLOT < 6 << 20
        assert "has room for" in caplog.text
        store.put_group([record((i,)) for i in range(store.capacity)])
        with pytest.raises(StoreError, match="store is full"):
            store.put_group([record((-1,))])
        assert all(fetch(store, [record((i,)) for i in range(store.capacity)]))


def test_a_read_only_file_system(small_disk: Path) -> None:
    with open_store(small_disk) as store:
        store.put_group(chain(1, 3))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(KVTierError) as caught:
        open_store(small_disk)
    assert isinstance(caught.value, ConfigError | StoreError)
    assert "read-only" in str(caught.value).lower()
    with open_store(small_disk, mode="read") as store:
        assert fetch(store, chain(1, 4)) == [True] * 3 + [False]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_room_that_was_had_in_part_is_given_back(tmp_path: Path) -> None:
    """Where the file system fills up in the middle of enlarging a file."""

    class HalfFull(FaultyIO):
        full = False

        def allocate(self, fd: int, size: int) -> None:
            if not self.full:
                return super().allocate(fd, size)
            super().allocate(fd, size // 2)
            raise OSError(errno.ENOSPC, "full")

    io = HalfFull()
    with open_store(tmp_path, io=io) as store:
        io.full = True
        with pytest.raises(StoreError):
            store.put_group(chain(1, 2))
        assert (store_dir(tmp_path) / "slab-00000").stat().st_size == 0
        io.full = False
        store.put_group(chain(1, 2))
        assert fetch(store, chain(1, 2)) == [True] * 2
        store.check()


def test_a_rank_that_holds_more_than_its_part_is_respected(tmp_path: Path) -> None:
    """Rank 0 was filled under a larger limit and is closed; rank 1 gets what it leaves."""
    with open_store(tmp_path, rank=0, world=2, limit_bytes=8 << 20) as store:
        store.put_group([record((i,)) for i in range(store.capacity)])
    limit = 5 << 20
    with open_store(tmp_path, rank=1, world=2, limit_bytes=limit) as store:
        store.put_group([record((i,)) for i in range(store.capacity)])
        assert bytes_under(tmp_path) <= limit


# -- the index -----------------------------------------------------------------------------------

_HOLD = """
import sys, lmdb
env = lmdb.open(sys.argv[1], subdir=False, readonly=True, max_dbs=3, map_size=1 << 30)
rows = env.open_db(b"rows", create=False)
txn = env.begin()
print("held", flush=True)
sys.stdin.read()
print(sum(1 for _ in txn.cursor(db=rows)), flush=True)
"""


def test_a_reader_that_holds_on_fills_the_index(tmp_path: Path) -> None:
    """AT-26: old pages cannot be reused while somebody looks at them; a put is refused in the end,
    nothing is lost, and after the reader has died everything goes on."""
    limit = 2 << 20
    with open_store(tmp_path, limit_bytes=limit) as store:
        store.put_group(chain(1, 5))
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(store_dir(tmp_path) / "index.mdb")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match="index is full"):
            for i in range(10_000):
                store.put_group([record((2, i))] if i else [record((2,)), record((2, 0))])
                store.delete([key_of((2, i))])
        store.check()
        assert all(fetch(store, chain(1, 5)))
        assert bytes_under(tmp_path) <= limit
        holder.kill()
        holder.communicate()
        with pytest.raises(StoreError):
            store.put_group(chain(3, 1))  # notices that the reader is gone
        store.put_group(chain(3, 5))
        assert all(fetch(store, [*chain(1, 5), *chain(3, 5)]))
        store.check()
    with open_store(tmp_path, limit_bytes=limit) as store:
        assert all(fetch(store, [*chain(1, 5), *chain(3, 5)]))


def test_the_index_does_not_grow_under_churn(tmp_path: Path) -> None:
    """AT-28: a live set of fixed size, turned over many times at 100 % full."""
    with open_store(tmp_path, limit_bytes=2 << 20) as store:
        live = store.capacity
        store.put_group([record((i,)) for i in range(live)])
        for turn in range(1, 5):
            for start in range(0, live, 8):
                numbers = range(start, min(start + 8, live))
                store.delete([key_of(((turn - 1) * live + i,)) for i in numbers])
                store.put_group([record((turn * live + i,)) for i in numbers])
            if turn == 2:
                settled = store._index.used_bytes()
        store.check()
        assert store._index.used_bytes() <= settled * 1.1
        assert store.counters().records == live
        assert all(fetch(store, [record((4 * live + i,)) for i in range(live)]))
