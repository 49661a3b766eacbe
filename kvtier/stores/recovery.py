"""Bringing a store's index into a state that can be trusted, before anything opens it.

A clean close leaves a mark with a digest of the index.  Without it, or when the digest differs,
the index is inspected in a child process and replaced by a sound compact copy; if that fails it is
set aside and built anew from the slots' headers, keeping what still hangs together.  What is
replaced leaves its lock file too, so that readers of the old file keep to themselves.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import xxhash

from kvtier.errors import StoreError
from kvtier.stores.directory import INDEX_BASE, INDEX_ROW, Names
from kvtier.stores.files import BLOCK, FileIO, aligned, read_file, write_file
from kvtier.stores.index import Counters, Found, Index, Rows, newer
from kvtier.stores.pages import IndexFile
from kvtier.stores.record import STORED, Header, Row, unpack_header
from kvtier.stores.scan import NEWER, SOUND, Verdict
from kvtier.stores.slabs import BATCH, Slabs, SlotIO

__all__ = ["Inspect", "Mark", "is_clean", "read_mark", "rebuild", "recover", "write_mark"]

log = logging.getLogger("kvtier")

Inspect = Callable[[str, bytes, str | None], Verdict]
INDEX = "index.mdb"
SET_ASIDE = "index.bad"
_SPARE = "index.new"
_MARK = "clean"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a clean close leaves behind."""

    used: int
    """Bytes of the index that hold data."""
    digest: str
    records: int
    checkpoints: int
    payload_bytes: int


def read_mark(names: Names) -> Mark | None:
    """The mark of a clean close; None where there is none, or it is damaged."""
    data = read_file(names.file(_MARK)) or b""
    text, _, check = data.rpartition(b"\n")
    if xxhash.xxh3_64_hexdigest(text).encode() != check:
        return None
    try:
        return Mark(**json.loads(text))
    except (ValueError, TypeError):
        return None


def write_mark(io: FileIO, names: Names, mark: Mark) -> None:
    """Cut a closed index to what it uses, and leave the mark; ``digest`` is filled in here."""
    fd = io.open(names.file(INDEX), os.O_RDWR)
    try:
        io.truncate(fd, mark.used)
        io.sync(fd)
    finally:
        os.close(fd)
    mark = replace(mark, digest=_digest(names.file(INDEX), mark.used))
    io.point("close:digest")
    text = json.dumps(asdict(mark)).encode()
    write_file(io, names.file(_MARK), text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode())


def remove_mark(io: FileIO, names: Names) -> None:
    """From here on the store counts as not cleanly closed."""
    if os.path.exists(names.file(_MARK)):
        io.unlink(names.file(_MARK))
        io.sync_directory(names.directory)


def is_clean(names: Names) -> bool:
    """Whether the index is byte for byte what a clean close left."""
    mark = read_mark(names)
    if mark is None:
        return False
    try:
        return _digest(names.file(INDEX), mark.used) == mark.digest
    except OSError:
        return False


