"""Rolling back and branching off: truncate and fork.

Shared pages are never written: a partial page that others may read is copied first.  COPY runs in
stream order, so the copy is there before the next forward pass writes to either page.
"""

from collections.abc import Iterator

from kvtier.core.copies import GPU
from kvtier.core.leases import LeaseRecord, LeaseTables, Tail
from kvtier.core.operations import Operations, TailPools
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.core.residency import Residency
from kvtier.core.restore import Restore
from kvtier.core.writing import Writing
from kvtier.errors import LeaseError, OutOfPages
from kvtier.types import LeaseState, Tier

__all__ = ["Branching"]


class Branching:
    """Truncate and fork."""

    def __init__(self, restore: Restore, writing: Writing, ids: Iterator[int]) -> None:
        self.restore = restore
        self.writing = writing
        self.ids = ids
        self.residency: Residency = restore.residency
        self.geometry = restore.geometry
        self.operations: Operations = restore.operations
        self.tails: TailPools = restore.tails
        self.tables: LeaseTables = restore.tables

    def truncate(self, rec: LeaseRecord, n: int) -> tuple[int, list[Op]]:
        """Roll back to at most ``n`` committed tokens; returns where the lease now stands."""
        rec.check_active()
        if not 0 <= n <= rec.length:
            raise LeaseError(f"cannot truncate lease {rec.id} of {rec.length} tokens to {n}")
        page, res = self.geometry.page_tokens, self.residency
        if n == rec.length:
            self.writing.cut(rec, -(-n // page))
            self.writing.cut_windows(rec)
            return n, []
        if self.geometry.has_tails:
            return self.to_checkpoint(rec, n)
        keep, part = -(-n // page), n % page
        ops: list[Op] = []
        if part and not (
            rec.owned[keep - 1] and self.operations.private.refs[rec.frames[keep - 1]] == 1
        ):
            ops.append(self._copy_page(rec, keep - 1, part))  # shared, and about to be written
        self.writing.cut(rec, keep)
        gone, rec.nodes = rec.nodes[n // page :], rec.nodes[: n // page]
        rec.length = n
        del rec.tokens[4 * n :]
        self.tables.lengths[rec.row] = n
        res.unpin(gone)
        return n, ops

    def _copy_page(self, rec: LeaseRecord, i: int, tokens: int) -> Op:
        """Copy-on-write of a lease's page ``i``, whose first ``tokens`` tokens matter."""
        private, source = self.operations.private, rec.frames[i]
        if self.residency.evictor.room(GPU, 1):
            raise OutOfPages(1, 0)
        (frame,) = private.take(1)
        part = Part(Kind.HISTORY, Tier.GPU, (source,), Tier.GPU, (frame,))
        op = self.operations.in_order(OpKind.COPY, part, tokens)
        if rec.owned[i]:
            private.drop(source)
        rec.frames[i], rec.owned[i] = frame, True
        self.tables.put(rec.row, i, [frame])
        return op

    def to_checkpoint(self, rec: LeaseRecord, n: int) -> tuple[int, list[Op]]:
        """Restore the last checkpoint at or before ``n`` tokens; returns where that is."""
        path = rec.nodes[: n // self.geometry.page_tokens]
        self.writing.return_captures(rec)
        rec.limit, rec.source, rec.tokens = len(path), bytes(rec.tokens[: 4 * n]), bytearray()
        ops = self.restore.stand_anew(rec, path)
        return len(rec.nodes) * self.geometry.page_tokens, ops

    def fork(
        self, rec: LeaseRecord, label: str = "", opened_at: str = ""
    ) -> tuple[LeaseRecord, list[Op]]:
        """A second lease on the same tokens: full pages shared, the partial one and the tail
        copied, and so are full pages that each of the two has yet to publish (of a span that is
        not committed to its end).  What is only reserved, or was rejected, stays behind.  Raises
        OutOfPages, having changed nothing."""
        rec.check_active()
        page, private = self.geometry.page_tokens, self.operations.private
        full = len(rec.nodes) if rec.write else rec.length // page
        copied = range(full, -(-rec.length // page))
        if not self.tables.free:
            raise OutOfPages(1, 0, f"leases (max_leases={self.geometry.max_leases})")
        if missing := self.residency.evictor.room(GPU, len(copied)):
            raise OutOfPages(
                len(copied),
                len(copied) - missing,
                capacity=self.geometry.gpu_pages,
                held=len(rec.device_pages(copied.stop)),
            )
        tail = None
        if rec.tail is not None:
            held = self.geometry.windows_at(rec.length, self.geometry.max_draft)
            tail = self.tails.take_like(rec.tail, held)
            if tail is None:
                raise OutOfPages(1, 0, "state slots or window pages")
        kid = self._kid(rec, full, tail, label or rec.label, opened_at)
        self.residency.pin(kid.nodes)
        for frame, own in zip(kid.frames, kid.owned, strict=True):
            if own:
                private.hold(frame)
        ops: list[Op] = []
        for i, frame in zip(copied, private.take(len(copied)), strict=True):
            copy = Part(Kind.HISTORY, Tier.GPU, (rec.frames[i],), Tier.GPU, (frame,))
            valid = min(page, rec.length - i * page)
            ops.append(self.operations.in_order(OpKind.COPY, copy, valid))
            kid.frames.append(frame)
            kid.owned.append(True)
        if tail is not None:
            assert rec.tail is not None
            ops.append(self._copy_tail(rec, kid))
        kid.capacity = len(kid.frames) * page
        self.tables.lengths[kid.row] = kid.length
        self.tables.put(kid.row, 0, kid.frames)
        self.restore.settled.append(kid)
        return kid, ops

    def _kid(
        self, rec: LeaseRecord, full: int, tail: Tail | None, label: str, opened_at: str
    ) -> LeaseRecord:
        """A record like ``rec``, on its first ``full`` pages and all of its tokens."""
        return LeaseRecord(
            id=next(self.ids),
            row=self.tables.free.pop(),
            identity=rec.identity,
            spans=rec.spans,
            extras=rec.extras,
            root=rec.root,
            prompt=rec.prompt,
            read=rec.read,
            write=rec.write,
            limit=rec.limit,
            priority=rec.priority,
            expires=rec.expires,
            label=label,
            opened_at=opened_at,
            known_pages=rec.known_pages,
            length=rec.length,
            tokens=bytearray(rec.tokens),
            nodes=list(rec.nodes),
            frames=rec.frames[:full],
            owned=rec.owned[:full],
            tail=tail,
            state=LeaseState.ACTIVE,
            cached_tokens=rec.length,
            counted=True,
            restored={Tier.GPU: rec.length},
        )

    def _copy_tail(self, rec: LeaseRecord, kid: LeaseRecord) -> Op:
        assert rec.tail is not None and kid.tail is not None
        pages = range(min(kid.tail.windows, default=0), max(kid.tail.windows, default=-1) + 1)
        part = Part(
            Kind.TAIL,
            Tier.GPU,
            rec.tail.frames(pages),
            Tier.GPU,
            kid.tail.frames(pages),
            live_src=True,
            live_dst=True,
        )
        for p, frame in kid.tail.windows.items():
            self.tables.put_window(kid.row, p, frame)
        return self.operations.in_order(OpKind.COPY, part)
