"""DeepSeek-V4's layout against the published arithmetic, done again here from single numbers."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.layouts import Component, Layout, Share, swa_c4_c128
from kvtier.trace import V4_FLASH, Sizes

FLASH = (0, 0, *(4, 128) * 20, 4)
PRO = (128, 128, *(4, 128) * 29, 4)
MODELS = pytest.mark.parametrize("ratios", [FLASH, PRO], ids=["flash", "pro"])
KIB, GIB = 1 << 10, 1 << 30


def flash(**options: object) -> Layout:
    return swa_c4_c128(layer_ratios=FLASH, **options)  # type: ignore[arg-type]


def pro(**options: object) -> Layout:
    return swa_c4_c128(layer_ratios=PRO, **options)  # type: ignore[arg-type]


def part(it: Layout, name: str) -> Component:
    return next(c for c in it.components if c.name == name)


def test_the_models_are_those_that_were_published() -> None:
    assert [len(FLASH), FLASH.count(0), FLASH.count(4), FLASH.count(128)] == [43, 2, 21, 20]
    assert [len(PRO), PRO.count(0), PRO.count(4), PRO.count(128)] == [61, 0, 30, 31]
    assert [FLASH[2], FLASH[3], FLASH[42], PRO[2], PRO[3], PRO[60]] == [4, 128, 4, 4, 128, 4]


def test_traces_are_replayed_with_the_sizes_of_this_layout() -> None:
    it = flash()
    sizes = Sizes(
        page_tokens=it.page_tokens,
        page_bytes=it.page_bytes(),
        checkpoint_bytes=it.checkpoint_bytes(),
    )
    assert sizes == V4_FLASH


# --------------------------------------------------------------------------- pages


def v4_page(slots: int) -> tuple[int, int]:
    """Bytes of a page of 584-byte records, and of its padding: rows of 448 + 2 * 64 bytes, then
    8 of scales each, then up to a whole row."""
    raw = slots * (448 + 2 * 64) + slots * (7 + 1)
    size = -(-raw // 576) * 576
    return size, size - raw


@pytest.mark.parametrize(
    ("slots", "size", "padding"),
    [(2, 1_728, 560), (64, 37_440, 64), (128, 74_880, 128), (256, 149_760, 256)],
)
def test_pages_of_packed_records(slots: int, size: int, padding: int) -> None:
    assert v4_page(slots) == (size, padding)
    c = replace(part(flash(), "c4"), slots_per_page=slots)
    assert (c.slot_bytes, c.planes, c.dtype) == (584, (576, 8), "uint8")
    assert c.page_bytes == size
    assert c.page_bytes - slots * c.slot_bytes == padding
    assert slots * c.planes[0] == slots * 576  # where the scales begin


@MODELS
def test_pages_of_one_layer(ratios: tuple[int, ...]) -> None:
    it = swa_c4_c128(layer_ratios=ratios)
    sizes = {c.name: (c.tokens_per_slot, c.slots_per_page, c.page_bytes) for c in it.components}
    assert sizes["c4"] == (4, 64, 37_440)
    assert sizes["c4_index"] == (4, 64, 8_448)
    assert sizes["c128"] == (128, 2, 1_728)
    assert sizes["swa"] == (1, 128, 74_880)
    index = part(it, "c4_index")
    assert (index.planes, index.page_align) == ((128, 4), 1)
    half = part(swa_c4_c128(layer_ratios=ratios, index_record="mxfp4"), "c4_index")
    assert (half.planes, half.slot_bytes, half.page_bytes) == ((64, 4), 68, 4_352)


@MODELS
def test_layers(ratios: tuple[int, ...]) -> None:
    """Every layer has a window; compressed history and its state only where there is a ratio."""
    it = swa_c4_c128(layer_ratios=ratios, draft_layers=1)
    for c in it.components:
        want = {i for i, r in enumerate(ratios) if r == (4 if c.name.startswith("c4") else 128)}
        if c.name == "swa":
            want = set(range(len(ratios) + 1))
        assert set(c.layers) == want, c.name
    assert [c.name for c in it.history] == ["c4", "c4_index", "c128"]
    assert [c.name for c in it.states] == [
        *("c4_state_a", "c4_state_b", "c4_index_state_a", "c4_index_state_b", "c128_state")
    ]
    assert [c.name for c in it.windows] == ["swa"]


def test_what_no_layer_has_is_left_out() -> None:
    assert [c.name for c in swa_c4_c128(layer_ratios=[0, 128]).components] == [
        *("c128", "c128_state", "swa")
    ]
    names = [c.name for c in swa_c4_c128(layer_ratios=[4]).components]
    assert names[:2] == ["c4", "c4_index"]
    assert not [n for n in names if "128" in n]


# --------------------------------------------------------------------------- history


@pytest.mark.parametrize(
    ("it", "page", "per_token", "gib"),
    [
        (flash(), 998_208, 3_899.25, (0.476, 3.808)),
        (flash(index_record="mxfp4"), 912_192, 3_563.25, (0.435, 3.480)),
        (pro(), 1_430_208, 5_586.75, (0.682, 5.456)),
        (pro(index_record="mxfp4"), 1_307_328, 5_106.75, (0.623, 4.987)),
    ],
    ids=["flash-fp8", "flash-fp4", "pro-fp8", "pro-fp4"],
)
def test_history(it: Layout, page: int, per_token: float, gib: tuple[float, float]) -> None:
    num_c4, num_c128 = len(part(it, "c4").layers), len(part(it, "c128").layers)
    index = 64 * (132 if part(it, "c4_index").slot_bytes == 132 else 68)
    assert page == num_c4 * (v4_page(64)[0] + index) + num_c128 * v4_page(2)[0]
    assert it.page_bytes() == page
    assert page / 256 == per_token
    at = [page * (tokens // 256) / GIB for tokens in (128 * KIB, 1024 * KIB)]
    assert [round(x, 3) for x in at] == list(gib)
    # Frames are whole multiples of 4096 bytes: less than half a percent more.
    assert it.frame_bytes() % 4096 == 0
    assert page <= it.frame_bytes() < page + 4096


@pytest.mark.parametrize(
    ("it", "per_token"),
    [
        (flash(), 3_850.25),
        (flash(index_record="mxfp4"), 3_514.25),
        (pro(), 5_511.4375),
        (pro(index_record="mxfp4"), 5_031.4375),
    ],
)
def test_history_without_padding(it: Layout, per_token: float) -> None:
    raw = sum(c.slot_bytes * c.slots_per_page * len(c.layers) for c in it.history)
    assert raw / 256 == per_token


def test_fp32_records_are_plain_rows() -> None:
    it = flash(record="fp32", index_record="fp32")
    for name, row in [("c4", 2048), ("c128", 2048), ("swa", 2048), ("c4_index", 512)]:
        c = part(it, name)
        assert (c.slot_bytes, c.dtype, c.planes, c.page_align) == (row, "float32", (), 1)


# --------------------------------------------------------------------------- tails


@pytest.mark.parametrize(("drafts", "small", "large"), [(0, 8, 128), (1, 16, 256), (8, 16, 256)])
def test_states_are_rings_of_fp32_rows(drafts: int, small: int, large: int) -> None:
    """A ring holds what is read and as many drafts, and is a power of two."""
    it = flash(max_draft=drafts)
    rows = {c.name: (c.slots_per_page, c.slot_bytes, c.dtype) for c in it.states}
    half, index = 2 * 512 * 4, 2 * 128 * 4  # value and score of one half of a row
    assert rows == {
        "c4_state_a": (small, half, "float32"),
        "c4_state_b": (small, half, "float32"),
        "c4_index_state_a": (small, index, "float32"),
        "c4_index_state_b": (small, index, "float32"),
        "c128_state": (large, 4_096, "float32"),
    }
    assert 2 * half == 8_192  # of one token of a compressor of ratio 4
    assert 2 * index == 2_048
    assert all(256 % c.slots_per_page == 0 for c in it.states)


@pytest.mark.parametrize(
    ("it", "swa", "a_half", "minimal", "seed"),
    [
        (flash, 3_219_840, 430_080, 3_649_920, 7_299_840),
        (pro, 4_567_680, 614_400, 5_182_080, 10_364_160),
    ],
    ids=["flash", "pro"],
)
def test_checkpoints(it: object, swa: int, a_half: int, minimal: int, seed: int) -> None:
    """At a page's end: one window page of every layer, and of four tokens the half that the next
    group reads again; nothing of ratio 128."""
    assert callable(it)
    small, whole = it(), it(tail="seed")
    num_c4, layers = len(part(small, "c4").layers), len(part(small, "swa").layers)
    assert swa == small.window_bytes() == layers * 128 * 584 + layers * 128
    assert a_half == num_c4 * 4 * (512 + 128) * 2 * 4 == num_c4 * 20_480
    assert minimal == swa + a_half
    assert seed == 2 * swa + 2 * a_half
    assert small.checkpoint_bytes() == minimal
    assert whole.checkpoint_bytes() == seed
    assert (small.tail_windows, whole.tail_windows) == (1, 2)
    assert (small.window_kept, whole.window_kept) == (128, 130)  # to the older page
    pieces = [name for name, *_ in whole.sections(Share.TAIL)]
    assert pieces.count("swa") == 2 * layers
    assert not [n for n in pieces if n.startswith("c128")]
    assert {n for n, *_ in small.sections(Share.TAIL)} == {"c4_state_a", "c4_index_state_a", "swa"}


def test_checkpoint_sections_lie_behind_one_another() -> None:
    for it in (flash(), flash(tail="seed"), flash(tail="seed", draft_layers=1, max_draft=4)):
        end = 0
        for name, layer, at, size in it.sections(Share.TAIL):
            c = part(it, name)
            assert layer in c.layers
            assert at == end
            assert size == (74_880 if name == "swa" else 4 * c.slot_bytes)
            end += size
        assert end == it.checkpoint_bytes()


def test_checkpoints_take_few_frames() -> None:
    """Flash: four frames of a page's size, 9 % of them unused."""
    it = flash()
    assert it.checkpoint_frames() == 4
    assert 1 - it.checkpoint_bytes() / (4 * it.frame_bytes()) == pytest.approx(0.09, abs=0.005)
    assert pro().checkpoint_frames() == 4
    assert flash(tail="seed").checkpoint_frames() == 8


