"""From a Hugging Face configuration to the layout of its cache.

Picks the architecture; what its fields mean is read in ``mla.config``, ``v32.config`` and
``v4.config``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvtier import ConfigError
from kvtier.layouts import Layout
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.mla import config as mla_config
from kvtier_deepseek.v4 import config as v4_config
from kvtier_deepseek.v32 import config as v32_config

__all__ = ["layout_for"]

MODEL_TYPES = (*mla_config.MODEL_TYPES, *v32_config.MODEL_TYPES, *v4_config.MODEL_TYPES)


@contextmanager
def _as_unsupported() -> Iterator[None]:
    """What a layout refuses is what the caller or the configuration gave, and is said once."""
    try:
        yield
    except ConfigError as error:
        raise UnsupportedModel(str(error)) from None


@_as_unsupported()
def layout_for(
    config: Any,
    *,
    record: str | None = None,
    index_record: str | None = None,
    page_tokens: int | None = None,
    dtype: torch.dtype | str | None = None,
    tail: str | None = None,
    window_record: str | None = None,
    draft: str | None = None,
    max_draft: int = 0,
) -> Layout:
    """Layout of a DeepSeek-V2-Lite, V2, V3, V3.2 or V4 model's cache, from its configuration.

    V2 and V3: ``record`` is "dense" (plain values, the default).  Their layers may have a window
    (MLA_SWA), by ``window_attn_skip_freq``, a list with 1 for each that has and 0 for each that has
    not, or by ``layer_types``: these keep their rows as ``window_record`` says, "fp8" (656 bytes,
    the default) or "dense".

    V3.2: ``record`` is "dense" (the default) or "fp8" (656 bytes), ``index_record`` "fp8" (132
    bytes, the default) or "dense".

    V4, in the schema of the released checkpoints or in HF's: ``record`` is "fp8" (584 bytes, the
    default) or "fp32", ``index_record`` "fp8" (the default), "mxfp4" or "fp32", ``tail`` "minimal"
    (the default) or "seed".

    ``dtype`` is that of plain values of V2, V3 and V3.2, the one the model computes in: by default
    the configuration's own, or bfloat16 where it has none, as one made by hand has.  V4 takes none:
    ``record="fp32"`` keeps its values plain.  ``page_tokens`` defaults to 64, for V4 to 256.

    ``draft`` adds the layers of a draft that has a cache, "mtp" (V3, V4) or "dspark" (V4);
    ``max_draft`` (0) is the most tokens that a step may carry beyond those that are certain,
    whoever drafts them.

    Raises UnsupportedModel naming the field or the argument for anything else.
    """
    model_type = getattr(config, "model_type", None)
    if model_type in v4_config.MODEL_TYPES:
        if dtype is not None:
            raise UnsupportedModel(
                f"dtype {dtype!r}: leave it out; the types of V4's values are those of its record "
                "formats (record='fp32' and index_record='fp32' keep float32)"
            )
        if window_record is not None:
            raise UnsupportedModel(f"window_record {window_record!r}: V4's windows are as record")
        return v4_config.layout_for(
            config,
            record=record,
            index_record=index_record,
            page_tokens=page_tokens,
            tail=tail,
            draft=draft,
            max_draft=max_draft,
        )
    if model_type in v32_config.MODEL_TYPES:
        for name, value in (("tail", tail), ("window_record", window_record)):
            if value is not None:
                raise UnsupportedModel(f"{name} {value!r}: {model_type} has none")
        return v32_config.layout_for(
            config,
            record=record,
            index_record=index_record,
            page_tokens=page_tokens,
            dtype=dtype,
            draft=draft,
            max_draft=max_draft,
        )
    if model_type not in mla_config.MODEL_TYPES:
        raise UnsupportedModel(f"model_type {model_type!r} is not one of {MODEL_TYPES}")
    for name, value in (("index_record", index_record), ("tail", tail)):
        if value is not None:
            raise UnsupportedModel(f"{name} {value!r}: {model_type} has none")
    return mla_config.layout_for(
        config,
        record=record,
        window_record=window_record,
        page_tokens=page_tokens,
        dtype=dtype,
        draft=draft,
        max_draft=max_draft,
    )
