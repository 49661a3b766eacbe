"""F6: rejected tokens on the real ``Cache`` and its data plane on the CPU, in every kind of layout.

Rows are a function of the tokens up to their own (``ByteModel``).  After every step all that lies
past a lease's committed tokens, and all of its rings that the next token does not read, is 0xFF,
a NaN in every format: whatever is derived from a rejected token is seen.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import kvtier
from kvtier import Step, Tier
from kvtier.core.leases import LeaseRecord
from kvtier.errors import LeaseError
from kvtier.layouts import Component, Layout, Share, drafts_from, mla, swa_c4_c128
from tests.shell.v4_kit import ByteModel, Bytes, Positions, open_lease, prompt, sized

torch.set_num_threads(1)

GPU, CPU, DISK = Tier.GPU, Tier.CPU, Tier.DISK
DRAFTS = 7
FEW = {"draft_layers": 1, "max_draft": DRAFTS, "draft_state_values": 6}
MLA = {"layers": 2, "latent_dim": 8, "rope_dim": 4, "dtype": "float32", "page_tokens": 16, **FEW}
WINDOWED = {"window_layers": (0,), "window": 9, "window_record": "dense"}


def dense() -> Layout:
    return mla(**MLA)  # type: ignore[arg-type]


def windowed() -> Layout:
    """Windows in the first layer, and none of the draft's."""
    return mla(**MLA, **WINDOWED)  # type: ignore[arg-type]


def compressed() -> Layout:
    return swa_c4_c128(
        layer_ratios=(4, 128),
        record="fp32",
        index_record="fp32",
        **FEW,  # type: ignore[arg-type]
    )


def packed() -> Layout:
    return swa_c4_c128(layer_ratios=(4, 128), tail="seed", **FEW)  # type: ignore[arg-type]


SHORT = [1, 2, 7, 8, 9, 10, 14, 15, 16, 17, 31, 32, 33]
"""Pages of 16 and windows of 9 tokens, in pages of 8."""
LONG = [3, *range(125, 131), 254, 255, 256, 257, 383, 511, 512]
"""Pages of 256, windows of 128, groups of 4 and 128."""
KINDS = [
    pytest.param(dense, SHORT, id="dense"),
    pytest.param(windowed, SHORT, id="windowed"),
    pytest.param(packed, LONG, id="packed"),
]
LAYOUTS = [pytest.param(make, id=make.__name__) for make in (dense, windowed, compressed, packed)]


