"""What V4's drafts share: decoder layers with a window only, behind the model's own, and attention
to rows of guesses that lie in scratch.

Scratch is made of pages like those of windows, one a request, so that rows are stored and read by
the very kernels that store and read the cache's.
"""

import copy
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kvtier import LayoutMismatch
from kvtier.layouts import Component, Layout
from kvtier_deepseek.drafts.base import on_device
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.family import Family
from kvtier_deepseek.metadata import DeviceStepLike, TailDeviceStepLike, TailStepLike
from kvtier_deepseek.v4.attention import WINDOW, V4Attention
from kvtier_deepseek.v4.family import V4Family

__all__ = [
    "Flight",
    "WindowLayer",
    "blank_window",
    "block_name",
    "hyper_head",
    "main_turns",
    "window_block",
    "window_slots_at",
]


@dataclass(slots=True, eq=False)
class Flight:
    """One pass of guesses through one layer."""

    window: Tensor
    """The cache's rows of this layer."""
    slots: Tensor
    """(guesses, k) int32: rows of the cache that each sees, -1 for none."""
    scratch: Tensor
    own: Tensor
    """(guesses,) int64: where in scratch each puts its row."""
    seen: Tensor
    """(guesses, l) int32: rows of scratch that each sees."""


_FLIGHT: ContextVar[Flight | None] = ContextVar("kvtier_deepseek_stream_flight", default=None)


def window_block(model: nn.Module, index: int) -> nn.Module:
    """A decoder layer of the model's own class, as layer ``index`` behind its last: a window only,
    the main rope, experts by router.  Weights are not initialised."""
    body: Any = model.model
    config = copy.deepcopy(body.config)
    more = index + 1 - config.num_hidden_layers
    config.layer_types = [*config.layer_types, *["sliding_attention"] * more]
    config.mlp_layer_types = [*config.mlp_layer_types, *["moe"] * more]
    config.num_hidden_layers = index + 1
    block: nn.Module = type(body.layers[-1])(config, index)
    return block


