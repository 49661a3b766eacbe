"""V3.2 through pages: what HF computes, and what a dense pass with the same selection does.

HF's eager pass has neither the Hadamard rotation nor fp8, as dense records have; its top-k is
``torch.topk``, which says nothing of ties: these tests have no ties where they compare with it.
What no lease owns is NaN after every step.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier_deepseek import attach, generate
from tests.adapter.models import full_logits, hf_greedy, random_tokens
from tests.adapter.swa_kit import any_course, cut, feed, near, run
from tests.adapter.v32_kit import LOGITS, new_model, open_cache, v32_model, with_selection

SPLIT = [13, 1, 1, 9, 2, *[1] * 19]
TOPK = 8


class Selections:
    """What every layer's index picks, as (tokens, tokens) bool by position, from the lists of slots
    that attention is handed."""

    def __init__(self, adapter: Any, lease: Any, tokens: int) -> None:
        layers = adapter._family.layers
        self.chosen = [torch.zeros(tokens, tokens, dtype=torch.bool) for _ in layers]
        self._lease = lease
        self._adapter = adapter

    def __enter__(self) -> "Selections":
        cls = type(self._adapter._family.layers[0])
        self._select = select = cls._select

        def listening(layer: Any, run: Any, *rest: Any) -> Tensor:
            slots: Tensor = select(layer, run, *rest)
            positions = run.step.positions.tolist()
            mine = self._lease.slot_mapping(0, self._lease.num_tokens + len(positions))["latent"]
            where = {int(slot): at for at, slot in enumerate(mine)}
            for at, row in zip(positions, slots.tolist(), strict=True):
                picked = [where[s] for s in row if s >= 0]
                assert picked == sorted(set(picked)) and max(picked) <= at
                self.chosen[layer.index][at, picked] = True
            return slots

        cls._select = listening  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        type(self._adapter._family.layers[0])._select = self._select  # type: ignore[method-assign]


@pytest.mark.parametrize("yarn", [False, True], ids=["plain", "yarn"])
@pytest.mark.parametrize("topk", [45, 4096])
def test_logits_where_everything_is_chosen(yarn: bool, topk: int) -> None:
    """F1: prefill, chunks and decode; as many chosen as there are, and more."""
    model, tokens = v32_model(yarn=yarn, index_topk=topk), random_tokens(45)
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        near(run(cache, adapter, lease, tokens, SPLIT), full_logits(model, tokens), LOGITS)
        assert adapter.report.layers == 2
        assert set(adapter.report.backends) == {
            "write_record latent",
            "write_record index",
            "index_query",
            "index_topk",
            "mla_sparse",
        }


@pytest.mark.parametrize("topk", [1, TOPK, 44])
@pytest.mark.parametrize("split", [SPLIT, [45], [1] * 45], ids=["mixed", "whole", "single"])
def test_logits_where_few_are_chosen(topk: int, split: list[int]) -> None:
    """E3, F1: HF's selection is the same one here, and a dense pass with ours agrees."""
    model, tokens = v32_model(index_topk=topk), random_tokens(45)
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        with Selections(adapter, lease, 45) as seen:
            got = run(cache, adapter, lease, tokens, split)
    counts = torch.arange(1, 46).clamp_max(topk)
    assert all(torch.equal(chosen.sum(1), counts) for chosen in seen.chosen)
    near(got, with_selection(model, tokens, seen.chosen), LOGITS)
    near(got, full_logits(model, tokens), LOGITS)
    if topk == TOPK:
        everything = full_logits(v32_model(), tokens)
        assert (got - everything).abs().max() > 0.1  # what is chosen matters here


def test_what_is_chosen_scores_highest() -> None:
    """E3: the selection of every layer, against scores of one dense float64 pass of its index."""
    model, tokens = v32_model(index_topk=TOPK), random_tokens(45)
    heard: list[tuple[Tensor, Tensor, Any]] = []
    hooks = [
        layer.self_attn.indexer.register_forward_pre_hook(lambda _, args: heard.append(args[:3]))
        for layer in model.model.layers
    ]
    full_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        with Selections(adapter, lease, 45) as seen:
            run(cache, adapter, lease, tokens, SPLIT)
    for layer, (hidden, latent, turns), chosen in zip(
        model.model.layers, heard, seen.chosen, strict=True
    ):
        scores = dense_scores(layer.self_attn.indexer, hidden[0], latent[0], turns)
        for at in range(TOPK, 45):
            mine = chosen[at, : at + 1]
            assert scores[at, : at + 1][mine].min() > scores[at, : at + 1][~mine].max() - 1e-6


@torch.no_grad()
def dense_scores(indexer: Any, hidden: Tensor, latent: Tensor, turns: Any) -> Tensor:
    """(tokens, tokens) float64, written down from the formula."""
    hidden, latent = hidden.double(), latent.double()
    cos, sin = (each[0].double()[:, None, : indexer.qk_rope_head_dim // 2] for each in turns)

    def turned(x: Tensor) -> Tensor:
        half = indexer.qk_rope_head_dim // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    query = (latent @ indexer.wq_b.weight.double().T).view(len(hidden), indexer.n_heads, -1)
    key = hidden @ indexer.wk.weight.double().T
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, correction=0)[:, None] + 1e-6).sqrt()
    key = key * indexer.k_norm.weight.double() + indexer.k_norm.bias.double()
    query, key = turned(query), turned(key[:, None])[:, 0]
    weights = hidden @ indexer.weights_proj.weight.double().T * indexer.n_heads**-0.5
    products = torch.einsum("qhd,kd->qhk", query, key) * indexer.head_dim**-0.5
    return torch.einsum("qhk,qh->qk", products.relu(), weights)


