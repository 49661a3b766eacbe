"""Power cuts between any two writes of a real run.

A preloaded library logs every write, sync, rename and change of length that a process makes on a
store; the log is then replayed up to each of its entries, with a random part of what was not
synced by then left out, and the store is opened on what that leaves.
"""

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.stores import LmdbStore
from tests.crash import scenario
from tests.crash.kit import inspect_here

SEED, STEPS = 3, 24
SECTOR = 512
ENTRY = struct.Struct("<cHQI")


@dataclass(frozen=True)
class Entry:
    kind: bytes
    path: str
    offset: int
    data: bytes


@dataclass
class Disk:
    """Files as the log has them: what is certain, and what only was written."""

    durable: dict[str, bytearray] = field(default_factory=dict)
    current: dict[str, bytearray] = field(default_factory=dict)
    pending: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)

    def apply(self, entry: Entry) -> None:
        path = entry.path
        if entry.kind in (b"W", b"D"):
            _put(self.current.setdefault(path, bytearray()), entry.offset, entry.data)
            if entry.kind == b"D":
                _put(self.durable.setdefault(path, bytearray()), entry.offset, entry.data)
            else:
                for at in range(0, len(entry.data), SECTOR):
                    piece = entry.data[at : at + SECTOR]
                    self.pending.setdefault(path, []).append((entry.offset + at, piece))
        elif entry.kind == b"S":
            if path in self.current:
                self.durable[path] = bytearray(self.current[path])
            self.pending.pop(path, None)
        elif entry.kind in (b"T", b"A"):
            for files in (self.current, self.durable):
                file = files.setdefault(path, bytearray())
                if entry.kind == b"T":
                    del file[entry.offset :]
                file.extend(bytes(max(0, entry.offset - len(file))))
        elif entry.kind == b"R":
            for files in (self.current, self.durable):
                files[entry.data.decode()] = files.pop(path, bytearray())
            self.pending[entry.data.decode()] = self.pending.pop(path, [])
        else:
            for files in (self.current, self.durable, self.pending):
                files.pop(path, None)

    def after_power_cut(self, rng: random.Random) -> dict[str, bytearray]:
        """What is certain, and each sector that was not synced or not."""
        files = {path: bytearray(data) for path, data in self.durable.items()}
        for path, pieces in self.pending.items():
            for offset, piece in pieces:
                if rng.random() < 0.5:
                    _put(files.setdefault(path, bytearray()), offset, piece)
        return files


def _put(file: bytearray, offset: int, data: bytes) -> None:
    if len(file) < offset + len(data):
        file.extend(bytes(offset + len(data) - len(file)))
    file[offset : offset + len(data)] = data


def read_log(path: Path) -> Iterator[Entry]:
    data = path.read_bytes()
    at = 0
    while at < len(data):
        kind, length, offset, size = ENTRY.unpack_from(data, at)
        at += ENTRY.size
        name = data[at : at + length].decode()
        at += length
        yield Entry(kind, name, offset, data[at : at + size])
        at += size


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Entry], Path]:
    """The log of one run, and the directory it was made on."""
    if shutil.which("gcc") is None:
        pytest.skip("the library that logs writes needs gcc")
    top = tmp_path_factory.mktemp("log")
    library = top / "write_log.so"
    source = Path(__file__).with_name("write_log.c")
    command = [
        "gcc",
        "-O1",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(source),
        "-ldl",
        "-pthread",
    ]
    subprocess.run(command, check=True)
    root = top / "run"
    (root / "disk").mkdir(parents=True, mode=0o700)
    where = {
        "LD_PRELOAD": str(library),
        "KVTIER_LOG": str(top / "log"),
        "KVTIER_LOG_ROOT": str(root),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    arguments = [str(root / "disk"), str(root / "marks"), str(SEED), str(STEPS)]
    subprocess.run(
        [sys.executable, "-m", "tests.crash.scenario", *arguments],
        env={**os.environ, **where},
        cwd=Path(__file__).parents[2],
        check=True,
    )
    return list(read_log(top / "log")), root


def replay(
    log: list[Entry], root: Path, target: Path, cuts: list[int], seed: int
) -> dict[str, int]:
    """Open the store after each cut; returns how often the step under way had taken effect."""
    disk, marks = Disk(), b""
    seen = {"in effect": 0, "not in effect": 0, "between": 0}
    at = 0
    for number, cut in enumerate(cuts):
        for entry in log[at:cut]:
            if entry.path.endswith("/marks"):
                marks += entry.data
            else:
                disk.apply(entry)
        at = cut
        if b"opened" not in marks:
            continue
        shutil.rmtree(target, ignore_errors=True)
        for path, data in disk.after_power_cut(random.Random(seed + number)).items():
            copy = target / Path(path).relative_to(root / "disk")
            copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            copy.write_bytes(data)
        done, begun = marks.count(b"done"), marks.count(b"begin")
        with scenario.open_for_course(str(target)) as store:
            in_effect = scenario.verify(store, SEED, STEPS, done, begun)
        if done == begun:
            seen["between"] += 1
        else:
            seen["in effect" if in_effect == begun else "not in effect"] += 1
    return seen


def test_the_log_is_of_a_real_run(log: tuple[list[Entry], Path]) -> None:
    """Payload is synced before the index transaction that names it, and that before the mark."""
    entries, _ = log
    assert {entry.kind for entry in entries} >= {b"W", b"D", b"S", b"R", b"A"}
    unsynced = commits = 0
    for entry in entries:
        if "slab-" in entry.path and entry.kind in (b"W", b"S"):
            unsynced = unsynced + 1 if entry.kind == b"W" else 0
        elif entry.kind == b"D":
            commits += 1
            assert not unsynced, "a commit before the payload was synced"
    assert commits > STEPS
    disk = Disk()
    for entry in entries:
        if not entry.path.endswith("/marks"):
            disk.apply(entry)
    for path, data in disk.current.items():  # the log accounts for every byte
        if not path.endswith("-lock"):
            assert Path(path).read_bytes() == data, path


def cut_points(entries: list[Entry], count: int | None) -> list[int]:
    opened = next(
        i for i, e in enumerate(entries) if b"opened" in e.data and e.path.endswith("marks")
    )
    every = range(opened + 1, len(entries) + 1)
    if count is None:
        return list(every)
    return sorted(random.Random(1).sample(every, min(count, len(every))))


def test_power_cuts(
    log: tuple[list[Entry], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LmdbStore, "inspect", inspect_here)
    entries, root = log
    seen = replay(entries, root, tmp_path / "disk", cut_points(entries, 60), seed=0)
    assert seen["not in effect"] > 10, seen
    assert seen["in effect"] > 0, seen


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_power_cuts_between_all_writes(
    log: tuple[list[Entry], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LmdbStore, "inspect", inspect_here)
    entries, root = log
    for seed in (100, 10_000, 20_000):
        replay(entries, root, tmp_path / "disk", cut_points(entries, None), seed)
