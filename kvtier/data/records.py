"""Moving records: pages and tails into staging and on to the host, and from the host or the disk
back into pages.

Runs on whichever thread calls; knows streams and frames, but not ops, callbacks or queues.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from kvtier.core.ops import Kind, Part
from kvtier.data.arrivals import NO_LAYERS, Arrival
from kvtier.data.device import DevicePool, LayerGroup
from kvtier.data.host import HostArena
from kvtier.data.rows import copy_rows
from kvtier.data.staging import Slots, Staging
from kvtier.data.streams import Event, Fences, Lane, Streams
from kvtier.errors import StoreError
from kvtier.kernels.pack import Sections, pack_pages, pack_tails, unpack_pages, unpack_tails
from kvtier.layouts.base import Layout
from kvtier.seams import Read, Record, Store
from kvtier.sizing import record_bytes
from kvtier.types import Tier

__all__ = ["Loader", "Packer", "Place", "Reader", "Sizes", "copy_part", "kept_on_host", "record_of"]

LAYERS_BYTES = 8 << 20
"""Layers that come one after the other do so in groups of at least this size: a group takes the
interpreter about 0.1 ms, its copy 0.15 ms."""

Place = tuple[HostArena, tuple[int, ...]]
"""Frames in which a record lies; none for what never leaves the device."""


class Sizes:
    """Bytes of the records of one layout, looked up rather than added up for every part."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.page = layout.page_bytes()
        self.frame = layout.frame_bytes()
        self._checkpoint = layout.checkpoint_bytes()

    def of(self, part: Part) -> int:
        """Bytes of the record that a part moves."""
        if part.kind is Kind.HISTORY:
            return self.page
        return (
            self._checkpoint if part.kind is Kind.CHECKPOINT else record_bytes(self._layout, part)
        )

    def frames(self, part: Part) -> int:
        """Host frames that it takes."""
        return 1 if part.kind is Kind.HISTORY else -(-self.of(part) // self.frame)

    def spread(self, parts: Sequence[Part], frames: Sequence[Sequence[int]]) -> list[int]:
        """How many bytes of each part's record lie in each of its frames."""
        if _all_history(parts):
            return [self.page] * len(parts)
        whole = self.frame
        return [
            max(0, min(whole, size - start))
            for size, held in zip(map(self.of, parts), frames, strict=True)
            for start in range(0, len(held) * whole, whole)
        ]


def is_live(part: Part, *, source: bool) -> bool:
    """Whether the device end of a part is a live tail."""
    return part.kind is Kind.TAIL or (part.live_src if source else part.live_dst)


def kept_on_host(part: Part) -> bool:
    """Whether a record that comes from disk has host frames of its own to come through."""
    return bool(part.via) or part.target is Tier.CPU


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

    def gather(self, parts: Sequence[Part], slots: Sequence[int], fences: Fences) -> Event:
        """Pack parts into staging slots, as many as each has frames; behind the event the sources
        may be reused."""
        pages, rows, tails = _split(parts, [p.dst for p in parts], slots, source=True)
        for part, held in tails:
            if self._sizes.of(part) > len(held) * self._sizes.frame:
                raise ValueError(f"a tail of {part.src} does not fit {len(held)} frames")
        with self._streams.on(Lane.PACK, fences):
            if pages:
                pack_pages(self._pool.history, pages, self._staging.frames, rows)
            for sections, ids, held_by in _by_sections(self._pool, tails, source=True):
                pack_tails(sections, ids, self._staging.frames, held_by)
        return self._streams.mark(Lane.PACK)

    def drain(self, parts: Sequence[Part], slots: Sequence[int], gathered: Event) -> Event:
        """Copy what was gathered to the host frames; behind the event they are whole, and the
        slots are free."""
        places = [part.dst for part in parts]
        frames = [frame for place in places for frame in place]
        self._host.unseal(frames)
        with self._streams.on(Lane.DRAIN, (gathered,)):
            sizes = self._sizes.spread(parts, places)
            copy_rows(self._staging.frames, slots, self._host.frames, frames, sizes)
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

    def place(self, part: Part) -> Place:
        """Where a record lies that is not on disk."""
        return self._host, part.src if part.source is Tier.CPU else ()

    def rows(self, parts: Sequence[Part], places: Sequence[Place]) -> int:
        """Landing rows that loading these takes."""
        if self._pool.device.type == "cpu":
            return 0
        return sum(
            len(frames)
            for part, (_, frames) in zip(parts, places, strict=True)
            if part.target is Tier.GPU
        )

    def load(
        self,
        parts: Sequence[Part],
        places: Sequence[Place],
        landing_rows: Sequence[int],
        fences: Fences,
    ) -> Event:
        """Bring the records from host memory into pages and tails; behind the event it is done,
        and nothing reads the places any more."""
        lower, here = _by_arena(parts, places)
        fetched = self._fetch(lower, landing_rows)
        with self._streams.on(Lane.LOAD, (*fetched, *fences)):
            for it in lower:
                pages, rows, tails = _split(it.parts, it.frames, it.rows, source=False)
                if pages:
                    unpack_pages(self._pool.history, pages, it.where, rows)
                for sections, ids, held_by in _by_sections(self._pool, tails, source=False):
                    unpack_tails(sections, ids, it.where, held_by)
            for part in here:
                copy_part(self._pool, part)
        return self._streams.mark(Lane.LOAD)

    def layer_groups(self, pages: int) -> list[LayerGroup]:
        """The layers of so many pages as they are to come one after the other, some at a time."""
        layers, size = 1, self._sizes.page * pages // self._pool.num_layers
        while layers * size < LAYERS_BYTES:
            layers *= 2
        return self._pool.layer_groups(layers)

    def load_layers(self, group: LayerGroup, parts: Sequence[Part], fences: Fences) -> Event:
        """Bring some layers of history pages from their host frames, which the device reads by
        itself; behind the event they are there."""
        with self._streams.on(Lane.LOAD, fences):
            unpack_pages(
                group.sections,
                [part.dst[0] for part in parts],
                self._host.frames,
                [part.src[0] for part in parts],
            )
            return self._streams.mark(Lane.LOAD)

    def arrival(
        self,
        parts: Sequence[Part],
        places: Sequence[Place],
        loaded: Event,
        layers: Mapping[int, Event] = NO_LAYERS,
    ) -> Arrival:
        """What has been queued: these pages, behind ``loaded`` at the latest."""
        return Arrival(
            self._streams,
            pages=(part.dst[0] for part in parts),
            frames=(f for arena, held in places if arena is self._host for f in held),
            whole=loaded,
            layers=layers,
        )

    def _fetch(self, lower: Sequence["_Records"], landing_rows: Sequence[int]) -> Fences:
        """Bring records where the pack kernels can read them; what these have to wait for.

        On a GPU to the landing buffer: large copies first and one launch then, as many small copies
        run at a tenth of the speed.
        """
        for it in lower:
            it.rows = [frame for held in it.frames for frame in held]
        if self._pool.device.type == "cpu" or not lower:
            return ()
        used = 0
        with self._streams.on(Lane.FETCH):
            for it in lower:
                frames, it.rows = it.rows, landing_rows[used : used + len(it.rows)]
                used += len(frames)
                sizes = self._sizes.spread(it.parts, it.frames)
                copy_rows(it.arena.frames, frames, self._landing.frames, it.rows, sizes)
                it.where = self._landing.frames
        return (self._streams.mark(Lane.FETCH),)


class _Records:
    """Records in one arena, and where the pack kernels find them."""

    __slots__ = ("arena", "frames", "parts", "rows", "where")

    def __init__(self, arena: HostArena, parts: list[Part], frames: list[tuple[int, ...]]) -> None:
        self.arena = arena
        self.parts = parts
        self.frames = frames
        self.where = arena.frames
        self.rows: Sequence[int] = ()
        """Of ``where``, one part's after the other."""


def _by_arena(parts: Sequence[Part], places: Sequence[Place]) -> tuple[list[_Records], list[Part]]:
    """What is to come from host memory, arena by arena; and what is on the device already."""
    first = places[0][0] if places else None
    if all(p.target is Tier.GPU and p.source is not Tier.GPU for p in parts) and all(
        arena is first for arena, _ in places
    ):  # by far the most
        return [_Records(arena, list(parts), [f for _, f in places]) for arena, _ in places[:1]], []
    lower: dict[int, _Records] = {}
    here: list[Part] = []
    for part, (arena, frames) in zip(parts, places, strict=True):
        if part.target is not Tier.GPU:
            continue
        if part.source is Tier.GPU:  # a checkpoint that has not left it
            here.append(part)
            continue
        records = lower.setdefault(id(arena), _Records(arena, [], []))
        records.parts.append(part)
        records.frames.append(frames)
    return list(lower.values()), here


Tails = list[tuple[Part, Sequence[int]]]


def _all_history(parts: Sequence[Part]) -> bool:
    return all(part.kind is Kind.HISTORY for part in parts)


def _split(
    parts: Sequence[Part], frames: Sequence[Sequence[int]], rows: Sequence[int], *, source: bool
) -> tuple[list[int], Sequence[int], Tails]:
    """Device pages of the history parts and the row of each; all other parts with their rows.

    ``rows`` are those of one part after the other, as many as it has host ``frames``.
    """
    if _all_history(parts):
        return [(p.src if source else p.dst)[0] for p in parts], rows, []
    pages: list[int] = []
    page_rows: list[int] = []
    tails: Tails = []
    at = 0
    for part, held in zip(parts, frames, strict=True):
        if part.kind is Kind.HISTORY:
            pages.append((part.src if source else part.dst)[0])
            page_rows.append(rows[at])
        else:
            tails.append((part, rows[at : at + len(held)]))
        at += len(held)
    return pages, page_rows, tails


def _by_sections(
    pool: DevicePool, tails: Tails, *, source: bool
) -> Iterable[tuple[Sections, list[tuple[int, ...]], list[Sequence[int]]]]:
    """Sections, and the pages and rows of all records that one call can move."""
    out: dict[Sections, tuple[list[tuple[int, ...]], list[Sequence[int]]]] = {}
    for part, held in tails:
        frames, live = part.src if source else part.dst, is_live(part, source=source)
        sections, pages = pool.sections(part.kind, frames, live=live)
        some, theirs = out.setdefault(sections, ([], []))
        some.append(pages)
        theirs.append(held)
    return [(sections, *moved) for sections, moved in out.items()]
