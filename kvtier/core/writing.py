"""Writing: room for new tokens, and what becomes of them once they are committed.

Pages enter the tree only through ``commit`` (D6), in stream order, after the forward pass that
wrote them.
"""

from collections.abc import Sequence

import numpy as np

from kvtier.config import CheckpointPolicy
from kvtier.core.boundaries import inside_span
from kvtier.core.checkpoints import Mark
from kvtier.core.copies import CHECKPOINT, CPU, GPU
from kvtier.core.leases import LeaseRecord, LeaseTables
from kvtier.core.lifetimes import Lifetimes
from kvtier.core.lower import Lower
from kvtier.core.operations import Operations, TailPools
from kvtier.core.ops import Op
from kvtier.core.residency import Residency
from kvtier.core.tree import Node
from kvtier.errors import OutOfPages
from kvtier.types import Capture, LeaseState

__all__ = ["Writing"]


class Writing:
    """Reserve and commit."""

    def __init__(
        self,
        residency: Residency,
        operations: Operations,
        tails: TailPools,
        tables: LeaseTables,
        lower: Lower,
        lifetimes: Lifetimes,
        checkpoints: CheckpointPolicy,
    ) -> None:
        self.geometry = residency.geometry
        self._reach_back = self.geometry.window_kept - 1 + self.geometry.max_draft
        self.residency = residency
        self.operations = operations
        self.tails = tails
        self.tables = tables
        self.lower = lower
        self.lifetimes = lifetimes
        self.checkpoints = checkpoints

    def reserve(self, recs: Sequence[LeaseRecord], counts: Sequence[int]) -> list[Capture]:
        """Room for ``counts[i]`` tokens past the committed ones of ``recs[i]``, for all or (raising
        OutOfPages) none; with tails also the captures that fall due."""
        active = LeaseState.ACTIVE
        short = [
            (rec, n)
            for rec, n in zip(recs, counts, strict=True)
            if rec.length + n > rec.capacity or rec.state is not active
        ]
        for rec, _ in short:
            rec.check_active()
        windows = self._windows_due(recs, counts) if self.geometry.window else []
        if short:
            self._grow(short, recs, counts)
        if not self.geometry.has_tails:
            return []
        self._grow_windows(windows)
        return self._captures(recs, counts)

    def _grow(
        self,
        short: Sequence[tuple[LeaseRecord, int]],
        recs: Sequence[LeaseRecord],
        counts: Sequence[int],
    ) -> None:
        page = self.geometry.page_tokens
        needs = [-(-(rec.length + n) // page) - len(rec.frames) for rec, n in short]
        total = sum(needs)
        if missing := self.residency.evictor.room(GPU, total):
            held = {
                frame
                for rec, n in zip(recs, counts, strict=True)
                for frame in rec.device_pages(-(-(rec.length + n) // page))
            }
            raise OutOfPages(
                total, total - missing, capacity=self.geometry.gpu_pages, held=len(held)
            )
        for (rec, _), need in zip(short, needs, strict=True):
            frames = self.operations.private.take(need)
            self.tables.put(rec.row, len(rec.frames), frames)
            rec.frames += frames
            rec.owned += [True] * need
            rec.capacity = len(rec.frames) * page

    def cut(self, rec: LeaseRecord, keep: int) -> None:
        """Give back a lease's pages from page ``keep`` on, which must be its own."""
        while len(rec.frames) > keep:
            frame, own = rec.frames.pop(), rec.owned.pop()
            if own:
                self.operations.private.drop(frame)
        self.tables.cut(rec.row, keep)
        rec.capacity = len(rec.frames) * self.geometry.page_tokens

    def cut_windows(self, rec: LeaseRecord) -> None:
        """Give back a lease's window pages past its committed tokens."""
        if self.geometry.window and rec.tail is not None:
            stop = -(-rec.length // self.geometry.window_page)
            for p in self.tails.cut(rec.tail, 0, stop):
                self.tables.put_window(rec.row, p, -1)

    def _windows_due(
        self, recs: Sequence[LeaseRecord], counts: Sequence[int]
    ) -> list[tuple[LeaseRecord, range]]:
        """Which window pages the new tokens touch; raises OutOfPages if they do not fit."""
        g = self.geometry
        wanted: list[tuple[LeaseRecord, range]] = []
        need = 0
        for rec, n in zip(recs, counts, strict=True):
            if not n:
                continue
            assert rec.tail is not None
            pages = range(rec.length // g.window_page, (rec.length + n - 1) // g.window_page + 1)
            need += sum(p not in rec.tail.windows for p in pages)
            wanted.append((rec, pages))
        pool = self.tails.windows
        if need > pool.free:
            held = sum(p < pages.stop for r, pages in wanted if r.tail for p in r.tail.windows)
            raise OutOfPages(need, pool.free, "window pages", pool.size, held)
        return wanted

    def _grow_windows(self, wanted: Sequence[tuple[LeaseRecord, range]]) -> None:
        for rec, pages in wanted:
            assert rec.tail is not None
            self.tails.grow(rec.tail, pages)
            for p in pages:
                self.tables.put_window(rec.row, p, rec.tail.windows[p])

    def _captures(self, recs: Sequence[LeaseRecord], counts: Sequence[int]) -> list[Capture]:
        """Device frames for the checkpoints due inside this step; what does not fit is skipped."""
        page, out = self.geometry.page_tokens, []
        pool = self.residency.pools[GPU + CHECKPOINT]
        host = self.residency.pools[CPU]
        spare = not host.size or host.free >= self.geometry.checkpoint_frames
        for row, (rec, n) in enumerate(zip(recs, counts, strict=True)):
            self.return_captures(rec)
            if not rec.write:
                continue
            first = rec.length // page + 1
            for depth in range(first, (rec.length + n) // page + 1):
                if inside_span(depth * page, rec.spans) or not self._due(rec, depth, spare):
                    continue
                if self.residency.evictor.room(GPU + CHECKPOINT, 1):
                    self.lower.dropped += 1
                    continue
                (frame,) = pool.take()
                rec.captures.append((depth * page, frame))
                out.append(Capture(row, depth * page, frame))
        return out

    def _due(self, rec: LeaseRecord, depth: int, spare: bool) -> bool:
        """Whether to capture at the end of a page.  Without ``spare`` room below it would go
        nowhere unless it is to be kept, or past the prompt: a turn may end there."""
        place = self._place(rec, depth)
        if spare or depth > len(rec.prompt) // self.geometry.page_tokens:
            return self.checkpoints.due(depth, **place)
        return self.checkpoints.keep(depth, **place) and self.checkpoints.due(depth, **place)

    def _place(self, rec: LeaseRecord, depth: int) -> dict[str, bool]:
        """What a checkpoint policy may know of a page end."""
        end = max(0, len(rec.prompt) - 1) // self.geometry.page_tokens
        return {
            "prompt_end": depth in (end - 1, end, len(rec.prompt) // self.geometry.page_tokens),
            "branch": depth == rec.known_pages and rec.known_pages < end,
        }

    def return_captures(self, rec: LeaseRecord) -> None:
        if rec.captures:
            self.residency.pools[GPU + CHECKPOINT].give(f for _, f in rec.captures)
            rec.captures = []

    def abandon(self, recs: Sequence[LeaseRecord]) -> None:
        """A step was left with an exception: captures go back, the reserve stays."""
        for rec in recs:
            self.return_captures(rec)

    # ------------------------------------------------------------------ committing
    def commit(self, recs: Sequence[LeaseRecord], counts: Sequence[int], data: bytes) -> list[Op]:
        """These tokens' rows are written (in stream order).  ``data`` holds them packed, lease
        after lease.  Full pages become shareable and start on their way down: one PACK for all."""
        decoding = counts.count(1) == len(counts)
        filled = self._add_one(recs, data) if decoding else self._add(recs, counts, data)
        fresh = [f for rec in filled if (f := self._publish(rec))]
        if self.geometry.has_tails:
            for rec in recs:
                self.return_captures(rec)
                self._free_windows(rec)
        return self.lower.pack(fresh) if fresh else []

    def _add(
        self, recs: Sequence[LeaseRecord], counts: Sequence[int], data: bytes
    ) -> list[LeaseRecord]:
        """Count new tokens in; returns the leases that may have filled a page."""
        page, offset = self.geometry.page_tokens, 0
        filled: list[LeaseRecord] = []
        for rec, n in zip(recs, counts, strict=True):
            stop = offset + 4 * n
            rec.tokens += data[offset:stop]
            offset = stop
            rec.length = length = rec.length + n
            assert length <= rec.capacity, "I5: committing past the reserve"
            self.tables.lengths[rec.row] = length
            if length % page < n or (rec.spans and length // page > len(rec.nodes)):
                filled.append(rec)
        return filled

    def _add_one(self, recs: Sequence[LeaseRecord], data: bytes) -> list[LeaseRecord]:
        """The same for one token of each: what decoding does in every step."""
        for rec, token in zip(recs, np.frombuffer(data, "V4").tolist(), strict=True):
            rec.tokens += token
            rec.length += 1
        rows = np.array([rec.row for rec in recs], np.intp)
        lengths = self.tables.lengths[rows] + 1
        self.tables.lengths[rows] = lengths
        full = (lengths % self.geometry.page_tokens == 0).tolist()
        # With spans a page may have been waiting for the end of one.
        return [rec for rec, now in zip(recs, full, strict=True) if now or rec.spans]

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
        fresh = res.tree.extend(
            above, bytes(rec.tokens[: last * stride]), first, rec.extras or None
        )
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
                place = self._place(rec, i + 1)
                copy.expendable = not self.checkpoints.keep(i + 1, **place)
                copy.mark = Mark(i + 1, **place)
        return rec.nodes

    def _adopt(self, rec: LeaseRecord, i: int, node: Node) -> None:
        """The tree takes a lease's page, unless it has one of its own already (D7)."""
        res = self.residency
        there = node.copies[GPU]
        if there is None and res.best(node) is None:  # nobody has had this page before
            if res.ghosts.back(node.page(res.tree.stride)):
                node.hits += 1
            self.lifetimes.born(node, rec)
        else:
            self.lifetimes.extend((node,), rec)
        if there is not None and there.ready:
            return
        if there is None:
            res.attach(node, GPU, (rec.frames[i],))
        else:  # being restored: what the lease has is as good, and here
            res.supersede(there, (rec.frames[i],))
        self.operations.private.adopt(rec.frames[i])
        rec.owned[i] = False

    def _free_windows(self, rec: LeaseRecord) -> None:
        """Window pages that no later query reads go back (by committed tokens, never scheduled)."""
        g = self.geometry
        if not g.window or rec.tail is None:
            return
        below = max(0, rec.length - self._reach_back) // g.window_page
        for p in self.tails.cut(rec.tail, below):
            self.tables.put_window(rec.row, p, -1)
