"""The list of injected bugs fits the sources, and the script tells caught from missed."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutate.py"


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


def test_every_pattern_occurs_once(mutate: ModuleType) -> None:
    assert mutate.misfits() == []
    assert len(mutate.BUGS) >= 35


def test_a_pattern_that_does_not_fit_is_told(
    mutate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = mutate.Bug("nothing", "frames", "no such line", "")
    monkeypatch.setattr(mutate, "BUGS", [bug, bug])
    assert mutate.misfits() == [
        "'nothing': its pattern occurs 0 times in frames.py",
        "'nothing': its pattern occurs 0 times in frames.py",
        "'nothing' is there twice",
    ]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("a frame may be given back twice", "tests/unit/test_core_frames.py"),
        ("fields of a key run together", "tests/unit/test_core_keys.py"),
        ("the disk table compares half of a key", "tests/unit/test_core_disk.py"),
    ],
)
def test_some_bugs_are_caught(
    mutate: ModuleType, name: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bug,) = [b for b in mutate.BUGS if b.name == name]
    monkeypatch.setattr(mutate, "STAGES", ([stage],))
    mutate.snapshot(tmp_path)
    seen, _, reason = mutate.caught(tmp_path, bug)
    assert seen and reason.startswith(stage)


def test_a_harmless_change_is_missed(
    mutate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "STAGES", (["tests/unit/test_core_frames.py"],))
    mutate.snapshot(tmp_path)
    assert (
        mutate.caught(tmp_path, mutate.Bug("", "frames", "a frame given", "a frame given"))[0]
        is False
    )


def test_list_prints_the_bugs() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--list", "frame"], capture_output=True, text=True, check=True
    )
    assert "a frame may be given back twice" in done.stdout
