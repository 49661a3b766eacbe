"""Which sequences of a step take which form of attention, decided once per step, not per layer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtier.kernels import PagedBatch
from kvtier_deepseek.metadata import DeviceStepLike, RowLens
from kvtier_deepseek.mla.attention import Form, Group, MlaRun

__all__ = ["make_run"]


def make_run(
    device: DeviceStepLike, lens: RowLens, *, page_tokens: int, max_absorbed: int
) -> MlaRun:
    """A run of this step: sequences with at most ``max_absorbed`` queries absorbed, others not.

    ``lens`` are those of ``device``'s rows, padding rows too.
    """
    query_lens, kv_lens = lens
    few = [b for b, q in enumerate(query_lens) if q <= max_absorbed]
    many = [b for b, q in enumerate(query_lens) if q > max_absorbed]
    forms: tuple[tuple[Form, list[int]], ...] = (("absorbed", few), ("materialised", many))
    groups = [
        _group(form, members, query_lens, kv_lens, device, page_tokens)
        for form, members in forms
        if members
    ]
    everything = range(len(query_lens))
    return MlaRun(
        step=device,
        groups=tuple(groups),
        whole=_group("materialised", everything, query_lens, kv_lens, device, page_tokens),
    )


def _group(
    form: Form,
    members: Sequence[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    device: DeviceStepLike,
    page_tokens: int,
) -> Group:
    mine = tuple(query_lens[b] for b in members)
    tokens: Tensor | None = None
    block_table, cu_seqlens_q, kv_lens_device = (
        device.block_table,
        device.cu_seqlens_q,
        device.kv_lens,
    )
    if len(members) < len(query_lens):
        where = device.input_ids.device
        starts = np.cumsum([0, *query_lens])
        picked = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in members])
        tokens = torch.from_numpy(picked).to(where)
        rows = torch.tensor(members, device=where)
        block_table, kv_lens_device = block_table[rows], kv_lens_device[rows]
        sums = np.cumsum([0, *mine], dtype=np.int32)
        cu_seqlens_q = torch.from_numpy(sums).to(where)
    return Group(
        form=form,
        batch=PagedBatch(
            query_lens=mine,
            kv_lens=tuple(kv_lens[b] for b in members),
            block_table=block_table,
            cu_seqlens_q=cu_seqlens_q,
            kv_lens_device=kv_lens_device,
            page_tokens=page_tokens,
        ),
        tokens=tokens,
    )
