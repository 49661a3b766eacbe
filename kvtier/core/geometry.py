"""All that the core knows of a layout and a configuration: counts of frames and tokens."""

from dataclasses import dataclass

__all__ = ["Geometry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of pages and pools.  A pool of 0 frames is off."""

    page_tokens: int
    page_bytes: int = 1
    gpu_pages: int
    cpu_frames: int = 0
    disk_frames: int = 0
    max_leases: int = 256

    has_tails: bool = False
    checkpoint_frames: int = 0
    """Host or disk frames of one checkpoint."""
    parked_frames: int = 0
    """Host frames of a live tail, wherever its lease stands; for ``pause``."""
    gpu_states: int = 0
    """State slots: one per lease of a layout with tails."""
    gpu_checkpoints: int = 0
    """Device frames that hold captured tails until they are packed, and longer if there is room."""
    window: int = 0
    """Tokens a window layer reads, the query's own included; 0: no windows."""
    window_page: int = 0
    """Tokens of a window page."""
    window_kept: int = 0
    """Tokens that windows are kept for, the next one included; more than ``window`` if checkpoints
    hold more of them.  0: ``window``."""
    gpu_windows: int = 0
    max_draft: int = 0
    """Tokens past the committed ones that may be rejected; windows are kept that much longer."""
    max_rejected: int | None = None
    """Tokens of one step that may be rejected without a lease's tail being lost; None: any."""

    def __post_init__(self) -> None:
        if not self.window_kept:
            object.__setattr__(self, "window_kept", self.window)

    def windows_at(self, position: int, drafts: int = 0) -> range:
        """Window pages needed at a committed length of ``position`` tokens, of which ``drafts``
        may be rolled back."""
        if not self.window:
            return range(0)
        first = max(0, position - self.window_kept + 1 - drafts) // self.window_page
        return range(first, -(-position // self.window_page))
