"""What an architecture's attention offers, so that one ``Adapter`` can run steps through any.

A *family* is the models whose attention layers are made of the same parts and cache the same
components.  Knows nothing of any of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvtier.kernels import Kernel, Load, PagedBatch
from kvtier_deepseek.metadata import DeviceStepLike, StepLike

__all__ = [
    "FEW",
    "MANY",
    "Family",
    "LayerAttention",
    "Run",
    "load_of",
    "variants_of",
    "without_reference",
]

FEW = 32
"""Queries of one sequence that are more than a decode step has."""
MANY = 513
"""Queries that fill a device twice."""


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One forward pass of one adapter: its step, and what has been done so far."""

    step: DeviceStepLike
    mask: Tensor = field(init=False)
    """The very object given to the model as attention mask: a layer that is called with another
    one is not being called for this run."""
    written: list[int] = field(default_factory=list)
    """Layers in the order in which they wrote, and then read, their pages."""
    forms: dict[str, int] = field(default_factory=dict)
    """Form -> sequences that took it, of the first layer."""
    backends: dict[str, str] = field(default_factory=dict)
    """Operation -> backend used."""
    loads: dict[str, Load] = field(default_factory=dict)
    """Operation -> how much a call of it has to do, where that decides what is called."""
    picked: dict[str, Kernel] = field(default_factory=dict)
    """Operation -> the kernel that was picked by its load: the same in all layers."""
    taps: dict[str, Tensor] = field(default_factory=dict)
    """What drafts have asked for of this pass."""

    def __post_init__(self) -> None:
        self.mask = torch.empty(1, 1, 1, 1, device=self.step.input_ids.device)

    def check(self, layer: int, hidden: Tensor) -> None:
        """Raises RuntimeError unless ``hidden`` (1, tokens, size) can be this layer's one turn."""
        if hidden.dim() != 3 or hidden.shape[:2] != (1, self.step.input_ids.shape[0]):
            raise RuntimeError(f"hidden states {tuple(hidden.shape)} are not this step's tokens")
        if layer in self.written:
            raise RuntimeError(f"layer {layer} was called twice in one step")

    def kernel(self, layer: "LayerAttention", operation: str) -> Callable[..., Any]:
        """What a layer calls for this operation, and looks at the outputs of; noted as used."""
        kernel = layer.kernels[operation]
        if kernel.rivals:
            kernel = self.picked.get(operation) or self._pick(operation, kernel)
        self.backends[operation] = kernel.backend
        return kernel.outputs

    def _pick(self, operation: str, kernel: Kernel) -> Kernel:
        if (load := self.loads.get(operation)) is not None:
            kernel = self.picked[operation] = kernel.for_load(load)
        return kernel


class LayerAttention(Protocol):
    """One attention module, and what takes its place during a step."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def index(self) -> int: ...
    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """By operation."""

    def __call__(self, run: Any, hidden: Tensor, embeddings: Any) -> Tensor:
        """Write the step's rows, then attend: (1, tokens, hidden) to the same shape.

        ``run`` is what the family's ``make_run`` made, ``embeddings`` what the model hands its
        attention as ``position_embeddings``.  Appends itself to ``run.written``.
        """


class Family(Protocol):
    """The attention of one attached model.  Its layers are checked, its kernels picked."""

    @property
    def layers(self) -> Sequence[LayerAttention]: ...
    @property
    def max_absorbed(self) -> int:
        """Sequences with more new tokens than this take the materialised form; 0 where there is
        no other."""

    @property
    def max_rows(self) -> int:
        """Rows projected up at a time, which is what ``workspace_bytes`` came to; 0 where none
        are."""

    @property
    def reserved_bytes(self) -> int:
        """Scratch that is held all the time, for all layers together."""

    @property
    def decoding(self) -> Mapping[str, Kernel]:
        """The kernels that a decode step of one token a row runs, by operation.

        Raises ConfigError naming what keeps such a step from having kernels only.
        """

    @property
    def options(self) -> Mapping[str, Any]:
        """Further keywords of the model's forward."""

    def check_step(self, step: StepLike, device: DeviceStepLike) -> None:
        """Check metadata that kvtier has not made.  Raises LayoutMismatch or TokenError."""

    def make_run(self, step: StepLike, device: DeviceStepLike, bound: int | None) -> Run:
        """What all layers of this step share; ``device`` may have padding rows behind the step's
        own.

        With ``bound`` of any decode step with ``device``'s arrays, whatever they hold by then: of
        as many tokens in each row as in any other, and no more than ``bound`` KV tokens.
        """

    def capture(self, step: StepLike, device: DeviceStepLike) -> None:
        """Copy what checkpoints due in a decode step hold, which has run with ``bound``."""

    def warmup(self) -> None:
        """Run every kernel that a step may need once, on scratch pages."""


def load_of(batch: PagedBatch, heads: int, *, captured: bool) -> Load:
    """How much attention to all rows of these sequences has to do."""
    sequences = max(1, len(batch.kv_lens))
    return Load(
        batch=sequences,
        heads=heads,
        keys=sum(batch.kv_lens) // sequences,
        queries=max(batch.query_lens, default=1),
        page_tokens=batch.page_tokens,
        captured=captured,
    )


def without_reference(kernels: Mapping[str, Kernel], operation: str) -> Mapping[str, Kernel]:
    """``kernels``, less that of an operation that is worth its while as a kernel only."""
    return {
        name: kernel
        for name, kernel in kernels.items()
        if name != operation or kernel.backend != "torch"
    }


def variants_of(kernels: Mapping[str, Kernel]) -> Iterator[dict[str, Kernel]]:
    """``Run.picked`` of runs that between them call every kernel that a step may pick."""
    turns = max((len(kernel.variants) for kernel in kernels.values()), default=1)
    for turn in range(turns):
        yield {
            operation: kernel.variants[min(turn, len(kernel.variants) - 1)]
            for operation, kernel in kernels.items()
        }
