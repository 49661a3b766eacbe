"""The bookkeeping of drafts over thousands of random rounds: lengths on the host, on the device and
in the draft agree, and what is carried is always the last committed token's.

The model is not run: hidden states are a code of position and tokens, so that any that is not the
right one shows.  Steps, pages and the ledger are the real ones.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier import Cache, LeaseState
from kvtier.layouts import Layout, mla
from kvtier_deepseek.drafts.ledger import Ledger
from kvtier_deepseek.fields import DRAFT_STATE
from tests.adapter import drafts_kit as kit
from tests.adapter.models import random_tokens
from tests.shell.v4_kit import sized

PAGE, VALUES, MAX_DRAFT = 8, 3, 4


def small_layout() -> Layout:
    return mla(
        layers=1,
        latent_dim=6,
        rope_dim=2,
        dtype="float32",
        page_tokens=PAGE,
        draft_layers=1,
        max_draft=MAX_DRAFT,
        draft_state_values=VALUES,
        draft_state_dtype="float32",
    )


def code(tokens: list[int], position: int) -> list[float]:
    """What stands for the model's hidden state of a position."""
    before = sum((i + 1) * t for i, t in enumerate(tokens[: position + 1])) % 65521
    return [float(position), float(before), float(tokens[position])]


class Rounds:
    """A few requests of a tree of texts, taken forward at random."""

    def __init__(self, cache: Cache, seed: int) -> None:
        self.cache, self.rng = cache, random.Random(seed)
        self.ledger = Ledger(
            page_tokens=PAGE, layer=1, values=VALUES, keep=MAX_DRAFT + 2, carries=True, reach=None
        )
        self.leases: list[Any] = []
        self.texts: dict[Any, list[int]] = {}
        pool: Any = cache._pool
        self.drafted: Tensor = pool.rows("latent", 1)
        self.hits = self.lost = self.whole = 0
        self.accepted: dict[int, int] = {}

    def open(self) -> None:
        prompt = [self.rng.randint(2, 4) for _ in range(self.rng.randint(1, 40))]
        if self.texts and self.rng.random() < 0.7:  # goes on from what another one said
            other = self.texts[self.rng.choice(self.leases)] if self.leases else []
            prompt = [*other[: self.rng.randint(0, len(other))], *prompt]
        lease = self.cache.lease(prompt)
        self.hits += lease.ready.result() > 0
        self.leases.append(lease)
        self.texts[lease] = prompt

    def close(self, lease: Any) -> None:
        self.leases.remove(lease)
        del self.texts[lease]
        lease.release()

    def step(self) -> None:
        work, right = [], []
        for lease in self.rng.sample(self.leases, self.rng.randint(1, len(self.leases))):
            text, done = self.texts[lease], lease.num_tokens
            if done < len(text):
                fed = text[done : done + self.rng.randint(1, 12)]
                right.append(len(fed))
            else:
                fed = [self.rng.randint(2, 4) for _ in range(self.rng.randint(1, MAX_DRAFT + 1))]
                right.append(self.rng.randint(0, len(fed)))
            work.append((lease, fed))
        with self.cache.step(work) as step:
            device = step.to_device()
            hidden = []
            for lease, fed in work:
                tokens = [*self.texts[lease][: lease.num_tokens], *fed]
                hidden += [code(tokens, p) for p in range(lease.num_tokens, len(tokens))]
            stands = self.ledger.begin(step, device, torch.empty(0))
            for (lease, _), stand in zip(work, stands, strict=True):
                self.check(lease, stand)
            self.write(step, hidden, stands)
            self.ledger.end(step, device, torch.tensor(hidden), stands)
            assert device.context_lens.tolist() == [lease.num_tokens for lease, _ in work]
            assert device.kv_lens.tolist() == [lease.num_tokens + len(f) for lease, f in work]
            for (lease, fed), n in zip(work, right, strict=True):
                if lease.num_tokens == len(self.texts[lease]):
                    self.texts[lease] += fed[:n]
                    self.accepted[n] = self.accepted.get(n, 0) + 1
                step.accept(lease, n)
            for row, ((lease, fed), n) in enumerate(zip(work, right, strict=True)):
                after = self.ledger.stand(step, device, row, int(step.context_lens[row]) + n)
                tokens = self.texts[lease]
                assert after.length == int(step.context_lens[row]) + n
                if after.length and after.carry is not None:
                    assert after.carry.tolist() == code(tokens, after.length - 1)
                assert self.ledger.stop(lease) == int(step.context_lens[row]) + len(fed)
        for lease, _ in work:
            core = self.cache._core
            assert int(core.lengths[lease._record.row]) == lease.num_tokens
            assert lease.tokens().tolist() == self.texts[lease][: lease.num_tokens]
            self.check_pages(lease)

    def check(self, lease: Any, stand: Any) -> None:
        """Before a step: nothing is taken for there that is not, nothing carried that is wrong."""
        tokens = self.texts[lease]
        assert stand.length == lease.num_tokens
        if stand.carry is not None and stand.length:
            assert stand.carry.tolist() == code(tokens, stand.length - 1)
        self.whole += stand.gapless == 0
        if stand.gapless < stand.length:
            slots = lease.slot_mapping(stand.gapless, stand.length)["latent"]
            held = self.drafted[torch.from_numpy(slots.astype("int64")), :VALUES]
            positions = range(stand.gapless, stand.length)
            assert held.tolist() == [code(tokens, p) for p in positions]

    def write(self, step: Any, hidden: list[list[float]], stands: list[Any]) -> None:
        """A draft row holds the code of its own position, or nothing where it cannot be made."""
        slots = torch.from_numpy(step.slot_mapping["latent"].astype("int64"))
        self.drafted[slots] = 0.0
        self.drafted[slots, :VALUES] = torch.tensor(hidden)
        for begin, stand in zip(step.cu_seqlens_q[:-1].tolist(), stands, strict=True):
            if stand.carry is None:
                self.drafted[slots[begin]] = 0.0
                self.lost += 1

    def check_pages(self, lease: Any) -> None:
        """Whole pages say what their last token's state is."""
        pool: Any = self.cache._pool
        rows: Tensor = pool.rows(DRAFT_STATE, 1)
        for number in range(lease.num_tokens // PAGE):
            page = int(lease.block_table()[number])
            assert rows[page, :VALUES].tolist() == code(self.texts[lease], (number + 1) * PAGE - 1)
            mark = int(rows.view(torch.int32)[page, -1])
            assert 0 <= mark <= PAGE

    def change(self) -> None:
        """Anything that may happen to a lease between steps."""
        lease = self.rng.choice(self.leases)
        what = self.rng.random()
        if what < 0.3:
            self.close(lease)
        elif what < 0.5 and lease.num_tokens:
            n = lease.truncate(self.rng.randint(0, lease.num_tokens))
            self.texts[lease] = self.texts[lease][:n]
        elif what < 0.7:
            lease.pause().result()
            lease.resume().result()
            assert lease.state is LeaseState.ACTIVE
        else:
            other = lease.fork()
            other.ready.result()
            if what < 0.9:
                self.ledger.fork(lease, other)
            self.leases.append(other)
            self.texts[other] = self.texts[lease][: other.num_tokens]


def many_rounds(rounds: int, seed: int) -> Rounds:
    layout = small_layout()
    config = sized(layout, gpu=150, cpu=60, max_leases=6)
    with Cache(layout, config, model="rounds", device="cpu") as cache:
        pool: Any = cache._pool
        pool.poison_all()
        world = Rounds(cache, seed)
        for number in range(rounds):
            if len(world.leases) < 2 or (len(world.leases) < 5 and world.rng.random() < 0.1):
                world.open()
            if len(world.leases) < 5 and world.rng.random() < 0.1:
                world.change()
            if not world.leases:
                continue
            world.step()
            for lease in list(world.leases):
                if len(world.texts[lease]) > 120:
                    world.close(lease)
            if number % 500 == 0:
                cache.check()
        for lease in list(world.leases):
            world.close(lease)
        cache.check()
    return world


def test_speculative_lengths_agree_after_random_rounds() -> None:
    """AT-6.8, AT-6.9: with forks, cuts, pauses and hits in between."""
    world = many_rounds(1000, seed=1)
    assert world.hits > 10
    assert world.lost > 5
    assert world.whole > 500
    assert set(world.accepted) == set(range(MAX_DRAFT + 2))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_speculative_lengths_agree_after_ten_thousand_random_rounds() -> None:
    world = many_rounds(10_000, seed=2)
    assert world.hits > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_speculative_predictor_agrees_after_ten_thousand_random_rounds() -> None:
    """The real predictor on a tiny model: what it has taken in is what the lease has, and it always
    guesses."""
    rng = random.Random(3)
    with kit.session("v3", "mtp", gpu=60) as (cache, adapter):
        draft = adapter.draft
        assert draft is not None
        lease, tokens = cache.lease([]), random_tokens(5)
        for _ in range(10_000):
            if lease.num_tokens > 300:
                lease.release()
                cut = rng.randint(0, 40)
                tokens = [*tokens[:cut], rng.randint(2, 96)]
                lease = cache.lease(tokens)
                lease.ready.result()
            fed = [
                *tokens[lease.num_tokens :],
                *[rng.randint(2, 96) for _ in range(rng.randint(0, 4))],
            ]
            certain = len(tokens) - lease.num_tokens
            n = rng.randint(certain, len(fed))
            with cache.step([(lease, fed)]) as step:
                device = step.to_device()
                adapter.forward(step, device=device)
                tokens = [*tokens, *fed[certain:n], rng.randint(2, 96)]
                step.accept(lease, n)
                row = kit.Continuation(0, tokens, 2)
                assert len(draft.propose(step, device, [row])[0]) == 2
                assert draft.carried(lease) == int(device.kv_lens[0])
                assert row.length == int(device.context_lens[0]) + n
            assert lease.num_tokens == len(tokens) - 1 <= (draft.carried(lease) or 0)
            assert draft.rows_from(lease) == 0
        lease.release()
        cache.check()
