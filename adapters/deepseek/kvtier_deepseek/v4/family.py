"""A V4 model's attention, checked against its configuration and its cache's layout."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from kvtier import ConfigError, LayoutMismatch
from kvtier.kernels import (
    RECORDS,
    Case,
    Kernel,
    Load,
    PagedBatch,
    Record,
    c128_slots,
    closed_entries,
    select_all,
    token_positions,
    window_slots,
)
from kvtier.layouts import Component, Layout
from kvtier_deepseek.config import layout_for
from kvtier_deepseek.family import FEW, MANY, variants_of
from kvtier_deepseek.fields import DRAFT_STATE
from kvtier_deepseek.metadata import (
    CaptureLike,
    DeviceStepLike,
    RowLens,
    StepLike,
    TailDeviceStepLike,
    TailStepLike,
    row_lens,
    upload,
    validate_tail_step,
)
from kvtier_deepseek.v4 import structure
from kvtier_deepseek.v4.attention import STREAMS, WINDOW, Captures, V4Attention, V4Run
from kvtier_deepseek.v4.config import Attention, attention_of
from kvtier_deepseek.v4.scratch import Scratch

__all__ = ["V4Family", "v4_family"]

NAME = "swa_c4_c128"
FORMATS = {"fp8": "v4_fp8", "fp32": "dense"}
INDEX_FORMATS = {"fp8": "index_fp8", "mxfp4": "index_mxfp4", "fp32": "dense"}
INDEX = "c4_index"
CHOICES = (1, 16, 80)
"""How many times as much as is chosen there may be, for each of which it is cut up differently."""
SIZES = sorted({size for n in range(9) for size in (1 << n, (1 << n) + 1, 3 << n)})
"""Queries of a call, between which kernels cut lists into other numbers of parts."""


@final
class V4Family:
    """See ``Family``.  Made by ``v4_family``."""

    max_absorbed = 0
    max_rows = 0
    reserved_bytes = 0
    # The balancing loss reads the mask, which is ours and no mask.
    options: Mapping[str, Any] = MappingProxyType({"output_router_logits": False})

    def __init__(self, layout: Layout, layers: list[V4Attention]) -> None:
        self._layout = layout
        self._layers = layers
        self._windows = layout.windows[0]
        self._has_c128 = any(layer.ratio == 128 for layer in layers)
        self._heads = int(cast(Any, layers[0].module).sinks.shape[0])
        selecting = [cast(Any, layer.module).compressor for layer in layers if layer.ratio == 4]
        self._selected = int(selecting[0].indexer.index_topk) if selecting else 0

    @property
    def layers(self) -> Sequence[V4Attention]:
        return self._layers

    @property
    def decoding(self) -> Mapping[str, Kernel]:
        return self._layers[0].kernels

    def check_step(self, step: StepLike, device: DeviceStepLike) -> None:
        pools: dict[str, int] = {}
        for c in self._layout.components:
            rows = device.layer(c.layers[0]).rows(c.name)
            pools[c.name] = rows.shape[0] // (1 if c.planes else c.slots_per_page)
        validate_tail_step(
            cast(TailStepLike, step),
            self._layout,
            num_pages=min(pools[c.name] for c in self._layout.history),
            num_windows=pools[WINDOW],
            num_states=min(pools[c.name] for c in self._layout.states),
        )

    def make_run(self, step: StepLike, device: DeviceStepLike, bound: int | None) -> V4Run:
        step, device = cast(TailStepLike, step), cast(TailDeviceStepLike, device)
        captures = None
        if step.captures and bound is None:
            captures = self.captures(step, device.input_ids.device)
        run = self._run(device, row_lens(step, device, bound), captures)
        tokens, keys = run.window_slots.shape
        run.loads["sparse_attend"] = Load(
            tokens, self._heads, keys + self._selected, captured=bound is not None
        )
        return run

    def capture(self, step: StepLike, device: DeviceStepLike) -> None:
        step, device = cast(TailStepLike, step), cast(TailDeviceStepLike, device)
        if step.captures:
            captures = self.captures(step, device.input_ids.device)
            for layer in self._layers:
                layer.capture(device.layer(layer.index), captures, device.state_slots)

    def warmup(self) -> None:
        """One token at the end of a context that there is something to choose from; and attention
        of as many queries as kernels cut up in other ways."""
        for layer in {layer.ratio: layer for layer in self._layers}.values():
            m: Any = layer.module
            topk = m.compressor.indexer.index_topk if layer.ratio == 4 else 0
            pages = 4 * topk // self._layout.page_tokens + 1
            scratch = Scratch(self._layout, m.sinks.device, pages)
            weight = m.q_a_proj.weight
            turns = weight.new_zeros(1, 1, int(self._layout.meta["rope_dim"]) // 2)
            hidden = weight.new_zeros(1, 1, weight.shape[1])
            for picked in variants_of(layer.kernels):
                run = self._run(scratch, ((1,), (scratch.length,)), scratch.captures)
                run.picked = picked
                layer(run, hidden, {m.rope_layer_type: (turns, turns)})
        self._warm_sizes(self._layers[0])
        for layer in [layer for layer in self._layers if layer.ratio == 4][:1]:
            self._warm_index(layer)

    def _warm_index(self, layer: V4Attention) -> None:
        """Choose for one query, some and many, from contexts that are cut in every way."""
        m: Any = layer.module
        indexer, name = m.compressor.indexer, "index_topk"
        kernels = [k for k in layer.kernels[name].variants if k.backend != "torch"]
        record = layer.records[INDEX]
        for tokens, times in product((1, FEW, MANY), CHOICES) if kernels else ():
            pages = 4 * times * indexer.index_topk // self._layout.page_tokens + 1
            scratch = Scratch(self._layout, m.sinks.device, pages)
            one = self._run(scratch, ((1,), (scratch.length,)), None).batch
            batch = replace(one, query_lens=(tokens,), cu_seqlens_q=one.cu_seqlens_q * tokens)
            shape = tokens, indexer.num_heads, indexer.head_dim
            query = m.q_a_proj.weight.new_zeros(shape)
            turns = query.new_zeros(tokens, int(self._layout.meta["rope_dim"]) // 2)
            weights = query.new_zeros(shape[:2], dtype=torch.float32)
            query, weights = layer.kernels["index_query"].run(query, weights, turns, turns, record)
            for kernel in kernels:
                kernel.run(
                    query,
                    weights,
                    scratch.rows(INDEX),
                    batch,
                    ratio=4,
                    topk=indexer.index_topk,
                    record=record,
                    workspace_bytes=layer.workspace_bytes,
                    slots=True,
                )

    def _warm_sizes(self, layer: V4Attention) -> None:
        """Attention to nothing, by every kernel that may be picked."""
        m: Any = layer.module
        window = Scratch(self._layout, m.sinks.device, 1).rows(WINDOW)
        kernels = [k for k in layer.kernels["sparse_attend"].variants if k.backend != "torch"]
        for n in [n for n in SIZES if n * self._heads <= 1 << 15] if kernels else ():
            query = m.q_a_proj.weight.new_zeros(n, self._heads, m.head_dim)
            shape = n, self._windows.window or 1
            slots = torch.full(shape, -1, dtype=torch.int32, device=query.device)
            for kernel in kernels:
                kernel.run(
                    query,
                    window,
                    slots,
                    m.sinks,
                    scale=m.scaling,
                    record=layer.records[WINDOW],
                    workspace_bytes=layer.workspace_bytes,
                )

    def _run(self, device: TailDeviceStepLike, lens: RowLens, captures: Captures | None) -> V4Run:
        query_lens, kv_lens = lens
        batch = PagedBatch(
            query_lens=query_lens,
            kv_lens=kv_lens,
            block_table=device.block_table,
            cu_seqlens_q=device.cu_seqlens_q,
            kv_lens_device=device.kv_lens,
            page_tokens=self._layout.page_tokens,
        )
        window = self._windows
        assert window.window is not None
        _, positions = token_positions(batch)
        return V4Run(
            step=device,
            batch=batch,
            captures=captures,
            window_slots=window_slots(
                batch,
                device.window_table,
                window=window.window,
                slots_per_page=window.slots_per_page,
            ),
            c128_slots=c128_slots(batch) if self._has_c128 else None,
            c128_lengths=closed_entries(positions, 128).int() if self._has_c128 else None,
        )

    def captures(self, step: TailStepLike, device: torch.device) -> Captures:
        """Checkpoints due in ``step``.  In one copy, so that nothing waits."""
        table = np.array([self._capture(step, each) for each in step.captures], dtype=np.int64)
        moved = upload(table, device)
        return Captures(moved[:, :3], moved[:, 3:])

    def _capture(self, step: TailStepLike, due: CaptureLike) -> list[int]:
        """Near the start of a sequence there are fewer window pages than a checkpoint has room for:
        what is left of it holds the last one again."""
        count, end = self._layout.tail_windows, due.position // self._windows.slots_per_page
        pages = step.window_table[due.row, max(0, end - count) : end].tolist()
        return [due.row, due.position, due.frame, *pages, *pages[-1:] * (count - len(pages))]


def v4_family(
    model: nn.Module,
    layout: Layout,
    *,
    backend: str,
    workspace_bytes: int | str,
    max_absorbed: int | None,
) -> V4Family:
    """The family of ``model``; arguments and errors are those of ``attach``."""
    if max_absorbed is not None:
        raise ConfigError(f"max_absorbed={max_absorbed}: V4's attention has one form only")
    config: Any = getattr(model, "config", None)
    wanted = attention_of(config)
    layers = structure.attention_layers(model, config, wanted)
    _check_layout(layout, config)
    reference = next(model.parameters())
    records = {
        c.name: RECORDS[
            INDEX_FORMATS[str(layout.meta["index_record"])]
            if c.name == INDEX
            else FORMATS[str(layout.meta["record"])]
        ]
        for c in (*layout.history, *layout.windows)
    }
    kernels = select_all(
        _cases(wanted, records, reference.dtype, reference.device.type), backend=backend
    )
    _check_workspace(kernels, records[WINDOW], wanted, reference, workspace_bytes)
    attentions = [
        V4Attention(
            module=layer.module,
            index=layer.index,
            ratio=wanted.ratios[layer.index],
            groups=int(config.o_groups),
            eps=layer.eps,
            components={c.name: c for c in layout.components},
            records=records,
            kernels=kernels,
            workspace_bytes=workspace_bytes,
        )
        for layer in layers
    ]
    return V4Family(layout, attentions)


def _check_layout(layout: Layout, config: Any) -> None:
    """Raises LayoutMismatch naming the first field in which ``layout`` is not this model's.

    Record formats, tails and page size are the layout's to choose; the rest is the model's.
    """
    meta = layout.meta
    if layout.name != NAME:
        raise LayoutMismatch(f"layout is {layout.name!r}, the model needs {NAME!r}")
    wanted = layout_for(
        config,
        page_tokens=layout.page_tokens,
        record=str(meta["record"]),
        index_record=str(meta["index_record"]),
    )
    for name, value in wanted.meta.items():
        if meta.get(name) != value:
            raise LayoutMismatch(f"{name} is {meta.get(name)!r}, the model has {value!r}")
    mine = {c.name: c for c in layout.components if c.name != DRAFT_STATE}
    if mine.keys() != {c.name for c in wanted.components}:
        raise LayoutMismatch(
            f"components are {sorted(mine)}, the model needs "
            f"{sorted(c.name for c in wanted.components)}"
        )
    for needed in wanted.components:
        _check_component(mine[needed.name], needed, layout)


def _check_component(mine: Component, needed: Component, layout: Layout) -> None:
    layers = needed.layers
    if mine.name == WINDOW:
        layers += tuple(len(layers) + i for i in range(layout.draft_layers))
    for name, have, want in (
        ("layers", mine.layers, layers),
        ("window", mine.window, needed.window),
        ("slot_bytes", mine.slot_bytes, needed.slot_bytes),
        ("tokens_per_slot", mine.tokens_per_slot, needed.tokens_per_slot),
    ):
        if have != want:
            raise LayoutMismatch(f"{mine.name}: {name} is {have!r}, the model needs {want!r}")


def _cases(
    wanted: Attention, records: Mapping[str, Record], dtype: torch.dtype, device: str
) -> dict[str, Case]:
    def case(operation: str, record: str, dim: int, dtype: torch.dtype = dtype) -> Case:
        return Case(operation, record, (dim,), dtype, device)

    entry, dim = records[WINDOW].name, wanted.head_dim
    cases = {
        "head_norm_rope": case("head_norm_rope", "dense", dim),
        "inverse_rope": case("inverse_rope", "dense", dim),
        "write_normed": case("write_normed", entry, dim),
        "sparse_attend": case("sparse_attend", entry, dim),
    }
    for stream in (s for ratio in set(wanted.ratios) for s in STREAMS[ratio]):
        of_index = stream.entries == INDEX
        cases[stream.kernel] = case(
            "compress_write",
            records[stream.entries].name,
            wanted.index_dim if of_index else dim,
        )
    if INDEX in records:
        index, codes = records[INDEX].name, torch.uint8 if records[INDEX].planes else dtype
        cases["index_query"] = case("index_query", index, wanted.index_dim)
        cases["index_topk"] = case("index_topk", index, wanted.index_dim, codes)
    return cases


def _check_workspace(
    kernels: Mapping[str, Kernel],
    record: Record,
    wanted: Attention,
    reference: Tensor,
    workspace_bytes: int | str,
) -> None:
    """A size that is none is refused here, by a call for no token, not in the first step."""
    query = reference.new_empty(0, wanted.heads, wanted.head_dim)
    slots = torch.empty(0, wanted.window, dtype=torch.int32, device=reference.device)
    kernels["sparse_attend"].run(
        query,
        query.new_empty(1, wanted.head_dim),
        slots,
        query.new_zeros(wanted.heads),
        scale=1.0,
        record=record,
        workspace_bytes=workspace_bytes,
    )
