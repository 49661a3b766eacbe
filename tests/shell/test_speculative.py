"""F6: rejected tokens on the real ``Cache`` and its data plane on the CPU, in every layout."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import LeaseError
from kvtier.layouts import Layout
from tests.shell.speculative_kit import (
    CPU,
    DISK,
    DRAFTS,
    GPU,
    KINDS,
    LAYOUTS,
    compressed,
    dense,
    found,
    free,
    packed,
    served,
    tables,
    windowed,
)
from tests.shell.v4_kit import open_lease, prompt

torch.set_num_threads(1)


# --------------------------------------------------------------------------- every pattern


@pytest.mark.parametrize(("make", "starts"), KINDS)
@pytest.mark.parametrize("drafts", [1, 3, 4, 7])
def test_speculative_acceptance_at_every_edge(
    make: Callable[[], Layout], starts: list[int], drafts: int
) -> None:
    """AT-6.1, 6.4: none, all and each number of drafts accepted, from every edge on, beside the
    lease it was forked from; then three more tokens and a rest."""
    tokens = prompt(starts[-1] + 40)
    with served(make(), gpu=16, max_leases=4) as model, open_lease(model, tokens) as base:
        for start in starts:
            if base.num_tokens < start:
                model.verify(base, tokens[base.num_tokens : start], rejected=0)
            for kept in range(drafts + 2):
                with base.fork() as lease:
                    if kept % 2:
                        model.draft(lease, drafts)
                    new = tokens[start : start + kept]
                    model.verify(lease, new, rejected=drafts + 1 - kept)
                    model.check(lease)
                    at = lease.num_tokens
                    model.verify(lease, tokens[at : at + 1], rejected=drafts)
                    model.verify(lease, tokens[at + 1 : start + drafts + 6], rejected=0)
                    model.check(lease)
            model.check(base)


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_rewriting_gives_the_same_bytes(make: Callable[[], Layout]) -> None:
    """AT-6.2: written twice, with other tokens and then the right ones: the same rows, the same
    pages, nothing counted twice."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(3 * page)
    with served(layout) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[: 2 * page - 4])  # 508 of 512
        model.feed(lease, [], rejected=5)
        model.feed(lease, tokens[2 * page - 4 : 2 * page + 1])
        model.check(lease)
    with served(layout) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[: page - 1])
        model.feed(lease, [], rejected=4)
        held, refs = tables(lease), dict(model.cache._core.operations.private.refs)
        model.feed(lease, [], rejected=4)
        assert (tables(lease), model.cache._core.operations.private.refs) == (held, refs)
        model.feed(lease, tokens[page - 1 : page], rejected=3)
        model.check(lease)
        model.feed(lease, tokens[page : page + 4])
        assert tables(lease)[0] == held[0]
        model.check(lease)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("make", [compressed, packed])
def test_speculative_groups_closed_by_rejected_tokens(
    make: Callable[[], Layout], ratio: int
) -> None:
    """AT-6.3: the entry is no row of the lease until the right token closes it, then or several
    steps later, and it is written then."""
    name = f"c{ratio}"
    for close, before in ((255, 3), (383, 1), (511, 3)):
        tokens = prompt(close + 9)
        with served(make()) as model, open_lease(model, tokens) as lease:
            model.prefill(lease, tokens[: close - before])
            entries = (close - before) // ratio
            for _ in range(2):
                model.feed(lease, [], rejected=before + 2)
                mapping = lease.slot_mapping(0, lease.num_tokens)[name]
                assert np.count_nonzero(mapping >= 0) == entries
                model.check(lease)
            for at in range(close - before, close):
                model.feed(lease, tokens[at : at + 1], rejected=DRAFTS)
                model.check(lease)
            assert np.count_nonzero(lease.slot_mapping(0, close)[name] >= 0) == entries
            model.feed(lease, tokens[close : close + 1], rejected=DRAFTS)
            mapping = lease.slot_mapping(0, close + 1)[name]
            assert np.count_nonzero(mapping >= 0) == entries + 1 and mapping[-1] >= 0
            model.check(lease)


