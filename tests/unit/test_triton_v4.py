"""Kernels of a V4 step beside the table's own tests: replayed graphs, slots that are not there,
pools past 2^31 bytes, and how often anything is compiled."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvtier.kernels import (
    RECORDS,
    PagedBatch,
    compress_write,
    head_norm_rope,
    index_query,
    index_topk,
    inverse_rope,
    triton_compress,
    triton_index,
    triton_query,
    triton_select,
    triton_write,
    write_normed,
    write_records,
)
from tests.unit.v4_cases import batch_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROWS, PAGES, SLOTS = 5, 12, 64
"""Of a captured step: rows of its batch, pages of 256 tokens and entries of a page."""


def turns(n: int) -> tuple[Tensor, Tensor]:
    angles = 50 * torch.randn(n, 32)
    return angles.cos(), angles.sin()


class Decode:
    """One decode step's tensors, which stay where they are, and what it writes to."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.input: dict[str, Tensor] = {
            "kv": torch.zeros(ROWS, 1024),
            "score": torch.zeros(ROWS, 1024),
            "lengths": torch.zeros(ROWS, dtype=torch.int32),
            "offsets": torch.arange(ROWS + 1, dtype=torch.int32),
            "table": torch.full((ROWS, 4), -1, dtype=torch.int32),
            "state_slots": torch.full((ROWS,), -1, dtype=torch.int64),
            "slots": torch.full((ROWS,), -1, dtype=torch.int64),
            "index_slots": torch.full((ROWS,), -1, dtype=torch.int64),
            "cos": torch.zeros(ROWS, 32),
            "sin": torch.zeros(ROWS, 32),
            "captures": torch.full((3, 3), -1, dtype=torch.int64),
            "query": torch.zeros(ROWS, 4, 128),
            "weights": torch.zeros(ROWS, 4),
        }
        self.kept = {
            "c4": torch.zeros(PAGES, RECORDS["v4_fp8"].page_bytes(SLOTS), dtype=torch.uint8),
            "swa": torch.zeros(4, RECORDS["v4_fp8"].page_bytes(128), dtype=torch.uint8),
            "index": torch.zeros(PAGES, RECORDS["index_fp8"].page_bytes(SLOTS), dtype=torch.uint8),
            "a": torch.zeros(7 * 16, 1024),
            "b": torch.zeros(7 * 16, 1024),
            "frames": torch.zeros(6, 4, 1024),
        }
        self.weight = torch.linspace(0.5, 1.5, 512)
        for each in (self.input, self.kept):
            for name in each:
                each[name] = each[name].to(device)
        self.weight = self.weight.to(device)
        self.output: dict[str, Tensor] = {}

    def load(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.input[name].copy_(value)

    def batch(self, kv_lens: tuple[int, ...]) -> PagedBatch:
        i = self.input
        return PagedBatch((1,) * ROWS, kv_lens, i["table"], i["offsets"], i["lengths"], 256)

    def run(self, kernels: dict[str, Callable[..., Any]], kv_lens: tuple[int, ...]) -> None:
        i, k, batch, record = self.input, self.kept, self.batch(kv_lens), RECORDS["v4_fp8"]
        cos, sin = i["cos"], i["sin"]
        kernels["write_normed"](
            *(k["swa"], i["slots"], i["kv"][:, :512], self.weight, cos, sin, record), eps=1e-6
        )
        kernels["compress_write"](
            *(i["kv"], i["score"], [k["a"], k["b"]], batch, i["state_slots"]),
            *(k["c4"], i["slots"], self.weight, cos, sin, record),
            ratio=4,
            ring=16,
            eps=1e-6,
            captures=i["captures"],
            frames=[k["frames"], None],
        )
        kernels["write_records"](
            k["index"], i["index_slots"], i["query"][:, 0], RECORDS["index_fp8"]
        )
        packed = RECORDS["index_fp8"]
        codes, folded = kernels["index_query"](i["query"], i["weights"], cos, sin, packed)
        chosen = kernels["index_topk"](
            i["query"],
            i["weights"],
            k["index"],
            batch,
            ratio=4,
            topk=32,
            record=RECORDS["index_fp8"],
        )
        self.output = {"codes": codes, "folded": folded, "chosen": chosen}
        self.output["turned"] = kernels["head_norm_rope"](i["query"], cos, sin, eps=1e-6)
        self.output["back"] = kernels["inverse_rope"](i["query"], cos, sin)


REFERENCE = {
    f.__name__: f
    for f in (
        compress_write,
        head_norm_rope,
        index_query,
        index_topk,
        inverse_rope,
        write_normed,
        write_records,
    )
}
TRITON = {
    name: getattr(module, name)
    for module in (triton_compress, triton_index, triton_query, triton_write)
    for name in module.__all__
}


def whole_numbers(*shape: int) -> Tensor:
    """Values whose products and sums are exact in any order."""
    return torch.randint(-2, 3, shape).float()


def replays(steps: int) -> list[dict[str, Tensor]]:
    """What each step puts into a captured decode step: other lengths, rows, tables, captures."""
    found = []
    for step in range(steps):
        lengths = torch.randint(1, 1000, (ROWS,))
        lengths[step % ROWS] = 4 * int(torch.randint(40, 250, ()))  # closes an entry
        lengths[(step + 1) % ROWS] = 0
        if step == 2:
            lengths[:] = 0  # nothing but padding
        real = lengths > 0
        slots = torch.where(real, torch.randperm(256)[:ROWS], -1)
        captures = torch.full((3, 3), -1)
        if step != 2:
            captures[step % 3] = torch.tensor([step % ROWS, int(lengths[step % ROWS]), step])
        query = whole_numbers(ROWS, 4, 128)
        found.append(
            {
                "kv": torch.randn(ROWS, 1024).masked_fill(~real[:, None], torch.nan),
                "score": torch.randn(ROWS, 1024).masked_fill(~real[:, None], torch.nan),
                "lengths": lengths,
                "table": torch.randperm(PAGES)[:4].expand(ROWS, 4),
                "state_slots": torch.where(real, torch.randperm(7)[:ROWS], -1),
                "slots": slots,
                "index_slots": torch.where(real, torch.randperm(PAGES * SLOTS)[:ROWS], -1),
                "captures": captures,
                "query": query,
                "weights": whole_numbers(ROWS, 4),
                **dict(zip(("cos", "sin"), turns(ROWS), strict=True)),
            }
        )
    return found


@pytest.fixture
def captured() -> Callable[[Decode], Callable[[], None]]:
    """Makes a step replayable; without a GPU it is simply run again."""
    bound = (1000,) * ROWS

    def capture(step: Decode) -> Callable[[], None]:
        if not GPU:
            return lambda: step.run(TRITON, bound)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step.run(TRITON, bound)  # compiles; all rows are padding, so nothing is written
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run(TRITON, bound)
        return graph.replay

    return capture


def test_a_captured_step_replayed_with_other_batches_is_the_reference(
    captured: Callable[[Decode], Callable[[], None]],
) -> None:
    torch.manual_seed(1)
    ours, theirs = Decode(DEVICE), Decode("cpu")
    keys = whole_numbers(PAGES * SLOTS, 128)
    for step in (ours, theirs):
        write_records(
            step.kept["index"],
            torch.arange(PAGES * SLOTS, device=step.device),
            keys.to(step.device),
            RECORDS["index_fp8"],
        )
    replay = captured(ours)
    assert all(not t.any() for name, t in ours.kept.items() if name != "index")
    for values in replays(5 if GPU else 4):
        ours.load(**values)
        theirs.load(**values)
        replay()
        theirs.run(REFERENCE, tuple(values["lengths"].tolist()))
        for name, expected in theirs.kept.items():
            assert torch.equal(ours.kept[name].cpu(), expected), name
        real = values["lengths"] > 0
        for name, expected in theirs.output.items():
            assert torch.equal(ours.output[name].cpu()[real], expected[real]), name
        assert ours.output["chosen"][~real.to(DEVICE)].eq(-1).all()


def test_slots_past_the_pool_are_skipped() -> None:
    record = RECORDS["v4_fp8"]
    around = torch.full((4, record.page_bytes(2)), 0xAB, dtype=torch.uint8, device=DEVICE)
    slots = torch.tensor([4, 1 << 40, -7, 3], device=DEVICE)
    values, (cos, sin) = torch.randn(4, 512, device=DEVICE), (t.to(DEVICE) for t in turns(4))
    triton_write.write_records(around[:2], slots, values, record)
    triton_write.write_normed(around[:2], slots, values, values[0], cos, sin, record, eps=1e-6)
    changed = (around != 0xAB).sum(1).tolist()
    assert changed[0] == changed[2] == changed[3] == 0 and changed[1] > 400
    rows = torch.full((8, 576), torch.nan, device=DEVICE)
    triton_write.write_rows(rows[:4], slots, torch.randn(4, 576, device=DEVICE))
    assert rows.isnan().all(1).tolist() == [True] * 3 + [False] + [True] * 4


def test_values_may_lie_apart() -> None:
    record, slots = RECORDS["index_fp8"], torch.tensor([5, 2], device=DEVICE)
    apart = torch.randn(128, 2, device=DEVICE).T
    pools = [torch.zeros(2, record.page_bytes(4), dtype=torch.uint8, device=DEVICE)] * 2
    pools[1] = pools[0].clone()
    triton_write.write_records(pools[0], slots, apart, record)
    write_records(pools[1], slots, apart, record)
    assert torch.equal(*pools)
    heads = torch.randn(3, 128, 2, device=DEVICE).transpose(1, 2)
    cos, sin = (t.to(DEVICE) for t in turns(3))
    assert torch.equal(triton_query.inverse_rope(heads, cos, sin), inverse_rope(heads, cos, sin))


@pytest.mark.parametrize("slot", [-1, 2, 1 << 40])
def test_state_slots_that_are_not_there_are_skipped(slot: int) -> None:
    states = [torch.full((3 * 8, 256), torch.nan, device=DEVICE) for _ in range(2)]
    record = RECORDS["index_fp8"]
    storage = torch.full((1, record.page_bytes(4)), 0xAB, dtype=torch.uint8, device=DEVICE)
    lengths = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    batch = PagedBatch((4,), (4,), lengths[:, None], offsets, lengths, 256)
    tokens = torch.randn(4, 256, device=DEVICE)
    triton_compress.compress_write(
        *(tokens, tokens, [s[:16] for s in states], batch, torch.tensor([slot], device=DEVICE)),
        *(storage, torch.arange(4, device=DEVICE), tokens[0, :128]),
        *(t.to(DEVICE) for t in turns(4)),
        record,
        ratio=4,
        ring=8,
        eps=1e-6,
    )
    assert all(s.isnan().all() for s in states)
    assert storage.eq(0xAB).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    record, values = RECORDS["v4_fp8"], torch.zeros(2, 512, device=DEVICE)
    storage = torch.zeros(2, 1728, dtype=torch.uint8, device=DEVICE)
    slots, turn = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, 32)
    for bad in (values[:, :500], values[:1], values.T):
        with pytest.raises(ValueError):
            triton_write.write_records(storage, slots, bad, record)
    for pages in (storage[:, :1700], storage[:, ::2], storage.view(torch.int16), storage[:, 1:]):
        with pytest.raises(ValueError):
            triton_write.write_records(pages, slots, values, record)
    for weight, cos in ((values[0, :64], turn), (values[0], turn[:1]), (values[0], turn[:, :9])):
        with pytest.raises(ValueError):
            triton_write.write_normed(storage, slots, values, weight, cos, turn, record, eps=0)