def test_a_draft_layer_adds_one_window() -> None:
    """149,760 bytes for two pages."""
    more = (
        flash(draft_layers=1, tail="seed").checkpoint_bytes()
        - flash(tail="seed").checkpoint_bytes()
    )
    assert more == 2 * 74_880 == 149_760
    assert flash(draft_layers=1).page_bytes() == flash().page_bytes()


@pytest.mark.parametrize("it", [flash(), flash(tail="seed"), pro(max_draft=3)])
def test_a_live_tail_is_whole(it: Layout) -> None:
    num_c4, num_c128 = len(part(it, "c4").layers), len(part(it, "c128").layers)
    small, large = (16, 256) if it.max_draft else (8, 128)
    states = num_c4 * small * (8_192 + 2_048) + num_c128 * large * 4_096
    assert it.state_bytes() == states
    for windows in range(4):
        assert it.tail_bytes(windows) == states + windows * len(part(it, "swa").layers) * 74_880


def test_the_worst_state_of_ratio_128_fits_its_ring() -> None:
    """127 open rows a layer."""
    for it, worst in [(flash(), 10_403_840), (pro(), 16_125_952)]:
        c = part(it, "c128_state")
        assert len(c.layers) * 127 * 4_096 == worst
        assert c.slots_per_page * c.slot_bytes * len(c.layers) >= worst


