"""The workspace that all layers of an adapter project rows up in, one layer at a time.

It is taken from the device once, when a model is attached, so that what does not fit is found out
then and not under load.  Steps of several threads take turns, and so do streams.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from kvtier import ConfigError, KVTierError
from kvtier.kernels import HeadDims, Workspace

__all__ = ["SharedWorkspace"]


@final
class SharedWorkspace:
    """Room for ``rows`` projected rows.  Raises ConfigError where the device has none."""

    def __init__(self, rows: int, dims: HeadDims, dtype: torch.dtype, device: torch.device) -> None:
        try:
            self._workspace = Workspace.allocate(rows, dims, dtype, device)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"a workspace of {rows} projected rows could not be taken on {device}; set a "
                f"smaller workspace_bytes: {error}"
            ) from error
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._used: torch.cuda.Event | None = None
        """Behind what was queued last."""

    @property
    def rows(self) -> int:
        return self._workspace.rows

    @property
    def nbytes(self) -> int:
        return self._workspace.nbytes

    def beside(self, workspace_bytes: int | str) -> int:
        """What is left of so many bytes for other scratch."""
        return self._workspace.beside(workspace_bytes)

    @contextmanager
    def taken(self) -> Iterator[Workspace]:
        """The workspace, for work on the current stream; waits while another thread has it.

        Raises KVTierError where this thread has it already: a projection that runs another step.
        """
        if self._owner == threading.get_ident():
            raise KVTierError("an up-projection may not run a step of the adapter it belongs to")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                device = self._workspace.latent.device
                if device.type != "cuda":
                    yield self._workspace
                    return
                stream = torch.cuda.current_stream(device)
                if self._used is not None:
                    stream.wait_event(self._used)
                else:
                    self._used = torch.cuda.Event()  # type: ignore[no-untyped-call]
                try:
                    yield self._workspace
                finally:
                    self._used.record(stream)
            finally:
                self._owner = None
