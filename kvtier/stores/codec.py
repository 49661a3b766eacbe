"""zstd for payloads, where it pays.  Contexts are per thread: they must not be shared."""

import threading
from collections.abc import Mapping

import zstandard

__all__ = ["Codec"]

PAYS = 7 / 8
"""A frame is stored compressed only below this part of its size."""
REST = 63
"""After a frame that did not compress, so many of its component are not even tried."""


class Codec:
    """Compresses frames of the components it has levels for.  Thread-safe."""

    def __init__(self, levels: Mapping[str, int]) -> None:
        self._levels = dict(levels)
        self._resting = dict.fromkeys(levels, 0)
        self._local = threading.local()

    def encode(self, component: str, frame: memoryview) -> memoryview | None:
        """The compressed frame, or None to store it as it is."""
        level = self._levels.get(component)
        if level is None:
            return None
        if self._resting[component]:
            self._resting[component] -= 1
            return None
        made: dict[int, zstandard.ZstdCompressor] | None = getattr(self._local, "made", None)
        if made is None:
            made = self._local.made = {}
        if level not in made:
            made[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
        packed = made[level].compress(frame)
        if len(packed) > len(frame) * PAYS:
            self._resting[component] = REST
            return None
        return memoryview(packed)

    def decode(self, stored: bytes, frame: memoryview) -> bool:
        """Fill the frame; False where the stored bytes are not exactly that."""
        context: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if context is None:
            context = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            if zstandard.frame_content_size(stored) != frame.nbytes:
                return False
            frame[:] = context.decompress(stored)
        except (zstandard.ZstdError, ValueError):
            return False
        return True
