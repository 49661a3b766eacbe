"""Decode steps in a CUDA graph: what is replayed is what the model computes kernel by kernel.

Requests join, leave, change rows and cross the ends of groups, windows and pages between replays.
What nobody owns is NaN.  Without a GPU the same steps run in the interpreter, under a guard that
lets nothing be asked of a tensor.
"""

import copy
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as memo
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from kvtier import Cache, ConfigError, KVTierError
from kvtier.kernels import select_all, slots
from kvtier.layouts.base import Share
from kvtier_deepseek import Adapter, DecodeGraph, attach, layout_for
from tests.adapter.models import full_logits, random_tokens, tiny_model
from tests.adapter.swa_kit import expected as windowed_logits
from tests.adapter.v4_models import v4_model
from tests.adapter.v32_kit import new_model
from tests.shell.v4_kit import free, sized

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROWS, PAGES = 4, 4
PACKED: dict[str, Any] = {}
PLAIN = {"record": "fp32", "index_record": "fp32"}
MLA: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""Sizes that the kernels of latent attention are made for."""
KINDS = ("v3", "swa", "swa-plain", "v32", "v32-plain", "v4", "v4-plain")
INDEXED = ("v32", "v32-plain")
LATENT = ("v3", "swa", "swa-plain", *INDEXED)
WINDOWED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "window_attn_skip_freq": [0, 1, 0],
    "sliding_window": 70,
}
"""Reaches into the page before, and the one before that."""
CHOSEN: dict[str, Any] = {"index_head_dim": 128, "index_topk": 40}
"""Of one of the requests below everything is chosen, of others a half or a third."""


def type_for(kind: str, *, wide: bool) -> torch.dtype:
    """The widest type that a kind's kernels take, or bfloat16."""
    if not wide or kind in ("swa", "v32"):  # packed rows have queries in bfloat16
        return torch.bfloat16
    return torch.float16 if kind in LATENT else torch.float32


def made(kind: str) -> Any:
    if kind not in LATENT:
        return v4_model(seed=1)
    if kind in INDEXED:
        return new_model(**MLA, **CHOSEN)
    return tiny_model(**MLA, **({} if kind == "v3" else WINDOWED))


def near_of(kind: str) -> float:
    """How far logits may be apart of which only the order of sums differs: with an index, one of
    the tokens that are chosen may be another."""
    return 0.5 if kind in INDEXED else 0.05


@memo
def model_of(kind: str, dtype: torch.dtype) -> Any:
    model = made(kind).to(dtype)
    # The others ask the device how many tokens each expert has.
    model.set_experts_implementation("batched_mm")
    return model.to(DEVICE)


def open_cache(kind: str, model: Any) -> Cache:
    options: dict[str, Any] = PLAIN if kind == "v4-plain" else PACKED
    if kind in LATENT:
        record = "dense" if kind.endswith("-plain") else "fp8"
        options = {"dtype": next(model.parameters()).dtype}
        if kind in INDEXED:
            options |= {"record": record, "index_record": record}
        elif kind != "v3":
            options["window_record"] = record
    layout = layout_for(model.config, **options)
    config = sized(layout, gpu=24, cpu=0, max_leases=6)
    opened = Cache(layout, config, model="tiny", device=DEVICE)
    pool: Any = opened._pool
    pool.poison_all()
    return opened


def held(cache: Cache) -> list[Tensor]:
    """Everything on the device."""
    pool: Any = cache._pool
    return [*pool._storage.values(), pool.checkpoints]


def starts(cache: Cache) -> list[int]:
    """Prompts that end around the ends of a page."""
    page = cache.layout.page_tokens
    return [page - 3, page, 3, 2 * page - 1, page - 1, 2 * page + 5]


ROUNDS: list[tuple[int, ...]] = [
    (0, 1, 2, 3),
    (3, 0),
    (),
    (5, 4, 0, 1),
    (2,),
    (4, 5, 3, 0),
    (1, 0, 4),
    (0, 4, 2, 1),
]
"""Which of six requests each step has, in the order of its rows."""


@contextmanager
def session(kind: str, dtype: torch.dtype, **options: Any) -> Iterator[tuple[Any, ...]]:
    """(cache, adapter, leases, their tokens), the prompts computed."""
    model = model_of(kind, dtype)
    with open_cache(kind, model) as cache, attach(model, cache, **options) as adapter:
        streams = [random_tokens(n + len(ROUNDS), seed) for seed, n in enumerate(starts(cache))]
        leases = [cache.lease([]) for _ in streams]
        for lease, tokens, n in zip(leases, streams, starts(cache), strict=True):
            with cache.step([(lease, tokens[:n])]) as step:
                adapter(step)
        yield cache, adapter, leases, streams
        for lease in leases:
            lease.release()


