"""The attention of one V4 layer during a step.

Order matters: the step's window rows, compressor states and closed entries are written before
anything is read, since the token that closes an entry attends to it already; what checkpoints hold
is copied in the same turn, before another step moves the rings on.  Everything else is the model's
own: projections, norms, rope, scale, scorer.  Weights are read at each call, so nothing here is
stale after they change in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.kernels import Kernel, PagedBatch, Record, c4_slots
from kvtier.layouts import Component
from kvtier_deepseek.family import Run
from kvtier_deepseek.metadata import TailDeviceStepLike, TailRows
from kvtier_deepseek.v4.structure import Rotation

__all__ = ["WINDOW", "V4Attention", "V4Run"]

WINDOW = "swa"
WRITERS = {
    WINDOW: "write_record",
    "c4": "write_record",
    "c128": "write_record",
    "c4_index": "write_index_record",
}
"""Component -> key of the kernel that writes its records."""


@dataclass(slots=True, eq=False, kw_only=True)
class V4Run(Run):
    """A step, and what is the same in all of its layers."""

    step: TailDeviceStepLike
    batch: PagedBatch
    captures: tuple[tuple[int, int], ...]
    """(row, position) of each checkpoint due."""
    capture_frames: Tensor
    """(captures,) int64: the checkpoint frame each goes to."""
    captured_pages: Tensor
    """(captures, pages) int64: the window pages each holds."""
    window_slots: Tensor
    """(tokens, window) physical slots that each query's window reaches, -1 where none."""
    c128_slots: Tensor | None
    """(tokens, n) physical slots of all entries of ratio 128 that each query sees, -1 behind;
    None where no layer has any."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One compressor's components: where its entries go, and the state it keeps until then."""

    entries: str
    states: tuple[str, ...]
    """What the next group reads first, if the compressor overlaps."""
    ratio: int


C4 = Stream("c4", ("c4_state_a", "c4_state_b"), 4)
C4_INDEX = Stream("c4_index", ("c4_index_state_a", "c4_index_state_b"), 4)
C128 = Stream("c128", ("c128_state",), 128)


