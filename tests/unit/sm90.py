"""Compiles for an H100 or H200 every variant of the kernels that the table lists; needs no GPU.

Prints one JSON object: for each variant registers a thread, bytes spilled, bytes of shared memory.
Run in a process of its own, without ``TRITON_INTERPRET``: ``python -m tests.unit.sm90``.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvtier.kernels import (
    RECORDS,
    HeadDims,
    Workspace,
    triton_compress,
    triton_index,
    triton_mla_sparse,
    triton_prefill,
    triton_query,
    triton_sparse,
    triton_values,
    triton_write,
)
from kvtier.kernels.fused import LatentRope
from tests.unit.v4_cases import batch_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def pages(record: str, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if record == "dense":
        return torch.zeros(64, dim, dtype=dtype)
    return torch.zeros(2, RECORDS[record].page_bytes(64), dtype=torch.uint8)


def writers() -> Iterator[tuple[str, Callable[[], Any]]]:
    slots = torch.zeros(3, dtype=torch.int64)
    turns = torch.zeros(3, 32)
    for dtype in FLOATS:
        for name, record in RECORDS.items():
            for dim in (record.dim,) if record.dim else (128, 512, 576):
                values = torch.zeros(3, dim, dtype=dtype)
                storage = pages(name, dim, dtype)
                label = f"{name} {dim} {dtype}".replace("torch.", "")
                yield (
                    f"write_record {label}",
                    lambda s=storage, v=values, r=record: triton_write.write_records(
                        s, slots, v, r
                    ),
                )
                if dim != 576:
                    yield (
                        f"write_normed {label}",
                        lambda s=storage, v=values, r=record: triton_write.write_normed(
                            s, slots, v, v[0], turns, turns, r, eps=1e-6
                        ),
                    )


def latent_writers() -> Iterator[tuple[str, Callable[[], Any]]]:
    slots = torch.zeros(3, dtype=torch.int64)
    for dtype in FLOATS:
        values, turns = torch.zeros(3, 576, dtype=dtype), torch.zeros(3, 32, dtype=dtype)
        for name in ("dense", "mla_fp8"):
            for rotation in get_args(LatentRope) if dtype == torch.bfloat16 else ("half",):
                for weight in (values[0, :512], None):
                    label = f"{name} {rotation} {dtype}".replace("torch.", "")
                    yield (
                        f"write_latent {label} {'normed here' if weight is not None else ''}",
                        lambda n=name, v=values, t=turns, w=weight, r=rotation: (
                            triton_write.write_latent(
                                *(pages(n, 576, v.dtype), slots, v, w, t, t, RECORDS[n]),
                                eps=1e-6,
                                rotation=r,
                            )
                        ),
                    )


def compressors() -> Iterator[tuple[str, Callable[[], Any]]]:
    batch, slots = batch_of([(3, 300)]), torch.zeros(3, dtype=torch.int64)
    captures, turns = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 32)
    streams = [(4, 2, 512, n) for n in ("v4_fp8", "dense")]
    streams += [(128, 1, 512, n) for n in ("v4_fp8", "dense")]
    streams += [(4, 2, 128, n) for n in ("index_fp8", "index_mxfp4", "dense")]
    for ratio, parts, dim, name in streams:
        kv, ring = torch.zeros(3, parts * dim), parts * ratio
        states = [torch.zeros(2 * ring, 2 * dim) for _ in range(parts)]
        frames = [torch.zeros(2, 4, 2 * dim), None][:parts]

        def run(
            kv: torch.Tensor = kv,
            states: list[torch.Tensor] = states,
            name: str = name,
            dim: int = dim,
            options: dict[str, Any] = {"ratio": ratio, "ring": ring, "frames": frames},  # noqa: B006
        ) -> None:
            triton_compress.compress_write(
                *(kv, kv, states, batch, slots[:1], pages(name, dim), slots, torch.zeros(dim)),
                *(turns, turns, RECORDS[name]),
                eps=1e-6,
                captures=captures,
                **options,
            )

        yield f"compress_write {name} {dim} of {ratio}", run


def queries() -> Iterator[tuple[str, Callable[[], Any]]]:
    turns = torch.zeros(3, 32)
    for dtype in FLOATS:
        short = str(dtype).removeprefix("torch.")
        query = torch.zeros(3, 64, 512, dtype=dtype)
        for to in {None, dtype if dtype != torch.float32 else None}:
            label = f"512 {short} to {'float32' if to is None else short}"
            yield (
                f"head_norm_rope {label}",
                lambda q=query, to=to: triton_query.head_norm_rope(
                    q, turns, turns, eps=1e-6, dtype=to
                ),
            )
            yield (
                f"inverse_rope {label}",
                lambda q=query, to=to: triton_query.inverse_rope(q, turns, turns, dtype=to),
            )
        index = torch.zeros(3, 64, 128, dtype=dtype)
        yield (
            f"index_query 128 {short}",
            lambda q=index: triton_query.index_query(
                q, torch.zeros(3, 64), turns, turns, RECORDS["index_fp8"]
            ),
        )
        yield (
            f"index_query 128 {short} that comes rotated",
            lambda q=index: triton_query.index_query(
                q, torch.zeros(3, 64), turns[:, :0], turns[:, :0], RECORDS["index_fp8"]
            ),
        )


def indexes() -> Iterator[tuple[str, Callable[[], Any]]]:
    batch = batch_of([(3, 9000)])
    for dtype in (*FLOATS, torch.uint8):
        query = torch.zeros(3, 64, 128, dtype=dtype)
        for name in ("index_fp8", "index_mxfp4", "dense")[: 2 if dtype is torch.uint8 else 3]:
            for topk in (512, 4096):
                yield (
                    f"index_topk {name} {str(dtype).removeprefix('torch.')} of {topk}",
                    lambda q=query, name=name, dtype=dtype, topk=topk: triton_index.index_topk(
                        *(q, torch.zeros(3, 64), pages(name, 128, dtype), batch),
                        ratio=4,
                        topk=topk,
                        record=RECORDS[name],
                    ),
                )


def attentions() -> Iterator[tuple[str, Callable[[], Any]]]:
    slots = torch.zeros(3, 128, dtype=torch.int32)
    for dtype in FLOATS:
        query = torch.zeros(3, 64, 512, dtype=dtype)
        for name in ("v4_fp8", "dense"):
            for storage in {torch.float32, dtype} if name == "dense" else {torch.uint8}:
                label = f"{name} {storage} {dtype}".replace("torch.", "")
                yield (
                    f"sparse_attend {label}",
                    lambda q=query, name=name, storage=storage: triton_sparse.sparse_attend(
                        *(q, pages(name, 512, storage), slots, torch.zeros(64)),
                        scale=1.0,
                        record=RECORDS[name],
                    ),
                )


def latents() -> Iterator[tuple[str, Callable[[], Any]]]:
    slots = torch.zeros(3, 128, dtype=torch.int32)
    for name, dtype in (
        ("dense", torch.bfloat16),
        ("dense", torch.float16),
        ("mla_fp8", torch.bfloat16),
    ):
        for heads in (16, 32, 64):
            query = torch.zeros(3, heads, 576, dtype=dtype)
            yield (
                f"mla_sparse {name} {heads} {dtype}".replace("torch.", ""),
                lambda q=query, name=name: triton_mla_sparse.mla_sparse(
                    *(q, pages(name, 576, q.dtype), slots),
                    latent_dim=512,
                    scale=1.0,
                    record=RECORDS[name],
                ),
            )


def prefills() -> Iterator[tuple[str, Callable[[], Any]]]:
    dims = HeadDims(heads=128, latent=512, rope=64, nope=128, value=128)
    for name, dtype in (
        ("dense", torch.bfloat16),
        ("dense", torch.float16),
        ("mla_fp8", torch.bfloat16),
    ):
        workspace = Workspace.allocate(64, dims, dtype, "cpu")
        for queries in (1, 17, 65):
            query = torch.zeros(queries, 128, 192, dtype=dtype)
            yield (
                f"mla_materialised {name} {queries} {dtype}".replace("torch.", ""),
                lambda q=query, name=name, space=workspace: triton_prefill.materialised(
                    *(q, pages(name, 576, q.dtype), batch_of([(q.shape[0], 70)], page_tokens=64)),
                    lambda *_: None,
                    dims=dims,
                    scale=1.0,
                    workspace=space,
                    record=RECORDS[name],
                ),
            )


def resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(found["REG"]), "spilled": int(found["STACK"]) + int(found["LOCAL"])}


def compiles_only() -> list[tuple[str, Any]]:
    """From here on launches only compile, for an H100 or H200: kernels, by name, as they come."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if "ON_GPU" in kwargs:  # where the interpreter would go another way
            kwargs["ON_GPU"] = True
        compiled.append((self.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))
        return compiled[-1][1]

    JITFunction.run = compile_only
    return compiled


def main() -> None:
    # The interpreter has other products than a GPU.
    chosen = triton_values.precision
    for module in (triton_index, triton_sparse):
        module.precision = lambda *args, on_gpu: chosen(*args, on_gpu=True)
    compiled = compiles_only()
    report: dict[str, Any] = {}
    for cases in (
        writers,
        latent_writers,
        compressors,
        queries,
        indexes,
        attentions,
        latents,
        prefills,
    ):
        for label, call in cases():
            if len(sys.argv) > 1 and not any(word in label for word in sys.argv[1:]):
                continue
            compiled.clear()
            call()
            for name, kernel in compiled:
                report[f"{label}: {name}"] = {
                    **resources(kernel.asm["cubin"]),
                    "shared": kernel.metadata.shared,
                }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
