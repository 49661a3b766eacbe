"""Decode steps with static buffers: captured in a CUDA graph once, replayed with other batches.

The graph holds the model's whole forward pass.  What a step asks of it lies in device arrays that
``Step.to_device`` fills before each replay: tokens, positions, tables, lengths, slots.  Nothing
else changes from replay to replay, so the host decides nothing within the graph; what it knows of
lengths is a bound.  Checkpoints that fall due are copied behind the replay: they are rare, and the
rings still hold what they need after one token.
"""

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from kvtier import ConfigError

if TYPE_CHECKING:
    from kvtier import Cache
    from kvtier_deepseek.attach import Adapter
    from kvtier_deepseek.metadata import DeviceStepLike, StepLike

__all__ = ["DecodeGraph"]


@final
class DecodeGraph:
    """Decode steps of up to ``batch`` leases; made by ``Adapter.capture_decode``.

    One step at a time, on one stream: its arrays and logits lie at the same addresses in all of
    them.
    """

    def __init__(self, adapter: "Adapter", cache: "Cache", *, batch: int, pages: int) -> None:
        self._adapter = adapter
        self._bound = pages * cache.layout.page_tokens
        self._buffers = cache.buffers(max_batch=batch, max_tokens=batch, max_pages=pages)
        self.batch = batch
        """Rows of every replay; those that a step does not have are padding."""
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        with cache.step([]) as step:  # nothing but padding, which writes nothing
            device = step.to_device(self._buffers, pad_to=batch)
            if device.input_ids.device.type == "cuda":
                self._capture(step, device)

    def replay(self, step: "StepLike") -> Tensor:
        """Logits (leases, vocab) of a step of one token a lease; the next replay overwrites them.

        Queued on the current stream without waiting.  Without a GPU the model is run as ever.
        Raises ConfigError for a step with more leases or pages than were captured or with more
        than one token of a lease, and what ``Adapter.forward`` raises.
        """
        device = self._load(step)
        if self._graph is None:
            return self._adapter._run(step, device, None)[: len(step.query_lens)]
        self._graph.replay()
        self._adapter._family.capture(step, device)
        self._adapter._note(len(step.query_lens))
        assert self._logits is not None
        return self._logits[: len(step.query_lens)]

    def eager(self, step: "StepLike") -> Tensor:
        """What ``replay`` does, kernel by kernel, without the graph: for comparison."""
        device = self._load(step)
        logits = self._adapter._run(step, device, self._bound)
        self._adapter._family.capture(step, device)
        return logits[: len(step.query_lens)]

    def _load(self, step: "StepLike") -> "DeviceStepLike":
        self._adapter._check(step)
        if (step.query_lens != 1).any():
            raise ConfigError(f"decoding takes one token of each lease, not {step.query_lens}")
        return step.to_device(self._buffers, pad_to=self.batch)

    def _capture(self, step: "StepLike", device: "DeviceStepLike") -> None:
        kernels = self._adapter._family.decoding
        if asking := [name for name, kernel in kernels.items() if kernel.backend == "torch"]:
            raise ConfigError(
                f"cannot capture {', '.join(asking)}: for this model the table has the reference "
                "only, which waits for the device"
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
            self._logits = self._adapter._run(step, device, self._bound)
        self._graph = graph
