"""The next-n predictor of DeepSeek-V4 as a draft.

As V3's, but for two things.  It reads the model's residual streams, all ``hc_mult`` of them, before
they are joined for the head, and joins its own with a head of its own.  And its layer has a window
only: what it needs of a prefix is a checkpoint's last window page, and what a page keeps of its
last token.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from kvtier.layouts import Layout
from kvtier_deepseek.drafts.base import CachedDraft, Continuation, Tap, on_device
from kvtier_deepseek.drafts.ledger import Stand
from kvtier_deepseek.drafts.mtp import shifted
from kvtier_deepseek.drafts.streams import (
    Flight,
    WindowLayer,
    block_name,
    hyper_head,
    main_turns,
    window_block,
    window_slots_at,
)
from kvtier_deepseek.drafts.weights import fill, like_layer, read
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.family import Family
from kvtier_deepseek.metadata import DeviceStepLike, StepLike, TailStepLike

__all__ = ["StreamMtp", "StreamMtpModule"]


@final
class StreamMtpModule(nn.Module):
    """The predictor's own weights; embedding and head are the model's."""

    def __init__(self, model: nn.Module) -> None:
        """Weights are not initialised."""
        super().__init__()
        body: Any = model.model
        size = int(body.config.hidden_size)
        self.index = int(body.config.num_hidden_layers)
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(body.norm) for _ in range(3))
        self.e_proj = nn.Linear(size, size, bias=False)
        self.h_proj = nn.Linear(size, size, bias=False)
        self.hc_head = hyper_head(model)
        self.block = window_block(model, self.index)
        like_layer(self, body.layers[-1], body.norm.weight)

    def combine(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """What goes into the block, (n, streams, hidden), of tokens (n, hidden) and of the streams
        at the positions before them."""
        result: Tensor = self.e_proj(self.enorm(embedded))[:, None]
        result = result + self.h_proj(self.hnorm(streams))
        return result


@final
class StreamMtp(CachedDraft):
    """DeepSeek-V4's next-n predictor; guesses are chained where more than one is wanted."""

    kind: ClassVar[str] = "mtp"
    carries: ClassVar[bool] = True

    def __init__(self, model: nn.Module, module: StreamMtpModule) -> None:
        config: Any = model.config
        if config.model_type != "deepseek_v4":
            raise UnsupportedModel(f"{config.model_type!r} has no next-n predictor of this kind")
        super().__init__(values=int(config.hc_mult * config.hidden_size), layers=1)
        self.module = module
        self._model: Any = model
        self._window = int(config.sliding_window)
        self._streams = int(config.hc_mult)
        self._layer: WindowLayer | None = None
        self._state_dtype = torch.float32

    @classmethod
    def load(cls, model: nn.Module, checkpoint: str | Path) -> Self:
        """With the weights that the checkpoint has as ``mtp.0.*``, which transformers leaves out.

        ``checkpoint`` is a directory of safetensors files.  Raises UnsupportedModel naming a tensor
        that is missing, of another shape or in a format that is not known.
        """
        module = StreamMtpModule(model)
        fill(module, read(checkpoint, "mtp.0."), name_of)
        return cls(model, module)

    @property
    def taps(self) -> Mapping[str, Tap]:
        return {"streams": Tap(self._model.model.hc_head, "input")}

    @property
    def reach(self) -> int:
        return self._window - 1

    def _bind(self, family: Family, layout: Layout) -> None:
        self._layer = WindowLayer(self.module.block, self.module.index, family, layout)
        for c in layout.components:
            if c.name == "draft_state":
                self._state_dtype = getattr(torch, c.dtype)

    def _hidden(self, taps: Mapping[str, Tensor]) -> Tensor:
        streams = taps["streams"][0].flatten(1)
        return streams.to(self._state_dtype).to(streams.dtype)  # as it comes back from a page

    def _write(
        self, step: StepLike, device: DeviceStepLike, hidden: Tensor, stands: Sequence[Stand]
    ) -> None:
        layer, tokens = self._bound, hidden.shape[0]
        before, lost = shifted(step, hidden, stands)
        embedded = self._embed(device.input_ids[:tokens])
        mixed = self.module.combine(embedded, self._split(before))
        *_, joined = layer.block.attn_hc(mixed[None])
        values = layer.block.self_attn.kv_proj(layer.block.input_layernorm(joined))[0]
        layer.write(device, values, main_turns(self._model, embedded, device.positions[:tokens]))
        if lost:
            layer.blank(device, lost)

    def _capture(self, step: TailStepLike, device: DeviceStepLike) -> None:
        if step.captures:
            self._bound.capture(step, device)

    def _guess(
        self,
        step: StepLike,
        device: DeviceStepLike,
        rows: Sequence[Continuation],
        stands: Sequence[Stand],
    ) -> Tensor:
        layer, where, n = self._bound, device.input_ids.device, len(rows)
        per_page = layer.component.slots_per_page
        window = device.layer(layer.index).rows(layer.component.name)
        scratch = layer.scratch(n, where)
        base = np.arange(n) * per_page
        token = on_device([row.tokens[-1] for row in rows], where)
        streams = torch.stack([stand.carry for stand in stands if stand.carry is not None])
        streams = self._split(streams)
        tables: Any = getattr(step, "window_table")  # noqa: B009 - a step of a layout with windows
        found = []
        for turn in range(max(row.count for row in rows)):
            slots = [
                window_slots_at(
                    tables[row.row],
                    max(0, row.length + turn + 1 - self._window),
                    row.length,
                    per_page,
                    self._window,
                )
                for row in rows
            ]
            seen = base[:, None] + np.arange(turn + 1)
            flight = Flight(
                window=window,
                slots=on_device(np.stack(slots), where, torch.int32),
                scratch=scratch,
                own=on_device(base + turn, where),
                seen=on_device(seen, where, torch.int32),
            )
            embedded = self._embed(token)
            position = on_device([row.length + turn for row in rows], where)
            mixed = self.module.combine(embedded, streams)
            streams = layer.run(flight, mixed, token, main_turns(self._model, embedded, position))
            joined = self.module.norm(self.module.hc_head(streams[None]))[0]
            token = self._model.lm_head(joined).argmax(-1)
            found.append(token)
        return torch.stack(found, dim=1)

    def _split(self, hidden: Tensor) -> Tensor:
        """(n, values) as (n, streams, hidden)."""
        return hidden.view(hidden.shape[0], self._streams, -1)

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._model.model.embed_tokens(tokens)
        return embedded

    @property
    def _bound(self) -> WindowLayer:
        assert self._layer is not None
        return self._layer


HEAD = {"hc_head.hc_fn": "hc_head_fn", "hc_head.hc_base": "hc_head_base"} | {
    "hc_head.hc_scale": "hc_head_scale"
}


def name_of(key: str) -> str:
    """Where the checkpoint has what is ``key`` here, below ``mtp.0.``."""
    if key.startswith("block."):
        return block_name(key.removeprefix("block."))
    return HEAD.get(key, key)
