"""Races of the data plane, through the whole cache: sources overwritten as ``packed`` fires, pages
reused while copies are on their way, streams that are late, requests that go away in between.

On the CPU the same with real threads.  Each kind of race comes with a fault in the data plane that
it must show.
"""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier import Lease, LeaseState, OutOfPages, Tier
from kvtier.core.ops import OpKind
from kvtier.data import records, transfer
from kvtier.data.arrivals import Arrival
from kvtier.data.batches import is_live
from kvtier.data.copier import Copier
from kvtier.data.jobs import Job
from kvtier.data.streams import CudaStreams, Lane
from tests.device.byte_model import LAYOUTS, POISON, DeviceModel, prompt, sized
from tests.device.traffic import Traffic

torch.set_num_threads(1)

GPU, CPU, DISK = Tier.GPU, Tier.CPU, Tier.DISK
LONG_S = 0.03
"""Longer than anything that is not delayed takes here."""
SHORT_S = 0.0005
"""Longer than a copy or a kernel."""
CYCLES_S = 1.9e9
BOTH = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
on_both = pytest.mark.parametrize("device", BOTH)
on_gpu = pytest.mark.parametrize("device", BOTH[1:])
all_layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


@pytest.fixture(autouse=True)
def restores_of_one_layout_end_early(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large ones do: with its pages still on the way.  The other dense layout's do not."""
    if request.node.callspec.params["layout"] == "gqa":
        monkeypatch.setattr(transfer, "EARLY_BYTES", 1)
        for name in ("FIRST_LAYERS_BYTES", "LAYERS_BYTES", "PIECE_BYTES"):
            monkeypatch.setattr(records, name, 1)


@contextmanager
def served(
    layout: str, device: str, *, gpu: int = 16, cpu: int = 120, disk: Path | None = None
) -> Iterator[DeviceModel]:
    """A cache whose whole device and host memory is 0xFF, and the model on it."""
    options: dict[str, Any] = {}
    if disk is not None:
        options = {"disk_path": disk, "disk_bytes": "32MiB"}
    config = sized(LAYOUTS[layout], gpu=gpu, cpu=cpu, **options)
    cache = kvtier.Cache(LAYOUTS[layout], config, model="bytes", device=device)
    model = DeviceModel(cache)
    with model.computing():
        model.pool.poison_all()
        model.transfer.host.poison(range(cpu))
        model.transfer.fence(None)
        try:
            yield model
            cache.check()
        finally:
            cache.close()


def late(model: DeviceModel, lanes: Collection[Lane], seconds: float = LONG_S) -> None:
    """Whatever is queued on these lanes from here on starts that much later."""
    streams = model.transfer._streams
    queue = type(streams).on.__get__(streams)

    @contextmanager
    def on(lane: Lane, after: tuple[Any, ...] = ()) -> Iterator[None]:
        with queue(lane, after):
            if lane in lanes:
                pause(model, seconds)
            yield

    streams.on = on


def pause(model: DeviceModel, seconds: float) -> None:
    """On the current stream; on the CPU on this thread."""
    if model.on_gpu:
        torch.cuda._sleep(int(seconds * CYCLES_S))
    else:
        time.sleep(seconds)


def overwrite_when_packed(model: DeviceModel) -> list[int]:
    """From here on the sources of every PACK are 0xFF the very moment they are said to be free."""
    start, count = model.transfer.start, [0]
    aside = torch.cuda.Stream(model.device, priority=-1) if model.on_gpu else None

    def overwrite(op: kvtier.Op) -> None:
        with torch.cuda.stream(aside):
            for part in op.parts:
                live = is_live(part, source=True)
                model.pool.poison(part.kind, part.src, live=live, byte=POISON)
                count[0] += 1
        if aside is not None:
            aside.synchronize()

    def hooked(op: kvtier.Op, *, packed: Callable[[], None], done: Any) -> None:
        def tell() -> None:
            overwrite(op)
            packed()

        start(op, packed=tell if op.kind is OpKind.PACK else packed, done=done)

    model.transfer.start = hooked
    return count


def tokens_of(model: DeviceModel, pages: float, seed: int = 0) -> list[int]:
    return prompt(int(pages * model.layout.page_tokens), seed)


def retry(call: Callable[[], Any]) -> Any:
    """Again until operations under way have given back what they hold."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return call()
        except OutOfPages:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def compute(model: DeviceModel, tokens: list[int], **options: Any) -> kvtier.Lease:
    """A lease with all of these tokens fed, chunk by chunk."""
    lease = retry(lambda: model.cache.lease(tokens, **options))
    chunk = model.layout.page_tokens * 5 // 4
    retry(lambda: model.prefill(lease, tokens, chunk))
    return lease


def restored(model: DeviceModel, tokens: list[int], tier: Tier) -> None:
    """A lease on these tokens is read back from that tier, whole and right."""
    page = model.layout.page_tokens
    with model.cache.lease(tokens) as lease:
        assert lease.ready.result(timeout=300) == (len(tokens) - 1) // page * page
        assert lease.restored[tier] == lease.num_tokens, dict(lease.restored)
        model.check(lease)
        model.feed(lease, tokens[lease.num_tokens :])
        model.check(lease)


# --------------------------------------------------------------------------- packed means packed


@on_both
@all_layouts
@pytest.mark.parametrize("lanes", [(), (Lane.PACK,), (Lane.DRAIN,), (Lane.PACK, Lane.DRAIN)])
def test_sources_are_overwritten_as_packed_fires(
    layout: str, device: str, lanes: tuple[Lane, ...]
) -> None:
    """D1: history pages and captured tails."""
    with served(layout, device) as model:
        count = overwrite_when_packed(model)
        late(model, lanes, SHORT_S)
        tokens = tokens_of(model, 6.5)
        compute(model, tokens).release()
        model.cache.flush(to=CPU).result(timeout=300)
        assert count[0] == (12 if model.layout.has_tails else 6)
        model.evict(GPU)
        restored(model, tokens, CPU)


@on_both
@all_layouts
def test_sources_of_a_pause_are_overwritten_as_packed_fires(layout: str, device: str) -> None:
    """The partial page and the whole live tail."""
    with served(layout, device) as model:
        tokens = tokens_of(model, 5.4)
        lease = compute(model, tokens, write=False)
        count = overwrite_when_packed(model)
        late(model, (Lane.DRAIN,), SHORT_S)
        lease.pause().result(timeout=300)
        assert count[0] == (7 if model.layout.has_tails else 6)
        model.poison()
        assert lease.resume().result(timeout=300) == len(tokens)
        model.check(lease)
        lease.release()


def packs_at_once(copier: Copier, job: Job) -> None:
    job.release_sources()
    PACK(copier, job)


PACK = Copier.pack


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("fault", ["as it starts", "as it is queued"])
@all_layouts
def test_packed_too_early_shows(
    layout: str, device: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "as it starts":
        monkeypatch.setattr(Copier, "pack", packs_at_once)
    elif device == "cpu":
        pytest.skip("there it is done when it is queued")
    else:
        monkeypatch.setattr(CudaStreams, "mark", hasty(Lane.PACK))
    with served(layout, device) as model:
        overwrite_when_packed(model)
        late(model, (Lane.PACK,))
        tokens = tokens_of(model, 4.5)
        compute(model, tokens).release()
        model.cache.flush(to=CPU).result(timeout=300)
        model.evict(GPU)
        with pytest.raises(AssertionError, match="rows"):
            restored(model, tokens, CPU)


# --------------------------------------------------------------------------- pages change hands


@on_both
@all_layouts
@pytest.mark.parametrize("lanes", [(Lane.PACK,), (Lane.DRAIN,), (Lane.FETCH, Lane.LOAD)])
def test_pages_are_reused_while_copies_are_on_their_way(
    layout: str, device: str, lanes: tuple[Lane, ...], tmp_path: Path
) -> None:
    """Two requests at a time on a device that barely holds them; whatever is free is 0xFF."""
    with served(layout, device, gpu=9, cpu=60, disk=tmp_path) as model:
        late(model, lanes, SHORT_S)
        problems: list[BaseException] = []
        tiers: dict[Tier, int] = dict.fromkeys((GPU, CPU, DISK), 0)

        def request(seed: int) -> None:
            tokens = tokens_of(model, 3.2, seed)
            lease = retry(lambda: model.cache.lease(tokens))
            lease.ready.result(timeout=300)
            for tier, n in lease.restored.items():
                tiers[tier] += n
            model.check(lease)
            retry(lambda: model.prefill(lease, tokens, 40))
            model.check(lease)
            lease.release()
            model.poison()

        def requests(me: int) -> None:
            try:
                with model.computing():
                    for turn in range(9):
                        request(2 * (turn % 4) + me)
            except BaseException as error:  # noqa: BLE001 - asserted below
                problems.append(error)

        threads = [threading.Thread(target=requests, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "stuck"
        assert not problems, problems
        assert tiers[CPU] + tiers[DISK] > 0, tiers


@on_both
@all_layouts
def test_a_free_page_that_is_read_shows(layout: str, device: str) -> None:
    """The poison itself: a lease over a page that has been given back."""
    with served(layout, device) as model:
        tokens = tokens_of(model, 4.5)
        with compute(model, tokens, write=False) as lease:
            model.check(lease)
            pool = model.cache._core.residency.pools[0]
            page = int(lease.block_table()[1])
            pool.give([page])
            model.poison()
            with pytest.raises(AssertionError, match="rows"):
                model.check(lease)
            pool._free.remove(page)
            pool._taken[page] = 1


# --------------------------------------------------------------------------- late streams


def journey(model: DeviceModel, *, before: float = 0.0, after: float = 0.0) -> None:
    """A prompt down to the disk and up again from each tier, forked, paused; nothing is waited for
    but what the cache says to wait for.  ``before`` and ``after``: the compute stream is that late
    before and after a step's writes."""
    tokens, other = tokens_of(model, 4.4), tokens_of(model, 4.4, seed=1)
    page = model.layout.page_tokens

    def feed(lease: kvtier.Lease, new: list[int]) -> None:
        with model.cache.step([(lease, new)]) as step:
            if before:
                pause(model, before)
            model.write(step)
        if after:
            pause(model, after)

    for each in (tokens, other):
        with model.cache.lease(each) as lease:
            for start in range(0, len(each), page + 3):
                feed(lease, each[start : start + page + 3])
            with lease.fork() as kid:
                feed(kid, [7, 8, 9])
                kid.ready.result(timeout=300)
                lease.pause().result(timeout=300)
                model.poison()
                feed(kid, [10])
                assert lease.resume().result(timeout=300) == len(each)
                feed(lease, [11])
                model.check(lease)
                model.check(kid)
    model.cache.flush(to=DISK).result(timeout=300)
    for empty, tier in (((GPU,), CPU), ((GPU, CPU), DISK)):
        model.evict(*empty)
        for each in (tokens, other):
            if after:
                pause(model, after)
            model.poison()
            restored(model, each, tier)


SUBSETS = [s for n in range(5) for s in itertools.combinations(list(Lane)[1:], n)]


@on_both
@all_layouts
def test_streams_are_late_in_every_combination(layout: str, device: str, tmp_path: Path) -> None:
    """Each of the four streams late or not, and the compute stream before or after its writes."""
    combinations = list(itertools.product(SUBSETS, (0.0, SHORT_S), (0.0, SHORT_S)))
    if device == "cpu":  # threads rather than streams: there is less to get wrong
        combinations = [(s, 0.0, 0.0) for s in SUBSETS if len(s) in (1, 4)]
    with served(layout, device, disk=tmp_path) as model:
        for lanes, before, after in combinations:
            late(model, lanes, SHORT_S)
            try:
                journey(model, before=before, after=after)
            except AssertionError as error:
                raise AssertionError(f"late: {lanes}, {before=} {after=}: {error}") from error
            model.cache.clear().result(timeout=300)


class Hasty(torch.cuda.Event):
    """An event that is over for whoever waits on the host."""

    def synchronize(self) -> None:
        return None


def hasty(lane: Lane) -> Callable[..., Any]:
    """``mark`` that says at once that what was queued on this lane is done."""

    def mark(streams: CudaStreams, this: Lane) -> Any:
        if this is not lane:
            return MARK(streams, this)
        event = Hasty()
        event.record(streams._stream(lane))
        return event

    return mark


def without(lane: Lane, *, fences: bool = True, others: bool = True) -> Callable[..., Any]:
    """``on`` whose work on this lane waits for no fence, or for nothing but fences."""

    def on(streams: CudaStreams, this: Lane, after: tuple[Any, ...] = ()) -> Any:
        if this is lane:
            after = tuple(e for e in after if not (fences if id(e) in KNOWN else others))
        return ON(streams, this, after)

    return on


KNOWN: dict[int, object] = {}
"""All fences that any operation was started behind."""


@pytest.fixture
def told_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fences = CudaStreams.fences

    def noted(streams: CudaStreams) -> Any:
        out = fences(streams)
        KNOWN.update({id(event): event for event in out})
        return out

    monkeypatch.setattr(CudaStreams, "fences", noted)
    yield
    KNOWN.clear()


def waits_for_nothing(arrival: Arrival, layer: int | None = None) -> None:
    return None


ON, MARK = CudaStreams.on, CudaStreams.mark
FAULTS: dict[str, tuple[type, str, Any, tuple[Lane, ...], dict[str, float]]] = {
    "a pack before the step": (
        *(CudaStreams, "on", without(Lane.PACK), ()),
        {"before": LONG_S},
    ),
    "a load before the poison": (
        *(CudaStreams, "on", without(Lane.LOAD, others=False), ()),
        {"after": LONG_S},
    ),
    "a drain before the gather": (CudaStreams, "on", without(Lane.DRAIN), (Lane.PACK,), {}),
    "an unpack before the fetch": (
        *(CudaStreams, "on", without(Lane.LOAD, fences=False), (Lane.FETCH,)),
        {},
    ),
    "landed before the drain": (CudaStreams, "mark", hasty(Lane.DRAIN), (Lane.DRAIN,), {}),
    "ready before the load": (CudaStreams, "mark", hasty(Lane.LOAD), (Lane.LOAD,), {}),
}
EARLY_FAULTS: dict[str, Any] = {
    "a layer before it is there": (Arrival, "wait", waits_for_nothing, (Lane.LOAD,), {}),
}


@on_gpu
@pytest.mark.parametrize(
    ("layout", "fault"),
    [*itertools.product(LAYOUTS, FAULTS), *(("gqa", name) for name in EARLY_FAULTS)],
)
def test_an_order_that_is_not_kept_shows(
    layout: str,
    device: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    told_apart: None,
) -> None:
    owner, name, wrong, lanes, delays = {**FAULTS, **EARLY_FAULTS}[fault]
    monkeypatch.setattr(owner, name, wrong)
    with served(layout, device, disk=tmp_path) as model:
        late(model, lanes)
        with pytest.raises(AssertionError):
            journey(model, **delays)
        torch.cuda.synchronize()
        for record in list(model.cache._core.leases.values()):
            with model.cache._pump:
                model.cache._pump.release(record)


@on_both
@pytest.mark.parametrize("layout", ["mla", "gqa"])
def test_a_page_is_written_to_only_once_others_have_queued_their_copies(
    layout: str, device: str
) -> None:
    """A truncation copies its last page and gives the shared one up; before that copy is queued, a
    step of another thread may have been given the page."""
    with served(layout, device, gpu=5) as model:
        tokens = tokens_of(model, 2)
        lease = compute(model, tokens)
        other = compute(model, tokens_of(model, 1, seed=1), write=False)
        model.cache.flush(to=CPU).result(timeout=300)
        start, reached, gate = model.transfer.start, threading.Event(), threading.Event()

        def hooked(op: kvtier.Op, **callbacks: Any) -> None:
            if op.kind is OpKind.COPY:
                reached.set()
                assert gate.wait(300)
            start(op, **callbacks)

        model.transfer.start = hooked
        entered = threading.Event()

        def step() -> None:
            with model.computing(), model.cache.step([(other, tokens_of(model, 2, seed=2))]) as it:
                model.write(it)
                entered.set()

        def truncate() -> None:
            with model.computing():
                lease.truncate(len(tokens) - 3)

        shared = int(lease.block_table()[1])
        threads = [threading.Thread(target=task) for task in (truncate, step)]
        threads[0].start()
        assert reached.wait(300)
        threads[1].start()
        early = entered.wait(0.2)
        gate.set()
        for thread in threads:
            thread.join(300)
        assert shared in other.block_table(), "the scene is another one"
        model.check(lease)
        model.check(other)
        assert not early
        lease.release()
        other.release()


# --------------------------------------------------------------------------- several streams


def pages_pass_on(model: DeviceModel) -> None:
    """What a step still reads on its stream is not overwritten by its next owner's on another."""
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    c, layer = model.places[0]
    tokens, other = tokens_of(model, 2.5), tokens_of(model, 2.5, seed=1)

    def held(pages: torch.Tensor) -> torch.Tensor:
        return model.pool._storage[c.name, layer].index_select(0, pages)

    def first_two(lease: Lease) -> torch.Tensor:
        return torch.tensor(lease.block_table()[:2]).to(model.pool.device, torch.int64)

    with torch.cuda.stream(a):
        with compute(model, tokens, write=False) as lease:
            numbers = lease.block_table()[:2].tolist()
            pages = first_two(lease)  # here, as an upload would wait for the pause to be over
            with model.cache.step([(lease, [5])]) as step:
                model.write(step)
                pause(model, LONG_S)
                read = held(pages)
    with torch.cuda.stream(b):
        with compute(model, other, write=False) as lease:
            assert set(numbers) <= set(lease.block_table().tolist()), "another scene"
            model.check(lease)
            now = held(pages)
    torch.cuda.synchronize()
    with torch.cuda.stream(a):
        with compute(model, tokens, write=False) as lease:
            model.check(lease)
            want = held(first_two(lease))
    torch.cuda.synchronize()
    assert not torch.equal(now, want)
    assert torch.equal(read, want)


def a_fork_goes_on(model: DeviceModel, *, named: bool = False) -> None:
    """Its partial page and its tail are copied on the stream that was fenced last."""
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    tokens = tokens_of(model, 2.5)
    with torch.cuda.stream(b):
        lease = compute(model, tokens, write=False)
        pause(model, LONG_S)
        kid = lease.fork()
    with lease, kid:
        with torch.cuda.stream(a):
            with model.cache.step([(kid, [1, 2, 3])], stream=a if named else None) as step:
                model.write(step)
            model.check(kid)
        with torch.cuda.stream(b):
            model.check(lease)
            model.check(kid)


@on_gpu
@all_layouts
def test_pages_pass_from_one_compute_stream_to_another(layout: str, device: str) -> None:
    with served(layout, device, gpu=4) as model:
        pages_pass_on(model)


@on_gpu
@all_layouts
@pytest.mark.parametrize("named", [True, False])
def test_a_fork_goes_on_on_another_stream(layout: str, device: str, named: bool) -> None:
    with served(layout, device) as model:
        a_fork_goes_on(model, named=named)


def fences_without_waiting(streams: CudaStreams, stream: Any) -> None:
    stream = stream or torch.cuda.current_stream()
    event = torch.cuda.Event()
    event.record(stream)
    with streams._lock:
        streams._compute = stream
        streams._fences[stream.cuda_stream] = event


@on_gpu
@pytest.mark.parametrize("layout", ["mla", "v4"])
@pytest.mark.parametrize("scene", [pages_pass_on, a_fork_goes_on])
def test_streams_that_do_not_wait_for_each_other_show(
    layout: str, device: str, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaStreams, "fence", fences_without_waiting)
    # Who comes next has to come while the first still reads: on a busy machine that takes longer.
    for seconds in (LONG_S, 8 * LONG_S, 64 * LONG_S):
        monkeypatch.setitem(globals(), "LONG_S", seconds)
        with served(layout, device, gpu=4) as model:
            if fails(scene, model):
                return
    pytest.fail("nothing on one stream was disturbed by what another did")


def fails(scene: Callable[[DeviceModel], None], model: DeviceModel) -> bool:
    try:
        scene(model)
    except AssertionError:
        return True
    finally:
        torch.cuda.synchronize()
    return False


# --------------------------------------------------------------------------- those who go away


@on_both
@all_layouts
@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.LOAD])
def test_a_lease_goes_while_it_is_loaded(layout: str, device: str, lane: Lane) -> None:
    """Its pages are written to by others only once the load is over."""
    with served(layout, device, gpu=8) as model:
        tokens, other = tokens_of(model, 6.5), tokens_of(model, 6.5, seed=1)
        for turn in range(3):
            compute(model, tokens).release()
            model.cache.flush(to=CPU).result(timeout=300)
            model.evict(GPU)
            late(model, (lane,))
            lease = model.cache.lease(tokens)
            assert lease.state is LeaseState.RESTORING
            lease.release()
            model.poison()
            held = compute(model, other, read=False, write=bool(turn))
            late(model, ())
            model.check(held)
            time.sleep(2 * LONG_S)
            model.poison()
            model.check(held)
            held.release()
            model.cache.check()
            assert model.cache.stats().tiers[GPU].reserved == 0


