"""Checks of what callers pass to the cache's public methods.

Done once, at the public edge: what is inside may rely on types and ranges.
"""

from collections.abc import Iterable, Sequence

from kvtier.core.keys import ANONYMOUS, check_spans
from kvtier.errors import ConfigError
from kvtier.tokens import TokenBuffer, Tokens, pack
from kvtier.types import Identity, Span, Tier

__all__ = [
    "FOREVER",
    "check_identity",
    "check_prompt",
    "check_tier",
    "check_tiers",
    "check_ttl",
    "check_type",
]

FOREVER = 1e18
"""Seconds; an int may be too large to add to a time."""


def check_prompt(
    tokens: Tokens, identity: Identity, spans: Sequence[Span]
) -> tuple[TokenBuffer, tuple[Span, ...]]:
    """The tokens packed and the spans sorted.  Raises TokenError, or ConfigError for what is no
    identity."""
    packed = pack(tokens)
    check_identity(identity)
    return packed, check_spans(spans, len(packed)) if spans else ()


def check_identity(identity: Identity) -> None:
    """Raises ConfigError naming the field that is of a wrong type."""
    if identity is ANONYMOUS:
        return
    if not isinstance(identity, Identity):
        raise ConfigError(f"identity must be an Identity, like Identity(tenant={identity!r})")
    for name, kind in (("tenant", str), ("adapter", str), ("salt", bytes)):
        value = getattr(identity, name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"identity.{name} must be {kind.__name__} or None, got {value!r}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raises ConfigError unless ``value`` is of this type."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")


def check_tier(tier: Tier) -> Tier:
    """One of the three tiers a cache may have.  Raises ConfigError for any other."""
    if not isinstance(tier, int) or tier not in (Tier.GPU, Tier.CPU, Tier.DISK):
        raise ConfigError(f"tier must be Tier.GPU, Tier.CPU or Tier.DISK, got {tier!r}")
    return Tier(tier)


def check_tiers(tiers: Iterable[Tier]) -> frozenset[Tier]:
    """Several of them.  Raises ConfigError."""
    if not isinstance(tiers, Iterable):
        raise ConfigError(f"tiers must be several, like [Tier.GPU], got {tiers!r}")
    return frozenset(check_tier(tier) for tier in tiers)


def check_ttl(ttl: float) -> float:
    """A time to live in seconds, small enough to be added to a time.  Raises ConfigError unless it
    is a number above 0."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl > 0:
        raise ConfigError(f"ttl must be a number of seconds above 0, got {ttl!r}")
    return min(ttl, FOREVER)
