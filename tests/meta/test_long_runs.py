"""What ``make soak`` asks for holds: without a limit nothing is cut off, whatever a test is marked
with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = """
import time
import pytest

@pytest.mark.timeout(0.3)
def test_sleeps():
    time.sleep(0.8)
"""


@pytest.mark.parametrize("limit", [None, "--timeout=0"])
def test_no_limit_is_no_limit(limit: str | None, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    ran = subprocess.run(
        [*command, *filter(None, [limit]), f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ran.returncode == 0) == (limit is not None), ran.stdout + ran.stderr
    assert limit is not None or "Timeout" in ran.stdout
