"""docs/api.md says what the code says, and its generator notices when it does not."""

import dataclasses
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import kvtier
import kvtier_deepseek

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


@pytest.mark.parametrize("module", [kvtier, kvtier_deepseek])
def test_every_parameter_is_in_it(generator: ModuleType, module: ModuleType) -> None:
    """Against the runtime's own view of the same signatures."""
    seen = 0
    for name in module.__all__:
        thing = getattr(module, name)
        if getattr(thing, "__module__", "").partition(".")[0] != module.__name__:
            continue
        lines = generator.entry(module.__name__, name).splitlines()
        functions = [(name, thing)] if inspect.isfunction(thing) else []
        if inspect.isclass(thing):
            functions = [(n, getattr(thing, n)) for n in vars(thing) if not n.startswith("_")]
        for member, function in functions:
            if not inspect.isroutine(function):
                continue
            (line,) = [n for n in lines if n.strip().startswith(f"{member}(")]
            for parameter in inspect.signature(function).parameters:
                shown = f"{parameter}:" in line or f"{parameter}=" in line
                assert shown or parameter == "self", (name, line)
                seen += 1
    assert seen > 50


def test_every_part_of_the_adapter_says_what_it_is(generator: ModuleType) -> None:
    """Functions, methods, properties and fields; what overrides something says so there."""
    bare = []
    for name in kvtier_deepseek.__all__:
        thing = getattr(kvtier_deepseek, name)
        if not (thing.__doc__ or "").strip():
            bare.append(name)
        if not inspect.isclass(thing):
            continue
        for member in (m for m in vars(thing) if not m.startswith("_")):
            if inspect.isroutine(part := getattr(thing, member)) or isinstance(part, property):
                bare += [f"{name}.{member}"] * (not (inspect.getdoc(part) or "").strip())
        if dataclasses.is_dataclass(thing):
            entry = generator.entry("kvtier_deepseek", name)
            fields = [f.name for f in dataclasses.fields(thing)]
            bare += [f"{name}.{field}" for field in fields if f"\n| `{field}` | " not in entry]
    assert not bare


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
