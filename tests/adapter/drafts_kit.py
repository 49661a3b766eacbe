"""Tiny models with drafts, guesses that are right as often as a test says, and what the drafts
compute without a cache."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache as memo
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvtier import Cache
from kvtier_deepseek import Adapter, DSpark, Mtp, NGram, StreamMtp, attach, layout_for
from kvtier_deepseek.drafts.base import Continuation
from kvtier_deepseek.drafts.dspark import DSparkModule
from kvtier_deepseek.drafts.mtp import MtpModule
from kvtier_deepseek.drafts.stream_mtp import StreamMtpModule
from tests.adapter.models import tiny_model
from tests.adapter.swa_kit import expected as swa_expected
from tests.adapter.v4_models import v4_model
from tests.shell.v4_kit import sized

MAX_DRAFT = 4
PAGE = 8
BLOCK = 4
SWA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "window_attn_skip_freq": [0, 1, 0],
    "sliding_window": 6,
}
V4: dict[str, Any] = {
    "dspark_block_size": BLOCK,
    "dspark_noise_token_id": 96,
    "dspark_target_layer_ids": [0, 2],
    "dspark_markov_rank": 8,
    "index_topk": 512,
}
"""Lists as long as the text: what is chosen is never a matter of the last bits."""
KINDS = {
    "v2": ("ngram",),
    "v3": ("ngram", "mtp"),
    "mla_swa": ("ngram", "mtp"),
    "v4": ("ngram", "mtp", "dspark"),
}
"""Layout -> who can guess there."""


@memo
def model_of(layout: str) -> Any:
    """One model per test process: tests leave it as it was."""
    if layout == "v4":
        return v4_model((0, 4, 128), seed=1, **V4)
    if layout == "mla_swa":
        return tiny_model("v3", **SWA)
    return tiny_model(layout)


def noisy(module: nn.Module, seed: int = 5) -> Any:
    """Weights as wide as those of the tiny models."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.25)
        for name, buffer in module.named_buffers():
            if "bias" in name:
                buffer.normal_(0, 0.5)
    return module


def draft_of(model: Any, draft: str) -> Any:
    """A new draft, always with the same weights; None for n-grams."""
    if draft == "ngram":
        return None
    if draft == "dspark":
        return DSpark(model, noisy(DSparkModule(model)))
    if model.config.model_type == "deepseek_v4":
        return StreamMtp(model, noisy(StreamMtpModule(model)))
    return Mtp(model, noisy(MtpModule(model)))


def layout_of(model: Any, draft: str, **options: Any) -> Any:
    options = {"max_draft": MAX_DRAFT, **options}
    if draft != "ngram":
        options["draft"] = draft
    if model.config.model_type == "deepseek_v4":
        return layout_for(model.config, record="fp32", index_record="fp32", **options)
    if getattr(model.config, "window_attn_skip_freq", None):
        options["window_record"] = "dense"
    return layout_for(model.config, **{"page_tokens": PAGE, "dtype": "float32", **options})


def open_cache(
    model: Any,
    draft: str,
    path: Path | None = None,
    *,
    gpu: int = 40,
    cpu: int = 0,
    **options: Any,
) -> Cache:
    """A cache of that many device pages and host frames, everything in it 0xFF (NaN)."""
    layout = layout_of(model, draft)
    if path is not None:
        options |= {"disk_path": path, "disk_bytes": "1GiB"}
    opened = Cache(layout, sized(layout, gpu=gpu, cpu=cpu, **options), model="tiny", device="cpu")
    pool: Any = opened._pool
    pool.poison_all()
    return opened


@contextmanager
def session(
    layout: str, draft: str, path: Path | None = None, **options: Any
) -> Iterator[tuple[Cache, Adapter]]:
    model = model_of(layout)
    with (
        open_cache(model, draft, path, **options) as cache,
        attach(model, cache, draft=draft_of(model, draft)) as adapter,
    ):
        yield cache, adapter


