"""The attention of one layer with a window (MLA_SWA) during a step.

Rows go to window pages, and what each query sees of them is a list of physical slots, made once per
step: the step's own tokens, those of an earlier chunk and those of a shared prefix are all reached
by it.  Projections, norms, rope and scale are the model's own, through the same code as those of
full layers.  No result's shape depends on data, so a decode step may be captured in a graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from kvtier.kernels import Kernel, Record, window_slots
from kvtier.layouts import Component, Layout
from kvtier_deepseek.metadata import TailDeviceStepLike, TailRows, TailStepLike, upload
from kvtier_deepseek.mla.attention import MlaAttention, MlaRun
from kvtier_deepseek.mla.listed import attend_listed

__all__ = ["FORMATS", "WINDOW", "WindowAttention", "WindowRun", "captures_of", "window_run"]

WINDOW = "window_latent"
FORMATS = {"fp8": "mla_fp8", "dense": "dense"}


@dataclass(slots=True, eq=False, kw_only=True)
class WindowRun(MlaRun):
    """A step of a model that has layers with windows, and what is the same in all of these."""

    step: TailDeviceStepLike
    slots: Tensor
    """(tokens, window) int32: physical slots that each query sees, -1 behind them."""
    captures: Tensor | None
    """(pages, 3) int64: frame, place in it and window page that checkpoints due hold; None: none
    is due, or they are copied afterwards."""


@dataclass(frozen=True, slots=True)
class WindowAttention:
    """Attention of one module to its window; ``full`` is what it would be without one."""

    full: MlaAttention
    component: Component
    record: Record

    @property
    def module(self) -> nn.Module:
        return self.full.module

    @property
    def index(self) -> int:
        return self.full.index

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return self.full.kernels

    def __call__(self, run: WindowRun, hidden: Tensor, embeddings: Any) -> Tensor:
        """Attention output (1, tokens, hidden) for the step's packed tokens."""
        run.check(self.index, hidden)
        view = run.step.layer(self.index)
        rows = view.rows(WINDOW)
        q_nope, q_rope, latent = self.full.project(hidden, embeddings)
        run.kernel(self, "write_window")(rows, run.step.slot_mapping[WINDOW], latent, self.record)
        if run.captures is not None:
            self.capture(view, run.captures)
        run.written.append(self.index)
        out = attend_listed(
            self.full,
            partial(run.kernel, self),
            q_nope,
            q_rope,
            rows,
            run.slots,
            self.record,
            self.full.workspace_bytes,
        )
        result: Tensor = cast(Any, self.module).o_proj(out.flatten(1)[None])
        return result

    def capture(self, view: TailRows, captures: Tensor) -> None:
        """Copy the window pages that checkpoints hold of this layer."""
        pages = view.rows(WINDOW)
        if not self.record.planes:
            pages = pages.view(-1, self.component.slots_per_page, pages.shape[1])
        frame, place, page = captures.T
        view.checkpoints(WINDOW)[frame, place] = pages[page]

    def warmup(self) -> None:
        """Run every kernel of this layer once on a scratch page."""
        c, d = self.component, self.full.dims
        norm = cast(Any, self.module).kv_a_layernorm.weight
        if self.record.planes:
            rows = torch.zeros(1, c.page_bytes, dtype=torch.uint8, device=norm.device)
        else:
            rows = norm.new_zeros(c.slots_per_page, d.latent + d.rope)
        slot = torch.zeros(1, dtype=torch.int64, device=norm.device)
        self.kernels["write_window"].run(
            rows, slot, norm.new_zeros(1, d.latent + d.rope), self.record
        )
        slots = torch.full((1, c.window or 1), -1, dtype=torch.int32, device=norm.device)
        slots[0, 0] = 0
        for workspace in (self.full.workspace_bytes, 0):  # with lists cut into parts, and whole
            for kernel in self.kernels["mla_sparse"].variants:
                kernel.run(
                    norm.new_zeros(1, d.heads, d.latent + d.rope),
                    rows,
                    slots,
                    latent_dim=d.latent,
                    scale=self.full.scale,
                    record=self.record,
                    workspace_bytes=workspace,
                )


def window_run(
    run: MlaRun, device: TailDeviceStepLike, captures: Tensor | None, window: Component
) -> WindowRun:
    """``run`` with what layers of that component need besides."""
    assert window.window is not None
    return WindowRun(
        step=device,
        groups=run.groups,
        whole=run.whole,
        slots=window_slots(
            run.whole.batch,
            device.window_table,
            window=window.window,
            slots_per_page=window.slots_per_page,
        ),
        captures=captures,
    )


def captures_of(step: TailStepLike, layout: Layout, device: torch.device) -> Tensor | None:
    """``WindowRun.captures`` of a step; None where no checkpoint is due.

    Near the start of a sequence a checkpoint has fewer pages than it has room for.
    """
    if not step.captures:
        return None
    (window,) = layout.windows
    table = []
    for capture in step.captures:
        end = capture.position // window.slots_per_page
        first = max(0, end - layout.tail_windows)
        for place, page in enumerate(step.window_table[capture.row, first:end].tolist()):
            table.append((capture.frame, place, page))
    return upload(np.array(table, dtype=np.int64), device)
