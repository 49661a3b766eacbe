"""The disk tier: where payloads should live, how close it comes to a raw file, what opening costs.

Everything is durable: a group of pages counts as written when it would survive a power cut.  At
each size the contenders run side by side, in turn, on the same directory:

* ``raw``: a preallocated file, direct I/O, a write per page, one fdatasync per group;
* ``slabs``: ``LmdbStore`` (slab files beside an LMDB index);
* ``values``: payloads as LMDB values, one synchronous transaction per group.

``waiting``: so many groups are there at once.  ``slabs`` gets them as the cache passes them on, in
one publish; to the others each is a durable group of its own, as before.

The baseline of every rate is ``raw`` at the same queue depth: pages written or read by as many
threads at once.  ``run`` works under ``build`` in the current directory unless told otherwise.
"""

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import xxhash

from benchmarks.harness import Param, Result, summarise
from kvtier.seams import Read, Record
from kvtier.stores import LmdbStore
from kvtier.stores.index import Counters
from kvtier.stores.record import Row

FINGERPRINT = b"benchmark-store!"
SIZES = {64 << 10: "64 KiB", 1 << 20: "1 MiB", 4 << 20: "4 MiB"}
GROUPS = {64 << 10: (16, 64), 1 << 20: (16,), 4 << 20: (16,)}
"""Page size -> pages per durable group."""
WAITING = 4
"""Groups that wait, where that is tried: of groups smaller than what is worth a publish."""
SMALL = 8 << 20


def run(quick: bool, where: str | None = None) -> list[Result]:
    """All results; leaves nothing behind."""
    results: list[Result] = []
    with _directory(where) as root:
        for size, label in SIZES.items():
            for group in GROUPS[size]:
                times = min(((128 if quick else 1024) << 20) // (size * group), 12 if quick else 60)
                times = max(times - times % WAITING, WAITING)
                results += _payload(root, size, label, group, times)
        results += _checksum(4 << 20)
        results += _codec(quick)
        results += _opening(root, 100_000 if quick else 1_000_000)
    return results


@contextmanager
def _directory(where: str | None) -> Iterator[str]:
    if where is None:
        where = "build"  # not in version control
        os.makedirs(where, exist_ok=True)
    root = tempfile.mkdtemp(prefix="kvtier-bench-", dir=where)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Pages:
    """Pages of random bytes in page-aligned memory, and as many frames to read into."""

    def __init__(self, size: int, group: int, groups: int) -> None:
        memory = memoryview(mmap.mmap(-1, size * group))
        memory[:] = np.random.default_rng(0).bytes(size * group)
        self.sources = [memory[i * size : (i + 1) * size] for i in range(group)]
        target = memoryview(mmap.mmap(-1, size * group))
        target[:] = bytes(size * group)
        self.targets = [target[i * size : (i + 1) * size] for i in range(group)]
        self.group = group
        self.checks = [xxhash.xxh3_128_digest(view) for view in self.sources]
        self.size = size
        self.groups = groups

    def key(self, group: int, i: int) -> bytes:
        return xxhash.xxh3_128_digest(b"%d/%d" % (group, i))


class _Raw:
    def __init__(self, path: str, pages: _Pages, depth: int) -> None:
        self.pages, self.pool = pages, ThreadPoolExecutor(depth)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self.fd, 0, pages.size * pages.group * pages.groups)

    def write(self, group: int) -> None:
        base = group * self.pages.group
        list(self.pool.map(lambda i: self._write(base + i, i), range(self.pages.group)))
        os.fdatasync(self.fd)

    def _write(self, at: int, i: int) -> None:
        os.pwrite(self.fd, self.pages.sources[i], at * self.pages.size)

    def write_all(self, groups: range) -> None:
        for group in groups:
            self.write(group)

    def read(self, group: int) -> None:
        base = group * self.pages.group
        list(self.pool.map(lambda i: self._read(base + i, i), range(self.pages.group)))

    def _read(self, at: int, i: int) -> None:
        os.preadv(self.fd, [self.pages.targets[i]], at * self.pages.size)

    def forget(self, group: int) -> None:
        """Written over in place."""

    def close(self) -> None:
        self.pool.shutdown()
        os.close(self.fd)


