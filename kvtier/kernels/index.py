"""Which entries a query attends to: scores against indexer keys, and the best of them.

An entry stands for ``ratio`` tokens: some of them compressed to one, or each as it is.  Keys lie in
pages as any record, entry j of a sequence in its page ``j // entries per page``.  Reads keys up to
the sequence's last closed entry and nothing else.
"""

import torch
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.kernels.casts import e4m3_values
from kvtier.kernels.mla import PagedBatch, check_queries
from kvtier.kernels.records import Record, read_records
from kvtier.kernels.slots import chosen_slots, closed_entries, entry_slots

__all__ = ["check_choice", "index_topk"]

SPLIT_KEYS = 4096
"""Keys scored at a time, at most: scratch does not grow with the context."""


def index_topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    batch: PagedBatch,
    *,
    ratio: int,
    topk: int,
    record: Record,
    slots: bool = False,
    workspace_bytes: int | str = "512MiB",
) -> Tensor:
    """The entries (n, topk) int32 that each query attends to, ascending, -1 behind.

    ``query`` (n, heads, dim) rotated, e4m3 codes if uint8; ``weights`` (n, heads) with every
    constant folded in; ``keys`` the pages (or plain rows) of ``record``.  The score of entry j is
    the sum over heads of ``weights * relu(query . key_j)``.  A query at position t sees entries
    below ``(t + 1) // ratio``: all of them where they are at most ``topk``, otherwise those of the
    highest scores, and of equal scores the smaller entries (0 and -0 are equal).  A padding row
    gets -1 alone.

    With ``slots`` the same as physical slots, in the same order: where each entry lies, as
    ``c4_slots`` and ``token_slots`` say it.  Raises ConfigError for a ``topk`` below 1, and
    ValueError for shapes that do not fit together and where the block table lacks a page that is
    needed.
    """
    n, heads, dim = query.shape
    check_choice(query, weights, keys, batch, ratio=ratio, topk=topk, record=record)
    if query.dtype is torch.uint8:
        query = e4m3_values(query.contiguous())
    out = torch.full((n, topk), -1, dtype=torch.int32, device=query.device)
    exact = torch.promote_types(query.dtype, torch.float32)
    workspace = parse_bytes(workspace_bytes, "workspace_bytes")
    block, split = _blocks(workspace, heads, dim, topk, exact.itemsize)
    begin = 0
    for b, (q_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
        first = kv_len - q_len
        for low in range(0, q_len if kv_len else 0, block):
            high = min(low + block, q_len)
            mine = slice(begin + low, begin + high)
            positions = torch.arange(first + low, first + high, device=query.device)
            visible = closed_entries(positions, ratio)[:, None]
            best = _Best(topk, high - low, query.device, exact)
            for start in range(0, (first + high) // ratio, split):
                stop = min(start + split, (first + high) // ratio)
                entries = torch.arange(start, stop, device=query.device)
                if (first + high) // ratio <= topk:  # nothing to choose: no score is needed
                    scores = query.new_zeros(high - low, stop - start, dtype=exact)
                else:
                    at = entry_slots(entries, batch.block_table[b], batch.page_tokens, ratio)
                    key = read_records(keys, at, record).to(exact)
                    scores = _scores(query[mine].to(exact), weights[mine].to(exact), key)
                best.take(torch.where(entries < visible, scores, -torch.inf), entries)
            out[mine] = best.ascending(visible)
        begin += q_len
    return chosen_slots(out, batch, ratio) if slots else out


def check_choice(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    batch: PagedBatch,
    *,
    ratio: int,
    topk: int,
    record: Record,
) -> None:
    """Raises ConfigError for a number of entries below 1, and ValueError for shapes that do not fit
    together."""
    if topk < 1:
        raise ConfigError(f"{topk=}: at least one entry is chosen")
    n, heads, dim = query.shape
    check_queries(n, batch)
    if ratio < 1 or batch.page_tokens % ratio:
        raise ValueError(f"entries of {ratio} tokens, pages of {batch.page_tokens}")
    if weights.shape != (n, heads) or (record.dim or keys.shape[-1]) != dim:
        raise ValueError(
            f"query {tuple(query.shape)}, weights {tuple(weights.shape)}, keys {tuple(keys.shape)}"
        )


class _Best:
    """The highest scores seen so far, of equal ones the entry that came first."""

    __slots__ = ("entries", "scores", "topk")

    def __init__(self, topk: int, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.topk = topk
        self.scores = torch.empty(rows, 0, dtype=dtype, device=device)
        self.entries = torch.empty(rows, 0, dtype=torch.int64, device=device)

    def take(self, scores: Tensor, entries: Tensor) -> None:
        # What was kept comes first and is sorted, so a stable sort keeps earlier entries ahead.
        scores = torch.cat((self.scores, scores), dim=1)
        entries = torch.cat((self.entries, entries.expand(scores.shape[0], -1)), dim=1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        self.scores = scores[:, : self.topk]
        self.entries = entries.gather(1, order[:, : self.topk])

    def ascending(self, visible: Tensor) -> Tensor:
        """(rows, topk) int32 of what was kept below ``visible`` (rows, 1), -1 behind."""
        none = torch.iinfo(torch.int32).max
        entries = torch.where(self.entries < visible, self.entries, none).sort(dim=1).values
        out = torch.full(
            (entries.shape[0], self.topk), -1, dtype=torch.int32, device=entries.device
        )
        out[:, : entries.shape[1]] = torch.where(entries == none, -1, entries)
        return out


def _scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """(q, m) of query (q, heads, dim), weights (q, heads) and keys (m, dim)."""
    products = torch.einsum("qhd,md->qhm", query, keys).relu_()
    return torch.einsum("qhm,qh->qm", products, weights)


def _blocks(workspace: int, heads: int, dim: int, topk: int, itemsize: int) -> tuple[int, int]:
    """How many queries are scored at a time, and against how many keys."""
    split = SPLIT_KEYS

    def a_query() -> int:
        # Products of each head; then scores and entries as joined, sorted and cut.
        return heads * (split + dim) * itemsize + 3 * (split + topk) * (itemsize + 8)

    while split > 64 and split * dim * 3 * itemsize + a_query() > workspace:
        split //= 2
    return max(1, (workspace - split * dim * 3 * itemsize) // a_query()), split
