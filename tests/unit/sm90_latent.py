"""Compiles for an H100 or H200 what attention to latent rows in gluon launches there; needs no GPU.

Prints one JSON object: for each kernel registers, bytes of shared memory, bytes spilled, and what
the assembler warns of.  Run in a process of its own, without ``TRITON_INTERPRET``:
``python -m tests.unit.sm90_latent``.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvtier.kernels import RECORDS, gluon_latent
from tests.unit.sm90 import compiles_only, resources
from tests.unit.sm90_mla import warnings
from tests.unit.v4_cases import batch_of


def pages(record: str) -> torch.Tensor:
    if record == "dense":
        return torch.zeros(64, 576, dtype=torch.bfloat16)
    return torch.zeros(2, RECORDS[record].page_bytes(64), dtype=torch.uint8)


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Steps as they would run on an H200."""
    query = torch.zeros(128, 128, 576, dtype=torch.bfloat16)
    for name in ("mla_fp8", "dense"):
        for label, n, width in (("window", 128, 128), ("parts of chosen", 1, 2048)):
            yield (
                f"{name} {label}",
                lambda name=name, n=n, width=width: gluon_latent.mla_sparse(
                    *(query[:n], pages(name), torch.zeros(n, width, dtype=torch.int32)),
                    latent_dim=512,
                    scale=1.0,
                    record=RECORDS[name],
                ),
            )
    yield (
        "pages",
        lambda: gluon_latent.absorbed(
            *(query[:1], pages("mla_fp8"), batch_of([(1, 70)], page_tokens=64)),
            latent_dim=512,
            scale=1.0,
        ),
    )


def main() -> None:
    compiled = compiles_only()
    gluon_latent._processors = lambda device: 132
    report = {}
    for label, call in calls():
        if len(sys.argv) > 1 and not any(word in label for word in sys.argv[1:]):
            continue
        compiled.clear()
        call()
        for name, kernel in compiled:
            if name in ("attend_lists", "attend_pages"):
                report[label] = {
                    "shared": kernel.metadata.shared,
                    **resources(kernel.asm["cubin"]),
                    "products": kernel.asm["ptx"].count("wgmma.mma_async"),
                    "barriers": kernel.asm["ptx"].count("bar.sync"),
                    "warnings": warnings(kernel.asm["ptx"]),
                }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
