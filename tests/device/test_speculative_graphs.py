"""Verify steps in a CUDA graph: several tokens of each request, of which some are rejected.

As in ``test_graphs``: requests join, leave, change rows and cross ends between replays, and what
nobody owns is NaN.  Without a GPU the same steps run in the interpreter, or on the references.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvtier import Cache, ConfigError, Step
from kvtier_deepseek import NGram, Request, attach, generate, layout_for, verify
from tests.adapter.models import random_tokens, tiny_model
from tests.adapter.v4_models import v4_model
from tests.device import test_graphs as decoding
from tests.device.test_graphs import DEVICE, GPU, MLA, NothingIsAsked, as_on_a_gpu, held
from tests.shell.v4_kit import sized

QUERIES, ROWS, PAGES = 4, 3, 4
ROUNDS: list[tuple[tuple[int, int], ...]] = [
    ((0, 4), (1, 1), (2, 0)),
    ((2, 3), (0, 2)),
    (),
    ((4, 1), (3, 4), (1, 3)),
    ((3, 0),),
    ((1, 4), (4, 2), (0, 0)),
    ((0, 3), (2, 4), (3, 1)),
]
"""Of each step the requests, in the order of its rows, and how many of their tokens are right."""


def open_cache(kind: str, model: Any) -> Cache:
    options: dict[str, Any] = {"max_draft": QUERIES - 1}
    if kind == "v3":
        options["dtype"] = next(model.parameters()).dtype
    elif kind == "v4-plain":
        options |= decoding.PLAIN
    layout = layout_for(model.config, **options)
    config = sized(layout, gpu=24, cpu=0, max_leases=5)
    opened = Cache(layout, config, model="tiny", device=DEVICE)
    pool: Any = opened._pool
    pool.poison_all()
    return opened


@contextmanager
def session(kind: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """(cache, adapter, leases, their tokens), the prompts computed."""
    model = decoding.model_of(kind, dtype)
    with open_cache(kind, model) as cache, attach(model, cache) as adapter:
        page = cache.layout.page_tokens
        starts = [page - 3, page, 3, 2 * page - 1, page - 5]
        streams = [random_tokens(n + 4 * QUERIES, seed) for seed, n in enumerate(starts)]
        leases = [cache.lease([]) for _ in streams]
        for lease, tokens, n in zip(leases, streams, starts, strict=True):
            with cache.step([(lease, tokens[:n])]) as step:
                adapter(step)
        yield cache, adapter, leases, streams
        for lease in leases:
            lease.release()


def work(leases: list[Any], streams: list[list[int]], rows: Any) -> list[Any]:
    """As many right tokens as ``rows`` says, and wrong ones behind them."""
    out = []
    for i, right in rows:
        at = leases[i].num_tokens
        wrong = [(token + 7) % 97 for token in streams[i][at + right : at + QUERIES]]
        out.append((leases[i], [*streams[i][at : at + right], *wrong]))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", decoding.KINDS)
def test_replay_of_verify_steps_is_eager_speculative(kind: str) -> None:
    """F9: logits and every byte on the device, checkpoints too; a step of nothing but padding
    writes nothing."""
    dtype = torch.float32 if kind == "v4-plain" else torch.bfloat16
    with session(kind, dtype) as (cache, adapter, leases, streams):
        before = [s.clone() for s in held(cache)]
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES, queries=QUERIES)
        assert all(map(torch.equal, held(cache), before))
        captures = 0
        for rows in ROUNDS:
            with cache.step(work(leases, streams, rows)) as step:
                captures += len(step.captures)
                before = [s.clone() for s in held(cache)]
                logits = graph.replay(step).clone()
                assert logits.shape == (len(rows) * QUERIES, 97)
                after = [s.clone() for s in held(cache)]
                if not rows:
                    assert all(map(torch.equal, after, before))
                    continue
                restore(cache, before)
                assert torch.equal(logits, graph.eager(step))
                assert all(map(torch.equal, held(cache), after))
                restore(cache, before)
                plain = adapter.forward(step, all_logits=True)
                near = decoding.near_of(kind)
                torch.testing.assert_close(logits, plain, atol=near, rtol=near)
                restore(cache, after)
                assert not logits.isnan().any()
                for i, right in rows:
                    step.accept(leases[i], right)
        assert captures >= 1 or kind in ("v3", *decoding.INDEXED)


def restore(cache: Cache, saved: list[Tensor]) -> None:
    for storage, was in zip(held(cache), saved, strict=True):
        storage.copy_(was)


@pytest.mark.gpu
def test_text_of_replayed_verify_steps_speculative() -> None:
    """Three requests in one graph, guesses from their own text: what is decoded token by token."""
    model = decoding.model_of("v4-plain", torch.float32)
    text(model, "v4-plain", 40)


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_text_without_a_gpu_speculative() -> None:
    model = tiny_model("v3")
    text(model, "v3", 16)


@pytest.mark.parametrize("replayed", [True, False])
def test_a_verify_step_is_uploaded_once_speculative(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt, uploads = tiny_model("v3"), random_tokens(23, 1), []
    to_device = Step.to_device

    def noted(step: Step, *args: Any, **options: Any) -> Any:
        uploads.append(step)
        return to_device(step, *args, **options)

    with open_cache("v3", model) as cache, attach(model, cache) as adapter:
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES, queries=QUERIES)
        with cache.lease(prompt) as lease:
            with cache.step([(lease, prompt)]) as step:
                first = int(adapter(step)[0].argmax())
            request = Request(lease, [*prompt, first], len(prompt) + 20)
            monkeypatch.setattr(Step, "to_device", noted)
            for count in (1, 2, 3):
                verify(
                    adapter, cache, [request], NGram(), max_draft=QUERIES - 1,
                    graph=graph if replayed else None,
                )  # fmt: skip
                assert len(uploads) == count


def text(model: Any, kind: str, new: int) -> None:
    prompts = [random_tokens(n, 3 + n) for n in (5, 60, 23)]
    with open_cache(kind, model) as cache, attach(model, cache) as adapter:
        wanted = [generate(adapter, cache, prompt, new).tokens for prompt in prompts]
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES, queries=QUERIES)
        requests = []
        for prompt in prompts:
            lease = cache.lease(prompt)
            done = lease.ready.result()
            with cache.step([(lease, prompt[done:])]) as step:
                first = int(adapter(step)[0].argmax())
            requests.append(Request(lease, [*prompt, first], len(prompt) + new))
        while going := [r for r in requests if not r.done]:
            verify(adapter, cache, going, NGram(), max_draft=QUERIES - 1, graph=graph)
        for prompt, request, tokens in zip(prompts, requests, wanted, strict=True):
            assert tuple(request.tokens[len(prompt) :]) == tokens
            request.lease.release()
        assert sum(r.accepted for r in requests) > 0


@pytest.mark.skipif(GPU, reason="there is a GPU")
@pytest.mark.parametrize("kind", ["v3", pytest.param("v4", marks=pytest.mark.slow)])
def test_nothing_is_asked_in_a_verify_step_speculative(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a GPU, in the interpreter: a row of four tokens and one of padding, over a page's
    end."""
    model = tiny_model(**MLA).half() if kind == "v3" else v4_model((4, 128), seed=1)
    model.set_experts_implementation("batched_mm")
    with open_cache(kind, model) as cache, cache.lease([]) as lease:
        page = cache.layout.page_tokens
        with attach(model, cache) as adapter, cache.step([(lease, random_tokens(page - 2))]) as s:
            adapter(s)
        as_on_a_gpu(monkeypatch)
        with attach(model, cache) as adapter:
            graph = adapter.capture_decode(batch=2, pages=2, queries=QUERIES)
            for right in (1, QUERIES):
                with cache.step([(lease, [7, 8, 9, 10])]) as step:
                    before = [s.clone() for s in held(cache)]
                    device = graph.load(step)
                    assert device.input_ids.shape == (2 * QUERIES,)
                    with NothingIsAsked():
                        logits = adapter._run(step, device, graph._bound)
                    adapter._family.capture(step, device)
                    after = [s.clone() for s in held(cache)]
                    restore(cache, before)
                    assert torch.equal(adapter._run(step, device, None), logits)
                    assert all(map(torch.equal, held(cache), after))
                    restore(cache, before)
                    again = adapter.forward(step, all_logits=True)
                    torch.testing.assert_close(again, logits[:QUERIES], atol=2e-3, rtol=2e-3)
                    step.accept(lease, right)
            assert set(adapter.report.backends.values()) == {"triton"}


def test_verify_graphs_that_cannot_be_speculative() -> None:
    model = v4_model((4, 128), seed=1)
    with open_cache("v4", model) as cache, attach(model, cache) as adapter:
        for queries in (0, QUERIES + 1):
            with pytest.raises(ConfigError, match=f"queries={queries}"):
                adapter.capture_decode(batch=1, pages=1, queries=queries)
