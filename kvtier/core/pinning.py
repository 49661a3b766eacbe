"""Pins: prefixes kept in their tiers by request, whoever else uses them, until unpinned."""

from collections.abc import Sequence

from kvtier.core.copies import CHECKPOINT
from kvtier.core.leases import PinRecord
from kvtier.core.residency import Residency
from kvtier.core.tree import Node

__all__ = ["Pinning"]


class Pinning:
    """Makes and ends the pins of ``pins``, which together hold a share of a tier at most."""

    __slots__ = ("pins", "residency", "share")

    def __init__(self, residency: Residency, pins: list[PinRecord], *, share: float) -> None:
        self.residency = residency
        self.pins = pins
        self.share = share

    def pin(self, path: Sequence[Node], owner: str) -> PinRecord:
        """Keep as many pages of a path, from its root on, as the share has room for; and the
        deepest checkpoint among them."""
        res = self.residency
        tiers = (res.geometry.gpu_pages, res.geometry.cpu_frames)
        budget = int(self.share * min(size for size in tiers if size))
        room = max(0, budget - len({n for p in self.pins for n in p.nodes}))
        held = list(path[:room])
        res.keep(held, 1)
        for n in reversed(path[room:]):
            res.prune(n)
        tails = (n for n in reversed(held) if res.best(n, CHECKPOINT) is not None)
        rec = PinRecord(held, len(held) * res.geometry.page_tokens, owner, next(tails, None))
        if rec.tail is not None:
            res.keep_tail(rec.tail, 1)
        self.pins.append(rec)
        return rec

    def unpin(self, rec: PinRecord) -> None:
        """Idempotent."""
        if rec.closed:
            return
        rec.closed = True
        self.pins.remove(rec)
        if rec.tail is not None:
            self.residency.keep_tail(rec.tail, -1)
        self.residency.keep(reversed(rec.nodes), -1)
        rec.nodes = []
