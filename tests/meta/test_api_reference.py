"""docs/api.md says what the code says, and its generator notices when it does not."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import kvtier

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api", ROOT / "scripts" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(generator: ModuleType) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert text == generator.reference(), "run python scripts/api_reference.py and look at the diff"


def test_every_parameter_is_in_it(generator: ModuleType) -> None:
    """Against the runtime's own view of the same signatures."""
    for name in kvtier.__all__:
        thing = getattr(kvtier, name)
        if not inspect.isclass(thing) or thing.__module__.partition(".")[0] != "kvtier":
            continue
        entry = generator.entry("kvtier", name)
        for member, function in vars(thing).items():
            if member.startswith("_") or not inspect.isfunction(function):
                continue
            (line,) = [n for n in entry.splitlines() if n.strip().startswith(f"{member}(")]
            for parameter in list(inspect.signature(function).parameters)[1:]:
                assert f"{parameter}:" in line or f"{parameter}=" in line, (name, line)


def test_the_check_can_fail(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "TARGET", tmp_path / "api.md")
    monkeypatch.setattr("sys.argv", ["api_reference.py", "--check"])
    assert generator.main() == 1
    monkeypatch.setattr("sys.argv", ["api_reference.py"])
    assert generator.main() == 0
    monkeypatch.setattr("sys.argv", ["api_reference.py", "--check"])
    assert generator.main() == 0
