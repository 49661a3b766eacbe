"""DSpark, the block draft of later DeepSeek-V4 checkpoints.

A few decoder layers with a window only.  Their context are hidden states of the model itself: of
chosen layers the mean over the residual streams, side by side, projected and normed once; each
draft layer makes its row of a position of that alone.  A block of guesses starts from the last
token and placeholders, all of which see each other and the window before, and goes through the
layers at once; a low-rank head then adds to each place's logits what the token before it says
(Markov), one place after the other.

Rows are made of hidden states of tokens the model has computed, never of guesses, and guesses see
the rows of committed positions only.  The confidence head of the checkpoints is not used: every
guess is verified.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from kvtier import ConfigError
from kvtier.layouts import Layout
from kvtier_deepseek.drafts.base import CachedDraft, Continuation, Tap, on_device
from kvtier_deepseek.drafts.ledger import Stand
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
from kvtier_deepseek.fields import size
from kvtier_deepseek.metadata import DeviceStepLike, StepLike, TailStepLike
from kvtier_deepseek.v4.config import dspark_stages

__all__ = ["DSpark", "DSparkModule"]


@final
class DSparkModule(nn.Module):
    """The draft's own weights; embedding and head are the model's."""

    def __init__(self, model: nn.Module) -> None:
        """Sizes are those of the configuration's ``dspark_*`` fields; weights are not initialised.

        Raises UnsupportedModel naming a field that is missing.
        """
        super().__init__()
        body: Any = model.model
        config: Any = body.config
        hidden, vocab = int(config.hidden_size), int(config.vocab_size)
        self.first = int(config.num_hidden_layers)
        self.block_size = size(config, "dspark_block_size")
        self.noise = int(getattr(config, "dspark_noise_token_id", -1))
        if not 0 <= self.noise < vocab:
            raise UnsupportedModel(f"dspark_noise_token_id is {self.noise}, no token of {vocab}")
        layers = getattr(config, "dspark_target_layer_ids", None)
        if not layers or any(not 0 <= i < self.first for i in layers):
            raise UnsupportedModel(f"dspark_target_layer_ids is {layers!r}, of {self.first} layers")
        self.listens = tuple(int(i) for i in layers)
        rank = size(config, "dspark_markov_rank")
        self.main_proj = nn.Linear(len(self.listens) * hidden, hidden, bias=False)
        self.main_norm, self.norm = (copy.deepcopy(body.norm) for _ in range(2))
        self.hc_head = hyper_head(model)
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        self.blocks = nn.ModuleList(
            window_block(model, self.first + i) for i in range(dspark_stages(config))
        )
        like_layer(self, body.layers[-1], body.norm.weight)


@final
class DSpark(CachedDraft):
    """DeepSeek-V4's block draft."""

    kind: ClassVar[str] = "dspark"
    carries: ClassVar[bool] = False

    def __init__(self, model: nn.Module, module: DSparkModule) -> None:
        config: Any = model.config
        if config.model_type != "deepseek_v4":
            raise UnsupportedModel(f"{config.model_type!r} has no DSpark draft")
        super().__init__(values=1, layers=len(module.blocks))
        self.module = module
        self._model: Any = model
        self._window = int(config.sliding_window)
        self._streams = int(config.hc_mult)
        self._stages: list[WindowLayer] = []

    @classmethod
    def load(cls, model: nn.Module, checkpoint: str | Path) -> Self:
        """With the weights that the checkpoint has as ``mtp.*``, which transformers leaves out.

        ``checkpoint`` is a directory of safetensors files.  Raises UnsupportedModel naming a tensor
        that is missing, of another shape or in a format that is not known.
        """
        module = DSparkModule(model)
        last = len(module.blocks) - 1
        fill(module, read(checkpoint, "mtp."), lambda key: name_of(key, last))
        return cls(model, module)

    @property
    def taps(self) -> Mapping[str, Tap]:
        layers = self._model.model.layers
        return {str(i): Tap(layers[i], "output") for i in self.module.listens}

    @property
    def reach(self) -> int:
        return self._window

    def _bind(self, family: Family, layout: Layout) -> None:
        if layout.max_draft < 1:
            raise ConfigError("max_draft=0 keeps no window as long as a DSpark draft's")
        self._stages = [
            WindowLayer(block, self.module.first + i, family, layout)
            for i, block in enumerate(self.module.blocks)
        ]

    def _hidden(self, taps: Mapping[str, Tensor]) -> Tensor:
        """(tokens, hidden): what all layers' rows are made of.  Nothing of it is carried over."""
        means = [taps[str(i)][0].mean(dim=1) for i in self.module.listens]
        main: Tensor = self.module.main_norm(self.module.main_proj(torch.cat(means, dim=-1)))
        return main

    def _write(
        self, step: StepLike, device: DeviceStepLike, hidden: Tensor, stands: Sequence[Stand]
    ) -> None:
        turns = main_turns(self._model, hidden, device.positions[: hidden.shape[0]])
        for stage in self._stages:
            stage.write(device, stage.block.self_attn.kv_proj(hidden), turns)

    def _capture(self, step: TailStepLike, device: DeviceStepLike) -> None:
        for stage in self._stages if step.captures else ():
            stage.capture(step, device)

    def _guess(
        self,
        step: StepLike,
        device: DeviceStepLike,
        rows: Sequence[Continuation],
        stands: Sequence[Stand],
    ) -> Tensor:
        where, n, size = device.input_ids.device, len(rows), self.module.block_size
        per_page = self._stages[0].component.slots_per_page
        tables: Any = getattr(step, "window_table")  # noqa: B009 - a step of a layout with windows
        context = [
            window_slots_at(
                tables[row.row],
                max(0, row.length - self._window),
                row.length,
                per_page,
                self._window,
            )
            for row in rows
        ]
        block = np.arange(size)
        own = np.arange(n)[:, None] * per_page + block
        anchor = on_device([row.tokens[-1] for row in rows], where)
        tokens = torch.full((n, size), self.module.noise, device=where)
        tokens[:, 0] = anchor
        flat = tokens.flatten()
        embedded = self._model.model.embed_tokens(flat)
        position = np.array([row.length for row in rows])[:, None] + block
        turns = main_turns(self._model, embedded, on_device(position.reshape(-1), where))
        streams = embedded[:, None].expand(-1, self._streams, -1).contiguous()
        slots = on_device(np.repeat(np.stack(context), size, axis=0), where, torch.int32)
        seen = on_device(np.repeat(own, size, axis=0), where, torch.int32)
        for stage in self._stages:
            flight = Flight(
                window=device.layer(stage.index).rows(stage.component.name),
                slots=slots,
                scratch=stage.scratch(n, where),
                own=on_device(own.reshape(-1), where),
                seen=seen,
            )
            streams = stage.run(flight, streams, flat, turns)
        joined = self.module.norm(self.module.hc_head(streams[None]))[0]
        logits = self._model.lm_head(joined).view(n, size, -1)
        return self._chain(logits, anchor)

    def _chain(self, logits: Tensor, token: Tensor) -> Tensor:
        """(requests, block) tokens: each place's logits, and what the token before it adds."""
        found = []
        for place in range(logits.shape[1]):
            added = self.module.markov_w2(self.module.markov_w1(token))
            token = (logits[:, place] + added).argmax(-1)
            found.append(token)
        return torch.stack(found, dim=1)


HEAD = {
    "norm.weight": "norm.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
}
"""Of the last layer."""


def name_of(key: str, last: int) -> str:
    """Where the checkpoint has what is ``key`` here, below ``mtp.``: what fuses hidden states is
    the first layer's, what makes logits the last one's."""
    if key.startswith("blocks."):
        _, number, rest = key.split(".", 2)
        return f"{number}.{block_name(rest)}"
    return f"{last}.{HEAD[key]}" if key in HEAD else f"0.{key}"