@pytest.mark.parametrize("topk", [1, 100, 512, 999])
def test_ties_go_to_the_smaller_entry_wherever_they_lie(
    topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a part of the scores and across parts, once and again, and across launches of two
    queries each."""
    torch.manual_seed(2)
    n, entries = 3, 1000
    lengths = torch.tensor([4000], dtype=torch.int32)
    batch = PagedBatch(
        *((n,), (4 * entries,), torch.arange(16, dtype=torch.int32)[None]),
        *(torch.tensor([0, n], dtype=torch.int32), lengths, 256),
    )
    keys = torch.zeros(16, RECORDS["index_fp8"].page_bytes(64), dtype=torch.uint8)
    values = whole_numbers(1024, 128) * (torch.rand(1024, 1) < 0.3)  # many scores of 0
    write_records(keys, torch.arange(1024), values, RECORDS["index_fp8"])
    query, weights = whole_numbers(n, 4, 128), whole_numbers(n, 4)
    weights[1] = 0  # all alike
    options: dict[str, Any] = {"ratio": 4, "topk": topk, "record": RECORDS["index_fp8"]}
    expected = index_topk(query, weights, keys, batch, **options)
    monkeypatch.setattr(triton_select, "WARPS", {256: 1, 1024: 4, 2048: 4})
    monkeypatch.setattr(triton_select, "SHARE", 2)
    on_device = PagedBatch(
        *(batch.query_lens, batch.kv_lens, batch.block_table.to(DEVICE)),
        *(batch.cu_seqlens_q.to(DEVICE), lengths.to(DEVICE), 256),
    )
    got = triton_index.index_topk(
        *(query.to(DEVICE), weights.to(DEVICE), keys.to(DEVICE), on_device),
        **options,
        workspace_bytes=2 * triton_select.scratch_bytes(entries, topk),
    )
    assert torch.equal(got.cpu(), expected)


def test_entries_of_more_sequences_than_a_program_looks_at_at_a_time() -> None:
    torch.manual_seed(4)
    record, dim = RECORDS["index_mxfp4"], 128
    lengths = [(1, int(kv)) for kv in torch.randint(0, 9, (140,))]
    lengths[133] = (9, 12)
    n = sum(q for q, _ in lengths)
    tokens, slots = torch.randn(n, 2 * dim), torch.randperm(n)
    state_slots = torch.where(torch.tensor([kv > 0 for _, kv in lengths]), torch.arange(140), -1)
    states, turn = [torch.randn(140 * 8, 2 * dim) for _ in range(2)], turns(n)
    outcomes = []
    for call, place in ((triton_compress.compress_write, DEVICE), (compress_write, "cpu")):
        kept = [s.to(place, copy=True) for s in states]
        storage = torch.zeros(4, record.page_bytes(64), dtype=torch.uint8, device=place)
        call(
            *(tokens.to(place), tokens.to(place), kept, batch_of(lengths, device=place)),
            *(t.to(place) for t in (state_slots,)),
            storage,
            *(t.to(place) for t in (slots, torch.ones(dim), *turn)),
            record,
            ratio=4,
            ring=8,
            eps=1e-6,
        )
        outcomes.append([t.cpu() for t in (storage, *kept)])
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


# What only a GPU can show.


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    step = Decode("cuda")
    step.load(**replays(1)[0])
    step.run(TRITON, (1000,) * ROWS)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.run(TRITON, (1000,) * ROWS)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_variant_is_compiled_once_whatever_a_step_holds() -> None:
    record = RECORDS["v4_fp8"]
    storage = torch.zeros(64, record.page_bytes(64), dtype=torch.uint8, device="cuda")

    def write(n: int, at: int) -> None:
        slots = torch.arange(40, device="cuda")[at : at + n]
        values, (cos, sin) = torch.randn(n, 512, device="cuda"), (t.cuda() for t in turns(n))
        pool = storage[: n + 1]
        triton_write.write_normed(pool, slots, values, values[0], cos, sin, record, eps=1e-6)

    def compiled() -> int:
        return len(triton_write._write_records.device_caches[torch.cuda.current_device()][0])

    write(2, 0)
    before = compiled()
    for n in (1, 3, 15, 16, 17, 32):
        for at in (0, 1):
            write(n, at)
    assert compiled() == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["v4_fp8", "index_fp8", "dense"])
def test_a_pool_beyond_two_gigabytes(name: str) -> None:
    """Offsets past 2^31 and 2^32 bytes, and past 2^31 elements."""
    record = RECORDS[name]
    dim = record.dim or 512
    if name == "dense":
        storage = torch.zeros((9 << 30) // 1024, 512, dtype=torch.bfloat16, device="cuda")
        slots = torch.tensor([0, (1 << 21) + 1, (1 << 22) + 3, storage.shape[0] - 1])
    else:
        page = record.page_bytes(64)
        storage = torch.zeros((9 << 29) // page, page, dtype=torch.uint8, device="cuda")
        far = [(1 << 31) // page + 1, (1 << 32) // page + 1, storage.shape[0] - 1]
        slots = torch.tensor([3, *(64 * p + 63 for p in far)])
    values = torch.randn(4, dim).to(torch.bfloat16)
    triton_write.write_records(storage, slots.cuda(), values.cuda(), record)
    assert int(torch.count_nonzero(storage.view(torch.uint8).view(torch.int64))) <= 4 * 128
    small = storage[:1].new_zeros(4, storage.shape[1], device="cpu")
    at = torch.arange(4) if name == "dense" else 64 * torch.arange(4) + slots % 64
    write_records(small, at, values, record)
    held = slots if name == "dense" else slots // 64
    assert torch.equal(storage[held.cuda()].cpu(), small)


@pytest.mark.gpu
def test_scores_of_real_numbers_choose_what_the_reference_chooses() -> None:
    """Up to entries whose scores are closer than the sums' rounding."""
    torch.manual_seed(3)
    n, entries, topk = 4, 8000, 512
    lengths = torch.tensor([4 * entries], dtype=torch.int32, device="cuda")
    table = torch.randperm(125)[None].int().cuda()
    offsets = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    batch = PagedBatch((n,), (4 * entries,), table, offsets, lengths, 256)
    for name in ("index_fp8", "index_mxfp4"):
        record = RECORDS[name]
        keys = torch.zeros(125, record.page_bytes(64), dtype=torch.uint8, device="cuda")
        write_records(
            keys, torch.arange(8000, device="cuda"), torch.randn(8000, 128).cuda(), record
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            query = torch.randn(n, 64, 128, device="cuda").to(dtype)
            weights = torch.rand(n, 64, device="cuda")
            options: dict[str, Any] = {"ratio": 4, "topk": topk, "record": record}
            expected = index_topk(query.double(), weights, keys, batch, **options)
            got = triton_index.index_topk(query, weights, keys, batch, **options)
            for mine, theirs in zip(got.tolist(), expected.tolist(), strict=True):
                assert len(set(mine) ^ set(theirs)) <= 2


@pytest.mark.slow
def test_every_variant_compiles_for_hopper_without_spills() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sm90"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert len(report) > 90
    # Sparse attention of float32 queries, which is there for tests, spills some bytes.
    assert {name: used for name, used in report.items() if used["spilled"] > 112} == {}
