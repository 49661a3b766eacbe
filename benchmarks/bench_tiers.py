"""The way down and back through the real ``Cache``: step to durable, and disk to device.

``store_to_durable``: pages are fed in steps of 16, as fast as they are taken, until all of them
would survive a power cut; beside it a raw file of as many bytes, direct I/O, flushed once a step.
``disk_to_device``: what was stored is brought back, verified, until ``ready``, the host's copies
having been dropped; beside it the raw file read by as many threads, and the same without
verification.  Contenders take turns on one directory.

Without a GPU the device is plain memory and the prefixes are short: then the rates say little.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bench_ttft import THREADS
from benchmarks.harness import Param, Result, summarise
from benchmarks.prefixes import Prefix, RawFile, directory
from benchmarks.shapes import v3, v4_flash
from kvtier import Tier
from kvtier.layouts import Layout, mla, swa_c4_c128
from kvtier.stores.payload import PayloadReader, Verdict

__all__ = ["run"]

PAGES_A_STEP = 16


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    layout: Layout
    pages: int


def run(quick: bool, where: str | None = None) -> list[Result]:
    """GB/s of payload, each beside the raw file of the same run.  Files go to a directory of
    their own under ``where`` ("build" if None), and are deleted."""
    on_gpu = torch.cuda.is_available()
    results: list[Result] = []
    for case in _cases(on_gpu):
        with (
            directory(where) as root,
            Prefix(
                case.layout,
                case.pages * case.layout.page_tokens,
                device="cuda" if on_gpu else "cpu",
                disk=root / "cache",
                threads=THREADS,
                pages_a_step=PAGES_A_STEP,
            ) as prefix,
        ):
            results += _case(case, prefix, root, repeats=4 if quick else 12)
    return results


def _cases(on_gpu: bool) -> list[Case]:
    if not on_gpu:
        return [
            Case("v4, 3 layers", swa_c4_c128(layer_ratios=(0, 4, 128)), 16),
            Case("v3, 2 layers", mla(layers=2, latent_dim=512, rope_dim=64), 4),
        ]
    return [Case("v4-flash", v4_flash(), 256), Case("v3", v3(), 64)]


def _case(case: Case, prefix: Prefix, root: Path, *, repeats: int) -> list[Result]:
    """One round to warm up, then ``repeats``."""
    taken: dict[str, list[float]] = {}
    with RawFile(root / "raw", prefix.num_bytes, depth=THREADS) as raw:
        for _ in range(repeats + 1):
            seconds = {"raw write": raw.write(prefix.steps), "store": prefix.store()}
            seconds["raw read"] = raw.read()
            prefix.forget(Tier.GPU, Tier.CPU)
            seconds["restore"] = prefix.restore(Tier.DISK).ready
            prefix.forget(Tier.GPU, Tier.CPU)
            with _unverified():
                seconds["unverified"] = prefix.restore(Tier.DISK).ready
            prefix.forget(Tier.GPU, Tier.CPU)
            for what, each in seconds.items():
                taken.setdefault(what, []).append(each)
        direct = raw.direct
    params: dict[str, Param] = {
        "layout": case.name,
        "page": case.layout.page_bytes(),
        "mb": prefix.num_bytes // 10**6,
        "depth": THREADS,
    }

    def rate(name: str, what: str, **more: Param) -> Result:
        rates = [prefix.num_bytes / each / 1e9 for each in taken[what][1:]]
        return summarise(name, rates, unit="GB/s", params={**params, **more})

    write, read = (rate(f"raw_{verb}", f"raw {verb}", direct=direct) for verb in ("write", "read"))
    return [
        write,
        rate("store_to_durable", "store").against(write.median),
        read,
        rate("disk_to_device", "restore").against(read.median),
        rate("disk_to_device", "unverified", verified="no").against(read.median),
    ]


@contextmanager
def _unverified() -> Iterator[None]:
    """Reads that look at nothing but whether the bytes came."""
    verify = PayloadReader._verify
    PayloadReader._verify = lambda *_: Verdict.GOOD  # type: ignore[method-assign]
    try:
        yield
    finally:
        PayloadReader._verify = verify  # type: ignore[method-assign]
