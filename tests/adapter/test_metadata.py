"""AT-4.12: hand-made metadata is checked against itself before anything is written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier import LayoutMismatch, TokenError
from kvtier.layouts import mla
from kvtier_deepseek import attach, layout_for, validate_step
from tests.adapter.fake_step import FakeCache, FakeSequence, FakeStep
from tests.adapter.models import tiny_model

PAGE = 4


def made() -> FakeStep:
    """Two requests: 3 new tokens after 6, and 2 after none."""
    cache = FakeCache(mla(layers=1, latent_dim=4, rope_dim=2, dtype="float32", page_tokens=PAGE))
    seq = FakeSequence()
    step = cache.step((seq, range(6)))
    step.commit()
    return cache.step((seq, [1, 2, 3]), (FakeSequence(), [4, 5]))


def check(step: Any) -> None:
    validate_step(step, page_tokens=PAGE)


def test_the_example_of_two_prompts() -> None:
    """Pages 10 and 20 of 4 slots: 2 tokens and 1, neither with context."""
    step = made()
    step.input_ids = np.array([7, 8, 9], np.int32)
    step.positions = np.array([0, 1, 0], np.int32)
    step.cu_seqlens_q = np.array([0, 2, 3], np.int32)
    step.query_lens = np.array([2, 1], np.int32)
    step.context_lens = np.zeros(2, np.int32)
    step.kv_lens = np.array([2, 1], np.int32)
    step.block_table = np.array([[10], [20]], np.int32)
    step.slot_mapping = {"latent": np.array([40, 41, 80], np.int32)}
    check(step)


def test_accepts_what_the_arithmetic_gives_and_an_empty_batch() -> None:
    check(made())
    cache = made().cache
    check(cache.step())


def test_accepts_slots_that_are_not_to_be_written() -> None:
    step = made()
    step.slot_mapping["latent"][1] = -1
    check(step)


def setting(name: str, index: Any, value: int) -> Callable[[Any], None]:
    def change(step: Any) -> None:
        array = step.slot_mapping["latent"] if name == "slot_mapping" else getattr(step, name)
        array[index] = value

    return change


def longer(step: Any) -> None:
    step.kv_lens = step.context_lens - 1


def short_table(step: Any) -> None:
    step.block_table = step.block_table[:, :2]


def twice(step: Any) -> None:
    """Both rows on the same pages: every slot lies in its own row's pages, yet two collide."""
    step.block_table[1] = step.block_table[0]
    step.context_lens[1], step.kv_lens[1] = 6, 8
    step.positions[3:] = [6, 7]
    step.slot_mapping["latent"][3:] = step.slot_mapping["latent"][:2]


def wrong_type(name: str) -> Callable[[Any], None]:
    def change(step: Any) -> None:
        setattr(step, name, getattr(step, name).astype(np.int64))

    return change


def wrong_shape(name: str) -> Callable[[Any], None]:
    def change(step: Any) -> None:
        setattr(step, name, getattr(step, name)[:-1])

    return change


def no_component(step: Any) -> None:
    step.slot_mapping = {"c4": step.slot_mapping["latent"]}


def wrong_slot_type(step: Any) -> None:
    step.slot_mapping = {"latent": step.slot_mapping["latent"].astype(np.int64)}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (setting("cu_seqlens_q", 1, 2), "cu_seqlens_q"),
        (setting("cu_seqlens_q", -1, 4), "cu_seqlens_q"),
        (setting("query_lens", 0, 4), "cu_seqlens_q"),
        (setting("kv_lens", 0, 2), "row 0: kv_lens"),
        (setting("kv_lens", 1, 3), "row 1: kv_lens"),
        (setting("context_lens", 0, 9), "row 0: kv_lens"),
        (longer, "kv_lens"),
        (setting("positions", 0, 7), "row 0: positions"),
        (setting("positions", 3, 3), "row 1: positions"),
        (short_table, "row 0: block_table"),
        (setting("block_table", (0, 2), -1), "row 0: block_table"),
        (setting("slot_mapping", 0, 0), "row 0: slot_mapping"),
        (setting("slot_mapping", 4, -2), "row 1: slot_mapping"),
        (twice, "written twice"),
        (no_component, "no component 'latent'"),
        (wrong_slot_type, "slot_mapping.* must be int32"),
        *[(wrong_type(n), f"{n} must be int32") for n in ("positions", "block_table", "kv_lens")],
        *[(wrong_shape(n), f"{n} has shape") for n in ("positions", "kv_lens", "cu_seqlens_q")],
        (wrong_shape("block_table"), "block_table has shape"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_rejects(change: Callable[[Any], None], names: str) -> None:
    step = made()
    if names == "row 0: slot_mapping":
        step.block_table[0, :3] = [5, 6, 7]
        names = "row 0: slot_mapping"
    change(step)
    with pytest.raises(LayoutMismatch, match=names):
        check(step)


def test_the_adapter_checks_what_it_did_not_make_itself() -> None:
    model = tiny_model("v3")
    cache = FakeCache(layout_for(model.config, page_tokens=PAGE, dtype="float32"))
    with attach(model, cache) as adapter:
        step = cache.step((FakeSequence(), [1, 2, 3]))
        step.slot_mapping["latent"][0] = step.slot_mapping["latent"][1]
        with pytest.raises(LayoutMismatch, match="slot_mapping"):
            adapter(step)
    assert cache.layers[0]._rows.isnan().all()


def test_pages_past_the_pool_and_negative_ids() -> None:
    step = made()
    largest = int(step.block_table.max())
    validate_step(step, page_tokens=PAGE, num_pages=largest + 1)
    with pytest.raises(LayoutMismatch, match=f"names page {largest} of a pool of {largest}"):
        validate_step(step, page_tokens=PAGE, num_pages=largest)
    step.input_ids[1] = -2
    with pytest.raises(TokenError, match="-2"):
        check(step)


def test_the_adapter_knows_its_pool_and_its_vocabulary() -> None:
    model = tiny_model("v3")
    cache = FakeCache(layout_for(model.config, page_tokens=PAGE, dtype="float32"), pages=8)
    with attach(model, cache) as adapter:
        step = cache.step((FakeSequence(), [1, 2, 3]))
        step.block_table[0, 0] = 8
        step.slot_mapping["latent"][:] = [32, 33, 34]
        with pytest.raises(LayoutMismatch, match="page 8 of a pool of 8"):
            adapter(step)
        for id in (-1, int(model.config.vocab_size)):
            with pytest.raises(TokenError, match=str(id)):
                adapter(cache.step((FakeSequence(), [1, id, 3])))
    assert cache.layers[0]._rows.isnan().all()


def test_negative_ids_are_refused_by_a_check_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of arrays is left out for steps that kvtier made."""
    model = tiny_model("v3")
    cache = FakeCache(layout_for(model.config, page_tokens=PAGE, dtype="float32"))
    with attach(model, cache) as adapter:
        monkeypatch.setattr(type(adapter._family), "check_step", lambda *_: None)
        with pytest.raises(TokenError, match="-7"):
            adapter(cache.step((FakeSequence(), [1, -7, 3])))
