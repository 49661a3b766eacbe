"""V4 models on the real cache: resume from every boundary of every tier, forks, pauses, spans.

torch's linear layers give other last bits for other numbers of rows, and packed records turn these
into other bytes; so where bits are claimed to be equal, the runs compared are cut at the same
points.  What nobody owns is NaN all along.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier import Cache, KVTierError, Lease, Span, Tier
from kvtier.kernels import RECORDS, norm_rope, write_records
from kvtier.layouts import swa_c4_c128
from kvtier_deepseek import Adapter, attach, generate
from kvtier_deepseek.v4.attention import V4Run
from tests.adapter.models import full_logits, random_tokens
from tests.adapter.v4_kit import (
    FP32,
    LOGITS,
    PAGE,
    expected,
    feed,
    held,
    model_of,
    near,
    open_cache,
    poison_free,
    run,
    stream,
)
from tests.shell.v4_kit import sized

FP8: dict[str, Any] = {}
CUTS = [256, 512, 539, 540, 541, 542]
"""Ends of chunks: both boundaries of the prompt, its end within a group, and decode."""
OTHER_CUTS = 2e-5
"""How far fp32 logits of a run cut at other points may lie apart: 1.03e-5 has been seen."""


def resume(
    cache: Cache, adapter: Adapter, tokens: list[int], start: int, cuts: list[int]
) -> tuple[Lease, dict[int, Tensor]]:
    """A lease that takes at most ``start`` tokens from the cache and computes up to each of
    ``cuts``: what it took must be all it could; the logits of each chunk by its end."""
    lease = cache.lease(tokens, max_reuse=start)
    assert lease.ready.result(timeout=300) == start
    poison_free(cache)
    logits = {}
    for stop in cuts:
        if stop > start:
            logits[stop] = feed(cache, adapter, (lease, tokens[lease.num_tokens : stop]))[0]
            poison_free(cache)
    return lease, logits


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(FP8, id="fp8"),
        pytest.param(FP32, id="fp32"),
        pytest.param({"tail": "seed", "index_record": "mxfp4"}, id="seed", marks=pytest.mark.slow),
    ],
)
def test_resume_from_every_boundary_of_every_tier(layout: dict[str, Any], tmp_path: Path) -> None:
    """F5, D3: bytes and logits are those of a run that was never interrupted."""
    model, tokens = model_of(), stream()[: CUTS[-1]]
    with open_cache(model, layout=layout) as cache, attach(model, cache) as adapter:
        lease, wanted = resume(cache, adapter, tokens, 0, CUTS)
        with lease:
            bytes_wanted = held(cache, lease)
    assert not torch.cat(list(wanted.values())).isnan().any()
    boundaries = [stop for stop in CUTS if stop % PAGE == 0]

    def check(tier: Tier) -> None:
        for start in boundaries:
            if tier is not Tier.GPU:
                cache.evict(Tier.GPU, 100)
            if tier is Tier.DISK:
                cache.evict(Tier.CPU, 100)
            lease, logits = resume(cache, adapter, tokens, start, CUTS)
            with lease:
                assert lease.restored[tier] == start
                for stop, got in logits.items():
                    assert torch.equal(got, wanted[stop]), (start, stop)
                assert held(cache, lease) == bytes_wanted
            cache.flush().result(timeout=300)

    options: dict[str, Any] = {"layout": layout, "cpu": 30}
    with open_cache(model, tmp_path, **options) as cache, attach(model, cache) as adapter:
        resume(cache, adapter, tokens, 0, CUTS)[0].release()
        cache.flush().result(timeout=300)
        check(Tier.GPU)
        check(Tier.CPU)
        cache.check()
    with open_cache(model, tmp_path, **options) as cache, attach(model, cache) as adapter:
        check(Tier.DISK)
        cache.check()


def test_a_model_whose_checkpoints_hold_windows_only() -> None:
    """Entries of 128 tokens leave no state at a page's end."""
    model, tokens = model_of(ratios=(128,)), stream()
    with open_cache(model, cpu=400) as cache, attach(model, cache) as adapter:
        with cache.lease(tokens) as lease:
            wanted = run(cache, adapter, lease, tokens, [512, 128])
        cache.flush(to=Tier.CPU).result(timeout=300)
        for tier in (Tier.GPU, Tier.CPU):
            lease, logits = resume(cache, adapter, tokens, 512, [640])
            with lease:
                assert lease.restored[tier] == 512
                assert torch.equal(logits[640], wanted[512:])
            cache.evict(Tier.GPU, 100)


