"""Time to first token: a cached prefix restored from host memory or disk, or computed again.

Prefixes are shaped like DeepSeek-V4-Flash's, 43 layers, with the checkpoint at their end, and go
through the real ``Cache``: from the call of ``lease`` until ``ready`` has resolved, when a kernel
may read every page, and on to the end of a first step of one token.  The device's copies are
dropped before each restore, and the host's as well where it is to come from disk; slab files are
read with direct I/O, so the page cache has no part in it.  What came back is compared with what
was stored.

Beside each restore, in the same run and in turn with it: one bare pinned copy of as many bytes,
or a raw file of as many bytes read with direct I/O by as many threads.  ``recompute_ms`` is what
the attention layers' matrix products would take in its place, see ``_recompute``.

Without a GPU everything is tiny, there to show that it runs; nothing is computed again then.
"""

import time
from pathlib import Path

import torch

from benchmarks.bench_step import HIDDEN, Attention
from benchmarks.harness import Param, Result, summarise
from benchmarks.prefixes import Prefix, RawFile, Restore, directory
from benchmarks.shapes import V4_FLASH_RATIOS, v4_flash
from kvtier import Tier
from kvtier.layouts import swa_c4_c128

__all__ = ["run"]

LENGTHS = (8 << 10, 32 << 10, 128 << 10)
THREADS = 4
"""Reads at once, of the cache (its default) and of the raw file."""
CHUNK, WINDOW, TOP_K = 8192, 128, 512
INDEX_WIDTH = 64 * 128
"""Heads and values of the query that scores compressed keys."""


def run(quick: bool, where: str | None = None) -> list[Result]:
    """Milliseconds; the baseline is what the bytes alone take.  Files go to a directory of their
    own under ``where`` ("build" if None), and are deleted."""
    on_gpu = torch.cuda.is_available()
    lengths = LENGTHS if on_gpu else (512, 1024)
    repeats = 5 if quick else 13
    layout = v4_flash() if on_gpu else swa_c4_c128(layer_ratios=(0, 4, 128))
    results: list[Result] = []
    for tokens in lengths:
        with (
            directory(where) as root,
            Prefix(
                layout,
                tokens,
                device="cuda" if on_gpu else "cpu",
                disk=root / "cache",
                threads=THREADS,
            ) as prefix,
        ):
            params: dict[str, Param] = {"tokens": tokens, "mb": prefix.num_bytes // 10**6}
            results += _from_host(prefix, params, repeats)
            results += _from_disk(prefix, root, params, repeats)
    if on_gpu:
        results += _recompute(lengths, repeats)
    return results


def _from_host(prefix: Prefix, params: dict[str, Param], repeats: int) -> list[Result]:
    seen, bare = [], []
    prefix.forget(Tier.GPU)
    prefix.restore(Tier.CPU)  # compiles, warms
    for _ in range(repeats):
        bare.append(_bare_copy(prefix))
        prefix.forget(Tier.GPU)
        seen.append(prefix.restore(Tier.CPU))
    return _told("host", seen, "pinned copy", bare, params)


def _from_disk(prefix: Prefix, root: Path, params: dict[str, Param], repeats: int) -> list[Result]:
    seen, bare = [], []
    with RawFile(root / "raw", prefix.num_bytes, depth=THREADS) as raw:
        raw.write()
        for turn in range(repeats + 1):
            taken = raw.read()
            prefix.forget(Tier.GPU, Tier.CPU)
            restored = prefix.restore(Tier.DISK)
            if turn:
                bare.append(taken)
                seen.append(restored)
        direct = "direct I/O" if raw.direct else "through the page cache"
    return _told("disk", seen, f"raw file, {direct}", bare, params)


def _told(
    source: str, seen: list[Restore], what: str, bare: list[float], params: dict[str, Param]
) -> list[Result]:
    params = {**params, "from": source}

    def ms(name: str, seconds: list[float], **more: Param) -> Result:
        return summarise(name, [1e3 * s for s in seconds], unit="ms", params={**params, **more})

    floor = ms("bytes_ms", bare, by=what)
    ready = ms("restore_ms", [each.ready for each in seen]).against(floor.median)
    stages = [each.parts() for each in seen]
    return [
        floor,
        ready,
        ms("first_token_ms", [each.stepped for each in seen]).against(floor.median),
        *(ms("stage_ms", [each[stage] for each in stages], stage=stage) for stage in stages[0]),
    ]


def _bare_copy(prefix: Prefix) -> float:
    """Seconds of one copy of as many bytes from the host frames themselves."""
    host = prefix.plane.host.frames.view(-1)[: prefix.num_bytes]
    target = torch.empty_like(host, device=prefix.plane.pool.device)
    if target.device.type == "cpu":
        begin = time.perf_counter()
        target.copy_(host)
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    target.copy_(host, non_blocking=True)
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


def _recompute(lengths: tuple[int, ...], repeats: int) -> list[Result]:
    """Milliseconds of the attention layers' matrix products over whole prefixes, in bf16.

    One layer of each kind is measured over a chunk of 8,192 tokens at several context lengths:
    its projections, and attention to the window and to 512 chosen (C4) or all (C128) compressed
    keys before the middle of the chunk; for C4 also a product as large as scoring all its
    compressed keys.  In between times are interpolated; a prefix is the sum over its chunks and
    43 layers.  Experts, norms, top-k and sampling are left out, so a model takes longer.
    """
    attention = Attention()
    longest = max(lengths)
    at = sorted(
        {min(c, longest - CHUNK) + CHUNK // 2 for c in (0, longest // 4, longest // 2, longest)}
    )
    kinds = {ratio: V4_FLASH_RATIOS.count(ratio) for ratio in sorted(set(V4_FLASH_RATIOS))}
    samples: dict[int, list[float]] = {tokens: [] for tokens in lengths}
    for turn in range(repeats + 1):
        known = {ratio: [_layer_ms(attention, ratio, context) for context in at] for ratio in kinds}
        for tokens in lengths if turn else ():
            middles = range(CHUNK // 2, tokens, CHUNK)
            samples[tokens].append(
                sum(
                    count * _between(middle, at, known[ratio])
                    for ratio, count in kinds.items()
                    for middle in middles
                )
            )
    return [
        summarise("recompute_ms", ms, unit="ms", params={"tokens": tokens})
        for tokens, ms in samples.items()
    ]


def _layer_ms(attention: Attention, ratio: int, context: int) -> float:
    keys = WINDOW
    if ratio == 4:
        keys += min(TOP_K, context // ratio)
    elif ratio:
        keys += context // ratio
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    scored = context // ratio if ratio == 4 else 0
    if scored:
        query = torch.empty(CHUNK, INDEX_WIDTH, dtype=torch.bfloat16, device="cuda").normal_()
        index = torch.empty(INDEX_WIDTH, scored, dtype=torch.bfloat16, device="cuda").normal_()
    hidden = torch.zeros(CHUNK, HIDDEN, dtype=torch.bfloat16, device="cuda")
    begin.record()
    if scored:
        query @ index
    attention.layer(hidden, keys)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _between(x: float, at: list[int], known: list[float]) -> float:
    """``known`` at ``x``, on the straight line between its neighbours."""
    for left, right, low, high in zip(at, at[1:], known, known[1:], strict=False):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return known[-1]
