"""Attention to latent rows in gluon: on a GPU where there is one, else by its source's twin on the
CPU.  The oracle is the reference in float64; slots that no list names hold NaN."""

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
    gluon_latent,
    gluon_latent_attend,
    gluon_latent_keys,
    mla,
    read_records,
    triton_mla_sparse,
    write_records,
)
from kvtier.kernels import mla_sparse as reference_lists
from kvtier.kernels.mla import PagedBatch
from tests.unit import gluon_twin

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if GPU else "cpu"
INF = float("inf")
SCALE = 0.1352
PACKED = RECORDS["mla_fp8"]
BOTH = pytest.mark.parametrize("record", ["mla_fp8", "dense"])


@pytest.fixture(autouse=True)
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if not GPU:
        for name in ("attend_lists", "attend_pages"):
            launched = gluon_twin.Launched(gluon_latent_attend, name)
            monkeypatch.setattr(gluon_latent, name, launched)
        monkeypatch.setattr(gluon_latent, "_processors", lambda device: 6)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says into how many parts lists are cut."""
    return lambda count: monkeypatch.setattr(gluon_latent, "splits_of", lambda *_: count)


def pool_of(record: str, pages: int, per_page: int, some: Tensor, gap: int = 0) -> Tensor:
    """NaN everywhere but in ``some`` slots; packed rows' scales are no powers of two."""
    if record == "dense":
        memory = torch.full((pages * per_page, 576 + gap), torch.nan, dtype=torch.bfloat16)
        pool = memory[:, gap // 2 :][:, :576] if gap else memory
        pool[some] = torch.randn(len(some), 576).to(torch.bfloat16)
        return pool
    size = PACKED.page_bytes(per_page)
    memory = torch.full((pages, size + gap), 0xFF, dtype=torch.uint8)
    pool = memory[:, gap // 2 :][:, :size] if gap else memory
    write_records(pool, some, torch.randn(len(some), 576), PACKED)
    for slot in some.tolist():
        at = slot % per_page * 656 + 512
        scales = pool[slot // per_page, at : at + 16].clone().view(torch.float32)
        scales *= 1 + torch.rand(4)
        pool[slot // per_page, at : at + 16] = scales.view(torch.uint8)
    return pool


class Case:
    """Queries with lists into a pool of NaN, in which only listed slots are anything else."""

    def __init__(
        self,
        record: str,
        n: int,
        heads: int,
        keys: int,
        *,
        per_page: int = 64,
        pages: int = 4,
        gap: int = 0,
        holes: bool = False,
        kind: torch.dtype = torch.int32,
    ) -> None:
        torch.manual_seed(0)
        self.record = RECORDS[record]
        self.there = per_page * pages
        self.query = torch.randn(n, heads, 576).to(torch.bfloat16)
        some = torch.randperm(self.there)[: -(-self.there * 3 // 4)]
        self.pool = pool_of(record, pages, per_page, some, gap)
        self.lists = some[torch.randint(0, len(some), (n, keys))].to(kind)
        if holes:
            self.lists[torch.rand(n, keys) < 0.3] = -1
            self.lists[torch.rand(n, keys) < 0.1] = self.there + 3  # past the pool: none

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        given = {"query": self.query, "rows": self.pool, "slots": self.lists} | options
        given = {k: _moved(v) if isinstance(v, Tensor) else v for k, v in given.items()}
        out, lse = gluon_latent.mla_sparse(**given, latent_dim=512, scale=SCALE, record=self.record)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        return out.cpu(), lse.cpu()

    def expected(self) -> tuple[Tensor, Tensor]:
        lists = torch.where(self.lists < self.there, self.lists, -1)
        return reference_lists(
            *(self.query.double(), as_rounded(self.pool), lists),
            latent_dim=512,
            scale=SCALE,
            record=RECORDS["dense"],
        )

    def check(self) -> None:
        close(self.run(), self.expected(), exact=self.pool.dtype == torch.bfloat16)


def as_rounded(pool: Tensor) -> Tensor:
    """Values of a pool as the kernel computes with them: plain rows in bfloat16."""
    if pool.dtype == torch.bfloat16:
        return pool
    slots = torch.arange(len(pool) * PACKED.slots_of(pool.shape[1]))
    return read_records(pool, slots, PACKED).to(torch.bfloat16)


def close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], *, exact: bool = False) -> None:
    """``exact``: keys are the oracle's to the last bit; else a few in a thousand are not, where a
    value is halfway between two."""
    out, lse = (x.double() for x in got)
    size = want[0].abs().amax(-1, keepdim=True).clamp(min=1e-3)
    assert ((out - want[0]).abs() / size).max() < (8e-3 if exact else 1.5e-2)
    finite = want[1].isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert lse[~finite].eq(-INF).all() and out[~finite].eq(0).all()
    off = (lse - want[1]).abs() / want[1].abs().clamp(min=1)
    assert not finite.any() or off[finite].max() < (2e-5 if exact else 2e-3)


def _moved(x: Tensor) -> Tensor:
    if DEVICE == "cpu" or x.is_contiguous():
        return x.to(DEVICE)
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(DEVICE)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


class TestLists:
    @BOTH
    @pytest.mark.parametrize(
        ("n", "heads", "keys"), [(1, 64, 128), (2, 3, 44), (1, 100, 70), (1, 16, 300), (2, 2, 1)]
    )
    def test_whole(
        self, record: str, n: int, heads: int, keys: int, parts: Callable[[int], None]
    ) -> None:
        parts(1)
        Case(record, n, heads, keys).check()

    @BOTH
    @pytest.mark.parametrize("count", [2, 3, 7])
    def test_keys_shared_out(self, record: str, count: int, parts: Callable[[int], None]) -> None:
        parts(count)
        Case(record, 2, 5, 330, holes=True).check()

    @BOTH
    @pytest.mark.parametrize("count", [1, 3])
    def test_holes_and_slots_past_the_pool(
        self, record: str, count: int, parts: Callable[[int], None]
    ) -> None:
        parts(count)
        case = Case(record, 4, 4, 300, holes=True, kind=torch.int64)
        case.lists[1] = -1  # a query without keys, whatever it holds
        case.query[1] = torch.nan
        case.lists[2, 64:] = -1
        case.lists[3, :200] = -1
        case.check()

    @pytest.mark.parametrize("per_page", [1, 16, 48])
    def test_pages_of_any_size(self, per_page: int, parts: Callable[[int], None]) -> None:
        parts(1)
        Case("mla_fp8", 1, 4, 100, per_page=per_page, pages=7).check()

    @BOTH
    def test_rows_apart_from_each_other(self, record: str, parts: Callable[[int], None]) -> None:
        """Layers may lie beside each other in one block."""
        parts(1)
        case = Case(record, 1, 4, 100, gap=96)
        assert not case.pool.is_contiguous()
        case.check()

    def test_a_query_that_is_a_view(self, parts: Callable[[int], None]) -> None:
        parts(1)
        case = Case("mla_fp8", 2, 4, 70)
        wide = torch.full((2, 9, 640), torch.nan, dtype=torch.bfloat16)
        wide[:, 1::2, :576] = case.query
        case.query = wide[:, 1::2, :576]
        case.check()

    @pytest.mark.parametrize(("n", "heads", "width", "at"), [(2, 4, 576, 1), (1, 1, 577, 0)])
    def test_queries_between_words_are_copied(
        self, n: int, heads: int, width: int, at: int, parts: Callable[[int], None]
    ) -> None:
        """As are those whose only row has an odd width: they all count as contiguous."""
        parts(1)
        case = Case("dense", n, heads, 70)
        memory = torch.full((n * heads * width + at,), torch.nan, dtype=torch.bfloat16)
        query = memory[at:].view(n, heads, width)[..., :576]
        query.copy_(case.query)
        assert query.is_contiguous()
        case.query = query
        case.check()

    @BOTH
    def test_scores_that_grow_and_fall(self, record: str, parts: Callable[[int], None]) -> None:
        """The largest score of a tile is often hundreds below that of the one before."""
        parts(1)
        case = Case(record, 1, 4, 320)
        case.query *= 64
        case.check()

    @BOTH
    def test_whoever_is_first(
        self, record: str, parts: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Copies arrive and groups of warps go on in many orders."""
        parts(1)
        case = Case(record, 1, 2, 300)
        for seed in range(1 if GPU else 24):
            if not GPU:
                launched = gluon_twin.Launched(gluon_latent_attend, "attend_lists", seed)
                monkeypatch.setattr(gluon_latent, "attend_lists", launched)
            case.check()

    def test_nothing_at_all(self) -> None:
        case = Case("mla_fp8", 1, 3, 10)
        for n, heads in ((0, 3), (1, 0)):
            out, lse = case.run(query=case.query[:n, :heads], slots=case.lists[:n])
            assert out.shape == (n, heads, 512) and lse.shape == (n, heads)
        out, lse = case.run(slots=case.lists[:, :0])
        assert out.eq(0).all() and lse.eq(-INF).all()

    def test_the_workspace_bounds_the_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Case("mla_fp8", 1, 2, 250)
        seen: list[int] = []
        joined = triton_mla_sparse.join

        def join(parts: Tensor, *given: Any) -> None:
            seen.append(len(parts))
            joined(parts, *given)

        monkeypatch.setattr(triton_mla_sparse, "join", join)
        monkeypatch.setattr(gluon_latent, "splits_of", lambda *_: 4)
        a_part = 2 * 513 * 4
        for workspace in (1, a_part, 2 * a_part, "512MiB"):
            close(case.run(workspace_bytes=workspace), case.expected())
        assert seen == [2, 4]  # one part alone is written as it is

    def test_rows_between_multiples_of_16_bytes_are_left_to_triton(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = Case("mla_fp8", 1, 2, 70, gap=8)
        found = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
        monkeypatch.setattr(triton_mla_sparse, "mla_sparse", lambda *_, **__: found)
        assert case.run() == found
        case = Case("dense", 1, 2, 70, gap=4)
        assert case.run() == found

    def test_what_it_does_not_take_is_refused(self) -> None:
        case = Case("mla_fp8", 1, 2, 8)
        for kind in (torch.float32, torch.float16):
            with pytest.raises(ValueError, match="queries of"):
                case.run(query=case.query.to(kind))
        with pytest.raises(ValueError, match="slots"):
            case.run(slots=case.lists[:0])
        with pytest.raises(ValueError, match="rows of"):
            Case("dense", 1, 2, 8).run(rows=case.pool.float())


def sequences(lengths: list[tuple[int, int]], per_page: int, heads: int) -> tuple[Any, ...]:
    """Queries (8 tokens more than there are), a pool that is NaN where no sequence has rows, their
    batch, and what is expected of it."""
    torch.manual_seed(1)
    needed = [-(-kv // per_page) for _, kv in lengths]
    order = torch.randperm(sum(needed) + 2)
    table = torch.full((len(lengths), max(needed) + 1), 2**20, dtype=torch.int32)
    rows = []
    owned = torch.split(order[:-2], needed)
    for b, (pages, (_, kv)) in enumerate(zip(owned, lengths, strict=True)):
        table[b, : len(pages)] = pages
        at = torch.arange(kv)
        rows.append(pages[at // per_page] * per_page + at % per_page if kv else at)
    pool = pool_of("mla_fp8", len(order), per_page, torch.cat(rows))
    offsets = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).to(torch.int32)
    batch = PagedBatch(
        tuple(q for q, _ in lengths),
        tuple(kv for _, kv in lengths),
        table.to(DEVICE),
        offsets.to(DEVICE),
        torch.tensor([kv for _, kv in lengths], dtype=torch.int32).to(DEVICE),
        per_page,
    )
    query = torch.randn(int(offsets[-1]) + 8, heads, 576).to(torch.bfloat16)
    host = PagedBatch(
        batch.query_lens, batch.kv_lens, table, offsets, batch.kv_lens_device.cpu(), per_page
    )
    asked = query[: int(offsets[-1])].double()
    out, lse = mla.absorbed(asked, as_rounded(pool), host, latent_dim=512, scale=SCALE)
    out = torch.cat((out, out.new_zeros(8, heads, 512)))
    lse = torch.cat((lse.double(), torch.full((8, heads), -INF, dtype=torch.float64)))
    return query, pool, batch, (out, lse)


class TestPages:
    @pytest.mark.parametrize(("heads", "processors"), [(3, 1), (16, 5), (70, 4), (16, 40)])
    def test_several_sequences(
        self, heads: int, processors: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In one part each, and in more parts than there are sequences."""
        if not GPU:
            monkeypatch.setattr(gluon_latent, "_processors", lambda device: processors)
        lengths = [(1, 1), (2, 130), (1, 0), (5, 5), (3, 200), (8, 64)]
        query, pool, batch, expected = sequences(lengths, 64, heads)
        given = (query.to(DEVICE), pool.to(DEVICE), batch)
        out, lse = gluon_latent.absorbed(*given, latent_dim=512, scale=SCALE)
        close((out.cpu(), lse.cpu()), expected)

    @pytest.mark.parametrize("per_page", [16, 48, 128])
    def test_pages_of_other_sizes(self, per_page: int) -> None:
        query, pool, batch, expected = sequences([(1, 100), (2, 70)], per_page, 4)
        given = (query.to(DEVICE), pool.to(DEVICE), batch)
        out, lse = gluon_latent.absorbed(*given, latent_dim=512, scale=SCALE)
        close((out.cpu(), lse.cpu()), expected)

    def test_without_sequences(self) -> None:
        query, pool, some, _ = sequences([(1, 70)], 64, 2)
        table, lengths = some.block_table[:0], some.kv_lens_device[:0]
        batch = PagedBatch((), (), table, some.cu_seqlens_q[:1], lengths, 64)
        given = (query.to(DEVICE), pool.to(DEVICE), batch)
        out, lse = gluon_latent.absorbed(*given, latent_dim=512, scale=SCALE)
        assert out.shape == (9, 2, 512) and out.eq(0).all() and lse.eq(-INF).all()

    def test_what_it_does_not_take_is_refused(self) -> None:
        query, pool, batch, _ = sequences([(1, 70)], 64, 2)
        with pytest.raises(ValueError, match="queries of"):
            gluon_latent.absorbed(query.float(), pool, batch, latent_dim=512, scale=SCALE)
        with pytest.raises(ValueError, match="queries, in a batch"):
            gluon_latent.absorbed(query[:0], pool, batch, latent_dim=512, scale=SCALE)
        with pytest.raises(ValueError, match="tokens"):
            wider = torch.zeros(2, PACKED.page_bytes(32), dtype=torch.uint8)
            gluon_latent.absorbed(query, wider, batch, latent_dim=512, scale=SCALE)


def bf16_of(half: Any) -> Any:
    return np.asarray(half._reinterpret(gluon_twin.BF16, [64, 256], None).load(None)).copy()


def test_every_code_at_many_scales() -> None:
    """Unpacked values are the reference's, rounded to bfloat16 once; a scale of 255 is the
    largest."""
    names = gluon_twin.names_of(gluon_latent_keys)
    torch.manual_seed(2)
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    codes[codes & 0x7F == 0x7F] = 0  # NaN, which no writer leaves
    pool = codes.repeat(64, 1)
    scales = torch.exp2(torch.rand(64, 4) * 130 - 123)  # below a value would be no normal bfloat16
    scales[:8] = torch.exp2(torch.randint(-100, 8, (8, 4)).float())
    scales[8] = torch.tensor([254.9, 255.0, 256.0, 1e9])
    pool = torch.cat((pool, scales.view(torch.uint8), torch.zeros(64, 128, dtype=torch.uint8)), 1)
    pool = pool.view(1, -1)
    places = gluon_twin.tensor(np.arange(64, dtype=np.int32))
    storage = gluon_twin._argument(pool.view(torch.int32))
    whole_pages = {"PACKED": True, "PAGED": True, "WHOLE": True}
    page = gluon_twin.tensor(np.int32(0))
    row, seen = names["_rows_of"](page, places, storage, pool.shape[1] // 4, 64, 64, **whole_pages)
    shared = gluon_twin.Language.allocate_shared_memory
    words = gluon_twin.TYPES[torch.int32]
    halves = [shared(words, [64, 128], None) for _ in range(2)]
    rope, four = (
        shared(words, [64, 32], None),
        shared(gluon_twin.TYPES[torch.float32], [64, 4], None),
    )
    bias = shared(gluon_twin.TYPES[torch.float32], [64], None)
    names["_copy"](row, seen, *halves, rope, four, bias, True, PACKED=True, PAGED=True)
    gluon_twin.AsyncCopy.wait_group(0)
    codes = halves[1].array.copy()
    for i, half in enumerate(halves):
        names["_unpack"](gluon_twin.Shared(words, codes), four, half, i)
    got = torch.cat([torch.from_numpy(bf16_of(half)) for half in halves], 1)
    pool.view(64, 656)[8, 512:528] = torch.tensor([254.9, 255, 255, 255]).view(torch.uint8)
    want = read_records(pool, torch.arange(64), PACKED)[:, :512].to(torch.bfloat16).float()
    normal = want.abs() >= 2.0**-126
    wrong = (got != want) & normal
    # What is left over is itself rounded: where a value lies halfway, to the last bit.
    assert wrong.sum() <= 0.004 * wrong.numel()
    off = (got - want).abs() / want.abs().clamp(min=2.0**-126)
    assert off[normal].max() <= 2.0**-7
    assert not wrong[:9].any()


class TestSplits:
    def test_few_units_are_cut_and_many_are_not(self) -> None:
        splits = gluon_latent.splits_of
        assert splits(2, 2, 132) == 1  # a window: one launch
        assert splits(256, 32, 132) in (1, 2)
        for units in (1, 2, 16, 64):
            count = splits(units, 32, 132)
            assert 1 < count <= gluon_latent.MOST_SPLITS and units * count <= 132

    def test_there_is_one_where_there_is_nothing(self) -> None:
        assert gluon_latent.splits_of(0, 0, 132) == gluon_latent.splits_of(5, 0, 132) == 1


def test_it_compiles_as_it_was_meant_to() -> None:
    """Products of the tensor cores stay asynchronous, next to nothing is spilled, two buffers of
    keys and the queries fit."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sm90_latent"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    for label, found in json.loads(done.stdout).items():
        # Scores before and in the loop; values in the loop and after it, and of the other half.
        assert found["products"] == 2 * 36 + 3 * 4, label
        assert found["warnings"] == [], label
        assert found["spilled"] <= (240 if label == "pages" else 32), label
        assert found["shared"] <= 227 * 1024, label
