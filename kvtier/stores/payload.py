"""Records to slots and back: headers, codec and verification; the bytes themselves go through
``Slabs``.  Knows nothing of transactions.
"""

import threading
from collections.abc import Iterator, Sequence
from enum import Enum

import xxhash

from kvtier.errors import StoreError
from kvtier.seams import Read, Record
from kvtier.stores.codec import Codec
from kvtier.stores.files import BLOCK, aligned
from kvtier.stores.index import Found
from kvtier.stores.record import (
    MAX_TOKEN_BYTES,
    RAW,
    STORED,
    ZSTD,
    Header,
    Row,
    pack_header,
    unpack_header,
)
from kvtier.stores.slabs import BATCH, Slabs, SlotIO

__all__ = ["PayloadReader", "PayloadWriter", "Verdict"]


class Verdict(Enum):
    """What reading a record came to."""

    GOOD = "good"
    BAD = "bad"
    OTHER = "other"
    """Sound, but of other tokens: two prefixes with one key."""


def _parts(views: Sequence[memoryview], size: int) -> Iterator[memoryview]:
    """The used part of each frame."""
    for view in views:
        flat = view if view.ndim == 1 and view.format == "B" else view.cast("B")
        used = min(flat.nbytes, size)
        yield flat[:used]
        size -= used


