"""The directory that all stores share: their names, their locks, and how its byte limit is split.

Each (fingerprint, rank, world) has a store of its own in a subdirectory.  A store counts with its
quota while a process writes it and with what it holds otherwise; nobody touches another's.

Locks, always taken in this order: the directory's (while somebody opens), a store's gate (its
index may be replaced: exclusive; somebody opens it for reading: shared), a store's writer lock.
"""

import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvtier.errors import ConfigError, StoreError, StoreLocked
from kvtier.stores.files import DIRECTORY_MODE, FileIO, FileLock, read_file
from kvtier.stores.record import FORMAT, slot_bytes

__all__ = [
    "Names",
    "Quota",
    "create",
    "directory_bytes",
    "gate",
    "is_written",
    "names_in",
    "quota_for",
    "store_name",
    "take_writer_lock",
]

log = logging.getLogger("kvtier")

_NAME = re.compile(r"((?:[0-9a-f]{2}){4,32})-(\d{1,6})of(\d{1,6})")
_OURS = ("kvtier.lock", "lost+found")
WAIT_S = 60.0
"""For another process to finish opening; opening takes a second, a rebuild longer."""

FIXED_BYTES = 128 << 10
"""Locks, marks and directories of one store."""
INDEX_BASE = 256 << 10
INDEX_ROW = 640
"""Per record: a third holds it, the rest is what copy-on-write transactions need meanwhile."""


@dataclass(frozen=True, slots=True)
class Names:
    """Which store, and where."""

    root: str
    fingerprint: bytes
    rank: int
    world: int

    @property
    def directory(self) -> str:
        return os.path.join(self.root, store_name(self.fingerprint, self.rank, self.world))

    def file(self, name: str) -> str:
        return os.path.join(self.directory, name)


@dataclass(frozen=True, slots=True)
class Quota:
    """What one store may use."""

    bytes: int
    capacity: int
    """Slots."""
    map_bytes: int
    """Size of the index; as much again is kept for replacing it."""


def store_name(fingerprint: bytes, rank: int, world: int) -> str:
    return f"{fingerprint.hex()}-{rank}of{world}"


def names_in(root: str) -> list[Names]:
    """The stores inside a directory, in order of name."""
    found = []
    for name in sorted(os.listdir(root)):
        match = _NAME.fullmatch(name)
        if match and os.path.isdir(os.path.join(root, name)):
            found.append(Names(root, bytes.fromhex(match[1]), int(match[2]), int(match[3])))
    return found


def create(io: FileIO, root: str) -> None:
    """Make sure the directory is there, also after a crash, and private.

    Raises ConfigError for a file in its place, no permission, or a directory that holds
    something else (its mode would be changed, and its bytes counted).
    """
    try:
        _make(io, root)
        for name in os.listdir(root):
            if name not in _OURS and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"disk_path {root!r} holds {name!r}, which is not kvtier's: "
                    "name a directory of its own"
                )
        if os.stat(root).st_mode & 0o077:
            os.chmod(root, DIRECTORY_MODE)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"disk_path {root!r} is not a directory") from error
    except OSError as error:
        raise ConfigError(f"disk_path {root!r} cannot be used: {error}") from error


def _make(io: FileIO, path: str) -> None:
    """Create a directory and those above it; what is created is durable in its parent."""
    parent = os.path.dirname(path)
    if not os.path.exists(parent):
        _make(io, parent)
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    with suppress(PermissionError):  # it may be written and not read: then nothing can be done
        io.sync_directory(parent)


def directory_bytes(path: str) -> int:
    """Bytes of everything under a directory, itself included: lengths or blocks, whichever is
    more."""
    total = 0
    for where, _, files in os.walk(path):
        for name in (".", *files):
            try:
                found = os.lstat(os.path.join(where, name))
            except FileNotFoundError:
                continue
            total += max(found.st_size, found.st_blocks * 512)
    return total


@contextmanager
def directory_lock(root: str, *, create: bool) -> Iterator[None]:
    """Nobody else opens or measures a store of this directory meanwhile."""
    lock = FileLock(os.path.join(root, "kvtier.lock"), create=create)
    try:
        if not lock.take(shared=False, wait_s=WAIT_S):
            raise StoreError(f"{root}: another process has been opening a store for {WAIT_S:.0f} s")
        yield
    finally:
        lock.release()


def gate(names: Names, *, shared: bool) -> FileLock:
    """Hold a store's gate.  Raises StoreError when it stays shut."""
    lock = FileLock(names.file("gate.lock"), create=not shared)
    if not lock.take(shared=shared, wait_s=WAIT_S):
        lock.release()
        raise StoreError(f"{names.directory}: another process is still opening this store")
    return lock


def take_writer_lock(names: Names) -> FileLock:
    """The writer's lock, for as long as the store is open.  Raises StoreLocked."""
    lock = FileLock(names.file("writer.lock"), create=True)
    if not lock.take(shared=False):
        lock.release()
        raise StoreLocked(
            f"{names.directory} is already open for writing, here or in another process; "
            'a process that does not write it may open it with disk_mode="read"'
        )
    return lock


