"""A V3.2 model's attention, checked against its configuration and its cache's layout."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast, final

import torch
from torch import nn

from kvtier import ConfigError, LayoutMismatch
from kvtier.kernels import (
    RECORDS,
    Case,
    Kernel,
    Load,
    PagedBatch,
    Record,
    mla_sparse,
    select_all,
)
from kvtier.layouts import Layout
from kvtier_deepseek.config import layout_for
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.family import FEW, MANY, variants_of, without_reference
from kvtier_deepseek.metadata import DeviceStepLike, RowLens, StepLike, row_lens, validate_step
from kvtier_deepseek.mla import structure as mla_structure
from kvtier_deepseek.v32.attention import INDEX, LATENT, V32Attention, V32Run
from kvtier_deepseek.v32.config import Attention, attention_of
from kvtier_deepseek.v32.scratch import Scratch
from kvtier_deepseek.v32.structure import check_indexer, rotations_of

__all__ = ["V32Family", "v32_family"]

NAME = "mla_indexed"
PACKED = {LATENT: "mla_fp8", INDEX: "index_fp8"}
"""What "fp8" of a layout is called among records."""
CHOICES = (1, 2, 4, 16)
"""How many times as much as is chosen there may be, for each of which it is cut up differently."""
SPARSE, MATERIALISED = "mla_sparse", "mla_sparse_materialised"


@final
class V32Family:
    """See ``Family``.  Made by ``v32_family``."""

    max_absorbed = 0
    max_rows = 0
    reserved_bytes = 0
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, layout: Layout, layers: list[V32Attention]) -> None:
        self._layout = layout
        self._layers = layers

    @property
    def layers(self) -> Sequence[V32Attention]:
        return self._layers

    @property
    def decoding(self) -> Mapping[str, Kernel]:
        for layer in self._layers:
            if not layer.absorbs:
                raise ConfigError(f"layer {layer.index}: its kv_b_proj cannot be absorbed")
        layer = self._layers[0]
        other = "write_latent" if layer.latent_rope is None else f"write_record {LATENT}"
        unused = MATERIALISED, other
        return {name: kernel for name, kernel in layer.kernels.items() if name not in unused}

    def check_step(self, step: StepLike, device: DeviceStepLike) -> None:
        for c in self._layout.components:
            rows = device.layer(c.layers[0]).rows(c.name)
            validate_step(
                step,
                page_tokens=self._layout.page_tokens,
                num_pages=rows.shape[0] // (1 if c.planes else c.slots_per_page),
                component=c.name,
            )

    def make_run(self, step: StepLike, device: DeviceStepLike, bound: int | None) -> V32Run:
        run = self._run(device, row_lens(step, device, bound))
        layer = self._layers[0]
        topk = int(cast(Any, layer.module).indexer.index_topk)
        tokens = device.input_ids.shape[0]
        run.loads["mla_sparse"] = Load(tokens, layer.dims.heads, topk, captured=bound is not None)
        return run

    def capture(self, step: StepLike, device: DeviceStepLike) -> None:
        """Nothing: pages hold all there is."""

    def warmup(self) -> None:
        """The end of contexts that there is something to choose from: more of it is chosen from in
        parts, and for several tokens of a sequence it is scored in another way."""
        layer = self._layers[0]
        m: Any = layer.module
        weight = m.q_a_proj.weight
        topk = int(m.indexer.index_topk)

        def run(length: int, tokens: int, workspace: int | str, picked: dict[str, Kernel]) -> None:
            scratch = Scratch(self._layout, weight.device, length, tokens)
            hidden = weight.new_zeros(1, tokens, weight.shape[1])
            turns = weight.new_zeros(1, tokens, layer.dims.rope)
            step = self._run(scratch, ((tokens,), (length,)))
            step.picked = picked
            replace(layer, workspace_bytes=workspace)(step, hidden, (turns, turns))

        for workspace in (layer.workspace_bytes, 0):  # with lists cut into parts, and whole
            for picked in variants_of(layer.kernels):
                run(topk + 1, 1, workspace, picked)
        for tokens in (1, FEW, MANY):
            for times in CHOICES:
                run(times * topk + tokens, tokens, layer.workspace_bytes, {})

    def _run(self, device: DeviceStepLike, lens: RowLens) -> V32Run:
        query_lens, kv_lens = lens
        batch = PagedBatch(
            query_lens=query_lens,
            kv_lens=kv_lens,
            block_table=device.block_table,
            cu_seqlens_q=device.cu_seqlens_q,
            kv_lens_device=device.kv_lens,
            page_tokens=self._layout.page_tokens,
        )
        return V32Run(step=device, batch=batch)


def v32_family(
    model: nn.Module,
    layout: Layout,
    *,
    backend: str,
    workspace_bytes: int | str,
    max_absorbed: int | None,
) -> V32Family:
    """The family of ``model``; arguments and errors are those of ``attach``."""
    if max_absorbed is not None:
        raise ConfigError(f"max_absorbed={max_absorbed}: V3.2's attention has one form only")
    config: Any = getattr(model, "config", None)
    wanted = attention_of(config)
    layers = mla_structure.attention_layers(model, config)
    for layer in layers:
        check_indexer(layer.name, layer.module, wanted)
    dtype = cast(nn.Module, layers[0].module.kv_a_layernorm).weight.dtype
    assert isinstance(dtype, torch.dtype)
    _check_layout(layout, config, dtype)
    latent_rotation, index_rotation = rotations_of(layers[0].module)
    order = mla_structure.written_order(model, latent_rotation, wanted.heads.rope)
    if order != layout.meta["rope_layout"] and wanted.heads.rope > 2:
        raise UnsupportedModel(
            f"the model writes its rope values {order}, the layout has {layout.meta['rope_layout']}"
        )
    records = {
        component: RECORDS[PACKED[component] if layout.meta[kind] == "fp8" else "dense"]
        for component, kind in ((LATENT, "record"), (INDEX, "index_record"))
    }
    device = next(model.parameters()).device.type
    kernels = without_reference(
        select_all(_cases(wanted, records, dtype, device), backend=backend), "write_latent"
    )
    turned = None
    if "write_latent" in kernels:
        turned = mla_structure.latent_rope(model, latent_rotation, wanted.heads, dtype)
    _check_workspace(workspace_bytes)
    return V32Family(
        layout,
        [
            V32Attention(
                module=layer.module,
                index=layer.index,
                rotation=latent_rotation,
                dims=wanted.heads,
                latent_rope=turned,
                index_rotation=index_rotation,
                kernels=kernels,
                records=records,
                workspace_bytes=workspace_bytes,
            )
            for layer in layers
        ],
    )


def _check_layout(layout: Layout, config: Any, dtype: torch.dtype) -> None:
    """Raises LayoutMismatch naming the first field in which ``layout`` is not this model's.

    Record formats and page size are the layout's to choose; the rest is the model's.
    """
    if layout.name != NAME:
        raise LayoutMismatch(f"layout is {layout.name!r}, the model needs {NAME!r}")
    wanted = layout_for(
        config,
        page_tokens=layout.page_tokens,
        dtype=dtype,
        record=str(layout.meta["record"]),
        index_record=str(layout.meta["index_record"]),
    )
    for name, value in wanted.meta.items():
        if layout.meta.get(name) != value:
            raise LayoutMismatch(f"{name} is {layout.meta.get(name)!r}, the model has {value!r}")
    if (names := [c.name for c in layout.components]) != [c.name for c in wanted.components]:
        raise LayoutMismatch(f"component is {names}, the model needs {wanted.components}")
    for mine, needed in zip(layout.components, wanted.components, strict=True):
        for name in ("layers", "dtype", "slot_bytes", "planes"):
            have, want = getattr(mine, name), getattr(needed, name)
            if have != want:
                raise LayoutMismatch(f"{mine.name}: {name} is {have!r}, the model needs {want!r}")


def _cases(
    wanted: Attention, records: Mapping[str, Record], dtype: torch.dtype, device: str
) -> dict[str, Case]:
    d = wanted.heads
    latent, index = records[LATENT], records[INDEX]
    width, whole = d.latent + d.rope, (d.nope + d.rope, d.value)
    codes = torch.uint8 if index.planes else dtype
    return {
        "write_latent": Case("write_latent", latent.name, (width,), dtype, device),
        "write_record latent": Case("write_record", latent.name, (width,), dtype, device),
        "write_record index": Case("write_record", index.name, (wanted.index_dim,), dtype, device),
        "index_query": Case("index_query", index.name, (wanted.index_dim,), dtype, device),
        "index_topk": Case("index_topk", index.name, (wanted.index_dim,), codes, device),
        SPARSE: Case(SPARSE, latent.name, (width, d.latent), dtype, device),
        MATERIALISED: Case(MATERIALISED, latent.name, whole, dtype, device),
    }


def _check_workspace(workspace_bytes: int | str) -> None:
    """A size that is none is refused here, by a call for no token, not in the first step."""
    nothing = torch.empty(0, 1, 1)
    mla_sparse(
        nothing,
        nothing[:, 0],
        torch.empty(0, 1, dtype=torch.int32),
        latent_dim=1,
        scale=1.0,
        record=RECORDS["dense"],
        workspace_bytes=workspace_bytes,
    )
