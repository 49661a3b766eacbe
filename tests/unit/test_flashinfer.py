"""FlashInfer's backend, over doubles of its wrapper: what is planned, and what comes of it."""

import gc
import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtier import ConfigError
from kvtier.kernels import HeadDims, flashinfer
from tests.unit.flashinfer_double import NEW, OLD, Double, check
from tests.unit.mla_cases import MlaCase

RELEASED = HeadDims(heads=3, latent=512, rope=64, nope=128, value=128)


@pytest.fixture(autouse=True, params=[NEW, OLD], ids=["new", "old"])
def _double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def imported(name: str, *more: Any) -> Any:
        return request.param if name == "flashinfer.mla" else real(name, *more)

    monkeypatch.setattr(importlib, "import_module", imported)
    monkeypatch.setattr(Double, "plans", 0)
    monkeypatch.setattr(Double, "used", set())


def case(*lengths: tuple[int, int], page: int = 16, heads: int = 3) -> MlaCase:
    dims = replace(RELEASED, heads=heads)
    return MlaCase(list(lengths), dims=dims, dtype=torch.bfloat16, page=page)


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1), (1, 70), (1, 33)],
        [(1, 1), (1, 0), (3, 70), (2, 0), (5, 33)],
        [(1, 0), (1, 0)],
        [(4, 64)],
        [(3, 9), (4, 2), (0, 20), (1, 5)],
    ],
    ids=["decode", "ragged, with padding", "padding only", "one", "fewer keys than queries"],
)
def test_absorbed(lengths: list[tuple[int, int]], heads: int) -> None:
    check(case(*lengths, heads=heads))


@pytest.mark.parametrize("heads", [12, 64, 96])
def test_heads_that_share_a_tile_see_every_key(heads: int) -> None:
    """Each query of 12 or 96 heads is planned by itself: one of them ends in a tile that begins
    with the next, and key 64 begins a tile of keys."""
    some = case((11, 70), (2, 65), heads=heads)
    check(some)
    planned = flashinfer.plan(some.batch, heads, torch.bfloat16, scale=some.scale)
    assert len(planned.wrapper.all[3]) == (2 if heads == 64 else 13)


def test_a_batch_is_planned_by_its_first_layer_only() -> None:
    one, two = case((1, 70), (1, 3)), case((1, 5))

    def run(some: MlaCase, **more: Any) -> None:
        options = {"latent_dim": 512, "scale": some.scale} | more
        flashinfer.absorbed(some.absorbed_query, some.rows, some.batch, **options)

    for _ in range(3):
        run(one)
    assert Double.plans == 1
    run(two)
    run(two)
    assert Double.plans == 2
    run(one)  # its plan is still there
    run(one, scale=0.5)
    assert Double.plans == 3
    one.batch = replace(one.batch)
    run(one, scale=0.5)
    assert Double.plans == 4
    assert len(Double.used) == len(flashinfer._floats) == 1
    del one, two
    gc.collect()
    assert len(flashinfer._floats) == 0  # it goes with the plans


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    some = case((1, 5))
    query, options = some.absorbed_query, {"latent_dim": 512, "scale": 1.0}
    with pytest.raises(ValueError, match="query width"):
        flashinfer.absorbed(query[..., :512], some.rows, some.batch, **options)
    with pytest.raises(ValueError, match="queries of"):
        flashinfer.absorbed(query.half(), some.rows, some.batch, **options)
    for wrong in (query[:0], query.repeat(2, 1, 1)):
        with pytest.raises(ValueError, match="queries, in a batch of 1"):
            flashinfer.absorbed(wrong, some.rows, some.batch, **options)
    monkeypatch.setattr(flashinfer, "capturing", lambda: True)
    with pytest.raises(ConfigError, match="captured graph cannot hold it"):
        flashinfer.absorbed(query, some.rows, some.batch, **options)
    assert Double.plans == 0


def test_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "capability 8.0" in flashinfer.missing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "capability 8.0" in flashinfer.missing()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert flashinfer.missing() == "flashinfer is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flashinfer")
    assert flashinfer.missing() == ""