@pytest.mark.parametrize("topk", [TOPK, 4096])
def test_greedy_tokens(topk: int) -> None:
    """F2: 64 of them, computed and with a prompt that is in the cache."""
    model, prompt = v32_model(index_topk=topk), random_tokens(21, 3)
    want = hf_greedy(model, prompt, 64)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        for _ in range(2):
            got = generate(adapter, cache, prompt, 64, chunk=6)
            assert list(got.tokens) == want
        assert got.computed == len(prompt) - 16


@pytest.mark.parametrize("queries", [2, 5])
def test_several_query_tokens(queries: int) -> None:
    """Steps of several tokens of two requests at once, as when drafts are verified."""
    model = v32_model(index_topk=TOPK)
    streams = [random_tokens(40, 1), random_tokens(40, 2)]
    wants = [full_logits(model, s) for s in streams]
    with (
        open_cache(model) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as a,
        cache.lease([]) as b,
    ):
        feed(cache, adapter, (a, streams[0][:11]), (b, streams[1][:3]))
        while max(a.num_tokens, b.num_tokens) + queries <= 40:
            at = a.num_tokens, b.num_tokens
            work = [(x, s[x.num_tokens :][:queries]) for x, s in zip((a, b), streams, strict=True)]
            for logits, want, start in zip(feed(cache, adapter, *work), wants, at, strict=True):
                near(logits, want[start : start + queries], LOGITS)


def test_mixed_batches_equal_each_request_alone() -> None:
    """A prefill chunk, decode and a step of four tokens in one call, padding rows behind; some
    have fewer tokens than are chosen, some more."""
    model = v32_model(index_topk=TOPK)
    streams = [random_tokens(n, seed) for seed, n in enumerate((50, 30, 30))]
    wants = [full_logits(model, s) for s in streams]
    with open_cache(model) as cache, attach(model, cache) as adapter:
        a, b, c = (cache.lease([]) for _ in range(3))
        feed(cache, adapter, (b, streams[1][:17]), (c, streams[2][:2]))
        for i in range(3):
            work = [
                (a, streams[0][a.num_tokens :][:12]),
                (b, streams[1][b.num_tokens :][:1]),
                (c, streams[2][c.num_tokens :][:4]),
            ]
            starts = [lease.num_tokens for lease, _ in work]
            got = feed(cache, adapter, *work, pad_to=3 + i)
            for logits, want, start in zip(got, wants, starts, strict=True):
                near(logits, want[start : start + len(logits)], LOGITS)
        for lease in (a, b, c):
            lease.release()


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), topk=st.sampled_from([1, 3, TOPK, 20]))
def test_any_course_of_several_requests(data: st.DataObject, topk: int) -> None:
    """Rejected drafts, forks and pauses in between; what nobody owns is NaN all along."""
    model = v32_model(index_topk=topk)
    streams = [random_tokens(60, seed) for seed in (1, 2, 3)]
    wants = [full_logits(model, s) for s in streams]
    with (
        open_cache(model, gpu=40, cpu=60, max_leases=4, max_draft=13) as cache,
        attach(model, cache) as adapter,
    ):
        any_course(cache, adapter, data, streams, wants, LOGITS)


def test_ties_go_to_the_earlier_token() -> None:
    """An index that says nothing: every score is zero, and the first tokens are chosen."""
    model, tokens = new_model(index_topk=TOPK), random_tokens(30)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.indexer.weights_proj.weight.zero_()
    first = torch.ones(30, 30, dtype=torch.bool).tril()
    first[:, TOPK:] = False
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        got = run(cache, adapter, lease, tokens, [11, 1, 18])
    near(got, with_selection(model, tokens, [first, first]), LOGITS)


def test_a_projection_that_cannot_be_absorbed() -> None:
    model, tokens = new_model(index_topk=TOPK), random_tokens(33)
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *args: 1.5 * args[2])
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        near(run(cache, adapter, lease, tokens, cut(33, 11)), full_logits(model, tokens), LOGITS)
        assert {"mla_sparse", "mla_sparse_materialised"} <= set(adapter.report.backends)


def test_weights_changed_in_place_take_effect() -> None:
    model, tokens = new_model(index_topk=TOPK), random_tokens(20)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        for _ in range(2):
            attention = model.model.layers[1].self_attn
            with torch.no_grad():
                attention.kv_b_proj.weight.mul_(1.3)
                attention.indexer.weights_proj.weight.neg_()
            with cache.lease([]) as lease:
                got = run(cache, adapter, lease, tokens, [12, 8])
            near(got, full_logits(model, tokens), LOGITS)


def test_a_bfloat16_model() -> None:
    """No further from the float32 model than twice HF's own bfloat16 pass; the index's weights
    are projected in float32, as HF keeps them."""
    exact = new_model(first_k_dense_replace=2)  # no routing to flip
    tokens = random_tokens(40)
    want = full_logits(exact, tokens)
    model = exact.to(torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.float()
    native = (full_logits(model, tokens).float() - want).abs().max().item()
    with (
        open_cache(model, dtype=torch.bfloat16) as cache,
        attach(model, cache) as adapter,
        cache.lease([]) as lease,
    ):
        got = run(cache, adapter, lease, tokens, [17, 1, 1, 21]).float()
    assert (got - want).abs().max().item() <= 2 * native


def test_native_calls_are_as_ever() -> None:
    model, tokens = v32_model(index_topk=TOPK), random_tokens(20)
    before = full_logits(model, tokens)
    with open_cache(model) as cache, attach(model, cache) as adapter:
        assert torch.equal(full_logits(model, tokens), before)
        adapter.warmup()
    assert torch.equal(full_logits(model, tokens), before)
