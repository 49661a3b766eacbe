"""The batching loop of minimal_server.py over a DeepSeek model of Hugging Face.

Run it: ``.venv/bin/python examples/deepseek_server.py`` (needs the extra ``deepseek``).  The model
is tiny and its weights are random; requests share a system prompt, a long one is fed in chunks
beside those that decode, and every token is compared with plain ``model.generate``.
"""

import asyncio

import torch
from minimal_server import Engine
from speculative import tiny_model
from transformers import DeepseekV3ForCausalLM

import kvtier
from kvtier_deepseek import Adapter, attach, layout_for

NEW = 16


class Served:
    """What the engine calls: the adapter takes the step itself, and makes its device arrays."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.steps: list[tuple[str, int]] = []  # kind and rows of each

    def __call__(self, step: kvtier.Step) -> list[int]:
        logits = self.adapter(step)  # (batch, vocab), of each lease's last token
        self.steps.append((self.adapter.report.kind, len(logits)))
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens


def plainly(model: DeepseekV3ForCausalLM, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


async def serve() -> None:
    torch.set_num_threads(1)  # matrices are tiny: more threads would wait for one another
    model = tiny_model()
    model.generation_config.eos_token_id = None  # no token ends an answer early
    system = [7 * i % 97 for i in range(70)]
    prompts = [system + [i * i % 97 for i in range(n, 2 * n)] for n in (3, 5, 9, 150)]
    expected = [plainly(model, prompt) for prompt in prompts]
    layout = layout_for(model.config, dtype=torch.float32, page_tokens=16)
    config = kvtier.CacheConfig(gpu_bytes=64 * layout.page_bytes(), cpu_bytes="16MiB")
    with (
        kvtier.Cache(layout, config, model="tiny@1", device="cpu") as cache,
        attach(model, cache) as adapter,
    ):
        served = Served(adapter)
        engine = Engine(cache, served)
        loop = asyncio.create_task(engine.run())

        async def client(number: int) -> None:
            got = [token async for token in engine.generate(prompts[number], NEW)]
            assert got == expected[number]
            print(f"prompt of {len(prompts[number])}: {NEW} tokens, those of model.generate")

        await client(0)  # alone: the others find the system prompt, which none computes again
        await asyncio.gather(*(client(number) for number in (1, 2, 3)))
        loop.cancel()
        mixed = sum(kind == "mixed" for kind, _ in served.steps)
        most = max(rows for _, rows in served.steps)
        print(f"{len(served.steps)} steps of up to {most} requests")
        print(f"{mixed} of them fed a chunk of a prompt beside requests that decode")
        stats = cache.stats()
        hits = stats.tiers[kvtier.Tier.GPU].hit_tokens
        print(f"{hits} of {stats.lookup_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    asyncio.run(serve())
