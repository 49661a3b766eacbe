"""Every invariant of the core, checked against first principles.

All violations are collected before raising, so that one failure in a log tells the whole story.
"""

from collections import Counter
from typing import TYPE_CHECKING

from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, Copy
from kvtier.core.ops import OpKind
from kvtier.core.tree import NEVER, Node
from kvtier.errors import InvariantError
from kvtier.types import LeaseState

if TYPE_CHECKING:
    from kvtier.core.machine import CacheCore

__all__ = ["check"]


def check(core: "CacheCore") -> None:
    """Raises InvariantError naming every violated invariant; O(pages)."""
    errors: list[str] = []
    nodes = list(core.residency.nodes())
    pinned = _leases(core, errors)
    _nodes(core, nodes, pinned, errors)
    _copies(core, nodes, errors)
    _frames(core, nodes, errors)
    if core.residency.disk is not None:
        errors.extend(core.residency.disk.errors())
    if errors:
        raise InvariantError("\n".join(errors))


def _leases(core: "CacheCore", errors: list[str]) -> Counter[Node]:
    """Leases and tables (I4, I5); returns how often each node is pinned."""
    pins: Counter[Node] = Counter()
    page = core.geometry.page_tokens
    for rec in core.leases.values():
        pins.update(rec.nodes)
        active = rec.state is LeaseState.ACTIVE
        if bool(rec.waits) != (rec.state is LeaseState.RESTORING):
            errors.append(f"I4: lease {rec.id} is {rec.state.value} and waits for {rec.waits}")
        if not rec.waits <= core.operations.running.keys():
            errors.append(f"I4: lease {rec.id} waits for an op that has ended")
        if active and not rec.tail_ok:
            errors.append(f"I4: lease {rec.id} is active on a stale tail")
        if len(rec.tokens) != 4 * rec.length and rec.state is not LeaseState.RESTORING:
            errors.append(f"I5: lease {rec.id}: {rec.length} tokens, {len(rec.tokens)} bytes")
        if not active:
            continue
        if rec.capacity != len(rec.frames) * page or rec.length > rec.capacity:
            errors.append(f"I5: lease {rec.id}: length {rec.length}, capacity {rec.capacity}")
        table = core.tables.blocks[rec.row]
        if list(table[: len(rec.frames)]) != rec.frames or (table[len(rec.frames) :] != -1).any():
            errors.append(f"I5: lease {rec.id}: block table differs from its frames")
        if core.tables.lengths[rec.row] != rec.length:
            errors.append(f"I5: lease {rec.id}: length row differs")
        for i, (frame, own) in enumerate(zip(rec.frames, rec.owned, strict=True)):
            if own:
                continue
            copy = rec.nodes[i].copies[GPU] if i < len(rec.nodes) else None
            if copy is None or not copy.ready or copy.frames != (frame,):
                errors.append(f"I5: lease {rec.id}: page {i} names a frame it does not pin")
    for pre in core.prefetches.values():
        pins.update(pre.nodes)
    return pins


