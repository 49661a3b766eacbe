"""Token ids, checked once and packed: the form in which every call takes them.

In memory pages are compared by these bytes, never by a digest alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import numpy.typing as npt

from kvtier.errors import TokenError

if TYPE_CHECKING:
    import torch

__all__ = ["TOKEN_BYTES", "IntArray", "TokenBuffer", "Tokens", "pack"]

TOKEN_BYTES = 4
IntArray: TypeAlias = npt.NDArray[np.int32]


@final
class TokenBuffer:
    """Token ids checked once and packed as little-endian int32; made by ``pack``."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data
        """The packed ids, four bytes each; already checked."""

    def __len__(self) -> int:
        return len(self.data) >> 2

    def __getitem__(self, part: slice) -> "TokenBuffer":
        start, stop, stride = part.indices(len(self))
        if stride != 1:
            raise TokenError(f"a TokenBuffer is cut with step 1 only, not {stride}")
        return TokenBuffer(self.data[start * TOKEN_BYTES : max(start, stop) * TOKEN_BYTES])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenBuffer) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __add__(self, other: "TokenBuffer") -> "TokenBuffer":
        return TokenBuffer(self.data + other.data)

    def __repr__(self) -> str:
        return f"TokenBuffer({len(self)} tokens)"

    def array(self) -> IntArray:
        """The ids as a read-only int32 array that shares this buffer's memory."""
        return np.frombuffer(self.data, dtype="<i4")


Tokens: TypeAlias = (
    "TokenBuffer | Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64] | torch.Tensor"
)


def pack(tokens: Tokens) -> TokenBuffer:
    """Check and pack token ids: int32 or int64 arrays (numpy, torch, ``array``) or ints.

    Packing a list of 4,096 ints costs about 100 us, an array a few: servers keep a
    ``TokenBuffer`` or an array per request.  Raises TokenError for other dtypes, ids below 0 or
    above 2**31 - 1, and more than one dimension.
    """
    if type(tokens) is TokenBuffer:
        return tokens
    if isinstance(tokens, str | bytes | bytearray):
        raise TokenError(f"tokens must be ints, got {type(tokens).__name__}; tokenize first")
    if isinstance(tokens, np.ma.MaskedArray):
        raise TokenError("tokens must not be masked: pass those that count, tokens.compressed()")
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TokenError(f"tokens cannot be read as an array of ints: {error}") from error
    if ids.ndim != 1:
        raise TokenError(f"tokens must be one-dimensional, got shape {ids.shape}")
    if ids.size == 0:
        return _EMPTY
    if ids.dtype.kind not in "iu" or ids.dtype.itemsize < 4:
        raise TokenError(f"tokens must be int32 or int64, got {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > 0x7FFFFFFF:
        raise TokenError(f"token ids must lie in [0, 2**31 - 1], got {low if low < 0 else high}")
    # Among ints in a list numpy takes True for 1; looked for only where there is a 0 or a 1.
    if low < 2 and isinstance(tokens, list | tuple) and {bool, np.bool_} & set(map(type, tokens)):
        raise TokenError("tokens must be ints, got a bool among them")
    return TokenBuffer(ids.astype("<i4", copy=False).tobytes())


_EMPTY = TokenBuffer(b"")
