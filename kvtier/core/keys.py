"""Keys.  In memory a page is its token bytes; only stores see digests.

A stored key is a blake2b-128 chain: base(layout, model) -> root(identity) -> page -> page ...
Every field is tagged and length-framed, so no two different inputs are ever the same bytes, and
nothing depends on the process (no ``hash()``).
"""

import hashlib
import struct
from collections.abc import Sequence

from kvtier.errors import TokenError
from kvtier.types import Identity, Span

__all__ = [
    "ANONYMOUS",
    "KEY_BYTES",
    "chain_base",
    "chain_root",
    "check_spans",
    "checkpoint_key",
    "page_extras",
    "page_key",
]

KEY_BYTES = 16
ANONYMOUS = Identity()


def _digest(tag: bytes, *fields: bytes | None) -> bytes:
    h = hashlib.blake2b(digest_size=KEY_BYTES, person=tag)
    for field in fields:
        h.update(b"-" if field is None else b"+" + struct.pack("<Q", len(field)))
        h.update(field or b"")
    return h.digest()


def chain_base(layout_fingerprint: bytes, model: bytes) -> bytes:
    """What all keys of one layout and one model start from; also names their store on disk."""
    return _digest(b"kvtier base 1", layout_fingerprint, model)


def chain_root(base: bytes, identity: Identity) -> bytes:
    """The chain's first link: parent of every first page of this identity."""
    tenant, adapter = (
        None if text is None else text.encode("utf-8", "surrogatepass")
        for text in (identity.tenant, identity.adapter)
    )
    return _digest(b"kvtier root 1", base, tenant, adapter, identity.salt)


_PAGE = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvtier page 1")  # cheaper to copy


def page_key(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """Key of the page ``tokens`` (packed) behind ``parent``; ``extra`` comes from its spans."""
    if extra:
        return _digest(b"kvtier span 1", parent, tokens, extra)
    h = _PAGE.copy()
    h.update(parent)
    h.update(tokens)
    return h.digest()


def checkpoint_key(page: bytes) -> bytes:
    """Key of the checkpoint at the end of the page with this key."""
    return _digest(b"kvtier tail 1", page)


def check_spans(spans: Sequence[Span], num_tokens: int) -> tuple[Span, ...]:
    """Sorted spans; raises TokenError if one is malformed, empty, overlaps another or lies outside
    the tokens."""
    if not isinstance(spans, Sequence):
        raise TokenError(f"spans must be a sequence of Span, got {type(spans).__name__}")
    for span in spans:
        if not isinstance(span, Span) or not isinstance(span.digest, bytes):
            raise TokenError(f"a span is a Span(start, stop, digest: bytes), got {span!r}")
        if type(span.start) is not int or type(span.stop) is not int:
            raise TokenError(f"a span starts and stops at ints, got {span!r}")
    ordered = tuple(sorted(spans, key=lambda s: s.start))
    end = 0
    for span in ordered:
        if not end <= span.start < span.stop:
            raise TokenError(f"span [{span.start}, {span.stop}) is empty or overlaps another")
        if span.stop > num_tokens:
            raise TokenError(
                f"span [{span.start}, {span.stop}) ends past the {num_tokens} tokens given"
            )
        if not span.digest:
            raise TokenError(f"span [{span.start}, {span.stop}) needs a digest of its content")
        end = span.stop
    return ordered


def page_extras(spans: Sequence[Span], page_tokens: int) -> dict[int, bytes]:
    """For each page (0-based) that a span touches: bytes that tell the span and where it lies."""
    out: dict[int, bytes] = {}
    for span in spans:
        for page in range(span.start // page_tokens, -(-span.stop // page_tokens)):
            frame = struct.pack(
                "<qqQ", span.start - page * page_tokens, span.stop - span.start, len(span.digest)
            )
            out[page] = out.get(page, b"") + frame + span.digest
    return out