@pytest.mark.parametrize("tail", ["minimal", "seed"])
def test_pages_as_short_as_a_window(tail: str) -> None:
    """At the end of the first there is one window page, and a checkpoint may have room for two."""
    model, tokens = model_of(), stream()[:300]
    layout = FP32 | {"page_tokens": 128, "tail": tail}
    with open_cache(model, layout=layout, cpu=100) as cache, attach(model, cache) as adapter:
        resume(cache, adapter, tokens, 0, [200, 300])[0].release()
        cache.flush(to=Tier.CPU).result(timeout=300)
        for tier in (Tier.GPU, Tier.CPU):
            for start in (128, 256):
                lease, logits = resume(cache, adapter, tokens, start, [270, 300])
                with lease:
                    assert lease.restored[tier] == start
                    near(torch.cat([*logits.values()]), expected()[start:300])
                if tier is Tier.CPU:
                    cache.evict(Tier.GPU, 100)
            cache.evict(Tier.GPU, 100)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [100, 256, 300, 1111])
def test_every_boundary_of_a_longer_prompt(chunk: int, tmp_path: Path) -> None:
    """Boundaries within chunks too; what is computed afterwards is cut elsewhere."""
    model, tokens = model_of(), random_tokens(1111, 3)
    with open_cache(model, tmp_path, gpu=20, cpu=60) as cache, attach(model, cache) as adapter:
        with cache.lease(tokens) as lease:
            wanted = run(
                cache,
                adapter,
                lease,
                tokens,
                [min(chunk, 1111 - at) for at in range(0, 1111, chunk)],
            )
        cache.flush().result(timeout=300)
        for tiers in ((), (Tier.GPU,), (Tier.GPU, Tier.CPU)):
            for start in (256, 512, 768, 1024):
                for tier in tiers:
                    cache.evict(tier, 100)
                lease, logits = resume(cache, adapter, tokens, start, [1111])
                with lease:
                    torch.testing.assert_close(
                        logits[1111], wanted[start:], atol=OTHER_CUTS, rtol=0
                    )


def test_boundaries_within_a_chunk() -> None:
    """D3: captured while their chunk runs; the rest, cut elsewhere, agrees."""
    model, tokens = model_of(), stream()[:600]
    with open_cache(model, cpu=40) as cache, attach(model, cache) as adapter:
        with cache.lease(tokens) as lease:
            wanted = run(cache, adapter, lease, tokens, [70, 530])
        cache.flush(to=Tier.CPU).result(timeout=300)
        for start, tier in ((256, Tier.GPU), (512, Tier.GPU), (512, Tier.CPU), (256, Tier.CPU)):
            if tier is Tier.CPU:
                cache.evict(Tier.GPU, 100)
            lease, logits = resume(cache, adapter, tokens, start, [600])
            with lease:
                assert lease.restored[tier] == start
                torch.testing.assert_close(logits[600], wanted[start:], atol=OTHER_CUTS, rtol=0)


