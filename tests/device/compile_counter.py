"""Counts what triton would have to compile: in a warm-up, and in the steps after it.

``python -m tests.device.compile_counter KIND [rivals]``, without ``TRITON_INTERPRET``; needs no
GPU.  Kernels are chosen as for one and told what they are called with, but neither compiled nor
run, so tensors hold whatever was there.  Prints ``{"warm": ..., "later": [...], "used": ...}``: how
many variants the warm-up asks for, the kernels that steps ask for others of, and what steps ran, by
operation.  With ``rivals`` the times that kernels are picked by say that another one is faster at
each next doubling of the batch.
"""

import importlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvtier.kernels import Case, Load, measured
from kvtier.kernels.measured import Figures
from kvtier_deepseek import attach
from tests.adapter.models import random_tokens
from tests.device.test_graphs import as_on_a_gpu, model_of, open_cache, type_for

COUNTS = [(1, 0), (15, 1), (16, 17), (230, 3), (1, 1), (300, 16), (0, 1), (33, 0), (0, 300)]
"""Tokens of two leases, step by step."""


def take_turns(patch: pytest.MonkeyPatch) -> None:
    """Of all kernels of triton and gluon, whether they are taken unasked or not."""
    table: Any = importlib.import_module("kvtier.kernels.table")
    kernels = [row for row in table.ROWS if row.backend in ("triton", "gluon")]
    have = {(row.operation, row.record) for row in kernels}
    others = [row for row in table.ROWS if (row.operation, row.record) not in have]
    patch.setattr(table, "ROWS", (*(replace(row, missing=str) for row in kernels), *others))
    rivals: dict[tuple[str, Case], dict[str, None]] = {}
    for row in kernels:
        for dims in row.dims or ():
            case = Case(row.operation, row.record, dims, torch.bfloat16, "cuda")
            rivals.setdefault(("here", case), {})[row.backend] = None
    loads = [Load(1 << n, 4, 64) for n in range(10)]
    figures = {
        key: Figures(
            {
                load: {name: 1.0 + (at + n) % len(names) for n, name in enumerate(names)}
                for at, load in enumerate(loads)
            },
            frozenset(names),
        )
        for key, names in rivals.items()
        if len(names) > 1
    }
    patch.setattr(measured, "_shipped", lambda: figures)
    patch.setattr(measured, "device_name", lambda: "here")
    there = SimpleNamespace(multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: there)


def main(kind: str, rivals: bool = False) -> dict[str, Any]:
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
        if rivals:
            take_turns(patch)
        used: dict[str, set[str]] = {}
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
                    for operation, backend in adapter.report.backends.items():
                        used.setdefault(operation, set()).add(backend)
                    with cache.step([(lease, [5]) for lease, _ in work]) as step:
                        adapter.forward(step, pad_to=4)
    return {
        "warm": len(warm),
        "later": sorted({name for name, _ in set(asked) - warm}),
        "used": {operation: sorted(backends) for operation, backends in used.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(sys.argv[1], "rivals" in sys.argv[2:])) + "\n")
