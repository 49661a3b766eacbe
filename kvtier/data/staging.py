"""Staging: a bounded number of packed frames on the device, on their way to the host.

Credits, not buffers per caller: who takes a slot gives it back once its bytes have landed.  Only
the pack thread waits here, and only for the landing threads, which wait for nobody.
"""

import threading
import time
from collections.abc import Sequence

import torch

from kvtier.errors import ConfigError

__all__ = ["Staging"]


class Staging:
    """``staging_bytes`` worth of slots, each of one host frame, but not more than ``cpu_frames``.

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
        self.num_slots = min(slots, max(cpu_frames, most_frames)) if cpu_frames else 0
        self.frames = torch.zeros((self.num_slots, frame_bytes), dtype=torch.uint8, device=device)
        self._free = list(range(self.num_slots))
        self._backlog = 0
        self._changed = threading.Condition()

    def admit(self, frames: int, *, always: bool) -> bool:
        """Count an op's frames in, unless those before it already fill the staging.

        An op larger than the staging streams through it; only ops behind it are kept out.
        """
        with self._changed:
            if not always and self._backlog >= self.num_slots:
                return False
            self._backlog += frames
            return True

    def dismiss(self, frames: int) -> None:
        """The op has ended: count its frames out."""
        with self._changed:
            self._backlog -= frames

    def take(self, least: int, most: int, deadline: float | None) -> list[int] | None:
        """Between ``least`` and ``most`` slots, as soon as ``least`` are free; None once the
        monotonic clock has passed ``deadline``."""
        with self._changed:
            while len(self._free) < least:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            count = min(most, len(self._free))
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._free += slots
            assert len(self._free) <= self.num_slots, "a staging slot was given back twice"
            self._changed.notify_all()

    def spans(self, slots: Sequence[int]) -> list[torch.Tensor]:
        return [self.frames[slot] for slot in slots]
