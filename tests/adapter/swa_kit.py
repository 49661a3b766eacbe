"""Tiny V2 and V3 models of which some layers have a window, and what they compute without a cache.

The oracle is HF's own eager pass with another mask in these layers: dense, additive, in float32.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache as memo
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvtier import Cache, Lease, Tier
from kvtier_deepseek import Adapter, attach, layout_for
from kvtier_deepseek.mla.config import window_layers
from tests.adapter.models import random_tokens, tiny_model
from tests.device.byte_model import DeviceModel, sized

PAGE = 8
LOGITS = 1e-5
MIXED = [0, 1, 0]


@memo
def swa_model(
    window: int = 6, kinds: Sequence[int] = (0, 1, 0), variant: str = "v3", **changes: Any
) -> Any:
    """One model per test process: tests leave it as it was."""
    return tiny_model(
        variant,
        num_hidden_layers=len(kinds),
        window_attn_skip_freq=[*kinds],
        sliding_window=window,
        **changes,
    )


@torch.no_grad()
def expected(model: Any, tokens: Sequence[int]) -> Tensor:
    """(tokens, vocab) of one pass without a cache."""
    window = model.config.sliding_window
    at = torch.arange(len(tokens))
    hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - window)
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)

    def masked(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": mask[None, None]}

    hooks = [
        model.model.layers[i].self_attn.register_forward_pre_hook(masked, with_kwargs=True)
        for i in window_layers(model.config)
    ]
    logits: Tensor = model(input_ids=torch.tensor([[*tokens]]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


def near(got: Tensor, want: Tensor, atol: float = LOGITS) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def open_cache(
    model: Any,
    path: Path | None = None,
    *,
    gpu: int = 40,
    cpu: int = 0,
    page: int = PAGE,
    poison: bool = True,
    layout: Any = None,
    **options: Any,
) -> Cache:
    """A cache of that many device pages and host frames, everything in it 0xFF (NaN)."""
    if layout is None:
        layout = layout_for(
            model.config, page_tokens=page, dtype=torch.float32, window_record="dense"
        )
    if path is not None:
        options |= {"disk_path": path, "disk_bytes": "1GiB"}
    opened = Cache(layout, sized(layout, gpu=gpu, cpu=cpu, **options), model="tiny", device="cpu")
    if poison:
        pool: Any = opened._pool
        pool.poison_all()
    return opened


def poison_free(cache: Cache) -> None:
    """Whatever nobody owns is NaN from here on: pages, window pages, checkpoints, host frames."""
    DeviceModel(cache).poison()


def feed(
    cache: Cache, adapter: Adapter, *work: tuple[Lease, Sequence[int]], **options: Any
) -> list[Tensor]:
    """One step; logits (new tokens, vocab) of each lease.  Then what is free is poisoned."""
    with cache.step([(lease, list(tokens)) for lease, tokens in work]) as step:
        logits = adapter.forward(step, all_logits=True, **options)
        counts = step.query_lens.tolist()
    poison_free(cache)
    return list(logits.split(counts))


def run(
    cache: Cache, adapter: Adapter, lease: Lease, tokens: Sequence[int], chunks: Iterable[int]
) -> Tensor:
    """Feed ``tokens`` from where the lease stands in steps of ``chunks``; logits of them all."""
    out = []
    for count in chunks:
        at = lease.num_tokens
        if at < len(tokens):
            out += feed(cache, adapter, (lease, tokens[at : at + count]))
    assert lease.num_tokens == len(tokens)
    return torch.cat(out)


def cut(length: int, chunk: int, start: int = 0) -> list[int]:
    """``length - start`` tokens in chunks of ``chunk``."""
    return [min(chunk, length - at) for at in range(start, length, chunk)]


def resume(
    cache: Cache,
    adapter: Adapter,
    tokens: list[int],
    start: int,
    chunk: int,
    want: Tensor,
    atol: float = LOGITS,
) -> Lease:
    """A lease that takes just ``start`` tokens from the cache; the rest is as if computed anew.
    ``want``: logits of all tokens."""
    lease = cache.lease(tokens, max_reuse=start)
    assert lease.ready.result(timeout=300) == start
    poison_free(cache)
    got = run(cache, adapter, lease, tokens, cut(len(tokens), chunk, start))
    near(got, want[start:], atol)
    return lease


def every_boundary_of_every_tier(
    model: Any,
    opened: Callable[[], Cache],
    tokens: list[int],
    want: Tensor,
    atol: float = LOGITS,
) -> None:
    """Resume at each page end of ``tokens``, in chunks of several sizes: from the device, from the
    host, and from the disk of a cache opened anew (``opened`` does so, on the same one)."""

    def check(cache: Cache, adapter: Adapter, tier: Tier) -> None:
        for i, start in enumerate(range(PAGE, len(tokens), PAGE)):
            if tier is not Tier.GPU:
                cache.evict(Tier.GPU, 1 << 20)
            if tier is Tier.DISK:
                cache.evict(Tier.CPU, 1 << 20)
            chunk = (1, 7, PAGE)[i % 3]
            with resume(cache, adapter, tokens, start, chunk, want, atol) as lease:
                assert lease.restored[tier] == start
            cache.flush().result(timeout=300)
        cache.check()

    with opened() as cache, attach(model, cache) as adapter:
        resume(cache, adapter, tokens, 0, 13, want, atol).release()
        cache.flush().result(timeout=300)
        check(cache, adapter, Tier.GPU)
        check(cache, adapter, Tier.CPU)
    with opened() as cache, attach(model, cache) as adapter:
        check(cache, adapter, Tier.DISK)


def any_course(
    cache: Cache,
    adapter: Adapter,
    data: st.DataObject,
    streams: Sequence[list[int]],
    wants: Sequence[Tensor],
    atol: float = LOGITS,
) -> None:
    """Steps of up to 13 tokens of several requests, of which a part is rejected, and a pause or a
    fork after each; ``wants`` are the streams' logits."""
    leases = [cache.lease([]) for _ in streams]
    for _ in range(7):
        counts = [min(data.draw(st.integers(0, 13)), 60 - lease.num_tokens) for lease in leases]
        kept = [data.draw(st.integers(0, n)) for n in counts]
        rows = [r for r in range(3) if counts[r]]
        work = []
        for r in rows:
            mine = streams[r][leases[r].num_tokens :]
            wrong = [(t + 1) % 97 for t in mine[kept[r] : counts[r]]]
            work.append((leases[r], mine[: kept[r]] + wrong))
        with cache.step(work) as step:
            logits = adapter.forward(step, all_logits=True).split(step.query_lens.tolist())
            for r, got, start in zip(rows, logits, step.context_lens.tolist(), strict=True):
                near(got[: kept[r]], wants[r][start : start + kept[r]], atol)
                step.accept(leases[r], kept[r])
        r = data.draw(st.integers(0, 2))
        what = data.draw(st.sampled_from(["pause", "fork", "go on"]))
        if what == "pause":
            leases[r].pause().result(timeout=300)
            leases[r].resume().result(timeout=300)
        elif what == "fork":
            other = leases[r].fork()
            other.ready.result(timeout=300)
            leases[r].release()
            leases[r] = other
    for lease in leases:
        lease.release()
    cache.check()


__all__ = [
    "LOGITS",
    "MIXED",
    "PAGE",
    "any_course",
    "cut",
    "every_boundary_of_every_tier",
    "expected",
    "feed",
    "near",
    "open_cache",
    "poison_free",
    "random_tokens",
    "resume",
    "run",
    "swa_model",
]