def _nodes(core: "CacheCore", nodes: list[Node], pins: Counter[Node], errors: list[str]) -> None:
    """Structure and counts of nodes (I2, I6, I7, I9)."""
    keeps: Counter[Node] = Counter()
    tails = Counter(pin.tail for pin in core.pins if pin.tail is not None)
    if tails != core.residency.kept_tails:
        errors.append("I2: checkpoints are kept that no pin keeps")
    for pin in core.pins:
        keeps.update(pin.nodes)
    for rec in core.leases.values():
        if rec.parked is not None:
            keeps.update(rec.parked.nodes[: rec.parked.kept])
    roots = Counter(rec.root for rec in core.leases.values())
    for who, root in core.residency.tree.roots.items():
        if root.pins != roots.pop(root, 0):
            errors.append(f"I2: the root of {who} has {root.pins} pins")
    if roots:
        errors.append(f"I7: {len(roots)} leases stand under roots that are gone")
    if len(nodes) != core.residency.tree.num_nodes:
        errors.append(f"I7: {len(nodes)} nodes, {core.residency.tree.num_nodes} counted")
    for n in nodes:
        parent = n.parent
        assert parent is not None
        if n.pins != pins[n] or n.keeps != keeps[n]:
            errors.append(
                f"I2: node {n.depth}: pins {n.pins}/{pins[n]}, keeps {n.keeps}/{keeps[n]}"
            )
        if parent.depth and (parent.pins < n.pins or parent.tick < n.tick):
            errors.append(f"I2: node {n.depth}: pins or tick above its parent's")
        if core.residency.best(n) is None:
            errors.append(f"I9: node {n.depth} has no READY copy")
        kept = n.copies[GPU] or n.copies[CPU] or n.offspring() or n.pins or n.keeps
        on_disk = [c for c in n.copies[DISK::CHECKPOINT] if c is not None]
        busy = on_disk and (n.expires < NEVER or any(c.readers or c.writer for c in on_disk))
        if not kept and not busy:
            errors.append(f"I7: node {n.depth} is kept for nothing")
        for tier in (GPU, CPU, DISK):
            kids = sum(k.copies[tier] is not None for k in n.offspring())
            if n.kids(tier) != kids:
                errors.append(f"I6: node {n.depth} counts {n.kids(tier)} in {tier}, has {kids}")
            if n.copies[tier] is not None and parent.depth and parent.copies[tier] is None:
                errors.append(f"I6: node {n.depth} is in tier {tier}, its parent is not")
            if n.copies[tier + CHECKPOINT] is not None and n.copies[tier] is None:
                errors.append(
                    f"I6: checkpoint of node {n.depth} is in tier {tier} without its page"
                )


def _copies(core: "CacheCore", nodes: list[Node], errors: list[str]) -> None:
    """Readers and writers of copies against the running operations (I3)."""
    readers: Counter[Copy] = Counter()
    writers: dict[Copy, int] = {}
    for run in core.operations.running.values():
        for m in run.moves:
            if m.source is not None and not (run.op.kind is OpKind.PACK and run.packed):
                readers[m.source] += 1
            for copy in m.targets:
                if copy in writers:
                    errors.append("I3: two operations fill one copy")
                writers[copy] = run.op.id
    res = core.residency
    live = [c for n in nodes for c in n.copies if c is not None]
    dead_pinned = [
        c
        for rec in core.leases.values()
        for n in rec.nodes
        if n.run is None and (c := n.copies[GPU]) is not None
    ]
    for copy in {*live, *dead_pinned, *res.orphans, *res.parked}:
        if copy.readers != readers[copy]:
            errors.append(f"I3: copy in {copy.tier}: {copy.readers} readers, {readers[copy]} ops")
        if copy.writer != writers.get(copy, 0):
            errors.append(f"I3: copy in {copy.tier} filled by {copy.writer}, {writers.get(copy)}")
        if copy.ready == bool(copy.writer) and copy.node is not None and copy.node.run is not None:
            errors.append(f"I3: copy in {copy.tier} ready={copy.ready}, writer={copy.writer}")
    for n in nodes:
        for slot, held in enumerate(n.copies):
            if held is None:
                continue
            if held.node is not n or held.slot != slot:
                errors.append(f"I3: copy of node {n.depth} belongs elsewhere")
            if held.tier != DISK and not held.queued and res.candidates.evictable(held):
                errors.append(f"I10: copy of node {n.depth} in {held.tier} could leave, unasked")


