"""Moving records: pages and tails into staging and on to the host, and from the host or the disk
back into pages.

Runs on whichever thread calls; knows streams and frames, but not ops, callbacks or queues.
"""

from collections.abc import Sequence

import torch

from kvtier.core.ops import Kind, Part
from kvtier.data.device import DevicePool, Spans
from kvtier.data.host import HostArena
from kvtier.data.staging import Staging
from kvtier.data.streams import Event, Fences, Lane, Streams
from kvtier.errors import StoreError
from kvtier.kernels.pack import copy_spans, pack_pages, unpack_pages
from kvtier.layouts.base import Layout
from kvtier.seams import Read, Record, Store
from kvtier.sizing import record_bytes
from kvtier.types import Tier

__all__ = ["Loader", "Packer", "record_of"]

Place = tuple[HostArena, tuple[int, ...]]


def is_live(part: Part, *, source: bool) -> bool:
    """Whether the device end of a part is a live tail."""
    return part.kind is Kind.TAIL or (part.live_src if source else part.live_dst)


def record_of(layout: Layout, host: HostArena, part: Part) -> Record:
    """What a STORE part hands to the store; its payload shares the host frames."""
    size = record_bytes(layout, part)
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
    """Device to host, in two halves that may run on different threads."""

    def __init__(
        self, layout: Layout, pool: DevicePool, host: HostArena, staging: Staging, streams: Streams
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._host = host
        self._staging = staging
        self._streams = streams

    def gather(self, parts: Sequence[Part], slots: Sequence[list[int]], fences: Fences) -> Event:
        """Pack parts into their staging slots; behind the event the sources may be reused."""
        with self._streams.on(Lane.PACK, fences):
            pages = [p.src[0] for p in parts if p.kind is Kind.HISTORY]
            rows = [s[0] for p, s in zip(parts, slots, strict=True) if p.kind is Kind.HISTORY]
            if pages:
                pack_pages(self._pool.history, pages, self._staging.frames, rows)
            for part, held in zip(parts, slots, strict=True):
                if part.kind is not Kind.HISTORY:
                    if record_bytes(self._layout, part) > len(held) * self._host.frame_bytes:
                        raise ValueError(f"a tail of {part.src} does not fit {len(held)} frames")
                    tail = self._pool.spans(part.kind, part.src, live=is_live(part, source=True))
                    copy_spans(tail, self._staging.spans(held))
        return self._streams.mark(Lane.PACK)

    def land(self, parts: Sequence[Part], slots: Sequence[list[int]], gathered: Event) -> None:
        """Copy what was gathered to the host frames and seal them.  Blocks until they are whole;
        the slots are free then."""
        with self._streams.on(Lane.DRAIN, (gathered,)):
            for part, held in zip(parts, slots, strict=True):
                self._host.unseal(part.dst)
                copy_spans(self._staging.spans(held), list(self._host.spans(part.dst)))
        self._streams.mark(Lane.DRAIN).synchronize()
        for part in parts:
            self._host.seal(part.dst, record_bytes(self._layout, part))


class Loader:
    """Disk or host to pages, for one thread: what has no host frame of its own bounces through
    this loader's."""

    def __init__(
        self,
        layout: Layout,
        pool: DevicePool,
        host: HostArena,
        store: Store | None,
        streams: Streams,
        batch_frames: int,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._host = host
        self._store = store
        self._streams = streams
        # Taken now: a device that is full later must not look like a record that is bad.
        device = pool.device if pool.device.type == "cuda" else None
        self._bounce = HostArena(
            batch_frames if store is not None else 0, host.frame_bytes, pinned=device
        )
        lower = device is not None and (store is not None or host.num_frames > 0)
        self._landing = torch.empty(
            (batch_frames if lower else 0, host.frame_bytes), dtype=torch.uint8, device=pool.device
        )

    def read(self, parts: Sequence[Part]) -> tuple[list[Place], int]:
        """Bring the records into host memory: where each lies, and how many leading ones are
        there, whole and verified.  ``parts`` take at most ``batch_frames`` frames.

        Raises what the store raises.
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
            size = record_bytes(self._layout, part)
            reads.append(Read(part.key, part.parent, part.tokens, arena.views(frames), size))
        found = self._store.read_into(reads)
        missing = (i for i, good in zip(wanted, found, strict=True) if not good)
        return places, next(missing, len(parts))

    def scatter(self, parts: Sequence[Part], places: Sequence[Place], fences: Fences) -> None:
        """Bring the records from host memory into pages and tails.  Blocks until it is done."""
        targets = [i for i, part in enumerate(parts) if part.target is Tier.GPU]
        if not targets:
            return
        with self._streams.on(Lane.LOAD, fences):
            pages = [
                i
                for i in targets
                if parts[i].kind is Kind.HISTORY and parts[i].source is not Tier.GPU
            ]
            for arena in {id(places[i][0]): places[i][0] for i in pages}.values():
                here = [i for i in pages if places[i][0] is arena]
                self._unpack(
                    [parts[i].dst[0] for i in here], arena, [places[i][1][0] for i in here]
                )
            for i in sorted(set(targets) - set(pages)):
                part, (arena, frames) = parts[i], places[i]
                record: Spans = [*arena.spans(frames)]
                if part.source is Tier.GPU:  # a checkpoint that is still on the device
                    record = self._pool.spans(part.kind, part.src, live=is_live(part, source=True))
                target = self._pool.spans(part.kind, part.dst, live=is_live(part, source=False))
                copy_spans(record, target)
        self._streams.mark(Lane.LOAD).synchronize()
        self._streams.passed(fences)

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
                count = -(-record_bytes(self._layout, part) // self._host.frame_bytes)
                places.append((self._bounce, tuple(range(used, used + count))))
                used += count
        return places

    def _unpack(self, pages: list[int], arena: HostArena, frames: list[int]) -> None:
        if self._pool.device.type == "cpu":
            unpack_pages(self._pool.history, pages, arena.frames, frames)
            return
        # One large copy a record, then one scatter: many small copies run at a tenth of the speed.
        for row, frame in enumerate(frames):
            self._landing[row].copy_(arena.frames[frame], non_blocking=True)
        unpack_pages(self._pool.history, pages, self._landing, range(len(frames)))
