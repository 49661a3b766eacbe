"""Every available row of the kernel table does what the reference means, for every type it lists.

Generated from the table: a row added there is tested here, on the devices it names; those of
triton in its interpreter too, where there is no GPU.
"""

import ast
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch

from kvtier.kernels import (
    RECORDS,
    Case,
    HeadDims,
    compress,
    compress_write,
    head_norm_rope,
    index_query,
    index_topk,
    inverse_rope,
    select,
    sparse_attend,
    table,
    write_latent,
    write_normed,
    write_records,
)
from kvtier.kernels.casts import e4m3_codes
from kvtier.kernels.fused import LatentRope
from tests.unit.mla_cases import MlaCase
from tests.unit.v4_cases import batch_of
from tests.unit.window_cases import PADDING, WindowCase

RELEASED = HeadDims(heads=3, latent=512, rope=64, nope=128, value=128)
ODD = HeadDims(heads=5, latent=24, rope=6, nope=10, value=7)
FORMS = {
    "mla_absorbed": "absorbed",
    "mla_materialised": "materialised",
    "mla_materialised_whole": "sdpa",
}
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
GPU = torch.cuda.is_available()
LENGTHS = [(1, 1), (1, 33), (5, 5), (1, 0), (7, 40), (2, 17)]


def rows() -> Iterator[object]:
    for row in table():
        if row["available"] != "yes":
            marks = [pytest.mark.skip(reason=f"{row['backend']}: {row['available']}")]
            name = "-".join((row["operation"], row["record"], row["backend"]))
            yield pytest.param(row, None, "", "", id=name, marks=marks)
            continue
        places = [(device, device) for device in row["device"].split()]
        if row["backend"] == "triton" and not GPU:
            places.append(("cuda", "cpu"))  # in the interpreter
        for dtype in row["dtype"].split():
            for device, place in places:
                name = device if device == place else "interpreted"
                yield pytest.param(
                    row,
                    getattr(torch, dtype),
                    device,
                    place,
                    id="-".join((row["operation"], row["record"], row["backend"], dtype, name)),
                    marks=[pytest.mark.gpu] if place == "cuda" else [],
                )


def sizes(row: dict[str, str]) -> list[HeadDims]:
    """The released models' sizes, and odd ones where the row takes any."""
    return [RELEASED, ODD] if row["dims"] == "any" else [RELEASED]


def widths(row: dict[str, str], any_width: int) -> list[int]:
    """Row widths of a row of the table, one where it takes any."""
    if row["dims"] == "any":
        return [any_width]
    listed = [ast.literal_eval(dims) for dims in row["dims"].replace(") (", ")|(").split("|")]
    return [width for (width,) in listed]


def check_write_record(
    run: Callable[..., Any], record: str, dim: int, dtype: torch.dtype, device: str
) -> None:
    """The reference's bytes on the CPU, wherever they are written."""
    slots = torch.tensor([9, -1, 2, 0, 11, 5], dtype=torch.int32)
    values = (torch.randn(6, dim) * 2.0 ** torch.randint(-20, 9, (6, dim))).to(dtype)
    values[3] = 0
    values[4, ::3] = 2.0**-130  # no float16, and subnormal as float32
    expected = pool(record, 3, 4, dim, dtype)
    write_records(expected, slots, values, RECORDS[record])
    written = pool(record, 3, 4, dim, dtype, device)
    run(written, slots.to(device), values.to(device), RECORDS[record])
    assert torch.equal(as_bytes(written).cpu(), as_bytes(expected))


