"""Norms, partial rotation and quantised indexer queries (E3)."""

import math

import pytest
import torch

from kvtier.kernels import (
    head_norm_rope,
    inverse_rope,
    norm_rope,
    quantise_query,
    rms_norm,
    rope,
)
from kvtier.kernels.casts import e4m3_values
from tests.unit.v4_cases import E4M3, quantised


def tables(n: int, pairs: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    inverse = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(n)[:, None] * inverse
    return angle.cos().to(dtype), angle.sin().to(dtype)


def test_rotation_of_pairs_one_by_one() -> None:
    values = torch.randn(5, 3, 14, dtype=torch.float64)
    cos, sin = tables(5, 4)
    got = rope(values, cos, sin)
    assert torch.equal(got[..., :6], values[..., :6])
    for t in range(5):
        for i in range(4):
            angle = t * 10000.0 ** (-i / 4)
            turned = complex(math.cos(angle), math.sin(angle))
            for h in range(3):
                x, y = values[t, h, 6 + 2 * i : 8 + 2 * i].tolist()
                z = complex(x, y) * turned
                assert got[t, h, 6 + 2 * i].item() == pytest.approx(z.real, abs=1e-14)
                assert got[t, h, 7 + 2 * i].item() == pytest.approx(z.imag, abs=1e-14)


def test_rotation_of_vectors_without_heads() -> None:
    values = torch.randn(5, 14)
    cos, sin = tables(5, 4, torch.float32)
    assert torch.equal(rope(values, cos, sin), rope(values[:, None], cos, sin)[:, 0])


def test_the_inverse_undoes_it() -> None:
    values = torch.randn(9, 2, 512, dtype=torch.float64)
    cos, sin = tables(9, 32)
    assert (rope(values, cos, sin) - values).abs().max() > 1
    back = inverse_rope(rope(values, cos, sin), cos, sin)
    torch.testing.assert_close(back, values, rtol=0, atol=1e-13)


def test_products_depend_on_the_distance_alone() -> None:
    """Why keys keep their rotation, and outputs are rotated back at the query's position."""
    a, b = torch.randn(2, 64, dtype=torch.float64)
    cos, sin = tables(50, 32)
    turned_a = rope(a.expand(50, 64), cos, sin)
    turned_b = rope(b.expand(50, 64), cos, sin)
    assert (turned_a[40] @ turned_b[30] - turned_a[17] @ turned_b[7]).abs() < 1e-12
    assert (turned_a[40] @ turned_b[30] - turned_a[40] @ turned_b[7]).abs() > 1e-3


def test_norms() -> None:
    values, weight = torch.randn(4, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    for t in range(4):
        for h in range(3):
            row = values[t, h]
            root = math.sqrt(sum(x * x for x in row.tolist()) / 8 + 1e-6)
            torch.testing.assert_close(
                rms_norm(values, weight, eps=1e-6)[t, h], row / root * weight
            )
            torch.testing.assert_close(rms_norm(values, None, eps=1e-6)[t, h], row / root)
    assert rms_norm(torch.zeros(1, 4), None, eps=1e-6).eq(0).all()


def test_norm_and_rotation_together() -> None:
    cos, sin = tables(4, 2, torch.float32)
    entries, weight = torch.randn(4, 8), torch.randn(8)
    got = norm_rope(entries, weight, cos, sin, eps=1e-6)
    assert torch.equal(got, rope(rms_norm(entries, weight, eps=1e-6), cos, sin))
    query = torch.randn(4, 3, 8)
    heads = head_norm_rope(query, cos, sin, eps=1e-6)
    torch.testing.assert_close(heads.square().mean(-1), torch.ones(4, 3), rtol=1e-4, atol=0)
    for h in range(3):
        alone = norm_rope(query[:, h], torch.ones(8), cos, sin, eps=1e-6)
        torch.testing.assert_close(heads[:, h], alone, rtol=1e-6, atol=1e-7)


def test_bfloat16_is_computed_in_float32() -> None:
    values = torch.randn(3, 2, 16).bfloat16()
    cos, sin = tables(3, 4, torch.float32)
    got = head_norm_rope(values, cos, sin, eps=1e-6)
    assert got.dtype == torch.float32
    assert torch.equal(got, head_norm_rope(values.float(), cos, sin, eps=1e-6))


class TestQuantisedQuery:
    def test_codes_and_weights(self) -> None:
        query = torch.randn(6, 4, 128) * 2.0 ** torch.randint(-20, 9, (6, 4, 1))
        query[0, 0] = 0
        weights = torch.randn(6, 4)
        codes, folded = quantise_query(query, weights)
        flat = query.double().numpy().reshape(24, 128)
        expected, scales = quantised(flat, 128, E4M3, 1e-4)
        assert codes.dtype == torch.uint8 and folded.dtype == torch.float32
        assert (codes.numpy().reshape(24, 128) == expected).all()
        powers = torch.from_numpy(2.0 ** (scales.astype("f8") - 127)).view(6, 4)
        assert torch.equal(folded.double(), weights.double() * powers)

    def test_scores_stay_what_they_were(self) -> None:
        torch.manual_seed(0)
        query, keys, weights = torch.randn(3, 64, 128), torch.randn(50, 128), torch.randn(3, 64)
        codes, folded = quantise_query(query, weights)

        def scores(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.einsum("qhm,qh->qm", torch.einsum("qhd,md->qhm", q, keys).relu(), w)

        exact, got = scores(query, weights), scores(e4m3_values(codes), folded)
        assert (got - exact).abs().max() < 0.04 * exact.abs().max()
        # What folding changes is the rounding alone: with exact values nothing is lost.
        values = e4m3_values(codes)
        again, weights_again = quantise_query(values, weights)
        torch.testing.assert_close(
            scores(e4m3_values(again), weights_again), scores(values, weights), rtol=1e-6, atol=1e-4
        )
