"""A V2 or V3 model's attention, checked against its configuration and its cache's layout."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast, final

import torch
from torch import nn

from kvtier import ConfigError, LayoutMismatch
from kvtier.kernels import Case, HeadDims, Kernel, select_all, workspace_rows
from kvtier.layouts import Layout
from kvtier_deepseek.config import layout_for
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.metadata import DeviceStepLike, StepLike, row_lens, validate_step
from kvtier_deepseek.mla import structure
from kvtier_deepseek.mla.attention import COMPONENT, MlaAttention, MlaRun
from kvtier_deepseek.mla.config import head_dims
from kvtier_deepseek.mla.grouping import absorb_limit, make_run

__all__ = ["MlaFamily", "mla_family"]


@final
class MlaFamily:
    """See ``Family``.  Made by ``mla_family``."""

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, layout: Layout, layers: list[MlaAttention], max_absorbed: int) -> None:
        self._page_tokens = layout.page_tokens
        self._layers = layers
        self._max_absorbed = max_absorbed

    @property
    def layers(self) -> Sequence[MlaAttention]:
        return self._layers

    @property
    def max_absorbed(self) -> int:
        return self._max_absorbed

    @property
    def max_rows(self) -> int:
        return self._layers[0].max_rows

    @property
    def decoding(self) -> Mapping[str, Kernel]:
        if self._max_absorbed < 1:
            raise ConfigError(
                f"max_absorbed={self._max_absorbed}: decoding takes the absorbed form"
            )
        for layer in self._layers:
            if not layer.absorbs:
                raise ConfigError(f"layer {layer.index}: its kv_b_proj cannot be absorbed")
        return {name: self._layers[0].kernels[name] for name in ("write_rows", "mla_absorbed")}

    def check_step(self, step: StepLike, device: DeviceStepLike) -> None:
        page_tokens = self._page_tokens
        slots = device.layer(self._layers[0].index).rows(COMPONENT).shape[0]
        validate_step(step, page_tokens=page_tokens, num_pages=slots // page_tokens)

    def make_run(self, step: StepLike, device: DeviceStepLike, bound: int | None) -> MlaRun:
        return make_run(
            device,
            row_lens(step, device, bound),
            page_tokens=self._page_tokens,
            max_absorbed=self._max_absorbed,
        )

    def capture(self, step: StepLike, device: DeviceStepLike) -> None:
        pass

    def warmup(self) -> None:
        self._layers[0].warmup(self._page_tokens)


def mla_family(
    model: nn.Module,
    layout: Layout,
    *,
    backend: str,
    workspace_bytes: int | str,
    max_absorbed: int | None,
) -> MlaFamily:
    """The family of ``model``; arguments and errors are those of ``attach``."""
    if max_absorbed is not None and max_absorbed < 0:
        raise ConfigError(f"max_absorbed={max_absorbed} is negative; 0 turns the absorbed form off")
    config: Any = getattr(model, "config", None)
    layers = structure.attention_layers(model, config)
    dims = head_dims(config)
    dtype = cast(nn.Module, layers[0].module.kv_a_layernorm).weight.dtype
    assert isinstance(dtype, torch.dtype)
    _check_layout(layout, config, dtype)
    rotations = [structure.rotation_of(layer.module, config) for layer in layers]
    order = structure.written_order(model, rotations[0], dims.rope)
    if order != layout.meta["rope_layout"] and dims.rope > 2:
        raise UnsupportedModel(
            f"the model writes its rope values {order}, rope_layout of its configuration says "
            f"{layout.meta['rope_layout']}"
        )
    device = next(model.parameters()).device
    kernels = select_all(_cases(dims, dtype, device.type), backend=backend)
    max_rows = workspace_rows(workspace_bytes, dims, dtype.itemsize, layout.page_tokens)
    attentions = [
        MlaAttention(layer.module, layer.index, rotation, dims, kernels, max_rows, workspace_bytes)
        for layer, rotation in zip(layers, rotations, strict=True)
    ]
    limit = absorb_limit(dims) if max_absorbed is None else max_absorbed
    return MlaFamily(layout, attentions, limit)


def _check_layout(layout: Layout, config: Any, dtype: torch.dtype) -> None:
    """Raises LayoutMismatch naming the first field in which ``layout`` is not this model's."""
    wanted = layout_for(config, page_tokens=layout.page_tokens, dtype=dtype)
    if layout.name != wanted.name:
        raise LayoutMismatch(f"layout is {layout.name!r}, the model needs {wanted.name!r}")
    for name, value in wanted.meta.items():
        if layout.meta.get(name) != value:
            raise LayoutMismatch(f"{name} is {layout.meta.get(name)!r}, the model has {value!r}")
    mine, needed = layout.components[0], wanted.components[0]
    drafts = layout.draft_layers
    for name, have, want in (
        ("component", mine.name, COMPONENT),
        ("dtype", mine.dtype, needed.dtype),
        ("slot_bytes", mine.slot_bytes, needed.slot_bytes),
        ("layers", mine.layers, tuple(range(len(needed.layers) + drafts))),
    ):
        if have != want:
            raise LayoutMismatch(f"{name} is {have!r}, the model needs {want!r}")


def _cases(dims: HeadDims, dtype: torch.dtype, device: str) -> dict[str, Case]:
    width = dims.latent + dims.rope
    whole = (dims.nope + dims.rope, dims.value)
    sizes = {
        "write_rows": (width,),
        "mla_absorbed": (width, dims.latent),
        "mla_materialised": whole,
        "mla_materialised_whole": whole,
    }
    return {name: Case(name, "dense", dim, dtype, device) for name, dim in sizes.items()}
