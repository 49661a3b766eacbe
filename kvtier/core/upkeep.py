"""Taking things away on request: evict, clear."""

from collections.abc import Iterable

from kvtier.core.copies import CHECKPOINT, DISK, GPU
from kvtier.core.leases import LeaseRecord
from kvtier.core.residency import Residency
from kvtier.errors import ConfigError
from kvtier.types import Identity, Tier

__all__ = ["Upkeep"]


class Upkeep:
    """Evict and clear."""

    def __init__(
        self, residency: Residency, leases: dict[int, LeaseRecord], *, stores: bool
    ) -> None:
        self.residency = residency
        self.leases = leases
        self.stores = stores

    def evict(self, tier: Tier, pages: int) -> int:
        """Drop up to ``pages`` frames of a tier, least recently used first; returns how many."""
        if pages <= 0:
            return 0
        if tier is Tier.DISK:
            return self._evict_disk(pages)
        if tier is Tier.REMOTE:
            raise ConfigError("the remote tier evicts for itself")
        return self.residency.evictor.evict(int(tier), pages)

    def _evict_disk(self, pages: int) -> int:
        disk = self.residency.disk
        if disk is None or not self.stores:
            return 0
        before = disk.used
        want = min(disk.used, pages)
        while want and not self.residency.evictor.disk_room(disk.free + want):
            want //= 2
        return before - disk.used

    def clear(self, identity: Identity | None = None, tiers: Iterable[Tier] | None = None) -> None:
        """Forget an identity (None: all) in these tiers (None: all).  Open leases keep their
        pages; with all tiers they can no longer be matched and publish nothing more.  What is in
        flight becomes visible to nobody."""
        if tiers is None:
            self._clear_all(identity)
        else:
            for tier in sorted(set(tiers)):
                self._clear_tier(identity, int(tier))

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
        root = None if identity is None else res.root_key(identity)
        for row in res.disk.rows_of(root):
            res.drop_row(int(row))

    def _clear_tier(self, identity: Identity | None, tier: int) -> None:
        res = self.residency
        roots = [r for who, r in res.tree.roots.items() if identity is None or who == identity]
        for root in roots:
            for node in list(res.tree.iterate(root))[::-1]:
                for slot in (tier + CHECKPOINT, tier):
                    copy = node.copies[slot] if node.run is not None else None
                    if copy is None or node.kids(tier):
                        continue
                    if tier == GPU and not res.candidates.evictable(copy):
                        continue
                    res.detach(copy)
        if tier == DISK:
            self._clear_rows(identity)
