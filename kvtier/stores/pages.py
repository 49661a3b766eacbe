"""An index read without LMDB: its file as bytes, of which every number is checked before use.

LMDB trusts its file, pages carry no checksum, and a flipped bit in one can end the process that
follows it.  Here damage is an exception, and a sound file is read in bulk: a million rows in a
quarter of the time that cursors take.  Knows how LMDB lays out its files (data version 1, 64 bits,
little-endian), and nothing of what rows mean.

What is returned is what LMDB will find as well: every tree has the depth, the pages and the
entries it is said to have, no page belongs to two, keys ascend and lie where looking them up
leads, and nodes lie side by side in their pages.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.stores.record import ROW, halves, less

__all__ = ["Damaged", "IndexFile", "claimed_bytes"]

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_APART, _TREE = 1, 2
"""Flags of a node: its value lies in pages of its own; its value describes a tree."""
_NONE = 2**64 - 1
_INTEGER_KEYS = 8
_HEADER, _NODE, _KEY = 16, 8, 16
"""Bytes of a page's header, of a node's, and of every key but those of ``meta``."""
_DESCRIPTION = np.dtype(
    [
        ("pad", "<u4"),
        ("flags", "<u2"),
        ("depth", "<u2"),
        ("branches", "<u8"),
        ("leaves", "<u8"),
        ("overflows", "<u8"),
        ("entries", "<u8"),
        ("root", "<u8"),
    ]
)
_FIRST = np.dtype(
    [
        ("number", "<u8"),
        ("pad", "<u2"),
        ("kind", "<u2"),
        ("bounds", "<u4"),
        ("magic", "<u4"),
        ("version", "<u4"),
        ("address", "<u8"),
        ("map", "<u8"),
        ("free", _DESCRIPTION),
        ("main", _DESCRIPTION),
        ("last", "<u8"),
        ("commit", "<u8"),
    ]
)
"""Each of the first two pages: what one commit left; the later one counts."""

Numbers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
"""(keys, 2): each as its two halves."""


class Damaged(ValueError):
    """The file is not what LMDB writes, or not all of it."""


class IndexFile:
    """An index as its last commit left it; nobody may be writing it.

    Raises Damaged, a ValueError, for whatever is wrong with the file, here and in ``read``; OSError
    where it cannot be read.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb", buffering=0) as file:
            self._size, self._last = _last_commit(file.read(1 << 16))
            length = (int(self._last["last"]) + 1) * self._size
            if length > file.seek(0, 2):
                raise Damaged("the file is shorter than it says")
            file.seek(0)
            self._data = np.empty(length, np.uint8)
            if _fill(file, self._data.data) != length:
                raise Damaged("the file is shorter than it was")
        self._words = self._data.view("<u2")
        self._seen = np.zeros(length // self._size, np.bool_)
        self._take(np.arange(2))
        self._trees = self._entries(self._last["main"], _TREE)
        self.meta = self._entries(self._tree(b"meta"), 0)
        """The entries of ``meta``."""

    def read(self, *, compact: bool) -> tuple[npt.NDArray[np.void], dict[bytes, bytes]]:
        """(``rows`` in key order, as ``ROW``; the entries of ``more``).  Call once.

        Every row holds the key under which it is stored; nothing else of it was looked at.
        ``compact``: the file is a fresh copy, in which every page is in use.
        """
        rows = self._rows(self._tree(b"rows"))
        more = self._values(self._tree(b"more"))
        if compact:
            _check_empty(self._last["free"])
            if not self._seen.all():
                raise Damaged("a page belongs to nothing")
        return rows, more

    # -- trees ---------------------------------------------------------------------------------

    def _tree(self, name: bytes) -> Any:
        if name not in self._trees:
            raise Damaged(f"there is no {name!r}")
        return np.frombuffer(self._trees[name], _DESCRIPTION)[0]

    def _entries(self, tree: Any, flags: int) -> dict[bytes, bytes]:
        """What a tree of one page holds, whatever its keys are."""
        found: dict[bytes, bytes] = {}
        leaves, _ = self._leaves(tree)
        if len(leaves) != 1:
            raise Damaged("a table of names has more than a page")
        at, _, counts, head = self._nodes(leaves, _LEAF)
        sizes, keys = (head & 0xFFFFFFFF).astype(np.int64), (head >> 48).astype(np.int64)
        self._check_packed(leaves, at, counts, _NODE + keys + sizes)
        last = b""
        for start, size, key_size in zip(at + _NODE, sizes, keys, strict=True):
            key = self._data[start : start + key_size].tobytes()
            found[key] = self._data[start + key_size : start + key_size + size].tobytes()
            if key <= last:
                raise Damaged("names are not in order")
            last = key
        told = tree["entries"], tree["overflows"]
        if (head >> 32 & 0xFFFF != flags).any() or told != (len(found), 0):
            raise Damaged("names that are none")
        if flags == _TREE and (sizes != _DESCRIPTION.itemsize).any():
            raise Damaged("a tree is not described")
        return found

    def _rows(self, tree: Any) -> npt.NDArray[np.void]:
        leaves, low = self._leaves(tree)
        at, starts, counts, head = self._nodes(leaves, _LEAF)
        told = tree["entries"], tree["overflows"]
        if (head != ROW.itemsize | _KEY << 48).any() or told != (len(at), 0):
            raise Damaged("rows have another form or number")
        self._check_packed(leaves, at, counts, np.full(len(at), _NODE + _KEY + ROW.itemsize))
        keys = halves(self._gather(at + _NODE, np.dtype("V16")))
        _check_order(keys, starts, low)
        rows = self._gather(at + _NODE + _KEY, ROW)
        if not np.array_equal(halves(rows["key"]), keys):
            raise Damaged("a row lies under another key")
        return rows

    def _values(self, tree: Any) -> dict[bytes, bytes]:
        leaves, low = self._leaves(tree)
        at, starts, counts, head = self._nodes(leaves, _LEAF)
        sizes, flags = (head & 0xFFFFFFFF).astype(np.int64), head >> 32 & 0xFFFF
        apart = flags == _APART
        if (head >> 48 != _KEY).any() or (flags & ~np.uint64(_APART)).any():
            raise Damaged("lists have another form")
        here = np.where(apart, 8, sizes)
        self._check_packed(leaves, at, counts, _NODE + _KEY + here)
        _check_order(halves(self._gather(at + _NODE, np.dtype("V16"))), starts, low)
        found: dict[bytes, bytes] = {}
        overflows = 0
        view = self._data.data
        for start, size, is_apart in zip(at.tolist(), sizes.tolist(), apart.tolist(), strict=True):
            body = start + _NODE + _KEY
            key = bytes(view[start + _NODE : body])
            if is_apart:
                number = int.from_bytes(view[body : body + 8], "little")
                overflows += self._take_run(number, size)
                body = number * self._size + _HEADER
            found[key] = bytes(view[body : body + size])
        if len(found) != tree["entries"] or overflows != tree["overflows"]:
            raise Damaged("lists have another number")
        return found

    def _take_run(self, number: int, size: int) -> int:
        """The pages of a value that has its own; how many there are."""
        count = -(-(_HEADER + size) // self._size)
        if number >= len(self._seen):
            raise Damaged("a page lies outside")
        self._take(number + np.arange(count))
        head = self._data[number * self._size :][:_HEADER].tobytes()
        told = [int.from_bytes(head[a:b], "little") for a, b in ((0, 8), (10, 12), (12, 16))]
        if told != [number, _OVERFLOW, count]:
            raise Damaged("a long value lies on other pages")
        return count

    def _leaves(self, tree: Any) -> tuple[Numbers, Keys]:
        """The leaves of a tree from left to right, and where looking up starts to lead there."""
        level, low = np.array([int(tree["root"])], np.uint64), np.zeros((1, 2), np.uint64)
        depth, branches = int(tree["depth"]), 0
        if tree["flags"] or tree["pad"]:
            raise Damaged("a tree of another kind")
        if level[0] == _NONE:
            _check_empty(tree)
            return self._take(level[:0]), low[:0]
        for _ in range(depth - 1):
            pages = self._take(level)
            branches += len(pages)
            at, starts, counts, head = self._nodes(pages, _BRANCH)
            later = np.ones(len(at), np.bool_)
            later[starts] = False  # the first of a page begins where the page does
            key_sizes = (head >> 48).astype(np.int64)
            if (key_sizes[later] != _KEY).any() or (key_sizes > _KEY).any():
                raise Damaged("a branch has keys of another size")
            self._check_packed(pages, at, counts, _NODE + key_sizes)
            keys = np.empty((len(at), 2), np.uint64)
            keys[starts] = low
            keys[later] = halves(self._gather(at[later] + _NODE, np.dtype("V16")))
            level, low = head & (1 << 48) - 1, keys
        leaves = self._take(level)
        if depth < 1 or branches != tree["branches"] or len(leaves) != tree["leaves"]:
            raise Damaged("a tree has another shape")
        return leaves, low

    # -- pages and nodes -----------------------------------------------------------------------

    def _take(self, numbers: npt.NDArray[np.integer]) -> Numbers:
        """These pages belong to one thing, and to no other."""
        if len(numbers) and (numbers.max() >= len(self._seen) or numbers.min() < 0):
            raise Damaged("a page lies outside")
        taken = numbers.astype(np.int64)
        if self._seen[taken].any() or len(np.unique(taken)) != len(taken):
            raise Damaged("a page is used twice")
        self._seen[taken] = True
        return taken

    def _nodes(self, pages: Numbers, kind: int) -> tuple[Numbers, Numbers, Numbers, Any]:
        """(where each node of these pages begins, in order; the number of the first of each page;
        how many each page has; the header of each node)."""
        words, half = self._words, pages * (self._size // 2)
        lower, upper = (words[half + i].astype(np.int64) for i in (6, 7))
        if not np.array_equal(self._gather(pages * self._size, np.dtype("<u8")), pages):
            raise Damaged("a page has another number")
        if (words[half + 5] != kind).any():
            raise Damaged("a page of another kind")
        if (lower <= _HEADER).any() or (lower & 1).any() or (lower > upper).any():
            raise Damaged("a page has impossible bounds")
        counts = (lower - _HEADER) // 2
        starts = np.cumsum(counts) - counts
        inside = words[np.repeat(half + _HEADER // 2 - starts, counts) + np.arange(counts.sum())]
        if (inside & 1).any() or (inside > self._size - _NODE).any():
            raise Damaged("a node lies outside its page")
        at = np.repeat(pages * self._size, counts) + inside
        return at, starts, counts, self._gather(at, np.dtype("<u8"))

    def _check_packed(self, pages: Numbers, at: Numbers, counts: Numbers, sizes: Numbers) -> None:
        """Nodes fill their pages from where free room ends."""
        if not len(at):
            return
        sizes = sizes + (sizes & 1)
        upper = self._words[pages * (self._size // 2) + 7].astype(np.int64)
        if (sizes == sizes[0]).all():  # places of one size, counted from the end: each taken once
            size = int(sizes[0])
            before = np.cumsum(counts) - counts
            place = np.repeat((pages + 1) * self._size + before * size, counts) - at
            fits = (counts * size == self._size - upper).all() and not (place % size).any()
            taken = np.zeros(len(at) + 1, np.bool_)
            taken[np.minimum(place // size, len(at))] = True
            if not fits or not taken[1:].all():
                raise Damaged("nodes overlap, or leave room")
            return
        order = np.argsort(at)
        begins, ends = at[order], (at + sizes)[order]
        opens = np.ones(len(at), np.bool_)
        opens[1:] = begins[1:] // self._size != begins[:-1] // self._size
        closes = np.append(opens[1:], True)
        if (
            not np.array_equal(begins[opens], np.sort(pages * self._size + upper))
            or (ends[closes] != (begins[closes] // self._size + 1) * self._size).any()
            or (ends[:-1] != begins[1:])[~opens[1:]].any()
        ):
            raise Damaged("nodes overlap, or leave room")

    def _gather(self, at: Numbers, kind: "np.dtype[Any]") -> npt.NDArray[Any]:
        """What lies at these (even) places."""
        count = max(len(self._data) - kind.itemsize, 0) // 2 + 1
        if len(at) and at.max() + kind.itemsize > len(self._data):
            raise Damaged("a node lies outside the file")
        whole = np.dtype((np.void, kind.itemsize)) if kind.names else kind  # copied in one piece
        places = np.ndarray((count,), whole, self._data.data, strides=(2,))
        found: npt.NDArray[Any] = places[at >> 1].view(kind)
        return found


def claimed_bytes(path: str) -> int:
    """How long the last commit says that the file is.  Raises Damaged, and OSError."""
    with open(path, "rb", buffering=0) as file:
        size, last = _last_commit(file.read(1 << 16))
    return (int(last["last"]) + 1) * size


def _check_empty(tree: Any) -> None:
    told = [tree[name] for name in ("depth", "branches", "leaves", "overflows", "entries")]
    if tree["root"] != _NONE or any(told):
        raise Damaged("a tree that should be empty")


def _check_order(keys: Keys, starts: Numbers, low: Keys) -> None:
    """Keys ascend, and looking one up leads to its leaf."""
    if not less(keys[:-1], keys[1:]).all():
        raise Damaged("keys are not in order")
    if less(keys[starts], low).any() or not less(keys[starts[1:] - 1], low[1:]).all():
        raise Damaged("keys lie on other pages than where they are looked for")


def _last_commit(head: bytes) -> tuple[int, Any]:
    """(bytes of a page, what the last commit left), from the beginning of the file."""
    found: list[Any] = []
    size = 0
    for number in range(2):
        block = head[number * size :][: _FIRST.itemsize]
        if len(block) < _FIRST.itemsize:
            raise Damaged("the file is shorter than two pages")
        left = np.frombuffer(block, _FIRST)[0]
        size = int(left["free"]["pad"])
        told = [int(left[name]) for name in ("number", "kind", "magic", "version")]
        if told != [number, _META, _MAGIC, _VERSION]:
            raise Damaged("the file does not begin as one of LMDB")
        if size & (size - 1) or not 512 <= size <= 1 << 15:
            raise Damaged(f"pages of {size} bytes")
        if left["free"]["flags"] & 0x7F != _INTEGER_KEYS or left["last"] >= 1 << 40:
            raise Damaged("an impossible description")
        found.append(left)
    if found[0]["free"]["pad"] != size:
        raise Damaged("pages of two sizes")
    commits = [int(left["commit"]) for left in found]
    later = int(commits[1] > commits[0])
    if commits[later] & 1 != later:
        raise Damaged("a commit on the wrong page")
    return size, found[later]


def _fill(file: Any, view: memoryview) -> int:
    done = 0
    while done < view.nbytes and (got := file.readinto(view[done : done + (1 << 30)])):
        done += got
    return done
