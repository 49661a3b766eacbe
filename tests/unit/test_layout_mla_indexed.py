"""Layouts of latent rows with an indexer key each (B2)."""

from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.kernels import RECORDS
from kvtier.layouts import Share, gqa, mla, mla_indexed, retile

SIZES: dict[str, Any] = {"layers": 61, "latent_dim": 512, "rope_dim": 64}


def test_released_sizes() -> None:
    """Bytes of a token and of a page of 64, by hand: rows of 1152 or 656 bytes, keys of 132."""
    plain, packed = mla_indexed(**SIZES), mla_indexed(**SIZES, record="fp8")
    assert [c.name for c in plain.components] == ["latent", "index"]
    for it, row in ((plain, 1152), (packed, 656)):
        latent, index = it.components
        assert (latent.slot_bytes, latent.page_bytes) == (row, 64 * row)
        assert (index.slot_bytes, index.page_bytes) == (132, 8448)
        assert {c.share for c in it.components} == {Share.HISTORY}
        assert all(c.layers == tuple(range(61)) for c in it.components)
        assert it.page_bytes() == 61 * 64 * (row + 132)
        assert not it.has_tails and it.max_rejected is None
    assert (plain.components[0].dtype, packed.components[0].dtype) == ("bfloat16", "uint8")


def test_planes_are_those_of_the_records() -> None:
    latent, index = mla_indexed(**SIZES, record="fp8").components
    assert latent.planes == RECORDS["mla_fp8"].planes
    assert index.planes == RECORDS["index_fp8"].planes
    assert index.page_bytes == RECORDS["index_fp8"].page_bytes(64)
    assert latent.page_bytes == RECORDS["mla_fp8"].page_bytes(64)


def test_dense_rows() -> None:
    it = mla_indexed(
        layers=2, latent_dim=24, rope_dim=4, index_dim=16, dtype="float32", index_record="dense"
    )
    latent, index = it.components
    assert (latent.slot_bytes, index.slot_bytes) == (28 * 4, 16 * 4)
    assert (latent.planes, index.planes, index.dtype) == ((), (), "float32")


def test_latent_rows_are_those_without_an_index() -> None:
    (plain,) = mla(**SIZES).components
    assert mla_indexed(**SIZES).components[0] == plain
    assert mla_indexed(**SIZES).fingerprint != mla(**SIZES).fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 60},
        {"record": "fp8"},
        {"index_record": "dense"},
        {"dtype": "float16"},
        {"rope_layout": "interleaved"},
        {"page_tokens": 32},
    ],
    ids=str,
)
def test_fingerprints_tell_layouts_apart(change: dict[str, Any]) -> None:
    it = mla_indexed(**SIZES)
    assert mla_indexed(**{**SIZES, **change}).fingerprint != it.fingerprint
    assert mla_indexed(**SIZES, max_draft=3).fingerprint == it.fingerprint


def test_what_else_bytes_mean_is_in_the_fingerprint() -> None:
    assert mla_indexed(**SIZES, record="fp8").meta == {
        "rope_layout": "half",
        "latent_dim": 512,
        "rope_dim": 64,
        "index_dim": 128,
        "record": "fp8",
        "index_record": "fp8",
        "index_hadamard": "no",
    }


def test_sizes_of_equal_bytes_are_told_apart() -> None:
    a, b = (
        mla_indexed(layers=1, latent_dim=latent, rope_dim=rope, index_dim=32, index_record="dense")
        for latent, rope in ((48, 16), (32, 32))
    )
    assert a.page_bytes() == b.page_bytes() and a.fingerprint != b.fingerprint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers must be an int of at least 1, got 0"),
        ({"layers": "2"}, "layers must be an int of at least 1, got '2'"),
        ({"latent_dim": 512.0}, "latent_dim must be an int of at least 1, got 512.0"),
        ({"rope_dim": None}, "rope_dim must be an int"),
        ({"index_dim": True}, "index_dim must be an int of at least 1, got True"),
        ({"page_tokens": 0}, "page_tokens must be an int of at least 1, got 0"),
        ({"page_tokens": "64"}, "page_tokens must be an int"),
        ({"max_draft": -1}, "max_draft must be an int of at least 0, got -1"),
        ({"max_draft": 1.0}, "max_draft must be an int"),
        ({"index_dim": 32}, "rope_dim=64 values of an indexer key"),
        ({"index_dim": 64}, r"index_record='fp8' stores \(128,\) values, not \(64,\)"),
        ({"latent_dim": 256, "record": "fp8"}, r"record='fp8' stores \(512, 64\)"),
        ({"record": "fp4"}, "record must be one of"),
        ({"index_record": "mxfp4"}, "index_record must be one of"),
        ({"dtype": "uint8"}, "dtype must be one of"),
        ({"rope_layout": "whole"}, "rope_layout"),
        ({"page_tokens": 48}, "page_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mla_indexed(**{**SIZES, **change})


def test_numbers_of_any_integer_type() -> None:
    """The same layout, and so the same pages, as of Python's own."""
    for make, sizes in (
        (mla, SIZES),
        (mla_indexed, SIZES),
        (gqa, {"layers": 2, "kv_heads": 8, "head_dim": 64}),
    ):
        mine = {name: np.int64(value) for name, value in (sizes | {"page_tokens": 16}).items()}
        plain = make(**sizes, page_tokens=16)
        assert make(**mine) == plain and make(**mine).fingerprint == plain.fingerprint


def test_every_token_has_a_slot_of_both() -> None:
    it = mla_indexed(**SIZES)
    positions, pages = np.array([0, 63, 64, 5], np.int32), np.array([3, 3, 9, -1], np.int32)
    slots = it.slots(positions, pages)
    wanted = [192, 255, 576, -1]
    assert {name: of.tolist() for name, of in slots.items()} == {
        "latent": wanted,
        "index": wanted,
    }


def test_retiling_moves_rows_and_scales() -> None:
    """B7: pages of 64 from pages of 16; the scales of a page lie behind all of its keys."""
    sizes: dict[str, Any] = {**SIZES, "layers": 1, "record": "fp8"}
    small, large = (mla_indexed(**sizes, page_tokens=n) for n in (16, 64))
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 256, (4, small.page_bytes()), dtype=np.uint8)
    (got,) = retile(pages.tobytes(), small, large)
    rows, keys = got[: 64 * 656], got[64 * 656 :]
    assert np.array_equal(rows, pages[:, : 16 * 656].reshape(-1))
    assert np.array_equal(keys[: 64 * 128], pages[:, 16 * 656 : 16 * 784].reshape(-1))
    assert np.array_equal(keys[64 * 128 :], pages[:, 16 * 784 :].reshape(-1))
