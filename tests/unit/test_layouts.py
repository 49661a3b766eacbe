"""Sizes, slots and fingerprints of layouts, against arithmetic done here by hand."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError, LayoutMismatch
from kvtier.layouts import Component, Layout, Share, gqa, mla, retile

PLAIN = mla(layers=3, latent_dim=512, rope_dim=64)


def component(name: str = "c", share: Share = Share.HISTORY, **sizes: object) -> Component:
    fields = {
        "tokens_per_slot": 1,
        "slots_per_page": 16,
        "slot_bytes": 4,
        "layers": (0,),
        "dtype": "uint8",
        **sizes,
    }
    return Component(name=name, share=share, **fields)  # type: ignore[arg-type]


def layout(*components: Component, page_tokens: int = 16, **fields: object) -> Layout:
    return Layout(
        name="test",
        page_tokens=page_tokens,
        components=components or (component(),),
        **fields,  # type: ignore[arg-type]
    )


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("dtype", "row"), [("bfloat16", 1152), ("float16", 1152), ("float32", 2304)]
)
def test_mla_row(dtype: str, row: int) -> None:
    """AT-1.6: 576 values a token and layer, whatever the heads of the model."""
    it = mla(layers=61, latent_dim=512, rope_dim=64, dtype=dtype)
    (latent,) = it.components
    assert latent.slot_bytes == row
    assert latent.layers == tuple(range(61))
    assert it.page_bytes() == row * 64 * 61
    assert not it.has_tails
    assert it.checkpoint_bytes() == it.checkpoint_frames() == 0


def test_published_sizes_per_token() -> None:
    for layers, per_token in [(61, 70_272), (60, 69_120), (27, 31_104)]:
        it = mla(layers=layers, latent_dim=512, rope_dim=64)
        assert it.page_bytes() == 64 * per_token


def test_draft_layers_come_behind_the_models_own() -> None:
    it = mla(layers=4, latent_dim=8, rope_dim=8, draft_layers=2, max_draft=3)
    assert it.components[0].layers == (0, 1, 2, 3, 4, 5)


def test_gqa_keeps_keys_and_values_apart() -> None:
    it = gqa(layers=2, kv_heads=4, head_dim=16, dtype="float32", page_tokens=8)
    assert [(c.name, c.slot_bytes) for c in it.components] == [("k", 256), ("v", 256)]
    assert list(it.sections()) == [
        ("k", 0, 0, 2048),
        ("k", 1, 2048, 2048),
        ("v", 0, 4096, 2048),
        ("v", 1, 6144, 2048),
    ]


def test_frames_are_pages_rounded_up_to_4096() -> None:
    for slot, frame in [(1, 4096), (256, 4096), (257, 8192), (512, 8192)]:
        assert layout(component(slot_bytes=slot)).frame_bytes() == frame


def test_padded_pages() -> None:
    """A 584-byte record in pages of a multiple of 576 bytes."""
    for slots, size in [(2, 1728), (64, 37_440), (128, 74_880)]:
        c = component(slots_per_page=slots, slot_bytes=584, planes=(576, 8), page_align=576)
        assert c.page_bytes == size


@pytest.mark.parametrize(("window", "pages"), [(1, 0), (2, 1), (9, 1), (10, 2), (17, 2), (18, 3)])
def test_checkpoints_hold_the_window_pages_that_are_read_next(window: int, pages: int) -> None:
    """At a page's end the next token reads the window - 1 rows before it, in pages of 8."""
    state = component("ring", Share.TAIL, slots_per_page=3, slot_bytes=5)
    swa = component("swa", Share.TAIL, slots_per_page=8, slot_bytes=7, window=window, layers=(0, 1))
    it = layout(swa, component(), state)
    assert it.tail_windows == pages
    assert it.state_bytes() == 15
    assert it.window_bytes() == 112
    assert it.checkpoint_bytes() == it.tail_bytes(pages) == 15 + 112 * pages
    sections = list(it.sections(Share.TAIL))
    assert [name for name, *_ in sections] == ["ring"] + ["swa", "swa"] * pages
    ends = [at + size for _, _, at, size in sections]
    assert [at for _, _, at, _ in sections] == [0, *ends[:-1]]
    assert ends[-1] == it.checkpoint_bytes()


