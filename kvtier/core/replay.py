"""Recording a core's calls, and doing them again.

The core is a function of its calls (A10): the same log, replayed into a core built alike, in any
process, leads to the same ``digest()``.  A log is a list of plain values that ``json`` can write,
so that a failure seen in the field can be carried home.  Calls that only read are not recorded.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kvtier.core.leases import LeaseRecord, PinRecord, PrefetchRecord
from kvtier.core.load_costs import LoadCosts
from kvtier.core.machine import CacheCore
from kvtier.core.ops import Shortfall
from kvtier.errors import KVTierError
from kvtier.tokens import TokenBuffer
from kvtier.types import Identity, Span, Tier

__all__ = ["Call", "Recorder", "replay"]

Call: TypeAlias = list[Any]
"""[method, arguments, keyword arguments, name of the error it raised or None]"""

_CALLS = frozenset(
    [
        "open",
        "settle_early",
        "reserve",
        "commit",
        "abandon",
        "truncate",
        "fork",
        "pause",
        "resume",
        "release",
        "prefetch",
        "cancel_prefetch",
        "pin",
        "unpin",
        "evict",
        "clear",
        "expire",
        "packed",
        "finish",
        "subscribe",
        "disk_ticks",
    ]
)


class Recorder:
    """Stands in for a ``CacheCore`` and keeps a ``log`` of the calls that may change it."""

    def __init__(self, core: CacheCore) -> None:
        self.core = core
        self.log: list[Call] = []
        self._pins: dict[PinRecord, int] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.core, name)
        return self._recorded(name, found) if name in _CALLS else found

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            plain = [self._plain(a) for a in args]
            entry: Call = [name, plain, {k: self._plain(v) for k, v in options.items()}, None]
            self.log.append(entry)
            try:
                result = method(*args, **options)
            except KVTierError as error:
                entry[3] = type(error).__name__
                raise
            if isinstance(result, PinRecord):
                self._pins[result] = len(self._pins)
            return result

        return call

    def _plain(self, value: Any) -> Any:
        """Every argument that is not plain becomes [what it is, plain value ...]."""
        match value:
            case None | bool() | float() | str():
                return value
            case Tier():
                return ["tier", value.name]
            case Shortfall():
                return ["shortfall", value.name]
            case int():
                return int(value)
            case bytes():
                return ["bytes", value.hex()]
            case TokenBuffer():
                return ["tokens", value.data.hex()]
            case Identity():
                salt = None if value.salt is None else value.salt.hex()
                return ["identity", value.tenant, value.adapter, salt]
            case Span():
                return ["span", value.start, value.stop, value.digest.hex()]
            case LoadCosts():
                return ["costs", *value.plain()]
            case LeaseRecord():
                return ["lease", value.id]
            case PrefetchRecord():
                return ["prefetch", value.id]
            case PinRecord():
                return ["pin", self._pins[value]]
            case set() | frozenset():
                return ["list", *(self._plain(v) for v in sorted(value))]
            case list() | tuple():
                return ["list", *(self._plain(v) for v in value)]
        raise TypeError(f"cannot record an argument of type {type(value).__name__}")


def replay(log: Sequence[Call], core: CacheCore) -> None:
    """Do all calls of a log again.  ``core`` is fresh and built like the recorded one; raises
    AssertionError if a call does not end as it did then."""
    leases: dict[int, LeaseRecord] = {}
    prefetches: dict[int, PrefetchRecord] = {}
    pins: list[PinRecord] = []

    def value(plain: Any) -> Any:
        if not isinstance(plain, list):
            return plain
        match plain:
            case ["list", *values]:
                return [value(v) for v in values]
            case ["tier", name]:
                return Tier[name]
            case ["bytes", data]:
                return bytes.fromhex(data)
            case ["shortfall", name]:
                return Shortfall[name]
            case ["tokens", data]:
                return TokenBuffer(bytes.fromhex(data))
            case ["identity", tenant, adapter, salt]:
                salt = None if salt is None else bytes.fromhex(salt)
                return Identity(tenant=tenant, adapter=adapter, salt=salt)
            case ["span", start, stop, digest]:
                return Span(start, stop, bytes.fromhex(digest))
            case ["costs", *seconds]:
                return LoadCosts(*seconds)
            case ["lease", number]:
                return leases[number]
            case ["prefetch", number]:
                return prefetches[number]
            case ["pin", number]:
                return pins[number]
        raise ValueError(f"not a recorded value: {plain!r}")

    for i, (name, args, options, raised) in enumerate(log):
        error = None
        try:
            result = getattr(core, name)(
                *map(value, args), **{k: value(v) for k, v in options.items()}
            )
        except KVTierError as exception:
            error, result = type(exception).__name__, None
        assert error == raised, f"call {i}, {name}: {error} now, {raised} then"
        made = result[0] if isinstance(result, tuple) else result
        if isinstance(made, LeaseRecord):
            leases[made.id] = made
        elif isinstance(made, PrefetchRecord):
            prefetches[made.id] = made
        elif isinstance(made, PinRecord):
            pins.append(made)
