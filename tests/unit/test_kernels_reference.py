"""Writing and gathering rows, and merging attention to parts of the keys."""

import itertools

import pytest
import torch

from kvtier.kernels import attend, gather_rows, merge, write_rows

INF, NAN = torch.inf, torch.nan


class TestWriteRows:
    def test_writes_the_named_rows_and_no_other(self) -> None:
        rows = torch.full((12, 3), NAN)
        values = torch.arange(12.0).reshape(4, 3)
        write_rows(rows, torch.tensor([7, 0, 11, 4], dtype=torch.int32), values)
        for value, slot in zip(values, (7, 0, 11, 4), strict=True):
            assert rows[slot].tolist() == value.tolist()
        untouched = [i for i in range(12) if i not in (7, 0, 11, 4)]
        assert rows[untouched].isnan().all()

    def test_slot_minus_one_is_skipped(self) -> None:
        rows = torch.full((4, 2), NAN)
        write_rows(rows, torch.tensor([-1, 2, -1], dtype=torch.int32), torch.ones(3, 2))
        assert rows[2].tolist() == [1.0, 1.0]
        assert rows[[0, 1, 3]].isnan().all()  # -1 is not the last row

    def test_only_padding_and_nothing_at_all(self) -> None:
        rows = torch.full((4, 2), NAN)
        write_rows(rows, torch.tensor([-1, -1], dtype=torch.int32), torch.ones(2, 2))
        write_rows(rows, torch.empty(0, dtype=torch.int32), torch.empty(0, 2))
        assert rows.isnan().all()

    def test_rows_of_one_layer_inside_a_wider_pool(self) -> None:
        pool = torch.full((6, 2, 3), NAN)  # slots, layers, width
        write_rows(pool[:, 1], torch.tensor([4, 1], dtype=torch.int32), torch.ones(2, 3))
        assert pool[[4, 1], 1].eq(1).all()
        assert pool[:, 0].isnan().all()
        assert pool[[0, 2, 3, 5], 1].isnan().all()

    def test_values_take_the_type_of_the_rows(self) -> None:
        rows = torch.zeros(2, 1, dtype=torch.bfloat16)
        write_rows(rows, torch.tensor([1], dtype=torch.int32), torch.tensor([[1.0009765625]]))
        assert rows[1].item() == 1.0

    def test_offsets_past_two_gib(self) -> None:
        """Row * width no longer fits 32 bits: an index kernel with int32 offsets would wrap."""
        width = 1 << 20
        rows = torch.empty(2100, width, dtype=torch.uint8)  # never touched as a whole
        rows[0].zero_()
        write_rows(rows, torch.tensor([2099], dtype=torch.int32), torch.full((1, width), 7))
        assert rows[2099].eq(7).all()
        assert rows[0].eq(0).all()

    @pytest.mark.parametrize(
        ("slots", "values"), [([0, 4], (2, 2)), ([0], (2, 2)), ([0, 1], (2, 3))]
    )
    def test_bad_input_writes_nothing(self, slots: list[int], values: tuple[int, int]) -> None:
        rows = torch.full((4, 2), NAN)
        with pytest.raises(ValueError, match=r"slot"):
            write_rows(rows, torch.tensor(slots, dtype=torch.int32), torch.ones(values))
        assert rows.isnan().all()


class TestGatherRows:
    rows = torch.arange(20.0).reshape(20, 1)  # pages of 4
    pages = torch.tensor([3, 0, 4, -1], dtype=torch.int32)

    @pytest.mark.parametrize(
        ("start", "stop", "expected"),
        [
            (0, 4, [12, 13, 14, 15]),
            (3, 5, [15, 0]),
            (4, 4, []),
            (5, 12, [1, 2, 3, 16, 17, 18, 19]),
        ],
    )
    def test_positions_through_the_table(self, start: int, stop: int, expected: list[int]) -> None:
        got = gather_rows(self.rows, self.pages, start, stop, 4)
        assert got.flatten().tolist() == expected

    @pytest.mark.parametrize(("start", "stop"), [(11, 13), (12, 13), (0, 17)])
    def test_a_missing_page_raises_instead_of_wrapping(self, start: int, stop: int) -> None:
        with pytest.raises(ValueError, match="no page"):
            gather_rows(self.rows, self.pages, start, stop, 4)


