"""DeepSeek-V4 through every tier, byte by byte, over the real data plane on the CPU."""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvtier
from kvtier import LeaseState, Tier
from kvtier.cli import main
from kvtier.errors import ConfigError, LeaseError
from tests.shell.v4_kit import PAGE, ByteModel, open_lease, prompt, serving, small

torch.set_num_threads(1)

GPU, CPU, DISK = Tier.GPU, Tier.CPU, Tier.DISK
ROOT = Path(__file__).parents[2]
FP32 = {"record": "fp32", "index_record": "fp32"}
KINDS = [
    pytest.param({}, id="fp8"),
    pytest.param({"index_record": "mxfp4", "tail": "seed"}, id="mxfp4-seed"),
    pytest.param(FP32, id="fp32"),
    pytest.param(
        {**FP32, "tail": "seed", "draft_layers": 1, "max_draft": 2}, id="fp32-seed-drafts"
    ),
    pytest.param({"page_tokens": 128, "tail": "seed"}, id="short-pages-seed"),
]


served = partial(serving, ByteModel)


def windows_of(lease: kvtier.Lease) -> set[int]:
    """Window pages it holds, by number."""
    tail = lease._record.tail
    assert tail is not None
    return set(tail.windows)


def moved(model: ByteModel) -> dict[tuple[Tier, str], int]:
    return dict(model.cache._pump.moved)


# --------------------------------------------------------------------------- down and up again


@pytest.mark.parametrize("options", KINDS)
def test_every_component_through_every_tier(options: dict[str, Any], tmp_path: Path) -> None:
    """B7: device, host, disk and a new process; the boundary lies in the middle of a chunk."""
    layout, tokens = small(**options), prompt(700)
    page = layout.page_tokens
    whole = (len(tokens) - 1) // page * page
    with served(layout, tmp_path) as model:
        with open_lease(model, tokens) as lease:
            assert lease.num_tokens == 0
            model.prefill(lease, tokens, chunk=300)
            model.check(lease)
        model.cache.flush(to=DISK).result(timeout=300)
        for tier, empty in ((GPU, ()), (CPU, (GPU,)), (DISK, (GPU, CPU))):
            model.evict(*empty)
            before = moved(model)
            with open_lease(model, tokens) as lease:
                assert lease.restored == {**dict.fromkeys((GPU, CPU, DISK), 0), tier: whole}
                model.check(lease)
                after = moved(model)
                read = {t for t in (CPU, DISK) if after.get((t, "read")) != before.get((t, "read"))}
                assert (DISK in read) == (tier is DISK)
                assert (CPU in read) == (tier is not GPU)
                model.prefill(lease, [*tokens, *prompt(80, seed=9)], chunk=33)
                model.check(lease)
            model.cache.flush(to=DISK).result(timeout=300)
    script = f"from tests.shell.test_v4_tiers import again; again({str(tmp_path)!r}, {options!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{whole} tokens of DISK"


def again(path: str, options: dict[str, Any]) -> None:
    """What the new process does."""
    tokens = prompt(700)
    with served(small(**options), Path(path)) as model, open_lease(model, tokens) as lease:
        model.check(lease)
        print(f"{lease.restored[DISK]} tokens of DISK")  # noqa: T201
        model.prefill(lease, tokens)
        model.check(lease)


def test_the_model_would_notice() -> None:
    """One byte of any component, and the check fails."""
    layout, tokens = small(), prompt(511)
    with served(layout) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens)
        model.check(lease)
        record = lease._record
        for c in layout.components:
            storage = model.pool._storage[c.name, c.layers[-1]]
            if c.share.value == "history":
                page, at = int(lease.block_table()[0]), 3
            elif c.window is not None:
                page, at = int(model.cache._core.window_tables[record.row][3]), 3
            else:  # the open row of position 509, or the one of 506 in the half of the group before
                position = 506 if c.name.endswith("_a") else 509
                page, at = record.state_slot, position % c.slots_per_page * c.slot_bytes
            storage[page, at] ^= 1
            with pytest.raises(AssertionError, match=f"{c.name}, layer"):
                model.check(lease)
            storage[page, at] ^= 1
        model.check(lease)


