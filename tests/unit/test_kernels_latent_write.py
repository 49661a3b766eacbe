"""Fused writing of latent rows (E1) against the models' own norms and rope functions.

With latents that come normed a row is theirs, bit for bit.  Normed on the way, a mean that is
summed in another order now and then gives the neighbouring value.
"""

import importlib
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from kvtier.kernels import RECORDS, write_latent, write_records
from kvtier.kernels.fused import LatentRope

ROWS = 500
HALVES = [torch.bfloat16, torch.float16]


class Made(NamedTuple):
    """What a model makes of hidden states, and of that."""

    values: Tensor
    weight: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    rotation: LatentRope
    latent: Tensor
    """Normed by the model's own module."""
    rows: Tensor
    """What it would cache: normed and rotated by its own code."""


@torch.no_grad()
def made(model: str, dtype: torch.dtype, n: int = ROWS) -> Made:
    torch.manual_seed(1)
    arch = model.removesuffix("-half")
    home: Any = importlib.import_module(
        f"transformers.models.deepseek_{arch}.modeling_deepseek_{arch}"
    )
    norm = getattr(home, f"Deepseek{arch.upper()}RMSNorm")(512).to(dtype)
    norm.weight.uniform_(0.5, 1.5)
    values = (torch.randn(n, 576) * torch.exp(2 * torch.randn(n, 1))).to(dtype)
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    key = values[:, 512:].view(1, 1, n, 64)
    rotation: LatentRope = "interleaved_to_half"
    if arch == "v2":
        turns = torch.polar(torch.ones_like(angles), angles)
        _, turned = home.apply_rotary_emb(key, key, turns[None])
        rotation, cos, sin = "interleaved", turns.real, turns.imag
    else:
        whole = torch.cat((angles, angles), dim=-1)
        cos, sin = whole.cos().to(dtype), whole.sin().to(dtype)
        turn = home.apply_rotary_pos_emb_interleave
        if model.endswith("-half"):
            rotation, turn = "half", home.apply_rotary_pos_emb
        _, turned = turn(key, key, cos[None], sin[None])
        cos, sin = cos[:, :32], sin[:, :32]
    latent = norm(values[:, :512])
    rows = torch.cat((latent, turned[0, 0]), dim=1)
    return Made(
        values, norm.weight.detach(), norm.variance_epsilon, cos, sin, rotation, latent, rows
    )


