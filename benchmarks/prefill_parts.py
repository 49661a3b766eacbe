"""What the prefill benchmark times: sizes, and one layer's random tensors with calls on them.

A layer's materialised attention runs by any backend of the kernel table in a workspace that the
caller gives, its absorbed form beside it, and an output can be compared with dense attention in
float32.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_parts import paged_batch
from kvtier.kernels import Case, HeadDims, Workspace, select, select_all

__all__ = ["GPU", "SCALE", "TOY", "Layer", "Sizes"]

SCALE = 0.1
"""Of scores; any will do for random rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured."""

    dims: HeadDims
    dtype: torch.dtype
    device: str
    backends: tuple[str, ...]
    """The first is what everything but ``kernels`` and ``backends`` is measured with."""
    page: int
    workspaces: tuple[int, ...]
    """Rows, fewest first; the last but one is taken where workspaces are not compared."""
    tokens: int
    """New ones of a step, of all its sequences."""
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    long: int
    short: tuple[int, int]
    """Contexts of a mixed step: one of ``long``, 31 between these."""
    prompts: tuple[int, ...]
    pieces: tuple[int, ...]
    queries: tuple[int, ...]
    behind: int
    """New tokens, and the context before them, of which the forms are compared."""
    loads: tuple[tuple[int, int, int], ...]
    """Sequences, new tokens of each, keys of each: what backends are compared at.  More than 64 new
    ones on a GPU: of fewer all have the same kernel, and which of them is the faster is chance."""
    repeats: int

    @property
    def backend(self) -> str:
        return self.backends[0]

    def quick(self) -> "Sizes":
        """A third of it, with the extremes."""
        ends = {
            name: (getattr(self, name)[0], getattr(self, name)[-1])
            for name in ("contexts", "batches", "prompts", "pieces")
        }
        fields = {name: getattr(self, name) for name in self.__slots__}
        fewer = {"queries": self.queries[::3], "loads": self.loads[::2], "repeats": 3}
        return Sizes(**{**fields, **ends, **fewer})


GPU = Sizes(
    dims=HeadDims(heads=128, latent=512, rope=64, nope=128, value=128),
    dtype=torch.bfloat16,
    device="cuda",
    backends=("gluon", "triton"),
    page=64,
    workspaces=(1024, 4096, 8192, 32768),
    tokens=2048,
    contexts=(1024, 4096, 16384, 65536, 131072),
    batches=(1, 4, 8, 32),
    long=60_000,
    short=(100, 1000),
    prompts=(8192, 32768, 131072),
    pieces=(512, 2048, 8192),
    queries=(16, 32, 64, 96, 128, 192, 256, 384, 512, 1024),
    behind=8192,
    loads=(
        (1, 8192, 8192),
        (1, 2048, 2048),
        (1, 512, 16384),
        (32, 128, 4096),
        (8, 256, 8192),
        (1, 2048, 131072),
    ),
    repeats=7,
)
TOY = Sizes(
    dims=HeadDims(heads=2, latent=16, rope=4, nope=8, value=8),
    dtype=torch.float32,
    device="cpu",
    backends=("torch",),
    page=16,
    workspaces=(32, 128),
    tokens=32,
    contexts=(64, 256),
    batches=(1, 4),
    long=600,
    short=(1, 10),
    prompts=(64, 192),
    pieces=(16, 32),
    queries=(1, 4, 16, 64),
    behind=64,
    loads=((1, 32, 64), (4, 8, 16)),
    repeats=3,
)


class Layer:
    """One call's tensors: queries, rows in scattered pages, and the projection."""

    def __init__(
        self, sizes: Sizes, lengths: Sequence[tuple[int, int]], backend: str | None = None
    ) -> None:
        d = self._dims = sizes.dims
        self._sizes = sizes
        like: dict[str, Any] = {"dtype": sizes.dtype, "device": sizes.device}
        self.batch = paged_batch(lengths, sizes.page, sizes.device)
        pages = int(self.batch.block_table.max()) + 1
        self.padded = pages * sizes.page
        self.rows = torch.randn(self.padded, d.latent + d.rope, **like)
        self.query = torch.randn(sum(self.batch.query_lens), d.heads, d.nope + d.rope, **like)
        self.weight = torch.randn(d.heads * (d.nope + d.value), d.latent, **like)
        self.weight *= d.latent**-0.5
        self.project: Callable[[Tensor, Tensor], object] = self._project
        self.choose(backend or sizes.backend)

    def choose(self, backend: str) -> None:
        """From here on by this backend.  Raises ConfigError where it is not available."""
        d, sizes = self._dims, self._sizes
        self._materialised = select(
            Case(
                "mla_materialised", "dense", (d.nope + d.rope, d.value), sizes.dtype, sizes.device
            ),
            backend=backend,
        )
        latent = (d.latent + d.rope, d.latent)
        case = Case("mla_absorbed", "dense", latent, sizes.dtype, sizes.device)
        self._absorbed = select_all({"absorbed": case})["absorbed"]

    def error(self, out: Tensor) -> float:
        """Of some queries and heads, against dense attention in float32, by the largest value."""
        d, batch = self._dims, self.batch
        worst, largest = 0.0, 1e-6
        offsets = [0, *itertools.accumulate(batch.query_lens)]
        for b in {0, len(batch.query_lens) - 1}:
            n, kv = batch.query_lens[b], batch.kv_lens[b]
            slots = batch.block_table[b, : -(-kv // batch.page_tokens)].long()
            page = torch.arange(batch.page_tokens, device=slots.device)
            latent = self.rows[(slots[:, None] * batch.page_tokens + page).flatten()[:kv]].float()
            for h in {0, d.heads - 1}:
                weight = self.weight.view(d.heads, d.nope + d.value, d.latent)[h]
                up = (latent[:, : d.latent] @ weight.float().t()).to(out.dtype).float()
                for i in {0, n // 2, n - 1}:
                    seen = kv - n + i + 1
                    query = self.query[offsets[b] + i, h].float()
                    keys = torch.cat((up[:seen, : d.nope], latent[:seen, d.latent :]), -1)
                    want = (keys @ query * SCALE).softmax(0) @ up[:seen, d.nope :]
                    worst = max(worst, float((out[offsets[b] + i, h] - want).abs().max()))
                    largest = max(largest, float(want.abs().max()))
        return worst / largest

    def workspace(self, rows: int) -> Workspace:
        return Workspace.allocate(rows, self._dims, self._sizes.dtype, self._sizes.device)

    def usual_workspace(self) -> Workspace:
        """The last but one of the sizes', or one for all rows where these are fewer."""
        return self.workspace(min(self._sizes.workspaces[-2], self.padded))

    def _project(self, latent: Tensor, out: Tensor) -> None:
        torch.mm(latent, self.weight.t(), out=out.flatten(1))

    def __call__(self, workspace: Workspace) -> Tensor:
        """(n, heads, value)"""
        out: Tensor
        out, _ = self._materialised.run(
            self.query,
            self.rows,
            self.batch,
            self.project,
            dims=self._dims,
            scale=SCALE,
            workspace=workspace,
        )
        return out

    def absorbed(self) -> Tensor:
        """The same by the other form, into latent space and out of it."""
        d = self._dims
        per_head = self.weight.view(d.heads, d.nope + d.value, d.latent)
        key_up, value_up = torch.split(per_head, [d.nope, d.value], dim=1)
        latent = torch.einsum("nhp,hpl->nhl", self.query[..., : d.nope], key_up)
        query = torch.cat((latent, self.query[..., d.nope :]), -1)
        out, _ = self._absorbed.run(query, self.rows, self.batch, latent_dim=d.latent, scale=SCALE)
        return torch.einsum("nhl,hvl->nhv", out, value_up)
