"""Bytes on disk: the row of a record in the index, and the header of each of its slots.

A slot is one block of header and one frame of payload.  The header repeats everything the index
knows of the record and its page's tokens, so that the index can be rebuilt from the slots alone
and a slot that belongs to another record is recognised.  Pure encoding; no files.
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import StoreError
from kvtier.stores.files import BLOCK

__all__ = [
    "FORMAT",
    "MAX_TOKEN_BYTES",
    "ROW",
    "Header",
    "Row",
    "halves",
    "less",
    "pack_header",
    "pack_more",
    "pack_row",
    "row_checks",
    "slot_bytes",
    "store_id",
    "unpack_header",
    "unpack_more",
    "unpack_row",
]

FORMAT = 1
"""Raised whenever older code would misread what newer code writes."""

_PRIME = 2**27 - 39
_AT_ONCE = 1 << 13
"""Rows checked at once: as many as stay in a processor's own memory."""
RAW, ZSTD = 0, 1
STORED, QUARANTINED = 0, 1

_ROW = struct.Struct("<16s16s16sQQQIIIIHBBI")
ROW = np.dtype(
    [
        ("key", "V16"),
        ("parent", "V16"),
        ("checksum", "V16"),
        ("tick", "<u8"),
        ("seq", "<u8"),
        ("size", "<u8"),
        ("depth", "<u4"),
        ("children", "<u4"),
        ("slot", "<u4"),
        ("blocks", "<u4"),
        ("frames", "<u2"),
        ("checkpoint", "u1"),
        ("state", "u1"),
        ("check", "<u4"),
    ]
)
assert ROW.itemsize == _ROW.size

_HEADER = struct.Struct("<8sI16s16s16s16sQQQIIHHHBB")
_MAGIC = b"KVTSLOT\0"
_TOKENS = 128
_DIGEST = BLOCK - 16
MAX_TOKEN_BYTES = 2048


class Row(NamedTuple):
    """One record as the index keeps it."""

    key: bytes
    parent: bytes
    checksum: bytes
    """xxh3-128 over the payload."""
    tick: int
    seq: int
    """Number of the publish that wrote it; tells two lives of one key apart."""
    size: int
    depth: int
    children: int
    """Records whose parent this is."""
    slot: int
    """Its first slot; those of its other frames are kept beside."""
    blocks: int
    """Payload blocks to read per slot, at most."""
    frames: int
    checkpoint: int
    state: int

    @property
    def is_root(self) -> bool:
        """A first page: it hangs on no record."""
        return self.depth == 1 and not self.checkpoint

    @property
    def order(self) -> tuple[int, int]:
        """Ascending in this order, parents come before what hangs on them."""
        return self.depth, self.checkpoint


class Header(NamedTuple):
    """What a slot says of itself."""

    key: bytes
    parent: bytes
    checksum: bytes
    seq: int
    tick: int
    size: int
    depth: int
    stored: int
    """Payload bytes in this slot, as stored."""
    part: int
    """Which of the record's frames this is."""
    frames: int
    checkpoint: int
    codec: int
    tokens: bytes


def slot_bytes(frame_bytes: int) -> int:
    """Bytes of one slot: a header block, and the frame rounded up to blocks."""
    return BLOCK + -(-frame_bytes // BLOCK) * BLOCK


def store_id(fingerprint: bytes, rank: int, world: int, frame_bytes: int) -> bytes:
    """16 bytes in every slot: one moved here from another store is foreign."""
    text = b"kvtier-store\0%d\0%d\0%d\0" % (rank, world, frame_bytes)
    return hashlib.blake2b(text + fingerprint, digest_size=16).digest()


def _check(body: bytes) -> int:
    """The bytes, read as one number, modulo a prime: no flip of one bit goes unnoticed, and a
    million rows are checked at once in a tenth of a second."""
    return int.from_bytes(body, "little") % _PRIME


def pack_row(row: Row) -> bytes:
    body = _ROW.pack(*row, 0)[:-4]
    return body + _check(body).to_bytes(4, "little")


def unpack_row(data: bytes) -> Row | None:
    """The row, or None where its own check fails."""
    if len(data) != _ROW.size:
        return None
    fields = _ROW.unpack(data)
    if fields[-1] != _check(data[:-4]):
        return None
    return Row(*fields[:-1])


def row_checks(rows: npt.NDArray[np.void]) -> bool:
    """Whether every row passes its own check."""
    words = np.ascontiguousarray(rows).view("<u4").reshape(-1, ROW.itemsize // 4)
    weights = [np.uint64(pow(2, 32 * i, _PRIME)) for i in range(words.shape[1] - 1)]
    for at in range(0, len(words), _AT_ONCE):
        columns = words[at : at + _AT_ONCE].T.astype(np.uint64, order="C")
        total = columns[0].copy()  # 23 products of 32 and 27 bits fit
        for column, weight in zip(columns[1:-1], weights[1:], strict=True):
            column *= weight
            total += column
        if not np.array_equal(total % np.uint64(_PRIME), columns[-1]):
            return False
    return True


def halves(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """(keys, 2): 16-byte keys as two numbers each, which compare as the keys do."""
    return np.ascontiguousarray(keys).view(">u8").reshape(-1, 2).astype(np.uint64)


def less(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which of the keys ``a``, given as halves, come before those of ``b``."""
    before: npt.NDArray[np.bool_] = (a[:, 0] == b[:, 0]) & (a[:, 1] < b[:, 1])
    before |= a[:, 0] < b[:, 0]
    return before


def pack_more(slots: list[int]) -> bytes:
    """The slots after the first, of a record of several frames."""
    body = struct.pack(f"<{len(slots)}I", *slots)
    return body + _check(body).to_bytes(4, "little")


def unpack_more(data: bytes) -> list[int] | None:
    """The slots, or None where their check fails."""
    body = data[:-4]
    if not body or len(body) % 4 or _check(body) != int.from_bytes(data[-4:], "little"):
        return None
    return list(struct.unpack(f"<{len(body) // 4}I", body))


def pack_header(block: memoryview, store: bytes, header: Header) -> None:
    """Fill a block of ``BLOCK`` bytes."""
    tokens = header.tokens
    if len(tokens) > MAX_TOKEN_BYTES:
        raise StoreError(f"a page of {len(tokens)} token bytes; at most {MAX_TOKEN_BYTES} fit")
    _HEADER.pack_into(
        block,
        0,
        _MAGIC,
        FORMAT,
        store,
        header.key,
        header.parent,
        header.checksum,
        header.seq,
        header.tick,
        header.size,
        header.depth,
        header.stored,
        header.part,
        header.frames,
        len(tokens),
        header.checkpoint,
        header.codec,
    )
    block[_HEADER.size : _TOKENS] = bytes(_TOKENS - _HEADER.size)
    block[_TOKENS : _TOKENS + len(tokens)] = tokens
    block[_TOKENS + len(tokens) : _DIGEST] = bytes(_DIGEST - _TOKENS - len(tokens))
    block[_DIGEST:] = xxhash.xxh3_128_digest(block[:_DIGEST])


def unpack_header(block: memoryview, store: bytes) -> Header | None:
    """What the slot says, or None where it is torn, of another store or of another format."""
    if block[:8] != _MAGIC or block[_DIGEST:] != xxhash.xxh3_128_digest(block[:_DIGEST]):
        return None
    fields = _HEADER.unpack_from(block)
    if fields[1] != FORMAT or fields[2] != store:
        return None
    *known, length, checkpoint, codec = fields[3:]
    tokens = bytes(block[_TOKENS : _TOKENS + length])
    return Header._make([*known, checkpoint, codec, tokens])
