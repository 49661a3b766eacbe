"""Models with windowed MLA layers compute through pages what HF computes with a windowed mask.

What no lease owns is NaN after every step, freed window pages too.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier import LayoutMismatch
from kvtier_deepseek import attach, generate, layout_for
from kvtier_deepseek.mla.config import window_layers
from tests.adapter.models import full_logits, hf_greedy, random_tokens, tiny_model
from tests.adapter.swa_kit import (
    PAGE,
    any_course,
    cut,
    expected,
    feed,
    near,
    open_cache,
    run,
    swa_model,
)

SPLIT = [13, 1, 1, 9, 2, *[1] * 19]
WINDOWS = [1, 2, PAGE, PAGE + 1, 20]


@pytest.mark.parametrize("variant", ["v3", "v3-half", "v2", "v2-lite"])
@pytest.mark.parametrize("window", WINDOWS)
def test_logits(variant: str, window: int) -> None:
    """AT-3.1: prefill, chunks and decode of (full, windowed, full)."""
    model, tokens = swa_model(window, variant=variant), random_tokens(45)
    want = expected(model, tokens)
    assert (want - full_logits(model, tokens)).abs().max() > 0.1  # windows matter here
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        near(run(cache, adapter, lease, tokens, SPLIT), want)
        assert adapter.report.layers == 3
        assert set(adapter.report.backends) >= {"mla_sparse", "write_window", "mla_absorbed"}


@pytest.mark.parametrize("kinds", [(1, 0, 1), (0, 1, 1, 0), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("max_absorbed", [0, 3, 1000])
def test_other_orders_of_layers(kinds: tuple[int, ...], max_absorbed: int) -> None:
    """The first layer may have a window; full layers take either form beside it."""
    model, tokens = swa_model(5, kinds), random_tokens(30)
    with (
        open_cache(model) as cache,
        attach(model, cache, max_absorbed=max_absorbed) as adapter,
        cache.lease([]) as lease,
    ):
        near(run(cache, adapter, lease, tokens, [9, 1, 2, 17, 1]), expected(model, tokens))
        form = "absorbed" if max_absorbed else "materialised"
        assert adapter.report.forms == {form: 1}


@pytest.mark.parametrize("window", [41, 64])
def test_a_window_as_long_as_the_sequence_is_no_window(window: int) -> None:
    """E6"""
    model, tokens = swa_model(window), random_tokens(41)
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        near(run(cache, adapter, lease, tokens, [20, 20, 1]), full_logits(model, tokens))


@pytest.mark.parametrize("window", [2, 5, PAGE, PAGE + 1])
def test_chunks_of_any_size(window: int) -> None:
    """AT-3.4: chunks of 1, W - 1, W and W + 1 tokens, and the whole at once."""
    model, tokens = swa_model(window), random_tokens(37)
    want = expected(model, tokens)
    for chunk in {1, max(1, window - 1), window, window + 1, 37}:
        with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
            near(run(cache, adapter, lease, tokens, cut(37, chunk)), want)


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_verify_steps(queries: int) -> None:
    """AT-3.5: several query tokens of each request equal as many single steps."""
    model = swa_model(6)
    streams = [random_tokens(40, 1), random_tokens(40, 2)]
    wants = [expected(model, s) for s in streams]
    with (
        open_cache(model) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as a,
        cache.lease([]) as b,
    ):
        feed(cache, adapter, (a, streams[0][:11]), (b, streams[1][:3]))
        while max(a.num_tokens, b.num_tokens) + queries <= 40:
            at = a.num_tokens, b.num_tokens
            got = feed(
                cache,
                adapter,
                *((x, s[x.num_tokens :][:queries]) for x, s in zip((a, b), streams, strict=True)),
            )
            for logits, want, start in zip(got, wants, at, strict=True):
                near(logits, want[start : start + queries])


def test_mixed_batches_equal_each_request_alone() -> None:
    """A prefill chunk, decode and a verify step in one call, with padding rows behind."""
    model = swa_model(6)
    streams = [random_tokens(n, seed) for seed, n in enumerate((50, 30, 30))]
    wants = [expected(model, s) for s in streams]
    with open_cache(model) as cache, attach(model, cache) as adapter:
        a, b, c = (cache.lease([]) for _ in range(3))
        feed(cache, adapter, (b, streams[1][:17]), (c, streams[2][:9]))
        for i in range(3):
            work = [
                (a, streams[0][a.num_tokens :][:12]),
                (b, streams[1][b.num_tokens :][:1]),
                (c, streams[2][c.num_tokens :][:4]),
            ]
            starts = [lease.num_tokens for lease, _ in work]
            got = feed(cache, adapter, *work, pad_to=3 + i)
            for logits, want, start in zip(got, wants, starts, strict=True):
                near(logits, want[start : start + len(logits)])
        for lease in (a, b, c):
            lease.release()


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), window=st.sampled_from([1, 2, 3, 7, 9, 20]))
def test_any_course_of_several_requests(data: st.DataObject, window: int) -> None:
    """Rejected drafts, forks and pauses in between; what nobody owns is NaN all along."""
    model = swa_model(window)
    streams = [random_tokens(60, seed) for seed in (1, 2, 3)]
    wants = [expected(model, s) for s in streams]
    with (
        open_cache(model, gpu=40, cpu=60, max_leases=4) as cache,
        attach(model, cache) as adapter,
    ):
        any_course(cache, adapter, data, streams, wants)


def test_greedy_tokens() -> None:
    model, prompt = swa_model(7), random_tokens(21, 3)
    want = list(prompt)
    for _ in range(12):
        want.append(int(expected(model, want)[-1].argmax()))
    with open_cache(model) as cache, attach(model, cache) as adapter:
        for _ in range(2):  # the second time from the prompt's pages
            got = generate(adapter, cache, prompt, 12, chunk=6)
            assert list(got.tokens) == want[len(prompt) :]
        assert got.computed == len(prompt) - 16
    assert want[len(prompt) :] != hf_greedy(model, prompt, 12)


def test_a_projection_that_cannot_be_absorbed() -> None:
    model, tokens = tiny_model("v3", num_hidden_layers=3), random_tokens(33)
    model.config.window_attn_skip_freq, model.config.sliding_window = [0, 1, 0], 6
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *args: 1.5 * args[2])
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        near(run(cache, adapter, lease, tokens, [11, 1, 1, 9, 11]), expected(model, tokens))
        assert "mla_sparse_materialised" in adapter.report.backends
        assert "mla_sparse" not in adapter.report.backends


def test_weights_changed_in_place_take_effect() -> None:
    model, tokens = tiny_model("v3", num_hidden_layers=3), random_tokens(20)
    model.config.window_attn_skip_freq, model.config.sliding_window = [0, 1, 0], 6
    with open_cache(model) as cache, attach(model, cache) as adapter:
        for _ in range(2):
            with torch.no_grad():
                model.model.layers[1].self_attn.kv_b_proj.weight.mul_(1.3)
            want = expected(model, tokens)
            with cache.lease([]) as lease:
                near(run(cache, adapter, lease, tokens, [12, 8]), want)


def test_a_bfloat16_model() -> None:
    """No further from the float32 model than twice HF's own bfloat16 pass."""
    exact = tiny_model("v3", num_hidden_layers=3, first_k_dense_replace=3)  # no routing to flip
    exact.config.window_attn_skip_freq, exact.config.sliding_window = [0, 1, 0], 6
    tokens = random_tokens(40)
    want = expected(exact, tokens)
    model = exact.to(torch.bfloat16)
    native = (expected(model, tokens).float() - want).abs().max().item()
    layout = layout_for(model.config, page_tokens=PAGE, dtype=torch.bfloat16, window_record="dense")
    with (
        open_cache(model, layout=layout) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as lease,
    ):
        got = run(cache, adapter, lease, tokens, [17, 1, 1, 21]).float()
    assert (got - want).abs().max().item() <= 2 * native


