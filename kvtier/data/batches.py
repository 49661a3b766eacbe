"""Parts as arrays: where their records lie on the device and on the host, and how long they are.

Knows layouts and frames; not streams, threads or how anything is copied.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvtier.core.ops import Kind, Part
from kvtier.data.device import DevicePool
from kvtier.data.host import HostArena
from kvtier.data.rows import Rows
from kvtier.kernels.pack import Sections
from kvtier.layouts.base import Layout
from kvtier.sizing import record_bytes
from kvtier.types import Tier

__all__ = [
    "Batch",
    "Place",
    "Sizes",
    "all_history",
    "by_arena",
    "by_sections",
    "is_live",
    "kept_on_host",
    "num_frames",
    "page_frames",
    "split",
]

# Parts are gone through by comprehensions of the plainest kind: of 489 of them an attribute takes
# 8 us so, and 25 through ``attrgetter`` and ``map``.
_HISTORY = Kind.HISTORY

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

    def all_frames(self, parts: Sequence[Part]) -> list[int]:
        """Of each of them."""
        return [1] * len(parts) if all_history(parts) else [self.frames(part) for part in parts]

    def spread(self, parts: Sequence[Part], frames: Sequence[Sequence[int]]) -> list[int]:
        """How many bytes of each part's record lie in each of its frames."""
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


def all_history(parts: Sequence[Part]) -> bool:
    """Whether each of them is a page, which has one frame everywhere."""
    return [part.kind for part in parts].count(_HISTORY) == len(parts)


def num_frames(parts: Sequence[Part], *, source: bool) -> int:
    """Frames that they have at this end."""
    if source:
        return sum([len(part.src) for part in parts])
    return sum([len(part.dst) for part in parts])


def page_frames(parts: Sequence[Part], *, source: bool) -> npt.NDArray[np.int64]:
    """The frame of each page at this end."""
    if source:
        return np.array([part.src[0] for part in parts], np.int64)
    return np.array([part.dst[0] for part in parts], np.int64)


class Batch:
    """Parts with one end in the frames of one arena, and these as arrays: a loop over parts costs
    the thread that queues copies as much as a launch, so each is gone through once."""

    __slots__ = ("arena", "frames", "held", "pages", "parts", "rows", "sizes", "where")

    def __init__(
        self,
        sizes: Sizes,
        arena: HostArena,
        parts: Sequence[Part],
        held: Sequence[tuple[int, ...]] | None,
        *,
        source: bool,
    ) -> None:
        self.arena = arena
        self.parts = parts
        self.held = held or []
        """Frames of each part, unless all of it is history."""
        self.pages: Rows | None = None
        """Device pages, if all of it is history."""
        if all_history(parts):
            frames = (
                page_frames(parts, source=not source)
                if held is None
                else np.array([frame for (frame,) in held], np.int64)
            )
            # Neighbours next to each other: so they are one copy.  Eviction leaves runs of them.
            order = np.argsort(frames)
            self.frames = frames[order]
            self.pages = page_frames(parts, source=source)[order]
            self.sizes = np.full(len(parts), sizes.page, np.int64)
        else:
            self.held = held or [part.dst if source else part.src for part in parts]
            self.frames = np.array(list(chain.from_iterable(self.held)), np.int64)
            self.sizes = np.array(sizes.spread(parts, self.held), np.int64)
        self.where = arena.frames
        """Where the pack kernels find the records,"""
        self.rows: Rows = self.frames
        """and in which rows of it, one part's after the other."""


def by_arena(
    sizes: Sizes, host: HostArena, parts: Sequence[Part], places: Sequence[Place] | None
) -> tuple[list[Batch], list[Part]]:
    """What is to come from host memory, arena by arena; and what is on the device already."""
    if places is None:
        return [Batch(sizes, host, parts, None, source=False)], []
    lower: dict[int, tuple[HostArena, list[Part], list[tuple[int, ...]]]] = {}
    here: list[Part] = []
    for part, (arena, frames) in zip(parts, places, strict=True):
        if part.target is not Tier.GPU:
            continue
        if part.source is Tier.GPU:  # a checkpoint that has not left it
            here.append(part)
            continue
        _, theirs, held = lower.setdefault(id(arena), (arena, [], []))
        theirs.append(part)
        held.append(frames)
    return [Batch(sizes, *some, source=False) for some in lower.values()], here


Tails = list[tuple[Part, Sequence[int]]]


def split(batch: Batch, *, source: bool) -> tuple[Rows, Rows, Tails]:
    """Device pages of the history parts and the row of each; all other parts with their rows."""
    if batch.pages is not None:
        return batch.pages, batch.rows, []
    pages: list[int] = []
    page_rows: list[int] = []
    tails: Tails = []
    rows = np.asarray(batch.rows).tolist()
    at = 0
    for part, held in zip(batch.parts, batch.held, strict=True):
        if part.kind is Kind.HISTORY:
            pages.append((part.src if source else part.dst)[0])
            page_rows.append(rows[at])
        else:
            tails.append((part, rows[at : at + len(held)]))
        at += len(held)
    return pages, page_rows, tails


def by_sections(
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
