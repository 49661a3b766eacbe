"""What a model computes through pages equals what it computes without any cache.

Sessions mix prefill, chunks and decode of two requests in packed steps over scattered pages full
of NaN; no test here stops at prefill, where most faults of paged attention do not show.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier_deepseek import Adapter, attach, layout_for
from tests.adapter.fake_step import FakeCache, FakeSequence
from tests.adapter.models import VARIANTS, full_logits, hf_greedy, random_tokens, tiny_model

PAGE = 4
LOGITS = 5e-6
# (new tokens of request A, of request B): prefill, chunks, decode and several tokens, both ways.
SESSION = [(13, 0), (9, 20), (1, 7), (1, 1), (17, 1), (2, 2), (3, 3), (4, 1), (0, 5)]
LENGTHS = tuple(sum(n) for n in zip(*SESSION, strict=True))


def cache_for(model: Any, **options: Any) -> FakeCache:
    dtype = next(model.parameters()).dtype
    return FakeCache(layout_for(model.config, page_tokens=PAGE, dtype=dtype), **options)


def play(adapter: Adapter, cache: FakeCache, streams: list[list[int]]) -> Iterator[tuple[Any, ...]]:
    """Run SESSION; yields (step, sequences, logits of all tokens) before each commit."""
    sequences = [FakeSequence() for _ in streams]
    for counts in SESSION:
        work = [
            (seq, stream[seq.num_tokens : seq.num_tokens + n])
            for seq, stream, n in zip(sequences, streams, counts, strict=True)
            if n
        ]
        step = cache.step(*work)
        yield step, sequences, adapter.forward(step, all_logits=True)
        step.commit()


def worst_error(adapter: Adapter, cache: FakeCache, streams: list[list[int]]) -> float:
    expected = [full_logits(adapter._model, stream) for stream in streams]
    worst = 0.0
    for step, sequences, logits in play(adapter, cache, streams):
        at = 0
        for seq, new in step.work:
            want = expected[sequences.index(seq)][seq.num_tokens : seq.num_tokens + len(new)]
            worst = max(worst, (logits[at : at + len(new)] - want).abs().max().item())
            at += len(new)
    return worst


def two_streams() -> list[list[int]]:
    return [random_tokens(n, seed) for seed, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("yarn", [False, True], ids=["plain", "yarn"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["torch", "sdpa"])
def test_logits(variant: str, yarn: bool, backend: Any) -> None:
    """AT-1.1, 4.5, 4.13, both forms in one session."""
    model = tiny_model(variant, yarn=yarn)
    cache = cache_for(model)
    with attach(model, cache, backend=backend, max_absorbed=3) as adapter:
        assert worst_error(adapter, cache, two_streams()) <= LOGITS


@pytest.mark.parametrize("max_absorbed", [0, 1000], ids=["materialised", "absorbed"])
def test_either_form_alone(max_absorbed: int) -> None:
    """AT-1.8: the choice of form changes cost, not results."""
    model = tiny_model("v3", yarn=True)
    cache = cache_for(model)
    with attach(model, cache, max_absorbed=max_absorbed) as adapter:
        assert worst_error(adapter, cache, two_streams()) <= LOGITS
        form = "absorbed" if max_absorbed else "materialised"
        assert adapter.report.forms == {form: 1}


def test_projections_with_biases() -> None:
    model = tiny_model("v3", attention_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.uniform_(-0.5, 0.5)
    cache = cache_for(model)
    with attach(model, cache, max_absorbed=3) as adapter:
        assert worst_error(adapter, cache, two_streams()) <= LOGITS


def test_inference_mode_and_back() -> None:
    """Pages written under inference mode are read and written outside it, and the other way."""
    model = tiny_model("v3")
    tokens = random_tokens(9)
    expected = full_logits(model, tokens)
    cache, seq = cache_for(model), FakeSequence()
    with attach(model, cache) as adapter:
        for i, token in enumerate(tokens):
            step = cache.step((seq, [token]))
            with torch.inference_mode(i % 2 == 0):
                logits = adapter(step)
            step.commit()
            torch.testing.assert_close(logits[0], expected[i], atol=LOGITS, rtol=0)


def test_context_longer_than_the_workspace() -> None:
    """AT-2.6 in little: 45 rows of context in parts of 4."""
    model = tiny_model("v3")
    cache = cache_for(model)
    with attach(model, cache, workspace_bytes=22_000, max_absorbed=0) as adapter:
        assert adapter.max_rows == PAGE
        assert worst_error(adapter, cache, two_streams()) <= LOGITS
        assert "mla_materialised_whole" not in adapter.report.backends


def test_27_layers_on_one_cache() -> None:
    """AT-4.5: a cache without a layer dimension would pass with prefill only, or with one layer."""
    model = tiny_model("v2-lite", num_hidden_layers=27)
    for layer in model.model.layers:  # keep 27 random layers from saturating
        layer.self_attn.o_proj.weight.data.mul_(0.3)
        for parameter in layer.mlp.parameters():
            parameter.data.mul_(0.5)
    cache = cache_for(model)
    with attach(model, cache, max_absorbed=3) as adapter:
        streams = two_streams()
        scale = full_logits(model, streams[0]).abs().max().item()
        assert worst_error(adapter, cache, streams) <= LOGITS * max(1.0, scale)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_of_two_interleaved_requests(variant: str) -> None:
    """AT-4.13: 64 tokens each, equal to HF's own ``generate``."""
    model = tiny_model(variant, yarn=True)
    prompts = [random_tokens(21, 3), random_tokens(PAGE * 2, 4)]
    expected = [hf_greedy(model, prompt, 64) for prompt in prompts]
    cache = cache_for(model)
    sequences, got = [FakeSequence(), FakeSequence()], [[], []]
    with attach(model, cache) as adapter:
        feed = [list(prompt) for prompt in prompts]
        for turn in range(200):
            # Now one request, now the other, now both; prompts in chunks of at most 5.
            rows = [r for r in ([0], [1], [0, 1])[turn % 3] if len(got[r]) < 64]
            if not rows:
                continue
            chunks = {r: feed[r][:5] for r in rows}
            step = cache.step(*[(sequences[r], chunks[r]) for r in rows])
            logits = adapter(step)
            step.commit()
            for row, r in enumerate(rows):
                feed[r] = feed[r][len(chunks[r]) :]
                if not feed[r]:
                    got[r].append(int(logits[row].argmax()))
                    feed[r] = [got[r][-1]]
    assert got == expected


