"""Between the device and pinned host memory: how near the data plane comes to a bare copy.

Everything runs in one process on one GPU, in turn: bare pinned copies of the same bytes (the
ceiling: one large copy, and one copy a page for comparison), then the real data plane: PACK
(gather, staging, copy to the host frames), RESTORE from the host (copy, scatter into pages), and
both at once, with several operations and at least 256 MB of each in flight.  Then one large restore
of a dense layout: how soon its first layer can be read.  Host frames are in random order, the worst
there is; small pages also in runs of ``RUN``, less than a cache that has run for a while leaves
(replayed traces: 9 to 32).  What was moved is compared with what it should be.

Without a GPU there are no results.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.harness import Param, Result, summarise
from benchmarks.shapes import v3, v4_flash
from kvtier.config import CacheConfig
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.data import DeviceTransfer
from kvtier.layouts import Layout, gqa
from kvtier.sizing import geometry_for
from kvtier.types import Tier

__all__ = ["run"]

IN_FLIGHT = 256 * 10**6
"""Bytes of unfinished operations each way, at least."""
RESTORED = 10**9
"""Bytes of the restore whose first layer is waited for."""
OPS = 4
"""Operations these bytes are cut into: a step of a prefill ends one."""
RUN = 8
"""Neighbours that host frames come in."""
COPIES = 4
"""Bare copies of all that back to back, for one sample."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    layout: Layout
    kind: Kind = Kind.HISTORY
    run: int = 1
    """Host frames of so many records in turn are neighbours."""

    @property
    def params(self) -> dict[str, Param]:
        known: dict[str, Param] = {"layout": self.name, "bytes": _record_bytes(self)}
        return known if self.run == 1 else {**known, "frames": f"runs of {self.run}"}


def run(quick: bool) -> list[Result]:
    """Rates in GB/s of payload, each beside the pinned copy measured in the same run."""
    if not torch.cuda.is_available():
        print("pipeline: needs a CUDA device")
        return []
    v4 = v4_flash()
    assert v4.page_bytes() == 998_208
    small = gqa(layers=4, kv_heads=2, head_dim=64)
    cases = [
        Case("v4-flash", v4),
        Case("v4-flash-tails", v4, Kind.CHECKPOINT),
        Case("v3", v3()),
        Case("small", small),
        Case("small", small, run=RUN),
    ]
    results: list[Result] = []
    for case in cases:
        results += _case(case, ops=100 if quick else 400)
    return results + _first_layer(cases[2], repeats=5 if quick else 20)


def _first_layer(case: Case, *, repeats: int, device: str = "cuda") -> list[Result]:
    """How long a large restore takes until its lease may begin, until the first layer is there,
    and until all of it is."""
    bench = _Bench(case, device=device, in_flight=RESTORED)
    try:
        runs = [bench.restore() for _ in range(repeats + 2)][2:]
        params: dict[str, Param] = {
            "layout": case.name,
            "bytes": bench.records * bench.size,
            "tokens": bench.records * case.layout.page_tokens,
        }
        whole = sum(run[2] for run in runs) / len(runs)
        bench.check(restored=True)
        return [
            summarise(name, [run[i] for run in runs], unit="ms", params=params).against(base)
            for i, (name, base) in enumerate(
                (("restore_ready", None), ("restore_first_layer", whole), ("restore_whole", None))
            )
        ]
    finally:
        bench.close()


def _case(case: Case, *, ops: int) -> list[Result]:
    params = case.params
    bench = _Bench(case)
    try:
        results = []
        ceilings = {}
        bench.plane("both", OPS)  # compiles the kernels
        for way in ("d2h", "h2d", "both"):
            ceiling = summarise(f"pinned_{way}_gbps", bench.bare(way), unit="GB/s", params=params)
            single = summarise(
                f"pinned_{way}_gbps",
                bench.bare(way, whole=False),
                unit="GB/s",
                params={**params, "copies": "one a page"},
            )
            ceilings[way] = max(ceiling.median, single.median)
            results += [ceiling, single.against(ceilings[way])]
        for name, way in (("pack_d2h", "d2h"), ("h2d_unpack", "h2d"), ("both", "both")):
            samples = bench.plane(way, ops)
            result = summarise(f"{name}_gbps", samples, unit="GB/s", params=params)
            results.append(result.against(ceilings[way]))
        bench.check()
        return results
    finally:
        bench.close()


