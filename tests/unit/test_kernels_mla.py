"""Both forms of MLA over pages, against dense attention in float64; poison wherever not to read."""

import itertools
from functools import partial

import pytest
import torch

from benchmarks.memory import Peak
from kvtier import ConfigError
from kvtier.kernels import HeadDims, PrefillPlan, absorbed, workspace_rows
from tests.unit.mla_cases import DIMS, PAGE, MlaCase

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
    case = MlaCase(BATCHES[name])
    out, lse = case.run(form)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("queries", [1, 2, 170, 172])
def test_the_two_forms_agree(queries: int) -> None:
    """AT-1.2"""
    case = MlaCase([(queries, 200)], dims=HeadDims(4, 64, 16, 16, 16), page=16)
    expected, _ = case.expected()
    outs = [expected, *(case.run(form, max_rows=64)[0].double() for form in FORMS)]
    for one, other in itertools.combinations(outs, 2):
        assert (one - other).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_padding_rows_come_out_as_zero(form: str) -> None:
    case = MlaCase([(2, 5), (1, 0), (3, 3), (1, 0)])
    out, lse = case.run(form)
    expected, _ = case.expected()
    real = [0, 1, 3, 4, 5]
    torch.testing.assert_close(out[real].double(), expected[real], atol=2e-6, rtol=0)
    assert out[[2, 6]].eq(0).all()
    if lse is not None:
        assert lse[[2, 6]].eq(-torch.inf).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [[], [(1, 0)], [(0, 7), (2, 4)]])
def test_empty_batches_and_sequences(form: str, lengths: list[tuple[int, int]]) -> None:
    case = MlaCase(lengths)
    out, _ = case.run(form)
    assert out.shape == (sum(q for q, _ in lengths), DIMS.heads, DIMS.value)
    assert out.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_stale_table_entries_are_not_dereferenced(form: str) -> None:
    """AT-4.10: what a table row holds past the pages needed is never looked at."""
    case = MlaCase([(1, PAGE), (4, 2 * PAGE)])
    before, _ = case.run(form)
    case.batch.block_table[case.batch.block_table < 0] = 1 << 30
    after, _ = case.run(form)
    assert torch.equal(before, after)


@pytest.mark.parametrize("form", FORMS)
def test_a_page_shared_by_two_sequences(form: str) -> None:
    case = MlaCase([(1, 2 * PAGE), (3, PAGE + 2)])
    case.batch.block_table[1, 0] = case.batch.block_table[0, 0]
    case.stored[1][:PAGE] = case.stored[0][:PAGE]
    out, _ = case.run(form)
    torch.testing.assert_close(out.double(), case.expected()[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_page_raises(form: str) -> None:
    case = MlaCase([(1, 2 * PAGE)])
    case.batch.block_table[0, 1] = -1
    with pytest.raises(ValueError, match="no page"):
        case.run(form)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_rows(form: str) -> None:
    case = MlaCase(BATCHES["mixed"], dtype=torch.bfloat16)
    out, _ = case.run(form)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected()[0], atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("context", [0, 1, 7, 8, 9, 16, 17, 25])
@pytest.mark.parametrize("suffix", [1, 2, 11])
def test_bounded_parts_equal_the_whole(context: int, suffix: int) -> None:
    """AT-2.1 in little: zero, one, two and three parts of 8 rows, never more than 8 at once."""
    case = MlaCase([(suffix, context + suffix), (1, 2)])
    out, lse = case.run("materialised", max_rows=8)
    assert max(case.projected) <= 8
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_many_queries_are_scored_in_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MlaCase([(19, 26), (9, 9)])
    whole, _ = case.run(form, max_rows=1000)
    tiles = partial(PrefillPlan.of, tile=4)
    monkeypatch.setattr("kvtier.kernels.prefill.plan_of", tiles)
    monkeypatch.setattr("kvtier.kernels.mla.SPLIT_ROWS", 8)
    blocks, _ = case.run(form, max_rows=8)
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(blocks.double(), case.expected()[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("queries", [1, 40, 160])
@pytest.mark.parametrize("budget", [2 << 20, 6 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absorbed_scratch_is_bounded(queries: int, budget: int, dtype: torch.dtype) -> None:
    """Whatever the number of queries and the context; the result itself does not count."""
    case = MlaCase([(queries, 3000)], dims=HeadDims(heads=16, latent=64, rope=8, nope=8, value=8))
    query, rows = case.absorbed_query.to(dtype), case.rows.to(dtype)
    args = {"latent_dim": 64, "scale": case.scale}
    want, want_lse = absorbed(query, rows, case.batch, **args, workspace_bytes=1 << 30)
    with Peak("cpu") as peak:
        out, lse = absorbed(query, rows, case.batch, **args, workspace_bytes=budget)
    result = out.numel() * out.itemsize + lse.numel() * lse.itemsize
    assert budget / 20 < peak.bytes - result <= budget
    torch.testing.assert_close(out, want, atol=2e-6 if dtype == torch.float32 else 4e-3, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=2e-6 if dtype == torch.float32 else 1e-5, rtol=0)


def test_absorbed_computes_in_any_workspace() -> None:
    case = MlaCase(BATCHES["mixed"])
    want, _ = case.run("absorbed")
    out, _ = case.run("absorbed", kernel=partial(absorbed, workspace_bytes=0))
    torch.testing.assert_close(out, want, atol=2e-6, rtol=0)


def test_absorbed_refuses_widths_that_do_not_fit() -> None:
    case = MlaCase([(1, 1)])
    with pytest.raises(ValueError, match="width"):
        absorbed(case.query, case.rows, case.batch, latent_dim=16, scale=1.0)


@pytest.mark.parametrize("queries", [2, 4])
def test_absorbed_refuses_another_number_of_queries(queries: int) -> None:
    case = MlaCase([(2, 5), (1, 3)])
    query = case.query.repeat(2, 1, 1)[:queries, :, : case.rows.shape[1]]
    with pytest.raises(ValueError, match=f"{queries} queries, in a batch of 3"):
        absorbed(query, case.rows, case.batch, latent_dim=1, scale=1.0)


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

    @pytest.mark.parametrize("width", [2, 4])
    def test_counts_every_copy_that_is_made(self, width: int) -> None:
        gathered, projected, keys, values = 576, 128 * 256, 128 * 192, 128 * 128
        row = width * (gathered + projected + keys + values)
        row += 2 * 128 * 128 * 4  # scores and weights of 128 queries, float32
        row += 128 * 5  # and their mask, twice
        if width < 4:
            row += 4 * (keys + values)  # widened for the arithmetic
        assert workspace_rows(row * 64 * 3, self.dims, width, 64) == 64 * 3
        assert workspace_rows(row * 64 * 3 - 1, self.dims, width, 64) == 64 * 2

    @pytest.mark.parametrize("size", [0, 100_000, "1MiB"])
    def test_less_than_a_page_is_refused(self, size: int | str) -> None:
        with pytest.raises(ConfigError, match="workspace_bytes"):
            workspace_rows(size, self.dims, 2, 64)

    def test_the_named_minimum_suffices(self) -> None:
        with pytest.raises(ConfigError) as caught:
            workspace_rows(1, self.dims, 2, 64)
        least = int(str(caught.value).rsplit(" ", 1)[1])
        assert workspace_rows(least, self.dims, 2, 64) == 64
