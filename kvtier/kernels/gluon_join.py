"""What several programs found of one sequence, merged by these programs themselves, in the launch
that found it: for kernels in gluon whose programs all run at the same time.

A program that is done with its part says so in a counter of the sequence and waits for the others;
then each merges a share of the sequence's outputs.  Whoever is the last to have seen that all are
done leaves the counter at 0, for the next launch.

A part keeps at most two such results: of a sequence that starts in an earlier part, its first, and
of one that goes on in the next part, its last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["arrive", "join", "slot_of"]

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Renamed by triton 3.9."""
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def slot_of(part, starts):
    """Where a part keeps what it found of a sequence that starts in it, or in an earlier one."""
    return (part * 2 + starts.to(gl.int32)) * gl.num_programs(0) + gl.program_id(0)


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
    out += to * 512
    lse += to
    unit = gl.program_id(1) - one
    if held <= 8:
        while unit * 8 < pairs:
            _few(unit * 8, pairs, one, last, out, lse, parts, part_lse, HALF)
            unit += held
    elif held > 2 * pairs:
        while unit < pairs * 8:
            column = unit % 8 * 32
            _many(unit // 8, column, one, last, out, lse, parts, part_lse, HALF, 128, 32)
            unit += held
    else:
        while unit < pairs:
            _many(unit, 0, one, last, out, lse, parts, part_lse, HALF, 32, 256)
            unit += held


@gluon.jit
def _found(part, one, last, row, column, there, parts, part_lse):
    """Log-sum-exp and output of some pairs in one part; -inf and 0 where there is no such part."""
    there = there & (part <= last)
    slot = slot_of(part, part == one)
    value = gl.load(part_lse + slot * 64 + row, mask=there, other=-float("inf"))
    at = slot.to(gl.int64) * (64 * 512) + (row * 512)[:, None] + column[None, :]
    return value, gl.load(parts + at, mask=there[:, None], other=0.0)


@gluon.jit
def _few(low, pairs, one, last, out, lse, parts, part_lse, HALF: gl.constexpr):
    """Eight pairs from ``low`` on, four parts at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    row = low + gl.arange(0, 8, row_layout)
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
    there = row < pairs
    top = gl.full([8], -float("inf"), gl.float32, row_layout)
    weight = gl.full([8], 0.0, gl.float32, row_layout)
    sofar = gl.full([8, 256], 0.0, gl.float32, layout)
    part = one
    while part <= last:
        l0, v0 = _found(part, one, last, row, column, there, parts, part_lse)
        l1, v1 = _found(part + 1, one, last, row, column, there, parts, part_lse)
        l2, v2 = _found(part + 2, one, last, row, column, there, parts, part_lse)
        l3, v3 = _found(part + 3, one, last, row, column, there, parts, part_lse)
        new_top = gl.maximum(gl.maximum(top, gl.maximum(l0, l1)), gl.maximum(l2, l3))
        # A row that has seen nothing yet subtracts 0, not -inf.
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = gl.exp2((top - base) * LOG2E)
        w0 = gl.exp2((l0 - base) * LOG2E)
        w1 = gl.exp2((l1 - base) * LOG2E)
        w2 = gl.exp2((l2 - base) * LOG2E)
        w3 = gl.exp2((l3 - base) * LOG2E)
        weight = weight * shrink + ((w0 + w1) + (w2 + w3))
        sofar = sofar * shrink[:, None] + v0 * w0[:, None] + v1 * w1[:, None]
        sofar += v2 * w2[:, None] + v3 * w3[:, None]
        top = new_top
        part += 4
    safe = gl.where(weight > 0, weight, 1.0)
    at = (row * 512)[:, None] + column[None, :]
    gl.store(out + at, (sofar / safe[:, None]).to(out.dtype.element_ty), mask=there[:, None])
    if HALF == 0:
        found = gl.where(weight > 0, top + gl.log2(safe) * LN2, -float("inf"))
        gl.store(lse + row, found, mask=there)


@gluon.jit
def _many(
    pair, column, one, last, out, lse, parts, part_lse,
    HALF: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Some columns of one pair, many parts at a time.  Each warp has columns of its own, so that
    sums over parts stay within it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [512 // COLUMNS, COLUMNS // 16], [1, 4], [1, 0])
    columns = HALF * 256 + column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    sofar = gl.full([COLUMNS], 0.0, gl.float32, gl.SliceLayout(0, layout))
    top = -float("inf")
    weight = 0.0
    part = one
    while part <= last:
        which = part + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
        there = which <= last
        slot = slot_of(which, which == one)
        value = gl.load(part_lse + slot * 64 + pair, mask=there, other=-float("inf"))
        at = (slot.to(gl.int64) * (64 * 512) + pair * 512)[:, None] + columns[None, :]
        found = gl.load(parts + at, mask=there[:, None], other=0.0)
        new_top = gl.maximum(top, gl.max(value, 0))
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = gl.exp2((top - base) * LOG2E)
        share = gl.exp2((value - base) * LOG2E)
        weight = weight * shrink + gl.sum(share, 0)
        sofar = sofar * shrink + gl.sum(found * share[:, None], 0)
        top = new_top
        part += BLOCK
    safe = gl.where(weight > 0, weight, 1.0)
    gl.store(out + pair * 512 + columns, (sofar / safe).to(out.dtype.element_ty))
    if (HALF == 0) & (column == 0):
        gl.store(lse + pair, gl.where(weight > 0, top + gl.log2(safe) * LN2, -float("inf")))
