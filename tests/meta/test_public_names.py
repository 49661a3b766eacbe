"""The surface of the package: exactly the names promised, and no torch behind ``import kvtier``."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier

ROOT = Path(__file__).parents[2]

PROMISED = {
    "Adaptive", "Cache", "CacheClosed", "CacheConfig", "CacheStats", "Capture",
    "CheckpointFacts", "CheckpointPolicy", "ConfigError", "Dense", "DeviceStep",
    "EvictionPolicy", "Identity",
    "InvariantError", "KVTierError", "LayerView", "LayoutMismatch", "Lease", "LeaseError",
    "LeaseInfo", "LeaseNotReady", "LeaseReleased", "LeaseState", "Op", "OpKind", "OutOfPages",
    "PageInfo", "PageReport", "Part", "Pin", "PrefixMatch", "Record", "RestorePolicy", "Span",
    "Sparse", "Step", "StepBuffers", "Store", "StoreError", "StoreLocked", "Tier", "TierStats",
    "TokenBuffer", "TokenError", "Tokens", "Transfer", "__version__", "pack",
}  # fmt: skip


def test_names_are_those_promised() -> None:
    assert set(kvtier.__all__) == PROMISED
    missing = [name for name in kvtier.__all__ if not hasattr(kvtier, name)]
    assert not missing


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Lees"):
        _ = kvtier.Lees  # type: ignore[attr-defined]


def test_every_public_thing_has_a_docstring() -> None:
    bare = []
    for name in kvtier.__all__:
        thing = getattr(kvtier, name)
        if not isinstance(thing, type):
            continue
        members = [m for m in vars(thing).items() if not m[0].startswith("_") and callable(m[1])]
        if not (thing.__doc__ or "").strip():
            bare.append(name)
        bare += [
            f"{name}.{member}"
            for member, function in members
            if not (getattr(function, "__doc__", "") or "").strip() and member != "close"
        ]
    assert not bare


@pytest.mark.parametrize("module", ["kvtier", "kvtier.layouts", "kvtier.cli", "kvtier.testing"])
def test_import_needs_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "heavy = {'torch', 'triton', 'transformers'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_starts_nothing() -> None:
    code = (
        "import threading, os, sys; before = set(os.environ.items()); import kvtier.cache; "
        "assert threading.active_count() == 1; assert set(os.environ.items()) == before"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_library_reads_no_environment_variable() -> None:
    found = []
    for folder in ("kvtier", "adapters/deepseek/kvtier_deepseek"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute | ast.Subscript):
                    text = ast.unparse(node)  # handing it on to a child process is no reading
                    if text.startswith(("os.environ.", "os.environ[", "os.getenv")):
                        found.append(f"{path}:{node.lineno}")
    assert not found
