"""Decode steps with static buffers: captured in a CUDA graph once, replayed with other batches.

The graph holds the model's whole forward pass.  What a step asks of it lies in device arrays that
``Step.to_device`` fills before each replay: tokens, positions, tables, lengths, slots.  Nothing
else changes from replay to replay, so the host decides nothing within the graph; what it knows of
lengths is a bound.  Checkpoints that fall due are copied behind the replay: they are rare, and the
rings still hold what they need after one token, or after as many drafts as they have room for.
"""

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from kvtier import ConfigError

if TYPE_CHECKING:
    from kvtier import Cache
    from kvtier_deepseek.attach import Adapter
    from kvtier_deepseek.metadata import DeviceStepLike, LayerRows, StepLike

__all__ = ["DecodeGraph"]


@final
class EvenStep:
    """A step's arrays with as many tokens in every row, padding rows too.

    A padding row's tokens have slot -1, position 0 and KV length 0.
    """

    def __init__(self, device: "DeviceStepLike", offsets: Tensor) -> None:
        rows = offsets.shape[0] - 1
        tails: Any = device
        self._device = device
        self.input_ids = device.input_ids
        self.positions = device.positions
        self.slot_mapping = device.slot_mapping
        self.cu_seqlens_q = offsets
        self.kv_lens = device.kv_lens[:rows]
        self.block_table = device.block_table[:rows]
        self.window_table: Tensor = tails.window_table[:rows]
        self.state_slots: Tensor = tails.state_slots[:rows]

    def layer(self, layer: int) -> "LayerRows":
        return self._device.layer(layer)


@final
class DecodeGraph:
    """Decode steps of up to ``batch`` leases, ``queries`` tokens of each; made by
    ``Adapter.capture_decode``.

    One step at a time, on one stream: its arrays and logits lie at the same addresses in all of
    them.
    """

    batch: int
    """Rows of every replay; those that a step does not have are padding."""
    queries: int
    """Tokens of each row."""

    def __init__(
        self, adapter: "Adapter", cache: "Cache", *, batch: int, pages: int, queries: int = 1
    ) -> None:
        most = cache.layout.max_rejected
        if queries < 1 or (most is not None and queries > most):
            raise ConfigError(f"queries={queries} must be in [1, {most or 'any'}]")
        self._adapter = adapter
        self._bound = pages * cache.layout.page_tokens
        tokens = batch * queries
        self._buffers = cache.buffers(max_batch=tokens, max_tokens=tokens, max_pages=pages)
        self.batch = batch
        self.queries = queries
        self._offsets: Tensor | None = None
        self._taps: dict[str, Tensor] = {}
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured = adapter.report
        with cache.step([]) as step:  # nothing but padding, which writes nothing
            device = self._arrays(step)
            if device.input_ids.device.type == "cuda":
                self._capture(step, device)

    def replay(self, step: "StepLike", device: "DeviceStepLike | None" = None) -> Tensor:
        """Logits (tokens, vocab) of a step of ``queries`` tokens a lease; the next replay
        overwrites them.

        ``device`` is what ``load`` gave for this step; None: it is loaded now.  Queued on the
        current stream without waiting.  Without a GPU the model is run as ever.  Raises what
        ``load`` raises.
        """
        device = self.load(step) if device is None else device
        tokens = len(step.input_ids)
        if self._graph is None:
            taps: dict[str, Tensor] = {}
            logits = self._adapter._run(step, device, None, taps=taps)
            self._adapter._record(step, device, taps)
            return logits[:tokens]
        self._graph.replay()
        self._adapter._family.capture(step, device)
        self._adapter._record(step, device, self._taps)
        self._adapter._note(tokens, self._captured)
        assert self._logits is not None
        return self._logits[:tokens]

    def eager(self, step: "StepLike") -> Tensor:
        """What ``replay`` does, kernel by kernel, without the graph: for comparison."""
        if self._graph is None:  # kernels of the host go by lengths, not by a bound
            return self.replay(step)
        device = self.load(step)
        taps: dict[str, Tensor] = {}
        logits = self._adapter._run(step, device, self._bound, taps=taps)
        self._adapter._family.capture(step, device)
        self._adapter._record(step, device, taps)
        return logits[: len(step.input_ids)]

    def load(self, step: "StepLike") -> "DeviceStepLike":
        """Copy a step's arrays to where the graph reads them, queued on the current stream.

        They come with padding rows, for whoever needs them besides ``replay``; the next step that
        is loaded overwrites them.  Raises ConfigError for a step with more leases or pages than
        were captured or with another number of tokens of a lease, and what ``Adapter.forward``
        raises.
        """
        self._adapter._check(step)
        if (step.query_lens != self.queries).any():
            wanted = "one token" if self.queries == 1 else f"{self.queries} tokens"
            raise ConfigError(f"decoding takes {wanted} of each lease, not {step.query_lens}")
        return self._arrays(step)

    def _arrays(self, step: "StepLike") -> "DeviceStepLike":
        """The static arrays, filled; rows that the step does not have are padding."""
        rows = len(step.query_lens)
        # A padding row of the step's own is one token: of each row here it takes several.
        missing = (self.batch - rows) * self.queries
        if self.queries == 1 or missing < 0:
            return step.to_device(self._buffers, pad_to=self.batch)
        device = step.to_device(self._buffers, pad_to=rows + missing)
        if self._offsets is None:
            tokens = torch.arange(self.batch + 1, dtype=torch.int32) * self.queries
            self._offsets = tokens.to(device.input_ids.device)
        return EvenStep(device, self._offsets)

    def _capture(self, step: "StepLike", device: "DeviceStepLike") -> None:
        kernels = self._adapter._family.decoding
        asking = {
            name: kernel.backend
            for name, kernel in kernels.items()
            if not any(variant.captures for variant in kernel.variants)
        }
        if asking:
            told = " and ".join(sorted(set(asking.values())))
            raise ConfigError(
                f"cannot capture {', '.join(asking)}: {told}, all there is for this model here, "
                "waits for the device or plans on the host"
            )
        where = device.input_ids.device
        ahead = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(where)
        ahead.wait_stream(current)
        with torch.cuda.stream(ahead):
            self._adapter._run(step, device, self._bound)  # compiles, and allocates once
        current.wait_stream(ahead)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on copying pages meanwhile.
        with torch.cuda.graph(graph, stream=ahead, capture_error_mode="thread_local"):
            self._logits = self._adapter._run(step, device, self._bound, taps=self._taps)
        self._graph = graph
        self._captured = self._adapter.report
