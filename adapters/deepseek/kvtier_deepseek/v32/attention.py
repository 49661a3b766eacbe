"""The attention of one V3.2 layer during a step.

The step's latent rows and indexer keys are written first; then every query, of whatever sequence
and however many there are, picks the rows it attends to by the keys in the pages, and attends to
these as physical slots, in latent space.  What earlier chunks or another request's prefix left in
the pages is reached as the step's own rows are.  Keys are written for every token, also where there
is nothing to choose from yet: later queries choose among them.

Projections, norms, rope and scale are the model's own, the index's too.  No result's shape depends
on data, so a decode step may be captured in a graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtier.kernels import Kernel, PagedBatch, Record
from kvtier_deepseek.family import Run
from kvtier_deepseek.metadata import LayerRows
from kvtier_deepseek.mla.listed import attend_listed
from kvtier_deepseek.mla.projections import Projections
from kvtier_deepseek.mla.structure import Rotation

__all__ = ["INDEX", "LATENT", "V32Attention", "V32Run"]

LATENT = "latent"
INDEX = "index"


@dataclass(slots=True, eq=False, kw_only=True)
class V32Run(Run):
    """A step, and what is the same in all of its layers."""

    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class V32Attention(Projections):
    """Attention of one module to what its index picks."""

    index_rotation: Rotation
    kernels: Mapping[str, Kernel]
    records: Mapping[str, Record]
    """Of each component."""
    workspace_bytes: int | str

    def __call__(self, run: V32Run, hidden: Tensor, embeddings: Any) -> Tensor:
        """Attention output (1, tokens, hidden) for the step's packed tokens."""
        run.check(self.index, hidden)
        m: Any = self.module
        view = run.step.layer(self.index)
        query_latent = m.q_a_layernorm(m.q_a_proj(hidden))
        q_nope, q_rope = self.project_and_write(
            partial(run.kernel, self),
            lambda values: self._write(run, view, LATENT, values),
            (view.rows(LATENT), run.step.slot_mapping[LATENT], self.records[LATENT]),
            hidden,
            embeddings,
            query_latent,
        )
        query, key = self.project_index(hidden, embeddings, query_latent)
        self._write(run, view, INDEX, key)
        run.written.append(self.index)
        slots = self._select(run, hidden, query, view.rows(INDEX))
        out = attend_listed(
            self,
            partial(run.kernel, self),
            q_nope,
            q_rope,
            view.rows(LATENT),
            slots,
            self.records[LATENT],
            self.workspace_bytes,
        )
        result: Tensor = m.o_proj(out.flatten(1)[None])
        return result

    def _write(self, run: V32Run, view: LayerRows, component: str, values: Tensor) -> None:
        run.kernel(self, f"write_record {component}")(
            view.rows(component),
            run.step.slot_mapping[component],
            values,
            self.records[component],
        )

    def project_index(
        self, hidden: Tensor, embeddings: Any, query_latent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries (n, heads, dim) and keys (n, dim) of the index, the first values of each rotated,
        by the module's own submodules."""
        indexer: Any = self.module.indexer
        rope = indexer.qk_rope_head_dim
        query = indexer.wq_b(query_latent).view(*hidden.shape[:2], -1, indexer.head_dim)
        key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
        turned_query, turned_key = self.index_rotation(
            query[..., :rope], key[..., :rope], *embeddings, unsqueeze_dim=2
        )
        query = torch.cat((turned_query, query[..., rope:]), dim=-1)
        key = torch.cat((turned_key, key[..., rope:]), dim=-1)
        return query[0], key[0, :, 0]

    def _select(self, run: V32Run, hidden: Tensor, query: Tensor, keys: Tensor) -> Tensor:
        """Slots (tokens, k) int32 of the rows that the index picks for each query, -1 behind."""
        indexer: Any = self.module.indexer
        project = indexer.weights_proj
        weights = project(hidden.to(project.weight.dtype))[0].float()
        weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        record = self.records[INDEX]
        unturned = weights.new_empty(len(weights), 0)
        query, weights = run.kernel(self, "index_query")(query, weights, unturned, unturned, record)
        slots: Tensor = run.kernel(self, "index_topk")(
            query,
            weights,
            keys,
            run.batch,
            ratio=1,
            topk=indexer.index_topk,
            record=record,
            slots=True,
            workspace_bytes=self.workspace_bytes,
        )
        # What is not there lies behind, so no list goes further than there are tokens.
        return slots[:, : max(run.batch.kv_lens, default=0)]
