"""Counts what triton would have to compile: in a warm-up, and in the steps after it.

``python -m tests.device.compile_counter KIND``, in a process without ``TRITON_INTERPRET``; needs no
GPU.  Kernels are chosen as for one and told what they are called with, but neither compiled nor
run, so tensors hold whatever was there.  Prints ``{"warm": ..., "later": [...]}``: how many
variants the warm-up asks for, and the kernels that steps ask for others of.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvtier_deepseek import attach
from tests.adapter.models import random_tokens
from tests.device.test_graphs import as_on_a_gpu, model_of, open_cache, type_for

COUNTS = [(1, 0), (15, 1), (16, 17), (230, 3), (1, 1), (300, 16), (0, 1), (33, 0), (0, 300)]
"""Tokens of two leases, step by step."""


def main(kind: str) -> dict[str, Any]:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    asked: dict[tuple[str, str], None] = {}

    def count(*, fn: Any, key: str, **_: Any) -> bool:
        asked[f"{fn.module}.{fn.name}", key] = None
        return True  # it is there already, as far as triton is concerned

    knobs.runtime.jit_cache_hook = count
    model = model_of(kind, type_for(kind, wide=False))
    with pytest.MonkeyPatch.context() as patch, open_cache(kind, model) as cache:
        as_on_a_gpu(patch)
        with attach(model, cache) as adapter:
            adapter.warmup()
            warm = set(asked)
            tokens = random_tokens(900, 1)
            with cache.lease([]) as one, cache.lease([]) as two:
                for counts in COUNTS:
                    work = [
                        (lease, tokens[lease.num_tokens : lease.num_tokens + count])
                        for lease, count in zip((one, two), counts, strict=True)
                        if count
                    ]
                    with cache.step(work) as step:
                        adapter(step)
                    with cache.step([(lease, [5]) for lease, _ in work]) as step:
                        adapter.forward(step, pad_to=4)
    return {"warm": len(warm), "later": sorted({name for name, _ in set(asked) - warm})}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
