"""Payload files: numbered slots of one size, in preallocated files beside the index.

Owns which slots are free, where a slot lies, and moving bytes between slots and frames with as
few and as large system calls as the slots' order allows.  Knows nothing of keys or transactions:
a slot is written before the index names it and given back after the index forgot it.
"""

import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import StoreError
from kvtier.stores.files import BLOCK, FileIO, aligned, is_aligned, rest_of, write_all
from kvtier.stores.record import slot_bytes

__all__ = ["BATCH", "Slabs", "SlotIO", "SlotMap"]

log = logging.getLogger("kvtier")

BATCH = 64
"""Slots per system call, at most; two buffers each, well under the kernel's limit of 1,024."""
SLAB_BYTES = 16 << 30
"""A file holds as many whole slots as fit in this."""
WRITERS = 4
"""Threads that write the parts of a group; more than one where it is larger than a part."""
PART_BYTES = 1 << 20
GROW_BYTES = 64 << 20
"""Files grow by at least this (or by what is left), so that growing is rare."""
_LOST = frozenset(
    (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ, errno.ENOENT)
)
"""Errors of a read that say something of the medium, or of a file that is gone; any other (no
memory, no descriptors) passes and says nothing of what is stored."""


@dataclass(frozen=True, slots=True)
class SlotIO:
    """One slot to move: its header block and the first ``payload.nbytes`` of its frame."""

    slot: int
    header: memoryview
    payload: memoryview


class SlotMap:
    """Which slots are free, from 0 up to a capacity.  Not thread-safe."""

    __slots__ = ("_cursor", "_free", "used")

    def __init__(self, capacity: int) -> None:
        self._free: npt.NDArray[np.bool_] = np.ones(capacity, np.bool_)
        self._cursor = 0
        self.used = 0

    @property
    def capacity(self) -> int:
        return len(self._free)

    def mark(self, slots: npt.NDArray[np.integer] | Sequence[int]) -> None:
        """These are taken.  Raises ValueError when one is already, or does not exist."""
        at = np.asarray(slots, dtype=np.int64)
        if at.size == 0:
            return
        if at.min() < 0 or at.max() >= self.capacity:
            raise ValueError("a slot lies beyond the end")
        self._free[at] = False
        self.used += at.size
        if self.capacity - int(np.count_nonzero(self._free)) != self.used:
            raise ValueError("a slot is used twice")

    def highest(self) -> int:
        """The highest slot taken; -1 for none."""
        taken = np.flatnonzero(~self._free)
        return int(taken[-1]) if taken.size else -1

    def take(self, count: int, below: int) -> list[int] | None:
        """``count`` free slots under ``below``, ascending from where the last ended and
        wrapping once; None (and nothing taken) when there are fewer."""
        if count == 0:
            return []
        start = min(self._cursor, below)
        after = np.flatnonzero(self._free[start:below])[:count] + start
        picked: list[int] = after.tolist()
        if len(picked) < count:
            before = np.flatnonzero(self._free[:start])[: count - len(picked)]
            picked += before.tolist()
        if len(picked) < count:
            return None
        self._free[picked] = False
        self.used += count
        self._cursor = picked[-1] + 1
        return picked

    def give(self, slots: Sequence[int]) -> None:
        """These are free again."""
        at = list(slots)
        assert not self._free[at].any(), "a slot was given back twice"
        self._free[at] = True
        self.used -= len(at)


