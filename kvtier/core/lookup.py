"""``match``: what a lease opened now would find.  Reads only."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvtier.core.boundaries import inside_span
from kvtier.core.copies import CHECKPOINT, CPU, GPU
from kvtier.core.keys import check_spans, checkpoint_key, page_extras, page_key
from kvtier.core.residency import Residency
from kvtier.core.tree import Node
from kvtier.tokens import TokenBuffer
from kvtier.types import Identity, PrefixMatch, Span

__all__ = ["match"]

_NOTHING = PrefixMatch(0, 0, 0, 0, 0, 0)
_NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})
_new = tuple.__new__  # half the time of calling the class, on the path that is asked most


def match(
    res: Residency, tokens: TokenBuffer, identity: Identity, spans: Sequence[Span]
) -> PrefixMatch:
    """What a lease opened now would find.  Reads only: no pin, no recency change."""
    data, disk, extras = tokens.data, res.disk, _NO_EXTRAS
    if spans:
        spans = check_spans(spans, len(tokens))
        extras = page_extras(spans, res.geometry.page_tokens)
    root = res.tree.find_root(identity)
    if root is None:
        if disk is None or not disk.rows:
            return _NOTHING
        last = res.bare_root(identity)
    else:
        last = res.tree.walk(root, data, extras)
    known = history = last.depth
    if not known and disk is None:
        return _NOTHING
    geometry = res.geometry
    page = geometry.page_tokens
    limit = ((len(data) >> 2) - 1) // page
    if known >= limit > 0 and last.copies[GPU] and not (spans or geometry.has_tails):
        tokens_found = limit * page  # all on the device
        return _new(PrefixMatch, (tokens_found, known * page, tokens_found, 0, 0, 0))
    if known < limit and disk is not None:
        history += _disk_pages(res, last, data, extras, known, limit)
        if not history:
            return _NOTHING
    usable = min(history, limit)
    if spans or res.geometry.has_tails:
        usable = _resumable(res, last, history, usable, data, extras, spans)
    if usable < 1:
        return _NOTHING if not history else PrefixMatch(0, history * page, 0, 0, 0, 0)
    on_gpu = min(_in_tier(last, GPU), usable)
    on_cpu = on_gpu if on_gpu == usable else max(on_gpu, min(_in_tier(last, CPU), usable))
    return PrefixMatch(
        usable * page,
        history * page,
        on_gpu * page,
        (on_cpu - on_gpu) * page,
        (usable - on_cpu) * page,
        (usable - on_gpu) * res.geometry.page_bytes,
    )


def _resumable(
    res: Residency,
    last: Node,
    history: int,
    usable: int,
    data: bytes,
    extras: Mapping[int, bytes],
    spans: Sequence[Span],
) -> int:
    """The deepest of ``usable`` page ends that no span and no missing checkpoint rules out."""
    page = res.geometry.page_tokens
    nodes = res.tree.path(last)
    tails: list[bool] = []
    if res.geometry.has_tails:
        tails = [res.best(n, CHECKPOINT) is not None for n in nodes]
        tails += _disk_checkpoints(res, last, data, extras, history - len(nodes))
    while usable:
        if (not tails or tails[usable - 1]) and not inside_span(usable * page, spans):
            break
        usable -= 1
    return usable


def _in_tier(node: Node, slot: int) -> int:
    """How many pages of the path to ``node`` have a copy in a tier.  Tiers are prefix-closed: a
    page with a copy answers for all above it, and within a run a bisection finds the last."""
    while node.depth and node.copies[slot] is None:
        run = node.run
        assert run is not None
        if run.nodes[0].copies[slot] is None:
            node = run.parent
            continue
        low, high = 0, node.index
        while high - low > 1:
            mid = (low + high) // 2
            if run.nodes[mid].copies[slot] is None:
                high = mid
            else:
                low = mid
        node = run.nodes[low]
    return node.depth


def _disk_checkpoints(
    res: Residency, last: Node, data: bytes, extras: Mapping[int, bytes], count: int
) -> list[bool]:
    """For ``count`` pages behind ``last`` that are only on disk: whether each has a checkpoint."""
    stride, key, out = res.tree.stride, res.digest(last) if count else b"", []
    for page in range(last.depth, last.depth + count):
        key = page_key(key, data[page * stride : (page + 1) * stride], extras.get(page, b""))
        out.append(res.disk is not None and res.disk.find(checkpoint_key(key)) >= 0)
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
    key, page = last.digest or res.digest(last), first
    while page < limit:
        tokens = data[page * stride : (page + 1) * stride]
        key = page_key(key, tokens, extras.get(page, b""))
        if disk.find(key) < 0:
            break
        page += 1
    return page - first
