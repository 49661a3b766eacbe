"""What is worth loading, against trying everything; and what the paces of tiers come to."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.load_costs import ALWAYS, MARGIN, SLACK, Boundary, LoadCosts, stages
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.deadlines import Patience
from kvtier.speeds import Pace, Speeds
from kvtier.types import Tier

PAGE = 4
SECONDS = st.floats(0, 2)


@st.composite
def paths(draw: st.DrawFn) -> tuple[list[Boundary], int]:
    """Boundaries of a path whose pages lie on the device, then the host, then the disk; with tails
    only some page ends are boundaries, and each has its checkpoint somewhere."""
    gpu, cpu, disk = (draw(st.integers(0, 6)) for _ in range(3))
    tails = draw(st.booleans())
    out: list[Boundary] = []
    for pages in range(1, gpu + cpu + disk + 1):
        on_host, on_disk = max(0, min(pages - gpu, cpu)), max(0, pages - gpu - cpu)
        at = Boundary(pages, on_host > 0, on_disk > 0, on_host, on_disk)
        if tails:
            where = draw(st.sampled_from(["none", "gpu", "cpu", "disk"]))
            if where == "none":
                continue
            if where == "cpu":
                at = at._replace(host=True, host_frames=on_host + 2)
            if where == "disk":
                at = at._replace(disk=True, disk_frames=on_disk + 2, checkpoint=2)
        out.append(at)
    return out, (gpu + cpu + disk) * PAGE + draw(st.integers(1, 9))


COSTS = st.builds(LoadCosts, st.floats(0.01, 2), SECONDS, SECONDS, SECONDS, SECONDS)


def seconds_to(at: Boundary, costs: LoadCosts, more: int = 0) -> float:
    """Written down once more, from what the fields mean."""
    host = disk = 0.0
    if at.host:
        host = costs.host_wait_s + costs.host_s * at.host_frames
    if at.disk:
        disk = costs.disk_wait_s + costs.disk_s * (at.disk_frames + more)
    return max(host, disk)


def total(pages: int, path: list[Boundary], tokens: int, costs: LoadCosts) -> float:
    load = next((seconds_to(at, costs) for at in path if at.pages == pages), 0.0)
    return load + (tokens - pages * PAGE) * costs.compute_s


@given(paths(), COSTS, st.booleans())
def test_no_other_boundary_is_better(
    drawn: tuple[list[Boundary], int], costs: LoadCosts, even: bool
) -> None:
    path, tokens = drawn
    chosen = stages(path, tokens, PAGE, costs, even=even)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= {at.pages for at in path}
    nothing = tokens * costs.compute_s
    goal = chosen[-1] if chosen else 0
    best = min(total(n, path, tokens, costs) for n in [0, *(at.pages for at in path)])
    assert total(goal, path, tokens, costs) <= nothing + 1e-9
    near = [at.pages for at in path if not at.disk]
    assert (
        total(goal, path, tokens, costs)
        <= min((total(n, path, tokens, costs) for n in near), default=inf) + 1e-9
    ), "what needs no disk is never given up for something worse"
    at_once = MARGIN * SLACK * nothing
    if all(seconds_to(at, costs) <= at_once for at in path if at.disk):  # nothing is at stake
        assert total(goal, path, tokens, costs) == pytest.approx(best)


@given(paths(), COSTS, st.booleans())
def test_every_stage_can_fail(
    drawn: tuple[list[Boundary], int], costs: LoadCosts, even: bool
) -> None:
    """Settling, when a stage that should be there is not, for the one before loses no more than
    the slack: what has been waited plus what is left to compute."""
    path, tokens = drawn
    by_pages = {at.pages: at for at in path}
    chosen = [by_pages[n] for n in stages(path, tokens, PAGE, costs, even=even)]
    stands, more = 0, 0
    for at in chosen:
        if at.disk:
            wait = seconds_to(at, costs, more)
            left = (tokens - stands * PAGE) * costs.compute_s
            assert MARGIN * left + wait <= MARGIN * (1 + SLACK) * tokens * costs.compute_s + 1e-9
            more += at.checkpoint
        stands = at.pages


@given(paths(), st.booleans())
def test_without_a_rate_all_is_loaded_and_best_effort_takes_what_is_near(
    drawn: tuple[list[Boundary], int], even: bool
) -> None:
    path, tokens = drawn
    all_of_it = LoadCosts(ALWAYS, 1.0, 1.0, 1.0, 1.0)
    assert stages(path, tokens, PAGE, all_of_it, even=even)[-1:] == [p.pages for p in path[-1:]]
    near = [at.pages for at in path if not at.disk]
    assert stages(path, tokens, PAGE, all_of_it.without_disk(), even=even) == near[-1:]


def test_a_disk_as_fast_as_computing_is_not_worth_it() -> None:
    path = [Boundary(n, disk=True, disk_frames=n) for n in range(1, 101)]
    for times, expected in ((0.5, 0), (1.0, 0), (2.0, 100), (50.0, 100)):
        costs = LoadCosts(1.0, disk_s=PAGE / times)
        assert (stages(path, 401, PAGE, costs, even=True) or [0])[-1] == expected


def test_stages_of_checkpoints_grow() -> None:
    """A first one that may be lost, then ever larger ones: each costs a checkpoint."""
    path = [Boundary(n, disk=True, disk_frames=n + 4, checkpoint=4) for n in range(1, 501)]
    chosen = stages(path, 500 * PAGE + 1, PAGE, LoadCosts(1.0, disk_s=PAGE / 10), even=False)
    assert chosen[-1] == 500
    assert len(chosen) == 2
    assert 100 < chosen[0] < 200  # 3.2 % of the time to compute all


# --------------------------------------------------------------------------- speeds


def run(pace: Pace, *ops: tuple[int, float], start: float = 0.0) -> float:
    """One after the other: frames and seconds of each."""
    for i, (frames, took) in enumerate(ops):
        pace.started(i, frames, start)
        start += took
        pace.ended(i, frames, start)
    return start


def test_pace_of_operations_that_queue() -> None:
    """Started together, served one after the other: each has its own time, not the queue's."""
    pace = Pace(1.0)
    for i in range(4):
        pace.started(i, 10, 0.0)
    for i in range(4):
        assert pace.ahead(2.0 * i)[0] == pytest.approx((4 - i) * (2.0 if i else 10.0))
        pace.ended(i, 10, 2.0 * (i + 1))
    assert pace.estimate() == (0.0, pytest.approx(0.2))
    assert pace.ahead(8.0) == (0.0, pytest.approx(0.2))


