"""Finding a model's latent-attention layers by what they are made of, and checking them.

Looks at submodules, attributes and a tiny numeric probe; never at a library version.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.kernels import RECORDS, HeadDims, LatentRope, write_latent
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.fields import size
from kvtier_deepseek.mla.config import head_dims

__all__ = [
    "attention_layers",
    "latent_rope",
    "plain_weight",
    "rope_function",
    "rotate",
    "rotation_of",
    "written_order",
]

PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
QUERY_WHOLE = ("q_proj",)
QUERY_LORA = ("q_a_proj", "q_a_layernorm", "q_b_proj")
ATTRIBUTES = ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")

Rotation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module that can be adapted, and where it was found."""

    name: str
    index: int
    module: nn.Module


def attention_layers(model: nn.Module, config: Any) -> list[AttentionLayer]:
    """The latent-attention layers of ``model`` in layer order, each checked.

    Raises UnsupportedModel naming what is missing: a layer, a submodule, an attribute.
    """
    dims = head_dims(config)
    found: dict[int, AttentionLayer] = {}
    for name, module in model.named_modules():
        if not any(isinstance(getattr(module, part, None), nn.Module) for part in PARTS[:3]):
            continue
        _check_layer(name, module, dims)
        index = module.layer_idx
        assert isinstance(index, int)
        if index in found:
            raise UnsupportedModel(f"{found[index].name} and {name} both have layer_idx {index}")
        found[index] = AttentionLayer(name, index, module)
    wanted = range(size(config, "num_hidden_layers"))
    if missing := [i for i in wanted if i not in found]:
        raise UnsupportedModel(f"layers {missing} have no latent attention that this adapter knows")
    if extra := [layer.name for i, layer in sorted(found.items()) if i not in wanted]:
        raise UnsupportedModel(f"{extra} lie outside num_hidden_layers={len(wanted)}")
    return [found[i] for i in wanted]


def _check_layer(name: str, module: nn.Module, dims: HeadDims) -> None:
    query = QUERY_WHOLE if getattr(module, "q_proj", None) is not None else QUERY_LORA
    for part in (*PARTS, *query):
        if not isinstance(getattr(module, part, None), nn.Module):
            raise UnsupportedModel(f"{name} has no submodule {part}")
    for attribute in ("layer_idx", "scaling", *ATTRIBUTES):
        if not isinstance(getattr(module, attribute, None), int | float):
            raise UnsupportedModel(f"{name} has no number {attribute}")
    sizes = (dims.heads, dims.latent, dims.rope, dims.nope, dims.value)
    for attribute, wanted in zip(ATTRIBUTES, sizes, strict=True):
        if (found := getattr(module, attribute)) != wanted:
            raise UnsupportedModel(
                f"{name}.{attribute} is {found}, the configuration says {wanted}"
            )
    # An instance may hold its class's own forward, as the copy of an attached model does.
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        raise UnsupportedModel(f"{name}.forward is already replaced (by a hook or another adapter)")


def rotation_of(module: nn.Module, config: Any) -> Rotation:
    """The rope function that the module's own modelling code calls.

    Raises UnsupportedModel where that code has none that is known.
    """
    if getattr(config, "rope_interleave", None):
        return rope_function(module, "apply_rotary_pos_emb_interleave")
    if hasattr(config, "rope_interleave"):
        return rope_function(module, "apply_rotary_pos_emb")
    return rope_function(module, "apply_rotary_emb")


def rope_function(module: nn.Module, name: str) -> Rotation:
    """What the modelling code of a module's class calls ``name``.

    Raises UnsupportedModel where it has none.
    """
    for cls in type(module).__mro__:
        if found := getattr(sys.modules.get(cls.__module__), name, None):
            rotation: Rotation = found
            return rotation
    raise UnsupportedModel(f"{type(module).__module__} has no rope function {name}")


def rotate(
    rotation: Rotation, query: Tensor, key: Tensor, embeddings: Any
) -> tuple[Tensor, Tensor]:
    """Rotate ``query`` (1, heads, n, rope) and ``key`` (1, 1, n, rope) as the model would.

    ``embeddings`` is what the model hands to its attention: (cos, sin), or one complex tensor.
    """
    if isinstance(embeddings, Tensor):
        return rotation(query, key, embeddings.to(query.device))
    cos, sin = embeddings
    return rotation(query, key, cos, sin)


def written_order(model: nn.Module, rotation: Rotation, rope_dim: int) -> str:
    """Where the model's own code leaves a rotated pair: "interleaved" or "half".

    Rotates a first unit vector at position 1 and looks where its pair's other half comes out.
    Raises UnsupportedModel where there is no ``rotary_emb`` or the result is neither.
    """
    if (rotary := _rotary(model)) is None:
        raise UnsupportedModel("the model has no submodule rotary_emb")
    reference = next(model.parameters())
    probe = torch.zeros(1, 1, 1, rope_dim, dtype=torch.float32, device=reference.device)
    probe[..., 0] = 1.0
    with torch.no_grad():
        embeddings = rotary(probe[0], torch.ones(1, 1, dtype=torch.int64, device=probe.device))
        _, turned = rotate(rotation, probe, probe, embeddings)
    touched = turned.flatten().abs().gt(1e-3).nonzero().flatten().tolist()
    if touched == [0, 1]:
        return "half" if rope_dim == 2 else "interleaved"
    if touched == [0, rope_dim // 2]:
        return "half"
    raise UnsupportedModel(f"the model's rope turns value 0 into values {touched}")


def latent_rope(
    model: nn.Module, rotation: Rotation, dims: HeadDims, dtype: torch.dtype
) -> LatentRope | None:
    """The rotation of ``write_latent`` that gives the very bits of the model's own code.

    Tried on random rows of ``dtype`` at some positions, on the model's device.  None: none of them
    does, or the model turns rows by something other than cosines and sines.
    """
    if (rotary := _rotary(model)) is None:
        return None
    device, n, width = next(model.parameters()).device, 16, dims.latent + dims.rope
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with torch.no_grad():
        embeddings = rotary(rows[None], torch.arange(n, device=device)[None])
        if isinstance(embeddings, Tensor):
            return None
        key = rows[:, dims.latent :].view(1, 1, n, dims.rope)
        _, turned = rotate(rotation, key, key, embeddings)
        expected = torch.cat((rows[:, : dims.latent], turned[0, 0]), dim=1)
        cos, sin = (turns[0, :, : dims.rope // 2] for turns in embeddings)
        slots, got = torch.arange(n, device=device), torch.empty_like(rows)
        kinds: tuple[LatentRope, ...] = ("half", "interleaved_to_half")
        for kind in kinds:
            write_latent(got, slots, rows, None, cos, sin, RECORDS["dense"], eps=0.0, rotation=kind)
            if torch.equal(got, expected):
                return kind
    return None


def _rotary(model: nn.Module) -> nn.Module | None:
    """What makes the embeddings that the model hands to its attention."""
    return next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)


def plain_weight(linear: nn.Module, shape: tuple[int, int]) -> Tensor | None:
    """The weight of a linear layer that is nothing but that weight, else None.

    A wrapped, quantised, adapted, hooked or biased layer is None: only calling it gives its result.
    """
    if type(linear) is not nn.Linear or linear.bias is not None or "forward" in vars(linear):
        return None
    if linear._forward_hooks or linear._forward_pre_hooks:
        return None
    weight = linear.weight
    if type(weight) is not nn.Parameter or weight.shape != shape or weight.element_size() < 2:
        return None
    return weight if weight.is_floating_point() else None
