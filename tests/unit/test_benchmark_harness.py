"""The harness: what is timed, what is written, and when a comparison fails."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bench_tiers, bench_ttft, compare, harness, run
from benchmarks.harness import Result
from benchmarks.prefixes import Prefix, RawFile
from benchmarks.workload import Workload
from kvtier import Tier
from kvtier.layouts import swa_c4_c128


def result(name: str = "match_us", median: float = 10.0, unit: str = "us", **params: int) -> Result:
    return Result(name=name, params=params, unit=unit, median=median, p10=9.0, p90=12.0, n=5)


def test_summary_agrees_with_numpy() -> None:
    samples = list(np.random.default_rng(0).random(37))
    got = harness.summarise("x", samples, unit="us")
    want = np.quantile(samples, [0.5, 0.1, 0.9])
    assert [got.median, got.p10, got.p90] == pytest.approx(list(want))
    assert got.n == 37
    with pytest.raises(ValueError, match="no samples"):
        harness.summarise("x", [], unit="us")


def test_every_call_is_made_once_in_order_without_the_collector() -> None:
    seen: list[int] = []
    collector: set[bool] = set()

    def call(i: int) -> None:
        seen.append(i)
        collector.add(gc.isenabled())

    samples = harness.measure([lambda i=i: call(i) for i in range(9)], batch=2)
    assert seen == list(range(8))  # the odd one out makes no whole batch
    assert len(samples) == 4
    assert min(samples) > 0
    assert collector == {False}
    assert gc.isenabled()


@pytest.mark.parametrize(("unit", "ratio"), [("us", 2.0), ("GB/s", 0.5)])
def test_ratio_says_how_many_times_better(unit: str, ratio: float) -> None:
    assert result(unit=unit, median=10.0).against(20.0).ratio == ratio
    assert result(unit=unit).against(None).ratio is None


def test_written_file_has_the_promised_form_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    results = [result(page=64).against(20.0), result(page=256)]
    harness.write(path, results)
    document = json.loads(path.read_text())
    assert set(document) == {"meta", "results"}
    assert set(document["meta"]) == {"git", "versions", "device", "cpu", "date"}
    assert set(document["results"][0]) == {
        "name", "params", "unit", "median", "p10", "p90", "n", "baseline", "ratio",
    }  # fmt: skip
    assert harness.read(path)[1] == results


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"meta": {}, "results": [{"name": "x"}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a benchmark file"):
        harness.read(path)
    assert compare.main([str(path), str(path)]) == 2


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ([result(median=10.0)], [result(median=11.0)], 0),
        ([result(median=10.0)], [result(median=12.0)], 1),
        ([result(median=10.0)], [result(median=5.0)], 0),
        ([result(median=10.0, unit="GB/s")], [result(median=8.0, unit="GB/s")], 1),
        ([result(median=10.0, unit="GB/s")], [result(median=20.0, unit="GB/s")], 0),
        ([result(page=64), result(page=256)], [result(page=64)], 1),  # gone
        ([result(page=64)], [result(page=64), result(page=256)], 0),  # new
        ([result()], [result(unit="ms")], 1),  # no longer comparable
    ],
)
def test_comparison_exits_1_past_the_threshold(
    tmp_path: Path, old: list[Result], new: list[Result], status: int, capsys: object
) -> None:
    before, after = tmp_path / "old.json", tmp_path / "new.json"
    harness.write(before, old, {})
    harness.write(after, new, {})
    assert compare.main([str(before), str(after), "--threshold", "0.15"]) == status


def test_runner_goes_on_past_a_broken_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(name: str, quick: bool, **options: object) -> list[Result]:
        if name == "bad":
            raise RuntimeError("no luck")
        return [result(name, quick=int(quick))]

    monkeypatch.setattr(run, "available", lambda: ["bad", "good"])
    monkeypatch.setattr(run, "_call", call)
    path = tmp_path / "out.json"
    assert run.main(["bad", "good", "--quick", "--json", str(path)]) == 1
    assert [r.key for r in harness.read(path)[1]] == [("good", (("quick", 1),))]
    assert "bad: RuntimeError: no luck" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["nothing"])


def test_every_benchmark_module_has_run() -> None:
    import ast

    for name in run.available():
        tree = ast.parse((run.HERE / f"bench_{name}.py").read_text())
        found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"]
        assert found, f"bench_{name}.py has no run()"
        assert found[0].args.args[0].arg == "quick"


def test_workload_shares_exactly_the_prefixes() -> None:
    work = Workload(sequences=30, length=64, groups=3, shared=32, probes=5)
    stored = [ids.tobytes() for ids in work.stored()]
    prefixes = {ids[: 32 * 4] for ids in stored}
    assert len(set(stored)) == 30
    assert len(prefixes) == 3
    half = [ids.tobytes() for ids in work.half_hits()]
    assert {ids[: 32 * 4] for ids in half} <= prefixes
    assert not {ids[32 * 4 :] for ids in half} & {ids[32 * 4 :] for ids in stored}
    assert not {ids.tobytes()[: 32 * 4] for ids in work.misses()} & prefixes
    assert [ids.tobytes() for ids in work.stored()] == stored


def prefix(where: Path) -> Prefix:
    layout = swa_c4_c128(layer_ratios=(0, 4, 128))
    return Prefix(layout, 4 * layout.page_tokens, device="cpu", disk=where / "cache", threads=2)


def test_a_restore_is_timed_by_stages_that_follow_one_another(tmp_path: Path) -> None:
    with prefix(tmp_path) as it:
        for source, lost in ((Tier.CPU, [Tier.GPU]), (Tier.DISK, [Tier.GPU, Tier.CPU])):
            it.forget(*lost)
            seen = it.restore(source)
            stages = seen.parts()
            assert min(stages.values()) > 0
            assert sum(stages.values()) == pytest.approx(seen.stepped)
            assert 0 < seen.planned < seen.started < seen.moved < seen.ready < seen.stepped
        with pytest.raises(AssertionError, match="DISK"):  # it is on the device now
            it.restore(Tier.DISK)


def test_a_page_that_comes_back_changed_ends_the_benchmark(tmp_path: Path) -> None:
    with prefix(tmp_path) as it:
        it.forget(Tier.GPU)
        it.plane.host.frames[:, 0] ^= 1
        with pytest.raises(AssertionError, match="came back changed"):
            it.restore(Tier.CPU)


def test_raw_file_reads_what_it_wrote(tmp_path: Path) -> None:
    with RawFile(tmp_path / "raw", 100_000, depth=2, piece=16384) as raw:
        was = bytes(raw.memory)
        assert len(was) == 102_400  # whole blocks
        assert raw.write(groups=3) > 0
        raw.memory[:] = bytes(len(was))
        assert raw.read() > 0
        assert bytes(raw.memory) == was
    assert (tmp_path / "raw").read_bytes() == was


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there it takes its time")


@without_gpu
def test_restores_are_told_beside_what_the_bytes_take(tmp_path: Path) -> None:
    results = bench_ttft.run(True, where=str(tmp_path))
    assert {r.params["from"] for r in results} == {"host", "disk"}
    floors = {(r.params["tokens"], r.params["from"]): r for r in results if r.name == "bytes_ms"}
    assert len(floors) == 4
    for r in results:
        if r.name in ("restore_ms", "first_token_ms"):
            assert r.baseline == floors[r.params["tokens"], r.params["from"]].median
    assert not list(tmp_path.iterdir())


@without_gpu
def test_ways_down_and_back_are_told_beside_the_raw_file(tmp_path: Path) -> None:
    results = bench_tiers.run(True, where=str(tmp_path))
    names = [r.name for r in results]
    assert names == 2 * [
        "raw_write", "store_to_durable", "raw_read", "disk_to_device", "disk_to_device",
    ]  # fmt: skip
    assert [r.baseline for r in results[:2]] == [None, results[0].median]
    assert [r.baseline for r in results[2:5]] == [None, results[2].median, results[2].median]
    assert not list(tmp_path.iterdir())


@without_gpu
@pytest.mark.parametrize("name", ["step", "pipeline"])
def test_without_a_gpu_others_say_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([name, "--quick"]) == 0
    assert "needs a CUDA device" in capsys.readouterr().out
