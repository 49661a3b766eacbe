"""A state machine's run depends on its choices alone, however the data plane's threads are timed.

Hypothesis replays what it has drawn and gives up where another state asks for another draw; and a
failure that cannot be seen again helps nobody.  Each machine runs twice with the same choices,
while its threads begin their tasks sooner or later by chance; the states must be the same.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from kvtier.data import jobs
from kvtier.stores.files import BLOCK
from kvtier.stores.slabs import Slabs
from tests.property.test_cache_machine import CacheMachine
from tests.property.test_store_machine import PowerCut, StoreMachine

FEW = settings(
    max_examples=12,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def of_cache(machine: CacheMachine) -> object:
    if not hasattr(machine, "cache"):
        return None
    leases = [(h.lease.label, h.lease.state, h.tokens) for h in machine.held]
    return machine.core.digest(), machine.transfer._open_ops, leases, list(machine.known)


def of_store(machine: StoreMachine) -> object:
    if not hasattr(machine, "store"):
        return None
    return sorted(machine.lives.items()), sorted(machine.quarantined), sorted(machine.keys())


def traced(machine: type[RuleBasedStateMachine], state: Callable[[Any], object]) -> list[object]:
    """The states that a run goes through."""
    trace: list[object] = []

    class Traced(machine):  # type: ignore[misc, valid-type]
        @invariant()
        def trace(self) -> None:
            trace.append(state(self))

    run_state_machine_as_test(Traced, settings=FEW)
    return trace


@pytest.mark.parametrize(
    ("machine", "state"),
    [
        pytest.param(CacheMachine, of_cache, id="cache"),
        pytest.param(StoreMachine, of_store, id="store"),
    ],
)
def test_the_same_choices_lead_to_the_same_states(
    machine: type[RuleBasedStateMachine],
    state: Callable[[Any], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random()  # another one each time, on purpose

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.003)
            return call(*args)

        return wrapped

    monkeypatch.setattr(jobs, "_guarded", late(jobs._guarded))
    monkeypatch.setattr(Slabs, "_write_run", late(Slabs._write_run))
    first = traced(machine, state)
    assert len(set(map(repr, first))) > 100, "it hardly moves"
    again = traced(machine, state)
    for step, (one, other) in enumerate(zip(first, again, strict=False)):
        assert one == other, f"the states differ from step {step} on"
    assert len(first) == len(again)


@pytest.mark.parametrize("order", range(3))
def test_a_power_cut_loses_the_same_in_whatever_order_threads_wrote(
    order: int, tmp_path: Path
) -> None:
    path = tmp_path / "slab"
    path.write_bytes(b"new" * BLOCK * 4)
    written = [(str(path), i * BLOCK, b"%02d" % i * (BLOCK // 2)) for i in range(12)]
    left = []
    for blocks in (written, random.Random(order).sample(written, 12)):
        path.write_bytes(b"new" * BLOCK * 4)
        io = PowerCut()
        io.blocks = list(blocks)
        io.power_off(random.Random(order))
        left.append(path.read_bytes())
    assert left[0] == left[1]
    assert 0 < sum(left[0][at : at + 2] == old[:2] for _, at, old in written) < 12
