"""Traces of both forms, and replays against a simulation that knows nothing of the core."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.config import Dense, Sparse
from kvtier.errors import ConfigError
from kvtier.trace import V4_FLASH, Request, Sizes, Trace, clairvoyant, load, replay

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "traces"
SMALL = Sizes(page_tokens=4, page_bytes=100, checkpoint_bytes=350)


def written(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def random_trace(seed: int, requests: int = 300, block: int = 4) -> Trace:
    """Conversations that go on, branch and are forgotten."""
    rng = np.random.default_rng(seed)
    known: list[list[int]] = []
    made, fresh = [], 0
    for _ in range(requests):
        blocks: list[int] = []
        if known and rng.random() < 0.6:
            base = known[int(len(known) * rng.beta(4, 1)) % len(known)]
            blocks = base[: int(rng.integers(1, len(base) + 1))] if rng.random() < 0.3 else base
        more = int(rng.integers(1, 12))
        blocks = [*blocks, *range(fresh, fresh + more)]
        fresh += more
        known.append(blocks)
        length = len(blocks) * block - int(rng.integers(0, block))
        made.append(Request(np.array(blocks, np.int32), length))
    return Trace("random", block, made)


# ---------------------------------------------------------------------- files
def test_a_request_a_line(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        {"timestamp": 9000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]},
        "",
        {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]},
    )
    trace = load(path, "mine")
    assert (trace.name, trace.block_tokens, trace.prompt_tokens) == ("mine", 512, 1724)
    early, late = (trace.tokens(r) for r in trace.requests)  # in the order of time
    assert (len(early), len(late)) == (1024, 700)
    assert early[:512] == late[:512] and early[512:700] != late[512:]
    assert len(np.unique(early.array())) == 1024, "no block is like another, nor part of it"


def test_a_conversation_a_line(tmp_path: Path) -> None:
    first = [
        {"t": 5, "in": 8, "out": 1, "keep": 0, "new": [[1, 2]]},
        {"t": 50, "in": 15, "out": 1, "keep": 1, "new": [[2, 1], [9, 1]]},
    ]
    second = [{"t": 20.5, "in": 9, "out": 1, "keep": 0, "new": [[1, 2]]}]
    path = written(
        tmp_path / "t.jsonl",
        {"block_tokens": 4, "requests": first},
        {"block_tokens": 4, "requests": second},
    )
    trace = load(path)
    assert trace.block_tokens == 4 and [r.length for r in trace.requests] == [8, 9, 15]
    one, other, two = (trace.tokens(r).array().tolist() for r in trace.requests)
    assert one == two[:8], "a block that comes back is the same"
    assert not set(one) & set(other), "ids of another conversation are other blocks"
    assert not set(two[12:]) & {*one, *other, *two[:12]}, "what is left is shared with nobody"
    assert trace.pages(4) == [[0, 1], [2, 3], [0, 1, 4]]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{nonsense", "t.jsonl:2"),
        ("[1, 2]", "t.jsonl:2"),
        ('{"input_length": 10}', "hash_ids"),
        ('{"input_length": 600, "hash_ids": [1]}', "1 blocks of 512 for 600 tokens"),
        ('{"input_length": 0, "hash_ids": []}', "for 0 tokens"),
        ('{"block_tokens": 64, "requests": []}', "blocks of 64 tokens after 512"),
        (
            '{"block_tokens": 512, "requests": [{"t": 0, "in": 512, "keep": 3, "new": []}]}',
            "3 blocks kept of 0",
        ),
        (
            '{"block_tokens": 512, "requests": [{"t": 0, "in": 64, "keep": 0, "new": [[1, 3]]}]}',
            "3 blocks of 512 for 64 tokens",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, told: str) -> None:
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(ConfigError, match=r"t\.jsonl:2") as error:
        load(written(tmp_path / "t.jsonl", good, line))
    assert told in str(error.value)


def test_an_empty_file_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty"):
        load(written(tmp_path / "t.jsonl", "", ""))


def test_the_shipped_traces() -> None:
    conversation = load(SHIPPED / "conversation.jsonl")
    agentic = load(SHIPPED / "agentic.jsonl")
    assert (len(conversation.requests), conversation.prompt_tokens) == (12_031, 144_793_823)
    assert (len(agentic.requests), agentic.prompt_tokens) == (581, 130_245_525)
    assert clairvoyant(conversation, 1 << 62, 256) == pytest.approx(37.35, abs=0.01)
    assert clairvoyant(agentic, 1 << 62, 256) == pytest.approx(95.19, abs=0.01)


# ---------------------------------------------------------------------- replays
def lru(trace: Trace, frames: int, page: int) -> int:
    """Tokens found by a plain cache of pages, the deepest of a prompt the oldest of it."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request, path in zip(trace.requests, trace.pages(page), strict=True):
        known = next((i for i, p in enumerate(path) if p not in held), len(path))
        hits += min(known, (request.length - 1) // page) * page
        for p in reversed(path):
            held[p] = None
            held.move_to_end(p)
        while len(held) > frames:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("frames", [40, 90, 300])
def test_history_alone_is_least_recently_used(frames: int) -> None:
    trace = random_trace(1)
    out = replay(trace, host=frames * 100, sizes=SMALL, eviction="lru", tails=False)
    assert out.prompt_tokens == trace.prompt_tokens
    assert out.hit_tokens == lru(trace, frames, 4)
    assert out.hit_rate == pytest.approx(100 * out.hit_tokens / out.prompt_tokens)


def test_nothing_stays_on_the_device() -> None:
    """Two prompts alike, and a host that holds no page: not a hit."""
    trace = random_trace(2, 1)
    again = Trace("twice", 4, [trace.requests[0], trace.requests[0]])
    assert replay(again, host=0, sizes=SMALL, tails=False).hit_tokens == 0
    assert replay(again, host=9_000, sizes=SMALL, tails=False).hit_tokens > 0


def test_room_for_all_is_what_any_cache_could_hit() -> None:
    trace = random_trace(3)
    out = replay(trace, host=1 << 20, sizes=SMALL, tails=False)
    assert clairvoyant(trace, 1 << 40, 4) == pytest.approx(out.hit_rate)
    dense = replay(trace, host=1 << 21, sizes=SMALL, checkpoints=Dense())
    assert dense.hit_tokens == out.hit_tokens, "with a checkpoint at every page none is lost"


def test_who_knows_the_future_is_not_beaten() -> None:
    trace = random_trace(4)
    for frames in (20, 60, 150):
        best = clairvoyant(trace, frames, 4)
        for eviction in ("lru", "s3fifo", "adaptive"):
            out = replay(trace, host=frames * 100, sizes=SMALL, eviction=eviction, tails=False)
            assert out.hit_rate <= best + 1e-9
    assert clairvoyant(trace, 20, 4) < clairvoyant(trace, 150, 4)


def test_bytes_are_counted_by_tier() -> None:
    prompt = Request(np.arange(5, dtype=np.int32), 20)  # five pages; a hit stops before the last
    trace = Trace("two", 4, [prompt, prompt])
    out = replay(trace, host=100_000, disk=100_000, sizes=SMALL, checkpoints=Sparse(every_pages=64))
    # Five pages and checkpoints of four frames at pages 3, 4 and 5.
    assert (out.host_bytes, out.disk_bytes) == (17 * 100, 17 * 100)
    assert out.hit_tokens == 16 and out.disk_hit_tokens == 0
    others = [Request(np.arange(9 * i, 9 * i + 9, dtype=np.int32), 36) for i in (1, 2)]
    trace = Trace("pushed out", 4, [prompt, *others, prompt])
    out = replay(trace, host=1_300, disk=100_000, sizes=SMALL, checkpoints=Sparse(every_pages=64))
    assert out.hit_tokens == 16 and out.disk_hit_tokens == 16


def test_progress_is_told_after_every_request() -> None:
    told: list[int] = []
    replay(random_trace(5, 7), host=5_000, sizes=SMALL, progress=told.append)
    assert told == [1, 2, 3, 4, 5, 6, 7]


# ---------------------------------------------------------------------- how good it is
@pytest.fixture(scope="module")
def conversation() -> Trace:
    return load(SHIPPED / "conversation.jsonl").part(2_000, 2_700)


def rate(trace: Trace, gib: float, **options: Any) -> float:
    return replay(trace, host=int(gib * (1 << 30)), sizes=V4_FLASH, **options).hit_rate


def test_adaptive_placement_comes_near_history_alone(conversation: Trace) -> None:
    """H2, on a part of a trace: near the bound, and not worse than what it adapts between."""
    bound = rate(conversation, 12, tails=False, eviction="lru")
    adaptive = rate(conversation, 12)
    assert adaptive >= 0.88 * bound
    assert adaptive >= rate(conversation, 12, checkpoints=Sparse(), eviction="lru") - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part", "gib", "share"),
    [
        ("conversation", (0, 6_000), 16, 0.85),
        ("conversation", (6_000, None), 64, 0.93),
        ("agentic", (0, None), 1, 0.85),
        ("agentic", (0, None), 4, 0.93),
    ],
)
def test_adaptive_placement_keeps_its_share_of_the_bound(
    name: str, part: tuple[int, int | None], gib: float, share: float
) -> None:
    trace = load(SHIPPED / f"{name}.jsonl").part(*part)
    bound = rate(trace, gib, tails=False, eviction="lru")
    adaptive = rate(trace, gib)
    assert adaptive >= share * bound
    for placement in (Dense(), Sparse()):
        assert adaptive >= rate(trace, gib, checkpoints=placement, eviction="lru") - 0.1


@pytest.mark.parametrize("gib", [1.5, 4.0, 16.0])
def test_default_eviction_is_near_the_best(conversation: Trace, gib: float) -> None:
    """P10, on a part of a trace: within a point of the better of the static ones."""
    best = max(rate(conversation, gib, tails=False, eviction=e) for e in ("lru", "s3fifo"))
    assert rate(conversation, gib, tails=False, eviction="adaptive") >= best - 1.0
