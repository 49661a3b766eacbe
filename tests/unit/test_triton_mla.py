"""Absorbed attention in triton against dense float64 attention: on a GPU, and in triton's
interpreter without one.  Pages not needed, and rows past a sequence's end, are NaN."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvtier.kernels import PagedBatch, triton_mla
from kvtier.kernels.records import pack_mla_fp8, unpack_mla_fp8

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = {torch.bfloat16: 6e-3 if GPU else 1.2e-2, torch.float16: 1e-3}
"""Of the largest value of a head's output; the interpreter cuts bf16 off where a GPU rounds."""
SCALE = 0.135


class Case:
    """Sequences of (query tokens, KV length) over rows in scattered pages of a pool of NaN."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: int,
        page: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        growth: float = 0.0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-kv // page) for _, kv in lengths]
        order = torch.randperm(sum(needed) + 2, generator=generator)
        self.lengths, self.pool = list(lengths), order.numel() * page
        rows = torch.full((self.pool, 576), torch.nan)
        table = torch.full((len(lengths), max(needed, default=0) + 3), -7, dtype=torch.int32)
        self.stored: list[Tensor] = []
        at = 0
        for b, (_, kv) in enumerate(lengths):
            mine = order[at : at + needed[b]]
            at += needed[b]
            table[b, : needed[b]] = mine
            new = torch.randn(kv, 576, generator=generator)
            new *= 1 + growth * torch.arange(kv)[:, None] / max(kv, 1)
            slot = torch.arange(kv)
            rows[mine[slot // page] * page + slot % page] = new
            self.stored.append(new.to(dtype))
        query_lens = [q for q, _ in lengths]
        kv_lens = [kv for _, kv in lengths]
        offsets = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        self.rows = rows.to(dtype).to(DEVICE)
        self.query = torch.randn(sum(query_lens), heads, 576, generator=generator).to(dtype)
        self.batch = PagedBatch(
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            block_table=table.to(DEVICE),
            cu_seqlens_q=offsets.to(DEVICE),
            kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
            page_tokens=page,
        )

    def run(self, query: Tensor | None = None) -> tuple[Tensor, Tensor]:
        query = self.query.to(DEVICE) if query is None else query
        return triton_mla.absorbed(query, self.rows, self.batch, latent_dim=512, scale=SCALE)

    def expected(self) -> tuple[Tensor, Tensor]:
        outs, lses, at = [], [], 0
        for (q_len, kv_len), stored in zip(self.lengths, self.stored, strict=True):
            keys = stored.double()
            for i in range(q_len):
                seen = keys[: max(0, kv_len - q_len + i + 1)]
                score = self.query[at + i].double() @ seen.T * SCALE
                lses.append(score.logsumexp(-1))
                outs.append(score.softmax(-1) @ seen[:, :512])
            at += q_len
        return torch.stack(outs), torch.stack(lses)

    def check(self, out: Tensor, lse: Tensor) -> None:
        expected, expected_lse = self.expected()
        tolerance = TOLERANCE[self.query.dtype]
        assert out.dtype == self.query.dtype
        assert lse.dtype == torch.float32
        assert not out.isnan().any()
        out, lse = out.cpu().double(), lse.cpu().double()
        scale = expected.abs().amax(-1).clamp(min=1e-6)
        error = (out - expected).abs().amax(-1) / scale
        assert error.max().item() <= tolerance
        finite = expected_lse.isfinite()
        assert torch.equal(lse[~finite], expected_lse[~finite])
        gap = (lse - expected_lse)[finite].abs()
        assert (gap <= 1e-4 * expected_lse[finite].abs() + 1e-3).all()


RAGGED = [(1, 1), (1, 64), (1, 0), (1, 63), (1, 130), (1, 65), (1, 0)]
MANY = [(2, 2), (5, 70), (8, 8), (1, 33), (3, 129), (1, 0)]


@pytest.mark.parametrize(
    ("lengths", "heads", "dtype"),
    [
        (RAGGED, 1, torch.bfloat16),
        (RAGGED, 5, torch.bfloat16),
        (RAGGED, 16, torch.float16),
        (MANY, 3, torch.bfloat16),
        (MANY, 24, torch.float16),
        ([(2, 70), (1, 200)], 65, torch.bfloat16),
    ],
)
def test_ragged_batches(lengths: list[tuple[int, int]], heads: int, dtype: torch.dtype) -> None:
    case = Case(lengths, heads=heads, dtype=dtype)
    case.check(*case.run())


@pytest.mark.parametrize("page", [16, 512])
def test_page_sizes(page: int) -> None:
    case = Case([(2, 300), (1, 17), (3, 513)], heads=4, page=page)
    case.check(*case.run())


def test_scores_that_grow_rescale_what_was_summed() -> None:
    case = Case([(1, 700), (2, 260)], heads=16, growth=8.0)
    case.check(*case.run())


def test_scores_that_are_far_apart() -> None:
    case = Case([(1, 257), (1, 64)], heads=16)
    case.query *= 300
    case.check(*case.run())


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_any_number_of_parts_gives_the_same(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(1, 400), (1, 0), (2, 33), (1, 1), (1, 129), (1, 640)]
    case = Case(lengths, heads=16)
    grid = triton_mla.grid_of
    monkeypatch.setattr(
        triton_mla, "grid_of", lambda *args, **how: replace(grid(*args, **how), parts=parts)
    )
    case.check(*case.run())


def test_scratch_stays_within_the_workspace() -> None:
    case = Case([(1, 700)], heads=16)
    for fast, tile in ((False, 16), (True, 64)):
        assert triton_mla.grid_of(case.batch, 16, 132, 1 << 29, fast=fast).parts == 11
        small = 4 * tile * 513 * 4
        assert triton_mla.grid_of(case.batch, 16, 132, small, fast=fast).parts == 2


def test_tokens_of_no_sequence_get_nothing() -> None:
    case = Case([(1, 70), (2, 20)], heads=4)
    spare = torch.full((5, 4, 576), torch.nan, dtype=torch.bfloat16)
    out, lse = case.run(torch.cat((case.query, spare)).to(DEVICE))
    case.check(out[:3], lse[:3])
    assert out[3:].eq(0).all()
    assert lse[3:].eq(-torch.inf).all()


def test_nothing_is_launched_where_there_are_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of all kernels look at a sequence's length before they know that there is one."""
    monkeypatch.delattr(triton_mla, "grid_of")
    case = Case([], heads=4)
    out, lse = case.run(torch.full((5, 4, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE))
    assert out.shape == (5, 4, 512) and out.eq(0).all() and lse.eq(-torch.inf).all()


def test_queries_and_rows_that_lie_apart() -> None:
    case = Case([(1, 70), (2, 20)], heads=4)
    wide = torch.full((case.pool, 640), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 16:592] = case.rows
    case.rows = wide[:, 16:592]
    query = torch.full((3, 9, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    query[:, 1::2] = case.query.to(DEVICE)
    case.check(*case.run(query[:, 1::2]))


def test_packed_rows() -> None:
    case = Case([(1, 70), (3, 200), (1, 0), (1, 64)], heads=16)
    packed = pack_mla_fp8(case.rows.cpu().nan_to_num(0.0))
    packed[case.rows.cpu().isnan().any(-1)] = 0xFF
    case.stored = [unpack_mla_fp8(pack_mla_fp8(rows)).to(torch.bfloat16) for rows in case.stored]
    pages = packed.view(-1, 64 * 656)
    apart = torch.full((pages.shape[0], 64 * 656 + 48), 0xFF, dtype=torch.uint8, device=DEVICE)
    case.rows = apart[:, 16:-32]
    case.rows.copy_(pages)
    case.check(*case.run())


def test_other_widths_and_types_are_refused() -> None:
    case = Case([(1, 4)], heads=2)
    with pytest.raises(ValueError, match="width"):
        triton_mla.absorbed(case.query, case.rows, case.batch, latent_dim=448, scale=1.0)
    with pytest.raises(ValueError, match="float16"):
        case.run(case.query.to(torch.float16))


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_captured_step_follows_the_lengths_on_the_device() -> None:
    first = Case([(1, 500), (1, 3), (1, 70), (1, 0)], heads=16)
    first.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    query = first.query.to(DEVICE)
    with torch.cuda.graph(graph):
        out, lse = first.run(query)
    graph.replay()
    first.check(out, lse)
    for lengths in ([(1, 7), (1, 0), (1, 64), (1, 500)], [(1, 0)] * 4, [(1, 300)] * 4):
        other = Case(lengths, heads=16, seed=5)
        pages = min(first.rows.shape[0], other.rows.shape[0])
        if other.rows.shape[0] > first.rows.shape[0]:
            continue
        first.rows[:pages] = other.rows[:pages]
        width = min(first.batch.block_table.shape[1], other.batch.block_table.shape[1])
        first.batch.block_table[:, :width] = other.batch.block_table[:, :width]
        first.batch.kv_lens_device.copy_(other.batch.kv_lens_device)
        query.copy_(other.query)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        other.check(out, lse)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_graphs_of_one_batch_stand_for_themselves() -> None:
    case = Case([(1, 5000), (1, 70)], heads=16)
    query = case.query.to(DEVICE)
    case.run(query)
    found = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = case.run(query)
        found.append((graph, result))
    del found[0], graph
    overwritten = [torch.full((1 << 20,), 7, dtype=torch.int32, device=DEVICE) for _ in range(20)]
    for _ in range(2):
        found[0][0].replay()
        case.check(*found[0][1])
    assert all(each.eq(7).all() for each in overwritten)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_long_ragged_batches(heads: int) -> None:
    lengths = [(1, 5000), (2, 9001), (1, 0), (4, 64), (8, 777), (1, 20_000), *[(1, 300)] * 20]
    case = Case(lengths, heads=heads)
    case.check(*case.run())


def test_what_runs_on_an_h200_compiles_as_it_was_meant_to() -> None:
    """Products of the tensor cores stay asynchronous, and registers are moved between groups."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sm90_mla"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    report = json.loads(done.stdout)
    for heads in (16, 128):
        attend = report[f"_attend {heads}"]
        assert attend["products"] == 36 + 2 * 4
        assert attend["warnings"] == []
        assert attend["shared"] <= 227 * 1024
