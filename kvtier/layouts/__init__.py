"""Cache layouts: which components a model keeps per token, and how large they are."""

from kvtier.layouts.base import Component, Layout, Share
from kvtier.layouts.drafts import drafts_from
from kvtier.layouts.gqa import gqa
from kvtier.layouts.mla import mla
from kvtier.layouts.mla_indexed import mla_indexed
from kvtier.layouts.retile import retile, retile_pages
from kvtier.layouts.swa_c4_c128 import swa_c4_c128

__all__ = [
    "Component",
    "Layout",
    "Share",
    "drafts_from",
    "gqa",
    "mla",
    "mla_indexed",
    "retile",
    "retile_pages",
    "swa_c4_c128",
]
