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
