"""One launch moves what the reference moves: on a GPU, and in triton's interpreter without one.

Every byte is random, so NaNs of every format are among them; what may not be touched is compared
with what it was.
"""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")
GPU = torch.cuda.is_available()

from kvtier.kernels import pack, triton_pack  # noqa: E402
from kvtier.kernels.pack import Sections  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
# Bytes of a section's page: below, at and above a chunk, of odd length, a multiple of 16 or not.
WIDTHS = (5, 16, 48, 1, 1152, triton_pack.CHUNK, 17, triton_pack.CHUNK + 16, 20_001)


def noise(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE)


def sections(
    widths: Sequence[int],
    *,
    pages: int = 6,
    members: Sequence[int] = (),
    gap: int = 0,
    shift: int = 0,
    seed: int = 0,
) -> Sections:
    """Storages whose rows lie ``gap`` bytes apart and begin ``shift`` bytes behind a boundary."""
    storages = tuple(
        noise(pages, width + gap + shift, seed=seed + i)[:, shift : shift + width]
        for i, width in enumerate(widths)
    )
    offsets = tuple(sum(widths[:i]) for i in range(len(widths)))
    return Sections(storages, offsets, tuple(members))


def base(storage: torch.Tensor) -> torch.Tensor:
    """All bytes around a storage, gaps included."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage.untyped_storage()).cpu().clone()


def record(it: Sections, tail: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [
            s[tail[m]].cpu() if tail[m] >= 0 else torch.zeros(s.shape[1], dtype=torch.uint8)
            for s, _, m in it
        ]
    )


def move(
    it: Sections,
    pages: Sequence[Sequence[int]],
    records: torch.Tensor,
    rows: Sequence[Sequence[int]],
    *,
    unpack: bool,
) -> None:
    """What ``pack`` calls on a GPU, on the interpreter's device too."""
    flat = pack._flat(it, pages, records, rows)
    pack._launch(it, *flat, unpack=unpack)


@pytest.mark.parametrize(
    ("gap", "shift", "pad", "start"),
    [(0, 0, 0, 0), (16, 0, 16, 0), (16, 0, 13, 0), (3, 0, 16, 0), (31, 1, 0, 0), (0, 0, 0, 1)],
    ids=["adjacent", "apart", "odd-rows", "odd-pages", "odd-start", "odd-records"],
)
def test_pages_are_gathered_and_scattered_and_nothing_else(
    gap: int, shift: int, pad: int, start: int
) -> None:
    it = sections(WIDTHS, gap=gap, shift=shift)
    width, pages, rows = it.record_bytes + pad, [4, 0], [1, 3]
    flat = noise(start + 5 * width, seed=99)
    records = flat[start:].view(5, width)
    before, around = records.cpu(), [base(s) for s in it.storages]
    move(it, [(p,) for p in pages], records, [(r,) for r in rows], unpack=False)
    want = before.clone()
    for page, row in zip(pages, rows, strict=True):
        want[row, : it.record_bytes] = record(it, [page])
    assert torch.equal(records.cpu(), want)
    assert all(torch.equal(base(s), b) for s, b in zip(it.storages, around, strict=True))

    other = sections(WIDTHS, gap=gap, shift=shift, seed=50)
    around = [base(s) for s in other.storages]
    stale = [s.cpu() for s in other.storages]
    move(other, [(p,) for p in pages], records, [(r,) for r in rows], unpack=True)
    assert torch.equal(records.cpu(), want)
    for page in range(6):
        if page in pages:
            assert torch.equal(record(other, [page]), record(it, [page]))
    for page in set(range(6)) - set(pages):
        assert all(
            torch.equal(s[page].cpu(), b[page]) for s, b in zip(other.storages, stale, strict=True)
        )
    if gap:  # the bytes between pages are nobody's
        for s, b in zip(other.storages, around, strict=True):
            now = base(s).view(6, -1)
            assert torch.equal(now[:, :shift], b.view(6, -1)[:, :shift])
            assert torch.equal(now[:, shift + s.shape[1] :], b.view(6, -1)[:, shift + s.shape[1] :])


