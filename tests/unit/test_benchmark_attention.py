"""The attention benchmark at toy sizes: it checks what it times, and writes what kernels are picked
by."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bench_attention
from benchmarks.attention_parts import PARTS, Part, Shape
from benchmarks.bench_attention import BARE, PLANNED, Timed, measure, planned, write_times
from kvtier.kernels import Case, Load, flashinfer, flashmla, measured
from tests.unit import flashinfer_double
from tests.unit.flashmla_double import Double

ABOUT = {
    "device": "a device",
    "git": "abc",
    "date": "today",
    "versions": {"torch": "2", "triton": "3"},
}


def toy(part: Part, **more: Any) -> Shape:
    if part.operation == "mla_absorbed":
        return Shape(2, 3, 130, **more)
    return Shape(2, 3, 40, extra=30 if part.operation == "sparse_attend" else 0, **more)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    part = PARTS[name]
    shapes = [toy(part), toy(part, queries=2)]
    found = list(measure(part, shapes, device="cpu", turns=2))
    assert [timed.shape for timed in found] == shapes
    for timed in found:
        assert timed.errors == {"torch": 0.0} and len(timed.samples["torch"]) == 2
        (result,) = timed.results()
        assert result.name == part.result and result.ratio is None
        assert result.params == {**timed.shape.params, "backend": "torch"}
    assert capsys.readouterr().out.count(" us ") == 2


@pytest.mark.parametrize("name", [n for n in PARTS if n != "packed"])
def test_flashmlas_functions_are_called_as_they_want_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and as a backend: both answer what the reference does."""
    double, part = Double(), PARTS[name]

    def with_out(call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            assert arguments[-1] is None  # what to write to, of which the double knows nothing
            return call(*arguments[:-1])

        return run

    operations = {call: with_out(run) for call, run in double.calls.items()}
    monkeypatch.setattr(torch.ops, "_flashmla_C", SimpleNamespace(**operations), raising=False)
    monkeypatch.setattr(flashmla, "_found", lambda: (double.calls, ""))
    shape = Shape(2, 64, 130) if part.operation == "mla_absorbed" else Shape(2, 64, 128)
    if name == "v4":
        shape = Shape(2, 64, 128, extra=64)
    work = part.make(part, shape, "cpu", True)
    right = work.kernel("torch")
    run = {"mla_absorbed": flashmla.absorbed, "sparse_attend": flashmla.sparse_attend}.get(
        part.operation, flashmla.mla_sparse
    )
    assert len(work.bare) == len(right) == 2
    for bare, reference in zip(work.bare, right, strict=True):
        out, lse = reference()
        ours, ours_lse = run(*reference.args, **reference.keywords)
        assert bench_attention._error((ours, ours_lse), (out, lse)) <= bench_attention.BOUND
        made = double.made
        theirs = bare()[0].reshape(out.shape)
        assert double.made == made  # its schedule was there
        assert (theirs.float() - out.float()).abs().max() <= 8e-3 * out.float().abs().max()


def test_flashinfers_kernels_are_called_under_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"flashinfer.mla": flashinfer_double.NEW}
    monkeypatch.setattr(flashinfer, "importlib", SimpleNamespace(import_module=modules.get))
    part, shape = PARTS["dense"], Shape(2, 4, 130, queries=2)
    assert part.make(part, shape, "cpu", False).planned is None
    monkeypatch.setattr(flashinfer, "missing", lambda: "")
    assert PARTS["packed"].make(PARTS["packed"], shape, "cpu", False).planned is None
    work = part.make(part, shape, "cpu", False)
    assert work.planned is not None
    plans = flashinfer_double.Double.plans
    calls = work.planned()
    assert flashinfer_double.Double.plans == plans + 1 and len(calls) == 2
    for call, reference in zip(calls, work.kernel("torch"), strict=True):
        assert bench_attention._error(call(), reference()) <= bench_attention.BOUND
    assert flashinfer_double.Double.plans == plans + 1


def test_what_is_made_of_a_batch_is_made_anew_by_each_backend() -> None:
    work = PARTS["dense"].make(PARTS["dense"], Shape(1, 2, 40), "cpu", False)
    one, two = (work.kernel("torch") for _ in range(2))
    assert one[0].args[2] is one[1].args[2] is not two[0].args[2]


