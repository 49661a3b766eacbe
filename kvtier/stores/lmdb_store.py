"""``LmdbStore``: page records on a local disk, crash-safe, verified on read, hard-bounded.

An LMDB index says which records there are; their payloads lie in preallocated slab files beside
it.  This module owns the order of things: payload is durable before the index names it, a slot is
reused only after the index forgot it, and nothing is handed out that was not verified.  It knows
nothing of leases, tiers or devices.

A record's life: absent -> (slots reserved, written, synced) -> stored, by one transaction for its
whole group -> [quarantined, when a read finds it bad] -> absent, by ``delete``.
"""

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, InvariantError, StoreError
from kvtier.seams import ENTRY, Read, Record
from kvtier.stores import opening
from kvtier.stores.codec import Codec
from kvtier.stores.directory import Names
from kvtier.stores.files import FileIO, FileLock
from kvtier.stores.index import Counters, Found, Index
from kvtier.stores.payload import PayloadReader, PayloadWriter, Verdict
from kvtier.stores.record import QUARANTINED, STORED, store_id
from kvtier.stores.recovery import Inspect, Mark, write_mark
from kvtier.stores.scan import inspect_in_child

__all__ = ["LmdbStore"]

log = logging.getLogger("kvtier")

_NO_CODEC: Mapping[str, int] = MappingProxyType({})


