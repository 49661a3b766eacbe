"""Who may import whom.  What stands lower in ``LAYERS`` never imports what stands higher.
And what tests take from each other exists."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up.  Units of one row do not know each other, except those listed in INSIDE.
LAYERS = [
    {"errors", "futures", "progress"},
    {"types"},
    {"tokens", "config"},
    {"layouts"},
    {"core"},
    {"arguments", "device_step", "seams", "sizing", "speeds", "trace"},
    {"kernels", "stores"},
    {"data", "deadlines"},
    {"watching"},
    {"pump", "step", "metrics"},
    {"flushing", "lease"},
    {"assembly", "stepping"},
    {"cache"},
    {"testing", "__init__"},
    {"cli_disk", "cli_doctor", "cli_trace"},
    {"cli"},
]
RANK = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}
PURE = {"errors", "types", "tokens", "config", "layouts", "core", "seams", "sizing"}
PURE |= {"arguments", "speeds", "trace"}
# Of the standard library; `config` alone may ask os for `fspath`.
IMPURE_STDLIB = {"threading", "time", "os", "random", "asyncio", "socket", "subprocess"}
ALLOWED = {("config", "os.PathLike"), ("config", "os.fspath"), ("trace", "os.PathLike")}
# `Cache.__init__` picks the data plane when none is given, and stores know no kernels.
FORBIDDEN = {("data", "stores"), ("stores", "data")}
# What the adapter may use: public names only.
ADAPTER_MAY = ("kvtier.layouts", "kvtier.kernels", "kvtier.testing")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is for type checkers only) of every import in a file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        hint = id(node) in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, hint
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: absolute imports only"
            for alias in node.names:  # catches `from kvtier import core`
                yield f"{node.module}.{alias.name}", hint


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT / "kvtier").parts[0].removesuffix(".py")


def violations(path: Path, me: str) -> Iterator[str]:
    for name, hint in imports(path):
        head, _, rest = name.partition(".")
        if head == "kvtier":
            other = rest.split(".")[0]
            if other not in RANK:  # a public name, from the top
                other = "__init__"
            if other == me:
                continue
            if RANK[other] > RANK[me] and hint:
                continue  # a name in an annotation builds no dependency at run time
            if RANK[other] >= RANK[me] or (me, other) in FORBIDDEN:
                yield f"{path}: {me} imports {other} ({name})"
        elif head in ("kvtier_deepseek", "tests", "benchmarks"):
            yield f"{path}: the library imports {head}"
        elif me in PURE and not hint and not _pure(head) and (me, name) not in ALLOWED:
            yield f"{path}: pure unit {me} imports {name}"


def _pure(package: str) -> bool:
    if package in IMPURE_STDLIB:
        return False
    return package == "numpy" or package in sys.stdlib_module_names


def test_library_imports_downwards_only() -> None:
    found = []
    for path in sorted((ROOT / "kvtier").rglob("*.py")):
        me = unit_of(path)
        assert me in RANK, f"{path}: give {me} a row in LAYERS"
        found += violations(path, me)
    assert not found, "\n".join(found)


def test_adapter_uses_public_names_only() -> None:
    public = set(ast.literal_eval(_all_of(ROOT / "kvtier" / "__init__.py")))
    found = []
    for path in sorted((ROOT / "adapters" / "deepseek").rglob("*.py")):
        for name, _ in imports(path):
            head, _, rest = name.partition(".")
            if head == "kvtier" and rest not in public and not name.startswith(ADAPTER_MAY):
                found.append(f"{path}: imports {name}")
    assert not found, "\n".join(found)


def test_what_tests_take_from_each_other_is_there() -> None:
    """The type checker sees to everything else."""
    wrong = [w for path in sorted((ROOT / "tests").rglob("*.py")) for w in not_there(path)]
    assert not wrong, "\n".join(wrong)


def not_there(path: Path) -> Iterator[str]:
    for name, _ in imports(path):
        module, _, taken = name.rpartition(".")
        source = (ROOT / module.replace(".", "/")).with_suffix(".py")
        if module.startswith("tests.") and source.exists() and taken not in _bound(source):
            yield f"{path}: {name} is not there"


@cache
def _bound(path: Path) -> set[str]:
    """Every name that is given a meaning in a file, at whatever depth."""
    names = {name.rpartition(".")[2] for name, _ in imports(path)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _all_of(path: Path) -> ast.expr:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return node.value
    raise AssertionError(f"{path} has no __all__")


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("core", "import time"),
        ("core", "import torch"),
        ("core", "from kvtier.seams import Record"),
        ("core", "from kvtier import cache"),
        ("stores", "from kvtier.kernels import slots"),
        ("stores", "def f():\n    from kvtier.data import arena"),
        ("layouts", "from os import environ"),
        ("cache", "import kvtier_deepseek"),
    ],
)
def test_the_check_can_fail(unit: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(violations(path, unit))


def test_a_name_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("from tests.meta.test_layers import ROOT, NoSuchThing")
    assert list(not_there(path)) == [f"{path}: tests.meta.test_layers.NoSuchThing is not there"]
