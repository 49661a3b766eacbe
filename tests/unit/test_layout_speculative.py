"""F6: what a page holds for draft layers, and from where on their rows are there."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError, LayoutMismatch
from kvtier.layouts import Component, Layout, Share, drafts_from, mla, retile, swa_c4_c128

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def dense(**options: Any) -> Layout:
    return mla(layers=3, latent_dim=8, rope_dim=8, **options)


def windowed(**options: Any) -> Layout:
    return mla(
        layers=3,
        latent_dim=8,
        rope_dim=8,
        window_layers=(0, 2),
        window=5,
        window_record="dense",
        **options,
    )


def compressed(**options: Any) -> Layout:
    return swa_c4_c128(layer_ratios=(0, 4, 128), **options)


MADE = [dense, windowed, compressed]


def state(layout: Layout) -> Component:
    return next(c for c in layout.components if c.name == "draft_state")


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("values", [1, 6, 7, 100])
def test_speculative_state_is_one_slot_a_page(make: Any, dtype: str, values: int) -> None:
    """Its last token writes it, in the first draft layer; values, zeros, and a mark at the end."""
    plain = make(draft_layers=2, max_draft=3)
    it = make(draft_layers=2, max_draft=3, draft_state_values=values, draft_state_dtype=dtype)
    c = state(it)
    assert (c.share, c.layers, c.dtype) == (Share.HISTORY, (3,), dtype)
    assert (c.tokens_per_slot, c.slots_per_page) == (it.page_tokens, 1)
    least = values * BYTES[dtype] + 4
    assert c.slot_bytes % 16 == 0 and least <= c.slot_bytes < least + 16
    others = tuple(each for each in it.components if each is not c)
    assert others == plain.components, "nothing else changes"
    assert it.page_bytes() == plain.page_bytes() + c.slot_bytes
    if it.has_tails:
        assert it.checkpoint_bytes() == plain.checkpoint_bytes()
    page = it.page_tokens
    at = np.array([page - 2, page - 1, page, 2 * page - 1], dtype=np.int32)
    slots = it.slots(at, np.array([7, 7, 4, 4], dtype=np.int32))["draft_state"]
    assert slots.tolist() == [-1, 7, -1, 4]


@pytest.mark.parametrize("make", MADE)
def test_speculative_state_is_part_of_the_fingerprint(make: Any) -> None:
    """Also where two lengths take the same bytes; without it nothing changes."""
    prints = {
        make(draft_layers=1, draft_state_values=n, draft_state_dtype=d).fingerprint
        for n, d in ((0, "bfloat16"), (4, "bfloat16"), (5, "bfloat16"), (4, "float16"))
    }
    assert len(prints) == 4
    plain = make(draft_layers=1)
    assert plain.fingerprint == make(draft_layers=1, draft_state_values=0).fingerprint
    assert "draft_state_values" not in plain.meta


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"draft_state_values": 4}, "draft_layers=0"),
        ({"draft_state_values": -1, "draft_layers": 1}, "draft_state_values=-1"),
        (
            {"draft_state_values": 4, "draft_layers": 1, "draft_state_dtype": "uint8"},
            "draft_state_dtype",
        ),
    ],
)
def test_speculative_state_that_cannot_be(make: Any, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(**wrong)


def test_speculative_state_is_of_one_page_size() -> None:
    """Pages of another size end at other tokens: what these left is not there."""
    small = dense(draft_layers=1, draft_state_values=4, page_tokens=32)
    with pytest.raises(LayoutMismatch, match="draft_state"):
        retile(
            bytes(small.page_bytes() * 2),
            small,
            dataclasses.replace(
                small,
                page_tokens=64,
                components=dense(draft_layers=1, draft_state_values=4, page_tokens=64).components,
            ),
        )


@pytest.mark.parametrize(
    ("marks", "start"),
    [
        ([], 0),
        ([8], 0),
        ([8, 8, 8], 0),
        ([8, 0, 8], 16),
        ([8, 3, 8], 13),
        ([8, 8, 0], 24),
        ([8, 8, 1], 23),
        ([3, 8, 8], 5),
        ([3, 8, 2], 22),
        ([8, -1, 8], 16),
        ([8, 9, 8], 16),
        ([8, 8, 2**31 - 1], 24),
    ],
)
def test_speculative_rows_are_there_from(marks: list[int], start: int) -> None:
    assert drafts_from(marks, 8) == start
    assert drafts_from(np.array(marks, dtype=np.int32), 8) == start
    assert drafts_from(torch.tensor(marks, dtype=torch.int32), 8) == start
