"""Sparse attention in triton: a program attends the heads of one query to both its slot lists.

Keys are read and unpacked as they are needed, 64 values at a time: once for the scores, once for
the output.  Few queries have their keys shared out among several programs; a second launch joins
what they found.  Nothing is asked of the device; slots past the pool count as none.  A list costs
what it has slots in it: whole tiles of -1 are passed over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.config import parse_bytes
from kvtier.kernels.records import Record
from kvtier.kernels.sparse import check_extra
from kvtier.kernels.triton_values import (
    cast,
    e4m3_values,
    operand,
    power_of_two,
    precision,
    product,
    widened,
)
from kvtier.kernels.triton_write import adjacent, pool_of

__all__ = ["DIM", "check_lists", "join", "sparse_attend", "splits_of"]

DIM = 512
SPLITS = 16
"""Programs that share the keys of a query, at most; and..."""
PROGRAMS = 256
"""...how many there are to be in all."""
TILE = 32
"""Keys at a time."""
HEADS = 64
"""Heads of one program, at most: they share the keys that it unpacks."""

MOST_SPLITS = 32
TILES, AROUND, JOINING = 10, 1.5, 1.2
"""Of a plan for whole multiprocessors: tiles of a usual query (128 + 512 keys); what a program
takes beside its tiles, and what joining parts takes, in tiles."""


def sparse_attend(
    query: Tensor,
    window: Tensor,
    window_slots: Tensor,
    sink: Tensor,
    *,
    scale: float,
    record: Record,
    extra: Tensor | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    workspace_bytes: int | str = "512MiB",
) -> tuple[Tensor, Tensor]:
    """``kvtier.kernels.sparse_attend``, for heads of 512 values; lengths are not looked at."""
    query, sink = adjacent(query), adjacent(sink)
    n, heads, dim = query.shape
    check_extra(extra, extra_slots)
    if extra is None or extra_slots is None:
        extra, extra_slots = window, window_slots[:, :0]
    window_slots, extra_slots = adjacent(window_slots), adjacent(extra_slots)
    check_lists(query, sink, window_slots, extra_slots)
    dot = precision(query, window, record, on_gpu=query.is_cuda)
    block = min(max(16, triton.next_power_of_2(heads)), HEADS if dot == "bf16" else 16)
    blocks = triton.cdiv(heads, block)
    # By the number of queries alone: what is behind the end of a list changes no sum's order.
    splits = max(1, min(SPLITS, PROGRAMS // max(1, n * blocks)))
    a_query = splits * heads * (dim + 1) * 4
    some = max(1, parse_bytes(workspace_bytes, "workspace_bytes") // a_query)
    out = torch.empty(n, heads, dim, dtype=query.dtype, device=query.device)
    lse = torch.empty(n, heads, dtype=torch.float32, device=query.device)
    rows = min(n, some) * heads
    parts = query.new_empty(splits * rows, dim, dtype=torch.float32)
    part_lse = query.new_empty(splits * rows, dtype=torch.float32)
    for low in range(0, n, some):
        count = min(some, n - low)
        _attend[(count, blocks, splits)](
            query,
            *query.stride()[:2],
            window,
            *pool_of(window, record),
            window_slots,
            window_slots.stride(0),
            window_slots.shape[1],
            extra,
            *pool_of(extra, record),
            extra_slots,
            extra_slots.stride(0),
            extra_slots.shape[1],
            scale,
            low,
            parts,
            part_lse,
            rows,
            heads,
            HEADS=block,
            TILE=TILE if dot == "bf16" else TILE // 2,
            RECORD=record.name,
            DOT=dot,
            num_warps=8,
        )
        _join[(count * heads,)](
            parts, part_lse, rows, splits, sink, low, out, lse, heads, SPLITS=SPLITS, WIDTH=dim
        )
    return out, lse


def check_lists(query: Tensor, sink: Tensor, window_slots: Tensor, extra_slots: Tensor) -> None:
    """Raises ValueError for shapes that are no query (n, heads, 512), its sink and its lists."""
    n, heads, dim = query.shape
    lists_of = {window_slots.shape[0], extra_slots.shape[0]}
    if dim != DIM or sink.shape != (heads,) or lists_of != {n}:
        raise ValueError(
            f"query {tuple(query.shape)}, sink {tuple(sink.shape)}, slots "
            f"{tuple(window_slots.shape)} and {tuple(extra_slots.shape)}"
        )


def splits_of(units: int, processors: int) -> int:
    """Programs that share the keys of a query, where a program fills a multiprocessor: of 1 to 32
    what ends soonest, for ``units`` queries (or groups of their heads) of a usual number of keys.

    Lists do not matter, so what is behind the end of one changes no sum's order.
    """
    if 0 < units <= processors:
        return min(MOST_SPLITS, processors // units)

    def tiles(splits: int) -> float:
        joining = JOINING if splits > 1 else 0.0
        return -(-units * splits // processors) * (-(-TILES // splits) + AROUND) + joining

    return min((1, 2, 3), key=tiles)


def join(
    parts: Tensor, part_lse: Tensor, splits: int, sink: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Fills ``out`` (n, heads, 512) and ``lse`` (n, heads), with ``sink``'s share in the output, by
    what each of ``splits`` parts found: (splits * n * heads, 512) means of values and natural
    log-sum-exps, -inf where the means are not written."""
    heads, rows = out.shape[1], lse.numel()
    pieces = 8 if rows <= 128 else 4 if rows <= 256 else 1  # few rows: more programs
    _join[(rows, pieces)](
        *(parts, part_lse, rows, splits, sink, 0, out, lse, heads),
        SPLITS=triton.next_power_of_2(splits),
        WIDTH=DIM // pieces,
        num_warps=1 if pieces > 1 else 4,
    )


@triton.jit
def _some_values(rows, scales, seen, C: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr):
    """Values 64 * C .. of each key of a tile, (keys, 64)."""
    at = C * 64 + tl.arange(0, 64)[None, :]
    if RECORD == "dense":
        return operand(tl.load(rows[:, None] + at, mask=seen[:, None], other=0.0), DOT)
    else:
        tl.static_assert(RECORD == "v4_fp8")
        if C < 7:
            codes = tl.load(rows[:, None] + at, mask=seen[:, None], other=0)
            scale = power_of_two(tl.load(scales + C, mask=seen, other=127).to(tl.int32))
            return operand(e4m3_values(codes) * scale[:, None], DOT)
        else:
            halves = (rows[:, None] + 448).to(tl.pointer_type(tl.bfloat16)) + (at - 448)
            return operand(tl.load(halves, mask=seen[:, None], other=0.0), DOT)


@triton.jit
def _more_scores(
    scores, q, real, rows, scales, seen,
    C: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    x = tl.load(q + C * 64 + tl.arange(0, 64)[None, :], mask=real[:, None], other=0.0)
    keys = _some_values(rows, scales, seen, C, RECORD, DOT)
    return scores + product(operand(x, DOT), tl.trans(keys), DOT)


@triton.jit
def _more_output(
    acc, shrink, p, rows, scales, seen,
    C: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    keys = _some_values(rows, scales, seen, C, RECORD, DOT)
    return acc * shrink[:, None] + product(p, keys, DOT)


@triton.jit(
    do_not_specialize=[
        "window_there",
        "extra_there",
        "num_window",
        "num_extra",
        "scale",
        "window_slots_stride",
        "extra_slots_stride",
        "low",
        "rows_a_part",
    ],
    do_not_specialize_on_alignment=["window_slots", "extra_slots", "sink"],
)
def _attend(
    query, token_stride, head_stride,
    window, window_page_stride, window_per_page, window_there,
    window_slots, window_slots_stride, num_window,
    extra, extra_page_stride, extra_per_page, extra_there,
    extra_slots, extra_slots_stride, num_extra,
    scale, low, parts, part_lse, rows_a_part, heads,
    HEADS: tl.constexpr, TILE: tl.constexpr, RECORD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Some heads of one query against every so manieth tile of its keys."""
    token = low + tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    q = query + token * token_stride + (head * head_stride)[:, None]
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    a0 = tl.zeros((HEADS, 64), tl.float32)
    a1 = tl.zeros((HEADS, 64), tl.float32)
    a2 = tl.zeros((HEADS, 64), tl.float32)
    a3 = tl.zeros((HEADS, 64), tl.float32)
    a4 = tl.zeros((HEADS, 64), tl.float32)
    a5 = tl.zeros((HEADS, 64), tl.float32)
    a6 = tl.zeros((HEADS, 64), tl.float32)
    a7 = tl.zeros((HEADS, 64), tl.float32)
    in_window = tl.cdiv(num_window, TILE)
    tiles = in_window + tl.cdiv(num_extra, TILE)
    i = tl.program_id(2)
    while i < tiles:
        first = i < in_window
        at = tl.where(first, i, i - in_window) * TILE + tl.arange(0, TILE)
        slots = tl.where(
            first,
            window_slots + token * window_slots_stride,
            extra_slots + token * extra_slots_stride,
        )
        slot = tl.load(slots + at, mask=at < tl.where(first, num_window, num_extra), other=-1)
        slot = slot.to(tl.int64)
        seen = (slot >= 0) & (slot < tl.where(first, window_there, extra_there))
        if tl.max(seen.to(tl.int32), axis=0) > 0:
            slot = tl.where(seen, slot, 0)
            storage = tl.where(first, window, extra)
            page_stride = tl.where(first, window_page_stride, extra_page_stride).to(tl.int64)
            if RECORD == "dense":
                rows = storage + slot * page_stride
                scales = rows
            else:
                per_page = tl.where(first, window_per_page, extra_per_page)
                page = storage + slot // per_page * page_stride
                rows = page + slot % per_page * 576
                scales = page + per_page * 576 + slot % per_page * 8
            s = tl.zeros((HEADS, TILE), tl.float32)
            for c in tl.static_range(8):
                s = _more_scores(s, q, real, rows, scales, seen, c, RECORD, DOT)
            s = tl.where(seen[None, :], s * scale, float("-inf"))
            new_most = tl.maximum(most, tl.max(s, axis=1))
            shrink = tl.exp(most - new_most)
            weights = tl.exp(s - new_most[:, None])
            total = total * shrink + tl.sum(weights, axis=1)
            most = new_most
            p = operand(weights, DOT)
            a0 = _more_output(a0, shrink, p, rows, scales, seen, 0, RECORD, DOT)
            a1 = _more_output(a1, shrink, p, rows, scales, seen, 1, RECORD, DOT)
            a2 = _more_output(a2, shrink, p, rows, scales, seen, 2, RECORD, DOT)
            a3 = _more_output(a3, shrink, p, rows, scales, seen, 3, RECORD, DOT)
            a4 = _more_output(a4, shrink, p, rows, scales, seen, 4, RECORD, DOT)
            a5 = _more_output(a5, shrink, p, rows, scales, seen, 5, RECORD, DOT)
            a6 = _more_output(a6, shrink, p, rows, scales, seen, 6, RECORD, DOT)
            a7 = _more_output(a7, shrink, p, rows, scales, seen, 7, RECORD, DOT)
        i += tl.num_programs(2)
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    row = tl.program_id(2).to(tl.int64) * rows_a_part + (token - low) * heads + head
    tl.store(part_lse + row, tl.where(none, float("-inf"), most + tl.log(total)), mask=real)
    if tl.max(tl.where(none, 0, 1), axis=0) > 0:  # what is not written has no weight
        o = parts + (row * 512)[:, None] + tl.arange(0, 64)[None, :]
        w = (1.0 / total)[:, None]
        tl.store(o, a0 * w, mask=real[:, None])
        tl.store(o + 64, a1 * w, mask=real[:, None])
        tl.store(o + 128, a2 * w, mask=real[:, None])
        tl.store(o + 192, a3 * w, mask=real[:, None])
        tl.store(o + 256, a4 * w, mask=real[:, None])
        tl.store(o + 320, a5 * w, mask=real[:, None])
        tl.store(o + 384, a6 * w, mask=real[:, None])
        tl.store(o + 448, a7 * w, mask=real[:, None])


@triton.jit(
    do_not_specialize=["rows_a_part", "splits", "low"], do_not_specialize_on_alignment=["sink"]
)
def _join(
    parts, part_lse, rows_a_part, splits, sink, low, out, lse, heads,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some values of one head of one query, of its parts; the sink has its share of the
    denominator."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < splits
    part = split * rows_a_part.to(tl.int64) + row
    each = tl.load(part_lse + part, mask=there, other=float("-inf"))
    most = tl.max(each, axis=0)
    none = most == float("-inf")
    most = tl.where(none, 0.0, most)
    weights = tl.exp(each - most)
    total = tl.sum(weights, axis=0)
    held = widened(tl.load(sink + row % heads))
    share = tl.where(none, 0.0, 1.0 / (total + tl.exp(held - most)))
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    found = each > float("-inf")
    values = tl.load(parts + part[:, None] * 512 + at[None, :], mask=found[:, None], other=0.0)
    mean = tl.sum(values * weights[:, None], axis=0) * share
    row += low * heads
    tl.store(out + row * 512 + at, cast(mean, out.dtype.element_ty))
    sums = most + tl.log(tl.where(none, 1.0, total))
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(none, float("-inf"), sums))