def test_tail_frames_round_up() -> None:
    state = component("ring", Share.TAIL, slots_per_page=1, slot_bytes=4096)
    swa = component("swa", Share.TAIL, slots_per_page=8, slot_bytes=512, window=8)
    it = layout(component(), state, swa)
    assert [it.tail_frames(n) for n in range(3)] == [1, 2, 3]
    assert it.checkpoint_frames() == 2


# --------------------------------------------------------------------------- slots


@given(
    pages=st.lists(st.integers(0, 1000), min_size=1, max_size=5, unique=True),
    start=st.integers(0, 70),
    count=st.integers(0, 90),
)
def test_slots(pages: list[int], start: int, count: int) -> None:
    """Token by token: its page's frame, then how many groups end before it in the page."""
    it = layout(
        component("one"),
        component("four", tokens_per_slot=4, slots_per_page=4),
        component("all", tokens_per_slot=16, slots_per_page=1),
    )
    positions = np.arange(start, start + count, dtype=np.int32)
    table = np.array([pages[i % len(pages)] for i in range(20)], dtype=np.int32)
    got = it.slots(positions, table[positions // 16])
    for name, group, per_page in [("one", 1, 16), ("four", 4, 4), ("all", 16, 1)]:
        want = []
        for t in range(start, start + count):
            closed = [u for u in range(16 * (t // 16), t + 1) if (u + 1) % group == 0]
            closes = bool(closed) and closed[-1] == t
            want.append(int(table[t // 16]) * per_page + len(closed) - 1 if closes else -1)
        assert got[name].tolist() == want


def test_padding_rows_have_no_slot() -> None:
    it = layout(component("one"), component("four", tokens_per_slot=4, slots_per_page=4))
    got = it.slots(np.array([3, 3, 7], np.int32), np.array([2, -1, -1], np.int32))
    assert got["one"].tolist() == [35, -1, -1]
    assert got["four"].tolist() == [8, -1, -1]


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"slot_bytes": 0}, "at least 1"),
        ({"tokens_per_slot": 0}, "at least 1"),
        ({"page_align": 0}, "at least 1"),
        ({"layers": ()}, "layers"),
        ({"layers": (1, 1)}, "layers"),
        ({"layers": (-1,)}, "layers"),
        ({"dtype": "int3"}, "dtype"),
        ({"dtype": "float32", "slot_bytes": 6}, "whole float32"),
        ({"planes": (3, 2)}, "planes"),
        ({"planes": (5, -1)}, "planes"),
        ({"window": 8}, "window"),
        ({"share": Share.TAIL, "window": 0}, "window"),
    ],
)
def test_bad_components(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        component(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [0, -16, 3, 48, 1024])
def test_bad_page_sizes(page: int) -> None:
    with pytest.raises(ConfigError, match="page_tokens"):
        layout(component(slots_per_page=48), page_tokens=page)


def test_bad_layouts() -> None:
    with pytest.raises(ConfigError, match="do not make a page"):
        layout(component(tokens_per_slot=4, slots_per_page=16))
    with pytest.raises(ConfigError, match="names must differ"):
        layout(component("a"), component("a"))
    with pytest.raises(ConfigError, match="no shareable component"):
        layout(component(share=Share.TAIL))
    with pytest.raises(ConfigError, match="agree on window"):
        layout(
            component(),
            component("a", Share.TAIL, window=8),
            component("b", Share.TAIL, window=9),
        )
    with pytest.raises(ConfigError, match="do not end where"):
        layout(component(), component("a", Share.TAIL, window=8, slots_per_page=32))
    for bad in ({"dtype": "uint8"}, {"rope_layout": "pairs"}, {"layers": 0}, {"max_draft": -1}):
        with pytest.raises(ConfigError):
            mla(**{"layers": 1, "latent_dim": 8, "rope_dim": 8, **bad})  # type: ignore[arg-type]
    for bad in ({"dtype": "uint8"}, {"kv_heads": 0}, {"layers": 0}, {"page_tokens": 24}):
        with pytest.raises(ConfigError):
            gqa(**{"layers": 1, "kv_heads": 1, "head_dim": 8, **bad})  # type: ignore[arg-type]


# --------------------------------------------------------------------------- fingerprints

BASE: Mapping[str, object] = {
    "layers": 3,
    "latent_dim": 32,
    "rope_dim": 8,
    "dtype": "bfloat16",
    "rope_layout": "half",
    "page_tokens": 64,
    "draft_layers": 0,
}


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("layers", 4),
        ("latent_dim", 40),
        ("rope_dim", 16),
        ("dtype", "float16"),
        ("rope_layout", "interleaved"),
        ("page_tokens", 32),
        ("draft_layers", 1),
    ],
)
def test_mla_fingerprint_field_by_field(field: str, other: object) -> None:
    """B6: f, f', and f again."""
    f = mla(**BASE).fingerprint  # type: ignore[arg-type]
    assert mla(**{**BASE, field: other}).fingerprint != f  # type: ignore[arg-type]
    assert mla(**BASE).fingerprint == f  # type: ignore[arg-type]


def test_equal_bytes_of_another_meaning_have_another_fingerprint() -> None:
    """Same row length, other cut; a draft layer instead of a model layer."""
    prints = {
        mla(layers=4, latent_dim=32, rope_dim=8).fingerprint,
        mla(layers=4, latent_dim=8, rope_dim=32).fingerprint,
        mla(layers=3, latent_dim=32, rope_dim=8, draft_layers=1).fingerprint,
        mla(layers=4, latent_dim=32, rope_dim=8, dtype="float16").fingerprint,
        gqa(layers=2, kv_heads=8, head_dim=64).fingerprint,
        gqa(layers=2, kv_heads=4, head_dim=128).fingerprint,
    }
    assert len(prints) == 6


def test_every_field_of_a_component_is_in_the_fingerprint() -> None:
    tail = component("t", Share.TAIL, window=9)
    base = component("c", slot_bytes=8)
    changes: dict[str, object] = {
        "name": "d",
        "share": Share.TAIL,
        "tokens_per_slot": 2,
        "slots_per_page": 8,
        "slot_bytes": 16,
        "layers": (1,),
        "dtype": "float32",
        "planes": (6, 2),
        "page_align": 32,
    }
    tails = {"window", "checkpoint_slots"}
    assert set(changes) | tails == set(Component.__dataclass_fields__)
    assert layout(base, tail).fingerprint != layout(base, replace(tail, window=10)).fingerprint
    keep = component("keep")
    f = layout(keep, base).fingerprint
    for field, value in changes.items():
        changed = replace(base, **{field: value})  # type: ignore[arg-type]
        if field in ("tokens_per_slot", "slots_per_page"):  # only together do they make a page
            changed = replace(base, tokens_per_slot=2, slots_per_page=8)
        assert layout(keep, changed).fingerprint != f, field
    both = layout(
        component("c", tokens_per_slot=2, slots_per_page=8, slot_bytes=16), page_tokens=16
    )
    assert both.fingerprint != layout(component("c", slot_bytes=8)).fingerprint


def test_fingerprints_of_the_rest() -> None:
    a, b = component("a"), component("b")
    f = layout(a, b).fingerprint
    assert len(f) == 16
    assert layout(b, a).fingerprint != f  # records would lie in another order
    assert layout(a, b, meta={"fp8": "fn"}).fingerprint != f
    assert layout(a, b, meta={"x": 1}).fingerprint != layout(a, b, meta={"x": "1"}).fingerprint
    assert (
        layout(a, b, meta={"x": 1, "y": 2}).fingerprint
        == layout(a, b, meta={"y": 2, "x": 1}).fingerprint
    )
    assert replace(layout(a, b), name="other").fingerprint != f
    # How far a step may draft changes no stored byte.
    assert layout(a, b, max_draft=4).fingerprint == f


def test_fingerprint_is_the_same_in_every_process() -> None:
    """Written down: another value would orphan everything that is on disk."""
    assert PLAIN.fingerprint.hex() == "9ed4d0136b8f13db5ba913f598688552"


def test_a_layout_cannot_be_changed_from_outside() -> None:
    meta: dict[str, str | int] = {"x": 1}
    it = layout(meta=meta)
    f = it.fingerprint
    meta["x"] = 2
    assert it.fingerprint == f
    assert len({it, layout(meta={"x": 1})}) == 1


# --------------------------------------------------------------------------- retile


def packed(pages: int, page: int, seed: int) -> tuple[npt.NDArray[np.uint8], Layout]:
    it = v4_like(page)
    data = np.random.default_rng(seed).integers(0, 256, (pages, it.page_bytes()), dtype=np.uint8)
    return data, it


def v4_like(page: int) -> Layout:
    return layout(
        component("kv", slots_per_page=page, slot_bytes=12, planes=(9, 3), page_align=9),
        component("c4", tokens_per_slot=4, slots_per_page=page // 4, slot_bytes=7, layers=(2, 5)),
        page_tokens=page,
    )


def slot(record: npt.NDArray[np.uint8], it: Layout, name: str, layer: int, s: int) -> bytes:
    """One slot's bytes, found by walking the record plane by plane."""
    (c,) = (c for c in it.components if c.name == name)
    (at,) = (o for n, ly, o, _ in it.sections() if (n, ly) == (name, layer))
    out = b""
    for width in c.planes or (c.slot_bytes,):
        out += record[at + s * width : at + (s + 1) * width].tobytes()
        at += width * c.slots_per_page
    return out


@pytest.mark.parametrize(("few", "many"), [(16, 32), (8, 64)])
def test_retile_moves_slots_not_bytes(few: int, many: int) -> None:
    data, small = packed(2 * many // few, few, seed=1)
    large = v4_like(many)
    got = retile(data, small, large)
    assert got.shape == (2, large.page_bytes())
    for name, layer, group in [("kv", 0, 1), ("c4", 2, 4), ("c4", 5, 4)]:
        for s in range(2 * many // group):
            want = slot(data[s * group // few], small, name, layer, s % (few // group))
            assert slot(got[s * group // many], large, name, layer, s % (many // group)) == want
    # 12 bytes a slot, padded to 9: what lies behind the slots is zero, not what lay there before.
    (kv,) = (c for c in large.components if c.name == "kv")
    assert not got[:, kv.slots_per_page * 12 : kv.page_bytes].any()


@given(st.sampled_from([(8, 16), (16, 64), (64, 64)]), st.integers(1, 3), st.integers(0, 99))
def test_retile_there_and_back(sizes: tuple[int, int], pages: int, seed: int) -> None:
    few, many = sizes
    data, small = packed(pages * many // few, few, seed)
    clean = retile(data, small, small)  # the same slots, padding zeroed
    large = retile(data.tobytes(), small, v4_like(many))
    assert np.array_equal(retile(large, v4_like(many), small), clean)


def test_retile_keeps_nans_and_denormals() -> None:
    """Every 16-bit pattern there is, as bfloat16 rows."""
    small = mla(layers=1, latent_dim=96, rope_dim=32, page_tokens=16)
    large = mla(layers=1, latent_dim=96, rope_dim=32, page_tokens=128)
    data = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    assert np.array_equal(retile(data, small, large).ravel(), data)


def test_retile_refuses_other_layouts() -> None:
    """AT-1.7: rope order, record size, layer set; and what is no whole page of both."""
    half = mla(layers=2, latent_dim=8, rope_dim=8, page_tokens=16)
    data = bytes(half.page_bytes() * 2)
    for field, other in [
        ("rope_layout", "interleaved"),
        ("layers", 3),
        ("dtype", "float16"),
        ("latent_dim", 16),
    ]:
        fields = {"layers": 2, "latent_dim": 8, "rope_dim": 8, "page_tokens": 32, field: other}
        with pytest.raises(LayoutMismatch):
            retile(data, half, mla(**fields))  # type: ignore[arg-type]
    wide = mla(layers=2, latent_dim=8, rope_dim=8, page_tokens=64)
    with pytest.raises(LayoutMismatch, match="whole pages"):
        retile(data, half, wide)
    with pytest.raises(LayoutMismatch, match="whole pages"):
        retile(data[1:], half, half)
    with pytest.raises(LayoutMismatch, match="name"):
        retile(data, half, gqa(layers=2, kv_heads=1, head_dim=16, page_tokens=16))
