"""The next-n predictor of DeepSeek-V3 as a draft.

One decoder layer more, of the model's own class, behind the last: from the normed last hidden state
of position p - 1 and token p it makes what follows token p.  Its latent row of position p depends
on nothing else, so rows of committed tokens are made of the model's true hidden states, all of a
step at once; guesses are chained, each from what the layer itself made of the guess before, with
rows in scratch.

Attention over pages is the adapter's; over scratch it is written down here, and the two are merged
by their log-sum-exp.
"""

import copy
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from kvtier import LayoutMismatch
from kvtier.kernels import PagedBatch, merge
from kvtier.kernels.mla import expand
from kvtier.layouts import Layout
from kvtier_deepseek.drafts.base import CachedDraft, Continuation, Tap, on_device
from kvtier_deepseek.drafts.ledger import Stand
from kvtier_deepseek.drafts.weights import fill, like_layer, read
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.family import Family
from kvtier_deepseek.metadata import DeviceStepLike, StepLike, TailStepLike
from kvtier_deepseek.mla.attention import COMPONENT, MlaAttention

__all__ = ["Mtp", "MtpModule"]


@final
class MtpModule(nn.Module):
    """The predictor's own weights; embedding and head are the model's.

    Submodules are named as in the checkpoint, below ``model.layers.{num_hidden_layers}``, but for
    ``block``, whose parts lie there directly, and ``norm``, which is ``shared_head.norm`` there.
    """

    def __init__(self, model: nn.Module) -> None:
        """Weights are not initialised."""
        super().__init__()
        body: Any = model.model
        config = copy.deepcopy(body.config)
        last = body.layers[-1]
        size = config.hidden_size
        self.index = int(config.num_hidden_layers)
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(body.norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(last)(config, self.index)
        like_layer(self, last, body.norm.weight)

    def combine(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What goes into the block: (n, hidden) of tokens and of the positions before them."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        result: Tensor = self.eh_proj(joined)
        return result


@dataclass(slots=True, eq=False)
class _Flight:
    """Rows that guesses have made so far, and the pages that lie before them."""

    batch: PagedBatch
    rows: Tensor
    """(slots, width): the cache's."""
    fresh: Tensor
    """(requests, guesses so far, width)"""


_FLIGHT: ContextVar[_Flight | None] = ContextVar("kvtier_deepseek_mtp_flight", default=None)


@final
class Mtp(CachedDraft):
    """DeepSeek-V3's next-n predictor; guesses are chained where more than one is wanted."""

    kind: ClassVar[str] = "mtp"
    carries: ClassVar[bool] = True
    reach = None

    def __init__(self, model: nn.Module, module: MtpModule) -> None:
        config: Any = model.config
        if config.model_type != "deepseek_v3":
            raise UnsupportedModel(f"{config.model_type!r} has no next-n predictor of this kind")
        super().__init__(values=int(config.hidden_size), layers=1)
        self.module = module
        self._model: Any = model
        self._attention: MlaAttention | None = None
        self._state_dtype: torch.dtype | None = None
        self._page_tokens = 0

    @classmethod
    def load(cls, model: nn.Module, checkpoint: str | Path) -> Self:
        """With the weights of a checkpoint's draft layer, which transformers leaves out.

        ``checkpoint`` is a directory of safetensors files.  Raises UnsupportedModel naming a tensor
        that is missing, of another shape or in a format that is not known.
        """
        module = MtpModule(model)
        prefix = f"model.layers.{module.index}."
        fill(module, read(checkpoint, prefix), name_of)
        return cls(model, module)

    @property
    def taps(self) -> Mapping[str, Tap]:
        return {"hidden": Tap(self._model.model.norm, "output")}

    def _bind(self, family: Family, layout: Layout) -> None:
        full = next((each for each in family.layers if isinstance(each, MlaAttention)), None)
        index = self.module.index
        latent = next((c for c in layout.components if c.name == COMPONENT), None)
        if full is None or latent is None or index not in latent.layers:
            raise LayoutMismatch(f"{layout.name!r} has no latent rows in layer {index}")
        attention = self.module.block.self_attn
        self._attention = replace(full, module=attention, index=index)
        attention.forward = self._attend
        name = next((c.dtype for c in layout.components if c.name == "draft_state"), latent.dtype)
        self._state_dtype = getattr(torch, name)
        self._page_tokens = layout.page_tokens

    def _hidden(self, taps: Mapping[str, Tensor]) -> Tensor:
        hidden = taps["hidden"][0]
        assert self._state_dtype is not None
        return hidden.to(self._state_dtype).to(hidden.dtype)  # as it comes back from a page

    def _write(
        self, step: StepLike, device: DeviceStepLike, hidden: Tensor, stands: Sequence[Stand]
    ) -> None:
        attention = self._bound
        before, lost = shifted(step, hidden, stands)
        tokens = hidden.shape[0]
        mixed = self.module.combine(self._embed(device.input_ids[:tokens]), before)
        normed = self.module.block.input_layernorm(mixed)[None]
        *_, latent = attention.project(normed, self._turns(mixed, device.positions[:tokens]))
        if lost:
            latent[on_device(lost, latent.device)] = 0
        attention.kernels["write_rows"].run(
            device.layer(attention.index).rows(COMPONENT),
            device.slot_mapping[COMPONENT][:tokens],
            latent,
        )

    def _capture(self, step: TailStepLike, device: DeviceStepLike) -> None:
        """Nothing: the layer's rows are history."""

    def _guess(
        self,
        step: StepLike,
        device: DeviceStepLike,
        rows: Sequence[Continuation],
        stands: Sequence[Stand],
    ) -> Tensor:
        where = device.input_ids.device
        flight = self._flight(step, device, rows, stands)
        position = on_device([row.length for row in rows], where)
        token = on_device([row.tokens[-1] for row in rows], where)
        hidden = torch.stack([stand.carry for stand in stands if stand.carry is not None])
        found = []
        taken = _FLIGHT.set(flight)
        try:
            for _ in range(max(row.count for row in rows)):
                mixed = self.module.combine(self._embed(token), hidden)
                turns = self._turns(mixed, position)
                out = self.module.block(mixed[None], position_embeddings=turns)
                hidden = self.module.norm(out[0])
                token = self._model.lm_head(hidden).argmax(-1)
                found.append(token)
                position = position + 1
        finally:
            _FLIGHT.reset(taken)
        return torch.stack(found, dim=1)

    def _ready(self, stand: Stand) -> bool:
        """With a gap, guesses are made of the whole pages behind it, from the first one on."""
        if stand.carry is None:
            return False
        first = self._first_page(stand) * self._page_tokens
        return first == 0 or stand.length - first >= self._page_tokens

    def _first_page(self, stand: Stand) -> int:
        return -(-stand.gapless // self._page_tokens)

    def _flight(
        self,
        step: StepLike,
        device: DeviceStepLike,
        rows: Sequence[Continuation],
        stands: Sequence[Stand],
    ) -> _Flight:
        attention = self._bound
        where = device.input_ids.device
        first = [self._first_page(stand) for stand in stands]
        lens = [row.length - f * self._page_tokens for row, f in zip(rows, first, strict=True)]
        table = np.full((len(rows), -(-max(lens) // self._page_tokens)), -1, dtype=np.int32)
        for at, (row, f, length) in enumerate(zip(rows, first, lens, strict=True)):
            pages = -(-length // self._page_tokens)
            table[at, :pages] = step.block_table[row.row, f : f + pages]
        ints = torch.int32
        batch = PagedBatch(
            query_lens=(1,) * len(rows),
            kv_lens=tuple(lens),
            block_table=on_device(table, where, ints),
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=ints, device=where),
            kv_lens_device=on_device(lens, where, ints),
            page_tokens=self._page_tokens,
        )
        cached = device.layer(attention.index).rows(COMPONENT)
        return _Flight(batch, cached, cached.new_empty(len(rows), 0, cached.shape[1]))

    def _attend(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """Stands as ``forward`` on the block's attention: one guess of every request."""
        flight = _FLIGHT.get()
        assert flight is not None, "the predictor's block runs only to guess"
        attention = self._bound
        q_nope, q_rope, latent = attention.project(hidden_states, options["position_embeddings"])
        fresh = latent[:, None].to(flight.rows.dtype)
        flight.fresh = torch.cat((flight.fresh, fresh), dim=1)
        weight = attention.up_weight(hidden_states.dtype)
        out = (
            self._materialised(flight, torch.cat((q_nope, q_rope), dim=-1))
            if weight is None
            else self._absorbed(flight, q_nope, q_rope, weight)
        )
        module: Any = attention.module
        return module.o_proj(out.flatten(1)[None]), None

    def _absorbed(self, flight: _Flight, q_nope: Tensor, q_rope: Tensor, weight: Tensor) -> Tensor:
        attention = self._bound
        d = attention.dims
        per_head = weight.reshape(d.heads, d.nope + d.value, d.latent)
        key_up, value_up = torch.split(per_head, [d.nope, d.value], dim=1)
        query = torch.cat((torch.einsum("nhp,hpl->nhl", q_nope, key_up), q_rope), dim=-1)
        out, lse = attention.kernels["mla_absorbed"].run(
            query,
            flight.rows,
            flight.batch,
            latent_dim=d.latent,
            scale=attention.scale,
            workspace_bytes=attention.workspace_bytes,
        )
        keys = flight.fresh[:, :, None]
        out, _ = merge(out, lse, *_beside(query, keys, keys[..., : d.latent], attention.scale))
        return torch.einsum("nhl,hvl->nhv", out, value_up)

    def _materialised(self, flight: _Flight, query: Tensor) -> Tensor:
        attention = self._bound
        d = attention.dims
        with attention.workspace.taken() as workspace:
            out, lse = attention.kernels["mla_materialised"].run(
                query,
                flight.rows,
                flight.batch,
                attention.project_up,
                dims=d,
                scale=attention.scale,
                workspace=workspace,
            )
        keys, values = expand(flight.fresh.flatten(0, 1), attention.up_project, d)
        shape = flight.fresh.shape[:2]
        keys, values = (each.view(*shape, *each.shape[1:]) for each in (keys, values))
        return merge(out, lse, *_beside(query, keys, values, attention.scale))[0]

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._model.model.embed_tokens(tokens)
        return embedded

    def _turns(self, like: Tensor, positions: Tensor) -> Any:
        return self._model.model.rotary_emb(like[None], position_ids=positions[None])

    @property
    def _bound(self) -> MlaAttention:
        assert self._attention is not None
        return self._attention


def name_of(key: str) -> str:
    """Where the checkpoint has what is ``key`` here, below the layer's prefix."""
    if key.startswith("norm."):
        return f"shared_head.{key}"
    return key.removeprefix("block.")


def shifted(step: StepLike, hidden: Tensor, stands: Sequence[Stand]) -> tuple[Tensor, list[int]]:
    """(tokens, values) of the position before each of the step's tokens, and the tokens of which
    that is lost."""
    before = hidden.roll(1, dims=0)
    starts = step.cu_seqlens_q[:-1].tolist()
    fed = [i for i, count in enumerate(step.query_lens.tolist()) if count]
    lost = [starts[i] for i in fed if stands[i].carry is None]
    carries = [
        hidden.new_zeros(hidden.shape[1]) if (carry := stands[i].carry) is None else carry
        for i in fed
    ]
    before[on_device([starts[i] for i in fed], hidden.device)] = torch.stack(carries)
    return before, lost


def _beside(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one query (n, heads, width) each to few keys (n, keys, heads or 1, width)."""
    exact = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1]
    keys = keys.to(exact).expand(-1, -1, heads, -1)
    values = values.to(exact).expand(-1, -1, heads, -1)
    scores = torch.einsum("nhw,njhw->nhj", query.to(exact), keys) * scale
    lse = scores.logsumexp(-1)
    out = torch.einsum("nhj,njhv->nhv", (scores - lse[..., None]).exp(), values)
    return out.to(query.dtype), lse.to(torch.float32) if exact == torch.float32 else lse
