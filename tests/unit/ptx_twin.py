"""What a few instructions of PTX do, in numpy: those that kernels have inside."""

import re
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def to_bf16(x: Array) -> Array:
    """Bits of the nearest bfloat16 of each float32, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).reshape(x.shape)


def of_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def assembled(text: str, inputs: list[Array]) -> list[Array]:
    """Results of PTX that works on 32-bit registers, one element at a time."""
    if "ex2.approx.ftz.f32" in text:
        with np.errstate(over="ignore"):
            return [np.exp2(inputs[0])]
    outputs = len(set(re.findall(r"\$\d+", text))) - len(inputs)
    held = {f"${outputs + i}": _bits(x) for i, x in enumerate(inputs)}

    def value(name: str) -> Any:
        return held[name] if name in held else np.uint32(int(name, 0))

    for line in re.findall(r"^\s*(\w[\w.]* [^;]*);", text, re.MULTILINE):
        op, rest = line.split(" ", 1)
        to, *of = (part.strip() for part in rest.split(","))
        if op == "prmt.b32":
            held[to] = permuted(value(of[0]), value(of[1]), int(of[2], 0))
        elif op == "shl.b32":
            held[to] = value(of[0]) << value(of[1])
        elif op == "and.b32":
            held[to] = value(of[0]) & value(of[1])
        elif op == "mov.b32":
            held[to] = value(of[0])
        elif op == "sub.rn.f32":
            held[to] = (value(of[0]).view(np.float32) - value(of[1]).view(np.float32)).view(
                np.uint32
            )
        elif op == "cvt.rn.bf16x2.f32":
            held[to] = _pair(*(value(x).view(np.float32) for x in of))
        elif op == "mul.bf16x2":
            (a, b), (c, d) = (_halves(value(x)) for x in of)
            held[to] = _pair(a * c, b * d)
        elif op == "fma.rn.bf16x2":  # a product of two and a sum are exact in float64
            (a, b), (c, d), (e, f) = (_halves(value(x)) for x in of)
            wide = np.float64
            high = (a.astype(wide) * c + e).astype(np.float32)
            held[to] = _pair(high, (b.astype(wide) * d + f).astype(np.float32))
        else:
            raise NotImplementedError(line)
    return [held[f"${i}"].view(np.int32) for i in range(outputs)]


def _bits(x: Array) -> Array:
    return (x if x.dtype == np.float32 else x.astype(np.int32)).view(np.uint32)


def _halves(x: Array) -> tuple[Array, Array]:
    return of_bf16(x >> np.uint32(16)), of_bf16(x & np.uint32(0xFFFF))


def _pair(high: Array, low: Array) -> Array:
    return to_bf16(high).astype(np.uint32) << np.uint32(16) | to_bf16(low).astype(np.uint32)


def permuted(a: Array, b: Any, selector: int) -> Array:
    """prmt: bytes of (b, a), or eight times their highest bit."""
    both = a.astype(np.uint64) | np.uint64(b) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (both >> np.uint64(8 * (nibble & 7)) & np.uint64(0xFF)).astype(np.uint32)
        if nibble & 8:
            byte = np.where(byte >= 0x80, 0xFF, 0).astype(np.uint32)
        out |= byte << np.uint32(8 * i)
    return out
