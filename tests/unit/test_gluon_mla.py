"""Absorbed attention as H100 and H200 run it, on a CPU: the source's twin, with its groups of warps
and its copies in many orders.  On a GPU the tests of ``triton_mla`` run the kernel itself."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvtier.kernels import gluon_mla, mla_schedule, triton_mla
from tests.unit import gluon_twin
from tests.unit.test_triton_mla import Case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernel itself")

LENGTHS = {
    "one sequence in four parts": [(1, 500)],
    "padding, a single key, whole blocks": [(1, 64), (1, 0), (1, 1), (1, 128)],
    "several tokens of a sequence": [(3, 200), (1, 130)],
    "more sequences than parts": [(1, 70), (1, 3), (1, 129), (1, 0), (1, 64), (1, 65)],
}


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sends calls to the kernel made for Hopper, whose groups take turns by a seed."""
    kernel = gluon_mla._attend
    monkeypatch.setattr(triton_mla, "_for_hopper", lambda *args: True)

    def run(seed: int) -> None:
        monkeypatch.setattr(gluon_mla, "_attend", kernel)
        twin = gluon_twin.Launched(gluon_mla, "_attend", seed, together=True)
        monkeypatch.setattr(gluon_mla, "_attend", twin)

    return run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(
    lengths: list[tuple[int, int]], seed: int, as_on_hopper: Callable[[int], None]
) -> None:
    as_on_hopper(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    case = Case(lengths, heads=3, seed=seed)
    case.check(*case.run())
    torch.set_num_threads(threads)


def test_half_precision_and_rows_that_outgrow_the_reference(
    as_on_hopper: Callable[[int], None],
) -> None:
    as_on_hopper(7)
    for case in (
        Case([(1, 300)], heads=2, dtype=torch.float16),
        Case([(1, 300)], heads=2, growth=9.0),
    ):
        case.check(*case.run())


@pytest.mark.parametrize(
    ("lengths", "heads", "parts"),
    [
        ([(1, 700), (1, 1000), (1, 64)], 4, 11),
        ([(1, 1000)], 20, 2),
        ([(1, 1700)], 4, 27),
        ([(1, 2150)], 17, 34),
        ([(2, 900), (1, 100)], 33, 14),
        ([(1, 500), (2, 301), (1, 0), (4, 64), (8, 77), *[(1, 30)] * 5], 8, 7),
    ],
    ids=[
        "several sequences in one part",
        "two parts",
        "more parts than pairs",
        "many parts",
        "two tiles",
        "ragged",
    ],
)
def test_programs_merge_what_they_found_of_one_sequence(
    lengths: list[tuple[int, int]],
    heads: int,
    parts: int,
    as_on_hopper: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And leave their counters as they were, for the next layer."""
    as_on_hopper(1)
    grid = triton_mla.grid_of
    monkeypatch.setattr(
        triton_mla, "grid_of", lambda *args, **how: replace(grid(*args, **how), parts=parts)
    )
    case = Case(lengths, heads=heads, seed=1)
    for _ in range(2):
        case.check(*case.run())
    tiles = -(-heads * max(q for q, _ in lengths) // 64)
    made = mla_schedule._schedules.find(case.batch, (case.query.shape[0], parts, tiles))
    assert made is not None
    assert not made.counts.any()