def _frames(core: "CacheCore", nodes: list[Node], errors: list[str]) -> None:
    """Every frame of every pool is accounted for once (I1)."""
    res = core.residency
    used: dict[int, Counter[int]] = {GPU: Counter(), CPU: Counter(), 3: Counter()}

    def count(copy: Copy) -> None:
        if copy.tier != DISK:
            used[CPU if copy.slot == CPU + CHECKPOINT else copy.slot].update(copy.frames)

    dead = {n for rec in core.leases.values() for n in rec.nodes if n.run is None}
    dead |= {n for pre in core.prefetches.values() for n in pre.nodes if n.run is None}
    for n in [*nodes, *dead]:
        for copy in n.copies:
            if copy is not None:
                count(copy)
    for copy in [*res.orphans, *res.parked]:
        count(copy)
    held: Counter[int] = Counter()
    for rec in core.leases.values():
        held.update(f for f, own in zip(rec.frames, rec.owned, strict=True) if own)
        held.update(rec.spare)
        used[3].update(f for _, f in rec.captures)
    for run in core.operations.running.values():
        for m in run.moves:
            if m.reads >= 0 and not run.packed:
                held[m.reads] += 1
            if m.writes >= 0:
                held[m.writes] += 1
    if dict(held) != core.operations.private.refs:
        errors.append(f"I1: private frames {core.operations.private.refs}, held {dict(held)}")
    used[GPU].update(held.keys())
    for slot, frames in used.items():
        twice = [f for f, c in frames.items() if c > 1]
        if twice:
            errors.append(f"I1: frames {twice} of pool {slot} owned twice")
        if res.pools[slot].taken() != set(frames):
            errors.append(f"I1: pool {slot} differs: {res.pools[slot].taken() ^ set(frames)}")
        if res.pools[slot].free + len(frames) != res.pools[slot].size:
            errors.append(f"I1: pool {slot} has lost frames")
    _tail_frames(core, errors)
    if res.disk is not None:
        _disk_links(core, nodes, errors)


def _tail_frames(core: "CacheCore", errors: list[str]) -> None:
    tails = {id(r.tail): r.tail for r in core.leases.values() if r.tail is not None}
    ops: Counter[int] = Counter()
    for run in core.operations.running.values():
        for m in run.moves:
            for tail in (m.tail, None if run.packed else m.tail_src):
                if tail is not None:
                    tails[id(tail)] = tail
                    ops[id(tail)] += 1
    states = Counter(t.state for t in tails.values())
    windows = Counter(w for t in tails.values() for w in t.windows.values())
    for name, pool, frames in (
        ("state slots", core.tails.states, states),
        ("window pages", core.tails.windows, windows),
    ):
        if pool.taken() != set(frames) or any(c > 1 for c in frames.values()):
            errors.append(f"I1: {name} differ: {pool.taken() ^ set(frames)}")
        if pool.free + len(frames) != pool.size:
            errors.append(f"I1: {name} are lost")
    for key, tail in tails.items():
        if tail.ops != ops[key]:
            errors.append(f"I3: tail of state {tail.state}: {tail.ops} ops, {ops[key]} running")


def _disk_links(core: "CacheCore", nodes: list[Node], errors: list[str]) -> None:
    res = core.residency
    disk = res.disk
    assert disk is not None
    linked = {c.frames[0]: n for n in nodes if (c := n.copies[DISK]) is not None}
    if linked != res.disk_nodes:
        errors.append("I6: disk rows and nodes are linked differently")
    if disk.quarantined != (of_keys := sum(core.operations.bad_keys.values())):
        errors.append(f"I1: {disk.quarantined} disk frames quarantined, {of_keys} of known keys")
    busy: Counter[int] = Counter()
    for n in nodes:
        for slot in (DISK, DISK + CHECKPOINT):
            copy = n.copies[slot]
            if copy is None:
                continue
            row = copy.frames[0]
            if not disk.live[row] or (slot == DISK and disk.key(row) != res.digest(n)):
                errors.append(f"I6: node {n.depth} names a disk row that is not its own")
            kept = n.keeps if slot == DISK else res.kept_tails.get(n, 0)
            busy[row] += copy.readers + bool(copy.writer) + bool(kept)
    errors.extend(
        f"I3: disk row {row} busy {disk.busy[row]}, held {busy[int(row)]}"
        for row in disk.all_rows()
        if disk.busy[row] != busy[int(row)]
    )
