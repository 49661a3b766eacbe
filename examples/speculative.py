"""Speculative decoding on kvtier: two drafts, and the text that greedy decoding gives without any.

Run it: ``.venv/bin/python examples/speculative.py`` (needs the extra ``deepseek``).  The model is
tiny and its weights are random, so the n-gram draft is right now and then, and the predictor hardly
ever; what is decoded is the same with either.
"""

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kvtier import Cache, CacheConfig
from kvtier_deepseek import Mtp, NGram, attach, generate, layout_for, speculate
from kvtier_deepseek.drafts.mtp import MtpModule

MAX_DRAFT = 4
NEW = 120


def random_weights(module: nn.Module) -> None:
    """Wide enough that the logits of different tokens differ."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)


def tiny_model() -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        pad_token_id=None,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    random_weights(model)
    return model


def main() -> None:
    model = tiny_model()
    predictor = MtpModule(model)  # with a checkpoint: Mtp.load(model, "path/of/checkpoint")
    random_weights(predictor)
    layout = layout_for(model.config, dtype=torch.float32, draft="mtp", max_draft=MAX_DRAFT)
    config = CacheConfig(gpu_bytes="16MiB", cpu_bytes="16MiB")
    prompt = [token * 7 % 97 for token in range(150)]
    with (
        Cache(layout, config, model="tiny@1", device="cpu") as cache,
        attach(model, cache, draft=Mtp(model, predictor)) as adapter,
    ):
        greedy = generate(adapter, cache, prompt, NEW)
        for name, proposer in (("n-gram", NGram()), ("predictor", None)):
            got = speculate(adapter, cache, prompt, NEW, proposer=proposer)
            assert got.tokens == greedy.tokens
            print(
                f"{name}: {NEW} tokens in {got.rounds} steps, {got.accepted} of {got.proposed} "
                f"guesses right, {got.computed} of {got.prompt_tokens} prompt tokens computed"
            )


if __name__ == "__main__":
    main()