def steps(cache: Cache, leases: list[Any], streams: list[list[int]]) -> Iterator[Any]:
    """Each round's step, open."""
    for rows in ROUNDS:
        work = [(leases[i], [streams[i][leases[i].num_tokens]]) for i in rows]
        with cache.step(work) as step:
            yield step


def whole(adapter: Adapter, step: Any) -> Tensor:
    """A step of as many rows, the head's too, in the adapter's ordinary way."""
    return adapter.forward(step, all_logits=True, pad_to=ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "wide"])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_is_eager(kind: str, wide: bool) -> None:
    """F9, A4: logits and every byte on the device, checkpoints too; padding rows attend to nothing
    and a step of nothing else writes nothing."""
    dtype = type_for(kind, wide=wide)
    with session(kind, dtype) as (cache, adapter, leases, streams):
        outputs: list[Tensor] = []
        hooks = [
            layer.self_attn.register_forward_hook(lambda m, a, out: outputs.append(out[0]))
            for layer in model_of(kind, dtype).model.layers
        ]
        before = [s.clone() for s in held(cache)]
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES)
        assert all(map(torch.equal, held(cache), before))
        captured = outputs[-len(hooks) :]
        for hook in hooks:
            hook.remove()
        captures = 0
        for step in steps(cache, leases, streams):
            n, captures = len(step.leases), captures + len(step.captures)
            before = [s.clone() for s in held(cache)]
            logits = graph.replay(step).clone()
            assert logits.shape == (n, 97)
            assert adapter.report.tokens == n
            after = [s.clone() for s in held(cache)]
            assert all(bool((out[0, n:] == 0).all()) for out in captured)
            if not n:
                assert all(map(torch.equal, after, before))
                continue
            for ran in (graph.eager, lambda s: whole(adapter, s)):
                for storage, was in zip(held(cache), before, strict=True):
                    storage.copy_(was)
                again = ran(step)
                if ran == graph.eager or kind not in LATENT:
                    assert torch.equal(logits, again)
                    assert all(map(torch.equal, held(cache), after))
                else:  # of other lengths the keys are cut into other parts
                    near = near_of(kind)
                    torch.testing.assert_close(logits, again, atol=near, rtol=near)
            assert not logits.isnan().any()
        assert captures >= 2 or kind in ("v3", *INDEXED)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replays_give_the_logits_of_the_whole_sequence(kind: str) -> None:
    """By HF's own pass without a cache, in float32 where the kernels take it."""
    dtype = type_for(kind, wide=kind not in LATENT)
    reference = copy.deepcopy(model_of(kind, dtype)).to("cpu", torch.float32)
    errors = []
    with session(kind, dtype) as (cache, adapter, leases, streams):
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES)
        oracle = full_logits if kind not in ("swa", "swa-plain") else windowed_logits
        wanted = [oracle(reference, tokens) for tokens in streams]
        for step in steps(cache, leases, streams):
            logits = graph.replay(step).float().cpu()
            for row, lease in enumerate(step.leases):
                want = wanted[leases.index(lease)][lease.num_tokens]
                errors.append((logits[row] - want).abs().max().item())
    errors.sort()
    # Of rounded keys or values the tiny models' experts may be others, so not of all.
    bounds = {"v3": 0.05, "swa": 0.5, "swa-plain": 0.05, "v4": 0.5, "v4-plain": 5e-4}
    bounds |= {"v32": 0.5, "v32-plain": 0.1}
    assert errors[len(errors) // 2] < bounds[kind], errors


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["v4", "swa", "swa-plain"])
def test_checkpoints_of_replays_are_resumed_from(kind: str) -> None:
    """A request that begins alike takes the page that was filled within a graph."""
    with session(kind, torch.bfloat16) as (cache, adapter, leases, streams):
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES)
        page, lease, tokens = cache.layout.page_tokens, leases[0], streams[0]
        while lease.num_tokens < page + 2:
            with cache.step([(lease, [tokens[lease.num_tokens]])]) as step:
                wanted = graph.replay(step).clone()
        lease.release()
        poison_free(cache)
        with cache.lease(tokens[: page + 2]) as again:
            assert again.ready.result(timeout=300) == page
            with cache.step([(again, tokens[page : page + 2])]) as step:
                got = adapter(step)
        torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.05)