class _Headers:
    """Aligned header blocks, one set per thread, as many as were ever needed at once."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, count: int) -> list[memoryview]:
        held: list[memoryview] = getattr(self._local, "blocks", [])
        if len(held) < count:
            memory = aligned(max(count, BATCH) * BLOCK)
            held = [memory[at : at + BLOCK] for at in range(0, memory.nbytes, BLOCK)]
            self._local.blocks = held
        return held[:count]


class PayloadWriter:
    """Writes records to slots.  One thread at a time."""

    def __init__(self, slabs: Slabs, store: bytes, frame_bytes: int, codec: Codec) -> None:
        self._slabs = slabs
        self._store = store
        self._frame_bytes = frame_bytes
        self._codec = codec
        self._headers = _Headers()

    def check(self, record: Record) -> None:
        """Raise StoreError for a record of a form that could not be read back."""
        frames = len(record.payload)
        fits = (frames - 1) * self._frame_bytes < record.size <= frames * self._frame_bytes
        whole = all(view.nbytes == self._frame_bytes for view in record.payload[:-1])
        held = sum(view.nbytes for view in record.payload)
        if not frames or not fits or not whole or held < record.size:
            raise StoreError(
                f"record {record.key.hex()}: {record.size} bytes in {frames} frames of "
                f"{[view.nbytes for view in record.payload[:4]]} bytes; this store's frames have "
                f"{self._frame_bytes}"
            )
        if len(record.key) != 16 or len(record.parent) != 16 or len(record.checksum) != 16:
            raise StoreError("key, parent and checksum of a record are 16 bytes each")
        if len(record.tokens) > MAX_TOKEN_BYTES:
            raise StoreError(f"a page of {len(record.tokens)} token bytes; {MAX_TOKEN_BYTES} fit")

    def write(
        self, records: Sequence[Record], slots: Sequence[int], *, seq: int, tick: int
    ) -> list[Found]:
        """Write payloads to the slots, in order; returns the rows to publish."""
        rows: list[Found] = []
        items: list[SlotIO] = []
        headers = self._headers.take(BATCH)
        taken = 0
        for record in records:
            own = list(slots[taken : taken + len(record.payload)])
            taken += len(own)
            blocks = 0
            for index, used in enumerate(_parts(record.payload, record.size)):
                payload, stored, codec = self._stored(record, record.payload[index], used)
                blocks = max(blocks, -(-stored // BLOCK))
                header = headers[len(items)]
                pack_header(
                    header, self._store, _header(record, index, stored, codec, seq=seq, tick=tick)
                )
                items.append(SlotIO(own[index], header, payload))
                if len(items) == BATCH:
                    self._slabs.write(items)
                    items = []
            rows.append((_row(record, own[0], blocks, seq=seq, tick=tick), own))
        if items:
            self._slabs.write(items)
        return rows

    def _stored(
        self, record: Record, frame: memoryview, used: memoryview
    ) -> tuple[memoryview, int, int]:
        """(bytes to write, how many of them count, codec)."""
        packed = self._codec.encode(record.component, used)
        if packed is not None:
            return packed, packed.nbytes, ZSTD
        whole = min(-(-used.nbytes // BLOCK) * BLOCK, frame.nbytes)
        return frame.cast("B")[:whole], used.nbytes, RAW


class PayloadReader:
    """Reads records and verifies them.  Thread-safe."""

    def __init__(self, slabs: Slabs, store: bytes, frame_bytes: int, codec: Codec) -> None:
        self._slabs = slabs
        self._store = store
        self._frame_bytes = frame_bytes
        self._codec = codec
        self._headers = _Headers()

    def read(self, wanted: Sequence[tuple[Read, Found]]) -> list[Verdict]:
        """Fill the views; what each came to.  Neighbours on disk are read together."""
        verdicts: list[Verdict] = []
        batch: list[tuple[Read, Found]] = []
        slots = 0
        for read, found in wanted:
            batch.append((read, found))
            slots += found[0].frames
            if slots >= BATCH:
                verdicts += self._read_batch(batch, slots)
                batch, slots = [], 0
        return verdicts + (self._read_batch(batch, slots) if batch else [])

    def _read_batch(self, batch: Sequence[tuple[Read, Found]], slots: int) -> list[Verdict]:
        headers = self._headers.take(slots)
        items: list[SlotIO] = []
        for read, (row, own) in batch:
            for view, slot in zip(read.views, own, strict=True):
                payload = view.cast("B")[: row.blocks * BLOCK]
                items.append(SlotIO(slot, headers[len(items)], payload))
        whole = self._slabs.read(items)
        verdicts = []
        at = 0
        for read, (row, own) in batch:
            end = at + len(own)
            if all(whole[at:end]):
                verdicts.append(self._verify(read, row, items[at:end]))
            else:
                verdicts.append(Verdict.BAD)
            at = end
        return verdicts

    def _verify(self, read: Read, row: Row, items: Sequence[SlotIO]) -> Verdict:
        parts = list(_parts(read.views, row.size))
        tokens = read.tokens
        for index, (item, part) in enumerate(zip(items, parts, strict=True)):
            header = unpack_header(item.header, self._store)
            if header is None or not _belongs(header, row, index):
                return Verdict.BAD
            if header.codec == ZSTD:
                if header.stored > item.payload.nbytes:
                    return Verdict.BAD
                if not self._codec.decode(bytes(item.payload[: header.stored]), part):
                    return Verdict.BAD
            elif header.stored != part.nbytes:
                return Verdict.BAD
            tokens = header.tokens if header.tokens != read.tokens else tokens
        if _checksum(parts) != row.checksum:
            return Verdict.BAD
        return Verdict.GOOD if tokens == read.tokens else Verdict.OTHER


def _checksum(parts: Sequence[memoryview]) -> bytes:
    if len(parts) == 1:
        return bytes(xxhash.xxh3_128_digest(parts[0]))
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return bytes(digest.digest())


def _belongs(header: Header, row: Row, part: int) -> bool:
    return (
        header.key == row.key
        and header.parent == row.parent
        and header.checksum == row.checksum
        and header.seq == row.seq
        and header.size == row.size
        and header.frames == row.frames
        and header.part == part
    )


def _header(record: Record, part: int, stored: int, codec: int, *, seq: int, tick: int) -> Header:
    return Header(
        key=record.key,
        parent=record.parent,
        checksum=record.checksum,
        seq=seq,
        tick=tick,
        size=record.size,
        depth=record.depth,
        stored=stored,
        part=part,
        frames=len(record.payload),
        checkpoint=int(record.component == "checkpoint"),
        codec=codec,
        tokens=record.tokens,
    )


def _row(record: Record, slot: int, blocks: int, *, seq: int, tick: int) -> Row:
    return Row(
        key=record.key,
        parent=record.parent,
        checksum=record.checksum,
        tick=tick,
        seq=seq,
        size=record.size,
        depth=record.depth,
        children=0,
        slot=slot,
        blocks=blocks,
        frames=len(record.payload),
        checkpoint=int(record.component == "checkpoint"),
        state=STORED,
    )
