"""Reading an index without LMDB: what LMDB's own cursors say, or an error; never anything else."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvtier.stores.pages import _FIRST, Damaged, IndexFile
from kvtier.stores.record import ROW, Row, pack_row, row_checks
from kvtier.stores.walk import copy_tree

Content = tuple[dict[bytes, bytes], bytes, dict[bytes, bytes]]


def key_of(number: int) -> bytes:
    return hashlib.md5(b"%d" % number).digest()


def row_of(number: int, tick: int = 0) -> bytes:
    key = key_of(number)
    return pack_row(Row(key, key_of(number + 1), key, tick, 2, 3, 4, 0, number, 1, 1, 0, 0))


def open_tables(path: Path) -> tuple[Any, list[Any]]:
    env = lmdb.open(str(path), subdir=False, max_dbs=3, map_size=1 << 26, sync=False)
    return env, [env.open_db(name) for name in (b"meta", b"rows", b"more")]


def write(path: Path, seed: int, rows: int, lists: int, rounds: int = 6) -> None:
    """An index with a past: pages that were split, merged and freed."""
    rng = random.Random(seed)
    env, (meta, rows_db, more_db) = open_tables(path)
    alive: list[int] = []
    for turn in range(rounds):
        with env.begin(write=True) as txn:
            txn.put(b"store", b"{}", db=meta)
            txn.put(b"counters", b"%d" % rng.randrange(10 ** rng.randrange(1, 30)), db=meta)
            for number in rng.sample(alive, len(alive) // 2 if turn < rounds - 1 else 0):
                alive.remove(number)
                txn.delete(key_of(number), db=rows_db)
                txn.delete(key_of(number), db=more_db)
            for number in range(turn * rows, turn * rows + rows):
                alive.append(number)
                txn.put(key_of(number), row_of(number), db=rows_db)
            for number in rng.sample(alive, min(lists, len(alive))):
                size = rng.choice([1, 8, 101, 2100, 9000])
                txn.put(key_of(number), rng.randbytes(size), db=more_db)
                txn.put(key_of(number), row_of(number, tick=turn), db=rows_db)
    env.close()


def through_cursors(path: Path) -> Content:
    env = lmdb.open(str(path), subdir=False, max_dbs=3, readonly=True, lock=False)
    meta, rows_db, more_db = (env.open_db(n, create=False) for n in (b"meta", b"rows", b"more"))
    with env.begin() as txn:
        found = (
            dict(txn.cursor(db=meta)),
            b"".join(value for _, value in txn.cursor(db=rows_db)),
            dict(txn.cursor(db=more_db)),
        )
    env.close()
    return found


def without_lmdb(path: Path, *, compact: bool) -> Content:
    file = IndexFile(str(path))
    rows, more = file.read(compact=compact)
    assert rows.dtype == ROW
    assert row_checks(rows)
    return file.meta, rows.tobytes(), more


@pytest.mark.parametrize(
    ("seed", "rows", "lists"), [(1, 0, 0), (2, 1, 1), (3, 40, 3), (4, 700, 90), (5, 6000, 0)]
)
def test_it_finds_what_cursors_find(tmp_path: Path, seed: int, rows: int, lists: int) -> None:
    path, copy = tmp_path / "index", tmp_path / "copy"
    write(path, seed, rows, lists)
    copy_tree(str(path), str(copy))
    wanted = through_cursors(path)
    assert len(wanted[1]) // ROW.itemsize >= rows
    assert without_lmdb(path, compact=False) == wanted
    assert without_lmdb(copy, compact=True) == wanted
    if rows > 1:
        with pytest.raises(Damaged):  # the original has pages that are free
            without_lmdb(path, compact=True)


_USE = """
import sys
from pathlib import Path
from tests.unit.test_store_pages import key_of, open_tables, row_of, through_cursors
for path in map(Path, sys.argv[1:]):
    env, (meta, rows, more) = open_tables(path)
    for turn in range(3):
        with env.begin(write=True) as txn:
            for number in range(0, 5000, 7):
                txn.put(key_of(number), row_of(number, turn), db=rows)
                txn.put(key_of(number), b"x" * (number % 3000 + 1), db=more)
            for number in range(turn, 5000, 5):
                txn.delete(key_of(number), db=rows)
                txn.delete(key_of(number), db=more)
    env.close()
    assert through_cursors(path)[1]
