"""STOREs that wait for the disk go to it together, and keep their own ends."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvtier.core.ops import OpKind, Part
from kvtier.data import publishing
from kvtier.errors import StoreError
from kvtier.seams import Record
from kvtier.testing import MemoryStore
from tests.device.test_transfer_cpu import End, Plane, down, key, plane, to_disk


class SlowStore(MemoryStore):
    """Notes what is asked of it; the first call waits for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.began = threading.Event()
        self.calls: list[tuple[str, list[int]]] = []
        self.refuse: set[int] = set()
        """No group with one of these is taken."""
        self.passing: BaseException | None = None
        """Of every call with several records."""

    def _note(self, what: str, keys: Sequence[bytes]) -> None:
        self.calls.append((what, [int.from_bytes(k, "big") for k in keys]))
        self.began.set()
        assert self.gate.wait(300)

    def put_group(self, records: Sequence[Record]) -> None:
        self._note("put", [record.key for record in records])
        if self.refuse.intersection(self.calls[-1][1]):
            raise StoreError("not this one")
        if len(records) > 1 and self.passing is not None:
            raise self.passing
        super().put_group(records)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._note("drop", keys)
        super().delete(keys)


@contextmanager
def busy(*groups: tuple[OpKind, Sequence[Part]]) -> Iterator[tuple[Plane, SlowStore, list[End]]]:
    """A plane whose disk is writing page 1, with these ops queued behind it."""
    store = SlowStore()
    with plane(store=store) as p:
        assert p.start(OpKind.PACK, *[down(i, i) for i in range(10)]).delivered == 10
        ends = [p.start(OpKind.STORE, to_disk(1, 0))]
        assert store.began.wait(300)
        ends += [p.start(kind, *parts) for kind, parts in groups]
        sealed = threading.Event()
        p.transfer._publisher.ahead(sealed.set)  # all of them are queued by then
        assert sealed.wait(300)
        assert not any(end.calls for end in ends)
        try:
            yield p, store, ends
        finally:
            store.gate.set()


def put(*pages: int) -> tuple[OpKind, list[Part]]:
    return OpKind.STORE, [to_disk(n, n - 1) for n in pages]


def drop(*pages: int) -> tuple[OpKind, list[Part]]:
    return OpKind.DROP, [to_disk(n, n - 1) for n in pages]


def kept(store: MemoryStore) -> set[int]:
    return {int.from_bytes(bytes(k), "big") for k in store.scan()["key"]}


def test_groups_that_wait_are_published_together() -> None:
    with busy(put(2, 3), put(4), put(5, 6)) as (_, store, ends):
        store.gate.set()
        assert [end.delivered for end in ends] == [1, 2, 1, 2]
    assert store.calls == [("put", [1]), ("put", [2, 3, 4, 5, 6])]


def test_a_drop_keeps_its_place() -> None:
    with busy(put(2), put(3), drop(3), drop(2), put(2), put(3)) as (_, store, ends):
        store.gate.set()
        assert [end.delivered for end in ends] == [1] * 7
        assert kept(store) == {1, 2, 3}
    assert store.calls == [
        ("put", [1]),
        ("put", [2, 3]),
        ("drop", [3]),
        ("drop", [2]),
        ("put", [2, 3]),
    ]


def test_one_that_is_refused_fails_alone() -> None:
    """And those that hang on it: each has its own try, in order."""
    with busy(put(2), put(3, 4), put(5), put(6)) as (_, store, ends):
        store.refuse = {5}
        store.gate.set()
        assert [end.delivered for end in ends] == [1, 1, 2, 0, 0]
        assert [type(end.error) for end in ends[3:]] == [StoreError] * 2
        assert kept(store) == {1, 2, 3, 4}


@pytest.mark.parametrize("error", [StoreError("passing"), OSError(5, "passing"), SystemExit()])
def test_a_failure_of_all_together_is_nobodys(error: BaseException) -> None:
    """What failed for all may work for each."""
    with busy(put(2), put(3), drop(3)) as (_, store, ends):
        store.passing = error
        store.gate.set()
        assert [(end.delivered, end.error) for end in ends] == [(1, None)] * 4
        assert kept(store) == {1, 2}


def test_a_try_that_ends_a_thread_elsewhere_ends_no_other() -> None:
    """What is no Exception goes on to whoever runs the thread, and still every op ends."""
    with busy(put(2), put(3, 4), put(5, 6), put(7)) as (_, store, ends):
        store.passing = SystemExit()
        store.gate.set()
        assert [end.delivered for end in ends] == [1, 1, 0, 0, 0]
        assert [type(end.error) for end in ends[2:]] == [SystemExit, SystemExit, StoreError]
        assert kept(store) == {1, 2}


def test_what_goes_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with busy(put(2), put(3), put(4), put(5)) as (p, store, ends):
        monkeypatch.setattr(publishing, "PUBLISH_BYTES", 2 * p.transfer._sizes.of(to_disk(1, 0)))
        store.gate.set()
        assert [end.delivered for end in ends] == [1] * 5
    assert store.calls == [("put", [1]), ("put", [2, 3]), ("put", [4, 5])]
    assert key(1) in {bytes(k) for k in store.scan()["key"]}