class Forced:
    """Lets ``inner`` guess, keeps what it said, and proposes instead as many right tokens of a
    known text as ``pattern`` says, round by round, and wrong ones behind them."""

    def __init__(self, inner: Any, text: Sequence[int], pattern: Callable[[int], int]) -> None:
        self.inner, self.text, self.pattern = inner, text, pattern
        self.said: list[tuple[int, list[int]]] = []
        self.rounds = 0

    def propose(self, step: Any, device: Any, rows: Sequence[Continuation]) -> list[list[int]]:
        out = []
        for row, guesses in zip(rows, self.inner.propose(step, device, rows), strict=True):
            if row.count > 0:
                self.said.append((len(row.tokens), guesses))
            at, count = len(row.tokens), max(0, row.count)
            right = min(self.pattern(self.rounds), count)
            wrong = [(t + 1) % 97 for t in self.text[at + right : at + count]]
            out.append([*self.text[at : at + right], *wrong])
            self.rounds += 1
        return out


def proposer_of(adapter: Adapter) -> Any:
    return adapter.draft if adapter.draft is not None else NGram()


# ------------------------------------------------------------------ drafts without a cache


class Heard:
    """What the drafts' inputs are, of one pass over a text without a cache."""

    @torch.no_grad()
    def __init__(self, model: Any, tokens: Sequence[int]) -> None:
        got: dict[str, Tensor] = {}
        body = model.model
        hooks = [
            body.layers[i].register_forward_hook(
                lambda m, a, out, i=i: got.__setitem__(f"layer {i}", out[0])
            )
            for i in range(len(body.layers))
        ]
        if hasattr(body, "hc_head"):
            hooks.append(
                body.hc_head.register_forward_pre_hook(
                    lambda m, a: got.__setitem__("streams", a[0][0])
                )
            )
        hooks.append(
            body.norm.register_forward_hook(lambda m, a, out: got.__setitem__("hidden", out[0]))
        )
        if getattr(model.config, "window_attn_skip_freq", None):
            logits = swa_expected(model, tokens)
        else:
            logits = model(input_ids=torch.tensor([[*tokens]]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        self.got, self.logits = got, logits


@torch.no_grad()
def mtp_guesses(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """What V3's predictor says follows ``tokens``, of which the last has not been computed: HF's
    own layer over the whole text at once, again for every guess."""
    module = noisy(MtpModule(model))
    body = model.model
    ids = [*tokens]
    known = Heard(model, ids[:-1]).got["hidden"]
    hidden = torch.cat((known.new_zeros(1, known.shape[1]), known))
    out = []
    for _ in range(count):
        x = torch.cat((module.enorm(body.embed_tokens(torch.tensor(ids))), module.hnorm(hidden)), 1)
        x = module.eh_proj(x)[None]
        n = len(ids)
        mask = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)[None, None]
        turns = body.rotary_emb(x, position_ids=torch.arange(n)[None])
        last = module.norm(module.block(x, attention_mask=mask, position_embeddings=turns)[0, -1])
        ids.append(int(model.lm_head(last).argmax()))
        hidden = torch.cat((hidden, last[None]))
        out.append(ids[-1])
    return out


def plain_attention(m: Any, turns: Any, extra: Tensor, seen: Tensor) -> Callable[..., Any]:
    """V4 attention of one layer written down once more: queries of all rows, keys that are
    ``extra`` (already rotated) and the rows' own, of which ``seen`` (rows, keys) says which."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    cos, sin = turns

    def forward(hidden: Tensor, *args: Any, **options: Any) -> Any:
        n = hidden.shape[1]
        q = m.q_b_norm(m.q_b_proj(m.q_a_norm(m.q_a_proj(hidden))).view(1, n, -1, m.head_dim))
        q = apply_rotary_pos_emb(q.transpose(1, 2), cos, sin)[0]
        own = rotated(m, m.kv_proj(hidden), turns)
        keys = torch.cat((extra, own))
        scores = (q @ keys.T) * m.scaling
        scores = scores.masked_fill(~seen, -torch.inf)
        sink = m.sinks[:, None, None].expand(-1, n, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        out = (weights @ keys)[None]
        out = apply_rotary_pos_emb(out, cos, -sin).transpose(1, 2)
        grouped = out.reshape(1, n, m.config.o_groups, -1)
        return m.o_b_proj(m.o_a_proj(grouped).flatten(2)), None

    return forward


def rotated(m: Any, values: Tensor, turns: Any) -> Tensor:
    """Window rows (n, head_dim) of what ``kv_proj`` gave."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    row: Tensor = apply_rotary_pos_emb(m.kv_norm(values)[:, None], *turns)[0, 0]
    return row


def main_turns(model: Any, positions: Tensor) -> Any:
    like = torch.zeros(1, len(positions), model.config.hidden_size)
    return model.model.rotary_emb(like, position_ids=positions[None], layer_type="main")


@torch.no_grad()
def stream_mtp_guesses(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """The same of V4's predictor."""
    module = noisy(StreamMtpModule(model))
    body, ids = model.model, [*tokens]
    known = Heard(model, ids[:-1]).got["streams"]
    streams = torch.cat((torch.zeros_like(known[:1]), known))
    out = []
    for _ in range(count):
        n = len(ids)
        e = module.e_proj(module.enorm(body.embed_tokens(torch.tensor(ids))))
        x = (e[:, None] + module.h_proj(module.hnorm(streams)))[None]
        at = torch.arange(n)
        gap = at[:, None] - at
        turns = main_turns(model, at)
        block = copy.copy(module.block.self_attn)
        module.block.self_attn.forward = plain_attention(
            block, turns, x.new_zeros(0, block.head_dim), (gap >= 0) & (gap < 128)
        )
        after = module.block(x, input_ids=torch.tensor([ids]))[0, -1:]
        joined = module.norm(module.hc_head(after[None]))[0, -1]
        ids.append(int(model.lm_head(joined).argmax()))
        streams = torch.cat((streams, after))
        out.append(ids[-1])
    return out


@torch.no_grad()
def dspark_guesses(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """The same of DSpark: one block behind the committed tokens' window."""
    module = noisy(DSparkModule(model))
    body, ids = model.model, [*tokens]
    length, size = len(ids) - 1, module.block_size
    got = Heard(model, ids[:-1]).got
    fused = torch.cat([got[f"layer {i}"].mean(1) for i in V4["dspark_target_layer_ids"]], -1)
    main = module.main_norm(module.main_proj(fused))
    first = max(0, length - 128)
    block_ids = torch.tensor([ids[-1], *[V4["dspark_noise_token_id"]] * (size - 1)])
    x = body.embed_tokens(block_ids)[None, :, None].expand(-1, -1, model.config.hc_mult, -1)
    turns = main_turns(model, torch.arange(length, length + size))
    for stage in module.blocks:
        m = copy.copy(stage.self_attn)
        context = rotated(
            m, m.kv_proj(main[first:])[None], main_turns(model, torch.arange(first, length))
        )
        seen = torch.ones(size, length - first + size, dtype=torch.bool)
        stage.self_attn.forward = plain_attention(m, turns, context, seen)
        x = stage(x.contiguous(), input_ids=block_ids[None])
    logits = model.lm_head(module.norm(module.hc_head(x)))[0]
    out, before = [], ids[-1]
    for place in range(size):
        added = module.markov_w2.weight @ module.markov_w1.weight[before]
        before = int((logits[place] + added).argmax())
        out.append(before)
    return out[:count]


def oracle_guesses(layout: str, draft: str, tokens: Sequence[int], count: int) -> list[int]:
    model = model_of(layout)
    if draft == "ngram":
        return NGram().guess(list(tokens), count)
    if draft == "dspark":
        return dspark_guesses(model, tokens, count)
    return (stream_mtp_guesses if layout == "v4" else mtp_guesses)(model, tokens, count)
