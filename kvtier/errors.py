"""Every exception kvtier raises.

    KVTierError
    |- ConfigError (ValueError)    a size, path or option that cannot work; names the field
    |- TokenError (ValueError)     token ids of a wrong type, range or shape
    |- OutOfPages                  not enough pages could be freed; nothing changed
    |- CacheClosed                 the cache has been closed
    |- LeaseError                  a lease used in a way its state does not allow
    |  |- LeaseReleased            ... after release()
    |  `- LeaseNotReady            ... while it is restoring or paused
    |- StoreError (OSError)        a store that cannot be opened, read or written
    |  `- StoreLocked              another process writes this store
    |- LayoutMismatch              an import or a transfer from another layout, model or format
    `- InvariantError (AssertionError)   a bug in kvtier

A fault in a lower tier is none of these: it is a miss and a counter.
"""

__all__ = [
    "CacheClosed",
    "ConfigError",
    "InvariantError",
    "KVTierError",
    "LayoutMismatch",
    "LeaseError",
    "LeaseNotReady",
    "LeaseReleased",
    "OutOfPages",
    "StoreError",
    "StoreLocked",
    "TokenError",
]


class KVTierError(Exception):
    """Base of everything kvtier raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """A size, path or option that cannot work.  The message names the field and the remedy."""


class TokenError(KVTierError, ValueError):
    """Token ids of a wrong type, range or shape."""


class OutOfPages(KVTierError):
    """Not enough pages could be freed.  Nothing changed; shed load and try again, unless
    ``never_fits``.

    ``held``: what the leases that asked hold already of what they need.
    """

    needed: int
    """More than is held; of device pages unless the message names something else."""
    available: int
    """How many of these could be freed."""
    capacity: int | None
    """How many there are in all; None of leases and state slots, and where a truncate or a resume
    asked."""
    never_fits: bool
    """The leases that asked would hold more than there are in all: to wait is of no use, nor to
    release others."""

    def __init__(
        self,
        needed: int,
        available: int,
        what: str = "device pages",
        capacity: int | None = None,
        held: int = 0,
    ) -> None:
        self.needed = needed
        self.available = available
        self.capacity = capacity
        self.never_fits = capacity is not None and held + needed > capacity
        self._what = what
        self._held = held
        super().__init__(self._message())

    def _message(self) -> str:
        if not self.never_fits:
            return (
                f"needed {self.needed} {self._what}, {self.available} could be freed; "
                "release leases or retry later"
            )
        sized_by = "max_leases" if self._what == "window pages" else "gpu_bytes"
        beside = f" beside the {self._held} already held" if self._held else ""
        return (
            f"needed {self.needed} {self._what}{beside}, which can never fit: there are "
            f"{self.capacity} in all; take fewer tokens or leases at once, or raise {sized_by}"
        )

    def __reduce__(self) -> tuple[type["OutOfPages"], tuple[int, int, str, int | None, int]]:
        """It travels between processes as it was made, not as its message."""
        return type(self), (self.needed, self.available, self._what, self.capacity, self._held)


class CacheClosed(KVTierError):
    """The cache has been closed."""


class LeaseError(KVTierError):
    """A lease used in a way its state does not allow."""


class LeaseReleased(LeaseError):
    """The lease has been released; it holds nothing any more."""


class LeaseNotReady(LeaseError):
    """The lease is restoring or paused; wait on ``ready`` (or ``resume()``) first."""


class StoreError(KVTierError, OSError):
    """A store that cannot be opened, read or written."""


class StoreLocked(StoreError):
    """Another process writes this store; open it with ``disk_mode="read"``."""


class LayoutMismatch(KVTierError):
    """An import or a transfer from another layout, model or format; names the field."""


class InvariantError(KVTierError, AssertionError):
    """A bug in kvtier.  Lists every violated invariant by its number."""
