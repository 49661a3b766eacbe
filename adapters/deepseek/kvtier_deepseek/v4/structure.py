"""Finding a model's V4 attention layers by what they are made of, and checking them.

Looks at submodules, attributes, shapes and a tiny numeric probe; never at a library version.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.kernels import rms_norm
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.v4.config import Attention

__all__ = ["AttentionLayer", "attention_layers", "looks_like_v4"]

PARTS = (
    "q_a_proj",
    "q_a_norm",
    "q_b_proj",
    "q_b_norm",
    "kv_proj",
    "kv_norm",
    "o_a_proj",
    "o_b_proj",
)
COMPRESSOR_PARTS = ("kv_proj", "gate_proj", "kv_norm", "rotary_emb")
INDEXER_PARTS = (*COMPRESSOR_PARTS, "q_b_proj", "scorer")
MARKS = ("kv_proj", "q_a_proj", "o_a_proj", "o_b_proj")
"""Two of these make a module one that was meant to be V4 attention."""

EPSILONS = ("variance_epsilon", "eps")


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module that can be adapted, and where it was found."""

    name: str
    index: int
    module: nn.Module
    eps: float
    """Of its norms."""


def looks_like_v4(model: nn.Module) -> bool:
    """Whether any module of ``model`` is made like V4 attention, complete or not."""
    return any(_marks(module) >= 2 for module in model.modules())


def attention_layers(model: nn.Module, config: Any, wanted: Attention) -> list[AttentionLayer]:
    """The attention layers of ``model`` in layer order, each checked against its configuration.

    Raises UnsupportedModel naming what is missing or of another size.
    """
    found: dict[int, AttentionLayer] = {}
    for name, module in model.named_modules():
        if _marks(module) < 2:
            continue
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise UnsupportedModel(f"{name} has no number layer_idx")
        if index in found:
            raise UnsupportedModel(f"{found[index].name} and {name} both have layer_idx {index}")
        if not 0 <= index < len(wanted.ratios):
            raise UnsupportedModel(f"{name} lies outside num_hidden_layers={len(wanted.ratios)}")
        _check_layer(name, module, wanted, wanted.ratios[index], config)
        _check_rotation(module, wanted.rope_dim)
        found[index] = AttentionLayer(name, index, module, _eps(name, module, wanted))
    if missing := [i for i in range(len(wanted.ratios)) if i not in found]:
        raise UnsupportedModel(f"layers {missing} have no attention that this adapter knows")
    return [layer for _, layer in sorted(found.items())]


def _marks(module: nn.Module) -> int:
    return sum(isinstance(getattr(module, part, None), nn.Module) for part in MARKS)


def _check_layer(name: str, module: nn.Module, wanted: Attention, ratio: int, config: Any) -> None:
    _check_parts(name, module, PARTS)
    _check_numbers(
        name,
        module,
        {
            "num_heads": wanted.heads,
            "head_dim": wanted.head_dim,
            "sliding_window": wanted.window,
            "scaling": None,
        },
    )
    _check_shape(name, module, "sinks", (wanted.heads,))
    if not isinstance(getattr(config, "o_groups", None), int):
        raise UnsupportedModel(f"o_groups must be an integer, got {config.o_groups!r}")
    rope = "compress" if ratio else "main"
    if (found := getattr(module, "rope_layer_type", None)) != rope:
        raise UnsupportedModel(f"{name}.rope_layer_type is {found!r}, not {rope!r}")
    compressor = getattr(module, "compressor", None)
    if (compressor is not None) != (ratio > 0):
        raise UnsupportedModel(
            f"{name}.compressor is {type(compressor).__name__}, its ratio is {ratio}"
        )
    if ratio:
        halves = 2 if ratio == 4 else 1
        where = f"{name}.compressor"
        _check_compressor(where, compressor, COMPRESSOR_PARTS, ratio, wanted.head_dim, halves)
    if ratio == 4:
        _check_indexer(f"{name}.compressor.indexer", getattr(compressor, "indexer", None), wanted)
    # An instance may hold its class's own forward, as the copy of an attached model does.
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        raise UnsupportedModel(f"{name}.forward is already replaced (by a hook or another adapter)")


def _check_compressor(
    name: str, module: Any, parts: tuple[str, ...], ratio: int, dim: int, halves: int
) -> None:
    if not isinstance(module, nn.Module):
        raise UnsupportedModel(f"there is no module {name}")
    _check_parts(name, module, parts)
    _check_numbers(name, module, {"compress_rate": ratio, "head_dim": dim})
    _check_shape(name, module, "position_bias", (ratio, halves * dim))
    if (rope := getattr(module, "rope_layer_type", None)) != "compress":
        raise UnsupportedModel(f"{name}.rope_layer_type is {rope!r}, not 'compress'")


