"""Compressors: the same entries however a sequence is cut, and rows that must not be read (E2)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.kernels import PagedBatch, closed_entries, compress
from tests.unit.v4_cases import batch_of

NAN = torch.nan
CHUNKS = [1, 2, 3, 4, 5, 7, 127, 128, 129, 255, 256, 257, 300]
POINTS = [
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    127,
    128,
    129,
    255,
    256,
    257,
    258,
    259,
    300,
    383,
    384,
    511,
    512,
]


@dataclass(frozen=True)
class Kind:
    """A compressor as a layer has it."""

    ratio: int
    parts: int
    dim: int

    @property
    def ring(self) -> int:
        return self.ratio * self.parts

    def tokens(self, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        width = self.parts * self.dim
        return torch.randn(n, width), 3 * torch.randn(n, width)

    def states(self, slots: int, ring: int | None = None) -> list[Tensor]:
        rows = slots * (ring or self.ring)
        return [torch.full((rows, 2 * self.dim), NAN) for _ in range(self.parts)]

    def live(self, part: int, position: int) -> range:
        """Positions whose rows a sequence of this length still needs (spec 2.5)."""
        start = self.ratio * (position // self.ratio)
        if self.parts == 2 and part == 0:
            start = max(0, start - self.ratio)
        return range(start, position)


KINDS = {
    "c4": Kind(4, 2, 64),
    "c128": Kind(128, 1, 64),
    "c4-whole": Kind(4, 2, 512),
    "index-whole": Kind(4, 2, 128),
    "c128-whole": Kind(128, 1, 512),
    "small": Kind(16, 1, 8),
    "odd": Kind(3, 2, 5),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
real = pytest.mark.parametrize("kind", [KINDS["c4"], KINDS["c128"]], ids=["c4", "c128"])


def dense(kind: Kind, kv: Tensor, score: Tensor) -> Tensor:
    """Every entry of a whole sequence, one channel's softmax at a time, in float64."""
    k, s, d = kv.double().numpy(), score.double().numpy(), kind.dim
    entries = []
    for j in range(len(k) // kind.ratio):
        mine = slice(j * kind.ratio, (j + 1) * kind.ratio)
        values, scores = k[mine, -d:], s[mine, -d:]
        if kind.parts == 2 and j:
            before = slice((j - 1) * kind.ratio, j * kind.ratio)
            values = np.concatenate((k[before, :d], values))
            scores = np.concatenate((s[before, :d], scores))
        weights = np.exp(scores - scores.max(0))
        entries.append((values * weights).sum(0) / weights.sum(0))
    return torch.from_numpy(np.array(entries).reshape(-1, d))


def feed(
    kind: Kind,
    kv: Tensor,
    score: Tensor,
    cuts: Sequence[int],
    states: list[Tensor],
    *,
    start: int = 0,
    slot: int = 0,
    ring: int | None = None,
) -> list[Tensor]:
    """Entries of each call, tokens ``start``... fed in the given pieces."""
    out = []
    for count in cuts:
        stop = start + count
        closed = compress(
            kv[start:stop],
            score[start:stop],
            states,
            batch_of([(count, stop)]),
            torch.tensor([slot], dtype=torch.int32),
            ratio=kind.ratio,
            ring=ring or kind.ring,
        )
        expected = range(start // kind.ratio, stop // kind.ratio)
        assert closed.entries.tolist() == list(expected)
        assert closed.tokens.tolist() == [kind.ratio * (j + 1) - 1 - start for j in expected]
        out.append(closed.values)
        start = stop
    return out


def whole(kind: Kind, kv: Tensor, score: Tensor) -> Tensor:
    return torch.cat(feed(kind, kv, score, [len(kv)], kind.states(1)))


def cut(n: int, size: int) -> list[int]:
    return [size] * (n // size) + [n % size] * (n % size > 0)


class TestEntries:
    @kinds
    def test_one_call_is_the_formula(self, kind: Kind) -> None:
        kv, score = kind.tokens(520)
        got, expected = whole(kind, kv, score), dense(kind, kv, score)
        assert got.shape == expected.shape
        assert (got.double() - expected).abs().max() < 1e-6

    @kinds
    def test_float64_is_exact_arithmetic(self, kind: Kind) -> None:
        kv, score = (t.double() for t in kind.tokens(260))
        states = [s.double() for s in kind.states(1)]
        (got,) = feed(kind, kv, score, [260], states)
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, dense(kind, kv, score), rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("size", CHUNKS)
    @real
    def test_any_chunk_size_gives_the_same_bits(self, kind: Kind, size: int) -> None:
        kv, score = kind.tokens(600)
        parts = feed(kind, kv, score, cut(600, size), kind.states(1))
        assert torch.equal(torch.cat(parts), whole(kind, kv, score))

    @pytest.mark.parametrize("seed", range(6))
    @kinds
    def test_any_cuts_give_the_same_bits(self, kind: Kind, seed: int) -> None:
        kv, score = kind.tokens(400, seed)
        rng = np.random.default_rng(seed)
        cuts: list[int] = []
        while sum(cuts) < 400:
            cuts.append(min(int(rng.integers(1, 1 << rng.integers(1, 9))), 400 - sum(cuts)))
        parts = feed(kind, kv, score, cuts, kind.states(1))
        assert torch.equal(torch.cat(parts), whole(kind, kv, score))

    @kinds
    def test_the_number_of_entries_pooled_at_a_time_changes_nothing(
        self, kind: Kind, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv, score = kind.tokens(300)
        expected = whole(kind, kv, score)
        monkeypatch.setattr(sys.modules["kvtier.kernels.compress"], "ENTRY_BLOCK_VALUES", 1)
        assert torch.equal(whole(kind, kv, score), expected)

    def test_scores_of_any_size(self) -> None:
        kind = KINDS["c4"]
        kv, score = kind.tokens(40)
        got = whole(kind, kv, 1e4 * score)
        assert got.isfinite().all()
        assert (got - dense(kind, kv, 1e4 * score)).abs().max() < 1e-5

    def test_tokens_in_bfloat16_are_widened(self) -> None:
        kind = KINDS["index-whole"]
        kv, score = (t.bfloat16() for t in kind.tokens(9))
        states = kind.states(1)
        (got,) = feed(kind, kv, score, [9], states)
        assert got.dtype == torch.float32
        assert torch.equal(got, whole(kind, kv.float(), score.float()))


class TestMixedBatches:
    @pytest.mark.parametrize("seed", range(4))
    @kinds
    def test_sequences_at_different_points(self, kind: Kind, seed: int) -> None:
        """Decode, prefill and padding rows in one call, state slots scattered."""
        rng = np.random.default_rng(seed)
        lengths = [int(n) for n in rng.integers(1, 420, size=5)]
        streams = [kind.tokens(n, 10 * seed + i) for i, n in enumerate(lengths)]
        slots = [int(s) for s in rng.permutation(8)[: len(lengths)]]
        states = kind.states(8)
        done = [0] * len(lengths)
        got: list[list[Tensor]] = [[] for _ in lengths]
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            rows, kvs, scores, batch, used = [], [], [], [], []
            for i in rng.permutation(len(lengths)):
                left = lengths[i] - done[i]
                if not left or rng.random() < 0.3:
                    if rng.random() < 0.5:  # a padding row
                        rows.append(-1)
                        kvs.append(torch.full((1, kind.parts * kind.dim), NAN))
                        scores.append(kvs[-1])
                        batch.append((1, 0))
                        used.append(-1)
                    continue
                count = min(left, int(rng.integers(1, 1 << rng.integers(1, 9))))
                mine = slice(done[i], done[i] + count)
                rows.append(int(i))
                kvs.append(streams[i][0][mine])
                scores.append(streams[i][1][mine])
                batch.append((count, done[i] + count))
                used.append(slots[i])
                done[i] += count
            if not rows:
                continue
            closed = compress(
                torch.cat(kvs),
                torch.cat(scores),
                states,
                batch_of(batch),
                torch.tensor(used, dtype=torch.int32),
                ratio=kind.ratio,
                ring=kind.ring,
            )
            owner = np.repeat(np.arange(len(rows)), [q for q, _ in batch])[closed.tokens.numpy()]
            for row, stream in enumerate(rows):
                if stream >= 0:
                    got[stream].append(closed.values[torch.from_numpy(owner == row)])
                else:
                    assert not (owner == row).any()
        for (kv, score), parts in zip(streams, got, strict=True):
            assert torch.equal(torch.cat(parts), whole(kind, kv, score))
        untouched = sorted(set(range(8)) - set(slots))
        for state in states:
            assert state.view(8, kind.ring, -1)[untouched].isnan().all()

    def test_nothing_but_padding(self) -> None:
        kind = KINDS["c4"]
        states = kind.states(2)
        row = torch.full((3, 2 * kind.dim), NAN)
        closed = compress(
            row, row, states, batch_of([(1, 0)] * 3), torch.tensor([-1] * 3), ratio=4, ring=8
        )
        assert closed.values.shape == (0, kind.dim)
        assert closed.tokens.numel() == closed.entries.numel() == 0
        assert all(s.isnan().all() for s in states)

    def test_an_empty_batch(self) -> None:
        kind = KINDS["c128"]
        none = torch.empty(0, kind.dim)
        closed = compress(
            none, none, kind.states(1), batch_of([]), torch.empty(0), ratio=128, ring=128
        )
        assert closed.values.shape == (0, kind.dim)


class TestResume:
    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("ring", [1, 2], ids=["tight", "double"])
    @real
    def test_from_the_rows_of_that_point_alone(self, kind: Kind, ring: int, point: int) -> None:
        """Another state slot, another ring size, everything else poisoned: the same bits."""
        kv, score = kind.tokens(point + 300)
        live = kind.states(1)
        feed(kind, kv, score, cut(point, 37), live)
        resumed = kind.states(3, ring * kind.ring)
        for part in range(kind.parts):
            for p in kind.live(part, point):
                row = live[part][p % kind.ring]
                resumed[part][2 * ring * kind.ring + p % (ring * kind.ring)] = row
        rest = feed(
            kind, kv, score, [1, 2, 3, 294], resumed, start=point, slot=2, ring=ring * kind.ring
        )
        closed = point // kind.ratio
        assert torch.equal(torch.cat(rest), whole(kind, kv, score)[closed:])

    @real
    def test_every_row_said_to_be_needed_is(self, kind: Kind) -> None:
        for point in (300, 257, 511, 256):
            kv, score = kind.tokens(point + 128)
            live = kind.states(1)
            feed(kind, kv, score, [point], live)
            for part in range(kind.parts):
                for p in list(kind.live(part, point))[:3]:
                    broken = [s.clone() for s in live]
                    broken[part][p % kind.ring] = NAN
                    rest = feed(kind, kv, score, [128], broken, start=point)
                    assert torch.cat(rest).isnan().any(), (point, part, p)

    @real
    def test_what_a_former_owner_left_is_never_seen(self, kind: Kind) -> None:
        kv, score = kind.tokens(300)
        states = kind.states(2)
        other = kind.tokens(777, seed=9)
        feed(kind, *other, [777], states, slot=1)
        assert torch.equal(
            torch.cat(feed(kind, kv, score, cut(300, 13), states, slot=1)), whole(kind, kv, score)
        )

    @real
    def test_only_the_last_rows_are_written(self, kind: Kind) -> None:
        ring = 2 * kind.ring
        kv, score = kind.tokens(700)
        states = kind.states(3, ring)
        feed(kind, kv, score, [700], states, slot=1, ring=ring)
        for part, state in enumerate(states):
            rows = state.view(3, ring, -1)
            assert rows[[0, 2]].isnan().all()
            columns = slice(part * kind.dim, (part + 1) * kind.dim)
            for p in range(700 - ring, 700):
                assert torch.equal(rows[1, p % ring, : kind.dim], kv[p, columns])
                assert torch.equal(rows[1, p % ring, kind.dim :], score[p, columns])


class TestRejection:
    @pytest.mark.parametrize("drafts", [0, 1, 3, 8])
    @real
    def test_rejected_tokens_were_never_there(self, kind: Kind, drafts: int) -> None:
        """Feed a token and its drafts, keep 0 .. all of them, go on with others."""
        ring = 1 << (kind.ring + drafts - 1).bit_length()
        total = 2 * kind.ratio + 150
        kv, score = kind.tokens(total)
        bad_kv, bad_score = kind.tokens(total + drafts + 1, seed=4)
        expected = whole(kind, kv, score)
        rng = np.random.default_rng(drafts)
        states = kind.states(1, ring)
        start, got = 0, []
        if kind.ratio == 128:  # straight to where groups close
            got += feed(kind, kv, score, [100], states, ring=ring)
            start = 100
        while start < total:
            kept = min(int(rng.integers(0, drafts + 2)), total - start)
            step = slice(start, start + kept)
            mixed_kv, mixed_score = bad_kv.clone(), bad_score.clone()
            mixed_kv[step], mixed_score[step] = kv[step], score[step]
            (values,) = feed(
                kind, mixed_kv, mixed_score, [drafts + 1], states, start=start, ring=ring
            )
            closed = (start + kept) // kind.ratio - start // kind.ratio
            got.append(values[:closed])
            start += kept
        assert torch.equal(torch.cat(got), expected)

    @real
    def test_the_same_tokens_again_change_nothing(self, kind: Kind) -> None:
        ring = 2 * kind.ring
        kv, score = kind.tokens(400)
        states = kind.states(1, ring)
        feed(kind, kv, score, [300], states, ring=ring)
        once = feed(kind, kv, score, [9], states, start=300, ring=ring)
        after = [s.clone() for s in states]
        again = feed(kind, kv, score, [9], states, start=300, ring=ring)
        assert torch.equal(once[0], again[0])
        assert all(torch.equal(a, b) for a, b in zip(after, states, strict=True))

    @real
    def test_a_long_chunk_with_a_rejected_end(self, kind: Kind) -> None:
        ring, drafts = 2 * kind.ring, 7
        kv, score = kind.tokens(700)
        expected = whole(kind, kv, score)
        states = kind.states(1, ring)
        bad_kv, bad_score = kv.clone(), score.clone()
        bad_kv[511:], bad_score[511:] = kind.tokens(189, seed=5)
        first = feed(kind, bad_kv, bad_score, [511 + drafts], states, ring=ring)[0]
        rest = feed(kind, kv, score, [2, 187], states, start=511, ring=ring)
        kept = first[: 511 // kind.ratio]
        assert torch.equal(torch.cat((kept, *rest)), expected)


class TestCaptures:
    @pytest.mark.parametrize("context", [0, 1, 250, 252, 253, 254, 255, 256, 300])
    @pytest.mark.parametrize("slots", [(4, 0), (4, 4)], ids=["minimal", "seed"])
    def test_rows_before_each_page_end(self, context: int, slots: tuple[int, int]) -> None:
        kind = KINDS["c4"]
        stop = 800
        kv, score = kind.tokens(stop)
        states = kind.states(3)
        feed(kind, kv, score, [context] if context else [], states, slot=1)
        ends = [p for p in (256, 512, 768, 800) if p > context]
        other = kind.tokens(5, seed=2)
        closed = compress(
            torch.cat((other[0], kv[context:])),
            torch.cat((other[1], score[context:])),
            states,
            batch_of([(5, 5), (stop - context, stop)]),
            torch.tensor([0, 1]),
            ratio=4,
            ring=8,
            captures=[(1, p) for p in ends],
            capture_slots=slots,
        )
        for part, count in enumerate(slots):
            columns = slice(kind.dim * part, kind.dim * (part + 1))
            assert closed.captured[part].shape == (len(ends), count, 2 * kind.dim)
            for i, end in enumerate(ends):
                rows = slice(end - count, end)
                expected = torch.cat((kv[rows, columns], score[rows, columns]), 1)
                assert torch.equal(closed.captured[part][i], expected)

    def test_a_checkpoint_at_a_page_end_is_enough(self) -> None:
        """The four captured rows, put anywhere a ring wants them, continue bit for bit."""
        kind = KINDS["c4"]
        kv, score = kind.tokens(700)
        closed = compress(
            *(kv[:600], score[:600], kind.states(1), batch_of([(600, 600)]), torch.tensor([0])),
            ratio=4,
            ring=8,
            captures=[(0, 256), (0, 512)],
            capture_slots=(4, 0),
        )
        for i, end in enumerate((256, 512)):
            states = kind.states(1, 16)
            states[0][[p % 16 for p in range(end - 4, end)]] = closed.captured[0][i]
            rest = feed(kind, kv, score, [700 - end], states, start=end, ring=16)
            assert torch.equal(torch.cat(rest), whole(kind, kv, score)[end // 4 :])

    def test_nothing_of_a_state_that_is_empty_at_a_page_end(self) -> None:
        kind = KINDS["c128"]
        kv, score = kind.tokens(300)
        closed = compress(
            *(kv, score, kind.states(1), batch_of([(300, 300)]), torch.tensor([0])),
            ratio=128,
            ring=128,
            captures=[(0, 256)],
            capture_slots=(0,),
        )
        assert closed.captured[0].shape == (1, 0, 2 * kind.dim)


@pytest.mark.parametrize("ratio", [4, 128])
def test_numbers_of_closed_entries(ratio: int) -> None:
    positions = torch.arange(1100)
    got = closed_entries(positions, ratio).tolist()
    for t in range(1100):
        assert got[t] == sum(1 for j in range(300) if ratio * j + ratio - 1 <= t)


class TestMisuse:
    def call(self, **change: object) -> None:
        kind = KINDS["c4-whole"]
        arguments: dict[str, object] = {
            "kv": torch.zeros(5, 1024),
            "score": torch.zeros(5, 1024),
            "states": kind.states(2),
            "batch": batch_of([(5, 5)]),
            "state_slots": torch.tensor([0]),
            "ratio": 4,
            "ring": 8,
        }
        compress(**(arguments | change))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "change",
        [
            {"kv": torch.zeros(5, 1022)},
            {"score": torch.zeros(4, 1024)},
            {"states": [torch.zeros(16, 1024)]},
            {"states": [torch.zeros(16, 1024), torch.zeros(16, 512)]},
            {"state_slots": torch.tensor([0, 1])},
            {"state_slots": torch.tensor([-1])},
            {"state_slots": torch.tensor([2])},
            {"ring": 7},
            {"ring": 12},
            {"ratio": 128},
        ],
        ids=lambda c: str(next(iter(c))),
    )
    def test_shapes_that_do_not_fit_are_refused(self, change: dict[str, object]) -> None:
        self.call()
        with pytest.raises(ValueError):
            self.call(**change)

    def test_a_batch_of_other_tokens_is_refused(self) -> None:
        batch: PagedBatch = batch_of([(4, 4)])
        with pytest.raises(ValueError, match="5 tokens"):
            self.call(batch=batch)
