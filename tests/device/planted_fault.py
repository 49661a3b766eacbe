"""A kernel that writes one value past its buffer, for ``scripts/sanitize.sh``: what looks for such
writes has to tell this one."""

import torch
import triton
import triton.language as tl


@triton.jit
def _one_too_many(target, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, at, mask=at <= size)


if __name__ == "__main__":
    target = torch.zeros(1 << 19, dtype=torch.int32, device="cuda")  # an allocation of its own
    _one_too_many[(1,)](target[-100:], 100, BLOCK=128)
    torch.cuda.synchronize()
