"""A model of DeepSeek-V4's shape that writes bytes instead of computing: every row is a function
of the tokens up to its own, so that whatever a lease may read can be told from anything else.

Rows are cut from one block of noise, in which every byte occurs, NaNs of every format included.
``ByteModel.feed`` is the forward pass, ``ByteModel.check`` what the next one would read, and
``poison`` fills all that nobody may read with 0xFF.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

import kvtier
from kvtier import Capture, LeaseState, Step, Tier
from kvtier.core.frames import FramePool
from kvtier.layouts import Component, Layout, Share, swa_c4_c128
from kvtier.sizing import geometry_for

RATIOS = (0, 4, 128, 4)
PAGE, GROUP, WINDOW = 256, 128, 128
Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

NOISE = np.random.default_rng(4).integers(0, 256, 1 << 20, dtype=np.uint8)
# The sum of all tokens up to a place, each times the weight of its own, tells prefixes apart.
WEIGHTS = np.random.default_rng(5).integers(0, 1 << 63, 1 << 13, dtype=np.uint64) * np.uint64(2)
WEIGHTS += np.uint64(1)
REJECTED = 99_999_999
"""Drafts that are fed and not accepted."""


def small(**options: Any) -> Layout:
    """Few layers, real slots."""
    return swa_c4_c128(layer_ratios=RATIOS, **options)


def sized(
    layout: Layout, *, gpu: int = 12, cpu: int | None = None, **options: Any
) -> kvtier.CacheConfig:
    """A configuration with that many device pages and host frames."""
    leases = {"max_leases": 3, "checkpoints": kvtier.Dense(), **options}
    if cpu is None:
        cpu = gpu + 7 * layout.checkpoint_frames()
    host = cpu * layout.frame_bytes()
    least = 1
    try:
        geometry_for(layout, kvtier.CacheConfig(gpu_bytes=1, cpu_bytes=host, **leases))
    except kvtier.ConfigError as error:
        least = int(str(error).split("set gpu_bytes to ")[1].split()[0])
    gpu_bytes = least + (gpu - 2) * layout.page_bytes()
    return kvtier.CacheConfig(gpu_bytes=gpu_bytes, cpu_bytes=host, **leases)


def prompt(n: int, seed: int = 0) -> list[int]:
    """``n`` tokens; of one seed the shorter ones begin the longer ones."""
    return list(map(int, np.random.default_rng(seed).integers(0, 100_000, n)))


class ByteModel:
    """The forward pass of one cache, and what it may read."""

    def __init__(self, cache: kvtier.Cache) -> None:
        self.cache = cache
        self.layout = cache.layout
        self.pool: Any = cache._pool
        self.host: Any = cache._pump.transfer.host  # type: ignore[attr-defined]
        self.by_layer: dict[int, list[Component]] = {}
        for c in self.layout.components:
            for layer in c.layers:
                self.by_layer.setdefault(layer, []).append(c)

    # ------------------------------------------------------------------ what rows hold

    @staticmethod
    def digests(tokens: Sequence[int]) -> npt.NDArray[np.uint64]:
        """One number per position, over all tokens up to it."""
        return np.cumsum(
            (np.array(tokens, dtype=np.uint64) + np.uint64(1)) * WEIGHTS[: len(tokens)]
        )

    @staticmethod
    def rows(c: Component, layer: int, digests: npt.NDArray[np.uint64]) -> Bytes:
        """(n, slot bytes): what these positions leave in a component's slots."""
        salt = hashlib.blake2b(f"{c.name} {layer}".encode(), digest_size=8).digest()
        mixed = (digests ^ np.uint64(int.from_bytes(salt, "little"))) * np.uint64(
            0x9E3779B97F4A7C15
        )
        starts = (mixed >> np.uint64(20)) % np.uint64(len(NOISE) - c.slot_bytes)
        return np.lib.stride_tricks.sliding_window_view(NOISE, c.slot_bytes)[
            starts.astype(np.int64)
        ]

    # ------------------------------------------------------------------ the forward pass

    def feed(
        self,
        lease: kvtier.Lease,
        tokens: Sequence[int],
        *,
        rejected: int = 0,
        poison: bool = True,
    ) -> Step:
        """One step of one lease: ``tokens``, and drafts behind them that are not accepted."""
        with self.cache.step([(lease, [*tokens, *[REJECTED] * rejected])]) as step:
            self.write(step)
            step.accept(lease, len(tokens))
        if poison:
            self.poison()
        return step

    def prefill(self, lease: kvtier.Lease, tokens: Sequence[int], chunk: int = 300) -> None:
        """The rest of a prompt, chunk by chunk."""
        lease.ready.result(timeout=300)
        while (done := lease.num_tokens) < len(tokens):
            self.feed(lease, tokens[done : min(done + chunk, len(tokens))])

    def write(self, step: Step) -> None:
        """All rows of a step, its captures included."""
        device = step.to_device()
        for row, lease in enumerate(step.leases):
            start, stop = step.cu_seqlens_q[row : row + 2].tolist()
            context = lease.tokens().tolist()
            digests = self.digests([*context, *step.input_ids[start:stop].tolist()])
            captures = [c for c in step.captures if c.row == row]
            for layer, components in self.by_layer.items():
                view = device.layer(layer)
                for c in components:
                    if c.name in step.slot_mapping:
                        slots = step.slot_mapping[c.name][start:stop]
                        kept = np.flatnonzero(slots >= 0)
                        assert c.window is None or len(kept) == stop - start, "no window page"
                        held = self.rows(c, layer, digests[len(context) + kept])
                        self.put(view.rows(c.name), c, slots[kept], held)
                        if c.window is not None:
                            self.capture_windows(view, c, step.window_table[row], captures)
                    else:
                        slot = int(step.state_slots[row])
                        self.write_ring(view, c, slot, layer, digests, len(context), captures)

    def write_ring(
        self,
        view: kvtier.LayerView,
        c: Component,
        slot: int,
        layer: int,
        digests: npt.NDArray[np.uint64],
        context: int,
        captures: Sequence[Capture],
    ) -> None:
        """The last rows of a chunk; before they overwrite others, what captures ask for."""
        ring = c.slots_per_page
        rows = view.rows(c.name)[slot * ring : (slot + 1) * ring].view(torch.uint8).numpy()
        kept = c.checkpoint_slots or 0
        for capture in captures if kept else ():
            at = np.arange(capture.position - kept, capture.position)
            fresh = at >= context
            wanted = rows[at % ring].copy()
            wanted[fresh] = self.rows(c, layer, digests[at[fresh]])
            frame = view.checkpoints(c.name)[capture.frame].view(torch.uint8).numpy()
            frame[:] = wanted
        at = np.arange(max(context, len(digests) - ring), len(digests))
        rows[at % ring] = self.rows(c, layer, digests[at])

    def capture_windows(
        self,
        view: kvtier.LayerView,
        c: Component,
        table: npt.NDArray[np.int32],
        captures: Sequence[Capture],
    ) -> None:
        rows, pages = view.rows(c.name), self.layout.tail_windows
        if not c.planes:
            rows = rows.view(-1, c.slots_per_page, rows.shape[1])
        for capture in captures:
            end = capture.position // c.slots_per_page
            numbers = table[max(0, end - pages) : end]
            assert (numbers >= 0).all(), "a window page of a capture is gone"
            view.checkpoints(c.name)[capture.frame, : len(numbers)] = rows[numbers.tolist()]

    @staticmethod
    def put(storage: torch.Tensor, c: Component, slots: npt.NDArray[np.int32], rows: Bytes) -> None:
        if not c.planes:
            storage.view(torch.uint8).numpy()[slots] = rows
            return
        pages, inside = slots // c.slots_per_page, slots % c.slots_per_page
        begin = plane = 0
        for width in c.planes:
            at = plane + (inside * width)[:, None] + np.arange(width)
            storage.numpy()[pages[:, None], at] = rows[:, begin : begin + width]
            begin, plane = begin + width, plane + width * c.slots_per_page

    @staticmethod
    def get(storage: torch.Tensor, c: Component, slots: Positions) -> Bytes:
        if not c.planes:
            return np.asarray(storage.view(torch.uint8).numpy()[slots])
        pages, inside = slots // c.slots_per_page, slots % c.slots_per_page
        parts, plane = [], 0
        for width in c.planes:
            at = plane + (inside * width)[:, None] + np.arange(width)
            parts.append(storage.numpy()[pages[:, None], at])
            plane += width * c.slots_per_page
        return np.concatenate(parts, axis=1)

    # ------------------------------------------------------------------ what the next pass reads

    def needed(self, c: Component, length: int) -> Positions:
        """Positions whose rows of a tail component the next token reads."""
        first = {
            "swa": length - WINDOW + 1,
            "c4_state_a": 4 * (length // 4) - 4,
            "c4_index_state_a": 4 * (length // 4) - 4,
            "c4_state_b": 4 * (length // 4),
            "c4_index_state_b": 4 * (length // 4),
            "c128_state": GROUP * (length // GROUP),
        }[c.name]
        return np.arange(max(0, first), length)

    def check(self, lease: kvtier.Lease) -> None:
        """Every byte that the next forward pass of a lease reads is that of its tokens."""
        tokens = lease.tokens().tolist()
        length, digests = len(tokens), self.digests(tokens)
        mapping = lease.slot_mapping(0, length)
        record = lease._record
        windows = self.cache._core.window_tables[record.row]
        for layer, components in self.by_layer.items():
            for c in components:
                storage = self.pool.rows(c.name, layer)
                if c.name in mapping:
                    at = np.flatnonzero(mapping[c.name] >= 0)
                    slots = mapping[c.name][at].astype(np.int64)
                    assert len(at) == length // c.tokens_per_slot
                elif c.window is not None:
                    at = self.needed(c, length)
                    pages = windows[at // c.slots_per_page]
                    assert (pages >= 0).all(), "a window page that is read is not held"
                    slots = pages.astype(np.int64) * c.slots_per_page + at % c.slots_per_page
                else:
                    at = self.needed(c, length)
                    slots = record.state_slot * c.slots_per_page + at % c.slots_per_page
                same = (self.get(storage, c, slots) == self.rows(c, layer, digests[at])).all(axis=1)
                assert same.all(), f"{c.name}, layer {layer}: rows {at[~same].tolist()} of {length}"

    # ------------------------------------------------------------------ what nobody reads

    def poison(self) -> None:
        """All that is free, on the device and on the host, is 0xFF from here on."""
        core = self.cache._core
        pools, tails = core.residency.pools, core.tails
        with self.cache._pump:
            self.pool.checkpoints[free(pools[3])] = 0xFF
            self.host.frames[free(pools[1])] = 0xFF
            for c in self.layout.components:
                pool = tails.states if c.window is None else tails.windows
                frames = free(pools[0] if c.share is Share.HISTORY else pool)
                for layer in c.layers:
                    self.pool._storage[c.name, layer].numpy()[frames] = 0xFF

    def evict(self, *tiers: Tier) -> None:
        """These tiers are emptied and poisoned; what was theirs is below or gone."""
        for tier in tiers:
            self.cache.evict(tier, 1 << 20)
            assert self.cache.stats().tiers[tier].resident == 0
        self.poison()


def free(pool: FramePool) -> list[int]:
    return sorted(set(range(pool.size)) - pool.taken())


def open_lease(model: ByteModel, tokens: Sequence[int], **options: Any) -> kvtier.Lease:
    """A lease that is ready."""
    lease = model.cache.lease(list(tokens), **options)
    lease.ready.result(timeout=300)
    assert lease.state is LeaseState.ACTIVE
    return lease


Model = TypeVar("Model", bound=ByteModel)


@contextmanager
def serving(
    kind: type[Model], layout: Layout, disk: Path | None = None, **options: Any
) -> Iterator[Model]:
    """A cache whose whole device and host memory is 0xFF, and a model of this kind on it."""
    if disk is not None:
        options |= {"disk_path": disk, "disk_bytes": "256MiB"}
    cache = kvtier.Cache(layout, sized(layout, **options), model="bytes", device="cpu")
    model = kind(cache)
    model.pool.poison_all()
    model.host.poison(range(model.host.num_frames))
    try:
        yield model
        cache.check()
        assert not cache.leases(), "the test left leases open"
    finally:
        cache.close()
