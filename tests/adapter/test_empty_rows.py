"""Leases that are given no token in a step that others share."""

import pytest
import torch

from kvtier import TokenError
from kvtier_deepseek import attach
from tests.adapter.v4_kit import feed, model_of, open_cache, stream


@pytest.mark.parametrize("row", [0, 1, 2])
def test_they_never_get_another_leases_logits(row: int) -> None:
    model, tokens = model_of(), stream()
    work = [tokens[:3], tokens[3:5]]
    work.insert(row, [])
    with open_cache(model) as cache, attach(model, cache) as adapter:
        leases = [cache.lease(tokens) for _ in work]
        with (
            pytest.raises(TokenError, match=f"row {row} is fed no token"),
            cache.step(list(zip(leases, work, strict=True))) as step,
        ):
            adapter(step)
        assert [lease.num_tokens for lease in leases] == [0, 0, 0]
        mixed = feed(cache, adapter, *zip(leases, work, strict=True))
        for lease in leases:
            lease.release()
        alone = cache.lease(tokens)
        wanted = feed(cache, adapter, (alone, work[(row + 1) % 3]))[0]
        alone.release()
        assert mixed[row].shape == (0, 97)
        torch.testing.assert_close(mixed[(row + 1) % 3], wanted, atol=5e-5, rtol=0)