class Recorder:
    """Inputs and outputs of every attention layer, by hooks."""

    def __init__(self, model: Any) -> None:
        self.calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.model.layers]
        self.hooks = [
            layer.self_attn.register_forward_hook(self.hook(i), with_kwargs=True)
            for i, layer in enumerate(model.model.layers)
        ]

    def hook(self, layer: int) -> Any:
        def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.calls[layer].append((hidden[0].clone(), output[0][0].clone()))

        return record

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def native_attention(model: Any, layer: int, hidden: Tensor) -> Tensor:
    """The layer's own eager attention over one whole sequence of hidden states."""
    n = hidden.shape[0]
    positions = model.model.rotary_emb(hidden[None], torch.arange(n)[None])
    mask = torch.full((n, n), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
    out = model.model.layers[layer].self_attn(
        hidden_states=hidden[None], position_embeddings=positions, attention_mask=mask[None, None]
    )
    result: Tensor = out[0][0]
    return result


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_absorbed", [0, 3, 1000])
def test_attention_outputs(
    variant: str, dtype: torch.dtype, limit: float, max_absorbed: int
) -> None:
    """AT-4.13: each layer alone, fed what it was fed, against HF's eager attention."""
    model = tiny_model(variant, dtype=dtype)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.5)  # outputs of about 1
    cache = cache_for(model)
    recorder = Recorder(model)
    with attach(model, cache, max_absorbed=max_absorbed) as adapter:
        owners = []
        for step, sequences, _ in play(adapter, cache, two_streams()):
            for seq, new in step.work:
                owners += [sequences.index(seq)] * len(new)
    recorder.remove()
    for layer, calls in enumerate(recorder.calls):
        hidden, out = (torch.cat(parts) for parts in zip(*calls, strict=True))
        for request in (0, 1):
            mine = torch.tensor([owner == request for owner in owners])
            want = native_attention(model, layer, hidden[mine])
            assert 0.3 < want.abs().max() < 3.0
            assert (out[mine] - want).abs().max().item() <= limit


