"""A model that leaves bytes instead of computing, on any device, with tails or without.

What a row holds is a pure function of the tokens up to its own, its layer, its component and the
lease's identity.  ``write`` lays that down with device work alone, queued and not waited for;
``check`` says on the CPU what must be there and compares on the device; ``poison`` fills all that
is free with 0xFF (a NaN in every float format).
"""

import hashlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache as memoised
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import kvtier
from kvtier import Capture, Identity, Step, Tier
from kvtier.core.frames import FramePool
from kvtier.layouts import Component, Layout, Share, gqa, mla, mla_indexed, swa_c4_c128
from kvtier.sizing import geometry_for

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]

REJECTED = 99_999_999
"""Drafts that are fed and not accepted."""
POISON = 0xFF
NOISE = np.random.default_rng(11).integers(0, 256, 1 << 20, dtype=np.uint8)
"""Rows are cut from it; every byte occurs, NaNs of every format included."""
# The sum of all tokens up to a place, each times the weight of its own, tells prefixes apart.
WEIGHTS = np.random.default_rng(12).integers(0, 1 << 63, 1 << 14, dtype=np.uint64) * np.uint64(2)
WEIGHTS += np.uint64(1)
LAYOUTS = {
    "mla": mla(layers=3, latent_dim=512, rope_dim=64, page_tokens=16),
    "gqa": gqa(layers=3, kv_heads=2, head_dim=64, page_tokens=32),
    "v4": swa_c4_c128(layer_ratios=(0, 4, 128), max_draft=3),
}
SMALL_V4 = swa_c4_c128(
    layer_ratios=(4, 128),
    record="fp32",
    index_record="fp32",
    head_dim=32,
    rope_dim=16,
    index_dim=16,
    draft_layers=1,
    max_draft=3,
    draft_state_values=6,
)
"""For a CPU, which has to write all of these bytes."""


V32 = mla_indexed(layers=2, latent_dim=512, rope_dim=64, record="fp8", page_tokens=16)
"""History alone, of records whose planes lie apart."""


@memoised
def salt_of(name: str, layer: int) -> np.uint64:
    digest = hashlib.blake2b(f"{name} {layer}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def digests_of(tokens: Sequence[int], identity: Identity) -> Digests:
    """One number per position, over the identity and all tokens up to it."""
    sums = np.cumsum((np.asarray(tokens, dtype=np.uint64) + np.uint64(1)) * WEIGHTS[: len(tokens)])
    return sums ^ salt_of(repr(identity), 0)


def starts_of(c: Component, layer: int, digests: Digests) -> Ints:
    """Where in the noise the rows of these positions begin."""
    mixed = (digests ^ salt_of(c.name, layer)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(20)) % np.uint64(len(NOISE) - c.slot_bytes)).astype(np.int64)


def rows_of(c: Component, layer: int, digests: Digests) -> npt.NDArray[np.uint8]:
    """(n, slot bytes): the oracle, on the CPU."""
    windows = np.lib.stride_tricks.sliding_window_view(NOISE, c.slot_bytes)
    return windows[starts_of(c, layer, digests)]


