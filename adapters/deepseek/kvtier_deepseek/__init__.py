"""DeepSeek models of Hugging Face transformers on kvtier's pages.

    layout = layout_for(model.config)
    with Cache(layout, config, model="name@revision") as cache, attach(model, cache) as adapter:
        ...

Supports V2-Lite, V2, V3, V3.2 and V4; a model it does not know is refused by name.
"""

from kvtier_deepseek.attach import Adapter, StepReport, attach, backends
from kvtier_deepseek.config import layout_for
from kvtier_deepseek.decode import DecodeGraph
from kvtier_deepseek.drafts import CachedDraft, DSpark, Mtp, NGram, Proposer, StreamMtp
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.metadata import validate_step
from kvtier_deepseek.runner import Generation, generate
from kvtier_deepseek.speculative import Request, Speculation, speculate, verify

__all__ = [
    "Adapter",
    "CachedDraft",
    "DSpark",
    "DecodeGraph",
    "Generation",
    "Mtp",
    "NGram",
    "Proposer",
    "Request",
    "Speculation",
    "StepReport",
    "StreamMtp",
    "UnsupportedModel",
    "attach",
    "backends",
    "generate",
    "layout_for",
    "speculate",
    "validate_step",
    "verify",
]
