"""Compare two result files: ``python -m benchmarks.compare OLD.json NEW.json [--threshold 0.15]``.

Exits 1 when a quantity got worse by more than the threshold or is gone, 2 for unreadable files.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, lower_is_better, read, table

__all__ = ["Change", "compare", "main"]


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity in both files; None where a file lacks it."""

    old: Result | None
    new: Result | None

    @property
    def worse_by(self) -> float | None:
        """How much worse, as a share of the old value: 0.2 is 20 % slower (or a 20 % lower rate).
        Negative: better.  None when one side is missing or not comparable."""
        if self.old is None or self.new is None or self.old.unit != self.new.unit:
            return None
        if self.old.median == 0:
            return 0.0 if self.new.median == 0 else None
        change = self.new.median / self.old.median - 1
        return change if lower_is_better(self.old.unit) else -change

    def fails(self, threshold: float) -> bool:
        """Whether it is worse by more than ``threshold``, or can no longer be compared."""
        if self.old is None:
            return False
        worse = self.worse_by
        return worse is None or worse > threshold


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Change]:
    """Pair results by name and parameters, in the old file's order, new ones last."""
    before = {r.key: r for r in old}
    after = {r.key: r for r in new}
    return [Change(before.get(key), after.get(key)) for key in {**before, **after}]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--threshold", type=float, default=0.15, help="share of the old value (default 0.15)"
    )
    options = parser.parse_args(argv)
    if options.threshold < 0:
        parser.error("--threshold must not be negative")
    try:
        (_, old), (_, new) = read(options.old), read(options.new)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    changes = compare(old, new)
    rows = [_row(change, options.threshold) for change in changes]
    print(table(rows, ["name", "params", "unit", "old", "new", "change", ""]))
    failed = sum(change.fails(options.threshold) for change in changes)
    print(f"\n{failed} of {len(changes)} worse by more than {options.threshold:.0%}, or gone")
    return 1 if failed else 0


def _row(change: Change, threshold: float) -> list[str]:
    either = change.old or change.new
    assert either is not None
    worse = change.worse_by
    return [
        either.name,
        " ".join(f"{k}={v}" for k, v in either.params.items()),
        either.unit,
        "" if change.old is None else f"{change.old.median:.4g}",
        "gone" if change.new is None else f"{change.new.median:.4g}",
        "" if worse is None else f"{worse:+.1%} {'worse' if worse > 0 else 'better'}",
        "FAIL" if change.fails(threshold) else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