"""


def test_flips_are_noticed_or_harmless(tmp_path: Path) -> None:
    """Whatever bit of a copy is wrong: the file is refused, or read as before, and then LMDB reads
    it so too and can go on writing it."""
    path, copy = tmp_path / "index", tmp_path / "copy"
    write(path, seed=7, rows=300, lists=12)
    copy_tree(str(path), str(copy))
    wanted = without_lmdb(copy, compact=True)
    pristine = copy.read_bytes()
    size = 4096
    rng = random.Random(0)
    kinds = {
        int.from_bytes(pristine[at + 10 : at + 12], "little")
        for at in range(0, len(pristine), size)
    }
    assert kinds >= {1, 2, 4, 8}  # branches, leaves, overflows, metas
    places = list(range(0, 160, 2)) + list(range(size, size + 160))
    for page in range(2, len(pristine) // size):
        head = pristine[page * size : page * size + 16]
        places += [page * size + rng.randrange(16) for _ in range(2)]
        lower = int.from_bytes(head[12:14], "little")
        places += [page * size + rng.randrange(16, max(lower, 17)) for _ in range(2)]
        places += [page * size + rng.randrange(size) for _ in range(3)]
    refused, accepted = 0, []
    fd = os.open(copy, os.O_RDWR)
    for at in places:
        flipped = bytes([pristine[at] ^ 1 << rng.randrange(8)])
        os.pwrite(fd, flipped, at)
        try:
            file = IndexFile(str(copy))
            rows, more = file.read(compact=True)
            if row_checks(rows) and (file.meta, more) == (wanted[0], wanted[2]):
                assert rows.tobytes() == wanted[1]
                accepted.append(pristine[:at] + flipped + pristine[at + 1 :])
        except Damaged:
            refused += 1
        os.pwrite(fd, pristine[at : at + 1], at)
    os.close(fd)
    assert refused > len(places) // 3
    assert len(accepted) > 50
    files = []
    for number, data in enumerate(accepted[::3]):
        files.append(tmp_path / f"accepted-{number}")
        files[-1].write_bytes(data)
        assert through_cursors(files[-1]) == wanted
    subprocess.run([sys.executable, "-c", _USE, *map(str, files)], check=True)


_GO_ON = """
import json, sys
from pathlib import Path
from tests.unit.test_store_pages import key_of, open_tables, row_of, through_cursors
path, flips = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
pristine = path.read_bytes()
wanted = through_cursors(path)
for at, value in flips:
    with path.open("r+b") as file:
        file.write(pristine)
        file.truncate()
        file.seek(at)
        file.write(bytes([value]))
    assert through_cursors(path) == wanted, (at, value)
    env, (meta, rows, more) = open_tables(path)
    with env.begin(write=True) as txn:
        for number in range(40):
            txn.put(key_of(number), row_of(number, 9), db=rows)
        txn.put(key_of(2), b"x" * 3000, db=more)
    with env.begin() as txn:
        assert [v for _, v in txn.cursor(db=rows)] == sorted(row_of(n, 9) for n in range(40))
        assert txn.get(key_of(2), db=more) == b"x" * 3000
    env.close()
