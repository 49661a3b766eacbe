"""``CacheConfig``: sizes, paths and policies, checked once, here.  No environment variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from os import PathLike, fspath
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from kvtier.errors import ConfigError

__all__ = [
    "Adaptive",
    "CacheConfig",
    "CheckpointFacts",
    "CheckpointPolicy",
    "Dense",
    "EvictionPolicy",
    "RestorePolicy",
    "Sparse",
    "as_int",
    "parse_bytes",
]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1 << (10 * (i + 1)) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}


def parse_bytes(value: int | str, name: str = "size") -> int:
    """``"64GiB"`` or a plain int, as bytes.  Raises ConfigError naming the field."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name} must be bytes or a string like '64GiB', got {value!r}")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value)
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f"{name}={value!r} is not a size; write it like '64GiB' or '500MB'")
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 0:
        raise ConfigError(f"{name} must not be negative, got {value!r}")
    return size


def as_int(name: str, value: int, *, least: int | None = None) -> int:
    """``value``, an int or a numpy integer, of Python's own type.

    Raises ConfigError naming it unless it is one, of at least ``least`` (None: of any sign).
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or (least is not None and value < least)
    ):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} must be an int{bound}, got {value!r}")
    return int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_path(value: str | PathLike[str]) -> str:
    """Raises ConfigError for what is no path, or none that a file system takes."""
    try:
        path = fspath(value)
        fits = isinstance(path, str) and b"\0" not in path.encode(errors="surrogateescape")
    except (TypeError, UnicodeEncodeError):
        fits = False
    if not fits:
        raise ConfigError(f"disk_path must be a path of text, got {value!r}")
    return path


class CheckpointFacts(NamedTuple):
    """What a policy weighs of a checkpoint in host memory."""

    gap: int
    """Pages a lease would lose without it, back to the next shallower checkpoint."""
    frames: int
    """How many frames it takes."""
    deepest: bool
    """Nothing is known below, so the pages of the gap would go with it."""
    passed: bool
    """Another was kept at least two pages deeper on its path."""
    uses: int
    """How many leases have resumed here; 9 stands for more."""
    prompt_end: bool
    """One of the last two page ends of its prompt."""
    branch: bool
    """Another prompt was known to here and went on differently."""


class CheckpointPolicy:
    """At which page ends to keep the tail (layouts with tails only).  One instance per cache.

    For one of your own, override what differs.  Every method must be a pure function of its
    arguments: the core asks again whenever it has to choose.
    """

    def due(self, depth: int, *, prompt_end: bool, branch: bool) -> bool:
        """Whether to capture a checkpoint at the end of page ``depth`` (1-based).

        ``prompt_end``: one of the last two page ends of the prompt.  ``branch``: another prompt
        was known to here and went on differently.
        """
        return self.keep(depth, prompt_end=prompt_end, branch=branch)

    def keep(self, depth: int, *, prompt_end: bool, branch: bool) -> bool:
        """Whether a captured one is worth the disk.  Others stay in host memory, and go there
        only while it has free room."""
        return True

    def worth(self, checkpoint: CheckpointFacts) -> float:
        """What a checkpoint in host memory is worth per frame, beside a page of history (1.0) that
        somebody can resume behind: it outlives that page's time without use this many times."""
        return 1.0


@dataclass(frozen=True, slots=True)
class _Placement(CheckpointPolicy):
    every_pages: int
    capture_all: bool
    keep_all: bool

    def due(self, depth: int, *, prompt_end: bool, branch: bool) -> bool:
        return self.capture_all or self.keep(depth, prompt_end=prompt_end, branch=branch)

    def keep(self, depth: int, *, prompt_end: bool, branch: bool) -> bool:
        return self.keep_all or prompt_end or branch or depth % self.every_pages == 0


@dataclass(frozen=True, slots=True)
class _Adaptive(_Placement):
    """The guesses are round numbers; what comes of them is flat around each."""

    def worth(self, checkpoint: CheckpointFacts) -> float:
        gap, frames = checkpoint.gap, checkpoint.frames
        if checkpoint.deepest:
            return gap / (frames + gap)
        if not checkpoint.passed or checkpoint.uses > 1:
            chance = 1.0
        elif checkpoint.branch:
            chance = 0.5
        elif checkpoint.uses or checkpoint.prompt_end:
            chance = 0.1  # a conversation goes on from its end, and seldom twice
        else:
            chance = 0.03
        return chance * gap / frames