def is_written(names: Names) -> bool:
    """Whether a process writes this store now.  Call with the directory or the gate locked."""
    try:
        lock = FileLock(names.file("writer.lock"), create=False)
    except FileNotFoundError:
        return False
    try:
        return not lock.take(shared=True)
    finally:
        lock.release()


def _claim(names: Names) -> int:
    """Bytes that a store is entitled to at this moment: its quota while it is open, otherwise what
    it holds and what it needs to be opened again without losing any of it."""
    actual = directory_bytes(names.directory)
    if is_written(names):
        try:
            about = json.loads(read_file(names.file("writer.lock")) or b"{}")
            return max(int(about["quota"]), actual)
        except (ValueError, KeyError, TypeError):
            return actual
    return max(actual, _needs(names))


def _needs(names: Names) -> int:
    """Quota with which a closed store would lose nothing."""
    frame_bytes = described(names).get("frame_bytes", 0)
    if frame_bytes < 1:
        return 0
    slabs = (name for name in os.listdir(names.directory) if name.startswith("slab-"))
    slots = sum(os.stat(names.file(name)).st_size // slot_bytes(frame_bytes) for name in slabs)
    return _bytes_for(slots, frame_bytes)


def _bytes_for(slots: int, frame_bytes: int) -> int:
    """Quota that comes to this many slots."""
    return FIXED_BYTES + 2 * INDEX_BASE + slots * (slot_bytes(frame_bytes) + 2 * INDEX_ROW)


def quota_for(names: Names, *, limit_bytes: int, frame_bytes: int, checkpoint_frames: int) -> Quota:
    """This store's part of the directory's limit.  Call with the directory locked.

    Ranks of one world have equal parts of what other stores leave; what a sibling already claims
    beyond its part is respected; so is what the file system can hold.  Raises ConfigError when not
    even a few pages fit.
    """
    others = siblings = 0
    for other in names_in(names.root):
        if (other.fingerprint, other.world) != (names.fingerprint, names.world):
            others += _claim(other)
        elif other.rank != names.rank:
            siblings += _claim(other)
    shared = limit_bytes - others - _loose_bytes(names.root)
    quota = min(shared // names.world, shared - siblings)
    room = _room(names)
    if room < quota:
        log.warning(
            "kvtier disk: %s may hold %d bytes, the file system has room for %d",
            names.directory,
            quota,
            room,
        )
        quota = room
    each = _bytes_for(1, frame_bytes) - _bytes_for(0, frame_bytes)
    capacity = (quota - _bytes_for(0, frame_bytes)) // each
    least = max(4, checkpoint_frames + 1)
    if capacity < least:
        if quota == room:
            raise StoreError(
                errno.ENOSPC,
                f"{names.directory}: the file system has room for {room} bytes, at least "
                f"{_bytes_for(least, frame_bytes)} are needed",
            )
        raise ConfigError(
            f"disk_bytes={limit_bytes} leaves {max(quota, 0)} bytes to rank {names.rank} of "
            f"{names.world} in {names.root!r} (other stores there hold {others + siblings}); "
            f"at least {_bytes_for(least, frame_bytes)} are needed. "
            "Raise disk_bytes, or remove stores that are no longer used"
        )
    map_bytes = -(-(INDEX_BASE + capacity * INDEX_ROW) // 4096) * 4096
    return Quota(quota, min(capacity, 2**32 - 1), map_bytes)


def _room(names: Names) -> int:
    """Bytes that the file system can give to this store, or that it holds already."""
    found = os.statvfs(names.directory)
    return max(found.f_bavail * found.f_frsize + directory_bytes(names.directory), _needs(names))


def _loose_bytes(root: str) -> int:
    """The directory's own bytes, and its lock's."""
    return sum(
        max(found.st_size, found.st_blocks * 512)
        for found in (os.lstat(os.path.join(root, name)) for name in (".", *_OURS[:1]))
    )


def describe(names: Names, frame_bytes: int) -> bytes:
    """Content of a store's ``about.json``: what a tool must know before it opens anything."""
    about = {
        "format": FORMAT,
        "fingerprint": names.fingerprint.hex(),
        "rank": names.rank,
        "world": names.world,
        "frame_bytes": frame_bytes,
    }
    return json.dumps(about, indent=1).encode() + b"\n"


def described(names: Names) -> dict[str, int]:
    """``format`` and ``frame_bytes`` as a store's ``about.json`` has them; {} where it is damaged:
    the caller's own values are as good then, and the slots are checked against them."""
    try:
        about = json.loads(read_file(names.file("about.json")) or b"{}")
        return {name: int(about[name]) for name in ("format", "frame_bytes") if name in about}
    except (ValueError, KeyError, TypeError):
        return {}