# --------------------------------------------------------------------------- what others see


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_tokens_are_seen_by_nobody(make: Callable[[], Layout]) -> None:
    """AT-6.7: whatever is asked for while drafts are being verified finds committed pages only."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(2 * page)
    drafts = tokens[page - 2 : page + 6]
    with served(layout) as model, open_lease(model, tokens) as lease:
        assert not list(model.cache.events())
        model.prefill(lease, tokens[: page - 2])
        before = dict(model.cache._pump.moved)
        with model.cache.step([(lease, drafts)]) as step:
            model.write(step)
            assert lease.num_tokens == page - 2 and lease.tokens().tolist() == tokens[: page - 2]
            assert found(model, tokens) == 0
            model.cache.flush(to=CPU).result(timeout=300)
            model.cache.evict(CPU, 99)
            assert not list(model.cache.pages()) and not list(model.cache.events())
            with model.cache.lease(tokens) as other:
                assert other.ready.result(timeout=300) == 0
            for use in (
                lease.pause,
                lease.fork,
                lambda: lease.truncate(1),
                lambda: lease.reserve(1),
            ):
                with pytest.raises(LeaseError, match="step"):
                    use()
            step.accept(lease, 1)
        assert found(model, tokens) == 0 and dict(model.cache._pump.moved) == before
        model.poison()
        model.check(lease)
        with model.cache.step([(lease, drafts[1:])]) as step:
            model.write(step)
            step.accept(lease, 1)
        model.poison()
        assert found(model, tokens) == page, "one token was accepted, and filled a page"
        model.cache.flush(to=CPU).result(timeout=300)
        told = list(model.cache.events())
        assert [(what, tier) for what, _, tier in told] == [("stored", GPU), ("stored", CPU)]
        assert {key for _, key, _ in told} == {info.key for info in model.cache.pages()}
        model.check(lease)
    with served(layout) as model:
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens[: page - 2])
            model.verify(lease, tokens[page - 2 : page], rejected=6)
        model.cache.flush(to=CPU).result(timeout=300)
        model.evict(GPU)
        with open_lease(model, tokens[: page + 1]) as other:
            assert other.num_tokens == page
            model.check(other)


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_steps_that_are_left_leak_nothing(make: Callable[[], Layout]) -> None:
    """AT-6.6, D5: an exception after ``accept``, a release in the step or after it; what was
    accepted and never committed is nothing."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(page + 20)
    with served(layout) as model:
        before = free(model)
        for start in (0, 1, page - 2, page - 1, page, page + 1):
            for how in ("raise", "raise and go on", "release", "release and raise"):
                lease = open_lease(model, tokens, read=False, write=False)
                model.prefill(lease, tokens[:start])
                with pytest.raises(ZeroDivisionError) if "raise" in how else nullcontext():
                    with model.cache.step([(lease, tokens[start : start + DRAFTS + 1])]) as step:
                        model.write(step)
                        step.accept(lease, 3)
                        if "release" in how:
                            lease.release()
                        if "raise" in how:
                            raise ZeroDivisionError
                model.poison_all_rejected()
                if "release" not in how:
                    assert lease.tokens().tolist() == tokens[:start]
                    model.check(lease)
                if how == "raise and go on":
                    model.feed(lease, tokens[start : start + 2], rejected=DRAFTS - 1)
                    model.check(lease)
                    model.prefill(lease, tokens)
                    model.check(lease)
                lease.release()
                assert free(model) == before, (start, how)
                model.cache.check()
        assert not list(model.cache.pages())


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_stop_inside_an_accepted_run(make: Callable[[], Layout]) -> None:
    """AT-6.6: the last word on how many counts, and nothing past it is published."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(page + 20)
    with served(layout) as model:
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens[: page - 3])
            with model.cache.step([(lease, tokens[page - 3 : page + 3])]) as step:
                model.write(step)
                step.accept(lease, 6)
                step.accept(lease, 2)
            model.poison()
            assert lease.num_tokens == page - 1
            model.check(lease)
        assert found(model, tokens) == 0


# --------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_rounds_beside_a_shared_prefix(
    make: Callable[[], Layout], tmp_path: Path
) -> None:
    """AT-6.8, 6.5: 100 rounds of any number of drafts and accepted ones, two leases in a batch on
    one prefix, with forks, pauses and abandoned steps in between; then all of it from each tier."""
    layout, rng = make(), np.random.default_rng(6)
    page = layout.page_tokens
    shared = prompt(page + page // 2)
    with served(layout, tmp_path, gpu=24, max_leases=4) as model:
        with open_lease(model, shared) as first:
            model.prefill(first, shared)
        ways = [[*shared[: page + i], *prompt(5 * page, seed=i)] for i in (2, 5)]
        leases = [open_lease(model, way[: page + 8]) for way in ways]
        assert all(lease.num_tokens == page for lease in leases)
        for round_ in range(100):
            drafts = rng.integers(0, DRAFTS + 1, 2).tolist()
            kept = [int(rng.integers(0, n + 2)) for n in drafts]
            work, accepted = [], []
            for lease, way, n, k in zip(leases, ways, drafts, kept, strict=True):
                at = lease.num_tokens
                if at + n + 1 > len(way):
                    k = 0
                work.append((lease, [*way[at : at + k], *[5_000_000 + at] * (n + 1 - k)]))
                accepted.append(k)
            fails = rng.random() < 0.1
            try:
                with model.cache.step(work) as step:
                    model.write(step)
                    for lease, k in zip(leases, accepted, strict=True):
                        step.accept(lease, k)
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            model.poison_all_rejected()
            if round_ % 10 == 9:
                model.poison()
            for i, (lease, way) in enumerate(zip(leases, ways, strict=True)):
                assert lease.tokens().tolist() == way[: lease.num_tokens]
                what = rng.random()
                if what < 0.05:
                    kid = lease.fork()
                    lease.release()
                    leases[i] = kid
                elif what < 0.1:
                    at = lease.num_tokens
                    lease.pause().result(timeout=300)
                    model.poison_all_rejected()
                    assert lease.resume().result(timeout=300) == at
                if (round_ + i) % 3 == 0:  # what is wrong stays wrong
                    model.check(leases[i])
        for lease in leases:
            model.check(lease)
        lengths = [lease.num_tokens for lease in leases]
        for lease in leases:
            lease.release()
        model.cache.flush(to=DISK).result(timeout=300)
        for tiers in ((), (GPU,), (GPU, CPU)):
            model.evict(*tiers)
            for way, length in zip(ways, lengths, strict=True):
                with open_lease(model, [*way[:length], 1]) as lease:
                    assert lease.num_tokens == length // page * page
                    model.check(lease)
            assert found(model, ways[0][: lengths[0]]) == lengths[0] // page * page


@pytest.mark.parametrize("make", [dense])
def test_speculative_truncation_to_every_length(make: Callable[[], Layout]) -> None:
    """Past rejected tokens too, and into pages that others share."""
    layout = make()
    tokens = prompt(40)
    with served(layout, max_leases=4) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[:35])
        for to in range(35, -1, -1):
            with lease.fork() as kid:
                model.feed(kid, [], rejected=4)
                assert kid.truncate(to) == to
                model.poison()
                model.check(kid)
                model.feed(kid, [9, 8], rejected=3)
                model.check(kid)
        model.check(lease)


@pytest.mark.parametrize(("make", "starts"), KINDS)
def test_speculative_pauses_with_open_groups(make: Callable[[], Layout], starts: list[int]) -> None:
    """Right behind rejected tokens, at every edge, while another lease takes what is given back;
    a fork in the middle of a draft goes the same way."""
    tokens = prompt(starts[-1] + 20)
    with served(make(), gpu=16, max_leases=4) as model, open_lease(model, tokens) as base:
        for start in starts:
            model.verify(base, tokens[base.num_tokens : start], rejected=0)
            model.draft(base, DRAFTS)
            with base.fork() as lease:
                model.verify(lease, [], rejected=DRAFTS + 1)
                held = tables(lease)[1]
                lease.pause().result(timeout=300)
                model.poison()
                with open_lease(model, prompt(20, seed=start), read=False) as other:
                    model.feed(other, prompt(20, seed=start))
                assert lease.resume().result(timeout=300) == start
                stays = set(tables(lease)[1])
                assert stays <= set(held) and len(held) - len(stays) <= 1
                model.check(lease)
                model.verify(lease, tokens[start : start + 3], rejected=DRAFTS - 2)
                model.check(lease)
        model.check(base)


@pytest.mark.parametrize("make", [windowed, compressed, packed])
def test_speculative_truncation_of_tails(make: Callable[[], Layout]) -> None:
    """To the last checkpoint, whatever was rejected behind the committed tokens; giving back what
    was not used keeps all of them."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(3 * page)
    with served(layout) as model, open_lease(model, tokens) as lease:
        for length in (
            2 * page + 5,
            2 * page + 1,
            2 * page,
            2 * page - 1,
            page + 1,
            page,
            page - 1,
        ):
            model.prefill(lease, tokens[:length])
            model.draft(lease, DRAFTS + 1)
            assert lease.truncate(length) == length
            assert lease.capacity == -(-length // page) * page
            model.poison()
            model.check(lease)
            model.verify(lease, [], rejected=DRAFTS + 1)
            stands = lease.truncate(length - 1)
            assert stands == (length - 1) // page * page
            lease.ready.result(timeout=300)
            model.poison()
            model.verify(lease, tokens[stands : stands + 2], rejected=DRAFTS - 1)
            model.check(lease)
            lease.truncate(0)
            lease.ready.result(timeout=300)


def test_speculative_writing_by_hand() -> None:
    """Without ``Cache.step``: more is reserved and written than is committed; between the two a
    fork, a pause, a match and a second reserve know of nothing."""
    layout, tokens = dense(), prompt(60)
    with served(layout, max_leases=4) as model, open_lease(model, tokens) as lease:
        for i, kept in enumerate((3, 8, 0, 4, 1, 7, 5, 0, 6, 2, 8)):
            at = lease.num_tokens
            for _ in range(1 + i % 2):
                lease.reserve(8)
            fed = [*tokens[at : at + kept], *[5_000_000 + i] * (8 - kept)]
            digests = model.digests([*tokens[:at], *fed])[at:]
            slots = lease.slot_mapping(at, at + 8)
            for c in layout.components:
                ours = np.flatnonzero(slots[c.name] >= 0)
                for layer in c.layers:
                    rows = model.rows(c, layer, digests[ours])
                    model.put(model.pool.rows(c.name, layer), c, slots[c.name][ours], rows)
            pages = layout.page_tokens
            assert found(model, [*tokens[:at], *fed]) == at // pages * pages
            if i % 3 == 0:
                with lease.fork() as kid:
                    model.check(kid)
                    assert kid.num_tokens == at and kid.capacity == -(-at // pages) * pages
            if i % 4 == 2:  # what was written and not committed is not parked
                lease.pause().result(timeout=300)
                model.poison()
                assert lease.resume().result(timeout=300) == at
                model.check(lease)
                continue
            lease.commit(fed[:kept])
            model.poison_all_rejected()
            model.check(lease)
