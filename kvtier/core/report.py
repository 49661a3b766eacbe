"""Looking inside: statistics, explanations, listings and the state's digest.  Reads only."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.core.boundaries import boundaries, inside_span
from kvtier.core.copies import CHECKPOINT, DISK, GPU, TIERS, Copy
from kvtier.core.keys import check_spans, checkpoint_key, page_extras, page_key
from kvtier.core.leases import LeaseRecord
from kvtier.core.load_costs import ALWAYS, LoadCosts, stages
from kvtier.core.ops import OpKind
from kvtier.core.tree import Node
from kvtier.tokens import TokenBuffer
from kvtier.types import (
    CacheStats,
    Identity,
    LeaseInfo,
    LeaseState,
    PageInfo,
    PageReport,
    Span,
    Tier,
    TierStats,
)

if TYPE_CHECKING:
    from kvtier.core.machine import CacheCore

__all__ = ["digest", "explain", "leases", "pages", "stats", "tiers_of"]


def tiers_of(node: Node, kind: int = 0) -> frozenset[Tier]:
    """Tiers with a READY copy of a page, or (``CHECKPOINT``) of its checkpoint."""
    copies = node.copies[kind : kind + 3]
    return frozenset(t for t, c in zip(TIERS, copies, strict=True) if c is not None and c.ready)


def explain(
    core: "CacheCore",
    tokens: TokenBuffer,
    identity: Identity,
    spans: Sequence[Span],
    costs: LoadCosts | None = None,
) -> list[PageReport]:
    """Page by page: where it is, or why it is not a hit; with ``costs`` also what a lease that
    weighs them would do."""
    page, res = core.geometry.page_tokens, core.residency
    spans = check_spans(spans, len(tokens)) if spans else ()
    extras = page_extras(spans, page) if spans else {}
    stride, data = page * 4, tokens.data
    root = res.tree.roots.get(identity) or res.bare_root(identity)
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
        elif own in res.ghosts:
            reason = "evicted"
        else:
            reason = "never_seen"
        out.append(PageReport(i * page, here, tails, reason))  # type: ignore[arg-type]
    return out if costs is None else _weighed(core, out, nodes, len(tokens), spans, costs)


def _weighed(
    core: "CacheCore",
    out: Sequence[PageReport],
    nodes: Sequence[Node],
    tokens: int,
    spans: Sequence[Span],
    costs: LoadCosts,
) -> list[PageReport]:
    """The same with what each page would take to load, and those that are not worth it."""
    page, tails = core.geometry.page_tokens, core.geometry.has_tails
    limit = max(0, tokens - 1) // page
    known = next((i for i, each in enumerate(out) if not each.tiers), len(out))
    path = nodes[: min(limit, known)]
    below = [bool(each.checkpoint_tiers) for each in out[len(path) : min(limit, known)]]
    places = boundaries(core.operations, path, spans, below)
    loads = {at.pages: costs.load_s(at) for at in places}
    worth = max(stages(places, tokens, page, costs, even=not tails), default=0)
    weighed: list[PageReport] = []
    for number, each in enumerate(out, start=1):
        reason = "recomputed" if each.reason == "hit" and number > worth else each.reason
        compute_s = None if costs.compute_s == ALWAYS else number * page * costs.compute_s
        weighed.append(replace(each, reason=reason, load_s=loads.get(number), compute_s=compute_s))
    return weighed


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
    held, in_flight = _held(core), _in_flight(core)
    return CacheStats(
        lookups=core.lookups,
        lookup_tokens=core.restore.lookup_tokens,
        computed_tokens=core.restore.computed_tokens,
        recomputed_tokens=core.restore.recomputed_tokens,
        leases=len(core.leases),
        restoring=restoring,
        packing=kinds.count(OpKind.PACK),
        storing=kinds.count(OpKind.STORE),
        dropped_stores=core.lower.dropped,
        tiers={t: _tier(core, t, held, in_flight[t]) for t in TIERS},
    )


def _tier(core: "CacheCore", tier: Tier, held: Collection[Node], in_flight: int) -> TierStats:
    """One tier's frames, from what is held and in flight: resident ones are too many to visit."""
    res = core.residency
    if tier is Tier.DISK and res.disk is None:
        return TierStats()
    reserved = quarantined = 0
    if tier is Tier.DISK:
        disk = res.disk
        assert disk is not None
        capacity, free = disk.capacity, disk.free
        quarantined = capacity - free - disk.used  # a STORE counted on it may be on its way
    else:
        pool = res.pools[int(tier)]
        capacity, free = pool.size, pool.free
        if tier is Tier.GPU:  # also pages that were cleared while leases stood on them
            reserved = len(core.operations.private.refs)
            reserved += sum(n.run is None and n.copies[GPU] is not None for n in held)
        else:
            reserved = sum(len(c.frames) for c in res.parked)
    return TierStats(
        capacity=capacity,
        free=free,
        resident=capacity - free - reserved - in_flight - quarantined,
        reserved=reserved,
        in_flight=in_flight,
        quarantined=quarantined,
        pinned=sum(
            _frames(core, copy)
            for n in held
            if n.run is not None
            for copy in (n.copies[tier], n.copies[tier + CHECKPOINT])
            if copy is not None and copy.slot != GPU + CHECKPOINT
        ),
        hit_tokens=core.restore.hit_tokens[tier],
        evictions=res.evictions[tier],
        faults=res.faults[tier],
    )


