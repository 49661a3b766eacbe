"""What a V3.2 attention layer has beside that of V3: the index, checked.

Looks at submodules, attributes, shapes and tiny numeric probes; never at a library version.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.mla.structure import Rotation, rope_function
from kvtier_deepseek.v32.config import Attention

__all__ = ["check_indexer", "looks_like_v32", "rotations_of"]

PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
LATENT_ROTATION = "apply_rotary_pos_emb_interleave"
INDEX_ROTATION = "apply_rotary_pos_emb"


def looks_like_v32(model: nn.Module) -> bool:
    """Whether any latent attention of ``model`` has an index, complete or not."""
    return any(
        isinstance(getattr(module, "kv_a_proj_with_mqa", None), nn.Module)
        and isinstance(getattr(module, "indexer", None), nn.Module)
        for module in model.modules()
    )


def check_indexer(name: str, module: nn.Module, wanted: Attention) -> None:
    """Raises UnsupportedModel naming what the index of an attention layer lacks, or what is of
    another size than its configuration says."""
    if not isinstance(getattr(module, "indexer", None), nn.Module):
        raise UnsupportedModel(f"{name} has no submodule indexer")
    indexer: Any = module.indexer
    where = f"{name}.indexer"
    for part in PARTS:
        if not isinstance(getattr(indexer, part, None), nn.Module):
            raise UnsupportedModel(f"{where} has no submodule {part}")
    sizes = {
        "n_heads": wanted.index_heads,
        "head_dim": wanted.index_dim,
        "index_topk": wanted.index_topk,
        "qk_rope_head_dim": wanted.heads.rope,
    }
    for attribute in (*sizes, "softmax_scale"):
        found = getattr(indexer, attribute, None)
        if not isinstance(found, int | float):
            raise UnsupportedModel(f"{where} has no number {attribute}")
        if found != sizes.get(attribute, found):
            raise UnsupportedModel(
                f"{where}.{attribute} is {found}, the configuration says {sizes[attribute]}"
            )
    if not indexer.softmax_scale > 0:
        raise UnsupportedModel(f"{where}.softmax_scale is {indexer.softmax_scale}, not positive")
    if not isinstance(getattr(indexer.weights_proj, "weight", None), Tensor):
        raise UnsupportedModel(f"{where}.weights_proj has no weight, whose type it computes in")
    # An instance may hold its class's own forward, as the copy of an attached model does.
    own = vars(indexer).get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(indexer).forward:
        raise UnsupportedModel(
            f"{where}.forward is already replaced (by a hook or another adapter)"
        )


def rotations_of(module: nn.Module) -> tuple[Rotation, Rotation]:
    """The rope functions of the module's own modelling code, for latent rows and for the index.

    Raises UnsupportedModel where that code lacks one, or where the index's does not turn pairs that
    lie half a row apart.
    """
    latent = rope_function(module, LATENT_ROTATION)
    index = rope_function(module, INDEX_ROTATION)
    row = torch.zeros(1, 1, 1, 8)
    row[..., 0] = 1.0
    angle = torch.full((1, 1, 8), 0.5)
    try:
        turned, _ = index(row, row, angle.cos(), angle.sin(), unsqueeze_dim=2)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"{INDEX_ROTATION} cannot be called: {error}") from error
    touched = turned.flatten().abs().gt(1e-3).nonzero().flatten().tolist()
    if touched != [0, 4]:
        raise UnsupportedModel(f"{INDEX_ROTATION} turns value 0 of 8 into values {touched}")
    return latent, index
