"""Layouts of MLA models whose layers do not all see everything (B5, AT-3.8)."""

from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.kernels import RECORDS
from kvtier.layouts import Share, mla

SIZES: dict[str, Any] = {"layers": 5, "latent_dim": 512, "rope_dim": 64}
MIXED: dict[str, Any] = {**SIZES, "window_layers": (1, 3), "window": 128}


def test_each_layer_has_its_own_rows() -> None:
    """AT-3.8: shapes, types and bytes of both kinds, by hand."""
    it = mla(**MIXED)
    latent, windows = it.components
    assert (latent.name, latent.share, latent.layers) == ("latent", Share.HISTORY, (0, 2, 4))
    assert (latent.dtype, latent.slot_bytes, latent.page_bytes) == ("bfloat16", 1152, 64 * 1152)
    assert (windows.name, windows.share, windows.layers) == ("window_latent", Share.TAIL, (1, 3))
    assert (windows.dtype, windows.slot_bytes, windows.page_bytes) == ("uint8", 656, 64 * 656)
    assert (windows.window, windows.planes) == (128, RECORDS["mla_fp8"].planes)
    assert it.name == "mla_swa"
    assert it.page_bytes() == 3 * 64 * 1152
    assert it.tail_windows == 2 and it.checkpoint_bytes() == 2 * 2 * 64 * 656
    assert it.state_bytes() == 0


def test_dense_windows_are_rows_as_the_others() -> None:
    _, windows = mla(**MIXED, window_record="dense", dtype="float32").components
    assert (windows.dtype, windows.slot_bytes, windows.planes) == ("float32", 2304, ())


@pytest.mark.parametrize("record", ["fp8", "dense"])
def test_full_layers_know_nothing_of_windows(record: str) -> None:
    """AT-3.8: rows of full layers are those of a layout without any."""
    (plain,) = mla(**SIZES).components
    latent, _ = mla(**MIXED, window_record=record).components
    for field in ("dtype", "slot_bytes", "slots_per_page", "planes", "window", "share"):
        assert getattr(latent, field) == getattr(plain, field)


def test_layouts_do_not_change() -> None:
    it = mla(**MIXED)
    with pytest.raises(AttributeError):
        it.components[1].dtype = "bfloat16"  # type: ignore[misc]
    layers = [1, 3]
    other = mla(**{**MIXED, "window_layers": layers})
    layers.append(4)
    assert other == it and other.fingerprint == it.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"window_layers": (1,)},
        {"window_layers": (1, 2)},
        {"window": 127},
        {"window": 129},
        {"window_record": "dense"},
        {"window_page_tokens": 32},
        {"dtype": "float16"},
        {"rope_layout": "interleaved"},
        {"draft_layers": 1},
    ],
    ids=str,
)
def test_fingerprints_tell_layouts_apart(change: dict[str, Any]) -> None:
    assert mla(**{**MIXED, **change}).fingerprint != mla(**MIXED).fingerprint


def test_without_windows_nothing_has_changed() -> None:
    """Caches on disk from before are still this layout's."""
    it = mla(**SIZES)
    assert it.name == "mla"
    assert it.meta == {"rope_layout": "half", "latent_dim": 512, "rope_dim": 64}
    assert it == mla(**SIZES, window_layers=[], window_record="dense")


def test_order_of_the_list_does_not_matter() -> None:
    assert mla(**{**MIXED, "window_layers": (3, 1)}) == mla(**MIXED)
    assert mla(**{**MIXED, "window_layers": range(1, 4, 2)}) == mla(**MIXED)


def test_draft_layers_may_have_windows() -> None:
    it = mla(**{**MIXED, "window_layers": (1, 5)}, draft_layers=2)
    assert [c.layers for c in it.components] == [(0, 2, 3, 4, 6), (1, 5)]


@pytest.mark.parametrize(
    ("window", "page", "slots", "pages"),
    [
        (1, 64, 1, 1),
        (2, 64, 1, 1),
        (3, 64, 2, 1),
        (5, 4, 4, 1),
        (6, 4, 4, 2),
        (100, 64, 64, 2),
        (128, 64, 64, 2),
        (128, 256, 64, 2),
        (129, 256, 128, 1),
        (4096, 64, 64, 64),
    ],
)
def test_window_pages_are_no_larger_than_they_need_to_be(
    window: int, page: int, slots: int, pages: int
) -> None:
    it = mla(**{**MIXED, "window": window}, page_tokens=page)
    assert it.windows[0].slots_per_page == slots
    assert it.tail_windows == pages
    assert pages * slots >= window - 1


def test_slots() -> None:
    it = mla(**{**MIXED, "window": 6}, page_tokens=8)
    at = np.array([0, 3, 4, 9, 10], np.int32)
    pages, windows = np.array([5, 5, 5, 2, -1], np.int32), np.array([7, 7, 1, 0, -1], np.int32)
    slots = it.slots(at, pages, windows)
    assert slots["latent"].tolist() == [40, 43, 44, 17, -1]
    assert slots["window_latent"].tolist() == [28, 31, 4, 1, -1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"window": None}, "give both or none"),
        ({"window_layers": ()}, "give both or none"),
        ({"window": 0}, "window=0"),
        ({"window_layers": (1, 1)}, "each named once"),
        ({"window_layers": (5,)}, "of 5 layers"),
        ({"window_layers": (-1,)}, "of 5 layers"),
        ({"window_layers": (True,)}, "layer numbers"),
        ({"window_layers": ("1",)}, "layer numbers"),
        ({"window_layers": range(5)}, "every layer"),
        ({"window_record": "fp4"}, "window_record"),
        ({"latent_dim": 16}, "window_record='fp8' stores"),
        ({"window_page_tokens": 48}, "window_page_tokens=48"),
        ({"window_page_tokens": 0}, "window_page_tokens=0"),
        ({"window_page_tokens": 128}, "window_page_tokens=128"),
    ],
    ids=lambda each: str(each),
)
def test_bad_arguments(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mla(**{**MIXED, **change})
