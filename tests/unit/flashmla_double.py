"""FlashMLA's functions in plain torch: what they take, what they answer, what they refuse.

As their documentation has it: pages of 64 tokens, 64 or 128 heads and whole blocks of slots where
keys are listed, slot -1 for none, a log-sum-exp of +inf where there are no keys.  Memory that no
length or list names is read by nothing here, so that poison shows.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvtier.kernels import RECORDS, read_records

PARTS = 4
Answer = tuple[Tensor, Tensor, Tensor, Tensor]


class Double:
    """Its ``calls`` go where FlashMLA's do; ``made`` counts schedules that were made."""

    def __init__(self) -> None:
        self.made = 0
        self.shapes: list[tuple[int, ...]] = []

    @property
    def calls(self) -> dict[str, Any]:
        return {
            "dense_decode_fwd": self.dense,
            "sparse_decode_fwd": self.sparse,
            "sparse_prefill_fwd": self.prefill,
        }

    def package(self) -> Any:
        """The same as what DeepSeek's package has for everybody."""

        def attend(
            q: Tensor,
            k_cache: Tensor,
            block_table: Tensor | None,
            cache_seqlens: Tensor | None,
            head_dim_v: int,
            tile_scheduler_metadata: Any,
            num_splits: None = None,
            softmax_scale: float | None = None,
            causal: bool = False,
            is_fp8_kvcache: bool = False,
            indices: Tensor | None = None,
            attn_sink: Tensor | None = None,
            extra_k_cache: Tensor | None = None,
            extra_indices_in_kvcache: Tensor | None = None,
            extra_topk_length: Tensor | None = None,
        ) -> Any:
            kept = tile_scheduler_metadata
            known = (kept.tile_scheduler_metadata, kept.num_splits)
            if indices is None:
                assert not is_fp8_kvcache and block_table is not None
                shape = (q, k_cache, head_dim_v, cache_seqlens, block_table)
                out, lse, *made = self.dense(*shape, softmax_scale, causal, *known)  # type: ignore[arg-type]
            else:
                assert is_fp8_kvcache and not causal and block_table is cache_seqlens is None
                extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
                out, lse, *made = self.sparse(
                    *(q, k_cache, indices, None, attn_sink, *known, *extra),
                    *(head_dim_v, softmax_scale),  # type: ignore[arg-type]
                )
            kept.tile_scheduler_metadata, kept.num_splits = made
            return out, lse

        def lists(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512) -> Any:
            return self.prefill(q, kv, indices, sm_scale, d_v, None, None)

        def metadata() -> Any:
            return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

        return SimpleNamespace(
            flash_mla_with_kvcache=attend,
            flash_mla_sparse_fwd=lists,
            get_mla_metadata=metadata,
            double=self,
        )

    @classmethod
    def of(cls, package: Any) -> "Double":
        """The one behind a package, with nothing counted."""
        double: Double = package.double
        double.made, double.shapes = 0, []
        return double

    def schedule(self, given: Tensor | None, splits: Tensor | None, batch: int) -> Any:
        assert (given is None) == (splits is None)
        if given is None or splits is None:
            self.made += 1
            given = torch.zeros(PARTS, 8, dtype=torch.int32)
            splits = torch.zeros(batch + 1, dtype=torch.int32)
        assert given.shape == (PARTS, 8) and splits.shape == (batch + 1,)
        return given, splits

    def dense(
        self,
        query: Tensor,
        pages: Tensor,
        value: int,
        lengths: Tensor,
        table: Tensor,
        scale: float,
        causal: bool,
        given: Tensor | None,
        splits: Tensor | None,
    ) -> Answer:
        batch, queries, heads, width = query.shape
        self.shapes.append(tuple(query.shape))
        assert width == 576 and value == 512 and query.dtype == pages.dtype
        assert query.dtype in (torch.bfloat16, torch.float16) and query.stride(-1) == 1
        assert pages.shape[1:] == (64, 1, 576) and pages.stride(-1) == 1
        assert lengths.dtype == table.dtype == torch.int32 and lengths.is_contiguous()
        assert lengths.shape == (batch,) and table.shape[0] == batch and table.stride(1) == 1
        assert int(table[:, 0].min()) >= 0  # read whatever the length
        out = query.new_zeros(batch, queries, heads, 512)
        lse = torch.full((batch, heads, queries), torch.inf)
        for b in range(batch):
            length = int(lengths[b])
            rows = pages[table[b, : -(-length // 64)].long()].reshape(-1, width)[:length].float()
            for i in range(queries):
                seen = rows[: max(0, length - (queries - 1 - i if causal else 0))]
                if len(seen):
                    scores = query[b, i].float() @ seen.T * scale
                    out[b, i] = (scores.softmax(-1) @ seen[:, :512]).to(query.dtype)
                    lse[b, :, i] = scores.logsumexp(-1)
        return out, lse, *self.schedule(given, splits, batch)

    def sparse(
        self,
        query: Tensor,
        pages: Tensor,
        lists: Tensor,
        lengths: None,
        sink: Tensor | None,
        given: Tensor | None,
        splits: Tensor | None,
        extra: Tensor | None,
        extra_lists: Tensor | None,
        extra_lengths: Tensor | None,
        value: int,
        scale: float,
    ) -> Answer:
        batch, queries, heads, width = query.shape
        self.shapes.append(tuple(query.shape))
        assert queries == 1 and heads in (64, 128) and value == 512
        assert query.dtype == torch.bfloat16 and query.stride(-1) == 1
        record = RECORDS["mla_fp8" if width == 576 else "v4_fp8"]
        assert width == (576 if record.name == "mla_fp8" else 512)
        assert (extra is None) == (extra_lists is None)
        if sink is not None:
            assert sink.dtype == torch.float32 and sink.shape == (heads,) and sink.is_contiguous()
        found = []
        for pool, named in ((pages, lists), (extra, extra_lists)):
            if pool is None or named is None:
                continue
            assert pool.dtype == torch.uint8 and pool.shape[2:] == (1, record.slot_bytes)
            assert pool.stride(1) == record.slot_bytes and pool.stride(0) % 16 == 0
            assert named.shape[:2] == (batch, 1) and named.shape[2] % 64 == 0 < named.shape[2]
            assert named.dtype == torch.int32 and named.stride(2) == 1
            size = record.page_bytes(pool.shape[1])
            storage = pool.as_strided((pool.shape[0], size), (pool.stride(0), 1))
            found.append((named[:, 0], storage))
        if extra_lengths is not None:
            assert extra_lengths.dtype == torch.int32 and extra_lengths.is_contiguous()
            assert extra_lengths.shape == (batch,) and extra is not None
            behind = torch.arange(found[1][0].shape[1]) >= extra_lengths[:, None]
            found[1] = found[1][0].masked_fill(behind, -1), found[1][1]
        out = query.new_zeros(batch, 1, heads, 512)
        lse = torch.full((batch, 1, heads), torch.inf)
        for b in range(batch):
            keys = torch.cat(
                [read_records(storage, s[b][s[b] >= 0], record) for s, storage in found]
            )
            self._attend(query[b, 0], keys, scale, sink, out[b, 0], lse[b, 0])
        return out, lse.transpose(1, 2), *self.schedule(given, splits, batch)

    def prefill(
        self,
        query: Tensor,
        rows: Tensor,
        lists: Tensor,
        scale: float,
        value: int,
        sink: Tensor | None,
        lengths: None,
    ) -> list[Tensor]:
        n, heads, width = query.shape
        self.shapes.append(tuple(query.shape))
        assert heads in (64, 128) and value == 512 and width == 576 and query.is_contiguous()
        assert query.dtype == rows.dtype == torch.bfloat16 and rows.shape[1:] == (1, width)
        assert lists.shape[:2] == (n, 1) and lists.shape[2] % 128 == 0 < lists.shape[2]
        assert lists.dtype == torch.int32 and rows.stride(2) == lists.stride(2) == 1
        out, lse = query.new_zeros(n, heads, 512), torch.full((n, heads), torch.inf)
        for i in range(n):
            keys = rows[lists[i, 0][lists[i, 0] >= 0].long(), 0].float()
            self._attend(query[i], keys, scale, sink, out[i], lse[i])
        return [out, torch.zeros_like(lse), lse]

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        scale: float,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        if not len(keys):
            return
        scores = query.float() @ keys.T * scale
        lse.copy_(scores.logsumexp(-1))
        weight = torch.sigmoid(lse - sink)[:, None] if sink is not None else 1.0
        out.copy_(scores.softmax(-1) @ keys[:, :512] * weight)
