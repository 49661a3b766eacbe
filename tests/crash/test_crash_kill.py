"""A process is killed at a random moment while it publishes and deletes; what it had been told to
be durable is there afterwards, and nothing is there in part."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash import scenario

STEPS = 400


def kill_once(root: Path, seed: int, rng: random.Random) -> tuple[int, int]:
    """Start the course in a child, kill it midway; returns (steps ended, steps begun)."""
    reader, writer = os.pipe()
    arguments = [str(root), f"/dev/fd/{writer}", str(seed), str(STEPS)]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.scenario", *arguments],
        pass_fds=[writer],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    os.close(writer)
    said = b""
    try:
        while b"opened" not in said:
            said += _some(reader, 60.0)
        until = time.monotonic() + rng.random() ** 2 * 0.5
        while (left := until - time.monotonic()) > 0:
            said += _some(reader, left)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    while data := os.read(reader, 1 << 16):
        said += data
    os.close(reader)
    assert b"failed" not in said, said
    return said.count(b"done"), said.count(b"begin")


def _some(fd: int, wait_s: float) -> bytes:
    ready, _, _ = select.select([fd], [], [], wait_s)
    return os.read(fd, 1 << 16) if ready else b""


def kill_often(top: Path, times: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    seen = {"in effect": 0, "not in effect": 0, "between": 0}
    for number in range(times):
        root = top / f"disk-{number}"
        done, begun = kill_once(root, seed + number, rng)
        with scenario.open_for_course(str(root)) as store:
            in_effect = scenario.verify(store, seed + number, STEPS, done, begun)
            # It goes on as if nothing had happened.
            for step in list(scenario.course(seed + number, STEPS))[in_effect : in_effect + 3]:
                if step.kind == "put":
                    store.put_group(step.records())
                else:
                    store.delete([scenario.key_of(*name) for name in step.names])
            store.check()
        if done == begun:
            seen["between"] += 1
        else:
            seen["in effect" if in_effect == begun else "not in effect"] += 1
    return seen


def test_kills_at_random_moments(tmp_path: Path) -> None:
    seen = kill_often(tmp_path, times=20, seed=1)
    assert seen["in effect"] + seen["not in effect"] > 0, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_kills(tmp_path: Path) -> None:
    seen = kill_often(tmp_path, times=300, seed=1000)
    assert seen["in effect"] > 0, seen
    assert seen["not in effect"] > 30, seen
