"""FlashInfer's backend, over a double of its wrapper: what is planned, and what comes of it."""

import importlib
import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier import ConfigError
from kvtier.kernels import HeadDims, absorbed, flashinfer
from tests.unit.mla_cases import MlaCase

RELEASED = HeadDims(heads=3, latent=512, rope=64, nope=128, value=128)
LOG2E = 1.4426950408889634


class Double:
    """``BatchMLAPagedAttentionWrapper`` as documented: plans on the host, pages by exact lists,
    causal, log-sum-exp in base 2.  Of sequences without keys it has never heard."""

    plans = 0

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20

    def plan(
        self, queries: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, heads: int,
        latent: int, rope: int, page: int, causal: bool, scale: float, of_query: torch.dtype,
        of_rows: torch.dtype,
    ) -> None:  # fmt: skip
        Double.plans += 1
        for each in (queries, pages, table, lengths):
            assert each.dtype == torch.int32
        assert causal and (latent, rope) == (512, 64) and of_query == of_rows
        assert int(queries[0]) == int(pages[0]) == 0 and int(lengths.min()) > 0
        assert table.shape == (int(pages[-1]),) and int(table.min()) >= 0
        assert torch.equal(pages.diff(), (lengths + page - 1) // page)
        self.all = (queries.tolist(), pages.tolist(), table, lengths.tolist(), page, scale, heads)

    def run(
        self, q_nope: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor, *, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        queries, pages, table, lengths, page, scale, heads = self.all
        assert return_lse and q_nope.shape == (queries[-1], heads, 512)
        assert latents.shape[1:] == (page, 512) and ropes.shape[1:] == (page, 64)
        query = torch.cat((q_nope, q_rope), -1).float()
        rows = torch.cat((latents, ropes), -1)
        out, lse = torch.zeros(q_nope.shape), torch.zeros(q_nope.shape[:2])
        for b, length in enumerate(lengths):
            keys = rows[table[pages[b] : pages[b + 1]].long()].flatten(0, 1)[:length].float()
            count = queries[b + 1] - queries[b]
            for i in range(count):
                seen = keys[: length - count + i + 1]
                scores = query[queries[b] + i] @ seen.T * scale
                out[queries[b] + i] = scores.softmax(-1) @ seen[:, :512]
                lse[queries[b] + i] = scores.logsumexp(-1) * LOG2E
        return out.to(q_nope.dtype), lse


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def imported(name: str, *more: Any) -> Any:
        if name == "flashinfer.mla":
            return SimpleNamespace(BatchMLAPagedAttentionWrapper=Double)
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", imported)
    monkeypatch.setattr(flashinfer, "_planner", flashinfer._Planner())
    monkeypatch.setattr(Double, "plans", 0)


def case(*lengths: tuple[int, int], page: int = 16) -> MlaCase:
    return MlaCase(list(lengths), dims=RELEASED, dtype=torch.bfloat16, page=page)


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1), (1, 70), (1, 33)],
        [(1, 1), (1, 0), (3, 70), (2, 0), (5, 33)],
        [(1, 0), (1, 0)],
        [(4, 64)],
    ],
    ids=["decode", "ragged, with padding", "padding only", "one"],
)
def test_absorbed(lengths: list[tuple[int, int]]) -> None:
    some = case(*lengths)
    options = {"latent_dim": 512, "scale": some.scale}
    out, lse = flashinfer.absorbed(some.absorbed_query, some.rows, some.batch, **options)
    right, right_lse = absorbed(some.absorbed_query, some.rows, some.batch, **options)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    none = right_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, none) and out[none].eq(0).all()
    assert (out.float() - right.float()).abs().max() <= 8e-3 * right.float().abs().max()
    torch.testing.assert_close(lse[~none], right_lse[~none], rtol=1e-3, atol=1e-3)


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
    run(one)  # another's plan has taken its place
    run(one, scale=0.5)
    assert Double.plans == 4
    one.batch = replace(one.batch)
    run(one, scale=0.5)
    assert Double.plans == 5


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    some = case((1, 5))
    query, options = some.absorbed_query, {"latent_dim": 512, "scale": 1.0}
    with pytest.raises(ValueError, match="query width"):
        flashinfer.absorbed(query[..., :512], some.rows, some.batch, **options)
    with pytest.raises(ValueError, match="queries of"):
        flashinfer.absorbed(query.half(), some.rows, some.batch, **options)
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
