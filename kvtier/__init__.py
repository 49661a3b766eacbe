"""kvtier: a paged KV cache for LLMs over device, pinned-host and disk tiers.

``import kvtier`` needs no torch.  Only what is named in ``__all__`` here, in ``kvtier.layouts``,
``kvtier.kernels`` and ``kvtier.testing`` is public.
"""

import importlib
from typing import Any

from kvtier.config import (
    Adaptive,
    CacheConfig,
    CheckpointPolicy,
    Dense,
    EvictionPolicy,
    Sparse,
)
from kvtier.core.ops import Op, OpKind, Part
from kvtier.errors import (
    CacheClosed,
    ConfigError,
    InvariantError,
    KVTierError,
    LayoutMismatch,
    LeaseError,
    LeaseNotReady,
    LeaseReleased,
    OutOfPages,
    StoreError,
    StoreLocked,
    TokenError,
)
from kvtier.seams import Record, Store, Transfer
from kvtier.tokens import TokenBuffer, Tokens, pack
from kvtier.types import (
    CacheStats,
    Capture,
    Identity,
    LeaseInfo,
    LeaseState,
    PageInfo,
    PageReport,
    PrefixMatch,
    Span,
    Tier,
    TierStats,
)

__all__ = [
    "Adaptive",
    "Cache",
    "CacheClosed",
    "CacheConfig",
    "CacheStats",
    "Capture",
    "CheckpointPolicy",
    "ConfigError",
    "Dense",
    "DeviceStep",
    "EvictionPolicy",
    "Identity",
    "InvariantError",
    "KVTierError",
    "LayerView",
    "LayoutMismatch",
    "Lease",
    "LeaseError",
    "LeaseInfo",
    "LeaseNotReady",
    "LeaseReleased",
    "LeaseState",
    "Op",
    "OpKind",
    "OutOfPages",
    "PageInfo",
    "PageReport",
    "Part",
    "Pin",
    "PrefixMatch",
    "Record",
    "Span",
    "Sparse",
    "Step",
    "StepBuffers",
    "Store",
    "StoreError",
    "StoreLocked",
    "Tier",
    "TierStats",
    "TokenBuffer",
    "TokenError",
    "Tokens",
    "Transfer",
    "__version__",
    "pack",
]
__version__ = "0.1.0.dev0"

_FACE = {
    "Cache": "kvtier.cache",
    "Pin": "kvtier.cache",
    "Lease": "kvtier.lease",
    "Step": "kvtier.step",
    "StepBuffers": "kvtier.step",
    "DeviceStep": "kvtier.step",
    "LayerView": "kvtier.step",
}


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), name)
    raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
