"""Looking slots up takes no scratch that grows with both the tokens and the context."""

import torch

from kvtier.kernels import PagedBatch, c4_slots, window_slots
from tests.unit.v4_cases import Allocations

TOKENS, CONTEXT = 64, 1 << 20


def test_a_million_tokens() -> None:
    batch = PagedBatch(
        query_lens=(TOKENS,),
        kv_lens=(CONTEXT,),
        block_table=torch.arange(CONTEXT // 256, dtype=torch.int32)[None],
        cu_seqlens_q=torch.tensor([0, TOKENS], dtype=torch.int32),
        kv_lens_device=torch.tensor([CONTEXT], dtype=torch.int32),
        page_tokens=256,
    )
    windows = torch.arange(CONTEXT // 128, dtype=torch.int32).flip(0)[None]
    entries = torch.arange(TOKENS * 8, dtype=torch.int32).view(TOKENS, 8) * 500
    with Allocations() as made:
        seen = window_slots(batch, windows, window=128, slots_per_page=128)
        chosen = c4_slots(entries, batch)
    assert made.largest(besides=()) <= 8 * TOKENS * 128
    position = CONTEXT - TOKENS + torch.arange(TOKENS)[:, None] + torch.arange(-127, 1)
    assert torch.equal(seen, ((8191 - position // 128) * 128 + position % 128).int())
    assert torch.equal(chosen, entries)
