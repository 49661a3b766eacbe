"""What is on disk, one compact row a record: about 60 bytes each, no objects.

Pages that are only on disk have no node in memory; a lookup here is how a walk goes on past the
tree.  A row's key is the record's key; a checkpoint is a child row of its page, so that leaves
first holds for both.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.keys import KEY_BYTES

__all__ = ["DiskTable"]

_EMPTY, _GONE = -1, -2
_OVERFLOW = 4096
_START = 1024
_FIRST_WORD = Struct("<Q")


class DiskTable:
    """Rows of records, found by key, evicted leaves first and least recently used first."""

    def __init__(self, capacity: int, entries: npt.NDArray[Any] | None = None) -> None:
        self.capacity = capacity
        """Frames."""
        self.used = 0
        self.quarantined = 0
        """Frames of bad records whose deletion has not been confirmed."""
        self.rows = 0
        self.root_keys: list[bytes] = []
        self.touched: set[int] = set()
        self._root_index: dict[bytes, int] = {}
        self._free: list[int] = []
        self._next = 0
        self._victims: list[tuple[int, int, int]] = []
        """Heap of candidates: its tick when it was found to be one, minus its depth, row."""
        self._horizon = 0
        """Candidates with younger ticks are left to the next scan."""
        self._size = 0
        self._keys = bytearray()
        self.parent, self.kids, self.depth, self.root = (_none(np.int32) for _ in range(4))
        self.tick = _none(np.int64)
        self.frames = _none(np.uint16)
        self.busy = _none(np.uint16)
        """Operations and pins that hold the row."""
        self.live = _none(np.uint8)
        self._grow(_START if entries is None else max(_START, len(entries) * 5 // 4))
        if entries is not None and len(entries):
            self._load(entries)

    # ------------------------------------------------------------------ columns
    def _grow(self, size: int) -> None:
        more = size - self._size
        for name in ("parent", "kids", "depth", "root", "tick", "frames", "busy", "live"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        self._keys += bytes(more * KEY_BYTES)
        self._size = size
        self._reindex()

    def _reindex(self) -> None:
        """Build the hash index anew: linear probing, laid out in one vectorised pass."""
        slots = 1 << max(4, (self._size * 2 - 1).bit_length())
        self._mask = slots - 1
        index = np.full(slots + _OVERFLOW, _EMPTY, dtype=np.int32)  # probing never wraps
        rows = np.flatnonzero(self.live)
        if len(rows):
            words = np.frombuffer(self._keys, dtype="<u8")[::2][rows]
            home = (words & np.uint64(self._mask)).astype(np.int32)
            order = np.argsort(home)
            home = home[order].astype(np.int64)
            step = np.arange(len(rows))
            index[np.maximum.accumulate(home - step) + step] = rows[order]
        self._index = memoryview(index.data)
        self._tombs = 0

    def _load(self, entries: npt.NDArray[Any]) -> None:
        n = len(entries)
        keys = np.ascontiguousarray(entries["key"]).tobytes()
        self._keys[: n * KEY_BYTES] = keys
        self.live[:n] = 1
        self.depth[:n] = entries["depth"]
        self.frames[:n] = entries["frames"]
        self.tick[:n] = entries["tick"].astype(np.int64)
        self._next = self.rows = n
        self.used = int(self.frames[:n].sum())
        self._reindex()
        self.parent[:n] = _find_parents(keys, entries)
        np.add.at(self.kids, self.parent[:n][self.parent[:n] >= 0], 1)
        self._roots_of_loaded(entries, n)

    def _roots_of_loaded(self, entries: npt.NDArray[Any], n: int) -> None:
        first = np.flatnonzero(self.parent[:n] < 0)
        roots = np.ascontiguousarray(entries["parent"][first]).tobytes()
        halves = np.frombuffer(roots, dtype="<u8").reshape(len(first), 2)
        _, where, index = np.unique(
            halves[:, 0] ^ (halves[:, 1] << np.uint64(1)), return_index=True, return_inverse=True
        )
        self.root_keys = [roots[16 * i : 16 * i + 16] for i in where]
        self._root_index = {k: i for i, k in enumerate(self.root_keys)}
        self.root[:n] = -1
        self.root[first] = index
        jump = self.parent[:n].copy()  # pointer jumping: log2(depth) passes
        root = self.root[:n]
        while (todo := np.flatnonzero(root < 0)).size:
            known = root[jump[todo]]
            root[todo] = known
            jump[todo] = np.where(known < 0, jump[jump[todo]], jump[todo])

    # ------------------------------------------------------------------ lookups
    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used - self.quarantined)

    def find(self, key: bytes) -> int:
        """The row of this key, or -1."""
        index, keys = self._index, self._keys
        slot: int = _FIRST_WORD.unpack_from(key)[0] & self._mask
        while True:
            row = index[slot]
            if row >= 0:
                if keys.startswith(key, row * KEY_BYTES):
                    return row
            elif row == _EMPTY:
                return -1
            slot += 1

    def key(self, row: int) -> bytes:
        return bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def is_checkpoint(self, row: int) -> bool:
        parent = self.parent[row]
        return bool(parent >= 0 and self.depth[parent] == self.depth[row])

    def all_rows(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.live[: self._next])

    def rows_of(self, root_key: bytes | None) -> npt.NDArray[np.int64]:
        """Rows of one identity, or of all, children before parents."""
        rows = self.all_rows()
        if root_key is not None:
            rows = rows[self.root[rows] == self._root_index.get(root_key, -9)]
        # A checkpoint has its page's depth: rows of equal depth with a parent of that depth first.
        below = self.parent[rows] >= 0
        same = below & (self.depth[np.maximum(self.parent[rows], 0)] == self.depth[rows])
        return rows[np.lexsort((~same, -self.depth[rows]))]

    # ------------------------------------------------------------------ changes
    def add(
        self, key: bytes, parent: int, root_key: bytes, depth: int, frames: int, tick: int
    ) -> int:
        """A new row; the caller has made room.  It is busy until released."""
        root = int(self.root[parent]) if parent >= 0 else self._intern(root_key)
        row = self._free.pop() if self._free else self._next
        if row == self._next:
            if row >= self._size:
                self._grow(self._size * 2)
            self._next += 1
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self.parent[row], self.depth[row], self.frames[row] = parent, depth, frames
        self.tick[row], self.kids[row], self.live[row], self.busy[row] = tick, 0, 1, 0
        self.root[row] = root
        if parent >= 0:
            self.kids[parent] += 1
        self.used += frames
        self.rows += 1
        slot: int = _FIRST_WORD.unpack_from(key)[0] & self._mask
        while self._index[slot] >= 0:
            slot += 1
        if slot >= len(self._index) - 2:
            self._reindex()
        else:
            self._index[slot] = row
        return row

    def _intern(self, root_key: bytes) -> int:
        """The number of an identity; those without rows are forgotten now and then."""
        number = self._root_index.get(root_key)
        if number is None:
            if len(self.root_keys) > 2 * self.rows + 64:
                rows = self.all_rows()
                used, self.root[rows] = np.unique(self.root[rows], return_inverse=True)
                self.root_keys = [self.root_keys[i] for i in used]
                self._root_index = {k: i for i, k in enumerate(self.root_keys)}
            number = self._root_index[root_key] = len(self.root_keys)
            self.root_keys.append(root_key)
        return number

    def remove(self, row: int, *, quarantine: bool = False) -> bytes:
        """Forget a row; returns its key.  Its frames stay counted if quarantined."""
        key = self.key(row)
        assert self.live[row] and not self.kids[row], "I6: removing a page under its child"
        index = self._index
        slot: int = _FIRST_WORD.unpack_from(key)[0] & self._mask
        while index[slot] != row:
            slot += 1
        index[slot] = _GONE
        self._tombs += 1
        self.live[row] = 0
        if self._tombs > self._size // 4:  # tombstones lengthen every miss
            self._reindex()
        frames = int(self.frames[row])
        self.used -= frames
        if quarantine:
            self.quarantined += frames
        if (parent := int(self.parent[row])) >= 0:
            self.kids[parent] -= 1
        self.rows -= 1
        self.touched.discard(row)
        self._free.append(row)
        return key

    def touch(self, row: int, tick: int) -> None:
        self.tick[row] = tick
        self.touched.add(row)

    def below(self, row: int) -> list[int]:
        """Rows that need this one, deepest first."""
        rows = self.all_rows()
        rows = rows[np.argsort(self.parent[rows], kind="stable")]
        parents = self.parent[rows]  # sorted: the children of a row lie side by side
        out, level = [], np.array([row])
        while len(level):
            first, last = (np.searchsorted(parents, level, side=s) for s in ("left", "right"))
            level = np.concatenate([rows[a:b] for a, b in zip(first, last, strict=True)])
            out.extend(level.tolist())
        return out[::-1]

    # ------------------------------------------------------------------ eviction
    def victims(self, frames: int) -> list[int] | None:
        """Idle leaves, least recently used first, until ``frames`` would be free; None if they
        cannot be.  Changes nothing but its own queue of candidates."""
        need = frames + self.used + self.quarantined - self.capacity
        out: list[int] = []
        taken: dict[int, int] = {}
        scanned_at = -1
        while need > 0:
            if not self._victims:
                if scanned_at == len(out):
                    for r in out:
                        self._propose(r)
                    return None
                self._scan(set(out))
                scanned_at = len(out)
                continue
            tick, _, row = heappop(self._victims)
            if taken.get(row, 0) < 0 or self.tick[row] != tick:
                continue  # taken, or used since it was queued
            limit = self._victims[0][0] if self._victims else self._horizon
            while row >= 0 and self._idle(row, taken):
                out.append(row)
                taken[row] = -1 - self.kids[row]
                need -= int(self.frames[row])
                parent = int(self.parent[row])
                if parent < 0:
                    break
                taken[parent] = taken.get(parent, 0) + 1
                if need <= 0 or self.tick[parent] > limit:
                    if self.tick[parent] <= self._horizon and self._idle(parent, taken):
                        self._propose(parent)  # a leaf now, and as old as the others
                    break
                row = parent
        return out

    def _propose(self, row: int) -> None:
        heappush(self._victims, (int(self.tick[row]), -int(self.depth[row]), row))

    def _idle(self, row: int, taken: dict[int, int]) -> bool:
        gone = taken.get(row, 0)
        return bool(self.live[row] and not self.busy[row]) and gone >= 0 and self.kids[row] == gone

    def _scan(self, taken: Iterable[int]) -> None:
        """Refill the candidates: the oldest idle leaves, in one vectorised pass."""
        n = self._next
        kids = self.kids[:n].copy()
        rows = np.fromiter(taken, dtype=np.int64)
        live = self.live[:n].astype(bool)
        if rows.size:
            live[rows] = False
            parents = self.parent[rows]
            np.subtract.at(kids, parents[parents >= 0], 1)
        leaves = np.flatnonzero(live & (kids == 0) & (self.busy[:n] == 0))
        batch = max(1024, self.rows // 64)
        if len(leaves) > batch:
            leaves = leaves[np.argpartition(self.tick[leaves], batch)[:batch]]
        order = np.lexsort((-self.depth[leaves], self.tick[leaves]))
        leaves = leaves[order]
        self._horizon = int(self.tick[leaves[-1]]) if len(leaves) else 0
        depths = (-self.depth[leaves]).tolist()
        found = zip(self.tick[leaves].tolist(), depths, leaves.tolist(), strict=True)
        self._victims = list(found)  # in order, and so a heap

    # ------------------------------------------------------------------ checking
    def errors(self) -> Iterator[str]:
        rows = self.all_rows()
        if int(self.frames[rows].sum()) != self.used or self.rows != len(rows):
            yield f"I1: disk rows {len(rows)}/{self.rows}, frames used {self.used}"
        if self.used > self.capacity:
            yield f"I1: disk over capacity by {self.used - self.capacity} frames"
        kids = np.zeros_like(self.kids)
        parents = self.parent[rows]
        np.add.at(kids, parents[parents >= 0], 1)
        for r in rows:
            if kids[r] != self.kids[r]:
                yield f"I6: disk row {r} counts {self.kids[r]} children, has {kids[r]}"
            if (p := self.parent[r]) >= 0 and not self.live[p]:
                yield f"I6: disk row {r} without its parent"
            if self.find(self.key(int(r))) != r:
                yield f"disk row {r} is not found by its key"


def _find_parents(keys: bytes, entries: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Row of each entry's parent, -1 for none: one sorted search instead of a million lookups."""
    n = len(entries)
    parent = np.full(n, -1, dtype=np.int64)
    todo = np.flatnonzero((entries["depth"] > 1) | (entries["checkpoint"] > 0))
    have = _halves(keys)
    order = np.argsort(have[:, 0], kind="stable")  # stores list keys in order: nothing to do then
    have = have[order]
    want = _halves(np.ascontiguousarray(entries["parent"][todo]).tobytes())
    by_want = np.argsort(want[:, 0])  # in order, neighbours are searched for in the same cache line
    todo, want = todo[by_want], want[by_want]
    at = np.searchsorted(have[:, 0], want[:, 0])
    while len(todo):  # equal first halves lie side by side, if that ever happens
        at = np.minimum(at, n - 1)
        hit = (have[at] == want).all(axis=1)
        parent[todo[hit]] = order[at[hit]]
        more = ~hit & (have[at, 0] == want[:, 0]) & (at < n - 1)
        todo, want, at = todo[more], want[more], at[more] + 1
    return parent


def _halves(keys: bytes) -> npt.NDArray[np.uint64]:
    """Keys as pairs of words that sort like the bytes."""
    return np.frombuffer(keys, dtype=">u8").astype(np.uint64).reshape(-1, 2)


def _none(dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
    return np.zeros(0, dtype=dtype)
