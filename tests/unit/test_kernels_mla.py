"""Both forms of MLA over pages, against dense attention in float64; poison wherever not to read."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier import ConfigError
from kvtier.kernels import (
    HeadDims,
    PagedBatch,
    absorbed,
    materialised,
    materialised_sdpa,
    workspace_rows,
)

DIMS = HeadDims(heads=3, latent=16, rope=4, nope=8, value=6)
PAGE = 4
SCALE = 0.3


class Case:
    """Sequences with (query, KV) lengths, rows in scattered pages of a pool full of NaN."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        dims: HeadDims = DIMS,
        dtype: torch.dtype = torch.float32,
        page: int = PAGE,
    ) -> None:
        torch.manual_seed(7)
        self.lengths, self.dims = list(lengths), dims
        width = dims.latent + dims.rope
        needed = [-(-kv // page) for _, kv in lengths]
        pages = torch.randperm(sum(needed) + 3).tolist()
        self.rows = torch.full(((sum(needed) + 3) * page, width), torch.nan, dtype=dtype)
        table = np.full((len(lengths), max(needed, default=0) + 2), -1, np.int32)
        self.stored = []
        for b, (_, kv) in enumerate(lengths):
            mine = [pages.pop() for _ in range(needed[b])]
            table[b, : len(mine)] = mine
            rows = torch.randn(kv, width).to(dtype)
            self.stored.append(rows)
            for t in range(kv):
                self.rows[mine[t // page] * page + t % page] = rows[t]
        query_lens = [q for q, _ in lengths]
        kv_lens = [kv for _, kv in lengths]
        self.batch = PagedBatch(
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            block_table=torch.from_numpy(table),
            cu_seqlens_q=torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32)),
            kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32),
            page_tokens=page,
        )
        n = sum(query_lens)
        self.q_nope = torch.randn(n, dims.heads, dims.nope).to(dtype)
        self.q_rope = torch.randn(n, dims.heads, dims.rope).to(dtype)
        weight = torch.randn(dims.heads, dims.nope + dims.value, dims.latent) / dims.latent**0.5
        self.weight = weight.to(dtype)
        self.projected: list[int] = []

    @property
    def absorbed_query(self) -> Tensor:
        latent = torch.einsum("nhp,hpl->nhl", self.q_nope, self.weight[:, : self.dims.nope])
        return torch.cat((latent, self.q_rope), -1)

    @property
    def query(self) -> Tensor:
        return torch.cat((self.q_nope, self.q_rope), -1)

    def up_project(self, latent: Tensor) -> Tensor:
        self.projected.append(latent.shape[0])
        return torch.einsum("ml,hpl->mhp", latent, self.weight)

    def run(self, form: str, max_rows: int = 8) -> tuple[Tensor, Tensor | None]:
        """(n, heads, value) by one of the forms, and the log-sum-exp where it has one."""
        if form == "absorbed":
            out, lse = absorbed(
                self.absorbed_query, self.rows, self.batch, latent_dim=self.dims.latent, scale=SCALE
            )
            return torch.einsum("nhl,hvl->nhv", out, self.weight[:, self.dims.nope :]), lse
        args = (self.query, self.rows, self.batch, self.up_project)
        if form == "sdpa":
            return materialised_sdpa(*args, dims=self.dims, scale=SCALE), None
        return materialised(*args, dims=self.dims, scale=SCALE, max_rows=max_rows)

    def expected(self) -> tuple[Tensor, Tensor]:
        """One query, head and key set at a time, in float64, from the rows as they were made."""
        d, weight = self.dims, self.weight.double()
        outs, lses, at = [], [], 0
        for (q_len, kv_len), rows in zip(self.lengths, self.stored, strict=True):
            rows = rows.double()
            up = torch.einsum("ml,hpl->hmp", rows[:, : d.latent], weight)
            rope = rows[:, d.latent :].expand(d.heads, -1, -1)
            keys, values = torch.cat((up[..., : d.nope], rope), -1), up[..., d.nope :]
            for i in range(q_len):
                seen = max(kv_len - q_len + i + 1, 0)
                query = self.query[at + i].double()
                scores = torch.einsum("hd,hmd->hm", query, keys[:, :seen]) * SCALE
                lses.append(torch.logsumexp(scores, -1))
                outs.append(torch.einsum("hm,hmv->hv", scores.softmax(-1), values[:, :seen]))
            at += q_len
        return torch.stack(outs), torch.stack(lses)


FORMS = ["absorbed", "materialised", "sdpa"]
BATCHES = {
    "decode": [(1, 1), (1, PAGE), (1, PAGE + 1), (1, 23)],
    "prefill": [(1, 1), (PAGE - 1, PAGE - 1), (PAGE, PAGE), (17, 17)],
    "chunk": [(2, 3), (5, 9), (7, 31), (PAGE, 2 * PAGE)],
    "mixed": [(9, 9), (1, 30), (3, 12), (1, 1), (17, 41)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BATCHES)
def test_equals_dense_attention(form: str, name: str) -> None:
    case = Case(BATCHES[name])
    out, lse = case.run(form)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("queries", [1, 2, 170, 172])
def test_the_two_forms_agree(queries: int) -> None:
    """AT-1.2"""
    case = Case([(queries, 200)], dims=HeadDims(4, 64, 16, 16, 16), page=16)
    expected, _ = case.expected()
    for form in FORMS:
        out, _ = case.run(form, max_rows=64)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5, form


@pytest.mark.parametrize("form", FORMS)
def test_padding_rows_come_out_as_zero(form: str) -> None:
    case = Case([(2, 5), (1, 0), (3, 3), (1, 0)])
    out, lse = case.run(form)
    expected, _ = case.expected()
    real = [0, 1, 3, 4, 5]
    torch.testing.assert_close(out[real].double(), expected[real], atol=1e-6, rtol=0)
    assert out[[2, 6]].eq(0).all()
    if lse is not None:
        assert lse[[2, 6]].eq(-torch.inf).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [[], [(1, 0)], [(0, 7), (2, 4)]])
def test_empty_batches_and_sequences(form: str, lengths: list[tuple[int, int]]) -> None:
    case = Case(lengths)
    out, _ = case.run(form)
    assert out.shape == (sum(q for q, _ in lengths), DIMS.heads, DIMS.value)
    assert out.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_stale_table_entries_are_not_dereferenced(form: str) -> None:
    """AT-4.10: what a table row holds past the pages needed is never looked at."""
    case = Case([(1, PAGE), (4, 2 * PAGE)])
    before, _ = case.run(form)
    case.batch.block_table[case.batch.block_table < 0] = 1 << 30
    after, _ = case.run(form)
    assert torch.equal(before, after)


@pytest.mark.parametrize("form", FORMS)
def test_a_page_shared_by_two_sequences(form: str) -> None:
    case = Case([(1, 2 * PAGE), (3, PAGE + 2)])
    case.batch.block_table[1, 0] = case.batch.block_table[0, 0]
    case.stored[1][:PAGE] = case.stored[0][:PAGE]
    out, _ = case.run(form)
    torch.testing.assert_close(out.double(), case.expected()[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_page_raises(form: str) -> None:
    case = Case([(1, 2 * PAGE)])
    case.batch.block_table[0, 1] = -1
    with pytest.raises(ValueError, match="no page"):
        case.run(form)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_rows(form: str) -> None:
    case = Case(BATCHES["mixed"], dtype=torch.bfloat16)
    out, _ = case.run(form)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected()[0], atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("context", [0, 1, 7, 8, 9, 16, 17, 25])
@pytest.mark.parametrize("suffix", [1, 2, 11])
def test_bounded_parts_equal_the_whole(context: int, suffix: int) -> None:
    """AT-2.1 in little: zero, one, two and three parts of 8 rows, never more than 8 at once."""
    case = Case([(suffix, context + suffix), (1, 2)])
    out, lse = case.run("materialised", max_rows=8)
    assert max(case.projected) <= 8
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_many_queries_are_scored_in_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(19, 26), (9, 9)])
    whole, _ = case.run(form, max_rows=1000)
    monkeypatch.setattr("kvtier.kernels.mla.QUERY_BLOCK", 4)
    monkeypatch.setattr("kvtier.kernels.mla.SPLIT_ROWS", 8)
    blocks, _ = case.run(form, max_rows=8)
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(blocks.double(), case.expected()[0], atol=1e-6, rtol=0)


def test_absorbed_refuses_widths_that_do_not_fit() -> None:
    case = Case([(1, 1)])
    with pytest.raises(ValueError, match="width"):
        absorbed(case.query, case.rows, case.batch, latent_dim=16, scale=SCALE)


class TestWorkspaceRows:
    dims = HeadDims(heads=128, latent=512, rope=64, nope=128, value=128)

    def test_is_a_multiple_of_a_page_and_grows_with_the_workspace(self) -> None:
        rows = workspace_rows("512MiB", self.dims, 2, 64)
        assert rows > 0
        assert rows % 64 == 0
        assert 1.9 < workspace_rows("1GiB", self.dims, 2, 64) / rows < 2.1

    def test_counts_the_projected_rows(self) -> None:
        """The projected row is 71 times the latent one: that is what must fit."""
        rows = workspace_rows("512MiB", self.dims, 2, 64)
        assert rows * 128 * 320 * 2 <= 512 << 20

    @pytest.mark.parametrize("size", [0, 100_000, "1MiB"])
    def test_less_than_a_page_is_refused(self, size: int | str) -> None:
        with pytest.raises(ConfigError, match="workspace_bytes"):
            workspace_rows(size, self.dims, 2, 64)

    def test_the_named_minimum_suffices(self) -> None:
        with pytest.raises(ConfigError) as caught:
            workspace_rows(1, self.dims, 2, 64)
        least = int(str(caught.value).rsplit(" ", 1)[1])
        assert workspace_rows(least, self.dims, 2, 64) == 64
