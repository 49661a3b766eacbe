"""The look at an index that may be damaged, in a process that may die of it.

LMDB's pages carry no checksum, and a flipped bit in one can end the process that follows it.  So
after an unclean close a child process (arguments: INDEX STORE [COPY]) reads every row, compares it
with its own check and with the others, and writes a fresh compact copy; only the copy is ever used
for writing.  It prints a line as soon as it has started and then its verdict; exit status 0 sound
(and a JSON object of counts), 3 not, 4 newer format, 5 could not look.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lmdb
import numpy as np

from kvtier.errors import StoreError
from kvtier.stores.files import FILE_MODE
from kvtier.stores.index import Counters, Rows, check_rows, open_env
from kvtier.stores.record import FORMAT, ROW, row_checks, unpack_more

__all__ = ["NEWER", "SOUND", "UNSOUND", "Verdict", "inspect", "inspect_in_child"]

SOUND, UNSOUND, NEWER, _UNABLE = 0, 3, 4, 5
TIMEOUT_S = 600.0
_STARTED = "looking"
_PASSING = frozenset(
    getattr(errno, name)
    for name in ("ENOMEM", "EMFILE", "ENFILE", "EAGAIN", "EINTR", "ENOSPC", "EDQUOT")
)
"""Errors that say nothing of the file: there was no room to look at it."""

_CHILD = """
import sys, types
sys.path += sys.argv.pop(1).split(chr(0x1F))
for name, path in ("kvtier", sys.argv[1]), ("kvtier.stores", sys.argv[1] + "/stores"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from kvtier.stores.scan import main
sys.exit(main(sys.argv[2:]))
"""
"""Loads this module and what it needs, not the whole package: opening waits for it.  Isolated,
with the parent's path behind its own: no file of the user's can stand for a standard module."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an inspection."""

    status: int
    detail: str
    """Why not sound; or, if sound, a JSON object of counts."""

    @property
    def counts(self) -> dict[str, int]:
        return dict(json.loads(self.detail)) if self.status == SOUND else {}


def inspect_in_child(index: str, store: bytes, copy: str | None = None) -> Verdict:
    """Inspect an index in a child process, which may write a sound copy of it to ``copy``.

    Never raises for what is in the file: a child that crashes or hangs over it means UNSOUND.
    Raises StoreError where it could not look: the child did not start, or lacked memory,
    descriptors or room.
    """
    if not sys.executable:
        raise StoreError(f"{index} cannot be inspected: this process names no Python to run")
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = "\x1f".join(entry for entry in sys.path if entry)
    command = [sys.executable, "-I", "-c", _CHILD, path, package, index, store.hex()]
    if copy is not None:
        command.append(copy)
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return Verdict(UNSOUND, f"the inspection did not end: {error}")
    except OSError as error:
        raise StoreError(error.errno, f"{index} cannot be inspected: {error}") from error
    started, _, said = child.stdout.partition("\n")
    said = said.strip()
    if started != _STARTED or child.returncode == _UNABLE:
        why = said or child.stderr.strip()[-300:] or f"exit status {child.returncode}"
        raise StoreError(f"{index} cannot be inspected by {sys.executable!r}: {why}")
    if child.returncode == NEWER or (child.returncode == SOUND and _are_counts(said)):
        return Verdict(child.returncode, said)
    said = (said or child.stderr.strip()[-300:]) or "no output"
    return Verdict(UNSOUND, f"exit status {child.returncode}: {said}")


def _are_counts(text: str) -> bool:
    try:
        return isinstance(Counters(**json.loads(text)), Counters)
    except (ValueError, TypeError):
        return False


def inspect(index: str, store: bytes, copy: str | None = None) -> Verdict:
    """The inspection itself; may crash the process when the file is damaged."""
    size = os.stat(index).st_size
    try:
        env = open_env(index, size, readonly=True, lock=False)
        try:
            with ThreadPoolExecutor(1) as pool:
                copying = pool.submit(_copy, env, copy) if copy is not None else None
                verdict = _read(env, store)
                if copying is not None:
                    copying.result()
            return verdict
        finally:
            env.close()
    except (lmdb.Error, OSError, ValueError, KeyError, TypeError) as error:
        status = _UNABLE if _is_passing(error) else UNSOUND
        return Verdict(status, f"{type(error).__name__}: {error}")


def _is_passing(error: Exception) -> bool:
    return isinstance(error, lmdb.MemoryError | lmdb.DiskError) or (
        isinstance(error, OSError) and error.errno in _PASSING
    )


def _copy(env: Any, copy: str) -> None:
    """A copy of the tree alone: compacting walks every page, and leaves the list of free pages
    behind, which nothing could check."""
    fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        env.copyfd(fd, compact=True)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(env: Any, store: bytes) -> Verdict:
    names = (b"meta", b"rows", b"more")
    meta, rows_db, more_db = (env.open_db(name, create=False) for name in names)
    with env.begin() as txn:
        about = json.loads(txn.get(b"store", db=meta))
        if about["format"] > FORMAT:
            return Verdict(NEWER, str(about["format"]))
        if about["store"] != store.hex():
            return Verdict(UNSOUND, "belongs to another store")
        counters = Counters(**json.loads(txn.get(b"counters", db=meta)))
        rows = _rows(txn, rows_db)
        more: dict[bytes, list[int]] = {}
        for key, data in txn.cursor(db=more_db):
            slots = unpack_more(data)
            if slots is None or len(more) > len(rows):
                return Verdict(UNSOUND, "a list of slots fails its check")
            more[key] = slots
    wrong = check_rows(rows, more, counters)
    if wrong:
        return Verdict(UNSOUND, "; ".join(wrong))
    return Verdict(SOUND, json.dumps(counters.named()))


def _rows(txn: Any, rows_db: Any) -> Rows:
    expected = int(txn.stat(rows_db)["entries"])
    values = _column(txn, rows_db, expected, ROW.itemsize, values=True)
    rows = np.frombuffer(values, ROW)
    keys = _column(txn, rows_db, expected, 16, values=False)
    if keys != rows["key"].tobytes() or not row_checks(rows):
        raise ValueError("a row fails its check")
    return rows


def _column(txn: Any, rows_db: Any, expected: int, size: int, *, values: bool) -> bytes:
    """All keys or all values, end to end."""
    cursor = txn.cursor(db=rows_db).iternext(keys=not values, values=values)
    # One more than counted: pages that point in a circle never end.
    data = b"".join(islice(cursor, expected + 1))
    if len(data) != expected * size:
        raise ValueError("the rows do not have the length that was counted")
    return data


def main(argv: list[str]) -> int:
    """What the child runs."""
    index, store, *copy = argv
    # A damaged tree may be endless: the copy may not outgrow the original, nor take for ever.
    sys.stdout.write(_STARTED + "\n")
    sys.stdout.flush()
    size = os.stat(index).st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verdict = inspect(index, bytes.fromhex(store), *copy)
    sys.stdout.write(verdict.detail + "\n")
    return verdict.status
