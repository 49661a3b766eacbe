"""One bad argument is a typed error to whoever gave it, and nothing to anybody else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier import Cache, CacheConfig, Identity, KVTierError, Span
from kvtier.layouts import mla
from kvtier.testing import ManualTransfer

LAYOUT = mla(layers=1, latent_dim=8, rope_dim=8, dtype="float32", page_tokens=4)
PROMPT = [1, 2, 3, 4, 5]
BAD: dict[str, Callable[[Cache, kvtier.Lease], Any]] = {
    "digest is text": lambda c, _: c.lease(PROMPT, spans=[Span(0, 3, "x")]),  # type: ignore[arg-type]
    "digest is none": lambda c, _: c.prefetch(PROMPT, spans=[Span(0, 3, None)]),  # type: ignore[arg-type]
    "digest is a number": lambda c, _: c.explain(PROMPT, spans=[Span(0, 3, 5)]),  # type: ignore[arg-type]
    "span of floats": lambda c, _: c.match(PROMPT, spans=[Span(0.0, 3.0, b"x")]),  # type: ignore[arg-type]
    "span is a tuple": lambda c, _: c.lease(PROMPT, spans=[(0, 3, b"x")]),  # type: ignore[list-item]
    "spans are a number": lambda c, _: c.lease(PROMPT, spans=5),  # type: ignore[arg-type]
    "a pin in a step": lambda c, _: c.step([(c.pin(PROMPT), [1])]).__enter__(),  # type: ignore[list-item]
    "no batch": lambda c, _: c.step(None).__enter__(),  # type: ignore[arg-type]
    "a batch of leases": lambda c, lease: c.step([lease]).__enter__(),  # type: ignore[list-item]
    "True for a token": lambda c, lease: c.step([(lease, [1, True])]).__enter__(),
    "False for a token": lambda c, lease: c.step([(lease, [False])]).__enter__(),
    "True in a tuple": lambda c, lease: c.step([(lease, (5, True))]).__enter__(),
    "numpy's True": lambda c, lease: c.step([(lease, [5, np.True_])]).__enter__(),
    "True in a prompt": lambda c, _: c.match([5, True]),
    "numpy's True in a prompt": lambda c, _: c.match([5, np.True_]),
    "masked tokens": lambda c, _: c.match(np.ma.masked_equal([1, 2, 3], 2)),
    "padding up to anything": lambda c, lease: _pad(c, lease, 10**12),
    "padding up to more than anything": lambda c, lease: _pad(c, lease, 10**400),
    "padding up to a half": lambda c, lease: _pad(c, lease, 2.5),
    "padding up to text": lambda c, lease: _pad(c, lease, "2"),
    "padding past the buffers": lambda c, lease: _pad(c, lease, 10**12, buffers=_buffers(c)),
    "buffers of a half": lambda c, _: c.buffers(max_batch=1.5, max_tokens=1, max_pages=1),  # type: ignore[arg-type]
    "buffers of text": lambda c, _: c.buffers(max_batch=1, max_tokens="1", max_pages=1),  # type: ignore[arg-type]
    "chunk of floats": lambda _, lease: lease.chunk_end(0.0, 3.0),
    "chunk of text": lambda _, lease: lease.chunk_end("0", 3),
    "slots of a half": lambda _, lease: lease.slot_mapping(0.5, 1),
    "slots of text": lambda _, lease: lease.slot_mapping("0", 1),
    "slots of nothing": lambda _, lease: lease.slot_mapping(None, 1),
    "room for more than anything": lambda _, lease: lease.reserve(10**400),
    "a lease with more room than anything": lambda c, _: c.lease(PROMPT, reserve=10**400),
    "accept for a list": lambda c, lease: _accept(c, [lease], 1),
    "accept a half": lambda c, lease: _accept(c, lease, 1.5),
    "accept text": lambda c, lease: _accept(c, lease, "a"),
}


BAD_FIELDS: dict[str, tuple[Any, ...]] = {
    "disk_path": (5, b"x", "\ud800", "a\0b", ["x"]),
    "rank": ("0", 0.0, -1, 1, None),
    "world": ("1", 1.5, 0, float("inf"), None),
    "max_leases": ("1", 1.5, 0, True, None),
    "store_after_hits": ("1", 1.5, -1, None),
    "io_threads": ("4", 1.5, 0, 65, None),
    "wait_s": ("1", -1.0, float("nan"), True, None),
    "max_pinned": ("1", -0.5, 1.5, float("nan"), True, None),
    "codec": (None, 3, "history", {"pages": 1}, {"history": 20}, {"history": 1.5}),
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_bad_setting_is_refused_by_name(field: str) -> None:
    options: dict[str, Any] = {"gpu_bytes": 1, "cpu_bytes": 1, "disk_bytes": 1, "disk_path": "d"}
    CacheConfig(**options)
    for value in BAD_FIELDS[field]:
        with pytest.raises(kvtier.ConfigError, match=field):
            CacheConfig(**options | {field: value})


def _accept(cache: Cache, lease: Any, n: Any) -> None:
    [one] = lease if isinstance(lease, list) else [lease]
    with cache.step([(one, [1, 2])]) as step:
        step.accept(lease, n)


def _pad(cache: Cache, lease: kvtier.Lease, rows: Any, **options: Any) -> None:
    with cache.step([(lease, [1, 2])]) as step:
        step.to_device(pad_to=rows, **options)


def _buffers(cache: Cache) -> kvtier.StepBuffers:
    return cache.buffers(max_batch=4, max_tokens=8, max_pages=4)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_argument_stops_nobody(what: str) -> None:
    config = CacheConfig(gpu_bytes=16 * LAYOUT.page_bytes())
    with Cache(LAYOUT, config, model="m", device="cpu", transfer=ManualTransfer()) as cache:
        with cache.lease(PROMPT) as lease:
            with pytest.raises(KVTierError):
                BAD[what](cache, lease)
            with cache.step([(lease, PROMPT)]):
                pass
            assert lease.num_tokens == len(PROMPT)
        cache.check()


def test_what_is_large_but_means_something() -> None:
    config = CacheConfig(gpu_bytes=16 * LAYOUT.page_bytes())
    with Cache(LAYOUT, config, model="m", device="cpu", transfer=ManualTransfer()) as cache:
        forever: dict[str, Any] = {"ttl": 10**400, "max_reuse": 10**400, "priority": 10**400}
        for options in (forever, {"ttl": float("inf")}, {"priority": -(10**400)}):
            with cache.lease(PROMPT, **options) as lease:
                with cache.step([(lease, PROMPT[lease.num_tokens :])]):
                    pass
                assert lease.chunk_end(0, 10**400) == len(PROMPT)
        assert cache.match([*PROMPT, 6]).tokens == 4
        cache.check()
        assert cache.evict(kvtier.Tier.GPU, 10**400) == 1


def test_ids_of_0_and_1_are_tokens() -> None:
    config = CacheConfig(gpu_bytes=16 * LAYOUT.page_bytes())
    with Cache(LAYOUT, config, model="m", device="cpu", transfer=ManualTransfer()) as cache:
        with cache.lease([0, 1, 5]) as lease:
            with cache.step([(lease, [0, 1, 5])]) as step:
                assert step.input_ids.tolist() == [0, 1, 5]
            with cache.step([(lease, [1])]) as step:
                assert step.input_ids.tolist() == [1]
            assert lease.tokens().tolist() == [0, 1, 5, 1]


def test_any_text_names_a_tenant() -> None:
    """A lone surrogate comes out of a client's JSON."""
    who = Identity(tenant="\ud800")
    config = CacheConfig(gpu_bytes=16 * LAYOUT.page_bytes())
    with Cache(LAYOUT, config, model="m", device="cpu", transfer=ManualTransfer()) as cache:
        with cache.lease(PROMPT, identity=who) as lease, cache.step([(lease, PROMPT)]):
            pass
        assert cache.match([*PROMPT, 6], identity=who).tokens == 4
        assert cache.match([*PROMPT, 6]).tokens == 0
