"""Run benchmarks by name: ``python -m benchmarks.run core store --quick --json out.json``."""

import argparse
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from benchmarks.harness import Result, meta, table, write

__all__ = ["available", "main"]

HERE = Path(__file__).parent


def available() -> list[str]:
    """Names of the benchmarks that exist."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 when a benchmark raised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(available()))
    parser.add_argument("--quick", action="store_true", help="smaller: each ends within 45 s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="PYTHON",
        help="interpreter of an environment made by scripts/peers_venv.sh; adds their figures",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        action="append",
        default=[],
        help="replay this trace in place of the shipped ones (for `trace`; may be repeated)",
    )
    parser.add_argument(
        "--flashmla",
        type=Path,
        metavar="PATH",
        help="vLLM's _flashmla_C.abi3.so, if FlashMLA is not installed (for `attention`)",
    )
    parser.add_argument(
        "--write-table",
        type=Path,
        metavar="PATH",
        help="put times where kernels are picked by them: kvtier/kernels/measured_h200.json "
        "(for `attention`)",
    )
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(available()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(available())}")
    results: list[Result] = []
    failed = []
    for name in dict.fromkeys(options.names):
        began = time.monotonic()
        try:
            found = _call(
                name,
                options.quick,
                peers=options.peers,
                trace=options.trace,
                flashmla=options.flashmla,
                write_table=options.write_table,
            )
        except Exception as error:  # noqa: BLE001  one broken benchmark must not lose the others
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        print(f"\n{name} ({time.monotonic() - began:.1f} s)\n{_show(found)}", flush=True)
        results += found
    if options.json:
        write(options.json, results, meta())
        print(f"\nwritten to {options.json}")
    return 1 if failed else 0


def _call(name: str, quick: bool, **options: object) -> list[Result]:
    """Run one benchmark with those of the ``options`` it knows."""
    run = cast(
        "Callable[..., list[Result]]", importlib.import_module(f"benchmarks.bench_{name}").run
    )
    known = inspect.signature(run).parameters
    return run(quick, **{name: value for name, value in options.items() if name in known})


def _show(results: Sequence[Result]) -> str:
    rows = [
        [
            r.name,
            " ".join(f"{k}={v}" for k, v in r.params.items()),
            f"{r.median:.4g}",
            f"{r.p10:.4g} .. {r.p90:.4g}",
            r.unit,
            str(r.n),
            "" if r.baseline is None else f"{r.baseline:.4g}",
            "" if r.ratio is None else f"{r.ratio:.2f}x",
        ]
        for r in results
    ]
    header = ["name", "params", "median", "p10 .. p90", "unit", "n", "baseline", "better by"]
    return table(rows, header)


if __name__ == "__main__":
    sys.exit(main())
