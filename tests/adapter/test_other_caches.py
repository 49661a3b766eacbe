"""Steps of a cache that is not the one a model was attached to."""

from typing import Any

import pytest
import torch

from kvtier import Cache, CacheClosed, CacheConfig, LayoutMismatch
from kvtier.layouts import Layout, swa_c4_c128
from kvtier_deepseek import attach, layout_for
from tests.adapter.models import full_logits, tiny_model
from tests.adapter.v4_kit import FP32, feed, model_of, open_cache, stream


@pytest.mark.parametrize(
    "other", [{"page_tokens": 512}, {"max_draft": 8}, {"tail": "seed"}], ids=str
)
def test_a_v4_cache_laid_out_otherwise_is_refused(other: dict[str, Any]) -> None:
    """Its pages and rings would be read where they are not; nothing is written before that."""
    model, tokens = model_of(), stream()
    options: dict[str, Any] = {**FP32, **other}
    layout = swa_c4_c128(layer_ratios=(0, 4, 128, 4), **options)
    mine = open_cache(model)
    with mine, opened(layout) as cache, attach(model, mine) as adapter:
        pool: Any = cache._pool
        pool.poison_all()
        with (
            cache.lease(tokens) as lease,
            pytest.raises(LayoutMismatch, match="laid out otherwise"),
        ):
            feed(cache, adapter, (lease, tokens[:100]))
        history = [pool._storage[c.name, i] for c in layout.history for i in c.layers]
        assert all((rows == 0xFF).all() for rows in history)


def test_a_v3_cache_of_other_pages_is_refused() -> None:
    model = tiny_model("v3")
    mine, other = (layout_for(model.config, page_tokens=size, dtype="float32") for size in (16, 32))
    with opened(mine) as first, opened(other) as cache, attach(model, first) as adapter:
        with cache.lease([1, 2, 3]) as lease, pytest.raises(LayoutMismatch):
            feed(cache, adapter, (lease, [1, 2, 3]))


def test_a_cache_laid_out_the_same_is_as_good() -> None:
    model, tokens = model_of(), stream()[:300]
    mine, cache = open_cache(model), open_cache(model)
    with mine, cache, attach(model, mine) as adapter, cache.lease(tokens) as lease:
        got = feed(cache, adapter, (lease, tokens))[0]
    torch.testing.assert_close(got, full_logits(model, tokens), atol=5e-5, rtol=0)


def test_a_closed_cache_is_refused() -> None:
    model = tiny_model("v3")
    before = set(vars(model.model.layers[0].self_attn))
    with opened(layout_for(model.config, page_tokens=16, dtype="float32")) as cache:
        pass
    with pytest.raises(CacheClosed, match="has been closed"):
        attach(model, cache)
    assert set(vars(model.model.layers[0].self_attn)) == before


def opened(layout: Layout) -> Cache:
    config = CacheConfig(gpu_bytes="128MiB", max_leases=2)
    return Cache(layout, config, model="tiny", device="cpu")
