"""What one page is made of: components, their sizes, and where a token's row lies.

Pure arithmetic (numpy only).  Knows nothing of tiers, leases or tensors.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvtier.config import as_int
from kvtier.errors import ConfigError

__all__ = ["DTYPE_BYTES", "ROW_DTYPES", "Component", "Layout", "Share"]

FRAME_ALIGN = 4096
"""Host and disk frames start at multiples of this, so that direct I/O needs no copy."""

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}
)
"""Bytes of one value, by torch name."""

ROW_DTYPES = ("bfloat16", "float16", "float32")
"""What a plain row of values may be made of."""

IntArray = npt.NDArray[np.int32]


class Share(Enum):
    HISTORY = "history"
    """Shareable, in the tree, one page frame per ``page_tokens``."""
    TAIL = "tail"
    """Private to a lease; kept as checkpoints at page ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One kind of per-token state.

    A token at position t owns a slot when it closes a group: (t + 1) % tokens_per_slot == 0.
    """

    name: str
    share: Share
    tokens_per_slot: int
    slots_per_page: int
    slot_bytes: int
    layers: tuple[int, ...]
    dtype: str
    """torch name of what a slot holds, e.g. "bfloat16"; "uint8" for packed records."""
    window: int | None = None
    """Tail components only: how many tokens, the query's own included, are ever read.  Set: kept
    in window pages of ``slots_per_page``; None: kept in the lease's state slot."""
    planes: tuple[int, ...] = ()
    """Bytes of a slot that lie apart within a page: first every slot's first plane, then every
    slot's second, and so on.  Empty: slots are whole and adjacent."""
    page_align: int = 1
    """A page is padded to a multiple of this."""
    checkpoint_slots: int | None = None
    """Tail components only: how many slots, the last ones before the page's end, a checkpoint
    holds.  None: a whole state, or as many window pages as the next token's window reaches.
    Otherwise a state is a ring of slots, position ``t`` in slot ``t % slots_per_page``, of which 0
    are enough if nothing of it is read at a page's end; of windows these are whole pages."""

    def __post_init__(self) -> None:
        me = f"component {self.name!r}"
        for name in ("tokens_per_slot", "slots_per_page", "slot_bytes", "page_align"):
            value = as_int(f"{me}: {name}", getattr(self, name), least=1)
            object.__setattr__(self, name, value)
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) != len(self.layers):
            raise ConfigError(f"{me} needs layers, each named once, got {self.layers}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"{me}: dtype must be one of {sorted(DTYPE_BYTES)}: {self.dtype!r}")
        if self.slot_bytes % DTYPE_BYTES[self.dtype]:
            raise ConfigError(f"{me}: a slot of {self.slot_bytes} bytes is no whole {self.dtype}")
        if self.planes and (sum(self.planes) != self.slot_bytes or min(self.planes) < 1):
            raise ConfigError(f"{me}: planes {self.planes} do not add up to {self.slot_bytes}")
        if self.window is not None and (self.share is not Share.TAIL or self.window < 1):
            raise ConfigError(f"{me}: a window is a tail's, of at least 1 token: {self.window}")
        if self.checkpoint_slots is not None:
            self._check_checkpoint_slots(self.checkpoint_slots)

    def _check_checkpoint_slots(self, kept: int) -> None:
        slots = self.slots_per_page
        me = f"component {self.name!r}: checkpoint_slots={kept}"
        if self.share is not Share.TAIL:
            raise ConfigError(f"{me}: only a tail is kept in checkpoints")
        if self.window is None:
            if not 0 <= kept <= slots:
                raise ConfigError(f"{me} must be in [0, {slots}]")
            if 0 < kept < slots and (self.planes or self.page_bytes != slots * self.slot_bytes):
                raise ConfigError(f"{me}: a part of a ring needs whole, adjacent slots")
        elif kept % slots or kept < self.window - 1:
            raise ConfigError(
                f"{me} must be whole pages of {slots} that hold a window of {self.window}"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return _round_up(self.slots_per_page * self.slot_bytes, self.page_align)

    @property
    def kept_bytes(self) -> int:
        """Of one page of one layer, the bytes at its end that a checkpoint holds."""
        if self.window is not None or self.checkpoint_slots in (None, self.slots_per_page):
            return self.page_bytes
        assert self.checkpoint_slots is not None
        return self.checkpoint_slots * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The components of one model's cache.

    A page's packed record is the concatenation, in order, of every HISTORY component's page of
    every of its layers.  A packed tail is the same of the TAIL components without a window, then,
    oldest first, as many window pages as it holds, each the same of the components with one.  A
    checkpoint is what the next token needs of the packed tail at a page's end: in the same order
    the last ``checkpoint_slots`` of every state and the last window pages.
    """

    name: str
    page_tokens: int
    components: tuple[Component, ...]
    meta: Mapping[str, str | int] = field(default_factory=dict, hash=False)
    """Whatever else changes the meaning of the bytes: rope order, record format, ..."""
    draft_layers: int = 0
    max_draft: int = 0
    """Draft tokens a step may carry beyond those that are certain to be committed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "meta", dict(self.meta))
        for name in ("page_tokens", "draft_layers", "max_draft"):
            # Of Python's own type: the fingerprint is made of what they print as.
            value = as_int(name, getattr(self, name), least=0)
            object.__setattr__(self, name, value)
        page = self.page_tokens
        if page < 1 or page > 512 or page & (page - 1):
            raise ConfigError(f"page_tokens must be a power of two in [1, 512], got {page}")
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            raise ConfigError(f"component names must differ: {names}")
        if not self.history:
            raise ConfigError(f"layout {self.name!r} has no shareable component")
        for c in self.history:
            if c.slots_per_page * c.tokens_per_slot != page:
                raise ConfigError(
                    f"component {c.name!r}: {c.slots_per_page} slots of {c.tokens_per_slot} tokens "
                    f"do not make a page of {page} tokens"
                )
        for c in self.windows:
            if page % c.slots_per_page:
                raise ConfigError(
                    f"component {c.name!r}: window pages of {c.slots_per_page} slots do not end "
                    f"where a page of {page} tokens does"
                )
        # One table of window pages serves all of them.
        if len({(c.window, c.slots_per_page, c.checkpoint_slots) for c in self.windows}) > 1:
            raise ConfigError(f"window components must agree on window and slots: {self.windows}")
        for c in self.states:
            if c.checkpoint_slots is not None and page % c.slots_per_page:
                raise ConfigError(
                    f"component {c.name!r}: a ring of {c.slots_per_page} slots does not end where "
                    f"a page of {page} tokens does"
                )

    @property
    def history(self) -> tuple[Component, ...]:
        return tuple(c for c in self.components if c.share is Share.HISTORY)

    @property
    def tails(self) -> tuple[Component, ...]:
        return tuple(c for c in self.components if c.share is Share.TAIL)

    @property
    def states(self) -> tuple[Component, ...]:
        """Tail components of the state slot."""
        return tuple(c for c in self.tails if c.window is None)

    @property
    def windows(self) -> tuple[Component, ...]:
        """Tail components of the window pages."""
        return tuple(c for c in self.tails if c.window is not None)

    @property
    def has_tails(self) -> bool:
        return bool(self.tails)

    @property
    def tail_windows(self) -> int:
        """Window pages of a checkpoint: those that the next token's window reaches, or more."""
        for c in self.windows:
            assert c.window is not None
            kept = c.window - 1 if c.checkpoint_slots is None else c.checkpoint_slots
            return -(-kept // c.slots_per_page)
        return 0

    @property
    def window_kept(self) -> int:
        """Tokens that windows are kept for, the next one included: those it reads, and back to
        the oldest page that a checkpoint here holds."""
        for c in self.windows:
            assert c.window is not None
            return max(c.window, self.tail_windows * c.slots_per_page - c.slots_per_page + 2)
        return 0

    @property
    def max_rejected(self) -> int | None:
        """Tokens of one step that may be rejected and leave the tail as it was; None: any number.

        A ring that holds what is read and ``max_draft`` tokens more overwrites nothing that is
        needed until it has turned one token further than that.  A state that is no ring (one that
        checkpoints hold whole) is put right by whoever wrote it.
        """
        if any(c.checkpoint_slots is not None for c in self.states):
            return self.max_draft + 1
        return None

    @property
    def fingerprint(self) -> bytes:
        """16 bytes over everything that changes bytes or meaning; part of every stored key.

        ``max_draft`` is left out, and so is the length of a ring of which checkpoints hold a
        part: they change how much a lease holds, not what a page or a checkpoint says.
        """
        text = repr(
            (
                "kvtier-layout-1",
                self.name,
                self.page_tokens,
                [sorted(_meaning(c).items()) for c in self.components],
                sorted(self.meta.items()),
                self.draft_layers,
            )
        )
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def page_bytes(self) -> int:
        """Bytes of one page's history, all layers."""
        return _bytes_of(self.history)

    def state_bytes(self) -> int:
        """Bytes of one state slot, all layers."""
        return _bytes_of(self.states)

    def window_bytes(self) -> int:
        """Bytes of one window page, all layers."""
        return _bytes_of(self.windows)

    def tail_bytes(self, windows: int) -> int:
        """Bytes of a packed tail that holds this many window pages."""
        return self.state_bytes() + windows * self.window_bytes()

    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        states = sum(c.kept_bytes * len(c.layers) for c in self.states)
        return states + self.tail_windows * self.window_bytes()

    def frame_bytes(self) -> int:
        """Bytes of one host or disk frame: a page's history, rounded up to ``FRAME_ALIGN``."""
        return _round_up(self.page_bytes(), FRAME_ALIGN)

    def tail_frames(self, windows: int) -> int:
        """Host or disk frames a packed tail with this many window pages takes."""
        return -(-self.tail_bytes(windows) // self.frame_bytes())

    def checkpoint_frames(self) -> int:
        """Host or disk frames one checkpoint takes."""
        return -(-self.checkpoint_bytes() // self.frame_bytes())

    def sections(self, share: Share = Share.HISTORY) -> Iterator[tuple[str, int, int, int]]:
        """(component, layer, offset, bytes) of each piece of a page's record, or (TAIL) of a
        checkpoint, in order.  What a checkpoint holds nothing of has no piece."""
        order = self.history
        if share is Share.TAIL:
            order = self.states + self.windows * self.tail_windows
        offset = 0
        for c in order:
            size = c.page_bytes if share is Share.HISTORY else c.kept_bytes
            for layer in c.layers if size else ():
                yield c.name, layer, offset, size
                offset += size

    def slots(
        self, positions: IntArray, pages: IntArray, windows: IntArray | None = None
    ) -> dict[str, IntArray]:
        """Slot of each token in each history component; -1 where the token closes no group.  With
        ``windows`` in each window component as well.

        ``positions`` (n,) are token positions, ``pages`` and ``windows`` (n,) the device page and
        the window page each lies in (-1: a padding row, which gets -1 everywhere).
        """
        out: dict[str, IntArray] = {}
        inside = positions & (self.page_tokens - 1)
        for c in self.history:
            if c.tokens_per_slot == 1:
                slot = pages * c.slots_per_page + inside
                slot[pages < 0] = -1
            else:
                slot = pages * c.slots_per_page + inside // c.tokens_per_slot
                slot[(pages < 0) | ((positions + 1) % c.tokens_per_slot != 0)] = -1
            out[c.name] = slot
        if windows is not None:
            for c in self.windows:
                slot = windows * c.slots_per_page + positions % c.slots_per_page
                slot[windows < 0] = -1
                out[c.name] = slot
        return out


def _meaning(c: Component) -> dict[str, str]:
    """What of a component changes the bytes of pages and checkpoints, or their meaning."""
    fields = {name: repr(value) for name, value in asdict(c).items()}
    if c.checkpoint_slots is None:
        del fields["checkpoint_slots"]
    elif c.window is None:
        del fields["slots_per_page"]
    return fields


def _bytes_of(components: tuple[Component, ...]) -> int:
    return sum(c.page_bytes * len(c.layers) for c in components)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
