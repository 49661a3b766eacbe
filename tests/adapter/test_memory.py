"""AT-5.4: what a step allocates does not grow with heads times context."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier_deepseek import attach, layout_for
from tests.adapter.fake_step import FakeCache, FakeSequence
from tests.adapter.models import random_tokens, tiny_model

PAGE = 16


class Largest(TorchDispatchMode):
    """The most values any single operation put out."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage(each) for each in args if isinstance(each, torch.Tensor)}
        for each in out if isinstance(out, tuple | list) else (out,):
            # Views and writes in place give back what was there before.
            if isinstance(each, torch.Tensor) and storage(each) not in given:
                self.values = max(self.values, each.numel())
        return out


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def largest_of_a_step(model: Any, context: int, new: int, **options: Any) -> int:
    """With ``context`` rows of zeros already in the pages."""
    layout = layout_for(model.config, page_tokens=PAGE, dtype="float32")
    cache = FakeCache(layout, pages=context // PAGE + new // PAGE + 3, poison=0.0)
    seq = FakeSequence()
    cache.step((seq, [0] * context)).commit()  # takes pages, computes nothing
    with attach(model, cache, **options) as adapter:
        step = cache.step((seq, random_tokens(new)))
        with Largest() as largest:
            adapter(step)
    return largest.values


@pytest.mark.parametrize("wrapped", [False, True], ids=["absorbed", "not absorbable"])
def test_decode(wrapped: bool) -> None:
    """4 heads of 20 expanded values would be 80 a token; a gathered row is 20, and of those at
    most 4096 are held at a time."""
    model = tiny_model("v3", max_position_embeddings=1 << 20)
    options: dict[str, Any] = {}
    if wrapped:
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
        options["workspace_bytes"] = 1_000_000
    short = largest_of_a_step(model, 1024, 1, **options)
    assert short <= (1024 + 1) * 20 if not wrapped else short <= 250_000
    long = largest_of_a_step(model, 1 << 14, 1, **options)
    assert long <= 4096 * 20 + PAGE * 20 if not wrapped else long <= 250_000


def test_prefill_with_long_context_stays_within_the_workspace() -> None:
    model = tiny_model("v3", max_position_embeddings=1 << 20)
    for context in (1 << 10, 1 << 13):
        values = largest_of_a_step(model, context, 300, workspace_bytes=1_000_000, max_absorbed=0)
        assert values * 4 <= 1_000_000
