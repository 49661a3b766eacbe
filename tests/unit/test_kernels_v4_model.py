"""Every V4 kernel in one layer's order, against the attention modules of transformers (fp32)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.kernels import (
    RECORDS,
    ClosedEntries,
    PagedBatch,
    c4_slots,
    c128_slots,
    compress,
    entry_slots,
    head_norm_rope,
    index_topk,
    inverse_rope,
    norm_rope,
    rms_norm,
    rope,
    sparse_attend,
    window_slots,
    write_records,
)
from tests.unit.v4_cases import batch_of

T = 300
DENSE = RECORDS["dense"]


@pytest.fixture(scope="module")
def model() -> Any:
    """Three layers, one of each kind, with the cache geometry of the released models."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    config = transformers.DeepseekV4Config(
        vocab_size=97,
        hidden_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=512,
        partial_rotary_factor=64 / 512,
        q_lora_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        max_position_embeddings=4096,
        sliding_window=128,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        mlp_layer_types=["moe"] * 3,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=24,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        pad_token_id=None,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    made = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "position_bias" in name or "sinks" in name:
                p.normal_(0, 0.5)
            elif p.dim() >= 2 and "norm" not in name:
                p.normal_(0, 0.25)
    return made


class Seen:
    """What each layer's attention was given, and what it made of it before its last projections."""

    def __init__(self, model: Any) -> None:
        self.hidden: dict[int, Tensor] = {}
        self.attended: dict[int, Tensor] = {}
        self.chosen: Tensor | None = None
        hooks = []
        for i, layer in enumerate(model.model.layers):
            m = layer.self_attn
            hooks.append(m.register_forward_pre_hook(self.take_hidden(i), with_kwargs=True))
            hooks.append(m.o_a_proj.register_forward_pre_hook(self.take_attended(i)))
        indexer = model.model.layers[1].self_attn.compressor.indexer
        hooks.append(indexer.register_forward_hook(self.take_chosen))
        ids = torch.randint(2, 97, (1, T), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            self.cache = model(input_ids=ids, use_cache=True).past_key_values
        for hook in hooks:
            hook.remove()

    def take_hidden(self, i: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            self.hidden[i] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    def take_attended(self, i: int) -> Any:
        def hook(_: Any, args: Any) -> None:
            self.attended[i] = args[0][0].reshape(T, 4, 512)

        return hook

    def take_chosen(self, _: Any, args: Any, out: Tensor) -> None:
        self.chosen = out[0]


@pytest.fixture(scope="module")
def seen(model: Any) -> Seen:
    return Seen(model)


def tables(m: Any, model: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotary = model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1), position_ids=positions[None], layer_type=m.rope_layer_type)
    return cos[0], sin[0]


class Paged:
    """One layer's pages, poisoned, and its tokens fed in pieces."""

    def __init__(self, model: Any, layer: int, hidden: Tensor) -> None:
        self.model, self.m, self.hidden = model, model.model.layers[layer].self_attn, hidden
        pages = 6
        self.window = torch.full((pages * 128, 512), torch.nan)
        self.extra = torch.full((pages * 64, 512), torch.nan)
        self.index = torch.full((pages * 64, 128), torch.nan)
        self.states = {
            name: [torch.full((3 * parts * ratio, 2 * dim), torch.nan) for _ in range(parts)]
            for name, parts, ratio, dim in (
                ("c4", 2, 4, 512),
                ("index", 2, 4, 128),
                ("c128", 1, 128, 512),
            )
        }
        self.window_table = torch.tensor([[4, 1, 5]], dtype=torch.int32)
        self.block_table = torch.tensor([[3, 0]], dtype=torch.int32)

    def batch(self, start: int, stop: int) -> PagedBatch:
        return replace(batch_of([(stop - start, stop)]), block_table=self.block_table)

    def entries(self, c: Any, state: str, start: int, stop: int) -> tuple[ClosedEntries, Tensor]:
        """What a compressor closes, normed and rotated."""
        states = self.states[state]
        ratio = 128 if state == "c128" else 4
        x = self.hidden[start:stop]
        bias = c.position_bias[torch.arange(start, stop) % ratio]
        closed = compress(
            c.kv_proj(x),
            c.gate_proj(x) + bias,
            states,
            self.batch(start, stop),
            torch.tensor([1]),
            ratio=ratio,
            ring=ratio * len(states),
        )
        cos, sin = tables(c, self.model, closed.entries * ratio)
        eps = c.kv_norm.variance_epsilon
        return closed, norm_rope(closed.values, c.kv_norm.weight, cos, sin, eps=eps)

    def attend(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        m, x = self.m, self.hidden[start:stop]
        batch = self.batch(start, stop)
        cos, sin = tables(m, self.model, torch.arange(start, stop))
        residual = rms_norm(m.q_a_proj(x), m.q_a_norm.weight, eps=1e-6)
        query = head_norm_rope(m.q_b_proj(residual).view(-1, 4, 512), cos, sin, eps=1e-6)
        keys = norm_rope(m.kv_proj(x), m.kv_norm.weight, cos, sin, eps=1e-6)
        slots = window_slots(batch, self.window_table, window=128, slots_per_page=128)
        positions = torch.arange(start, stop)
        mine = self.window_table[0, positions // 128] * 128 + positions % 128
        write_records(self.window, mine, keys, DENSE)
        lists: dict[str, Any] = {}
        chosen = None
        if m.compressor is not None:
            state = "c128" if self.states_of(m) == 1 else "c4"
            closed, values = self.entries(m.compressor, state, start, stop)
            ratio = 128 if state == "c128" else 4
            where = entry_slots(closed.entries, batch.block_table[0], 256, ratio)
            write_records(self.extra, where, values, DENSE)
            lists = {"extra": self.extra}
            if state == "c4":
                chosen = self.choose(batch, residual, cos, sin, start, stop)
                lists["extra_slots"] = c4_slots(chosen, batch)
            else:
                lists["extra_slots"] = c128_slots(batch)
        out, _ = sparse_attend(
            query, self.window, slots, m.sinks, scale=m.scaling, record=DENSE, **lists
        )
        return inverse_rope(out, cos, sin), chosen

    @staticmethod
    def states_of(m: Any) -> int:
        return int(m.compressor.kv_proj.out_features // 512)

    def choose(
        self, batch: PagedBatch, residual: Tensor, cos: Tensor, sin: Tensor, start: int, stop: int
    ) -> Tensor:
        indexer = self.m.compressor.indexer
        closed, values = self.entries(indexer, "index", start, stop)
        where = entry_slots(closed.entries, batch.block_table[0], 256, 4)
        write_records(self.index, where, values, DENSE)
        query = rope(indexer.q_b_proj(residual).view(-1, 16, 128), cos, sin)
        weights = indexer.scorer.weights_proj(self.hidden[start:stop]) * (16**-0.5 * 128**-0.5)
        return index_topk(
            query, weights, self.index, batch, ratio=4, topk=indexer.index_topk, record=DENSE
        )


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer", "name", "state"),
    [(1, "compressor", "c4"), (1, "indexer", "index"), (2, "compressor", "c128")],
)
@pytest.mark.parametrize(
    "cuts", [[T], [1] * T, [7] * 42 + [6], [129, 171]], ids=["1", "300", "43", "2"]
)
def test_entries(
    model: Any, seen: Seen, layer: int, name: str, state: str, cuts: list[int]
) -> None:
    paged = Paged(model, layer, seen.hidden[layer])
    compressor = paged.m.compressor if name == "compressor" else paged.m.compressor.indexer
    got, start = [], 0
    for count in cuts:
        got.append(paged.entries(compressor, state, start, start + count)[1])
        start += count
    expected = seen.cache.layers[layer].compressed_kv[name][0]
    ours = torch.cat(got)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= 1e-6 * max(1.0, expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("cuts", [[T], [1] * 20 + [255, 25], [128, 129, 43]], ids=["1", "22", "3"])
def test_attention_before_its_last_projections(
    model: Any, seen: Seen, layer: int, cuts: list[int]
) -> None:
    paged = Paged(model, layer, seen.hidden[layer])
    outs, start = [], 0
    choices: list[Any] = []
    for count in cuts:
        out, chosen = paged.attend(start, start + count)
        outs.append(out)
        choices.append(chosen)
        start += count
    if layer == 1:
        theirs = seen.chosen
        assert theirs is not None
        for t, (ours, row) in enumerate(
            zip(torch.cat(choices).tolist(), theirs.tolist(), strict=True)
        ):
            assert ours == sorted(j for j in row if j >= 0) + [-1] * row.count(-1), t
        assert theirs[-1].min() >= 0 and theirs.shape[1] < T // 4  # there was something to choose
    assert (torch.cat(outs) - seen.attended[layer]).abs().max() < 1e-5
