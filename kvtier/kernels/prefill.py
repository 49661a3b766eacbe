"""Materialised attention in chunks: rows are projected up into a workspace of fixed size, part by
part, and what each part gives is folded into what the parts before it gave.

The planner cuts the keys of a call's sequences, their own new tokens among them, into chunks that
fit the workspace.  A chunk is gathered and projected at once, whatever sequences it holds; then
tiles of queries attend to the part of their sequence that it has.  Keys before a tile are attended
without a mask, its own tokens' with one.  Queries are never cut off from each other's chunks: every
tile meets every chunk of its sequence in turn, and a sequence's chunks follow one another, so that
partial results are kept of two sequences at most.

Conventions are those of ``reference``.  Knows nothing of models: a projection is a callable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.kernels.mla import HeadDims, PagedBatch
from kvtier.kernels.planned import PerBatch
from kvtier.kernels.records import RECORDS, Record, read_records
from kvtier.kernels.reference import attend, gather_rows, merge

__all__ = [
    "Chunk",
    "PrefillPlan",
    "Project",
    "Span",
    "Workspace",
    "check_budget",
    "materialised",
    "materialised_sdpa",
    "plan_chunks",
    "plan_of",
    "row_bytes",
    "run_chunks",
    "workspace_rows",
]

QUERY_TILE = 128
"""Queries of one sequence that meet keys together, at most."""
MAX_ROWS = 65536
"""More rows at a time gain nothing."""
DENSE = RECORDS["dense"]


class Span(NamedTuple):
    """Positions [start, stop) of one sequence."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a chunk is gathered and projected into."""

    latent: Tensor
    """(rows, latent + rope), in the queries' type."""
    projected: Tensor
    """(rows, heads, nope + value): keys without position, and values."""

    @classmethod
    def allocate(
        cls, rows: int, dims: HeadDims, dtype: torch.dtype, device: torch.device | str
    ) -> Self:
        """Room for ``rows`` rows, of ``row_bytes`` each; nothing is written to it."""
        # Written in and out of inference mode, wherever it was made.
        with torch.inference_mode(False):
            return cls(
                torch.empty(rows, dims.latent + dims.rope, dtype=dtype, device=device),
                torch.empty(rows, dims.heads, dims.nope + dims.value, dtype=dtype, device=device),
            )

    @property
    def rows(self) -> int:
        return self.latent.shape[0]

    @property
    def nbytes(self) -> int:
        return self.latent.nbytes + self.projected.nbytes

    def beside(self, workspace_bytes: int | str) -> int:
        """What is left of so many bytes."""
        return max(0, parse_bytes(workspace_bytes, "workspace_bytes") - self.nbytes)


class Project(Protocol):
    """Writes what latents (m, latent) are projected to: (m, heads, nope + value)."""

    def __call__(self, latent: Tensor, out: Tensor, /) -> None: ...


def plan_chunks(
    lengths: Sequence[int], rows: int, page_tokens: int, *, cut: bool = True
) -> tuple[tuple[Span, ...], ...]:
    """Chunks of at most ``rows`` rows that cover ``lengths`` rows of each sequence, in order.

    A chunk holds consecutive sequences: whole ones as long as they fit, then as many whole pages of
    the next as still do, unless it may not be ``cut``.  So every span starts at a page, none is
    empty, and only a chunk's first may go on with what an earlier chunk began.  A sequence without
    rows ends a chunk.  Raises ValueError for ``rows`` that are no whole pages, or none, and for a
    sequence that may not be cut and is longer.
    """
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
            work.sort(key=_seen, reverse=True)
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


def _seen(tile: Tile) -> int:
    """Keys that the last query of a tile sees of its span."""
    return min(tile.keys, tile.position + tile.queries - tile.key_position)


@dataclass(frozen=True, slots=True)
class Results:
    """Where tiles leave what they found: of queries that have met all their keys, and of those that
    have not, in the arithmetic's own type."""

    out: Tensor
    lse: Tensor
    carry: Tensor
    carry_lse: Tensor


