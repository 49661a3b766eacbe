"""The fakes keep the contracts they stand in for."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.ops import Kind, Op, OpKind, Part
from kvtier.data import DeviceTransfer
from kvtier.errors import CacheClosed, StoreError
from kvtier.layouts import gqa
from kvtier.seams import ENTRY, Read, Record, Store, Transfer
from kvtier.testing import Fate, FaultyTransfer, ManualTransfer, MemoryStore, token_streams
from kvtier.types import Tier

GPU, CPU, DISK = Tier.GPU, Tier.CPU, Tier.DISK


def test_importing_it_needs_neither_torch_nor_hypothesis() -> None:
    code = (
        "import sys, kvtier.testing; "
        "assert not {'torch', 'hypothesis'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_they_are_what_they_stand_for() -> None:
    """Checked by mypy; here, that the names are there."""
    store: Store = MemoryStore()
    transfer: Transfer = ManualTransfer()
    assert store.capacity > 0
    transfer.close()


# --------------------------------------------------------------------------- MemoryStore


def key(n: int) -> bytes:
    return bytes([n]) * 16


def record(n: int, parent: int = 0, *, depth: int = 2, component: str = "history") -> Record:
    payload = bytearray([n]) * 4096 + bytearray([n + 1]) * 4096
    return Record(
        key=key(n),
        parent=key(parent),
        depth=depth,
        component=component,
        tokens=b"tok" + bytes([n]),
        payload=(memoryview(payload)[:4096], memoryview(payload)[4096:]),
        checksum=xxhash.xxh3_128_digest(payload[:6000]),
        size=6000,
    )


def read(r: Record, **other: object) -> tuple[Read, bytearray]:
    out = bytearray(b"\xff" * 8192)
    views = (memoryview(out)[:4096], memoryview(out)[4096:])
    fields = {"key": r.key, "parent": r.parent, "tokens": r.tokens, "size": r.size, **other}
    return Read(views=views, **fields), out  # type: ignore[arg-type]


def test_store_gives_back_what_it_took() -> None:
    store = MemoryStore()
    first, second = record(1, depth=1), record(2, 1)
    store.put_group([first, second])
    (r1, out1), (r2, out2) = read(first), read(second)
    assert store.read_into([r2, r1]) == [True, True]
    assert out1 == b"\x01" * 4096 + b"\x02" * 1904 + b"\xff" * 2192
    assert out2[:4097] == b"\x02" * 4096 + b"\x03"
    first.payload[0][:] = bytes(4096)  # it keeps a copy
    assert store.read_into([read(first)[0]]) == [True]


def test_store_refuses_orphans_and_wrong_checksums_as_a_whole() -> None:
    store = MemoryStore()
    with pytest.raises(StoreError, match="parent"):
        store.put_group([record(2, 1)])
    with pytest.raises(StoreError, match="parent"):
        store.put_group([record(2, 1), record(1, depth=1)])  # children come after
    with pytest.raises(StoreError, match="parent"):
        store.put_group([record(9, 1, depth=1, component="checkpoint")])
    bad = record(1, depth=1)
    bad.payload[0][7] ^= 1
    with pytest.raises(StoreError, match="checksum"):
        store.put_group([record(3, depth=1), bad])
    assert store.keys() == set()
    store.put_group([record(1, depth=1), record(9, 1, depth=1, component="checkpoint")])
    store.put_group([record(1, depth=1)])  # there already: done
    assert store.keys() == {key(1), key(9)}


@pytest.mark.parametrize(
    "other", [{"parent": key(7)}, {"tokens": b"else"}, {"size": 5999}, {"size": 6001}]
)
def test_store_quarantines_what_does_not_agree(other: dict[str, object]) -> None:
    store = MemoryStore(capacity=4)
    store.put_group([record(1, depth=1)])
    assert store.read_into([read(record(1, depth=1), **other)[0]]) == [False]
    assert store.read_into([read(record(1, depth=1))[0]]) == [False]
    assert store.keys(quarantined=True) == {key(1)}
    assert len(store.scan()) == 0
    with pytest.raises(StoreError, match="full"):  # its frames still count
        store.put_group([record(3, depth=1), record(5, depth=1)])
    with pytest.raises(StoreError, match="parent"):
        store.put_group([record(2, 1)])
    store.put_group([record(1, depth=1)])  # rewritten, in the same room
    assert store.read_into([read(record(1, depth=1))[0]]) == [True]


def test_store_corruption_is_found_and_leaves_garbage_behind() -> None:
    store = MemoryStore()
    store.put_group([record(1, depth=1)])
    store.corrupt(key(1), at=5)
    r, out = read(record(1, depth=1))
    assert store.read_into([r]) == [False]
    assert out[5] == 0, "a caller must not count on its views after a miss"


def test_store_replaces_a_record_that_was_computed_anew() -> None:
    store = MemoryStore()
    store.put_group([record(1, depth=1), record(2, 1)])
    payload = bytearray(b"\x55") * 8192
    anew = replace(
        record(1, depth=1),
        payload=(memoryview(payload)[:4096], memoryview(payload)[4096:]),
        checksum=xxhash.xxh3_128_digest(payload[:6000]),
    )
    store.put_group([anew])
    r, out = read(anew)
    assert store.read_into([r]) == [True]
    assert out[:6000] == b"\x55" * 6000
    assert store.read_into([read(record(2, 1))[0]]) == [True]  # what hangs on it stays


def test_store_refuses_to_delete_what_another_record_needs() -> None:
    store = MemoryStore()
    chain = [record(1, depth=1), record(2, 1), record(9, 2, component="checkpoint")]
    store.put_group(chain)
    for keys in ([key(1)], [key(2)], [key(1), key(2)], [key(9), key(1)]):
        with pytest.raises(StoreError, match="needed by"):
            store.delete(keys)
        assert store.keys() == {key(1), key(2), key(9)}
    store.delete([key(2), key(9)])
    store.delete([key(1), key(2)])
    assert store.keys() == set()


def test_store_failures_scan_touch_delete() -> None:
    store = MemoryStore()
    store.put_group([record(1, depth=1), record(2, 1), record(9, 2, component="checkpoint")])
    store.touch([(key(2), 77), (key(50), 1)])
    rows = store.scan()
    assert rows.dtype == ENTRY
    by_key = {bytes(row["key"]): row for row in rows}
    assert set(by_key) == {key(1), key(2), key(9)}
    two = by_key[key(2)]
    assert (bytes(two["parent"]), two["tick"], two["depth"], two["frames"]) == (key(1), 77, 2, 2)
    assert [by_key[key(n)]["checkpoint"] for n in (1, 2, 9)] == [0, 0, 1]
    store.fail_next(2)
    with pytest.raises(StoreError):
        store.delete([key(9)])
    with pytest.raises(StoreError):
        store.scan()
    store.delete([key(9), key(50)])
    assert store.keys() == {key(1), key(2)}
    store.close()
    for call in (store.scan, lambda: store.put_group([]), lambda: store.read_into([])):
        with pytest.raises(StoreError):
            call()
    store.reopen()
    assert len(store.scan()) == 2


def test_empty_scan_has_the_right_type() -> None:
    assert MemoryStore().scan().dtype == ENTRY
    assert np.array_equal(MemoryStore().scan()["key"], np.zeros(0, "V16"))


# --------------------------------------------------------------------------- ManualTransfer


def op(number: int, kind: OpKind = OpKind.PACK, parts: int = 2) -> Op:
    moves = {
        OpKind.PACK: (GPU, CPU),
        OpKind.RESTORE: (CPU, GPU),
        OpKind.STORE: (CPU, DISK),
        OpKind.DROP: (DISK, DISK),
        OpKind.COPY: (GPU, GPU),
    }
    source, target = moves[kind]
    return Op(
        number, kind, tuple(Part(Kind.HISTORY, source, (i,), target, (i,)) for i in range(parts))
    )


class Log:
    """Callbacks that write down what happened."""

    def __init__(self, transfer: Transfer) -> None:
        self.events: list[object] = []
        self.transfer = transfer
        self.changed = threading.Condition()

    def start(self, op: Op, then: Callable[[], object] = lambda: None) -> None:
        def note(event: object) -> None:
            with self.changed:
                self.events.append(event)
                self.changed.notify_all()

        def done(n: int, error: BaseException | None) -> None:
            then()
            note((op.id, n) if error is None else (op.id, n, error))

        self.transfer.start(op, packed=lambda: note(f"packed {op.id}"), done=done)

    def wait(self, count: int) -> Sequence[object]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= count, 300), self.events
            return list(self.events)


def test_manual_holds_until_told() -> None:
    transfer = ManualTransfer()
    log = Log(transfer)
    a, b, c = op(1), op(2, OpKind.RESTORE), op(3, OpKind.COPY)
    for it in (a, b, c):
        log.start(it)
    assert transfer.pending == transfer.started == [a, b, c]
    assert log.events == []
    transfer.finish(b, 1)
    transfer.pack(a)
    assert log.events == [(2, 1), "packed 1"]
    transfer.finish(a)
    error = OSError("gone")
    transfer.finish(c, error=error)
    assert log.events[2:] == [(1, 2), (3, 0, error)]
    assert transfer.pending == []
    log.start(op(4))
    transfer.finish_all()
    assert log.events[4:] == ["packed 4", (4, 2)]


def test_manual_refuses_what_no_transfer_does() -> None:
    transfer = ManualTransfer()
    log = Log(transfer)
    a, store = op(1), op(2, OpKind.STORE)
    log.start(a)
    log.start(store)
    transfer.pack(a)
    with pytest.raises(ValueError):
        transfer.pack(a)
    with pytest.raises(ValueError):
        transfer.pack(store)
    with pytest.raises(ValueError):
        transfer.finish(a, 3)
    with pytest.raises(ValueError):
        transfer.finish(store, 1)
    transfer.finish(a)
    with pytest.raises(ValueError):
        transfer.finish(a)


def test_manual_close_finishes_what_was_started_and_what_follows() -> None:
    transfer = ManualTransfer()
    log = Log(transfer)
    log.start(op(1), then=lambda: log.start(op(2, OpKind.STORE)))
    transfer.close()
    assert log.events == ["packed 1", (1, 2), (2, 2)]
    log.start(op(3))
    assert log.events[3] == "packed 3"
    assert isinstance(log.events[4][2], CacheClosed)  # type: ignore[index]
    transfer.close()


# --------------------------------------------------------------------------- FaultyTransfer

LAYOUT = gqa(layers=2, kv_heads=1, head_dim=8, page_tokens=16)
GEOMETRY = Geometry(page_tokens=16, gpu_pages=8, cpu_frames=8)


def faulty(*fates: Fate, store: MemoryStore | None = None) -> tuple[FaultyTransfer, Log]:
    inner = DeviceTransfer(
        LAYOUT,
        GEOMETRY,
        device="cpu",
        store=MemoryStore() if store is None else store,
        config=CacheConfig(gpu_bytes=1, cpu_bytes=1, io_threads=1),
    )
    transfer = FaultyTransfer(inner, fates)
    for page in range(8):
        for layer in range(2):
            for name in "kv":
                transfer.pool.rows(name, layer)[16 * page : 16 * page + 16] = page + 1
    return transfer, Log(transfer)


def page_value(transfer: FaultyTransfer, page: int) -> float:
    """The one value of a page; NaN if it is poisoned; fails if it is a mixture."""
    rows = [
        transfer.pool.rows(n, layer)[16 * page : 16 * page + 16] for n in "kv" for layer in (0, 1)
    ]
    values = torch.stack(rows).float().flatten()
    assert values.isnan().all() or (values == values[0]).all()
    return float(values[0])


def test_without_fates_all_goes_well() -> None:
    transfer, log = faulty()
    log.start(op(1))
    assert log.wait(2) == ["packed 1", (1, 2)]
    transfer.close()


def test_ops_start_late_and_in_another_order() -> None:
    transfer, log = faulty(Fate(start_after=2), Fate())
    log.start(op(1))
    assert log.events == []
    log.start(op(2, OpKind.RESTORE))
    assert log.wait(1) == [(2, 2)]
    transfer.tick()
    assert log.wait(3)[1:] == ["packed 1", (1, 2)]
    transfer.close()


def test_ends_are_reported_late() -> None:
    transfer, log = faulty(Fate(report_after=2))
    log.start(op(1))
    log.wait(1)
    deadline = time.monotonic() + 300
    while not transfer._held:
        assert time.monotonic() < deadline
    transfer.tick()
    assert log.events == ["packed 1"]
    transfer.tick()
    assert log.wait(2) == ["packed 1", (1, 2)]
    transfer.close()


def test_cut_ops_deliver_a_leading_run_and_may_tear_the_rest() -> None:
    error = OSError("cut")
    transfer, log = faulty(Fate(), Fate(deliver=1, error=error), Fate(deliver=1, torn=True))
    log.start(op(1, parts=3))
    log.wait(2)
    for page in range(3):
        transfer.pool.poison(Kind.HISTORY, [page], live=False, byte=0)
    log.start(op(2, OpKind.RESTORE, parts=3))
    assert log.wait(3)[2] == (2, 1, error)
    assert [page_value(transfer, page) for page in range(3)] == [1, 0, 0]
    log.start(op(3, OpKind.RESTORE, parts=3))
    assert log.wait(4)[3] == (3, 1)
    assert page_value(transfer, 0) == 1
    assert all(np.isnan(page_value(transfer, page)) for page in (1, 2))
    transfer.close()


def test_nothing_delivered_still_releases_the_sources() -> None:
    transfer, log = faulty(Fate(deliver=0, torn=True))
    log.start(op(1))
    assert log.wait(2) == ["packed 1", (1, 0)]
    assert transfer.host.frames[0].tolist() == [0xFF] * LAYOUT.frame_bytes()
    transfer.close()


def chain(number: int, kind: OpKind) -> Op:
    part = Part(Kind.HISTORY, CPU, (0,), DISK, (0,), key=bytes(15) + b"k", depth=1, tokens=b"t")
    return Op(number, kind, (part,))


def test_writes_keep_their_order_however_late() -> None:
    store = MemoryStore()
    transfer, log = faulty(Fate(), Fate(start_after=3), Fate(), Fate(deliver=0), store=store)
    log.start(op(1))
    log.wait(2)
    log.start(chain(2, OpKind.STORE))
    log.start(chain(3, OpKind.DROP))  # must not run before the STORE
    transfer.drain()
    assert [e for e in log.events if isinstance(e, tuple)] == [(1, 2), (2, 1), (3, 1)]
    assert store.keys() == set()
    log.start(chain(4, OpKind.STORE))
    transfer.drain()
    assert log.events[-1] == (4, 0)
    assert store.keys() == set()
    transfer.close()


def test_copies_are_left_alone() -> None:
    transfer, log = faulty(Fate(start_after=9, deliver=0))
    log.start(Op(1, OpKind.COPY, (Part(Kind.HISTORY, GPU, (2,), GPU, (5,)),)))
    assert log.events == [(1, 1)]
    assert page_value(transfer, 5) == 3
    transfer.close()


FATES = st.builds(
    Fate,
    start_after=st.integers(0, 4),
    report_after=st.integers(0, 4),
    deliver=st.none() | st.integers(0, 3),
    torn=st.booleans(),
)


@settings(max_examples=25)
@given(st.lists(FATES, max_size=8), st.lists(st.sampled_from(list(OpKind)[:3]), max_size=8))
def test_every_op_ends_once_whatever_its_fate(fates: list[Fate], kinds: list[OpKind]) -> None:
    transfer, log = faulty(*fates)
    follow = iter(range(100, 200))
    for number, kind in enumerate(kinds):
        log.start(op(number, kind), then=lambda: log.start(op(next(follow), OpKind.RESTORE)))
    transfer.close()
    ends = sorted(e[0] for e in log.events if isinstance(e, tuple))
    assert ends == [*range(len(kinds)), *range(100, 100 + len(kinds))]


# --------------------------------------------------------------------------- prompts


@given(token_streams(page_tokens=4, max_pages=3, max_prompts=5, vocab=3))
def test_token_streams_are_prompts(prompts: list[list[int]]) -> None:
    assert 1 <= len(prompts) <= 5
    for prompt in prompts:
        assert 1 <= len(prompt) <= 12
        assert all(0 <= token < 3 for token in prompt)


def test_token_streams_share_prefixes_at_and_beside_page_edges() -> None:
    seen: set[int] = set()

    @settings(max_examples=200, derandomize=True, database=None)
    @given(token_streams(page_tokens=4, max_pages=4, vocab=1000))
    def collect(prompts: list[list[int]]) -> None:
        for i, a in enumerate(prompts):
            for b in prompts[:i]:
                pairs = zip(a, b, strict=False)
                same = [x == y for x, y in pairs]
                seen.add(same.index(False) if False in same else len(same))

    collect()
    assert {3, 4, 5, 8} <= seen
