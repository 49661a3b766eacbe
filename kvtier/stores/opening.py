"""Opening a store: locks, the share of the byte limit, recovery, and fitting what is there into
what may be there.  Everything that must have happened before the first call.
"""

import json
import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, StoreError
from kvtier.seams import ENTRY
from kvtier.stores import directory
from kvtier.stores.directory import INDEX_BASE, Names, Quota
from kvtier.stores.files import DIRECTORY_MODE, FileIO, FileLock, read_file, write_file
from kvtier.stores.index import Index, Rows, newer
from kvtier.stores.record import FORMAT, QUARANTINED
from kvtier.stores.recovery import INDEX, Inspect, compact, is_clean, recover, remove_mark
from kvtier.stores.scan import NEWER, SOUND
from kvtier.stores.slabs import Slabs, SlotMap

__all__ = ["About", "Opened", "drop", "entries_of", "open_reader", "open_writer", "reopen_index"]

log = logging.getLogger("kvtier")

READER_MAP = 1 << 30
"""A reader's map is at least this: the index may grow under it."""
_AT_ONCE = 1 << 13
"""Rows whose fields are copied at once: as many as stay in a processor's own memory."""


@dataclass(frozen=True, slots=True)
class About:
    """Which store to open, and the sizes it must have."""

    names: Names
    id: bytes
    frame_bytes: int
    checkpoint_frames: int


@dataclass(slots=True)
class Opened:
    """All that an open store stands on."""

    lock: FileLock | None
    index: Index
    slabs: Slabs
    slots: SlotMap
    entries: npt.NDArray[np.void] | None
    """What the opening pass read, for the first scan."""
    capacity: int
    seq: int
    """Publishes count on from here."""


def entries_of(rows: Rows) -> npt.NDArray[np.void]:
    """What ``scan`` reports of these rows."""
    if (rows["state"] == QUARANTINED).any():
        rows = rows[rows["state"] != QUARANTINED]
    entries = np.empty(len(rows), ENTRY)
    for at in range(0, len(rows), _AT_ONCE):
        for name in ENTRY.names or ():
            entries[name][at : at + _AT_ONCE] = rows[name][at : at + _AT_ONCE]
    return entries


def open_writer(io: FileIO, about: About, limit_bytes: int, inspect: Inspect) -> Opened:
    """Open for writing, creating or repairing what is needed."""
    names = about.names
    directory.create(io, names.root)
    try:
        gate, lock, quota = _claim(io, about, limit_bytes)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise ConfigError(f"disk_path {names.root!r} cannot be written: {error}") from error
    try:
        return _open_files(io, about, quota, lock, inspect)
    except OSError as error:
        lock.release()
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno, f"{names.directory} cannot be opened: {error}") from error
    except BaseException:
        lock.release()
        raise
    finally:
        gate.release()


def _claim(io: FileIO, about: About, limit_bytes: int) -> tuple[FileLock, FileLock, Quota]:
    """The store's gate and writer lock, and its share of the limit, which others see from now."""
    names = about.names
    with directory.directory_lock(names.root, create=True), ExitStack() as undo:
        os.makedirs(names.directory, DIRECTORY_MODE, exist_ok=True)
        io.sync_directory(names.root)  # each time: whoever made it may have died before this
        gate = directory.gate(names, shared=False)
        undo.callback(gate.release)
        lock = directory.take_writer_lock(names)
        undo.callback(lock.release)
        _admit(about)
        quota = directory.quota_for(
            names,
            limit_bytes=limit_bytes,
            frame_bytes=about.frame_bytes,
            checkpoint_frames=about.checkpoint_frames,
        )
        lock.write(json.dumps({"quota": quota.bytes, "capacity": quota.capacity}).encode())
        undo.pop_all()
        return gate, lock, quota


def _admit(about: About) -> None:
    """Raise StoreError for a store of a newer format or of frames of another size."""
    said = directory.described(about.names)
    if said.get("format", FORMAT) > FORMAT:
        raise newer(about.names.directory, said["format"])
    if said.get("frame_bytes", about.frame_bytes) != about.frame_bytes:
        raise StoreError(
            f"{about.names.directory} holds frames of {said['frame_bytes']} bytes, not "
            f"{about.frame_bytes}: the fingerprint must change with the layout"
        )


def _open_files(io: FileIO, about: About, quota: Quota, lock: FileLock, inspect: Inspect) -> Opened:
    names = about.names
    slabs = Slabs(io, names.directory, about.frame_bytes, write=True)
    index: Index | None = None
    try:
        rows = recover(io, names, about.id, slabs, quota.map_bytes, inspect)
        io.point("open:recovered")
        if not os.path.exists(names.file("about.json")) or not directory.described(names):
            write_file(io, names.file("about.json"), directory.describe(names, about.frame_bytes))
        remove_mark(io, names)
        io.point("open:unmarked")
        path = names.file(INDEX)
        length = os.stat(path).st_size if os.path.exists(path) else 0
        # An index of a larger limit needs pages to copy to while records are dropped from it.
        room = quota.map_bytes if length <= quota.map_bytes else 2 * length + INDEX_BASE
        index = Index(io, path, room, about.id, write=True)
        slots, entries = _fit(index, quota.capacity, rows)
        del rows
        if length > quota.map_bytes:
            index.close()
            index = None
            compact(io, names, about.id, inspect)
            index = Index(io, path, quota.map_bytes, about.id, write=True)
        _reserve_index(io, path, quota.map_bytes)
        if length == 0:
            io.sync_directory(names.directory)
        if slabs.allocated > quota.capacity:
            slabs.cut(quota.capacity)
        taken = slots.highest() + 1
        if taken or slabs.allocated:
            slabs.mend(max(taken, slabs.allocated))
        seq = index.begin_epoch()
        return Opened(lock, index, slabs, slots, entries, quota.capacity, seq)
    except BaseException:
        if index is not None:
            index.close()
        slabs.close()
        raise


