"""The benchmark of chunked prefill runs at toy sizes, and what it tells adds up."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import bench_prefill
from benchmarks.harness import read
from benchmarks.prefill_parts import TOY, Layer
from kvtier.kernels import Workspace

SMALL = replace(
    TOY,
    workspaces=(16, 32),
    tokens=8,
    contexts=(32, 64),
    batches=(1, 4),
    long=100,
    prompts=(32,),
    pieces=(8, 16),
    queries=(1, 8),
    repeats=2,
)


def test_every_part_tells_of_both_sides() -> None:
    results = bench_prefill.run(False, SMALL)
    found = {name: [r for r in results if r.name == name] for name in {r.name for r in results}}
    assert set(found) == {
        "chunk_ms", "chunk_mb", "prompt_ms", "stall_ms", "form_us", "attend_ms", "materialised_us",
    }  # fmt: skip
    # Two contexts of one sequence and of four, and one long beside 31 short: each whole, in 32 rows
    # and in 16.
    assert len(found["chunk_ms"]) == len(found["chunk_mb"]) == 5 * 3
    for r in found["chunk_mb"]:
        whole = r.params["workspace"] == "whole"
        assert (r.baseline is None) == whole
        assert whole or (r.ratio is not None and r.ratio > 1)  # less memory than all at once
    behind = [r for r in found["chunk_mb"] if r.params["batch"] == 1]
    bounded = {r.params["context"]: r.median for r in behind if r.params["workspace"] == "16"}
    assert bounded[32] == bounded[64]
    assert [r.params["piece"] for r in found["prompt_ms"]] == [32, 16, 8]
    assert [r.params["form"] for r in found["form_us"]] == ["absorbed", "materialised"] * 2
    assert {r.params["backend"] for r in found["attend_ms"]} == {"sdpa", "torch"}


def test_files_are_written_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes next: here, nothing behind the backends."""

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_prefill, "mixed", stop)
    table, results = tmp_path / "table.json", tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        bench_prefill.run(False, SMALL, table, results)
    (case,) = json.loads(table.read_text())["cases"]
    assert case["operation"] == "mla_materialised" and case["checked"] == ["torch"]
    assert [row[:4] for row in case["rows"]] == [[1, 32, 2, 64], [4, 8, 2, 16]]
    assert {r.name for r in read(results)[1]} == {"attend_ms", "materialised_us"}


def test_what_is_wrong_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Layer.__call__

    def wrong(self: Layer, workspace: Workspace) -> torch.Tensor:
        return right(self, workspace) * 1.1

    monkeypatch.setattr(Layer, "__call__", wrong)
    table = tmp_path / "table.json"
    bench_prefill.run(True, SMALL, table)
    (case,) = json.loads(table.read_text())["cases"]
    assert case["checked"] == []


def test_a_case_that_fails_is_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Layer, "absorbed", broken)
    names = {r.name for r in bench_prefill.run(True, SMALL)}
    assert names == {"chunk_ms", "chunk_mb", "attend_ms", "materialised_us"}
    assert "forms: RuntimeError: no room" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("at", "times", "steps", "total"),
    [
        ([0], [3.0], 1, 3.0),
        ([0, 4], [1.0, 5.0], 5, 15.0),
        ([0, 2, 6], [1.0, 3.0, 11.0], 7, 1 + 2 + 3 + 5 + 7 + 9 + 11),
    ],
)
def test_steps_between_those_measured(
    at: list[int], times: list[float], steps: int, total: float
) -> None:
    assert bench_prefill._sum(at, times, steps) == pytest.approx(total)


def test_a_long_call_is_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(bench_prefill, "LONG_MS", -1)
    samples = bench_prefill.timed(lambda: calls.append(1), replace(TOY, repeats=9))
    assert len(samples) == len(calls) == 1
    monkeypatch.setattr(bench_prefill, "LONG_MS", 1e6)
    samples = bench_prefill.timed(lambda: calls.append(1), replace(TOY, repeats=9))
    assert len(samples) == 9 and len(calls) == 1 + 10
    samples = bench_prefill.timed(lambda: calls.append(1), replace(TOY, repeats=2), warm=True)
    assert len(samples) == 2 and len(calls) == 1 + 10 + 2


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    both = {name: partial(calls.append, name) for name in "ab"}
    samples = bench_prefill.in_turn(both, replace(TOY, repeats=3))
    assert calls == list("ab" * 4) and [len(samples[name]) for name in "ab"] == [3, 3]
    calls.clear()
    monkeypatch.setattr(bench_prefill, "LONG_MS", -1)
    samples = bench_prefill.in_turn(both, replace(TOY, repeats=3))
    assert calls == list("ab" * 2) and [len(samples[name]) for name in "ab"] == [1, 1]