def test_the_largest_tail_between_pages() -> None:
    """Two window pages, seven rows of ratio 4 and 127 of ratio 128: less than what a pause parks,
    which is whole rings."""
    for it, worst in [(flash(), 18_348_800), (pro(), 27_411_712)]:
        num_c4, num_c128 = len(part(it, "c4").layers), len(part(it, "c128").layers)
        row = sum(part(it, n).slot_bytes for n in ("c4_state_a", "c4_state_b"))
        index = sum(part(it, n).slot_bytes for n in ("c4_index_state_a", "c4_index_state_b"))
        open_rows = num_c128 * 127 * part(it, "c128_state").slot_bytes
        assert 2 * it.window_bytes() + num_c4 * 7 * (row + index) + open_rows == worst
        assert worst <= it.tail_bytes(2)


def test_windows_of_every_token_would_cost_far_more_than_history() -> None:
    for it, per_token in [(flash(), 29_054.25), (pro(), 41_271.75)]:
        history = (it.page_bytes() + 2 * it.window_bytes()) / 256
        assert history == per_token


def test_tails_weigh_several_pages() -> None:
    """Why checkpoints are kept sparsely."""
    weights = [
        tail.checkpoint_bytes() / tail.page_bytes()
        for tail in (pro(), flash(), pro(tail="seed"), flash(tail="seed"))
    ]
    assert [round(w, 1) for w in weights] == [3.6, 3.7, 7.2, 7.3]


