"""What the tests of speculation share: layouts of every kind with a draft layer, and a model that
writes what will be rejected.

Rows are a function of the tokens up to their own (``ByteModel``).  After every step all that lies
past a lease's committed tokens, and all of its rings that the next token does not read, is 0xFF,
a NaN in every format: whatever is derived from a rejected token is seen.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

import kvtier
from kvtier import Tier
from kvtier.core.leases import LeaseRecord
from kvtier.layouts import Component, Layout, mla, swa_c4_c128
from tests.shell.v4_kit import ByteModel, Positions, serving

torch.set_num_threads(1)

GPU, CPU, DISK = Tier.GPU, Tier.CPU, Tier.DISK
DRAFTS = 7
FEW = {"draft_layers": 1, "max_draft": DRAFTS, "draft_state_values": 6}
MLA = {"layers": 2, "latent_dim": 8, "rope_dim": 4, "dtype": "float32", "page_tokens": 16, **FEW}
WINDOWED = {"window_layers": (0,), "window": 9, "window_record": "dense"}


def dense() -> Layout:
    return mla(**MLA)  # type: ignore[arg-type]


def windowed() -> Layout:
    """Windows in the first layer, and none of the draft's."""
    return mla(**MLA, **WINDOWED)  # type: ignore[arg-type]


def compressed() -> Layout:
    return swa_c4_c128(
        layer_ratios=(4, 128),
        record="fp32",
        index_record="fp32",
        **FEW,  # type: ignore[arg-type]
    )


def packed() -> Layout:
    return swa_c4_c128(layer_ratios=(4, 128), tail="seed", **FEW)  # type: ignore[arg-type]


SHORT = [1, 2, 7, 8, 9, 10, 14, 15, 16, 17, 31, 32, 33]
"""Pages of 16 and windows of 9 tokens, in pages of 8."""
LONG = [3, *range(125, 131), 254, 255, 256, 257, 383, 511, 512]
"""Pages of 256, windows of 128, groups of 4 and 128."""
KINDS = [
    pytest.param(dense, SHORT, id="dense"),
    pytest.param(windowed, SHORT, id="windowed"),
    pytest.param(packed, LONG, id="packed"),
]
LAYOUTS = [pytest.param(make, id=make.__name__) for make in (dense, windowed, compressed, packed)]


class SpecModel(ByteModel):
    """A model that also writes what will be rejected, and trusts nothing of it."""

    def needed(self, c: Component, length: int) -> Positions:
        if c.window is not None:
            return np.arange(max(0, length - c.window + 1), length)
        return super().needed(c, length)

    def poison(self) -> None:
        super().poison()
        self.poison_all_rejected()

    def poison_all_rejected(self) -> None:
        for record in self.cache._core.leases.values():
            if record.state is kvtier.LeaseState.ACTIVE:
                self.poison_rejected(record)

    def poison_rejected(self, record: LeaseRecord) -> None:
        """Slots of tokens past the committed ones, and ring rows that nobody reads any more."""
        core, length = self.cache._core, record.length
        at = np.arange(length, min(record.capacity, length + DRAFTS + 2), dtype=np.int32)
        pages = core.block_tables[record.row][at // self.layout.page_tokens]
        owned = np.array(record.owned, dtype=bool)
        assert owned[at // self.layout.page_tokens].all(), "a shared page would be written"
        windows = None
        if self.layout.windows:
            size = self.layout.windows[0].slots_per_page
            table = np.append(core.window_tables[record.row], -1)
            windows = table[np.minimum(at // size, len(table) - 1)]
        slots = self.layout.slots(at, pages, windows)
        for c in self.layout.components:
            if c.name in slots:
                mine = slots[c.name][slots[c.name] >= 0]
            else:
                unread = np.ones(c.slots_per_page, dtype=bool)
                unread[self.needed(c, length) % c.slots_per_page] = False
                mine = record.state_slot * c.slots_per_page + np.flatnonzero(unread)
            for layer in c.layers:
                poison = np.full((len(mine), c.slot_bytes), 0xFF, np.uint8)
                self.put(self.pool.rows(c.name, layer), c, mine.astype(np.int32), poison)

    def draft(self, lease: kvtier.Lease, count: int) -> None:
        """A pass of the draft layers alone: rows of what the target has not seen yet, made of a
        draft's own hidden states and so never right."""
        guesses = [77_000_000 + i for i in range(count)]
        with self.cache.step([(lease, guesses)]) as step:
            device = step.to_device()
            for c in self.layout.components:
                for layer in c.layers[-1:] if c.name in ("latent", "swa") else ():
                    slots = step.slot_mapping[c.name]
                    rows = np.full((len(slots), c.slot_bytes), 0xEE, np.uint8)
                    self.put(device.layer(layer).rows(c.name), c, slots, rows)
            step.accept(lease, 0)
        self.poison_all_rejected()

    def verify(self, lease: kvtier.Lease, tokens: Sequence[int], rejected: int) -> None:
        """One round; of what is free nothing changes."""
        self.feed(lease, tokens, rejected=rejected, poison=False)
        self.poison_all_rejected()


served = partial(serving, SpecModel)


def tables(lease: kvtier.Lease) -> tuple[list[int], dict[int, int]]:
    tail = lease._record.tail
    return lease.block_table().tolist(), dict(tail.windows) if tail is not None else {}


def free(model: SpecModel) -> tuple[int, ...]:
    """Of everything a lease may hold on the device, how much is free."""
    core = model.cache._core
    pools = (
        *(core.residency.pools[slot] for slot in (0, 3)),
        core.tails.states,
        core.tails.windows,
    )
    return tuple(pool.free for pool in pools)


def found(model: SpecModel, tokens: Sequence[int]) -> int:
    return model.cache.match([*tokens, 1]).history_tokens