# ------------------------------------------------------------------ packed rows

PACKED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16}


def rounded_latent(x: Tensor) -> Tensor:
    """What a packed row keeps of (..., 512), written down once more with torch's own casts."""
    groups = x.bfloat16().float().unflatten(-1, (4, 128))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@contextmanager
def rounding(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """HF's own code, with what layers with windows cache rounded as packed rows are."""
    name = "apply_rotary_pos_emb_interleave"
    home = sys.modules[type(model).__module__]
    plain, inside = getattr(home, name), []

    def turned(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        query, key = plain(query, key, *rest, **options)
        return query, key.bfloat16().float() if inside else key

    monkeypatch.setattr(home, name, turned)
    hooks = []
    for i in window_layers(model.config):
        layer = model.model.layers[i].self_attn
        hooks += [
            layer.kv_a_layernorm.register_forward_hook(lambda *args: rounded_latent(args[2])),
            layer.register_forward_pre_hook(lambda *_: inside.append(1)),
            layer.register_forward_hook(lambda *_: inside.clear()),
        ]
    yield
    for hook in hooks:
        hook.remove()
    monkeypatch.setattr(home, name, plain)


def test_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2, AT-3.7, 3.8: the same as HF with rows rounded alike, and not the same as plain HF."""
    model, tokens = swa_model(9, **PACKED), random_tokens(40)
    assert "kv_a_layernorm" in inspect.getsource(type(model.model.layers[1].self_attn).forward)
    plain = expected(model, tokens)
    with rounding(model, monkeypatch):
        want = expected(model, tokens)
    layout = layout_for(model.config, page_tokens=PAGE, dtype=torch.float32)
    assert [c.dtype for c in layout.components] == ["float32", "uint8"]
    with (
        open_cache(model, layout=layout) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as lease,
    ):
        got = run(cache, adapter, lease, tokens, SPLIT)
        latent, packed = lease.slot_mapping(0, 40)["latent"], adapter._family.layers[1]
        assert latent.shape == (40,)
        assert type(packed).__name__ == "WindowAttention"
    # A value on the edge between two codes may fall to either side: most logits are equal.
    off = (got - want).abs().amax(-1)
    assert off.median() <= 2e-5
    assert off.quantile(0.9) <= 0.1 * (plain - want).abs().amax(-1).median()


def test_full_layers_keep_their_rows_whatever_windows_are_stored_as() -> None:
    """AT-3.8: rows of the layers before and after a window, as values of their own type."""
    model, tokens = swa_model(9, **PACKED), random_tokens(24)
    rows = {}
    for record in ("dense", "fp8"):
        layout = layout_for(
            model.config, page_tokens=PAGE, dtype=torch.float32, window_record=record
        )
        with (
            open_cache(model, layout=layout) as cache,
            attach(model, cache) as adapter,
            cache.lease([]) as lease,
        ):
            run(cache, adapter, lease, tokens, [24])
            slots = torch.from_numpy(lease.slot_mapping(0, 24)["latent"].astype("int64"))
            pool: Any = cache._pool
            rows[record] = [pool.rows("latent", layer)[slots].clone() for layer in (0, 2)]
    assert torch.equal(rows["dense"][0], rows["fp8"][0])
    assert rows["dense"][1].dtype == rows["fp8"][1].dtype == torch.float32
    # Behind a packed layer values are those of a rounded window, and no coarser themselves.
    assert not torch.equal(rows["dense"][1], rows["fp8"][1])
    assert len(rows["fp8"][1][0, :512].unique()) > 400


# ------------------------------------------------------------------ configurations and caches


def test_layer_types_say_the_same() -> None:
    """F4"""
    model, tokens = tiny_model("v3", num_hidden_layers=3), random_tokens(30)
    model.config.sliding_window = 6
    model.config.window_attn_skip_freq = [0, 1, 0]
    wanted = layout_for(model.config, dtype=torch.float32, window_record="dense")
    want = expected(model, tokens)
    model.config.window_attn_skip_freq = None
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    assert layout_for(model.config, dtype=torch.float32, window_record="dense") == wanted
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        near(run(cache, adapter, lease, tokens, [12, 1, 17]), want)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sliding_window": 7}, "window"),
        ({"window_attn_skip_freq": [0, 0, 1]}, "layers"),
        ({"window_attn_skip_freq": [1, 1, 0]}, "layers"),
        ({"window_attn_skip_freq": None, "sliding_window": None}, "'mla'"),
    ],
    ids=str,
)
def test_a_cache_of_other_windows_is_refused(change: dict[str, Any], says: str) -> None:
    model = tiny_model("v3", num_hidden_layers=3)
    model.config.window_attn_skip_freq, model.config.sliding_window = [0, 1, 0], 6
    with open_cache(model) as cache:
        for name, value in change.items():
            setattr(model.config, name, value)
        with pytest.raises(LayoutMismatch, match=says):
            attach(model, cache)


def test_a_cache_without_windows_is_refused() -> None:
    """Also where the sizes are none that packed rows have: nothing is said of records."""
    model = tiny_model("v3", num_hidden_layers=3)
    layout = layout_for(model.config, page_tokens=PAGE, dtype=torch.float32)
    with open_cache(model, layout=layout) as cache:
        model.config.window_attn_skip_freq, model.config.sliding_window = [0, 1, 0], 6
        with pytest.raises(LayoutMismatch, match=r"window_layers is \(\), the model has \(1,\)"):
            attach(model, cache)


def test_every_component_is_read() -> None:
    model, tokens = swa_model(6), random_tokens(30)
    for broken in ("latent", "window_latent"):
        with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
            feed(cache, adapter, (lease, tokens[:20]))
            pool: Any = cache._pool
            for (name, _), storage in pool._storage.items():
                if name == broken:
                    values = storage.view(torch.float32)
                    values.copy_(torch.where(values.isnan(), values, values + 1.0))
            (got,) = feed(cache, adapter, (lease, tokens[20:21]))
        assert (got[0] - expected(model, tokens[:21])[20]).abs().max() > 1e-3


def test_native_calls_are_as_ever() -> None:
    """Without a step the model is HF's own, which knows nothing of windows."""
    model, tokens = swa_model(6), random_tokens(20)
    before = full_logits(model, tokens)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        assert torch.equal(full_logits(model, tokens), before)
        adapter.warmup()
    assert torch.equal(full_logits(model, tokens), before)
