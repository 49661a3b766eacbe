"""An index with a key of every token (V3.2): choosing among them, and where those chosen lie.

Scores are whole numbers, exact in every type and whatever the order of their sums, so what is
chosen is never a matter of the last bits; many are equal.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier import ConfigError
from kvtier.kernels import (
    RECORDS,
    PagedBatch,
    c4_slots,
    index_query,
    index_topk,
    quantise_query,
    read_records,
    token_slots,
    write_records,
)
from tests.unit.v4_cases import batch_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
PAGE = 64
LENGTHS = [(1, 130), (5, 70), (1, 0), (3, 3), (1, 12), (2, 200)]
"""Query and KV tokens: decode, a chunk, a padding row, a prompt, fewer than are chosen."""


def on_triton(*arguments: Any, **options: Any) -> Tensor:
    pytest.importorskip("triton")
    from kvtier.kernels import triton_index

    return triton_index.index_topk(*arguments, **options)


def keys_of(record: str, batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Pages of random whole numbers, and the same by slot; slots of no sequence are NaN."""
    pages = int(batch.block_table.max()) + 2
    by_slot = torch.randint(-2, 3, (pages * PAGE, 128)).float()
    owned = torch.zeros(pages * PAGE, dtype=torch.bool)
    for b, length in enumerate(batch.kv_lens):
        for at in range(length):
            owned[int(batch.block_table[b, at // PAGE]) * PAGE + at % PAGE] = True
    if record == "dense":
        storage = torch.full((pages * PAGE, 128), torch.nan)
    else:
        storage = torch.full((pages, RECORDS[record].page_bytes(PAGE)), 0xFF, dtype=torch.uint8)
    slots = owned.nonzero().flatten()
    write_records(storage, slots, by_slot[slots], RECORDS[record])
    return storage, by_slot


@pytest.mark.parametrize("record", ["dense", "index_fp8"])
@pytest.mark.parametrize(
    ("call", "topk"),
    [*((index_topk, topk) for topk in (1, 16, 128)), (on_triton, 16)],
    ids=["torch-1", "torch-16", "torch-128", "triton-16"],
)
def test_against_sorting_every_row(call: Callable[..., Any], record: str, topk: int) -> None:
    """E3: the highest scores among the tokens up to a query's own, its own included."""
    torch.manual_seed(2)
    batch = batch_of(LENGTHS, page_tokens=PAGE)
    keys, by_slot = keys_of(record, batch)
    n = sum(batch.query_lens)
    query, weights = torch.randint(-1, 2, (n, 4, 128)).float(), torch.randint(-2, 4, (n, 4)).float()
    moved = batch_of(LENGTHS, page_tokens=PAGE, device=DEVICE if call is on_triton else "cpu")
    place = moved.block_table.device
    arguments = (query.to(place), weights.to(place), keys.to(place), moved)
    options: dict[str, Any] = {"ratio": 1, "topk": topk, "record": RECORDS[record]}
    got = call(*arguments, **options).cpu()
    slots = call(*arguments, **options, slots=True).cpu()
    assert torch.equal(token_slots(got, batch), slots)
    row = 0
    for b, (queries, length) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
        for at in range(length - queries, length):
            if not length:
                wanted, where = [], []
            else:
                places = [
                    int(batch.block_table[b, p // PAGE]) * PAGE + p % PAGE for p in range(at + 1)
                ]
                products = torch.einsum("hd,kd->hk", query[row], by_slot[places]).relu()
                scores = (products * weights[row, :, None]).sum(0).tolist()
                best = sorted(range(at + 1), key=lambda p: (-scores[p], p))[:topk]
                wanted, where = sorted(best), [places[p] for p in sorted(best)]
            none = [-1] * (topk - len(wanted))
            assert got[row].tolist() == wanted + none
            assert slots[row].tolist() == where + none
            row += 1
    assert row == n


@pytest.mark.parametrize("call", [index_topk, on_triton], ids=["torch", "triton"])
def test_slots_of_entries_of_several_tokens(call: Callable[..., Any]) -> None:
    """Where all are chosen, where some are, and a page of them that the table lacks."""
    torch.manual_seed(3)
    place = DEVICE if call is on_triton else "cpu"
    batch = batch_of([(2, 130), (1, 60), (1, 0), (1, 1030)], page_tokens=PAGE)
    keys = torch.randint(-2, 3, ((int(batch.block_table.max()) + 1) * PAGE // 4, 128)).float()
    query, weights = torch.randint(-1, 2, (5, 4, 128)).float(), torch.ones(5, 4)
    options: dict[str, Any] = {"ratio": 4, "topk": 20, "record": RECORDS["dense"]}
    entries = index_topk(query, weights, keys, batch, **options)
    moved = replace(
        batch,
        block_table=batch.block_table.to(place),
        cu_seqlens_q=batch.cu_seqlens_q.to(place),
        kv_lens_device=batch.kv_lens_device.to(place),
    )
    arguments = (query.to(place), weights.to(place), keys.to(place))
    got = call(*arguments, moved, **options, slots=True)
    assert got.dtype == torch.int32 and torch.equal(got.cpu(), c4_slots(entries, batch))
    moved.block_table[3, 2] = -1
    if call is index_topk:
        if place == "cpu":
            with pytest.raises(ValueError, match="lacks a page"):
                call(*arguments, moved, **options, slots=True)
        return
    # Entries of the page come last; what is told of them is no slot.
    lacking = call(*arguments, moved, **options, slots=True).cpu()
    page = range(2 * PAGE // 4, 3 * PAGE // 4)
    others = call(*arguments, moved, **options).cpu()
    assert torch.equal(lacking[:4], got[:4].cpu()) and not {*page} & {*others[4].tolist()}
    every = call(*arguments, moved, **{**options, "topk": 300}, slots=True).cpu()[4]
    assert every[:257].eq(-1).nonzero().flatten().tolist() == [*page]


@pytest.mark.parametrize("call", [index_topk, on_triton], ids=["torch", "triton"])
@pytest.mark.parametrize("topk", [0, -1])
def test_fewer_than_one_entry_is_refused(call: Callable[..., Any], topk: int) -> None:
    query, batch = torch.zeros(1, 4, 128), batch_of([(1, 12)])
    with pytest.raises(ConfigError, match=f"topk={topk}: at least one"):
        call(query, query[..., 0], query[0], batch, ratio=1, topk=topk, record=RECORDS["dense"])


@pytest.mark.parametrize("call", [index_topk, on_triton], ids=["torch", "triton"])
def test_what_does_not_fit_together_is_refused(call: Callable[..., Any]) -> None:
    query, batch = torch.zeros(1, 4, 128, device=DEVICE), batch_of([(1, 12)], device=DEVICE)
    weights, keys = query[..., 0], torch.zeros(256, 128, device=DEVICE)
    wide = torch.zeros(2, 4, 128, device=DEVICE)
    for arguments, ratio, said in [
        ((wide, wide[..., 0], keys), 1, "2 queries, in a batch of 1"),
        ((query, weights[:, :3], keys), 1, "weights"),
        ((query, weights, keys[:, :64]), 1, "keys"),
        ((query, weights, keys), 0, "entries of 0 tokens"),
        ((query, weights, keys), 3, "entries of 3 tokens, pages of 256"),
    ]:
        with pytest.raises(ValueError, match=said):
            call(*arguments, batch, ratio=ratio, topk=2, record=RECORDS["dense"])


def test_more_than_a_kernel_chooses_is_refused() -> None:
    query, batch = torch.zeros(1, 4, 128, device=DEVICE), batch_of([(1, 12)], device=DEVICE)
    arguments = (query, query[..., 0], query[0], batch)
    options: dict[str, Any] = {"ratio": 1, "record": RECORDS["dense"]}
    assert on_triton(*arguments, topk=16384, **options)[0].tolist() == [*range(12)] + [-1] * 16372
    with pytest.raises(ValueError, match="topk=16385: 16384 entries at most"):
        on_triton(*arguments, topk=16385, **options)


# Between scores that are no numbers as floats the kernel takes the way that always leads on.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@given(data=st.data())
@settings(max_examples=50 if GPU else 8, deadline=None)
def test_any_scores_and_parts(data: st.DataObject) -> None:
    """The kernel that chooses, against sorting: ties, ends of the range, rows cut again."""
    triton_select = pytest.importorskip("kvtier.kernels.triton_select")
    topk, bound = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 300))
    unseen, highest = triton_select.UNSEEN.value, triton_select.HIGHEST.value
    pool = data.draw(
        st.lists(
            st.integers(unseen, highest) | st.sampled_from([unseen, -1, 0, 1, highest]),
            min_size=1,
            max_size=data.draw(st.sampled_from([1, 2, 5, 200])),
        )
    )
    seed, slots = data.draw(st.integers(0, 9)), data.draw(st.booleans())
    picks = torch.randint(len(pool), (bound,), generator=torch.Generator().manual_seed(seed))
    values = [pool[i] for i in picks]
    width = triton_select.row_scores(bound)
    scores = torch.full((1, width), highest, dtype=torch.int32)  # behind: never chosen
    scores[0, :bound] = torch.tensor(values, dtype=torch.int32)
    batch = batch_of([(1, bound)], page_tokens=PAGE)
    moved = replace(
        batch,
        block_table=batch.block_table.to(DEVICE),
        cu_seqlens_q=batch.cu_seqlens_q.to(DEVICE),
        kv_lens_device=batch.kv_lens_device.to(DEVICE),
    )
    out = torch.full((1, topk), 77, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_select, "WARPS", {64: 1, 128: 1})
        patch.setattr(triton_select, "SHARE", 2)
        triton_select.select_entries(scores.to(DEVICE), moved, 0, topk, out, ratio=1, slots=slots)
    best = sorted(sorted(range(bound), key=lambda i: (-values[i], i))[:topk])
    wanted = torch.tensor([best + [-1] * (topk - len(best))], dtype=torch.int32)
    if slots:
        wanted = token_slots(wanted, batch)
    assert torch.equal(out.cpu(), wanted)


def test_slots_of_tokens_that_are_named() -> None:
    batch = batch_of([(2, 70), (1, 0)], page_tokens=PAGE)
    first, second = batch.block_table[0, :2].tolist()
    named = torch.tensor([[0, 63, 64, -1], [69, -1, 5, 0], [-1, -1, -1, -1]])
    assert token_slots(named.int(), batch).tolist() == [
        [64 * first, 64 * first + 63, 64 * second, -1],
        [64 * second + 5, -1, 64 * first + 5, 64 * first],
        [-1, -1, -1, -1],
    ]
    with pytest.raises(ValueError, match="lacks a page"):
        token_slots(torch.tensor([[640], [0], [-1]]), batch)


def test_queries_that_come_rotated_are_only_quantised() -> None:
    torch.manual_seed(0)
    query, weights, none = torch.randn(3, 4, 128), torch.randn(3, 4), torch.empty(3, 0)
    got = index_query(query, weights, none, none, RECORDS["index_fp8"])
    assert all(map(torch.equal, got, quantise_query(query, weights)))
    same, unchanged = index_query(query, weights, none, none, RECORDS["dense"])
    assert torch.equal(same, query) and torch.equal(unchanged, weights)


@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
def test_attention_to_as_many_as_released_models_choose(record: str) -> None:
    """E5: lists of 2,048 of a longer context, one of them not full, against float64."""
    pytest.importorskip("triton")
    from kvtier.kernels import triton_mla_sparse

    torch.manual_seed(5)
    there, bf16 = 34 * PAGE, torch.bfloat16
    if record == "dense":
        rows = torch.full((there, 576), torch.nan, dtype=bf16)
    else:
        rows = torch.full((34, RECORDS[record].page_bytes(PAGE)), 0xFF, dtype=torch.uint8)
    slots = torch.stack([torch.randperm(there)[:2048] for _ in range(2)])
    slots[1, 2000:] = -1
    named = slots[slots >= 0].unique()  # what is not stays poison
    write_records(rows, named, torch.randn(len(named), 576).to(bf16), RECORDS[record])
    query = torch.randn(2, 3, 576).to(bf16)
    options: dict[str, Any] = {"latent_dim": 512, "scale": 192**-0.5, "record": RECORDS[record]}
    moved = (t.to(DEVICE) for t in (query, rows, slots.int()))
    out, lse = triton_mla_sparse.mla_sparse(*moved, **options)
    for i in range(2):
        keys = read_records(rows, slots[i][slots[i] >= 0], RECORDS[record]).double()
        scores = query[i].double() @ keys.T * 192**-0.5
        want = scores.softmax(-1) @ keys[:, :512]
        assert (out[i].cpu().double() - want).abs().max() <= 1e-2 * want.abs().max()
        assert (lse[i].cpu().double() - scores.logsumexp(-1)).abs().max() <= 1e-2
