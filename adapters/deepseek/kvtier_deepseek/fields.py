"""Reading single fields of a configuration that may be anyone's."""

from collections.abc import Mapping
from typing import Any

from kvtier_deepseek.errors import UnsupportedModel

__all__ = [
    "DRAFT_STATE",
    "ROPE_TYPES",
    "count",
    "is_size",
    "mapping",
    "refuse_rope_type",
    "size",
]

DRAFT_STATE = "draft_state"
"""The component of what pages keep for draft layers: no part of the model's own attention."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose rotation of a position never changes.  Others ("dynamic", "longrope") depend on the
longest sequence seen so far: a cached key would not be a function of its prefix."""


def size(config: Any, name: str) -> int:
    """The field as a positive integer.  Raises UnsupportedModel naming it."""
    value = getattr(config, name, None)
    if not is_size(value):
        raise UnsupportedModel(f"{name} must be a positive integer, got {value!r}")
    assert isinstance(value, int)
    return value


def count(config: Any, name: str) -> int:
    """The field as an integer, 0 where there is none.  Raises UnsupportedModel naming it."""
    value = getattr(config, name, None) or 0
    if not is_size(value) and value != 0:
        raise UnsupportedModel(f"{name} is {value!r}, which is no count")
    return int(value)


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def mapping(config: Any, name: str) -> Mapping[str, Any]:
    """The field, empty where there is none.  Raises UnsupportedModel where it is no mapping."""
    fields = getattr(config, name, None) or {}
    if not isinstance(fields, Mapping):
        raise UnsupportedModel(f"{name} must be a mapping, got {fields!r}")
    return fields


def refuse_rope_type(rope_type: object) -> None:
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type {rope_type!r} is not one of {ROPE_TYPES}")
