"""Compiles for an H100 or H200 what absorbed attention launches there; needs no GPU.

Prints one JSON object: for each kernel bytes of shared memory, and what the assembler warns of.
Run in a process of its own, without ``TRITON_INTERPRET``: ``python -m tests.unit.sm90_mla``.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton

from kvtier.kernels import PagedBatch, triton_mla
from tests.unit.sm90 import compiles_only

HEADS = (16, 128)


def call(heads: int) -> None:
    """One step of three sequences, as it would run on a GPU."""
    batch = PagedBatch(
        query_lens=(1, 1, 1),
        kv_lens=(512, 70, 0),
        block_table=torch.zeros(3, 8, dtype=torch.int32),
        cu_seqlens_q=torch.arange(4, dtype=torch.int32),
        kv_lens_device=torch.tensor([512, 70, 0], dtype=torch.int32),
        page_tokens=64,
    )
    query = torch.zeros(3, heads, 576, dtype=torch.bfloat16)
    rows = torch.zeros(640, 576, dtype=torch.bfloat16)
    triton_mla.absorbed(query, rows, batch, latent_dim=512, scale=0.1)


def warnings(ptx: str) -> list[str]:
    """Numbers of the assembler's performance warnings: C7510 and the like."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", "--gpu-name", "sm_90a", "-o", str(source.with_suffix(".cubin"))]
        told = subprocess.run(
            [str(tool), *options, str(source)], capture_output=True, text=True, check=True
        ).stderr
    return sorted(set(re.findall(r"\((C75\d\d)\)", told)))


def main() -> None:
    compiled = compiles_only()
    triton_mla._for_hopper = lambda *args: True
    report = {}
    for heads in HEADS:
        compiled.clear()
        call(heads)
        for name, kernel in compiled:
            report[f"{name} {heads}"] = {
                "shared": kernel.metadata.shared,
                "products": kernel.asm["ptx"].count("wgmma.mma_async"),
                "warnings": warnings(kernel.asm["ptx"]),
            }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
