"""Checkpoint frames on the device: the end of every ring, wherever rings and frames begin."""

from typing import Any

import pytest
import torch

from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind
from kvtier.data import DevicePool
from kvtier.errors import ConfigError
from kvtier.layouts import Component, Layout, Share

PAGE = 8


def component(name: str, share: Share, **sizes: Any) -> Component:
    fields = {
        **{"tokens_per_slot": 1, "slots_per_page": PAGE, "slot_bytes": 5, "dtype": "uint8"},
        **{"layers": (0, 1), **sizes},
    }
    return Component(name=name, share=share, **fields)


# Slots of 5 bytes: 15 of a ring and 40 of a window in each of two layers, so 110 bytes a frame.
LAYOUT = Layout(
    name="odd",
    page_tokens=PAGE,
    components=(
        component("history", Share.HISTORY),
        component("ring", Share.TAIL, checkpoint_slots=3),
        component("gone", Share.TAIL, checkpoint_slots=0),
        component("window", Share.TAIL, window=5),
    ),
)
SIZES: dict[str, Any] = {
    **{"page_tokens": PAGE, "gpu_pages": 2, "has_tails": True, "gpu_states": 2},
    **{"gpu_checkpoints": 3, "gpu_windows": 3, "window": 5, "window_page": PAGE},
}


def filled(pool: DevicePool, tail: tuple[int, ...]) -> torch.Tensor:
    """Noise in a live tail; what of it a checkpoint holds, cut out by hand."""
    for seed, (name, layer) in enumerate(pool._storage):
        frame = tail[1] if name == "window" else tail[0]
        generator = torch.Generator().manual_seed(seed)
        size = pool._storage[name, layer][frame].shape
        noise = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)
        pool._storage[name, layer][frame] = noise
    ring, window = ([pool._storage[name, layer] for layer in (0, 1)] for name in ("ring", "window"))
    return torch.cat([r[tail[0]][25:] for r in ring] + [w[tail[1]] for w in window])


def test_the_end_of_a_ring_there_and_back() -> None:
    pool = DevicePool(LAYOUT, Geometry(**SIZES), "cpu")
    assert pool.checkpoints.shape == (3, LAYOUT.checkpoint_bytes()) == (3, 110)
    assert pool.checkpoints.stride(0) % 16 == 0
    want = filled(pool, (1, 2))
    pool.copy(Kind.CHECKPOINT, (1, 2), (1,), live_src=True, live_dst=False)
    assert torch.equal(pool.checkpoints[1], want)
    assert not pool.checkpoints[0].any()
    assert not pool.checkpoints[2].any()
    pool.poison(Kind.TAIL, (0, 1), live=True)
    pool.copy(Kind.CHECKPOINT, (1,), (0, 1), live_src=False, live_dst=True)
    assert torch.equal(torch.cat(pool.spans(Kind.CHECKPOINT, (0, 1), live=True)), want)  # type: ignore[arg-type]
    for layer in (0, 1):
        assert torch.equal(pool._storage["ring", layer][0][25:], want[15 * layer :][:15])
        assert (pool._storage["ring", layer][0][:25] == 0xFF).all()
        assert (pool._storage["gone", layer][0] == 0xFF).all()
        assert torch.equal(pool._storage["window", layer][1], want[30 + 40 * layer :][:40])


def test_rows_of_frames_are_what_is_copied() -> None:
    pool = DevicePool(LAYOUT, Geometry(**SIZES), "cpu")
    want = filled(pool, (1, 2))
    pool.copy(Kind.CHECKPOINT, (1, 2), (1,), live_src=True, live_dst=False)
    for layer in (0, 1):
        ring, window = (pool.checkpoint_rows(name, layer) for name in ("ring", "window"))
        assert ring.shape == (3, 3, 5)
        assert window.shape == (3, 1, 8, 5)
        assert torch.equal(ring[1].flatten(), want[15 * layer :][:15])
        assert torch.equal(window[1].flatten(), want[30 + 40 * layer :][:40])
        ring[2], window[2] = 7, 9
    assert pool.checkpoints[2].tolist() == [7] * 30 + [9] * 80
    for name, layer in (("gone", 0), ("history", 0), ("ring", 2), ("nothing", 0)):
        with pytest.raises(ConfigError, match="checkpoint holds nothing"):
            pool.checkpoint_rows(name, layer)


def test_a_whole_tail_takes_all_of_its_rings() -> None:
    pool = DevicePool(LAYOUT, Geometry(**SIZES), "cpu")
    filled(pool, (1, 2))
    pool.copy(Kind.TAIL, (1, 2), (0, 0), live_src=True, live_dst=True)
    for name, layer in pool._storage:
        if name != "history":
            source, target = (2, 0) if name == "window" else (1, 0)
            storage = pool._storage[name, layer]
            assert torch.equal(storage[target], storage[source])
            assert storage[source].any()


def test_a_geometry_that_keeps_other_windows() -> None:
    with pytest.raises(ConfigError, match="window_kept: 9 tokens"):
        DevicePool(LAYOUT, Geometry(**SIZES, window_kept=9), "cpu")
