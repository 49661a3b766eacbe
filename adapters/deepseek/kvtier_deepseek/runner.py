"""The reference loop: one request from its prompt to its last token, greedy and synchronous.

What a server does for many requests at once, written down for one: lease what is cached, compute
the rest of the prompt in chunks, then decode token by token, each through ``Cache.step``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from kvtier import ConfigError, OutOfPages, Span, Tier, TokenError
from kvtier_deepseek.attach import Adapter

if TYPE_CHECKING:
    from kvtier import Cache, Lease

__all__ = ["Generation", "generate", "with_room"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request got, and where its prompt came from."""

    tokens: tuple[int, ...]
    """The new tokens only, at least one."""
    prompt_tokens: int
    """Length of the prompt."""
    restored: Mapping[Tier, int]
    """Prompt tokens that were not computed, by the tier they came from."""
    computed: int
    """Prompt tokens that went through the model; with ``restored`` they make the prompt."""
    restore_s: float
    """Seconds until the lease was ready."""
    prefill_s: float
    """Seconds for the rest of the prompt, which give the first new token."""
    decode_s: float
    """Seconds for the other new tokens."""

    @property
    def seconds(self) -> float:
        """All three together."""
        return self.restore_s + self.prefill_s + self.decode_s


def generate(
    adapter: Adapter,
    cache: "Cache",
    prompt: Sequence[int],
    max_new: int,
    *,
    chunk: int = 512,
    stop: Collection[int] = (),
    spans: Sequence[Span] = (),
    max_reuse: int | None = None,
    label: str = "",
    progress: Callable[[int], None] | None = None,
) -> Generation:
    """Greedily append up to ``max_new`` tokens to ``prompt``; ends early after one of ``stop``.

    Blocks until done.  The prompt is fed in chunks of ``chunk`` tokens (512); they end where
    ``spans`` (images, see ``kvtier.Span``) let them, so one may be longer.  ``stop`` are token ids,
    by default none: the configuration's end token ends nothing.  ``max_reuse`` is the most tokens
    that are taken from the cache (None: all but the last).  ``label`` names the lease.
    ``progress`` is called with the number of tokens now in the cache, after the restore and after
    every step.  The last token returned has not been fed, so it is not in the cache.

    Raises ConfigError for counts below 1, TokenError for an empty prompt or bad ids, OutOfPages
    where the request does not fit; the lease is released in every case.
    """
    if max_new < 1 or chunk < 1:
        raise ConfigError(f"max_new and chunk must be at least 1, got {max_new=} {chunk=}")
    if not len(prompt):
        raise TokenError("an empty prompt has no last token to go on from")
    started = perf_counter()
    with cache.lease(prompt, spans=spans, max_reuse=max_reuse, label=label) as lease:
        done = lease.ready.result()
        restored = dict(lease.restored)
        computed = len(prompt) - done
        if progress is not None:
            progress(done)
        ready = perf_counter()
        while done < len(prompt):
            logits = _step(
                adapter, cache, lease, prompt[done : lease.chunk_end(done, done + chunk)]
            )
            done = lease.num_tokens
            if progress is not None:
                progress(done)
        prefilled = perf_counter()
        tokens = [int(logits[0].argmax())]
        while len(tokens) < max_new and tokens[-1] not in stop:
            logits = _step(adapter, cache, lease, tokens[-1:])
            tokens.append(int(logits[0].argmax()))
            if progress is not None:
                progress(lease.num_tokens)
    return Generation(
        tokens=tuple(tokens),
        prompt_tokens=len(prompt),
        restored=restored,
        computed=computed,
        restore_s=ready - started,
        prefill_s=prefilled - ready,
        decode_s=perf_counter() - prefilled,
    )


def with_room(cache: "Cache", call: Callable[[], T]) -> T:
    """What ``call`` returns, made a second time where pages of earlier requests were still being
    copied down: these can be had when that is done.  Raises OutOfPages if they do not do."""
    try:
        return call()
    except OutOfPages:
        cache.flush(to=Tier.CPU).result()
        return call()


def _step(adapter: Adapter, cache: "Cache", lease: "Lease", tokens: Sequence[int]) -> Tensor:
    def now() -> Tensor:
        with cache.step([(lease, tokens)]) as step:
            return adapter(step)

    return with_room(cache, now)
