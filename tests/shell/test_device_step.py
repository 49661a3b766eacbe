"""A step on the device: padding rows, static buffers, layer views, layouts with tails."""

from collections.abc import Iterator

import pytest
import torch

import kvtier
from kvtier import ConfigError
from kvtier.testing import ManualTransfer
from tests.shell.kit import LAYOUT, PAGE, config, feed, prompt, tailed

FIELDS = ("input_ids", "positions", "cu_seqlens_q", "query_lens", "context_lens", "kv_lens")


@pytest.fixture
def real() -> Iterator[kvtier.Cache]:
    with kvtier.Cache(LAYOUT, config(), model="m", device="cpu") as cache:
        yield cache


def test_tensors_say_what_the_arrays_say(cache: kvtier.Cache) -> None:
    with cache.lease([1]) as one, cache.lease([1]) as two:
        feed(cache, one, prompt(5))
        with cache.step([(one, [7]), (two, prompt(6, 1))]) as step:
            device = step.to_device()
        for name in FIELDS:
            assert getattr(device, name).tolist() == getattr(step, name).tolist(), name
        assert device.block_table.tolist() == step.block_table.tolist()
        assert device.slot_mapping["latent"].tolist() == step.slot_mapping["latent"].tolist()
        assert (device.max_query_len, device.max_kv_len) == (6, 6)
        for name in ("input_ids", "positions"):
            assert getattr(device, name).dtype == torch.int64
        assert device.slot_mapping["latent"].dtype == torch.int64
        for name in (*FIELDS[2:], "block_table", "state_slots", "window_table"):
            assert getattr(device, name).dtype == torch.int32, name


@pytest.mark.parametrize("buffered", [False, True])
def test_padding_rows_ask_and_write_nothing(cache: kvtier.Cache, buffered: bool) -> None:
    """A4: query 1, slot -1, table -1, KV length 0."""
    buffers = cache.buffers(max_batch=6, max_tokens=12, max_pages=4) if buffered else None
    with cache.lease([1]) as one, cache.step([(one, prompt(6))]) as step:
        device = step.to_device(buffers, pad_to=4)
    assert device.query_lens.tolist() == [6, 1, 1, 1]
    assert device.cu_seqlens_q.tolist() == [0, 6, 7, 8, 9]
    assert device.kv_lens.tolist() == [6, 0, 0, 0]
    assert device.context_lens.tolist() == [0, 0, 0, 0]
    assert device.slot_mapping["latent"].tolist()[6:] == [-1, -1, -1]
    assert device.input_ids.shape == device.positions.shape == (9,)
    assert (device.block_table[1:] == -1).all()
    assert device.block_table.shape == (4, 4 if buffered else 2)
    assert device.block_table[0, :2].tolist() == step.block_table[0].tolist()
    assert (device.block_table[0, 2:] == -1).all()


@pytest.mark.parametrize("buffered", [False, True])
def test_an_empty_step_can_be_padded(cache: kvtier.Cache, buffered: bool) -> None:
    """A data-parallel rank without requests still runs the model."""
    buffers = cache.buffers(max_batch=2, max_tokens=2, max_pages=1) if buffered else None
    with cache.step([]) as step:
        assert step.to_device().input_ids.shape == (0,)
        device = step.to_device(buffers, pad_to=2)
    assert device.cu_seqlens_q.tolist() == [0, 1, 2]
    assert device.kv_lens.tolist() == [0, 0]
    assert device.slot_mapping["latent"].tolist() == [-1, -1]


def test_buffers_stay_where_they_are_and_forget(cache: kvtier.Cache) -> None:
    """What a CUDA graph needs: equal addresses for equal shapes, nothing stale in them."""
    buffers = cache.buffers(max_batch=4, max_tokens=16, max_pages=8)
    with cache.lease([1]) as long, cache.lease([1]) as short:
        feed(cache, long, prompt(20))
        feed(cache, short, prompt(1, 1))
        with cache.step([(long, [1]), (short, [2])]) as step:
            first = step.to_device(buffers, pad_to=2)
            assert first.block_table[0].tolist() == [*step.block_table[0].tolist(), -1, -1]
        with cache.step([(short, [3])]) as step:
            second = step.to_device(buffers, pad_to=2)
            assert second.input_ids.tolist() == [3, 0]
            assert second.block_table[0].tolist() == [step.block_table[0, 0], *[-1] * 7]
            assert (second.block_table[1] == -1).all()
            assert second.kv_lens.tolist() == [3, 0]
    for name in (*FIELDS, "block_table"):
        a, b = getattr(first, name), getattr(second, name)
        assert a.data_ptr() == b.data_ptr(), name
        assert a.shape == b.shape, name
        assert a.stride() == b.stride(), name
    a, b = first.slot_mapping["latent"], second.slot_mapping["latent"]
    assert a.data_ptr() == b.data_ptr()


def test_after_the_step_is_too_late(cache: kvtier.Cache) -> None:
    """What is written to its pages then is kept by nobody, or overwrites what others keep."""
    buffers = cache.buffers(max_batch=1, max_tokens=8, max_pages=4)
    with cache.lease([1]) as lease:
        with cache.step([(lease, prompt(5))]) as step:
            pass
        for options in ({}, {"buffers": buffers}, {"pad_to": 2}):
            with pytest.raises(kvtier.LeaseError, match=r"to_device\(\) belongs inside"):
                step.to_device(**options)  # type: ignore[arg-type]