@on_both
@all_layouts
@pytest.mark.parametrize("lane", [Lane.PACK, Lane.DRAIN])
def test_a_lease_goes_while_it_is_packed(layout: str, device: str, lane: Lane) -> None:
    """What was on its way down arrives, and is what it was."""
    with served(layout, device, gpu=8) as model:
        late(model, (lane,), 0.01)
        tokens = tokens_of(model, 6.5)
        compute(model, tokens).release()
        model.poison()
        other = compute(model, tokens_of(model, 6.5, seed=1), write=False)  # takes its pages
        model.poison()
        model.check(other)
        other.release()
        model.cache.flush(to=CPU).result(timeout=300)
        model.evict(GPU)
        restored(model, tokens, CPU)


@on_both
@all_layouts
def test_a_clear_while_loads_and_packs_are_on_their_way(layout: str, device: str) -> None:
    """A8: a late completion makes nothing visible, and the next owner's bytes stay."""
    with served(layout, device, gpu=16) as model:
        tokens, other = tokens_of(model, 4.5), tokens_of(model, 4.5, seed=1)
        compute(model, tokens).release()
        model.cache.flush(to=CPU).result(timeout=300)
        model.evict(GPU)
        late(model, (Lane.LOAD, Lane.DRAIN), 0.01)
        lease = model.cache.lease(tokens)
        written = compute(model, other)
        cleared = model.cache.clear()
        assert model.cache.match(tokens).tokens == model.cache.match(other).tokens == 0
        lease.ready.result(timeout=300)
        model.check(lease)
        model.check(written)
        lease.release()
        written.release()
        cleared.result(timeout=300)
        model.cache.flush(to=CPU).result(timeout=300)
        assert model.cache.match(tokens).history_tokens == 0
        assert model.cache.match(other).history_tokens == 0
        model.poison()
        compute(model, tokens).release()
        model.cache.flush(to=CPU).result(timeout=300)
        model.evict(GPU)
        restored(model, tokens, CPU)


