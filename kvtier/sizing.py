"""From bytes to frames: what a layout and a configuration come to.

Pure arithmetic, and the place where a configuration that could never serve a request is refused.
"""

from collections.abc import Callable

from kvtier.config import CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind, Part
from kvtier.errors import ConfigError
from kvtier.layouts.base import Layout
from kvtier.types import Tier

__all__ = ["geometry_for", "record_bytes", "record_sizes"]

MIN_PAGES = 2
"""A request's own page and the one it grows into: with fewer nothing but one-page prompts runs."""
CHUNK_TOKENS = 4096
"""Window pages are counted so that one lease may be fed this many tokens at once."""
CHECKPOINTS = 16
"""Device frames for captured tails on their way down, at least."""


def geometry_for(layout: Layout, config: CacheConfig, *, disk_frames: int = 0) -> Geometry:
    """Frames of every pool.

    Without tails all of ``gpu_bytes`` become pages.  With tails every lease first gets a state
    slot and the window pages that decoding keeps, then one chunk's window pages and 16 checkpoint
    frames are set aside; pages get the rest.  Raises ConfigError naming the field, its value and
    the least that works.
    """
    gpu_bytes, cpu_bytes = _bytes(config.gpu_bytes), _bytes(config.cpu_bytes)
    page_bytes, frame_bytes = layout.page_bytes(), layout.frame_bytes()
    windows, window_page = _windows_per_lease(layout), _window_page(layout)
    gpu_windows = gpu_checkpoints = tail_bytes = 0
    if layout.has_tails:
        gpu_checkpoints = CHECKPOINTS
        if windows:
            gpu_windows = config.max_leases * windows + CHUNK_TOKENS // window_page
        tail_bytes = (
            config.max_leases * layout.state_bytes()
            + gpu_windows * layout.window_bytes()
            + gpu_checkpoints * layout.checkpoint_bytes()
        )
    gpu_pages = (gpu_bytes - tail_bytes) // page_bytes
    if gpu_pages < MIN_PAGES:
        least = tail_bytes + MIN_PAGES * page_bytes
        tails = f" and {tail_bytes} of tails for max_leases={config.max_leases}" * bool(tail_bytes)
        raise ConfigError(
            f"gpu_bytes={gpu_bytes} cannot hold one request: it takes {MIN_PAGES} pages of "
            f"{page_bytes} bytes{tails}; set gpu_bytes to {least} or more"
        )
    cpu_frames = cpu_bytes // frame_bytes
    least_frames = max(MIN_PAGES, layout.checkpoint_frames())
    if cpu_bytes and cpu_frames < least_frames:
        raise ConfigError(
            f"cpu_bytes={cpu_bytes} would keep nothing: set it to {least_frames * frame_bytes} "
            f"({least_frames} frames of {frame_bytes} bytes) or more, or to 0 for no host tier"
        )
    return Geometry(
        page_tokens=layout.page_tokens,
        page_bytes=page_bytes,
        gpu_pages=gpu_pages,
        cpu_frames=cpu_frames,
        disk_frames=disk_frames,
        max_leases=config.max_leases,
        has_tails=layout.has_tails,
        checkpoint_frames=layout.checkpoint_frames() if layout.has_tails else 0,
        parked_frames=layout.tail_frames(_parked_windows(layout)) if layout.has_tails else 0,
        gpu_states=config.max_leases if layout.has_tails else 0,
        gpu_checkpoints=gpu_checkpoints,
        window=next((c.window or 0 for c in layout.windows), 0),
        window_page=window_page,
        window_kept=layout.window_kept,
        gpu_windows=gpu_windows,
        max_draft=layout.max_draft,
        max_rejected=layout.max_rejected,
    )


def record_bytes(layout: Layout, part: Part) -> int:
    """Bytes of the record that a part moves.

    A checkpoint has one size in every tier, also near the start of a sequence, where a live tail
    takes or gives fewer window pages than it has room for.  A whole tail has as many window pages
    as its device end names.
    """
    if part.kind is Kind.HISTORY:
        return layout.page_bytes()
    if part.kind is Kind.CHECKPOINT:
        return layout.checkpoint_bytes()
    live = part.src if part.source is Tier.GPU else part.dst
    return layout.tail_bytes(len(live) - 1)


def record_sizes(layout: Layout) -> Callable[[Part], int]:
    """``record_bytes`` of one layout, most of it added up once: it is asked of every part."""
    page, checkpoint = layout.page_bytes(), layout.checkpoint_bytes()

    def size(part: Part) -> int:
        if part.kind is Kind.HISTORY:
            return page
        return checkpoint if part.kind is Kind.CHECKPOINT else record_bytes(layout, part)

    return size


def _bytes(size: int | str) -> int:
    assert isinstance(size, int), "CacheConfig parses sizes"
    return size


def _window_page(layout: Layout) -> int:
    return next((c.slots_per_page for c in layout.windows), 0)


def _windows_per_lease(layout: Layout) -> int:
    """Window pages a decoding lease holds at most: what windows, checkpoints and drafts reach
    back to from any place within a page, and what the next tokens, drafts among them, fill."""
    if not layout.windows:
        return 0
    return (layout.window_kept + 2 * layout.max_draft - 2) // _window_page(layout) + 2


def _parked_windows(layout: Layout) -> int:
    """Of these, the window pages of committed tokens."""
    if not layout.windows:
        return 0
    return (layout.window_kept + layout.max_draft - 3) // _window_page(layout) + 2