def test_what_does_not_fit_is_named(cache: kvtier.Cache) -> None:
    small = cache.buffers(max_batch=1, max_tokens=2, max_pages=1)
    with cache.lease([1]) as one, cache.lease([1]) as two:
        with cache.step([(one, [1]), (two, [1])]) as step:
            with pytest.raises(ConfigError, match="pad_to=1 is less than the batch of 2"):
                step.to_device(pad_to=1)
            with pytest.raises(ConfigError, match="max_batch=2, the buffers have 1"):
                step.to_device(small)
        for chunk, says in ((prompt(3), "max_tokens=3, the buffers have 2"), ([1], "max_pages=2")):
            with cache.step([(one, chunk)]) as step, pytest.raises(ConfigError, match=says):
                step.to_device(small)
    for name in ("max_batch", "max_tokens", "max_pages"):
        sizes = {"max_batch": 1, "max_tokens": 1, "max_pages": 1, name: 0}
        with pytest.raises(ConfigError, match=f"{name} must be an int of at least 1"):
            cache.buffers(**sizes)


def test_layers_are_the_pool_and_apart(real: kvtier.Cache) -> None:
    """AT-4.5's ground: slot i of the mapping is row i, in that layer only."""
    with real.lease([1]) as lease:
        with real.step([(lease, prompt(6))]) as step:
            device = step.to_device()
            slots = device.slot_mapping["latent"]
            for layer in range(2):
                rows = device.layer(layer).rows("latent")
                rows[slots] = torch.full((6, 8), layer + 1.0) * device.input_ids[:, None]
        where = torch.from_numpy(lease.slot_mapping(0, 6)["latent"]).long()
        for layer in range(2):
            rows = device.layer(layer).rows("latent")
            expected = torch.arange(6.0)[:, None] * (layer + 1) * torch.ones(8)
            assert torch.equal(rows[where], expected)
            others = torch.ones(len(rows), dtype=torch.bool)
            others[where] = False
            assert not rows[others].any()
        for layer in (2, -1):
            with pytest.raises(ConfigError, match=f"no layer {layer}: its layers are 0 to 1"):
                device.layer(layer)
        with pytest.raises(ConfigError, match="'keys'"):
            device.layer(0).rows("keys")


def test_a_transfer_without_a_pool_says_so(cache: kvtier.Cache) -> None:
    with cache.step([]) as step, pytest.raises(ConfigError, match="no device pool"):
        step.to_device().layer(0)


def test_windows_states_and_strides_come_through() -> None:
    """A layout with tails: state slots are private, window tables cover what is read, a component
    with a stride has a slot for every second token only."""
    layout = tailed(window=6, window_page=4)
    transfer = ManualTransfer()
    sizes = kvtier.CacheConfig(
        gpu_bytes="80KiB", cpu_bytes="1MiB", max_leases=4, checkpoints=kvtier.Dense()
    )
    with kvtier.Cache(layout, sizes, model="m", transfer=transfer) as cache:
        one, two = cache.lease([1] * 20), cache.lease([2] * 20)
        transfer.finish_all()
        with cache.step([(one, [1] * 11), (two, [2] * 3)]) as step:
            assert len(set(step.state_slots.tolist())) == 2
            assert min(step.state_slots) >= 0
            assert step.window_table.shape == (2, 3)
            used = step.window_table[0].tolist() + step.window_table[1].tolist()[:1]
            assert -1 not in used
            assert len(set(used)) == 4
            assert step.window_table[1].tolist()[1:] == [-1, -1]
            full, half = step.slot_mapping["full"], step.slot_mapping["half"]
            for i, position in enumerate(step.positions.tolist()):
                assert half[i] == (full[i] // 2 if position % 2 else -1)
            assert [(c.row, c.position) for c in step.captures] == [(0, 4), (0, 8)]
            device = step.to_device(pad_to=3)
            assert device.state_slots.tolist() == [*step.state_slots.tolist(), -1]
            assert device.window_table.tolist() == [*step.window_table.tolist(), [-1] * 3]
            assert device.captures == step.captures
            buffers = cache.buffers(max_batch=4, max_tokens=20, max_pages=5)
            static = step.to_device(buffers, pad_to=3)
            assert static.window_table.shape == (3, 5)
            assert static.window_table[:, :3].tolist() == device.window_table.tolist()
            assert static.slot_mapping["half"].tolist() == [*half.tolist(), -1]
        with cache.step([(one, [1])]) as step:  # tokens 6..11 are read: page 0 was freed
            assert step.window_table[0].tolist()[0] == -1
            assert -1 not in step.window_table[0].tolist()[1:]
        one.release()
        two.release()
        cache.check()
        transfer.finish_all()


def test_steps_do_not_change_afterwards(cache: kvtier.Cache) -> None:
    """The arrays are the step's own: a later step does not show in them."""
    with cache.lease([1]) as lease:
        with cache.step([(lease, prompt(PAGE))]) as step:
            before = {name: getattr(step, name).tolist() for name in (*FIELDS, "block_table")}
        feed(cache, lease, [1])
        assert before == {name: getattr(step, name).tolist() for name in before}
