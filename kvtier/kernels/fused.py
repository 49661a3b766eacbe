"""Several steps in one call: norm, rotation and packing of what is stored; compressing into pages.

What kernels do in one launch or two, said with the references of the steps; other backends are held
to these bytes.  Nothing here has results whose shape depends on data, so a backend may do all of it
without asking the device, within a captured graph too.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from kvtier.kernels.compress import compress
from kvtier.kernels.mla import PagedBatch
from kvtier.kernels.query import norm_rope, quantise_query, rms_norm, rope
from kvtier.kernels.records import Record, write_records

__all__ = [
    "LatentRope",
    "check_latent",
    "compress_write",
    "index_query",
    "write_latent",
    "write_normed",
]

LatentRope = Literal["interleaved", "half", "interleaved_to_half"]
"""How the rope part of a latent row is rotated.  "interleaved": pairs lie adjacent and stay so, in
float32, rounded once (V2).  "half": they lie half a row apart and stay so; "interleaved_to_half":
they lie adjacent, and are written half a row apart (V3, V3.2); in both every product and sum is
rounded to the values' type."""


def write_normed(
    storage: Tensor,
    slots: Tensor,
    values: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    record: Record,
    *,
    eps: float,
) -> None:
    """Norm ``values`` (n, dim), rotate the last of each, and write them as ``write_records`` does.

    ``weight`` (dim,); ``cos`` and ``sin`` (n, pairs) of each row's position.  The norm is summed by
    halves, in float32 or wider.
    """
    rows = norm_rope(values, weight, cos, sin, eps=eps)
    write_records(storage, slots, rows, record)


def write_latent(
    storage: Tensor,
    slots: Tensor,
    values: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    record: Record,
    *,
    eps: float,
    rotation: LatentRope,
) -> None:
    """Write latent rows as ``write_records`` does, from what the down-projection gives.

    ``values`` (n, latent + 2 * pairs): the latent is normed, the rest rotated by ``cos`` and
    ``sin`` (n, pairs) of each row's position, which are taken in the values' type but for
    "interleaved".  ``weight`` (latent,) is of the values' type; None: latents come normed.

    Rounded where the models' own modules round: the norm to the values' type, and again when it is
    multiplied by ``weight``.  But its sum is taken by halves, which theirs is not: a normed value
    may be the next one to theirs, and then so may its code; rotated values are theirs, and so is
    all of a row whose latent comes normed.
    """
    latent_dim = check_latent(values, weight, cos, sin, rotation)
    latent, rest = torch.split(values, [latent_dim, 2 * cos.shape[1]], dim=1)
    if weight is not None:
        latent = rms_norm(latent, None, eps=eps).to(values.dtype) * weight
    rows = torch.cat((latent, _turned(rest, cos, sin, rotation)), dim=1)
    write_records(storage, slots, rows, record)


def check_latent(
    values: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, rotation: LatentRope
) -> int:
    """Values of a latent.  Raises ValueError for shapes and types that ``write_latent`` refuses."""
    latent = values.shape[1] - 2 * cos.shape[1]
    if rotation not in get_args(LatentRope):
        raise ValueError(f"rotation {rotation!r} is not one of {get_args(LatentRope)}")
    if cos.shape != sin.shape or cos.shape[0] != values.shape[0] or latent < 1:
        raise ValueError(
            f"values {tuple(values.shape)}, rotation {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if weight is not None and (weight.shape != (latent,) or weight.dtype != values.dtype):
        raise ValueError(
            f"weight {weight.dtype} {tuple(weight.shape)} of {latent} values of {values.dtype}"
        )
    return latent


def _turned(values: Tensor, cos: Tensor, sin: Tensor, rotation: LatentRope) -> Tensor:
    if rotation == "interleaved":
        return rope(values, cos, sin).to(values.dtype)
    cos, sin = cos.to(values.dtype), sin.to(values.dtype)
    if rotation == "half":
        a, b = values.chunk(2, dim=1)
    else:
        a, b = values[:, 0::2], values[:, 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)


def compress_write(
    kv: Tensor,
    score: Tensor,
    states: Sequence[Tensor],
    batch: PagedBatch,
    state_slots: Tensor,
    storage: Tensor,
    slots: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    record: Record,
    *,
    ratio: int,
    ring: int,
    eps: float,
    captures: Tensor | None = None,
    frames: Sequence[Tensor | None] = (),
) -> None:
    """Take the call's tokens into the rings, and write the entries that they close.

    ``kv`` to ``state_slots``, ``ratio`` and ``ring`` are those of ``compress``.  Token i, if it
    closes an entry, has it normed with ``weight`` (head_dim,), rotated by ``cos[i]`` and ``sin[i]``
    (the position of the entry's first token), and written to ``slots[i]`` of ``storage``, -1 for
    none; ``slots`` and rotation of other tokens are not looked at.

    ``captures`` (c, 3) of any integer type holds a row of the batch, a position and a frame for
    each checkpoint due, as in ``compress``; a row of -1 is none.  For each state ``frames`` has the
    checkpoints' frames (frames, count, 2 * head_dim), which get the ``count`` rows before the
    position, or None for a state that checkpoints do not hold.
    """
    due = [] if captures is None else [c for c in captures.tolist() if c[0] >= 0]
    closed = compress(
        kv,
        score,
        states,
        batch,
        state_slots,
        ratio=ratio,
        ring=ring,
        captures=[(row, position) for row, position, _ in due],
        capture_slots=[0 if f is None else f.shape[1] for f in frames],
    )
    for frame, rows in zip(frames, closed.captured, strict=False):
        if frame is not None and due:
            frame[torch.tensor([f for *_, f in due], device=frame.device)] = rows
    at = closed.tokens
    write_normed(storage, slots[at], closed.values, weight, cos[at], sin[at], record, eps=eps)


def index_query(
    query: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, record: Record
) -> tuple[Tensor, Tensor]:
    """Indexer queries (n, heads, dim) and weights (n, heads) as ``index_topk`` takes them beside
    keys of ``record``.

    Rotated, unless ``cos`` and ``sin`` have no pairs: then they come rotated.  Beside packed keys
    then quantised, weights and all, as ``quantise_query`` does; beside plain rows rounded once to
    the query's type, and the weights stay as they are.
    """
    turned = rope(query, cos, sin)
    if record.pack is None:
        return turned.to(query.dtype), weights
    return quantise_query(turned, weights)
