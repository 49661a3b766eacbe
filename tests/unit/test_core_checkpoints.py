"""What checkpoints are worth on the host, and what that makes leave first."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.config import (
    Adaptive,
    CacheConfig,
    CheckpointFacts,
    CheckpointPolicy,
    Dense,
    EvictionPolicy,
    Sparse,
)
from kvtier.core.checkpoints import HOPELESS, LEVEL, Mark, Scale, passed_by
from kvtier.core.copies import CHECKPOINT, CPU, GPU, Copy
from kvtier.core.geometry import Geometry
from kvtier.core.ghosts import Ghosts
from kvtier.core.tree import Node
from kvtier.errors import ConfigError
from kvtier.types import Tier
from tests.property.server import FakeServer, packed, server

FACTS = CheckpointFacts(
    gap=8, frames=4, deepest=False, passed=True, uses=0, prompt_end=False, branch=False
)


def tails(cpu: int, *, frames: int = 1, **options: Any) -> FakeServer:
    geometry = Geometry(
        page_tokens=1, gpu_pages=64, cpu_frames=cpu, max_leases=4, has_tails=True,
        checkpoint_frames=frames, parked_frames=1, gpu_states=4, gpu_checkpoints=64,
    )  # fmt: skip
    return server(geometry, **{"eviction": "lru", **options})


def serve(made: FakeServer, prompt: list[int], chunk: int = 64) -> int:
    """Serve it from the host alone; returns how many tokens were found."""
    rec = made.open([*prompt, 0])
    assert rec is not None
    made.drain()
    found = rec.cached_tokens
    made.run(made.core.release(rec))
    made.serve(prompt, chunk=chunk)
    made.drain()
    made.cold(Tier.GPU)
    made.sound()
    return found


def on_host(made: FakeServer, slot: int = CPU + CHECKPOINT) -> list[int]:
    """Depths of what the host has."""
    return sorted(n.depth for _, n in made.pages() if n.copies[slot] is not None)


# ---------------------------------------------------------------------- worth
@pytest.mark.parametrize(
    ("facts", "worth"),
    [
        ({"deepest": True}, 8 / 12),
        ({"deepest": True, "gap": 1}, 1 / 5),
        ({"passed": False}, 2.0),
        ({"uses": 2}, 2.0),
        ({"branch": True}, 1.0),
        ({"uses": 1}, 0.2),
        ({"prompt_end": True}, 0.2),
        ({}, 0.06),
        ({"gap": 16}, 0.12),
    ],
)
def test_what_adaptive_thinks_of_a_checkpoint(facts: dict[str, Any], worth: float) -> None:
    assert Adaptive().worth(FACTS._replace(**facts)) == pytest.approx(worth)


def test_others_keep_all_alike() -> None:
    for policy in (Dense(), Sparse(), CheckpointPolicy()):
        assert policy.worth(FACTS) == policy.worth(FACTS._replace(deepest=True)) == 1.0
    assert CheckpointPolicy().due(3, prompt_end=False, branch=False)


def test_classes_are_half_octaves() -> None:
    class Given(CheckpointPolicy):
        def worth(self, checkpoint: CheckpointFacts) -> float:
            return checkpoint.gap / 16

    scale = Scale(Given(), 4)
    classes = []
    for gap in (0, 1, 4, 8, 11, 16, 32):
        mark = Mark(gap, prompt_end=False, branch=False)
        classes.append(scale.standing(mark, deepest=False))
    assert classes == [HOPELESS + 1, -8, -4, -2, -1, LEVEL, 2]


def checkpoint(depth: int, above: Copy | None = None) -> Copy:
    copy = Copy(Node(None, None, 0, depth), CPU + CHECKPOINT, (0,), 0)
    copy.mark = Mark(depth, prompt_end=False, branch=False)
    copy.mark.above = above
    return copy


def test_the_gap_reaches_back_past_what_has_gone() -> None:
    first, second = checkpoint(3), None
    second = checkpoint(7, first)
    third = checkpoint(12, second)
    assert third.mark is not None and second.mark is not None
    assert (third.mark.gap, second.mark.gap) == (5, 4)
    second.node = None
    assert third.mark.gap == 9 and third.mark.above is first
    first.node = None
    assert third.mark.gap == 12 and third.mark.above is None


def test_the_page_before_the_end_is_not_passed_by_the_end() -> None:
    far, near = checkpoint(5), checkpoint(8)
    assert passed_by(Mark(9, prompt_end=True, branch=False), (near, far, None)) == [far]
    assert near.mark is not None and not near.mark.passed
    assert passed_by(Mark(10, prompt_end=True, branch=False), (near, far)) == [near]


def test_a_policy_is_one() -> None:
    class Lookalike:
        def rank(self, tick: int, hits: int) -> int:
            return tick

    for field, wrong in (("eviction", Lookalike()), ("eviction", "mru"), ("checkpoints", Adaptive)):
        with pytest.raises(ConfigError, match=field):
            CacheConfig(gpu_bytes=1, **{field: wrong})
    CacheConfig(gpu_bytes=1, eviction=EvictionPolicy(), checkpoints=CheckpointPolicy())


# ---------------------------------------------------------------------- what leaves first
def test_history_that_nothing_can_resume_behind_leaves_first() -> None:
    """Even if it was used later than all else."""
    made = tails(cpu=12, checkpoints=Sparse(every_pages=64))
    serve(made, [1, 1, 1, 1])
    serve(made, [2, 2, 2, 2])
    path = [n for _, n in made.pages() if n.copies[CPU] is not None]
    assert len(path) == 8 and made.core.residency.pools[CPU].free <= 1
    younger = max(n.tick for n in path)
    for node in path:  # the younger prompt loses its checkpoints
        tail = node.copies[CPU + CHECKPOINT]
        if tail is not None and node.tick == younger:
            made.core.residency.detach(tail)
    made.core.evict(Tier.CPU, 3)
    made.sound()
    left = [n for _, n in made.pages() if n.copies[CPU] is not None]
    assert sum(n.tick == younger for n in left) == 1 and len(left) == 5


def test_what_a_conversation_has_passed_leaves_before_its_end() -> None:
    made = tails(cpu=64, checkpoints=Adaptive(every_pages=4))
    serve(made, [1] * 12, chunk=4)
    assert on_host(made) == list(range(1, 13))  # there was room for all
    free = made.core.residency.pools[CPU].free
    made.core.evict(Tier.CPU, 9)
    made.sound()
    assert on_host(made, CPU) == list(range(1, 13)), "not a page before those"
    assert len(on_host(made)) == 3 and {11, 12} & set(on_host(made))
    assert made.core.residency.pools[CPU].free == free + 9


def test_the_end_that_a_conversation_has_left_behind_goes_before_the_new_one() -> None:
    made = tails(cpu=18, checkpoints=Adaptive(every_pages=64))
    serve(made, [1] * 4)
    assert serve(made, [1] * 4 + [2] * 4) == 4
    marks = {n.depth: c.mark for _, n in made.pages() if (c := n.copies[CPU + CHECKPOINT])}
    assert marks[4] is not None and marks[4].uses >= 1 and marks[4].passed
    assert marks[8] is not None and not marks[8].passed
    before = set(on_host(made))
    made.core.evict(Tier.CPU, 4)
    assert {7, 8} & set(on_host(made)) and not {1, 2} & set(on_host(made)), before


def test_expendable_ones_take_free_room_only() -> None:
    """Nothing leaves the host for a checkpoint that would be let go first; none is captured."""
    made = tails(cpu=10, checkpoints=Adaptive(every_pages=64))
    serve(made, [1] * 5)
    assert on_host(made) == [1, 2, 3, 4, 5]
    evicted = made.core.stats().tiers[Tier.CPU].evictions
    rec = made.open([7, 7, 7, 7, 7, 0])
    assert rec is not None
    captures, _ = made.core.reserve([rec], [5])
    assert [c.position for c in captures] == [4, 5]
    made.core.abandon([rec], [5])
    made.run(made.core.release(rec))
    assert made.core.stats().tiers[Tier.CPU].evictions == evicted


def long_prompt(cpu: int, every: int, chunk: int) -> FakeServer:
    """A prompt, served twice, that the host is too small for; checkpoints take two frames."""
    made = tails(cpu=cpu, frames=2, checkpoints=Sparse(every_pages=every))
    for _ in range(2):
        serve(made, list(range(1, 20)), chunk=chunk)
    return made


def test_a_prompt_longer_than_the_host_keeps_a_checkpoint() -> None:
    """As many pages as fit are of no use unless a lease can resume at one of them."""
    made = long_prompt(cpu=16, every=4, chunk=8)
    assert on_host(made) == [12] and len(on_host(made, CPU)) == 14
    assert serve(made, list(range(1, 20)), chunk=8) == 12


def test_the_first_checkpoint_of_a_path_may_shorten_it() -> None:
    made = long_prompt(cpu=8, every=3, chunk=8)
    assert on_host(made) == [3] and len(on_host(made, CPU)) == 6


def test_later_checkpoints_push_out_no_pages_of_their_own_path() -> None:
    """These would be copied down again with the next chunk, and pushed out again."""
    made = long_prompt(cpu=14, every=3, chunk=12)
    assert on_host(made) == [6] and len(on_host(made, CPU)) == 12
    assert made.core.stats().tiers[Tier.CPU].evictions == 2


def test_what_is_passed_is_queued_by_its_new_worth() -> None:
    """A second turn goes past checkpoints of the first that already wait in the queues."""
    made = tails(cpu=64, checkpoints=Adaptive(every_pages=4))
    serve(made, [1] * 4)
    serve(made, [1] * 8)
    residency = made.core.residency
    classes = {
        entry[3].mark.depth: (kind[2], residency.candidates.standing(entry[3]))
        for kind, queue in residency.candidates.orders[CPU]._queues.items()
        for entry in queue
        if entry[3].queued == entry[2] and entry[3].mark is not None
    }
    assert sorted(classes) == list(range(1, 9))
    assert all(queued == now for queued, now in classes.values()), classes
    assert classes[3] != classes[7]  # the first turn's last but one: passed, and worth less


def test_where_a_turn_ends_a_checkpoint_is_kept() -> None:
    """Also when the host is full: the next turn goes on from the last whole page of the answer."""
    made = tails(cpu=8, checkpoints=Adaptive(every_pages=64))
    serve(made, [1] * 4)
    assert made.core.residency.pools[CPU].free == 0
    rec = made.open([2, 2, 0])
    assert rec is not None
    for _ in range(5):  # three tokens of a prompt, two of an answer
        assert made.step([rec], [[2]])
        made.drain()
    assert [n.depth for n in rec.nodes if n.copies[CPU + CHECKPOINT] is not None] == [1, 2, 3]
    nodes = list(rec.nodes)
    made.run(made.core.release(rec))
    made.drain()
    made.sound()
    tail = nodes[-1].copies[CPU + CHECKPOINT]
    assert nodes[-1].depth == 5 and tail is not None and not tail.expendable
    assert nodes[3].copies[CPU + CHECKPOINT] is None
    made.cold(Tier.GPU)
    assert made.core.match(packed([2] * 9)).tokens == 5


def test_the_last_of_a_chain_becomes_its_deepest() -> None:
    """With what lay below it gone, a passed checkpoint is what its conversation can resume at."""
    made = tails(cpu=40, checkpoints=Adaptive(every_pages=4))
    serve(made, [1] * 12, chunk=4)
    residency = made.core.residency
    by_depth = {n.depth: n for _, n in made.pages()}
    for depth in (12, 11, 10, 9):
        for slot in (CPU + CHECKPOINT, CPU):
            if (copy := by_depth[depth].copies[slot]) is not None:
                residency.detach(copy)
    tail = by_depth[8].copies[CPU + CHECKPOINT]
    assert tail is not None and tail.queued
    queues = residency.candidates.orders[CPU]._queues.items()
    kinds = [kind for kind, queue in queues if any(e[2] == tail.queued for e in queue)]
    assert [k[2] for k in kinds] == [residency.candidates.standing(tail)]
    assert tail.mark is not None
    assert residency.candidates.standing(tail) == Scale(Adaptive(), 1).standing(
        tail.mark, deepest=True
    )


def test_match_tells_what_is_known_apart_from_where_to_resume() -> None:
    """H3: the gap between them is history a server may compute anew, or not."""
    made = tails(cpu=40, checkpoints=Sparse(every_pages=4))
    serve(made, [1] * 12)
    assert on_host(made) == [4, 8, 11, 12]
    found = made.core.match(packed([1] * 10 + [2] * 9))
    assert (found.tokens, found.history_tokens, found.cpu_tokens) == (8, 10, 8)
    found = made.core.match(packed([1] * 3 + [2] * 9))
    assert (found.tokens, found.history_tokens, found.restore_bytes) == (0, 3, 0)


# ---------------------------------------------------------------------- found again
def test_pages_found_again_outlive_others_by_the_weight() -> None:
    class Thrice(EvictionPolicy):
        def weight(self, again: bool) -> float:
            return 3.0 if again else 1.0

    def left(policy: EvictionPolicy, between: int) -> bool:
        geometry = Geometry(page_tokens=1, gpu_pages=64, max_leases=4)
        made = server(geometry, eviction=policy)
        made.serve([1])
        made.serve([1, 9])  # finds the first page again
        for i in range(between):
            made.serve([100 + i])
        made.core.evict(Tier.GPU, between // 2 + 1)
        return any(n.depth == 1 and n.hits for _, n in made.pages())

    assert left(Thrice(), 8) and not left(EvictionPolicy(), 8)


def test_only_the_slowest_memory_tier_weighs() -> None:
    """Above another tier a page lost costs a copy, not its computation: least recently used."""
    made = server(Geometry(page_tokens=1, gpu_pages=8, cpu_frames=8, max_leases=2))
    orders = made.core.residency.candidates.orders
    assert not orders[GPU]._weighed and orders[CPU]._weighed
    alone = server(Geometry(page_tokens=1, gpu_pages=8, max_leases=2))
    assert alone.core.residency.candidates.orders[GPU]._weighed


# ---------------------------------------------------------------------- ghosts
def page(i: int) -> bytes:
    return i.to_bytes(4, "little") * 20


def test_ghosts_tell_what_came_back_soon() -> None:
    ghosts = Ghosts(frames=16, limit=8)
    ghosts.remember([page(1)[:64]], False)
    ghosts.remember([page(2)[:64]], True)
    assert page(1) in ghosts and page(3) not in ghosts
    assert ghosts.returned() is None
    assert ghosts.back(page(1)) and ghosts.back(page(2)) and not ghosts.back(page(3))
    assert ghosts.returned() == (1 / 16, 1 / 16)
    assert ghosts.returned() is None
    ghosts.remember([page(10 + i)[:64] for i in range(2)], False)
    assert ghosts.back(page(1))  # remembered, but two of its kind have gone since: not soon
    assert ghosts.returned() is None
    ghosts.remember([page(20 + i)[:64] for i in range(8)], True)
    assert page(1) not in ghosts and len(ghosts) == 8
    ghosts.remember([page(20)[:64]], True)  # again: the newer entry counts
    ghosts.remember([page(30 + i)[:64] for i in range(7)], True)
    assert page(20) in ghosts
    ghosts.clear()
    assert page(20) not in ghosts and len(ghosts) == 0


def test_the_policy_hears_of_it_with_the_next_request() -> None:
    heard: list[tuple[float, float]] = []

    class Listening(EvictionPolicy):
        def returned(self, first: float, again: float) -> None:
            heard.append((first, again))

    made = server(Geometry(page_tokens=1, gpu_pages=8, max_leases=2), eviction=Listening())
    made.serve([1])
    made.core.evict(Tier.GPU, 8)
    made.serve([1])
    assert not heard
    made.serve([2])
    assert heard == [(1 / 8, 0.0)]
