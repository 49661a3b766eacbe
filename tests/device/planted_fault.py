"""A kernel that writes past its buffer, for ``scripts/sanitize.sh``: what looks for such writes has
to tell this one.  The argument is how many values past."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _write_past(target, past, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + past + at, at)


if __name__ == "__main__":
    target = torch.zeros(3_000_001, dtype=torch.int32, device="cuda")
    _write_past[(1,)](target[-32:], int(sys.argv[1]), BLOCK=32)
    torch.cuda.synchronize()
