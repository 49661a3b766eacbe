"""Draw ``docs/img/trace.png`` from ``benchmarks/results/trace.json``.  Needs matplotlib."""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Result, read  # noqa: E402

LINES = {
    ("belady", "none"): ("knows the future (history alone)", "0.6", ":"),
    ("history_only", "adaptive"): ("history alone, adaptive eviction", "tab:green", "--"),
    ("history_only", "lru"): ("history alone, least recently used", "black", "--"),
    ("adaptive", "adaptive"): ("adaptive (default)", "tab:blue", "-"),
    ("sparse", "lru"): ("sparse", "tab:orange", "-"),
    ("dense", "lru"): ("dense", "tab:red", "-"),
}


def draw(axes: Axes, results: Sequence[Result], trace: str) -> None:
    """Hit rate by host memory of one trace, without a disk."""
    for (policy, eviction), (label, colour, style) in LINES.items():
        points = sorted(
            (float(r.params["host_gib"]), r.median)
            for r in results
            if r.name == "hit_rate"
            and (r.params["trace"], r.params["disk_gib"]) == (trace, 0)
            and (r.params["policy"], r.params["eviction"]) == (policy, eviction)
        )
        sizes, rates = zip(*points, strict=True)
        axes.plot(sizes, rates, style, color=colour, label=label, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{s:g}" for s in sizes])
    axes.set(title=trace, xlabel="host memory, GiB", ylim=(0, None))
    axes.grid(alpha=0.3)


def main() -> None:
    _, results = read(ROOT / "benchmarks" / "results" / "trace.json")
    traces = list(dict.fromkeys(str(r.params["trace"]) for r in results))
    figure, axes = plt.subplots(1, len(traces), figsize=(5 * len(traces), 3.8), squeeze=False)
    for at, trace in zip(axes[0], traces, strict=True):
        draw(at, results, trace)
    axes[0][0].set_ylabel("prompt tokens not computed, %")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    path = ROOT / "docs" / "img" / "trace.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