def _every(every_pages: int) -> int:
    if every_pages < 1:
        raise ConfigError(f"every_pages must be at least 1, got {every_pages}")
    return every_pages


def Adaptive(*, every_pages: int = 16) -> CheckpointPolicy:
    """Capture at every page end while there is room, else where ``Sparse`` does; under pressure
    let go first of those that would be missed least: what lies close behind another, or was
    passed by its conversation."""
    return _Adaptive(_every(every_pages), capture_all=True, keep_all=False)


def Dense() -> CheckpointPolicy:
    """Keep a checkpoint at every page end."""
    return _Placement(1, capture_all=True, keep_all=True)


def Sparse(*, every_pages: int = 16) -> CheckpointPolicy:
    """Keep checkpoints at prompt ends, branch points and every ``every_pages`` pages."""
    return _Placement(_every(every_pages), capture_all=False, keep_all=False)


class EvictionPolicy:
    """Which evictable page goes first, and what a full tier lets in.  One instance per cache.

    For one of your own, override what differs; as it stands this is ``"lru"``.
    """

    def rank(self, tick: int, hits: int) -> int:
        """Pages of one kind with the lowest rank leave first; ``tick`` is when it was last used (a
        counter), ``hits`` how often it was found again.  Must not fall while a page is unused."""
        return tick

    def weight(self, again: bool) -> float:
        """How long pages found ``again`` may go unused, beside those that never were."""
        return 1.0

    def returned(self, first: float, again: float) -> None:
        """A request has asked anew for pages just evicted, in shares of the tier: some that had
        never been found again before (``first``), some that had (``again``)."""

    def admit(self, hits: int, *, full: bool) -> bool:
        """Whether a page found again ``hits`` times may enter the disk, ``full`` or not."""
        return True


@dataclass(frozen=True, slots=True)
class RestorePolicy:
    """How long a lease may wait for its prefix.  Raises ConfigError naming the field.

    Without a prefill rate all that is known is loaded.  With one, a lease resumes where loading
    and then computing the rest should take least, by the speeds of host and disk as they were
    measured lately; and when the disk turns out slower than that, it settles for what has arrived
    before more than 4 % of the time to compute the whole prompt is lost.
    """

    mode: Literal["wait_complete", "best_effort", "timeout"] = "wait_complete"
    """"wait_complete" waits for all that is worth loading.  "best_effort" waits for nothing from
    the disk: it stands on what the device and the host have, and what only the disk has is brought
    to the host for the next request.  "timeout" waits ``timeout_s`` at most and settles for what
    has arrived; of a disk whose queue alone takes longer it asks nothing."""
    timeout_s: float | None = None
    prefill_tokens_per_s: float | None = None
    """How fast the server computes a prompt."""

    def __post_init__(self) -> None:
        if self.mode not in ("wait_complete", "best_effort", "timeout"):
            raise ConfigError(
                f'mode must be "wait_complete", "best_effort" or "timeout", got {self.mode!r}'
            )
        if (self.mode == "timeout") != (self.timeout_s is not None):
            raise ConfigError('mode="timeout" and timeout_s go together: set both, or neither')
        _check_seconds("timeout_s", self.timeout_s, zero=True)
        _check_seconds("prefill_tokens_per_s", self.prefill_tokens_per_s, zero=False)