def _in_flight(core: "CacheCore") -> Mapping[Tier, int]:
    """Frames of each tier that operations still write, or hold although their page has left."""
    filling = {
        copy: None
        for run in core.operations.running.values()
        for move in run.moves
        for copy in move.targets
        if copy.node is not None and copy.node.run is not None and not copy.ready
    }
    left = [copy for copy in core.residency.orphans if copy.tier != DISK]
    frames = dict.fromkeys(TIERS, 0)
    for copy in (*filling, *left):
        if copy.slot != GPU + CHECKPOINT:
            frames[TIERS[copy.tier]] += _frames(core, copy)
    return frames


def _frames(core: "CacheCore", copy: Copy) -> int:
    if copy.tier != DISK:
        return len(copy.frames)
    disk = core.residency.disk
    assert disk is not None
    return int(disk.frames[copy.frames[0]])


def _held(core: "CacheCore") -> Collection[Node]:
    """Pages that leases, paused ones too, prefetches or pins hold."""
    held: dict[Node, None] = {}
    paths = [rec.nodes for rec in core.leases.values()]
    paths += [p.nodes[: p.kept] for rec in core.leases.values() if (p := rec.parked) is not None]
    paths += [rec.nodes for rec in core.prefetches.values()]
    paths += [rec.nodes for rec in core.pins]
    for path in paths:
        for n in reversed(path):
            if n in held:  # and so is all above it
                break
            held[n] = None
    return held


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


def leases(core: "CacheCore") -> list[LeaseInfo]:
    """The open leases, oldest first."""
    return [
        LeaseInfo(
            id=r.id,
            label=r.label,
            state=r.state,
            num_tokens=r.length,
            cached_tokens=r.cached_tokens,
            pages=len(r.frames),
            opened_at=r.opened_at,
        )
        for r in core.leases.values()
    ]


def digest(core: "CacheCore") -> bytes:
    """16 bytes over the whole state: equal for equal histories of calls."""
    h = hashlib.blake2b(digest_size=16)
    res = core.residency
    numbers: dict[Node, int] = {}
    for who, root in res.tree.roots.items():
        h.update(repr((who, root.pins)).encode())
        for n in res.tree.iterate(root):
            numbers[n] = len(numbers)
            copies = [_copy_state(c) for c in n.copies]
            used = (n.tick, n.hits, n.priority, n.expires)
            h.update(res.digest(n))
            h.update(repr((n.depth, n.pins, n.keeps, used, copies)).encode())
    for rec in core.leases.values():
        path = [numbers.get(n, -1) for n in rec.nodes]
        h.update(repr((path, _lease_state(rec))).encode())
        h.update(rec.tokens)
    loose = [[_copy_state(c) for c in copies] for copies in (res.orphans, res.parked)]
    held = [[numbers.get(n, -1) for n in p.nodes] for p in core.prefetches.values()]
    held += [[numbers.get(n, -1) for n in p.nodes] for p in core.pins]
    pools = [*res.pools.values(), core.tails.states, core.tails.windows]
    counts = (res.tick, core.lookups, core.lower.dropped, res.evictions, res.faults)
    running = [(r.op, r.packed) for r in core.operations.running.values()]
    h.update(repr((loose, held, [p.order() for p in pools], counts, running)).encode())
    if res.disk is not None:
        rows = res.disk.all_rows()
        h.update(b"".join(res.disk.key(int(r)) for r in rows))
        h.update(rows.tobytes() + res.disk.tick[rows].tobytes() + res.disk.busy[rows].tobytes())
    return h.digest()


def _copy_state(copy: Copy | None) -> tuple[object, ...] | None:
    if copy is None:
        return None
    mark = None if copy.mark is None else copy.mark.state
    return (copy.slot, copy.frames, copy.ready, copy.readers, copy.writer, copy.expendable, mark)


def _lease_state(rec: LeaseRecord) -> tuple[object, ...]:
    tail = None if rec.tail is None else (rec.tail.state, rec.tail.windows, rec.tail.ops)
    parked = None
    if rec.parked is not None:
        parked = (rec.parked.length, rec.parked.ok, [_copy_state(c) for c in rec.parked.copies])
    return (
        rec.id,
        rec.row,
        rec.state,
        (rec.length, rec.capacity, rec.limit, rec.write),
        (rec.frames, rec.owned, rec.spare, rec.captures),
        (rec.costs, rec.stages, rec.recomputed),
        sorted(rec.waits),
        (tail, rec.tail_ok),
        parked,
    )
