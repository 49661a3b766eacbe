"""Draw ``docs/img/attention.svg`` and ``attention_sweep.svg`` from
``benchmarks/results/attention.json``.  Needs matplotlib.

The first has one panel a kind of attention: how many times as fast as the baseline each backend is,
at the targets' sizes.  The second has the faster of the project's own kernels at all sizes: over
whole sequences one panel a number of heads and a line a batch, over lists a line a kind of list.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.attention_parts import targets  # noqa: E402
from benchmarks.harness import Result, read  # noqa: E402

TITLES = {
    "mla_decode_us": "absorbed MLA, bf16 rows",
    "mla_fp8_decode_us": "absorbed MLA, 656-byte rows",
    "v4_sparse_us": "V4: window and chosen entries",
    "mla_swa_us": "listed 656-byte rows",
    "mla_swa_dense_us": "listed bf16 rows",
}
COLOURS = {
    "triton": "tab:blue",
    "gluon": "tab:green",
    "flashmla": "tab:orange",
    "flashinfer (bare)": "tab:red",
}
OWN = ("triton", "gluon")
HEADS = (16, 64, 128)
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
    """Bars of one kind, of what is timed in graphs; a size that has no baseline has none."""
    known = [r for r in results if r.ratio is not None and r.params["backend"] != "flashinfer"]
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


def sweep(panels: Sequence[Axes], results: Sequence[Result]) -> None:
    """The last panel is for lists, those before it for whole sequences, by number of heads."""
    own: dict[tuple[str, str], Result] = {}
    for r in results:
        known = own.get((r.name, size(r)))
        if r.params["backend"] in OWN and r.ratio and (not known or r.ratio > (known.ratio or 0)):
            own[r.name, size(r)] = r
    plain = [r for r in own.values() if r.params["queries"] == 1 and not r.params["ragged"]]
    *whole, listed = panels
    for axes, heads in zip(whole, HEADS, strict=True):
        mine = [r for r in plain if r.name == "mla_decode_us" and r.params["heads"] == heads]
        axes.set(title=f"{TITLES['mla_decode_us']}, {heads} heads", xlabel="keys")
        for batch in sorted({int(r.params["batch"]) for r in mine}):
            _line(axes, [r for r in mine if r.params["batch"] == batch], "keys", f"batch {batch}")
    listed.set(title="lists", xlabel="batch")
    lists = [r for r in plain if r.name != "mla_decode_us"]
    for name, heads, keys in sorted({(r.name, r.params["heads"], r.params["keys"]) for r in lists}):
        kind = {"name": name, "heads": heads, "keys": keys}
        mine = [r for r in lists if {"name": r.name, **r.params}.items() >= kind.items()]
        if len(mine) > 1:
            _line(listed, mine, "batch", f"{TITLES[name]}, {heads} heads, {keys} keys")
    for axes in panels:
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(ylabel="times FlashMLA's speed", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)


def _line(axes: Axes, results: Sequence[Result], along: str, label: str) -> None:
    points = sorted((int(r.params[along]), float(r.ratio or 0)) for r in results)
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)


def main() -> None:
    about, results = read(ROOT / "benchmarks" / "results" / "attention.json")
    aimed = [r for r in results if r.ratio is not None and targets(r)]
    kinds = [name for name in TITLES if any(r.name == name for r in aimed)]
    figure, axes = plt.subplots(len(kinds), 1, figsize=(12, 3.6 * len(kinds)), squeeze=False)
    for at, name in zip(axes[:, 0], kinds, strict=True):
        draw(at, [r for r in aimed if r.name == name], name)
    save(figure, "attention", about["date"])
    figure, axes = plt.subplots(2, 2, figsize=(12, 9))
    sweep(list(axes.flat), results)
    save(figure, "attention_sweep", about["date"])


def save(figure: Figure, name: str, date: str) -> None:
    """The same figures, the same file."""
    figure.tight_layout()
    mpl.rcParams["svg.hashsalt"] = name
    path = ROOT / "docs" / "img" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": date})


if __name__ == "__main__":
    main()
