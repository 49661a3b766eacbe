"""Materialised attention in chunks: rows are projected up into a workspace of fixed size, part by
part, and what each part gives is folded into what the parts before it gave.

A chunk (``prefill_plan``) is gathered and projected at once, whatever sequences it holds; then
tiles of queries attend to the part of their sequence that it has.  Keys before a tile are attended
without a mask, its own tokens' with one.

Conventions are those of ``reference``.  Knows nothing of models: a projection is a callable.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.kernels.mla import HeadDims, PagedBatch, check_queries
from kvtier.kernels.prefill_plan import (
    ENDS,
    GOES_ON,
    QUERY_TILE,
    Chunk,
    PrefillPlan,
    plan_of,
)
from kvtier.kernels.records import RECORDS, Record, read_records
from kvtier.kernels.reference import attend, gather_rows, merge

__all__ = [
    "Project",
    "Workspace",
    "check_budget",
    "materialised",
    "materialised_sdpa",
    "row_bytes",
    "run_chunks",
    "workspace_rows",
]

MAX_ROWS = 65536
"""Of a workspace, however many its bytes would hold."""
DENSE = RECORDS["dense"]


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
    _check(query, rows, batch, dims, workspace, record)
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
    _check(query, rows, batch, dims, workspace, record)
    plan = plan_of(batch, workspace.rows, cut=False)
    out = query.new_zeros(query.shape[0], dims.heads, dims.value)
    for chunk in plan.chunks:
        _gather(rows, batch, plan, chunk, record, workspace)
        project(workspace.latent[: chunk.rows, : dims.latent], workspace.projected[: chunk.rows])
        keys, values = (each.transpose(0, 1)[None] for each in _expanded(workspace, chunk, dims))
        for tile in chunk.tiles:
            seen = tile.seen
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


def _check(
    query: Tensor,
    rows: Tensor,
    batch: PagedBatch,
    dims: HeadDims,
    workspace: Workspace,
    record: Record,
) -> None:
    check_queries(query.shape[0], batch)
    width = dims.latent + dims.rope
    held, projected = workspace.latent.shape[1:], workspace.projected.shape[1:]
    if (
        query.shape[1:] != (dims.heads, dims.nope + dims.rope)
        or (record.dim or rows.shape[-1]) != width
        or (held, projected) != ((width,), (dims.heads, dims.nope + dims.value))
    ):
        raise ValueError(
            f"query {tuple(query.shape)}, rows {tuple(rows.shape)}, a workspace of {tuple(held)} "
            f"and {tuple(projected)}, {dims}"
        )


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
        theirs = slice(tile.key, tile.key + tile.seen)
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
