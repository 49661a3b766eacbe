"""Numbered frames of one tier (or of one class of device frames): free, or taken.

Knows nothing of what a frame holds.  A double give raises.
"""

from collections.abc import Iterable

__all__ = ["FramePool"]


class FramePool:
    """``size`` frames; those given back last are taken first, so that memory stays warm."""

    __slots__ = ("_free", "_taken", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._taken = bytearray(size)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int = 1) -> tuple[int, ...]:
        """``n`` frames; the caller has made room."""
        if n == 0:
            return ()
        assert n <= len(self._free), "I1: taking more frames than are free"
        frames = tuple(self._free[-n:])
        del self._free[-n:]
        for f in frames:
            self._taken[f] = 1
        return frames

    def give(self, frames: Iterable[int]) -> None:
        taken, free = self._taken, self._free.append
        for f in frames:
            assert taken[f], "I1: a frame given back twice"
            taken[f] = 0
            free(f)

    def order(self) -> tuple[int, ...]:
        """The free frames, those taken next last; for ``digest()``."""
        return tuple(self._free)

    def taken(self) -> set[int]:
        """All taken frames; for ``check()``."""
        return {f for f, t in enumerate(self._taken) if t}