class Slabs:
    """The slab files of one store.  ``read`` is thread-safe; the rest is the writer's."""

    def __init__(self, io: FileIO, directory: str, frame_bytes: int, *, write: bool) -> None:
        self._io = io
        self._directory = directory
        self._write = write
        self._payload = slot_bytes(frame_bytes) - BLOCK
        self.slot_bytes = slot_bytes(frame_bytes)
        self.slots_per_file = max(1, SLAB_BYTES // self.slot_bytes)
        self._files: dict[int, tuple[int, bool]] = {}
        self._opening = threading.Lock()
        self._dirty: set[int] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._bounce = threading.local()
        self.allocated = self._slots_on_disk()

    # -- files ---------------------------------------------------------------------------------

    def path(self, number: int) -> str:
        return os.path.join(self._directory, f"slab-{number:05d}")

    def _slots_on_disk(self) -> int:
        slots = 0
        for name in os.listdir(self._directory):
            if name.startswith("slab-") and name[5:].isdigit():
                size = os.stat(os.path.join(self._directory, name)).st_size
                here = min(size // self.slot_bytes, self.slots_per_file)
                slots = max(slots, int(name[5:]) * self.slots_per_file + here)
        return slots

    def _open(self, number: int) -> tuple[int, bool]:
        """(descriptor, whether it does direct I/O) of a slab file, opened once."""
        opened = self._files.get(number)
        if opened is None:
            with self._opening:
                opened = self._files.get(number)
                if opened is None:
                    opened = self._files[number] = self._open_file(number)
        return opened

    def _open_file(self, number: int) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CREAT if self._write else os.O_RDONLY
        path = self.path(number)
        try:
            fd = self._io.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._io.open(path, flags), False
        try:
            self._io.preadv(fd, [aligned(BLOCK)], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:  # opened, but not supported after all
                os.close(fd)
                return self._io.open(path, flags), False
        return fd, True

    def grow(self, slots: int, limit: int) -> None:
        """Make room for at least ``slots`` slots, and some more up to ``limit``.

        Raises StoreError where the medium is full; nothing is lost then.
        """
        step = max(slots, self.allocated + max(GROW_BYTES // self.slot_bytes, self.allocated // 8))
        try:
            self._allocate(min(step, limit))
        except OSError as error:
            if error.errno != errno.ENOSPC or slots >= step:
                raise StoreError(
                    error.errno, f"cannot enlarge the payload files: {error}"
                ) from error
            self._grow_exactly(slots)

    def _grow_exactly(self, slots: int) -> None:
        try:
            self._allocate(slots)
        except OSError as error:
            raise StoreError(error.errno, f"cannot enlarge the payload files: {error}") from error

    def _allocate(self, slots: int) -> None:
        first = self.allocated // self.slots_per_file
        last = (slots - 1) // self.slots_per_file
        for number in range(first, last + 1):
            here = min(slots - number * self.slots_per_file, self.slots_per_file)
            is_new = number not in self._files and not os.path.exists(self.path(number))
            fd, _ = self._open(number)
            before = os.fstat(fd).st_size
            if before < here * self.slot_bytes:
                try:
                    self._io.allocate(fd, here * self.slot_bytes)
                except OSError:
                    self._io.truncate(fd, before)
                    raise
                self._io.sync(fd)
            if is_new:
                self._io.sync_directory(self._directory)
            self.allocated = max(self.allocated, number * self.slots_per_file + here)
            self._io.point("slab:grown")

    def mend(self, slots: int) -> None:
        """Give every file the length that ``slots`` slots need: one may have been cut or lost.
        What was lost reads as zeros, which no record matches."""
        target, self.allocated = max(slots, self.allocated), 0
        if target:
            self._grow_exactly(target)

    def cut(self, slots: int) -> None:
        """Give back to the medium what lies beyond ``slots`` slots."""
        files = self.allocated // self.slots_per_file + 1
        self.allocated = min(self.allocated, slots)
        for number in range(files):
            keep = min(max(slots - number * self.slots_per_file, 0), self.slots_per_file)
            if os.path.exists(self.path(number)):
                fd, _ = self._open(number)
                if os.fstat(fd).st_size > keep * self.slot_bytes:
                    self._io.truncate(fd, keep * self.slot_bytes)
                    self._io.sync(fd)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        files, self._files = self._files, {}
        for fd, _ in files.values():
            os.close(fd)

    # -- bytes ---------------------------------------------------------------------------------

    def write(self, items: Sequence[SlotIO]) -> None:
        """Write slots, several parts at once where it is much; they are durable after ``sync``."""
        parts = list(self._runs(items, self._part_of(items)))
        self._dirty.update(self._place(run[0].slot)[0] for run in parts)
        if len(parts) == 1:
            self._write_run(parts[0])
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="kvtier-disk")
        writing = [self._pool.submit(self._write_run, run) for run in parts]
        wait(writing)  # all, also when one fails: their memory is the caller's again
        for future in writing:
            future.result()

    @staticmethod
    def _part_of(items: Sequence[SlotIO]) -> int:
        """How many slots to write with one call, so that the medium has several to work on."""
        size = sum(item.payload.nbytes for item in items)
        parts = min(WRITERS, max(size // PART_BYTES, 1))
        return -(-len(items) // parts)

    def _write_run(self, run: Sequence[SlotIO]) -> None:
        number, offset = self._place(run[0].slot)
        fd, direct = self._open(number)
        buffers: list[memoryview] = []
        for item in run:
            buffers += (item.header, item.payload)
        buffers[-1] = self._for_writing(buffers[-1], direct)  # the others are aligned
        write_all(self._io, fd, buffers, offset)
        self._io.point("slab:written")

    def sync(self) -> None:
        """What was written is on the medium when this returns."""
        while self._dirty:
            number = next(iter(self._dirty))
            self._io.sync(self._open(number)[0])
            self._dirty.discard(number)

    def read(self, items: Sequence[SlotIO]) -> list[bool]:
        """Fill headers and payloads; False for those that could not be read whole.

        Raises StoreError for an error that says nothing of the medium: no slot is judged then.
        """
        done: list[bool] = []
        for run in self._runs(items, BATCH):
            ok = self._read_run(run)
            if not ok and len(run) > 1:  # one bad slot must not spoil its neighbours
                done += [self._read_run([item]) for item in run]
            else:
                done += [ok] * len(run)
        return done

    def _read_run(self, run: Sequence[SlotIO]) -> bool:
        number, offset = self._place(run[0].slot)
        try:
            fd, direct = self._open(number)
            last = run[-1].payload
            if not direct or is_aligned(last):  # within a run all but the last are aligned
                buffers = [part for item in run for part in (item.header, item.payload)]
                return _read_all(self._io, fd, buffers, offset)
            bounce = self._scratch(-(-last.nbytes // BLOCK) * BLOCK)
            buffers = [part for item in run for part in (item.header, item.payload)]
            buffers[-1] = bounce
            if not _read_all(self._io, fd, buffers, offset):
                return False
            last[:] = bounce[: last.nbytes]
        except OSError as error:
            if error.errno not in _LOST:
                raise StoreError(error.errno, f"slots cannot be read now: {error}") from error
            log.warning("kvtier disk: slot %d cannot be read: %s", run[0].slot, error)
            return False
        return True

    def _place(self, slot: int) -> tuple[int, int]:
        number, inside = divmod(slot, self.slots_per_file)
        return number, inside * self.slot_bytes

    def _runs(self, items: Sequence[SlotIO], most: int) -> Iterator[Sequence[SlotIO]]:
        """Cut into runs of at most ``most`` that lie together on disk: each is one system call.

        All payloads of a run but the last fill their slots and are aligned.
        """
        start = 0
        for i in range(1, len(items) + 1):
            if (
                i == len(items)
                or i - start == most
                or items[i].slot != items[i - 1].slot + 1
                or items[i].slot % self.slots_per_file == 0
                or items[i - 1].payload.nbytes != self._payload
                or not is_aligned(items[i - 1].payload)
            ):
                yield items[start:i]
                start = i

    def _for_writing(self, payload: memoryview, direct: bool) -> memoryview:
        """The payload itself, or a copy that direct I/O can use."""
        if not direct or is_aligned(payload):
            return payload
        size = -(-payload.nbytes // BLOCK) * BLOCK
        bounce = self._scratch(size)
        bounce[: payload.nbytes] = payload
        bounce[payload.nbytes :] = bytes(size - payload.nbytes)
        return bounce

    def _scratch(self, size: int) -> memoryview:
        held: memoryview | None = getattr(self._bounce, "view", None)
        if held is None or held.nbytes < size:
            held = self._bounce.view = aligned(max(size, self._payload))
        return held[:size]


def _read_all(io: FileIO, fd: int, buffers: list[memoryview], offset: int) -> bool:
    while buffers:
        got = io.preadv(fd, buffers, offset)
        if got <= 0:
            return False
        offset += got
        buffers = rest_of(buffers, got)
    return True
