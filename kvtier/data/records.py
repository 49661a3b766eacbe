"""Moving records: pages and tails into staging and on to the host, and from the host or the disk
back into pages.

Runs on whichever thread calls; knows streams and frames, but not ops, callbacks or queues.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.core.ops import Part
from kvtier.data.arrivals import Arrival
from kvtier.data.batches import (
    Batch,
    Place,
    Sizes,
    by_arena,
    by_sections,
    is_live,
    num_frames,
    page_frames,
    split,
)
from kvtier.data.device import DevicePool, LayerGroup
from kvtier.data.host import HostArena
from kvtier.data.rows import addresses, as_rows, copy_pieces, copy_rows, in_one_call
from kvtier.data.staging import Slots, Staging
from kvtier.data.streams import Event, Fences, Lane, Streams
from kvtier.errors import StoreError
from kvtier.kernels.pack import pack_pages, pack_tails, unpack_pages, unpack_tails
from kvtier.seams import Read, Record, Store
from kvtier.types import Tier

__all__ = [
    "LayerLoad",
    "Loader",
    "Packer",
    "Reader",
    "copy_part",
    "record_of",
]

FIRST_LAYERS_BYTES = 8 << 20
LAYERS_BYTES = 32 << 20
"""Layers that come one after the other do so in groups of at least this size, the first of a few
at least of that, from where it doubles: a group takes the interpreter 0.3 ms, a copy of 8 MB half
as long."""
PIECE_BYTES = 32 << 10
"""Where a layer of a page is smaller than that, pages come whole: a copy of its own costs the
interpreter 0.5 us, in which the engine copies 27 KB."""


def copy_part(pool: DevicePool, part: Part) -> None:
    """Do what a part asks for whose source and target are both on the device."""
    pool.copy(
        part.kind,
        part.src,
        part.dst,
        live_src=is_live(part, source=True),
        live_dst=is_live(part, source=False),
    )


def record_of(sizes: Sizes, host: HostArena, part: Part) -> Record:
    """What a STORE part hands to the store; its payload shares the host frames."""
    size = sizes.of(part)
    return Record(
        key=part.key,
        parent=part.parent,
        depth=part.depth,
        component=part.kind.value,
        tokens=part.tokens,
        payload=host.views(part.src),
        checksum=host.checksum_of(part.src, size),
        size=size,
    )


class Packer:
    """Device to host.  What one thread queues another may wait for."""

    def __init__(
        self, sizes: Sizes, pool: DevicePool, host: HostArena, staging: Staging, streams: Streams
    ) -> None:
        self._sizes = sizes
        self._pool = pool
        self._host = host
        self._staging = staging
        self._streams = streams

    def batch(self, parts: Sequence[Part], slots: npt.NDArray[np.int64]) -> Batch:
        """Parts that are to be packed into these staging slots, as many as each has frames."""
        batch = Batch(self._sizes, self._host, parts, None, source=True)
        batch.where, batch.rows = self._staging.frames, np.sort(slots)
        return batch

    def gather(self, batch: Batch, fences: Fences) -> Event:
        """Pack them; behind the event the sources may be reused."""
        pages, rows, tails = split(batch, source=True)
        for part, held in tails:
            if self._sizes.of(part) > len(held) * self._sizes.frame:
                raise ValueError(f"a tail of {part.src} does not fit {len(held)} frames")
        with self._streams.on(Lane.PACK, fences):
            if len(pages):
                pack_pages(self._pool.history, pages, self._staging.frames, rows)
            for sections, ids, held_by in by_sections(self._pool, tails, source=True):
                pack_tails(sections, ids, self._staging.frames, held_by)
        return self._streams.mark(Lane.PACK)

    def drain(self, batch: Batch, gathered: Event) -> Event:
        """Copy what was gathered to the host frames; behind the event they are whole, and the
        slots are free."""
        self._host.unseal(batch.frames)
        with self._streams.on(Lane.DRAIN, (gathered,)):
            copy_rows(batch.where, batch.rows, self._host.frames, batch.frames, batch.sizes)
        return self._streams.mark(Lane.DRAIN)

    def land(self, drained: Event) -> None:
        """Wait until they are whole."""
        drained.synchronize()

    def sealing(self, parts: Sequence[Part]) -> Callable[[], None]:
        """What is left to do for records that have landed, at any time: note their checksums."""
        records = [(p.dst, self._sizes.of(p), self._host.written(p.dst)) for p in parts]

        def seal() -> None:
            for frames, size, written in records:
                self._host.seal(frames, size, written)

        return seal


class Reader:
    """Disk to host, for one thread: what has no host frame of its own bounces through this
    reader's."""

    def __init__(
        self,
        sizes: Sizes,
        host: HostArena,
        store: Store | None,
        *,
        read_frames: int,
        pinned: torch.device | None,
    ) -> None:
        self._sizes = sizes
        self._host = host
        self._store = store
        # Taken now: memory that is full later must not look like a record that is bad.
        self._bounce = HostArena(
            read_frames if store is not None else 0, host.frame_bytes, pinned=pinned
        )

    def read(self, parts: Sequence[Part]) -> tuple[list[Place], int]:
        """Bring the records into host memory: where each lies, and how many leading ones are
        there, whole and verified.  ``parts`` take at most ``read_frames`` frames.

        Where some bounce the places are good until the next call.  Raises what the store raises.
        """
        if self._store is None and any(part.source is Tier.DISK for part in parts):
            raise StoreError("this cache has no disk tier")
        places = self._places(parts)
        wanted = [i for i, part in enumerate(parts) if part.source is Tier.DISK]
        if not wanted:
            return places, len(parts)
        assert self._store is not None
        reads = []
        for i in wanted:
            arena, frames = places[i]
            arena.unseal(frames)
            part = parts[i]
            size = self._sizes.of(part)
            reads.append(Read(part.key, part.parent, part.tokens, arena.views(frames), size))
        found = self._store.read_into(reads)
        missing = (i for i, good in zip(wanted, found, strict=True) if not good)
        return places, next(missing, len(parts))

    def bounces(self, places: Sequence[Place]) -> bool:
        """Whether some of these records lie in memory that the next ``read`` writes to."""
        return any(arena is self._bounce for arena, _ in places)

    def close(self) -> None:
        self._bounce.close()

    def _places(self, parts: Sequence[Part]) -> list[Place]:
        places: list[Place] = []
        used = 0
        for part in parts:
            if part.source is Tier.GPU:  # nothing of it passes through the host
                places.append((self._host, ()))
            elif part.source is Tier.CPU:
                places.append((self._host, part.src))
            elif part.target is Tier.CPU:
                places.append((self._host, part.dst))
            elif part.via:
                places.append((self._host, part.via))
            else:
                count = self._sizes.frames(part)
                places.append((self._bounce, tuple(range(used, used + count))))
                used += count
        return places