@dataclass(frozen=True, slots=True)
class V4Attention:
    """Attention of one module over its window and, where it has a compressor, its entries."""

    module: nn.Module
    index: int
    ratio: int
    """Tokens of an entry: 4 or 128; 0: the window only."""
    groups: int
    """Of heads, in the output projection."""
    rotation: Rotation
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
        cos, sin = embeddings[m.rope_layer_type]
        residual = m.q_a_norm(m.q_a_proj(hidden))
        query = m.q_b_norm(_heads(m.q_b_proj(residual), m.head_dim))
        query = self.rotation(query, cos, sin)[0].transpose(0, 1)
        self._write_window(run, view, self._window_rows(hidden, cos, sin))
        extra: Tensor | None = None
        slots: Tensor | None = None
        if self.ratio == 4:
            self._compress(run, view, C4, m.compressor, hidden)
            self._compress(run, view, C4_INDEX, m.compressor.indexer, hidden)
            extra = view.rows(C4.entries)
            slots = self._selected(run, view, hidden, residual, (cos, sin))
        elif self.ratio == 128:
            self._compress(run, view, C128, m.compressor, hidden)
            extra, slots = view.rows(C128.entries), run.c128_slots
        run.written.append(self.index)
        out = self._attend(run, view, query, extra, slots)
        out = self.rotation(out.transpose(0, 1)[None], cos, -sin).transpose(1, 2)
        grouped = out.reshape(*hidden.shape[:2], self.groups, -1)
        result: Tensor = m.o_b_proj(m.o_a_proj(grouped).flatten(2))
        return result

    def warmup(self, page_tokens: int) -> None:
        """Run every kernel of this layer once, for one token on scratch pages."""
        m: Any = self.module
        weight = m.q_b_proj.weight
        one = torch.ones(1, dtype=torch.int32, device=weight.device)
        counts = torch.arange(2, dtype=torch.int32, device=weight.device)
        batch = PagedBatch((1,), (1,), counts[None, :1], counts, one, page_tokens)
        window = self._scratch(WINDOW)
        values = weight.new_zeros(1, m.head_dim)
        self.kernels[WRITERS[WINDOW]].run(window, counts[:1], values, self.records[WINDOW])
        for stream in {4: (C4, C4_INDEX), 128: (C128,)}.get(self.ratio, ()):
            dim = self.components[stream.states[0]].slot_bytes // 8
            tokens = weight.new_zeros(1, len(stream.states) * dim, dtype=torch.float32)
            states = [self._scratch(name) for name in stream.states]
            ring = self.components[stream.states[0]].slots_per_page
            self.kernels["compress"].run(
                tokens, tokens, states, batch, counts[:1], ratio=stream.ratio, ring=ring
            )
            self.kernels[WRITERS[stream.entries]].run(
                self._scratch(stream.entries),
                counts[:1],
                tokens[:, :dim],
                self.records[stream.entries],
            )
        extra: dict[str, Any] = {}
        if self.ratio:
            extra["extra"] = self._scratch(C4.entries if self.ratio == 4 else C128.entries)
            extra["extra_slots"] = counts[None, :1]
        if self.ratio == 4:
            indexer = m.compressor.indexer
            self.kernels["index_topk"].run(
                weight.new_zeros(1, indexer.num_heads, indexer.head_dim),
                weight.new_zeros(1, indexer.num_heads, dtype=torch.float32),
                self._scratch(C4_INDEX.entries),
                batch,
                ratio=C4_INDEX.ratio,
                topk=indexer.index_topk,
                record=self.records[C4_INDEX.entries],
                workspace_bytes=self.workspace_bytes,
            )
        self.kernels["sparse_attend"].run(
            weight.new_zeros(1, m.num_heads, m.head_dim),
            window,
            counts[None, :1],
            m.sinks,
            scale=m.scaling,
            record=self.records[WINDOW],
            workspace_bytes=self.workspace_bytes,
            **extra,
        )

    def _scratch(self, name: str) -> Tensor:
        """One page of a component, as ``rows`` would give it."""
        c = self.components[name]
        m: Any = self.module
        page = torch.zeros(1, c.page_bytes, dtype=torch.uint8, device=m.sinks.device)
        if c.planes:
            return page
        return page.view(c.slots_per_page, c.slot_bytes).view(getattr(torch, c.dtype))

    def _window_rows(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the window keeps of each token, (n, head_dim): key and value in one."""
        m: Any = self.module
        kv = _heads(m.kv_norm(m.kv_proj(hidden)), m.head_dim)
        return self.rotation(kv, cos, sin)[0, 0]

    def _write_window(self, run: V4Run, view: TailRows, values: Tensor) -> None:
        rows = view.rows(WINDOW)
        self._kernel(run, WRITERS[WINDOW])(
            rows, run.step.slot_mapping[WINDOW], values, self.records[WINDOW]
        )
        if run.captures:
            pages = rows
            if not self.records[WINDOW].planes:
                pages = rows.view(-1, self.components[WINDOW].slots_per_page, rows.shape[1])
            view.checkpoints(WINDOW)[run.capture_frames] = pages[run.captured_pages]

    def _compress(
        self, run: V4Run, view: TailRows, stream: Stream, compressor: Any, hidden: Tensor
    ) -> None:
        """Take the step's tokens into a compressor's state, and write the entries they close."""
        kept = [self.components[name].checkpoint_slots or 0 for name in stream.states]
        bias = compressor.position_bias[run.step.positions % stream.ratio]
        closed = self._kernel(run, "compress")(
            compressor.kv_proj(hidden)[0].float(),
            compressor.gate_proj(hidden)[0].float() + bias.float(),
            [view.rows(name) for name in stream.states],
            run.batch,
            run.step.state_slots,
            ratio=stream.ratio,
            ring=self.components[stream.states[0]].slots_per_page,
            captures=run.captures,
            capture_slots=kept,
        )
        for name, rows, count in zip(stream.states, closed.captured, kept, strict=True):
            if run.captures and count:
                view.checkpoints(name)[run.capture_frames] = rows
        if closed.tokens.numel():
            normed = compressor.kv_norm(closed.values)[None]
            cos, sin = compressor.rotary_emb(
                normed,
                position_ids=closed.entries[None] * stream.ratio,
                layer_type=compressor.rope_layer_type,
            )
            self._kernel(run, WRITERS[stream.entries])(
                view.rows(stream.entries),
                run.step.slot_mapping[stream.entries][closed.tokens],
                self.rotation(normed[None], cos, sin)[0, 0],
                self.records[stream.entries],
            )

    def _selected(
        self, run: V4Run, view: TailRows, hidden: Tensor, residual: Tensor, rope: tuple[Tensor, ...]
    ) -> Tensor:
        """Slots (tokens, topk) of the entries that the layer's index picks for each query."""
        m: Any = self.module
        indexer = m.compressor.indexer
        query = _heads(indexer.q_b_proj(residual), indexer.head_dim)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden)[0].float()
        entries = self._kernel(run, "index_topk")(
            self.rotation(query, *rope)[0].transpose(0, 1),
            weights * (scorer.weights_scaling * scorer.softmax_scale),
            view.rows(C4_INDEX.entries),
            run.batch,
            ratio=C4_INDEX.ratio,
            topk=indexer.index_topk,
            record=self.records[C4_INDEX.entries],
            workspace_bytes=self.workspace_bytes,
        )
        return c4_slots(entries, run.batch)

    def _attend(
        self, run: V4Run, view: TailRows, query: Tensor, extra: Tensor | None, slots: Tensor | None
    ) -> Tensor:
        m: Any = self.module
        out: Tensor
        out, _ = self._kernel(run, "sparse_attend")(
            query,
            view.rows(WINDOW),
            run.window_slots,
            m.sinks,
            scale=m.scaling,
            record=self.records[WINDOW],
            extra=extra,
            extra_slots=slots,
            workspace_bytes=self.workspace_bytes,
        )
        return out

    def _kernel(self, run: V4Run, operation: str) -> Any:
        kernel = self.kernels[operation]
        run.backends[operation] = kernel.backend
        return kernel.run


def _heads(rows: Tensor, dim: int) -> Tensor:
    """(1, n, heads * dim) as (1, heads, n, dim)."""
    return rows.view(1, rows.shape[1], -1, dim).transpose(1, 2)