def turns(n: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    angles = 50 * torch.randn(n, 4)
    return angles.cos().to(device), angles.sin().to(device)


def check_write_normed(
    run: Callable[..., Any], record: str, dim: int, dtype: torch.dtype, device: str
) -> None:
    slots = torch.tensor([9, -1, 2, 0, 11, 5], dtype=torch.int32)
    values = (torch.randn(6, dim) * 2.0 ** torch.randint(-20, 5, (6, dim))).to(dtype)
    values[3] = 0
    values[1] = torch.nan
    weight, (cos, sin) = torch.randn(dim), turns(6)
    expected = pool(record, 3, 4, dim, dtype)
    write_normed(expected, slots, values, weight, cos, sin, RECORDS[record], eps=1e-6)
    written = pool(record, 3, 4, dim, dtype, device)
    moved = (t.to(device) for t in (slots, values, weight, cos, sin))
    run(written, *moved, RECORDS[record], eps=1e-6)
    assert torch.equal(as_bytes(written).cpu(), as_bytes(expected))


def check_write_latent(
    run: Callable[..., Any], record: str, dim: int, dtype: torch.dtype, device: str
) -> None:
    slots = torch.tensor([9, -1, 2, 0, 11, 5], dtype=torch.int32)
    values = (torch.randn(6, dim) * 2.0 ** torch.randint(-14, 5, (6, dim))).to(dtype)
    values[3] = 0
    values[1] = torch.nan
    pairs = 32 if dim == 576 else 4
    angles = 50 * torch.randn(6, pairs)
    turn = angles.cos(), angles.sin()
    for weight in (torch.randn(dim - 2 * pairs).to(dtype), None):
        for rotation in get_args(LatentRope):
            options = {"eps": 1e-6, "rotation": rotation}
            expected = pool(record, 3, 4, dim, dtype)
            write_latent(expected, slots, values, weight, *turn, RECORDS[record], **options)
            written = pool(record, 3, 4, dim, dtype, device)
            moved = [None if t is None else t.to(device) for t in (slots, values, weight, *turn)]
            run(written, *moved, RECORDS[record], **options)
            assert torch.equal(as_bytes(written).cpu(), as_bytes(expected))


def check_compress_write(
    run: Callable[..., Any], record: str, dim: int, dtype: torch.dtype, device: str
) -> None:
    """Pages, rings and checkpoints of the reference, byte for byte."""
    # The second row has more new tokens than the smaller rings have rows.
    lengths = [(1, 4), (18, 262), (1, 0), (2, 129), (5, 5), (1, 128)]
    n, state_slots = 28, torch.tensor([3, 1, -1, 4, 5, 0], dtype=torch.int32)
    wide = torch.promote_types(dtype, torch.float32)
    for ratio, parts in ((4, 2), (128, 1)) if dim != 128 else ((4, 2),):
        ring = 2 * parts * ratio
        kv = torch.randn(n, parts * dim).to(dtype)
        score = (3 * torch.randn(n, parts * dim)).to(dtype)
        kv[19] = score[19] = torch.nan  # the padding row
        states = [torch.randn(6 * ring, 2 * dim).to(wide) for _ in range(parts)]
        for state in states:
            state[2 * ring : 3 * ring] = torch.nan  # nobody's
        frames = [torch.full((5, 4, 2 * dim), torch.nan, dtype=wide), None][:parts]
        slots = torch.randperm(48)[:n]
        slots[9] = -1
        weight, (cos, sin) = torch.randn(dim), turns(n)
        captures = torch.tensor([[1, 256, 3], [-1, 0, 0], [5, 128, 0], [4, 4, 1]])

        def outcome(
            call: Callable[..., Any],
            place: str,
            arguments: tuple[torch.Tensor, ...] = (slots, weight, cos, sin),
            tokens: tuple[torch.Tensor, ...] = (kv, score),
            kept: tuple[list[Any], list[Any]] = (states, frames),
            options: dict[str, Any] = {"ratio": ratio, "ring": ring},  # noqa: B006
            captures: torch.Tensor = captures,
        ) -> list[torch.Tensor]:
            moved = [s.to(place, copy=True) for s in kept[0]]
            due = [None if f is None else f.to(place, copy=True) for f in kept[1]]
            storage = pool(record, 3, 16, dim, wide, place)
            call(
                *(t.to(place) for t in tokens),
                moved,
                batch_of(lengths, device=place),
                state_slots.to(place),
                storage,
                *(t.to(place) for t in arguments),
                RECORDS[record],
                eps=1e-6,
                captures=captures.to(place),
                frames=due,
                **options,
            )
            return [as_bytes(t).cpu() for t in (storage, *moved, *due) if t is not None]

        for ours, theirs in zip(outcome(run, device), outcome(compress_write, "cpu"), strict=True):
            if wide == torch.float64 and record == "dense":  # the library's exponential
                pair = ours.view(wide), theirs.view(wide)
                torch.testing.assert_close(*pair, rtol=1e-13, atol=1e-13, equal_nan=True)
            else:
                assert torch.equal(ours, theirs)


def check_query(
    run: Callable[..., Any],
    reference: Callable[..., Any],
    record: str,
    dim: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    query = (torch.randn(3, 2, dim) * 2.0 ** torch.randint(-14, 6, (3, 2, 1))).to(dtype)
    query[1, 1] = 0
    weights, rotation = torch.randn(3, 2).to(dtype), turns(3)
    arguments = (query, weights, *rotation) if reference is index_query else (query, *rotation)
    options: list[dict[str, Any]] = [{}, {"dtype": dtype}]
    if reference is index_query:
        options = [{"record": RECORDS[record]}]
        none = tuple(turn[:, :0] for turn in rotation)
        plain = index_query(query, weights, *none, RECORDS[record])
        got = run(*(t.to(device) for t in (query, weights, *none)), RECORDS[record])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, plain, strict=True))
    for each in options:
        if reference is head_norm_rope:
            each["eps"] = 1e-6
        expected = reference(*arguments, **each)
        got = run(*(t.to(device) for t in arguments), **each)
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.cpu(), theirs)


