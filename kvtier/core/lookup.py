"""``match``: what a lease opened now would find.  Reads only."""

from collections.abc import Mapping, Sequence

from kvtier.core.keys import check_spans, checkpoint_key, page_extras, page_key
from kvtier.core.residency import CHECKPOINT, CPU, GPU, Residency
from kvtier.core.restore import inside_span
from kvtier.core.tree import Node
from kvtier.tokens import TokenBuffer
from kvtier.types import Identity, PrefixMatch, Span

__all__ = ["match"]

_NOTHING = PrefixMatch(0, 0, 0, 0, 0, 0)
Segments = list[tuple[list[Node], int, int]]


def match(
    res: Residency, tokens: TokenBuffer, identity: Identity, spans: Sequence[Span]
) -> PrefixMatch:
    """What a lease opened now would find.  Reads only: no pin, no recency change."""
    page = res.geometry.page_tokens
    data = tokens.data
    limit = (len(data) // 4 - 1) // page
    extras: dict[int, bytes] = {}
    if spans:
        spans = check_spans(spans, len(tokens))
        extras = page_extras(spans, page)
    root = res.tree.roots.get(identity)
    if root is None:
        if res.disk is None or not res.disk.rows or limit < 1:
            return _NOTHING
        root = res.root(identity)
    segments, known, last = res.tree.walk(root, data, extras or None)
    deeper = 0
    if known < limit and res.disk is not None:
        deeper = _disk_pages(res, last, data, extras, known, limit)
    usable = min(known + deeper, limit)
    if usable < 1:
        return _NOTHING
    if spans or res.geometry.has_tails:
        usable = _resumable(res, segments, known, deeper, usable, data, extras, spans)
    on_gpu = _leading(segments, GPU, usable)
    on_cpu = max(_leading(segments, CPU, usable), on_gpu) if on_gpu < usable else on_gpu
    return PrefixMatch(
        usable * page,
        (known + deeper) * page,
        on_gpu * page,
        (on_cpu - on_gpu) * page,
        (usable - on_cpu) * page,
        (usable - on_gpu) * res.geometry.page_bytes,
    )


def _resumable(
    res: Residency,
    segments: Segments,
    known: int,
    deeper: int,
    usable: int,
    data: bytes,
    extras: dict[int, bytes],
    spans: Sequence[Span],
) -> int:
    """The slow part of ``match``: boundaries that spans or missing checkpoints rule out."""
    page = res.geometry.page_tokens
    nodes = [n for run, first, stop in segments for n in run[first:stop]]
    tails = _disk_checkpoints(res, nodes, data, extras, deeper)
    while usable:
        node = nodes[usable - 1] if usable <= len(nodes) else None
        resumable = not res.geometry.has_tails or (
            res.best(node, CHECKPOINT) is not None
            if node is not None
            else tails[usable - 1 - known]
        )
        if resumable and not (spans and inside_span(usable * page, spans)):
            break
        usable -= 1
    return usable


def _leading(segments: Segments, slot: int, limit: int) -> int:
    """How many leading pages of a path have a copy in a tier.  Tiers are prefix-closed, so the
    last page of a segment answers for all, and otherwise a bisection does."""
    count = 0
    for nodes, first, stop in segments:
        stop = min(stop, first + limit - count)
        if stop <= first:
            break
        if nodes[stop - 1].copies[slot] is not None:
            count += stop - first
            continue
        low, high = first, stop - 1
        while low < high:
            mid = (low + high) // 2
            if nodes[mid].copies[slot] is not None:
                low = mid + 1
            else:
                high = mid
        return count + low - first
    return count


def _disk_checkpoints(
    residency: Residency,
    nodes: Sequence[Node],
    data: bytes,
    extras: Mapping[int, bytes],
    count: int,
) -> list[bool]:
    """For ``count`` pages behind ``nodes`` that are only on disk: whether each has a checkpoint."""
    if not count or residency.disk is None:
        return []
    stride = residency.tree.stride
    root = next(iter(residency.tree.roots.values())) if not nodes else None
    key = residency.digest(nodes[-1]) if nodes else (root.digest if root is not None else b"")
    out = []
    for page in range(len(nodes), len(nodes) + count):
        key = page_key(key, data[page * stride : (page + 1) * stride], extras.get(page, b""))
        out.append(residency.disk.find(checkpoint_key(key)) >= 0)
    return out


def _disk_pages(
    res: Residency,
    last: Node,
    data: bytes,
    extras: Mapping[int, bytes],
    first: int,
    limit: int,
) -> int:
    """How many pages from ``first`` on, at most up to ``limit``, are only on disk."""
    disk, stride = res.disk, res.tree.stride
    if disk is None or not disk.rows:
        return 0
    key, page = res.digest(last), first
    while page < limit:
        tokens = data[page * stride : (page + 1) * stride]
        key = page_key(key, tokens, extras.get(page, b""))
        if disk.find(key) < 0:
            break
        page += 1
    return page - first
