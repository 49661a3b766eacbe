"""Guessing by what followed the last time the text ended like this (prompt lookup).

No weights, no cache, nothing on the device.
"""

from collections.abc import Sequence
from typing import Any, final

from kvtier import ConfigError
from kvtier_deepseek.drafts.base import Continuation

__all__ = ["NGram"]


@final
class NGram:
    """Proposes what followed the latest earlier place that ends in the same tokens.

    The longest ending is tried first, from ``longest`` tokens (4) down to ``shortest`` (1).
    """

    def __init__(self, *, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(f"need 1 <= shortest <= longest, got {shortest=} {longest=}")
        self._sizes = range(longest, shortest - 1, -1)

    def propose(self, step: Any, device: Any, rows: Sequence[Continuation]) -> list[list[int]]:
        """See ``Proposer``; looks at nothing but the rows' tokens."""
        return [self.guess(row.tokens, row.count) for row in rows]

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tokens``."""
        if count < 1:
            return []
        for size in self._sizes:
            ending = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == ending:
                    return list(tokens[start + size : start + size + count])
        return []
