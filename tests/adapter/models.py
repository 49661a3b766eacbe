"""Tiny random DeepSeek models, the plain forward pass as oracle, and a greedy reference."""

from typing import Any

import torch
from torch import Tensor

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2560,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "v2-lite": {"arch": "v2", "q_lora_rank": None},
    "v2": {"arch": "v2"},
    "v3": {"arch": "v3", "rope_interleave": True},
    "v3-half": {"arch": "v3", "rope_interleave": False},
}


def config_of(variant: str, *, yarn: bool = False, **changes: Any) -> Any:
    import transformers

    fields = {**COMMON, **VARIANTS[variant], **changes}
    arch = fields.pop("arch")
    if yarn:
        fields["rope_parameters"] = dict(YARN)
    if arch == "v2":
        return transformers.DeepseekV2Config(**fields, topk_method="greedy")
    return transformers.DeepseekV3Config(**fields)


def tiny_model(
    variant: str = "v3",
    *,
    yarn: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A model with random weights wide enough that logits differ; eager attention."""
    import transformers

    config = config_of(variant, yarn=yarn, **changes)
    config._attn_implementation = "eager"
    cls = (
        transformers.DeepseekV2ForCausalLM
        if config.model_type == "deepseek_v2"
        else transformers.DeepseekV3ForCausalLM
    )
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.1 if "lm_head" in name else 0.2)
            elif "norm" in name:  # no two layers alike
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype)


def as_subclasses(model: Any) -> None:
    """Make each layer's attention one of a class of somebody else's that adds nothing."""

    class Mine(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        pass

    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine


@torch.no_grad()
def full_logits(model: Any, tokens: list[int]) -> Tensor:
    """(tokens, vocab) of one pass over the whole sequence, without any cache."""
    ids = torch.tensor([tokens])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@torch.no_grad()
def hf_greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    """The tokens that HF's own ``generate`` appends."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(t) for t in out[0, len(prompt) :]]


def random_tokens(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(2, 97, (n,), generator=generator)]
