"""What several kernels in gluon have in common on the device."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["BRING_LINE", "LN2", "LOG2E", "barriers", "exp2", "extent", "shared_as"]

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
BRING_LINE = gl.constexpr(
    """{
    .reg .pred there;
    setp.ne.b32 there, $2, 0;
    @there prefetch.global.L2 [$1];
    mov.b32 $0, 0;
}"""
)
"""Where a number is not 0, has a line brought to the L2 cache."""
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""By triton 3.9."""


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many in shared memory, each of which waits for so many groups."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def exp2(x):
    """To about 22 bits; what is below the smallest float32 with all its bits becomes 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def shared_as(memory, kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory as values of another type."""
    if RENAMED:
        return memory.reinterpret(kind, shape, layout)
    else:  # said for the compiler, which looks at one branch then
        return memory._reinterpret(kind, shape, layout)


@gluon.jit
def extent(slots, count, there, STEP: gl.constexpr):
    """How much of a list holds all slots that it has, looking at ``STEP`` of it at a time."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    end = 0
    base = 0
    while base < count:
        at = base + gl.arange(0, STEP, layout)
        slot = gl.load(slots + at, mask=at < count, other=-1)
        end = gl.maximum(end, gl.max(gl.where((slot >= 0) & (slot < there), at + 1, 0), 0))
        base += STEP
    return end
