"""V4 attention: slot lists, choice of entries, one softmax over lists with a sink (E3, E5)."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.kernels import (
    RECORDS,
    PagedBatch,
    apply_sink,
    c4_slots,
    c128_slots,
    closed_entries,
    entry_slots,
    index_topk,
    merge,
    read_records,
    sparse_attend,
    window_slots,
    write_records,
)
from tests.unit.v4_cases import Allocations, batch_of

NAN, INF = torch.nan, torch.inf
LENGTHS = [(1, 1), (3, 3), (1, 0), (1, 700), (5, 132), (260, 513), (2, 257)]


def tokens_of(batch: PagedBatch) -> list[tuple[int, int]]:
    """(sequence, position) of each token, a padding row's position -1."""
    return [
        (b, kv - q + i)
        for b, (q, kv) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True))
        for i in range(q)
    ]


def windows_of(batch: PagedBatch, slots: int = 128) -> Tensor:
    """A table of window pages, scattered, of which only those still needed are there."""
    pages = max(-(-kv // slots) for kv in batch.kv_lens) or 1
    table = np.random.default_rng(5).permutation(len(batch.kv_lens) * pages).astype(np.int32)
    table = table.reshape(len(batch.kv_lens), pages)
    for b, (q, kv) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
        table[b, : max(0, kv - q - 127) // slots] = -1  # freed
        table[b, -(-kv // slots) :] = -1  # not there yet
    return torch.from_numpy(table)


class TestSlots:
    def test_window_by_brute_force(self) -> None:
        batch = batch_of(LENGTHS)
        table = windows_of(batch)
        got = window_slots(batch, table, window=128, slots_per_page=128)
        assert got.dtype == torch.int32
        for row, (b, t) in zip(got.tolist(), tokens_of(batch), strict=True):
            seen = [p for p in range(t + 1) if t - p < 128]
            expected = [int(table[b, p // 128]) * 128 + p % 128 for p in seen]
            assert row == expected + [-1] * (128 - len(seen))

    @pytest.mark.parametrize(("window", "slots"), [(1, 4), (3, 4), (4, 4), (5, 4), (9, 2)])
    def test_other_windows_and_pages(self, window: int, slots: int) -> None:
        batch = batch_of([(7, 11), (1, 2)])
        table = torch.arange(24, dtype=torch.int32).reshape(2, 12).flip(1)
        got = window_slots(batch, table, window=window, slots_per_page=slots)
        for row, (b, t) in zip(got.tolist(), tokens_of(batch), strict=True):
            seen = range(max(0, t - window + 1), t + 1)
            expected = [int(table[b, p // slots]) * slots + p % slots for p in seen]
            assert row == expected + [-1] * (window - len(seen))

    def test_window_pages_at_every_length(self) -> None:
        """One more token, at every length: pages below (kv - 128) // 128 may be freed (spec 4)."""
        for kv in range(1, 1100, 7):
            batch = batch_of([(1, kv)])
            table = windows_of(batch)
            got = window_slots(batch, table, window=128, slots_per_page=128)
            assert int((got >= 0).sum()) == min(128, kv)
            assert int((table >= 0).sum()) <= 2

    def test_c128_by_brute_force(self) -> None:
        batch = batch_of(LENGTHS)
        got = c128_slots(batch)
        assert got.shape == (sum(batch.query_lens), 5) and got.dtype == torch.int32
        for row, (b, t) in zip(got.tolist(), tokens_of(batch), strict=True):
            seen = [j for j in range(5) if 128 * j + 127 <= t]
            expected = [int(batch.block_table[b, j // 2]) * 2 + j % 2 for j in seen]
            assert row == expected + [-1] * (5 - len(seen))

    def test_slots_follow_the_closing_token(self) -> None:
        """Entry 4j+3's (128j+127's) own slot, over the group size, is the entry's (spec 4)."""
        batch = batch_of([(1, 1100)])
        pages = batch.block_table[0].to(torch.int64)
        for ratio, entries in ((4, 275), (128, 8)):
            j = torch.arange(entries)
            closing = ratio * j + ratio - 1
            token_slot = pages[closing // 256] * 256 + closing % 256
            assert torch.equal(entry_slots(j, pages, 256, ratio), token_slot // ratio)

    def test_c4_keeps_minus_one(self) -> None:
        batch = batch_of(LENGTHS)
        n = sum(batch.query_lens)
        entries = torch.full((n, 3), -1, dtype=torch.int32)
        expected = entries.clone()
        for i, (b, t) in enumerate(tokens_of(batch)):
            if t >= 3:
                j = (t + 1) // 4 - 1
                entries[i, 1] = j
                expected[i, 1] = batch.block_table[b, j // 64] * 64 + j % 64
        assert torch.equal(c4_slots(entries, batch), expected)

    def test_a_missing_page_is_refused(self) -> None:
        batch = batch_of([(1, 300)])
        table = windows_of(batch)
        for page in (1, 2):
            broken = table.clone()
            broken[0, page] = -1
            with pytest.raises(ValueError, match="lacks a page"):
                window_slots(batch, broken, window=128, slots_per_page=128)
        with pytest.raises(ValueError, match="lacks a page"):
            window_slots(batch, table[:, :2], window=128, slots_per_page=128)
        with pytest.raises(ValueError, match="lacks a page"):
            window_slots(batch, table[:, :0], window=128, slots_per_page=128)
        batch.block_table[0, 1] = -1
        with pytest.raises(ValueError, match="lacks a page"):
            c4_slots(torch.tensor([[74]]), batch)

    def test_nothing_at_all(self) -> None:
        for lengths in ([], [(1, 0)] * 2):
            batch = batch_of(lengths)
            assert c128_slots(batch).shape == (len(lengths), 0)
            table = torch.full((len(lengths), 0), -1, dtype=torch.int32)
            got = window_slots(batch, table, window=128, slots_per_page=128)
            assert got.shape == (len(lengths), 128) and got.eq(-1).all()


class IndexCase:
    """Indexer keys in scattered pages; whatever is no closed entry's is poison."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        record: str = "dense",
        heads: int = 16,
        dim: int = 128,
    ) -> None:
        torch.manual_seed(3)
        self.record, self.batch = RECORDS[record], batch_of(lengths)
        pages = int(self.batch.block_table.max()) + 2
        if record == "dense":
            self.keys = torch.full((pages * 64, dim), NAN)
        else:
            self.keys = torch.full((pages, self.record.page_bytes(64)), 0xFF, dtype=torch.uint8)
        n = sum(self.batch.query_lens)
        self.query, self.weights = torch.randn(n, heads, dim), torch.randn(n, heads)
        self.stored = []
        for b, (_, kv) in enumerate(lengths):
            values = torch.randn(kv // 4, dim)
            slots = entry_slots(torch.arange(kv // 4), self.batch.block_table[b], 256, 4)
            write_records(self.keys, slots, values, self.record)
            self.stored.append(read_records(self.keys, slots, self.record))

    def run(self, topk: int, **options: object) -> Tensor:
        return index_topk(
            self.query,
            self.weights,
            self.keys,
            self.batch,
            ratio=4,
            topk=topk,
            record=self.record,
            **options,  # type: ignore[arg-type]
        )

    def scores(self, i: int, b: int, t: int) -> list[float]:
        key = self.stored[b][: (t + 1) // 4].double()
        products = torch.relu(self.query[i].double() @ key.T)
        return (self.weights[i].double() @ products).tolist()

    def expected(self, topk: int) -> list[list[int]]:
        rows = []
        for i, (b, t) in enumerate(tokens_of(self.batch)):
            scores = self.scores(i, b, t) if t >= 0 else []
            best = np.lexsort((np.arange(len(scores)), -np.array(scores)))[:topk].tolist()
            rows.append(sorted(best) + [-1] * (topk - len(best)))
        return rows


class TestIndexTopk:
    @pytest.mark.parametrize("topk", [1, 7, 64, 512])
    @pytest.mark.parametrize("record", ["dense", "index_fp8", "index_mxfp4"])
    def test_against_sorting_in_float64(self, record: str, topk: int) -> None:
        case = IndexCase(LENGTHS, record)
        got = case.run(topk)
        assert got.dtype == torch.int32
        assert got.tolist() == case.expected(topk)

    @pytest.mark.parametrize("workspace", [1, 300_000, "8MiB"])
    def test_any_workspace_gives_the_same(self, workspace: int | str) -> None:
        case = IndexCase([(3, 3000), (40, 900), (1, 0)], heads=4, dim=16)
        assert case.run(32, workspace_bytes=workspace).tolist() == case.expected(32)

    def test_keys_past_one_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtier.kernels.index.SPLIT_KEYS", 10)
        for topk in (1, 5, 9, 10, 11, 30):
            case = IndexCase([(9, 340)], heads=4, dim=8)
            assert case.run(topk).tolist() == case.expected(topk)

    @pytest.mark.parametrize("split", [3, 64, 4096])
    def test_ties_go_to_the_smaller_entry(
        self, split: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Few heads: relu leaves many scores at 0, some of them -0."""
        monkeypatch.setattr("kvtier.kernels.index.SPLIT_KEYS", split)
        case = IndexCase([(30, 500)], heads=1, dim=2)
        case.weights[::2] = -case.weights[::2].abs()
        tied = sum(case.scores(i, 0, 470 + i).count(0.0) > 20 for i in range(30))
        assert tied > 15
        assert case.run(64).tolist() == case.expected(64)

    def test_equal_keys(self) -> None:
        case = IndexCase([(1, 400)])
        slots = entry_slots(torch.arange(100), case.batch.block_table[0], 256, 4)
        write_records(case.keys, slots, torch.ones(100, 128), case.record)
        assert case.run(10)[0].tolist() == list(range(10))

    def test_all_entries_when_few_need_no_keys(self) -> None:
        """... so that a short sequence does not depend on the indexer's numbers."""
        case = IndexCase([(4, 9), (1, 256)])
        case.keys.fill_(NAN)
        got = case.run(64)
        assert got[:3].eq(torch.tensor([0, *[-1] * 63])).sum() == 63 * 3 + 2
        assert got[4].tolist() == list(range(64))

    @pytest.mark.parametrize("visible", [15, 16, 17, 18])
    def test_around_as_many_as_are_chosen(self, visible: int) -> None:
        case = IndexCase([(1, 4 * visible), (2, 4 * visible + 3)])
        assert case.run(16).tolist() == case.expected(16)

    def test_sees_no_future(self) -> None:
        case = IndexCase([(300, 300)])
        got = case.run(16)
        for t, row in enumerate(got.tolist()):
            assert all(j < (t + 1) // 4 for j in row)
            assert sum(j >= 0 for j in row) == min(16, (t + 1) // 4)
            assert row == [j for j in row if j >= 0] + [-1] * row.count(-1)

    def test_a_missing_page_is_refused(self) -> None:
        case = IndexCase([(1, 600)])
        case.batch.block_table[0, 1] = -1
        with pytest.raises(ValueError, match="lacks a page"):
            case.run(16)

    def test_empty(self) -> None:
        assert IndexCase([(1, 0), (2, 2)]).run(8).eq(-1).all()
        none = batch_of([])
        got = index_topk(
            torch.empty(0, 4, 8),
            torch.empty(0, 4),
            torch.empty(0, 8),
            none,
            ratio=4,
            topk=5,
            record=RECORDS["dense"],
        )
        assert got.shape == (0, 5)


class SparseCase:
    """Tokens and entries in scattered slots, the rest of the pools poisoned."""

    def __init__(
        self, record: str, heads: int = 5, lengths: list[tuple[int, int]] = LENGTHS
    ) -> None:
        torch.manual_seed(11)
        self.record, self.heads, self.batch = RECORDS[record], heads, batch_of(lengths)
        self.dim = 512 if record == "v4_fp8" else 24
        self.window_table = windows_of(self.batch)
        self.window = self.pool(int(self.window_table.max()) + 1, 128)
        self.extra = self.pool(int(self.batch.block_table.max()) + 1, 64)
        self.tokens, self.entries = [], []
        for b, (q, kv) in enumerate(lengths):
            tokens, entries = torch.randn(kv, self.dim), torch.randn(kv // 4, self.dim)
            live = torch.arange(max(0, kv - q - 127), kv)
            slots = self.window_table[b].to(torch.int64)[live // 128] * 128 + live % 128
            write_records(self.window, slots, tokens[live], self.record)
            tokens[live] = read_records(self.window, slots, self.record)
            slots = entry_slots(torch.arange(kv // 4), self.batch.block_table[b], 256, 4)
            write_records(self.extra, slots, entries, self.record)
            self.tokens.append(tokens)
            self.entries.append(read_records(self.extra, slots, self.record))
        n = sum(self.batch.query_lens)
        self.query = torch.randn(n, heads, self.dim)
        self.sink = torch.randn(heads)
        self.scale = self.dim**-0.5
        self.chosen = torch.full((n, 20), -1, dtype=torch.int32)
        for i, (_, t) in enumerate(tokens_of(self.batch)):
            seen = torch.randperm((t + 1) // 4)[:14]
            self.chosen[i, torch.randperm(20)[: len(seen)]] = seen.int()

    def pool(self, pages: int, slots: int) -> Tensor:
        if self.record.name == "dense":
            return torch.full((pages * slots, self.dim), NAN)
        return torch.full((pages, self.record.page_bytes(slots)), 0xFF, dtype=torch.uint8)

    @property
    def window_slots(self) -> Tensor:
        return window_slots(self.batch, self.window_table, window=128, slots_per_page=128)

    def run(self, *, both: bool = True, **options: object) -> tuple[Tensor, Tensor]:
        if both:
            options |= {"extra": self.extra, "extra_slots": c4_slots(self.chosen, self.batch)}
        arguments = {"query": self.query, "sink": self.sink} | options
        return sparse_attend(
            window=self.window,
            window_slots=self.window_slots,
            scale=self.scale,
            record=self.record,
            **arguments,  # type: ignore[arg-type]
        )

    def expected(self, *, both: bool = True, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """From tokens and entries, one query and one head at a time, in float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:2], -INF, dtype=torch.float64)
        sink = self.sink if sink is None else sink
        for i, (b, t) in enumerate(tokens_of(self.batch)):
            keys = self.tokens[b][max(0, t - 127) : t + 1]
            if both:
                chosen = [j for j in self.chosen[i].tolist() if j >= 0]
                keys = torch.cat((keys, self.entries[b][chosen]))
            keys = keys.double()
            for h in range(self.heads):
                if not len(keys):
                    continue
                scores = (keys @ self.query[i, h].double() * self.scale).tolist()
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                lse[i, h] = top + math.log(sum(weights))
                total = sum(weights) + math.exp(float(sink[h]) - top)
                out[i, h] = torch.tensor(weights, dtype=torch.float64) @ keys / total
        return out, lse

    def check(self, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], near: float) -> None:
        assert (got[0].double() - want[0]).abs().max() < near
        finite = want[1].isfinite()
        assert torch.equal(got[1].isfinite(), finite)
        assert (got[1].double() - want[1])[finite].abs().max() < near
        assert got[1][~finite].eq(-INF).all()


sparse_records = pytest.mark.parametrize("record", ["dense", "v4_fp8"])


class TestSparseAttend:
    @sparse_records
    def test_window_and_entries(self, record: str) -> None:
        case = SparseCase(record)
        out, lse = case.run()
        case.check((out, lse), case.expected(), 3e-6)
        assert out[4].eq(0).all() and lse[4].eq(-INF).all()  # the padding row

    @sparse_records
    def test_window_alone(self, record: str) -> None:
        case = SparseCase(record)
        case.check(case.run(both=False), case.expected(both=False), 3e-6)

    @sparse_records
    @pytest.mark.parametrize("workspace", [1, 2_000_000, "64MiB"])
    def test_any_workspace(self, record: str, workspace: int | str) -> None:
        case = SparseCase(record, lengths=[(9, 300), (1, 0), (1, 77)])
        case.check(case.run(workspace_bytes=workspace), case.expected(), 3e-6)

    def test_keys_past_one_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = SparseCase("dense", lengths=[(9, 300), (1, 0), (1, 77)])
        monkeypatch.setattr("kvtier.kernels.sparse.SPLIT_KEYS", 3)
        case.check(case.run(), case.expected(), 3e-6)

    def test_parts_merge_to_the_whole(self) -> None:
        """Attended without a sink, merged by log-sum-exp, ended by ``apply_sink``."""
        case = SparseCase("v4_fp8")
        none = torch.full_like(case.sink, -INF)
        window = case.run(both=False, sink=none)
        case.check(window, case.expected(both=False, sink=none), 3e-6)
        entries = sparse_attend(
            case.query,
            case.extra,
            c4_slots(case.chosen, case.batch),
            none,
            scale=case.scale,
            record=case.record,
        )
        out, lse = merge(*window, *entries)
        whole = case.run()
        torch.testing.assert_close(apply_sink(out, lse, case.sink), whole[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse, whole[1], rtol=0, atol=2e-6)

    def test_the_sink_is_in_the_denominator_alone(self) -> None:
        case = SparseCase("dense", lengths=[(4, 40)])
        free = case.run(sink=torch.full_like(case.sink, -INF))
        case.check(free, case.expected(sink=torch.full_like(case.sink, -INF)), 3e-6)
        out, lse = case.run()
        assert torch.equal(lse, free[1])
        share = 1 / (1 + torch.exp(case.sink - lse))
        torch.testing.assert_close(out, free[0] * share[..., None], rtol=1e-6, atol=1e-7)
        for sink, factor in ((200.0, 0.0), (-200.0, 1.0), (INF, 0.0)):
            out, _ = case.run(sink=torch.full_like(case.sink, sink))
            torch.testing.assert_close(out, free[0] * factor)

    @pytest.mark.parametrize("sink", [-INF, 0.0, 50.0, INF])
    def test_a_sink_alone_gives_nothing(self, sink: float) -> None:
        case = SparseCase("v4_fp8", lengths=[(1, 0), (1, 0)])
        out, lse = case.run(sink=torch.full((5,), sink))
        assert out.eq(0).all() and lse.eq(-INF).all()

    def test_lists_of_no_slots(self) -> None:
        case = SparseCase("dense", lengths=[(2, 6)])
        none = torch.full((2, 0), -1, dtype=torch.int32)
        for slots in (none, torch.full((2, 9), -1, dtype=torch.int32)):
            out, lse = sparse_attend(
                case.query, case.window, slots, case.sink, scale=1.0, record=case.record
            )
            assert out.eq(0).all() and lse.eq(-INF).all()
        without = case.run(both=False)
        got = case.run(both=False, extra=case.extra, extra_slots=none)
        assert torch.equal(got[0], without[0]) and torch.equal(got[1], without[1])

    def test_only_the_entries_list(self) -> None:
        case = SparseCase("dense", lengths=[(1, 9)])
        case.chosen[:] = -1
        case.chosen[0, 7] = 1
        out, _ = sparse_attend(
            case.query,
            case.window,
            torch.full((1, 4), -1),
            torch.full((5,), -INF),
            scale=1.0,
            record=case.record,
            extra=case.extra,
            extra_slots=c4_slots(case.chosen, case.batch),
        )
        torch.testing.assert_close(out, case.entries[0][1].expand_as(out))

    def test_a_slot_listed_twice_counts_twice(self) -> None:
        rows = torch.randn(4, 6)
        query, none = torch.randn(1, 2, 6), torch.full((2,), -INF)

        def run(slots: list[int]) -> tuple[Tensor, Tensor]:
            return sparse_attend(
                query, rows, torch.tensor([slots]), none, scale=0.3, record=RECORDS["dense"]
            )

        assert torch.equal(run([1, 1])[0], run([1])[0])
        torch.testing.assert_close(run([1, 1])[1], run([1])[1] + math.log(2))
        assert (run([1, 1, 2])[0] - run([1, 2])[0]).abs().max() > 1e-3

    @pytest.mark.parametrize(
        ("dtype", "near"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
    )
    def test_types(self, dtype: torch.dtype, near: float) -> None:
        case = SparseCase("dense", lengths=[(9, 300), (1, 0)])
        case.query = case.query.to(dtype)
        out, lse = case.run()
        assert out.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        case.check((out, lse), case.expected(), near)

    def test_scores_of_any_size(self) -> None:
        case = SparseCase("dense", lengths=[(3, 300)])
        case.scale = 1e4
        case.check(case.run(), case.expected(), 1e-1)
        assert case.run()[0].isfinite().all()

    def test_scratch_stays_within_the_workspace(self) -> None:
        """Long lists, many queries: what is gathered at a time does not grow with either."""
        rows = torch.randn(4000, 8)
        query, sink = torch.randn(32, 2, 8), torch.zeros(2)
        slots = torch.randint(0, 4000, (32, 2000))
        with Allocations() as seen:
            sparse_attend(
                *(query, rows, slots, sink),
                scale=1.0,
                record=RECORDS["dense"],
                workspace_bytes=200_000,
            )
        assert 20_000 < seen.largest(besides=(rows, query, slots, sink)) <= 200_000

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        case = SparseCase("dense", lengths=[(3, 30)])
        with pytest.raises(ValueError):
            case.run(sink=torch.zeros(4))
        with pytest.raises(ValueError):
            case.run(query=case.query[:2])
        with pytest.raises(ValueError):
            case.run(both=False, extra=case.extra, extra_slots=torch.zeros(2, 4))
        with pytest.raises(ValueError, match="together"):
            case.run(both=False, extra=case.extra)
        with pytest.raises(ValueError, match="together"):
            case.run(both=False, extra_slots=case.window_slots)


def test_closed_entries_of_padding() -> None:
    assert closed_entries(torch.tensor([-1, 0, 3, 4]), 4).tolist() == [0, 0, 1, 1]