class _Slabs:
    def __init__(self, path: str, pages: _Pages, depth: int) -> None:
        self.pages, self.depth = pages, depth
        self.pool = ThreadPoolExecutor(depth)
        room = (pages.size + 8192) * pages.group * (pages.groups + 1) + (8 << 20)
        self.store = LmdbStore(
            path, fingerprint=FINGERPRINT, frame_bytes=pages.size, limit_bytes=room
        )

        self.records = [self._records(group) for group in range(pages.groups)]
        # One stays: a store that becomes empty gives its files back.
        self.store.put_group(self._records(pages.groups)[:1])

    def _records(self, group: int) -> list[Record]:
        pages = self.pages
        keys = [bytes(16), *(pages.key(group, i) for i in range(self.pages.group))]
        return [
            Record(
                key=keys[i + 1],
                parent=keys[i],
                depth=i + 1,
                component="history",
                tokens=bytes(1024),
                payload=(pages.sources[i],),
                checksum=pages.checks[i],
                size=pages.size,
            )
            for i in range(self.pages.group)
        ]

    def write(self, group: int) -> None:
        self.store.put_group(self.records[group])

    def write_all(self, groups: range) -> None:
        self.store.put_group([record for group in groups for record in self.records[group]])

    def read(self, group: int) -> None:
        step = (
            self.pages.group // self.depth
        )  # each thread takes neighbours, as the cache's threads do
        parts = [range(at, at + step) for at in range(0, self.pages.group, step)]
        done = list(self.pool.map(lambda part: self._read(group, part), parts))
        assert all(done), "a page came back damaged"

    def _read(self, group: int, part: Sequence[int]) -> bool:
        targets, size = self.pages.targets, self.pages.size
        records = self.records[group]
        reads = [
            Read(records[i].key, records[i].parent, records[i].tokens, (targets[i],), size)
            for i in part
        ]
        return all(self.store.read_into(reads))

    def forget(self, group: int) -> None:
        self.store.delete([self.pages.key(group, i) for i in range(self.pages.group)])

    def close(self) -> None:
        self.pool.shutdown()
        self.store.close()


class _Values:
    def __init__(self, path: str, pages: _Pages, depth: int) -> None:
        self.pages, self.depth = pages, depth
        self.pool = ThreadPoolExecutor(depth)
        room = 2 * pages.size * pages.group * pages.groups + (64 << 20)
        self.env = lmdb.open(path, subdir=False, map_size=room)

    def write(self, group: int) -> None:
        with self.env.begin(write=True) as txn:
            for i in range(self.pages.group):
                txn.put(self.pages.key(group, i), self.pages.sources[i])

    def write_all(self, groups: range) -> None:
        for group in groups:
            self.write(group)

    def read(self, group: int) -> None:
        list(self.pool.map(lambda i: self._read(group, i), range(self.pages.group)))

    def _read(self, group: int, i: int) -> None:
        with self.env.begin(buffers=True) as txn:
            data = txn.get(self.pages.key(group, i))
            assert data is not None, "a page is missing"
            self.pages.targets[i][:] = memoryview(data)

    def forget(self, group: int) -> None:
        """Written over in place."""

    def close(self) -> None:
        self.pool.shutdown()
        self.env.close()


_Contender = _Raw | _Slabs | _Values
_CONTENDERS: dict[str, Callable[[str, _Pages, int], _Contender]] = {
    "raw": _Raw,
    "slabs": _Slabs,
    "values": _Values,
}


def _payload(root: str, size: int, label: str, group_size: int, groups: int) -> list[Result]:
    """Write and read rates; the contenders take turns, group by group, so that what the machine
    does besides falls on all of them alike."""
    results = []
    for depth in (1, 4):
        pages = _Pages(size, group_size, groups)
        paths = {
            name: os.path.join(root, f"{name}-{size}-{group_size}-{depth}") for name in _CONTENDERS
        }
        contenders = {name: make(paths[name], pages, depth) for name, make in _CONTENDERS.items()}
        passes = [("first", 1), ("again", 1)]
        if size * group_size < SMALL:
            passes.append(("again", WAITING))
        for space, waiting in passes:
            if space == "again":  # where others were before
                for group in range(groups):
                    for contender in contenders.values():
                        contender.forget(group)
            rates = _in_turn(contenders, groups, pages, "write", waiting)
            queue = {} if waiting == 1 else {"waiting": waiting}
            results += _compare(
                "store_write",
                rates,
                page=label,
                group=group_size,
                depth=depth,
                space=space,
                **queue,
            )
        _forget_cached(root)
        contenders["values"].close()  # what is mapped cannot be dropped from memory
        _forget_cached(root)
        contenders["values"] = _Values(paths["values"], pages, depth)
        rates = _in_turn(contenders, groups, pages, "read")
        results += _compare("store_read", rates, page=label, group=group_size, depth=depth)
        for name, contender in contenders.items():
            contender.close()
            shutil.rmtree(paths[name], ignore_errors=True)
        for leftover in Path(root).glob(f"*-{size}-*"):
            leftover.unlink()
    return results


