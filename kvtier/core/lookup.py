"""``match``: what a lease opened now would find.  Reads only."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from kvtier.core.boundaries import inside_span
from kvtier.core.copies import CHECKPOINT, CPU, GPU
from kvtier.core.keys import check_spans, checkpoint_key, page_extras, page_key
from kvtier.core.residency import Residency
from kvtier.core.tree import Node
from kvtier.tokens import TokenBuffer
from kvtier.types import Identity, PrefixMatch, Span

__all__ = ["NOTHING", "absent", "match"]

NOTHING = PrefixMatch(0, 0, 0, 0, 0, 0)


def absent(res: Residency, tokens: TokenBuffer, identity: Identity) -> bool:
    """Whether ``match`` without spans would find nothing; False also where that takes a look.

    The one thing here that may be asked at any time, whatever another thread is changing: it
    reads two references and looks one beginning up, and each of them is as it was before some
    change or after it.  A page is known from the moment its run hangs under its beginning.
    """
    tree = res.tree
    who, root = tree.last
    if who is not identity or res.disk is not None:
        return False
    children = None if root is None else root.children
    return children is None or tokens.data[: tree.head] not in children


def match(
    res: Residency, tokens: TokenBuffer, identity: Identity, spans: Sequence[Span]
) -> PrefixMatch:
    """What a lease opened now would find.  Reads only: no pin, no recency change."""
    data, disk, geometry = tokens.data, res.disk, res.geometry
    extras: Mapping[int, bytes] | None = None
    if spans:
        spans = check_spans(spans, len(tokens))
        extras = page_extras(spans, geometry.page_tokens)
    root, run, pages = res.tree.find_root(identity), None, 0
    if root is not None:
        run, pages = res.tree.reach(root, data, extras)
    elif disk is not None and disk.rows:
        root = res.bare_root(identity)
    else:
        return NOTHING
    known = history = 0 if run is None else run.parent.depth + pages
    page = geometry.page_tokens
    limit = ((len(data) >> 2) - 1) // page
    whole = known >= limit and not (spans or geometry.has_tails)
    if whole and run is not None and limit > 0 and run.held[GPU] >= pages:
        return _on_device(limit * page, known * page)
    last = root if run is None else run.nodes[pages - 1]
    if known < limit and disk is not None:
        history += _disk_pages(res, last, data, extras, known, limit)
    if not history:
        return NOTHING
    usable = min(history, limit)
    if spans or geometry.has_tails:
        usable = _resumable(res, last, history, usable, data, extras, spans)
    if usable < 1:
        return PrefixMatch(0, history * page, 0, 0, 0, 0)
    on_gpu = min(_in_tier(last, GPU), usable)
    on_cpu = on_gpu if on_gpu == usable else max(on_gpu, min(_in_tier(last, CPU), usable))
    return PrefixMatch(
        usable * page,
        history * page,
        on_gpu * page,
        (on_cpu - on_gpu) * page,
        (usable - on_cpu) * page,
        (usable - on_gpu) * geometry.page_bytes,
    )


@lru_cache(4096)  # half the time of making one, on the path that is asked most
def _on_device(tokens: int, history_tokens: int) -> PrefixMatch:
    return PrefixMatch(tokens, history_tokens, tokens, 0, 0, 0)


def _resumable(
    res: Residency,
    last: Node,
    history: int,
    usable: int,
    data: bytes,
    extras: Mapping[int, bytes] | None,
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
    """How many pages of the path to ``node`` have a history copy in a tier.  Tiers are
    prefix-closed: a run with one answers for all above it."""
    while (run := node.run) is not None:
        if held := min(run.held[slot], node.index + 1):
            return run.parent.depth + held
        node = run.parent
    return 0


def _disk_checkpoints(
    res: Residency, last: Node, data: bytes, extras: Mapping[int, bytes] | None, count: int
) -> list[bool]:
    """For ``count`` pages behind ``last`` that are only on disk: whether each has a checkpoint."""
    stride, key, out = res.tree.stride, res.digest(last) if count else b"", []
    for page in range(last.depth, last.depth + count):
        extra = extras.get(page, b"") if extras else b""
        key = page_key(key, data[page * stride : (page + 1) * stride], extra)
        out.append(res.disk is not None and res.disk.find(checkpoint_key(key)) >= 0)
    return out


def _disk_pages(
    res: Residency,
    last: Node,
    data: bytes,
    extras: Mapping[int, bytes] | None,
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
        key = page_key(key, tokens, extras.get(page, b"") if extras else b"")
        if disk.find(key) < 0:
            break
        page += 1
    return page - first
