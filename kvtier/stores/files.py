"""Every system call a store makes on its own files, and the named points between them.

One object, ``FileIO``, so that a test can crash at each point, lose what was not yet synced, or
make any call fail.  Also page-aligned memory and file locks.  Knows nothing of records.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np

__all__ = [
    "BLOCK",
    "FileIO",
    "FileLock",
    "aligned",
    "is_aligned",
    "read_file",
    "rest_of",
    "write_all",
    "write_file",
]

BLOCK = 4096
"""Direct I/O is done in multiples of this, in memory as on disk."""

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


class FileIO:
    """The real thing; tests override what they want to see fail."""

    def point(self, name: str) -> None:
        """A moment at which a crash would be interesting; does nothing."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Data and size of the file are on the medium when this returns."""
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def allocate(self, fd: int, size: int) -> None:
        """Make the file ``size`` bytes long, with room on the medium for all of them."""
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Remove the file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def commit(self, txn: Any) -> None:
        """End an index transaction: durable, all or nothing."""
        txn.commit()


def aligned(size: int) -> memoryview:
    """Zeroed writable memory that starts at a page and lives as long as the view."""
    return memoryview(mmap.mmap(-1, max(size, 1)))


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O can use the view as it is."""
    if view.nbytes % BLOCK:
        return False
    if view.nbytes == 0:
        return True
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % BLOCK == 0


def read_file(path: str) -> bytes | None:
    """The whole file, or None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def write_file(io: FileIO, path: str, data: bytes) -> None:
    """Write the file so that after a crash it has the old content or the new."""
    draft = path + ".new"
    fd = io.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(io, fd, [memoryview(data)], 0)
        io.sync(fd)
    finally:
        os.close(fd)
    io.replace(draft, path)
    io.sync_directory(os.path.dirname(path))


def write_all(io: FileIO, fd: int, buffers: list[memoryview], offset: int) -> None:
    """Write every byte, in as many calls as that takes.  Raises OSError when none gets anywhere."""
    while buffers:
        wrote = io.pwritev(fd, buffers, offset)
        if wrote <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += wrote
        buffers = rest_of(buffers, wrote)


def rest_of(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after their first ``done`` bytes."""
    for i, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[i + 1 :]]
        done -= buffer.nbytes
    return []


class FileLock:
    """An advisory lock on a file, held by this object until ``release`` or the process ends.

    It conflicts with every other lock object, in this process too, and ends with a kill.  A
    forked child has none of its parent's locks.
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, path: str, *, create: bool) -> None:
        _watch_forks()
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
        _locks.add(self)

    def take(self, *, shared: bool, wait_s: float = 0.0) -> bool:
        """Whether the lock was had within ``wait_s`` seconds."""
        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        give_up = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, mode)
                return True
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise
            if time.monotonic() >= give_up:
                return False
            time.sleep(0.005)

    def write(self, data: bytes) -> None:
        """Replace the file's content; the lock stays."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        """Let go and close.  Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def forget(self) -> None:
        """Close without unlocking: in a forked child, where the lock is the parent's."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


_locks: "WeakSet[FileLock]" = WeakSet()
"""All there are; those that a forked child finds are its parent's."""


def _forget_all() -> None:
    for lock in list(_locks):
        lock.forget()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_forget_all)
