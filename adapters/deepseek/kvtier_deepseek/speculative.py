"""The reference loop with drafts: guesses are verified in one step, greedily.

A step feeds the one token that is certain and the guesses behind it.  The model's own choice after
each of them says how many were right; those are committed, the rest leave nothing behind, and its
choice after the last right one is the next certain token.  The text is therefore what greedy
decoding without drafts gives, whoever guesses and however badly.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvtier import ConfigError, Tier, TokenError
from kvtier_deepseek.attach import Adapter
from kvtier_deepseek.decode import DecodeGraph
from kvtier_deepseek.drafts.base import Continuation, Proposer
from kvtier_deepseek.runner import with_room

if TYPE_CHECKING:
    from kvtier import Cache, Lease

__all__ = ["Request", "Speculation", "speculate", "verify"]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence that is being decoded with drafts."""

    lease: "Lease"
    """Holds all of ``tokens`` but the last, once its prompt has been fed."""
    tokens: list[int]
    """The prompt and what was generated; all but the last are, or will be, fed."""
    stop: int
    """Length of ``tokens`` at which it ends."""
    ends: Collection[int] = ()
    """Tokens after which it ends sooner."""
    guesses: list[int] = field(default_factory=list)
    """To be verified in the next step."""
    rounds: int = 0
    """Steps that verified."""
    proposed: int = 0
    """Guesses fed so far."""
    accepted: int = 0
    """Of ``proposed``, those that were right."""

    @property
    def done(self) -> bool:
        """Whether it has as many tokens as wanted, or one of ``ends``."""
        return len(self.tokens) >= self.stop or self.tokens[-1] in self.ends


@dataclass(frozen=True, slots=True)
class Speculation:
    """What one request got, and what guessing was worth."""

    tokens: tuple[int, ...]
    """The new tokens only, at least one."""
    prompt_tokens: int
    """Length of the prompt."""
    restored: dict[Tier, int]
    """Prompt tokens that were not computed, by the tier they came from."""
    computed: int
    """Prompt tokens that went through the model."""
    rounds: int
    """Steps after the prompt's."""
    proposed: int
    """Guesses that were fed."""
    accepted: int
    """Of ``proposed``, those that were right."""


def speculate(
    adapter: Adapter,
    cache: "Cache",
    prompt: Sequence[int],
    max_new: int,
    *,
    proposer: Proposer | None = None,
    max_draft: int | None = None,
    chunk: int = 512,
    stop: Collection[int] = (),
    label: str = "",
) -> Speculation:
    """What ``generate`` gives, with up to ``max_draft`` guesses verified in each step.

    ``proposer`` guesses; default: the draft that the model was attached with.  ``max_draft`` is at
    most, and by default, what the cache's layout says.  ``chunk``, ``stop`` and ``label`` are those
    of ``generate``.  Raises as ``generate`` does, and
    ConfigError where there is nobody to guess or room for no guess.
    """
    if max_new < 1 or chunk < 1:
        raise ConfigError(f"max_new and chunk must be at least 1, got {max_new=} {chunk=}")
    if not len(prompt):
        raise TokenError("an empty prompt has no last token to go on from")
    proposer = adapter.draft if proposer is None else proposer
    most = cache.layout.max_draft
    if proposer is None:
        raise ConfigError("nobody guesses: give a proposer, or attach the model with a draft")
    if not 1 <= (wanted := most if max_draft is None else max_draft) <= most:
        raise ConfigError(f"max_draft={wanted} must be in [1, {most}], the layout's max_draft")
    with cache.lease(prompt, label=label) as lease:
        done = lease.ready.result()
        restored = dict(lease.restored)
        request = Request(lease, list(prompt), len(prompt) + max_new, stop)
        while lease.num_tokens < len(prompt):
            prefill(adapter, cache, request, proposer, chunk=chunk, max_draft=wanted)
        while not request.done:
            with_room(cache, partial(verify, adapter, cache, [request], proposer, max_draft=wanted))
    return Speculation(
        tokens=tuple(request.tokens[len(prompt) :]),
        prompt_tokens=len(prompt),
        restored=restored,
        computed=len(prompt) - done,
        rounds=request.rounds,
        proposed=request.proposed,
        accepted=request.accepted,
    )