class Gather(Protocol):
    """Fills the first rows of a workspace's ``latent`` with a chunk's."""

    def __call__(
        self, rows: Tensor, batch: PagedBatch, plan: PrefillPlan, chunk: Chunk, record: Record,
        workspace: Workspace, /,
    ) -> None: ...  # fmt: skip


class Meet(Protocol):
    """Lets a chunk's tiles attend to what the workspace holds."""

    def __call__(
        self, query: Tensor, plan: PrefillPlan, chunk: Chunk, workspace: Workspace,
        dims: HeadDims, scale: float, results: Results, /,
    ) -> None: ...  # fmt: skip


def materialised(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    project: Project,
    *,
    dims: HeadDims,
    scale: float,
    workspace: Workspace,
    record: Record = DENSE,
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` (n, heads, nope + rope) to keys and values projected up from rows.

    ``rows`` (slots, latent + rope), or pages of ``record``.  At most ``workspace.rows`` rows are
    held projected up at a time.  Returns output (n, heads, value) in the query's type and natural
    log-sum-exp (n, heads) in float32, or the query's type if wider; 0 and -inf for a query that
    sees no key.  Beside the workspace, heads * (value + 1) values of that type are taken for each
    query of a sequence in several chunks, of two such sequences at a time.
    """
    return run_chunks(query, rows, batch, project, dims, scale, workspace, record, _gather, _meet)


def run_chunks(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    project: Project,
    dims: HeadDims,
    scale: float,
    workspace: Workspace,
    record: Record,
    gather: Gather,
    meet: Meet,
) -> tuple[Tensor, Tensor]:
    """``materialised``, by a backend's way of gathering and of attending."""
    if query.shape[1:] != (dims.heads, dims.nope + dims.rope):
        raise ValueError(f"query {tuple(query.shape)}, {dims}")
    plan = plan_of(batch, workspace.rows)
    exact = torch.promote_types(query.dtype, torch.float32)
    shape = (query.shape[0], dims.heads)
    results = Results(
        query.new_empty(*shape, dims.value),
        query.new_empty(shape, dtype=exact),
        query.new_empty(plan.carried, dims.heads, dims.value, dtype=exact),
        query.new_empty(plan.carried, dims.heads, dtype=exact),
    )
    if plan.blank:
        results.out.zero_()
        results.lse.fill_(-torch.inf)
    for chunk in plan.chunks:
        gather(rows, batch, plan, chunk, record, workspace)
        project(workspace.latent[: chunk.rows, : dims.latent], workspace.projected[: chunk.rows])
        meet(query, plan, chunk, workspace, dims, scale, results)
    return results.out, results.lse


def materialised_sdpa(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    project: Project,
    *,
    dims: HeadDims,
    scale: float,
    workspace: Workspace,
    record: Record = DENSE,
) -> Tensor:
    """``materialised`` by torch's own attention; output only.

    torch gives no log-sum-exp, so no sequence may lie in several chunks: ValueError where one is
    longer than the workspace.
    """
    plan = plan_of(batch, workspace.rows, cut=False)
    out = query.new_zeros(query.shape[0], dims.heads, dims.value)
    for chunk in plan.chunks:
        _gather(rows, batch, plan, chunk, record, workspace)
        project(workspace.latent[: chunk.rows, : dims.latent], workspace.projected[: chunk.rows])
        keys, values = (each.transpose(0, 1)[None] for each in _expanded(workspace, chunk, dims))
        for tile in chunk.tiles:
            seen = _seen(tile)
            mask = torch.ones(tile.queries, seen, dtype=torch.bool, device=query.device)
            mine = slice(tile.token, tile.token + tile.queries)
            theirs = slice(tile.key, tile.key + seen)
            attended = functional.scaled_dot_product_attention(
                query[mine].transpose(0, 1)[None],
                keys[..., theirs, :],
                values[..., theirs, :],
                attn_mask=mask.tril_(seen - tile.queries),
                scale=scale,
            )
            out[mine] = attended[0].transpose(0, 1)
    return out


def row_bytes(dims: HeadDims, element_bytes: int) -> int:
    """Bytes of one row of a workspace."""
    projected = dims.heads * (dims.nope + dims.value)
    return element_bytes * (dims.latent + dims.rope + projected)


def workspace_rows(
    workspace_bytes: int | str,
    dims: HeadDims,
    element_bytes: int,
    page_tokens: int,
    *,
    fused: bool = False,
) -> int:
    """How many rows a workspace may have, whole pages, ``MAX_ROWS`` at most.

    Counts all scratch that a row costs.  ``fused`` kernels need none but the row itself, and an
    eighth of the bytes is left to other kernels.  The others join keys with their rope part, copy
    to float32 where rows are narrower, and hold scores, weights and masks of a tile of queries.
    Raises ConfigError where not even one page fits.
    """
    row = row_bytes(dims, element_bytes)
    if fused:
        row += -(-row // 7)
    else:
        keys, values = dims.heads * (dims.nope + dims.rope), dims.heads * dims.value
        row += element_bytes * (keys + values)
        row += QUERY_TILE * (dims.heads * 2 * max(element_bytes, 4) + 5)
        if element_bytes < 4:
            row += 4 * (keys + values)
    size = parse_bytes(workspace_bytes, "workspace_bytes")
    if size < row * page_tokens:
        raise ConfigError(
            f"workspace_bytes={workspace_bytes!r} holds less than one page of projected rows; "
            f"set at least {row * page_tokens}"
        )
    most = max(MAX_ROWS, page_tokens)
    return min(size // row, most) // page_tokens * page_tokens


def check_budget(
    pool_bytes: int | str, workspace_bytes: int | str, device_bytes: int | str
) -> None:
    """Raises ConfigError where a device pool and scratch come to more than ``device_bytes``."""
    pool, scratch = parse_bytes(pool_bytes, "gpu_bytes"), parse_bytes(workspace_bytes)
    if pool + scratch > parse_bytes(device_bytes, "device_bytes"):
        raise ConfigError(
            f"device_bytes={device_bytes!r} cannot hold the device pool of {pool} bytes and "
            f"workspace_bytes={workspace_bytes!r}: they take {pool + scratch}"
        )


def _gather(
    rows: Tensor,
    batch: PagedBatch,
    plan: PrefillPlan,
    chunk: Chunk,
    record: Record,
    workspace: Workspace,
) -> None:
    page, at = batch.page_tokens, 0
    slots = torch.arange(rows.shape[0] * page, device=rows.device) if record.planes else rows
    for sequence, start, stop in chunk.spans:
        found = gather_rows(slots, batch.block_table[sequence], start, stop, page)
        values = read_records(rows, found, record) if record.planes else found
        workspace.latent[at : at + stop - start] = values
        at += stop - start


def _meet(
    query: Tensor,
    plan: PrefillPlan,
    chunk: Chunk,
    workspace: Workspace,
    dims: HeadDims,
    scale: float,
    results: Results,
) -> None:
    keys, values = _expanded(workspace, chunk, dims)
    for tile in chunk.tiles:
        theirs = slice(tile.key, tile.key + _seen(tile))
        mine = slice(tile.token, tile.token + tile.queries)
        kept = slice(tile.carry, tile.carry + tile.queries)
        part = attend(
            query[mine],
            keys[theirs],
            values[theirs],
            scale=scale,
            first_query=tile.position,
            first_key=tile.key_position,
        )
        if tile.state & GOES_ON:
            part = merge(results.carry[kept], results.carry_lse[kept], *part)
        if tile.state & ENDS:
            results.out[mine], results.lse[mine] = part
        else:
            results.carry[kept], results.carry_lse[kept] = part


def _expanded(workspace: Workspace, chunk: Chunk, dims: HeadDims) -> tuple[Tensor, Tensor]:
    """Keys (rows, heads, nope + rope) and values (rows, heads, value) of a chunk."""
    up = workspace.projected[: chunk.rows]
    rope = workspace.latent[: chunk.rows, None, dims.latent :].expand(-1, dims.heads, -1)
    return torch.cat((up[..., : dims.nope], rope), dim=-1), up[..., dims.nope :]