def test_history_and_checkpoints_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G5, H3: by `explain` of the cache and of the command line, and by `match`."""
    tokens = prompt(1600)
    with served(small(), tmp_path, checkpoints=kvtier.Sparse(every_pages=2)) as model:
        with open_lease(model, tokens[:1100]) as lease:
            model.prefill(lease, tokens[:1100], chunk=500)
        model.cache.flush(to=DISK).result(timeout=300)
        with open_lease(model, tokens, write=False):
            found = model.cache.match(tokens[:1000])
            assert (found.tokens, found.history_tokens) == (768, 768)
            found = model.cache.match(tokens[:500])
            assert (found.tokens, found.history_tokens) == (0, 256)
        pages = model.cache.explain(tokens)
        assert [p.reason for p in pages] == [
            *("no_checkpoint", "hit", "hit", "hit", "never_seen", "never_seen")
        ]
        assert [bool(p.checkpoint_tiers) for p in pages[:4]] == [False, True, True, True]
        assert all(p.tiers >= {GPU, CPU, DISK} for p in pages[:4])
    (tmp_path / "ids").write_text(" ".join(map(str, tokens)))
    assert main(["explain", str(tmp_path), "--tokens", str(tmp_path / "ids")]) == 0
    out = capsys.readouterr().out
    assert "1024 tokens, 4 of 6 pages of 256 tokens" in out
    assert "checkpoints at token 512, 768, 1024\n" in out
    assert "resumes at token 1024\n" in out


# --------------------------------------------------------------------------- on the device alone


@pytest.mark.parametrize("tail", ["minimal", "seed"])
def test_without_a_host_tier_checkpoints_stay_on_the_device(tail: str) -> None:
    """A second identical request reads nothing from anywhere else, since there is nothing."""
    tokens = prompt(700)
    with served(small(tail=tail), cpu=0) as model:
        for reused in (0, 512, 512):
            with open_lease(model, tokens) as lease:
                assert lease.num_tokens == lease.restored[GPU] == reused
                if reused:
                    model.check(lease)
                model.prefill(lease, tokens)
                model.check(lease)
        assert not {tier for (tier, _) in moved(model)} - {GPU}


def test_a_prefix_of_another_length_stands_on_another_checkpoint() -> None:
    """Every boundary of a long prompt is one to stand on, the deepest of those that match."""
    tokens = prompt(1100)
    with served(small(), gpu=14) as model:
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens, chunk=700)
        for length in (257, 300, 512, 513, 900, 1024, 1025, 1100):
            with open_lease(model, tokens[:length]) as lease:
                assert lease.num_tokens == (length - 1) // PAGE * PAGE
                model.check(lease)
        with open_lease(model, [*tokens[:600], *prompt(300, seed=1)]) as lease:
            assert lease.num_tokens == 512
            model.prefill(lease, [*tokens[:600], *prompt(300, seed=1)])
            model.check(lease)


# --------------------------------------------------------------------------- anywhere in a page


PLACES = [1, 3, 5, 127, 128, 255, 257, 300, 511]


@pytest.mark.parametrize("options", [{}, {"tail": "seed"}, {**FP32, "max_draft": 3}])
def test_pause_and_resume_anywhere(options: dict[str, Any]) -> None:
    """Whole rings travel, since a pause comes at any position."""
    tokens = prompt(560)
    with served(small(**options)) as model:
        for length in PLACES:
            with open_lease(model, tokens, read=False, write=False) as lease:
                model.prefill(lease, tokens[:length])
                held = windows_of(lease)
                lease.pause().result(timeout=300)
                model.poison()
                with open_lease(model, prompt(300, seed=length), read=False) as other:
                    model.prefill(other, prompt(300, seed=length))  # takes what was given back
                assert lease.resume().result(timeout=300) == length
                assert windows_of(lease) == held
                model.check(lease)
                model.prefill(lease, tokens, chunk=128)
                model.check(lease)


def test_a_pause_parks_what_is_committed() -> None:
    """Windows that are reserved are not parked."""
    tokens = prompt(1500)
    with served(small(), gpu=14) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[:200])
        lease.reserve(1200)
        assert len(windows_of(lease)) == 11
        lease.pause().result(timeout=300)
        model.poison()
        assert lease.resume().result(timeout=300) == 200
        model.check(lease)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_that_fails_after_more_than_the_rings_hold(drafts: int) -> None:
    """It has overwritten what the next token reads: the lease goes back to its last checkpoint."""
    tokens = prompt(1000)
    with served(small(max_draft=drafts)) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[:600])
        for fed, stands in ((drafts + 1, 600), (drafts + 2, 512), (300, 512)):
            with (
                pytest.raises(ZeroDivisionError),
                model.cache.step([(lease, prompt(fed, seed=fed))]) as step,
            ):
                model.write(step)
                raise ZeroDivisionError
            lease.ready.result(timeout=300)
            assert lease.num_tokens == stands
            model.poison()
            model.check(lease)
        model.prefill(lease, tokens)
        model.check(lease)
    with served(small(max_draft=drafts)) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[:200])  # no checkpoint yet: from the start
        with pytest.raises(ZeroDivisionError), model.cache.step([(lease, tokens[:9])]) as step:
            model.write(step)
            raise ZeroDivisionError
        assert lease.ready.result(timeout=300) == 0
        model.prefill(lease, tokens)
        model.check(lease)


def test_a_lease_released_in_a_step_that_fails() -> None:
    tokens = prompt(700)
    with served(small()) as model:
        lease, other = open_lease(model, tokens), open_lease(model, tokens, read=False)
        for each in (lease, other):
            model.prefill(each, tokens[:600])
        work = [(lease, tokens[600:700]), (other, tokens[600:700])]
        with pytest.raises(ZeroDivisionError), model.cache.step(work) as step:
            model.write(step)
            lease.release()
            raise ZeroDivisionError
        assert other.ready.result(timeout=300) == 512
        model.poison()
        model.check(other)
        other.release()


@pytest.mark.parametrize("drafts", [0, 3])
def test_no_more_is_rejected_than_the_rings_hold(drafts: int) -> None:
    tokens = prompt(700)
    with served(small(max_draft=drafts)) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens[:255])
        for _ in range(5):
            n = lease.num_tokens
            model.feed(lease, tokens[n : n + 1], rejected=drafts + 1)
            model.check(lease)
        n = lease.num_tokens
        with model.cache.step([(lease, tokens[n : n + drafts + 3])]) as step:
            model.write(step)
            with pytest.raises(LeaseError, match=f"cannot reject {drafts + 2} tokens"):
                step.accept(lease, 1)
        assert lease.num_tokens == n + drafts + 3
        model.check(lease)


@pytest.mark.parametrize("options", [{}, {"tail": "seed"}])
def test_forks_go_their_own_ways(options: dict[str, Any]) -> None:
    """History shared, the tail copied: neither sees what the other writes."""
    tokens = prompt(560)
    with served(small(**options)) as model:
        for length in PLACES:
            with open_lease(model, tokens, read=False, write=False) as lease:
                model.prefill(lease, tokens[:length])
                with lease.fork() as kid:
                    assert kid.num_tokens == length
                    model.check(kid)
                    other = [*tokens[:length], *prompt(150, seed=length)]
                    model.prefill(kid, other, chunk=130)
                    model.check(kid)
                    model.check(lease)
                    model.prefill(lease, tokens, chunk=130)
                    model.check(lease)
                    model.check(kid)


def test_truncation_lands_on_a_checkpoint() -> None:
    tokens = prompt(900)
    with served(small()) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens)
        for asked, stands in ((900, 900), (899, 768), (767, 512), (255, 0)):
            assert lease.truncate(asked) == stands
            lease.ready.result(timeout=300)
            assert lease.num_tokens == stands
            model.poison()
            if stands:
                model.check(lease)
        model.prefill(lease, tokens)
        model.check(lease)


@pytest.mark.parametrize("tail", ["minimal", "seed"])
def test_the_first_boundary_of_a_sequence(tail: str) -> None:
    """With pages of 128 tokens a seed tail finds one window page there, and no second one."""
    layout = small(page_tokens=128, tail=tail)
    tokens = prompt(129)
    with served(layout) as model:
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens)
        model.cache.flush(to=CPU).result(timeout=300)
        for empty in ((), (GPU,)):
            model.evict(*empty)
            with open_lease(model, tokens) as lease:
                assert lease.num_tokens == 128
                model.check(lease)
                assert windows_of(lease) == {0}
                model.prefill(lease, prompt(400))
                model.check(lease)


# --------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("tail", "drafts"), [("minimal", 0), ("minimal", 3), ("seed", 0), ("seed", 3)]
)
def test_windows_are_freed_while_decoding(tail: str, drafts: int) -> None:
    """By what is committed, never by what was drafted; a checkpoint finds the pages it holds."""
    tokens = prompt(600)
    kept = (127 if tail == "minimal" else 129) + drafts
    with served(small(tail=tail, max_draft=drafts)) as model:
        with open_lease(model, tokens) as lease:
            step = 1 + drafts
            while (n := lease.num_tokens) < 520:
                if not n or (n + 8) % 128 > 40:  # nothing happens here: on to the next page's end
                    model.feed(lease, tokens[n : n + 120 - n % 128])
                    continue
                accepted = 1 + n % step
                model.feed(lease, tokens[n : n + accepted], rejected=step - accepted)
                length, held = lease.num_tokens, windows_of(lease)
                needed = {t // 128 for t in range(max(0, length - kept), length)}
                ahead = {t // 128 for t in range(length, n + step)}
                assert needed <= held <= needed | ahead, length
                table = model.cache._core.window_tables[lease._record.row]
                assert {p for p in range(len(table)) if table[p] >= 0} == held
                if (length + 4) % 128 < 8:
                    model.check(lease)
        for end in (256, 512):  # reached one token at a time
            with open_lease(model, tokens[: end + 1]) as lease:
                assert lease.num_tokens == end
                model.check(lease)
                pages = 1 if tail == "minimal" else 2
                assert windows_of(lease) == set(range(end // 128 - pages, end // 128))


def test_a_chunk_of_4096_tokens() -> None:
    """34 window pages are there for it beside another lease's two; each of its 16 boundaries is
    one to resume at (D3), and the next chunk finds its window."""
    tokens = prompt(4400)
    with served(small(), gpu=20, cpu=0, max_leases=2) as model:
        with open_lease(model, [1, 2]) as other, open_lease(model, tokens) as lease:
            model.feed(other, prompt(200, seed=5))
            model.feed(lease, tokens[:100])
            step = model.feed(lease, tokens[100:4196])
            assert [c.position for c in step.captures] == list(range(256, 4097, 256))
            model.check(lease)
            assert windows_of(lease) == {(4196 - 127) // 128, 4196 // 128}
            model.feed(lease, tokens[4196:4250])
            model.check(lease)
            model.check(other)
        for end in range(256, 4097, 256):
            with open_lease(model, tokens, max_reuse=end) as lease:
                assert lease.num_tokens == end
                model.check(lease)


def test_windows_are_refused_all_or_none() -> None:
    """More window pages than there are: OutOfPages, and nothing has changed."""
    tokens = prompt(200)
    with served(small(), gpu=40, cpu=0, max_leases=1) as model, open_lease(model, tokens) as lease:
        model.prefill(lease, tokens)
        with pytest.raises(kvtier.OutOfPages, match="window pages"):
            model.feed(lease, prompt(5000, seed=2))
        assert lease.num_tokens == 200
        model.check(lease)
        model.feed(lease, prompt(4096, seed=2))
        model.check(lease)


# --------------------------------------------------------------------------- little room


@pytest.mark.parametrize("options", [{}, {"tail": "seed"}])
def test_tiny_pools(options: dict[str, Any]) -> None:
    """Four device pages and room for one checkpoint and a page on the host: everything is evicted
    all the time, nothing is ever wrong."""
    layout = small(**options)
    room = layout.checkpoint_frames() + 2
    with served(layout, gpu=4, cpu=room, max_leases=1) as model:
        reused = 0
        for turn in range(24):
            tokens = prompt((300, 520, 700, 258)[turn % 4], seed=turn % 3)
            with open_lease(model, tokens) as lease:
                reused += lease.num_tokens
                if lease.num_tokens:
                    model.check(lease)
                model.prefill(lease, tokens, chunk=130)
                model.check(lease)
        assert reused > 0


def test_prompts_below_a_group_leave_nothing() -> None:
    with served(small()) as model:
        for length in (1, 2, 3, 5):
            for _ in range(2):
                with open_lease(model, prompt(length)) as lease:
                    assert lease.num_tokens == 0
                    model.prefill(lease, prompt(length))
                    model.check(lease)
        assert not list(model.cache.pages())


def test_mixed_batches() -> None:
    """Prefill chunks and single tokens of several leases in one packed step."""
    with served(small(), max_leases=3) as model:
        prompts = [prompt(n, seed=n) for n in (700, 300, 90)]
        leases = [open_lease(model, tokens) for tokens in prompts]
        counts: Sequence[Sequence[int]] = [(129, 1, 0), (255, 127, 1), (3, 128, 1), (300, 1, 88)]
        for row in counts:
            work = [
                (lease, tokens[lease.num_tokens :][:n])
                for lease, tokens, n in zip(leases, prompts, row, strict=True)
                if n
            ]
            with model.cache.step(work) as step:
                model.write(step)
            model.poison()
            for lease in leases:
                if lease.num_tokens:
                    model.check(lease)
        for lease in leases:
            lease.release()
        for tokens, stands in zip(prompts, (512, 256, 0), strict=True):
            with open_lease(model, tokens) as lease:
                assert lease.num_tokens == stands
                if stands:
                    model.check(lease)


# --------------------------------------------------------------------------- what a step offers


def test_slots_of_windows_on_the_device() -> None:
    """Where ``window_table`` says, and -1 for padding; the same in static buffers."""
    layout, tokens = small(), prompt(300)
    with served(layout) as model, open_lease(model, tokens) as lease:
        buffers = model.cache.buffers(max_batch=4, max_tokens=512, max_pages=4)
        with model.cache.step([(lease, tokens)]) as step:
            table = step.window_table[0]
            want = [int(table[t // 128]) * 128 + t % 128 for t in range(300)]
            assert step.slot_mapping["swa"].tolist() == want
            assert list(step.slot_mapping) == ["c4", "c4_index", "c128", "swa"]
            for device in (step.to_device(pad_to=3), step.to_device(buffers, pad_to=3)):
                assert device.slot_mapping["swa"].tolist() == [*want, -1, -1]
                assert device.slot_mapping["swa"].dtype == torch.int64
            model.write(step)
        model.check(lease)


@pytest.mark.parametrize("options", [{}, {"tail": "seed"}, {**FP32, "tail": "seed"}])
def test_views_of_checkpoint_frames(options: dict[str, Any]) -> None:
    """Every piece of every frame, of the shape that is promised, and none overlapping another."""
    layout = small(**options)
    pages = layout.tail_windows
    packed = (pages, 74_880) if not options.get("record") else (pages, 128, 512)
    with served(layout) as model, open_lease(model, [1]) as lease:
        with model.cache.step([(lease, [1])]) as step:
            device = step.to_device()
            model.pool.checkpoints.zero_()
            frames, seen = model.pool.checkpoints.shape[0], 0
            for layer in range(4):
                view = device.layer(layer)
                for c in layout.tails:
                    if layer not in c.layers or not c.checkpoint_slots:
                        with pytest.raises(ConfigError, match="checkpoint holds nothing"):
                            view.checkpoints(c.name)
                        continue
                    held = view.checkpoints(c.name)
                    values = c.slot_bytes // 4
                    assert held.shape[0] == frames
                    assert held.shape[1:] == (packed if c.window else (4, values))
                    raw = held.view(torch.uint8)
                    assert not raw.any()
                    raw.fill_(1)
                    seen += raw[0].numel()
            assert seen == layout.checkpoint_bytes()
            assert bool(model.pool.checkpoints.all())
            with pytest.raises(ConfigError, match="nothing of 'c4'"):
                device.layer(1).checkpoints("c4")
            model.write(step)


def test_restored_tails_hold_what_the_checkpoint_held_and_no_more() -> None:
    """The other slots of a ring stay those of the former owner, here 0xFF."""
    tokens = prompt(400)
    with served(small(tail="minimal")) as model:
        with open_lease(model, tokens) as lease:
            model.prefill(lease, tokens)
        model.poison()
        with open_lease(model, tokens) as lease:
            slot = lease._record.state_slot
            for c in model.layout.states:
                ring = model.pool._storage[c.name, c.layers[0]][slot].numpy()
                kept = (c.checkpoint_slots or 0) * c.slot_bytes
                assert (ring[: len(ring) - kept] == 0xFF).all()
                assert kept == 0 or len(np.unique(ring[len(ring) - kept :])) > 200


def test_a_cold_start_begins_with_a_clear_state() -> None:
    with served(small()) as model:
        with open_lease(model, prompt(200)) as lease:
            model.prefill(lease, prompt(200))
        model.poison()
        with open_lease(model, prompt(9, seed=1)) as lease:
            for c in model.layout.states:
                for layer in c.layers:
                    assert not model.pool._storage[c.name, layer][lease._record.state_slot].any()
            assert lease.state is LeaseState.ACTIVE
