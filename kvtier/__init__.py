"""kvtier: a paged KV cache for LLMs over device, pinned-host and disk tiers.

``import kvtier`` needs no torch.  Only what is named in ``__all__`` here, in ``kvtier.layouts``,
``kvtier.kernels`` and ``kvtier.testing`` is public.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

try:
    from kvtier.cache import Cache
    from kvtier.config import (
        Adaptive,
        CacheConfig,
        CheckpointFacts,
        CheckpointPolicy,
        Dense,
        EvictionPolicy,
        RestorePolicy,
        Sparse,
    )
    from kvtier.core.ops import Op, OpKind, Part
    from kvtier.device_step import DeviceStep, LayerView, StepBuffers
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
    from kvtier.lease import Lease, Pin
    from kvtier.seams import Record, Store, Transfer
    from kvtier.step import Step
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
except ImportError as error:
    # A package that all of this needs is not there.  ``kvtier doctor`` says which; whatever else
    # is asked for raises what the import did.
    if TYPE_CHECKING or (error.name or "kvtier").startswith("kvtier"):
        raise
    _missing = error

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _missing


__all__ = [
    "Adaptive",
    "Cache",
    "CacheClosed",
    "CacheConfig",
    "CacheStats",
    "Capture",
    "CheckpointFacts",
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
    "RestorePolicy",
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