@on_both
@all_layouts
@pytest.mark.parametrize("lane", [Lane.PACK, Lane.DRAIN])
def test_a_fork_of_a_lease_that_is_packed_and_goes(layout: str, device: str, lane: Lane) -> None:
    with served(layout, device) as model:
        late(model, (lane,), 0.005)
        tokens = tokens_of(model, 4.4)
        lease = compute(model, tokens)
        kid = lease.fork()
        lease.release()
        model.poison()
        kid.ready.result(timeout=300)
        model.check(kid)
        model.prefill(kid, [*tokens, *prompt(3 * model.layout.page_tokens, seed=9)])
        paused = kid.pause()
        paused.result(timeout=300)
        model.poison()
        kid.resume().result(timeout=300)
        model.check(kid)
        kid.release()


@on_both
@all_layouts
def test_everything_at_once(layout: str, device: str, tmp_path: Path) -> None:
    """A second of the soak: threads of requests of every kind, late streams, a store that fails."""
    traffic = Traffic(layout, device, tmp_path, seed=3, threads=3)
    for _ in range(20):  # as often as a busy machine takes
        traffic.run(1.0 if device == "cpu" else 2.0)
        if traffic.failures or traffic.counts["requests"] > 3:
            break
    traffic.close()
    assert not traffic.failures, "\n".join(traffic.failures)
    assert traffic.counts["requests"] > 3
