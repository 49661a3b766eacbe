"""Hand-made metadata of a layout with tails is checked before anything is written."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier import LayoutMismatch, TokenError
from kvtier_deepseek import attach
from kvtier_deepseek.metadata import validate_tail_step
from tests.adapter.test_v4_attach import small
from tests.adapter.v4_kit import open_cache, stream

ARRAYS = (
    "input_ids",
    "positions",
    "cu_seqlens_q",
    "query_lens",
    "context_lens",
    "kv_lens",
    "block_table",
    "window_table",
    "state_slots",
)


@pytest.fixture(scope="module")
def made() -> Any:
    """(layout, step) of two requests: 70 new tokens after 250, and 5 after none; windows of 64."""
    cache = open_cache(small())
    with cache, cache.lease([]) as one, cache.lease([]) as two:
        with cache.step([(one, stream()[:250])]):
            pass
        with cache.step([(one, stream()[250:320]), (two, stream(1)[:5])]) as step:
            return cache.layout, step


def copied(step: Any) -> Any:
    copy = SimpleNamespace(**{name: getattr(step, name).copy() for name in ARRAYS})
    copy.slot_mapping = {name: slots.copy() for name, slots in step.slot_mapping.items()}
    return copy


def test_real_steps_pass(made: Any) -> None:
    layout, step = made
    validate_tail_step(step, layout)
    validate_tail_step(step, layout, num_pages=100, num_windows=1000, num_states=3)
    blank = copied(step)
    for slots in blank.slot_mapping.values():
        slots[::2] = -1  # not to be written
    validate_tail_step(blank, layout)


def put(name: str, index: Any, value: int) -> Callable[[Any], None]:
    def change(step: Any) -> None:
        array = step.slot_mapping[name] if name in step.slot_mapping else getattr(step, name)
        array[index] = value

    return change


def reshaped(name: str, shape: Any) -> Callable[[Any], None]:
    def change(step: Any) -> None:
        setattr(step, name, getattr(step, name)[shape])

    return change


def without(step: Any) -> None:
    del step.slot_mapping["swa"]


def wide(step: Any) -> None:
    step.window_table = step.window_table.astype(np.int64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without, "no component 'swa'"),
        (put("query_lens", 0, 69), "cu_seqlens_q"),
        (put("context_lens", 1, 4), "row 1: kv_lens"),
        (put("positions", 3, 9), "row 0: positions"),
        (put("block_table", (0, 1), -1), "row 0: block_table needs 2 pages"),
        (put("block_table", (1, 0), 99), "row 1: block_table names page 99"),
        # Token 253 of the first request closes no group; 255 does.
        (put("c4", 3, 7), r"slot_mapping\['c4'\] puts position 253"),
        (put("c4", 5, 7), r"row 0: slot_mapping\['c4'\] puts position 255 into slot 7"),
        (put("c4_index", 73, 7), r"row 1: slot_mapping\['c4_index'\] puts position 3"),
        (put("c128", 5, 0), r"slot_mapping\['c128'\] puts position 255"),
        (put("swa", 70, 1), r"row 1: slot_mapping\['swa'\] puts position 0 into slot 1"),
        (put("window_table", (0, 2), -1), r"row 0: window_table lacks pages of 2..4"),
        (put("window_table", (1, 0), -1), r"row 1: window_table lacks pages of 0..0"),
        (put("window_table", (0, 4), 999), "row 0: window_table names page 999"),
        (reshaped("window_table", slice(1)), "window_table is int32"),
        (reshaped("window_table", (slice(None), slice(4))), "row 0: window_table lacks"),
        (wide, "window_table is int64"),
        (put("state_slots", 0, -1), "state_slots"),
        (put("state_slots", 1, 9), "state_slots names 9 of a pool of 3"),
        (reshaped("state_slots", slice(1)), r"state_slots is int32 \(1,\)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_rejects(made: Any, change: Callable[[Any], None], says: str) -> None:
    layout, step = made
    wrong = copied(step)
    change(wrong)
    with pytest.raises(LayoutMismatch, match=says):
        validate_tail_step(wrong, layout, num_pages=50, num_windows=500, num_states=3)


def test_two_rows_on_one_state(made: Any) -> None:
    layout, step = made
    wrong = copied(step)
    wrong.state_slots[:] = wrong.state_slots[0]
    with pytest.raises(LayoutMismatch, match="one of its own for each row"):
        validate_tail_step(wrong, layout)


def test_negative_ids(made: Any) -> None:
    layout, step = made
    wrong = copied(step)
    wrong.input_ids[3] = -4
    with pytest.raises(TokenError, match="-4"):
        validate_tail_step(wrong, layout)


def test_the_adapter_checks_steps_that_kvtier_did_not_make() -> None:
    model = small()
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        with cache.step([(lease, [1, 2, 3, 4])]) as step:
            mine = copied(step)
            mine.captures = ()
            mine.to_device = step.to_device
            native = adapter(step)
            assert np.array_equal(adapter(mine), native)
            mine.state_slots = np.array([7], np.int32)
            with pytest.raises(LayoutMismatch, match="state_slots names 7 of a pool of 3"):
                adapter(mine)
