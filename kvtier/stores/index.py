"""The transactional index of a store: one LMDB file that says which records there are.

Owns the databases inside it, their counters, and what a change may never do: publish a record
without its parent, or remove one that others hang on.  Knows slots as numbers only; payload is
not its business.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from kvtier.errors import StoreError
from kvtier.stores.files import FILE_MODE, FileIO
from kvtier.stores.record import (
    FORMAT,
    QUARANTINED,
    ROW,
    Row,
    halves,
    less,
    pack_more,
    pack_row,
    unpack_more,
    unpack_row,
)

__all__ = ["Counters", "Found", "Index", "Update", "check_rows", "open_env"]

CHUNK = 1 << 16
READERS = 510
"""Read transactions at once, over all processes."""

Rows = npt.NDArray[np.void]
Found = tuple[Row, list[int]]
"""A record's row, and its slots in order."""


@dataclass(slots=True)
class Counters:
    """Kept in the index, changed in the same transaction as what they count."""

    records: int = 0
    checkpoints: int = 0
    frames: int = 0
    quarantined: int = 0
    """Frames of quarantined records; part of ``frames``."""
    bytes: int = 0
    """Payload bytes of all records, before any codec."""
    seq: int = 0
    """Of the last publish: the opening it belongs to, times 2**32, and its number in it."""
    tick: int = 0
    """Of the youngest record."""

    def named(self) -> dict[str, int]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def open_env(path: str, map_bytes: int, *, readonly: bool, lock: bool = True) -> Any:
    """The LMDB environment of an index file."""
    return lmdb.open(
        path,
        subdir=False,
        map_size=map_bytes,
        max_dbs=3,
        max_readers=READERS,
        mode=FILE_MODE,
        readonly=readonly,
        lock=lock,
        create=not readonly,
    )


@contextmanager
def _typed(doing: str) -> Iterator[None]:
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreError(f"the index is full while {doing}: {error}") from error
    except lmdb.Error as error:
        raise StoreError(f"the index failed while {doing}: {error}") from error
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(error.errno, f"the index failed while {doing}: {error}") from error


