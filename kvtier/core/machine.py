"""``CacheCore``: the whole state machine, without I/O, threads, clock or tensors.

Every public method returns the operations the shell must start, in order, or raises having
changed nothing.  Completions come back through ``packed`` and ``finish``.  The same calls in the
same order lead to the same state (``digest``), in any process.

Invariants, checked by ``check()``:

* I1  every frame is free, in exactly one copy, private with a counted number of holders, or left
      behind to an operation;
* I2  pins count the leases whose path has the node, and never grow towards the leaves;
* I3  a filling copy has exactly one writer, a READY one none; readers are the operations reading;
* I4  a RESTORING lease waits for at least one operation, an ACTIVE one for none;
* I5  a block table names READY copies the lease pins, or frames it owns;
* I6  a page is in a tier only if its parent is;
* I7  a node lives only with a copy, a child, a pin or a keep;
* I9  every node in the tree has a READY history copy.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.config import Adaptive, CheckpointPolicy, EvictionPolicy
from kvtier.core import check, report
from kvtier.core.disk import DiskTable
from kvtier.core.geometry import Geometry
from kvtier.core.keys import ANONYMOUS, chain_root, check_spans, page_extras
from kvtier.core.leases import (
    LeaseRecord,
    LeaseTables,
    PinRecord,
    PrefetchRecord,
)
from kvtier.core.lower import Lower
from kvtier.core.operations import Move, Operations, TailPools
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.core.parking import Parking
from kvtier.core.residency import CHECKPOINT, CPU, DISK, GPU, Residency
from kvtier.core.restore import Restore, disk_pages, inside_span
from kvtier.core.tree import Node
from kvtier.errors import ConfigError, LeaseError, LeaseNotReady, LeaseReleased, OutOfPages
from kvtier.tokens import TokenBuffer
from kvtier.types import (
    CacheStats,
    Capture,
    Identity,
    LeaseState,
    PageInfo,
    PageReport,
    PrefixMatch,
    Span,
    Tier,
)

__all__ = ["CacheCore"]

_NEVER = float("inf")


class CacheCore:
    """Decides where pages live and what leases may read.  See the module's invariants."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        chain: bytes,
        eviction: str | EvictionPolicy = "adaptive",
        checkpoints: CheckpointPolicy | None = None,
        entries: npt.NDArray[Any] | None = None,
        read_only_disk: bool = False,
        store_after_hits: int = 0,
        max_pinned: float = 0.5,
    ) -> None:
        self.geometry = geometry
        self.chain = chain
        self.checkpoints = checkpoints or Adaptive()
        disk = None if entries is None else DiskTable(geometry.disk_frames, entries)
        self.residency = Residency(geometry, chain, eviction, disk)
        self.tails = TailPools(geometry.gpu_states, geometry.gpu_windows)
        self.operations = Operations(self.residency, self.tails)
        self.operations.read_only_disk = read_only_disk
        self.tables = LeaseTables(geometry.max_leases, windows=geometry.window > 0)
        self.settled: list[LeaseRecord | PrefetchRecord] = []
        self.restore = Restore(
            self.residency, self.operations, self.tails, self.tables, self.settled
        )
        self.lower = Lower(
            self.residency,
            self.operations,
            store_after_hits=store_after_hits,
            stores=not read_only_disk,
        )
        self.parking = Parking(self.restore, self.lower)
        self.leases: dict[int, LeaseRecord] = {}
        self.prefetches: dict[int, PrefetchRecord] = {}
        self.pins: list[PinRecord] = []
        self.max_pinned = max_pinned
        self.lookups = 0
        self.lookup_tokens = 0
        self._roots: dict[Identity, bytes] = {}
        self._expiring: list[tuple[float, int, Node]] = []
        self._last_id = 0
        if disk is not None:
            disk_ticks = disk.tick[disk.all_rows()]
            self.residency.tick = int(disk_ticks.max(initial=0))

    # ------------------------------------------------------------------ tables for steps
    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Committed tokens by ``LeaseRecord.row``."""
        return self.tables.lengths

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """Device page ids by ``LeaseRecord.row``; -1 past the end."""
        return self.tables.blocks

    @property
    def window_tables(self) -> npt.NDArray[np.int32]:
        """Window page ids by row and window page number; -1 where not held."""
        return self.tables.windows

    # ------------------------------------------------------------------ reading
    def _root(self, identity: Identity) -> Node:
        key = self._roots.get(identity)
        if key is None:
            key = self._roots[identity] = chain_root(self.chain, identity)
            if len(self._roots) > 4096:  # identities come and go; their digests are cheap to redo
                self._roots = {identity: key}
        return self.residency.root(identity, key)

    def match(
        self, tokens: TokenBuffer, identity: Identity = ANONYMOUS, spans: Sequence[Span] = ()
    ) -> PrefixMatch:
        """What a lease opened now would find.  Reads only: no pin, no recency change."""
        page = self.geometry.page_tokens
        data = tokens.data
        limit = (len(data) // 4 - 1) // page
        extras: dict[int, bytes] = {}
        if spans:
            spans = check_spans(spans, len(tokens))
            extras = page_extras(spans, page)
        res = self.residency
        root = res.tree.roots.get(identity)
        if root is None:
            if res.disk is None or not res.disk.rows or limit < 1:
                return _NOTHING
            root = self._root(identity)
        segments, known, last = res.tree.walk(root, data, extras or None)
        deeper = 0
        if known < limit and res.disk is not None:
            deeper, _ = disk_pages(res, last, data, extras, known, limit)
        usable = min(known + deeper, limit)
        if usable < 1:
            return _NOTHING
        if spans or self.geometry.has_tails:
            usable = self._resumable(segments, known, deeper, usable, data, extras, spans)
        on_gpu = _leading(segments, GPU, usable)
        on_cpu = max(_leading(segments, CPU, usable), on_gpu) if on_gpu < usable else on_gpu
        return PrefixMatch(
            usable * page,
            (known + deeper) * page,
            on_gpu * page,
            (on_cpu - on_gpu) * page,
            (usable - on_cpu) * page,
            (usable - on_gpu) * self.geometry.page_bytes,
        )

    def _resumable(
        self,
        segments: list[tuple[list[Node], int, int]],
        known: int,
        deeper: int,
        usable: int,
        data: bytes,
        extras: dict[int, bytes],
        spans: Sequence[Span],
    ) -> int:
        """The slow part of ``match``: boundaries that spans or missing checkpoints rule out."""
        page = self.geometry.page_tokens
        nodes = [n for run, first, stop in segments for n in run[first:stop]]
        tails = report.disk_checkpoints(self.residency, nodes, data, extras, deeper)
        while usable:
            node = nodes[usable - 1] if usable <= len(nodes) else None
            resumable = not self.geometry.has_tails or (
                self.residency.best(node, CHECKPOINT) is not None
                if node is not None
                else tails[usable - 1 - known]
            )
            if resumable and not (spans and inside_span(usable * page, spans)):
                break
            usable -= 1
        return usable

    # ------------------------------------------------------------------ leases
    def _check(self, rec: LeaseRecord) -> None:
        if rec.state is LeaseState.ACTIVE:
            return
        if rec.state is LeaseState.RELEASED:
            raise LeaseReleased(f"lease {rec.id} {rec.label!r} has been released")
        raise LeaseNotReady(
            f"lease {rec.id} {rec.label!r} is {rec.state.value}; wait on `ready` or resume() first"
        )

    def open(
        self,
        tokens: TokenBuffer,
        *,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        max_reuse: int | None = None,
        read: bool = True,
        write: bool = True,
        reserve: int = 0,
        priority: int = 0,
        expires: float | None = None,
        label: str = "",
        opened_at: str = "",
    ) -> tuple[LeaseRecord, list[Op]]:
        """Pin the longest prefix a lease may stand on and plan what is missing of it.

        Raises OutOfPages, having changed nothing, if ``reserve`` tokens past it do not fit or
        ``max_leases`` are open.
        """
        page = self.geometry.page_tokens
        spans = check_spans(spans, len(tokens)) if spans else ()
        extras = page_extras(spans, page) if spans else {}
        if not self.tables.free:
            raise OutOfPages(1, 0, f"leases (max_leases={self.geometry.max_leases})")
        limit = max(0, len(tokens) - 1) // page
        if max_reuse is not None:
            limit = min(limit, max(0, max_reuse) // page)
        if not read:
            limit = 0
        root = self._root(identity)
        path, known = self.restore.path(root, tokens.data, extras, limit)
        self._last_id += 1
        rec = LeaseRecord(
            id=self._last_id,
            row=self.tables.free[-1],
            identity=identity,
            spans=spans,
            extras=extras,
            root=root,
            prompt=tokens,
            read=read,
            write=write,
            limit=limit,
            priority=priority,
            expires=_NEVER if expires is None else expires,
            label=label,
            opened_at=opened_at,
            known_pages=known,
        )
        try:
            ops = self.restore.bring_up(rec, path, -(-reserve // page))
        except OutOfPages:
            for n in reversed(path):
                self.residency.prune(n)
            raise
        for n in reversed(path[len(rec.nodes) :]):
            self.residency.prune(n)
        self.tables.free.pop()
        self.leases[rec.id] = rec
        self.lookups += 1
        self.lookup_tokens += len(tokens)
        for n in rec.nodes:
            n.hits += 1
            self._lives_with(n, rec)
        if write:
            ops += self._lower_again(rec.nodes)
        return rec, ops

    def _lower_again(self, nodes: Sequence[Node]) -> list[Op]:
        """Offer what was skipped before to the lower tiers: it has been found again."""
        if not nodes or not self.geometry.cpu_frames:
            return []
        last, ops = nodes[-1], []
        if last.copies[CPU] is None:
            ops += self.lower.pack([nodes])
        elif last.copies[DISK] is None:
            ops += self.lower.store([last])
        return ops

    def reserve(
        self, recs: Sequence[LeaseRecord], counts: Sequence[int]
    ) -> tuple[list[Capture], list[Op]]:
        """Room for ``counts[i]`` tokens past the committed ones of ``recs[i]``, for all or (raising
        OutOfPages) none; with tails also the captures that fall due."""
        active = LeaseState.ACTIVE
        short: list[tuple[LeaseRecord, int]] = []
        for rec, n in zip(recs, counts, strict=True):
            if rec.state is not active:
                self._check(rec)
            if rec.length + n > rec.capacity:
                short.append((rec, n))
        if short:
            self._grow(short)
        if not self.geometry.has_tails:
            return [], []
        try:
            self._grow_windows(recs, counts)
        except OutOfPages:
            self._shrink(short)
            raise
        return self._captures(recs, counts), []

    def _grow(self, short: Sequence[tuple[LeaseRecord, int]]) -> None:
        page = self.geometry.page_tokens
        needs = [-(-(rec.length + n) // page) - len(rec.frames) for rec, n in short]
        total = sum(needs)
        if missing := self.residency.room(GPU, total):
            raise OutOfPages(total, total - missing)
        for (rec, _), need in zip(short, needs, strict=True):
            frames = self.operations.private.take(need)
            self.tables.put(rec.row, len(rec.frames), frames)
            rec.frames += frames
            rec.owned += [True] * need
            rec.capacity = len(rec.frames) * page

    def _shrink(self, short: Sequence[tuple[LeaseRecord, int]]) -> None:
        """Undo ``_grow`` as far as it matters: pages that hold no committed token go back."""
        page = self.geometry.page_tokens
        for rec, _ in short:
            self._cut(rec, -(-rec.length // page))

    def _cut(self, rec: LeaseRecord, keep: int) -> None:
        """Give back a lease's pages from page ``keep`` on, which must be its own."""
        while len(rec.frames) > keep:
            frame, own = rec.frames.pop(), rec.owned.pop()
            if own:
                self.operations.private.drop(frame)
        self.tables.cut(rec.row, keep)
        rec.capacity = len(rec.frames) * self.geometry.page_tokens

    def _grow_windows(self, recs: Sequence[LeaseRecord], counts: Sequence[int]) -> None:
        g = self.geometry
        if not g.window:
            return
        wanted: list[tuple[LeaseRecord, range]] = []
        need = 0
        for rec, n in zip(recs, counts, strict=True):
            if not n:
                continue
            assert rec.tail is not None
            pages = range(rec.length // g.window_page, (rec.length + n - 1) // g.window_page + 1)
            need += sum(p not in rec.tail.windows for p in pages)
            wanted.append((rec, pages))
        if need > self.tails.windows.free:
            raise OutOfPages(need, self.tails.windows.free, "window pages")
        for rec, pages in wanted:
            assert rec.tail is not None
            self.tails.grow(rec.tail, pages)
            for p in pages:
                self.tables.put_window(rec.row, p, rec.tail.windows[p])

    def _captures(self, recs: Sequence[LeaseRecord], counts: Sequence[int]) -> list[Capture]:
        """Device frames for the checkpoints due inside this step; what does not fit is skipped."""
        page, out = self.geometry.page_tokens, []
        pool = self.residency.pools[GPU + CHECKPOINT]
        for row, (rec, n) in enumerate(zip(recs, counts, strict=True)):
            self._return_captures(rec)
            if not rec.write:
                continue
            first = rec.length // page + 1
            for depth in range(first, (rec.length + n) // page + 1):
                if inside_span(depth * page, rec.spans) or not self.checkpoints.due(
                    depth, **self._place(rec, depth)
                ):
                    continue
                if self.residency.room(GPU + CHECKPOINT, 1):
                    self.lower.dropped += 1
                    continue
                (frame,) = pool.take()
                rec.captures.append((depth * page, frame))
                out.append(Capture(row, depth * page, frame))
        return out

    def _place(self, rec: LeaseRecord, depth: int) -> dict[str, bool]:
        """What a checkpoint policy may know of a page end."""
        end = max(0, len(rec.prompt) - 1) // self.geometry.page_tokens
        return {
            "prompt_end": depth in (end - 1, end, len(rec.prompt) // self.geometry.page_tokens),
            "branch": depth == rec.known_pages and rec.known_pages < end,
        }

    def _return_captures(self, rec: LeaseRecord) -> None:
        if rec.captures:
            self.residency.pools[GPU + CHECKPOINT].give(f for _, f in rec.captures)
            rec.captures = []

    def commit(self, recs: Sequence[LeaseRecord], counts: Sequence[int], data: bytes) -> list[Op]:
        """These tokens' rows are written (in stream order).  ``data`` holds them packed, lease
        after lease.  Full pages become shareable and start on their way down: one PACK for all."""
        page, offset = self.geometry.page_tokens, 0
        filled: list[LeaseRecord] = []
        lengths = self.tables.lengths
        for rec, n in zip(recs, counts, strict=True):
            stop = offset + 4 * n
            rec.tokens += data[offset:stop]
            offset = stop
            before = rec.length
            rec.length = after = before + n
            assert after <= rec.capacity, "I5: committing past the reserve"
            lengths[rec.row] = after
            if after // page > before // page:
                filled.append(rec)
        fresh = [f for rec in filled if (f := self._publish(rec))]
        if self.geometry.has_tails:
            for rec in recs:
                self._return_captures(rec)
                self._free_windows(rec)
        return self.lower.pack(fresh) if fresh else []

    def _publish(self, rec: LeaseRecord) -> list[Node]:
        """Pages that became full join the tree (D6); returns the lease's path if it grew."""
        page, res = self.geometry.page_tokens, self.residency
        last = rec.length // page
        while any(s.start < last * page and s.stop > rec.length for s in rec.spans):
            last -= 1  # a page of a span is published only once the whole span is committed
        first = len(rec.nodes)
        if not rec.write or last <= first:
            return []
        above = rec.nodes[-1] if rec.nodes else rec.root
        stride = page * 4
        fresh = res.tree.extend(above, bytes(rec.tokens[: last * stride]), first, rec.extras or None)
        res.pin(fresh)
        rec.nodes += fresh
        res.touch(rec.nodes)
        captured = dict(rec.captures)
        for i, node in enumerate(fresh, first):
            self._adopt(rec, i, node)
            frame = captured.get((i + 1) * page, -1)
            if frame >= 0 and node.copies[GPU + CHECKPOINT] is None:
                rec.captures.remove(((i + 1) * page, frame))
                copy = res.attach(node, GPU + CHECKPOINT, (frame,))
                copy.expendable = not self.checkpoints.keep(i + 1, **self._place(rec, i + 1))
        return rec.nodes

    def _adopt(self, rec: LeaseRecord, i: int, node: Node) -> None:
        """The tree takes a lease's page, unless it has one of its own already (D7)."""
        res = self.residency
        assert node.parent is not None
        there = node.copies[GPU]
        if there is not None and there.ready:
            return
        if there is not None:  # being restored: what the lease has is as good, and here
            res.supersede(there, (rec.frames[i],))
        else:
            if res.seen_before(node.depth, node.page(res.tree.stride)):
                node.hits += 1
            res.attach(node, GPU, (rec.frames[i],))
        self.operations.private.adopt(rec.frames[i])
        rec.owned[i] = False
        self._lives_with(node, rec)

    def _lives_with(self, node: Node, rec: LeaseRecord) -> None:
        """A page is as important, and lives as long, as the lease that asks most of it."""
        node.priority = max(node.priority, rec.priority)
        if node.expires < rec.expires:
            node.expires = rec.expires
            if rec.expires < _NEVER:
                self._last_id += 1
                heappush(self._expiring, (rec.expires, self._last_id, node))

    def _free_windows(self, rec: LeaseRecord) -> None:
        """Window pages that no later query reads go back (by committed tokens, never scheduled)."""
        g = self.geometry
        if not g.window or rec.tail is None:
            return
        below = max(0, rec.length - g.window + 1 - g.max_draft) // g.window_page
        for p in self.tails.cut(rec.tail, below):
            self.tables.put_window(rec.row, p, -1)

    def abandon(self, recs: Sequence[LeaseRecord]) -> None:
        """A step was left with an exception: captures go back, the reserve stays."""
        for rec in recs:
            self._return_captures(rec)

    def truncate(self, rec: LeaseRecord, n: int) -> tuple[int, list[Op]]:
        """Roll back to at most ``n`` committed tokens; returns where the lease now stands."""
        self._check(rec)
        if not 0 <= n <= rec.length:
            raise LeaseError(f"cannot truncate lease {rec.id} of {rec.length} tokens to {n}")
        page, res = self.geometry.page_tokens, self.residency
        if n == rec.length:
            self._cut(rec, -(-n // page))
            return n, []
        if self.geometry.has_tails:
            return self._truncate_to_checkpoint(rec, n)
        keep, part = -(-n // page), n % page
        ops: list[Op] = []
        if part and not (rec.owned[keep - 1] and self.operations.private.refs[rec.frames[keep - 1]] == 1):
            ops.append(self._copy_page(rec, keep - 1, part))  # shared, and about to be written
        self._cut(rec, keep)
        gone, rec.nodes = rec.nodes[n // page :], rec.nodes[: n // page]
        rec.length = n
        del rec.tokens[4 * n :]
        self.tables.lengths[rec.row] = n
        res.unpin(gone)
        return n, ops

    def _copy_page(self, rec: LeaseRecord, i: int, tokens: int) -> Op:
        """Copy-on-write of a lease's page ``i``, whose first ``tokens`` tokens matter."""
        private, source = self.operations.private, rec.frames[i]
        copy = None if rec.owned[i] else rec.nodes[i].copies[GPU]
        if copy is not None:
            copy.readers += 1
        missing = self.residency.room(GPU, 1)
        if copy is not None:
            copy.readers -= 1
        if missing:
            raise OutOfPages(1, 0)
        (frame,) = private.take(1)
        part = Part(Kind.HISTORY, Tier.GPU, (source,), Tier.GPU, (frame,))
        op = self.operations.in_order(OpKind.COPY, part, tokens)
        if rec.owned[i]:
            private.drop(source)
        rec.frames[i], rec.owned[i] = frame, True
        self.tables.put(rec.row, i, [frame])
        return op

    def _truncate_to_checkpoint(self, rec: LeaseRecord, n: int) -> tuple[int, list[Op]]:
        path = rec.nodes[: n // self.geometry.page_tokens]
        self._return_captures(rec)
        rec.limit = len(path)
        rec.prompt = TokenBuffer(bytes(rec.tokens[: 4 * n]))
        self.residency.pin(path)
        self.restore.let_go(rec)
        rec.tokens = bytearray()
        ops = self.restore.bring_up(rec, path)
        self.residency.unpin(path)
        return len(rec.nodes) * self.geometry.page_tokens, ops

    def fork(
        self, rec: LeaseRecord, label: str = "", opened_at: str = ""
    ) -> tuple[LeaseRecord, list[Op]]:
        """A second lease on the same tokens: full pages shared, the partial one and the tail
        copied.  Raises OutOfPages, having changed nothing."""
        self._check(rec)
        page, private = self.geometry.page_tokens, self.operations.private
        full, part = divmod(rec.length, page)
        if not self.tables.free:
            raise OutOfPages(1, 0, f"leases (max_leases={self.geometry.max_leases})")
        if part and self.residency.room(GPU, 1):
            raise OutOfPages(1, 0)
        tail = None
        if rec.tail is not None:
            tail = self.tails.take(range(0))
            if tail is None or self.tails.windows.free < len(rec.tail.windows):
                if tail is not None:
                    self.tails.disown(tail)
                raise OutOfPages(1, 0, "state slots or window pages")
            self.tails.windows_like(tail, rec.tail)
        self._last_id += 1
        kid = LeaseRecord(
            id=self._last_id, row=self.tables.free.pop(), identity=rec.identity, spans=rec.spans,
            extras=rec.extras, root=rec.root, prompt=rec.prompt, read=rec.read, write=rec.write,
            limit=rec.limit, priority=rec.priority, expires=rec.expires,
            label=label or rec.label, opened_at=opened_at, known_pages=rec.known_pages,
            length=rec.length, tokens=bytearray(rec.tokens), nodes=list(rec.nodes),
            frames=rec.frames[:full], owned=rec.owned[:full], tail=tail, state=LeaseState.ACTIVE,
            cached_tokens=rec.length, counted=True, restored={Tier.GPU: rec.length},
        )
        self.leases[kid.id] = kid
        self.residency.pin(kid.nodes)
        for frame, own in zip(kid.frames, kid.owned, strict=True):
            if own:
                private.hold(frame)
        ops: list[Op] = []
        if part:
            (frame,) = private.take(1)
            source = rec.frames[full]
            copy = Part(Kind.HISTORY, Tier.GPU, (source,), Tier.GPU, (frame,))
            ops.append(self.operations.in_order(OpKind.COPY, copy, part))
            kid.frames.append(frame)
            kid.owned.append(True)
        if tail is not None:
            assert rec.tail is not None
            ops.append(self._copy_tail(rec, kid))
        kid.capacity = len(kid.frames) * page
        self.tables.lengths[kid.row] = kid.length
        self.tables.put(kid.row, 0, kid.frames)
        self.settled.append(kid)
        return kid, ops

    def _copy_tail(self, rec: LeaseRecord, kid: LeaseRecord) -> Op:
        assert rec.tail is not None and kid.tail is not None
        pages = range(min(rec.tail.windows, default=0), max(rec.tail.windows, default=-1) + 1)
        part = Part(
            Kind.TAIL, Tier.GPU, rec.tail.frames(pages), Tier.GPU, kid.tail.frames(pages),
            live_src=True, live_dst=True,
        )
        for p, frame in kid.tail.windows.items():
            self.tables.put_window(kid.row, p, frame)
        return self.operations.in_order(OpKind.COPY, part)

    def pause(self, rec: LeaseRecord) -> list[Op]:
        """Park all of a lease on the host and free its device pages; settles as PAUSED."""
        self._check(rec)
        self._return_captures(rec)
        return self.parking.pause(rec)

    def resume(self, rec: LeaseRecord) -> list[Op]:
        """Bring a paused lease back; settles as ACTIVE, where it stood or (if the host was full)
        shorter.  OutOfPages leaves it paused."""
        if rec.state is not LeaseState.PAUSED:
            self._check(rec)
            raise LeaseError(f"lease {rec.id} {rec.label!r} is not paused")
        return self.parking.resume(rec)

    def release(self, rec: LeaseRecord) -> list[Op]:
        """Let go of everything, in any state.  Idempotent."""
        if rec.state is LeaseState.RELEASED:
            return []
        self._return_captures(rec)
        self.parking.drop(rec)
        self.restore.let_go(rec)
        for frame in rec.spare:
            self.operations.private.drop(frame)
        rec.spare = []
        rec.origins = {}
        rec.state = LeaseState.RELEASED
        self.tables.free.append(rec.row)
        del self.leases[rec.id]
        return self._drops()

    # ------------------------------------------------------------------ upkeep
    def prefetch(
        self, tokens: TokenBuffer, identity: Identity = ANONYMOUS, spans: Sequence[Span] = ()
    ) -> tuple[PrefetchRecord, list[Op]]:
        """Bring a prefix up to the host."""
        page = self.geometry.page_tokens
        extras = page_extras(check_spans(spans, len(tokens)), page) if spans else {}
        path, _ = self.restore.path(
            self._root(identity), tokens.data, extras, len(tokens) // page
        )
        self._last_id += 1
        rec = PrefetchRecord(self._last_id, path, set())
        self.residency.pin(path)
        self.prefetches[rec.id] = rec
        self.residency.touch(path)
        ops = self.restore.prefetch(rec)
        if rec.done:
            self._end_prefetch(rec)
        return rec, ops

    def _end_prefetch(self, rec: PrefetchRecord) -> None:
        if self.prefetches.pop(rec.id, None) is not None:
            nodes, rec.nodes = rec.nodes, []
            self.residency.unpin(nodes)

    def cancel_prefetch(self, rec: PrefetchRecord) -> list[Op]:
        """Stop waiting; what still arrives stays, and its frames can be evicted then."""
        if not rec.done:
            rec.done = True
            self._end_prefetch(rec)
        return self._drops()

    def pin(
        self,
        tokens: TokenBuffer,
        identity: Identity = ANONYMOUS,
        spans: Sequence[Span] = (),
        owner: str = "",
    ) -> PinRecord:
        """Keep what is known of a prefix in some tier until ``unpin``; stops where all pins
        together would hold more than ``max_pinned`` of the device and host pages."""
        page = self.geometry.page_tokens
        extras = page_extras(check_spans(spans, len(tokens)), page) if spans else {}
        path, _ = self.restore.path(
            self._root(identity), tokens.data, extras, len(tokens) // page
        )
        budget = int(self.max_pinned * max(self.geometry.gpu_pages, self.geometry.cpu_frames))
        room = max(0, budget - sum(p.frames for p in self.pins))
        held = path[:room]
        self.residency.keep(held, 1)
        for n in reversed(path[room:]):
            self.residency.prune(n)
        rec = PinRecord(held, len(held) * page, owner, len(held))
        self.pins.append(rec)
        return rec

    def unpin(self, rec: PinRecord) -> list[Op]:
        """Idempotent."""
        if not rec.closed:
            rec.closed = True
            self.pins.remove(rec)
            self.residency.keep(reversed(rec.nodes), -1)
            rec.nodes = []
        return self._drops()

    def evict(self, tier: Tier, pages: int) -> tuple[int, list[Op]]:
        """Drop up to ``pages`` frames of a tier, least recently used first; returns how many."""
        if pages <= 0:
            return 0, []
        if tier is Tier.DISK:
            return self._evict_disk(pages)
        if tier is Tier.REMOTE:
            raise ConfigError("the remote tier evicts for itself")
        freed = self.residency.evict(int(tier), pages)
        return freed, self._drops()

    def _evict_disk(self, pages: int) -> tuple[int, list[Op]]:
        disk = self.residency.disk
        if disk is None or not self.lower.stores:
            return 0, []
        before = disk.used
        want = min(disk.used, pages)
        while want and not self.residency.disk_room(disk.free + want):
            want //= 2
        return before - disk.used, self._drops()

    def clear(
        self, identity: Identity | None = None, tiers: Iterable[Tier] | None = None
    ) -> list[Op]:
        """Forget an identity (None: all) in these tiers (None: all).  Open leases keep their
        pages; with all tiers they can no longer be matched and publish nothing more.  What is in
        flight becomes visible to nobody."""
        if tiers is None:
            self._clear_all(identity)
        else:
            for tier in sorted(set(tiers)):
                self._clear_tier(identity, int(tier))
        return self._drops()

    def _clear_all(self, identity: Identity | None) -> None:
        res = self.residency
        for rec in self.leases.values():
            if identity is None or rec.identity == identity:
                rec.write = False
        for who in [identity] if identity is not None else list(res.tree.roots):
            root = res.tree.roots.get(who)
            for node in root.offspring() if root is not None else ():
                res.kill(node)
        self._clear_rows(identity)
        if identity is None:
            res.ghosts.clear()

    def _clear_rows(self, identity: Identity | None) -> None:
        res = self.residency
        if res.disk is None:
            return
        root = None if identity is None else chain_root(self.chain, identity)
        for row in res.disk.rows_of(root):
            res.drops.append(res.disk.remove(int(row)))

    def _clear_tier(self, identity: Identity | None, tier: int) -> None:
        res = self.residency
        roots = [r for who, r in res.tree.roots.items() if identity is None or who == identity]
        for root in roots:
            for node in [n for n in res.tree.iterate(root)][::-1]:
                for slot in (tier + CHECKPOINT, tier):
                    copy = node.copies[slot] if node.run is not None else None
                    if copy is None or node.kids[tier]:
                        continue
                    if tier == GPU and not res.evictable(copy):
                        continue
                    res.detach(copy)
        if tier == DISK:
            self._clear_rows(identity)

    def expire(self, now: float) -> list[Op]:
        """Drop pages whose time to live has passed and that nobody holds."""
        again: list[tuple[float, int, Node]] = []
        due = []
        while self._expiring and self._expiring[0][0] < now:
            due.append(heappop(self._expiring))
        for entry in sorted(due, key=lambda e: -e[2].depth):
            node = entry[2]
            if node.run is None or node.expires >= now:
                continue  # gone, or somebody has prolonged it (and queued that)
            busy = any(c is not None and (c.readers or c.writer) for c in node.copies)
            if busy or node.pins or node.keeps or node.offspring():
                again.append(entry)
            else:
                self.residency.kill(node)
        for entry in again:
            heappush(self._expiring, entry)
        return self._drops()

    # ------------------------------------------------------------------ completions
    def packed(self, op_id: int) -> list[Op]:
        """The device side of a PACK has been read; its sources may be reused."""
        self.operations.packed(op_id)
        return self._drops()

    def finish(self, op_id: int, delivered: int, failed: bool = False) -> list[Op]:
        """An operation has ended with its first ``delivered`` parts done."""
        run = self.operations.finish(op_id, delivered)
        ops: list[Op] = []
        delivered = len(run.moves) if run.failed_at < 0 else run.failed_at
        for rec in [r for r in self.leases.values() if op_id in r.waits]:
            if any(m.tail is rec.tail for m in run.moves[:delivered]) and rec.tail is not None:
                rec.tail_ok = True
            rec.waits.discard(op_id)
            if rec.parked is not None and rec.parked.op_id == op_id and run.failed_at >= 0:
                rec.parked.ok = False
            if not rec.waits:
                ops += self.parking.settle(rec) if rec.parked else self.restore.settle(rec)
        for pre in [p for p in self.prefetches.values() if op_id in p.waits]:
            pre.waits.discard(op_id)
            if not pre.waits:
                self.restore.settle_prefetch(pre)
                self._end_prefetch(pre)
        if run.op.kind in (OpKind.PACK, OpKind.RESTORE):
            arrived = [
                c.node
                for m in run.moves[:delivered]
                for c in m.targets
                if c.slot % 3 == CPU and c.node is not None
            ]
            if run.op.kind is OpKind.PACK and arrived:
                ops += self.lower.store(arrived)
        return ops + self._drops()

    def _drops(self) -> list[Op]:
        return self.operations.drop_op()

    # ------------------------------------------------------------------ looking inside
    @property
    def idle(self) -> bool:
        return not self.operations.running

    def busy(self, tier: Tier) -> bool:
        """Whether operations run that lower something to ``tier`` or above it."""
        kinds = {OpKind.PACK} if tier is Tier.CPU else {OpKind.PACK, OpKind.STORE, OpKind.DROP}
        return any(r.op.kind in kinds for r in self.operations.running.values())

    def subscribe(self, maxlen: int) -> None:
        """Record page events from now on, the last ``maxlen`` of them."""
        if self.residency.events is None:
            self.residency.events = deque(maxlen=maxlen)

    @property
    def events(self) -> "deque[tuple[str, bytes, Tier]] | None":
        return self.residency.events

    @property
    def events_dropped(self) -> int:
        return self.residency.events_dropped

    def disk_ticks(self) -> list[tuple[bytes, int]]:
        """Recency of the disk records used since the last call, for ``Store.touch``."""
        disk = self.residency.disk
        if disk is None:
            return []
        touched, disk.touched = disk.touched, set()
        return [(disk.key(r), int(disk.tick[r])) for r in sorted(touched)]

    def explain(
        self, tokens: TokenBuffer, identity: Identity = ANONYMOUS, spans: Sequence[Span] = ()
    ) -> list[PageReport]:
        """Page by page: where it is, or why it is not a hit."""
        return report.explain(self, tokens, identity, spans)

    def stats(self) -> CacheStats:
        """A consistent snapshot of the core's counters."""
        return report.stats(self)

    def pages(self, identity: Identity | None = None) -> list[PageInfo]:
        """The radix tree, parents before children."""
        return report.pages(self, identity)

    def check(self) -> None:
        """Raises InvariantError naming every violated invariant; O(pages)."""
        check.check(self)

    def digest(self) -> bytes:
        """16 bytes over the whole state."""
        return report.digest(self)


_NOTHING = PrefixMatch(0, 0, 0, 0, 0, 0)


def _leading(segments: list[tuple[list[Node], int, int]], slot: int, limit: int) -> int:
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
