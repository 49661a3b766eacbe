"""The suite's own rules: a leaked lease fails the test that leaked it, and profiles are taken."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEAK = """
import kvtier, pytest
from kvtier.layouts import mla
from kvtier.testing import ManualTransfer

@pytest.fixture(scope="module")
def cache():
    layout = mla(layers=1, latent_dim=8, rope_dim=8)
    config = kvtier.CacheConfig(gpu_bytes=8 * layout.page_bytes())
    with kvtier.Cache(layout, config, model="m", device="cpu", transfer=ManualTransfer()) as made:
        yield made

def test_leaks(cache):
    lease = cache.lease([1, 2, 3])
    ring = [lease]
    ring.append(ring)  # only the collector finds it

def test_innocent(cache):
    pass
"""


def run_suite(tmp_path: Path, code: str, *options: str) -> str:
    """pytest's output over one test file, under this repository's configuration."""
    folder = tmp_path / "tests"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(code)
    config = (ROOT / "pyproject.toml").read_text()
    config = config.replace('pythonpath = ["."', f'pythonpath = ["{ROOT}"')
    (tmp_path / "pyproject.toml").write_text(config)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout


def test_leaked_lease_fails_its_own_test(tmp_path: Path) -> None:
    out = run_suite(tmp_path, LEAK)
    assert "ERROR tests/test_it.py::test_leaks" in out, out
    assert "2 passed, 1 error" in out, out
    assert "ResourceWarning" in out
    assert "test_it.py:14" in out, out  # the line that opened the lease


def test_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from hypothesis import settings

def test_profile(long_run):
    print("profile", settings.default.max_examples, settings.default.derandomize, long_run)
"""
    monkeypatch.setenv("CI", "true")
    assert "profile 200 True False" in run_suite(tmp_path / "ci", code, "-s")
    assert "profile 20000 False True" in run_suite(tmp_path / "long", code, "-s", "--long")
