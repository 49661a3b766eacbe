"""``Cache.step``: its arrays against a token-by-token oracle, and what leaving it does."""

import array
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvtier
from kvtier import LeaseError, OutOfPages, TokenError
from kvtier.testing import ManualTransfer
from tests.shell.kit import PAGE, feed, fill, free, make, prompt


def check_arrays(step: kvtier.Step, contexts: list[int], chunks: list[list[int]]) -> None:
    """Every array, derived again one token at a time from the leases' own block tables."""
    tables = [lease.block_table().tolist() for lease in step.leases]
    ids, positions, slots = [], [], []
    for table, context, chunk in zip(tables, contexts, chunks, strict=True):
        for i, token in enumerate(chunk):
            at = context + i
            ids.append(token)
            positions.append(at)
            slots.append(table[at // PAGE] * PAGE + at % PAGE)
    lens = [len(chunk) for chunk in chunks]
    kv = [c + n for c, n in zip(contexts, lens, strict=True)]
    pages = [-(-n // PAGE) for n in kv]
    widest = max(pages, default=0)
    assert step.input_ids.tolist() == ids
    assert step.positions.tolist() == positions
    assert step.slot_mapping["latent"].tolist() == slots
    assert step.query_lens.tolist() == lens
    assert step.context_lens.tolist() == contexts
    assert step.kv_lens.tolist() == kv
    assert step.cu_seqlens_q.tolist() == [0, *accumulate(lens)]
    assert step.block_table.shape == (len(chunks), widest)
    for row, table, needed in zip(step.block_table.tolist(), tables, pages, strict=True):
        assert row == table[:needed] + [-1] * (widest - needed)
    assert step.window_table.shape == (len(chunks), 0)
    assert step.state_slots.shape == (0,)
    assert step.captures == ()
    assert len(set(slots)) == len(slots), "two tokens share a slot"
    for name in ("input_ids", "positions", "cu_seqlens_q", "query_lens", "block_table"):
        assert getattr(step, name).dtype == np.int32, name


@given(
    rows=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), max_size=5),
    shared=st.booleans(),
)
def test_arrays_agree_with_an_oracle(rows: list[tuple[int, int, int]], shared: bool) -> None:
    """Rows of (committed tokens, new tokens, tokens reserved beyond)."""
    cache, transfer = make(gpu=64)
    leases = []
    for row, (context, _, reserve) in enumerate(rows):
        tokens = prompt(context, seed=0 if shared else row)
        lease = cache.lease([*tokens, 1])
        feed(cache, lease, tokens[lease.ready.result(timeout=0) :])
        lease.reserve(reserve)
        leases.append(lease)
    contexts = [context for context, _, _ in rows]
    chunks = [[7 * row + i for i in range(new)] for row, (_, new, _) in enumerate(rows)]
    with cache.step(zip(leases, chunks, strict=True)) as step:
        check_arrays(step, contexts, chunks)
    for lease, context, chunk in zip(leases, contexts, chunks, strict=True):
        assert lease.num_tokens == context + len(chunk)
        lease.release()
    cache.check()
    transfer.finish_all()
    cache.close()


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_page_edges_in_prefill_and_decode(cache: kvtier.Cache, length: int) -> None:
    """AT-4.4, AT-4.9: with c tokens committed, the token being fed sits at position c."""
    with cache.lease(prompt(length)) as lease:
        with cache.step([(lease, prompt(length))]) as step:
            check_arrays(step, [0], [prompt(length)])
        for extra in range(PAGE + 1):
            with cache.step([(lease, [9])]) as step:
                check_arrays(step, [length + extra], [[9]])


def test_a_row_that_was_longer_leaves_nothing_behind(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    """AT-4.10: stale block-table entries of an earlier lease on the same row."""
    fill(cache, prompt(10 * PAGE))
    transfer.finish_all()
    with cache.lease([1]) as short, cache.lease(prompt(30, 1)) as long:
        with cache.step([(short, [1]), (long, prompt(30, 1))]) as step:
            check_arrays(step, [0, 0], [[1], prompt(30, 1)])
        assert short.block_table().shape == (1,)


def test_an_empty_batch_is_a_step(cache: kvtier.Cache, transfer: ManualTransfer) -> None:
    with cache.step([]) as step:
        check_arrays(step, [], [])
        assert step.leases == ()
    assert not transfer.started


def test_an_empty_chunk_beside_others(cache: kvtier.Cache) -> None:
    with cache.lease(prompt(6)) as one, cache.lease(prompt(6, 1)) as two:
        with cache.step([(one, []), (two, prompt(6, 1))]) as step:
            check_arrays(step, [0, 0], [[], prompt(6, 1)])
        assert (one.num_tokens, two.num_tokens) == (0, 6)


@pytest.mark.parametrize(
    "chunk",
    [
        [5, 6, 7],
        (5, 6, 7),
        kvtier.pack([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.int32),
        np.array([5, 6, 7], dtype=np.int64),
        array.array("i", [5, 6, 7]),
        torch.tensor([5, 6, 7]),
        [np.int64(5), np.int32(6), 7],
    ],
    ids=lambda chunk: type(chunk).__name__,
)
def test_tokens_in_every_form_beside_lists(cache: kvtier.Cache, chunk: Any) -> None:
    with cache.lease([1]) as a, cache.lease([1]) as b, cache.lease([1]) as c:
        with cache.step([(a, [1]), (b, chunk), (c, [2, 3])]) as step:
            check_arrays(step, [0, 0, 0], [[1], [5, 6, 7], [2, 3]])
        assert b.tokens().tolist() == [5, 6, 7]


# ------------------------------------------------------------------ leaving


def test_an_exception_commits_nothing_and_keeps_the_reserve(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    with cache.lease(prompt(9)) as lease:
        with pytest.raises(ZeroDivisionError), cache.step([(lease, prompt(9))]):
            _ = 1 // 0
        assert lease.num_tokens == 0
        assert lease.capacity == 3 * PAGE
        assert not transfer.started
        assert cache.match(prompt(9)).tokens == 0
        feed(cache, lease, prompt(9))  # and again
        assert lease.num_tokens == 9


def test_leaving_never_masks_the_bodys_exception() -> None:
    cache, _ = make()
    lease = cache.lease(prompt(3))

    def body() -> None:
        with cache.step([(lease, prompt(3))]):
            with pytest.raises(LeaseError, match="closed with 1 open"):
                cache.close()
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        body()
    with pytest.raises(kvtier.CacheClosed):
        _ = lease.num_tokens


def test_the_step_ends_behind_the_work_it_queued(
    cache: kvtier.Cache, transfer: ManualTransfer
) -> None:
    """Also after an exception: what was queued still runs on those pages."""
    with cache.lease(prompt(3)) as lease:
        feed(cache, lease, prompt(3))
        before = transfer.fences
        with pytest.raises(ZeroDivisionError), cache.step([(lease, [1])]):
            assert transfer.fences == before + 1  # behind what others queued
            _ = 1 // 0
        assert transfer.fences == before + 2


def test_accept_commits_the_leading_tokens_only(cache: kvtier.Cache) -> None:
    with cache.lease(prompt(3)) as one, cache.lease(prompt(3, 1)) as two:
        with cache.step([(one, [1, 2, 3, 4, 5]), (two, [6, 7, 8])]) as step:
            step.accept(one, 2)
        assert one.tokens().tolist() == [1, 2]
        assert two.tokens().tolist() == [6, 7, 8]
        with cache.step([(two, [4]), (one, [9, 9])]) as step:
            check_arrays(step, [3, 2], [[4], [9, 9]])  # over the rejected ones' slots
            step.accept(one, 0)
            step.accept(two, 1)
        assert one.tokens().tolist() == [1, 2]
        assert two.tokens().tolist() == [6, 7, 8, 4]


def test_accept_refuses_what_it_cannot_mean(cache: kvtier.Cache) -> None:
    with cache.lease([1]) as lease, cache.lease([1]) as other:
        with cache.step([(lease, [1, 2])]) as step:
            with pytest.raises(LeaseError, match="not in this step"):
                step.accept(other, 1)
            for n in (-1, 3):
                with pytest.raises(LeaseError, match=f"cannot accept {n} of the 2"):
                    step.accept(lease, n)
        with pytest.raises(LeaseError, match="has ended"):
            step.accept(lease, 1)
        assert lease.num_tokens == 2


# ------------------------------------------------------------------ the batch as a whole


def test_out_of_pages_changes_nothing() -> None:
    cache, _ = make(gpu=6)
    with cache.lease(prompt(8)) as one, cache.lease(prompt(8, 1)) as two:
        feed(cache, one, prompt(8))
        before = cache._core.digest()
        with (
            pytest.raises(OutOfPages) as caught,
            cache.step([(one, [1]), (two, prompt(16, 1))]),
        ):
            raise AssertionError("not reached")
        assert caught.value.needed == 5
        assert caught.value.available == 4
        assert caught.value.never_fits  # the two of them
        assert cache._core.digest() == before
        feed(cache, two, prompt(16, 1))  # alone it fits
    cache.close(drain=False)


def test_a_lease_is_in_one_step_at_a_time(cache: kvtier.Cache) -> None:
    with cache.lease([1]) as lease, cache.lease([2], label="free") as other:
        with (
            pytest.raises(LeaseError, match="twice"),
            cache.step([(other, [1]), (lease, [1]), (lease, [2])]),
        ):
            raise AssertionError("not reached")
        with cache.step([(lease, [1])]):
            with (
                pytest.raises(LeaseError, match="another step"),
                cache.step([(other, [1]), (lease, [1])]),
            ):
                raise AssertionError("not reached")
            with cache.step([(other, [1])]):  # two steps of different leases are fine
                pass
        assert (lease.num_tokens, other.num_tokens) == (1, 1)


def test_a_step_is_entered_once(cache: kvtier.Cache) -> None:
    with cache.lease([1]) as lease:
        stepping = cache.step([(lease, [1])])
        with stepping:
            pass
        with pytest.raises(LeaseError, match="entered before"), stepping:
            raise AssertionError("not reached")
        assert lease.num_tokens == 1


def test_leases_of_another_cache_are_refused(cache: kvtier.Cache) -> None:
    other, _ = make()
    with other, other.lease([1], label="theirs") as theirs, cache.lease([1]) as mine:
        with (
            pytest.raises(LeaseError, match="'theirs' is of another cache"),
            cache.step([(mine, [1]), (theirs, [1])]),
        ):
            raise AssertionError("not reached")
        feed(cache, mine, [1])
        feed(other, theirs, [1])


@pytest.mark.parametrize("work", [[1], ["ab"], [None], [(1, 2, 3)]])
def test_work_that_is_no_pairs(cache: kvtier.Cache, work: Any) -> None:
    with pytest.raises(LeaseError, match="pairs"), cache.step(work):
        raise AssertionError("not reached")


@pytest.mark.parametrize("bad", [[-1], [1 << 31], [1.0], ["x"], [[1]], 5, "abc", [None]])
def test_bad_tokens_name_their_lease(cache: kvtier.Cache, bad: Any) -> None:
    with cache.lease([1], label="fine") as fine, cache.lease([1], label="broken") as broken:
        with (
            pytest.raises(TokenError, match="lease 'broken': "),
            cache.step([(fine, [1]), (broken, bad)]),
        ):
            raise AssertionError("not reached")
        feed(cache, fine, [1])
        assert (fine.num_tokens, broken.num_tokens) == (1, 0)


# ------------------------------------------------------------------ leases used meanwhile


def test_only_the_step_writes_its_leases(cache: kvtier.Cache) -> None:
    with cache.lease([1]) as lease, cache.step([(lease, [1, 2, 3, 4])]):
        for call in (
            lambda: lease.reserve(1),
            lambda: lease.commit([1]),
            lambda: lease.truncate(0),
            lease.fork,
            lease.pause,
            lease.resume,
        ):
            with pytest.raises(LeaseError, match="while a step runs"):
                call()
        assert lease.slot_mapping(0, 4)["latent"].shape == (4,)


def test_a_lease_released_meanwhile_keeps_its_pages_until_the_end(cache: kvtier.Cache) -> None:
    """★35 for a forward pass: its kernels still write there."""
    with cache.lease(prompt(8)) as stays:
        gone = cache.lease(prompt(8, 1))
        with cache.step([(gone, prompt(8, 1)), (stays, prompt(8))]) as step:
            before = free(cache)
            gone.release()
            gone.release()
            assert gone.state is kvtier.LeaseState.RELEASED
            assert free(cache) == before
            with pytest.raises(kvtier.LeaseReleased):
                _ = gone.num_tokens
            with pytest.raises(LeaseError), cache.step([(gone, [1])]):
                raise AssertionError("not reached")
            assert step.leases == (gone, stays)
        assert free(cache) == before + 2
        assert stays.tokens().tolist() == prompt(8)
        assert cache.match([*prompt(8, 1), 1]).tokens == 0
        assert [info.id for info in cache.leases()] == [stays._record.id]


def test_a_lease_released_in_a_failing_step_is_released(cache: kvtier.Cache) -> None:
    lease = cache.lease(prompt(8))

    def body() -> None:
        with cache.step([(lease, prompt(8))]):
            lease.release()
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        body()
    assert cache.leases() == []
    assert free(cache) == 16
