"""The host pool: one arena of equal frames, and a checksum per record it holds.

Knows nothing of pages, leases or streams.
"""

import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
import xxhash

from kvtier.data.rows import Rows, as_rows
from kvtier.layouts.base import FRAME_ALIGN

__all__ = ["HostArena", "checksum"]


def checksum(payload: Sequence[memoryview], size: int) -> bytes:
    """xxh3-128 over the first ``size`` bytes of these frames, one after another."""
    digest = xxhash.xxh3_128()
    for view in payload:
        digest.update(view[:size])
        size -= min(size, len(view))
    return digest.digest()


class HostArena:
    """``num_frames`` frames of ``frame_bytes`` each, in one page-aligned mapping.

    With ``pinned`` the whole arena is registered with that device's driver, so that copies to and
    from it run at full speed and asynchronously; ``close`` gives the registration back.  Pinned
    memory is not there in a forked child: the driver holds its pages, so a child that wrote to
    its copy, or a parent after it, would part with what the device sees.
    """

    def __init__(
        self, num_frames: int, frame_bytes: int, *, pinned: torch.device | None = None
    ) -> None:
        self.num_frames = num_frames
        self.frame_bytes = frame_bytes
        # A mapping of its own rather than torch's pinned allocator: that one rounds the size up
        # to a power of two, which at these sizes can double it.
        self._map = mmap.mmap(
            -1,
            max(num_frames * frame_bytes, FRAME_ALIGN),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        # Direct I/O takes memory in runs that are adjacent for the device, a bounded number at a
        # time: with small pages a disk reads and writes at half its speed.
        with suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.frames = torch.frombuffer(self._map, dtype=torch.uint8)[
            : num_frames * frame_bytes
        ].view(num_frames, frame_bytes)
        """(frames, bytes) uint8; shares the memory of ``view``."""
        self._view = memoryview(self._map)
        self._checksums = np.full(num_frames, None, object)
        self._written = np.zeros(num_frames, np.int64)
        """How often each frame was written."""
        self._lock = threading.Lock()
        self._unregister: weakref.finalize[..., HostArena] | None = None
        if pinned is not None and num_frames:
            start = self.frames.data_ptr()
            self._map.madvise(mmap.MADV_DONTFORK)
            _driver(pinned, "cudaHostRegister", start, len(self._map), 0)
            # Before the mapping goes, whoever forgets to close.
            self._unregister = weakref.finalize(self, _driver, pinned, "cudaHostUnregister", start)
            self._unregister.atexit = False

    def view(self, frame: int) -> memoryview:
        """The bytes of one frame, writable, without a copy."""
        start = self._checked(frame) * self.frame_bytes
        return self._view[start : start + self.frame_bytes]

    def views(self, frames: Sequence[int]) -> tuple[memoryview, ...]:
        return tuple(self.view(f) for f in frames)

    def spans(self, frames: Sequence[int]) -> list[torch.Tensor]:
        """The same bytes as 1-D tensors."""
        return [self.frames[self._checked(f)] for f in frames]

    def written(self, frames: Sequence[int]) -> tuple[int, ...]:
        """What to seal the record with that now lies in these frames."""
        return tuple(self._written[list(frames)].tolist())

    def seal(self, frames: Sequence[int], size: int, written: tuple[int, ...]) -> None:
        """Note the checksum of the record that lay in these frames at ``written``.

        May run at any time after: nothing is noted of frames that were written again since.
        """
        if self.written(frames) != written:
            return
        digest = checksum(self.views(frames), size)
        with self._lock:
            if self.written(frames) == written:
                self._checksums[frames[0]] = digest

    def unseal(self, frames: Rows) -> None:
        """These frames, all different, are about to be written: what they held is no record any
        more."""
        numbers = as_rows(frames, self.num_frames)
        with self._lock:
            self._checksums[numbers] = None
            self._written[numbers] += 1

    def checksum_of(self, frames: Sequence[int], size: int) -> bytes:
        """The checksum noted when the record had arrived; computed now if it came from disk, where
        it was verified on the way."""
        known: bytes | None = self._checksums[frames[0]]
        return checksum(self.views(frames), size) if known is None else known

    def poison(self, frames: Sequence[int], byte: int = 0xFF) -> None:
        """Fill frames with a byte that no reader may see (tests)."""
        for span in self.spans(frames):
            span.fill_(byte)

    def _checked(self, frame: int) -> int:
        if not 0 <= frame < self.num_frames:  # -1 would name the last one
            raise IndexError(f"frame {frame} of {self.num_frames}")
        return frame

    def close(self) -> None:
        """Undo the registration.  Idempotent; the memory itself goes with its last user."""
        if self._unregister is not None:
            self._unregister()


def _driver(device: torch.device, call: str, *args: int) -> None:
    with torch.cuda.device(device):  # another one that is current here would get a context
        status = getattr(torch.cuda.cudart(), call)(*args)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise RuntimeError(f"{call} failed with status {int(status)}; is cpu_bytes too large?")
