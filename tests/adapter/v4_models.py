"""Tiny random V4 models with the real geometry of the cache, and their configurations."""

from typing import Any

import torch

# The released sizes, in the schema of the checkpoints.
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}
CHECKPOINT: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": YARN,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 3,
}
FLASH: dict[str, Any] = {
    **CHECKPOINT,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
PRO: dict[str, Any] = {
    **CHECKPOINT,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}

# Hidden sizes as small as they go; everything that is cached as it is in the released models.
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "num_hash_layers": 1,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 24,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def v4_config(ratios: tuple[int, ...] = (0, 4, 128, 4), **changes: Any) -> Any:
    import transformers

    fields = {**TINY, "num_hidden_layers": len(ratios), "compress_ratios": [*ratios], **changes}
    return transformers.DeepseekV4Config(**fields, attn_implementation="eager")


def v4_model(ratios: tuple[int, ...] = (0, 4, 128, 4), *, seed: int = 0, **changes: Any) -> Any:
    """A model whose weights are wide enough that softmaxes and top-k are not trivial, and whose
    biases, sinks and routing table, zero by default, are not."""
    import transformers

    config = v4_config(ratios, **changes)
    torch.manual_seed(seed)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position_bias" in name or "sinks" in name:
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.1 if "lm_head" in name else 0.25)
        for name, buffer in model.named_buffers():
            if "tid2eid" in name:
                buffer.copy_(torch.randint(0, config.n_routed_experts, buffer.shape))
            elif "e_score_correction_bias" in name:
                buffer.normal_(0, 0.5)
    return model