@final
class LmdbStore:
    """A ``Store`` in a directory that it may share with stores of other models and ranks.

    ``capacity`` is in frames.  It follows from ``limit_bytes``, a hard limit for all files of the
    directory: what other stores there hold or may use is taken off first, ranks of one world get
    equal parts.  Opened with a smaller limit, a store keeps what lies in its first slots, however
    recent, and drops the rest.  One writer per store; any number of readers (``mode="read"``), in
    other processes.  A process forked from this one must open its own: here every call raises.

    Raises ConfigError when the sizes or the path cannot work, StoreLocked when somebody else
    writes this store, StoreError when it cannot be opened or a newer version wrote it.  Opening
    repairs what a crash or a damaged file left; another fingerprint's store is never touched.
    """

    inspect: Inspect = staticmethod(inspect_in_child)
    """Looks at an index nobody vouches for; in a child process, which may die of it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: bytes,
        rank: int = 0,
        world: int = 1,
        frame_bytes: int,
        limit_bytes: int = 0,
        mode: Literal["write", "read"] = "write",
        codec: Mapping[str, int] = _NO_CODEC,
        checkpoint_frames: int = 1,
        io: FileIO | None = None,
    ) -> None:
        if not 4 <= len(fingerprint) <= 32:
            raise ConfigError(f"fingerprint must be 4 to 32 bytes, got {len(fingerprint)}")
        if world < 1 or not 0 <= rank < world:
            raise ConfigError(f"rank must lie in [0, world), got rank={rank} of {world}")
        if frame_bytes < 1 or checkpoint_frames < 0:
            raise ConfigError(f"frame_bytes must be at least 1, got {frame_bytes}")
        if mode not in ("write", "read"):
            raise ConfigError(f'disk_mode must be "write" or "read", got {mode!r}')
        self._io = io or FileIO()
        self._names = Names(os.path.abspath(os.fspath(path)), fingerprint, rank, world)
        self._id = store_id(fingerprint, rank, world, frame_bytes)
        self._frame_bytes = frame_bytes
        self._write = mode == "write"
        self._pid = os.getpid()
        self._codec = Codec(codec)
        self._turn = threading.Condition()
        self._active = 0
        self._closed = True  # until everything is open
        self._changing = threading.Lock()
        self._bad: set[tuple[bytes, int]] = set()
        """(key, seq) found bad and not recorded: by a reader, or when even that failed."""

        about = opening.About(self._names, self._id, frame_bytes, checkpoint_frames)
        if self._write:
            opened = opening.open_writer(self._io, about, limit_bytes, type(self).inspect)
        else:
            opened = opening.open_reader(self._io, about, type(self).inspect)
        self._about = about
        self._lock = opened.lock
        self._index: Index = opened.index
        self._seq = opened.seq
        self._slabs = opened.slabs
        self._slots = opened.slots
        self._entries = opened.entries
        self.capacity = opened.capacity
        self._reader = PayloadReader(self._slabs, self._id, frame_bytes, self._codec)
        self._writer = PayloadWriter(self._slabs, self._id, frame_bytes, self._codec)
        self._closed = False

    # -- the protocol --------------------------------------------------------------------------

    def put_group(self, records: Sequence[Record]) -> None:
        """Publish records, parents first: all or none, durable when it returns.

        A key already stored with this checksum counts as done; one that is quarantined or has
        another checksum is replaced, and what hangs on it stays.  Raises StoreError and changes
        nothing when a parent is missing, the capacity is used up, or the medium fails.
        """
        with self._operation(), self._writes("put_group"):
            fresh = self._fresh(records)
            if not fresh:
                return
            slots = self._reserve(sum(len(record.payload) for record in fresh))
            try:
                retired = self._publish(fresh, slots)
            except BaseException:
                self._after_failure(fresh[-1].key, slots)
                raise
            self._slots.give(retired)
            self._io.point("put:done")

    def read_into(self, reads: Sequence[Read]) -> list[bool]:
        """Fill the views of each read; True where the record was there, whole and the right one.

        Views are written to even where the answer is False.  Thread-safe.  Raises StoreError when
        the index itself fails, or a read for want of memory or descriptors: no record is judged
        then.
        """
        with self._operation():
            wanted: list[tuple[Read, Found]] = []
            where: list[int] = []
            for i, found in enumerate(self._index.find([read.key for read in reads])):
                if found is not None and self._offers(reads[i], found):
                    wanted.append((reads[i], found))
                    where.append(i)
            answers = [False] * len(reads)
            for i, (read, _), verdict in zip(where, wanted, self._reader.read(wanted), strict=True):
                answers[i] = verdict is Verdict.GOOD or (
                    verdict is Verdict.BAD and self._suspect(read)
                )
            return answers

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget records in one transaction; their slots are free when it returns.

        When nothing is left the payload files are emptied too.  Otherwise the bytes stay until
        their slots are written again, and an index that has to be rebuilt finds them.  Unknown
        keys are ignored.  Raises StoreError when a record would stay behind without its parent
        (nothing changes then), or when the medium fails.
        """
        with self._operation(), self._writes("delete"):
            rows = zip(keys, self._index.find(keys), strict=True)
            found = {key: at for key, at in rows if at is not None}
            going: dict[bytes, int] = {}
            for row, _ in found.values():
                going[row.parent] = going.get(row.parent, 0) + 1
            for key, (row, _) in found.items():
                if row.children != going.get(key, 0):
                    raise StoreError(
                        f"record {key.hex()} has {row.children} that hang on it, of which "
                        f"{going.get(key, 0)} are deleted with it"
                    )
            if not found:
                return
            try:
                with self._index.update("deleting") as change:
                    for row, _ in sorted(found.values(), key=lambda at: at[0].order):
                        change.remove(row)
            except StoreError:
                self._free_gone(found)
                raise
            self._free(found.values())
            if not self._index.counters.records:
                self._erase()
            self._io.point("delete:done")

    def touch(self, ticks: Sequence[tuple[bytes, int]]) -> None:
        """Remember the recency of records, for the next open; unknown keys are ignored."""
        with self._operation(), self._writes("touch"):
            latest = dict(ticks)
            with self._index.update("touching") as change:
                for key, tick in latest.items():
                    found = change.get(key)
                    if found is not None and found[0].tick != tick:
                        change.change(found[0], tick=tick)

    def scan(self) -> npt.NDArray[np.void]:
        """Everything stored and not quarantined, as an array of ``ENTRY`` in key order."""
        with self._operation():
            with self._changing:
                entries, self._entries = self._entries, None
            if entries is not None:
                return entries
            parts = [opening.entries_of(rows) for rows in self._index.chunks()]
            return np.concatenate(parts) if parts else np.empty(0, ENTRY)

    def close(self) -> None:
        """Leave a store that the next open can trust without a look, and give back the room that
        was reserved and not used.  Waits for calls under way; idempotent."""
        if os.getpid() != self._pid:
            return
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self._turn.wait_for(lambda: self._active == 0)
        try:
            if self._lock is not None and not self._index.failed:
                counters, used = self._index.counters, self._index.used_bytes()
                self._slabs.cut(self._slots.highest() + 1)
                self._release()
                mark = Mark(used, "", counters.records, counters.checkpoints, counters.bytes)
                write_mark(self._io, self._names, mark)
        except OSError as error:
            log.warning("kvtier disk: %s will be inspected when opened: %s", self, error)
        finally:
            self._let_go()

    def _release(self) -> None:
        """Close the files."""
        self._index.close()
        self._slabs.close()

    def _abandon(self) -> None:
        """Let go of everything as a crash would: no mark of a clean close is left."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        self._release()
        if self._lock is not None:
            self._lock.release()

    # -- beyond the protocol -------------------------------------------------------------------

    def counters(self) -> Counters:
        """What the index holds: records, frames, quarantined frames, payload bytes."""
        with self._operation(), self._changing:
            if not self._write:
                self._index.reload()
            return self._index.counters

    def check(self) -> None:
        """Raise InvariantError naming everything that does not add up.  O(records)."""
        with self._operation(), self._changing:
            if not self._write:
                self._index.reload()
            wrong = self._index.wrong(self._index.counters if self._write else None)
            if self._write and self._slots.used != self._index.counters.frames:
                wrong.append(
                    f"{self._slots.used} slots are taken, records have "
                    f"{self._index.counters.frames} (I1)"
                )
            if self._index.counters.frames > self.capacity:
                wrong.append(f"more frames than the capacity of {self.capacity}")
        if wrong:
            raise InvariantError("\n".join(wrong))

    def __enter__(self) -> "LmdbStore":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        """A store dropped without ``close`` gives its lock back all the same; its index will be
        inspected when opened."""
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            self._abandon()
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        mode = "write" if self._write else "read"
        return f"LmdbStore({self._names.directory!r}, mode={mode!r}, capacity={self.capacity})"

    # -- inside --------------------------------------------------------------------------------

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """A call under way: the store stays open until it ends."""
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; open one in the child")
        with self._turn:
            if not self._write and not self._closed and self._index.stale():
                self._turn.wait_for(lambda: self._active == 0)
                self._follow()
            if self._closed:
                raise StoreError("this store is closed")
            self._active += 1
        try:
            yield
        finally:
            with self._turn:
                self._active -= 1
                if self._active == 0:
                    self._turn.notify_all()

    @contextmanager
    def _writes(self, what: str) -> Iterator[None]:
        """The one change at a time; failures of the medium leave as StoreError."""
        if not self._write:
            raise StoreError(f'{what}: this store was opened with disk_mode="read"')
        with self._changing:
            self._entries = None
            try:
                yield
            except StoreError:
                raise
            except OSError as error:
                raise StoreError(error.errno, f"{what} failed: {error}") from error

    def _fresh(self, records: Sequence[Record]) -> list[Record]:
        """Those not stored yet, or with other bytes; checks their form and that no parent is
        missing."""
        fresh: list[Record] = []
        known: set[bytes] = set()
        found = self._index.find([record.key for record in records])
        for record, at in zip(records, found, strict=True):
            if record.key in known:
                continue
            if at is None or at[0].checksum != record.checksum or not self._is_good(at):
                self._writer.check(record)
                if not (
                    _is_root(record)
                    or record.parent in known
                    or self._is_good(self._index.find([record.parent])[0])
                ):
                    raise StoreError(
                        f"record {record.key.hex()} needs {record.parent.hex()}, "
                        "which is not stored"
                    )
                fresh.append(record)
            known.add(record.key)
        return fresh

    def _is_good(self, found: Found | None) -> bool:
        """Whether the record is there and has not been found bad."""
        if found is None:
            return False
        row = found[0]
        return row.state == STORED and (row.key, row.seq) not in self._bad

    def _reserve(self, frames: int) -> list[int]:
        """Slots nobody uses.  Raises StoreError when there are too few."""
        slots = self._slots.take(frames, min(self._slabs.allocated, self.capacity))
        if slots is None:
            if self._slots.used + frames > self.capacity:
                raise StoreError(
                    f"the store is full: {frames} frames wanted, "
                    f"{self.capacity - self._slots.used} of {self.capacity} free"
                )
            self._slabs.grow(self._slots.used + frames, self.capacity)
            slots = self._slots.take(frames, self._slabs.allocated)
            assert slots is not None, "I1"
        self._io.point("put:reserved")
        return slots

    def _publish(self, records: Sequence[Record], slots: list[int]) -> list[int]:
        """Write, sync, publish.  Returns the slots of records that were replaced."""
        self._seq += 1  # also when it fails: two lives of a key never carry one number
        seq, tick = self._seq, self._index.counters.tick + 1
        rows = self._writer.write(records, slots, seq=seq, tick=tick)
        self._io.point("put:written")
        self._slabs.sync()
        self._io.point("put:synced")
        retired: list[int] = []
        with self._index.update("publishing") as change:
            change.counters.seq = seq
            fresh = []
            for row, own in rows:
                old = change.get(row.key)
                if old is None:
                    fresh.append((row, own))
                else:
                    change.replace(old[0], row, own)
                    retired += old[1]
            change.add(fresh)
        return retired

    def _free(self, deleted: Iterable[Found]) -> None:
        for row, slots in deleted:
            self._slots.give(slots)
            self._bad.discard((row.key, row.seq))

    def _erase(self) -> None:
        """Nothing is stored: leave no slot from which a rebuilt index could bring it back."""
        try:
            self._slabs.cut(0)
        except OSError as error:
            log.warning("kvtier disk: %s: deleted payload stays in its files: %s", self, error)

    def _free_gone(self, found: Mapping[bytes, Found]) -> None:
        """After a deletion that raised: free what went all the same; if nobody can tell, the slots
        stay taken until the next open."""
        try:
            now = self._index.find(list(found))
        except StoreError:
            return
        self._free(was for was, left in zip(found.values(), now, strict=True) if left is None)

    def _after_failure(self, key: bytes, slots: list[int]) -> None:
        """The slots of a publish that failed are free again, unless it took effect all the same;
        if nobody can tell, they stay taken until the next open."""
        try:
            found = self._index.find([key])[0]
        except StoreError:
            return
        if found is None or found[1][-1] != slots[-1]:
            self._slots.give(slots)

    def _offers(self, read: Read, found: Found) -> bool:
        """Whether this record can be what is wanted."""
        row = found[0]
        return (
            self._is_good(found)
            and row.parent == read.parent
            and row.size == read.size
            and row.frames == len(read.views)
        )

    def _suspect(self, read: Read) -> bool:
        """A record that failed its checks: look again with nobody writing, then quarantine it.

        A slot may have been given to another record between the look-up and the read; that is
        a miss (or a second chance), not damage.
        """
        with self._changing:
            found = self._index.find([read.key])[0]
            if found is None or not self._offers(read, found):
                return False
            verdict = self._reader.read([(read, found)])[0]
            if verdict is not Verdict.BAD:
                return verdict is Verdict.GOOD
            row = found[0]
            log.warning("kvtier disk: record %s is damaged; quarantined", row.key.hex())
            self._bad.add((row.key, row.seq))
            if self._write:
                self._entries = None
                try:
                    with self._index.update("quarantining") as change:
                        now = change.get(row.key)
                        if now is not None:
                            change.change(now[0], state=QUARANTINED)
                    self._bad.discard((row.key, row.seq))
                except StoreError as error:
                    log.warning("kvtier disk: quarantine of %s: %s", row.key.hex(), error)
        return False

    def _follow(self) -> None:
        """The writer replaced the index: open the new one, unless it is just being made.  Until
        then the old one answers, whose records fail their checks once their slots are reused.
        Where the new one cannot be opened this raises, and the next call tries again."""
        if self._closed or not self._index.stale():
            return
        try:
            gate = FileLock(self._names.file("gate.lock"), create=False)
        except OSError:
            return
        try:
            if gate.take(shared=True):
                fresh = opening.reopen_index(self._io, self._about, type(self).inspect)
                old, self._index = self._index, fresh
                old.close()
        finally:
            gate.release()


def _is_root(record: Record) -> bool:
    return record.depth == 1 and record.component == "history"
