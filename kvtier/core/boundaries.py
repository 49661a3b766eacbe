"""Page ends of a path where a lease could resume, and what standing there would take to load.

Reads only.
"""

from collections.abc import Sequence

from kvtier.core.copies import CHECKPOINT, CPU, DISK, GPU, Copy
from kvtier.core.load_costs import Boundary
from kvtier.core.operations import Operations
from kvtier.core.tree import Node
from kvtier.types import Span, Tier

__all__ = ["boundaries", "inside_span"]


def inside_span(position: int, spans: Sequence[Span]) -> bool:
    """Whether a boundary at ``position`` would cut a span in two."""
    return any(s.start < position < s.stop for s in spans)


def boundaries(
    operations: Operations,
    path: Sequence[Node],
    spans: Sequence[Span],
    below: Sequence[bool] = (),
) -> list[Boundary]:
    """All of them, ascending.  Every page of the path is READY in some tier (I9).  ``below``: of
    each page behind it that is on disk only, whether its checkpoint is there too."""
    res = operations.residency
    page, tails = res.geometry.page_tokens, res.geometry.has_tails
    out: list[Boundary] = []
    frames, seen = [0, 0, 0], [False, False, False]  # by tier
    origins: dict[Copy, Tier] = {}
    for depth, node in enumerate(path, start=1):
        copy = node.copies[GPU]
        if copy is None:
            source = res.best(node)
            assert source is not None, "I9"
            frames[source.tier] += 1
            seen[source.tier] = True
        elif copy.writer:
            if copy not in origins:
                origins |= operations.origins(copy.writer)
            seen[origins[copy]] = True
        if spans and inside_span(depth * page, spans):
            continue
        at = Boundary(depth, seen[CPU], seen[DISK], frames[CPU], frames[DISK])
        if tails:
            checkpoint = res.best(node, CHECKPOINT)
            if checkpoint is None:
                continue
            if checkpoint.tier != GPU:
                on_disk = checkpoint.tier == DISK
                at = _with_checkpoint(at, res.geometry.checkpoint_frames, on_disk=on_disk)
        out.append(at)
    for depth, checkpointed in enumerate(below, start=len(path) + 1):
        frames[DISK] += 1
        if (spans and inside_span(depth * page, spans)) or (tails and not checkpointed):
            continue
        at = Boundary(depth, seen[CPU], True, frames[CPU], frames[DISK])
        if tails:
            at = _with_checkpoint(at, res.geometry.checkpoint_frames, on_disk=True)
        out.append(at)
    return out


def _with_checkpoint(at: Boundary, frames: int, *, on_disk: bool) -> Boundary:
    if on_disk:
        return at._replace(disk=True, disk_frames=at.disk_frames + frames, checkpoint=frames)
    return at._replace(host=True, host_frames=at.host_frames + frames)