def _in_turn(
    contenders: Mapping[str, _Contender], groups: int, pages: _Pages, verb: str, waiting: int = 1
) -> dict[str, list[float]]:
    """GB/s of each group, or of so many that wait, of each contender."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn, group in enumerate(range(0, groups - waiting + 1, waiting)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            contender = contenders[name]
            began = time.perf_counter()
            if verb == "read":
                contender.read(group)
            elif waiting == 1:
                contender.write(group)
            else:
                contender.write_all(range(group, group + waiting))
            size = pages.size * pages.group * waiting
            rates[name].append(size / (time.perf_counter() - began) / 1e9)
    return rates


def _compare(what: str, rates: Mapping[str, list[float]], **params: Param) -> list[Result]:
    base = float(np.median(rates["raw"]))
    found = []
    for name, samples in rates.items():
        result = summarise(what, samples, unit="GB/s", params={**params, "place": name})
        found.append(result if name == "raw" else result.against(base))
    return found


def _forget_cached(root: str) -> None:
    """Let the kernel drop the files' pages, so that reads come from the medium."""
    for where, _, files in os.walk(root):
        for name in files:
            fd = os.open(os.path.join(where, name), os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _checksum(size: int) -> list[Result]:
    """What verification costs, beside what reading alone takes."""
    data = memoryview(np.random.default_rng(1).bytes(size * 32))
    samples = []
    for i in range(32):
        began = time.perf_counter()
        xxhash.xxh3_128_digest(data[i * size : (i + 1) * size])
        samples.append(size / (time.perf_counter() - began) / 1e9)
    return [summarise("store_checksum", samples, unit="GB/s", params={"page": "4 MiB"})]


def _codec(quick: bool) -> list[Result]:
    """zstd on bytes shaped like KV: bfloat16 of a normal distribution, and fp8-like bytes."""
    import zstandard

    rng = np.random.default_rng(2)
    count = 1 << (19 if quick else 21)
    wide = rng.standard_normal(count, dtype=np.float32)
    kinds = {
        "bf16": (wide.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "fp8": np.clip(wide * 40 + 128, 0, 255).astype(np.uint8).tobytes(),
    }
    results = []
    for kind, data in kinds.items():
        for level in (1, 3):
            pack, unpack = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
            packing, unpacking = [], []
            packed = b""
            for _ in range(5):
                began = time.perf_counter()
                packed = pack.compress(data)
                packing.append(len(data) / (time.perf_counter() - began) / 1e9)
                began = time.perf_counter()
                unpack.decompress(packed)
                unpacking.append(len(data) / (time.perf_counter() - began) / 1e9)
            params = {"bytes": kind, "level": level}
            results += [
                summarise("zstd_pack", packing, unit="GB/s", params=params),
                summarise("zstd_unpack", unpacking, unit="GB/s", params=params),
                summarise(
                    "zstd_size", [100 * len(packed) / len(data)], unit="% of raw", params=params
                ),
            ]
    return results


_OPEN = """
import sys, time
from kvtier.stores import LmdbStore
began = time.perf_counter()
store = LmdbStore(sys.argv[1], fingerprint=sys.argv[2].encode(), frame_bytes=4096,
                  limit_bytes=int(sys.argv[3]))
entries = store.scan()
print(time.perf_counter() - began, len(entries), entries.nbytes / max(len(entries), 1))
store._abandon() if sys.argv[4] == "kill" else store.close()
"""


def _opening(root: str, count: int) -> list[Result]:
    """Opening and scanning ``count`` records, after a clean close and after a kill."""
    path = os.path.join(root, "opening")
    limit = count * 9600 + (16 << 20)
    _fill(path, count, limit)
    results = []
    for after in ("close", "kill"):
        samples = []
        for _ in range(5):
            command = [sys.executable, "-c", _OPEN, path, FINGERPRINT.decode(), str(limit), after]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seconds, found, _ = (float(word) for word in said.split())
            assert int(found) == count, f"{found} of {count} records came back"
            samples.append(seconds)
        # The first open after a change of mode follows the other kind of end.
        results.append(
            summarise(
                "store_open_s", samples[1:], unit="s", params={"pages": count, "after": after}
            )
        )
    return results


def _fill(path: str, count: int, limit: int) -> None:
    """A store of ``count`` records, in chains of 64 pages, whose payload was never written."""
    store = LmdbStore(path, fingerprint=FINGERPRINT, frame_bytes=4096, limit_bytes=limit)
    slab = store._slabs
    fd = os.open(slab.path(0), os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, count * slab.slot_bytes)  # sparse: no room is needed for it
    os.close(fd)
    keys = [xxhash.xxh3_128_digest(b"%d" % i) for i in range(count)]
    found = []
    for i, key in enumerate(keys):
        depth = i % 64 + 1
        last = depth == 64 or i == count - 1
        row = Row(
            key=key,
            parent=keys[i - 1] if depth > 1 else bytes(16),
            checksum=key,
            tick=i // 64,
            seq=1,
            size=4096,
            depth=depth,
            children=0 if last else 1,
            slot=i,
            blocks=1,
            frames=1,
            checkpoint=0,
            state=0,
        )
        found.append((row, [i]))
    found.sort(key=lambda at: at[0].key)
    store._index.fill(found, Counters(seq=1))
    store.close()
