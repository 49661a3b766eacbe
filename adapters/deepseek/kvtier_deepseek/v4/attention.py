"""The attention of one V4 layer during a step.

Order matters: the step's window rows, compressor states and closed entries are written before
anything is read, since the token that closes an entry attends to it already; what checkpoints hold
is copied in the same turn, before another step moves the rings on.  Projections, scale and rotation
angles are the model's own, norms and rotation are kernels of the table that do what the model's do.
Weights are read at each call, so nothing here is stale after they change in place.

No result's shape depends on data, and nothing is asked of the device: with kernels that keep to
that, a decode step may be captured in a graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.kernels import Kernel, PagedBatch, Record
from kvtier.layouts import Component
from kvtier_deepseek.family import Run
from kvtier_deepseek.metadata import TailDeviceStepLike, TailRows

__all__ = ["STREAMS", "WINDOW", "Captures", "Stream", "V4Attention", "V4Run"]

WINDOW = "swa"


@dataclass(frozen=True, slots=True)
class Captures:
    """Checkpoints due in a step, on the device."""

    states: Tensor
    """(captures, 3) int64: row, position and frame."""
    pages: Tensor
    """(captures, pages) int64: the window pages that each holds, oldest first."""

    @property
    def frames(self) -> Tensor:
        return self.states[:, 2]


@dataclass(slots=True, eq=False, kw_only=True)
class V4Run(Run):
    """A step, and what is the same in all of its layers."""

    step: TailDeviceStepLike
    batch: PagedBatch
    captures: Captures | None
    """None: none is due, or they are copied afterwards."""
    window_slots: Tensor
    """(tokens, window) physical slots that each query's window reaches, -1 where none."""
    c128_slots: Tensor | None
    """(tokens, n) physical slots of all entries of ratio 128 that each query sees, -1 behind;
    None where no layer has any."""
    c128_lengths: Tensor | None
    """(tokens,) int32: how many these are."""
    entry_turns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Ratio -> cos and sin (tokens, pairs) of the first token of each token's group."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One compressor's components: where its entries go, and the state it keeps until then."""

    entries: str
    states: tuple[str, ...]
    """What the next group reads first, if the compressor overlaps."""
    ratio: int

    @property
    def kernel(self) -> str:
        """Key of the kernel that writes its entries."""
        return f"compress_write {self.entries}"


C4 = Stream("c4", ("c4_state_a", "c4_state_b"), 4)
C4_INDEX = Stream("c4_index", ("c4_index_state_a", "c4_index_state_b"), 4)
C128 = Stream("c128", ("c128_state",), 128)
STREAMS: Mapping[int, tuple[Stream, ...]] = {0: (), 4: (C4, C4_INDEX), 128: (C128,)}
"""Of a layer of that ratio."""


@dataclass(frozen=True, slots=True)
class V4Attention:
    """Attention of one module over its window and, where it has a compressor, its entries."""

    module: nn.Module
    index: int
    ratio: int
    """Tokens of an entry: 4 or 128; 0: the window only."""
    groups: int
    """Of heads, in the output projection."""
    eps: float
    """Of all of the layer's norms of heads, window rows and entries."""
    components: Mapping[str, Component]
    records: Mapping[str, Record]
    """Of each component that holds records."""
    kernels: Mapping[str, Kernel]
    workspace_bytes: int | str

    def __call__(self, run: V4Run, hidden: Tensor, embeddings: Any) -> Tensor:
        """Attention output (1, tokens, hidden) for the step's packed tokens."""
        run.check(self.index, hidden)
        m: Any = self.module
        view = run.step.layer(self.index)
        cos, sin = (each[0] for each in embeddings[m.rope_layer_type])
        residual = m.q_a_norm(m.q_a_proj(hidden))
        query = m.q_b_proj(residual).view(hidden.shape[1], -1, m.head_dim)
        query = run.kernel(self, "head_norm_rope")(query, cos, sin, eps=self.eps, dtype=query.dtype)
        self._write_window(run, view, m.kv_proj(hidden)[0], cos, sin)
        extra: Tensor | None = None
        slots: Tensor | None = None
        lengths: Tensor | None = None
        if self.ratio == 4:
            self._compress(run, view, C4, m.compressor, hidden)
            self._compress(run, view, C4_INDEX, m.compressor.indexer, hidden)
            extra = view.rows(C4.entries)
            slots = self._selected(run, view, hidden, residual, cos, sin)
        elif self.ratio == 128:
            self._compress(run, view, C128, m.compressor, hidden)
            extra, slots = view.rows(C128.entries), run.c128_slots
            lengths = run.c128_lengths
        run.written.append(self.index)
        out, _ = run.kernel(self, "sparse_attend")(
            query,
            view.rows(WINDOW),
            run.window_slots,
            m.sinks,
            scale=m.scaling,
            record=self.records[WINDOW],
            extra=extra,
            extra_slots=slots,
            extra_lengths=lengths,
            workspace_bytes=self.workspace_bytes,
        )
        out = run.kernel(self, "inverse_rope")(out, cos, sin, dtype=out.dtype)
        grouped = out.reshape(*hidden.shape[:2], self.groups, -1)
        result: Tensor = m.o_b_proj(m.o_a_proj(grouped).flatten(2))
        return result

    def capture(self, view: TailRows, captures: Captures, state_slots: Tensor) -> None:
        """Copy what ``captures`` hold of this layer, after a step of as many tokens a row as rings
        have room for behind what is read: one, and ``max_draft``.
        """
        self.capture_window(view, captures)
        for stream in STREAMS[self.ratio]:
            for name in stream.states:
                c = self.components[name]
                if c.checkpoint_slots:
                    row, position, frame = captures.states.T
                    back = torch.arange(-c.checkpoint_slots, 0, device=row.device)
                    ring = c.slots_per_page
                    at = state_slots[row][:, None] * ring + (position[:, None] + back) % ring
                    view.checkpoints(name)[frame] = view.rows(name)[at]

    def _write_window(
        self, run: V4Run, view: TailRows, values: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        """What the window keeps of each token, (n, head_dim): key and value in one."""
        m: Any = self.module
        run.kernel(self, "write_normed")(
            view.rows(WINDOW),
            run.step.slot_mapping[WINDOW],
            values,
            m.kv_norm.weight,
            cos,
            sin,
            self.records[WINDOW],
            eps=self.eps,
        )
        if run.captures is not None:
            self.capture_window(view, run.captures)

    def capture_window(self, view: TailRows, captures: Captures) -> None:
        """Copy the window pages that ``captures`` hold of this layer."""
        pages = view.rows(WINDOW)
        if not self.records[WINDOW].planes:
            pages = pages.view(-1, self.components[WINDOW].slots_per_page, pages.shape[1])
        view.checkpoints(WINDOW)[captures.frames] = pages[captures.pages]

    def _compress(
        self, run: V4Run, view: TailRows, stream: Stream, compressor: Any, hidden: Tensor
    ) -> None:
        """Take the step's tokens into a compressor's state, and write the entries they close."""
        if stream.ratio not in run.entry_turns:
            first = run.step.positions - run.step.positions % stream.ratio
            # Of a float32 tensor's kind: entries are that until they are stored.
            run.entry_turns[stream.ratio] = tuple(
                each[0]
                for each in compressor.rotary_emb(
                    hidden.new_empty(0, dtype=torch.float32),
                    position_ids=first[None],
                    layer_type=compressor.rope_layer_type,
                )
            )
        kept = [self.components[name] for name in stream.states]
        due: dict[str, Any] = {}
        if run.captures is not None:
            frames = [view.checkpoints(c.name) if c.checkpoint_slots else None for c in kept]
            due = {"captures": run.captures.states, "frames": frames}
        bias = compressor.position_bias[run.step.positions % stream.ratio]
        run.kernel(self, stream.kernel)(
            compressor.kv_proj(hidden)[0],
            compressor.gate_proj(hidden)[0].float() + bias.float(),
            [view.rows(c.name) for c in kept],
            run.batch,
            run.step.state_slots,
            view.rows(stream.entries),
            run.step.slot_mapping[stream.entries],
            compressor.kv_norm.weight,
            *run.entry_turns[stream.ratio],
            self.records[stream.entries],
            ratio=stream.ratio,
            ring=kept[0].slots_per_page,
            eps=self.eps,
            **due,
        )

    def _selected(
        self, run: V4Run, view: TailRows, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Slots (tokens, topk) of the entries that the layer's index picks for each query."""
        m: Any = self.module
        indexer = m.compressor.indexer
        scorer = indexer.scorer
        record = self.records[C4_INDEX.entries]
        query, weights = run.kernel(self, "index_query")(
            indexer.q_b_proj(residual).view(hidden.shape[1], -1, indexer.head_dim),
            scorer.weights_proj(hidden)[0].float()
            * (scorer.weights_scaling * scorer.softmax_scale),
            cos,
            sin,
            record,
        )
        slots: Tensor = run.kernel(self, "index_topk")(
            query,
            weights,
            view.rows(C4_INDEX.entries),
            run.batch,
            ratio=C4_INDEX.ratio,
            topk=indexer.index_topk,
            record=record,
            slots=True,
            workspace_bytes=self.workspace_bytes,
        )
        return slots
