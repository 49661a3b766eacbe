"""FlashMLA's backend, over a double of its functions: what it is handed, and what comes of it.

The kernels themselves are tested with the table's other rows, where they are installed.
"""

import gc
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier import ConfigError
from kvtier.kernels import (
    RECORDS,
    HeadDims,
    PagedBatch,
    absorbed,
    flashmla,
    mla_sparse,
    planned,
    sparse_attend,
    write_records,
)
from kvtier.kernels.planned import PerBatch
from tests.unit.flashmla_double import Double
from tests.unit.mla_cases import MlaCase
from tests.unit.window_cases import PADDING, WindowCase

RELEASED = HeadDims(heads=3, latent=512, rope=64, nope=128, value=128)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    monkeypatch.setattr(flashmla, "_found", lambda: (double.calls, ""))
    monkeypatch.setattr(flashmla, "_schedules", flashmla._Schedules())
    return double


def check(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, ...]) -> None:
    (out, lse), (right, right_lse) = found, expected
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert out.shape == right.shape and lse.shape == right_lse.shape
    none = right_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, none) and out[none].eq(0).all()
    assert (out.double() - right.double()).abs().max() <= 8e-3 * max(1, right.abs().max())
    assert (lse - right_lse)[~none].abs().max() <= 1e-3 * right_lse[~none].abs().max()


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1), (1, 70), (1, 0), (1, 200)],
        [(2, 2), (2, 130), (2, 0)],
        [(1, 1), (3, 70), (1, 0), (5, 133)],
    ],
    ids=["one query", "two queries", "ragged"],
)
def test_absorbed(double: Double, lengths: list[tuple[int, int]], page: int) -> None:
    case = MlaCase(lengths, dims=RELEASED, dtype=torch.bfloat16, page=page)
    query = case.absorbed_query
    options = {"latent_dim": 512, "scale": case.scale}
    expected = absorbed(query, case.rows, case.batch, **options)
    check(flashmla.absorbed(query, case.rows, case.batch, **options), expected)
    even = len({q for q, _ in lengths}) == 1
    assert double.shapes == [(len(lengths), lengths[0][0], 3, 576) if even else (10, 1, 3, 576)]


def test_rows_of_a_wider_pool(double: Double) -> None:
    case = MlaCase([(1, 70)], dims=RELEASED, dtype=torch.bfloat16, page=64)
    wide = torch.full((case.rows.shape[0], 640), torch.nan, dtype=torch.bfloat16)
    wide[:, :576] = case.rows
    options = {"latent_dim": 512, "scale": case.scale}
    expected = absorbed(case.absorbed_query, case.rows, case.batch, **options)
    found = flashmla.absorbed(case.absorbed_query, wide[:, :576], case.batch, **options)
    check(found, expected)


def test_a_batch_is_planned_once_for_all_layers(double: Double) -> None:
    case = MlaCase([(1, 70), (1, 3)], dims=RELEASED, dtype=torch.bfloat16, page=64)
    options = {"latent_dim": 512, "scale": case.scale}
    for _ in range(3):
        flashmla.absorbed(case.absorbed_query, case.rows, case.batch, **options)
    assert double.made == 1
    flashmla.absorbed(case.absorbed_query, case.rows, replace(case.batch), **options)
    assert double.made == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"page_tokens": 16}, "pages of 16"),
        ({"width": 512}, "query width"),
        ({"dtype": torch.float32}, "queries of"),
        ({"count": 2}, "2 queries, in a batch of 1"),
        ({"count": 0}, "0 queries, in a batch of 1"),
    ],
)
def test_what_it_does_not_take(double: Double, change: dict[str, object], match: str) -> None:
    case = MlaCase([(1, 70)], dims=RELEASED, dtype=torch.bfloat16, page=64)
    query, batch = case.absorbed_query, case.batch
    if "page_tokens" in change:
        batch = replace(batch, page_tokens=16)
    query = query.repeat(2, 1, 1)[: change.get("count", 1)]
    query = query[..., : change.get("width", 576)].to(change.get("dtype", query.dtype))
    with pytest.raises(ValueError, match=match):
        flashmla.absorbed(query, case.rows, batch, latent_dim=512, scale=1.0)
    assert not double.shapes


