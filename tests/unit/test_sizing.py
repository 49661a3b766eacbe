"""What bytes come to in frames, and configurations that could never serve a request."""

import re

import pytest

import kvtier
from kvtier.core.machine import CacheCore
from kvtier.layouts import Layout, mla
from kvtier.sizing import geometry_for
from tests.shell.kit import LAYOUT, tailed


def test_dense_layouts_turn_bytes_into_pages() -> None:
    """V3's latent: 61 layers of 64 rows of 576 values."""
    layout = mla(layers=61, latent_dim=512, rope_dim=64)
    page = 61 * 64 * 576 * 2
    config = kvtier.CacheConfig(gpu_bytes=10 * page + 5, cpu_bytes="1GiB", max_leases=7)
    geometry = geometry_for(layout, config, disk_frames=99)
    assert geometry.page_bytes == page
    assert geometry.gpu_pages == 10
    assert geometry.cpu_frames == (1 << 30) // (-(-page // 4096) * 4096)
    assert (geometry.disk_frames, geometry.max_leases) == (99, 7)
    assert not geometry.has_tails
    assert (geometry.gpu_states, geometry.gpu_windows, geometry.gpu_checkpoints) == (0, 0, 0)


def test_tails_are_set_aside_before_pages() -> None:
    """Window 6 in pages of 4: decoding reads 5 tokens back and writes one, so up to 3 pages."""
    layout = tailed(window=6, window_page=4)
    state, window, page = 2 * 8, 2 * 4 * 8, 2 * 4 * 8 + 2 * 2 * 8
    checkpoint = state + 2 * window
    windows = 5 * 3 + 4096 // 4
    tails = 5 * state + windows * window + 16 * checkpoint
    config = kvtier.CacheConfig(gpu_bytes=tails + 7 * page + 1, cpu_bytes="1MiB", max_leases=5)
    geometry = geometry_for(layout, config)
    assert geometry.gpu_pages == 7
    assert (geometry.gpu_states, geometry.gpu_windows, geometry.gpu_checkpoints) == (5, windows, 16)
    assert (geometry.window, geometry.window_page) == (6, 4)
    assert (geometry.checkpoint_frames, geometry.parked_frames) == (1, 1)


@pytest.mark.parametrize("layout", [LAYOUT, tailed()], ids=lambda layout: layout.name)
def test_the_least_that_is_named_works(layout: Layout) -> None:
    """The message's remedy is a remedy: a request of a page and a token runs on it."""
    with pytest.raises(kvtier.ConfigError) as caught:
        geometry_for(layout, kvtier.CacheConfig(gpu_bytes=1))
    least = int(re.findall(r"set gpu_bytes to (\d+) or more", str(caught.value))[0])
    with pytest.raises(kvtier.ConfigError):
        geometry_for(layout, kvtier.CacheConfig(gpu_bytes=least - 1))
    geometry = geometry_for(layout, kvtier.CacheConfig(gpu_bytes=least))
    core = CacheCore(geometry, chain=bytes(16))
    record, _ = core.open(kvtier.pack([1] * 5))
    for op in list(core.operations.running):
        core.finish(op, 1)
    core.reserve([record], [5])


def test_a_host_that_could_keep_nothing() -> None:
    for size in (1, 2 * LAYOUT.frame_bytes() - 1):
        with pytest.raises(kvtier.ConfigError, match=f"set it to {2 * LAYOUT.frame_bytes()} "):
            geometry_for(LAYOUT, kvtier.CacheConfig(gpu_bytes="1MiB", cpu_bytes=size))
    least = kvtier.CacheConfig(gpu_bytes="1MiB", cpu_bytes=2 * LAYOUT.frame_bytes())
    assert geometry_for(LAYOUT, least).cpu_frames == 2
