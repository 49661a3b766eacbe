"""The prefix-cache workload that every control-plane figure is taken on, ours and the peers'.

``sequences`` sequences of ``length`` tokens; each starts with one of ``groups`` shared prefixes of
``shared`` tokens and goes on with tokens of its own.  numpy only: peers import it from their own
environments.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["VOCABULARY", "Ids", "Workload"]

Ids = npt.NDArray[np.int32]
VOCABULARY = 128_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Token ids drawn once from a seed: the same on both sides of a comparison."""

    sequences: int = 10_000
    length: int = 4_096
    groups: int = 100
    shared: int = 2_048
    probes: int = 2_000
    seed: int = 0

    @classmethod
    def of_size(cls, *, quick: bool) -> "Workload":
        """The size that every side of a comparison runs at."""
        return cls(sequences=1_000, groups=20, probes=500) if quick else cls()

    def _draw(self, stream: int, *shape: int) -> Ids:
        rng = np.random.default_rng([self.seed, stream])
        return rng.integers(0, VOCABULARY, size=shape, dtype=np.int32)

    def _prefixed(self, tails: Ids, stream: int) -> Iterator[Ids]:
        prefixes = self._draw(0, self.groups, self.shared)
        rng = np.random.default_rng([self.seed, stream])
        for group, tail in zip(rng.integers(0, self.groups, len(tails)), tails, strict=True):
            yield np.concatenate([prefixes[group], tail])

    def stored(self) -> Iterator[Ids]:
        """The sequences that are put into the cache."""
        yield from self._prefixed(self._draw(1, self.sequences, self.length - self.shared), 2)

    def half_hits(self) -> Iterator[Ids]:
        """Sequences of which only the shared prefix is in the cache."""
        yield from self._prefixed(self._draw(3, self.probes, self.length - self.shared), 4)

    def misses(self) -> Iterator[Ids]:
        """Sequences that share nothing with what is in the cache."""
        yield from self._draw(5, self.probes, self.length)
