"""Keys: what enters them, that nothing runs together, and that no process differs."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.core.keys import (
    KEY_BYTES,
    chain_base,
    chain_root,
    check_spans,
    checkpoint_key,
    page_extras,
    page_key,
)
from kvtier.errors import TokenError
from kvtier.types import Identity, Span

ROOT = Path(__file__).parents[2]
BASE = chain_base(b"layout", b"model")
TOKENS = bytes(range(16))

PRINT_KEYS = """
from kvtier.core.keys import *
from kvtier.types import Identity, Span
base = chain_base(b"layout", b"model")
root = chain_root(base, Identity(tenant="t\\u00e9", adapter="a", salt=b"\\x00s"))
extra = page_extras([Span(1, 6, b"image")], 4)
page = page_key(root, bytes(range(16)))
for key in (base, root, page, page_key(page, bytes(16), extra[1]), checkpoint_key(page)):
    print(key.hex())
"""


def distinct(keys: list[bytes]) -> bool:
    return len(set(keys)) == len(keys) and all(len(k) == KEY_BYTES for k in keys)


def test_same_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEYS],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    (output,) = outputs
    assert distinct([bytes.fromhex(line) for line in output.split()])


def test_known_values() -> None:
    """What is on disks already must be found again: a change here is a new format."""
    root = chain_root(BASE, Identity(tenant="t", adapter="a", salt=b"s"))
    page = page_key(root, TOKENS)
    assert BASE.hex() == "11e0893116b57cbae49b6163540316e7"
    assert root.hex() == "7955875bea9b761511ccec91af17399d"
    assert page.hex() == "0a1b78133f05614617af3f0108100ca1"
    assert page_key(page, TOKENS, b"extra").hex() == "ddf27314a45803df469f312c34122d8c"
    assert checkpoint_key(page).hex() == "3abbfd4088da32e5ec250acfd768be72"


def test_base_takes_layout_and_model_apart() -> None:
    pairs = [(b"a", b"bc"), (b"ab", b"c"), (b"abc", b""), (b"", b"abc"), (b"bc", b"a")]
    assert distinct([chain_base(*p) for p in pairs])


def test_every_field_of_an_identity_counts() -> None:
    """Absent, empty and any value differ, in each field and between fields (★55)."""
    texts, salts = [None, "", "a", "s", "as"], [None, b"", b"a", b"s", b"as"]
    identities = [
        Identity(tenant=t, adapter=a, salt=s) for t, a, s in itertools.product(texts, texts, salts)
    ]
    assert distinct([chain_root(BASE, i) for i in identities])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Identity(tenant="a", adapter="bc"), Identity(tenant="ab", adapter="c")),
        (Identity(tenant="s"), Identity(adapter="s")),
        (Identity(adapter="s"), Identity(salt=b"s")),
        (Identity(tenant=""), Identity()),
        (Identity(tenant="+\x01"), Identity(tenant="+", adapter="\x01")),
    ],
)
def test_nothing_runs_together(one: Identity, other: Identity) -> None:
    assert chain_root(BASE, one) != chain_root(BASE, other)


def test_roots_differ_by_base() -> None:
    assert chain_root(BASE, Identity()) != chain_root(chain_base(b"other", b"model"), Identity())


def test_page_keys_chain() -> None:
    root = chain_root(BASE, Identity())
    first = page_key(root, TOKENS)
    second = page_key(first, TOKENS)
    assert distinct([root, first, second, page_key(root, TOKENS[::-1]), page_key(second, TOKENS)])
    assert page_key(first, b"") != first


def test_extra_is_not_more_tokens() -> None:
    root = chain_root(BASE, Identity())
    keys = [page_key(root, TOKENS + b"x"), page_key(root, TOKENS, b"x"), page_key(root, TOKENS)]
    assert distinct(keys)


def test_checkpoint_keys_are_not_page_keys() -> None:
    page = page_key(chain_root(BASE, Identity()), TOKENS)
    assert distinct([page, checkpoint_key(page), page_key(page, b"")])


def test_extras_tell_where_a_span_lies() -> None:
    def extras(start: int, stop: int, digest: bytes = b"d") -> dict[int, bytes]:
        return page_extras([Span(start, stop, digest)], 4)

    assert sorted(extras(4, 8)) == [1]
    assert sorted(extras(3, 9)) == [0, 1, 2]
    assert sorted(extras(7, 8)) == [1]
    # Place, length and content each make a difference, and so does the page within the span.
    same_page = [extras(4, 7)[1], extras(5, 7)[1], extras(4, 8)[1], extras(4, 7, b"e")[1]]
    assert len(set(same_page)) == 4
    assert len({*extras(3, 9).values()}) == 3
    # The same span one page further looks the same from its pages: keys chain anyway.
    assert extras(5, 7)[1] == extras(9, 11)[2]


def test_extras_of_two_spans_do_not_run_together() -> None:
    def of(*spans: Span) -> bytes:
        return page_extras(spans, 8)[0]

    both = of(Span(0, 2, b"ab"), Span(4, 6, b"c"))
    assert both != of(Span(0, 2, b"a"), Span(4, 6, b"bc"))
    assert both != of(Span(0, 2, b"ab"))
    assert both.startswith(of(Span(0, 2, b"ab")))


def test_spans_are_sorted_and_checked() -> None:
    a, b = Span(4, 6, b"a"), Span(0, 4, b"b")
    assert check_spans([a, b], 6) == (b, a)
    assert check_spans([], 0) == ()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([Span(2, 2, b"x")], "empty"),
        ([Span(3, 2, b"x")], "empty"),
        ([Span(-1, 2, b"x")], "empty or overlaps"),
        ([Span(0, 3, b"x"), Span(2, 4, b"y")], "overlaps"),
        ([Span(4, 9, b"x")], "ends past the 8 tokens"),
        ([Span(0, 3, b"")], "digest"),
    ],
)
def test_bad_spans(spans: list[Span], message: str) -> None:
    with pytest.raises(TokenError, match=message):
        check_spans(spans, 8)
