"""Whether the store hangs: it has something to do, and nothing has come of it for long.

For whoever closes the data plane.  Knows operations by number; nothing of threads or bytes.
"""

import threading
import time
from math import inf

from kvtier.core.ops import Op, OpKind
from kvtier.types import Tier

__all__ = ["DiskWatch"]


class DiskWatch:
    """Of the operations that read from the store or write to it.  Called from any thread."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._under_way: set[int] = set()
        self._heard = -inf
        """When something last came of these, or the first of them was started."""
        self._lock = threading.Lock()

    def started(self, op: Op) -> None:
        """Any operation; counts if the store is needed for it."""
        if op.kind not in (OpKind.STORE, OpKind.DROP) and not (
            op.kind is OpKind.RESTORE and any(part.source is Tier.DISK for part in op.parts)
        ):
            return
        with self._lock:
            if not self._under_way:
                self._heard = time.monotonic()
            self._under_way.add(op.id)

    def heard(self) -> None:
        """Something was read."""
        self._heard = time.monotonic()

    def ended(self, op: Op) -> None:
        """Any that was started, done or not."""
        with self._lock:
            if op.id in self._under_way:
                self._under_way.discard(op.id)
                self._heard = time.monotonic()

    def patience(self) -> float:
        """Seconds until it hangs if nothing comes; infinity: it has nothing to do."""
        with self._lock:
            return self._heard + self.stall_s - time.monotonic() if self._under_way else inf