def test_what_plans_on_the_host_is_timed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many calls as a graph would have, each made anew."""
    steps: list[list[int]] = []

    def make() -> list[Any]:
        mine: list[int] = []
        steps.append(mine)
        return [lambda: mine.append(0), lambda: mine.append(1)]

    def elapsed(call: Any) -> float:
        call()
        return 240.0

    monkeypatch.setattr(bench_attention, "_elapsed", elapsed)
    assert bench_attention._stepped(make, 3) == [240 / 42] * 3
    assert [sorted(step) for step in steps[1:]] == [[0] * 21 + [1] * 21] * 4


def test_targets_come_first_and_time_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ("v4", "window")
    order = [(part.result, shape) for part, shape in planned(parts, quick=False)]
    targets = [(PARTS[p].result, shape) for p in parts for shape in PARTS[p].targets]
    assert order[: len(targets)] == targets and len(set(order)) == len(order)
    assert order[len(targets) :] == [(PARTS[p].result, s) for p in parts for s in PARTS[p].sweep]
    assert [(p.result, s) for p, s in planned(parts, quick=True)] == targets

    clock = iter(range(100))
    done = []

    def measured_once(part: Part, shapes: list[Shape], _: None) -> Any:
        done.append((part.result, *shapes))
        return [Timed(part, *shapes, {"triton": [float(len(done))]}, {"triton": 0.0})]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_attention, "meta", lambda: ABOUT)
    monkeypatch.setattr(bench_attention, "measure", measured_once)
    monkeypatch.setattr(bench_attention.time, "monotonic", lambda: next(clock))
    found = bench_attention.run(False, parts=parts, json_path=tmp_path / "a.json", seconds=15)
    assert done == order[:15] and len(found) == 15
    assert capsys.readouterr().out.count("left out after 15 s") == len(order) - 15
    # Part by part, whenever each size was measured.
    assert [r.name for r in found] == sorted((r.name for r in found), reverse=True)
    assert len(json.loads((tmp_path / "a.json").read_text())["results"]) == 15


def test_what_is_wrong_is_seen() -> None:
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    lse[1] = -torch.inf
    error = bench_attention._error
    assert error((out, lse), (out, lse)) == 0
    assert error((out + 0.5, lse), (out, lse)) > 0.05
    assert error((out, lse + 0.1), (out, lse)) == float("inf")
    assert error((out, lse * 1.4426950408889634), (out, lse)) == float("inf")  # in base 2
    assert error((out, lse.abs()), (out, lse)) == float("inf")  # +inf where there are no keys
    assert error((out * torch.nan, lse), (out, lse)) == float("inf")


def test_a_backend_that_fails_loses_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = PARTS["dense"]
    monkeypatch.setattr(bench_attention, "_backends", lambda *_: ["triton", "torch"])
    timed = next(measure(part, [toy(part)], device="cpu", turns=1))
    assert timed.errors == {"triton": float("inf"), "torch": 0.0}
    assert list(timed.samples) == ["torch"]
    assert "triton: ConfigError" in capsys.readouterr().out


def timed(part: str, shape: Shape, us: dict[str, float], **errors: float) -> Timed:
    return Timed(PARTS[part], shape, {name: [value] for name, value in us.items()}, errors)


class TestTheTable:
    def test_is_what_kernels_are_picked_by(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "measured.json"
        one, two = Shape(1, 16, 8192), Shape(8, 128, 1000, queries=2, ragged=True)
        small = {BARE: 9.0, "triton": 15.04, "flashmla": 29.0}
        large = {"triton": 20.0, "flashmla": 19.0}
        found = [
            timed("dense", one, small, triton=0.001, flashmla=0.0),
            timed("dense", two, large, triton=0.002, flashmla=0.003),
            timed("v4", Shape(2, 64, 128, extra=512, queries=3), {"triton": 5.0}, triton=0.0),
        ]
        write_times(path, found, ABOUT)
        monkeypatch.setattr(measured, "FILES", (path.name,))
        monkeypatch.setattr(measured, "__file__", str(tmp_path / "measured.py"))
        monkeypatch.setattr(measured, "device_name", lambda: "a device")
        measured._shipped.cache_clear()
        try:
            case = Case("mla_absorbed", "dense", (576, 512), torch.bfloat16, "cuda")
            known = measured.figures(case)
            assert known is not None and known.checked == {"triton", "flashmla"}
            mean = sum(two.kv_lens) // 8
            assert known.times == {
                Load(1, 16, 8192): {"triton": 15.0, "flashmla": 29.0},
                Load(8, 128, mean, queries=2): {"triton": 20.0, "flashmla": 19.0},
            }
            v4 = measured.figures(Case("sparse_attend", "v4_fp8", (512,), torch.bfloat16, "cuda"))
            assert v4 is not None and list(v4.times) == [Load(6, 64, 640)]
        finally:
            measured._shipped.cache_clear()

    def test_keeps_other_cases_and_replaces_its_own(self, tmp_path: Path) -> None:
        path = tmp_path / "measured.json"
        shape = Shape(1, 16, 64)
        write_times(path, [timed("dense", shape, {"triton": 1.0}, triton=0.0)], ABOUT)
        write_times(path, [timed("window", shape, {"triton": 2.0}, triton=0.0)], ABOUT)
        write_times(path, [timed("dense", shape, {"triton": 3.0}, triton=1.0)], ABOUT)
        cases = {case["operation"]: case for case in json.loads(path.read_text())["cases"]}
        assert [cases[name]["rows"][0][-1] for name in ("mla_absorbed", "mla_sparse")] == [3.0, 2.0]
        assert [cases[n]["checked"] for n in ("mla_absorbed", "mla_sparse")] == [[], ["triton"]]

    def test_knows_nothing_of_what_no_graph_can_hold(self, tmp_path: Path) -> None:
        path = tmp_path / "measured.json"
        us = {BARE: 1.0, PLANNED: 2.0, "triton": 4.0, "flashinfer": 3.0}
        errors = {PLANNED: 0.0, "triton": 0.0, "flashinfer": 0.0}
        found = Timed(PARTS["dense"], Shape(1, 16, 64), {n: [v] for n, v in us.items()}, errors)
        write_times(path, [found], ABOUT)
        (case,) = json.loads(path.read_text())["cases"]
        assert case["checked"] == case["columns"][4:] == ["triton"]

    def test_one_wrong_size_and_a_backend_does_not_count(self, tmp_path: Path) -> None:
        path = tmp_path / "measured.json"
        us = {"triton": 1.0, "flashmla": 1.0}
        found = [
            timed("dense", Shape(1, 16, 64), us, triton=0.001, flashmla=0.001),
            timed("dense", Shape(2, 16, 64), {"flashmla": 1.0}, triton=float("inf"), flashmla=0.0),
        ]
        write_times(path, found, ABOUT)
        (case,) = json.loads(path.read_text())["cases"]
        assert case["checked"] == ["flashmla"]
        assert case["rows"][1] == [2, 1, 16, 64, None, 1.0]

    def test_is_of_one_device(self, tmp_path: Path) -> None:
        path = tmp_path / "measured.json"
        found = [timed("dense", Shape(1, 16, 64), {"triton": 1.0}, triton=0.0)]
        write_times(path, found, ABOUT)
        with pytest.raises(ValueError, match="another device"):
            write_times(path, found, {**ABOUT, "device": "another device"})

    def test_the_shipped_one_is_in_this_form(self) -> None:
        path = bench_attention.TABLE
        assert bench_attention._dumped(json.loads(path.read_text())) == path.read_text()


def test_what_was_measured_is_written_whatever_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(part: Part, shapes: Any, library: Any) -> Any:
        assert shapes == [part.targets[0]]
        yield timed("dense", Shape(1, 16, 64), {BARE: 3.0, "triton": 1.5}, triton=0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_attention, "measure", measure)
    monkeypatch.setattr(bench_attention, "meta", lambda: ABOUT)
    table, results = tmp_path / "table.json", tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        bench_attention.run(True, None, table, ["dense"], results)
    assert json.loads(table.read_text())["cases"][0]["rows"] == [[1, 1, 16, 64, 1.5]]
    (result,) = json.loads(results.read_text())["results"]
    assert (result["median"], result["baseline"], result["ratio"]) == (1.5, 3.0, 2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention.run(quick=True) == []
    assert "needs a CUDA device" in capsys.readouterr().out
