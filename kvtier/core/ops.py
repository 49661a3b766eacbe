"""What the core asks of the data plane: one ``Op`` at a time, each of which ends exactly once.

Frozen and made of plain values, so that a leader can broadcast them and a test can print them.
"""

from dataclasses import dataclass
from enum import Enum

from kvtier.types import Tier

__all__ = ["Kind", "Op", "OpKind", "Part", "Shortfall"]


class Kind(Enum):
    """What a frame holds."""

    HISTORY = "history"
    """One page of shareable components, all layers."""
    CHECKPOINT = "checkpoint"
    """What of a tail is needed to go on from a page's end."""
    TAIL = "tail"
    """All of a lease's live tail, its state slot and window pages, wherever it stands; private,
    and on the device except while the lease is paused."""


class OpKind(Enum):
    """What is to be done with every part of an op."""

    PACK = "pack"  # device -> host
    RESTORE = "restore"  # any tier -> device (or -> host only: a prefetch)
    STORE = "store"  # host -> disk: one transaction, parents first
    COPY = "copy"  # device -> device, in stream order
    CLEAR = "clear"  # a private tail back to "no tokens seen", in stream order
    DROP = "drop"  # disk keys no longer wanted


class Shortfall(Enum):
    """Why an operation ended with parts that were not delivered."""

    SOURCE = "source"  # of a RESTORE: that of the next part is bad or missing
    FAULT = "fault"  # of a device, a medium, a lack of memory; says nothing of any source
    UNWANTED = "unwanted"  # nobody waited for it any more, which is no fault


@dataclass(frozen=True, slots=True)
class Part:
    """One thing moved.  ``src`` and ``dst`` are frame numbers of their tier's pool.

    HISTORY takes one frame.  CHECKPOINT takes one frame on the device, several (not adjacent) on
    the host and disk.  A live tail is (state slot, window page, ...), -1 among its window pages
    meaning "not held"; it pairs with the host frames of a TAIL, with another live TAIL, or, for
    the part that a CHECKPOINT holds, with the frames of one.
    """

    kind: Kind
    source: Tier
    src: tuple[int, ...]
    target: Tier
    dst: tuple[int, ...]
    via: tuple[int, ...] = ()
    """RESTORE from disk: host frames that keep a copy on the way."""
    live_src: bool = False
    """``src`` names a live tail rather than a checkpoint frame."""
    live_dst: bool = False
    key: bytes = b""
    """16-byte chain digest; set where the disk takes part."""
    parent: bytes = b""
    depth: int = 0
    tokens: bytes = b""
    """The page's own packed tokens; stored with it and compared on load."""


@dataclass(frozen=True, slots=True)
class Op:
    """One thing for the data plane to do.

    ``parts`` are delivered in order; what ends early has delivered a leading run of them.  STORE
    and DROP are atomic: all or none.
    """

    id: int
    kind: OpKind
    parts: tuple[Part, ...]
    tokens: int = 0
    """COPY of a partial page: how many tokens of it are valid."""
    must: bool = False
    """PACK of a paused lease: wait for staging, whatever the policy for a full one says."""
