"""Host -> disk: STOREs and DROPs, in the order of ``start``, on two threads of their own.

One thread takes checksums, the other writes, so that the next op's are taken meanwhile.  Knows
nothing of the device.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from kvtier.core.ops import OpKind, Part
from kvtier.data.jobs import Job, Workers
from kvtier.errors import StoreError
from kvtier.seams import Record, Store

__all__ = ["Publisher"]

logger = logging.getLogger("kvtier")

PUBLISH_BYTES = 16 << 20
"""STOREs that wait are written to disk together up to this much; from there on what a publish
costs besides its bytes is lost in them."""


class Publisher:
    """Writes to ``store`` (None: there is no disk tier, and every op fails).

    ``record`` makes a record of a part, checksum and all; ``guard`` surrounds whatever may go wrong
    with a job from a part on.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        record: Callable[[Part], Record],
        guard: Callable[[Job, int], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self._record = record
        self._guard = guard
        self._to_write: deque[tuple[Job, Sequence[Record]]] = deque()
        """In the order of ``start``, a task of the writing thread for each."""
        self._sealing = Workers("seal", 1)
        self._writing = Workers("write", 1)
        self.workers = (self._sealing, self._writing)
        """In the order in which work flows."""

    def start(self, job: Job) -> None:
        """Queue a STORE or a DROP."""
        self._sealing.submit(lambda _: self._seal(job))

    def ahead(self, seal: Callable[[], None]) -> None:
        """Take checksums ahead of what is started from here on."""
        self._sealing.submit(lambda _: seal())

    def _seal(self, job: Job) -> None:
        """Everything but the writing."""
        records: list[Record] = []
        failed = True
        try:
            with self._guard(job, 0):
                if self._store is None:
                    raise StoreError("this cache has no disk tier")
                if job.op.kind is OpKind.STORE:
                    records = [self._record(part) for part in job.op.parts]
                failed = False
        finally:
            if failed:
                job.end_share()
            else:
                self._to_write.append((job, records))
                self._writing.submit(lambda _: self._write_next())

    def _write_next(self) -> None:
        """Write what is first, and the STOREs right behind it that wait by now with it: what makes
        a group durable is then paid once for all of them."""
        batch: list[tuple[Job, Sequence[Record]]] = []
        size = 0
        while self._to_write and size < PUBLISH_BYTES:
            drops = self._to_write[0][0].op.kind is OpKind.DROP
            if drops and batch:
                break
            job, records = self._to_write.popleft()
            batch.append((job, records))
            size += sum(record.size for record in records)
            if drops:
                break
        if len(batch) > 1 and self._written_together([r for _, group in batch for r in group]):
            for job, _ in batch:
                job.end_share()
            return
        with ExitStack() as tries:  # whatever one raises, the others have theirs
            for job, records in reversed(batch):
                tries.callback(self._write, job, records)

    def _written_together(self, records: Sequence[Record]) -> bool:
        """Whether all went in one publish; if not, nothing did, and each group has its own try."""
        assert self._store is not None
        try:
            self._store.put_group(records)
        except BaseException:  # each op is told by its own try
            logger.debug("groups that waited are written one by one", exc_info=True)
            return False
        return True

    def _write(self, job: Job, records: Sequence[Record]) -> None:
        try:
            with self._guard(job, 0):
                assert self._store is not None
                if job.op.kind is OpKind.DROP:
                    self._store.delete([part.key for part in job.op.parts])
                else:
                    self._store.put_group(records)
        finally:
            job.end_share()
