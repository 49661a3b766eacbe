"""The soak itself: a short one passes and reports, and what is wrong is told."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.core.ops import Kind, Part
from kvtier.data.records import Loader
from kvtier.types import Tier
from tests.device.traffic import Traffic

torch.set_num_threads(1)

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


def test_a_short_one(soak: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reopened, once after the process was killed; every tier gives pages back."""
    out = tmp_path / "summary.json"
    restored = [("pages_restored", tier) for tier in ("GPU", "CPU", "DISK")]
    for minutes in ("0.1", "0.5", "2"):  # longer where the machine is busy
        options = ["--minutes", minutes, "--layout", "mla", "--seed", "1", "--out", str(out)]
        status = soak.main([*options, "--dir", str(tmp_path)])
        said = capsys.readouterr().out
        summary = json.loads(out.read_text())
        counts = {(r["name"], r["params"].get("tier")): r["median"] for r in summary["results"]}
        if counts["requests", None] > 100:
            break
    assert status == 0, said
    assert "requests/s" in said
    assert counts["failures", None] == 0
    assert counts["requests", None] > 20
    assert all(counts[each] > 0 for each in restored)


@pytest.mark.parametrize("around", [0.0, 3.0, 12.0, 40.0])
@pytest.mark.parametrize("layout", ["all", "mla"])
@pytest.mark.parametrize("minutes", [0.05, 0.3, 1.0, 2.5, 8.0, 30.0])
def test_it_runs_for_at_least_as_long_as_asked(
    soak: ModuleType,
    minutes: float,
    layout: str,
    around: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a round takes besides its own seconds (``around``): one that is the last, with its
    checks for leaks, and no layout left out."""
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
    monkeypatch.setattr(soak, "time", clock)
    options = ["--minutes", str(minutes), "--device", "cuda", "--layout", layout]
    run, rounds = soak.Soak(soak.parse(options), tmp_path), []

    def round_(name: str, seconds: float, *, last: bool) -> None:
        nonlocal now
        run.rounds += 1
        rounds.append((name, seconds, last))
        now += seconds + around

    monkeypatch.setattr(run, "round", round_)
    monkeypatch.setattr(run, "verdict", lambda: None)
    run.run()
    names, lengths, lasts = zip(*rounds, strict=True)
    assert set(names) == set(run.layouts)
    assert lasts == (False,) * (len(rounds) - 1) + (True,)
    assert now - 100.0 >= 60 * minutes
    assert min(lengths) >= 2.0
    every = len(run.layouts) * (soak.ROUND_S + around)
    assert now - 100.0 <= max(60 * minutes + 1.5 * soak.ROUND_S + around, every)


def test_a_tier_that_gives_nothing_back_is_told(soak: ModuleType, tmp_path: Path) -> None:
    run = soak.Soak(soak.parse(["--layout", "mla"]), tmp_path)
    found = {"requests": 300, "restored from GPU": 3, "restored from CPU": 1}
    run.counts.update({**found, "restored from DISK": 1})
    run.per_layout["mla"].update(found)
    run.memory = [{"rss_mib": 100, "threads": 1}, {"rss_mib": 300, "threads": 1}]
    run.verdict()
    assert run.failures[0] == "mla: nothing was restored from DISK"
    assert run.failures[1].startswith("rss_mib has grown")


@pytest.mark.parametrize("source", [Tier.CPU, Tier.DISK])
def test_one_wrong_byte_of_one_tier_is_told(
    source: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Loader.load

    def wrong(self: Loader, parts: Any, *args: Any) -> Any:
        event = load(self, parts, *args)
        for part in parts:
            assert isinstance(part, Part)
            if part.source is source and part.kind is Kind.HISTORY:
                storage = self._pool._storage["latent", 1]
                storage[part.dst[0], storage.shape[1] // 2] ^= 1
        return event

    monkeypatch.setattr(Loader, "load", wrong)
    traffic = Traffic("mla", "cpu", tmp_path, seed=2, threads=2, early=False)
    traffic.run(300.0)  # ends with the first
    traffic.close()
    assert "latent, layer 1: rows" in traffic.failures[0]
    assert any("lease" in line for line in traffic.log)


def test_a_lease_left_open_is_told(tmp_path: Path) -> None:
    traffic = Traffic("mla", "cpu", tmp_path, seed=1, threads=1)
    with traffic.cache.lease([1, 2, 3]):
        traffic.run(0.1)
        assert "leases left open" in traffic.failures[0]
    traffic.close()