@pytest.mark.parametrize("layout", [FP8, {"tail": "seed", **FP32}], ids=["fp8", "fp32-seed"])
@pytest.mark.parametrize("chunks", [[520], [254, 4, 252, 1, 1, 8]], ids=["one", "at the ends"])
def test_a_checkpoint_is_the_rows_that_were_written(
    layout: dict[str, Any], chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3: bit for bit, of every layer, also where the rows lie in two chunks."""
    model, tokens = model_of(), stream()[:520]
    seen = Seen(monkeypatch)
    frames: dict[int, dict[tuple[str, int], Tensor]] = {}
    with open_cache(model, layout=layout) as cache, attach(model, cache) as adapter:
        pages = cache.layout.tail_windows
        with cache.lease(tokens) as lease:
            for count in chunks:
                at = lease.num_tokens
                with cache.step([(lease, tokens[at : at + count])]) as step:
                    adapter(step)
                    for capture in step.captures:
                        frames[capture.position] = checkpoint(cache, capture.frame)
    assert list(frames) == [256, 512]
    for position, frame in frames.items():
        assert len({name for name, _ in frame}) == (3 if layout is FP8 else 5)
        for (name, layer), got in frame.items():
            if name == "swa":
                rows = torch.cat(seen.windows[layer])[position - 128 * pages : position]
                wanted = rows.view(pages, 128, 512)
                if layout is FP8:
                    got, wanted = got[:, : 128 * 584], packed(wanted)
                assert torch.equal(got, wanted)
            else:
                dim = got.shape[1] // 2
                half = slice(0, dim) if name.endswith("a") else slice(dim, None)
                both = [
                    torch.cat(x)[position - 4 : position, half] for x in seen.states[layer, dim]
                ]
                assert torch.equal(got, torch.cat(both, 1)), name


class Seen:
    """The rows that layers write to their windows and give to their compressors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.windows: dict[int, list[Tensor]] = {}
        self.states: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        kernel = V4Run.kernel

        def noting_kernel(run: Any, layer: Any, key: str) -> Any:
            found = kernel(run, layer, key)

            def write(rows: Tensor, slots: Tensor, values: Tensor, *turn: Any, eps: float) -> None:
                stored = norm_rope(values, *turn[:3], eps=eps)
                self.windows.setdefault(layer.index, []).append(stored)
                found(rows, slots, values, *turn, eps=eps)

            def compress(kv: Tensor, score: Tensor, states: Any, *rest: Any, **options: Any) -> Any:
                key = layer.index, kv.shape[1] // len(states)
                for kept, rows in zip(
                    self.states.setdefault(key, ([], [])), (kv, score), strict=True
                ):
                    kept.append(rows.clone())
                return found(kv, score, states, *rest, **options)

            if key == "write_normed":
                return write
            return compress if key.startswith("compress_write") else found

        monkeypatch.setattr(V4Run, "kernel", noting_kernel)


def checkpoint(cache: Cache, frame: int) -> dict[tuple[str, int], Tensor]:
    """What a checkpoint frame on the device holds, by component and layer."""
    pool: Any = cache._pool
    return {
        (c.name, layer): pool.checkpoint_rows(c.name, layer)[frame].clone()
        for c in cache.layout.tails
        if c.checkpoint_slots
        for layer in c.layers
    }


def packed(pages: Tensor) -> Tensor:
    """(pages, 128 * 584) bytes of (pages, 128, 512) values."""
    storage = torch.zeros(len(pages), 74_880, dtype=torch.uint8)
    write_records(storage, torch.arange(len(pages) * 128), pages.flatten(0, 1), RECORDS["v4_fp8"])
    return storage[:, : 128 * 584]


def test_a_request_that_ends_within_a_group_and_the_next_one_in_its_place() -> None:
    """Its state slot and window pages go to another request; its pages serve its own kind."""
    model = model_of()
    with open_cache(model, max_leases=1) as cache, attach(model, cache) as adapter:
        for which, length in ((0, 259), (1, 263), (0, 519), (1, 393), (0, 640)):
            tokens = stream(which)[:length]
            with cache.lease(tokens) as lease:
                start = lease.ready.result(timeout=300)
                near(
                    run(cache, adapter, lease, tokens, [length - start]),
                    expected(which)[start:length],
                )
            # Of the same tokens as many as there are checkpoints of.
            assert start == {259: 0, 263: 0, 519: 256, 393: 256, 640: 512}[length]
            poison_free(cache)


@pytest.mark.parametrize("at", [255, 256, 302])
def test_forks_equal_runs_of_their_own(at: int) -> None:
    """F8: three branches off one trunk, which goes on itself; bit for bit, whoever goes first."""
    model, trunk = model_of(), stream()[:at]
    branches = [random_tokens(9, seed) for seed in (11, 12, 13)]
    cuts = [3, 1, 1, 4]
    alone = []
    with open_cache(model, layout=FP8) as cache, attach(model, cache) as adapter:
        for branch in branches:
            with cache.lease([]) as lease:
                feed(cache, adapter, (lease, trunk))
                logits = run(cache, adapter, lease, trunk + branch, cuts)
                alone.append((logits, held(cache, lease)))
    with open_cache(model, layout=FP8, max_leases=4) as cache, attach(model, cache) as adapter:
        with cache.lease([]) as lease:
            feed(cache, adapter, (lease, trunk))
            leases = [lease, lease.fork(), lease.fork()]
            for each in leases:
                each.ready.result(timeout=300)
            poison_free(cache)
            got: list[list[Tensor]] = [[], [], []]
            for i, count in enumerate(cuts):
                for who in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))[i]:
                    done = leases[who].num_tokens - at
                    new = branches[who][done : done + count]
                    got[who] += feed(cache, adapter, (leases[who], new))
                    poison_free(cache)
            for logits, each, (want, bytes_wanted) in zip(got, leases, alone, strict=True):
                assert torch.equal(torch.cat(logits), want)
                assert held(cache, each) == bytes_wanted
            for each in leases[1:]:
                each.release()