def _digest(path: str, size: int) -> str:
    """Hex digest of the first ``size`` bytes; of fewer where the file is shorter."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while size > 0 and (data := file.read(min(size, 1 << 22))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def recover(
    io: FileIO, names: Names, store: bytes, slabs: Slabs, map_bytes: int, inspect: Inspect
) -> Rows | None:
    """Afterwards the index is sound, or there is none (a new store).

    Returns its rows where they have been read already.  Call with the gate held.  Raises
    StoreError for a newer format.
    """
    index = names.file(INDEX)
    _unlink_index(io, names.file(_SPARE))
    if not os.path.exists(index):
        if slabs.allocated:
            log.warning("kvtier disk: %s has no index; rebuilding it", names.directory)
            rebuild(io, names, store, slabs, map_bytes)
        return None
    if is_clean(names):
        return _rows_of(index)
    io.unlink(names.file(SET_ASIDE))  # the spare room is needed for the copy
    verdict = inspect(index, store, names.file(_SPARE))
    if verdict.status == NEWER:
        _unlink_index(io, names.file(_SPARE))
        raise newer(index, int(verdict.detail))
    if verdict.status == SOUND:
        _install(io, names)
        return verdict.rows
    log.warning(
        "kvtier disk: the index of %s is damaged (%s); it is kept as %s and rebuilt",
        names.directory,
        verdict.detail,
        SET_ASIDE,
    )
    io.unlink(names.file(_SPARE))
    io.unlink(index + "-lock")
    io.replace(index, names.file(SET_ASIDE))
    io.sync_directory(names.directory)
    io.point("recover:set aside")
    rebuild(io, names, store, slabs, map_bytes)
    return None


def _rows_of(index: str) -> Rows | None:
    """Rows of an index that is byte for byte what was left, and so needs no further look."""
    try:
        return IndexFile(index).read(compact=False)[0]
    except (ValueError, OSError, MemoryError):  # the index itself will tell, a part at a time
        return None


def compact(io: FileIO, names: Names, store: bytes, inspect: Inspect) -> None:
    """Replace a closed index by a copy without reserve.  Raises StoreError if that fails."""
    verdict = inspect(names.file(INDEX), store, names.file(_SPARE))
    if verdict.status != SOUND:
        _unlink_index(io, names.file(_SPARE))
        raise StoreError(f"{names.file(INDEX)} cannot be compacted: {verdict.detail}")
    _install(io, names)


def _install(io: FileIO, names: Names) -> None:
    """The spare index, whole and durable, becomes the index."""
    io.point("recover:spare ready")
    io.unlink(names.file(_SPARE) + "-lock")
    io.unlink(names.file(INDEX) + "-lock")
    io.replace(names.file(_SPARE), names.file(INDEX))
    io.sync_directory(names.directory)
    io.point("recover:installed")


def _unlink_index(io: FileIO, path: str) -> None:
    io.unlink(path)
    io.unlink(path + "-lock")


def rebuild(io: FileIO, names: Names, store: bytes, slabs: Slabs, map_bytes: int) -> None:
    """A new index from what the slots say of themselves.

    Payload is not read: a torn one is found when it is wanted.  Records deleted earlier whose
    slots were not written since come back, unless the store was empty in between; they are still
    what their keys say.
    """
    headers = _headers(slabs, store)
    records = _connected(_whole(headers))
    # Also of those that are not whole: what is written from now on is later than all of them.
    counters = Counters(seq=max((header.seq for _, header in headers), default=0))
    # Where the limit was lowered there may be more records than it has rows for; they go later.
    map_bytes = max(map_bytes, INDEX_BASE + slabs.allocated * INDEX_ROW)
    spare = Index(io, names.file(_SPARE), map_bytes, store, write=True)
    try:
        spare.fill(records, counters)
    finally:
        spare.close()
    _install(io, names)
    log.warning("kvtier disk: %d records of %s found again", len(records), names.directory)


def _headers(slabs: Slabs, store: bytes) -> list[tuple[int, Header]]:
    found = []
    scratch = aligned(BATCH * BLOCK)
    nothing = memoryview(bytearray())
    for start in range(0, slabs.allocated, BATCH):
        count = min(BATCH, slabs.allocated - start)
        blocks = [scratch[i * BLOCK : (i + 1) * BLOCK] for i in range(count)]
        items = [SlotIO(start + i, block, nothing) for i, block in enumerate(blocks)]
        for item, ok in zip(items, slabs.read(items), strict=True):
            header = unpack_header(item.header, store) if ok else None
            if header is not None:
                found.append((item.slot, header._replace(tokens=b"")))
    return found


def _whole(headers: list[tuple[int, Header]]) -> dict[bytes, Found]:
    """The latest life of each key of which every slot is there and agrees."""
    lives: dict[tuple[bytes, int], dict[int, tuple[int, Header]]] = {}
    for slot, header in headers:
        lives.setdefault((header.key, header.seq), {})[header.part] = (slot, header)
    records: dict[bytes, Found] = {}
    for (key, seq), parts in lives.items():
        first = parts.get(0)
        if first is None:
            continue
        _, head = first
        same = {part._replace(part=0, stored=0, codec=0) for _, part in parts.values()}
        if len(same) != 1 or sorted(parts) != list(range(head.frames)):
            continue
        if key in records and records[key][0].seq > seq:
            continue
        slots = [parts[i][0] for i in range(head.frames)]
        blocks = max(-(-part.stored // BLOCK) for _, part in parts.values())
        records[key] = (
            Row(
                key=key,
                parent=head.parent,
                checksum=head.checksum,
                tick=head.tick,
                seq=seq,
                size=head.size,
                depth=head.depth,
                children=0,
                slot=slots[0],
                blocks=blocks,
                frames=head.frames,
                checkpoint=head.checkpoint,
                state=STORED,
            ),
            slots,
        )
    return records


def _connected(records: dict[bytes, Found]) -> list[Found]:
    """Those that hang on a first page through records that are there, in key order."""
    children: dict[bytes, int] = {}
    kept: dict[bytes, Found] = {}
    for row, slots in sorted(records.values(), key=lambda found: found[0].order):
        if not row.is_root:
            if row.parent not in kept:
                continue
            children[row.parent] = children.get(row.parent, 0) + 1
        kept[row.key] = (row, slots)
    return [
        (row._replace(children=children.get(key, 0)), slots)
        for key, (row, slots) in sorted(kept.items())
    ]
