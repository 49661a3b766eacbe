"""Records for the tests of stores: what a page holds follows from its prefix alone, so that any
test can say what a read must return."""

import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvtier.seams import Read, Record
from kvtier.stores import LmdbStore
from kvtier.stores.files import FileIO
from kvtier.stores.scan import inspect

FRAME = 8192
FINGERPRINT = b"test-fingerprint"
ROOT = hashlib.md5(b"root").digest()
Prefix = tuple[int, ...]
"""A page is named by the path of small numbers that leads to it."""


def key_of(prefix: Prefix, kind: str = "history") -> bytes:
    if not prefix:
        return ROOT
    return hashlib.md5(repr((prefix, kind)).encode()).digest()


def tokens_of(prefix: Prefix) -> bytes:
    return hashlib.shake_128(repr(prefix).encode()).digest(256)


def bytes_of(prefix: Prefix, kind: str, size: int, life: int = 0) -> bytes:
    """The payload; ``life`` tells two writings of one page apart (other kernels, same meaning)."""
    return hashlib.shake_128(repr((prefix, kind, life)).encode()).digest(size)


def aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def record(
    prefix: Prefix,
    *,
    kind: str = "history",
    size: int = FRAME - 100,
    frame: int = FRAME,
    life: int = 0,
    data: bytes | None = None,
) -> Record:
    """The record of a page, or of the checkpoint at its end."""
    body = bytes_of(prefix, kind, size, life) if data is None else data
    frames = -(-len(body) // frame)
    memory = aligned(frames * frame)
    memory[:] = b"\xaa" * memory.nbytes
    memory[: len(body)] = body
    return Record(
        key=key_of(prefix, kind),
        parent=key_of(prefix) if kind == "checkpoint" else key_of(prefix[:-1]),
        depth=len(prefix),
        component=kind,
        tokens=tokens_of(prefix),
        payload=tuple(memory[i * frame : (i + 1) * frame] for i in range(frames)),
        checksum=xxhash.xxh3_128_digest(body),
        size=len(body),
    )


def checkpoint(prefix: Prefix, size: int = 3 * FRAME - 5000, **options: int) -> Record:
    return record(prefix, kind="checkpoint", size=size, **options)


def chain(name: int, depth: int, start: int = 1) -> list[Record]:
    """Pages ``start`` to ``depth`` of one sequence."""
    return [record((name, *range(1, d))) for d in range(start, depth + 1)]


def read_for(wanted: Record, *, poison: bytes = b"\xff") -> Read:
    """A read of that record into memory full of poison."""
    frame = wanted.payload[0].nbytes
    memory = aligned(frame * len(wanted.payload))
    memory[:] = poison * memory.nbytes
    views = tuple(memory[i * frame : (i + 1) * frame] for i in range(len(wanted.payload)))
    return Read(wanted.key, wanted.parent, wanted.tokens, views, wanted.size)


def body(frames: Sequence[memoryview], size: int) -> bytes:
    return b"".join(bytes(view) for view in frames)[:size]


def fetch(store: LmdbStore, records: Iterable[Record]) -> list[bool]:
    """Read records; what is said to be there must have the right bytes."""
    records = list(records)
    reads = [read_for(wanted) for wanted in records]
    answers = store.read_into(reads)
    for wanted, read, answer in zip(records, reads, answers, strict=True):
        if answer:
            assert body(read.views, read.size) == body(wanted.payload, wanted.size), "wrong bytes"
    return answers


def keys_in(store: LmdbStore) -> set[bytes]:
    return {bytes(key) for key in store.scan()["key"]}


def open_store(path: Path | str, **options: object) -> LmdbStore:
    given: dict[str, object] = {
        "fingerprint": FINGERPRINT,
        "frame_bytes": FRAME,
        "limit_bytes": 4 << 20,
        **options,
    }
    return LmdbStore(path, **given)  # type: ignore[arg-type]


def store_dir(root: Path | str) -> Path:
    """The one store inside a directory."""
    (found,) = [path for path in Path(root).iterdir() if path.is_dir() and "of" in path.name]
    return found


def bytes_under(root: Path | str) -> int:
    """What ``du`` would say, or the lengths, whichever is more."""
    total = 0
    for where, _, files in os.walk(root):
        for name in (".", *files):
            try:
                found = os.lstat(os.path.join(where, name))
            except FileNotFoundError:
                continue
            total += max(found.st_size, found.st_blocks * 512)
    return total


class Crash(BaseException):
    """The power goes off here."""


@dataclass
class FaultyIO(FileIO):
    """Fails on demand: ``errors[call] = OSError`` makes the next such call raise it."""

    errors: dict[str, list[BaseException]] = field(default_factory=dict)
    points: list[str] = field(default_factory=list)
    crash_at: tuple[str, int] | None = None
    """(point, how many times it is passed first)."""
    _passing: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, call: str, error: BaseException, times: int = 1) -> None:
        self.errors.setdefault(call, []).extend([error] * times)

    def _due(self, call: str) -> None:
        if self.errors.get(call):
            raise self.errors[call].pop(0)

    def point(self, name: str) -> None:
        with self._passing:
            self.points.append(name)
            if self.crash_at is not None and self.crash_at[0] == name:
                left = self.crash_at[1]
                if left == 0:
                    self.crash_at = None
                    raise Crash(name)
                self.crash_at = (name, left - 1)

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            self._due("open_direct")
        self._due("open")
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._due("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._due("pwritev")
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._due("sync")
        super().sync(fd)

    def allocate(self, fd: int, size: int) -> None:
        self._due("allocate")
        super().allocate(fd, size)

    def commit(self, txn: object) -> None:
        self._due("commit")
        super().commit(txn)


inspect_here = staticmethod(inspect)
"""Inspects in this process: fast, for files that are known not to be damaged."""
