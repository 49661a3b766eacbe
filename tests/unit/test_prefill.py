"""Chunked prefill: the planner, the workspace's bound, and chunks against dense attention in
float64, by the reference and by triton (in its interpreter without a GPU)."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory import Peak
from kvtier import ConfigError
from kvtier.kernels import (
    Case,
    HeadDims,
    PagedBatch,
    PrefillPlan,
    Span,
    Workspace,
    materialised,
    materialised_sdpa,
    plan_chunks,
    prefill,
    row_bytes,
    select,
    workspace_rows,
)
from kvtier.kernels.pack import has_triton
from kvtier.kernels.prefill import Results
from kvtier.kernels.prefill_plan import _PLANS, ENDS, GOES_ON, Chunk, Tile, plan_of
from tests.unit.mla_cases import DIMS, MlaCase

GPU = torch.cuda.is_available()
ATOL = 2e-5 if GPU else 2e-6
"""A GPU's exponentials and logarithms are approximate."""
PAGE, W = 4, 8
EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1, W - 1, W, W + 1, 2 * W, 2 * W + 1]
GRID = [(s, c + s) for c, s in itertools.product(EDGES, (1, 2, 17))]
"""Every suffix behind every context, as (query, KV) lengths."""
FEW = [(1, 2 * W + 1), (17, 17), (2, W + 1), (1, 1), (17, 2 * W + 18), (2, PAGE + 3), (1, W)]
"""For an interpreter, which is slow."""


def by_triton(*args: Any, **options: Any) -> Any:
    from kvtier.kernels import triton_prefill

    return triton_prefill.materialised(*args, **options)


def by_gluon(*args: Any, **options: Any) -> Any:
    from kvtier.kernels import gluon_prefill

    return gluon_prefill.materialised(*args, **options)


BACKENDS = [
    pytest.param(materialised, "cpu", id="torch"),
    pytest.param(
        by_triton,
        "cuda" if GPU else "cpu",
        id="triton",
        marks=pytest.mark.skipif(not has_triton(), reason="needs triton"),
    ),
]
backends = pytest.mark.parametrize(("kernel", "device"), BACKENDS)


def spans(*chunks: Sequence[tuple[int, int, int]]) -> tuple[tuple[Span, ...], ...]:
    """Of (sequence, start, length)."""
    return tuple(tuple(Span(s, low, low + n) for s, low, n in chunk) for chunk in chunks)


