"""How absorbed attention's work is cut up, against a list of all blocks; in triton's interpreter
without a GPU.  Page numbers that are not to be read are negative."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvtier.kernels import PagedBatch, mla_schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(lengths: Sequence[int], *, page: int = 64, queries: int = 1) -> PagedBatch:
    """Sequences whose pages are in no order; what the table has behind them is -7."""
    needed = [-(-kv // page) for kv in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((len(lengths), max(needed, default=0) + 2), -7, dtype=torch.int32)
    for b, count in enumerate(needed):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    offsets = torch.arange(len(lengths) + 1, dtype=torch.int32) * queries
    return PagedBatch(
        query_lens=(queries,) * len(lengths),
        kv_lens=tuple(lengths),
        block_table=table.to(DEVICE),
        cu_seqlens_q=offsets.to(DEVICE),
        kv_lens_device=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_tokens=page,
    )


def all_blocks(batch: PagedBatch) -> list[tuple[int, int, int]]:
    """(sequence, its first block, row of the pool) of every block."""
    found: list[tuple[int, int, int]] = []
    for b, kv in enumerate(batch.kv_lens):
        begin = len(found)
        for token in range(0, kv, 64):
            page = int(batch.block_table[b, token // batch.page_tokens])
            found.append((b, begin, page * batch.page_tokens + token % batch.page_tokens))
    return found


def cost_of(lengths: Sequence[int], starts: Sequence[int]) -> int:
    """What the dearest of parts costs that start at these blocks, as the module says it."""
    ends = list(accumulate(-(-kv // 64) for kv in lengths if kv))
    worst = 0
    for at, stop in pairwise([*starts, ends[-1]]):
        cost = stop - at
        for low, high in pairwise([0, *ends]):
            if at < stop and low < stop and high > at:
                whole = at <= low and high <= stop
                cost += mla_schedule.SEQUENCE.value + (not whole) * mla_schedule.PIECE.value
        worst = max(worst, cost)
    return worst


def starts_of(lengths: Sequence[int], parts: int, quota: int, extra: int) -> list[int]:
    """Where parts start, found by walking over the list with its extra blocks."""
    places: list[int] = []
    block = 0
    for count in (-(-kv // 64) for kv in lengths if kv):
        places += [block] * extra + list(range(block, block + count))
        block += count
    return [places[part * quota] if part * quota < len(places) else block for part in range(parts)]


@pytest.mark.parametrize(
    ("lengths", "page", "parts"),
    [
        *(([500], 64, parts) for parts in (1, 3, 8, 11)),
        *(([64, 0, 1, 128, 0], 64, parts) for parts in (1, 3, 8)),
        *(([0, 0, 70, 3, 129, 64, 65], 256, parts) for parts in (1, 4)),
        ([1] * 70 + [0] * 60 + [300], 128, 3),
        ([640] * 7, 64, 8),
        ([640, 4000, 64, 1, 1, 900, 70], 64, 5),
    ],
)
def test_every_block_is_in_one_part(lengths: list[int], page: int, parts: int) -> None:
    batch = batch_of(lengths, page=page)
    made = mla_schedule.scheduled(batch, len(lengths), parts, 2)
    blocks = all_blocks(batch)
    assert made.rows.tolist() == [row for _, _, row in blocks]
    assert made.counts.shape == (parts, 2, 2)
    assert not made.counts.any()
    records = made.parts.tolist()
    assert [at for at, *_ in records] == [0, *(stop for _, stop, *_ in records[:-1])]
    assert records[-1][1] == len(blocks)
    holders: dict[int, list[int]] = {}
    for part, (at, stop, *_) in enumerate(records):
        for b, _, _ in blocks[at:stop]:
            holders.setdefault(b, []).append(part)
    for at, stop, b, begin, first, last, last_of_last, without, *rows in records:
        assert without == lengths.count(0)
        if at < stop:
            assert (b, begin) == blocks[at][:2]
            assert (first, last) == (holders[b][0], holders[b][-1])
            assert last_of_last == holders[blocks[stop - 1][0]][-1]
            some = [row for _, _, row in blocks[at : min(stop, at + 4)]]
            assert rows[: len(some)] == some


@settings(deadline=None, max_examples=6)
@given(
    st.lists(st.one_of(st.integers(0, 200), st.integers(0, 5000)), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_the_way_with_the_cheapest_dearest_part_is_taken(lengths: list[int], parts: int) -> None:
    if not any(lengths):
        return
    counts = [-(-kv // 64) for kv in lengths if kv]
    starts = [
        starts_of(lengths, parts, quota, extra)
        for extra in (0, mla_schedule.SEQUENCE.value)
        for least in (max(1, -(-(sum(counts) + extra * len(counts)) // parts)),)
        for quota in range(least, least + mla_schedule.WAYS.value // 2)
    ]
    made = mla_schedule.scheduled(batch_of(lengths), len(lengths), parts, 1)
    costs = [cost_of(lengths, one) for one in starts]
    assert made.parts[:, 0].tolist() == starts[costs.index(min(costs))]


@pytest.mark.parametrize(
    ("batch", "blocks", "parts", "used"), [(8, 16, 66, 64), (16, 8, 17, 16), (3, 100, 33, 30)]
)
def test_sequences_of_one_length_stay_whole(batch: int, blocks: int, parts: int, used: int) -> None:
    """Or are cut into pieces of one length, though some programs have nothing to do then."""
    made = mla_schedule.scheduled(batch_of([blocks * 64] * batch), batch, parts, 1)
    sizes = (made.parts[:, 1] - made.parts[:, 0]).tolist()
    assert sizes == [batch * blocks // used] * used + [0] * (parts - used)


def test_a_batch_is_cut_up_once_for_each_shape_of_grid() -> None:
    batch = batch_of([100, 3])
    first = mla_schedule.scheduled(batch, 2, 4, 1)
    assert mla_schedule.scheduled(batch, 2, 4, 1) is first
    assert mla_schedule.scheduled(batch, 2, 3, 1) is not first
    assert mla_schedule.scheduled(batch_of([100, 3]), 2, 4, 1) is not first


def test_spare_tokens_and_many_tiles() -> None:
    batch = batch_of([100, 3], queries=2)
    made = mla_schedule.scheduled(batch, 5, 2, 90)
    assert made.parts[:, 7].tolist() == [1, 1]
    assert mla_schedule.scheduled(batch, 4, 2, 90).parts[:, 7].tolist() == [0, 0]
    assert made.counts.shape == (2, 90, 2)
    assert not made.counts.any()


def test_no_keys_at_all() -> None:
    made = mla_schedule.scheduled(batch_of([0, 0]), 2, 1, 1)
    assert made.parts[0, :2].tolist() == [0, 0]
    assert made.parts[0, 7] == 2
