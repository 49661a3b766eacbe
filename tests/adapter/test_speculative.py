"""Drafts in the reference loop: text equal to greedy decoding, whoever guesses and however well;
what drafts guess, by another computation; what comes back with a hit, and what happens if not."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import Cache, ConfigError, LayoutMismatch, OutOfPages, Tier, TokenError
from kvtier_deepseek import NGram, Request, attach, generate, speculate, verify
from kvtier_deepseek.fields import DRAFT_STATE
from tests.adapter import drafts_kit as kit
from tests.adapter.drafts_kit import Forced, draft_of, model_of, open_cache, proposer_of, session
from tests.adapter.models import random_tokens
from tests.shell.v4_kit import ByteModel

PAIRS = [(layout, draft) for layout, drafts in kit.KINDS.items() for draft in drafts]
PROMPT = {"v4": 243}
"""Long enough that a page ends within the text; elsewhere pages are short."""
NEW = {"v4": 24}
PATTERNS: dict[str, Callable[[int], int]] = {
    "none": lambda i: 0,
    "all": lambda i: kit.MAX_DRAFT,
    "each": lambda i: i % (kit.MAX_DRAFT + 1),
    "random": lambda i: random.Random(i).randint(0, kit.MAX_DRAFT),
}


def prompt_of(layout: str, seed: int = 3) -> list[int]:
    return random_tokens(PROMPT.get(layout, 21), seed)


_TEXTS: dict[tuple[str, int], tuple[int, ...]] = {}


def pages(layout: str, new: int) -> int:
    return 12 if layout == "v4" else 10 + new // kit.PAGE


def text_of(layout: str, new: int) -> tuple[int, ...]:
    """What greedy decoding without any draft gives, in a cache without draft layers."""
    if (layout, new) not in _TEXTS:
        with session(layout, "ngram", gpu=pages(layout, new)) as (cache, adapter):
            _TEXTS[layout, new] = generate(adapter, cache, prompt_of(layout), new).tokens
    return _TEXTS[layout, new]


def poison(cache: Any) -> None:
    """Whatever nobody may read is NaN from here on, rows behind what is committed too."""
    ByteModel(cache).poison()


def run(layout: str, draft: str, pattern: str, new: int) -> Forced:
    """Decode with forced acceptance; everything that is not committed is NaN after each step."""
    prompt, text = prompt_of(layout), text_of(layout, new)
    gpu = pages(layout, new)
    with session(layout, draft, gpu=gpu) as (cache, adapter), cache.lease(prompt) as lease:
        lease.ready.result()
        forced = Forced(proposer_of(adapter), [*prompt, *text, 0], PATTERNS[pattern])
        request = Request(lease, list(prompt), len(prompt) + new)
        with cache.step([(lease, prompt)]) as step:
            first = int(adapter(step)[0].argmax())
        request.tokens.append(first)
        while not request.done:
            poison(cache)
            verify(adapter, cache, [request], forced, max_draft=kit.MAX_DRAFT)
            assert lease.num_tokens == len(request.tokens) - 1
        assert tuple(request.tokens[len(prompt) :]) == text
        if pattern == "none":
            assert request.accepted == 0
        if pattern == "all":
            assert request.accepted == request.proposed
        cache.check()
    return forced


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("layout", "draft"), PAIRS)
def test_speculative_text_is_greedy_text(layout: str, draft: str, pattern: str) -> None:
    """F6, AT-6.1, AT-6.4."""
    if layout == "v4" and pattern in ("none", "random"):
        pytest.skip("the long runs have it")
    run(layout, draft, pattern, NEW.get(layout, 48))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("layout", "draft"), PAIRS)
def test_speculative_text_of_a_thousand_tokens(layout: str, draft: str, pattern: str) -> None:
    """F6: across page, window and group ends."""
    run(layout, draft, pattern, 1000)


@pytest.mark.parametrize(("layout", "draft"), [p for p in PAIRS if p[1] != "ngram"])
def test_speculative_guesses_are_those_of_the_whole_text(layout: str, draft: str) -> None:
    """Rows in pages and in scratch give what the draft computes from the text at once."""
    prompt, new = prompt_of(layout), 12
    said = run(layout, draft, "each", NEW.get(layout, 48)).said
    text = [*prompt, *text_of(layout, NEW.get(layout, 48))]
    checked = 0
    for length, guesses in said[:new]:
        if guesses:
            assert guesses == kit.oracle_guesses(layout, draft, text[:length], len(guesses))
            checked += len(guesses)
    assert checked > 8


def draft_bytes(cache: Any, lease: Any) -> dict[str, torch.Tensor]:
    """All rows of draft layers that the lease has, by component and layer."""
    layout, found = cache.layout, {}
    model_layers = min(
        (c.layers[0] for c in layout.components if c.name == DRAFT_STATE), default=10**6
    )
    pool = cache._pool
    mapping = lease.slot_mapping(0, lease.num_tokens)
    for c in layout.components:
        for layer in (i for i in c.layers if i >= model_layers):
            if c.name in mapping:
                slots = mapping[c.name][mapping[c.name] >= 0]
            else:
                at = range(max(0, lease.num_tokens - 127), lease.num_tokens)
                table = cache._core.window_tables[lease._record.row]
                slots = [table[p // c.slots_per_page] * c.slots_per_page + p % 128 for p in at]
            rows = pool.rows(c.name, layer)[torch.as_tensor(slots, dtype=torch.int64)]
            found[f"{c.name} {layer}"] = rows.clone()
    return found


@pytest.mark.parametrize(("layout", "draft"), [p for p in PAIRS if p[1] != "ngram"])
def test_speculative_rows_of_drafts_roll_back_with_the_text(layout: str, draft: str) -> None:
    """AT-6.1, AT-6.9: after rounds with every acceptance the draft's rows are those of a lease that
    never rejected anything; pages say that they are whole."""
    prompt, new = prompt_of(layout), NEW.get(layout, 48)
    text = text_of(layout, new)
    with session(layout, draft) as (cache, adapter):
        with cache.lease(prompt) as lease, cache.lease([], read=False) as plain:
            lease.ready.result()
            with cache.step([(lease, prompt)]) as step:
                first = int(adapter(step)[0].argmax())
            forced = Forced(adapter.draft, [*prompt, *text, 0], PATTERNS["each"])
            request = Request(lease, [*prompt, first], len(prompt) + new)
            while not request.done:
                verify(adapter, cache, [request], forced, max_draft=kit.MAX_DRAFT)
                assert adapter.draft is not None
                assert adapter.draft.carried(lease) >= lease.num_tokens
            with cache.step([(plain, request.tokens[:-1])]) as step:
                adapter(step)
            got, want = draft_bytes(cache, lease), draft_bytes(cache, plain)
            assert got.keys() == want.keys()
            assert len(got) >= 2
            for name, rows in got.items():
                if name.startswith(DRAFT_STATE):
                    marks = rows.view(torch.int32)[:, -1]
                    assert marks.tolist() == [cache.layout.page_tokens] * len(marks)
                torch.testing.assert_close(rows, want[name], atol=2e-5, rtol=2e-4)


# ------------------------------------------------------------------ hits


def serve(cache: Any, adapter: Any, prompt: list[int], new: int) -> tuple[Any, list[Any]]:
    """A request whose guesses are never right; what it got, and what its draft said."""
    heard = Forced(adapter.draft, [*prompt, *[0] * (new + 9)], lambda i: 0)
    return speculate(adapter, cache, prompt, new, proposer=heard, chunk=64), heard.said


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.CPU, Tier.DISK])
@pytest.mark.parametrize(
    ("layout", "draft"), [("v3", "mtp"), ("mla_swa", "mtp"), ("v4", "mtp"), ("v4", "dspark")]
)
def test_speculative_state_comes_back_with_a_hit(
    layout: str, draft: str, tier: Tier, tmp_path: Path
) -> None:
    """★40, ★48: behind a hit a draft says what it says behind a computed prefix, from the first
    token on, whatever tier the prefix came from."""
    prompt = [*prompt_of(layout), *random_tokens(30, 8)]
    new = 4
    with session(layout, draft) as (cache, adapter):
        want, said = serve(cache, adapter, prompt, new)
        assert want.computed == len(prompt)
    sizes = {"gpu": 24, "cpu": 40} if layout != "v4" else {"gpu": 8, "cpu": 30}
    path = tmp_path if tier is Tier.DISK else None
    with session(layout, draft, path, **sizes) as (cache, adapter):
        first, _ = serve(cache, adapter, prompt, new)
        assert first.tokens == want.tokens
        cache.flush().result()
        for above in [t for t in Tier if t < tier]:
            cache.evict(above, 10**6)
        poison(cache)
        got, again = serve(cache, adapter, prompt, new)
        assert got.restored[tier] >= cache.layout.page_tokens
        assert got.tokens == want.tokens
        assert again == said
        assert all(guesses for _, guesses in again)


@pytest.mark.parametrize(("layout", "draft"), [("v3", "mtp"), ("v4", "mtp"), ("v4", "dspark")])
def test_speculative_state_that_is_lost_costs_no_hit(layout: str, draft: str) -> None:
    """AT-6.9, ★40: pages of steps without the draft are hit like any others; guesses wait until
    enough rows are there again."""
    model = model_of(layout)
    prompt = [*prompt_of(layout), *random_tokens(20, 8)]
    page = 256 if layout == "v4" else kit.PAGE
    hit = len(prompt) // page * page
    with open_cache(model, draft) as cache:
        with attach(model, cache) as adapter:  # a layout with draft layers, and no draft
            plain = generate(adapter, cache, prompt, 4).tokens
        with attach(model, cache, draft=draft_of(model, draft)) as adapter:
            poison(cache)
            new = 2 * page + 6 if layout == "v3" else 6
            got, said = serve(cache, adapter, prompt, new)
            assert got.tokens[:4] == plain
            assert sum(got.restored.values()) == hit
            waits = [length for length, guesses in said if not guesses]
            if layout == "v4":  # the window's 128 rows are further away than this text goes
                assert len(waits) == len(said)
            else:  # row ``hit`` itself needs what the page before did not keep
                ready = -(-(hit + 1) // page) * page + page
                assert ready < len(prompt) + new - 2
                for length, guesses in said:
                    assert bool(guesses) == (length - 1 >= ready), (length, ready)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("draft", ["mtp", "dspark"])
def test_speculative_windows_are_rebuilt(draft: str) -> None:
    """The same, until the window is full of the draft's own rows: then guesses are those of the
    whole text again."""
    model, prompt = model_of("v4"), [*prompt_of("v4"), *random_tokens(20, 8)]
    with open_cache(model, draft) as cache:
        with attach(model, cache) as adapter:
            generate(adapter, cache, prompt, 2)
        with attach(model, cache, draft=draft_of(model, draft)) as adapter:
            got, said = serve(cache, adapter, prompt, 140)
            assert sum(got.restored.values()) == 256
            text = [*prompt, *got.tokens]
            begun = [length for length, guesses in said if guesses]
            # MTP: row 256 is lost too.  Its window is 127 rows, DSpark's 128.
            assert begun[0] - 1 == 256 + 128
            for length, guesses in said:
                if length in begun[:3]:
                    want = kit.oracle_guesses("v4", draft, text[:length], len(guesses))
                    assert guesses == want


def test_speculative_layers_without_a_draft_are_blank() -> None:
    """Nothing of what pages held before is published in them."""
    for layout, draft in (("v3", "mtp"), ("v4", "dspark")):
        model = model_of(layout)
        with open_cache(model, draft) as cache, attach(model, cache) as adapter:
            tokens = random_tokens(20 if layout == "v3" else 260)
            with cache.lease([]) as lease:
                with cache.step([(lease, tokens)]) as step:
                    adapter(step)
                for name, rows in draft_bytes(cache, lease).items():
                    if name.startswith(DRAFT_STATE):
                        assert set(rows.view(torch.int32)[:, -1].tolist()) == {-1}
                        rows = rows[:, :-4]
                    assert not rows.any(), name


def test_speculative_fork_pause_and_truncate() -> None:
    """A3: a fork goes on from the same state, a pause keeps it; cut back to where nothing is
    remembered, guesses wait."""
    prompt = random_tokens(21, 4)
    with session("v3", "mtp", cpu=40) as (cache, adapter), cache.lease([]) as lease:
        draft = adapter.draft
        assert draft is not None

        def feed(to: Any, tokens: list[int]) -> None:
            with cache.step([(to, tokens)]) as step:
                adapter(step)

        feed(lease, prompt)
        assert draft.rows_from(lease) == 0
        with lease.fork() as other:
            other.ready.result()
            draft.fork(lease, other)
            feed(other, prompt[:3])
            assert draft.rows_from(other) == 0
        with lease.fork() as stranger:
            stranger.ready.result()
            feed(stranger, prompt[:3])
            assert draft.rows_from(stranger) == len(prompt) + 1
            rows = draft_bytes(cache, stranger)["latent 2"]
            assert not rows[len(prompt)].any()  # a gap is blank
            assert rows[len(prompt) + 1].any()
        lease.pause().result()
        assert lease.resume().result() == len(prompt)
        feed(lease, prompt[:2])
        assert draft.rows_from(lease) == 0
        assert lease.truncate(len(prompt)) == len(prompt)  # within the last step
        feed(lease, prompt[:1])
        assert draft.rows_from(lease) == 0
        lease.truncate(16)  # a page's end
        feed(lease, prompt[:1])
        assert draft.rows_from(lease) == 0
        lease.truncate(11)
        feed(lease, prompt[:1])
        assert draft.rows_from(lease) == 12
        with cache.step([(lease, [5])]):  # a token that the draft does not hear of
            pass
        feed(lease, prompt[:1])
        assert draft.rows_from(lease) == 14


# ------------------------------------------------------------------ the loop


def test_speculative_batches_and_stops() -> None:
    """Requests of unequal length in one step, one of which ends within what was accepted: nothing
    behind its end is committed (AT-6.6)."""
    prompts = [random_tokens(n, n) for n in (5, 23, 40)]
    with session("v3", "mtp") as (cache, adapter):
        texts = [generate(adapter, cache, prompt, 20).tokens for prompt in prompts]
        ends = texts[1][5]
        stop = texts[1].index(ends)
        known = {n + len(p): t for n, (p, t) in enumerate(zip(prompts, texts, strict=True))}
        assert len(known) == 3

        class Right:
            def propose(self, step: Any, device: Any, rows: Any) -> list[list[int]]:
                out = []
                for row in rows:
                    text = next(
                        [*p, *t]
                        for p, t in zip(prompts, texts, strict=True)
                        if row.tokens[: len(p)] == p
                    )
                    out.append(text[len(row.tokens) : len(row.tokens) + max(0, row.count)])
                return out

        requests = []
        for i, prompt in enumerate(prompts):
            lease = cache.lease(prompt, read=False)
            with cache.step([(lease, prompt)]) as step:
                first = int(adapter(step)[0].argmax())
            ended = (ends,) if i == 1 else ()
            requests.append(Request(lease, [*prompt, first], len(prompt) + 20, ended))
        while going := [r for r in requests if not r.done]:
            verify(adapter, cache, going, Right(), max_draft=kit.MAX_DRAFT)
            for request in requests:
                assert request.lease.num_tokens == len(request.tokens) - 1
        for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            want = texts[i][: stop + 1] if i == 1 else texts[i]
            assert tuple(request.tokens[len(prompt) :]) == want
            assert request.rounds < len(want)
            request.lease.release()
        cache.check()


def test_speculative_loop_refuses() -> None:
    with session("v3", "ngram") as (cache, adapter):
        for options, says in (
            ({}, "nobody guesses"),
            ({"proposer": NGram(), "max_draft": 5}, "max_draft=5"),
            ({"proposer": NGram(), "max_draft": 0}, "max_draft=0"),
            ({"proposer": NGram(), "chunk": 0}, "chunk=0"),
        ):
            with pytest.raises(ConfigError, match=says):
                speculate(adapter, cache, [1, 2], 3, **options)
        with pytest.raises(TokenError, match="empty"):
            speculate(adapter, cache, [], 3, proposer=NGram())


def test_speculative_steps_wait_for_pages_that_are_still_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of prompts, and those that verify, as ``generate``'s do."""
    step, flush, room, steps = Cache.step, Cache.flush, False, 0

    def one_step_for_a_flush(*args: Any, **options: Any) -> Any:
        nonlocal room, steps
        if not room:
            raise OutOfPages(1, 0)
        room, steps = False, steps + 1
        return step(*args, **options)

    def flushed(*args: Any, **options: Any) -> Any:
        nonlocal room
        room = True
        return flush(*args, **options)

    with session("v3", "ngram") as (cache, adapter):
        prompt = [5, 6, 7] * 4
        text = generate(adapter, cache, prompt, 6).tokens
        monkeypatch.setattr(Cache, "step", one_step_for_a_flush)
        monkeypatch.setattr(Cache, "flush", flushed)
        assert speculate(adapter, cache, prompt, 6, proposer=NGram(), chunk=4).tokens == text
        assert generate(adapter, cache, prompt, 6).tokens == text
    assert steps > 6