@pytest.mark.parametrize("variant", VARIANTS)
def test_stored_rows(variant: str) -> None:
    """AT-1.3: [norm(latent) ; rope(key)] by the model's own submodules, bit for bit."""
    model = tiny_model(variant)
    cache = cache_for(model)
    recorder = Recorder(model)
    seq, tokens = FakeSequence(), random_tokens(11)
    with attach(model, cache) as adapter:
        step = cache.step((seq, tokens))
        adapter(step)
        step.commit()
    recorder.remove()
    stored = []
    for layer, calls in enumerate(recorder.calls):
        attention = model.model.layers[layer].self_attn
        hidden = calls[0][0][None]
        with torch.no_grad():
            latent, key = attention.kv_a_proj_with_mqa(hidden).split([16, 4], dim=-1)
            latent = attention.kv_a_layernorm(latent)[0]
            rotary = model.model.rotary_emb(hidden, torch.arange(11)[None])
        rows = cache.rows_of(seq, layer)
        assert torch.equal(rows[:, :16], latent)
        assert torch.equal(rows[:, 16:], rotated(variant, key[0], rotary))
        stored.append(rows)
    assert not torch.equal(stored[0], stored[1])


def rotated(variant: str, key: Tensor, rotary: Any) -> Tensor:
    """Rope written out: which values make a pair, and where the pair's result goes."""
    if isinstance(rotary, Tensor):  # complex, (1, n, pairs): adjacent in, adjacent out
        pairs = torch.view_as_complex(key.reshape(-1, 2, 2))
        return torch.view_as_real(pairs * rotary[0]).flatten(1)
    cos, sin = rotary[0][0, :, :2], rotary[1][0, :, :2]
    first, second = (key[:, 0::2], key[:, 1::2]) if variant == "v3" else (key[:, :2], key[:, 2:])
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def test_every_row_written_once_and_nothing_else() -> None:
    """AT-4.2, 4.4: a step writes exactly its own tokens' slots, in every layer."""
    model = tiny_model("v3")
    cache = cache_for(model)
    with attach(model, cache) as adapter:
        written: list[set[int]] = [set() for _ in cache.layers]
        for step, _, _ in play(adapter, cache, two_streams()):
            own = set(step.slot_mapping["latent"].tolist())
            for layer, seen in zip(cache.layers, written, strict=True):
                now = set((~layer._rows.isnan().any(-1)).nonzero().flatten().tolist())
                assert now - seen == own
                seen |= now
        assert all(len(seen) == sum(LENGTHS) for seen in written)


def test_poison_does_not_matter() -> None:
    """AT-4.2: a pool of NaN, of zeros and of huge values give the same bits."""
    model = tiny_model("v3")
    runs = []
    for poison in (torch.nan, 0.0, 3e38):
        cache = cache_for(model, poison=poison)
        with attach(model, cache, max_absorbed=3) as adapter:
            runs.append([logits for _, _, logits in play(adapter, cache, two_streams())])
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a, b)


def test_every_layer_reads_its_own_pages_in_decode() -> None:
    """AT-4.1, 4.5: a change in one layer's pages changes that layer's output and none before."""
    model = tiny_model("v3", num_hidden_layers=3)
    tokens = random_tokens(12)
    outputs = {}
    for broken in (None, 0, 1, 2):
        cache, seq = cache_for(model), FakeSequence()
        with attach(model, cache) as adapter:
            step = cache.step((seq, tokens[:11]))
            adapter(step)
            step.commit()
            if broken is not None:
                cache.layers[broken]._rows[seq.pages[1] * PAGE].add_(1.0)
            for layer in cache.layers:
                layer.reads = 0
            recorder = Recorder(model)
            adapter(cache.step((seq, tokens[11:])))
            recorder.remove()
        # The first one's size is asked as well: hand-made steps are checked against the pool.
        assert [layer.reads for layer in cache.layers] == [2, 1, 1]
        assert adapter.report.layers == 3
        outputs[broken] = [calls[0][1] for calls in recorder.calls]
    for broken in (0, 1, 2):
        same = [torch.equal(a, b) for a, b in zip(outputs[None], outputs[broken], strict=True)]
        assert same[:broken] == [True] * broken
        assert same[broken] is False


