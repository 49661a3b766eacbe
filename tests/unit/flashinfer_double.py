"""Doubles of FlashInfer's wrapper, by what its documentation says of it."""

import itertools
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvtier.kernels import absorbed, flashinfer
from tests.unit.mla_cases import MlaCase

__all__ = ["NEW", "OLD", "Double", "check"]

LOG2E = 1.4426950408889634


class Double:
    """``BatchMLAPagedAttentionWrapper`` as documented: plans on the host, pages by exact lists,
    causal or not.  Of sequences without keys it has never heard.  Where heads of two queries share
    a tile it drops the key of the second that begins a tile of keys, as the kernels do."""

    plans = 0
    used: ClassVar[set[int]] = set()
    """Addresses of scratch."""

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20
        self.scratch = workspace
        Double.used.add(workspace.data_ptr())

    def plan(
        self, *, metadata: "Metadata", num_heads: int, head_dim_ckv: int, head_dim_kpe: int,
        page_size: int, causal: bool, sm_scale: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype, lse_mode: str, query_layout: str, kv_cache_layout: str,
    ) -> None:  # fmt: skip
        Double.plans += 1
        queries, pages, table, lengths = metadata
        for each in metadata:
            assert each.dtype == torch.int32 and each.is_contiguous()
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and q_data_type == kv_data_type
        assert (lse_mode, query_layout, kv_cache_layout) == ("basee", "split", "split")
        assert int(queries[0]) == int(pages[0]) == 0 and int(lengths.min()) > 0
        assert table.shape == (int(pages[-1]),) and int(table.min()) >= 0
        assert torch.equal(pages.diff(), (lengths + page_size - 1) // page_size)
        assert causal or int(queries.diff().max()) == 1
        self.all = (queries.tolist(), pages.tolist(), table, lengths.tolist())
        self.options = (page_size, sm_scale, num_heads, causal)

    def run(
        self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor], return_lse: bool,
        return_lse_base_on_e: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        queries, pages, table, lengths = self.all
        page, scale, heads, causal = self.options
        assert return_lse and return_lse_base_on_e and query[0].shape == (queries[-1], heads, 512)
        assert kv_cache[0].shape[1:] == (page, 512) and kv_cache[1].shape[1:] == (page, 64)
        joined = torch.cat(query, -1).float()
        rows = torch.cat(kv_cache, -1)
        out, lse = torch.zeros(query[0].shape), torch.zeros(query[0].shape[:2])
        tile = 128 if queries[-1] * heads // len(lengths) > 64 else 64
        for b, length in enumerate(lengths):
            keys = rows[table[pages[b] : pages[b + 1]].long()].flatten(0, 1)[:length].float()
            count = queries[b + 1] - queries[b]
            for i, h in itertools.product(range(count), range(heads)):
                seen = length - count + i + 1
                end = (i * heads + h) // tile * tile + tile
                if causal and end // heads == i and (seen - 1) % 64 == 0 and end % heads:
                    seen -= 1
                scores = joined[queries[b] + i, h] @ keys[:seen].T * scale
                out[queries[b] + i, h] = scores.softmax(-1) @ keys[:seen, :512]
                lse[queries[b] + i, h] = scores.logsumexp(-1)
        return out.to(query[0].dtype), lse


class Metadata(NamedTuple):
    """``MLAPlanMetadata``."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(cls, **tensors: Tensor) -> "Metadata":
        return cls(**tensors)


class Older(Double):
    """Before there was metadata: flat arguments, log-sum-exp in base 2."""

    def plan(self, **told: Any) -> None:
        metadata = Metadata(**{name: told.pop(name) for name in Metadata._fields})
        modes = {"lse_mode": "basee", "query_layout": "split", "kv_cache_layout": "split"}
        super().plan(metadata=metadata, **modes, **told)

    def run(  # type: ignore[override]
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        query, keys = (q_nope, q_pe), (ckv_cache, kpe_cache)
        options = {"return_lse": return_lse, "return_lse_base_on_e": True}
        out, lse = super().run(query=query, kv_cache=keys, **options)
        return out, lse * LOG2E


NEW = SimpleNamespace(BatchMLAPagedAttentionWrapper=Double, MLAPlanMetadata=Metadata)
OLD = SimpleNamespace(BatchMLAPagedAttentionWrapper=Older)
"""Module ``flashinfer.mla``, as it is and as it was."""


def check(some: MlaCase, dtype: torch.dtype = torch.bfloat16) -> None:
    """Beside the reference: outputs, log-sum-exps, and what there is of queries without keys."""
    options = {"latent_dim": 512, "scale": some.scale}
    inputs = some.absorbed_query, some.rows, some.batch
    out, lse = flashinfer.absorbed(*inputs, **options)
    right, right_lse = absorbed(*inputs, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    none = right_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, none) and out[none].eq(0).all()
    assert (out.float() - right.float()).abs().max() <= 8e-3 * right.float().abs().max()
    torch.testing.assert_close(lse[~none], right_lse[~none], rtol=1e-3, atol=1e-3)