class TestPlanner:
    @pytest.mark.parametrize(
        ("lengths", "rows", "expected"),
        [
            ([0, 10, 0, 100], 64, spans([(1, 0, 10)], [(3, 0, 64)], [(3, 64, 36)])),
            ([128], 64, spans([(0, 0, 64)], [(0, 64, 64)])),
            ([65], 64, spans([(0, 0, 64)], [(0, 64, 1)])),
            ([20, 50, 7], 64, spans([(0, 0, 20), (1, 0, 32)], [(1, 32, 18), (2, 0, 7)])),
            (
                [100, 3, 0, 33, 64],
                64,
                spans(
                    [(0, 0, 64)],
                    [(0, 64, 36), (1, 0, 3)],
                    [(3, 0, 33), (4, 0, 16)],
                    [(4, 16, 48)],
                ),
            ),
            ([17] * 4, 32, spans(*([(i, 0, 17)] for i in range(4)))),
        ],
    )
    def test_worked_examples(
        self, lengths: list[int], rows: int, expected: tuple[tuple[Span, ...], ...]
    ) -> None:
        """AT-2.3: pages of 16."""
        assert plan_chunks(lengths, rows, 16) == expected

    @given(
        lengths=st.lists(st.integers(0, 90), max_size=9),
        page=st.sampled_from([1, 4, 16]),
        pages=st.integers(1, 5),
    )
    def test_every_plan(self, lengths: list[int], page: int, pages: int) -> None:
        """AT-2.3"""
        rows = page * pages
        chunks = plan_chunks(lengths, rows, page)
        covered = dict.fromkeys(range(len(lengths)), 0)
        for chunk in chunks:
            assert 0 < sum(stop - start for _, start, stop in chunk) <= rows
            first = chunk[0].sequence
            assert [span.sequence for span in chunk] == list(range(first, first + len(chunk)))
            for i, (sequence, start, stop) in enumerate(chunk):
                assert start < stop
                assert start % page == 0
                assert start == 0 or i == 0
                assert start == covered[sequence]
                covered[sequence] = stop
        assert list(covered.values()) == lengths

    @given(lengths=st.lists(st.integers(0, 32), max_size=9))
    def test_sequences_that_may_not_be_cut(self, lengths: list[int]) -> None:
        chunks = plan_chunks(lengths, 32, 8, cut=False)
        assert all(sum(stop for _, _, stop in chunk) <= 32 for chunk in chunks)
        found = [span for chunk in chunks for span in chunk]
        assert found == [Span(i, 0, n) for i, n in enumerate(lengths) if n]

    @pytest.mark.parametrize("rows", [0, 8, 15, 17, 40])
    def test_rows_that_are_no_pages(self, rows: int) -> None:
        """AT-2.8"""
        with pytest.raises(ValueError, match="pages of 16"):
            plan_chunks([1], rows, 16)

    @pytest.mark.parametrize("page", [0, -4])
    def test_pages_of_no_token(self, page: int) -> None:
        """AT-2.8"""
        with pytest.raises(ConfigError, match=f"page_tokens={page}"):
            plan_chunks([1], 32, page)

    def test_one_too_long_that_may_not_be_cut(self) -> None:
        with pytest.raises(ValueError, match="33 rows, a workspace of 32"):
            plan_chunks([3, 33], 32, 16, cut=False)


def batch_of(lengths: Sequence[tuple[int, int]], page: int) -> PagedBatch:
    """As much of a batch as a plan looks at."""
    nothing = torch.empty(0, dtype=torch.int32)
    queries, keys = (tuple(each[i] for each in lengths) for i in (0, 1))
    return PagedBatch(queries, keys, nothing, nothing, nothing, page)


class TestTiles:
    @given(
        lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), max_size=6),
        pages=st.integers(1, 4),
        tile=st.sampled_from([2, 5, 16, None]),
    )
    def test_every_query_meets_every_key_it_sees_once_and_in_order(
        self, lengths: list[tuple[int, int]], pages: int, tile: int | None
    ) -> None:
        lengths = [(q, q + c) for q, c in lengths]
        plan = PrefillPlan.of(batch_of(lengths, 8), 8 * pages, tile=tile)
        starts = [sum(q for q, _ in lengths[:b]) for b in range(len(lengths))]
        met: dict[int, list[int]] = {s + i: [] for s, (q, _) in zip(starts, lengths, strict=True)
                                     for i in range(q)}  # fmt: skip
        ended: set[int] = set()
        kept: dict[int, int] = {}  # a place among kept results -> the query it is of
        for chunk in plan.chunks:
            offsets = [0, *itertools.accumulate(stop - start for _, start, stop in chunk.spans)]
            places = {s.sequence: (row, s) for s, row in zip(chunk.spans, offsets, strict=False)}
            read, written = {}, {}
            for t in chunk.tiles:
                assert 0 < t.queries <= plan.tile
                b = max(b for b, s in enumerate(starts) if s <= t.token and lengths[b][0])
                row, span = places[b]
                assert (t.key, t.keys, t.key_position) == (row, span.stop - span.start, span.start)
                q, kv = lengths[b]
                assert t.position == kv - q + t.token - starts[b]
                for i in range(t.queries):
                    token = t.token + i
                    assert token not in ended
                    assert bool(t.state & GOES_ON) == bool(met[token])
                    last = min(span.stop, t.position + i + 1)
                    met[token] += range(span.start, last)
                    if t.state & GOES_ON:
                        read[t.carry + i] = token
                    if t.state & ENDS:
                        ended.add(token)
                    else:
                        assert t.carry + i < plan.carried
                        written[t.carry + i] = token
            for place, token in read.items():
                assert kept[place] == token
                # Tiles of a chunk run at once: nobody else may write there.
                assert written.get(place, token) == token
            kept |= written
        assert ended == set(met)
        for b, (q, kv) in enumerate(lengths):
            for i in range(q):
                assert met[starts[b] + i] == list(range(kv - q + i + 1))

    def test_what_is_kept_is_of_two_sequences_at_most(self) -> None:
        lengths = [(20, 40), (3, 30), (9, 60), (11, 50), (2, 4)]
        plan = PrefillPlan.of(batch_of(lengths, 8), 32)
        cut = {c.spans[0].sequence for c in plan.chunks if c.spans[0].start}
        assert cut == {0, 1, 2, 3}
        assert plan.carried == 20 + 11
        assert PrefillPlan.of(batch_of(lengths, 8), 64, cut=False).carried == 0

    def test_tiles_with_most_keys_come_first(self) -> None:
        plan = PrefillPlan.of(batch_of([(40, 40), (1, 60)], 8), 128, tile=16)
        (chunk,) = plan.chunks
        assert [(t.token, t.queries) for t in chunk.tiles] == [(40, 1), (32, 8), (16, 16), (0, 16)]

    def test_made_once_a_batch_and_forgotten_with_it(self) -> None:
        batch = batch_of([(2, 5)], 4)
        before = len(_PLANS)
        plan = plan_of(batch, 8)
        assert plan_of(batch, 8) is plan
        assert plan_of(batch, 4) is not plan
        assert len(_PLANS) == before + 1
        del batch
        assert len(_PLANS) == before


