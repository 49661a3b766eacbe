"""E9: a warm-up asks for every variant of every kernel that steps need, without a GPU too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "kind",
    [
        "v3",
        "v4 rivals",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                *("v4", "swa", "swa-plain", "v32", "v32-plain", "v4-plain"),
                *("swa rivals", "v32 rivals"),
            )
        ),
    ],
)
def test_steps_ask_for_nothing_that_a_warm_up_has_not(kind: str) -> None:
    path = os.pathsep.join((str(ROOT), str(ROOT / "adapters" / "deepseek")))
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.compile_counter", *kind.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["warm"] >= 5
    assert told["later"] == []
    attention = {"v4 rivals": "sparse_attend", "v32 rivals": "mla_sparse"}.get(kind)
    if attention:
        assert told["used"][attention] == ["gluon", "triton"]