"""


def test_flips_of_every_byte_of_a_small_index(tmp_path: Path) -> None:
    path, copy, flips = tmp_path / "index", tmp_path / "copy", tmp_path / "flips"
    write(path, seed=3, rows=3, lists=1, rounds=1)
    copy_tree(str(path), str(copy))
    wanted = without_lmdb(copy, compact=True)
    pristine = copy.read_bytes()
    places = [
        at for at in range(len(pristine)) if at % 4096 < (160 if at < 8192 else 24) or pristine[at]
    ]
    accepted, refused, rng = [], 0, random.Random(0)
    fd = os.open(copy, os.O_RDWR)
    for at in places:
        for bit in (0, 1, 2, rng.randrange(3, 8)):
            value = pristine[at] ^ 1 << bit
            os.pwrite(fd, bytes([value]), at)
            try:
                file = IndexFile(str(copy))
                rows, more = file.read(compact=True)
                if row_checks(rows) and (file.meta, more) == (wanted[0], wanted[2]):
                    assert rows.tobytes() == wanted[1]
                    accepted.append((at, value))
            except Damaged:
                refused += 1
        os.pwrite(fd, pristine[at : at + 1], at)
    os.close(fd)
    assert refused > 1000
    assert accepted
    flips.write_text(json.dumps(accepted))
    subprocess.run([sys.executable, "-c", _GO_ON, str(copy), str(flips)], check=True)


def test_what_no_single_flip_makes(tmp_path: Path) -> None:
    """A row under another's key, a page that belongs to nothing, names that are missing, too many
    or in disorder."""
    path, copy = tmp_path / "index", tmp_path / "copy"

    def damaged(at: Path, *, compact: bool) -> None:
        with pytest.raises(Damaged):
            without_lmdb(at, compact=compact)

    write(path, seed=1, rows=3, lists=2, rounds=1)
    copy_tree(str(path), str(copy))
    whole = copy.read_bytes()
    last = len(whole) // 4096
    data = bytearray(whole + whole[-4096:])  # one page more, and counted by the last commit
    at = 4096 + _FIRST.fields["last"][1]  # type: ignore[index]
    data[at : at + 8] = last.to_bytes(8, "little")
    copy.write_bytes(data)
    damaged(copy, compact=True)
    main = next(
        at
        for at in range(8192, len(whole), 4096)
        if b"meta" in whole[at : at + 4096] and b"rows" in whole[at : at + 4096]
    )
    data = bytearray(whole)
    data[main + 16 : main + 18], data[main + 18 : main + 20] = (
        whole[main + 18 : main + 20],
        whole[main + 16 : main + 18],
    )
    copy.write_bytes(data)
    damaged(copy, compact=True)

    env, (meta, rows, _) = open_tables(path)
    with env.begin(write=True) as txn:
        txn.put(key_of(1), row_of(2), db=rows)
    env.close()
    damaged(path, compact=False)
    for names in ([b"meta", b"more"], [b"rows", b"more"]):
        path.unlink()
        env = lmdb.open(str(path), subdir=False, max_dbs=3, map_size=1 << 22)
        for name in names:
            env.open_db(name)
        env.close()
        damaged(path, compact=False)
    path.unlink()
    env, (meta, _, _) = open_tables(path)
    with env.begin(write=True) as txn:
        for number in range(400):
            txn.put(key_of(number), b"?" * 20, db=meta)
    env.close()
    damaged(path, compact=False)


@pytest.mark.parametrize("seed", range(4))
def test_rubbish_is_an_error_of_its_own(tmp_path: Path, seed: int) -> None:
    """Pages swapped, repeated, overwritten, cut: Damaged, and nothing else is raised."""
    path, copy = tmp_path / "index", tmp_path / "copy"
    write(path, seed, rows=300, lists=40)
    copy_tree(str(path), str(copy))
    wanted = without_lmdb(copy, compact=True)
    pristine = copy.read_bytes()
    pages = len(pristine) // 4096
    rng = random.Random(seed)
    for _ in range(150):
        data = bytearray(pristine)
        a, b = (rng.randrange(pages) * 4096 for _ in range(2))
        match rng.randrange(5):
            case 0:
                data[a : a + 4096] = pristine[b : b + 4096]
            case 1:  # and it says it is the page it replaced
                data[a + 8 : a + 4096] = pristine[b + 8 : b + 4096]
            case 2:
                data[a + 16 : a + 16 + 64] = rng.randbytes(64)
            case 3:
                data[a : a + 16] = rng.randbytes(16)
            case _:
                del data[rng.randrange(len(data)) :]
        copy.write_bytes(data)
        try:
            file = IndexFile(str(copy))
            rows, _ = file.read(compact=True)
        except Damaged:
            continue
        if row_checks(rows) and file.meta == wanted[0]:
            assert rows.tobytes() == wanted[1]


def test_a_million_rows_need_not_be_looked_at_one_by_one(tmp_path: Path) -> None:
    """Rows come as one array; nothing of a row but its key was looked at."""
    path = tmp_path / "index"
    env, (meta, rows_db, _) = open_tables(path)
    with env.begin(write=True) as txn:
        txn.put(b"store", b"{}", db=meta)
        for number in range(100):
            txn.put(key_of(number), key_of(number) + bytes(80), db=rows_db)
    env.close()
    rows, more = IndexFile(str(path)).read(compact=False)
    assert sorted(key_of(n) for n in range(100)) == [bytes(key) for key in rows["key"]]
    assert not row_checks(rows)
    assert more == {}
    assert np.all(rows["size"] == 0)
