"""Chunks as an H100 or H200 attends to them, on a CPU: the source's twin, with its groups of warps
and its copies in many orders.  On a GPU the kernel itself."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvtier.kernels import HeadDims, Workspace, gluon_prefill, prefill
from kvtier.kernels.prefill import Results
from kvtier.kernels.prefill_plan import ENDS, GOES_ON, Chunk, PrefillPlan, Span, Tile
from tests.unit import gluon_twin
from tests.unit.mla_cases import MlaCase

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if HOPPER else "cpu"
DIMS = HeadDims(heads=2, latent=512, rope=64, nope=128, value=128)
BOUNDS = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
LENGTHS = {
    "three tiles, chunks that end within them": [(300, 300)],
    "behind a context": [(70, 200), (1, 130)],
    "whole blocks": [(128, 256), (128, 128)],
    "padding, one key, queries that see none": [(1, 0), (65, 65), (1, 1), (70, 3)],
}

pytestmark = [
    *([pytest.mark.gpu] if HOPPER else []),
    pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="made for an H100 or H200"),
]
NAMES = ("KEYS", "STAGES", "HEADS_AT_ONCE")
Seeded = Callable[[int], None]


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seeded]:
    """Where there is no GPU groups take turns by a seed."""
    kernel, threads = gluon_prefill._attend, torch.get_num_threads()
    torch.set_num_threads(1)

    def run(seed: int) -> None:
        if not HOPPER:
            monkeypatch.setattr(gluon_prefill, "_attend", kernel)
            twin = gluon_twin.Launched(gluon_prefill, "_attend", seed)
            monkeypatch.setattr(gluon_prefill, "_attend", twin)

    yield run
    torch.set_num_threads(threads)


def by_gluon(*args: Any, **options: Any) -> Any:
    if HOPPER:
        return gluon_prefill.materialised(*args, **options)
    # Rows are fetched by the reference.
    names = ("dims", "scale", "workspace", "record")
    ways = (prefill._gather, gluon_prefill._meet)
    return prefill.run_chunks(*args, *(options[name] for name in names), *ways)


def check(case: MlaCase, rows: int) -> None:
    """Rows of the pool and the workspace that hold nothing are NaN."""
    out, lse = case.run("materialised", max_rows=rows, kernel=by_gluon)
    expected, expected_lse = case.expected()
    assert lse is not None and max(case.projected) <= rows
    scale = expected.abs().max()
    error = (out.double() - expected).abs().max() / scale
    assert error <= BOUNDS[out.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-2, rtol=0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(lengths: list[tuple[int, int]], seed: int, seeded: Seeded) -> None:
    seeded(seed)
    check(MlaCase(lengths, dims=DIMS, dtype=torch.bfloat16, page=64, device=DEVICE), 192)


@pytest.mark.parametrize("shape", [(64, 4, 1), (64, 3, 2), (128, 2, 1)])
def test_other_blocks(
    shape: tuple[int, int, int], seeded: Seeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded(5)
    for name, value in zip(NAMES, shape, strict=True):
        monkeypatch.setattr(gluon_prefill, name, value)
    check(MlaCase([(200, 450)], dims=DIMS, dtype=torch.float16, page=64, device=DEVICE), 320)


@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
def test_all_at_once(record: str, seeded: Seeded) -> None:
    seeded(6)
    lengths = [(150, 170), (3, 90)]
    case = MlaCase(lengths, dims=DIMS, dtype=torch.bfloat16, page=64, device=DEVICE, record=record)
    check(case, 320)


def test_a_workspace_of_less_than_a_block(seeded: Seeded) -> None:
    seeded(8)
    check(MlaCase([(70, 200)], dims=DIMS, dtype=torch.bfloat16, page=64, device=DEVICE), 64)


def test_queries_in_front_of_a_chunk_keep_what_they_had(seeded: Seeded) -> None:
    """AT-2.4: bit for bit; and one that had found nothing does not take what lay there."""
    seeded(7)
    torch.manual_seed(4)
    n, heads = 100, 2
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    space = Workspace(torch.randn(64, 576, **like), torch.randn(64, heads, 256, **like))
    space.projected[40:] = torch.nan
    carry = (torch.randn(n, heads, 128) * 1e3).to(DEVICE)
    carry_lse = (torch.randn(n, heads) * 5).to(DEVICE)
    for nothing in (torch.inf, -torch.inf):
        carry_lse[-1 if nothing > 0 else -2] = nothing
    carry[-2:] = torch.nan
    tile = Tile(0, n, 0, 0, 40, 60, 0, GOES_ON | ENDS)  # queries 0 to 99, keys 60 to 99
    chunk = Chunk((Span(0, 60, 100),), (tile,), 0, 0)
    plan = PrefillPlan((chunk,), 64, 128, n, False)
    out = torch.full((n, heads, 128), torch.nan, **like)
    lse = torch.full((n, heads), torch.nan, device=DEVICE)
    query = torch.randn(n, heads, 192, **like)
    results = Results(out, lse, carry.clone(), carry_lse.clone())
    gluon_prefill._meet(query, plan, chunk, space, DIMS, 0.1, results)
    assert torch.equal(out[:60], carry[:60].to(torch.bfloat16))
    assert torch.equal(lse[:60], carry_lse[:60])
    keys = torch.cat(
        (space.projected[:40, :, :128], space.latent[:40, None, 512:].expand(-1, 2, -1)), -1
    )
    for i in (98, 99):
        seen = i - 59
        score = torch.einsum("hd,khd->hk", query[i].float(), keys[:seen].float()) * 0.1
        want = torch.einsum(
            "hk,khv->hv", score.softmax(-1), space.projected[:seen, :, 128:].float()
        )
        torch.testing.assert_close(out[i].float(), want, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse[i], score.logsumexp(-1), atol=1e-4, rtol=0)


def test_fewer_queries_and_negative_scales_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        gluon_prefill.triton_prefill, "meet", lambda *args: asked.append((args[1].tile, args[5]))
    )
    for tile, scale in ((16, 0.1), (64, 0.1), (128, -0.1)):
        plan = PrefillPlan((Chunk((), (), 0, 0),), 64, tile, 0, False)
        args: Any = (torch.empty(0), plan, plan.chunks[0], None, DIMS, scale, None)
        gluon_prefill._meet(*args)
    assert asked == [(16, 0.1), (64, 0.1), (128, -0.1)]


def test_it_compiles_as_it_was_meant_to() -> None:
    """Products stay asynchronous, nothing is spilled, and two blocks of keys fit."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sm90_prefill"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    for found in json.loads(done.stdout).values():
        assert found["warnings"] == [] and found["spilled"] == 0
        assert found["shared"] <= 227 * 1024
