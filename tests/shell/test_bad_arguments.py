"""One bad argument is a typed error to whoever gave it, and nothing to anybody else."""

from collections.abc import Callable
from typing import Any

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
    "accept a half": lambda c, lease: _accept(c, lease, 1.5),
    "accept text": lambda c, lease: _accept(c, lease, "a"),
}


def _accept(cache: Cache, lease: kvtier.Lease, n: Any) -> None:
    with cache.step([(lease, [1, 2])]) as step:
        step.accept(lease, n)


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


def test_any_text_names_a_tenant() -> None:
    """A lone surrogate comes out of a client's JSON."""
    who = Identity(tenant="\ud800")
    config = CacheConfig(gpu_bytes=16 * LAYOUT.page_bytes())
    with Cache(LAYOUT, config, model="m", device="cpu", transfer=ManualTransfer()) as cache:
        with cache.lease(PROMPT, identity=who) as lease, cache.step([(lease, PROMPT)]):
            pass
        assert cache.match([*PROMPT, 6], identity=who).tokens == 4
        assert cache.match([*PROMPT, 6]).tokens == 0
