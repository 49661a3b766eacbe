"""The look at an index that may be damaged.

LMDB's pages carry no checksum, and a flipped bit in one can end the process that follows it.  So
after an unclean close LMDB itself is let loose on the file in a child process only, which writes a
fresh compact copy (``walk``).  What lies in the copy is read without LMDB (``pages``), and every
row compared with its own check and with the others; only then is the copy used.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvtier.errors import StoreError
from kvtier.stores.index import Counters, Rows, check_rows
from kvtier.stores.pages import IndexFile, claimed_bytes
from kvtier.stores.record import FORMAT, row_checks, unpack_more
from kvtier.stores.walk import STARTED, UNABLE, UNSOUND, copy_tree, is_passing

__all__ = ["NEWER", "SOUND", "UNSOUND", "Verdict", "inspect", "inspect_in_child"]

SOUND, NEWER = 0, 4
TIMEOUT_S = 600.0

_CHILD = """
import sys, types
sys.path += sys.argv.pop(1).split(chr(0x1F))
for name, path in ("kvtier", sys.argv[1]), ("kvtier.stores", sys.argv[1] + "/stores"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from kvtier.stores.walk import main
sys.exit(main(*sys.argv[2:]))
"""
"""Loads one module, not the whole package: opening waits for it.  Isolated, with the parent's path
behind its own: no file of the user's can stand for a standard module."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an inspection."""

    status: int
    detail: str
    """Why not sound; or, if sound, a JSON object of counts."""
    rows: Rows | None = field(default=None, compare=False, repr=False)
    """All of them in key order, if sound."""

    @property
    def counts(self) -> dict[str, int]:
        return dict(json.loads(self.detail)) if self.status == SOUND else {}


def inspect_in_child(index: str, store: bytes, copy: str | None = None) -> Verdict:
    """Inspect an index, which a child process follows; it may write a sound copy to ``copy``.

    Never raises for what is in the file: a child that crashes or hangs over it means UNSOUND.
    Raises StoreError where it could not look: the child did not start, or lacked memory,
    descriptors or room.
    """
    return _walk_in_child(index, copy or os.devnull) or _judge(index, store, copy)


def inspect(index: str, store: bytes, copy: str | None = None) -> Verdict:
    """The same in this process, which dies of a damaged file."""
    try:
        copy_tree(index, copy or os.devnull)
    except Exception as error:
        if is_passing(error) and not _overstated(index):
            raise StoreError(f"{index} cannot be inspected: {error}") from error
        return Verdict(UNSOUND, f"{type(error).__name__}: {error}")
    return _judge(index, store, copy)


def _walk_in_child(index: str, copy: str) -> Verdict | None:
    """None if the child came through."""
    if not sys.executable:
        raise StoreError(f"{index} cannot be inspected: this process names no Python to run")
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = "\x1f".join(entry for entry in sys.path if entry)
    command = [sys.executable, "-I", "-S", "-c", _CHILD, path, package, index, copy]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return Verdict(UNSOUND, f"the inspection did not end: {error}")
    except OSError as error:
        raise StoreError(error.errno, f"{index} cannot be inspected: {error}") from error
    started, _, said = child.stdout.partition("\n")
    why = said.strip() or child.stderr.strip()[-300:]
    passing = child.returncode == UNABLE and not _overstated(index)
    if started != STARTED or passing:
        why = why or f"exit status {child.returncode}"
        raise StoreError(f"{index} cannot be inspected by {sys.executable!r}: {why}")
    if child.returncode:
        return Verdict(UNSOUND, f"exit status {child.returncode}: {why or 'no output'}")
    return None


def _overstated(index: str) -> bool:
    """Whether its beginning is damaged, or says that the file is much longer than it is: LMDB maps
    what it says, and if that is too much it lacks memory, now and ever after."""
    try:
        return claimed_bytes(index) > 2 * os.stat(index).st_size + (1 << 20)
    except ValueError:
        return True
    except OSError:
        return False


def _judge(index: str, store: bytes, copy: str | None) -> Verdict:
    """Look at the copy, if there is one, while it becomes durable."""
    try:
        with ThreadPoolExecutor(2) as pool:
            syncing = pool.submit(_sync, copy) if copy is not None else None
            verdict = _read(copy or index, store, pool, compact=copy is not None)
            if syncing is not None:
                syncing.result()
        return verdict
    except OSError as error:
        if is_passing(error):
            raise StoreError(error.errno, f"{index} cannot be inspected: {error}") from error
        return Verdict(UNSOUND, f"{type(error).__name__}: {error}")
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        return Verdict(UNSOUND, f"{type(error).__name__}: {error}")
    except MemoryError as error:
        raise StoreError(f"{index} cannot be inspected: out of memory") from error


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: str, store: bytes, pool: ThreadPoolExecutor, *, compact: bool) -> Verdict:
    file = IndexFile(path)
    about = json.loads(file.meta[b"store"])
    if not isinstance(about["format"], int):
        return Verdict(UNSOUND, f"format {about['format']!r}")
    if about["format"] > FORMAT:
        return Verdict(NEWER, str(about["format"]))
    if about["store"] != store.hex():
        return Verdict(UNSOUND, "belongs to another store")
    counters = Counters(**json.loads(file.meta[b"counters"]))
    rows, lists = file.read(compact=compact)
    checking = pool.submit(row_checks, rows)
    more: dict[bytes, list[int]] = {}
    for key, data in lists.items():
        slots = unpack_more(data)
        if slots is None:
            return Verdict(UNSOUND, "a list of slots fails its check")
        more[key] = slots
    wrong = check_rows(rows, more, counters)
    if not checking.result():
        wrong = ["a row fails its check"]
    if wrong:
        return Verdict(UNSOUND, "; ".join(wrong))
    return Verdict(SOUND, json.dumps(counters.named()), rows)