@pytest.mark.parametrize("variant", ["v2", "v3"])
def test_packed_requests_do_not_see_each_other(variant: str) -> None:
    """AT-4.6, 1.5: packed prompts equal each alone, in any order, at their own positions."""
    model = tiny_model(variant)
    prompts = [random_tokens(n, n) for n in (9, 1, PAGE, 14)]
    alone, rows = [], []
    cache = cache_for(model)
    with attach(model, cache) as adapter:
        for prompt in prompts:
            seq = FakeSequence()
            step = cache.step((seq, prompt))
            alone.append(adapter(step)[0])
            step.commit()
            rows.append(cache.rows_of(seq, 1))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        cache = cache_for(model, seed=order[0])
        sequences = [FakeSequence() for _ in order]
        with attach(model, cache) as adapter:
            step = cache.step(*[(s, prompts[r]) for s, r in zip(sequences, order, strict=True)])
            logits = adapter(step)
            step.commit()
        for row, r in enumerate(order):
            torch.testing.assert_close(logits[row], alone[r], atol=LOGITS, rtol=0)
            torch.testing.assert_close(
                cache.rows_of(sequences[row], 1), rows[r], atol=LOGITS, rtol=0
            )


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_lengths_around_a_page(length: int) -> None:
    """AT-4.9: prefill of that length, and the first decodes after it."""
    model = tiny_model("v3")
    tokens = random_tokens(length + 3, length)
    expected = full_logits(model, tokens)
    cache, seq = cache_for(model), FakeSequence()
    with attach(model, cache) as adapter:
        for new in (tokens[:length], *[[t] for t in tokens[length:]]):
            step = cache.step((seq, new))
            logits = adapter(step)
            step.commit()
            want = expected[seq.num_tokens - 1]
            torch.testing.assert_close(logits[0], want, atol=LOGITS, rtol=0)


def test_padding_rows_change_nothing() -> None:
    model = tiny_model("v3")
    tokens = random_tokens(10)
    results = []
    for pad_to in (None, 2, 7):
        cache, a, b = cache_for(model), FakeSequence(), FakeSequence()
        with attach(model, cache) as adapter:
            step = cache.step((a, tokens[:6]), (b, tokens[3:7]))
            adapter(step)
            step.commit()
            results.append(adapter.forward(cache.step((a, [5]), (b, [9])), pad_to=pad_to))
        written = (~cache.layers[0]._rows.isnan().any(-1)).sum().item()
        assert written == 12  # slot -1 wrote nothing
    assert results[0].shape == (2, 97)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=LOGITS, rtol=0)


def test_an_empty_step() -> None:
    model = tiny_model("v3")
    cache = cache_for(model)
    with attach(model, cache) as adapter:
        assert adapter(cache.step()).shape == (0, 97)
        assert adapter.forward(cache.step(), all_logits=True).shape == (0, 97)


@pytest.mark.parametrize(
    ("variant", "fields", "scale"),
    [
        ("v3", {}, 0.0721688),
        ("v2-lite", {"mscale_all_dim": 0.707, "mscale": 0.707}, 0.114721),
        ("v2", {"mscale_all_dim": 0.707, "mscale": 0.707}, 0.114721),
        ("v3", {"mscale_all_dim": 1.0, "mscale": 1.0}, 0.135234),
    ],
)
def test_softmax_scale_of_the_released_models(
    variant: str, fields: dict[str, float], scale: float
) -> None:
    """AT-1.4: 192^-0.5 with yarn's factor; taken from the module, so here only read."""
    model = tiny_model(
        variant,
        yarn=bool(fields),
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_hidden_layers=1,
    )
    if fields:
        parameters = {**model.config.rope_parameters, **fields}
        module = type(model.model.layers[0].self_attn)
        model.config.rope_parameters = parameters
        attention = module(model.config, 0)
    else:
        attention = model.model.layers[0].self_attn
    assert attention.scaling == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize("max_absorbed", [0, 1000])
def test_the_modules_scale_is_used_as_it_is(max_absorbed: int) -> None:
    """AT-1.4: whatever the number, both forms use the one that HF's attention uses."""
    model = tiny_model("v3")
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.7123
    cache = cache_for(model)
    with attach(model, cache, max_absorbed=max_absorbed) as adapter:
        assert worst_error(adapter, cache, two_streams()) <= LOGITS


def test_form_by_query_count_and_what_the_report_says() -> None:
    """AT-1.8"""
    model = tiny_model("v3")
    cache = cache_for(model)
    a, b = FakeSequence(), FakeSequence()
    with attach(model, cache) as adapter:
        limit = adapter.max_absorbed
        step = cache.step((a, random_tokens(limit)), (b, random_tokens(limit + 1)))
        adapter(step)
        step.commit()
        assert adapter.report.forms == {"absorbed": 1, "materialised": 1}
        assert adapter.report.backends == {
            "write_rows": "torch",
            "mla_absorbed": "torch",
            "mla_materialised_whole": "sdpa",
        }
        adapter(cache.step((a, [1]), (b, [2])))
        assert adapter.report.forms == {"absorbed": 2}
        assert adapter.report.tokens == 2


def test_break_even_of_the_released_models() -> None:
    from kvtier.kernels import HeadDims
    from kvtier_deepseek.mla.threshold import absorb_limit

    assert absorb_limit(HeadDims(heads=128, latent=512, rope=64, nope=128, value=128)) == 128
