"""Absorbed attention as H100 and H200 run it, on a CPU: the source's twin, with its groups of warps
and its copies in many orders.  On a GPU the tests of ``triton_mla`` run the kernel itself."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from kvtier.kernels import gluon_mla, triton_mla
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
        monkeypatch.setattr(gluon_mla, "_attend", gluon_twin.Launched(gluon_mla, "_attend", seed))

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