def pages(record: str, dtype: torch.dtype) -> Tensor:
    if record == "dense":
        return torch.full((ROWS, 576), torch.nan, dtype=dtype)
    return torch.full((ROWS // 4, 4 * 656), 0xFF, dtype=torch.uint8)


MODELS = ["v2", "v3", "v3-half", "v32"]


@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_rows_whose_latent_comes_normed_are_the_models_own(
    model: str, dtype: torch.dtype, record: str
) -> None:
    it = made(model, dtype)
    slots = torch.randperm(ROWS)
    slots[::7] = -1
    want, got = pages(record, dtype), pages(record, dtype)
    write_records(want, slots, it.rows, RECORDS[record])
    values = torch.cat((it.latent, it.values[:, 512:]), dim=1)
    write_latent(
        got,
        slots,
        values,
        None,
        it.cos,
        it.sin,
        RECORDS[record],
        eps=it.eps,
        rotation=it.rotation,
    )
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_normed_on_the_way_they_are_the_same_but_for_neighbouring_values(
    model: str, dtype: torch.dtype
) -> None:
    it = made(model, dtype, 2000)
    got = torch.empty(2000, 576, dtype=dtype)
    write_latent(
        got,
        torch.arange(2000),
        *it[:2],
        it.cos,
        it.sin,
        RECORDS["dense"],
        eps=it.eps,
        rotation=it.rotation,
    )
    assert torch.equal(got[:, 512:], it.rows[:, 512:])
    steps = got.view(torch.int16).int() - it.rows.view(torch.int16).int()
    assert steps.abs().max() <= 2  # the norm's rounding, and that of its product with the weight
    assert (steps != 0).float().mean() < 1e-4


def test_the_norm_is_rounded_before_it_is_weighted() -> None:
    """Once more by hand, in float64: a single rounding at the end would give other bytes."""
    it = made("v3", torch.bfloat16)
    latent = it.values[:, :512].double()
    normed = latent / (latent.square().mean(1, keepdim=True) + it.eps).sqrt()
    twice = (normed.bfloat16() * it.weight).view(torch.int16)
    once = (normed * it.weight.double()).bfloat16().view(torch.int16)
    got = torch.empty(ROWS, 576, dtype=torch.bfloat16)
    turns = (it.cos, it.sin)
    options: dict[str, Any] = {"eps": it.eps, "rotation": it.rotation}
    write_latent(got, torch.arange(ROWS), *it[:2], *turns, RECORDS["dense"], **options)
    rows = got[:, :512].view(torch.int16)
    assert (rows != twice).float().mean() < 1e-4 < 0.05 < (rows != once).float().mean()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.ones(511)}, "weight torch.float32"),
        ({"weight": torch.ones(512, dtype=torch.bfloat16)}, "weight torch.bfloat16"),
        ({"cos": torch.ones(3, 16)}, "rotation"),
        ({"cos": torch.ones(3, 288), "sin": torch.ones(3, 288)}, "rotation"),
        ({"cos": torch.ones(2, 32), "sin": torch.ones(2, 32)}, "rotation"),
        ({"rotation": "whole"}, "rotation 'whole'"),
        ({"slots": torch.arange(2)}, "do not match"),
        ({"slots": torch.tensor([0, 1, 8])}, "past the pool"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    storage = torch.full((8, 576), torch.nan)
    arguments: dict[str, Any] = {
        "slots": torch.arange(3),
        "values": torch.zeros(3, 576),
        "weight": torch.ones(512),
        "cos": torch.ones(3, 32),
        "sin": torch.ones(3, 32),
        "record": RECORDS["dense"],
        "eps": 1e-6,
        "rotation": "half",
    }
    with pytest.raises(ValueError, match=says):
        write_latent(storage, **{**arguments, **change})
    assert storage.isnan().all()


# The kernel beside the table's own tests.

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def kernel(*arguments: Any, **options: Any) -> None:
    pytest.importorskip("triton")
    from kvtier.kernels import triton_write

    moved = [t.to(DEVICE) if isinstance(t, Tensor) else t for t in arguments]
    triton_write.write_latent(*moved, **options)


@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
def test_of_a_part_of_the_step_and_past_the_pool(record: str) -> None:
    """Values and angles with strides of their own; slots that are not there are skipped."""
    it = made("v3", torch.bfloat16)
    wide = torch.full((8, 600), torch.nan, dtype=torch.bfloat16)
    wide[:, 8:584] = it.values[:8]
    slots = torch.tensor([3, -1, 0, ROWS, 7, 1 << 40, 5, 2])
    want, got = (pages(record, torch.bfloat16) for _ in range(2))
    rest = (it.weight, it.cos[:8], it.sin[:8], RECORDS[record])
    inside = torch.where(slots < ROWS, slots, -1)
    options: dict[str, Any] = {"eps": it.eps, "rotation": it.rotation}
    write_latent(want, inside, it.values[:8], *rest, **options)
    got = got.to(DEVICE)
    kernel(got, slots, wide.to(DEVICE)[:, 8:584], *rest, **options)
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_latents_of_other_widths_are_refused() -> None:
    row = torch.zeros(1, 448)
    with pytest.raises(ValueError, match="powers of two"):
        kernel(
            *(torch.zeros(2, 448), torch.zeros(1, dtype=torch.int64), row, None),
            *(row[:, :32], row[:, :32], RECORDS["dense"]),
            eps=1e-6,
            rotation="half",
        )


# What only a GPU can show.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("model", [m for m in MODELS if m != "v2"])
def test_rows_are_the_models_own_on_a_gpu_too(model: str, dtype: torch.dtype) -> None:
    """With the model's norm and rope run there."""
    with torch.device("cuda"):
        it = made(model, dtype)
    got = torch.empty(ROWS, 576, dtype=dtype, device="cuda")
    values = torch.cat((it.latent, it.values[:, 512:]), dim=1)
    kernel(
        *(got, torch.arange(ROWS), values, None, it.cos, it.sin, RECORDS["dense"]),
        eps=it.eps,
        rotation=it.rotation,
    )
    assert torch.equal(got, it.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("record", ["dense", "mla_fp8"])
def test_a_pool_beyond_two_gigabytes_without_a_wait(record: str) -> None:
    """Offsets past 2^31 and 2^32 bytes."""
    it = made("v3", torch.bfloat16, 4)
    if record == "dense":
        storage = torch.zeros((9 << 29) // 1152, 576, dtype=torch.bfloat16, device="cuda")
        slots = torch.tensor([0, (1 << 31) // 1152 + 1, (1 << 32) // 1152 + 1, len(storage) - 1])
        held = slots
    else:
        storage = torch.zeros((9 << 29) // 41984, 41984, dtype=torch.uint8, device="cuda")
        far = [(1 << 31) // 41984 + 1, (1 << 32) // 41984 + 1, len(storage) - 1]
        held = torch.tensor([0, *far])
        slots = 64 * held + 63
    options: dict[str, Any] = {"eps": it.eps, "rotation": it.rotation}
    rest = [t.cuda() for t in (it.values, it.weight, it.cos, it.sin)]
    on_device = slots.cuda()
    kernel(storage, on_device, *rest, RECORDS[record], **options)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernel(storage, on_device, *rest, RECORDS[record], **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    small = torch.zeros(4, storage.shape[1], dtype=storage.dtype)
    at = torch.arange(4) if record == "dense" else 64 * torch.arange(4) + 63
    write_latent(small, at, *it[:2], it.cos, it.sin, RECORDS[record], **options)
    assert torch.equal(storage[held.cuda()].cpu(), small)
    assert int(torch.count_nonzero(storage)) <= 4 * 656