def one_shot(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Softmax attention to all keys, one query and head at a time."""
    out = torch.empty(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    for i, h in itertools.product(range(query.shape[0]), range(query.shape[1])):
        weights = torch.softmax(keys.double() @ query[i, h].double() * 0.5, dim=0)
        out[i, h] = weights @ values.double()
    return out


class TestMerge:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_parts_in_any_order_are_the_whole(self, order: tuple[int, ...]) -> None:
        torch.manual_seed(1)
        query, keys, values = torch.randn(5, 2, 6), torch.randn(9, 6) * 3, torch.randn(9, 4)
        parts = []
        for start, stop in ((0, 2), (2, 8), (8, 9)):
            parts.append(
                attend(
                    query,
                    keys[start:stop],
                    values[start:stop],
                    scale=0.5,
                    first_query=100,
                    first_key=start,
                )
            )
        out, lse = parts[order[0]]
        for i in order[1:]:
            out, lse = merge(out, lse, *parts[i])
        torch.testing.assert_close(out.double(), one_shot(query, keys, values), atol=2e-6, rtol=0)
        scores = torch.einsum("qhd,md->qhm", query.double(), keys.double()) * 0.5
        torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("empty", [-INF, INF])
    @pytest.mark.parametrize("garbage", [NAN, INF, 3.0])
    def test_an_empty_side_leaves_the_other_alone(self, empty: float, garbage: float) -> None:
        out, lse = torch.randn(3, 2, 4), torch.randn(3, 2) * 50
        void, void_lse = torch.full_like(out, garbage), torch.full_like(lse, empty)
        for got, got_lse in (merge(out, lse, void, void_lse), merge(void, void_lse, out, lse)):
            assert torch.equal(got, out)
            assert torch.equal(got_lse, lse)

    @pytest.mark.parametrize(("a", "b"), [(-INF, -INF), (INF, -INF), (INF, INF)])
    def test_two_empty_sides_are_empty(self, a: float, b: float) -> None:
        garbage = torch.full((2, 1, 3), NAN)
        out, lse = merge(garbage, torch.full((2, 1), a), garbage, torch.full((2, 1), b))
        assert out.eq(0).all()
        assert lse.eq(-INF).all()

    def test_empty_and_full_rows_in_one_call(self) -> None:
        """Rows are independent: an empty one does not disturb its neighbour."""
        a, b = torch.tensor([[[1.0]], [[NAN]]]), torch.tensor([[[3.0]], [[5.0]]])
        out, lse = merge(a, torch.tensor([[0.0], [-INF]]), b, torch.tensor([[0.0], [2.0]]))
        assert out.flatten().tolist() == [2.0, 5.0]
        assert lse.flatten().tolist() == pytest.approx([0.6931472, 2.0])

    @pytest.mark.parametrize("level", [1e4, -1e4])
    def test_extreme_log_sums(self, level: float) -> None:
        a, b = torch.full((1, 1, 1), 1.0), torch.full((1, 1, 1), 3.0)
        out, lse = merge(a, torch.full((1, 1), level), b, torch.full((1, 1), level))
        assert out.item() == 2.0
        assert lse.item() == pytest.approx(level + 0.6931, abs=1e-2)
        out, _ = merge(a, torch.full((1, 1), level), b, torch.full((1, 1), -level))
        assert out.item() == (1.0 if level > 0 else 3.0)

    def test_large_outputs_do_not_overflow(self) -> None:
        big = torch.full((1, 1, 1), 3e38)
        out, _ = merge(big, torch.zeros(1, 1), big, torch.zeros(1, 1))
        assert out.item() == pytest.approx(3e38)


class TestAttend:
    def test_a_query_before_every_key_sees_nothing(self) -> None:
        out, lse = attend(
            torch.randn(3, 2, 4),
            torch.randn(5, 4),
            torch.randn(5, 4),
            scale=1.0,
            first_query=7,
            first_key=9,
        )
        assert out[:2].eq(0).all()
        assert lse[:2].eq(-INF).all()
        assert lse[2].isfinite().all()  # position 9 sees key 9

    def test_log_sum_is_natural(self) -> None:
        _, lse = attend(
            torch.zeros(1, 1, 2),
            torch.ones(8, 2),
            torch.ones(8, 2),
            scale=1.0,
            first_query=7,
            first_key=0,
        )
        assert lse.item() == pytest.approx(2.0794415)  # ln 8