def test_pace_tells_latency_from_speed() -> None:
    pace = Pace(1.0)
    run(pace, *((n, 0.5 + 0.01 * n) for n in (1, 100, 3, 50)))
    latency, frame_s = pace.estimate()
    assert latency == pytest.approx(0.5)
    assert frame_s == pytest.approx(0.01)


def test_pace_forgets_and_overlooks_a_hiccup() -> None:
    pace = Pace(1.0)
    end = run(pace, *[(10, 0.1)] * 6, (10, 50.0))
    assert pace.estimate()[1] == pytest.approx(0.01)
    end = run(pace, *[(10, 10.0)] * 2, start=end)
    assert pace.estimate()[1] > 0.2
    run(pace, *[(1, 0.01)] * 8, start=end)
    assert pace.estimate()[1] == pytest.approx(0.01)


def test_what_hangs_is_slow() -> None:
    """The longer it hangs the slower; and no try is made while too many do."""
    pace = Pace(1.0)
    end = run(pace, *[(10, 0.1)] * 4)
    pace.started(9, 10, end)
    assert pace.ahead(end + 0.05) == (pytest.approx(0.05), pytest.approx(0.01))
    wait, frame_s = pace.ahead(end + 100)
    assert wait > 100
    assert frame_s == pytest.approx(10.0)
    assert not pace.unproven(end + 0.5)
    assert pace.unproven(end + 1.5)
    pace.started(10, 1, end + 1.5)
    pace.started(11, 1, end + 1.5)
    assert not pace.unproven(end + 100)


def test_rest_is_what_is_queued_up_to_the_last() -> None:
    pace = Pace(1.0)
    end = run(pace, (10, 1.0))
    for i in range(3):
        pace.started(10 + i, 10, end)
    assert pace.rest_s([10]) == pytest.approx(1.0)
    assert pace.rest_s({10, 11}) == pytest.approx(2.0)
    assert pace.rest_s([99]) == 0.0


def test_speeds_tell_tiers_apart() -> None:
    def op(op_id: int, *sources: tuple[Tier, Kind]) -> Op:
        parts = tuple(Part(kind, tier, (0,), Tier.GPU, (0,)) for tier, kind in sources)
        return Op(op_id, OpKind.RESTORE, parts)

    speeds = Speeds(10**9, 3)
    page, tail = Kind.HISTORY, Kind.CHECKPOINT
    assert speeds.costs(2.0, 0.0) == LoadCosts(2.0, 0.1, 1.0, 0.0, 0.0)
    host, disk = op(1, (Tier.CPU, page)), op(2, (Tier.CPU, page), (Tier.DISK, tail))
    device = op(3, (Tier.GPU, tail))
    for each in (host, disk, device):
        speeds.started(each, 0.0)
    for each, at in ((host, 0.5), (disk, 6.0), (device, 9.0)):
        speeds.ended(each, at, len(each.parts))
    assert speeds.costs(2.0, 10.0) == LoadCosts(2.0, 0.5, 2.0, 0.0, 0.0)


def test_what_was_left_out_counts_for_no_speed() -> None:
    part = Part(Kind.HISTORY, Tier.DISK, (0,), Tier.GPU, (0,))
    speeds = Speeds(10**9, 3)
    for number, tried in ((1, 2), (2, 0)):
        op = Op(number, OpKind.RESTORE, (part,) * 8)
        speeds.started(op, 10.0 * number)
        speeds.ended(op, 10.0 * number + 4, tried)
    assert speeds.costs(2.0, 30.0).disk_s == 2.0


# --------------------------------------------------------------------------- deadlines


class Record:
    prompt = range(1000)


def test_patience() -> None:
    patience = Patience(Record(), opened=10.0, compute_s=0.1, timeout_s=None)  # type: ignore[arg-type]
    assert patience.ends(0, 900, 1.0) == pytest.approx(10 + 4)  # 4 % of 100 s
    assert patience.ends(500, 900, 1.0) == pytest.approx(10 + 1 + 40)  # late by what it saves
    patience.progress = 50.0
    assert patience.ends(500, 900, 1.0) == pytest.approx(10 + 4 + 50)
    patience.limit = 12.0
    assert patience.ends(500, 900, 1.0) == 12.0
