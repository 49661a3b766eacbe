"""What a draft is to the loop and to the adapter, and what all drafts with a cache share.

A draft layer's row of position p is made of token p and of what the model made of position p - 1
(next-n predictors), or of position p alone (DSpark).  Either way it is a function of the tokens up
to p, so pages and checkpoints hold it as they hold the model's own rows.  Rows are written for
tokens that the model has computed, in the same step; what a draft makes of its own guesses stays
in scratch and is never in a page.

Knows nothing of how acceptance is decided.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from kvtier import ConfigError, LayoutMismatch
from kvtier.layouts import Layout
from kvtier_deepseek.drafts.ledger import Ledger, Stand
from kvtier_deepseek.family import Family
from kvtier_deepseek.fields import DRAFT_STATE
from kvtier_deepseek.metadata import DeviceStepLike, StepLike, TailStepLike

if TYPE_CHECKING:
    from kvtier import Lease

__all__ = ["CachedDraft", "Continuation", "Proposer", "Tap", "on_device"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """How one row of a step goes on once the step is committed."""

    row: int
    tokens: Sequence[int]
    """All tokens of the request: those that will be committed, and the next one to be fed."""
    count: int
    """The most guesses that are wanted."""

    @property
    def length(self) -> int:
        """Committed tokens after the step."""
        return len(self.tokens) - 1


class Proposer(Protocol):
    """Anything that guesses tokens."""

    def propose(
        self, step: StepLike, device: DeviceStepLike, rows: Sequence[Continuation]
    ) -> list[list[int]]:
        """For each of ``rows`` up to ``count`` guesses at what follows its tokens.

        Called within the step, after the model has run: tables of ``step`` are good up to what it
        has fed.  No guesses is always a valid answer.
        """


@dataclass(frozen=True, slots=True)
class Tap:
    """Where in the model a draft listens: what goes into a module, or what comes out of it."""

    module: nn.Module
    side: Literal["input", "output"]


class CachedDraft(ABC):
    """A draft with cache layers of its own, bound to one adapter by ``attach(draft=...)``.

    The adapter calls ``record`` after every forward pass, so that the draft's rows are there for
    every token that the model's are.  Where they are not (they were computed without this draft,
    or the lease was cut back to a place that nothing remembers), ``propose`` gives no guesses for
    that request until enough rows have been written again; the model's own hit is not touched.
    """

    kind: ClassVar[str]
    """As ``layout_for(draft=...)`` names it."""
    carries: ClassVar[bool]
    """Whether a row is made of the position before it too."""

    def __init__(self, *, values: int, layers: int) -> None:
        self._values = values
        self._layers = layers
        self._ledger: Ledger | None = None

    @property
    @abstractmethod
    def taps(self) -> Mapping[str, Tap]:
        """What ``record`` needs of the model's forward pass."""

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """Rows before a token that guessing what follows it reads; None: all."""

    @abstractmethod
    def _bind(self, family: Family, layout: Layout) -> None:
        """Check the layout and pick kernels.  Raises LayoutMismatch."""

    @abstractmethod
    def _hidden(self, taps: Mapping[str, Tensor]) -> Tensor:
        """(tokens, values): what the next position's row, or this one's, is made of."""

    @abstractmethod
    def _write(
        self, step: StepLike, device: DeviceStepLike, hidden: Tensor, stands: Sequence[Stand]
    ) -> None:
        """Write the rows of the step's tokens in all layers of the draft."""

    @abstractmethod
    def _guess(
        self,
        step: StepLike,
        device: DeviceStepLike,
        rows: Sequence[Continuation],
        stands: Sequence[Stand],
    ) -> Tensor:
        """(rows, most of their counts) guesses, int64."""

    @abstractmethod
    def _capture(self, step: TailStepLike, device: DeviceStepLike) -> None:
        """Copy what checkpoints due hold of the draft's layers."""

    def bind(self, family: Family, layout: Layout) -> None:
        """Called by ``attach``.  Raises LayoutMismatch where ``layout`` has no place for it, and
        ConfigError for a draft that serves another adapter."""
        if self._ledger is not None:
            raise ConfigError("this draft is attached already; a draft serves one adapter")
        if layout.draft_layers != self._layers:
            raise LayoutMismatch(
                f"draft_layers is {layout.draft_layers}, the draft has {self._layers}: make the "
                f"layout with draft={self.kind!r}"
            )
        states = [c for c in layout.components if c.name == DRAFT_STATE]
        have = layout.meta.get("draft_state_values")
        if states and have != self._values:
            raise LayoutMismatch(f"draft_state_values is {have}, the draft has {self._values}")
        self._bind(family, layout)
        self._ledger = Ledger(
            page_tokens=layout.page_tokens,
            layer=states[0].layers[0] if states else None,
            values=self._values,
            keep=layout.max_draft + 2,
            carries=self.carries,
            reach=self.reach,
        )

    def release(self) -> None:
        """Called by ``detach``: forget all requests; the draft may be attached again."""
        self._ledger = None

    @torch.no_grad()
    def record(self, step: StepLike, device: DeviceStepLike, taps: Mapping[str, Tensor]) -> None:
        """Take in a forward pass: write the rows of its tokens, and what pages keep of them.

        All of the step's tokens, those that may yet be rejected too: nobody sees the rows of such
        tokens before they are written over.
        """
        tokens = len(step.input_ids)
        if not tokens:
            return
        hidden = self._hidden(taps)[:tokens]
        stands = self.ledger.begin(step, device, hidden)
        self._write(step, device, hidden, stands)
        self._capture(cast(TailStepLike, step), device)
        state = hidden if self.carries else hidden.new_zeros(tokens, self._values)
        self.ledger.end(step, device, state, stands)

    @torch.no_grad()
    def propose(
        self, step: StepLike, device: DeviceStepLike, rows: Sequence[Continuation]
    ) -> list[list[int]]:
        """See ``Proposer``; no guesses for a request whose rows are not there (yet)."""
        guesses: list[list[int]] = [[] for _ in rows]
        ready: list[tuple[int, Stand]] = []
        for i, row in enumerate(rows):
            stand = self.ledger.stand(step, device, row.row, row.length)
            if row.count > 0 and self._ready(stand):
                ready.append((i, stand))
        if ready:
            wanted = [rows[i] for i, _ in ready]
            found = self._guess(step, device, wanted, [stand for _, stand in ready]).tolist()
            for (i, _), tokens in zip(ready, found, strict=True):
                guesses[i] = tokens[: rows[i].count]
        return guesses

    def rows_from(self, lease: "Lease") -> int | None:
        """First position from which all rows up to the lease's last step are there; None for a
        lease that has had no step."""
        return self.ledger.gapless(lease)

    def carried(self, lease: "Lease") -> int | None:
        """How many tokens the draft has taken in of this lease, rejected ones of its last step
        included; None before its first step."""
        return self.ledger.stop(lease)

    def fork(self, lease: "Lease", other: "Lease") -> None:
        """``other`` is a fork of ``lease``: it goes on from the same state."""
        self.ledger.fork(lease, other)

    @property
    def ledger(self) -> Ledger:
        """Which rows of each request are there.  Raises ConfigError where it is not attached."""
        if self._ledger is None:
            raise ConfigError("this draft is not attached; give it to attach(draft=...)")
        return self._ledger

    def _ready(self, stand: Stand) -> bool:
        if stand.carry is None:
            return False
        assert self.reach is not None
        return stand.gapless <= max(0, stand.length - self.reach)


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A copy of a list or an array on ``device``, queued without waiting."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
