"""Write the tables of ``docs/performance.md`` from ``benchmarks/results/NAME.json``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.  With ``--check`` nothing is
written, and the exit status is 1 if the document is out of date.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.attention_parts import targets  # noqa: E402
from benchmarks.harness import Result, read, table  # noqa: E402

DOCUMENT = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
HEADER = ["", "", "median", "p10 .. p90", "baseline", "better by"]
"""Of ``rows``."""
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(results: Sequence[Result]) -> list[list[str]]:
    """One row a quantity; where there are several ranges of samples, the median leads."""
    return [
        [
            f"`{r.name}`",
            ", ".join(f"{k} {v}" for k, v in r.params.items()),
            f"{r.median:.3g} {r.unit}",
            f"{r.p10:.3g} .. {r.p90:.3g}",
            "" if r.baseline is None else f"{r.baseline:.3g}",
            "" if r.ratio is None else f"{r.ratio:.2f}x",
        ]
        for r in results
    ]


def by_policy(results: Sequence[Result], name: str) -> str:
    """One row a trace and size of its tiers, one column a policy; what was not run is empty."""
    found = [r for r in results if r.name == name]
    cells = {(_tiers(r), _policy(r)): f"{r.median:.1f}" for r in found}
    columns = list(dict.fromkeys(_policy(r) for r in found))
    lines = [
        [*tiers, *(cells.get((tiers, column), "") for column in columns)]
        for tiers in dict.fromkeys(_tiers(r) for r in found)
    ]
    return table(lines, ["trace", "host GiB", "disk GiB", *columns])


def _tiers(result: Result) -> tuple[str, str, str]:
    p = result.params
    return str(p["trace"]), f"{p['host_gib']:g}", f"{p['disk_gib']:g}" if p["disk_gib"] else ""


def _policy(result: Result) -> str:
    policy, eviction = result.params["policy"], result.params["eviction"]
    return str(policy) if eviction == "none" else f"{policy}, {eviction}"


def by_prefix(results: Sequence[Result]) -> str:
    """One row a prefix and the tier it came from; below, what each stage of its way took."""
    found = {r.key: r for r in results}
    cases = [r for r in results if r.name == "restore_ms"]

    def cell(like: Result, name: str, **more: str) -> str:
        params = {**like.params, **more} if name != "recompute_ms" else {"tokens": tokens(like)}
        r = found.get((name, tuple(sorted(params.items()))))
        return "" if r is None else f"{r.median:.3g}"

    def tokens(r: Result) -> Any:
        return r.params["tokens"]

    whole = [
        [
            f"{tokens(r)}",
            f"{r.params['mb']}",
            f"{r.params['from']}",
            "" if r.baseline is None else f"{r.baseline:.3g}",
            f"{r.median:.3g} ({r.p10:.3g} .. {r.p90:.3g})",
            "" if r.ratio is None else f"{1 / r.ratio:.2f}",
            cell(r, "first_token_ms"),
            cell(r, "recompute_ms"),
        ]
        for r in cases
    ]
    stages = list(dict.fromkeys(str(r.params["stage"]) for r in results if r.name == "stage_ms"))
    parts = [
        [f"{tokens(r)}", f"{r.params['from']}", *(cell(r, "stage_ms", stage=s) for s in stages)]
        for r in cases
    ]
    header = [
        "tokens", "MB", "from", "bytes alone", "ready", "ratio", "first token", "recomputed",
    ]  # fmt: skip
    return f"{table(whole, header)}\n\n{table(parts, ['tokens', 'from', *stages])}"


def by_backend(results: Sequence[Result]) -> str:
    """One table a kind of attention, one row a size that there are targets for: microseconds of
    each backend, and how many times as fast as the baseline that is.  Below, how that is in the
    sweep."""
    told = []
    for name in dict.fromkeys(r.name for r in results):
        every = [r for r in results if r.name == name]
        found = [r for r in every if targets(r)]
        backends = list(dict.fromkeys(str(r.params["backend"]) for r in found))
        cells = {(_work(r), r.params["backend"]): _beside(r) for r in found}
        base = {_work(r): f"{r.baseline:.3g}" for r in found if r.baseline is not None}
        lines = [
            [
                *work,
                *([base.get(work, "")] if base else []),
                *(cells.get((work, b), "") for b in backends),
            ]
            for work in dict.fromkeys(map(_work, found))
        ]
        header = ["batch", "heads", "keys", *(["FlashMLA"] if base else []), *backends]
        told.append(f"`{name}`:\n\n{table(lines, header)}")
        told += _swept([r for r in every if not targets(r)])
    return "\n\n".join(told)


def _swept(results: Sequence[Result]) -> list[str]:
    """A sentence, where something was swept beside a baseline."""
    ratios: dict[str, list[float]] = {}
    for r in results:
        if r.ratio is not None:
            ratios.setdefault(str(r.params["backend"]), []).append(r.ratio)
    each = ", ".join(
        f"{name} {min(some):.2f} to {max(some):.2f}, median {statistics.median(some):.2f}"
        for name, some in ratios.items()
    )
    sizes = len({_work(r) for r in results})
    return (
        [f"{sizes} more sizes, as speed of FlashMLA where it takes them: {each}."] if each else []
    )


WORK = {"batch", "heads", "keys", "queries", "ragged", "backend"}
"""What a result of attention is named by."""


def _work(result: Result) -> tuple[str, ...]:
    p = result.params
    many = "" if p["queries"] == 1 else f" x {p['queries']}"
    return f"{p['batch']}{many}", f"{p['heads']}", f"{p['keys']}{' ragged' if p['ragged'] else ''}"


def _beside(result: Result) -> str:
    ratio = "" if result.ratio is None else f" ({result.ratio:.2f}x)"
    digits = ".0f" if result.median >= 1000 else ".3g"
    return f"{result.median:{digits}}{ratio}"


def by_workspace(results: Sequence[Result]) -> str:
    """What is compared with one other thing in lines, and what has many sizes in two dimensions:
    time and memory by workspace, time and stall by piece."""
    plain = [r for r in results if not {"workspace", "piece"} & set(r.params)]
    told = [table(rows(plain), HEADER)]
    for along, pair, unit, across in (
        ("workspace", ("chunk_ms", "chunk_mb"), "ms, MB", ("batch", "context")),
        ("piece", ("prompt_ms", "stall_ms"), "ms, stall in ms", ("prompt",)),
    ):
        cells: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for r in results:
            if r.name in pair:
                line = cells.setdefault(tuple(str(r.params[name]) for name in across), {})
                line.setdefault(str(r.params[along]), []).append(f"{r.median:.3g}")
        columns = list(dict.fromkeys(column for line in cells.values() for column in line))
        lines = [
            [*size, *(", ".join(line.get(column, ())) for column in columns)]
            for size, line in cells.items()
        ]
        header = [*across, *(f"{along} {column}" for column in columns)]
        told.append(f"{unit}:\n\n{table(lines, header)}")
    return "\n\n".join(told)


def render(about: dict[str, Any], results: Sequence[Result]) -> str:
    """The tables and a line on what they were taken on."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    if all("policy" in r.params for r in results):
        names = dict.fromkeys(r.name for r in results)
        unit = {r.name: r.unit for r in results}
        told = "\n\n".join(f"`{n}`, {unit[n]}:\n\n{by_policy(results, n)}" for n in names)
    elif any(r.name == "restore_ms" for r in results):
        told = by_prefix(results)
    elif any(r.name == "chunk_ms" for r in results):
        told = by_workspace(results)
    elif all(set(r.params) == WORK for r in results):
        told = by_backend(results)
    else:
        told = table(rows(results), HEADER)
    return (
        f"{told}\n\n"
        f"Taken {about['date'][:10]} at {about['git']} on {about['cpu']}, {about['device']}; "
        f"{versions}.\n"
    )


def filled(text: str) -> str:
    """The document with every table that has results; the others stay as they are."""

    def fill(block: re.Match[str]) -> str:
        path = RESULTS / f"{block[2]}.json"
        return block[1] + render(*read(path)) + block[3] if path.exists() else block[0]

    return BLOCK.sub(fill, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    before = DOCUMENT.read_text()
    after = filled(before)
    if check:
        return int(before != after)
    DOCUMENT.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
