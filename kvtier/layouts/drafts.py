"""What a page keeps for draft layers besides their rows.

A draft layer's row of position p is made of token p and of what the model itself made of position
p - 1, so whoever goes on from a page's end needs the latter.  It is a function of the tokens up to
there, as everything in a page is, and lies with them: one slot a page, written by the page's last
token.  Knows nothing of how rows are drafted.
"""

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.layouts.base import DTYPE_BYTES, ROW_DTYPES, Component, Share

__all__ = ["draft_state", "drafts_from"]

MARK_BYTES = 4
_ALIGN = 16
"""Bytes that a slot is a multiple of, so that its mark can be viewed as an int32."""


def draft_state(
    *, values: int, dtype: str, draft_layers: int, layer: int, page_tokens: int
) -> tuple[Component, ...]:
    """The component ``draft_state`` in the first draft layer, ``layer``; none without ``values``.

    A slot is ``values`` values, zeros, and in its last four bytes an int32, the *mark*: how many
    rows of the draft layers, counted back from the page's last token, lie there without a gap; at
    most ``page_tokens``.  Raises ConfigError naming the argument.
    """
    if not values:
        return ()
    if values < 0:
        raise ConfigError(f"draft_state_values={values} must not be negative")
    if not draft_layers:
        raise ConfigError(f"draft_state_values={values} are of draft layers: {draft_layers=}")
    if dtype not in ROW_DTYPES:
        raise ConfigError(f"draft_state_dtype must be one of {ROW_DTYPES}, got {dtype!r}")
    size = values * DTYPE_BYTES[dtype] + MARK_BYTES
    return (
        Component(
            name="draft_state",
            share=Share.HISTORY,
            tokens_per_slot=page_tokens,
            slots_per_page=1,
            slot_bytes=-(-size // _ALIGN) * _ALIGN,
            layers=(layer,),
            dtype=dtype,
        ),
    )


def drafts_from(marks: npt.ArrayLike, page_tokens: int) -> int:
    """The position from which on all rows of the draft layers are there.

    ``marks`` (pages,) are those of the pages that a lease stands on, in order.  The answer is in
    [0, pages * ``page_tokens``], and the latter if the last page has no rows.  A mark that is none
    (stale or poisoned bytes: not in [0, ``page_tokens``]) counts as 0.
    """
    known = np.asarray(marks, dtype=np.int64).reshape(-1)
    known = np.where((known < 0) | (known > page_tokens), 0, known)
    gaps = np.flatnonzero(known < page_tokens)
    if not len(gaps):
        return 0
    last = int(gaps[-1])
    return (last + 1) * page_tokens - int(known[last])
