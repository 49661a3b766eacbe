"""A model small enough to read, for the examples: two layers of attention, one row per token.

It stands where yours would.  Each token leaves one row a layer in the cache's pages, and every
token attends to all rows before it, so one wrong row anywhere changes what comes out.
"""

from collections.abc import Callable
from itertools import pairwise

import torch

import kvtier
from kvtier.layouts import mla

PAGE, WIDTH, VOCAB, LAYERS = 16, 32, 256, 2
LAYOUT = mla(layers=LAYERS, latent_dim=24, rope_dim=8, dtype="float32", page_tokens=PAGE)


class ToyModel:
    """Called with a step, it returns the next token of each row of the batch."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.embed = torch.randn(VOCAB, WIDTH, generator=rng)
        self.mix = torch.randn(LAYERS, WIDTH, WIDTH, generator=rng) / WIDTH**0.5
        self.tokens_fed = 0

    def __call__(self, step: kvtier.Step) -> list[int]:
        device = step.to_device()
        out = []
        for row, (start, stop) in enumerate(pairwise(step.cu_seqlens_q.tolist())):
            ids, positions = device.input_ids[start:stop], device.positions[start:stop]
            out.append(self.forward(ids, positions, paged(device, row, start, stop)))
        return out

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        store: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> int:
        """``store`` keeps the new rows of a layer and returns the rows of all tokens so far."""
        self.tokens_fed += len(ids)
        x = self.embed[ids] + torch.sin(positions[:, None] / torch.arange(1.0, WIDTH + 1))
        for layer in range(LAYERS):
            rows = store(layer, x)
            hidden = torch.arange(len(rows)) > positions[:, None]
            scores = (x @ rows.T).masked_fill(hidden, -torch.inf)
            x = torch.tanh((x + scores.softmax(-1) @ rows) @ self.mix[layer])
        return int((self.embed @ x[-1]).argmax())


def paged(
    step: kvtier.DeviceStep, row: int, start: int, stop: int
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Store in pages: new rows go where the slot mapping says, all rows come back through the
    block table."""
    new = step.slot_mapping["latent"][start:stop]
    slots = (step.block_table[row, :, None] * PAGE + torch.arange(PAGE)).flatten()
    known = slots[: int(step.kv_lens[row])]

    def store(layer: int, x: torch.Tensor) -> torch.Tensor:
        rows = step.layer(layer).rows("latent")
        rows[new] = x
        return rows[known]

    return store


def generate_plainly(model: ToyModel, prompt: list[int], max_new: int) -> list[int]:
    """The same tokens without a cache: everything is computed again for each of them."""
    tokens = list(prompt)
    for _ in range(max_new):
        ids = torch.tensor(tokens)
        tokens.append(model.forward(ids, torch.arange(len(tokens)), lambda _, x: x))
    return tokens[len(prompt) :]