def needed(c: Component, length: int) -> Ints:
    """Positions whose rows of a tail component the token at ``length`` reads."""
    if c.window is not None:
        first = length - c.window + 1
    elif c.name.startswith("c128"):
        first = 128 * (length // 128)
    else:  # a ratio of 4; the first half of a row is read by the next group again
        first = 4 * (length // 4) - (4 if c.name.endswith("_a") else 0)
    return np.arange(max(0, first), length)


class DeviceModel:
    """The forward pass of one cache over the default data plane, and what it may read.

    On a GPU it runs on one stream, or with ``several_streams`` on one for each thread; enter
    ``computing()`` around whatever calls into the cache or the model.
    """

    def __init__(self, cache: kvtier.Cache, *, several_streams: bool = False) -> None:
        self.cache = cache
        self.layout: Layout = cache.layout
        self.transfer: Any = cache._pump.transfer
        self.pool: Any = self.transfer.pool
        self.device: torch.device = self.pool.device
        self._several = several_streams
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.noise = torch.from_numpy(NOISE).to(self.device)
        self.places = [(c, layer) for c in self.layout.components for layer in c.layers]
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def computing(self) -> AbstractContextManager[Any]:
        """The compute stream is this thread's current one."""
        if not self.on_gpu:
            return nullcontext()
        who = threading.get_ident() if self._several else 0
        if who not in self._streams:
            self._streams[who] = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._streams[who])

    # ------------------------------------------------------------------ the forward pass

    def feed(self, lease: kvtier.Lease, tokens: Sequence[int], *, rejected: int = 0) -> Step:
        """One step of one lease: ``tokens``, and drafts behind them that are not accepted."""
        with self.cache.step([(lease, [*tokens, *[REJECTED] * rejected])]) as step:
            self.write(step)
            step.accept(lease, len(tokens))
        return step

    def prefill(self, lease: kvtier.Lease, tokens: Sequence[int], chunk: int = 300) -> None:
        """The rest of a prompt, chunk by chunk."""
        lease.ready.result(timeout=300)
        while (done := lease.num_tokens) < len(tokens):
            self.feed(lease, tokens[done : min(done + chunk, len(tokens))])

    def write(self, step: Step) -> None:
        """All rows of a step, its captures included.  Queued, not waited for."""
        device = step.to_device()
        for row, lease in enumerate(step.leases):
            start, stop = step.cu_seqlens_q[row : row + 2].tolist()
            context = lease.tokens().tolist()
            tokens = [*context, *step.input_ids[start:stop].tolist()]
            digests = digests_of(tokens, lease._record.identity)
            captures = [c for c in step.captures if c.row == row]
            for c, layer in self.places:
                device.layer(layer)  # waits for what is on its way into these pages
                if c.name not in step.slot_mapping:
                    slot = int(step.state_slots[row])
                    self._write_ring(c, layer, slot, digests, len(context), captures)
                    continue
                slots = step.slot_mapping[c.name][start:stop].astype(np.int64)
                kept = np.flatnonzero(slots >= 0)
                self._put(c, layer, slots[kept], digests[len(context) + kept])
                if c.window is not None:
                    self._capture_windows(c, layer, step.window_table[row], captures)

    def _write_ring(
        self,
        c: Component,
        layer: int,
        slot: int,
        digests: Digests,
        context: int,
        captures: Sequence[Capture],
    ) -> None:
        """The last rows of a chunk; before they overwrite others, what captures ask for."""
        size = c.slots_per_page
        ring = self.pool._storage[c.name, layer][slot].view(size, c.slot_bytes)
        kept = c.checkpoint_slots or 0
        for capture in captures if kept else ():
            at = np.arange(capture.position - kept, capture.position)
            fresh = np.flatnonzero(at >= context)
            (held,) = self._upload(at % size)
            wanted = ring[held]
            if len(fresh):
                into, starts = self._upload(fresh, starts_of(c, layer, digests[at[fresh]]))
                wanted[into] = self._rows(c, starts)
            self._frame(c, layer, capture.frame)[:] = wanted
        at = np.arange(max(context, len(digests) - size), len(digests))
        slots, starts = self._upload(at % size, starts_of(c, layer, digests[at]))
        ring[slots] = self._rows(c, starts)

    def _capture_windows(
        self,
        c: Component,
        layer: int,
        table: npt.NDArray[np.int32],
        captures: Sequence[Capture],
    ) -> None:
        storage, pages = self.pool._storage[c.name, layer], self.layout.tail_windows
        for capture in captures:
            end = capture.position // c.slots_per_page
            numbers = table[max(0, end - pages) : end].astype(np.int64)
            assert (numbers >= 0).all(), "a window page of a capture is gone"
            (held,) = self._upload(numbers)
            frame = self._frame(c, layer, capture.frame)[: len(numbers)]
            frame[:] = storage[held].view(frame.shape)

    def _frame(self, c: Component, layer: int, frame: int) -> torch.Tensor:
        rows: torch.Tensor = self.pool.checkpoint_rows(c.name, layer)[frame]
        return rows.view(torch.uint8)

    # ------------------------------------------------------------------ rows on the device

    def _planes(self, c: Component, layer: int) -> list[torch.Tensor]:
        """(pages, slots, bytes) views, one for each plane of a slot."""
        storage: torch.Tensor = self.pool._storage[c.name, layer]
        out, at = [], 0
        for width in c.planes or (c.slot_bytes,):
            shape = (storage.shape[0], c.slots_per_page, width)
            offset = storage.storage_offset() + at
            out.append(storage.as_strided(shape, (storage.stride(0), width, 1), offset))
            at += width * c.slots_per_page
        return out

    def _put(self, c: Component, layer: int, slots: Ints, digests: Digests) -> None:
        size = c.slots_per_page
        pages, inside, starts = self._upload(
            slots // size, slots % size, starts_of(c, layer, digests)
        )
        rows, at = self._rows(c, starts), 0
        for plane in self._planes(c, layer):
            plane[pages, inside] = rows[:, at : at + plane.shape[2]]
            at += plane.shape[2]

    def _rows(self, c: Component, starts: torch.Tensor) -> torch.Tensor:
        return self.noise.unfold(0, c.slot_bytes, 1)[starts]

    def _upload(self, *arrays: Ints) -> tuple[torch.Tensor, ...]:
        host = torch.from_numpy(np.stack(arrays))
        if self.on_gpu:
            return tuple(host.pin_memory().to(self.device, non_blocking=True))
        return tuple(host)

    # ------------------------------------------------------------------ what the next pass reads

    def check(self, lease: kvtier.Lease) -> int:
        """Every byte that the next forward pass of a lease reads is that of its tokens; how many
        rows these were."""
        self.transfer.fence(None)  # behind copies that ran on other streams
        tokens = lease.tokens().tolist()
        length = len(tokens)
        digests = digests_of(tokens, lease._record.identity)
        wrong: list[tuple[Component, int, Ints, torch.Tensor]] = []
        arriving = self.pool.arriving(lease.block_table())
        for c, layer in self.places:
            for arrival in arriving:
                arrival.wait(layer)
            at, slots = self._read_slots(c, lease, length)
            if not len(at):
                continue
            pages, inside = self._upload(slots // c.slots_per_page, slots % c.slots_per_page)
            held = torch.cat([p[pages, inside] for p in self._planes(c, layer)], dim=1)
            want = torch.from_numpy(np.ascontiguousarray(rows_of(c, layer, digests[at])))
            wrong.append((c, layer, at, (held != want.to(self.device)).any(dim=1)))
        if wrong and bool(torch.stack([bad.any() for *_, bad in wrong]).any()):
            told = [
                f"{c.name}, layer {layer}: rows {at[bad.cpu().numpy()].tolist()} of {length}"
                for c, layer, at, bad in wrong
                if bad.any()
            ]
            raise AssertionError("; ".join(told)[:2000])
        return sum(len(at) for _, _, at, _ in wrong)

    def _read_slots(self, c: Component, lease: kvtier.Lease, length: int) -> tuple[Ints, Ints]:
        """Positions that are read of a component, and their slots."""
        if c.share is Share.HISTORY:
            slots = lease.slot_mapping(0, length)[c.name].astype(np.int64)
            at = np.flatnonzero(slots >= 0)
            assert len(at) == length // c.tokens_per_slot
            return at, slots[at]
        at, record = needed(c, length), lease._record
        if c.window is None:
            return at, record.state_slot * c.slots_per_page + at % c.slots_per_page
        pages = self.cache._core.window_tables[record.row][at // c.slots_per_page].astype(np.int64)
        assert (pages >= 0).all(), "a window page that is read is not held"
        return at, pages * c.slots_per_page + at % c.slots_per_page

    # ------------------------------------------------------------------ what nobody reads

    def poison(self, most: int = 1 << 30) -> None:
        """All that is free, on the device and on the host, is 0xFF behind what is queued so far.

        Of each pool at most so many frames, those that will be taken next.
        """
        host, core = self.transfer.host, self.cache._core
        pools, tails = core.residency.pools, core.tails
        with self.computing(), self.cache._pump:
            if self.cache._pump._turn.locked():
                return  # of these some may be sources of a copy that is yet to be queued
            self.transfer.fence(None)  # their last owners may still read them, on other streams
            frames = free(pools[1], most)
            for arrival in self.pool.arrivals.touching(free(pools[0], most), frames):
                arrival.wait()
                if not arrival.frames.isdisjoint(frames):
                    arrival.whole.synchronize()
            host.frames[frames] = POISON
            if self.layout.has_tails:
                self._fill(self.pool.checkpoints, free(pools[3], most))
            for c, layer in self.places:
                pool = tails.states if c.window is None else tails.windows
                frames = free(pools[0] if c.share is Share.HISTORY else pool, most)
                self._fill(self.pool._storage[c.name, layer], frames)
            # Whoever takes one of these frames writes behind this.
            self.transfer.fence(None)

    def _fill(self, storage: torch.Tensor, frames: list[int]) -> None:
        if frames:
            (held,) = self._upload(np.array(frames, dtype=np.int64))
            storage.index_fill_(0, held, POISON)

    def evict(self, *tiers: Tier) -> None:
        """These tiers are emptied and poisoned; what was theirs is below or gone."""
        for tier in tiers:
            self.cache.evict(tier, 1 << 20)
            assert self.cache.stats().tiers[tier].resident == 0
        self.poison()


def free(pool: FramePool, most: int) -> list[int]:
    return list(pool.order()[-most:])


def sized(layout: Layout, *, gpu: int, cpu: int, **options: Any) -> kvtier.CacheConfig:
    """A configuration with that many device pages and host frames."""
    options = {"max_leases": 4, "checkpoints": kvtier.Dense(), **options}
    host = cpu * layout.frame_bytes()
    least = 2 * layout.page_bytes()
    try:
        geometry_for(layout, kvtier.CacheConfig(gpu_bytes=1, cpu_bytes=host, **options))
    except kvtier.ConfigError as error:
        least = int(str(error).split("set gpu_bytes to ")[1].split()[0])
    gpu_bytes = least + (gpu - 2) * layout.page_bytes()
    return kvtier.CacheConfig(gpu_bytes=gpu_bytes, cpu_bytes=host, **options)


def prompt(n: int, seed: int = 0) -> list[int]:
    """``n`` tokens; of one seed the shorter ones begin the longer ones."""
    return list(map(int, np.random.default_rng(seed).integers(0, 100_000, n)))