def _check_seconds(name: str, value: float | None, *, zero: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < inf or not (value or zero):
        raise ConfigError(f"{name} must be finite and {'not negative' if zero else 'above 0'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes and paths of a cache.

    A tier of size 0 is off.  Sizes are bytes or strings like "64GiB"; ``Cache.stats()`` reports
    the pages they came to.  ``disk_bytes`` bounds the whole directory, all stores and ranks in it.
    Raises ConfigError naming the field.
    """

    gpu_bytes: int | str
    """The device pool: pages, and for layouts with tails also windows, states, checkpoints."""
    cpu_bytes: int | str = 0
    disk_bytes: int | str = 0
    disk_path: str | PathLike[str] | None = None
    disk_mode: Literal["write", "read"] = "write"
    """"read" opens what another process writes; nothing is stored."""
    rank: int = 0
    world: int = 1
    max_leases: int = 256
    checkpoints: CheckpointPolicy = field(default_factory=Adaptive)
    eviction: Literal["adaptive", "lru", "s3fifo"] | EvictionPolicy = "adaptive"
    store_after_hits: int = 0
    """Write a page to disk only once it was found again this often; 0: always (but see
    ``eviction``: "adaptive" asks for one hit while the disk is full)."""
    codec: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Record component ("history", "checkpoint") -> zstd level; absent: stored raw."""
    staging_bytes: int | str = "192MiB"
    """Packed bytes between the device and the host at any time; bounds D2H back-pressure."""
    on_full: Literal["skip", "wait"] = "skip"
    """A step that fills pages while staging is full skips storing them, or waits ``wait_s``."""
    wait_s: float = 1.0
    io_threads: int = 4
    disk_stall_s: float = 30.0
    """A disk that has work and brings nothing for so long is taken to hang: leases and prefetches
    settle for what is nearer, new leases ask it for nothing until it moves, a flush ends with
    StoreError, and ``close`` does not wait for it.  Infinity: they wait for ever."""
    restore: RestorePolicy = field(default_factory=RestorePolicy)
    """Of leases that bring none of their own."""
    max_pinned: float = 0.5
    """Share of a tier that ``Cache.pin`` may hold."""

    def __post_init__(self) -> None:
        for name in ("gpu_bytes", "cpu_bytes", "disk_bytes", "staging_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        leasts = {"world": 1, "rank": 0, "max_leases": 1, "store_after_hits": 0, "io_threads": 1}
        for name, least in leasts.items():
            object.__setattr__(self, name, as_int(name, getattr(self, name), least=least))
        if self.gpu_bytes == 0:
            raise ConfigError("gpu_bytes must not be 0: the device pool holds every open lease")
        if self.disk_path is not None:
            object.__setattr__(self, "disk_path", _as_path(self.disk_path))
        if bool(self.disk_bytes) != (self.disk_path is not None):
            raise ConfigError("disk_bytes and disk_path go together: set both, or neither")
        if self.disk_bytes and not self.cpu_bytes:
            raise ConfigError("a disk tier needs cpu_bytes: pages pass through host memory")
        if self.disk_mode not in ("write", "read"):
            raise ConfigError(f'disk_mode must be "write" or "read", got {self.disk_mode!r}')
        if self.rank >= self.world:
            raise ConfigError(f"rank must lie in [0, world), got rank={self.rank} of {self.world}")
        named = isinstance(self.eviction, str) and self.eviction in ("adaptive", "lru", "s3fifo")
        if not (named or isinstance(self.eviction, EvictionPolicy)):
            raise ConfigError(
                f'eviction must be "adaptive", "lru", "s3fifo" or an EvictionPolicy, '
                f"got {self.eviction!r}"
            )
        if not isinstance(self.checkpoints, CheckpointPolicy):
            raise ConfigError(f"checkpoints must be a CheckpointPolicy, got {self.checkpoints!r}")
        if not isinstance(self.restore, RestorePolicy):
            raise ConfigError(f"restore must be a RestorePolicy, got {self.restore!r}")
        if self.on_full not in ("skip", "wait"):
            raise ConfigError(f'on_full must be "skip" or "wait", got {self.on_full!r}')
        if not (_is_number(self.wait_s) and self.wait_s >= 0):
            raise ConfigError(f"wait_s must be a number, not a negative one, got {self.wait_s!r}")
        if self.io_threads > 64:
            raise ConfigError(f"io_threads must lie in [1, 64], got {self.io_threads}")
        if not (_is_number(self.disk_stall_s) and self.disk_stall_s > 0):
            raise ConfigError(f"disk_stall_s must be a number above 0, got {self.disk_stall_s!r}")
        if not (_is_number(self.max_pinned) and 0 <= self.max_pinned <= 1):
            raise ConfigError(f"max_pinned is a share in [0, 1], got {self.max_pinned!r}")
        if not isinstance(self.codec, Mapping):
            raise ConfigError(f"codec must map components to zstd levels, got {self.codec!r}")
        for component, level in self.codec.items():
            if component not in ("history", "checkpoint"):
                raise ConfigError(f'codec names "history" or "checkpoint", got {component!r}')
            if not 1 <= as_int(f"codec[{component!r}]", level) <= 19:
                raise ConfigError(f"codec[{component!r}] is a zstd level in [1, 19], got {level}")
