"""A process is killed at a random moment while it publishes and deletes; what it had been told to
be durable is there afterwards, and nothing is there in part."""

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from kvtier.stores import LmdbStore
from tests.crash import scenario
from tests.crash.kit import inspect_here

STEPS = 1_000_000
"""More than the fastest machine comes through before it is killed."""


_NURSERY = """
import os, sys
from kvtier.stores import LmdbStore
from tests.crash import scenario
from tests.crash.kit import inspect_here
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        scenario.main(line.split())
        os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


class Nursery:
    """A process that has everything imported and forks a fresh victim per course."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, *arguments: str) -> int:
        """Start a course; returns the pid of who goes through it."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(arguments) + "\n")
        self._process.stdin.flush()
        return int(self.answer())

    def close(self) -> None:
        self._process.communicate(timeout=300)


def kill_once(nursery: Nursery, root: Path, seed: int, rng: random.Random) -> tuple[int, int]:
    """Start the course, kill it midway; returns (steps ended, steps begun)."""
    marks = root.with_suffix(".marks")
    os.mkfifo(marks)
    reader = os.open(marks, os.O_RDONLY | os.O_NONBLOCK)
    pid = nursery.start(str(root), str(marks), str(seed), str(STEPS))
    said = b""
    give_up = time.monotonic() + 300.0
    while b"opened" not in said and time.monotonic() < give_up:
        said += _some(reader, 0.01)
    until = time.monotonic() + rng.random() ** 2 * 0.5
    while (left := until - time.monotonic()) > 0:
        said += _some(reader, left)
    os.kill(pid, signal.SIGKILL)
    assert nursery.answer() == "gone"
    while data := os.read(reader, 1 << 16):
        said += data
    os.close(reader)
    assert b"opened" in said
    assert b"failed" not in said, said
    return said.count(b"done"), said.count(b"begin")


def _some(fd: int, wait_s: float) -> bytes:
    ready, _, _ = select.select([fd], [], [], wait_s)
    data = os.read(fd, 1 << 16) if ready else b""
    if ready and not data:  # nobody has opened the other end yet
        time.sleep(0.002)
    return data


def kill_often(top: Path, times: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    seen = {"in effect": 0, "not in effect": 0, "between": 0}
    nursery = Nursery()
    for number in range(times):
        root = top / f"disk-{number}"
        done, begun = kill_once(nursery, root, seed + number, rng)
        with scenario.open_for_course(str(root)) as store:
            in_effect = scenario.verify(store, seed + number, STEPS, done, begun)
            # It goes on as if nothing had happened.
            rest = islice(scenario.course(seed + number, STEPS), in_effect, in_effect + 3)
            for step in rest:
                if step.kind == "put":
                    store.put_group(step.records())
                else:
                    store.delete([scenario.key_of(*name) for name in step.names])
            store.check()
        if done == begun:
            seen["between"] += 1
        else:
            seen["in effect" if in_effect == begun else "not in effect"] += 1
        shutil.rmtree(root)
    nursery.close()
    return seen


def test_kills_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LmdbStore, "inspect", inspect_here)
    seen = kill_often(tmp_path, times=20, seed=1)
    assert seen["in effect"] + seen["not in effect"] > 0, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_kills(tmp_path: Path) -> None:
    seen = kill_often(tmp_path, times=300, seed=1000)
    assert seen["in effect"] > 0, seen
    assert seen["not in effect"] > 30, seen