def prefill(
    adapter: Adapter,
    cache: "Cache",
    request: Request,
    proposer: Proposer,
    *,
    chunk: int,
    max_draft: int,
) -> None:
    """One chunk of a request's prompt; the last one gives its first token, and guesses."""
    lease, done = request.lease, request.lease.num_tokens
    work = request.tokens[done : lease.chunk_end(done, done + chunk)]
    with_room(cache, partial(_prefill_now, adapter, cache, request, proposer, work, max_draft))


def verify(
    adapter: Adapter,
    cache: "Cache",
    requests: Sequence[Request],
    proposer: Proposer,
    *,
    max_draft: int,
    graph: DecodeGraph | None = None,
) -> None:
    """One step of requests that have one token to be fed: verify their guesses, take on what was
    right, and guess again.

    ``max_draft`` is the most guesses that are asked for.  With ``graph`` the step is replayed;
    requests with fewer guesses than it was captured for are filled up with tokens that are not
    expected to be right.  Raises OutOfPages with no request changed.
    """
    fill = 0 if graph is None else graph.queries - 1
    guesses = [r.guesses + [r.tokens[-1]] * (fill - len(r.guesses)) for r in requests]
    work = [(r.lease, [r.tokens[-1], *g]) for r, g in zip(requests, guesses, strict=True)]
    with cache.step(work) as step:
        if graph is not None:
            device = graph.load(step)
            logits = graph.replay(step, device)
        else:
            device = step.to_device()
            logits = adapter.forward(step, all_logits=True, device=device)
        chosen = logits.argmax(-1).tolist()
        taken: list[list[int]] = []
        going_on: list[Continuation] = []
        for row, request in enumerate(requests):
            begin, end = step.cu_seqlens_q[row : row + 2].tolist()
            taken.append(_right(request, guesses[row], chosen[begin:end]))
            step.accept(request.lease, len(taken[row]))
            tokens = [*request.tokens, *taken[row]]
            count = min(max_draft, request.stop - len(tokens) - 1)
            going_on.append(Continuation(row, tokens, 0 if tokens[-1] in request.ends else count))
        found = proposer.propose(step, device, going_on)
    for request, fed, new, wanted, then in zip(
        requests, guesses, taken, going_on, found, strict=True
    ):
        request.tokens += new
        request.guesses = then[: max(0, wanted.count)]
        request.rounds += 1
        request.proposed += len(fed)
        request.accepted += len(new) - 1


def _right(request: Request, guesses: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """What the model chose as far as the guesses were right, and one token more.

    Ends with the request: nothing behind its end counts as right.
    """
    taken = [chosen[0]]
    for guess, then in zip(guesses, chosen[1:], strict=True):
        full = len(request.tokens) + len(taken) >= request.stop
        if full or taken[-1] in request.ends or guess != taken[-1]:
            break
        taken.append(then)
    return taken


def _prefill_now(
    adapter: Adapter,
    cache: "Cache",
    request: Request,
    proposer: Proposer,
    work: Sequence[int],
    max_draft: int,
) -> None:
    with cache.step([(request.lease, work)]) as step:
        device = step.to_device()
        logits = adapter.forward(step, device=device)
        if request.lease.num_tokens + len(work) < len(request.tokens):
            return
        tokens = [*request.tokens, int(logits[0].argmax())]
        count = min(max_draft, request.stop - len(tokens) - 1)
        guesses = proposer.propose(step, device, [Continuation(0, tokens, count)])[0]
    request.tokens, request.guesses = tokens, guesses[: max(0, count)]
