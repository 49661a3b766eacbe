"""Windowed latent attention through slot lists against dense masked attention (AT-3.1 to 3.7)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtier.kernels import (
    RECORDS,
    HeadDims,
    attend,
    mla_sparse,
    window_slots,
    write_records,
)
from kvtier.kernels.records import pack_mla_fp8, unpack_mla_fp8
from tests.unit.window_cases import PACKED_DIMS, PADDING, WindowCase

PAGE = 4
WINDOWS = [1, 2, PAGE, PAGE + 1, 128]
NEAR = 1e-5


def near(case: WindowCase, got: tuple[Tensor, Tensor], b: int, start: int, stop: int) -> None:
    out, lse = case.expected(b)
    scale = max(1.0, out.abs().max().item())
    assert (got[0].double() - out[start:stop]).abs().max().item() <= NEAR * scale
    assert (got[1].double() - lse[start:stop]).abs().max().item() <= NEAR * 10


@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
@pytest.mark.parametrize("materialised", [False, True], ids=["absorbed", "materialised"])
@pytest.mark.parametrize("window", WINDOWS)
def test_prefill_decode_and_mixed(window: int, materialised: bool, record: str) -> None:
    """AT-3.1: at the start, around the first position that drops a key, and far behind it."""
    dims = PACKED_DIMS if record == "mla_fp8" else WindowCase([1], 1).dims
    length = 2 * window + 2
    case = WindowCase([length, 7], window, dims=dims, record=record, page=PAGE)
    near(case, case.call((0, 0, length), materialised=materialised), 0, 0, length)
    for t in sorted({0, window - 2, window - 1, window, window + 1, 2 * window} - {-1}):
        near(case, case.call((0, t, t + 1), materialised=materialised), 0, t, t + 1)
        spans = ((1, 2, 7), (0, t, t + 1), PADDING, (0, t, length))
        out, lse = case.call(*spans, materialised=materialised)
        near(case, (out[:5], lse[:5]), 1, 2, 7)
        near(case, (out[5:6], lse[5:6]), 0, t, t + 1)
        assert out[6].eq(0).all() and lse[6].eq(-torch.inf).all()
        near(case, (out[7:], lse[7:]), 0, t, length)


@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize(("distance", "seen"), [(0, True), (4, True), (5, False), (6, False)])
def test_a_key_that_outshines_all_others(where: str, distance: int, seen: bool) -> None:
    """AT-3.2: a window of 5 tokens holds the one 4 back, and not the one 5 back."""
    window, t = 5, 11
    case = WindowCase([t + 1], window)
    span = (0, t, t + 1) if where == "decode" else (0, 0, t + 1)
    plain = case.call(span)[0][-1]
    loud = case.q_nope[0][t, 0] @ case.weight[0, : case.dims.nope]
    row = torch.cat((1000 * loud / loud.norm(), 0 * case.q_rope[0][t, 0]))
    case.rows[0][t - distance] = row
    got = case.call(span)[0][-1]
    alone = case.weight[0, case.dims.nope :] @ row[: case.dims.latent]
    if seen:
        torch.testing.assert_close(got[0], alone, rtol=1e-5, atol=1e-3)
    else:
        assert torch.equal(got, plain)


class TestIndex:
    """AT-3.3"""

    @pytest.mark.parametrize("window", WINDOWS)
    def test_rows_by_definition(self, window: int) -> None:
        case = WindowCase([40, 9, 300], window, page=PAGE)
        spans = ((2, 290, 300), PADDING, (0, 0, 40), (1, 8, 9), PADDING)
        _, batch, table = case.paged(*spans)
        got = window_slots(batch, table, window=window, slots_per_page=PAGE)
        assert got.dtype == torch.int32 and got.shape == (10 + 1 + 40 + 1 + 1, window)
        rows = iter(got.tolist())
        for row, (b, start, stop) in enumerate(spans):
            for p in range(start, max(stop, start + 1)):
                seen = range(max(0, p - window + 1), p + 1) if b >= 0 else range(0)
                slots = [int(table[row, k // PAGE]) * PAGE + k % PAGE for k in seen]
                assert next(rows) == slots + [-1] * (window - len(seen))

    def test_padding_gives_zeros_whatever_its_query_holds(self) -> None:
        case = WindowCase([3], 4)
        out, lse = case.call(PADDING, (0, 0, 3), PADDING)
        assert out[[0, 4]].eq(0).all() and lse[[0, 4]].eq(-torch.inf).all()
        assert out[1:4].isfinite().all()

    def test_no_list_at_all(self) -> None:
        query = torch.full((2, 3, 20), torch.nan)
        rows, slots = torch.full((8, 20), torch.nan), torch.empty(2, 0, dtype=torch.int32)
        options = {"latent_dim": 16, "scale": 1.0, "record": RECORDS["dense"]}
        out, lse = mla_sparse(query, rows, slots, **options)
        assert out.shape == (2, 3, 16) and out.eq(0).all() and lse.eq(-torch.inf).all()
        out, lse = mla_sparse(query[:0], rows, slots[:0], **options)
        assert out.shape == (0, 3, 16) and lse.shape == (0, 3)


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("cut", ["1", "W-1", "W", "W+1"])
def test_chunks_and_prefixes(window: int, cut: str) -> None:
    """AT-3.4: each chunk reaches back over its own start, as far as the window does."""
    length = 21
    chunk = max(1, {"1": 1, "W-1": window - 1, "W": window, "W+1": window + 1}[cut])
    case = WindowCase([length], window)
    whole, _ = case.call((0, 0, length))
    for prefix in range(length):
        starts = [0, *range(prefix, length, chunk)] if prefix else range(0, length, chunk)
        ends = [*list(starts)[1:], length]
        parts = [case.call((0, a, z))[0] for a, z in zip(starts, ends, strict=True)]
        torch.testing.assert_close(torch.cat(parts), whole, atol=NEAR, rtol=0)


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_several_query_tokens(queries: int) -> None:
    """AT-3.5: a verify step equals as many single steps, whatever else is in the batch."""
    case = WindowCase([30, 12], 6)
    for start in range(30 - queries):
        stop = start + queries
        out, lse = case.call((1, 11, 12), (0, start, stop), (1, 0, 5))
        for i, t in enumerate(range(start, stop), 1):
            one, one_lse = case.call((0, t, t + 1))
            torch.testing.assert_close(out[i], one[0], atol=NEAR, rtol=0)
            torch.testing.assert_close(lse[i], one_lse[0], atol=NEAR, rtol=0)


@pytest.mark.parametrize("heads", [1, 16, 63, 64, 65, 128])
def test_any_number_of_heads(heads: int) -> None:
    """AT-3.6: heads of zeros beside them change nothing, and what those give is dropped."""
    case = WindowCase([14], 5, dims=HeadDims(heads, 16, 4, 8, 6))
    out, lse = case.call((0, 0, 14))
    near(case, (out, lse), 0, 0, 14)
    padded = WindowCase([14], 5, dims=HeadDims(128, 16, 4, 8, 6))
    padded.rows = case.rows
    for name in ("q_nope", "q_rope"):
        getattr(padded, name)[0][:] = 0
        getattr(padded, name)[0][:, :heads] = getattr(case, name)[0]
    padded.weight[:heads] = case.weight
    wide, wide_lse = padded.call((0, 0, 14))
    torch.testing.assert_close(wide[:, :heads], out, atol=NEAR, rtol=0)
    torch.testing.assert_close(wide_lse[:, :heads], lse, atol=NEAR, rtol=0)


def test_log_sum_exp_is_natural_and_merges() -> None:
    """Two halves of a list, joined by their log-sum-exp, are the whole; so is plain ``attend``."""
    case = WindowCase([9], 9)
    pool, batch, table = case.paged((0, 8, 9))
    slots = window_slots(batch, table, window=9, slots_per_page=case.page)
    query = torch.randn(1, 3, 20)
    options = {"latent_dim": 16, "scale": 0.3, "record": case.record}
    out, lse = mla_sparse(query, pool, slots, **options)
    keys = case.rows[0]
    same = attend(query, keys, keys[:, :16], scale=0.3, first_query=8, first_key=0)
    torch.testing.assert_close((out, lse), same)
    tiny = mla_sparse(query, pool, slots, workspace_bytes=1, **options)
    torch.testing.assert_close(tiny, (out, lse))


def test_a_window_as_long_as_the_sequence_is_the_full_layer() -> None:
    """E6"""
    length = 19
    full = WindowCase([length], 1000)
    for window in (length, length + 1, 64):
        case = WindowCase([length], window)
        torch.testing.assert_close(case.call((0, 0, length)), full.call((0, 0, length)))


class TestRecord:
    """AT-3.7"""

    def test_bytes_do_not_depend_on_the_batch(self) -> None:
        torch.manual_seed(0)
        token, others = torch.randn(1, 576), 1e4 * torch.randn(7, 576)
        alone = torch.zeros(2, 8 * 656, dtype=torch.uint8)
        record = RECORDS["mla_fp8"]
        write_records(alone, torch.tensor([5]), token, record)
        among = torch.zeros_like(alone)
        order = torch.tensor([3, 9, 5, 0, 12, 7, 1, 2])
        write_records(among, order, torch.cat((others[:2], token, others[2:])), record)
        mine = slice(5 * 656, 6 * 656)
        assert torch.equal(alone[0, mine], among[0, mine])
        assert alone[0, mine].any()

    def test_round_trip(self) -> None:
        """Half a step of e4m3, of each group of 128 by itself: 1/16 of the value, or 2**-10 of
        what the group's scale stands for."""
        torch.manual_seed(0)
        values = torch.randn(50, 576)
        values[:, :512] *= 2.0 ** torch.randint(-9, 9, (50, 4)).repeat_interleave(128, 1)
        values = values.bfloat16().float()
        back = unpack_mla_fp8(pack_mla_fp8(values))
        assert torch.equal(back[:, 512:], values[:, 512:])
        groups, found = values[:, :512].view(50, 4, 128), back[:, :512].view(50, 4, 128)
        scale = 2.0 ** torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 448))
        bound = torch.maximum(groups.abs() / 16, scale * 2.0**-10)
        assert ((found - groups).abs() <= bound * (1 + 1e-6)).all()

    def test_zeros_and_infinities(self) -> None:
        values = torch.zeros(3, 576)
        values[1, 7], values[2, 300] = torch.inf, -torch.inf
        packed = pack_mla_fp8(values)
        back = unpack_mla_fp8(packed)
        # What is infinite stays so, in a code that is no NaN, and ruins no other value.
        assert back[1, 7] == torch.inf and back[2, 300] == -torch.inf
        assert (packed[1, 7], packed[2, 300]) == (0x7E, 0xFE)
        values[1, 7] = values[2, 300] = back[1, 7] = back[2, 300] = 0
        assert torch.equal(back, values)
        # A group of zeros has the scale of the least value there is one for, 1e-4 by 448.
        scales = packed[:, 512:528].contiguous().view(torch.float32)
        zeros = torch.ones(3, 4, dtype=torch.bool)
        zeros[1, 0] = zeros[2, 2] = False
        assert scales[zeros].eq(2.0**-22).all() and scales.isfinite().all()


def test_shapes_that_do_not_match_are_refused() -> None:
    query, rows = torch.zeros(2, 3, 20), torch.zeros(8, 20)
    slots = torch.zeros(2, 1, dtype=torch.int32)
    options = {"latent_dim": 16, "scale": 1.0, "record": RECORDS["dense"]}
    for wrong in (
        (query[:1], rows, slots, options),
        (query, rows[:, :19], slots, options),
        (query, rows, slots, options | {"latent_dim": 21}),
        (query, rows, slots + 8, options),
    ):
        with pytest.raises(ValueError):
            mla_sparse(*wrong[:3], **wrong[3])
    case = WindowCase([2], 2)
    case.dims = replace(case.dims, nope=7)
    with pytest.raises((ValueError, RuntimeError)):
        case.call((0, 0, 2), materialised=True)
