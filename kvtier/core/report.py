"""Looking inside: statistics, explanations, listings and the state's digest.  Reads only."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.core.copies import CHECKPOINT, GPU, TIERS
from kvtier.core.keys import check_spans, checkpoint_key, page_extras, page_key
from kvtier.core.ops import OpKind
from kvtier.core.restore import inside_span
from kvtier.core.tree import Node
from kvtier.tokens import TokenBuffer
from kvtier.types import (
    CacheStats,
    Identity,
    LeaseState,
    PageInfo,
    PageReport,
    Span,
    Tier,
    TierStats,
)

if TYPE_CHECKING:
    from kvtier.core.machine import CacheCore

__all__ = ["digest", "explain", "pages", "stats", "tiers_of"]


def tiers_of(node: Node, kind: int = 0) -> frozenset[Tier]:
    """Tiers with a READY copy of a page, or (``CHECKPOINT``) of its checkpoint."""
    copies = node.copies[kind : kind + 3]
    return frozenset(t for t, c in zip(TIERS, copies, strict=True) if c is not None and c.ready)


def explain(
    core: "CacheCore", tokens: TokenBuffer, identity: Identity, spans: Sequence[Span]
) -> list[PageReport]:
    """Page by page: where it is, or why it is not a hit."""
    page, res = core.geometry.page_tokens, core.residency
    spans = check_spans(spans, len(tokens)) if spans else ()
    extras = page_extras(spans, page) if spans else {}
    stride, data = page * 4, tokens.data
    root = res.tree.roots.get(identity) or res.new_root(identity)
    nodes = res.tree.path(res.tree.walk(root, data, extras or None))
    key, known = root.digest, True
    out: list[PageReport] = []
    for i in range(len(data) // stride):
        own, extra = data[i * stride : (i + 1) * stride], extras.get(i, b"")
        key = page_key(key, own, extra)
        here: frozenset[Tier] = frozenset()
        tails: frozenset[Tier] = frozenset()
        if i < len(nodes):
            here, tails = tiers_of(nodes[i]), tiers_of(nodes[i], CHECKPOINT)
        if res.disk is not None and known and res.disk.find(key) >= 0:
            here |= {Tier.DISK}
            if res.disk.find(checkpoint_key(key)) >= 0:
                tails |= {Tier.DISK}
        known = bool(here)
        reason: str
        if here:
            end = (i + 1) * page
            if end >= len(tokens):
                reason = "last_token"
            elif inside_span(end, spans):
                reason = "in_span"
            elif core.geometry.has_tails and not tails:
                reason = "no_checkpoint"
            else:
                reason = "hit"
        elif key in core.operations.suspects:
            reason = "quarantined"
        elif _elsewhere(core, identity, data[: (i + 1) * stride], extras):
            reason = "other_identity"
        elif res.seen_before(own):
            reason = "evicted"
        else:
            reason = "never_seen"
        out.append(PageReport(i * page, here, tails, reason))  # type: ignore[arg-type]
    return out


def _elsewhere(
    core: "CacheCore", identity: Identity, data: bytes, extras: Mapping[int, bytes]
) -> bool:
    """Whether another identity has these pages in memory."""
    pages = len(data) // (core.geometry.page_tokens * 4)
    return any(
        core.residency.tree.walk(root, data, extras or None).depth == pages
        for who, root in core.residency.tree.roots.items()
        if who != identity
    )


def stats(core: "CacheCore") -> CacheStats:
    """A consistent snapshot of the core's counters."""
    running = core.operations.running.values()
    kinds = [r.op.kind for r in running]
    restoring = sum(r.state is LeaseState.RESTORING for r in core.leases.values())
    return CacheStats(
        lookups=core.lookups,
        lookup_tokens=core.lookup_tokens,
        computed_tokens=core.restore.computed_tokens,
        leases=len(core.leases),
        restoring=restoring,
        packing=kinds.count(OpKind.PACK),
        storing=kinds.count(OpKind.STORE),
        dropped_stores=core.lower.dropped,
        tiers={t: _tier(core, t) for t in TIERS},
    )


def _tier(core: "CacheCore", tier: Tier) -> TierStats:
    res = core.residency
    resident = in_flight = pinned = 0
    for n in res.nodes():
        for slot in (int(tier), tier + CHECKPOINT):
            copy = n.copies[slot]
            if copy is None or slot == GPU + CHECKPOINT:
                continue
            weight = len(copy.frames)
            if tier is Tier.DISK:
                assert res.disk is not None
                weight = int(res.disk.frames[copy.frames[0]])
            resident += weight * copy.ready
            in_flight += weight * (not copy.ready)
            pinned += weight * bool(n.pins or n.keeps)
    reserved = quarantined = 0
    if tier is Tier.DISK:
        disk = res.disk
        if disk is None:
            return TierStats()
        capacity, free, quarantined = disk.capacity, disk.free, disk.quarantined
        resident = disk.used - in_flight
    else:
        pool = res.pools[int(tier)]
        capacity, free = pool.size, pool.free
        in_flight += sum(
            len(c.frames) for c in res.orphans if c.tier == tier and c.slot != GPU + CHECKPOINT
        )
        reserved = capacity - free - resident - in_flight
    return TierStats(
        capacity=capacity,
        free=free,
        resident=resident,
        reserved=reserved,
        in_flight=in_flight,
        quarantined=quarantined,
        pinned=pinned,
        hit_tokens=core.restore.hit_tokens[tier],
        evictions=res.evictions[tier],
        faults=res.faults[tier],
    )


def pages(core: "CacheCore", identity: Identity | None) -> list[PageInfo]:
    """The radix tree, parents before children."""
    out: list[PageInfo] = []
    for who, root in core.residency.tree.roots.items():
        if identity is not None and who != identity:
            continue
        out.extend(
            PageInfo(
                core.residency.digest(n),
                n.depth,
                who,
                tiers_of(n),
                tiers_of(n, CHECKPOINT),
                n.pins,
                len(n.offspring()),
            )
            for n in core.residency.tree.iterate(root)
        )
    return out


def digest(core: "CacheCore") -> bytes:
    """16 bytes over the whole state: equal for equal histories of calls."""
    h = hashlib.blake2b(digest_size=16)
    numbers: dict[Node, int] = {}
    for who, root in core.residency.tree.roots.items():
        h.update(repr(who).encode())
        for n in core.residency.tree.iterate(root):
            numbers[n] = len(numbers)
            state = [
                None if c is None else (c.frames, c.ready, c.readers, c.writer, c.expendable)
                for c in n.copies
            ]
            h.update(core.residency.digest(n))
            h.update(repr((n.depth, n.pins, n.keeps, n.tick, n.hits, n.priority, state)).encode())
    for rec in core.leases.values():
        path = [numbers.get(n, -1) for n in rec.nodes]
        h.update(
            repr(
                (
                    rec.id,
                    rec.row,
                    rec.state,
                    rec.length,
                    rec.frames,
                    rec.owned,
                    path,
                    rec.spare,
                    sorted(rec.waits),
                    bytes(rec.tokens),
                )
            ).encode()
        )
    h.update(repr(sorted(core.operations.running)).encode())
    h.update(repr((core.residency.tick, core.lookups, core.lower.dropped)).encode())
    if core.residency.disk is not None:
        rows = core.residency.disk.all_rows()
        h.update(b"".join(core.residency.disk.key(int(r)) for r in rows))
    return h.digest()
