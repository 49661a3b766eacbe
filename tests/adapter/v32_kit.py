"""Tiny V3.2 models, and what they compute without a cache.

Two oracles: HF's own eager pass, whose top-k is its own; and a dense pass in which each layer's
selection is given from outside, so that it is that of the pages whatever ties there are.
"""

from collections.abc import Sequence
from functools import cache as memo
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtier import Cache
from kvtier_deepseek import layout_for
from tests.adapter.models import COMMON, YARN
from tests.adapter.swa_kit import PAGE
from tests.adapter.swa_kit import open_cache as open_any

LOGITS = 5e-6
SIZES: dict[str, Any] = {
    "index_n_heads": 16,  # with few heads many scores are exactly zero, and tie
    "index_head_dim": 16,
    "index_topk": 4096,
}
PACKED: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "index_head_dim": 128,
}
"""Sizes that packed records have."""


def new_model(*, yarn: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, biases of norms too; eager attention."""
    import transformers

    fields = {**COMMON, **SIZES, **changes}
    if yarn:
        fields["rope_parameters"] = dict(YARN)
    config = transformers.DeepseekV32Config(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.1 if "lm_head" in name else 0.2)
            elif "bias" in name:
                parameter.normal_(0, 0.3)
            elif "norm" in name:  # no two layers alike
                parameter.uniform_(0.5, 1.5)
    return model


@memo
def v32_model(**changes: Any) -> Any:
    """One model per test process: tests leave it as it was."""
    return new_model(**changes)


def open_cache(
    model: Any,
    path: Path | None = None,
    *,
    page: int = PAGE,
    record: str = "dense",
    index_record: str = "dense",
    dtype: torch.dtype = torch.float32,
    max_draft: int = 0,
    **options: Any,
) -> Cache:
    """A cache in which everything is 0xFF (NaN)."""
    layout = layout_for(
        model.config,
        page_tokens=page,
        dtype=dtype,
        record=record,
        index_record=index_record,
        max_draft=max_draft,
    )
    return open_any(model, path, layout=layout, **options)


@torch.no_grad()
def with_selection(model: Any, tokens: Sequence[int], chosen: Sequence[Tensor]) -> Tensor:
    """(tokens, vocab) of one pass in which a query of layer i attends to ``chosen[i]`` alone,
    (tokens, tokens) bool."""
    hooks = []
    for layer, seen in zip(model.model.layers, chosen, strict=True):
        lists = [row.nonzero().flatten() for row in seen]
        width = max(map(len, lists))
        # A list's first token again where there are fewer: the mask that HF makes is a set.
        padded = torch.stack([torch.cat((x, x[:1].expand(width - len(x)))) for x in lists])
        hooks.append(
            layer.self_attn.indexer.register_forward_hook(
                lambda *_, picked=padded: picked[None].int()
            )
        )
    logits: Tensor = model(input_ids=torch.tensor([[*tokens]]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits
