"""What several programs found of one sequence, merged by these programs themselves, in the launch
that found it: for kernels in gluon whose programs all run at the same time.

A program that is done with its part says so in a counter of the sequence and waits for the others;
then each merges a share of the sequence's outputs.  Whoever is the last to have seen that all are
done leaves the counter at 0, for the next launch.

A part keeps at most two such results: of a sequence that starts in an earlier part, its first, and
of one that goes on in the next part, its last.  A result is 64 rows of 512 values, eight columns of
all rows together, so that what a warp of a product's accumulators stores lies in one piece.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvtier.kernels.gluon_parts import LN2, LOG2E

__all__ = ["arrive", "join", "place_of", "slot_of"]

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Renamed by triton 3.9."""


@gluon.jit
def slot_of(part, starts):
    """Where a part keeps what it found of a sequence that starts in it, or in an earlier one."""
    return (part * 2 + starts.to(gl.int32)) * gl.num_programs(0) + gl.program_id(0)


@gluon.jit
def place_of(row, column):
    """Where a result has its value of a row and a column."""
    return row * 8, column // 8 * 512 + column % 8


@gluon.jit
def arrive(counts, one, HALF: gl.constexpr):
    """Says that this group's result of a sequence that starts in part ``one`` is stored."""
    barrier()
    place = counts + (one * gl.num_programs(0) + gl.program_id(0)) * 2 + HALF
    gl.atomic_add(place, 1, sem="release", scope="gpu")


@gluon.jit
def join(
    b, one, last, offsets, out, lse, parts, part_lse, counts,
    HALF: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """This group's share of the outputs of sequence ``b``, half of their columns, once all parts
    that hold some of it, ``one`` to ``last``, have arrived."""
    tile = gl.program_id(0)
    first = gl.load(offsets + b)
    pairs = gl.minimum((gl.load(offsets + b + 1) - first) * HEADS - tile * 64, 64)
    held = last - one + 1
    place = counts + (one * gl.num_programs(0) + tile) * 2 + HALF
    while gl.atomic_add(place, 0, sem="acquire", scope="gpu") < held:
        pass
    if gl.atomic_add(place, 1, sem="relaxed", scope="gpu") == 2 * held - 1:
        gl.store(place, 0)
    to = first.to(gl.int64) * HEADS + tile * 64
    of = (pairs, one, last, out + to * 512, lse + to, parts, part_lse)
    # Each warp has columns of its own, so that sums over parts stay within it.
    columns: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 2, 8, 2], [1, 4, 1, 1], [3, 2, 1, 0])
    both: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [2, 1, 8, 2], [1, 4, 1, 1], [3, 2, 1, 0])
    most: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [16, 1, 1, 2], [1, 4, 1, 1], [3, 2, 1, 0])
    # About as many values at a time: of few parts those of many pairs, of many parts of few.
    unit = gl.program_id(1) - one
    if held == 2:
        while unit * 16 < pairs:
            _merge(unit * 16, 0, *of, HALF, 2, 32, 16, columns)
            unit += held
    elif held <= 8:
        while unit * 8 < pairs:
            _merge(unit * 8, 0, *of, HALF, 4, 32, 8, columns)
            unit += held
    elif held <= 2 * pairs:
        while unit // 8 * 8 < pairs:
            _merge(unit // 8 * 8, unit % 8 * 4, *of, HALF, 32, 4, 8, both)
            unit += held
    else:
        while unit < pairs * 8:
            _merge(unit // 8, unit % 8 * 4, *of, HALF, 128, 4, 1, most)
            unit += held


@gluon.jit
def _merge(
    low, group, pairs, one, last, out, lse, parts, part_lse, HALF: gl.constexpr,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """``ROWS`` pairs from ``low`` on, so many groups of eight columns, so many parts at a time."""
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    row = low + gl.arange(0, ROWS, gl.SliceLayout(0, by_row))
    real = row < pairs
    by_group: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    groups = HALF * 32 + group + gl.arange(0, GROUPS, gl.SliceLayout(0, by_group))
    groups = groups[None, :, None, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    column = column[None, None, None, :]
    top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(0, by_row))
    weight = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(0, by_row))
    sofar = gl.full([1, GROUPS, ROWS, 8], 0.0, gl.float32, layout)
    part = one
    while part <= last:
        which = part + gl.arange(0, PARTS, gl.SliceLayout(1, by_row))
        there = (which <= last)[:, None] & real[None, :]
        slot = slot_of(which, which == one)
        value = gl.load(
            part_lse + slot[:, None] * 64 + row[None, :], mask=there, other=-float("inf")
        )
        at = (slot.to(gl.int64) * (64 * 512))[:, None] + row[None, :] * 8
        at = at[:, None, :, None] + (groups * 512 + column)
        found = gl.load(parts + at, mask=there[:, None, :, None], other=0.0)
        new_top = gl.maximum(top, gl.max(value, 0))
        # A row that has seen nothing yet subtracts 0, not -inf.
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = gl.exp2((top - base) * LOG2E)
        share = gl.exp2((value - base[None, :]) * LOG2E)
        weight = weight * shrink + gl.sum(share, 0)
        sofar = sofar * shrink[None, :][:, None, :, None]
        sofar += gl.sum(found * share[:, None, :, None], 0)[None, :, :, :]
        top = new_top
        part += PARTS
    safe = gl.where(weight > 0, weight, 1.0)
    sofar = sofar / safe[None, :][:, None, :, None]
    at = (row * 512)[None, :][:, None, :, None] + (groups * 8 + column)
    gl.store(out + at, sofar.to(out.dtype.element_ty), mask=real[None, :][:, None, :, None])
    if HALF == 0:  # noqa: SIM102  what no program of this half does must not be compiled
        if group == 0:
            found_lse = gl.where(weight > 0, top + gl.log2(safe) * LN2, -float("inf"))
            gl.store(lse + row, found_lse, mask=real)
