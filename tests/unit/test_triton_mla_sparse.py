"""Attention to lists of latent rows in triton against dense masked attention in float64: on a GPU,
and in triton's interpreter without one.  What no list names is poison."""

import pytest
import torch

pytest.importorskip("triton")

from kvtier.kernels import RECORDS, HeadDims, mla_sparse, triton_mla_sparse, write_records
from tests.unit.window_cases import PADDING, WindowCase

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest value; queries are rounded once more when they are brought into the latents."""
FORMATS = [("dense", torch.bfloat16), ("dense", torch.float16), ("mla_fp8", torch.bfloat16)]


def case_of(
    lengths: list[int], window: int, record: str, dtype: torch.dtype, *, heads: int = 3
) -> WindowCase:
    return WindowCase(
        lengths,
        window,
        dims=HeadDims(heads, 512, 64, 16, 8),
        page=16,
        record=record,
        dtype=dtype,
        device=DEVICE,
    )


def check(case: WindowCase, *spans: tuple[int, int, int]) -> None:
    out, lse = case.call(*spans, kernel=triton_mla_sparse.mla_sparse)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    at = 0
    for b, start, stop in spans:
        mine = slice(at, at + max(1, stop - start))
        at = mine.stop
        if b < 0:
            assert out[mine].eq(0).all() and lse[mine].eq(-torch.inf).all()
            continue
        expected, expected_lse = case.expected(b)
        scale = expected[start:stop].abs().max().item()
        error = (out[mine].cpu().double() - expected[start:stop]).abs().max().item()
        assert error <= TOLERANCE[case.dtype] * scale
        gap = (lse[mine].cpu().double() - expected_lse[start:stop]).abs().max().item()
        assert gap <= 5 * TOLERANCE[case.dtype]


@pytest.mark.parametrize(("record", "dtype"), FORMATS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 16, 17, 128 if GPU else 40])
def test_prefill_decode_and_mixed(window: int, record: str, dtype: torch.dtype) -> None:
    """AT-3.1, 3.3: with padding rows between."""
    length = 2 * window + 2
    case = case_of([length, 9], window, record, dtype)
    ends = sorted({1, window - 1, window, window + 1, window + 2} - {0})
    check(case, *((0, t - 1, t) for t in ends), PADDING, (1, 4, 9), (0, length - 4, length))


@pytest.mark.parametrize(("distance", "seen"), [(4, True), (5, False)])
def test_a_key_that_outshines_all_others(distance: int, seen: bool) -> None:
    """AT-3.2"""
    case, t = case_of([12], 5, "dense", torch.bfloat16), 11
    run = {"kernel": triton_mla_sparse.mla_sparse}
    plain = case.call((0, t, t + 1), **run)[0]
    loud = (case.q_nope[0][t, 0] @ case.weight[0, :16]).float()
    case.rows[0][t - distance] = torch.cat((100 * loud / loud.norm(), torch.zeros(64)))
    got = case.call((0, t, t + 1), **run)[0]
    prefill = case.call((0, 0, t + 1), **run)[0][-1:]
    assert torch.equal(got, prefill)
    assert torch.equal(got, plain) != seen
    check(case, (0, t, t + 1), (0, 0, t + 1))


@pytest.mark.parametrize("heads", [1, 16, 63, 64, 65, 128])
def test_any_number_of_heads(heads: int) -> None:
    """AT-3.6"""
    for record in ("dense", "mla_fp8"):
        check(case_of([40], 20, record, torch.bfloat16, heads=heads), (0, 37, 40), (0, 3, 4))


@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
def test_lists_of_any_length_with_holes(record: str) -> None:
    """Cut into parts or not, as the scratch allows; slots past the pool count as none."""
    torch.manual_seed(0)
    rows = torch.full((24 * 64, 576), torch.nan).bfloat16()
    if record == "mla_fp8":
        rows = torch.full((24, 64 * 656), 0xFF, dtype=torch.uint8)
    named = torch.randperm(24 * 64)[:1200]
    write_records(rows, named, torch.randn(1200, 576).bfloat16(), RECORDS[record])
    query = torch.randn(2, 5, 576).bfloat16()
    slots = named[torch.randint(0, 1200, (2, 1000 if GPU else 200))].int()
    slots[0, ::3] = -1
    slots[1, 40:] = -1  # whole parts without a key
    options = {"latent_dim": 512, "scale": 0.07, "record": RECORDS[record]}
    expected, expected_lse = mla_sparse(query.double(), rows, slots, **options)
    beyond = torch.where(slots < 0, 24 * 64, slots)
    for workspace, given in (("1GiB", slots), ("1GiB", beyond), (0, slots)):
        out, lse = triton_mla_sparse.mla_sparse(
            *(t.to(DEVICE) for t in (query, rows, given)), workspace_bytes=workspace, **options
        )
        worst = (out.cpu().double() - expected).abs().max() / expected.abs().max()
        assert worst <= 2e-2
        assert (lse.cpu().double() - expected_lse).abs().max() <= 2e-3
    for k in (0, 1, 33):
        out, lse = triton_mla_sparse.mla_sparse(
            *(t.to(DEVICE) for t in (query, rows, slots[:, :k])), **options
        )
        expected, expected_lse = mla_sparse(query.double(), rows, slots[:, :k], **options)
        assert (out.cpu().double() - expected).abs().max() <= 2e-2 * max(1, expected.abs().max())
        assert torch.equal(lse.cpu().isinf(), expected_lse.isinf())


def test_other_shapes_and_types_are_refused() -> None:
    query, slots = torch.zeros(2, 3, 576).bfloat16(), torch.zeros(2, 4, dtype=torch.int32)
    rows, options = torch.zeros(64, 576).bfloat16(), {"latent_dim": 512, "scale": 1.0}
    dense, packed = {"record": RECORDS["dense"]}, {"record": RECORDS["mla_fp8"]}
    pages = torch.zeros(1, 64 * 656, dtype=torch.uint8)
    for wrong in (
        (query[..., :512], rows, slots, options | dense),
        (query, rows[:, :512], slots, options | dense),
        (query, rows, slots[:1], options | dense),
        (query, rows, slots, options | dense | {"latent_dim": 576}),
        (query.half(), rows, slots, options | dense),
        (query.half(), pages, slots, options | packed),
        (query, pages[:, 1:], slots, options | packed),
    ):
        with pytest.raises(ValueError):
            triton_mla_sparse.mla_sparse(*wrong[:3], **wrong[3])
    out, lse = triton_mla_sparse.mla_sparse(query[:0], rows, slots[:0], **options, **dense)
    assert out.shape == (0, 3, 512) and lse.shape == (0, 3)