def test_speculative_drafts_that_do_not_fit() -> None:
    model = model_of("v3")
    draft = draft_of(model, "mtp")
    with open_cache(model, "ngram") as cache:
        with pytest.raises(LayoutMismatch, match="draft_layers is 0"):
            attach(model, cache, draft=draft)
    with open_cache(model, "mtp") as cache, pytest.raises(ConfigError, match="not attached"):
        _ = draft.ledger
    with open_cache(model, "mtp") as cache, attach(model, cache, draft=draft) as adapter:
        other = kit.tiny_model("v3")
        with pytest.raises(ConfigError, match="attached already"):
            attach(other, cache, draft=draft)
        adapter.detach()
        with attach(model, cache, draft=draft) as adapter:
            assert generate(adapter, cache, [1, 2, 3], 2).tokens


def test_speculative_ngrams() -> None:
    guess = NGram().guess
    assert guess([1, 2, 3, 1, 2], 2) == [3, 1]
    assert guess([1, 2, 9, 5, 2, 8, 1, 2], 3) == [9, 5, 2]  # the longer ending wins
    assert guess([4, 7, 4, 8, 4], 5) == [8, 4]  # the later place wins
    assert guess([1, 2, 3], 4) == []
    assert guess([1, 1], 0) == []
    with pytest.raises(ConfigError, match="shortest=0"):
        NGram(shortest=0)
