"""Request traces: two forms of file, and their replay through the core.

A trace knows how long prompts are and which blocks of them are equal, not their text; equal
blocks get equal tokens here.  A replay drives the real ``CacheCore`` with operations that end at
once, one request after the other, and counts.  Pure: no clock, no threads, no tensors.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np

from kvtier.config import Adaptive, CheckpointPolicy, Dense, EvictionPolicy, Sparse
from kvtier.core.geometry import Geometry
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Kind, Op, OpKind
from kvtier.errors import ConfigError
from kvtier.tokens import IntArray, TokenBuffer
from kvtier.types import Tier

__all__ = [
    "PLACEMENTS",
    "V4_FLASH",
    "Outcome",
    "Request",
    "Sizes",
    "Trace",
    "clairvoyant",
    "load",
    "replay",
]

REQUEST_BLOCK = 512
"""Tokens of a block in the form with one request a line."""
CHUNK_TOKENS = 4096
"""A prompt is computed in chunks of this many tokens."""
PLACEMENTS: Mapping[str, Callable[[], CheckpointPolicy]] = MappingProxyType(
    {"adaptive": Adaptive, "dense": Dense, "sparse": Sparse, "history_only": Adaptive}
)
"""Where checkpoints are kept in a replay, by name; "history_only" is one without tails."""


# ------------------------------------------------------------------ traces


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt: ``length`` tokens in numbered blocks, enough of them for all."""

    blocks: IntArray
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order in which they came."""

    name: str
    block_tokens: int
    requests: Sequence[Request]

    @property
    def prompt_tokens(self) -> int:
        return sum(r.length for r in self.requests)

    def tokens(self, request: Request) -> TokenBuffer:
        """Token ids in which equal blocks are equal, and nothing else is."""
        block = self.block_tokens
        ids = np.arange(block, dtype="<i4") + request.blocks[:, None] * np.int32(block)
        return TokenBuffer(ids.tobytes()[: request.length * 4])

    def pages(self, page_tokens: int) -> list[list[int]]:
        """Each prompt as numbers of its full pages; equal numbers are equal prefixes."""
        numbers: dict[tuple[int, bytes], int] = {}
        block, out = self.block_tokens, []
        for request in self.requests:
            path, above = [], -1
            for first in range(0, request.length // page_tokens * page_tokens, page_tokens):
                inside = request.blocks[first // block : -(-(first + page_tokens) // block)]
                key = above, inside.tobytes() + first.to_bytes(8, "little")
                above = numbers.setdefault(key, len(numbers))
                path.append(above)
            out.append(path)
        return out

    def part(self, start: int, stop: int | None = None) -> "Trace":
        """Some of its requests."""
        return replace(self, requests=self.requests[start:stop])


def load(path: str | PathLike[str], name: str | None = None) -> Trace:
    """Read a trace of either form; ``benchmarks/traces/README.md`` describes them.

    Raises ConfigError naming the line that cannot be read, OSError for the file.
    """
    label = str(path) if name is None else name
    with open(path, encoding="utf-8", errors="replace") as lines:
        rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: an empty file is no trace")
    numbers = _Numbers()
    timed: list[tuple[float, Request]] = []
    block = 0
    for number, line in rows:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"not an object, {row!r:.40}")
            if "requests" in row:
                size, found = int(row["block_tokens"]), _conversation(row, numbers)
            else:
                size, found = REQUEST_BLOCK, [_request(row, numbers)]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number} is not of a trace: {_why(error)}") from error
        if block not in (0, size):
            raise ConfigError(f"{path}:{number} has blocks of {size} tokens after {block}")
        block = size
        timed += found
    if numbers.count * block > 1 << 31:
        raise ConfigError(f"{path}: more than 2**31 different tokens")
    timed.sort(key=lambda pair: pair[0])  # stable: what came at one time stays in order
    return Trace(label, block, [request for _, request in timed])


def _why(error: KeyError | TypeError | ValueError) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg} at column {error.colno})"
    return str(error)


class _Numbers:
    """Small numbers for block ids of any kind."""

    def __init__(self) -> None:
        self.count = 0
        self._known: dict[object, int] = {}

    def of(self, key: object) -> int:
        number = self._known.setdefault(key, self.count)
        self.count = max(self.count, number + 1)
        return number

    def fresh(self) -> int:
        """The number of a block that no other is equal to."""
        self.count += 1
        return self.count - 1


def _request(row: Mapping[str, Any], numbers: _Numbers) -> tuple[float, Request]:
    length, ids = int(row["input_length"]), row["hash_ids"]
    if length < 1 or len(ids) != -(-length // REQUEST_BLOCK):
        raise ValueError(f"{len(ids)} blocks of {REQUEST_BLOCK} for {length} tokens")
    blocks = np.array([numbers.of(i) for i in ids], dtype=np.int32)
    return float(row.get("timestamp", 0)) / 1e3, Request(blocks, length)


def _conversation(row: Mapping[str, Any], numbers: _Numbers) -> list[tuple[float, Request]]:
    size, blocks, out = int(row["block_tokens"]), np.zeros(0, dtype=np.int32), []
    known: dict[int, int] = {}  # ids of one conversation mean nothing in another
    for request in row["requests"]:
        keep, length = int(request["keep"]), int(request["in"])
        if not 0 <= keep <= len(blocks):
            raise ValueError(f"{keep} blocks kept of {len(blocks)}")
        fresh = []
        for first, count in request["new"]:
            for i in range(first, first + count):
                if i not in known:
                    known[i] = numbers.fresh()
                fresh.append(known[i])
        blocks = np.append(blocks[:keep], np.array(fresh, dtype=np.int32))
        missing = -(-length // size) - len(blocks)
        if length < 1 or not 0 <= missing <= 1:
            raise ValueError(f"{len(blocks)} blocks of {size} for {length} tokens")
        whole = blocks
        if missing:
            whole = np.append(blocks, np.int32(numbers.fresh()))
        out.append((float(request["t"]), Request(whole, length)))
    return out


# ------------------------------------------------------------------ replays


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a page and a checkpoint weigh."""

    page_tokens: int
    page_bytes: int
    checkpoint_bytes: int
    """0: a layout without tails."""

    def frames(self, size: int) -> int:
        """Host or disk frames in ``size`` bytes."""
        return size // self.page_bytes

    def geometry(self, *, host: int, disk: int, pages: int, tails: bool) -> Geometry:
        """Tiers of ``host`` and ``disk`` bytes, and a device that just holds one request."""
        tails = tails and self.checkpoint_bytes > 0
        chunk = CHUNK_TOKENS // self.page_tokens
        return Geometry(
            page_tokens=self.page_tokens,
            page_bytes=self.page_bytes,
            gpu_pages=pages + 1,
            cpu_frames=self.frames(host),
            disk_frames=self.frames(disk),
            max_leases=1,
            has_tails=tails,
            checkpoint_frames=-(-self.checkpoint_bytes // self.page_bytes) if tails else 0,
            gpu_states=2 if tails else 0,
            gpu_checkpoints=2 * chunk if tails else 0,
        )


V4_FLASH = Sizes(page_tokens=256, page_bytes=998_208, checkpoint_bytes=3_649_920)
"""What layout ``swa_c4_c128`` comes to with the layers of DeepSeek-V4-Flash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a replay came to."""

    prompt_tokens: int
    hit_tokens: int
    disk_hit_tokens: int
    """Of ``hit_tokens``: read from disk."""
    host_bytes: int
    """Written to host memory,"""
    disk_bytes: int
    """and to disk."""

    @property
    def hit_rate(self) -> float:
        """Percent of the prompt tokens that need not be computed."""
        return 100 * self.hit_tokens / max(1, self.prompt_tokens)


Progress = Callable[[int], None]


def replay(
    trace: Trace,
    *,
    host: int,
    disk: int = 0,
    sizes: Sizes = V4_FLASH,
    checkpoints: CheckpointPolicy | None = None,
    eviction: str | EvictionPolicy = "adaptive",
    tails: bool = True,
    progress: Progress | None = None,
) -> Outcome:
    """Serve every prompt once, in order, from tiers of ``host`` and ``disk`` bytes.

    Nothing stays on the device between requests, so every hit comes from the tiers asked for.
    ``tails=False`` leaves checkpoints out, as if history were all.  ``progress`` is told how many
    requests are done.
    """
    pages = max(r.length for r in trace.requests) // sizes.page_tokens + 1
    geometry = sizes.geometry(host=host, disk=disk, pages=pages, tails=tails)
    core = CacheCore(
        geometry,
        chain=bytes(16),
        eviction=eviction,
        checkpoints=checkpoints,
        entries=np.zeros(0) if disk else None,
    )
    player = _Player(core)
    for done, request in enumerate(trace.requests, 1):
        player.serve(trace.tokens(request))
        if progress is not None:
            progress(done)
    hits = core.restore.hit_tokens
    return Outcome(
        prompt_tokens=core.restore.lookup_tokens,
        hit_tokens=sum(hits),
        disk_hit_tokens=hits[Tier.DISK],
        host_bytes=player.written[Tier.CPU] * sizes.page_bytes,
        disk_bytes=player.written[Tier.DISK] * sizes.page_bytes,
    )


class _Player:
    """A server without a model: every operation ends the moment it is started."""

    def __init__(self, core: CacheCore) -> None:
        self.core = core
        self.written = {Tier.CPU: 0, Tier.DISK: 0}
        """Frames."""

    def serve(self, tokens: TokenBuffer) -> None:
        core = self.core
        rec, ops = core.open(tokens)
        self._end(ops)
        data = tokens.data
        while rec.length < len(tokens):
            n = min(CHUNK_TOKENS, len(tokens) - rec.length)
            _, ops = core.reserve([rec], [n])
            self._end(ops)
            self._end(core.commit([rec], [n], data[rec.length * 4 : (rec.length + n) * 4]))
        self._end(core.release(rec))
        core.settled.clear()
        _, ops = core.evict(Tier.GPU, core.geometry.gpu_pages)
        self._end(ops)

    def _end(self, ops: Iterable[Op]) -> None:
        todo = list(ops)
        while todo:
            op = todo.pop(0)
            if op.kind is OpKind.PACK:
                todo += self.core.packed(op.id)
            if op.kind in (OpKind.PACK, OpKind.STORE):
                tier = Tier.CPU if op.kind is OpKind.PACK else Tier.DISK
                size = self.core.geometry.checkpoint_frames
                self.written[tier] += sum(
                    size if p.kind is Kind.CHECKPOINT else 1 for p in op.parts
                )
            todo += self.core.finish(op.id, len(op.parts))


def clairvoyant(trace: Trace, pages: int, page_tokens: int) -> float:
    """Percent of prompt tokens that a cache of ``pages`` pages would hit which knows the future.

    History alone, no checkpoints: keeps what is asked for soonest and never what is not asked for
    again.  With room for all it is what any cache could hit at most.
    """
    paths = trace.pages(page_tokens)
    again = _next_uses(paths)
    held: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for i, (request, path) in enumerate(zip(trace.requests, paths, strict=True)):
        known = next((n for n, page in enumerate(path) if page not in held), len(path))
        hits += min(known, (request.length - 1) // page_tokens)
        for depth, page in enumerate(path):
            held.pop(page, None)
            if (use := again[i][depth]) >= 0:
                held[page] = use
                heappush(farthest, (-use, -depth, page))
        while len(held) > pages:
            use, _, page = heappop(farthest)
            if held.get(page) == -use:
                del held[page]
    return 100 * hits * page_tokens / max(1, trace.prompt_tokens)


def _next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """For every page of every prompt the next prompt that has it; -1 for none."""
    later: dict[int, int] = {}
    out = []
    for i in range(len(paths) - 1, -1, -1):
        out.append([later.get(page, -1) for page in paths[i]])
        later.update((page, i) for page in paths[i])
    return out[::-1]
