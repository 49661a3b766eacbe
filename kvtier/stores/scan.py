"""The look at an index that may be damaged, in a process that may die of it.

LMDB's pages carry no checksum, and a flipped bit in one can end the process that follows it.  So
after an unclean close a child process (arguments: INDEX STORE [COPY]) reads every row, compares it
with its own check and with the others, and writes a fresh compact copy; only the copy is ever used
for writing.  Prints one JSON object; exit status 0 sound, 3 not, 4 newer format.
"""

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

from kvtier.stores.files import FILE_MODE
from kvtier.stores.index import Counters, Rows, check_rows, open_env
from kvtier.stores.record import FORMAT, ROW, row_checks, unpack_more

__all__ = ["NEWER", "SOUND", "UNSOUND", "Verdict", "inspect", "inspect_in_child"]

SOUND, UNSOUND, NEWER = 0, 3, 4
TIMEOUT_S = 600.0

_CHILD = """
import sys, types
for name, path in ("kvtier", sys.argv[1]), ("kvtier.stores", sys.argv[1] + "/stores"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from kvtier.stores.scan import main
sys.exit(main(sys.argv[2:]))
"""
"""Loads this module and what it needs, not the whole package: opening waits for it."""


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

    Never raises for what is in the file: a child that crashes, hangs or cannot start means
    UNSOUND.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-c", _CHILD, package, index, store.hex()]
    if copy is not None:
        command.append(copy)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Verdict(UNSOUND, f"the inspection did not end: {error}")
    if child.returncode in (SOUND, NEWER):
        return Verdict(child.returncode, child.stdout.strip())
    said = (child.stdout.strip() or child.stderr.strip()[-300:]) or "no output"
    return Verdict(UNSOUND, f"exit status {child.returncode}: {said}")


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
        return Verdict(UNSOUND, f"{type(error).__name__}: {error}")


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
    size = os.stat(index).st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verdict = inspect(index, bytes.fromhex(store), *copy)
    sys.stdout.write(verdict.detail + "\n")
    return verdict.status