# --------------------------------------------------------------------------- addressing


def read_back(position: int) -> dict[str, set[int]]:
    """Which earlier tokens and closed entries the query at ``position`` depends on, from what each
    mechanism reads: the sets of section 4's examples, without any formula of the layout."""
    closed4 = {j for j in range(position) if 4 * j + 3 < position}
    closed128 = {j for j in range(position) if 128 * j + 127 < position}
    return {
        "c4": closed4,
        "c128": closed128,
        "a": {t for t in range(position) if t // 4 == position // 4 - 1},
        "open4": {t for t in range(position) if t // 4 == position // 4},
        "open128": {t for t in range(position) if t // 128 == position // 128},
        "swa": {t for t in range(position) if position - t < 128},
    }


def test_the_published_examples() -> None:
    at = read_back(300)
    assert (len(at["c4"]), len(at["c128"])) == (75, 2)
    assert at["a"] == set(range(296, 300))
    assert not at["open4"]
    assert at["open128"] == set(range(256, 300))
    assert at["swa"] == set(range(173, 300))
    at = read_back(511)
    assert (len(at["c4"]), len(at["c128"])) == (127, 3)
    assert at["a"] == set(range(504, 508))
    assert at["open4"] == set(range(508, 511))
    assert at["open128"] == set(range(384, 511))
    assert at["swa"] == set(range(384, 511))


@pytest.mark.parametrize("drafts", [0, 3])
def test_rings_hold_what_is_read(drafts: int) -> None:
    """Wherever a sequence stands, whatever was rejected behind it: the rows that are still read
    are the last written of their slots."""
    it = flash(max_draft=drafts)
    small, large = (part(it, n).slots_per_page for n in ("c4_state_a", "c128_state"))
    for position in range(1101):
        at = read_back(position)
        for ring, rows in ((small, at["a"] | at["open4"]), (large, at["open128"])):
            last: dict[int, int] = {}
            for t in range(position + drafts):  # the drafts too have been written
                last[t % ring] = t
            assert all(last[t % ring] == t for t in rows), position


@pytest.mark.parametrize("tail", ["minimal", "seed"])
def test_checkpoints_hold_what_is_read(tail: str) -> None:
    """At every page's end."""
    it = flash(tail=tail)
    for position in range(256, 1101, 256):
        at = read_back(position)
        kept = {}
        for c in it.tails:
            assert c.checkpoint_slots is not None
            kept[c.name] = set(range(position - c.checkpoint_slots, position))
            # In a state, those are the last slots of the ring.
            slots = [t % c.slots_per_page for t in sorted(kept[c.name])]
            if c.window is None:
                assert slots == list(range(c.slots_per_page - len(slots), c.slots_per_page))
        assert at["a"] == kept["c4_state_a"] == kept["c4_index_state_a"]
        assert at["open4"] <= kept["c4_state_b"]
        assert at["open128"] == kept["c128_state"] == set()
        assert at["swa"] <= kept["swa"]
        assert len(kept["swa"]) == (128 if tail == "minimal" else 256)


def test_slots_against_the_closed_groups_one_by_one() -> None:
    """Every position up to 1100, with pages in no order."""
    it = flash()
    rng = np.random.default_rng(1)
    pages, windows = rng.permutation(50)[:5].astype(np.int32), rng.permutation(90)[:9].astype("i4")
    positions = np.arange(1101, dtype=np.int32)
    got = it.slots(positions, pages[positions // 256], windows[positions // 128])
    assert set(got) == {"c4", "c4_index", "c128", "swa"}
    entries = {4: 0, 128: 0}
    for t in range(1101):
        for name, ratio in (("c4", 4), ("c128", 128)):
            if t % ratio == ratio - 1:
                per_page = 256 // ratio
                j = entries[ratio] % per_page
                want = int(pages[entries[ratio] // per_page]) * per_page + j
                entries[ratio] += 1
            else:
                want = -1
            assert got[name][t] == want, (name, t)
        assert got["swa"][t] == int(windows[t // 128]) * 128 + t - t // 128 * 128
    assert np.array_equal(got["c4"], got["c4_index"])
    assert entries == {4: 275, 128: 8}
    # The closing tokens that end page 0 of everything.
    assert [int(got["c4"][t]) - int(pages[0]) * 64 for t in (3, 7, 127, 255)] == [0, 1, 31, 63]
    assert [int(got["c128"][t]) - int(pages[0]) * 2 for t in (127, 255)] == [0, 1]


def test_an_entry_lies_where_its_closing_token_does() -> None:
    """slot(4j + 3) // 4 and slot(128j + 127) // 128, with a token's own slot of 256 a page."""
    it, pages = flash(), np.array([7, 3, 11, 0], dtype=np.int32)
    positions = np.arange(1024, dtype=np.int32)
    own = pages[positions // 256] * 256 + positions % 256
    got = it.slots(positions, pages[positions // 256])
    for name, ratio in (("c4", 4), ("c128", 128)):
        closing = positions % ratio == ratio - 1
        assert np.array_equal(got[name][closing], own[closing] // ratio)
        assert (got[name][~closing] == -1).all()
    assert "swa" not in got  # whoever asks for it names window pages


def test_padding_and_freed_windows_have_no_slot() -> None:
    it = flash()
    nothing = np.full(3, -1, dtype=np.int32)
    positions = np.array([3, 127, 255], dtype=np.int32)
    got = it.slots(positions, nothing, nothing)
    assert all((slots == -1).all() for slots in got.values())


# --------------------------------------------------------------------------- fingerprints


BASE = {
    "layer_ratios": FLASH,
    "record": "fp8",
    "index_record": "fp8",
    "head_dim": 512,
    "rope_dim": 64,
    "index_dim": 128,
    "window": 128,
    "page_tokens": 256,
    "tail": "minimal",
    "draft_layers": 0,
    "max_draft": 0,
}


def made(**changes: object) -> Layout:
    return swa_c4_c128(**{**BASE, **changes})  # type: ignore[arg-type]


PLAIN = {"record": "fp32", "index_record": "fp32"}


@pytest.mark.parametrize(
    ("field", "other", "besides"),
    [
        ("layer_ratios", PRO, {}),
        ("layer_ratios", (0, 0, *(128, 4) * 20, 4), {}),
        ("layer_ratios", (*FLASH, 0), {}),
        ("record", "fp32", {}),
        ("index_record", "mxfp4", {}),
        ("index_record", "fp32", {}),
        ("head_dim", 256, PLAIN),
        ("rope_dim", 32, PLAIN),
        ("index_dim", 64, PLAIN),
        ("window", 64, {}),
        ("page_tokens", 128, {}),
        ("page_tokens", 512, {}),
        ("tail", "seed", {}),
        ("draft_layers", 1, {}),
    ],
)
def test_every_argument_is_in_the_fingerprint(
    field: str, other: object, besides: dict[str, object]
) -> None:
    """f, another, and f again."""
    prints = [made(**{**besides, **more}).fingerprint for more in ({}, {field: other}, {})]
    assert prints[0] == prints[2] != prints[1]


def test_fingerprints_differ_pairwise() -> None:
    records = product(("fp8", "fp32"), ("fp8", "mxfp4", "fp32"), ("minimal", "seed"), (0, 1))
    prints = {
        made(record=r, index_record=i, tail=t, draft_layers=d).fingerprint for r, i, t, d in records
    }
    assert len(prints) == 24


def test_a_draft_layer_is_not_one_more_layer() -> None:
    """The same components, but another meaning."""
    assert made(layer_ratios=(*FLASH, 0)).components == made(draft_layers=1).components
    assert made(layer_ratios=(*FLASH, 0)).fingerprint != made(draft_layers=1).fingerprint


def test_drafts_leave_pages_and_checkpoints_as_they_are() -> None:
    """The rings grow, what is stored of them does not."""
    one, other = made(), made(max_draft=7)
    assert one.fingerprint == other.fingerprint
    assert one.state_bytes() < other.state_bytes()
    assert list(one.sections()) == list(other.sections())
    assert list(one.sections(Share.TAIL)) == list(other.sections(Share.TAIL))


def test_fingerprint_is_the_same_in_every_process() -> None:
    """Written down: another value would orphan everything that is on disk."""
    assert made().fingerprint.hex() == "25ac1401d9c7f83528df8a404ef12f9c"


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_ratios": ()}, "layer_ratios"),
        ({"layer_ratios": (0, 0)}, "layer_ratios"),
        ({"layer_ratios": (4, 16)}, "layer_ratios"),
        ({"layer_ratios": ("4",)}, "layer_ratios"),
        ({"record": "fp8_584"}, "record"),
        ({"record": "mxfp4"}, "record"),
        ({"index_record": "bf16"}, "index_record"),
        ({"head_dim": 256}, "record"),
        ({"rope_dim": 32}, "record"),
        ({"index_dim": 64}, "index_record"),
        ({**PLAIN, "rope_dim": 0}, "rope_dim"),
        ({**PLAIN, "rope_dim": 3}, "rope_dim"),
        ({**PLAIN, "rope_dim": 256}, "index_dim"),
        ({**PLAIN, "head_dim": 32}, "head_dim"),
        ({"window": 0}, "window"),
        ({"window": 100}, "window"),
        ({"window": 512}, "window"),
        ({"page_tokens": 64, "window": 64}, "page_tokens"),
        ({"page_tokens": 384}, "page_tokens"),
        ({"page_tokens": 1024}, "page_tokens"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"tail": "whole"}, "tail"),
        ({"draft_layers": -1}, "draft_layers"),
        ({"max_draft": -1}, "max_draft"),
        ({"max_draft": 129}, "max_draft"),
        ({"max_draft": 1.5}, "max_draft"),
        ({"max_draft": "1"}, "max_draft"),
        ({"draft_layers": 1.5}, "draft_layers"),
    ],
)
def test_refused_by_name(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"\b{says}\b"):
        made(**changes)


def tail(**fields: object) -> Component:
    base: dict[str, object] = {
        "name": "t",
        "share": Share.TAIL,
        "tokens_per_slot": 1,
        "slots_per_page": 8,
        "slot_bytes": 4,
        "layers": (0,),
        "dtype": "uint8",
    }
    return Component(**{**base, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpoint_slots": -1},
        {"checkpoint_slots": 9},
        {"checkpoint_slots": 4, "planes": (3, 1)},
        {"checkpoint_slots": 4, "page_align": 64},
        {"checkpoint_slots": 8, "share": Share.HISTORY},
        {"checkpoint_slots": 12, "window": 9},
        {"checkpoint_slots": 8, "window": 10},
        {"checkpoint_slots": 0, "window": 2},
    ],
)
def test_checkpoint_slots_that_make_no_sense(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"'t'.*checkpoint_slots"):
        tail(**fields)


def test_a_ring_ends_where_a_page_does() -> None:
    history = tail(name="h", share=Share.HISTORY, slots_per_page=16)
    ring = tail(slots_per_page=12, checkpoint_slots=4)
    with pytest.raises(ConfigError, match="ring of 12 slots"):
        Layout(name="x", page_tokens=16, components=(history, ring))
    whole = Layout(
        name="x", page_tokens=16, components=(history, replace(ring, checkpoint_slots=None))
    )
    assert whole.checkpoint_bytes() == whole.state_bytes() == 48


def test_parts_of_a_ring() -> None:
    """A part of a plain ring is its end; all of one may have planes."""
    assert tail(checkpoint_slots=3).kept_bytes == 12
    assert tail(checkpoint_slots=0).kept_bytes == 0
    assert tail(checkpoint_slots=8, planes=(3, 1), page_align=64).kept_bytes == 64
    assert tail().kept_bytes == 32
    assert tail(window=9).kept_bytes == 32
