"""Every available row of the kernel table does what the reference means, for every type it lists.

Generated from the table: a row added there is tested here, on the devices it names.
"""

from collections.abc import Iterator

import pytest
import torch

from kvtier.kernels import Case, HeadDims, select, table
from tests.unit.mla_cases import MlaCase

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
LENGTHS = [(1, 1), (1, 33), (5, 5), (1, 0), (7, 40), (2, 17)]


def rows() -> Iterator[object]:
    for row in table():
        if row["available"] != "yes":
            continue
        for dtype in row["dtype"].split():
            for device in row["device"].split():
                yield pytest.param(
                    row["operation"],
                    row["record"],
                    row["backend"],
                    getattr(torch, dtype),
                    device,
                    id=f"{row['operation']}-{row['backend']}-{dtype}-{device}",
                    marks=[pytest.mark.gpu] if device == "cuda" else [],
                )


def sizes(operation: str, backend: str) -> list[HeadDims]:
    """The released models' sizes, and odd ones where the row takes any."""
    (dims,) = {
        r["dims"] for r in table() if r["operation"] == operation and r["backend"] == backend
    }
    return [RELEASED, ODD] if dims == "any" else [RELEASED]


@pytest.mark.parametrize(("operation", "record", "backend", "dtype", "device"), list(rows()))
def test_row(operation: str, record: str, backend: str, dtype: torch.dtype, device: str) -> None:
    for dims in sizes(operation, backend):
        width = dims.latent + dims.rope
        listed = {
            "write_rows": (width,),
            "merge": (dims.value,),
            "mla_absorbed": (width, dims.latent),
        }.get(operation, (dims.nope + dims.rope, dims.value))
        kernel = select(Case(operation, record, listed, dtype, device), backend=backend)
        assert kernel.backend == backend
        if operation in FORMS:
            case = MlaCase(LENGTHS, dims=dims, dtype=dtype, page=16, device=device)
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
            pool = torch.full((9, width), torch.nan, dtype=dtype, device=device)
            values = torch.randn(3, width, device=device).to(dtype)
            kernel.run(pool, torch.tensor([4, -1, 8], device=device), values)
            assert torch.equal(pool[[4, 8]], values[[0, 2]])
            assert pool[[0, 1, 2, 3, 5, 6, 7]].isnan().all()
        else:
            assert operation == "merge"
            a = torch.ones(2, 2, 3, dtype=dtype, device=device)
            b, none = 3 * a, torch.zeros(2, 2, device=device)
            void = torch.tensor([[0.0, -torch.inf], [0.0, torch.inf]], device=device)
            out, _ = kernel.run(a, none, b, void)
            assert out[:, :, 0].tolist() == [[2.0, 1.0], [2.0, 1.0]]