@dataclass(frozen=True, slots=True, eq=False)
class LayerLoad:
    """History pages that come layer by layer."""

    pages: npt.NDArray[np.int64]
    frames: npt.NDArray[np.int64]
    """Host frames of these pages."""
    groups: Sequence[LayerGroup]
    """Some layers at a time."""


class Loader:
    """Host to pages, and what of a RESTORE never leaves the device."""

    def __init__(
        self, sizes: Sizes, pool: DevicePool, landing: Slots, host: HostArena, streams: Streams
    ) -> None:
        self._sizes = sizes
        self._pool = pool
        self._landing = landing
        self._host = host
        self._streams = streams

    def rows(self, parts: Sequence[Part], places: Sequence[Place] | None) -> int:
        """Landing rows that loading these takes."""
        if self._pool.device.type == "cpu":
            return 0
        if places is None:
            return num_frames(parts, source=True)
        return sum(
            len(frames)
            for part, (_, frames) in zip(parts, places, strict=True)
            if part.target is Tier.GPU
        )

    def load(
        self,
        parts: Sequence[Part],
        places: Sequence[Place] | None,
        landing_rows: npt.NDArray[np.int64],
        fences: Fences,
    ) -> Event:
        """Bring the records from host memory (None: from the host frames that are their source)
        into pages and tails; behind the event it is done, and nothing reads the places any more."""
        lower, here = by_arena(self._sizes, self._host, parts, places)
        fetched = self._fetch(lower, landing_rows)
        with self._streams.on(Lane.LOAD, (*fetched, *fences)):
            for it in lower:
                pages, rows, tails = split(it, source=False)
                if len(pages):
                    unpack_pages(self._pool.history, pages, it.where, rows)
                for sections, ids, held_by in by_sections(self._pool, tails, source=False):
                    unpack_tails(sections, ids, it.where, held_by)
            for part in here:
                copy_part(self._pool, part)
        return self._streams.mark(Lane.LOAD)

    def by_layer(self) -> bool:
        """Whether history pages can come layer by layer."""
        sections = self._pool.history.storages
        if self._pool.device.type == "cpu":
            return self._pool.num_layers > 1
        smallest = min(storage.shape[1] for storage in sections)
        return self._pool.num_layers > 1 and smallest >= PIECE_BYTES and in_one_call()

    def layers(self, parts: Sequence[Part]) -> LayerLoad:
        """History pages in host frames as they are to come.  Raises IndexError for what is not
        there: once this has returned only the device can fail."""
        pages = as_rows(page_frames(parts, source=False), self._pool.history.num_pages[0])
        frames = as_rows(page_frames(parts, source=True), self._host.num_frames)
        layers, size = self._pool.num_layers, self._sizes.page * len(parts)
        groups: list[LayerGroup] = []
        start, least = 0, FIRST_LAYERS_BYTES
        while start < layers:
            stop = start + max(1, -(-least * layers // size))
            groups.append(self._pool.layer_group(start, stop))
            start, least = stop, min(2 * least, LAYERS_BYTES)
        return LayerLoad(pages, frames, groups)

    def load_layers(self, load: LayerLoad, group: LayerGroup, fences: Fences) -> Event:
        """Bring some layers from their host frames; behind the event they are there.

        The sections of a page are where they belong after one copy each, with no landing buffer
        that would have to be waited for."""
        frames = self._host.frames
        with self._streams.on(Lane.LOAD, fences):
            if self._pool.device.type == "cpu":
                unpack_pages(group.sections, load.pages, frames, load.frames)
            else:
                copy_pieces(
                    [addresses(storage, load.pages) for storage, _, _ in group.sections],
                    [addresses(frames, load.frames) + at for _, at, _ in group.sections],
                    [storage.shape[1] for storage, _, _ in group.sections],
                    self._pool.device,
                )
            return self._streams.mark(Lane.LOAD)

    def arrival(self, parts: Sequence[Part], places: Sequence[Place] | None) -> Arrival:
        """Of these history pages, which are about to be queued."""
        held = places or [(self._host, part.src) for part in parts]
        return Arrival(
            self._streams,
            pages=(part.dst[0] for part in parts),
            frames=[f for arena, frames in held if arena is self._host for f in frames],
        )

    def _fetch(self, lower: Sequence["Batch"], landing_rows: npt.NDArray[np.int64]) -> Fences:
        """Bring records where the pack kernels can read them; what these have to wait for.

        On a GPU to the landing buffer: large copies first and one launch then, as many small copies
        run at a tenth of the speed.
        """
        if self._pool.device.type == "cpu" or not lower:
            return ()
        used = 0
        with self._streams.on(Lane.FETCH):
            for it in lower:
                it.where = self._landing.frames
                it.rows = np.sort(landing_rows[used : used + len(it.frames)])
                used += len(it.frames)
                copy_rows(it.arena.frames, it.frames, it.where, it.rows, it.sizes)
        return (self._streams.mark(Lane.FETCH),)