class SpecModel(ByteModel):
    """A model that also writes what will be rejected, and trusts nothing of it."""

    def needed(self, c: Component, length: int) -> Positions:
        if c.window is not None:
            return np.arange(max(0, length - c.window + 1), length)
        return super().needed(c, length)

    def poison(self) -> None:
        super().poison()
        self.poison_all_rejected()

    def poison_all_rejected(self) -> None:
        for record in self.cache._core.leases.values():
            if record.state is kvtier.LeaseState.ACTIVE:
                self.poison_rejected(record)

    def poison_rejected(self, record: LeaseRecord) -> None:
        """Slots of tokens past the committed ones, and ring rows that nobody reads any more."""
        core, length = self.cache._core, record.length
        at = np.arange(length, min(record.capacity, length + DRAFTS + 2), dtype=np.int32)
        pages = core.block_tables[record.row][at // self.layout.page_tokens]
        owned = np.array(record.owned, dtype=bool)
        assert owned[at // self.layout.page_tokens].all(), "a shared page would be written"
        windows = None
        if self.layout.windows:
            size = self.layout.windows[0].slots_per_page
            table = np.append(core.window_tables[record.row], -1)
            windows = table[np.minimum(at // size, len(table) - 1)]
        slots = self.layout.slots(at, pages, windows)
        for c in self.layout.components:
            if c.name in slots:
                mine = slots[c.name][slots[c.name] >= 0]
            else:
                unread = np.ones(c.slots_per_page, dtype=bool)
                unread[self.needed(c, length) % c.slots_per_page] = False
                mine = record.state_slot * c.slots_per_page + np.flatnonzero(unread)
            for layer in c.layers:
                poison = np.full((len(mine), c.slot_bytes), 0xFF, np.uint8)
                self.put(self.pool.rows(c.name, layer), c, mine.astype(np.int32), poison)

    def draft(self, lease: kvtier.Lease, count: int) -> None:
        """A pass of the draft layers alone: rows of what the target has not seen yet, made of a
        draft's own hidden states and so never right."""
        guesses = [77_000_000 + i for i in range(count)]
        with self.cache.step([(lease, guesses)]) as step:
            device = step.to_device()
            for c in self.layout.components:
                for layer in c.layers[-1:] if c.name in ("latent", "swa") else ():
                    slots = step.slot_mapping[c.name]
                    rows = np.full((len(slots), c.slot_bytes), 0xEE, np.uint8)
                    self.put(device.layer(layer).rows(c.name), c, slots, rows)
            step.accept(lease, 0)
        self.poison_all_rejected()

    def verify(self, lease: kvtier.Lease, tokens: Sequence[int], rejected: int) -> None:
        """One round; of what is free nothing changes."""
        self.feed(lease, tokens, rejected=rejected, poison=False)
        self.poison_all_rejected()


@contextmanager
def served(layout: Layout, disk: Path | None = None, **options: Any) -> Iterator[SpecModel]:
    """A cache whose whole device and host memory is 0xFF, and the model on it."""
    if disk is not None:
        options |= {"disk_path": disk, "disk_bytes": "256MiB"}
    cache = kvtier.Cache(layout, sized(layout, **options), model="bytes", device="cpu")
    model = SpecModel(cache)
    model.pool.poison_all()
    model.host.poison(range(model.host.num_frames))
    try:
        yield model
        cache.check()
        assert not cache.leases(), "the test left leases open"
    finally:
        cache.close()


def tables(lease: kvtier.Lease) -> tuple[list[int], dict[int, int]]:
    tail = lease._record.tail
    return lease.block_table().tolist(), dict(tail.windows) if tail is not None else {}


def free(model: SpecModel) -> tuple[int, ...]:
    """Of everything a lease may hold on the device, how much is free."""
    core = model.cache._core
    pools = (
        *(core.residency.pools[slot] for slot in (0, 3)),
        core.tails.states,
        core.tails.windows,
    )
    return tuple(pool.free for pool in pools)


def found(model: SpecModel, tokens: Sequence[int]) -> int:
    return model.cache.match([*tokens, 1]).history_tokens


# --------------------------------------------------------------------------- every pattern


@pytest.mark.parametrize(("make", "starts"), KINDS)
@pytest.mark.parametrize("drafts", [1, 3, 4, 7])
def test_speculative_acceptance_at_every_edge(
    make: Callable[[], Layout], starts: list[int], drafts: int
) -> None:
    """AT-6.1, 6.4: none, all and each number of drafts accepted, from every edge on, beside the
    lease it was forked from; then three more tokens and a rest."""
    tokens = prompt(starts[-1] + 40)
    with served(make(), gpu=16, max_leases=4) as model, open_lease(model, tokens) as base:
        for start in starts:
            if base.num_tokens < start:
                model.verify(base, tokens[base.num_tokens : start], rejected=0)
            for kept in range(drafts + 2):
                with base.fork() as lease:
                    if kept % 2:
                        model.draft(lease, drafts)
                    new = tokens[start : start + kept]
                    model.verify(lease, new, rejected=drafts + 1 - kept)
                    model.check(lease)
                    at = lease.num_tokens
                    model.verify(lease, tokens[at : at + 1], rejected=drafts)
                    model.verify(lease, tokens[at + 1 : start + drafts + 6], rejected=0)
                    model.check(lease)
            model.check(base)


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_rewriting_gives_the_same_bytes(make: Callable[[], Layout]) -> None:
    """AT-6.2: written twice, with other tokens and then the right ones: the same rows, the same
    pages, nothing counted twice."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(3 * page)
    with served(layout) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[: 2 * page - 4])  # 508 of 512
        model.feed(lease, [], rejected=5)
        model.feed(lease, tokens[2 * page - 4 : 2 * page + 1])
        model.check(lease)
    with served(layout) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[: page - 1])
        model.feed(lease, [], rejected=4)
        held, refs = tables(lease), dict(model.cache._core.operations.private.refs)
        model.feed(lease, [], rejected=4)
        assert (tables(lease), model.cache._core.operations.private.refs) == (held, refs)
        model.feed(lease, tokens[page - 1 : page], rejected=3)
        model.check(lease)
        model.feed(lease, tokens[page : page + 4])
        assert tables(lease)[0] == held[0]
        model.check(lease)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("make", [compressed, packed])
def test_speculative_groups_closed_by_rejected_tokens(
    make: Callable[[], Layout], ratio: int
) -> None:
    """AT-6.3: the entry is no row of the lease until the right token closes it, then or several
    steps later, and it is written then."""
    name = f"c{ratio}"
    for close, before in ((255, 3), (383, 1), (511, 3)):
        tokens = prompt(close + 9)
        with served(make()) as model, open_lease(model, tokens) as lease:
            model.prefill(lease, tokens[: close - before])
            entries = (close - before) // ratio
            for _ in range(2):
                model.feed(lease, [], rejected=before + 2)
                mapping = lease.slot_mapping(0, lease.num_tokens)[name]
                assert np.count_nonzero(mapping >= 0) == entries
                model.check(lease)
            for at in range(close - before, close):
                model.feed(lease, tokens[at : at + 1], rejected=DRAFTS)
                model.check(lease)
            assert np.count_nonzero(lease.slot_mapping(0, close)[name] >= 0) == entries
            model.feed(lease, tokens[close : close + 1], rejected=DRAFTS)
            mapping = lease.slot_mapping(0, close + 1)[name]
            assert np.count_nonzero(mapping >= 0) == entries + 1 and mapping[-1] >= 0
            model.check(lease)


# --------------------------------------------------------------------------- what others see


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_tokens_are_seen_by_nobody(make: Callable[[], Layout]) -> None:
    """AT-6.7: whatever is asked for while drafts are being verified finds committed pages only."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(2 * page)
    drafts = tokens[page - 2 : page + 6]
    with served(layout) as model, open_lease(model, tokens) as lease:
        assert not list(model.cache.events())
        model.prefill(lease, tokens[: page - 2])
        before = dict(model.cache._pump.moved)
        with model.cache.step([(lease, drafts)]) as step:
            model.write(step)
            assert lease.num_tokens == page - 2 and lease.tokens().tolist() == tokens[: page - 2]
            assert found(model, tokens) == 0
            model.cache.flush(to=CPU).result(timeout=20)
            model.cache.evict(CPU, 99)
            assert not list(model.cache.pages()) and not list(model.cache.events())
            with model.cache.lease(tokens) as other:
                assert other.ready.result(timeout=20) == 0
            for use in (
                lease.pause,
                lease.fork,
                lambda: lease.truncate(1),
                lambda: lease.reserve(1),
            ):
                with pytest.raises(LeaseError, match="step"):
                    use()
            step.accept(lease, 1)
        assert found(model, tokens) == 0 and dict(model.cache._pump.moved) == before
        model.poison()
        model.check(lease)
        with model.cache.step([(lease, drafts[1:])]) as step:
            model.write(step)
            step.accept(lease, 1)
        model.poison()
        assert found(model, tokens) == page, "one token was accepted, and filled a page"
        model.cache.flush(to=CPU).result(timeout=20)
        told = list(model.cache.events())
        assert [(what, tier) for what, _, tier in told] == [("stored", GPU), ("stored", CPU)]
        assert {key for _, key, _ in told} == {info.key for info in model.cache.pages()}
        model.check(lease)
    with served(layout) as model:
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens[: page - 2])
            model.verify(lease, tokens[page - 2 : page], rejected=6)
        model.cache.flush(to=CPU).result(timeout=20)
        model.evict(GPU)
        with open_lease(model, tokens[: page + 1]) as other:
            assert other.num_tokens == page
            model.check(other)


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_steps_that_are_left_leak_nothing(make: Callable[[], Layout]) -> None:
    """AT-6.6, D5: an exception after ``accept``, a release in the step or after it; what was
    accepted and never committed is nothing."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(page + 20)
    with served(layout) as model:
        before = free(model)
        for start in (0, 1, page - 2, page - 1, page, page + 1):
            for how in ("raise", "raise and go on", "release", "release and raise"):
                lease = open_lease(model, tokens, read=False, write=False)
                model.prefill(lease, tokens[:start])
                with pytest.raises(ZeroDivisionError) if "raise" in how else nullcontext():
                    with model.cache.step([(lease, tokens[start : start + DRAFTS + 1])]) as step:
                        model.write(step)
                        step.accept(lease, 3)
                        if "release" in how:
                            lease.release()
                        if "raise" in how:
                            raise ZeroDivisionError
                model.poison_all_rejected()
                if "release" not in how:
                    assert lease.tokens().tolist() == tokens[:start]
                    model.check(lease)
                if how == "raise and go on":
                    model.feed(lease, tokens[start : start + 2], rejected=DRAFTS - 1)
                    model.check(lease)
                    model.prefill(lease, tokens)
                    model.check(lease)
                lease.release()
                assert free(model) == before, (start, how)
                model.cache.check()
        assert not list(model.cache.pages())


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_stop_inside_an_accepted_run(make: Callable[[], Layout]) -> None:
    """AT-6.6: the last word on how many counts, and nothing past it is published."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(page + 20)
    with served(layout) as model:
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens[: page - 3])
            with model.cache.step([(lease, tokens[page - 3 : page + 3])]) as step:
                model.write(step)
                step.accept(lease, 6)
                step.accept(lease, 2)
            model.poison()
            assert lease.num_tokens == page - 1
            model.check(lease)
        assert found(model, tokens) == 0


# --------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("make", LAYOUTS)
def test_speculative_rounds_beside_a_shared_prefix(
    make: Callable[[], Layout], tmp_path: Path
) -> None:
    """AT-6.8, 6.5: 100 rounds of any number of drafts and accepted ones, two leases in a batch on
    one prefix, with forks, pauses and abandoned steps in between; then all of it from each tier."""
    layout, rng = make(), np.random.default_rng(6)
    page = layout.page_tokens
    shared = prompt(page + page // 2)
    with served(layout, tmp_path, gpu=24, max_leases=4) as model:
        with open_lease(model, shared) as first:
            model.prefill(first, shared)
        ways = [[*shared[: page + i], *prompt(5 * page, seed=i)] for i in (2, 5)]
        leases = [open_lease(model, way[: page + 8]) for way in ways]
        assert all(lease.num_tokens == page for lease in leases)
        for round_ in range(100):
            drafts = rng.integers(0, DRAFTS + 1, 2).tolist()
            kept = [int(rng.integers(0, n + 2)) for n in drafts]
            work, accepted = [], []
            for lease, way, n, k in zip(leases, ways, drafts, kept, strict=True):
                at = lease.num_tokens
                if at + n + 1 > len(way):
                    k = 0
                work.append((lease, [*way[at : at + k], *[5_000_000 + at] * (n + 1 - k)]))
                accepted.append(k)
            fails = rng.random() < 0.1
            try:
                with model.cache.step(work) as step:
                    model.write(step)
                    for lease, k in zip(leases, accepted, strict=True):
                        step.accept(lease, k)
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            model.poison_all_rejected()
            if round_ % 10 == 9:
                model.poison()
            for i, (lease, way) in enumerate(zip(leases, ways, strict=True)):
                assert lease.tokens().tolist() == way[: lease.num_tokens]
                what = rng.random()
                if what < 0.05:
                    kid = lease.fork()
                    lease.release()
                    leases[i] = kid
                elif what < 0.1:
                    at = lease.num_tokens
                    lease.pause().result(timeout=20)
                    model.poison_all_rejected()
                    assert lease.resume().result(timeout=20) == at
                model.check(leases[i])
        lengths = [lease.num_tokens for lease in leases]
        for lease in leases:
            lease.release()
        model.cache.flush(to=DISK).result(timeout=20)
        for tiers in ((), (GPU,), (GPU, CPU)):
            model.evict(*tiers)
            for way, length in zip(ways, lengths, strict=True):
                with open_lease(model, [*way[:length], 1]) as lease:
                    assert lease.num_tokens == length // page * page
                    model.check(lease)
            assert found(model, ways[0][: lengths[0]]) == lengths[0] // page * page


@pytest.mark.parametrize("make", [dense])
def test_speculative_truncation_to_every_length(make: Callable[[], Layout]) -> None:
    """Past rejected tokens too, and into pages that others share."""
    layout = make()
    tokens = prompt(40)
    with served(layout, max_leases=4) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[:35])
        for to in range(35, -1, -1):
            with lease.fork() as kid:
                model.feed(kid, [], rejected=4)
                assert kid.truncate(to) == to
                model.poison()
                model.check(kid)
                model.feed(kid, [9, 8], rejected=3)
                model.check(kid)
        model.check(lease)


@pytest.mark.parametrize(("make", "starts"), KINDS)
def test_speculative_pauses_with_open_groups(make: Callable[[], Layout], starts: list[int]) -> None:
    """Right behind rejected tokens, at every edge, while another lease takes what is given back;
    a fork in the middle of a draft goes the same way."""
    tokens = prompt(starts[-1] + 20)
    with served(make(), gpu=16, max_leases=4) as model, open_lease(model, tokens) as base:
        for start in starts:
            model.verify(base, tokens[base.num_tokens : start], rejected=0)
            model.draft(base, DRAFTS)
            with base.fork() as lease:
                model.verify(lease, [], rejected=DRAFTS + 1)
                held = tables(lease)[1]
                lease.pause().result(timeout=20)
                model.poison()
                with open_lease(model, prompt(20, seed=start), read=False) as other:
                    model.feed(other, prompt(20, seed=start))
                assert lease.resume().result(timeout=20) == start
                stays = set(tables(lease)[1])
                assert stays <= set(held) and len(held) - len(stays) <= 1
                model.check(lease)
                model.verify(lease, tokens[start : start + 3], rejected=DRAFTS - 2)
                model.check(lease)
        model.check(base)


@pytest.mark.parametrize("make", [windowed, compressed, packed])
def test_speculative_truncation_of_tails(make: Callable[[], Layout]) -> None:
    """To the last checkpoint, whatever was rejected behind the committed tokens; giving back what
    was not used keeps all of them."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(3 * page)
    with served(layout) as model, open_lease(model, tokens) as lease:
        for length in (
            2 * page + 5,
            2 * page + 1,
            2 * page,
            2 * page - 1,
            page + 1,
            page,
            page - 1,
        ):
            model.prefill(lease, tokens[:length])
            model.draft(lease, DRAFTS + 1)
            assert lease.truncate(length) == length
            assert lease.capacity == -(-length // page) * page
            model.poison()
            model.check(lease)
            model.verify(lease, [], rejected=DRAFTS + 1)
            stands = lease.truncate(length - 1)
            assert stands == (length - 1) // page * page
            lease.ready.result(timeout=20)
            model.poison()
            model.verify(lease, tokens[stands : stands + 2], rejected=DRAFTS - 1)
            model.check(lease)
            lease.truncate(0)
            lease.ready.result(timeout=20)


def test_speculative_writing_by_hand() -> None:
    """Without ``Cache.step``: more is reserved and written than is committed; between the two a
    fork, a pause, a match and a second reserve know of nothing."""
    layout, tokens = dense(), prompt(60)
    with served(layout, max_leases=4) as model, open_lease(model, tokens) as lease:
        for i, kept in enumerate((3, 8, 0, 4, 1, 7, 5, 0, 6, 2, 8)):
            at = lease.num_tokens
            for _ in range(1 + i % 2):
                lease.reserve(8)
            fed = [*tokens[at : at + kept], *[5_000_000 + i] * (8 - kept)]
            digests = model.digests([*tokens[:at], *fed])[at:]
            slots = lease.slot_mapping(at, at + 8)
            for c in layout.components:
                ours = np.flatnonzero(slots[c.name] >= 0)
                for layer in c.layers:
                    rows = model.rows(c, layer, digests[ours])
                    model.put(model.pool.rows(c.name, layer), c, slots[c.name][ours], rows)
            pages = layout.page_tokens
            assert found(model, [*tokens[:at], *fed]) == at // pages * pages
            if i % 3 == 0:
                with lease.fork() as kid:
                    model.check(kid)
                    assert kid.num_tokens == at and kid.capacity == -(-at // pages) * pages
            if i % 4 == 2:  # what was written and not committed is not parked
                lease.pause().result(timeout=20)
                model.poison()
                assert lease.resume().result(timeout=20) == at
                model.check(lease)
                continue
            lease.commit(fed[:kept])
            model.poison_all_rejected()
            model.check(lease)


# --------------------------------------------------------------------------- draft layers


class DraftingModel(SpecModel):
    """Also writes the mark of every page, and can run without its draft layers."""

    drafts = True

    def __init__(self, cache: kvtier.Cache) -> None:
        super().__init__(cache)
        self.there: dict[kvtier.Lease, npt.NDArray[np.bool_]] = {}
        """Which rows of the draft layers have been written or found."""

    def stand(self, lease: kvtier.Lease) -> int:
        """What the marks of a restored lease say."""
        component = next(c for c in self.layout.components if c.name == "draft_state")
        pages = lease.block_table()[: lease.num_tokens // self.layout.page_tokens]
        rows = self.pool.rows("draft_state", component.layers[0])
        marks = rows.view(torch.int32)[torch.from_numpy(pages.astype(np.int64)), -1]
        start = drafts_from(marks, self.layout.page_tokens)
        self.there[lease] = np.arange(lease.num_tokens) >= start
        return start

    def write(self, step: Step) -> None:
        self.marks = {}
        for row, lease in enumerate(step.leases):
            known = self.there.setdefault(lease, np.zeros(0, dtype=bool))[: lease.num_tokens]
            fresh = np.full(int(step.query_lens[row]), self.drafts)
            known = self.there[lease] = np.concatenate([known, fresh])
            page = self.layout.page_tokens
            for end in range(page, len(known) + 1, page):
                gaps = np.flatnonzero(~known[end - page : end])
                self.marks[end - 1] = page - 1 - int(gaps[-1]) if len(gaps) else page
        assert len(step.leases) == 1
        saved = self.by_layer
        if not self.drafts:
            draft = max(layer for c in self.layout.components for layer in c.layers)
            kept = [c for c in saved[draft] if c.name == "draft_state"]
            self.by_layer = {**saved, draft: kept}
        super().write(step)
        self.by_layer = saved
        device = step.to_device()
        for c in self.layout.components:
            if c.name == "draft_state":
                slots = step.slot_mapping[c.name]
                for slot, position in zip(slots, step.positions, strict=True):
                    if slot >= 0:
                        rows = device.layer(c.layers[0]).rows(c.name)
                        rows.view(torch.int32)[int(slot), -1] = self.marks[int(position)]

    def rows(self, c: Component, layer: int, digests: npt.NDArray[np.uint64]) -> Bytes:  # type: ignore[override]
        made = ByteModel.rows(c, layer, digests)
        if c.name == "draft_state":
            made = made.copy()
            made[:, -4:] = 0xAA
        return made

    @staticmethod
    def get(storage: torch.Tensor, c: Component, slots: Positions) -> Bytes:
        got = ByteModel.get(storage, c, slots)
        if c.name == "draft_state":
            got = got.copy()
            got[:, -4:] = 0xAA  # the mark is checked for itself
        return got

    def check_drafts(self, lease: kvtier.Lease, start: int) -> None:
        """The target's rows are right whatever became of the drafts, and theirs from ``start``."""
        last = max(layer for c in self.layout.components for layer in c.layers)
        saved = self.by_layer
        carried = [c for c in saved[last] if c.name == "draft_state"]
        self.by_layer = {**saved, last: carried}
        try:
            self.check(lease)
        finally:
            self.by_layer = saved
        tokens = lease.tokens().tolist()
        digests = self.digests(tokens)
        for c in (c for c in saved[last] if c.name in ("latent", "swa")):
            first = 0 if c.window is None else max(0, len(tokens) - c.window + 1)
            at = np.arange(first, len(tokens))
            if c.window is None:
                slots = lease.slot_mapping(first, len(tokens))[c.name].astype(np.int64)
            else:
                table = self.cache._core.window_tables[lease._record.row]
                slots = table[at // c.slots_per_page].astype(np.int64) * c.slots_per_page
                slots += at % c.slots_per_page
            same = self.get(self.pool.rows(c.name, last), c, slots) == self.rows(
                c, last, digests[at]
            )
            right = same.all(axis=1)
            assert right[at >= start].all(), "a row of a draft layer that is said to be there"
            if first < start:
                assert not right[start - 1 - first], "more rows are there than are told of"


@contextmanager
def drafting(layout: Layout, disk: Path) -> Iterator[DraftingModel]:
    cache = kvtier.Cache(
        layout,
        sized(layout, gpu=16, max_leases=4, disk_path=disk, disk_bytes="256MiB"),
        model="bytes",
        device="cpu",
    )
    model = DraftingModel(cache)
    model.pool.poison_all()
    try:
        yield model
        cache.check()
    finally:
        cache.close()


@pytest.mark.parametrize("make", [dense, compressed])
@pytest.mark.parametrize("tiers", [(), (GPU,), (GPU, CPU)], ids=["gpu", "cpu", "disk"])
@pytest.mark.parametrize(
    "skipped", ["none", "a middle page", "part of the last page", "the last", "all"]
)
def test_speculative_draft_rows_that_are_missing(
    make: Callable[[], Layout], tiers: tuple[Tier, ...], skipped: str, tmp_path: Path
) -> None:
    """★40, ★48: steps ran without the draft layers.  The target's hit is as long as ever, from
    every tier; the marks say from where on drafts have what they read, and no later."""
    layout = make()
    page = layout.page_tokens
    tokens = prompt(4 * page)
    ends = {
        "none": (0, 0, 0),
        "a middle page": (page, 2 * page - 3, 2 * page - 3),
        "part of the last page": (2 * page + 4, 2 * page + 9, 2 * page + 9),
        "the last": (2 * page + 1, 3 * page, 3 * page),
        "all": (0, 3 * page, 3 * page),
    }
    first, last, start = ends[skipped]
    with drafting(layout, tmp_path) as model:
        with open_lease(model, tokens) as lease:
            for begin, end, drafts in (
                (0, first, True),
                (first, last, False),
                (last, 3 * page, True),
            ):
                model.drafts = drafts
                for at in range(begin, end, page // 2):
                    model.feed(lease, tokens[at : min(end, at + page // 2)], poison=False)
            model.drafts = True
            model.feed(lease, tokens[3 * page : 3 * page + 2], rejected=5)
        model.cache.flush(to=DISK).result(timeout=20)
        model.evict(*tiers)
        with open_lease(model, tokens) as lease:
            assert lease.num_tokens == 3 * page, "the target's hit is shorter"
            assert model.stand(lease) == start
            model.check_drafts(lease, start)
            for at in range(3 * page, 4 * page, 5):  # and is filled up from here
                if at % 4 == 0:
                    model.draft(lease, 3)
                model.verify(lease, tokens[at : min(4 * page, at + 5)], rejected=2)
            model.check_drafts(lease, start)
        with open_lease(model, [*tokens, 1]) as lease:
            assert lease.num_tokens == 4 * page and model.stand(lease) == start


def test_speculative_draft_rows_of_several_writers(tmp_path: Path) -> None:
    """The tree keeps the first copy of a page, so one path has pages of leases with and without
    drafts: each page's mark speaks for itself."""
    layout = dense()
    page = layout.page_tokens
    tokens = prompt(4 * page)
    with drafting(layout, tmp_path) as model:
        model.drafts = False
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens[: 2 * page], chunk=page)
            model.drafts = True
            with open_lease(model, tokens, read=False) as other:
                model.prefill(other, tokens, chunk=page)
                assert model.stand(other) == 0
                model.check_drafts(other, 0)
        with open_lease(model, [*tokens, 1]) as lease:
            assert lease.num_tokens == 4 * page
            assert model.stand(lease) == 2 * page
            model.check_drafts(lease, 2 * page)


def test_speculative_layouts_share_history_components() -> None:
    """What the tests above rely on: one draft layer, behind the model's own."""
    for make in (dense, windowed, compressed, packed):
        layout = make()
        last = max(layer for c in layout.components for layer in c.layers)
        names = [c.name for c in layout.components if last in c.layers]
        assert "draft_state" in names and len(names) == 2
        assert all(c.share is Share.HISTORY for c in layout.components if c.name == "draft_state")
