"""Which page leaves first: policies, priorities, checkpoints; and what it costs to find out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvtier.config import Adaptive, Dense, EvictionPolicy
from kvtier.core import eviction
from kvtier.core.copies import CHECKPOINT, CPU, GPU, Copy
from kvtier.core.eviction import Lru, S3Fifo, SecondTouch, policy_for
from kvtier.core.geometry import Geometry
from kvtier.core.tree import Node
from kvtier.errors import ConfigError
from kvtier.types import Tier
from tests.property.server import FakeServer, packed, server


def small(gpu: int = 8, cpu: int = 0, disk: int = 0, **options: Any) -> FakeServer:
    """Pages of one token, on the device only unless asked for more."""
    geometry = Geometry(page_tokens=1, gpu_pages=gpu, cpu_frames=cpu, disk_frames=disk)
    return server(geometry, **{"eviction": "lru", "events": False, **options})


def there(made: FakeServer, *prompts: list[int]) -> list[int]:
    """How many pages of each prompt are known."""
    return [made.core.match(packed([*p, 0])).tokens for p in prompts]


def evict(made: FakeServer, pages: int, tier: Tier = Tier.GPU) -> int:
    freed, ops = made.core.evict(tier, pages)
    made.run(ops)
    made.sound()
    return freed


def test_oldest_path_first_and_deepest_page_of_it_first() -> None:
    made = small()
    for prompt in ([1, 1, 1], [2, 2], [3]):
        made.serve(prompt)
    made.serve([1, 1, 1])  # used again
    steps = []
    for _ in range(6):
        assert evict(made, 1) == 1
        steps.append(there(made, [1, 1, 1], [2, 2], [3]))
    assert steps == [[3, 1, 1], [3, 0, 1], [3, 0, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert evict(made, 1) == 0


def test_a_shared_prefix_outlives_its_branches() -> None:
    made = small()
    made.serve([7, 7, 1])
    made.serve([7, 7, 2])
    evict(made, 1)
    assert there(made, [7, 7, 1], [7, 7, 2]) == [2, 3]
    evict(made, 2)
    assert there(made, [7, 7, 1], [7, 7, 2]) == [1, 1]


def test_one_sweep_takes_what_single_steps_take() -> None:
    for count in range(1, 9):
        one, many = small(9), small(9)
        for made in (one, many):
            for prompt in ([1, 1, 1], [2, 2, 5], [2, 2, 6], [1, 1, 4], [3]):
                made.serve(prompt)
        evict(one, count)
        for _ in range(count):
            evict(many, 1)
        prompts = ([1, 1, 1], [2, 2, 5], [2, 2, 6], [1, 1, 4], [3])
        assert there(one, *prompts) == there(many, *prompts)


def test_a_sweep_up_a_path_stops_where_it_is_more_recent() -> None:
    made = small()
    made.serve([1, 2])
    made.serve([5])
    twin = made.open([1, 9], read=False)  # uses the first page without finding it
    assert twin is not None and made.step([twin], [[1]])
    made.run(made.core.release(twin))
    evict(made, 2)
    assert there(made, [1, 2], [5]) == [1, 0]


def test_a_sweep_up_a_path_stops_at_a_branch() -> None:
    """Also at one whose other branch is older and cannot leave yet."""
    made = small(cpu=8)
    made.serve([1, 2], chunk=1)
    made.end(min(made.plane.live))  # the first page is on the host, the second on its way
    twin = made.open([1, 3, 9], read=False)
    assert twin is not None and made.step([twin], [[1, 3]])
    made.end(max(made.plane.live))
    made.run(made.core.release(twin))
    assert evict(made, 9) == 1
    made.drain()
    assert evict(made, 9) == 2


def test_match_does_not_make_recent() -> None:
    made = small()
    made.serve([1])
    made.serve([2])
    made.core.match(packed([1, 0]))
    made.core.explain(packed([1, 0]))
    evict(made, 1)
    assert there(made, [1], [2]) == [0, 1]


def test_pinned_read_and_held_pages_stay() -> None:
    made = small()
    made.serve([1, 1])
    made.serve([2, 2])
    lease = made.open([1, 1, 0])
    assert lease is not None and evict(made, 9) == 2
    assert there(made, [1, 1], [2, 2]) == [2, 0]
    made.run(made.core.release(lease))
    pin = made.core.pin(packed([1, 1]))
    assert evict(made, 9) == 0 and there(made, [1, 1]) == [2]  # nowhere else to stay
    made.run(made.core.unpin(pin))
    assert evict(made, 9) == 2


def test_priority_outranks_recency() -> None:
    made = small()
    made.serve([1, 1], priority=2)
    made.serve([2, 2], priority=1)
    made.serve([3, 3])
    made.serve([2, 2])  # recent, and its priority stays
    evict(made, 2)
    assert there(made, [1, 1], [2, 2], [3, 3]) == [2, 2, 0]
    evict(made, 2)
    assert there(made, [1, 1], [2, 2]) == [2, 0]


def test_priority_of_a_prefix_is_that_of_whoever_asks_most() -> None:
    made = small()
    made.serve([1], priority=0)
    made.serve([1, 2], priority=3)
    made.serve([5])
    evict(made, 1)
    assert there(made, [1, 2], [5]) == [2, 0]
    evict(made, 1)  # the branch is gone, its prefix keeps what was asked for it
    made.serve([6])
    evict(made, 1)
    assert there(made, [1], [6]) == [1, 0]


def test_s3fifo_keeps_what_was_found_again() -> None:
    made = small(eviction="s3fifo")
    for prompt in ([1], [2], [3]):
        made.serve(prompt)
    made.serve([1])
    for prompt in ([4], [5]):
        made.serve(prompt)
    evict(made, 4)
    assert there(made, [1], [2], [3], [4], [5]) == [1, 0, 0, 0, 0]


def test_s3fifo_counts_three_hits_at_most() -> None:
    policy = S3Fifo(generation=100)
    assert [policy.rank(5, hits) for hits in range(5)] == [5, 105, 205, 305, 305]
    assert policy.admit(0, full=True)


def test_ones_own_policy() -> None:
    class MostRecentFirst(EvictionPolicy):
        def rank(self, tick: int, hits: int) -> int:
            return -tick

    made = small(eviction=MostRecentFirst())
    for prompt in ([1], [2], [3]):
        made.serve(prompt)
    evict(made, 2)
    assert there(made, [1], [2], [3]) == [1, 0, 0]


def test_policies_by_name() -> None:
    assert type(policy_for("lru")) is Lru and isinstance(policy_for("s3fifo"), S3Fifo)
    assert isinstance(policy_for("adaptive"), SecondTouch)
    with pytest.raises(ConfigError, match="mru"):
        policy_for("mru")


def choosy(ratio: float) -> SecondTouch:
    policy = SecondTouch()
    policy.ratio = ratio
    return policy


def test_second_touch_is_choosy_only_where_that_has_paid() -> None:
    assert choosy(4.0).admit(1, full=True) and choosy(4.0).admit(0, full=False)
    assert not choosy(4.0).admit(0, full=True) and choosy(3.9).admit(0, full=True)


def test_second_touch_follows_what_comes_back() -> None:
    """At most a twentieth a request, never below LRU, never past its limit."""
    policy = SecondTouch()
    assert policy.weight(False) == 1.0 and policy.weight(True) == 2.0
    policy.returned(first=0.0, again=0.001)
    assert policy.ratio == pytest.approx(2.0 * math.exp(0.008))
    policy.returned(first=0.0, again=9.0)
    assert policy.ratio == pytest.approx(2.0 * math.exp(0.058))
    policy.returned(first=0.5, again=0.5)
    assert policy.ratio == pytest.approx(2.0 * math.exp(0.058))
    for _ in range(99):
        policy.returned(first=1.0, again=0.0)
    assert policy.weight(True) == 1.0
    for _ in range(199):
        policy.returned(first=0.0, again=1.0)
    assert policy.weight(True) == 64.0 and policy.weight(False) == 1.0


@pytest.mark.parametrize(
    ("policy", "kept"), [("lru", [0, 1]), (choosy(2.0), [0, 1]), (choosy(9.0), [1, 0])]
)
def test_admission_to_a_full_disk(policy: str | EvictionPolicy, kept: list[int]) -> None:
    """Adaptive may let only what was found again push others out."""
    made = small(cpu=8, disk=1, eviction=policy)
    for prompt in ([1], [2]):
        made.serve(prompt)
        made.drain()
    made.cold(Tier.GPU, Tier.CPU)
    assert there(made, [1], [2]) == kept


def test_admission_after_hits() -> None:
    made = small(cpu=8, disk=8, store_after_hits=2)
    counts = []
    for _ in range(4):
        made.serve([1])
        made.drain()
        assert made.core.residency.disk is not None
        counts.append(made.core.residency.disk.rows)
    assert counts == [0, 0, 1, 1]
    assert made.core.stats().dropped_stores == 2


# ---------------------------------------------------------------------- room for others
def test_victims_are_all_or_nothing() -> None:
    """A lease that does not fit pushes nobody out."""
    made = small(gpu=4)
    made.serve([1, 1])
    holder = made.open([5, 0])
    assert holder is not None and made.step([holder], [[5, 5]])
    before = made.core.digest()
    assert not made.step([holder], [[6, 6, 6]])
    assert made.core.digest() == before and there(made, [1, 1]) == [2]
    assert made.step([holder], [[6, 6]]) and there(made, [1, 1]) == [0]
    made.sound()


def test_batches_are_all_or_nothing() -> None:
    made = small(gpu=4)
    one, two = made.open([1, 0]), made.open([2, 0])
    assert one is not None and two is not None
    made.step([one, two], [[1], [2]])
    before = [list(r.frames) for r in (one, two)]
    assert not made.step([one, two], [[1, 1], [2]])
    assert [r.frames for r in (one, two)] == before
    assert made.step([one, two], [[1], [2]])


def test_evict_nothing() -> None:
    made = small()
    made.serve([1])
    assert evict(made, 0) == evict(made, -3) == 0
    assert evict(made, 1, Tier.CPU) == evict(made, 1, Tier.DISK) == 0
    with pytest.raises(ConfigError, match="remote"):
        made.core.evict(Tier.REMOTE, 1)


def test_a_page_stays_until_its_host_copy_is_confirmed() -> None:
    made = small(cpu=4)
    made.serve([1, 1])
    (pack,) = made.plane.live
    assert evict(made, 9) == 0
    made.plane.pack(pack)
    made.run(made.core.packed(pack))
    assert evict(made, 9) == 0  # read, but the copy is not confirmed
    made.end(pack)
    assert evict(made, 9) == 2 and there(made, [1, 1]) == [2]


def test_a_failed_pack_leaves_the_page_where_it_is() -> None:
    made = small(cpu=4)
    made.serve([1, 1, 1])
    made.end(min(made.plane.live), 1)
    made.sound()
    assert there(made, [1, 1, 1]) == [3]
    assert [made.core.stats().tiers[t].resident for t in (Tier.GPU, Tier.CPU)] == [3, 1]
    assert made.core.stats().tiers[Tier.CPU].faults == 1
    made.serve([1, 1, 1])  # offered again when somebody uses it
    made.drain()
    assert made.core.stats().tiers[Tier.CPU].resident == 3


# ---------------------------------------------------------------------- checkpoints
def tails(**options: Any) -> FakeServer:
    geometry = Geometry(
        page_tokens=1,
        gpu_pages=12,
        cpu_frames=options.pop("cpu", 12),
        max_leases=4,
        has_tails=True,
        checkpoint_frames=1,
        parked_frames=1,
        gpu_states=4,
        gpu_checkpoints=options.pop("spaces", 4),
    )
    return server(geometry, **{"eviction": "lru", **options})


def test_expendable_checkpoints_go_before_pages() -> None:
    """Adaptive placement: what Sparse would not keep leaves the host first."""
    made = tails(cpu=9, spaces=9, checkpoints=Adaptive(every_pages=4))
    made.serve([1, 1, 1, 1, 1], chunk=5)
    made.drain()
    nodes = [n for _, n in made.pages()]
    on_host = [n.depth for n in nodes if n.copies[CPU + CHECKPOINT] is not None]
    assert made.core.residency.pools[CPU].free == 0 and len(on_host) == 4
    evict(made, 2, Tier.CPU)
    made.sound()
    nodes = [n for _, n in made.pages()]
    assert all(n.copies[CPU] is not None for n in nodes), "a page before an expendable checkpoint"
    left = [n.depth for n in nodes if n.copies[CPU + CHECKPOINT] is not None]
    expendable = {1, 2, 3}
    assert set(on_host) - set(left) <= expendable


def test_a_checkpoint_that_served_is_kept_longer() -> None:
    made = tails(checkpoints=Adaptive(every_pages=16))
    made.serve([1, 1, 1, 1, 1, 1], chunk=6)
    made.drain()
    by_depth = {n.depth: n for _, n in made.pages()}
    second = by_depth[2].copies[CPU + CHECKPOINT]
    assert second is not None and second.expendable
    made.cold(Tier.GPU)
    lease = made.open([1, 1, 9])
    assert lease is not None and len(lease.nodes) == 2
    assert not second.expendable
    made.drain()
    made.sound()


def test_on_the_host_a_checkpoint_leaves_before_its_page() -> None:
    made = tails(checkpoints=Dense())
    made.serve([1, 1], chunk=2)
    made.drain()
    assert made.core.residency.pools[CPU].free == 12 - 4
    order = []
    while evict(made, 1, Tier.CPU):
        order.append(
            [sum(n.copies[s] is not None for _, n in made.pages()) for s in (CPU, CPU + CHECKPOINT)]
        )
    assert order == [[2, 1], [1, 1], [1, 0], [0, 0]]


def test_on_the_device_a_checkpoint_goes_with_its_page() -> None:
    made = tails(checkpoints=Dense(), cpu=0)
    made.serve([1, 1], chunk=2)
    assert made.core.residency.pools[GPU + CHECKPOINT].free == 2
    evict(made, 1)
    assert made.core.residency.pools[GPU + CHECKPOINT].free == 3
    assert there(made, [1, 1]) == [1]


# ---------------------------------------------------------------------- cost
@contextmanager
def counted_work() -> Iterator[Counter[str]]:
    """Counts candidates looked at, and heap operations."""
    count: Counter[str] = Counter()
    heaps = ("heappush", "heappop")
    originals = [(eviction, name) for name in heaps] + [(eviction.EvictionOrder, "_entry")]
    functions = [getattr(owner, name) for owner, name in originals]

    def wrap(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            count[name] += 1
            return function(*args)

        return call

    for (owner, name), function in zip(originals, functions, strict=True):
        setattr(owner, name, wrap(name, function))
    try:
        yield count
    finally:
        for (owner, name), function in zip(originals, functions, strict=True):
            setattr(owner, name, function)


def test_evicting_costs_the_same_among_many_leaves() -> None:
    """Candidates looked at to evict 256 pages: flat from a thousand to 16,000 leaves; and none
    has to be sorted when they were used in the order in which they came."""
    costs = {}
    for leaves in (1_000, 16_000):
        made = small(gpu=2 * leaves)
        core = made.core
        for i in range(leaves):
            rec, _ = core.open(packed([i, i, 0]))
            core.reserve([rec], [2])
            core.commit([rec], [2], packed([i, i]).data)
            core.release(rec)
            core.settled.clear()
        with counted_work() as count:
            assert core.evict(Tier.GPU, 256)[0] == 256
        assert count["heappush"] == count["heappop"] == 0
        costs[leaves] = count["_entry"]
    assert costs[16_000] <= 1.1 * costs[1_000] + 8, costs
    assert 128 <= costs[1_000] <= 4 * 256


def test_candidates_leave_in_order_whatever_order_they_came_in() -> None:
    """Those that come in order queue, the others are sorted: together they leave in order."""
    rng = np.random.default_rng(4)
    order = eviction.EvictionOrder(eviction.Lru(), lambda copy: True, 512)
    copies = []
    for tick in rng.integers(0, 100, 512).tolist():
        node = Node(None, None, 0, depth=int(rng.integers(1, 4)))
        node.tick = tick
        copies.append(Copy(node, GPU, (0,), 0))
    order.extend(copies)
    for i, copy in enumerate(copies[::5]):  # used again since they were queued
        assert copy.node is not None
        copy.node.tick = 200 - i
    for copy in copies[::7]:
        copy.node = None
    order.begin(1000)
    left = []
    while order.top() is not None:
        left.append(order.pop())
    nodes = [copy.node for copy in left if copy.node is not None]
    assert len(nodes) == len(left) == sum(c.node is not None for c in copies)
    assert not len(order)
    assert [n.tick for n in nodes] == sorted(n.tick for n in nodes)


def test_queues_stay_bounded_when_nothing_is_evicted() -> None:
    """Pages that leave by ``clear``, or by their time, do not pile up in the queues."""
    made = small(gpu=16, cpu=16)
    for i in range(500):
        made.serve([i, i, i], expires=float(i))
        made.drain()
        made.run(made.core.clear() if i % 2 else made.core.expire(i + 1.0))
    made.drain()
    assert (
        max(len(order) for order in made.core.residency.candidates.orders.values()) <= 2 * 16 + 65
    )
    assert len(made.core.lifetimes._expiring) <= 65
    assert made.core.residency.tree.num_nodes == 0