class Index:
    """Rows by key.  ``find`` is thread-safe; ``update`` is the writer's."""

    def __init__(self, io: FileIO, path: str, map_bytes: int, store: bytes, *, write: bool) -> None:
        self._io = io
        self.path = path
        self.failed = False
        """A change ended in an error of the medium: nobody should vouch for the file."""
        with _typed("opening"):
            self._env = open_env(path, map_bytes, readonly=not write)
            try:
                self._meta = self._env.open_db(b"meta", create=write)
                self._rows = self._env.open_db(b"rows", create=write)
                self._more = self._env.open_db(b"more", create=write)
                if write:
                    self._env.reader_check()
                    self._found(store)
                self._admit(store)
                self._inode = os.stat(path).st_ino
                self.counters = self._read_counters()
            except BaseException:
                self._env.close()
                raise

    def _found(self, store: bytes) -> None:
        """Write the description of a new index."""
        with self._env.begin(write=True) as txn:
            if txn.get(b"store", db=self._meta) is None:
                about = {"format": FORMAT, "store": store.hex()}
                txn.put(b"store", json.dumps(about).encode(), db=self._meta)
                _write_counters(txn, self._meta, Counters())

    def _admit(self, store: bytes) -> None:
        with self._env.begin() as txn:
            about = self._object(txn.get(b"store", default=b"{}", db=self._meta))
        version = about.get("format", FORMAT)
        if not isinstance(version, int):
            raise StoreError(f"{self.path} is damaged: format {version!r}")
        if version > FORMAT:
            raise newer(self.path, version)
        if about.get("store") != store.hex():
            raise StoreError(f"{self.path} belongs to another store; move it away")

    def reload(self) -> None:
        """Read the counters again: another process may have changed them."""
        with _typed("looking up"):
            self.counters = self._read_counters()

    def _recount(self) -> None:
        """After a commit of which nobody knows whether it took effect."""
        with suppress(StoreError, lmdb.Error):
            self.counters = self._read_counters()

    def _read_counters(self) -> Counters:
        with self._env.begin() as txn:
            return self._counters(txn)

    def _counters(self, txn: Any) -> Counters:
        data = txn.get(b"counters", db=self._meta)
        if data is None:
            raise StoreError(f"{self.path} has no counters")
        try:
            return Counters(**self._object(data))
        except TypeError as error:
            raise StoreError(f"{self.path} is damaged: its counters are {data!r}") from error

    def _object(self, data: bytes) -> dict[str, Any]:
        """A JSON object of the index; it may be damaged under a process that writes it."""
        try:
            found = json.loads(data)
        except ValueError as error:
            raise StoreError(f"{self.path} is damaged: {data[:80]!r} is no JSON") from error
        if not isinstance(found, dict):
            raise StoreError(f"{self.path} is damaged: {data[:80]!r} is no JSON object")
        return found

    # -- reading -------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        """The rows of these keys in one snapshot; None for unknown and for damaged ones."""
        with _typed("looking up"), self._env.begin() as txn:
            return [_find(txn, self._rows, self._more, key) for key in keys]

    def chunks(self) -> Iterator[Rows]:
        """All rows in key order, in one snapshot, some tens of thousands at a time."""
        with _typed("scanning"), self._env.begin(db=self._rows) as txn:
            values = txn.cursor().iternext(keys=False, values=True)
            while data := b"".join(islice(values, CHUNK)):
                if len(data) % ROW.itemsize:
                    raise StoreError("the index holds a row of a wrong length")
                yield np.frombuffer(data, ROW)

    def more(self) -> Iterator[tuple[bytes, list[int] | None]]:
        """(key, slots after the first) of every record of several frames."""
        with _typed("scanning"), self._env.begin(db=self._more) as txn:
            for key, data in txn.cursor():
                yield key, unpack_more(data)

    def wrong(self, counters: Counters | None = None) -> list[str]:
        """What ``check_rows`` finds in one snapshot; by default with the counters in it, which
        another process may be changing."""
        with _typed("checking"), self._env.begin() as txn:
            data = b"".join(value for _, value in txn.cursor(db=self._rows))
            if len(data) % ROW.itemsize:
                return ["the index holds a row of a wrong length"]
            more = {key: unpack_more(value) or [] for key, value in txn.cursor(db=self._more)}
            return check_rows(np.frombuffer(data, ROW), more, counters or self._counters(txn))

    def used_bytes(self) -> int:
        """Length of the part of the file that holds data; the rest is reserve."""
        with _typed("measuring"):
            return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def stale(self) -> bool:
        """Whether another file lies at the path by now."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except FileNotFoundError:
            return True

    # -- writing -------------------------------------------------------------------------------

    @contextmanager
    def update(self, doing: str) -> Iterator["Update"]:
        """One transaction: durable and visible when the block ends, absent if the block raises.

        An error of the commit itself leaves open whether it took effect; the counters are those
        of what is there.
        """
        counters = copy(self.counters)
        with _typed(doing):
            txn = self._env.begin(write=True)
            try:
                yield Update(txn, self._rows, self._more, counters)
                _write_counters(txn, self._meta, counters)
                self._io.point("index:commit")
                self._io.commit(txn)
            except lmdb.MapFullError:
                txn.abort()
                self._env.reader_check()  # processes that died reading hold on to old pages
                raise
            except BaseException as error:
                self.failed |= isinstance(error, lmdb.Error | OSError) and not isinstance(
                    error, StoreError
                )
                txn.abort()
                if self.failed:
                    self._recount()
                raise
        self.counters = counters
        self._io.point("index:committed")

    def begin_epoch(self) -> int:
        """A number beyond every one that a slot may carry, also from publishes that failed or were
        cut off; count on from it.  Durable when it returns."""
        with self.update("opening") as change:
            change.counters.seq = ((change.counters.seq >> 32) + 1) << 32
        return self.counters.seq

    def fill(self, records: Sequence[Found], counters: Counters) -> None:
        """Write all records of an empty index, in one transaction; they come in key order."""
        with self.update("rebuilding") as change:
            change.fill(records, counters)

    def close(self) -> None:
        self._env.close()


class Update:
    """The changes of one transaction; keeps the counters and the children of parents right."""

    def __init__(self, txn: Any, rows: Any, more: Any, counters: Counters) -> None:
        self._txn = txn
        self._rows = rows
        self._more = more
        self.counters = counters

    def get(self, key: bytes) -> Found | None:
        return _find(self._txn, self._rows, self._more, key)

    def add(self, records: Sequence[Found]) -> None:
        """Publish new records.  Raises StoreError when a parent is neither among them nor there."""
        children = Counter(row.parent for row, _ in records if not row.is_root)
        for row, slots in records:
            row = row._replace(children=children.pop(row.key, 0))
            self._write(row)
            if row.frames > 1:
                self._txn.put(row.key, pack_more(slots[1:]), db=self._more)
            self._count(row, 1)
        for parent, count in children.items():
            if not self._adopt(parent, count):
                raise StoreError(f"a record needs {parent.hex()}, which is not stored")

    def remove(self, row: Row) -> None:
        """Forget a record; the children it had must go in the same transaction."""
        self._txn.delete(row.key, db=self._rows)
        if row.frames > 1:
            self._txn.delete(row.key, db=self._more)
        if not row.is_root:
            self._adopt(row.parent, -1)  # unless it went first, in this transaction
        self._count(row, -1)

    def replace(self, old: Row, row: Row, slots: list[int]) -> None:
        """Put a record in the place of another of its key; what hangs on it stays."""
        self._count(old, -1)
        self._txn.delete(old.key, db=self._more)
        row = row._replace(children=old.children)
        self._write(row)
        if row.frames > 1:
            self._txn.put(row.key, pack_more(slots[1:]), db=self._more)
        self._count(row, 1)

    def change(self, row: Row, *, tick: int | None = None, state: int | None = None) -> None:
        """Rewrite a record's tick or state."""
        self._count(row, -1)
        row = row._replace(
            tick=row.tick if tick is None else tick, state=row.state if state is None else state
        )
        self._write(row)
        self._count(row, 1)

    def fill(self, records: Sequence[Found], counters: Counters) -> None:
        """Write records of an empty index as they are, children counted by the caller."""
        rows, more = self._txn.cursor(db=self._rows), self._txn.cursor(db=self._more)
        rows.putmulti(((row.key, pack_row(row)) for row, _ in records), append=True)
        several = ((row.key, pack_more(slots[1:])) for row, slots in records if row.frames > 1)
        more.putmulti(several, append=True)
        self.counters.seq = counters.seq
        for row, _ in records:
            self._count(row, 1)

    def _adopt(self, parent: bytes, by: int) -> bool:
        """Change a record's count of children; False where there is no such record."""
        found = self.get(parent)
        if found is None:
            return False
        row = found[0]
        self._write(row._replace(children=row.children + by))
        return True

    def _write(self, row: Row) -> None:
        self._txn.put(row.key, pack_row(row), db=self._rows)

    def _count(self, row: Row, by: int) -> None:
        counters = self.counters
        counters.records += by
        counters.checkpoints += by * row.checkpoint
        counters.frames += by * row.frames
        counters.bytes += by * row.size
        if row.state == QUARANTINED:
            counters.quarantined += by * row.frames
        if by > 0:
            counters.tick = max(counters.tick, row.tick)


