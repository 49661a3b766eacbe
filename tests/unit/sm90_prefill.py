"""Compiles for an H100 or H200 what attends to chunks in gluon there; needs no GPU.

Prints one JSON object: for each shape of it registers, bytes spilled and of shared memory, and what
the assembler warns of.  Run in a process of its own, without ``TRITON_INTERPRET``:
``python -m tests.unit.sm90_prefill``.
"""

import json
import sys

import torch

from kvtier.kernels import HeadDims, Workspace, gluon_prefill
from kvtier.kernels.prefill import Results
from kvtier.kernels.prefill_plan import ENDS, Chunk, PrefillPlan, Span, Tile
from tests.unit.sm90 import compiles_only, resources
from tests.unit.sm90_mla import warnings


def attend(dtype: torch.dtype, heads: int) -> None:
    dims = HeadDims(heads, 512, 64, 128, 128)
    space = Workspace.allocate(128, dims, dtype, "cpu")
    chunk = Chunk((Span(0, 0, 128),), (Tile(0, 128, 0, 0, 128, 0, 0, ENDS),), 0, 0)
    plan = PrefillPlan((chunk,), 128, 128, 0, False)
    query = torch.zeros(128, heads, 192, dtype=dtype)
    lse = torch.zeros(128, heads)
    results = Results(torch.zeros(128, heads, 128, dtype=dtype), lse, lse[:0], lse[:0])
    gluon_prefill._meet(query, plan, chunk, space, dims, 0.1, results)


def main() -> None:
    compiled = compiles_only()
    report = {}
    for dtype, heads in ((torch.bfloat16, 128), (torch.float16, 16)):
        attend(dtype, heads)
        report[f"{dtype} {heads}".removeprefix("torch.")] = {
            **resources(compiled[-1][1].asm["cubin"]),
            "shared": compiled[-1][1].metadata.shared,
            "warnings": warnings(compiled[-1][1].asm["ptx"]),
        }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
