"""How the keys of a batch are cut into chunks that fit a workspace, and which queries meet which.

Keys are those of a call's sequences, their own new tokens among them.  A sequence's chunks follow
one another, and every tile of its queries meets them in turn; of two sequences at most something
is kept from one chunk to the next.  Decided on the host, from lengths alone, once a batch: all
backends and all layers go by the same plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.planned import PerBatch

__all__ = [
    "ENDS",
    "GOES_ON",
    "QUERY_TILE",
    "Chunk",
    "PrefillPlan",
    "Span",
    "Tile",
    "plan_chunks",
    "plan_of",
]

QUERY_TILE = 128
"""Queries of one sequence that meet keys together, at most."""


class Span(NamedTuple):
    """Positions [start, stop) of one sequence."""

    sequence: int
    start: int
    stop: int


def plan_chunks(
    lengths: Sequence[int], rows: int, page_tokens: int, *, cut: bool = True
) -> tuple[tuple[Span, ...], ...]:
    """Chunks of at most ``rows`` rows that cover ``lengths`` rows of each sequence, in order.

    A chunk holds consecutive sequences: whole ones as long as they fit, then as many whole pages of
    the next as still do, unless it may not be ``cut``.  So every span starts at a page, none is
    empty, and only a chunk's first may go on with what an earlier chunk began.  A sequence without
    rows ends a chunk.  Raises ConfigError for pages of less than one token, and ValueError for
    ``rows`` that are no whole pages, or none, and for a sequence that may not be cut and is longer.
    """
    if page_tokens < 1:
        raise ConfigError(f"page_tokens={page_tokens!r}: a page holds at least one token")
    if rows < page_tokens or rows % page_tokens:
        raise ValueError(f"{rows} rows are not one or more pages of {page_tokens}")
    if not cut and (longest := max(lengths, default=0)) > rows:
        raise ValueError(f"a sequence of {longest} rows, a workspace of {rows}")
    chunks: list[tuple[Span, ...]] = []
    open_: list[Span] = []
    room = rows

    def close() -> None:
        nonlocal room
        if open_:
            chunks.append(tuple(open_))
            open_.clear()
        room = rows

    for sequence, length in enumerate(lengths):
        if length == 0:
            close()
        start = 0
        while start < length:
            left = length - start
            take = left if left <= room else room // page_tokens * page_tokens if cut else 0
            if take:
                open_.append(Span(sequence, start, start + take))
                room -= take
                start += take
            if take < left:
                close()
    close()
    return tuple(chunks)


class Tile(NamedTuple):
    """Queries of one sequence, and the part of its keys that a chunk holds."""

    token: int
    """The first query, among the call's packed tokens."""
    queries: int
    position: int
    """Of the first query."""
    key: int
    """The span's first row in the workspace."""
    keys: int
    key_position: int
    """Of the span's first key."""
    carry: int
    """The first query, among those of which results are kept from chunk to chunk."""
    state: int
    """``GOES_ON`` and ``ENDS``."""

    @property
    def seen(self) -> int:
        """Keys that the last query sees of the span."""
        return min(self.keys, self.position + self.queries - self.key_position)


