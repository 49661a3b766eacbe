"""The part of an inspection that may kill the process it runs in: LMDB follows every page of an
index that may be damaged, while it writes a compact copy.

A child process runs ``main`` (arguments: INDEX COPY).  Needs nothing but LMDB and the standard
library: opening a store waits for it.  The child writes a line as soon as it has started, and why
it failed if it did; exit status 0 the copy is written (not yet durable), 3 the file is damaged, 5
there was no room to look at it.
"""

import errno
import os
import resource
import signal
import sys

import lmdb

__all__ = ["STARTED", "UNABLE", "UNSOUND", "copy_tree", "is_passing", "main"]

UNSOUND, UNABLE = 3, 5
STARTED = "looking"
_PASSING = frozenset(
    getattr(errno, name)
    for name in ("ENOMEM", "EMFILE", "ENFILE", "EAGAIN", "EINTR", "ENOSPC", "EDQUOT")
)
"""Errors that say nothing of the file: there was no room to look at it."""


def is_passing(error: Exception) -> bool:
    """Whether the error says nothing of the file."""
    return isinstance(error, lmdb.MemoryError | lmdb.DiskError) or (
        isinstance(error, OSError) and error.errno in _PASSING
    )


def copy_tree(index: str, copy: str) -> None:
    """A copy of the tree alone: compacting walks every page, and leaves the list of free pages
    behind, which nothing could check."""
    fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        size = os.stat(index).st_size
        env = lmdb.open(index, subdir=False, map_size=size, readonly=True, lock=False, create=False)
        try:
            env.copyfd(fd, compact=True)
        finally:
            env.close()
    finally:
        os.close(fd)


def main(index: str, copy: str) -> int:
    """What the child runs."""
    sys.stdout.write(STARTED + "\n")
    sys.stdout.flush()
    try:
        # A damaged tree may be endless: the copy may not outgrow the original.
        size = os.stat(index).st_size
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        copy_tree(index, copy)
    except (lmdb.Error, OSError, ValueError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return UNABLE if is_passing(error) else UNSOUND
    return 0
