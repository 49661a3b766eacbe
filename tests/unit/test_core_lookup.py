"""``absent`` beside ``match``: a short answer that is never wrong."""

import random

import pytest

from kvtier.core import lookup
from kvtier.core.geometry import Geometry
from kvtier.types import Identity
from tests.property.server import packed, server

WHO = (Identity(), Identity(tenant="a"))


@pytest.mark.parametrize("page", [2, 32])
def test_absent_is_what_match_does_not_find(page: int) -> None:
    """Pages of 32 tokens are longer than what is looked up of them: those that begin alike and
    differ later are left to ``match``."""
    made = server(Geometry(page_tokens=page, gpu_pages=6, max_leases=2))
    res = made.core.residency
    rng = random.Random(page)
    outcomes = set()
    for step in range(400):
        tokens = [1] * (page - 1) + [rng.randrange(3)] + [rng.randrange(3)] * page
        if rng.random() < 0.5:
            tokens[0] = rng.randrange(4)
        who = rng.choice(WHO)
        found = made.core.match(packed(tokens), who)
        absent = lookup.absent(res, packed(tokens), who)
        outcomes.add((absent, found.history_tokens > 0))
        assert not lookup.absent(res, packed(tokens), Identity(tenant="asked for the first time"))
        if page == 2:
            assert absent == (found.history_tokens == 0)
        if step % 5 == 0:
            made.serve(tokens, who=who)
        if step % 40 == 39:
            made.run(made.core.clear(who))
            assert made.core.match(packed(tokens), who) == lookup.NOTHING
            assert lookup.absent(res, packed(tokens), who)
    assert (True, True) not in outcomes
    assert {(True, False), (False, True)} <= outcomes
    assert ((False, False) in outcomes) == (page == 32)


def test_with_a_disk_nothing_is_absent_at_a_glance() -> None:
    made = server(Geometry(page_tokens=2, gpu_pages=4, cpu_frames=4, disk_frames=4, max_leases=2))
    assert made.core.match(packed([1, 2, 3]), WHO[0]) == lookup.NOTHING
    assert not lookup.absent(made.core.residency, packed([1, 2, 3]), WHO[0])