def _record_bytes(case: Case) -> int:
    if case.kind is Kind.HISTORY:
        return case.layout.page_bytes()
    return case.layout.checkpoint_bytes()


class _Bench:
    """A data plane with twice the records of what is in flight, and as many bare pinned bytes."""

    def __init__(self, case: Case, *, device: str = "cuda", in_flight: int = IN_FLIGHT) -> None:
        layout = case.layout
        self.case = case
        self.size = _record_bytes(case)
        self.frames = -(-self.size // layout.frame_bytes())  # of a record, on the host
        self.per_op = -(-in_flight // (OPS * self.size))
        self.records = self.per_op * OPS
        tails = self.records if case.kind is Kind.CHECKPOINT else 0
        pages = 2 if tails else 2 * self.records
        config = CacheConfig(gpu_bytes="8GiB", cpu_bytes="1GiB", on_full="wait", wait_s=60.0)
        self.plane_ = DeviceTransfer(
            layout,
            replace(
                geometry_for(layout, config),
                gpu_pages=pages,
                cpu_frames=2 * self.records * self.frames,
                gpu_states=2 * tails,
                gpu_windows=2 * tails * layout.tail_windows,
            ),
            device=device,
            store=None,
            config=config,
        )
        rng = np.random.default_rng(0)
        count = 2 * self.records * self.frames
        starts = range(0, count, case.run)
        runs = [np.arange(at, min(at + case.run, count)) for at in starts]
        host = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
        host = host.reshape(-1, self.frames)
        order = rng.permutation(2 * self.records)
        # The first half is packed, the second restored.
        self.ends = [
            (self._device_frames(int(p)), tuple(int(f) for f in frames))
            for p, frames in zip(order, host, strict=True)
        ]
        self.parts = {
            way: [self._parts(way, turn) for turn in range(OPS)] for way in ("d2h", "h2d")
        }
        self.ids = iter(range(1 << 30))
        self._fill()

    def _device_frames(self, i: int) -> tuple[int, ...]:
        if self.case.kind is Kind.HISTORY:
            return (i,)
        windows = self.case.layout.tail_windows
        return (i, *range(i * windows, (i + 1) * windows))

    def _fill(self) -> None:
        pool = self.plane_.pool
        generator = torch.Generator(pool.device).manual_seed(0)
        for storage in pool._storage.values():
            storage.random_(0, 256, generator=generator)
        host = self.plane_.host.frames
        noise = torch.empty_like(host[:64], device=pool.device).random_(generator=generator)
        for start in range(0, host.shape[0], 64):
            host[start : start + 64].copy_(noise[: host.shape[0] - start].roll(start + 1, 1))
        if pool.device.type == "cuda":
            torch.cuda.synchronize()

    # The ceiling

    def bare(self, way: str, *, whole: bool = True, repeats: int = 5) -> list[float]:
        """Rates of copies between a plain device buffer and the arena itself."""
        size = self.records * self.frames * self.plane_.host.frame_bytes
        down, up = (
            self.plane_.host.frames[: self.records * self.frames],
            self.plane_.host.frames[self.records * self.frames :],
        )
        buffers = [torch.empty_like(down, device="cuda") for _ in range(2)]
        buffers[0].copy_(down)  # what comes back is what was there
        pairs = {"d2h": [(buffers[0], down)], "h2d": [(up, buffers[1])]}
        pairs["both"] = pairs["d2h"] + pairs["h2d"]
        streams = [torch.cuda.Stream() for _ in pairs[way]]  # type: ignore[no-untyped-call]

        def copy() -> None:
            for stream, (source, target) in zip(streams, pairs[way], strict=True):
                with torch.cuda.stream(stream):
                    if whole:
                        target.copy_(source, non_blocking=True)
                        continue
                    for src, dst in zip(source, target, strict=True):
                        dst.copy_(src, non_blocking=True)

        copy()
        torch.cuda.synchronize()
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(COPIES):
                copy()
            torch.cuda.synchronize()
            taken = time.perf_counter() - start
            samples.append(COPIES * size * len(pairs[way]) / taken / 1e9)
        return samples

    # The data plane

    def plane(self, way: str, ops: int) -> list[float]:
        """Rates over windows of several operations, the queues never empty; ``ops`` each way are
        run after some that are not counted."""
        ways = ("d2h", "h2d") if way == "both" else (way,)
        ends: list[float] = []
        left = dict.fromkeys(ways, ops + 3 * OPS)
        over = threading.Semaphore(0)

        def start(which: str, turn: int) -> None:
            def ended(n: int, error: BaseException | None) -> None:
                assert n == self.per_op, error
                ends.append(time.perf_counter())
                left[which] -= 1
                if left[which] >= OPS:
                    start(which, turn)
                else:
                    over.release()

            self.plane_.start(self._op(which, turn), packed=lambda: None, done=ended)

        for which in ways:
            for turn in range(OPS):
                start(which, turn)
        for _ in range(OPS * len(ways)):
            assert over.acquire(timeout=60)
        return _rates(ends, self.per_op * self.size, skip=OPS * len(ways))

    def restore(self) -> tuple[float, float, float]:
        """Milliseconds until the end of one operation, until its first layer and until all of it
        are there."""
        parts = tuple(part for turn in self.parts["h2d"] for part in turn)
        over = threading.Event()

        def ended(n: int, error: BaseException | None) -> None:
            assert n == len(parts), error
            over.set()

        start = time.perf_counter()
        op = Op(next(self.ids), OpKind.RESTORE, parts)
        self.plane_.start(op, packed=lambda: None, done=ended)
        assert over.wait(60)
        times = [time.perf_counter() - start]
        pages = np.array([part.dst[0] for part in parts], np.int32)
        arriving = self.plane_.pool.arriving(pages)
        for layer in (0, None):
            for arrival in arriving:
                arrival.wait(layer)
            if self.plane_.pool.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - start)
        ready, first, whole = (1e3 * t for t in times)
        return ready, first, whole

    def _op(self, way: str, turn: int) -> Op:
        kind = OpKind.PACK if way == "d2h" else OpKind.RESTORE
        return Op(next(self.ids), kind, self.parts[way][turn])

    def _parts(self, way: str, turn: int) -> tuple[Part, ...]:
        """What one operation moves; made once, as making them takes a third as long as the copy."""
        live, kind = self.case.kind is Kind.CHECKPOINT, self.case.kind
        first = turn * self.per_op + (self.records if way == "h2d" else 0)
        ends = self.ends[first : first + self.per_op]
        if way == "d2h":
            return tuple(
                Part(kind, Tier.GPU, device, Tier.CPU, host, live_src=live) for device, host in ends
            )
        return tuple(
            Part(kind, Tier.CPU, host, Tier.GPU, device, live_dst=live) for device, host in ends
        )

    def check(self, *, restored: bool = False) -> None:
        """Every record (``restored``: of those only) is the same on the device and on the host."""
        for device, frames in self.ends[self.records if restored else 0 :]:
            live = self.case.kind is Kind.CHECKPOINT
            spans = self.plane_.pool.spans(self.case.kind, device, live=live)
            there = torch.cat([span for span in spans if isinstance(span, torch.Tensor)])
            here = torch.cat([*self.plane_.host.spans(frames)])[: self.size]
            assert torch.equal(there.cpu(), here), (device, frames)

    def close(self) -> None:
        self.plane_.close()


def _rates(ends: Sequence[float], size: int, *, skip: int, window: int = 8) -> list[float]:
    """GB/s of every ``window`` operations in turn; the first and the last ``skip`` of all are left
    out, as the queues fill and run dry then."""
    inner = sorted(ends)[skip : len(ends) - skip]
    times = [b - a for a, b in zip(inner[::window], inner[window::window], strict=False)]
    return [window * size / t / 1e9 for t in times]
