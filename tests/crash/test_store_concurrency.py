"""Many threads, several processes, forks: answers are right or a miss, and nothing dies."""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.errors import StoreError, StoreLocked
from kvtier.stores import LmdbStore
from tests.crash.kit import (
    chain,
    checkpoint,
    fetch,
    key_of,
    keys_in,
    open_store,
    record,
    store_dir,
)

HERE = Path(__file__).parents[2]


def in_child(code: str, *arguments: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.parametrize("codec", [{}, {"history": 1, "checkpoint": 1}])
def test_32_threads_read_while_slots_are_reused(tmp_path: Path, codec: dict[str, int]) -> None:
    """AT-32: distinct payloads, compressible, all through one store; a record that is gone is a
    miss, one that is there is right, and no race is taken for damage."""
    bodies = {i: bytes([i]) * 4000 + os.urandom(3000) for i in range(60)}
    pages = [record((i,), data=data) for i, data in bodies.items()]
    tails = [checkpoint((i,)) for i in range(20)]
    stop = threading.Event()
    with open_store(tmp_path, limit_bytes=1400 << 10, codec=codec) as store:
        assert store.capacity < len(pages) + 3 * len(tails)  # slots change hands all the time

        hits = [0] * 32

        def read(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                hits[seed] += sum(fetch(store, rng.sample(pages, 3) + rng.sample(tails, 1)))

        def frames_of(page: int) -> int:
            return 1 + (len(tails[page].payload) if page < len(tails) else 0)

        def write() -> None:
            rng = random.Random(99)
            there: list[int] = []
            start = time.monotonic()
            while (now := time.monotonic()) < start + 4 or (not all(hits) and now < start + 60):
                page = rng.randrange(60)
                if page in there:
                    continue
                gone: list[int] = []
                while sum(map(frames_of, [*there, page])) > store.capacity:
                    gone.append(there.pop(rng.randrange(len(there))))
                store.delete(
                    [key_of((i,), kind) for i in gone for kind in ("history", "checkpoint")]
                )
                store.put_group([pages[page], *tails[page : page + 1]])
                there.append(page)

        with ThreadPoolExecutor(32) as pool:
            readers = [pool.submit(read, seed) for seed in range(32)]
            try:
                write()
            finally:
                stop.set()  # or the pool would wait for ever
            for reader in readers:
                reader.result()
        assert all(hits), "a thread never found anything"
        assert store.counters().quarantined == 0
        store.check()


_READER = """
import random, sys
from kvtier.errors import StoreError
from tests.crash.kit import fetch, open_store, record, checkpoint, keys_in
with open_store(sys.argv[1], mode="read") as store:
    print("open", flush=True)
    rng = random.Random(int(sys.argv[2]))
    hits = calls = 0
    while (line := sys.stdin.readline().strip()) != "stop":
        for _ in range(20):
            names = [(rng.randrange(30),) for _ in range(4)]
            hits += sum(fetch(store, [record(n) for n in names] + [checkpoint(names[0])]))
            calls += 1
        print(hits, len(keys_in(store)), flush=True)
"""


def test_reader_processes_while_a_writer_writes(tmp_path: Path) -> None:
    """Also while the writer is killed and opened again, and the index replaced under them."""
    store = open_store(tmp_path, limit_bytes=1400 << 10)
    store.put_group([record((i,)) for i in range(15)])
    readers = [in_child(_READER, str(tmp_path), str(seed)) for seed in range(3)]
    said = ""
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "open\n"
        rng = random.Random(5)
        inode = (store_dir(tmp_path) / "index.mdb").stat().st_ino
        for turn in range(9):
            for reader in readers:
                assert reader.stdin is not None
                reader.stdin.write("go\n")
                reader.stdin.flush()
            for _ in range(15):
                there = keys_in(store)
                page = rng.randrange(30)
                while len(there) > 24 and key_of((page,)) not in there:
                    page = rng.randrange(30)
                if key_of((page,)) in there:
                    store.delete([key_of((page,), kind) for kind in ("checkpoint", "history")])
                else:
                    store.put_group([record((page,)), checkpoint((page,))])
            if turn % 3 == 1:
                store._abandon()
                store = open_store(tmp_path, limit_bytes=1400 << 10)
            elif turn % 3 == 2:
                store.close()
                store = open_store(tmp_path, limit_bytes=1400 << 10)
            for reader in readers:
                assert reader.stdout is not None
                said = reader.stdout.readline()
                assert said, "a reader died"
        assert (store_dir(tmp_path) / "index.mdb").stat().st_ino != inode
        # They follow to the index that is current now.
        for reader in readers:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write("go\n")
            reader.stdin.flush()
            hits, known = reader.stdout.readline().split()
            assert int(hits) > 0
            assert int(known) == len(keys_in(store))
            reader.stdin.write("stop\n")
            reader.stdin.flush()
            assert reader.wait(300) == 0
        store.check()
        assert store.counters().quarantined == 0
    finally:
        store.close()
        for reader in readers:
            reader.kill()
            reader.communicate()


_FORK = """
import os, sys
from kvtier.errors import StoreError
from tests.crash.kit import chain, fetch, key_of, open_store
root = sys.argv[1]
store = open_store(root)
store.put_group(chain(1, 3))
go_read, go_write = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(go_write)
    refused = 0
    for call in (lambda: store.put_group(chain(2, 1)), lambda: store.read_into([]), store.scan,
                 lambda: store.delete([key_of((1,))]), lambda: store.touch([]), store.check):
        try:
            call()
        except StoreError as error:
            refused += "fork" in str(error)
    store.close()
    os.read(go_read, 1)  # alive while the parent closes
    del store
    os._exit(0 if refused == 6 else 1)
os.close(go_read)
assert fetch(store, chain(1, 3)) == [True] * 3
store.put_group(chain(2, 2))
store.check()
store.close()
with open_store(root) as store:  # the child does not hold the lock
    assert all(fetch(store, [*chain(1, 3), *chain(2, 2)]))
    store.check()
os.write(go_write, b"x")
assert os.waitpid(pid, 0)[1] == 0
with open_store(root) as store:
    assert all(fetch(store, [*chain(1, 3), *chain(2, 2)]))
print("fine")
"""


def test_fork(tmp_path: Path) -> None:
    """AT-33: in the child every call is refused; the parent does not notice."""
    child = in_child(_FORK, str(tmp_path))
    said, _ = child.communicate(timeout=300)
    assert (child.returncode, said) == (0, "fine\n")


_OPEN = """
import sys
from kvtier.errors import StoreLocked
from tests.crash.kit import chain, fetch, open_store
sys.stdin.readline()
try:
    store = open_store(sys.argv[1])
except StoreLocked:
    print("locked", flush=True)
else:
    store.put_group(chain(1, 4))
    print("open", flush=True)
    sys.stdin.readline()
    store.close()
"""


def test_processes_that_open_at_the_same_moment(tmp_path: Path) -> None:
    """A directory that does not exist yet, and four who want to write it."""
    children = [in_child(_OPEN, str(tmp_path / "new")) for _ in range(4)]
    try:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        said = []
        for child in children:
            assert child.stdout is not None
            said.append(child.stdout.readline().strip())
        assert sorted(said) == ["locked"] * 3 + ["open"]
        with pytest.raises(StoreLocked):
            open_store(tmp_path / "new")
        with open_store(tmp_path / "new", mode="read") as reader:
            assert fetch(reader, chain(1, 4)) == [True] * 4
    finally:
        for child in children:
            child.communicate("bye\n", timeout=300)
    with open_store(tmp_path / "new") as store:
        assert fetch(store, chain(1, 4)) == [True] * 4


def test_a_reader_that_cannot_follow_says_so(tmp_path: Path) -> None:
    """The index it followed to is damaged: StoreError, in every call, and close works."""
    with open_store(tmp_path) as store:
        store.put_group(chain(1, 2))
    reader = open_store(tmp_path, mode="read")
    index = store_dir(tmp_path) / "index.mdb"
    copy = index.with_name("other")
    copy.write_bytes(b"\x5a" * 8192)
    copy.replace(index)
    for _ in range(2):
        with pytest.raises(StoreError):
            fetch(reader, chain(1, 2))
    reader.close()
    assert isinstance(reader, LmdbStore)