def pool(record: str, slots: int) -> torch.Tensor:
    """Pages of 64 slots of noise, with a page of poison behind."""
    values = torch.randn(slots, 576 if record in ("dense", "mla_fp8") else 512)
    if record == "dense":
        poison = torch.full((64, 576), torch.nan)
        return torch.cat((values, poison)).to(torch.bfloat16)
    size = RECORDS[record].page_bytes(64)
    storage = torch.full((slots // 64 + 1, size), 0xFF, dtype=torch.uint8)
    write_records(storage, torch.arange(slots), values, RECORDS[record])
    return storage


@pytest.fixture
def filled() -> Iterator[None]:
    """Memory that is taken and not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("heads", [1, 16, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
def test_lists_of_latent_rows(double: Double, record: str, heads: int) -> None:
    """AT-3.6: whatever heads beside them hold and find, NaN here."""
    torch.manual_seed(0)
    rows, slots = pool(record, 128), torch.randint(0, 128, (5, 70))
    slots[1], slots[3, ::3] = -1, -1
    query = torch.randn(5, heads, 576).to(torch.bfloat16)
    options = {"latent_dim": 512, "scale": 0.07, "record": RECORDS[record]}
    expected = mla_sparse(query, rows, slots, **options)
    check(flashmla.mla_sparse(query, rows, slots, **options), expected)
    wanted = [128, 128] if heads > 128 else [64 if heads <= 64 else 128]
    assert [shape[-2] for shape in double.shapes] == wanted


@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
@pytest.mark.parametrize("window", [1, 64, 65, 100])
def test_windows(double: Double, window: int, record: str) -> None:
    """E6: lists as every backend is given them, of a verify step, padding, prefill and decode,
    against dense masked attention; what no query reaches is poison."""
    options = {"dims": RELEASED, "page": 64, "record": record, "dtype": torch.bfloat16}
    case = WindowCase([150, 70], window, **options)
    spans = ((0, 146, 150), PADDING, (1, 0, 70), (0, 100, 101))
    out, lse = case.call(*spans, kernel=flashmla.mla_sparse)
    at = 0
    for b, start, stop in spans:
        mine = slice(at, at + max(1, stop - start))
        at = mine.stop
        if b < 0:
            assert out[mine].eq(0).all() and lse[mine].eq(-torch.inf).all()
            continue
        expected, expected_lse = case.expected(b)
        scale = expected.abs().max()
        assert (out[mine].double() - expected[start:stop]).abs().max() <= 1.6e-2 * scale
        assert (lse[mine].double() - expected_lse[start:stop]).abs().max() <= 8e-2


@pytest.mark.parametrize("heads", [5, 64, 130])
@pytest.mark.parametrize("extra", [0, 40, 130])
def test_v4_lists(double: Double, heads: int, extra: int) -> None:
    torch.manual_seed(0)
    window, more = pool("v4_fp8", 128), pool("v4_fp8", 64)
    lists = torch.randint(0, 128, (4, 128)).int(), torch.randint(0, 64, (4, extra)).int()
    lists[0][1, 5:], lists[1][1, 3:], lists[0][2], lists[1][2] = -1, -1, -1, -1
    query, sink = torch.randn(4, heads, 512).to(torch.bfloat16), torch.randn(heads)
    sink[0] = -torch.inf
    options = {"scale": 0.05, "record": RECORDS["v4_fp8"]}
    options |= {"extra": more, "extra_slots": lists[1]}
    arguments = (query, window, lists[0], sink)
    expected = sparse_attend(*arguments, **options)
    check(flashmla.sparse_attend(*arguments, **options), expected)
    options["extra"] = options["extra_slots"] = None
    without = sparse_attend(*arguments, **options)
    check(flashmla.sparse_attend(*arguments, **options), without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_that_change_in_place(
    double: Double, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the count of versions too, as loaders of weights do it; float32 is not copied."""
    given, call = [], flashmla._call("sparse_decode_fwd")

    def seen(*arguments: object) -> object:
        given.append(arguments[4])
        return call(*arguments)

    monkeypatch.setattr(flashmla, "_call", lambda name: seen)
    query, window = torch.randn(2, 64, 512).to(torch.bfloat16), pool("v4_fp8", 64)
    slots = torch.arange(64, dtype=torch.int32).expand(2, 64)
    sink = torch.nn.Parameter(torch.zeros(64, dtype=dtype), requires_grad=False)
    for _ in range(3):
        sink.data.copy_(torch.randn(64))
        arguments = (query, window, slots, sink)
        options = {"scale": 0.05, "record": RECORDS["v4_fp8"]}
        check(flashmla.sparse_attend(*arguments, **options), sparse_attend(*arguments, **options))
    assert len(given) == 3
    assert all((g.data_ptr() == sink.data_ptr()) == (dtype is torch.float32) for g in given)


@pytest.mark.parametrize("left", ["extra", "extra_slots"])
def test_pages_and_lists_come_together(double: Double, left: str) -> None:
    window, slots = pool("v4_fp8", 64), torch.zeros(2, 64, dtype=torch.int32)
    query, sink = torch.zeros(2, 64, 512, dtype=torch.bfloat16), torch.zeros(64)
    options = {"scale": 1.0, "record": RECORDS["v4_fp8"], "extra": window, "extra_slots": slots}
    with pytest.raises(ValueError, match="come together"):
        flashmla.sparse_attend(query, window, slots, sink, **options | {left: None})
    assert not double.shapes


@pytest.mark.parametrize("heads", [5, 64, 130])
def test_lengths_of_lists(double: Double, heads: int) -> None:
    """What is behind a length is not looked at; what is made of lengths is made once."""
    window, more = pool("v4_fp8", 128), pool("v4_fp8", 64)
    query, sink = torch.randn(4, heads, 512).to(torch.bfloat16), torch.randn(heads)
    near, far = torch.randint(0, 128, (4, 64)).int(), torch.randint(0, 64, (4, 300)).int()
    lengths = torch.tensor([300, 0, 65, 64], dtype=torch.int32)
    cut = far.masked_fill(torch.arange(300) >= lengths[:, None], -1)
    options = {"scale": 0.05, "record": RECORDS["v4_fp8"], "extra": more}
    expected = sparse_attend(query, window, near, sink, **options, extra_slots=cut)
    options |= {"extra_slots": far, "extra_lengths": lengths}
    for _ in range(3):
        check(flashmla.sparse_attend(query, window, near, sink, **options), expected)
    parts = -(-heads // 128)  # which may be of other numbers of heads
    assert double.made == len({shape[2] for shape in double.shapes}) <= parts
    flashmla.sparse_attend(query, window, near, sink, **options | {"extra_lengths": lengths + 0})
    assert double.made == 2 * len({shape[2] for shape in double.shapes})
    # Of some queries at a time lengths would be cut anew in each layer: lists end in -1 anyway.
    options |= {"extra_slots": cut, "workspace_bytes": 4 * 128 * 513 * 2}
    check(flashmla.sparse_attend(query, window, near, sink, **options), expected)


def test_outputs_alone(double: Double) -> None:
    """Log-sum-exps stay as the library has them; outputs are the same."""
    torch.manual_seed(0)
    rows, query = pool("mla_fp8", 64), torch.randn(3, 8, 576).to(torch.bfloat16)
    slots = torch.randint(0, 64, (3, 40))
    slots[1] = -1
    options = {"latent_dim": 512, "scale": 0.07, "record": RECORDS["mla_fp8"]}
    out, lse = flashmla.mla_sparse(query, rows, slots, **options)
    alone, raw = flashmla.mla_sparse(query, rows, slots, **options, sums=False)
    assert torch.equal(out, alone)
    assert lse[1].eq(-torch.inf).all() and raw[1].eq(torch.inf).all()
    assert torch.equal(lse[::2], raw[::2])


def test_a_small_workspace_cuts_the_queries(double: Double) -> None:
    torch.manual_seed(0)
    rows, slots = pool("mla_fp8", 128), torch.randint(0, 128, (5, 64))
    query = torch.randn(5, 64, 576).to(torch.bfloat16)
    options = {"latent_dim": 512, "scale": 0.07, "record": RECORDS["mla_fp8"]}
    expected = mla_sparse(query, rows, slots, **options)
    small = 2 * 4 * 128 * 513
    check(flashmla.mla_sparse(query, rows, slots, **options, workspace_bytes=small), expected)
    assert [shape[0] for shape in double.shapes] == [2, 2, 1]
    check(flashmla.mla_sparse(query, rows, slots, **options, workspace_bytes=0), expected)
    assert [shape[0] for shape in double.shapes[3:]] == [1] * 5


def test_schedules_of_lists_depend_on_shapes_alone(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, options = pool("mla_fp8", 128), {"latent_dim": 512, "scale": 0.07}

    def run(n: int, k: int, heads: int = 64) -> int:
        query = torch.randn(n, heads, 576).to(torch.bfloat16)
        before = double.made
        slots = torch.randint(-1, 128, (n, k))
        flashmla.mla_sparse(query, rows, slots, **options, record=RECORDS["mla_fp8"])
        return double.made - before

    made = [run(2, 64), run(2, 64), run(2, 40), run(3, 64), run(2, 70), run(2, 64, 128)]
    assert made == [1, 0, 0, 1, 1, 1]
    window, sink = pool("v4_fp8", 64), torch.zeros(64)
    for width, count in ((0, 1), (64, 1), (64, 0), (128, 1), (0, 0)):
        before, more = double.made, torch.zeros(2, width, dtype=torch.int32)
        lists = torch.zeros(2, 64, dtype=torch.int32)
        flashmla.sparse_attend(
            torch.zeros(2, 64, 512, dtype=torch.bfloat16), window, lists, sink, scale=1.0,
            record=RECORDS["v4_fp8"], extra=window, extra_slots=more,
        )  # fmt: skip
        assert double.made - before == count
    # Another stream makes its own; a graph takes what there was before its capture, keeps nothing.
    monkeypatch.setattr(flashmla, "_stream", lambda: 7)
    assert [run(2, 64), run(2, 64)] == [1, 0]
    monkeypatch.setattr(flashmla, "capturing", lambda: True)
    monkeypatch.setattr(flashmla, "_stream", lambda: 8)
    assert [run(2, 64), run(9, 64), run(9, 64)] == [0, 1, 1]


def test_a_size_that_is_none_is_refused_without_a_query(double: Double) -> None:
    query, slots = torch.zeros(0, 4, 512), torch.zeros(0, 8)
    with pytest.raises(ConfigError, match="workspace_bytes"):
        flashmla.sparse_attend(
            query, query[:, 0], slots, torch.zeros(4), scale=1.0, record=RECORDS["v4_fp8"],
            workspace_bytes="much",
        )  # fmt: skip


def test_nothing_to_do(double: Double) -> None:
    record = {"dense": pool("dense", 64), "mla_fp8": pool("mla_fp8", 64)}
    for name, rows in record.items():
        options = {"latent_dim": 512, "scale": 1.0, "record": RECORDS[name]}
        none = torch.zeros(0, 8, 576, dtype=torch.bfloat16)
        out, lse = flashmla.mla_sparse(none, rows, torch.zeros(0, 5), **options)
        assert out.shape == (0, 8, 512) and lse.shape == (0, 8)
        one = torch.zeros(1, 8, 576, dtype=torch.bfloat16)
        out, lse = flashmla.mla_sparse(one, rows, torch.zeros(1, 0), **options)
        assert out.eq(0).all() and lse.eq(-torch.inf).all()


class TestWhereItIsFound:
    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        flashmla._found.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(flashmla, "_registered", dict)  # whatever this process has loaded
        yield
        flashmla._found.cache_clear()

    def test_nowhere(self) -> None:
        if importlib.util.find_spec("vllm") or importlib.util.find_spec("flash_mla"):
            pytest.skip("it is here")
        assert "neither flash_mla nor a vLLM" in flashmla.missing("dense_decode_fwd")
        with pytest.raises(ImportError, match="neither flash_mla nor a vLLM"):
            flashmla._call("dense_decode_fwd")

    def test_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
        assert "needs an H100 or H200" in flashmla.missing("dense_decode_fwd")

    def test_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        double = Double()
        package = double.package()
        found = SimpleNamespace(submodule_search_locations=[])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setitem(sys.modules, "flash_mla", package)
        assert [flashmla.missing(call) for call in flashmla.CALLS] == ["", "", ""]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(flashmla, "_schedules", flashmla._Schedules())
        test_absorbed(double, [(2, 2), (2, 130), (2, 0)], 64)
        test_a_batch_is_planned_once_for_all_layers(Double.of(package))
        test_v4_lists(Double.of(package), 64, 40)
        test_lists_of_latent_rows(Double.of(package), "dense", 64)
        test_lists_of_latent_rows(Double.of(package), "mla_fp8", 64)

    def test_an_old_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package = Double().package()
        package.get_mla_metadata = lambda *_: (torch.zeros(1), torch.zeros(1))
        found = SimpleNamespace(submodule_search_locations=[])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setitem(sys.modules, "flash_mla", package)
        assert "too old" in flashmla.missing("dense_decode_fwd")

    def test_vllms_extension_without_vllm(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "__init__.py").write_text("raise RuntimeError('imported')")
        (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"no library")
        found = {"vllm": SimpleNamespace(submodule_search_locations=[str(tmp_path)])}
        monkeypatch.setattr(importlib.util, "find_spec", found.get)
        assert "does not load" in flashmla.missing("dense_decode_fwd")
        loaded = []
        flashmla._found.cache_clear()
        monkeypatch.setattr(torch.ops, "load_library", loaded.append)
        monkeypatch.setattr(
            flashmla, "_registered", lambda: dict.fromkeys(["dense_decode_fwd"][: len(loaded)], 1)
        )
        assert flashmla.missing("dense_decode_fwd") == ""
        assert flashmla.missing("dense_decode_fwd") == ""
        assert loaded == [str(tmp_path / "_flashmla_C.abi3.so")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestInAGraph:
    """Replays see what lengths, tables and lists have become; schedules are made anew."""

    @pytest.fixture(autouse=True)
    def _here(self) -> None:
        for call in flashmla.CALLS:
            if missing := flashmla.missing(call):
                pytest.skip(missing)

    @pytest.mark.parametrize("queries", [1, 2])
    @pytest.mark.parametrize("warm", [True, False])
    def test_absorbed(self, queries: int, warm: bool) -> None:
        lengths = [(queries, 5000), (queries, 3), (queries, 0), (queries, 900)]
        case = MlaCase(lengths, dims=RELEASED, dtype=torch.bfloat16, page=64, device="cuda")
        options = {"latent_dim": 512, "scale": case.scale}
        query, batch, made = case.absorbed_query, case.batch, []
        if warm:
            flashmla.absorbed(query, case.rows, batch, **options)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = [flashmla.absorbed(query, case.rows, batch, **options) for _ in range(2)]
        for some in ([5000, 3, 0, 900], [0, 2, 0, 4], [64, 3, 0, 899], [4999, 0, 0, 1]):
            seen = tuple(kv if kv >= queries else 0 for kv in some)
            batch.kv_lens_device.copy_(torch.tensor(seen))
            graph.replay()
            expected = absorbed(query, case.rows, replace(batch, kv_lens=seen), **options)
            for found in made:
                check(tuple(t.cpu() for t in found), tuple(t.cpu() for t in expected))

    @pytest.mark.parametrize("record", ["dense", "mla_fp8"])
    def test_lists(self, record: str) -> None:
        rows = pool(record, 1024).cuda()
        query = torch.randn(7, 16, 576, device="cuda").to(torch.bfloat16)
        slots = torch.zeros(7, 512, dtype=torch.int32, device="cuda")
        options = {"latent_dim": 512, "scale": 0.07, "record": RECORDS[record]}
        flashmla.mla_sparse(query, rows, slots, **options)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = flashmla.mla_sparse(query, rows, slots, **options)
        for _ in range(3):
            slots.copy_(torch.randint(-1, 1024, (7, 512)))
            slots[2] = -1
            graph.replay()
            expected = mla_sparse(query, rows, slots, **options)
            check(tuple(t.cpu() for t in found), tuple(t.cpu() for t in expected))

    def test_lengths(self) -> None:
        window, more = pool("v4_fp8", 1024).cuda(), pool("v4_fp8", 4096).cuda()
        query = torch.randn(7, 64, 512, device="cuda").to(torch.bfloat16)
        sink = torch.randn(64, device="cuda")
        near = torch.randint(0, 1024, (7, 128), device="cuda").int()
        far = torch.full((7, 1000), -1, device="cuda", dtype=torch.int32)
        lengths = torch.zeros(7, device="cuda", dtype=torch.int32)
        options = {"scale": 0.05, "record": RECORDS["v4_fp8"], "extra": more, "extra_slots": far}
        graph = torch.cuda.CUDAGraph()
        arguments = (query, window, near, sink)
        flashmla.sparse_attend(*arguments, **options, extra_lengths=lengths)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = [
                flashmla.sparse_attend(*arguments, **options, extra_lengths=lengths)
                for _ in range(2)
            ]
        for some in ([0] * 7, [1000] * 7, [0, 1, 63, 64, 65, 128, 999], [1000, *[0] * 6]):
            lengths.copy_(torch.tensor(some))
            far.copy_(torch.randint(0, 4096, (7, 1000)))
            far.masked_fill_(torch.arange(1000, device="cuda") >= lengths[:, None], -1)
            near[3] = -1
            graph.replay()
            expected = sparse_attend(*arguments, **options)
            for found in made:
                check(tuple(t.cpu() for t in found), tuple(t.cpu() for t in expected))


def test_optional_arguments_that_a_build_has_besides() -> None:
    """An extension's functions may take a tensor to write to, and more, behind the others."""
    with torch.library._scoped_library("kvtier_test", "DEF") as library:
        library.define("three(Tensor a, Tensor? b, Tensor? c) -> Tensor")
        library.impl("three", lambda a, b, c: a + (b is None) + (c is None), "CPU")
        assert flashmla._filled(torch.ops.kvtier_test.three)(torch.tensor(5)) == 7


def test_what_is_kept_of_a_batch_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch() -> PagedBatch:
        nothing = torch.zeros(1, dtype=torch.int32)
        return PagedBatch((1,), (1,), nothing, nothing, nothing, 64)

    kept: PerBatch[str] = PerBatch()
    one, two = batch(), batch()
    assert kept.get(one, 1, lambda: "a") == kept.get(one, 1, lambda: "b") == "a"
    assert kept.get(one, 2, lambda: "c") == "c" and kept.find(two, 1) is None
    assert kept.put(two, 1, "d") == kept.find(two, 1) == "d"
    assert len(kept) == 2
    # A graph's are its own.
    monkeypatch.setattr(planned, "capturing", lambda: True)
    assert kept.find(two, 1) is None and kept.get(two, 1, lambda: "e") == "e"
    monkeypatch.setattr(planned, "capturing", lambda: False)
    assert kept.find(two, 1) == "d" and len(kept) == 3
    with monkeypatch.context() as other:
        other.setattr(planned, "_capture", lambda: 77)
        assert kept.find(two, 1) is None and kept.get(two, 1, lambda: "f") == "f"
    assert kept.find(two, 1) == "d" and len(kept) == 4
    del one
    gc.collect()
    assert len(kept) == 3 and kept.find(two, 1) == "d"
    del two
    gc.collect()
    assert len(kept) == 0