def newer(path: str, version: int) -> StoreError:
    """The error for a store that a newer version wrote."""
    return StoreError(
        f"{path} was written by a newer kvtier (format {version}, this one reads {FORMAT}): "
        "upgrade kvtier, or give this one another disk_path"
    )


def _find(txn: Any, rows: Any, more: Any, key: bytes) -> Found | None:
    data = txn.get(key, db=rows)
    if data is None:
        return None
    row = unpack_row(data)
    if row is None or row.key != key:
        return None
    if row.frames == 1:
        return row, [row.slot]
    rest = unpack_more(txn.get(key, default=b"", db=more))
    if rest is None or len(rest) != row.frames - 1:
        return None
    return row, [row.slot, *rest]


def _write_counters(txn: Any, meta: Any, counters: Counters) -> None:
    txn.put(b"counters", json.dumps(counters.named()).encode(), db=meta)


def check_rows(rows: Rows, more: dict[bytes, list[int]], counters: Counters) -> list[str]:
    """Everything that is wrong with the records of an index, as sentences; [] is sound.

    ``rows`` in key order.  Checks order, parents, child counts, slots and counters.
    """
    wrong = []
    if any(type(n) is not int or not 0 <= n < 1 << 63 for n in counters.named().values()):
        return [f"impossible counters: {counters}"]
    keys = halves(rows["key"])
    if not less(keys[:-1], keys[1:]).all():
        return ["keys are not in order"]
    if (rows["state"] > QUARANTINED).any() or (rows["checkpoint"] > 1).any():
        wrong.append("a row holds an impossible state")
    missing, children = _parents(rows, keys)
    if missing:
        wrong.append(f"{missing} records lack their parent (I6)")
    elif not np.array_equal(children, rows["children"]):
        wrong.append("child counts differ from the children")
    several = {bytes(row["key"]): int(row["frames"]) for row in rows[rows["frames"] > 1]}
    if {key: len(slots) + 1 for key, slots in more.items()} != several:
        wrong.append("slots of records of several frames do not match their rows")
    slots = np.concatenate(
        [rows["slot"], np.array([s for rest in more.values() for s in rest], np.uint32)]
    )
    slots.sort()
    if (slots[1:] == slots[:-1]).any():
        wrong.append("a slot is used twice (I1)")
    bad = rows[rows["state"] == QUARANTINED]
    total = replace(
        counters,
        records=len(rows),
        checkpoints=int(rows["checkpoint"].sum()),
        frames=int(rows["frames"].sum()),
        quarantined=int(bad["frames"].sum()),
        bytes=int(rows["size"].sum()),
    )
    wrong += [
        f"a row has a later {name} than the counters"
        for name in ("seq", "tick")
        if len(rows) and rows[name].max() > getattr(counters, name)
    ]
    if total != counters:
        wrong.append(f"the counters are {counters}, the rows make {total}")
    return wrong


def _parents(rows: Rows, keys: npt.NDArray[np.uint64]) -> tuple[int, npt.NDArray[np.int64]]:
    """(records whose parent is missing, children of each record); ``keys`` of the rows, halved."""
    high, low = np.ascontiguousarray(keys[:, 0]), np.ascontiguousarray(keys[:, 1])
    parents = halves(rows["parent"])
    hangs = (rows["depth"] != 1) | (rows["checkpoint"] != 0)  # first pages have none
    wanted, wanted_low = parents[hangs, 0], parents[hangs, 1]
    order = np.argsort(wanted)
    wanted, wanted_low = wanted[order], wanted_low[order]
    at = np.searchsorted(high, wanted)
    children = np.zeros(len(rows), np.int64)
    found = np.zeros(len(wanted), np.bool_)
    looking = at < len(rows)
    # Keys are digests: nearly always the first of equal high halves is the one.
    while looking.any():
        here = np.minimum(at, len(rows) - 1)
        same = looking & (high[here] == wanted)
        hit = same & (low[here] == wanted_low)
        children += np.bincount(here[hit], minlength=len(rows))
        found |= hit
        at = at + 1
        looking = same & ~hit & (at < len(rows))
    return int((~found).sum()), children
