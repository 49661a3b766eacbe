"""A10: the same log of calls leads to the same state, in this process and in any other."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.geometry import Geometry
from kvtier.core.machine import CacheCore
from kvtier.core.ops import OpKind
from kvtier.core.replay import Recorder, replay
from kvtier.errors import OutOfPages
from kvtier.types import Identity, Span, Tier
from tests.property.server import FakeServer, packed, server

ROOT = Path(__file__).parents[2]
GEOMETRY = Geometry(
    page_tokens=2,
    gpu_pages=8,
    cpu_frames=8,
    disk_frames=12,
    max_leases=4,
    has_tails=True,
    checkpoint_frames=1,
    parked_frames=2,
    gpu_states=4,
    gpu_checkpoints=3,
    window=3,
    window_page=2,
    gpu_windows=24,
)
REPLAY = """
import json, sys
import numpy as np
from kvtier.core.geometry import Geometry
from kvtier.core.machine import CacheCore
from kvtier.core.replay import replay
from kvtier.seams import ENTRY
given = json.load(sys.stdin)
core = CacheCore(Geometry(**given["geometry"]), chain=b"c" * 16, entries=np.zeros(0, ENTRY))
replay(given["log"], core)
core.check()
print(core.digest().hex())
"""


def recorded(geometry: Geometry, **options: Any) -> Any:
    return Recorder(CacheCore(geometry, **options))


def busy_day() -> FakeServer:
    """A run with every kind of call in it."""
    made = server(GEOMETRY, make=recorded)
    core = made.core
    tenants = (Identity(), Identity(tenant="t", adapter="a", salt=b"\x00\xff"))
    for i in range(30):
        who = tenants[i % 2]
        image = Span(1, 4, bytes([i % 3])) if i % 4 == 0 else None
        spans = [image] if image else []
        rec = made.serve([i % 3, 1, 2, i % 5, 3, i % 2], who, spans=spans, release=False)
        if rec is None:
            continue
        packs = [o.id for o in made.plane.live.values() if o.kind is OpKind.PACK]
        for op_id in packs:
            if not core.operations.running[op_id].packed:
                made.plane.pack(op_id)
                made.run(core.packed(op_id))
        if i % 3 == 0:
            kid = made.fork(rec)
            if kid is not None:
                made.run(core.release(kid))
        if i % 4 == 1:
            made.pause(rec)
            made.drain()
            made.run(core.resume(rec))
        if i % 5 == 2:
            made.drain()
            made.run(core.truncate(rec, min(3, rec.length))[1])
        made.step([rec], [[1]], fail=i % 2 == 0)
        made.run(core.release(rec))
        if i % 7 == 0:
            made.drain()
            made.run(core.evict(Tier.GPU, 3)[1])
        if i % 11 == 3:
            pre, ops = core.prefetch(packed([i % 3, 1]), who)
            made.run(ops)
            made.run(core.cancel_prefetch(pre))
            made.run(core.unpin(core.pin(packed([i % 3, 1]), who)))
        if i % 13 == 5:
            made.run(core.clear(who, {Tier.CPU, Tier.GPU}))
        made.run(core.expire(float(i)))
    core.disk_ticks()
    made.core.check()
    return made


def test_replay_in_other_processes() -> None:
    made = busy_day()
    log = made.core.log  # type: ignore[attr-defined]
    given = json.dumps({"geometry": asdict(GEOMETRY), "log": log})
    called = {entry[0] for entry in log}
    assert called >= {"open", "reserve", "commit", "abandon", "fork", "pause", "resume", "release"}
    assert called >= {"truncate", "prefetch", "cancel_prefetch", "pin", "unpin", "evict", "clear"}
    assert called >= {"expire", "packed", "finish", "subscribe", "disk_ticks"}
    assert not called & {"match", "explain", "stats", "check", "digest"}
    digests = [
        subprocess.run(
            [sys.executable, "-c", REPLAY],
            cwd=ROOT,
            input=given,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "987")
    ]
    assert digests == [made.core.digest().hex()] * 2


def fresh(**changes: Any) -> CacheCore:
    made = FakeServer()
    made.build(Geometry(**{**asdict(GEOMETRY), **changes}), events=False)
    return made.core


def test_every_call_counts() -> None:
    """Leave one call out of the log, or change an argument, and the digest tells."""
    core = Recorder(fresh())
    rec, _ = core.open(packed([1, 2, 3]), reserve=2)
    core.release(rec)
    rec, ops = core.open(packed([1, 2, 3]))
    for op in ops:
        core.finish(op.id, len(op.parts))
    core.reserve([rec], [3])
    core.commit([rec], [2], packed([1, 2]).data)
    again = fresh()
    replay(core.log, again)
    assert again.digest() == core.digest()
    for cut in range(len(core.log)):
        other = fresh()
        try:
            replay(core.log[:cut] + core.log[cut + 1 :], other)
        except (KeyError, AssertionError):
            continue  # what follows needs the call
        assert other.digest() != core.digest(), core.log[cut]
    log = json.loads(json.dumps(core.log))
    log[-1][1][2][1] = packed([1, 3]).data.hex()
    other = fresh()
    replay(log, other)
    assert other.digest() != core.digest()


def test_errors_are_part_of_the_log() -> None:
    core = Recorder(fresh())
    with pytest.raises(OutOfPages):
        core.open(packed([1]), reserve=99)
    assert core.log == [
        ["open", [["tokens", packed([1]).data.hex()]], {"reserve": 99}, "OutOfPages"]
    ]
    replay(core.log, fresh())
    with pytest.raises(AssertionError, match="call 0, open: None now, OutOfPages then"):
        replay(core.log, fresh(gpu_pages=99))


def test_only_plain_values_are_recorded() -> None:
    core = Recorder(fresh())
    with pytest.raises(TypeError, match="cannot record an argument of type object"):
        core.open(packed([1]), label=object())
    with pytest.raises(ValueError, match="not a recorded value"):
        replay([["expire", [["what", 1]], {}, None]], fresh())
