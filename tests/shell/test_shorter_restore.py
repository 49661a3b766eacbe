"""A device too full for all of a prefix takes as much of it as fits, also from disk.

Pages only on disk have no node of their own; planning a shorter restore must not lose sight of the
pages that do fit while it lets go of those that do not.
"""

from pathlib import Path

import pytest

from kvtier import Cache, CacheConfig, Tier
from kvtier.layouts import mla

PAGE, DEVICE = 4, 8


def open_cache(path: Path) -> Cache:
    layout = mla(layers=1, latent_dim=6, rope_dim=2, dtype="float32", page_tokens=PAGE)
    config = CacheConfig(
        gpu_bytes=DEVICE * layout.page_bytes(),
        cpu_bytes=32 * layout.frame_bytes(),
        disk_bytes="16MiB",
        disk_path=path,
    )
    return Cache(layout, config, model="m", device="cpu")


@pytest.mark.parametrize("taken", [1, 3, 5, 7, 8])
def test_restores_what_fits_beside_an_open_lease(taken: int, tmp_path: Path) -> None:
    prefix = list(range(6 * PAGE))
    with open_cache(tmp_path) as cache:
        with cache.lease([]) as lease:
            lease.reserve(len(prefix))
            lease.commit(prefix)
        cache.flush().result()
    with open_cache(tmp_path) as cache, cache.lease([]) as other:
        other.reserve(taken * PAGE)
        with cache.lease([*prefix, 99]) as lease:
            fits = min(6, DEVICE - taken) * PAGE
            assert lease.ready.result() == fits
            assert lease.restored[Tier.DISK] == fits
            cache.check()
