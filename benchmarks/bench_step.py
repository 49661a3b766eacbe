"""What a cache costs the model: a prefill step with and without it, storing and not storing.

The step is 8 layers at the attention sizes of DeepSeek-V4-Flash, bf16, over a chunk of 8,192 tokens
of a new prompt: the projections as they are, and attention of every query to 640 keys, shared by
128 neighbours instead of chosen one by one.  The same prompts go through the real ``Cache``, so
that leases, block tables and commits are counted too; no prompt shares anything with another.

Contenders run in turn, several steps back to back each, timed on the device, the host never
waiting for it in between.  Without a GPU there are no results.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Param, Result, summarise
from kvtier import Cache, CacheConfig, Tier, TokenBuffer, pack
from kvtier.layouts import Layout, swa_c4_c128

__all__ = ["run"]

TOKENS = 8192
LAYERS = 8
HIDDEN, Q_RANK, HEADS, HEAD_DIM, GROUPS, O_RANK = 4096, 1024, 64, 512, 8, 1024
KEYS, NEIGHBOURS = 640, 128
STEPS = 10
"""Back to back, for one sample."""
OWN = (0, 0, 4, 128, 4, 128, 4, 128)
"""Compression of the step's own 8 layers."""
WHOLE = (0, 0, *(4, 128) * 20, 4)
"""And of all 43 layers: five times what a step of 8 has to store."""


def run(quick: bool) -> list[Result]:
    """Milliseconds a step; the baseline of each is the step without it, in the same run."""
    if not torch.cuda.is_available():
        print("step: needs a CUDA device")
        return []
    model, repeats = _Model(), 4 if quick else 16
    results: list[Result] = []
    for name, ratios in (("8 layers", OWN), ("43 layers", WHOLE)):
        layout = swa_c4_c128(layer_ratios=ratios)
        params: dict[str, Param] = {"stored": name}
        with ExitStack() as stack:
            contenders: dict[str, Callable[[TokenBuffer], None]] = {"no cache": lambda _: model()}
            caches = {}
            for what, host in (("device only", 0), ("storing", 8 << 30)):
                cache = caches[what] = stack.enter_context(_cache(layout, host))
                contenders[what] = _step(cache, model)
            samples = _in_turn(contenders, repeats)
            stored = caches["storing"].stats().tiers[Tier.CPU].written_bytes
            stored //= (STEPS + 1) * (repeats + 1) * 10**6
            assert stored, "nothing was stored"
            params["mb_stored_a_step"] = stored
        medians = {what: summarise("", times, unit="ms").median for what, times in samples.items()}
        below = {"no cache": None, "device only": "no cache", "storing": "device only"}
        for what, times in samples.items():
            result = summarise("step_ms", times, unit="ms", params={**params, "cache": what})
            base = below[what]
            results.append(result.against(None if base is None else medians[base]))
            if base is not None:
                cost = [100 * (t / b - 1) for t, b in zip(times, samples[base], strict=True)]
                results.append(
                    summarise("slowdown", cost, unit="percent", params={**params, "cache": what})
                )
    return results


def _cache(layout: Layout, host: int) -> Cache:
    config = CacheConfig(gpu_bytes=16 << 30, cpu_bytes=host, max_leases=64)
    return Cache(layout, config, model="benchmark", device="cuda")


def _step(cache: Cache, model: "_Model") -> Callable[[TokenBuffer], None]:
    def step(prompt: TokenBuffer) -> None:
        with cache.lease(prompt) as lease:
            assert lease.cached_tokens == 0
            lease.ready.result(timeout=10)
            with cache.step([(lease, prompt)]) as work:
                work.to_device()
                model()

    return step


def _in_turn(
    contenders: dict[str, Callable[[TokenBuffer], None]], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds a step, one sample a turn; the first turn is not counted."""
    prompts = _prompts()
    samples: dict[str, list[float]] = {what: [] for what in contenders}
    for turn in range(repeats + 1):
        # Whoever comes first finds a cooler device.
        for what, step in sorted(contenders.items(), reverse=bool(turn % 2)):
            step(next(prompts))  # from its end on the device is never idle for want of a start
            begin, end = _timer(), _timer()
            begin.record()
            for _ in range(STEPS):
                step(next(prompts))
            end.record()
            torch.cuda.synchronize()
            if turn:
                samples[what].append(begin.elapsed_time(end) / STEPS)
    return samples


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _prompts() -> Iterator[TokenBuffer]:
    rng = np.random.default_rng(0)
    while True:
        yield pack(rng.integers(0, 100_000, TOKENS, np.int32))


class _Model:
    """The attention layers' matrix products on random weights."""

    def __init__(self) -> None:
        self._down = self._weights(HIDDEN, Q_RANK + HEAD_DIM)
        self._up = self._weights(Q_RANK, HEADS * HEAD_DIM)
        self._out_a = self._weights(GROUPS, HEADS * HEAD_DIM // GROUPS, O_RANK)
        self._out_b = self._weights(GROUPS * O_RANK, HIDDEN)
        self._keys = self._weights(TOKENS // NEIGHBOURS, KEYS, HEAD_DIM)
        self._hidden = self._weights(TOKENS, HIDDEN)

    @staticmethod
    def _weights(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-2] ** -0.5)

    def __call__(self) -> None:
        hidden = self._hidden
        for _ in range(LAYERS):
            down = hidden @ self._down
            query = down[:, :Q_RANK] @ self._up
            query = query.view(-1, NEIGHBOURS * HEADS, HEAD_DIM)
            scores = torch.softmax(query @ self._keys.transpose(1, 2), dim=-1)
            out = (scores @ self._keys).view(TOKENS, GROUPS, -1)
            out = torch.bmm(out.transpose(0, 1), self._out_a).transpose(0, 1)
            hidden = hidden + out.reshape(TOKENS, -1) @ self._out_b
