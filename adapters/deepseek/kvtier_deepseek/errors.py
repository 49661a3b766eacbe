"""The one exception the adapter adds to kvtier's own."""

__all__ = ["UnsupportedModel"]


class UnsupportedModel(ValueError):
    """A model, or a field of its configuration, that this adapter does not know.  Names it."""
