"""Slots: a bounded number of packed frames on the device, on their way to the host or from it.

Credits, not buffers per caller: who takes a slot gives it back once nothing reads its bytes any
more.  Nobody waits here.
"""

import threading

import numpy as np
import numpy.typing as npt
import torch

from kvtier.data.rows import Rows
from kvtier.errors import ConfigError

__all__ = ["Slots", "Staging"]


class Slots:
    """``num_slots`` rows of ``frame_bytes``."""

    def __init__(self, num_slots: int, frame_bytes: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.frames = torch.zeros((num_slots, frame_bytes), dtype=torch.uint8, device=device)
        """(slots, bytes) uint8."""
        self._free = np.arange(num_slots)
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """How many may be taken."""
        return len(self._free)

    def take(self, least: int, most: int) -> npt.NDArray[np.int64] | None:
        """Between ``least`` and ``most`` slots; None if fewer than ``least`` are free."""
        with self._lock:
            if len(self._free) < least:
                return None
            count = min(most, len(self._free))
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give(self, slots: Rows) -> None:
        with self._lock:
            self._free = np.concatenate((self._free, np.asarray(slots, np.int64)))
            assert len(self._free) <= self.num_slots, "a slot was given back twice"


class Staging(Slots):
    """``staging_bytes`` worth of slots for frames on their way to the host, not more than
    ``cpu_frames``.

    Raises ConfigError if the largest record, of ``most_frames``, would never fit.
    """

    def __init__(
        self,
        staging_bytes: int,
        frame_bytes: int,
        *,
        most_frames: int,
        cpu_frames: int,
        device: torch.device,
    ) -> None:
        slots = staging_bytes // frame_bytes
        if cpu_frames and slots < most_frames:
            raise ConfigError(
                f"staging_bytes={staging_bytes} holds {slots} frames of {frame_bytes} bytes, but "
                f"one record takes {most_frames}; make it at least {most_frames * frame_bytes}"
            )
        count = min(slots, max(cpu_frames, most_frames)) if cpu_frames else 0
        super().__init__(count, frame_bytes, device)
        self._backlog = 0

    def admit(self, frames: int, *, always: bool) -> bool:
        """Count an op's frames in, unless those before it already fill the staging.

        An op larger than the staging streams through it; only ops behind it are kept out.
        """
        with self._lock:
            if not always and self._backlog >= self.num_slots:
                return False
            self._backlog += frames
            return True

    def dismiss(self, frames: int) -> None:
        """The op has ended: count its frames out."""
        with self._lock:
            self._backlog -= frames