GOES_ON, ENDS = 1, 2
"""Keys of earlier chunks have been met; none will be met in later ones."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of the keys of some sequences, and the queries that meet them."""

    spans: tuple[Span, ...]
    tiles: tuple[Tile, ...]
    """Those with most keys first."""
    span_at: int
    """Where a plan's table has the first of its spans and tiles."""
    tile_at: int

    @property
    def rows(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


@dataclass(slots=True, eq=False)
class PrefillPlan:
    """How a batch's keys are cut into chunks, which is the same in all layers of a step."""

    chunks: tuple[Chunk, ...]
    rows: int
    """Of the workspace it was made for."""
    tile: int
    """Queries of a tile, at most."""
    carried: int
    """Queries whose results so far are kept from chunk to chunk."""
    blank: bool
    """Some tokens see no key at all."""
    _table: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, batch: PagedBatch, rows: int, *, cut: bool = True, tile: int | None = None) -> Self:
        """The plan for a workspace of ``rows`` rows; arguments and errors as of ``plan_chunks``.

        ``tile`` is chosen by the longest sequence of queries, unless it is given.
        """
        if tile is None:
            most = max(batch.query_lens, default=0)
            tile = next((t for t in (16, 64) if most <= t), QUERY_TILE)
        # Of sequences without queries nothing is wanted.
        lengths = [kv if q else 0 for q, kv in zip(batch.query_lens, batch.kv_lens, strict=True)]
        planned = plan_chunks(lengths, rows, batch.page_tokens, cut=cut)
        places, carried = _places(planned, batch)
        starts = np.cumsum([0, *batch.query_lens]).tolist()
        chunks: list[Chunk] = []
        spans = tiles = 0
        for found in planned:
            work = _tiles(found, batch, starts, places, tile)
            work.sort(key=lambda tile: tile.seen, reverse=True)
            chunks.append(Chunk(found, tuple(work), spans, tiles))
            spans, tiles = spans + len(found), tiles + len(work)
        pairs = zip(batch.query_lens, batch.kv_lens, strict=True)
        blank = any(kv < q for q, kv in pairs)
        return cls(tuple(chunks), rows, tile, carried, blank)

    def table(self, device: torch.device) -> Tensor:
        """int32: of every span its sequence, first position and first row in the workspace, then
        every tile's fields; made at the first call."""
        if self._table is None or self._table.device != device:
            spans: list[int] = []
            for chunk in self.chunks:
                row = 0
                for sequence, start, stop in chunk.spans:
                    spans += (sequence, start, row)
                    row += stop - start
            tiles = [value for chunk in self.chunks for tile in chunk.tiles for value in tile]
            self._table = torch.tensor(spans + tiles, dtype=torch.int32).to(device)
        return self._table

    def tables(self, chunk: Chunk, device: torch.device) -> tuple[Tensor, Tensor]:
        """A chunk's part of ``table``: (spans, 3) and (tiles, 8)."""
        table = self.table(device)
        spans = sum(len(each.spans) for each in self.chunks)
        mine = table[3 * chunk.span_at : 3 * (chunk.span_at + len(chunk.spans))]
        first = 3 * spans + 8 * chunk.tile_at
        return mine, table[first : first + 8 * len(chunk.tiles)]


_PLANS: PerBatch[PrefillPlan] = PerBatch()


def plan_of(batch: PagedBatch, rows: int, *, cut: bool = True) -> PrefillPlan:
    """``PrefillPlan.of``, made once a batch: all layers of a step ask for the same."""
    return _PLANS.get(batch, (rows, cut), lambda: PrefillPlan.of(batch, rows, cut=cut))


def _places(chunks: Sequence[Sequence[Span]], batch: PagedBatch) -> tuple[dict[int, int], int]:
    """Where results so far are kept of the sequences that are cut, and how many in all.

    A chunk may end one such sequence and begin another, but never has three of them.
    """
    cut = [chunk[0].sequence for chunk in chunks if chunk[0].start]
    cut = list(dict.fromkeys(cut))
    even, odd = (max((batch.query_lens[s] for s in cut[i::2]), default=0) for i in (0, 1))
    return {sequence: even * (i % 2) for i, sequence in enumerate(cut)}, even + odd


def _tiles(
    spans: Sequence[Span],
    batch: PagedBatch,
    starts: Sequence[int],
    places: Mapping[int, int],
    size: int,
) -> list[Tile]:
    found, row = [], 0
    for sequence, start, stop in spans:
        queries = batch.query_lens[sequence]
        first = batch.kv_lens[sequence] - queries
        for low in range(0, queries, size):
            count = min(size, queries - low)
            last = first + low + count - 1
            if last < start:
                continue  # every key of the span lies in these queries' future
            found.append(
                Tile(
                    token=starts[sequence] + low,
                    queries=count,
                    position=first + low,
                    key=row,
                    keys=stop - start,
                    key_position=start,
                    carry=places.get(sequence, 0) + low,
                    state=GOES_ON * (start > 0) + ENDS * (last < stop),
                )
            )
        row += stop - start
    return found
