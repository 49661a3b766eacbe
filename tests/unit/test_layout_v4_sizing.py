"""Frames for DeepSeek-V4: how many window pages leases hold, against counting them."""

from itertools import pairwise

import pytest

import kvtier
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind, Part
from kvtier.layouts import Layout, swa_c4_c128
from kvtier.sizing import geometry_for, record_bytes
from kvtier.types import Tier

FLASH = (0, 0, *(4, 128) * 20, 4)


def geometry(layout: Layout, leases: int = 4) -> Geometry:
    config = kvtier.CacheConfig(gpu_bytes="64GiB", cpu_bytes="1GiB", max_leases=leases)
    return geometry_for(layout, config)


def layout(tail: str = "minimal", drafts: int = 0) -> Layout:
    return swa_c4_c128(layer_ratios=FLASH, tail=tail, max_draft=drafts)


def test_what_gpu_bytes_become() -> None:
    it = layout()
    config = kvtier.CacheConfig(gpu_bytes="8GiB", max_leases=16)
    got = geometry_for(it, config)
    windows = 16 * 2 + 4096 // 128
    tails = 16 * 12_206_080 + windows * 3_219_840 + 16 * 3_649_920
    assert (got.gpu_states, got.gpu_windows, got.gpu_checkpoints) == (16, windows, 16)
    assert got.gpu_pages == ((8 << 30) - tails) // 998_208
    assert (got.window, got.window_page, got.window_kept) == (128, 128, 128)
    assert got.checkpoint_frames == 4
    # What a pause parks: the rings and two window pages.
    assert got.parked_frames == -(-(12_206_080 + 2 * 3_219_840) // it.frame_bytes()) == 19


@pytest.mark.parametrize("tail", ["minimal", "seed"])
@pytest.mark.parametrize("drafts", [0, 1, 2, 7, 128])
def test_windows_of_a_decoding_lease(tail: str, drafts: int) -> None:
    """The most pages, over every position, that one step with drafts holds: from the first token
    that is kept to the last that is fed."""
    it = layout(tail, drafts)
    kept = 128 if tail == "minimal" else 130  # its last token is in the older page
    most = parked = 0
    for committed in range(1, 1100):
        behind = set(range(max(0, committed - (kept - 1) - drafts), committed))
        fed = set(range(committed, committed + 1 + drafts))
        most = max(most, len({t // 128 for t in behind | fed}))
        parked = max(parked, len({t // 128 for t in behind}))
    got = geometry(it, leases=3)
    assert got.gpu_windows == 3 * most + 4096 // 128
    assert got.parked_frames == it.tail_frames(parked)


def test_window_pages_in_flight() -> None:
    """One or two tokens: 2 pages; 3 to 130: 3; a chunk of 4,096: 34.  One lease's two pages and
    what is set aside for a chunk are exactly enough for it."""

    def pages(n: int) -> int:
        return max(len({t // 128 for t in range(max(0, p - 127), p + n)}) for p in range(1, 1025))

    assert [pages(n) for n in (1, 2, 3, 130, 131, 4096)] == [2, 2, 3, 3, 4, 34]
    assert geometry(layout(), leases=1).gpu_windows == 34


@pytest.mark.parametrize("tail", ["minimal", "seed"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_windows_at_every_length(tail: str, drafts: int) -> None:
    """Freed one by one, never one that is still needed, and none twice."""
    got = geometry(layout(tail, drafts))
    kept = (128 if tail == "minimal" else 130) - 1 + drafts
    for n in range(1101):
        needed = {t // 128 for t in range(max(0, n - kept), n)}
        assert set(got.windows_at(n, drafts)) == needed
    firsts = [got.windows_at(n, drafts).start for n in range(1101)]
    assert all(b - a in (0, 1) for a, b in pairwise(firsts))
    # Where a page ends, without drafts: what a checkpoint holds.
    for end in (256, 512, 1024):
        pages = 1 if tail == "minimal" else 2
        assert got.windows_at(end) == range(end // 128 - pages, end // 128)


def test_no_windows_no_pages() -> None:
    g = Geometry(page_tokens=4, gpu_pages=2, has_tails=True)
    assert g.windows_at(100) == range(0)
    assert g.window_kept == 0


def test_bytes_of_what_moves() -> None:
    """A checkpoint has one size; a whole tail as many window pages as it names."""
    it = layout()
    gpu, cpu = Tier.GPU, Tier.CPU
    page = Part(Kind.HISTORY, gpu, (1,), cpu, (1,))
    assert record_bytes(it, page) == 998_208
    for source, target in ((gpu, cpu), (cpu, gpu), (Tier.DISK, gpu), (gpu, gpu)):
        assert record_bytes(it, Part(Kind.CHECKPOINT, source, (1, 2), target, (3, 4))) == 3_649_920
    for windows in range(4):
        live = (0, *range(windows))
        for part in (
            Part(Kind.TAIL, gpu, live, cpu, (1,) * 19, live_src=True),
            Part(Kind.TAIL, cpu, (1,) * 19, gpu, live, live_dst=True),
            Part(Kind.TAIL, gpu, live, gpu, live, live_src=True, live_dst=True),
        ):
            assert record_bytes(it, part) == 12_206_080 + windows * 3_219_840
