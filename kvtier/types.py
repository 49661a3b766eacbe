"""The values that cross kvtier's public edge: tiers, identities, reports.

Frozen, without behaviour; everything else in the package may import them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Literal, NamedTuple

__all__ = [
    "CacheStats",
    "Capture",
    "Identity",
    "LeaseInfo",
    "LeaseState",
    "PageInfo",
    "PageReport",
    "PrefixMatch",
    "Span",
    "Tier",
    "TierStats",
]


class Tier(IntEnum):
    """Where a page lives, fastest first.  ``GPU`` is the device pool, also on ``device="cpu"``."""

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3


class LeaseState(Enum):
    """RESTORING -> ACTIVE -> RELEASED; ACTIVE <-> PAUSED; see ``kvtier.core.leases``."""

    RESTORING = "restoring"
    ACTIVE = "active"
    PAUSED = "paused"
    RELEASED = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who may share a page: every field is part of every key, in every tier.

    An absent field (None) and an empty one are different identities.
    """

    tenant: str | None = None
    adapter: str | None = None
    salt: bytes | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) whose meaning is not in their ids (an image).

    ``digest`` joins the key of every page the span touches; a lease never resumes inside one.
    """

    start: int
    stop: int
    digest: bytes


class PrefixMatch(NamedTuple):
    """What a lease opened now would find.  A number, not a claim: it holds no pages.

    (A tuple because a frozen dataclass takes a microsecond longer to make, and schedulers ask for
    many of these in every step.)
    """

    tokens: int
    """A lease would resume here."""
    history_tokens: int
    """Pages are known up to here; more than ``tokens`` when a checkpoint is missing."""
    gpu_tokens: int
    """Of ``tokens``: already on the device."""
    cpu_tokens: int
    disk_tokens: int
    restore_bytes: int
    """Bytes a lease opened now would have to move up."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One open lease, as ``Cache.leases()`` lists it."""

    id: int
    label: str
    state: LeaseState
    num_tokens: int
    cached_tokens: int
    pages: int
    opened_at: str
    """``file:line`` of the call that opened it; used in leak reports."""


@dataclass(frozen=True, slots=True)
class PageInfo:
    """One page of the radix tree, as ``Cache.pages()`` lists it."""

    key: bytes
    """Chained digest (16 bytes) of the prefix that ends with this page."""
    depth: int
    """Pages from the root, 1-based."""
    identity: Identity
    tiers: frozenset[Tier]
    checkpoint_tiers: frozenset[Tier]
    pins: int
    children: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Frames of one tier: capacity = free + resident + reserved + in_flight + quarantined.

    ``reserved`` frames belong to leases, ``in_flight`` ones to operations still running.
    Byte and token counts only ever grow.
    """

    capacity: int = 0
    free: int = 0
    resident: int = 0
    reserved: int = 0
    in_flight: int = 0
    quarantined: int = 0
    pinned: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class PageReport:
    """One page of ``Cache.explain``: where it is, or why it is not a hit."""

    start: int
    tiers: frozenset[Tier]
    checkpoint_tiers: frozenset[Tier]
    reason: Literal[
        "hit",
        "never_seen",
        "evicted",
        "quarantined",
        "no_checkpoint",
        "other_identity",
        "last_token",
        "in_span",
        "recomputed",
    ]
    """"recomputed": known, but a lease opened now would rather compute it than wait."""
    load_s: float | None = None
    """Seconds until a lease opened now would stand at this page's end, by the speeds measured;
    infinity: it asks nothing of the disk; None: it cannot stand there."""
    compute_s: float | None = None
    """Seconds to compute the prompt up to there; None: nobody said how fast that is."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A consistent snapshot; what its counters grew by between two gives rates.

    Per lease, at the moment it becomes active: hits by tier + computed tokens = prompt tokens.
    """

    lookups: int = 0
    """Leases opened."""
    lookup_tokens: int = 0
    """Prompt tokens of leases that became active."""
    computed_tokens: int = 0
    """Of these: left to compute at that moment, whether they were fed to the model then or not."""
    recomputed_tokens: int = 0
    """Of ``computed_tokens``: known in some tier, but faster to compute than to load."""
    leases: int = 0
    restoring: int = 0
    packing: int = 0
    storing: int = 0
    dropped_stores: int = 0
    """Pages not kept in a lower tier: no room, not admitted, or an error."""
    tiers: Mapping[Tier, TierStats] = field(default_factory=dict)
    forgotten_leases: int = 0
    """Collected without having been released: a bug of whoever opened them; the log says where."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A checkpoint falls due inside this step.

    When the tail state has taken in ``position`` tokens of row ``row`` of the batch, the model
    copies it to checkpoint frame ``frame`` on the device.  Afterwards the rings have moved on.
    """

    row: int
    position: int
    frame: int
