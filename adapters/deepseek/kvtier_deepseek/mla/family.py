"""A V2 or V3 model's attention, checked against its configuration and its cache's layout."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from kvtier import ConfigError, LayoutMismatch
from kvtier.kernels import (
    RECORDS,
    Case,
    HeadDims,
    Kernel,
    Load,
    Record,
    select_all,
    workspace_rows,
)
from kvtier.layouts import Layout
from kvtier_deepseek.config import layout_for
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.family import load_of, without_reference
from kvtier_deepseek.fields import DRAFT_STATE, size
from kvtier_deepseek.metadata import (
    DeviceStepLike,
    StepLike,
    TailDeviceStepLike,
    TailStepLike,
    row_lens,
    validate_step,
    validate_tail_step,
)
from kvtier_deepseek.mla import structure
from kvtier_deepseek.mla.attention import COMPONENT, MlaAttention, MlaRun
from kvtier_deepseek.mla.config import head_dims, window_layers
from kvtier_deepseek.mla.grouping import make_run
from kvtier_deepseek.mla.threshold import absorb_limit, measured_limit
from kvtier_deepseek.mla.window import (
    FORMATS,
    WINDOW,
    WindowAttention,
    captures_of,
    window_run,
)
from kvtier_deepseek.mla.workspace import SharedWorkspace

__all__ = ["MlaFamily", "mla_family"]


@final
class MlaFamily:
    """See ``Family``.  Made by ``mla_family``."""

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, layout: Layout, layers: list[MlaAttention | WindowAttention], max_absorbed: int
    ) -> None:
        self._layout = layout
        self._layers = layers
        self._full = [layer for layer in layers if isinstance(layer, MlaAttention)]
        self._windowed = [layer for layer in layers if isinstance(layer, WindowAttention)]
        self._max_absorbed = max_absorbed

    @property
    def layers(self) -> Sequence[MlaAttention | WindowAttention]:
        return self._layers

    @property
    def max_absorbed(self) -> int:
        return self._max_absorbed

    @property
    def max_rows(self) -> int:
        return self._full[0].workspace.rows

    @property
    def reserved_bytes(self) -> int:
        return self._full[0].workspace.nbytes

    @property
    def decoding(self) -> Mapping[str, Kernel]:
        if self._max_absorbed < 1:
            raise ConfigError(
                f"max_absorbed={self._max_absorbed}: decoding takes the absorbed form"
            )
        for layer in (*self._full, *(layer.full for layer in self._windowed)):
            if not layer.absorbs:
                raise ConfigError(f"layer {layer.index}: its kv_b_proj cannot be absorbed")
        layer = self._full[0]
        writes = "write_rows" if layer.latent_rope is None else "write_latent"
        kernels = {name: layer.kernels[name] for name in (writes, "mla_absorbed")}
        for windowed in self._windowed[:1]:
            kernels |= {name: windowed.kernels[name] for name in ("write_window", "mla_sparse")}
        return kernels

    def check_step(self, step: StepLike, device: DeviceStepLike) -> None:
        page_tokens = self._layout.page_tokens
        slots = device.layer(self._full[0].index).rows(COMPONENT).shape[0]
        if not self._windowed:
            validate_step(step, page_tokens=page_tokens, num_pages=slots // page_tokens)
            return
        (window,) = self._layout.windows
        rows = device.layer(self._windowed[0].index).rows(WINDOW)
        validate_tail_step(
            cast(TailStepLike, step),
            self._layout,
            num_pages=slots // page_tokens,
            num_windows=rows.shape[0] // (1 if window.planes else window.slots_per_page),
        )

    def make_run(self, step: StepLike, device: DeviceStepLike, bound: int | None) -> MlaRun:
        run = make_run(
            device,
            row_lens(step, device, bound),
            page_tokens=self._layout.page_tokens,
            max_absorbed=self._max_absorbed,
        )
        captured, heads = bound is not None, self._full[0].dims.heads
        for group in run.groups:
            if group.form == "absorbed":
                run.loads["mla_absorbed"] = load_of(group.batch, heads, captured=captured)
        if not self._windowed:
            return run
        captures = None if captured else self._captures(step, device)
        windowed = window_run(
            run, cast(TailDeviceStepLike, device), captures, self._layout.windows[0]
        )
        tokens, keys = windowed.slots.shape
        windowed.loads |= run.loads
        windowed.loads["mla_sparse"] = Load(tokens, heads, keys, captured=captured)
        return windowed

    def capture(self, step: StepLike, device: DeviceStepLike) -> None:
        if self._windowed and (captures := self._captures(step, device)) is not None:
            for layer in self._windowed:
                layer.capture(cast(TailDeviceStepLike, device).layer(layer.index), captures)

    def warmup(self) -> None:
        self._full[0].warmup(self._layout.page_tokens)
        for layer in self._windowed[:1]:
            layer.warmup()

    def _captures(self, step: StepLike, device: DeviceStepLike) -> Tensor | None:
        return captures_of(cast(TailStepLike, step), self._layout, device.input_ids.device)


def mla_family(
    model: nn.Module,
    layout: Layout,
    *,
    backend: str,
    workspace_bytes: int | str,
    max_absorbed: int | Literal["measured"] | None,
) -> MlaFamily:
    """The family of ``model``; arguments and errors are those of ``attach``."""
    if max_absorbed not in (None, "measured") and (
        isinstance(max_absorbed, bool) or not isinstance(max_absorbed, int) or max_absorbed < 0
    ):
        raise ConfigError(
            f'max_absorbed={max_absorbed!r} must be a count (0: never), "measured" or None'
        )
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
    cases = _cases(dims, dtype, device.type)
    if layout.windows:
        record = RECORDS[FORMATS[str(layout.meta["window_record"])]]
        cases |= _window_cases(dims, record, dtype, device.type)
    kernels = without_reference(select_all(cases, backend=backend), "write_latent")
    turned = None
    if "write_latent" in kernels and all(rotation == rotations[0] for rotation in rotations):
        turned = structure.latent_rope(model, rotations[0], dims, dtype)
    max_rows = workspace_rows(
        workspace_bytes,
        dims,
        dtype.itemsize,
        layout.page_tokens,
        fused=kernels["mla_materialised"].backend != "torch",
    )
    workspace = SharedWorkspace(max_rows, dims, dtype, device)
    left = workspace.beside(workspace_bytes)
    full = [
        MlaAttention(layer.module, layer.index, rotation, dims, turned, kernels, workspace, left)
        for layer, rotation in zip(layers, rotations, strict=True)
    ]
    attentions: list[MlaAttention | WindowAttention] = list(full)
    for window in layout.windows:
        for each in full:
            if each.index in window.layers:
                attentions[each.index] = WindowAttention(each, window, record)
    limit = absorb_limit(dims) if max_absorbed is None else max_absorbed
    if limit == "measured":
        limit = measured_limit(full[0], layout.page_tokens)
    return MlaFamily(layout, attentions, limit)


def _check_layout(layout: Layout, config: Any, dtype: torch.dtype) -> None:
    """Raises LayoutMismatch naming the first field in which ``layout`` is not this model's.

    How windows are stored and the sizes of pages are the layout's to choose; the rest is the
    model's.
    """
    windowed = window_layers(config)
    record = layout.meta.get("window_record") if windowed else None
    if windowed and record is None:
        raise LayoutMismatch(f"window_layers is (), the model has {windowed}")
    wanted = layout_for(
        config,
        page_tokens=layout.page_tokens,
        dtype=dtype,
        window_record=None if record is None else str(record),
    )
    if layout.name != wanted.name:
        raise LayoutMismatch(f"layout is {layout.name!r}, the model needs {wanted.name!r}")
    for name, value in wanted.meta.items():
        if layout.meta.get(name) != value:
            raise LayoutMismatch(f"{name} is {layout.meta.get(name)!r}, the model has {value!r}")
    held = [c for c in layout.components if c.name != DRAFT_STATE]
    if (names := [c.name for c in held]) != [c.name for c in wanted.components]:
        raise LayoutMismatch(f"component is {names}, the model needs {wanted.components}")
    model_layers = size(config, "num_hidden_layers")
    draft_layers = range(model_layers, model_layers + layout.draft_layers)
    for mine, needed in zip(held, wanted.components, strict=True):
        drafts = tuple(i for i in mine.layers if i in draft_layers)
        for name, have, want in (
            ("dtype", mine.dtype, needed.dtype),
            ("slot_bytes", mine.slot_bytes, needed.slot_bytes),
            ("layers", mine.layers, needed.layers + drafts),
            ("window", mine.window, needed.window),
        ):
            if have != want:
                raise LayoutMismatch(f"{mine.name}: {name} is {have!r}, the model needs {want!r}")


def _cases(dims: HeadDims, dtype: torch.dtype, device: str) -> dict[str, Case]:
    width = dims.latent + dims.rope
    whole = (dims.nope + dims.rope, dims.value)
    sizes = {
        "write_rows": (width,),
        "write_latent": (width,),
        "mla_absorbed": (width, dims.latent),
        "mla_materialised": whole,
        "mla_materialised_whole": whole,
    }
    return {name: Case(name, "dense", dim, dtype, device) for name, dim in sizes.items()}


def _window_cases(
    dims: HeadDims, record: Record, dtype: torch.dtype, device: str
) -> dict[str, Case]:
    width = dims.latent + dims.rope
    return {
        "write_window": Case("write_record", record.name, (width,), dtype, device),
        "mla_sparse": Case("mla_sparse", record.name, (width, dims.latent), dtype, device),
        "mla_sparse_materialised": Case(
            "mla_sparse_materialised",
            record.name,
            (dims.nope + dims.rope, dims.value),
            dtype,
            device,
        ),
    }
