"""What a cache costs the model: a prefill step with and without it, storing and not storing.

The step is 8 layers at the attention sizes of DeepSeek-V4-Flash, bf16, over a chunk of 8,192 tokens
of a new prompt: the projections as they are, and attention of every query to 640 keys, shared by
128 neighbours instead of chosen one by one.  The same prompts go through the real ``Cache``, so
that leases, block tables and commits are counted too; no prompt shares anything with another.

Contenders take turns, as the clocks of a device drift by more than what is looked for; for the
same reason it rests between turns, and its first work in each is to wait until the host is ahead.
A turn is two steps back to back, and the second is timed on the device, from the end of the first
to its own: what the first has to store is stored meanwhile.  ``around_us`` is the part of that in
which the model's first product had not begun, or its last was over: there the cache's own work on
the compute stream shows, however much the products themselves vary.  Without a GPU there are no
results.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Param, Result, summarise
from benchmarks.shapes import V4_FLASH_RATIOS
from kvtier import Cache, CacheConfig, Tier, TokenBuffer, pack
from kvtier.layouts import Layout, swa_c4_c128

__all__ = ["HIDDEN", "TOKENS", "Attention", "run"]

TOKENS = 8192
LAYERS = 8
HIDDEN, Q_RANK, HEADS, HEAD_DIM, GROUPS, O_RANK = 4096, 1024, 64, 512, 8, 1024
KEYS, NEIGHBOURS = 640, 128
WAIT_CYCLES, REST_S = 40_000_000, 0.02
"""Of the device before a turn: some 20 ms each, as host and device take for two steps."""
OWN = (0, 0, 4, 128, 4, 128, 4, 128)
"""Compression of the step's own 8 layers."""
BASES = {"no cache": None, "device only": "no cache", "storing": "device only"}
"""What each contender is measured against."""
Samples = dict[str, list[float]]
Marks = tuple[torch.cuda.Event, torch.cuda.Event]
Contender = Callable[[TokenBuffer], Marks]
"""Queues one step; before and behind the model's own work."""


def run(quick: bool) -> list[Result]:
    """Milliseconds a step; the baseline of each is the step without it, in the same run.
    ``host_ms`` is how long the calling thread takes to queue a step."""
    if not torch.cuda.is_available():
        print("step: needs a CUDA device")
        return []
    model, turns = Attention(), 20 if quick else 48
    results: list[Result] = []
    # All 43 layers: five times what a step of 8 has to store.
    for name, ratios in (("8 layers", OWN), ("43 layers", V4_FLASH_RATIOS)):
        layout = swa_c4_c128(layer_ratios=ratios)
        params: dict[str, Param] = {"stored": name}
        with ExitStack() as stack:
            contenders: dict[str, Contender] = {"no cache": lambda _: _marked(model)}
            caches = {}
            for what, host in (("device only", 0), ("storing", 8 << 30)):
                cache = caches[what] = stack.enter_context(_cache(layout, host))
                contenders[what] = _step(cache, model)
            samples = _in_turn(contenders, turns)
            stored = caches["storing"].stats().tiers[Tier.CPU].written_bytes
            stored //= 2 * (turns + 1) * 10**6
            assert stored, "nothing was stored"
            params["mb_stored_a_step"] = stored
        results += _told(*samples, params)
    return results


def _told(
    on_device: Samples, around: Samples, on_host: Samples, params: dict[str, Param]
) -> list[Result]:
    results = []
    medians = {what: summarise("", times, unit="ms").median for what, times in on_device.items()}
    for what, base in BASES.items():
        mine: dict[str, Param] = {**params, "cache": what}
        times = on_device[what]
        step = summarise("step_ms", times, unit="ms", params=mine)
        results.append(step.against(None if base is None else medians[base]))
        results.append(summarise("around_us", around[what], unit="us", params=mine))
        results.append(summarise("host_ms", on_host[what], unit="ms", params=mine))
        if base is not None:
            cost = [100 * (t / b - 1) for t, b in zip(times, on_device[base], strict=True)]
            results.append(summarise("slowdown", cost, unit="percent", params=mine))
    return results


