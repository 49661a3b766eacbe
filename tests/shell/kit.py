"""What the shell's tests share: a small layout, caches over fakes, and prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

import kvtier
from kvtier.layouts import Layout, mla
from kvtier.layouts.base import Component, Share
from kvtier.testing import ManualTransfer

PAGE = 4
LAYOUT = mla(layers=2, latent_dim=4, rope_dim=4, dtype="float32", page_tokens=PAGE)


def tailed(*, window: int = 6, window_page: int = 4) -> Layout:
    """A layout with everything: history of two strides, a state slot and window pages."""

    def part(name: str, share: Share, stride: int, slots: int, window: int | None) -> Component:
        return Component(
            name=name,
            share=share,
            tokens_per_slot=stride,
            slots_per_page=slots,
            slot_bytes=8,
            layers=(0, 1),
            dtype="uint8",
            window=window,
        )

    return Layout(
        name="tailed",
        page_tokens=PAGE,
        components=(
            part("full", Share.HISTORY, 1, PAGE, None),
            part("half", Share.HISTORY, 2, PAGE // 2, None),
            part("state", Share.TAIL, 1, 1, None),
            part("window", Share.TAIL, 1, window_page, window),
        ),
    )


def config(*, gpu: int = 16, cpu: int = 16, **options: Any) -> kvtier.CacheConfig:
    """Tiers of that many pages of ``LAYOUT``."""
    return kvtier.CacheConfig(
        gpu_bytes=gpu * LAYOUT.page_bytes(), cpu_bytes=cpu * LAYOUT.frame_bytes(), **options
    )


def make(*, gpu: int = 16, cpu: int = 16, **options: Any) -> tuple[kvtier.Cache, ManualTransfer]:
    """A cache whose ops end when the test says so."""
    transfer = ManualTransfer()
    cache = kvtier.Cache(LAYOUT, config(gpu=gpu, cpu=cpu, **options), model="m", transfer=transfer)
    return cache, transfer


def prompt(n: int, seed: int = 0) -> list[int]:
    """``n`` tokens; prompts of different seeds differ from the first page on."""
    return [1000 * seed + i for i in range(n)]


def feed(cache: kvtier.Cache, lease: kvtier.Lease, tokens: Sequence[int]) -> None:
    """Step through tokens as a model would, one chunk."""
    with cache.step([(lease, list(tokens))]):
        pass


def fill(cache: kvtier.Cache, tokens: Sequence[int], **options: Any) -> None:
    """Compute a prompt and leave it in the cache."""
    with cache.lease(tokens, **options) as lease:
        transfer = cache._pump.transfer
        if isinstance(transfer, ManualTransfer) and not lease.ready.done():
            transfer.finish_all()
        done = lease.ready.result(timeout=300)
        feed(cache, lease, tokens[done:])


def free(cache: kvtier.Cache, tier: kvtier.Tier = kvtier.Tier.GPU) -> int:
    return cache.stats().tiers[tier].free


def ends(ops: Iterable[kvtier.Op]) -> list[str]:
    return [op.kind.value for op in ops]