def _reserve_index(io: FileIO, path: str, size: int) -> None:
    """Room for the index on the medium, once: a transaction never fails for want of it."""
    fd = io.open(path, os.O_RDWR)
    try:
        if os.fstat(fd).st_size < size:
            io.allocate(fd, size)
            io.sync(fd)
    finally:
        os.close(fd)


def _fit(
    index: Index, capacity: int, known: Rows | None = None
) -> tuple[SlotMap, npt.NDArray[np.void]]:
    """Which slots are taken, and the entries; ``known``: all rows, where they were read before.
    Records that were quarantined, or whose slots lie beyond the capacity, go first, with all that
    hangs on them."""
    slots, parts, doomed = SlotMap(capacity), [], []
    for rows in index.chunks() if known is None else [known]:
        out = (rows["state"] == QUARANTINED) | (rows["slot"] >= capacity)
        doomed += [bytes(key) for key in rows["key"][out]]
        slots.mark(rows["slot"][rows["slot"] < capacity])
        parts.append(entries_of(rows))
    others: list[int] = []
    for key, rest in index.more():
        if rest is None:
            raise StoreError(f"{index.path}: a list of slots fails its check")
        if max(rest) >= capacity:
            doomed.append(key)
        others += [slot for slot in rest if slot < capacity]
    slots.mark(others)
    if not doomed:
        return slots, np.concatenate(parts) if parts else np.empty(0, ENTRY)
    drop(index, doomed)
    return _fit(index, capacity)


def drop(index: Index, doomed: Iterable[bytes]) -> int:
    """Remove these records and all that hang on them; returns how many those were."""
    children: dict[bytes, list[bytes]] = {}
    depths: dict[bytes, tuple[int, int]] = {}
    for rows in index.chunks():
        for row in rows[["key", "parent", "depth", "checkpoint"]]:
            key, parent = bytes(row["key"]), bytes(row["parent"])
            depths[key] = (int(row["depth"]), int(row["checkpoint"]))
            children.setdefault(parent, []).append(key)
    going: set[bytes] = set()
    stack = list(doomed)
    while stack:
        key = stack.pop()
        if key not in going:
            going.add(key)
            stack += children.get(key, [])
    log.warning("kvtier disk: %d records are dropped at opening", len(going))
    with index.update("dropping records") as change:
        for key in sorted(going, key=depths.__getitem__):
            found = change.get(key)
            if found is not None:
                change.remove(found[0])
    return len(going)


def open_reader(io: FileIO, about: About, inspect: Inspect) -> Opened:
    """Open what another process writes, or has written."""
    names = about.names
    if not os.path.isdir(names.directory):
        raise StoreError(
            f'{names.directory} does not exist: open it once with disk_mode="write" '
            "(or the layout, the model or the rank differ from the writer's)"
        )
    try:
        gate = directory.gate(names, shared=True)
    except FileNotFoundError as error:
        raise StoreError(f"{names.directory} is not a store") from error
    slabs = None
    try:
        _admit(about)
        slabs = Slabs(io, names.directory, about.frame_bytes, write=False)
        index = reopen_index(io, about, inspect)
        return Opened(None, index, slabs, SlotMap(0), None, _capacity(about, slabs), 0)
    except OSError as error:
        if slabs is not None:
            slabs.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(error.errno, f"{names.directory} cannot be read: {error}") from error
    finally:
        gate.release()


def reopen_index(io: FileIO, about: About, inspect: Inspect) -> Index:
    """The index for reading.  Call with the gate held, shared.  Raises StoreError when nobody
    vouches for it and it does not look sound."""
    names = about.names
    path = names.file(INDEX)
    if not os.path.exists(path):
        raise StoreError(f"{names.directory} has no index; open it once for writing")
    if not directory.is_written(names) and not is_clean(names):
        verdict = inspect(path, about.id, None)
        if verdict.status == NEWER:
            raise newer(path, int(verdict.detail))
        if verdict.status != SOUND:
            raise StoreError(
                f"{path} is damaged ({verdict.detail}); opening the store for writing repairs it"
            )
    map_bytes = max(READER_MAP, 4 * os.stat(path).st_size)
    return Index(io, path, map_bytes, about.id, write=False)


def _capacity(about: About, slabs: Slabs) -> int:
    try:
        data = read_file(about.names.file("writer.lock")) or b"{}"
        return int(json.loads(data)["capacity"])
    except (ValueError, KeyError, TypeError):
        return slabs.allocated
