"""What one page is made of: components, their sizes, and where a token's row lies.

Pure arithmetic (numpy only).  Knows nothing of tiers, leases or tensors.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

__all__ = ["Component", "Layout", "Share"]

FRAME_ALIGN = 4096
"""Host and disk frames start at multiples of this, so that direct I/O needs no copy."""

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
    """Tail components only: how many tokens, the query's own included, are ever read."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.slots_per_page * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The components of one model's cache.

    A page's packed record is the concatenation, in order, of every HISTORY component's page of
    every of its layers; a checkpoint's likewise of the TAIL components.
    """

    name: str
    page_tokens: int
    components: tuple[Component, ...]
    meta: Mapping[str, str | int] = field(default_factory=dict)
    """Whatever else changes the meaning of the bytes: rope order, record format, ..."""
    draft_layers: int = 0
    max_draft: int = 0
    """Draft tokens a step may carry beyond those that are certain to be committed."""

    def __post_init__(self) -> None:
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
        for c in self.components:
            if c.slot_bytes < 1 or not c.layers:
                raise ConfigError(f"component {c.name!r} needs slot_bytes and at least one layer")
            if len(set(c.layers)) != len(c.layers):
                raise ConfigError(f"component {c.name!r} names a layer twice: {c.layers}")

    @property
    def history(self) -> tuple[Component, ...]:
        return tuple(c for c in self.components if c.share is Share.HISTORY)

    @property
    def tails(self) -> tuple[Component, ...]:
        return tuple(c for c in self.components if c.share is Share.TAIL)

    @property
    def has_tails(self) -> bool:
        return bool(self.tails)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes over everything that changes bytes or meaning; part of every stored key."""
        text = repr(
            (
                "kvtier-layout-1",
                self.name,
                self.page_tokens,
                [sorted((k, repr(v)) for k, v in asdict(c).items()) for c in self.components],
                sorted(self.meta.items()),
                self.draft_layers,
                self.max_draft,
            )
        )
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def page_bytes(self) -> int:
        """Bytes of one page's history, all layers."""
        return sum(c.page_bytes * len(c.layers) for c in self.history)

    def checkpoint_bytes(self) -> int:
        """Bytes of one packed tail at a page's end."""
        return sum(c.page_bytes * len(c.layers) for c in self.tails)

    def frame_bytes(self) -> int:
        """Bytes of one host or disk frame: a page's history, rounded up to ``FRAME_ALIGN``."""
        return -(-self.page_bytes() // FRAME_ALIGN) * FRAME_ALIGN

    def checkpoint_frames(self) -> int:
        """Host or disk frames one checkpoint takes."""
        return -(-self.checkpoint_bytes() // self.frame_bytes())

    def sections(self, share: Share = Share.HISTORY) -> Iterator[tuple[str, int, int, int]]:
        """(component, layer, offset, bytes) of each piece of a packed record, in order."""
        offset = 0
        for c in self.components:
            if c.share is share:
                for layer in c.layers:
                    yield c.name, layer, offset, c.page_bytes
                    offset += c.page_bytes

    def slots(self, positions: IntArray, pages: IntArray) -> dict[str, IntArray]:
        """Slot of each token in each history component; -1 where the token closes no group.

        ``positions`` (n,) are token positions, ``pages`` (n,) the device page each lies in (-1:
        a padding row, which gets -1 everywhere).
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
        return out