def check_compress(
    run: Callable[..., Any], record: str, dim: int, dtype: torch.dtype, device: str
) -> None:
    for ratio, parts in ((4, 2), (128, 1)):
        ring = parts * ratio
        lengths = [(1, 4), (300, 515), (1, 0), (2, 129)]
        kv, score = torch.randn(2, 304, parts * dim).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        states = [torch.randn(5 * ring, 2 * dim).to(wide) for _ in range(parts)]
        slots = torch.tensor([3, 0, -1, 4], dtype=torch.int32)
        options: dict[str, Any] = {"ratio": ratio, "ring": ring, "captures": [(1, 256), (1, 512)]}
        options["capture_slots"] = (4,) * parts
        expected_states = [s.clone() for s in states]
        expected = compress(kv, score, expected_states, batch_of(lengths), slots, **options)
        moved = [s.to(device) for s in states]
        batch = batch_of(lengths, device=device)
        got = run(kv.to(device), score.to(device), moved, batch, slots.to(device), **options)
        assert torch.equal(got.tokens.cpu(), expected.tokens)
        assert torch.equal(got.entries.cpu(), expected.entries)
        torch.testing.assert_close(got.values.cpu(), expected.values, rtol=0, atol=2e-6)
        for ours, theirs in zip(
            (*got.captured, *moved), (*expected.captured, *expected_states), strict=True
        ):
            assert torch.equal(ours.cpu(), theirs)


def check_index_topk(
    run: Callable[..., Any], record: str, dim: int, dtype: torch.dtype, device: str
) -> None:
    batch = batch_of([(3, 300), (1, 0), (2, 700), (1, 3)])
    keys = pool(record, int(batch.block_table.max()) + 1, 64, dim, torch.float32)
    slots = torch.arange(keys.shape[0] * (1 if record == "dense" else 64))
    # Few distinct scores, exact in every type: ties, and the same choice whatever the order.
    write_records(keys, slots, torch.randint(-2, 3, (len(slots), dim)).float(), RECORDS[record])
    query, weights = torch.randint(-1, 2, (7, 4, dim)), torch.randint(-1, 3, (7, 4))
    if dtype is torch.uint8:
        query, weights = e4m3_codes(query.float()), weights.float()
    else:
        query, weights = query.to(dtype), weights.to(dtype)
    options: dict[str, Any] = {"ratio": 4, "topk": 32, "record": RECORDS[record]}
    expected = index_topk(query, weights, keys, batch, **options)
    moved = batch_of([(3, 300), (1, 0), (2, 700), (1, 3)], device=device)
    got = run(query.to(device), weights.to(device), keys.to(device), moved, **options)
    assert torch.equal(got.cpu(), expected)