def _cache(layout: Layout, host: int) -> Cache:
    config = CacheConfig(gpu_bytes=16 << 30, cpu_bytes=host, max_leases=64)
    return Cache(layout, config, model="benchmark", device="cuda")


def _marked(model: "Attention") -> Marks:
    before = _mark()
    model()
    return before, _mark()


def _step(cache: Cache, model: "Attention") -> Contender:
    def step(prompt: TokenBuffer) -> Marks:
        with cache.lease(prompt) as lease:
            assert lease.cached_tokens == 0
            lease.ready.result(timeout=10)
            with cache.step([(lease, prompt)]) as work:
                work.to_device()
                return _marked(model)

    return step


def _in_turn(contenders: dict[str, Contender], turns: int) -> tuple[Samples, Samples, Samples]:
    """Of a step: milliseconds on the device, microseconds of it around the model, milliseconds of
    the calling thread.  One sample a turn; the first turn of each is not counted."""
    prompts = _prompts()
    on_device: Samples = {what: [] for what in contenders}
    around: Samples = {what: [] for what in contenders}
    on_host: Samples = {what: [] for what in contenders}
    for turn in range(turns + 1):
        # Whoever comes first would always find the same device.
        for what in sorted(contenders, reverse=bool(turn % 2)):
            time.sleep(REST_S)
            torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
            contenders[what](next(prompts))
            begin, prompt, began = _mark(), next(prompts), time.perf_counter()
            first, last = contenders[what](prompt)
            took, end = time.perf_counter() - began, _mark()
            torch.cuda.synchronize()
            if turn:
                on_host[what].append(1e3 * took)
                on_device[what].append(begin.elapsed_time(end))
                outside = begin.elapsed_time(first) + last.elapsed_time(end)
                around[what].append(1e3 * outside)
    return on_device, around, on_host


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _prompts() -> Iterator[TokenBuffer]:
    rng = np.random.default_rng(0)
    while True:
        yield pack(rng.integers(0, 100_000, TOKENS, np.int32))


class Attention:
    """The attention layers' matrix products on random weights, for chunks of 8,192 tokens."""

    def __init__(self) -> None:
        self._down = self._weights(HIDDEN, Q_RANK + HEAD_DIM)
        self._up = self._weights(Q_RANK, HEADS * HEAD_DIM)
        self._out_a = self._weights(GROUPS, HEADS * HEAD_DIM // GROUPS, O_RANK)
        self._out_b = self._weights(GROUPS * O_RANK, HIDDEN)
        self._hidden = self._weights(TOKENS, HIDDEN)
        self._keys: dict[int, Tensor] = {}

    @staticmethod
    def _weights(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-2] ** -0.5)

    def __call__(self) -> None:
        hidden = self._hidden
        for _ in range(LAYERS):
            hidden = self.layer(hidden, KEYS)

    def layer(self, hidden: Tensor, keys: int) -> Tensor:
        """One layer over a chunk, every query attending to so many ``keys``."""
        if keys not in self._keys:
            self._keys[keys] = self._weights(TOKENS // NEIGHBOURS, keys, HEAD_DIM)
        shared = self._keys[keys]
        down = hidden @ self._down
        query = down[:, :Q_RANK] @ self._up
        query = query.view(-1, NEIGHBOURS * HEADS, HEAD_DIM)
        scores = torch.softmax(query @ shared.transpose(1, 2), dim=-1)
        out = (scores @ shared).view(TOKENS, GROUPS, -1)
        out = torch.bmm(out.transpose(0, 1), self._out_a).transpose(0, 1)
        return hidden + out.reshape(TOKENS, -1) @ self._out_b
