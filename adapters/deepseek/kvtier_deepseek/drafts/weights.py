"""Reading the draft weights of a checkpoint, which transformers skips when it loads a model.

Safetensors only; a tensor is read when it is asked for.  Block-scaled fp8 is brought to the
module's own type; formats that would be guessed at are refused by name.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from kvtier_deepseek.errors import UnsupportedModel

__all__ = ["Tensors", "fill", "like_layer", "read"]

INDEX = "model.safetensors.index.json"
BLOCK = 128
"""Rows and columns that share one scale in fp8 checkpoints."""


@final
class Tensors:
    """The tensors of a checkpoint whose names begin alike, by the rest of their names."""

    def __init__(self, prefix: str, files: Mapping[str, Path]) -> None:
        self._prefix = prefix
        self._files = files
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._files

    def get(self, name: str) -> Tensor:
        """In full precision, whatever it is stored in.  Raises UnsupportedModel naming it."""
        found = self._read(name)
        if found.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            stem = name.removesuffix(".weight")
            for scale in (f"{name}_scale_inv", f"{stem}.scale"):
                if scale in self:
                    return _scaled(found, self._read(scale))
            raise UnsupportedModel(f"{self._prefix}{name} is fp8 and has no scale")
        if not found.is_floating_point():
            raise UnsupportedModel(
                f"{self._prefix}{name} is packed {found.dtype}: convert it first"
            )
        return found

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        key = self._prefix + name
        if key not in self._files:
            raise UnsupportedModel(f"the checkpoint has no tensor {key}")
        path = self._files[key]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        tensor: Tensor = self._open[path].get_tensor(key)
        return tensor


def read(checkpoint: str | Path, prefix: str) -> Tensors:
    """The tensors of a directory of safetensors files whose names begin with ``prefix``.

    Raises UnsupportedModel where there are none.
    """
    from safetensors import safe_open

    folder = Path(checkpoint)
    files: dict[str, Path] = {}
    if (index := folder / INDEX).is_file():
        named: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {k: folder / v for k, v in named.items() if k.startswith(prefix)}
    else:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                files |= {k: path for k in opened.keys() if k.startswith(prefix)}  # noqa: SIM118
    if not files:
        raise UnsupportedModel(f"{folder} has no tensors {prefix}*: no draft weights")
    return Tensors(prefix, files)


def fill(module: nn.Module, tensors: Tensors, name_of: Callable[[str], str]) -> None:
    """Load every parameter and buffer of ``module`` that a checkpoint has.

    ``name_of`` says where the checkpoint has a key.  Of a mixture's experts, which lie stacked in
    ``experts.gate_up_proj`` and ``experts.down_proj`` here, it is asked for each one's parts:
    ``experts.{i}.gate_proj.weight``, ``.up_proj.weight``, ``.down_proj.weight``.  Raises
    UnsupportedModel naming a tensor that is missing or of another shape.
    """
    with torch.no_grad():
        for key, target in module.state_dict(keep_vars=True).items():
            stem, _, part = key.rpartition(".")
            if stem.endswith(".experts") and part in ("gate_up_proj", "down_proj"):
                parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                for i in range(target.shape[0]):
                    names = [name_of(f"{stem}.{i}.{each}.weight") for each in parts]
                    joined = torch.cat([tensors.get(name) for name in names])
                    _copy(f"{stem}.{i}", target[i], joined)
            else:
                _copy(key, target, tensors.get(name_of(key)))


def like_layer(module: nn.Module, layer: nn.Module, reference: Tensor) -> None:
    """Bring a draft's parameters to the device and types that ``layer`` of the model has its own
    in; those it has none of to those of its first projection."""
    own = {name: each.dtype for name, each in layer.named_parameters()}
    plain = next(p.dtype for p in layer.parameters() if p.dim() == 2)
    module.to(reference.device)
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        known = own.get(".".join(parts[parts.index("block") + 1 :])) if "block" in parts else None
        if known is None and len(parts) > 2 and parts[0] == "blocks":
            known = own.get(".".join(parts[2:]))
        kept = parameter.dtype if "norm" in name or "hc_head" in name else plain
        parameter.data = parameter.data.to(known if known is not None else kept)
    module.eval().requires_grad_(False)


def _copy(key: str, target: Tensor, found: Tensor) -> None:
    if found.shape != target.shape:
        raise UnsupportedModel(
            f"{key} has shape {tuple(found.shape)} in the checkpoint, the draft needs "
            f"{tuple(target.shape)}"
        )
    target.copy_(found)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    wide = scales.to(torch.float32).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    if wide.shape[0] < values.shape[0] or wide.shape[1] < values.shape[1]:
        raise UnsupportedModel(f"scales {tuple(scales.shape)} do not cover {tuple(values.shape)}")
    return values.to(torch.float32) * wide[: values.shape[0], : values.shape[1]]