def check(case: MlaCase, out: torch.Tensor, lse: torch.Tensor, atol: float = ATOL) -> None:
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), atol=atol, rtol=0)
    torch.testing.assert_close(lse.cpu().double(), expected_lse.cpu(), atol=atol, rtol=0)


def within_two_units(chunked: torch.Tensor, whole: torch.Tensor) -> None:
    """In the last place of the largest value, in bfloat16."""
    unit = 2.0 ** (whole.abs().max().float().log2().floor() - 7)
    assert (chunked.float() - whole.float()).abs().max() <= 2 * unit


class TestChunks:
    @backends
    def test_edges_in_one_batch(self, kernel: Callable[..., Any], device: str) -> None:
        """AT-2.1, 2.5, 2.6: sequences of one to five chunks, in one call."""
        case = MlaCase(GRID if kernel is materialised or GPU else FEW, device=device)
        out, lse = case.run("materialised", max_rows=W, kernel=kernel)
        assert lse is not None
        check(case, out, lse)
        assert max(case.projected) <= W

    @pytest.mark.parametrize("lengths", GRID)
    def test_each_edge_alone(self, lengths: tuple[int, int]) -> None:
        """AT-2.1: chunked, and all at once."""
        case = MlaCase([lengths])
        chunked, lse = case.run("materialised", max_rows=W)
        assert lse is not None
        check(case, chunked, lse)
        whole, whole_lse = case.run("materialised", max_rows=64)
        assert case.projected[-1] == lengths[1]
        torch.testing.assert_close(chunked, whole, atol=2e-6, rtol=0)
        torch.testing.assert_close(lse, whole_lse, atol=2e-6, rtol=0)

    @backends
    def test_bfloat16_keeps_what_earlier_chunks_found_in_float32(
        self, kernel: Callable[..., Any], device: str
    ) -> None:
        """AT-2.1: chunked and at once are within 2 units in the last place of the output's scale,
        over many chunks."""
        case = MlaCase([(9, 89), (2, 30)], dtype=torch.bfloat16, device=device)
        chunked, _ = case.run("materialised", max_rows=W, kernel=kernel)
        assert len(case.projected) == 16
        whole, _ = case.run("materialised", max_rows=256, kernel=kernel)
        within_two_units(chunked, whole)

    @pytest.mark.parametrize("lengths", GRID)
    def test_each_edge_alone_in_bfloat16(self, lengths: tuple[int, int]) -> None:
        """AT-2.1"""
        case = MlaCase([lengths], dtype=torch.bfloat16)
        chunked, _ = case.run("materialised", max_rows=W)
        assert len(case.projected) == -(-lengths[1] // W)
        whole, _ = case.run("materialised", max_rows=64)
        within_two_units(chunked, whole)
        torch.testing.assert_close(whole.double(), case.expected()[0], atol=8e-3, rtol=8e-3)

    @backends
    def test_mixed_rows_equal_each_alone(self, kernel: Callable[..., Any], device: str) -> None:
        """AT-2.5: no context, context, decode and padding rows together."""
        lengths = [(9, 9), (5, 22), (1, 25), (1, 0), (1, 1)]
        case = MlaCase(lengths, device=device)
        out, lse = case.run("materialised", max_rows=W, kernel=kernel)
        assert lse is not None
        at = 0
        for b, (q, kv) in enumerate(lengths):
            alone = MlaCase([(q, kv)], device=device)
            alone.rows, alone.weight = case.rows, case.weight
            alone.q_nope, alone.q_rope = case.q_nope[at : at + q], case.q_rope[at : at + q]
            alone.batch = PagedBatch(
                (q,),
                (kv,),
                case.batch.block_table[b : b + 1],
                torch.tensor([0, q], dtype=torch.int32, device=device),
                torch.tensor([kv], dtype=torch.int32, device=device),
                PAGE,
            )
            want, want_lse = alone.run("materialised", max_rows=W, kernel=kernel)
            torch.testing.assert_close(out[at : at + q], want, atol=ATOL, rtol=0)
            torch.testing.assert_close(lse[at : at + q], want_lse, atol=ATOL, rtol=0)
            at += q
        assert out[15].eq(0).all() and lse[15].eq(-torch.inf).all()  # padding

    @backends
    def test_more_requests_than_the_workspace_has_pages(
        self, kernel: Callable[..., Any], device: str
    ) -> None:
        """AT-2.10"""
        case = MlaCase([(1, 18), (3, 20), (2, 19), (5, 22)], page=16, device=device)
        out, lse = case.run("materialised", max_rows=32, kernel=kernel)
        assert lse is not None
        check(case, out, lse)

    @backends
    @pytest.mark.parametrize("rows", [128, 320])
    def test_keys_before_a_tile_and_among_it(
        self, kernel: Callable[..., Any], device: str, rows: int
    ) -> None:
        """Contexts on both sides of what a kernel takes at a time, 64: whole blocks of keys that
        every query sees, and blocks that some see in part; also spans that begin in mid-sequence.
        """
        dims = HeadDims(heads=1, latent=8, rope=4, nope=6, value=5)
        lengths = [(3, 66), (3, 67), (3, 68), (70, 134), (2, 193), (20, 212)]
        case = MlaCase(lengths, dims=dims, page=16, device=device)
        out, lse = case.run("materialised", max_rows=rows, kernel=kernel)
        assert lse is not None
        check(case, out, lse)

    @backends
    @pytest.mark.parametrize("order", ["reversed", "shared"])
    def test_page_tables(self, kernel: Callable[..., Any], device: str, order: str) -> None:
        """AT-2.7: pages in any order, or in two tables; rows behind the last are NaN."""
        case = MlaCase([(3, 22), (5, 31)], device=device)
        if order == "reversed":
            case = MlaCase([(3, 22), (5, 31)])
            table = case.batch.block_table
            rows = case.rows.view(-1, PAGE, case.rows.shape[1])
            wanted = torch.arange(14 - 1, -1, -1, dtype=torch.int32)
            held = rows[torch.cat((table[0, :6], table[1, :8])).long()].clone()
            rows.fill_(torch.nan)
            rows[wanted.long()] = held
            table[0, :6], table[1, :8] = wanted[:6], wanted[6:]
            case._move(device)
        else:
            case.batch.block_table[1, :4] = case.batch.block_table[0, :4]
            case.stored[1][: 4 * PAGE] = case.stored[0][: 4 * PAGE]
        case.batch.block_table[case.batch.block_table < 0] = 1 << 30
        out, lse = case.run("materialised", max_rows=W, kernel=kernel)
        assert lse is not None
        check(case, out, lse)
        assert sum(case.projected) == 22 + 31  # and no row more

    @backends
    @pytest.mark.parametrize("rows", [4, 12])
    def test_no_row_beyond_the_workspace_is_touched(
        self, kernel: Callable[..., Any], device: str, rows: int
    ) -> None:
        """AT-2.2: it has exactly so many rows, with guards around them, and no others are used."""
        case = MlaCase([(9, 17), (2, 14), (1, 5)], device=device)
        around = case.workspace(rows + 16)
        around.latent.fill_(7.0)
        around.projected.fill_(7.0)
        inside = slice(8, 8 + rows)
        exact = Workspace(around.latent[inside], around.projected[inside])

        def project(latent: torch.Tensor, out: torch.Tensor) -> None:
            assert latent.data_ptr() == exact.latent.data_ptr()
            assert out.data_ptr() == exact.projected.data_ptr()
            case.project(latent, out)

        out, lse = kernel(
            *(case.query, case.rows, case.batch, project),
            dims=DIMS,
            scale=case.scale,
            workspace=exact,
        )
        check(case, out, lse)
        assert max(case.projected) == rows
        for guarded in (around.latent, around.projected):
            assert guarded[:8].eq(7).all() and guarded[-8:].eq(7).all()

    @backends
    def test_a_sequence_without_new_tokens_costs_nothing(
        self, kernel: Callable[..., Any], device: str
    ) -> None:
        case = MlaCase([(0, 30), (2, 5)], device=device)
        out, lse = case.run("materialised", max_rows=W, kernel=kernel)
        assert lse is not None
        check(case, out, lse)
        assert sum(case.projected) == 5

    @backends
    def test_nothing_at_all(self, kernel: Callable[..., Any], device: str) -> None:
        case = MlaCase([], device=device)
        out, lse = case.run("materialised", kernel=kernel)
        assert out.shape == (0, DIMS.heads, DIMS.value) and lse is not None and lse.numel() == 0

    @backends
    def test_queries_of_other_sizes_are_refused(
        self, kernel: Callable[..., Any], device: str
    ) -> None:
        case = MlaCase([(1, 3)], device=device)
        case.q_rope = case.q_rope[..., :2]
        with pytest.raises(ValueError, match="query"):
            case.run("materialised", kernel=kernel)

    @backends
    @pytest.mark.parametrize("what", ["queries", "row", "latents", "projected"])
    def test_what_would_be_read_or_left_unwritten_past_an_end_is_refused(
        self, kernel: Callable[..., Any], device: str, what: str
    ) -> None:
        case = MlaCase([(2, 3), (1, 5)], device=device)
        query, rows, workspace = case.query, case.rows, case.workspace(W)
        if what == "queries":
            query = query[:2]
        elif what == "row":
            rows = rows[:, 1:]
        elif what == "latents":
            workspace = replace(workspace, latent=workspace.latent[:, 1:])
        else:
            workspace = replace(workspace, projected=workspace.projected[:, 1:])
        options: dict[str, Any] = {"dims": DIMS, "scale": case.scale, "workspace": workspace}
        with pytest.raises(ValueError, match="queries" if what == "queries" else "workspace"):
            kernel(query, rows, case.batch, case.project, **options)

    def test_by_torchs_own_attention_only_what_fits_whole(self) -> None:
        case = MlaCase([(2, 8), (3, 7), (1, 3)])
        options: dict[str, Any] = {"dims": DIMS, "scale": case.scale}
        args = (case.query, case.rows, case.batch, case.project)
        out = materialised_sdpa(*args, **options, workspace=case.workspace(W))
        torch.testing.assert_close(out.double(), case.expected()[0], atol=2e-6, rtol=0)
        assert case.projected == [8, 7, 3]
        with pytest.raises(ValueError, match="8 rows, a workspace of 4"):
            materialised_sdpa(*args, **options, workspace=case.workspace(4))


class TestBytes:
    dims = HeadDims(heads=16, latent=64, rope=8, nope=8, value=8)

    @pytest.mark.parametrize("kernel", [materialised, materialised_sdpa])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_scratch_and_workspace_stay_within_their_bytes(
        self, kernel: Callable[..., Any], dtype: torch.dtype
    ) -> None:
        """Whatever the context; results, also those kept from chunk to chunk, do not count."""
        budget = 3 << 20
        rows = workspace_rows(budget, self.dims, dtype.itemsize, 16)
        assert rows % 16 == 0
        length = 3 * rows if kernel is materialised else rows
        case = MlaCase([(140, length), (3, 40)], dims=self.dims, dtype=dtype, page=16)
        args = (case.query, case.rows, case.batch)
        weight = case.weight.flatten(0, 1).t()
        with Peak("cpu") as held:
            space = Workspace.allocate(rows, self.dims, dtype, "cpu")
            found = kernel(
                *(*args, lambda latent, out: torch.mm(latent, weight, out=out.flatten(1))),
                dims=self.dims,
                scale=case.scale,
                workspace=space,
            )
        results = found if isinstance(found, tuple) else (found,)
        kept = 140 * 16 * 9 * 4 if kernel is materialised else 0
        peak = held.bytes - sum(t.nbytes for t in results) - kept
        # torch's own attention takes less in float32 than is set aside for it.
        assert budget / 4 < peak <= budget

    def test_kernels_without_scratch_get_seven_eighths(self) -> None:
        released = HeadDims(heads=128, latent=512, rope=64, nope=128, value=128)
        assert row_bytes(released, 2) == 66_688
        rows = workspace_rows("512MiB", released, 2, 64, fused=True)
        assert rows == 7040
        assert rows * 66_688 <= (512 << 20) * 7 / 8 < (rows + 64) * 66_688
        assert workspace_rows("512MiB", released, 2, 64) < rows
        with pytest.raises(ConfigError) as caught:
            workspace_rows(1, released, 2, 64, fused=True)
        least = int(str(caught.value).rsplit(" ", 1)[1])
        assert workspace_rows(least, released, 2, 64, fused=True) == 64

    def test_more_rows_than_are_of_use_are_not_taken(self) -> None:
        assert workspace_rows("1GiB", DIMS, 4, 64, fused=True) == 65536
        assert workspace_rows("1GiB", DIMS, 4, 1000, fused=True) == 65000

    def test_what_is_left(self) -> None:
        space = Workspace.allocate(8, DIMS, torch.float32, "cpu")
        assert space.nbytes == 8 * row_bytes(DIMS, 4) == 8 * 4 * (20 + 3 * 14)
        assert space.beside(5000) == 5000 - space.nbytes
        assert space.beside("1KiB") == 0


class TestTable:
    """AT-4.3"""

    case = Case("mla_materialised", "dense", (192, 128), torch.bfloat16, "cuda")

    @pytest.mark.skipif(not has_triton(), reason="needs triton")
    @pytest.mark.parametrize("record", ["dense", "mla_fp8"])
    def test_kernels_come_first(self, record: str) -> None:
        case = replace(self.case, record=record)
        hopper = GPU and torch.cuda.get_device_capability() == (9, 0)
        assert select(case).backend == ("gluon" if hopper else "triton")
        if not hopper:
            with pytest.raises(ConfigError, match="H100 or H200"):
                select(case, backend="gluon")

    @pytest.mark.parametrize(
        "change",
        [{"dims": (256, 128)}, {"dims": (192, 192)}, {"dtype": torch.float32}, {"device": "cpu"}],
    )
    def test_never_the_closest_kernel(self, change: dict[str, Any]) -> None:
        case = replace(self.case, **change)
        assert select(case).backend == "torch"
        with pytest.raises(ConfigError, match="does not list"):
            select(case, backend="triton")


def meets(backend: Callable[..., Any]) -> Callable[..., None]:
    if backend is materialised:
        return prefill._meet
    from kvtier.kernels import triton_prefill

    return triton_prefill.meet


class TestFolding:
    """AT-2.4, of what a chunk does with results of earlier ones."""

    @backends
    @pytest.mark.parametrize("ends", [True, False])
    def test_what_came_before(self, kernel: Callable[..., Any], device: str, ends: bool) -> None:
        """Two rows each: nothing before (whatever the output holds), far more, far less, as much.
        Queries in front of the chunk's keys keep what they had, bit for bit."""
        torch.manual_seed(3)
        lses = [-torch.inf, torch.inf, 1e4, -1e4, 0.5, 88.0, -torch.inf, 1e4]
        n, first_key = len(lses), 4
        # Positions 2 and 3 lie in front of the keys.
        positions = range(2, 2 + n)
        dims = HeadDims(heads=1, latent=4, rope=2, nope=3, value=5)
        query = torch.randn(n, 1, 5)
        space = Workspace(torch.randn(8, 6), torch.randn(8, 1, 8))
        carry, carry_lse = torch.randn(n, 1, 5), torch.tensor(lses)[:, None]
        carry[carry_lse.isinf()] = torch.nan
        state = GOES_ON | (ENDS if ends else 0)
        tile = Tile(0, n, positions[0], 0, 8, first_key, 0, state)
        chunk = Chunk((Span(0, first_key, first_key + 8),), (tile,), 0, 0)
        plan = PrefillPlan((chunk,), 8, 16, n, False)
        moved = Workspace(space.latent.to(device), space.projected.to(device))
        blank = torch.full((n, 1, 5), torch.nan)
        tensors = (blank, blank[..., 0], carry, carry_lse)
        results = Results(*(t.clone().to(device) for t in tensors))
        meets(kernel)(query.to(device), plan, chunk, moved, dims, 0.5, results)
        found = (results.out, results.lse) if ends else (results.carry, results.carry_lse)
        out, lse = (t.cpu() for t in found)
        for i, position in enumerate(positions):
            seen = max(0, position + 1 - first_key)
            keys = torch.cat((space.projected[:seen, 0, :3], space.latent[:seen, 4:]), -1).double()
            score = 0.5 * keys @ query[i, 0].double()
            mine, had = score.logsumexp(0), carry_lse[i, 0].double()
            had = had if had < torch.inf else torch.tensor(-torch.inf).double()
            total = torch.logaddexp(mine, had)
            value = (score - mine).exp() @ space.projected[:seen, 0, 3:].double()
            parts = [p * (w - total).exp() for p, w in ((value, mine), (carry[i, 0].double(), had))
                     if w > -torch.inf]  # fmt: skip
            want = sum(parts, torch.zeros(5, dtype=torch.float64))
            torch.testing.assert_close(out[i, 0].double(), want, atol=ATOL, rtol=1e-6)
            torch.testing.assert_close(lse[i, 0].double(), total, atol=ATOL, rtol=1e-6)
            if not seen:
                assert parts == [] and out[i].eq(0).all()

    @backends
    def test_bit_for_bit(self, kernel: Callable[..., Any], device: str) -> None:
        """A tile of which half lies in front of the keys, with results of all magnitudes."""
        torch.manual_seed(4)
        dims = HeadDims(heads=2, latent=4, rope=2, nope=3, value=5)
        space = Workspace(torch.randn(4, 6).to(device), torch.randn(4, 2, 8).to(device))
        carry, carry_lse = torch.randn(8, 2, 5) * 1e3, torch.randn(8, 2) * 50
        tile = Tile(0, 8, 0, 0, 4, 4, 0, GOES_ON | ENDS)
        chunk = Chunk((Span(0, 4, 8),), (tile,), 0, 0)
        plan = PrefillPlan((chunk,), 4, 16, 8, False)
        blank = torch.full((8, 2, 5), torch.nan, device=device)
        results = Results(blank, blank[..., 0].clone(), carry.to(device), carry_lse.to(device))
        query = torch.randn(8, 2, 5).to(device)
        meets(kernel)(query, plan, chunk, space, dims, 0.5, results)
        assert torch.equal(results.out[:4].cpu(), carry[:4])
        assert torch.equal(results.lse[:4].cpu(), carry_lse[:4])
        assert results.out.isfinite().all() and not torch.equal(results.out[4:].cpu(), carry[4:])


RELEASED = HeadDims(heads=16, latent=512, rope=64, nope=128, value=128)


def whole_by_torch(case: MlaCase, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of some heads in float32, every sequence at once."""
    d, weight = case.dims, case.weight[heads].float()
    outs, lses, at = [], [], 0
    for (q_len, kv_len), rows in zip(case.lengths, case.stored, strict=True):
        rows = rows.float()
        # What the workspace holds is rounded to the rows' type.
        up = torch.einsum("ml,hpl->hmp", rows[:, : d.latent], weight).to(case.weight.dtype).float()
        query = case.query[at : at + q_len, heads].float().transpose(0, 1)
        score = query[..., : d.nope] @ up[..., : d.nope].mT
        score += query[..., d.nope :] @ rows[:, d.latent :].T
        score *= case.scale
        ahead = torch.ones(q_len, kv_len, dtype=torch.bool, device=rows.device)
        score.masked_fill_(ahead.triu(kv_len - q_len + 1), -torch.inf)
        lses.append(score.logsumexp(-1).T)
        outs.append((score.softmax(-1) @ up[..., d.nope :]).transpose(0, 1))
        at += q_len
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", [by_triton, by_gluon])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1024, 8192])
def test_one_long_context_and_many_short_ones(
    kernel: Callable[..., Any], dtype: torch.dtype, rows: int
) -> None:
    lengths = [(300, 20_300), *((7 * i + 1, 90 * i + 1) for i in range(1, 31)), (1, 5000)]
    case = MlaCase(lengths, dims=RELEASED, dtype=dtype, page=64, device="cuda")
    out, lse = case.run("materialised", max_rows=rows, kernel=kernel)
    assert max(case.projected) <= rows and lse is not None
    # Few heads at a time: their scores alone would take 2 GB.
    parts = [whole_by_torch(case, slice(at, at + 4)) for at in range(0, RELEASED.heads, 4)]
    expected, expected_lse = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    scale = expected.abs().amax(-1)
    error = (out.float() - expected).abs().amax(-1) / scale
    assert error.max().item() <= (1.5e-2 if dtype == torch.bfloat16 else 2e-3)
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", [by_triton, by_gluon])
def test_a_workspace_of_more_values_than_32_bits_count(kernel: Callable[..., Any]) -> None:
    """66,000 rows of 128 heads at once: the last keys lie past 2^31 values."""
    dims = HeadDims(heads=128, latent=512, rope=64, nope=128, value=128)
    case = MlaCase([(70, 66_000)], dims=dims, dtype=torch.bfloat16, page=64, device="cuda")
    case.rows[case.rows.isnan()] = 0
    out, lse = case.run("materialised", max_rows=66_048, kernel=kernel)
    assert case.projected == [66_000] and lse is not None
    last = slice(126, 128)
    expected, expected_lse = whole_by_torch(case, last)
    error = (out[:, last].float() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert error.max().item() <= 1.5e-2
    torch.testing.assert_close(lse[:, last], expected_lse, atol=2e-3, rtol=0)
