"""Cache layouts: which components a model keeps per token, and how large they are."""

from kvtier.layouts.base import Component, Layout, Share
from kvtier.layouts.mla import mla

__all__ = ["Component", "Layout", "Share", "mla"]