def main_turns(model: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the main rotation at these positions, in the type of ``like``."""
    cos, sin = model.model.rotary_emb(like[None], position_ids=positions[None], layer_type="main")
    return cos[0], sin[0]


def hyper_head(model: nn.Module) -> nn.Module:
    """A module that joins residual streams into one, as the model's own does."""
    body: Any = model.model
    head: nn.Module = copy.deepcopy(body.hc_head)
    return head


class WindowLayer:
    """One layer of a draft: its block, and its rows in the cache."""

    def __init__(self, block: nn.Module, index: int, family: Family, layout: Layout) -> None:
        """Raises LayoutMismatch where the layout has no window rows for layer ``index``."""
        like = next((each for each in family.layers if isinstance(each, V4Attention)), None)
        window = next((c for c in layout.windows if c.name == WINDOW), None)
        if like is None or window is None or index not in window.layers:
            raise LayoutMismatch(f"{layout.name!r} has no window rows in layer {index}")
        attention = cast(Any, block).self_attn
        self.block: Any = block
        self.index = index
        self.attention = replace(like, module=attention, index=index, ratio=0)
        self.component: Component = window
        self._pairs = int(layout.meta["rope_dim"]) // 2
        self._family = cast(V4Family, family)
        attention.forward = self._attend

    def write(self, device: DeviceStepLike, values: Tensor, turns: tuple[Tensor, Tensor]) -> None:
        """Norm, rotate and write rows (tokens, head_dim) at the step's slots."""
        a = self.attention
        a.kernels["write_normed"].run(
            device.layer(self.index).rows(WINDOW),
            device.slot_mapping[WINDOW][: values.shape[0]],
            values,
            cast(Any, a.module).kv_norm.weight,
            *turns,
            a.records[WINDOW],
            eps=a.eps,
        )

    def blank(self, device: DeviceStepLike, tokens: Sequence[int]) -> None:
        """Zeros in the rows of these tokens of the step."""
        slots = device.slot_mapping[WINDOW][on_device(tokens, device.input_ids.device)]
        blank_window(self.attention, device, self.index, slots, self._pairs)

    def capture(self, step: TailStepLike, device: DeviceStepLike) -> None:
        """Copy what checkpoints due hold of this layer."""
        device = cast(TailDeviceStepLike, device)
        captures = self._family.captures(step, device.input_ids.device)
        self.attention.capture_window(device.layer(self.index), captures)

    def scratch(self, requests: int, device: torch.device) -> Tensor:
        """Room for a window page of guesses of each request."""
        c = self.component
        pages = torch.zeros(requests, c.page_bytes, dtype=torch.uint8, device=device)
        if c.planes:
            return pages
        return pages.view(requests * c.slots_per_page, -1).view(getattr(torch, c.dtype))

    def run(self, flight: Flight, streams: Tensor, tokens: Tensor, turns: Any) -> Tensor:
        """The block over (guesses, streams, hidden), each guess seeing what ``flight`` says."""
        taken = _FLIGHT.set(flight)
        try:
            out: Tensor = self.block(
                streams[None],
                input_ids=tokens[None],
                position_embeddings={"main": tuple(each[None] for each in turns)},
            )
        finally:
            _FLIGHT.reset(taken)
        return out[0]

    def _attend(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """Stands as ``forward`` on the block's attention."""
        flight = _FLIGHT.get()
        assert flight is not None, "a draft's block runs only to guess"
        a = self.attention
        m: Any = a.module
        run = {name: kernel.outputs for name, kernel in a.kernels.items()}
        cos, sin = (each[0] for each in options["position_embeddings"]["main"])
        query = m.q_b_proj(m.q_a_norm(m.q_a_proj(hidden_states)))
        query = query.view(hidden_states.shape[1], -1, m.head_dim)
        query = run["head_norm_rope"](query, cos, sin, eps=a.eps, dtype=query.dtype)
        record = a.records[WINDOW]
        run["write_normed"](
            flight.scratch,
            flight.own,
            m.kv_proj(hidden_states)[0],
            m.kv_norm.weight,
            cos,
            sin,
            record,
            eps=a.eps,
        )
        out, _ = run["sparse_attend"](
            query,
            flight.window,
            flight.slots,
            m.sinks,
            scale=m.scaling,
            record=record,
            extra=flight.scratch,
            extra_slots=flight.seen,
            workspace_bytes=a.workspace_bytes,
        )
        out = run["inverse_rope"](out, cos, sin, dtype=out.dtype)
        grouped = out.reshape(*hidden_states.shape[:2], a.groups, -1)
        return m.o_b_proj(m.o_a_proj(grouped).flatten(2)), None


def blank_window(
    attention: V4Attention, device: DeviceStepLike, layer: int, slots: Tensor, pairs: int
) -> None:
    """Write rows of zeros."""
    m: Any = attention.module
    zeros = m.kv_norm.weight.new_zeros(slots.shape[0], m.head_dim)
    turns = zeros[:, :pairs]
    attention.kernels["write_normed"].run(
        device.layer(layer).rows(WINDOW),
        slots,
        zeros,
        m.kv_norm.weight,
        turns,
        turns,
        attention.records[WINDOW],
        eps=attention.eps,
    )


def window_slots_at(
    table: npt.NDArray[np.int32], first: int, stop: int, per_page: int, width: int
) -> npt.NDArray[np.int32]:
    """(width,) slots of positions [first, stop) by one row of a window table, -1 behind."""
    at = np.arange(first, stop)
    slots = np.full(width, -1, dtype=np.int32)
    slots[: len(at)] = table[at // per_page] * per_page + at % per_page
    return slots


LEAVES: Mapping[str, str] = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
}
"""Keys of a decoder layer, as transformers has them -> as the checkpoints have them."""
EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def block_name(key: str) -> str:
    """Where a checkpoint has what is ``key`` of a decoder layer, below the layer's prefix."""
    if key in LEAVES:
        return LEAVES[key]
    if key.startswith("mlp.experts."):
        *_, number, part, leaf = key.split(".")
        return f"ffn.experts.{number}.{EXPERT[part]}.{leaf}"
    raise UnsupportedModel(f"it is not known how checkpoints call {key} of a draft layer")
