"""A progress bar for long work, on standard error.  Knows nothing of the work."""

import shutil
import sys
from typing import Self

__all__ = ["Bar"]


class Bar:
    """A progress bar on standard error; silent where that is not a terminal."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown = -1
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown >= 0:
            sys.stderr.write("\r\033[K")

    def show(self, done: int, total: int) -> None:
        """Draw ``done`` of ``total``; redrawn when a full percent has passed."""
        percent = 100 * done // max(total, 1)
        if not self._terminal or percent == self._shown:
            return
        self._shown = percent
        filled = "#" * (percent * 30 // 100)
        line = f"{self._label} [{filled:30}] {percent:3}% of {total}"
        sys.stderr.write("\r" + line[: shutil.get_terminal_size().columns - 1] + "\033[K")
        sys.stderr.flush()
