"""F6, ★40, ★48: rows of draft layers may be missing; the hit of the model itself does not care."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import kvtier
from kvtier import Step, Tier
from kvtier.layouts import Component, Layout, Share, drafts_from
from tests.shell.speculative_kit import (
    CPU,
    DISK,
    GPU,
    SpecModel,
    compressed,
    dense,
    packed,
    windowed,
)
from tests.shell.v4_kit import ByteModel, Bytes, Positions, open_lease, prompt, sized

torch.set_num_threads(1)


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
        model.cache.flush(to=DISK).result(timeout=300)
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
