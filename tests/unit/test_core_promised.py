"""A page leaves a tier only when what is promised below it is there (I9)."""

from kvtier.core.geometry import Geometry
from kvtier.core.ops import OpKind
from kvtier.types import Identity, Tier
from tests.property.server import packed, server


def test_a_page_stays_while_the_disk_is_still_writing_it() -> None:
    made = server(Geometry(page_tokens=2, gpu_pages=4, cpu_frames=4, disk_frames=4, max_leases=2))
    core = made.core
    rec, ops = core.open(packed([1, 2, 3]))
    made.epochs[rec.id] = made.epoch
    made.run(ops)
    made.step([rec], [[1, 2]])
    made.run(core.release(rec))
    (pack,) = made.plane.live
    made.end(pack)
    (store,) = (i for i, op in made.plane.live.items() if op.kind is OpKind.STORE)
    made.run(core.clear(tiers=[Tier.CPU]))  # takes away what the store reads from
    assert core.evict(Tier.GPU, 4) == (0, [])
    core.check()
    made.end(store)
    assert core.evict(Tier.GPU, 4)[0] == 1
    assert core.match(packed([1, 2, 3]), Identity()).disk_tokens == 2
    core.check()


def test_a_page_that_the_host_has_waits_for_no_disk() -> None:
    """A slow disk holds host memory, never the device: the store reads from the host."""
    made = server(Geometry(page_tokens=2, gpu_pages=4, cpu_frames=4, disk_frames=4, max_leases=2))
    core = made.core
    made.serve([1, 2, 3, 4])
    while any(op.kind is OpKind.PACK for op in made.plane.live.values()):
        made.end(min(made.plane.live))
    assert any(op.kind is OpKind.STORE for op in made.plane.live.values())
    rec = made.open([9], reserve=8)  # all of the device
    assert rec is not None
    made.sound()
    assert core.match(packed([1, 2, 3, 4, 5])).cpu_tokens == 4
    assert core.evict(Tier.CPU, 4) == (0, [])  # read by the store
    made.drain()
    assert core.evict(Tier.CPU, 4)[0] == 2
    assert core.match(packed([1, 2, 3, 4, 5])).disk_tokens == 4
    made.sound()


def test_a_new_host_copy_stays_while_the_disk_is_still_writing_the_old_one() -> None:
    made = server(Geometry(page_tokens=2, gpu_pages=4, cpu_frames=4, disk_frames=4, max_leases=2))
    core = made.core
    made.serve([1, 2])
    made.end(min(made.plane.live))
    (store,) = (i for i, op in made.plane.live.items() if op.kind is OpKind.STORE)
    made.run(core.clear(tiers=[Tier.CPU]))
    again = made.open([1, 2, 3])  # found on the device: packed once more
    assert again is not None
    made.run(core.release(again))
    made.end(next(i for i, op in made.plane.live.items() if op.kind is OpKind.PACK))
    assert core.evict(Tier.GPU, 4)[0] == 1
    assert core.evict(Tier.CPU, 4) == (0, [])
    made.sound()
    made.end(store)
    assert core.evict(Tier.CPU, 4)[0] == 1
    assert core.match(packed([1, 2, 3])).disk_tokens == 2
    made.sound()


def test_a_page_above_a_victim_waits_for_its_own_host_copy() -> None:
    made = server(Geometry(page_tokens=2, gpu_pages=4, cpu_frames=4, max_leases=2))
    core = made.core
    made.serve([1, 2, 3, 4], chunk=2)
    first, second = sorted(made.plane.live)  # one pack a page
    for op_id in (first, second):
        made.plane.pack(op_id)
        made.run(core.packed(op_id))
    made.end(second)
    assert core.evict(Tier.GPU, 4)[0] == 1
    made.sound()
    made.end(first)
    assert core.evict(Tier.GPU, 4)[0] == 1
    made.sound()


def test_a_page_above_a_victim_waits_for_its_other_child() -> None:
    """The other child is older but stays, as its host copy is still being made."""
    made = server(Geometry(page_tokens=2, gpu_pages=6, cpu_frames=6, max_leases=2))
    core = made.core
    made.serve([1, 2, 3, 4])
    made.drain()
    made.serve([1, 2, 5, 6], read=False)
    again = made.open([1, 2, 3, 4, 5])
    assert again is not None
    made.run(core.release(again))
    assert core.evict(Tier.GPU, 6)[0] == 1
    made.sound()
    made.drain()
    assert core.evict(Tier.GPU, 6)[0] == 2
    made.sound()