def poison_free(cache: Cache) -> None:
    """Whatever nobody owns is NaN from here on."""
    core: Any = cache._core
    pool: Any = cache._pool
    pools, tails = core.residency.pools, core.tails
    pool.checkpoints[free(pools[3])] = 0xFF
    for c in cache.layout.components:
        tail = tails.states if c.window is None else tails.windows
        frames = free(pools[0] if c.share is Share.HISTORY else tail)
        for layer in c.layers:
            pool._storage[c.name, layer][frames] = 0xFF


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_never_waits_for_the_device(kind: str) -> None:
    dtype = torch.float32 if kind == "v4-plain" else torch.bfloat16
    with session(kind, dtype) as (cache, adapter, leases, streams):
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES)
        for step in steps(cache, leases, streams):
            with no_waiting():
                graph.replay(step)
                graph.eager(step)
                adapter.forward(step, pad_to=ROWS)


def compiled() -> dict[str, int]:
    """How many variants of each kernel have been compiled for this device."""
    names = [n for n in sys.modules if n.startswith(("kvtier.kernels.triton", "kvtier.kernels.gl"))]
    device = torch.cuda.current_device()
    return {
        f"{n}.{k.__name__}": len(k.device_caches[device][0])
        for n in names
        for k in vars(sys.modules[n]).values()
        if isinstance(k, JITFunction) and k.__module__ == n
    }


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_warmup_compiles_everything(kind: str) -> None:
    """E9: prefill, chunks, decode and checkpoints compile nothing afterwards."""
    dtype = torch.float32 if kind == "v4-plain" else torch.bfloat16
    model = model_of(kind, dtype)
    with open_cache(kind, model) as cache, attach(model, cache) as adapter:
        before = [s.clone() for s in held(cache)]
        adapter.warmup()
        assert all(map(torch.equal, held(cache), before))
        warm = compiled()
        assert sum(warm.values()) > 0
        graph = adapter.capture_decode(batch=ROWS, pages=12)
        tokens = random_tokens(900, 1)
        with cache.lease([]) as one, cache.lease([]) as two:
            for counts in [(1, 0), (15, 1), (16, 17), (230, 3), (1, 1), (300, 16), (0, 1), (33, 0)]:
                work = [
                    (lease, tokens[lease.num_tokens : lease.num_tokens + count])
                    for lease, count in zip((one, two), counts, strict=True)
                    if count
                ]
                with cache.step(work) as step:
                    adapter(step)
                with cache.step([(lease, [5]) for lease, _ in work]) as step:
                    graph.replay(step)
        assert compiled() == warm


# Without a GPU: the same code path, in the interpreter.


