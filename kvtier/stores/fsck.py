"""Looking at the stores of a directory without being their cache: listing, checking, repairing.

Works on closed stores; one that a process is writing is only reported as such.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from kvtier.errors import StoreError
from kvtier.seams import Read
from kvtier.stores import directory
from kvtier.stores.codec import Codec
from kvtier.stores.directory import INDEX_BASE, INDEX_ROW, Names
from kvtier.stores.files import FileIO, aligned
from kvtier.stores.index import Found, Index, newer
from kvtier.stores.opening import drop
from kvtier.stores.payload import PayloadReader, Verdict
from kvtier.stores.record import FORMAT, QUARANTINED, store_id
from kvtier.stores.recovery import (
    INDEX,
    Mark,
    is_clean,
    read_mark,
    recover,
    remove_mark,
    write_mark,
)
from kvtier.stores.scan import NEWER, SOUND, inspect_in_child
from kvtier.stores.slabs import Slabs

__all__ = ["FsckReport", "StoreInfo", "fsck", "list_stores"]

State = Literal["clean", "open", "unclean"]
Progress = Callable[[int, int], None]
"""Called with (records checked, records in all)."""
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One store of a directory."""

    path: str
    fingerprint: bytes
    rank: int
    world: int
    frame_bytes: int
    """0 where its description is damaged."""
    pages: int | None
    """History records; None where only an inspection could tell and it failed."""
    checkpoints: int | None
    bytes: int
    """On the file system, index and reserve included."""
    state: State
    """"open": a process writes it now; "unclean": it will be inspected when opened."""


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What a check of one store found."""

    path: str
    state: State
    index: str
    """"sound", or what is wrong with it."""
    records: int
    quarantined: int
    damaged: tuple[bytes, ...]
    """Keys of records whose payload does not verify."""
    repaired: bool
    """The index was rebuilt if need be; damaged and quarantined records, and all that hang on
    them, are gone."""
    dropped: int = 0
    """Records that the repair removed, those that hung on bad ones included.  What an index that
    was rebuilt had lost is not among them: nobody can count it."""
    repairable: bool = False
    """Something is wrong that ``fsck(repair=True)`` would put right."""

    @property
    def ok(self) -> bool:
        """Nothing is wrong, or nothing is left of it."""
        return self.repaired or (
            self.state != "open" and self.index == "sound" and not self.damaged
        )


def list_stores(path: str | os.PathLike[str]) -> list[StoreInfo]:
    """The stores of a directory, by name.  Raises StoreError where there is none."""
    root = _root(path)
    if not os.path.exists(os.path.join(root, "kvtier.lock")):
        return []
    with directory.directory_lock(root, create=False):
        return [_info(names) for names in directory.names_in(root)]


def fsck(
    path: str | os.PathLike[str], *, repair: bool = False, progress: Progress | None = None
) -> list[FsckReport]:
    """Inspect the index and read every payload of every store of a directory.

    ``repair`` also rebuilds a damaged index and removes damaged records with all that hang on
    them.  Stores that are open are left alone; one that is being checked cannot be opened for
    writing.  One that cannot be checked, such as that of a newer format, is reported and not
    touched.  Raises StoreError where there is no directory.
    """
    return [
        _check_or_tell(names, repair, progress or (lambda done, total: None))
        for names in directory.names_in(_root(path))
    ]


def _check_or_tell(names: Names, repair: bool, progress: Progress) -> FsckReport:
    """A store that cannot be checked must not keep the others from it."""
    try:
        return _check(names, repair, progress)
    except OSError as error:
        return _unchecked(names, _state(names), str(error))


def _unchecked(names: Names, state: State, why: str) -> FsckReport:
    return FsckReport(names.directory, state, why, 0, 0, (), repaired=False)


def _root(path: str | os.PathLike[str]) -> str:
    root = os.path.abspath(os.fspath(path))
    if not os.path.isdir(root):
        raise StoreError(f"{root} is not a directory")
    return root


def _state(names: Names) -> State:
    if directory.is_written(names):
        return "open"
    return "clean" if is_clean(names) else "unclean"


def _info(names: Names) -> StoreInfo:
    state = _state(names)
    frame_bytes = directory.described(names).get("frame_bytes", 0)
    records: int | None = None
    checkpoints: int | None = None
    path = names.file(INDEX)
    mark = read_mark(names) if state == "clean" else None
    if mark is not None:
        records, checkpoints = mark.records, mark.checkpoints
    elif os.path.exists(path):
        with suppress(StoreError):  # it could not be looked at
            counts = inspect_in_child(path, _id(names, frame_bytes)).counts
            records, checkpoints = counts.get("records"), counts.get("checkpoints")
    return StoreInfo(
        path=names.directory,
        fingerprint=names.fingerprint,
        rank=names.rank,
        world=names.world,
        frame_bytes=frame_bytes,
        pages=None if records is None or checkpoints is None else records - checkpoints,
        checkpoints=checkpoints,
        bytes=directory.directory_bytes(names.directory),
        state=state,
    )


def _id(names: Names, frame_bytes: int) -> bytes:
    return store_id(names.fingerprint, names.rank, names.world, frame_bytes)


def _check(names: Names, repair: bool, progress: Progress) -> FsckReport:
    said = directory.described(names)
    if said.get("format", FORMAT) > FORMAT:
        raise newer(names.directory, said["format"])
    gate = directory.gate(names, shared=not repair)
    try:
        state = _state(names)
        if state == "open":
            return _unchecked(names, state, "in use by a process")
        if "frame_bytes" not in said:
            why = "about.json is damaged; opening the store for writing repairs it"
            return _unchecked(names, state, why)
        sound = _index_state(names, _id(names, said["frame_bytes"]))
        if not repair and sound != "sound":
            return replace(_unchecked(names, state, sound), repairable=True)
        return _check_payloads(names, said["frame_bytes"], state, sound, repair, progress)
    finally:
        gate.release()


def _index_state(names: Names, store: bytes) -> str:
    """What is wrong, or that it is sound.  Raises StoreError for a newer format, or if nobody can
    tell."""
    index = names.file(INDEX)
    if not os.path.exists(index):
        return "missing; repairing rebuilds it"
    verdict = inspect_in_child(index, store)
    if verdict.status == NEWER:
        raise newer(index, int(verdict.detail))
    return "sound" if verdict.status == SOUND else verdict.detail


def _check_payloads(
    names: Names,
    frame_bytes: int,
    state: State,
    sound: str,
    repair: bool,
    progress: Progress,
) -> FsckReport:
    io = FileIO()
    store = _id(names, frame_bytes)
    slabs = Slabs(io, names.directory, frame_bytes, write=repair)
    index: Index | None = None
    dropped = 0
    try:
        # Room for the rows of all slots there are; the next open gives it the size it should have.
        size = INDEX_BASE + slabs.allocated * INDEX_ROW
        if repair:
            if sound != "sound":
                remove_mark(io, names)
            recover(io, names, store, slabs, size, inspect_in_child)
            remove_mark(io, names)
        if os.path.exists(names.file(INDEX)):
            size = max(size, os.stat(names.file(INDEX)).st_size)
        index = Index(io, names.file(INDEX), size, store, write=repair)
        quarantined = index.counters.quarantined
        damaged = _damaged(index, slabs, store, frame_bytes, progress)
        if repair:
            gone = set(damaged)
            for rows in index.chunks():
                gone |= {bytes(key) for key in rows["key"][rows["state"] == QUARANTINED]}
            if gone:
                dropped = drop(index, gone)
        counters, used = index.counters, index.used_bytes()
    finally:
        if index is not None:
            index.close()
        slabs.close()
    if repair:
        mark = Mark(used, "", counters.records, counters.checkpoints, counters.bytes)
        write_mark(io, names, mark)
    return FsckReport(
        path=names.directory,
        state=state,
        index=sound,
        records=counters.records,
        quarantined=quarantined,
        damaged=tuple(damaged),
        repaired=repair,
        dropped=dropped,
        repairable=not repair and bool(damaged or quarantined),
    )


def _damaged(
    index: Index, slabs: Slabs, store: bytes, frame_bytes: int, progress: Progress
) -> list[bytes]:
    """Keys of the records, not quarantined, whose payload does not verify."""
    reader = PayloadReader(slabs, store, frame_bytes, Codec({}))
    room = slabs.slot_bytes
    bad: list[bytes] = []
    done = 0
    for rows in index.chunks():
        keys = [bytes(key) for key in rows["key"][rows["state"] != QUARANTINED]]
        for start in range(0, len(keys), _AT_ONCE):
            batch = keys[start : start + _AT_ONCE]
            wanted: list[tuple[Read, Found]] = []
            for key, found in zip(batch, index.find(batch), strict=True):
                if found is None:
                    bad.append(key)
                    continue
                row = found[0]
                memory = aligned(room * row.frames)
                views = tuple(memory[i * room : i * room + frame_bytes] for i in range(row.frames))
                wanted.append((Read(key, row.parent, b"", views, row.size), found))
            verdicts = reader.read(wanted)
            bad += [
                read.key
                for (read, _), verdict in zip(wanted, verdicts, strict=True)
                if verdict is Verdict.BAD
            ]
            done += len(batch)
            progress(done, index.counters.records)
    return bad
