"""Lease records: what a request holds.  Transitions are the machine's; the facts are here.

            open                     settle
    (none) ------> RESTORING <------------------+
                      |  all its ops have ended |  truncate to a checkpoint, resume
                      v                         |
                    ACTIVE ---------------------+
                      |  pause                  |
                      v                         |
                    PAUSED ---------------------+        any state --release--> RELEASED

Frames of a lease's pages, in order:

    | nodes[0] .. nodes[k-1]          | private pages                  |
    | pinned; shared, or (owned) a    | committed but not published,   |
    | duplicate of a published page   | partial, reserved              |
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.core.copies import GPU, Copy
from kvtier.core.load_costs import LoadCosts
from kvtier.core.tree import NEVER, Node
from kvtier.errors import LeaseNotReady, LeaseReleased
from kvtier.tokens import TokenBuffer
from kvtier.types import Identity, LeaseState, Span, Tier

__all__ = ["NEVER", "LeaseRecord", "LeaseTables", "Parked", "PinRecord", "PrefetchRecord", "Tail"]


@dataclass(slots=True, eq=False)
class Tail:
    """A live tail on the device: a state slot and window pages.  Freed when no lease and no
    operation holds it, so that a late restore never lands in the next request's state."""

    state: int
    windows: dict[int, int] = field(default_factory=dict)
    """Window page number -> frame."""
    ops: int = 0
    owned: bool = True

    def frames(self, pages: range) -> tuple[int, ...]:
        return (self.state, *(self.windows.get(p, -1) for p in pages))


@dataclass(slots=True, eq=False)
class Parked:
    """What a paused lease keeps in host memory besides shared pages."""

    length: int
    nodes: list[Node]
    """Its path."""
    kept: int
    """How many of these are kept in some tier meanwhile."""
    pages: dict[int, Copy] = field(default_factory=dict)
    """Private pages by number; host copies without a node."""
    tail: Copy | None = None
    windows: range = range(0)
    op_id: int = 0
    """The operation that parks, or brings back, the private part."""
    pausing: bool = True
    ok: bool = True
    """The private part is, or may still be, whole."""

    @property
    def copies(self) -> list[Copy]:
        return [*self.pages.values(), *([self.tail] if self.tail is not None else [])]


@dataclass(slots=True, eq=False, repr=False)
class LeaseRecord:
    id: int
    row: int
    identity: Identity
    spans: tuple[Span, ...]
    extras: dict[int, bytes]
    root: Node
    prompt: TokenBuffer
    read: bool
    write: bool
    limit: int
    """Pages it may reuse at most."""
    priority: int
    expires: float
    label: str
    opened_at: str
    state: LeaseState = LeaseState.RESTORING
    length: int = 0
    """Committed tokens."""
    capacity: int = 0
    """Tokens that fit without another reserve."""
    tokens: bytearray = field(default_factory=bytearray)
    nodes: list[Node] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    owned: list[bool] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    """Pages reserved before the lease is ACTIVE; they join ``frames`` then."""
    waits: set[int] = field(default_factory=set)
    tail: Tail | None = None
    tail_ok: bool = True
    captures: list[tuple[int, int]] = field(default_factory=list)
    """(position, device checkpoint frame) promised to the step in progress."""
    parked: Parked | None = None
    known_pages: int = 0
    """Where the known tree ended when it was opened: a branch point if not the prompt's end."""
    source: bytes = b""
    """Packed tokens it is being brought up for: the prompt, or what it stood on before."""
    give_up: bool = False
    """Something could not be read, for reasons of the moment: settle for what arrived."""
    costs: LoadCosts | None = None
    """What loading and computing take, until it is ACTIVE; None: all is worth loading."""
    stages: list[int] = field(default_factory=list)
    """Where it can stop on its way up, in pages."""
    recomputed: int = 0
    """Pages that could be loaded and are computed, since that is faster."""
    cached_tokens: int = 0
    counted: bool = False
    restored: dict[Tier, int] = field(default_factory=dict)
    origins: dict[Node, Tier] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<lease {self.id} {self.label!r}: {self.state.value}, {self.length} tokens>"

    def check_active(self) -> None:
        """Raises LeaseReleased or LeaseNotReady unless the lease is ACTIVE."""
        if self.state is LeaseState.ACTIVE:
            return
        if self.state is LeaseState.RELEASED:
            raise LeaseReleased(f"lease {self.id} {self.label!r} has been released")
        raise LeaseNotReady(
            f"lease {self.id} {self.label!r} is {self.state.value}; "
            "wait on `ready` or resume() first"
        )

    def device_pages(self, pages: int) -> set[int]:
        """Device frames that nobody else can have while it stands on its first ``pages`` pages:
        theirs, and where one is a duplicate of a published page, also that page's, which it pins.
        """
        published = (node.copies[GPU] for node in self.nodes)
        return {*self.frames[:pages], *(f for copy in published if copy for f in copy.frames)}

    @property
    def state_slot(self) -> int:
        return -1 if self.tail is None else self.tail.state


@dataclass(slots=True, eq=False)
class PrefetchRecord:
    id: int
    nodes: list[Node]
    waits: set[int]
    tokens: int = 0
    done: bool = False


@dataclass(slots=True, eq=False)
class PinRecord:
    nodes: list[Node]
    tokens: int
    owner: str
    tail: Node | None = None
    """The deepest page with a checkpoint, which is kept too."""
    closed: bool = False


class LeaseTables:
    """Per-lease rows that a step's arrays are gathered from, without a loop over leases."""

    __slots__ = ("blocks", "free", "lengths", "windows")

    def __init__(self, leases: int, *, windows: bool) -> None:
        self.lengths = np.zeros(leases, dtype=np.int32)
        self.blocks: npt.NDArray[np.int32] = np.full((leases, 64), -1, dtype=np.int32)
        self.windows: npt.NDArray[np.int32] = np.full((leases, 8 if windows else 0), -1, np.int32)
        self.free = list(range(leases - 1, -1, -1))

    def put(self, row: int, first: int, frames: list[int]) -> None:
        """Write block-table entries ``first`` .. of a row."""
        stop = first + len(frames)
        if stop > self.blocks.shape[1]:
            self.blocks = _wider(self.blocks, stop)
        self.blocks[row, first:stop] = frames

    def cut(self, row: int, keep: int) -> None:
        self.blocks[row, keep:] = -1

    def put_window(self, row: int, page: int, frame: int) -> None:
        if page >= self.windows.shape[1]:
            self.windows = _wider(self.windows, page + 1)
        self.windows[row, page] = frame

    def clear(self, row: int) -> None:
        self.blocks[row] = -1
        self.windows[row] = -1
        self.lengths[row] = 0


def _wider(table: npt.NDArray[np.int32], columns: int) -> npt.NDArray[np.int32]:
    wide = np.full((table.shape[0], max(columns, 2 * table.shape[1])), -1, dtype=np.int32)
    wide[:, : table.shape[1]] = table
    return wide
