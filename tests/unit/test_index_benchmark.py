"""The benchmark of choosing entries runs at toy sizes, and does not tell of what is wrong."""

import pytest
import torch

from benchmarks import bench_index


def test_every_size_is_told() -> None:
    results = list(bench_index.measure(bench_index.TOY, "torch", "cpu"))
    assert [r.params["entries"] for r in results] == [24, 20]
    assert all(r.name == "index_topk_us" and r.median > 0 for r in results)


def test_a_wrong_choice_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_index, "_equal", lambda ours, theirs: 0.99)
    assert list(bench_index.measure(bench_index.TOY, "torch", "cpu")) == []
    assert "only 0.99" in capsys.readouterr().out


def test_the_share_that_is_equal() -> None:
    ours = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    theirs = torch.tensor([[4, 3, 2, 9], [5, 6, 7, 8]])
    assert bench_index._equal(ours, theirs) == 7 / 8