class NothingIsAsked(TorchDispatchMode):
    """Refuses what would wait for a device, or bring numbers of the host into a graph."""

    ASKING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "is_nonzero",
        "equal",
        "lift_fresh",
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.ASKING, name
        if name.startswith("index"):
            flat = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else [arg])]
            masks = [a for a in flat if isinstance(a, Tensor) and a.dtype is torch.bool]
            assert not masks, name
        return func(*args, **(kwargs or {}))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as there, and the host looks into no table."""

    def select(cases: Any, **options: Any) -> Any:
        moved = {key: replace(case, device="cuda") for key, case in cases.items()}
        return select_all(moved, **options)

    for family in ("mla", "v32", "v4"):
        module = importlib.import_module(f"kvtier_deepseek.{family}.family")
        monkeypatch.setattr(module, "select_all", select)
    monkeypatch.setattr(slots, "_on_host", lambda table: False)


@pytest.mark.skipif(GPU, reason="there is a GPU")
@pytest.mark.parametrize(
    "kind",
    [
        "v3",
        pytest.param("v4", marks=pytest.mark.slow),
        pytest.param("swa-plain", marks=pytest.mark.slow),
        "v32-plain",
    ],
)
def test_nothing_is_asked_in_a_decode_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(kind).half() if kind in LATENT else v4_model((4, 128), seed=1)
    model.set_experts_implementation("batched_mm")
    with open_cache(kind, model) as cache, cache.lease([]) as lease:
        page = cache.layout.page_tokens
        with attach(model, cache) as adapter, cache.step([(lease, random_tokens(page - 1))]) as s:
            adapter(s)
        as_on_a_gpu(monkeypatch)
        with attach(model, cache) as adapter:
            graph = adapter.capture_decode(batch=2, pages=2)
            for _ in range(2):  # the page's last token, and the next one's first
                with cache.step([(lease, [7])]) as step:
                    before = [s.clone() for s in held(cache)]
                    device = graph.load(step)
                    with NothingIsAsked():
                        logits = adapter._run(step, device, graph._bound)
                    adapter._family.capture(step, device)
                    after = [s.clone() for s in held(cache)]
                    for storage, was in zip(held(cache), before, strict=True):
                        storage.copy_(was)
                    again = adapter.forward(step, all_logits=True, pad_to=2)
                    torch.testing.assert_close(again, logits[:1])
                    assert all(map(torch.equal, held(cache), after))
            assert set(adapter.report.backends.values()) == {"triton"}


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_it_decodes_all_the_same() -> None:
    with session("v4-plain", torch.float32) as (cache, adapter, leases, streams):
        graph = adapter.capture_decode(batch=ROWS, pages=PAGES)
        for step in steps(cache, leases, streams):
            got = graph.replay(step).clone()
            assert torch.equal(got, whole(adapter, step))


def test_buffers_of_a_step_without_leases() -> None:
    """A4: padding rows as ever, state slots of tails too, at the addresses of other steps."""
    model = v4_model((4, 128), seed=1)
    layout = layout_for(model.config)
    with Cache(layout, sized(layout, gpu=8, cpu=0), model="tiny", device=DEVICE) as cache:
        buffers = cache.buffers(max_batch=4, max_tokens=4, max_pages=2)
        with cache.lease([]) as lease:
            with cache.step([(lease, [1])]) as step:
                one = step.to_device(buffers, pad_to=3)
                assert one.state_slots.tolist()[1:] == [-1, -1]
        with cache.step([]) as step:
            none = step.to_device(buffers, pad_to=3)
        assert none.state_slots.tolist() == [-1, -1, -1]
        assert none.query_lens.tolist() == [1, 1, 1]
        assert none.kv_lens.tolist() == none.context_lens.tolist() == [0, 0, 0]
        assert none.cu_seqlens_q.tolist() == [0, 1, 2, 3]
        for table in (none.block_table, none.window_table, *none.slot_mapping.values()):
            assert table.shape[0] == 3
            assert (table == -1).all()
        assert none.block_table.shape[1] == 2
        for name in ("input_ids", "positions", "kv_lens", "state_slots", "block_table"):
            assert getattr(none, name).data_ptr() == getattr(one, name).data_ptr()


class TestRefused:
    def graph(self, cache: Cache, adapter: Adapter) -> DecodeGraph:
        return adapter.capture_decode(batch=2, pages=1)

    @pytest.mark.skipif(GPU, reason="needs the reference to be what is used")
    def test_steps_that_do_not_fit(self) -> None:
        model = tiny_model("v3", num_hidden_layers=1)
        layout = layout_for(model.config, dtype="float32", page_tokens=4)
        with (
            Cache(layout, sized(layout, gpu=8, cpu=0), model="tiny", device="cpu") as cache,
            attach(model, cache) as adapter,
        ):
            graph = self.graph(cache, adapter)
            leases = [cache.lease([]) for _ in range(3)]
            for work, says in (
                ([(leases[0], [1, 2])], "one token of each lease"),
                ([(lease, [1]) for lease in leases], "pad_to=2 is less than the batch of 3"),
            ):
                with pytest.raises(ConfigError, match=says), cache.step(work) as step:
                    graph.replay(step)
            with cache.step([(leases[0], [1, 2, 3, 4])]) as step:
                adapter(step)
            with pytest.raises(ConfigError, match="max_pages=2"):
                with cache.step([(leases[0], [5])]) as step:
                    graph.replay(step)
            adapter.detach()
            with pytest.raises(KVTierError, match="detached"):
                with cache.step([(leases[1], [5])]) as step:
                    graph.replay(step)
            with pytest.raises(KVTierError, match="detached"):
                self.graph(cache, adapter)
            for lease in leases:
                lease.release()

    @pytest.mark.gpu
    def test_a_model_that_runs_on_the_reference(self) -> None:
        model = tiny_model("v3").to("cuda")
        layout = layout_for(model.config, dtype="float32", page_tokens=4)
        config = sized(layout, gpu=8, cpu=0)
        with Cache(layout, config, model="tiny", device="cuda") as cache:
            for options, says in (
                ({}, "cannot capture write_rows, mla_absorbed"),
                ({"max_absorbed": 0}, "max_absorbed=0"),
            ):
                with attach(model, cache, **options) as adapter:
                    with pytest.raises(ConfigError, match=says):
                        self.graph(cache, adapter)
            model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda m, a, out: out)
            with attach(model, cache) as adapter, pytest.raises(ConfigError, match="layer 1"):
                self.graph(cache, adapter)