def check_sparse_attend(
    run: Callable[..., Any], record: str, dim: int, dtype: torch.dtype, device: str
) -> None:
    stored = torch.promote_types(dtype, torch.float32)
    window, extra = pool(record, 3, 128, dim, stored), pool(record, 3, 64, dim, stored)
    for storage, there in ((window, 384), (extra, 192)):
        values = torch.randn(there, dim).to(stored)
        write_records(storage, torch.arange(there), values, RECORDS[record])
    query, sink = torch.randn(5, 3, dim).to(dtype), torch.randn(3)
    lists = [torch.randint(0, 384, (5, 44)), torch.randint(0, 192, (5, 40))]
    for slots in lists:
        slots[1] = -1
        slots[3, ::3] = -1
    arguments: dict[str, Any] = {
        "query": query,
        "window": window,
        "window_slots": lists[0].int(),
        "sink": sink,
    }
    arguments |= {"extra": extra, "extra_slots": lists[1].int()}
    options: dict[str, Any] = {"scale": dim**-0.5, "record": RECORDS[record]}
    wide = arguments | {"query": query.double()}
    expected, expected_lse = sparse_attend(**wide, **options)
    out, lse = run(**{name: t.to(device) for name, t in arguments.items()}, **options)
    assert out.dtype == dtype
    assert out[1].eq(0).all() and lse[1].eq(-torch.inf).all()
    assert (out.cpu().double() - expected).abs().max() <= TOLERANCE[dtype] * 3
    keep = [0, 2, 3, 4]
    near = 10 * max(TOLERANCE[dtype], TOLERANCE[torch.float32])
    assert (lse.cpu().double() - expected_lse)[keep].abs().max() <= near


def check_mla_sparse(
    row: dict[str, str], dims: HeadDims, dtype: torch.dtype, device: str, place: str
) -> None:
    operation, record = row["operation"], row["record"]
    whole = operation == "mla_sparse_materialised"
    width = dims.latent + dims.rope
    listed = (dims.nope + dims.rope, dims.value) if whole else (width, dims.latent)
    case = Case(operation, record, listed, dtype, device)
    kernel = select(case, backend=row["backend"])
    assert kernel.backend == row["backend"]
    windows = WindowCase([40, 17, 5], 9, dims=dims, record=record, dtype=dtype, device=place)
    spans = ((0, 35, 40), PADDING, (1, 0, 17), (2, 4, 5))
    out, lse = windows.call(*spans, materialised=whole, kernel=kernel.run)
    assert out.dtype == dtype
    parts = [(slice(0, 5), 0, slice(35, 40)), (slice(6, 23), 1, slice(17)), (23, 2, 4)]
    for mine, b, at in parts:
        expected, expected_lse = windows.expected(b)
        scale = max(1.0, expected.abs().max().item())
        error = (out[mine].cpu().double() - expected[at]).abs().max().item()
        assert error <= 2 * TOLERANCE[dtype] * scale
        near = 10 * max(TOLERANCE[dtype], TOLERANCE[torch.float32])
        assert (lse[mine].cpu().double() - expected_lse[at]).abs().max().item() <= near
    assert out[5].eq(0).all() and lse[5].eq(-torch.inf).all()


