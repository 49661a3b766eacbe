"""Draw ``docs/img/attention.svg`` from ``benchmarks/results/attention.json``.  Needs matplotlib.

One panel a kind of attention: how many times as fast as the baseline each backend is, by size.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Result, read  # noqa: E402

TITLES = {
    "mla_decode_us": "absorbed MLA, bf16 rows",
    "mla_fp8_decode_us": "absorbed MLA, 656-byte rows",
    "v4_sparse_us": "V4: window and chosen entries",
    "mla_swa_us": "listed 656-byte rows",
    "mla_swa_dense_us": "listed bf16 rows",
}
COLOURS = {"triton": "tab:blue", "gluon": "tab:green", "flashmla": "tab:orange"}
WIDTH = 0.8
"""Of the bars of one size."""


def size(result: Result) -> str:
    """What a bar stands above."""
    p = result.params
    many = f" x{p['queries']}" if p["queries"] != 1 else ""
    ragged = " ragged" if p["ragged"] else ""
    return f"b{p['batch']}{many} h{p['heads']} {_count(int(p['keys']))}{ragged}"


def _count(keys: int) -> str:
    return f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)


def draw(axes: Axes, results: Sequence[Result], name: str) -> None:
    """Bars of one kind; a size that has no baseline has none."""
    known = [r for r in results if r.ratio is not None]
    sizes = list(dict.fromkeys(map(size, known)))
    backends = list(dict.fromkeys(str(r.params["backend"]) for r in known))
    each = WIDTH / max(1, len(backends))
    for at, backend in enumerate(backends):
        ratio = {size(r): float(r.ratio or 0) for r in known if r.params["backend"] == backend}
        places = [x - WIDTH / 2 + (at + 0.5) * each for x, s in enumerate(sizes) if s in ratio]
        heights = [ratio[s] for s in sizes if s in ratio]
        axes.bar(places, heights, each, label=backend, color=COLOURS.get(backend, "grey"))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(sizes)), sizes, rotation=60, ha="right", fontsize=6)
    axes.set(title=TITLES.get(name, name), ylabel="times FlashMLA's speed", ylim=(0, None))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    about, results = read(ROOT / "benchmarks" / "results" / "attention.json")
    names = [n for n in dict.fromkeys(r.name for r in results) if n in TITLES]
    kinds = [n for n in names if any(r.ratio is not None for r in results if r.name == n)]
    figure, axes = plt.subplots(len(kinds), 1, figsize=(12, 3.6 * len(kinds)), squeeze=False)
    for at, name in zip(axes[:, 0], kinds, strict=True):
        draw(at, [r for r in results if r.name == name], name)
    figure.tight_layout()
    path = ROOT / "docs" / "img" / "attention.svg"
    path.parent.mkdir(exist_ok=True)
    # The same figures, the same file.
    mpl.rcParams["svg.hashsalt"] = "attention"
    figure.savefig(path, metadata={"Date": about["date"]})


if __name__ == "__main__":
    main()
