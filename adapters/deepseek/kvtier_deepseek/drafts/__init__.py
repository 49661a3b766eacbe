"""Drafts: who guesses the next tokens, and what of it a cache keeps.

``NGram`` needs nothing but the text.  ``Mtp`` (V3), ``StreamMtp`` (V4) and ``DSpark`` (V4) are
modules with cache layers of their own; give one to ``attach(draft=...)``.
"""

from kvtier_deepseek.drafts.base import CachedDraft, Continuation, Proposer
from kvtier_deepseek.drafts.dspark import DSpark
from kvtier_deepseek.drafts.mtp import Mtp
from kvtier_deepseek.drafts.ngram import NGram
from kvtier_deepseek.drafts.stream_mtp import StreamMtp

__all__ = ["CachedDraft", "Continuation", "DSpark", "Mtp", "NGram", "Proposer", "StreamMtp"]
