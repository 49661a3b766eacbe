"""Rejected tokens around the ends of groups and windows of V4, for every draft length and every
accepted count: what follows is what HF computes of the whole text, in one pass without a cache."""

import pytest
import torch

from kvtier_deepseek import attach
from tests.adapter import drafts_kit as kit
from tests.adapter.models import full_logits, random_tokens
from tests.adapter.v4_kit import near, poison_free
from tests.shell.v4_kit import sized

STARTS = (125, 126, 127, 128, 129, 130)
"""Every residue of 4, around an entry of 128."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafts", [1, 3, 4, 7])
def test_speculative_every_accepted_count(drafts: int) -> None:
    """AT-6.1, AT-6.3, AT-6.4: logits of what is fed after a rejection, and of the groups that the
    rejected tokens had closed, when they close again."""
    model = kit.model_of("v4")
    tokens = random_tokens(160, 3)
    expected = full_logits(model, tokens)
    layout = kit.layout_of(model, "ngram", max_draft=7)
    config = sized(layout, gpu=16, cpu=0, max_leases=4)
    with kit.Cache(layout, config, model="tiny", device="cpu") as cache:
        with attach(model, cache) as adapter, cache.lease([]) as trunk:
            with cache.step([(trunk, tokens[: STARTS[0]])]) as step:
                adapter(step)
            for start in STARTS:
                if trunk.num_tokens < start:
                    with cache.step([(trunk, tokens[start - 1 : start])]) as step:
                        adapter(step)
                for accepted in range(drafts + 1):
                    with trunk.fork() as lease:
                        lease.ready.result()
                        stop = start + 1 + accepted
                        wrong = [(t + 1) % 97 for t in tokens[stop : start + 1 + drafts]]
                        with cache.step([(lease, [*tokens[start:stop], *wrong])]) as step:
                            logits = adapter.forward(step, all_logits=True)
                            step.accept(lease, 1 + accepted)
                        near(logits[: 1 + accepted], expected[start:stop])
                        poison_free(cache)
                        for count in (1, 3, 8):
                            at = lease.num_tokens
                            with cache.step([(lease, tokens[at : at + count])]) as step:
                                logits = adapter.forward(step, all_logits=True)
                            near(logits, expected[at : at + count])
            assert not torch.isnan(logits).any()
