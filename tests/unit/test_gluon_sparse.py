"""Sparse attention in gluon: on a GPU where there is one, else by its source's twin on the CPU.
The oracle is the reference in float64; slots that no list names hold NaN."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvtier.kernels import (
    RECORDS,
    gluon_sparse,
    gluon_sparse_attend,
    gluon_sparse_keys,
    read_records,
    sparse_attend,
    write_records,
)
from kvtier.kernels.triton_sparse import MOST_SPLITS, splits_of
from tests.unit import gluon_twin

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if GPU else "cpu"
RECORD = RECORDS["v4_fp8"]
INF = float("inf")
SCALE = 512**-0.5


@pytest.fixture(autouse=True)
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if not GPU:
        launched = gluon_twin.Launched(gluon_sparse_attend, "attend")
        monkeypatch.setattr(gluon_sparse, "attend", launched)
        monkeypatch.setattr(gluon_sparse, "_processors", lambda device: 132)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says into how many parts keys are cut."""
    return lambda count: monkeypatch.setattr(gluon_sparse, "splits_of", lambda *_: count)


class Case:
    """Queries with lists into two pools of NaN, in which only listed slots are anything else."""

    def __init__(
        self,
        n: int,
        heads: int,
        window: int,
        extra: int,
        *,
        slots: tuple[int, int] = (128, 64),
        pages: tuple[int, int] = (3, 4),
        gap: int = 0,
        holes: bool = False,
        seed: int = 0,
        kind: torch.dtype = torch.int32,
    ) -> None:
        torch.manual_seed(seed)
        self.query = torch.randn(n, heads, 512).to(torch.bfloat16)
        self.sink = torch.randn(heads)
        self.pools, self.lists = [], []
        for width, per_page, count in zip((window, extra), slots, pages, strict=True):
            there = per_page * count
            some = torch.randperm(there)[: -(-there * 3 // 4)]
            size = RECORD.page_bytes(per_page)
            memory = torch.full((count, size + gap), 0xFF, dtype=torch.uint8)
            pool = memory[:, gap // 2 :][:, :size] if gap else memory
            write_records(pool, some, 2 * torch.randn(len(some), 512), RECORD)
            chosen = some[torch.randint(0, len(some), (n, width))]
            if holes:
                chosen[torch.rand(n, width) < 0.3] = -1
                chosen[torch.rand(n, width) < 0.1] = there + 3  # past the pool: none
            self.pools.append(pool)
            self.lists.append(chosen.to(kind))

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        names = ("query", "sink", "window", "extra", "window_slots", "extra_slots")
        values = (self.query, self.sink, *self.pools, *self.lists)
        return {name: _moved(v, device) for name, v in zip(names, values, strict=True)}

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        arguments = self.arguments(DEVICE) | options
        out, lse = gluon_sparse.sparse_attend(**arguments, scale=SCALE, record=RECORD)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        return out.cpu(), lse.cpu()

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        arguments = self.arguments() | options
        for pool, slots in (("window", "window_slots"), ("extra", "extra_slots")):
            there = len(arguments[pool]) * RECORD.slots_of(arguments[pool].shape[1])
            listed = arguments[slots]
            arguments[slots] = torch.where(listed < there, listed, -1)
        arguments["query"] = arguments["query"].double()
        return sparse_attend(**arguments, scale=SCALE, record=RECORD)

    def check(self, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
        out, lse = (x.double() for x in got)
        size = want[0].abs().amax(-1, keepdim=True).clamp(min=1e-3)
        assert ((out - want[0]).abs() / size).max() < 8e-3
        finite = want[1].isfinite()
        assert torch.equal(lse.isfinite(), finite)
        assert lse[~finite].eq(-INF).all() and out[~finite].eq(0).all()
        off = (lse - want[1]).abs() / want[1].abs().clamp(min=1)
        assert not finite.any() or off[finite].max() < 2e-5


def _moved(x: Tensor, device: str) -> Tensor:
    if device == "cpu" or x.is_contiguous():
        return x.to(device)
    held = x.untyped_storage().nbytes() // x.element_size()
    whole = x.as_strided((held,), (1,), 0).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


SHAPES = [
    (1, 64, 128, 130),
    (2, 3, 44, 40),
    (1, 64, 64, 0),
    (1, 100, 128, 70),
    (1, 16, 0, 65),
]


class TestAgainstTheReference:
    @pytest.mark.parametrize(("n", "heads", "window", "extra"), SHAPES)
    def test_whole_lists(
        self, n: int, heads: int, window: int, extra: int, parts: Callable[[int], None]
    ) -> None:
        parts(1)
        case = Case(n, heads, window, extra)
        case.check(case.run(), case.expected())

    @pytest.mark.parametrize("count", [2, 3, 7])
    def test_keys_shared_out(self, count: int, parts: Callable[[int], None]) -> None:
        parts(count)
        case = Case(2, 5, 128, 260, holes=True)
        case.check(case.run(), case.expected())

    @pytest.mark.parametrize("count", [1, 3])
    def test_holes_and_slots_past_the_pool(self, count: int, parts: Callable[[int], None]) -> None:
        parts(count)
        case = Case(3, 4, 128, 200, holes=True, kind=torch.int64)
        case.lists[0][1] = -1
        case.lists[1][1] = -1  # a query without keys
        case.lists[0][2] = -1
        case.lists[1][0, 64:] = -1
        case.check(case.run(), case.expected())

    @pytest.mark.parametrize(
        "slots", [(128, 2), (256, 64), (1, 4)], ids=["C128", "SWA of 256", "tiny"]
    )
    def test_pages_of_any_power_of_two(
        self, slots: tuple[int, int], parts: Callable[[int], None]
    ) -> None:
        parts(1)
        case = Case(1, 4, 40, 70, slots=slots, pages=(9, 21))
        case.check(case.run(), case.expected())

    def test_pages_apart_from_each_other(self, parts: Callable[[int], None]) -> None:
        """Layers may lie beside each other in one block."""
        parts(1)
        case = Case(1, 4, 40, 70, gap=96)
        assert not case.pools[0].is_contiguous()
        case.check(case.run(), case.expected())

    def test_a_query_that_is_a_view(self, parts: Callable[[int], None]) -> None:
        parts(1)
        case = Case(2, 4, 40, 70)
        wide = torch.full((2, 9, 600), torch.nan, dtype=torch.bfloat16)
        wide[:, 1::2, :512] = case.query
        case.query = wide[:, 1::2, :512]
        case.check(case.run(), case.expected())

    @pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's, of a sink of 200
    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("sink", [-INF, -200.0, 0.0, 200.0, INF])
    def test_sinks(self, sink: float, count: int, parts: Callable[[int], None]) -> None:
        parts(count)
        case = Case(1, 2, 70, 0)
        case.sink = torch.full((2,), sink)
        out, lse = case.run()
        case.check((out, lse), case.expected())
        assert out.isfinite().all()

    def test_scores_that_grow_and_fall(self, parts: Callable[[int], None]) -> None:
        """The largest score of a tile is often hundreds below that of the one before."""
        parts(1)
        case = Case(1, 4, 128, 192)
        case.query *= 400
        case.check(case.run(), case.expected())

    def test_a_window_alone(self, parts: Callable[[int], None]) -> None:
        parts(1)
        case = Case(2, 3, 100, 10)
        got = case.run(extra=None, extra_slots=None)
        case.lists[1][:] = -1
        case.check(got, case.expected())

    def test_nothing_at_all(self) -> None:
        case = Case(1, 3, 10, 10)
        for n, heads in ((0, 3), (1, 0)):
            out, lse = gluon_sparse.sparse_attend(
                **case.arguments(DEVICE)
                | {
                    "query": case.query[:n, :heads].to(DEVICE),
                    "sink": case.sink[:heads].to(DEVICE),
                    "window_slots": case.lists[0][:n].to(DEVICE),
                    "extra_slots": case.lists[1][:n].to(DEVICE),
                },
                scale=SCALE,
                record=RECORD,
            )
            assert out.shape == (n, heads, 512) and lse.shape == (n, heads)


class TestWhatChangesNothing:
    @pytest.mark.parametrize("count", [1, 4])
    def test_the_width_of_lists(self, count: int, parts: Callable[[int], None]) -> None:
        parts(count)
        case = Case(1, 3, 128, 100)
        out, lse = case.run()
        listed = torch.nn.functional.pad(case.lists[1], (0, 700), value=-1)
        wide = case.run(extra_slots=listed.to(DEVICE))
        assert torch.equal(wide[0], out) and torch.equal(wide[1], lse)

    def test_the_other_queries(self, parts: Callable[[int], None]) -> None:
        parts(2)
        case = Case(3, 3, 128, 100)
        out, lse = case.run()
        for name in ("window_slots", "extra_slots"):
            lists = case.arguments()[name].clone()
            lists[1:] = -1
            alone = case.run(**{name: lists.to(DEVICE)})
            assert not torch.equal(alone[0][1:], out[1:])
            assert torch.equal(alone[0][0], out[0]) and torch.equal(alone[1][0], lse[0])


def test_more_queries_than_a_launch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(5, 2, 40, 70, holes=True)
    monkeypatch.setattr(gluon_sparse, "GRID", 2)
    case.check(case.run(), case.expected())


def test_the_workspace_bounds_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case, seen = Case(1, 2, 64, 64), []
    joined = gluon_sparse.join
    monkeypatch.setattr(gluon_sparse, "join", lambda *a: (seen.append(a[2]), joined(*a)))
    a_split = 2 * 513 * 4
    for workspace in (1, a_split, 2 * a_split, 5 * a_split + 1, "512MiB"):
        case.check(case.run(workspace_bytes=workspace), case.expected())
    assert seen == [2, 5, MOST_SPLITS]  # one part alone is written as it is


def test_every_code_at_every_scale() -> None:
    """Unpacked values are exactly the reference's, up to a scale of 2^7; that is the largest."""
    names = gluon_twin.names_of(gluon_sparse_keys)
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[:448]
    codes[codes & 0x7F == 0x7F] = 0  # NaN, which no writer leaves
    records = codes.repeat(256, 1)
    pool = torch.zeros(4, RECORD.page_bytes(64), dtype=torch.uint8)
    for exponent in range(256):
        page, slot = divmod(exponent, 64)
        pool[page, slot * 576 : slot * 576 + 448] = records[exponent]
        pool[page, 64 * 576 + slot * 8 : 64 * 576 + slot * 8 + 7] = exponent
    expected = read_records(pool, torch.arange(256), RECORD)
    for tile in range(4):
        slots = gluon_twin.tensor(np.arange(64, dtype=np.int32) + 64 * tile)
        storage = gluon_twin._argument(pool.view(torch.int32))
        of = (storage, pool.shape[1] // 4, 6, 256)
        halves = []
        for half in (0, 1):
            *words, hidden = names["_fetch"](slots, np.int32(tile), np.int32(4), *of, *of, half)
            into = gluon_twin.Language.allocate_shared_memory(
                gluon_twin.TYPES[torch.int32], [64, 128], None
            )
            names["_unpack"](*words, into, half)
            halves.append(
                np.asarray(into._reinterpret(gluon_twin.BF16, [64, 256], None).load(None))
            )
            assert not np.asarray(hidden).any()
        for key, values in enumerate(np.concatenate(halves, axis=1)):
            exponent = 64 * tile + key
            if exponent > 134:
                want = expected[134]
            elif exponent < 10:  # below what bfloat16 holds
                continue
            else:
                want = expected[exponent]
            assert np.array_equal(values, want.numpy()), exponent


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_other_queries_are_refused(kind: torch.dtype) -> None:
    case = Case(1, 2, 8, 8)
    with pytest.raises(ValueError, match="queries in"):
        case.run(query=case.query.to(kind).to(DEVICE))
    with pytest.raises(ValueError, match="sink"):
        case.run(sink=torch.zeros(3, device=DEVICE))
    for name in ("extra", "extra_slots"):
        with pytest.raises(ValueError, match="together"):
            case.run(**{name: None})


def test_other_pages_are_refused() -> None:
    case = Case(1, 2, 8, 8, slots=(128, 3))
    with pytest.raises(ValueError, match="power of two"):
        case.run()
    case = Case(1, 2, 8, 8, gap=8)
    with pytest.raises(ValueError, match="16 bytes"):
        case.run()


class TestSplits:
    def test_few_units_fill_the_device_once(self) -> None:
        for processors in (1, 78, 132):
            for units in range(1, processors + 1):
                splits = splits_of(units, processors)
                assert 1 <= splits <= MOST_SPLITS
                assert units * splits <= processors
                assert splits == MOST_SPLITS or units * (splits + 1) > processors

    def test_many_units_are_cut_where_that_ends_sooner(self) -> None:
        """Two rounds of which the second is nearly empty, or one and a half."""
        assert splits_of(133, 132) > 1
        assert splits_of(256, 132) == splits_of(264, 132) == 1
        assert {splits_of(n, 132) for n in range(1000, 5000)} <= {1, 2, 3}
        assert splits_of(0, 132) >= 1


def test_it_compiles_as_it_was_meant_to() -> None:
    """Products of the tensor cores stay asynchronous, each group has the registers that it asks
    for, next to nothing is spilled, and two buffers of keys and the queries fit."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sm90_sparse"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    report = json.loads(done.stdout)
    for name in ("whole", "parts"):
        found = report[f"attend {name}"]
        # Scores before and in the loop; values of one group in it and after it, of the other in it,
        # 128 columns at a time.
        assert found["products"] == 2 * 32 + 3 * 2 * 4
        assert found["warnings"] == []
        assert found["spilled"] <= 96
        assert found["shared"] <= 227 * 1024
