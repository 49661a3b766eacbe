"""Draft layers that nobody drafts with: zeros, so that no page holds what was there before.

A layout with draft layers keeps them in every page and checkpoint.  Steps without a draft leave
neither stale bytes in them nor a mark that says they were drafted.
"""

from dataclasses import replace
from typing import cast, final

import numpy as np
import torch

from kvtier.layouts import Layout
from kvtier_deepseek.drafts.base import on_device
from kvtier_deepseek.drafts.streams import blank_window
from kvtier_deepseek.family import Family
from kvtier_deepseek.fields import DRAFT_STATE
from kvtier_deepseek.metadata import (
    DeviceStepLike,
    StepLike,
    TailDeviceStepLike,
    TailStepLike,
)
from kvtier_deepseek.mla.attention import COMPONENT, MlaAttention
from kvtier_deepseek.v4.attention import WINDOW, V4Attention
from kvtier_deepseek.v4.family import V4Family

__all__ = ["BlankDraft"]

UNKNOWN = -1
"""Mark of a page of which not even the last token's hidden state is kept."""


@final
class BlankDraft:
    """Fills the draft layers of a step's tokens with zeros."""

    def __init__(self, family: Family, layout: Layout) -> None:
        self._family = family
        self._layout = layout
        model_layers = len(family.layers)
        self._layers = range(model_layers, model_layers + layout.draft_layers)

    @torch.no_grad()
    def record(self, step: StepLike, device: DeviceStepLike) -> None:
        tokens = len(step.input_ids)
        if not tokens:
            return
        for component in self._layout.components:
            for layer in self._layers:
                if layer not in component.layers:
                    continue
                if component.name == COMPONENT:
                    self._blank_latent(device, layer, tokens)
                elif component.name == WINDOW:
                    self._blank_window(step, device, layer, tokens)
                elif component.name == DRAFT_STATE:
                    self._blank_state(step, device, layer)

    def _blank_latent(self, device: DeviceStepLike, layer: int, tokens: int) -> None:
        rows = device.layer(layer).rows(COMPONENT)
        like = next(each for each in self._family.layers if isinstance(each, MlaAttention))
        slots = device.slot_mapping[COMPONENT][:tokens]
        like.kernels["write_rows"].run(rows, slots, rows.new_zeros(tokens, rows.shape[1]))

    def _blank_window(
        self, step: StepLike, device: DeviceStepLike, layer: int, tokens: int
    ) -> None:
        like = next(each for each in self._family.layers if isinstance(each, V4Attention))
        pairs = int(self._layout.meta["rope_dim"]) // 2
        blank_window(like, device, layer, device.slot_mapping[WINDOW][:tokens], pairs)
        tails = cast(TailStepLike, step)
        if tails.captures:
            captures = cast(V4Family, self._family).captures(tails, device.input_ids.device)
            view = cast(TailDeviceStepLike, device).layer(layer)
            replace(like, index=layer).capture_window(view, captures)

    def _blank_state(self, step: StepLike, device: DeviceStepLike, layer: int) -> None:
        slots = step.slot_mapping[DRAFT_STATE]
        closed = slots[np.flatnonzero(slots >= 0)]
        if len(closed):
            states = device.layer(layer).rows(DRAFT_STATE)
            filled = states.new_zeros(len(closed), states.shape[1])
            filled.view(torch.int32)[:, -1] = UNKNOWN
            states[on_device(closed, states.device)] = filled