def test_rejected_drafts_leave_no_trace() -> None:
    """E2: rings longer by ``max_draft`` keep what is still read, over the ends of groups, windows
    and pages; entries and window rows of rejected tokens are written over."""
    model, tokens = model_of(), stream()
    layout = swa_c4_c128(layer_ratios=(0, 4, 128, 4), max_draft=4, **FP32)
    config = sized(layout, gpu=8, cpu=0)
    with Cache(layout, config, model="drafts", device="cpu") as cache:
        pool: Any = cache._pool
        pool.poison_all()
        with attach(model, cache) as adapter, cache.lease([]) as lease:
            for start in (120, 250, 378):  # each run goes over a multiple of 128
                at = lease.num_tokens
                near(feed(cache, adapter, (lease, tokens[at:start]))[0], expected()[at:start])
                for accepted in (1, 5, 0, 2, 1, 3, 0, 4):
                    at = lease.num_tokens
                    wrong = [(t + 1) % 97 for t in tokens[at + accepted : at + 5]]
                    right = tokens[at : at + accepted]
                    with cache.step([(lease, right + wrong)]) as step:
                        logits = adapter.forward(step, all_logits=True)
                        step.accept(lease, accepted)
                    near(logits[:accepted], expected()[at : at + accepted])
                    poison_free(cache)


def test_n_best_packed() -> None:
    """F8: the branches in one step, as a server would run them."""
    model, trunk = model_of(), stream()[:302]
    branches = [random_tokens(6, seed) for seed in (11, 12)]
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as one:
        feed(cache, adapter, (one, trunk))
        with one.fork() as two:
            two.ready.result(timeout=300)
            got = [
                feed(cache, adapter, (one, branches[0][i : i + 2]), (two, branches[1][i : i + 2]))
                for i in (0, 2, 4)
            ]
    for which, branch in enumerate(branches):
        near(torch.cat([g[which] for g in got]), full_logits(model, trunk + branch)[302:])


