"""Random traffic on the whole cache for long, with every byte that a request may read checked.

    python scripts/soak.py --device cuda --minutes 8
    python scripts/soak.py --device cpu --minutes 30

Runs for at least so long, in rounds of about a minute, one layout after the other, each on the
disk that its last round left behind: closed cleanly, or with work abandoned, or by a process that
was killed in the middle.  See ``tests/device/traffic.py`` for what a round does.  Ends with a
summary in ``benchmarks/results/soak_DEVICE.json``; the exit status is 1 if a byte was wrong, an
invariant broken, something hung or leaked, or a tier has not given anything back.  Then it says
with which seed, and what was done last.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import harness  # noqa: E402
from kvtier import Tier  # noqa: E402
from tests.device.traffic import Traffic  # noqa: E402

ROUND_S = 55.0
PROGRESS_S = 10.0
CHILD_S = 4.0
"""How long the process lives that is killed."""
GROWTH = 64 << 20
"""Bytes of memory that the process may have gained since every layout had its first round."""
LAYOUTS = {"cpu": ("mla", "v4-small", "gqa", "v4"), "cuda": ("mla", "v4", "gqa")}
BY_NAME = ("v32",)
"""Further ones, that are only run where they are asked for."""
THREADS = {"cpu": 4, "cuda": 6}
MANY = 300
"""Requests after which every tier must have given something back."""
M_ARENA_MAX = -8
TIERS = (Tier.GPU, Tier.CPU, Tier.DISK)


class Soak:
    """All rounds of one run, and what came of them."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.directory = directory
        chosen = options.layout
        self.layouts = LAYOUTS[options.device] if chosen == "all" else (chosen,)
        self.counts: Counter[str] = Counter()
        self.per_layout: dict[str, Counter[str]] = {name: Counter() for name in self.layouts}
        self.failures: list[str] = []
        self.log: list[str] = []
        self.memory: list[dict[str, Any]] = []
        self.current: Traffic | None = None
        self.rounds = 0
        self.killed = 0
        self.born = time.monotonic()

    # ------------------------------------------------------------------ rounds

    def run(self) -> None:
        total = self.options.minutes * 60
        length = min(ROUND_S, max(4.0, total / (3 * len(self.layouts))))
        with self.progress():
            last = False
            while not last and not self.failures:
                left, seconds = total - (time.monotonic() - self.born), length
                if self.rounds + 1 >= len(self.layouts) and left < 1.5 * length:
                    last, seconds = True, max(left, length / 2)
                self.round(self.layouts[self.rounds % len(self.layouts)], seconds, last=last)
        if not self.failures:
            self.verdict()

    def round(self, layout: str, seconds: float, *, last: bool) -> None:
        """Open what the last round of this layout left, use it, close it in one way or another."""
        number, self.rounds = self.rounds, self.rounds + 1
        where = self.directory / layout
        traffic = self.current = Traffic(
            layout,
            self.options.device,
            where,
            seed=self.options.seed + number,
            threads=self.options.threads or THREADS[self.options.device],
        )
        found = traffic.cache.stats().tiers[Tier.DISK].resident
        traffic.count("pages found on disk at open", found)
        traffic.run(seconds)
        if not traffic.failures and (last or number % 3 == 2):
            traffic.check_empty()
            traffic.count("leak checks")
        if not traffic.failures:
            traffic.close(drain=number % 2 == 0)
        self.take(layout, traffic)
        self.current = None
        del traffic
        self.remember(layout)
        if not self.failures and not last and number % 2:
            self.kill_one(layout, where, number)

    def take(self, layout: str, traffic: Traffic) -> None:
        self.counts.update(traffic.counts)
        self.counts["faults injected"] += traffic.io.injected
        self.per_layout[layout].update(traffic.counts)
        if traffic.failures:
            self.failures += [f"{layout}, round {self.rounds}: {f}" for f in traffic.failures]
            self.log = list(traffic.log)

    def kill_one(self, layout: str, where: Path, number: int) -> None:
        """A process of its own uses the same disk and is killed: what it leaves is opened next."""
        command = [sys.executable, str(Path(__file__).resolve()), "--child", layout]
        command += ["--dir", str(where), "--seed", str(self.options.seed + number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
        if done.returncode != -signal.SIGKILL:
            self.failures.append(f"the process to be killed ended with {done.returncode}")
            self.log = (done.stdout + done.stderr).splitlines()
        self.killed += 1

    # ------------------------------------------------------------------ what must hold at the end

    def remember(self, layout: str) -> None:
        gc.collect()
        malloc("malloc_trim", 0)
        now: dict[str, Any] = {"round": self.rounds, "layout": layout, "rss_mib": resident() >> 20}
        if self.options.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            now["torch_mib"] = round(torch.cuda.memory_allocated() / 2**20, 3)
        now["threads"] = threading.active_count()
        self.memory.append(now)

    def verdict(self) -> None:
        for name, counts in {"all": self.counts, **self.per_layout}.items():
            for tier in TIERS if name == "all" or counts["requests"] >= MANY else ():
                if not counts[f"restored from {tier.name}"]:
                    self.failures.append(f"{name}: nothing was restored from {tier.name}")
        settled, end = self.memory[: len(self.layouts)], self.memory[-1]
        for what, most in (("rss_mib", GROWTH >> 20), ("torch_mib", 1), ("threads", 0)):
            if what in end and end[what] > max(each[what] for each in settled) + most:
                self.failures.append(f"{what} has grown: {[m[what] for m in self.memory]}")

    # ------------------------------------------------------------------ telling

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        over = threading.Event()

        def tell() -> None:
            while not over.wait(PROGRESS_S):
                self.tell()

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.tell()

    def tell(self) -> None:
        counts, traffic = Counter(self.counts), self.current
        if traffic is not None:
            counts.update(dict(traffic.counts))
            counts["faults injected"] += traffic.io.injected
        seconds = time.monotonic() - self.born
        restored = "/".join(str(counts[f"restored from {tier.name}"]) for tier in TIERS)
        print(
            f"{seconds:6.0f} s  round {self.rounds}  {counts['requests'] / seconds:7.1f} requests/s"
            f"  {counts['steps'] / seconds:7.1f} steps/s  pages restored {restored}"
            f"  faults {counts['faults injected']}  checks {counts['checks']}"
            f"  rss {resident() >> 20} MiB",
            flush=True,
        )

    def summary(self) -> dict[str, Any]:
        counts, seconds = self.counts, time.monotonic() - self.born
        results = [
            one("requests", counts["requests"], "requests"),
            one("steps", counts["steps"], "steps"),
            *(
                one("pages_restored", counts[f"restored from {t.name}"], "pages", tier=t.name)
                for t in TIERS
            ),
            one("rows_checked", counts["rows checked"], "rows"),
            one("faults_injected", counts["faults injected"], "faults"),
            one("invariant_checks", counts["checks"], "checks"),
            one("reopened", self.rounds - len(self.layouts), "times"),
            one("killed", self.killed, "processes"),
            one("failures", len(self.failures), "failures"),
        ]
        return {
            "meta": harness.meta(),
            "results": results,
            "seed": self.options.seed,
            "seconds": round(seconds, 1),
            "layouts": {name: dict(sorted(c.items())) for name, c in self.per_layout.items()},
            "memory": self.memory,
            "failures": [f[-2000:] for f in self.failures],
        }


def one(name: str, value: float, unit: str, **params: str) -> dict[str, Any]:
    """A count, in the form of a benchmark's result."""
    return harness.rounded(
        harness.Result(name=name, params=params, unit=unit, median=value, p10=value, p90=value, n=1)
    )


def malloc(call: str, *args: int) -> None:
    """Ask something of glibc's allocator, where that is what there is."""
    with contextlib.suppress(AttributeError, OSError):
        getattr(ctypes.CDLL(None), call)(*args)


def resident() -> int:
    """Bytes of memory this process holds."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def child(options: argparse.Namespace) -> None:
    """Use the cache of one layout on the CPU until killed."""
    rng = random.Random(options.seed)
    traffic = Traffic(options.child, "cpu", Path(options.dir), seed=options.seed, threads=2)

    def kill() -> None:
        time.sleep(CHILD_S * (0.3 + 0.7 * rng.random()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    traffic.run(10 * CHILD_S)
    print("\n".join([*traffic.failures, *traffic.log]))
    sys.exit(1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    names = sorted({name for names in LAYOUTS.values() for name in names} | {*BY_NAME})
    parser.add_argument("--layout", choices=("all", *names), default="all")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dir", default=None, help="where the disks are; default: a temporary one")
    parser.add_argument("--out", type=Path, default=None, help="the summary; default: see above")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.seed is None:
        options.seed = int(time.time()) % 1_000_000
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    torch.set_num_threads(1)
    # Every thread may fragment an arena of its own, which looks like a leak for a long time.
    malloc("mallopt", M_ARENA_MAX, 2)
    options = parse(argv)
    if options.child:
        child(options)
    name = {"cuda": "gpu", "cpu": "cpu"}[options.device]
    out = options.out or ROOT / "benchmarks" / "results" / f"soak_{name}.json"
    print(f"seed {options.seed}, {options.device}, {options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-", dir=options.dir) as directory:
        soak = Soak(options, Path(directory))
        try:
            soak.run()
        except Exception as error:  # noqa: BLE001 - the summary says so
            soak.failures.append(repr(error))
            faulthandler.dump_traceback(sys.__stderr__)
        summary = soak.summary()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(summary, indent=1) + "\n")
        if soak.failures:
            print("\n".join(soak.log[-80:]))
            print(f"FAILED with --seed {options.seed} --device {options.device}:")
            print("\n".join(soak.failures))
            if any("hangs" in each for each in soak.failures):
                faulthandler.dump_traceback(sys.__stderr__)
            return 1
    print(f"no failures in {summary['seconds']} s; {out}")
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)  # threads that hang would hold the exit up
