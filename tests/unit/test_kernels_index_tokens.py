"""An index with a key of every token (V3.2): choosing among them, and where those chosen lie.

Scores are whole numbers, exact in every type and whatever the order of their sums, so what is
chosen is never a matter of the last bits; many are equal.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.kernels import (
    RECORDS,
    PagedBatch,
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
    got = call(
        *(query.to(place), weights.to(place), keys.to(place), moved),
        ratio=1,
        topk=topk,
        record=RECORDS[record],
    ).cpu()
    slots = token_slots(got, batch)
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