PACKED: dict[str, tuple[Callable[..., None], int]] = {
    "write_record": (check_write_record, 24),
    "compress": (check_compress, 40),
    "index_topk": (check_index_topk, 24),
    "sparse_attend": (check_sparse_attend, 24),
    "write_normed": (check_write_normed, 24),
    "write_latent": (check_write_latent, 24),
    "compress_write": (check_compress_write, 40),
}
"""Operations on records: a check, and a row width for those that take any."""


QUERY_SIDE = {
    "head_norm_rope": head_norm_rope,
    "inverse_rope": inverse_rope,
    "index_query": index_query,
}


def pool(
    record: str, pages: int, slots: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """Pages of a record, poisoned."""
    if record == "dense":
        return torch.full((pages * slots, dim), torch.nan, dtype=dtype, device=device)
    shape = (pages, RECORDS[record].page_bytes(slots))
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=device)


def as_bytes(storage: torch.Tensor) -> torch.Tensor:
    return storage.view(torch.uint8)


@pytest.mark.parametrize(("row", "dtype", "device", "place"), list(rows()))
def test_row(row: dict[str, str], dtype: torch.dtype, device: str, place: str) -> None:
    torch.manual_seed(0)
    operation, record, backend = row["operation"], row["record"], row["backend"]
    if operation in PACKED or operation in QUERY_SIDE:
        check, any_width = PACKED.get(operation, (None, 24))
        for width in widths(row, any_width):
            kernel = select(Case(operation, record, (width,), dtype, device), backend=backend)
            assert kernel.backend == backend
            if check is None:
                check_query(kernel.run, QUERY_SIDE[operation], record, width, dtype, place)
            else:
                check(kernel.run, record, width, dtype, place)
        return
    for dims in [RELEASED] if record == "mla_fp8" else sizes(row):
        if operation in ("mla_sparse", "mla_sparse_materialised"):
            check_mla_sparse(row, dims, dtype, device, place)
            continue
        width = dims.latent + dims.rope
        listed = {
            "write_rows": (width,),
            "merge": (dims.value,),
            "mla_absorbed": (width, dims.latent),
        }.get(operation, (dims.nope + dims.rope, dims.value))
        kernel = select(Case(operation, record, listed, dtype, device), backend=backend)
        assert kernel.backend == backend
        if operation in FORMS:
            page = max(16, kernel.page_tokens)
            case = MlaCase(LENGTHS, dims=dims, dtype=dtype, page=page, device=place, record=record)
            out, lse = case.run(FORMS[operation], max_rows=16, kernel=kernel.run)
            expected, expected_lse = case.expected()
            scale = max(1.0, expected.abs().max().item())
            assert out.dtype == dtype
            assert (out.double() - expected).abs().max().item() <= TOLERANCE[dtype] * scale
            assert out[7].eq(0).all()  # the padding row
            if lse is not None:
                finite = expected_lse.isfinite()
                assert torch.equal(finite, lse.isfinite())
                error = (lse.double() - expected_lse)[finite].abs().max().item()
                assert error <= 10 * max(TOLERANCE[dtype], TOLERANCE[torch.float32])
        elif operation == "write_rows":
            pool = torch.full((9, width), torch.nan, dtype=dtype, device=place)
            values = torch.randn(3, width, device=place).to(dtype)
            kernel.run(pool, torch.tensor([4, -1, 8], device=place), values)
            assert torch.equal(pool[[4, 8]], values[[0, 2]])
            assert pool[[0, 1, 2, 3, 5, 6, 7]].isnan().all()
        else:
            assert operation == "merge"
            a = torch.ones(2, 2, 3, dtype=dtype, device=place)
            b, none = 3 * a, torch.zeros(2, 2, device=place)
            void = torch.tensor([[0.0, -torch.inf], [0.0, torch.inf]], device=place)
            out, _ = kernel.run(a, none, b, void)
            assert out[:, :, 0].tolist() == [[2.0, 1.0], [2.0, 1.0]]
