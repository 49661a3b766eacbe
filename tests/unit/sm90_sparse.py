"""Compiles for an H100 or H200 what sparse attention in gluon launches there; needs no GPU.

Prints one JSON object: for each kernel bytes of shared memory, bytes spilled, and what the
assembler warns of.  Run in a process of its own, without ``TRITON_INTERPRET``:
``python -m tests.unit.sm90_sparse``.
"""

import json
import sys

import torch

from kvtier.kernels import RECORDS, gluon_sparse
from tests.unit.sm90 import compiles_only, resources
from tests.unit.sm90_mla import warnings

QUERIES = {"whole": 128, "parts": 3}


def call(n: int) -> None:
    """One step of ``n`` queries, as it would run on an H200."""
    record = RECORDS["v4_fp8"]
    pools = [torch.zeros(2, record.page_bytes(slots), dtype=torch.uint8) for slots in (128, 64)]
    gluon_sparse.sparse_attend(
        torch.zeros(n, 64, 512, dtype=torch.bfloat16),
        pools[0],
        torch.zeros(n, 128, dtype=torch.int32),
        torch.zeros(64),
        scale=0.04,
        record=record,
        extra=pools[1],
        extra_slots=torch.zeros(n, 512, dtype=torch.int32),
    )


def main() -> None:
    compiled = compiles_only()
    gluon_sparse._processors = lambda device: 132
    report = {}
    for label, n in QUERIES.items():
        compiled.clear()
        call(n)
        for name, kernel in compiled:
            report[f"{name} {label}"] = {
                "shared": kernel.metadata.shared,
                "spilled": resources(kernel.asm["cubin"])["spilled"],
                "products": kernel.asm["ptx"].count("wgmma.mma_async"),
                "warnings": warnings(kernel.asm["ptx"]),
            }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