def _check_indexer(name: str, module: Any, wanted: Attention) -> None:
    _check_compressor(name, module, INDEXER_PARTS, 4, wanted.index_dim, 2)
    _check_numbers(name, module, {"num_heads": wanted.index_heads, "index_topk": wanted.index_topk})
    _check_parts(f"{name}.scorer", module.scorer, ("weights_proj",))
    _check_numbers(
        f"{name}.scorer", module.scorer, {"softmax_scale": None, "weights_scaling": None}
    )


def _check_parts(name: str, module: nn.Module, parts: tuple[str, ...]) -> None:
    for part in parts:
        if not isinstance(getattr(module, part, None), nn.Module):
            raise UnsupportedModel(f"{name} has no submodule {part}")


def _check_numbers(name: str, module: nn.Module, wanted: dict[str, int | None]) -> None:
    for attribute, value in wanted.items():
        found = getattr(module, attribute, None)
        if not isinstance(found, int | float):
            raise UnsupportedModel(f"{name} has no number {attribute}")
        if value is not None and found != value:
            raise UnsupportedModel(f"{name}.{attribute} is {found}, the configuration says {value}")


def _check_shape(name: str, module: nn.Module, parameter: str, shape: tuple[int, ...]) -> None:
    found = getattr(module, parameter, None)
    if not isinstance(found, Tensor) or found.shape != shape:
        size = tuple(found.shape) if isinstance(found, Tensor) else None
        raise UnsupportedModel(f"{name}.{parameter} has shape {size}, the layer needs {shape}")


def _eps(name: str, module: Any, wanted: Attention) -> float:
    """The one epsilon of a layer's norms of heads, window rows and entries, each of which must be
    a root mean square norm.  Raises UnsupportedModel naming the one that is not."""
    norms = [(f"{name}.q_b_norm", module.q_b_norm, wanted.head_dim)]
    norms.append((f"{name}.kv_norm", module.kv_norm, wanted.head_dim))
    if module.compressor is not None:
        norms.append((f"{name}.compressor.kv_norm", module.compressor.kv_norm, wanted.head_dim))
        if (indexer := getattr(module.compressor, "indexer", None)) is not None:
            norms.append((f"{name}.compressor.indexer.kv_norm", indexer.kv_norm, wanted.index_dim))
    found = {where: _probe_norm(where, norm, dim) for where, norm, dim in norms}
    if len(set(found.values())) > 1:
        raise UnsupportedModel(f"the norms of a layer have different epsilons: {found}")
    return next(iter(found.values()))


@torch.no_grad()
def _probe_norm(name: str, norm: nn.Module, dim: int) -> float:
    eps = next((e for a in EPSILONS if isinstance(e := getattr(norm, a, None), float)), None)
    if eps is None:
        raise UnsupportedModel(f"{name} has no number {EPSILONS[0]}")
    weight = getattr(norm, "weight", None)
    device = None if weight is None else weight.device
    # Small enough that epsilon shows.
    values = torch.linspace(-1, 2, dim, device=device)[None] * eps**0.5
    normed = norm(values)
    if not torch.allclose(normed, rms_norm(values, weight, eps=eps), rtol=1e-3, atol=1e-4):
        raise UnsupportedModel(f"{name} is no root mean square norm")
    return eps


def _check_rotation(module: nn.Module, rope_dim: int) -> None:
    """Raises UnsupportedModel where the modelling code has no rope function, or one that does not
    turn adjacent pairs of the last ``rope_dim`` values."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "apply_rotary_pos_emb", None)
        if found is not None:
            _probe(found, rope_dim)
            return
    raise UnsupportedModel(f"{type(module).__module__} has no rope function apply_rotary_pos_emb")


def _probe(rotation: Callable[..., Any], rope_dim: int) -> None:
    """Turn unit vectors by a quarter: the first of a pair must come out as the second."""
    dim = 2 * rope_dim
    cos, sin = torch.zeros(1, dim, rope_dim // 2), torch.ones(1, dim, rope_dim // 2)
    wanted = torch.eye(dim)
    wanted[rope_dim:] = 0
    for first in range(rope_dim, dim, 2):
        wanted[first, first + 1], wanted[first + 1, first] = 1.0, -1.0
    try:
        turned = rotation(torch.eye(dim)[None, None], cos, sin)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"apply_rotary_pos_emb cannot be called: {error}") from error
    if not isinstance(turned, Tensor) or not torch.allclose(turned[0, 0], wanted, atol=1e-5):
        raise UnsupportedModel(
            f"apply_rotary_pos_emb does not turn adjacent pairs of the last {rope_dim} values"
        )
