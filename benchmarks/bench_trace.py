"""Hit rates of real request traces: checkpoint placement, eviction and admission.

Replays traces through the real core with operations that end at once (``kvtier.trace``), at
DeepSeek-V4-Flash's sizes.  ``hit_rate`` is the share of prompt tokens that need not be computed.
Its baseline is least recently used over history alone, as if checkpoints took no room, in tiers
of the same size.  Policies and traces run in parallel, each alone in its process.
"""

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from os import cpu_count
from pathlib import Path

from benchmarks.harness import ROOT, Param, Result
from kvtier.progress import Bar
from kvtier.trace import PLACEMENTS, V4_FLASH, Outcome, Trace, clairvoyant, load, replay

__all__ = ["run"]

GIB = 1 << 30
TRACES = ROOT / "benchmarks" / "traces"
HOST_GIB = {"conversation": (16, 64, 256, 1024), "agentic": (1, 4, 16, 64)}
OTHER_GIB = (4, 16, 64, 256)
DISK = 4
"""The disk tier, where there is one, has this many times the host's size."""
# Placement and eviction, without a disk and with one.
HOST_CASES = (
    ("history_only", "lru"),
    ("history_only", "s3fifo"),
    ("history_only", "adaptive"),
    ("dense", "lru"),
    ("sparse", "lru"),
    ("adaptive", "lru"),
    ("adaptive", "s3fifo"),
    ("adaptive", "adaptive"),
)
DISK_CASES = (
    ("history_only", "lru"),
    ("dense", "lru"),
    ("sparse", "lru"),
    ("adaptive", "lru"),
    ("adaptive", "adaptive"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One replay."""

    path: Path
    share: float
    """Of the trace, from its beginning."""
    policy: str
    eviction: str
    host_gib: float
    disk_gib: float

    @property
    def params(self) -> dict[str, Param]:
        return {
            "trace": self.path.stem,
            "policy": self.policy,
            "eviction": self.eviction,
            "host_gib": self.host_gib,
            "disk_gib": self.disk_gib,
        }

    @property
    def bound(self) -> "Case":
        """What this one is held against."""
        return Case(self.path, self.share, "history_only", "lru", self.host_gib, self.disk_gib)


def run(quick: bool, trace: Sequence[Path] = ()) -> list[Result]:
    """Every policy at every capacity; with ``trace`` on these files instead."""
    paths = list(trace) or [TRACES / f"{name}.jsonl" for name in HOST_GIB]
    cases = [case for path in paths for case in _cases(path, quick=quick)]
    found: dict[Case, Outcome | float] = {}
    cases.sort(key=lambda case: case.disk_gib, reverse=True)  # the long ones first
    with ProcessPoolExecutor(cpu_count()) as pool, Bar("replays") as bar:
        bar.show(0, len(cases))
        running = {pool.submit(_replay, case): case for case in cases}
        for done, future in enumerate(as_completed(running), 1):
            found[running[future]] = future.result()
            bar.show(done, len(cases))
    order = [case for path in paths for case in _cases(path, quick=quick)]
    return [result for case in order for result in _results(case, found)]


def _cases(path: Path, *, quick: bool) -> Iterator[Case]:
    """With ``quick`` one capacity and the beginning of the trace, both an eighth."""
    sizes: Sequence[float] = HOST_GIB.get(path.stem, OTHER_GIB)
    share = 1.0
    if quick:
        sizes, share = (sizes[1] / 8,), 1 / 8
    for gib in sizes:
        for disk, cases in ((0.0, HOST_CASES), (DISK * gib, DISK_CASES)):
            yield Case(path, share, "infinite", "none", gib, disk)
            yield Case(path, share, "belady", "none", gib, disk)
            for policy, eviction in cases:
                yield Case(path, share, policy, eviction, gib, disk)


@cache
def _load(path: Path, share: float) -> Trace:
    trace = load(path, path.stem)
    return trace.part(0, max(1, round(share * len(trace.requests))))


@cache
def _infinite(path: Path, share: float) -> float:
    return clairvoyant(_load(path, share), 1 << 62, V4_FLASH.page_tokens)


def _replay(case: Case) -> Outcome | float:
    trace = _load(case.path, case.share)
    host, disk = int(case.host_gib * GIB), int(case.disk_gib * GIB)
    if case.policy == "infinite":
        return _infinite(case.path, case.share)
    if case.policy == "belady":
        pages = V4_FLASH.frames(host) + V4_FLASH.frames(disk)
        return clairvoyant(trace, pages, V4_FLASH.page_tokens)
    gc.disable()  # a replay makes millions of small objects and next to no cycles
    try:
        return replay(
            trace,
            host=host,
            disk=disk,
            checkpoints=PLACEMENTS[case.policy](),
            eviction=case.eviction,
            tails=case.policy != "history_only",
        )
    finally:
        gc.enable()
        gc.collect()


def _results(case: Case, found: dict[Case, Outcome | float]) -> Iterator[Result]:
    outcome, bound = found[case], found[case.bound]
    count = len(_load(case.path, case.share).requests)
    rate = outcome if isinstance(outcome, float) else outcome.hit_rate
    assert isinstance(bound, Outcome)
    yield _one("hit_rate", case, rate, "%", count).against(bound.hit_rate)
    if isinstance(outcome, Outcome):
        yield _one("host_written", case, outcome.host_bytes / GIB, "GiB", count)
        if case.disk_gib:
            yield _one("disk_written", case, outcome.disk_bytes / GIB, "GiB", count)


def _one(name: str, case: Case, value: float, unit: str, count: int) -> Result:
    return Result(
        name=name, params=case.params, unit=unit, median=value, p10=value, p90=value, n=count
    )
