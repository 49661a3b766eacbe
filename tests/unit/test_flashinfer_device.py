"""The FlashInfer that is installed: beside the reference, and in a graph while its plan holds."""

from dataclasses import replace

import pytest
import torch

from kvtier import ConfigError
from kvtier.kernels import HeadDims, absorbed, flashinfer
from tests.unit.flashinfer_double import check
from tests.unit.mla_cases import MlaCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(flashinfer.missing()), reason=flashinfer.missing() or "it is here"),
]
RELEASED = HeadDims(heads=3, latent=512, rope=64, nope=128, value=128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3, 12, 16, 96, 128, 192])
def test_absorbed(heads: int, dtype: torch.dtype) -> None:
    """Rows that are not to be seen are NaN."""
    for page, lengths in (
        (64, [(1, 5000), (1, 1), (1, 0), (1, 64), (1, 65)]),
        (64, [(11, 70), (2, 65), (1, 0), (3, 129), (5, 5), (4, 2000)]),
        (16, [(1, 33), (2, 0), (7, 640), (16, 16)]),
        (256, [(4, 2), (300, 700)]),
    ):
        dims = replace(RELEASED, heads=heads)
        some = MlaCase(lengths, dims=dims, dtype=dtype, page=page, device="cuda")
        check(some, dtype=dtype)


def test_a_graph_holds_a_plan() -> None:
    some = MlaCase(
        [(1, 5000), (1, 3), (1, 900)], dims=replace(RELEASED, heads=16),
        dtype=torch.bfloat16, page=64, device="cuda",
    )  # fmt: skip
    query, options = some.absorbed_query, {"latent_dim": 512, "scale": some.scale}
    made = flashinfer.plan(some.batch, 16, torch.bfloat16, scale=some.scale)
    made.run(query, some.rows)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(ConfigError, match="captured graph cannot hold it"):
            flashinfer.absorbed(query, some.rows, some.batch, **options)
        out, _ = made.run(query, some.rows)
    for _ in range(3):
        query.copy_(torch.randn_like(query))
        other = replace(some.batch, kv_lens=(64, 1, 70))  # planned in between
        flashinfer.absorbed(query, some.rows, other, **options)
        graph.replay()
        right, _ = absorbed(query, some.rows, some.batch, **options)
        assert (out.float() - right.float()).abs().max() <= 8e-3 * right.float().abs().max()