MEMBERS = (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("row_bytes", [100, 208, 4096, 1 << 16])
def test_records_of_several_pages_fill_their_rows_in_turn(row_bytes: int) -> None:
    """A row may end anywhere within a section; what is not held reads as zeros and stays."""
    widths = (48, 700, 33, 16, 2000, 112)
    it = sections(widths, members=MEMBERS)
    count = -(-it.record_bytes // row_bytes)
    tails = [(3, 1, 4), (0, -1, 2), (5, 2, -1)]
    records = noise(3 * count + 2, row_bytes, seed=7)
    order = torch.randperm(3 * count, generator=torch.Generator().manual_seed(1)).tolist()
    rows = [order[i * count : (i + 1) * count] for i in range(3)]
    before = records.cpu()
    move(it, tails, records, rows, unpack=False)
    want = before.clone()
    for tail, held in zip(tails, rows, strict=True):
        whole = want[held].view(-1)
        whole[: it.record_bytes] = record(it, tail)
        want[held] = whole.view(count, row_bytes)
    assert torch.equal(records.cpu(), want)

    other = sections(widths, members=MEMBERS, seed=60)
    expected = [s.cpu() for s in other.storages]
    for tail in tails:
        for s, ours, m in zip(expected, it.storages, MEMBERS, strict=True):
            if tail[m] >= 0:
                s[tail[m]] = ours[tail[m]].cpu()
    move(other, tails, records, rows, unpack=True)
    assert all(torch.equal(s.cpu(), e) for s, e in zip(other.storages, expected, strict=True))


@pytest.mark.parametrize("row_bytes", [100, 4096])
def test_the_reference_moves_the_same_bytes(row_bytes: int) -> None:
    widths = (48, 700, 33, 16, 500, 112)
    it, tails = sections(widths, members=MEMBERS), [(3, 1, 4), (0, -1, 2)]
    count = -(-it.record_bytes // row_bytes)
    rows = [list(range(count)), list(range(count, 2 * count))]
    records = noise(2 * count, row_bytes, seed=7)
    mine = Sections(tuple(s.cpu() for s in it.storages), it.offsets, it.members)
    reference = records.cpu()
    pack.pack_tails(mine, tails, reference, rows)
    move(it, tails, records, rows, unpack=False)
    assert torch.equal(records.cpu(), reference)
    for s in (*it.storages, *mine.storages):
        s.fill_(0xFF)
    pack.unpack_tails(mine, tails, reference, rows)
    move(it, tails, records, rows, unpack=True)
    for ours, theirs in zip(it.storages, mine.storages, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("shift", [0, 1])
def test_clearing_zeroes_the_pages_that_are_held_and_no_other(shift: int) -> None:
    widths, members = (48, 700, triton_pack.CHUNK + 32, 16), (0, 1, 1, 2)
    it = sections(widths, members=members, gap=16, shift=shift)
    want = [base(s) for s in it.storages]
    tails = [(3, 1, 4), (0, -1, 2)]
    for tail in tails:
        for around, (storage, _, member) in zip(want, it, strict=True):
            if tail[member] >= 0:
                around.view(6, -1)[tail[member], shift : shift + storage.shape[1]] = 0
    reference = Sections(tuple(s.cpu().clone() for s in it.storages), it.offsets, it.members)
    pack.clear_tails(reference, tails)
    chunks = pack._chunks(it, it.record_bytes)
    triton_pack.clear(chunks, [page for tail in tails for page in tail])
    for storage, around, ref in zip(it.storages, want, reference.storages, strict=True):
        assert torch.equal(base(storage), around)
        assert torch.equal(storage.cpu(), ref)
    with pytest.raises(IndexError):
        pack.clear_tails(it, [(0, 6, 0)])


def test_runs_of_any_length_and_alignment() -> None:
    source, target = noise(100_000, seed=1), noise(100_000, seed=2)
    want = target.cpu()
    runs = []
    at = 0
    for length, lead in ((16, 0), (40_000, 16), (33, 1), (1, 0), (17_000, 7)):
        at += lead
        runs.append((source.data_ptr() + at + lead, target.data_ptr() + at, length))
        want[at : at + length] = source.cpu()[at + lead : at + lead + length]
        at += length
    runs.append((0, target.data_ptr() + at, 777))
    want[at : at + 777] = 0
    triton_pack.copy_runs(runs, target.device)
    triton_pack.copy_runs([], target.device)
    assert torch.equal(target.cpu(), want)


def test_no_table_is_made_twice() -> None:
    it, records = sections((32, 5)), noise(2, 64, seed=1)
    move(it, [(0,)], records, [(0,)], unpack=False)
    known = it._chunks[64]
    move(it, [(1,)], records, [(1,)], unpack=True)
    assert it._chunks[64] is known
    move(it, [], records, [], unpack=True)


@pytest.mark.parametrize(
    ("tail", "held"),
    [((-2, 0), (0, 1)), ((6, 0), (0, 1)), ((0, 6), (0, 1)), ((0, 0), (0, -1)), ((0, 0), (4, 0))],
)
def test_tails_out_of_range_move_nothing(tail: tuple[int, int], held: tuple[int, int]) -> None:
    it, records = sections((32, 5), members=(0, 1)), noise(4, 20, seed=1)
    before, stale = records.cpu(), [s.cpu() for s in it.storages]
    for call in (pack.pack_tails, pack.unpack_tails):
        with pytest.raises(IndexError):
            call(it, [(0, 0), tail], records, [(2, 3), held])
    assert torch.equal(records.cpu(), before)
    assert all(torch.equal(s.cpu(), b) for s, b in zip(it.storages, stale, strict=True))


@pytest.mark.parametrize("count", [1, 6, 1023, 1024, 1025, 5000])
def test_numbers_are_fetched_to_their_place(count: int) -> None:
    there = torch.full((count + 2,), -1, dtype=torch.int64, device=DEVICE)
    numbers = torch.arange(1, count + 1) << 40
    pinned = torch.full((2 + 8192,), -7, dtype=torch.int64, pin_memory=GPU)
    pinned[0], pinned[1], pinned[2 : 2 + count] = there[1:].data_ptr(), count, numbers
    triton_pack._fetch[(-(-count // 1024),)](pinned)
    if GPU:
        torch.cuda.synchronize()
    assert there[1:-1].tolist() == numbers.tolist()
    assert there[0] == there[-1] == -1


# What only a GPU can show.


@pytest.mark.gpu
def test_numbers_of_launches_that_wait_are_left_alone() -> None:
    """Many launches behind a busy stream: each has its own numbers, until it has fetched them."""
    it, records = sections((64,), pages=64), noise(64, 64, seed=3)
    want = torch.stack([record(it, [63 - i]) for i in range(64)])
    pack.pack_pages(it, [0], records, [0])
    torch.cuda.synchronize()
    for _ in range(3):
        records.zero_()
        torch.cuda._sleep(20_000_000)
        for i in range(64):
            pack.pack_pages(it, [63 - i], records, [i])
        torch.cuda.synchronize()
        assert torch.equal(records.cpu(), want)
    held = len(triton_pack._lent[0])
    for _ in range(200):
        pack.pack_pages(it, [1], records, [1])
        torch.cuda.synchronize()
    assert len(triton_pack._lent[0]) == held, "buffers are used again"


@pytest.mark.gpu
def test_pack_takes_one_launch_whatever_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    it, records = sections(WIDTHS), noise(3, 1 << 17, seed=3)
    before = records.cpu()
    pack.pack_pages(it, [2, 4], records, [0, 2])  # makes the table
    calls: list[object] = []
    launch = triton_pack.move
    monkeypatch.setattr(triton_pack, "move", lambda *a, **k: (calls.append(a), launch(*a, **k)))
    pack.pack_pages(it, [2, 4], records, [2, 0])
    want = before.clone()
    want[2, : it.record_bytes], want[0, : it.record_bytes] = record(it, [2]), record(it, [4])
    assert torch.equal(records.cpu(), want)
    pack.unpack_pages(it, [4], records, [2])
    assert torch.equal(record(it, [4]), record(it, [2]))
    assert len(calls) == 2


@pytest.mark.gpu
def test_spans_on_one_device_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = noise(3000, seed=1), noise(3000, seed=2)
    spans = [source[i * 300 : (i + 1) * 300] for i in range(10)]
    want = target.cpu()
    want[:1000], want[1300:3000] = source[:1000].cpu(), source[1300:3000].cpu()
    calls: list[object] = []
    copy = triton_pack.copy_runs
    monkeypatch.setattr(triton_pack, "copy_runs", lambda *a: (calls.append(a), copy(*a)))
    pack.copy_spans(spans, [target[:1000], 300, target[1300:]])
    assert torch.equal(target.cpu(), want)
    host = torch.zeros(3000, dtype=torch.uint8).pin_memory()
    pack.copy_spans(spans, [host])  # to the host by the copy engine
    torch.cuda.synchronize()
    assert torch.equal(host, source.cpu())
    assert len(calls) == 1


@pytest.mark.gpu
def test_a_pool_beyond_two_gigabytes() -> None:
    """Addresses and offsets past 2^31 and 2^32 bytes, on both sides."""
    width = 1 << 20
    pages = (5 << 30) // width
    storage = torch.full((pages, width), 0xFF, dtype=torch.uint8, device="cuda")
    records = torch.full((pages, width + 16), 0xAA, dtype=torch.uint8, device="cuda")
    it = Sections((storage,), (0,))
    far = [0, 2047, 2048, 4095, 4096, pages - 1]
    for page in far:
        storage[page] = noise(width, seed=page)
    pack.pack_pages(it, far, records, far)
    for page in far:
        assert torch.equal(records[page, :width], storage[page])
        assert records[page, width:].eq(0xAA).all()
        assert page == 0 or page - 1 in far or records[page - 1].eq(0xAA).all()
    kept = [records[page, :width].clone() for page in far]
    storage.fill_(0xFF)
    pack.unpack_pages(it, far, records, far)
    for page, want in zip(far, kept, strict=True):
        assert torch.equal(storage[page], want)
        assert page == 0 or page - 1 in far or storage[page - 1].eq(0xFF).all()
