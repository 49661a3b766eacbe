"""Rows that are rotated as they are written (E1): where that gives the models' own bits, and that
nothing else changes with it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier_deepseek import attach, layout_for
from kvtier_deepseek.mla import family as mla_family
from kvtier_deepseek.mla.config import head_dims
from kvtier_deepseek.mla.structure import latent_rope, rotation_of
from kvtier_deepseek.v32 import family as v32_family
from kvtier_deepseek.v32.structure import rotations_of
from tests.adapter.models import random_tokens, tiny_model
from tests.adapter.swa_kit import open_cache, run, swa_model
from tests.adapter.v32_kit import PACKED, new_model

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SPLIT = [20, 1, 1, 5, 1]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is taken for the kernel."""
    for family in (mla_family, v32_family):
        monkeypatch.setattr(family, "without_reference", lambda kernels, operation: kernels)


def rope_of(model: Any, dtype: torch.dtype, turned: Any = None) -> str | None:
    attention = model.model.layers[0].self_attn
    if hasattr(attention, "indexer"):
        rotation = rotations_of(attention)[0]
    else:
        rotation = rotation_of(attention, model.config)
    return latent_rope(model, turned or rotation, head_dims(model.config), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_found_by_the_bits(dtype: torch.dtype) -> None:
    assert rope_of(tiny_model("v3"), dtype) == "interleaved_to_half"
    assert rope_of(tiny_model("v3", rope_interleave=False), dtype) == "half"
    assert rope_of(new_model(), dtype) == "interleaved_to_half"
    assert rope_of(tiny_model("v2"), dtype) is None


def test_code_that_turns_otherwise_is_left_to_itself() -> None:
    model = tiny_model("v3")
    own = rotation_of(model.model.layers[0].self_attn, model.config)

    def backwards(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return own(query, key, cos, -sin)

    def nearly(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        query, key = own(query, key, cos, sin)
        return query, torch.nextafter(key, key + 1)

    for rotation in (backwards, nearly):
        assert rope_of(model, torch.float32, rotation) is None


@pytest.mark.parametrize("kind", ["v3", "half", "windows", "v32", "v32 packed"])
def test_the_same_pages_and_logits(kind: str, request: pytest.FixtureRequest) -> None:
    """AT-1.6"""
    options: dict[str, Any] = {}
    writes = "write_rows"
    if kind.startswith("v32"):
        packed = kind.endswith("packed")
        model = new_model(index_topk=8, **(PACKED if packed else {}))
        options = dict.fromkeys(("record", "index_record"), "fp8" if packed else "dense")
        writes = "write_record latent"
    elif kind == "windows":
        model, options = swa_model(), {"window_record": "dense"}
    else:
        model = tiny_model("v3", rope_interleave=kind != "half")
    layout = layout_for(model.config, page_tokens=8, dtype=torch.float32, **options)
    tokens, found = random_tokens(sum(SPLIT)), []
    for _ in range(2):
        with open_cache(model, layout=layout) as cache, attach(model, cache) as adapter:
            adapter.warmup()
            with cache.lease([]) as lease:
                logits = run(cache, adapter, lease, tokens, SPLIT)
                pool: Any = cache._pool
                pages = [s.clone() for s in pool._storage.values()]
            found.append((logits, pages, {*adapter.report.backends}, {*adapter._family.decoding}))
        request.getfixturevalue("everywhere")
    (own, own_pages, own_names, own_kernels), (got, pages, names, kernels) = found
    assert torch.equal(own, got)
    assert all(map(torch.equal, own_pages, pages)) and own_pages
    assert names - own_names == kernels - own_kernels == {"write_latent"}
    assert own_names - names == own_kernels - kernels == {writes}


@pytest.mark.usefixtures("everywhere")
def test_where_rows_come_rotated_decoding_needs_no_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_deepseek.mla.structure.latent_rope", lambda *_: None)
    dense = dict.fromkeys(("record", "index_record"), "dense")
    for model, options, writes in (
        (tiny_model("v3"), {}, "write_rows"),
        (new_model(), dense, "write_record latent"),
    ):
        layout = layout_for(model.config, page_tokens=8, dtype=torch.float32, **options)
        with open_cache(model, layout=layout) as cache, attach(model, cache) as adapter:
            names = {name for name in adapter._family.decoding if name.startswith("write")}
        assert names - {"write_record index"} == {writes}
