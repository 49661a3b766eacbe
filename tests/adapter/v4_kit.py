"""Caches for tiny V4 models, steps on them, and an HF oracle with the cache's rounding."""

import inspect
from collections.abc import Sequence
from functools import cache as memo
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtier import Cache, Lease
from kvtier_deepseek import Adapter, layout_for
from tests.adapter.models import full_logits, random_tokens
from tests.adapter.v4_models import v4_model
from tests.shell.v4_kit import ByteModel, sized

PAGE = 256
FP32 = {"record": "fp32", "index_record": "fp32"}
LOGITS = 5e-5
"""How far logits may be from HF's with float32 records."""


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=LOGITS, rtol=0)


@memo
def model_of(seed: int = 1, **changes: Any) -> Any:
    """One model per test process: tests leave it as it was."""
    return v4_model(seed=seed, **changes)


LENGTH = 640
STREAMS = (1, 15, 22)
"""Seeds whose streams leave no choice of top-k to the last bits: see ``least_gap``."""


@memo
def stream(which: int = 0) -> list[int]:
    return random_tokens(LENGTH, STREAMS[which])


@memo
def expected(which: int = 0) -> Tensor:
    """HF's logits of every token of a stream, in one pass without a cache."""
    return full_logits(model_of(), stream(which))


@torch.no_grad()
def least_gap(model: Any, tokens: list[int]) -> float:
    """How far the last chosen entry's score is from the first one left out, at the closest of all
    queries and layers, in deviations of the chosen ones' scores.  By HF's scores."""
    gaps = []

    def look(module: Any, args: Any, scores: Tensor) -> None:
        count = scores.shape[2]
        visible = (torch.arange(scores.shape[1]) + 1) // 4
        hidden = torch.arange(count) >= visible[:, None]
        best = scores[0].masked_fill(hidden, -torch.inf).sort(-1, descending=True).values
        k = model.config.index_topk
        best = best[visible > k]
        gaps.append(((best[:, k - 1] - best[:, k]) / best[:, :k].std(-1)).min().item())

    hooks = [
        layer.self_attn.compressor.indexer.scorer.register_forward_hook(look)
        for layer in model.model.layers
        if getattr(layer.self_attn.compressor, "indexer", None) is not None
    ]
    full_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(gaps)


def open_cache(
    model: Any,
    path: Path | None = None,
    *,
    gpu: int = 12,
    cpu: int = 0,
    layout: dict[str, Any] | None = None,
    poison: bool = True,
    **options: Any,
) -> Cache:
    """A cache of that many device pages and host frames, everything in it 0xFF (NaN)."""
    made = layout_for(model.config, **(FP32 if layout is None else layout))
    if path is not None:
        options |= {"disk_path": path, "disk_bytes": "1GiB"}
    opened = Cache(made, sized(made, gpu=gpu, cpu=cpu, **options), model="tiny", device="cpu")
    if poison:
        pool: Any = opened._pool
        pool.poison_all()
    return opened


def poison_free(cache: Cache) -> None:
    """Whatever nobody owns is NaN from here on: pages, window pages, state slots, checkpoints."""
    ByteModel(cache).poison()


def feed(cache: Cache, adapter: Adapter, *work: tuple[Lease, Sequence[int]]) -> list[Tensor]:
    """One step; logits (new tokens, vocab) of each lease."""
    with cache.step([(lease, list(tokens)) for lease, tokens in work]) as step:
        logits = adapter.forward(step, all_logits=True)
        counts = step.query_lens.tolist()
    return list(logits.split(counts))


def run(
    cache: Cache, adapter: Adapter, lease: Lease, tokens: Sequence[int], chunks: Sequence[int]
) -> Tensor:
    """Feed ``tokens`` from where the lease stands in steps of ``chunks``; logits of them all."""
    out = []
    for count in chunks:
        at = lease.num_tokens
        out += feed(cache, adapter, (lease, tokens[at : at + count]))
    assert lease.num_tokens == len(tokens)
    return torch.cat(out)


def held(cache: Cache, lease: Lease) -> dict[tuple[str, int], bytes]:
    """Every byte that the lease's next token may read, by component and layer."""
    bytes_model = ByteModel(cache)
    length = lease.num_tokens
    mapping = lease.slot_mapping(0, length)
    windows = cache._core.window_tables[lease._record.row]
    found = {}
    for layer, components in bytes_model.by_layer.items():
        for c in components:
            if c.name in mapping:
                slots = mapping[c.name][mapping[c.name] >= 0].astype("int64")
                assert len(slots) == length // c.tokens_per_slot
            elif c.window is not None:
                at = bytes_model.needed(c, length)
                pages = windows[at // c.slots_per_page].astype("int64")
                assert (pages >= 0).all()
                slots = pages * c.slots_per_page + at % c.slots_per_page
            else:
                at = bytes_model.needed(c, length)
                slots = lease._record.state_slot * c.slots_per_page + at % c.slots_per_page
            rows = bytes_model.get(bytes_model.pool.rows(c.name, layer), c, slots)
            found[c.name, layer] = rows.tobytes()
    return found


def cut(length: int, chunk: int, start: int = 0) -> list[int]:
    """``length - start`` tokens in chunks of ``chunk``."""
    return [min(chunk, length - at) for at in range(start, length, chunk)]


# ------------------------------------------------------------------ HF with quantised keys


def rounded_v4(x: Tensor) -> Tensor:
    """What 584-byte records keep of (..., 512), written down once more with torch's own casts."""
    nope, rope = x[..., :448].bfloat16().float().unflatten(-1, (7, 64)), x[..., 448:]
    amax = nope.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    nope = (nope / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat((nope.flatten(-2), rope.bfloat16().float()), -1)


def rounded_index(x: Tensor) -> Tensor:
    """What 132-byte indexer keys keep of (..., 128)."""
    x = x.bfloat16().float()
    amax = x.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@torch.no_grad()
def rounded_logits(model: Any, tokens: list[int]) -> Tensor:
    """HF's own eager pass, with every cached row and index query rounded as the adapter does."""
    from transformers import DynamicCache

    scorers = [m for m in model.modules() if type(m).__name__.endswith("IndexerScorer")]
    assert scorers
    hooks = [
        scorer.register_forward_pre_hook(lambda _, args: (rounded_index(args[0]), *args[1:]))
        for scorer in scorers
    ]
    held = DynamicCache(config=model.config)
    for layer in held.layers:
        update = layer.update

        def rounding(key: Tensor, *rest: Any, update: Any = update, **options: Any) -> Any:
            return update(rounded_v4(key), *rest, **options)

        layer.update = rounding
        if hasattr(layer, "update_compressor_states"):
            compressed = layer.update_compressor_states

            def entries(name: str, values: Tensor, compressed: Any = compressed) -> Tensor:
                rounded = rounded_v4 if name == "compressor" else rounded_index
                result: Tensor = compressed(name, rounded(values))
                return result

            layer.update_compressor_states = entries
    # Older releases know the cache by another name only, and swallow this one.
    known = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in known else "past_key_values"
    out = model(input_ids=torch.tensor([tokens]), use_cache=True, **{keyword: held})
    for hook in hooks:
        hook.remove()
    logits: Tensor = out.logits[0]
    return logits