def test_truncation_lands_on_a_checkpoint() -> None:
    model, tokens = model_of(), stream()
    with open_cache(model, cpu=30) as cache, attach(model, cache) as adapter:
        with cache.lease([]) as lease:
            run(cache, adapter, lease, tokens[:600], [600])
            for wanted, stands in ((550, 512), (511, 256), (255, 0)):
                assert lease.truncate(wanted) == stands
                assert lease.ready.result(timeout=300) == stands
                poison_free(cache)
                logits = feed(cache, adapter, (lease, tokens[stands : stands + 130]))[0]
                near(logits, expected()[stands : stands + 130])


@pytest.mark.parametrize("at", [130, 390, 513])
def test_a_paused_request_goes_on_as_if_nothing_had_been(at: int) -> None:
    """Partial pages, open groups and windows travel; meanwhile others use what it gave back."""
    model, tokens = model_of(), stream()[: at + 6]
    results = []
    for paused in (False, True):
        with open_cache(model, layout=FP8, cpu=40) as cache, attach(model, cache) as adapter:
            with cache.lease([]) as lease:
                feed(cache, adapter, (lease, tokens[:at]))
                if paused:
                    lease.pause().result(timeout=300)
                    poison_free(cache)
                    with cache.lease([]) as other:
                        feed(cache, adapter, (other, stream(1)[:300]))
                    poison_free(cache)
                    assert lease.resume().result(timeout=300) == at
                results.append((run(cache, adapter, lease, tokens, [1, 3, 2]), held(cache, lease)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    "ratios", [(4,), pytest.param((4, 128), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_chunk_of_4096_tokens(ratios: tuple[int, ...]) -> None:
    """D3: 16 pages and 32 window pages at once, then decode, then resume in the middle of it."""
    model = model_of(ratios=ratios, num_attention_heads=2, index_n_heads=16)
    tokens = random_tokens(4099, 3)
    want = full_logits(model, tokens)
    with open_cache(model, gpu=20) as cache, attach(model, cache) as adapter:
        with cache.lease([]) as lease:
            got = run(cache, adapter, lease, tokens, [4096, 1, 2])
        good = ((got - want).abs().amax(-1) <= LOGITS).float().mean().item()
        assert good > 0.997  # among so many choices of top-k some hang on the last bits
        near(got[-3:], want[-3:])
        lease, logits = resume(cache, adapter, tokens, 2048, [2178])
        with lease:
            torch.testing.assert_close(logits[2178], got[2048:2178], atol=OTHER_CUTS, rtol=0)


def test_window_pages_are_freed_while_decoding() -> None:
    """600 tokens one by one: never more than the window reaches, and never one too few."""
    model, tokens = model_of(ratios=(128,)), stream()
    want = full_logits(model, tokens)
    with open_cache(model, max_leases=1) as cache, attach(model, cache) as adapter:
        with cache.lease([]) as lease:
            out = feed(cache, adapter, (lease, tokens[:40]))
            most = 0
            for token in tokens[40:]:
                with cache.step([(lease, [token])]) as step:
                    out.append(adapter(step))
                table = cache._core.window_tables[lease._record.row]
                most = max(most, int((table >= 0).sum()))
                if lease.num_tokens % 64 == 0:
                    poison_free(cache)
    assert most == 2
    near(torch.cat(out), want)


# ------------------------------------------------------------------ images, log-probabilities


def test_images_are_atomic_and_their_digest_is_in_every_page_they_touch() -> None:
    """F7: same text, images that differ late: nothing inside the span is shared."""
    model, tokens = model_of(), stream()
    span = (300, 600)
    one, other = (Span(*span, digest) for digest in (b"a cat", b"a cat, and late in it a dog"))
    with open_cache(model, gpu=20) as cache, attach(model, cache) as adapter:
        ends: list[int] = []
        first = generate(adapter, cache, tokens, 2, chunk=128, spans=[one], progress=ends.append)
        # 256..300 in front of the image, the image whole though longer than a chunk, the rest.
        assert ends == [0, 128, 256, 300, 600, 640, 641]
        assert first.computed == 640
        assert cache.match(tokens, spans=[other]).history_tokens == 256
        assert cache.match(tokens).history_tokens == 256
        assert cache.match(tokens, spans=[one]).history_tokens == 512
        # 512 lies inside the image: known, and no place to go on from.
        again = generate(adapter, cache, tokens, 2, spans=[one])
        assert (again.computed, again.tokens) == (640 - 256, first.tokens)
        third = generate(adapter, cache, tokens, 2, spans=[other])
        assert third.computed == 640 - 256
        longer = [*tokens, *stream(1)[:200]]
        generate(adapter, cache, longer, 1, spans=[one])
        assert cache.match([*longer, 1], spans=[one]).tokens == 768
        assert cache.match([*longer, 1], spans=[other]).tokens == 256


def test_nothing_of_an_image_is_published_before_all_of_it_is_committed() -> None:
    """F7: an engine that cuts inside a span all the same leaves no page of half an image."""
    model, tokens = model_of(), stream()
    span = Span(200, 600, b"a cat")
    with open_cache(model) as cache, attach(model, cache) as adapter:
        with cache.lease(tokens, spans=[span]) as lease:
            assert lease.chunk_end(0, 256) == 200
            assert lease.chunk_end(200, 256) == 600
            feed(cache, adapter, (lease, tokens[:520]))
            assert cache.match(tokens, spans=[span]).history_tokens == 0
            feed(cache, adapter, (lease, tokens[520:600]))
            assert cache.match(tokens, spans=[span]).history_tokens == 512


@pytest.mark.parametrize("first_wanted", [300, 256])
def test_prompt_logprobs_reuse_up_to_the_first_wanted_position(first_wanted: int) -> None:
    """D7: the probability of token i comes with the logits of token i - 1."""
    model, tokens = model_of(), stream()
    want = torch.log_softmax(expected(), -1)[first_wanted - 1 : -1]
    with open_cache(model) as cache, attach(model, cache) as adapter:
        with cache.lease(tokens) as lease:
            run(cache, adapter, lease, tokens, [640])
        with cache.lease(tokens, max_reuse=first_wanted - 1) as lease:
            start = lease.ready.result(timeout=300)
            assert start == (first_wanted - 1) // PAGE * PAGE
            logits = run(cache, adapter, lease, tokens, [640 - start])
    got = torch.log_softmax(logits, -1)[first_wanted - 1 - start : -1]
    picked = torch.tensor(tokens[first_wanted:])[:, None]
    near(got.gather(1, picked), want.gather(1, picked))


def test_a_chunk_that_has_overwritten_what_it_reads_is_not_run_again() -> None:
    """Rings have turned too far: a second pass would give, and commit, other rows."""
    model, tokens = model_of(), stream()
    with (
        open_cache(model, layout=FP32 | {"max_draft": 3}) as cache,
        attach(model, cache) as adapter,
    ):
        with cache.lease([]) as lease:
            lease.ready.result(timeout=300)
            for count in (130, 1, 4):  # as many as may be rejected may be fed again
                at = lease.num_tokens
                with cache.step([(lease, tokens[at : at + count])]) as step:
                    logits = adapter.forward(step, all_logits=True)
                    near(logits, expected()[at : at + count])
                    if count <= 4:
                        again = adapter.forward(step, all_logits=True)
                        near(again, expected()[at : at + count])

            def interrupted(*_: Any) -> None:
                raise RuntimeError("out of memory")

            hook = model.model.layers[-1].register_forward_pre_hook(interrupted)
            with (
                pytest.raises(KVTierError, match="has run before"),
                cache.step([(lease, tokens[135:240])]) as step,
            ):
                with pytest.raises(RuntimeError, match="out of memory"):
                    adapter.forward(step)
                hook.remove()
                adapter.forward(step)
            assert lease.ready.result(timeout=300) == lease.num_tokens == 0
            near(run(cache, adapter, lease, tokens[:240], [240]), expected()[:240])
