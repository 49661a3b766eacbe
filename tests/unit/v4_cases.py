"""Number formats written out from their definitions, and batches in scattered pages.

Everything here is numpy in float64, and slow: what the kernels do with bits is done with numbers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.kernels import PagedBatch

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


def bf16(values: Floats) -> Floats:
    """Rounded to 8 significant bits, ties to even, multiples of 2**-133."""
    _, exponent = np.frexp(values)
    quantum = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    rounded: Floats = np.rint(values / quantum) * quantum
    return rounded


def bf16_bytes(values: Floats) -> Bytes:
    exact = values.astype(np.float32)
    assert np.array_equal(exact.astype(np.float64), values), "values are no bfloat16"
    return np.ascontiguousarray(exact).view(np.uint8).reshape(*values.shape, 4)[..., 2:]


def grid(exponent_bits: int, mantissa_bits: int, bias: int) -> Floats:
    """Values of the non-negative codes of a small float, by definition."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


E4M3 = grid(4, 3, 7)[:-1]
"""The last code is NaN."""
E2M1 = grid(2, 1, 1)


def encode(values: Floats, of: Floats, sign: int) -> Bytes:
    """Code of the nearest value of a grid, ties to the even code, saturating."""
    size = np.minimum(np.abs(values), of[-1])
    middle = (of[:-1] + of[1:]) / 2
    code = np.searchsorted(middle, size, side="left")
    tie = (code < len(middle)) & (size == middle[np.minimum(code, len(middle) - 1)])
    code = code + (tie & (code % 2 == 1))
    signed: Bytes = (code | np.where(np.signbit(values), sign, 0)).astype(np.uint8)
    return signed


def scale_byte(largest: Floats, most: float, floor: float) -> npt.NDArray[np.int64]:
    """The least e with most * 2**(e - 127) >= max(largest, floor), by trying every one."""
    wanted = np.maximum(largest, np.float64(np.float32(floor)))
    return np.searchsorted(most * 2.0 ** (np.arange(256) - 127.0), wanted, side="left")


def quantised(values: Floats, tile: int, of: Floats, floor: float) -> tuple[Bytes, Bytes]:
    """Codes and scale bytes of (n, dim) values in tiles."""
    tiles = bf16(values).reshape(len(values), -1, tile)
    scale = scale_byte(np.abs(tiles).max(-1), of[-1], floor)
    codes = encode(tiles * 2.0 ** (127.0 - scale[..., None]), of, 0x80 if len(of) > 8 else 8)
    return codes.reshape(len(values), -1), scale.astype(np.uint8)


def v4_record(values: Floats) -> Bytes:
    codes, scales = quantised(values[:, :448], 64, E4M3, 1e-4)
    rope = bf16_bytes(bf16(values[:, 448:])).reshape(len(values), -1)
    return np.hstack((codes, rope, scales, np.zeros((len(values), 1), np.uint8)))


def index_fp8_record(values: Floats) -> Bytes:
    codes, scales = quantised(values, 128, E4M3, 1e-4)
    scale = (2.0 ** (scales.astype(np.float64) - 127)).astype("<f4")
    return np.hstack((codes, scale.view(np.uint8)))


def index_mxfp4_record(values: Floats) -> Bytes:
    codes, scales = quantised(values, 32, E2M1, 6 * 2.0**-126)
    return np.hstack((codes[:, 0::2] + 16 * codes[:, 1::2], scales))


def mla_fp8_record(values: Floats) -> Bytes:
    codes, scales = quantised(values[:, :512], 128, E4M3, 1e-4)
    scale = (2.0 ** (scales.astype(np.float64) - 127)).astype("<f4")
    rope = bf16_bytes(bf16(values[:, 512:])).reshape(len(values), -1)
    return np.hstack((codes, scale.view(np.uint8), rope))


PACKED = {
    "v4_fp8": v4_record,
    "index_fp8": index_fp8_record,
    "index_mxfp4": index_mxfp4_record,
    "mla_fp8": mla_fp8_record,
}


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sizes of what torch's operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.bytes[storage.data_ptr()] = storage.nbytes()
        return out

    def largest(self, *, besides: Sequence[torch.Tensor]) -> int:
        known = {t.untyped_storage().data_ptr() for t in besides}
        return max(size for at, size in self.bytes.items() if at not in known)


def batch_of(
    lengths: Sequence[tuple[int, int]], *, page_tokens: int = 256, device: str = "cpu"
) -> PagedBatch:
    """Sequences of (query, KV) lengths whose pages lie scattered; (1, 0) is a padding row."""
    needed = [-(-kv // page_tokens) for _, kv in lengths]
    pages = np.random.default_rng(3).permutation(sum(needed) + 2)
    table = np.full((len(lengths), max(needed, default=0) + 1), -1, np.int32)
    used = 0
    for b, count in enumerate(needed):
        table[b, :count] = pages[used : used + count]
        used += count
    query, kv = [q for q, _ in lengths], [kv for _, kv in lengths]
    return PagedBatch(
        query_lens=tuple(query),
        kv_lens=tuple(kv),
        block_table=torch.from_numpy(table).to(device),
        cu_seqlens_q=torch.from_numpy(np.cumsum([0, *query], dtype=np.int32)).to(device),
        kv_lens_device=torch.tensor(kv, dtype=torch.int32, device=device),
        page_tokens=page_tokens,
    )
