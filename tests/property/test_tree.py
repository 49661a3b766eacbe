"""The radix tree against a dictionary of prefixes: same answers, page by page, whatever order
pages come and go in.

Pages are short words over a small alphabet, so that sequences share prefixes, leave runs in the
middle and come back after eviction; two pages may differ in their first token, their last, or
only in the span that touches them.  Half of the profile's examples are run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.core import tree as tree_module
from kvtier.core.tree import Node, RadixTree
from kvtier.types import Identity

Step = tuple[int, bytes]  # a page's word and what spans add to it
Path = tuple[Step, ...]

IDENTITIES = (Identity(), Identity(tenant="a"), Identity(adapter="a"))
STEP = st.tuples(st.integers(0, 3), st.sampled_from([b"", b"", b"", b"", b"x", b"yy"]))
PLAIN = st.tuples(st.integers(0, 3), st.just(b""))
PATHS = st.one_of(st.lists(PLAIN, max_size=12), st.lists(STEP, max_size=7)).map(tuple)


def words(page: int) -> list[bytes]:
    """Four pages: one and its variations in the first token, the last and in the middle."""
    base = np.arange(page, dtype="<i4") + 7
    out = []
    for at in (None, 0, page - 1, page // 2):
        word = base.copy()
        if at is not None:
            word[at] += 1 + len(out)
        out.append(word.tobytes())
    return out


class TreeMachine(RuleBasedStateMachine):
    @initialize(
        page=st.sampled_from([1, 2, 3, 16, 64, 512]),
        cap=st.sampled_from([0, 1, 64, 1 << 16]),
    )
    def start(self, page: int, cap: int) -> None:
        self.words = words(page)
        self.stride = 4 * page
        self.cap, tree_module._RUN_BYTES = tree_module._RUN_BYTES, cap * page
        self.tree = RadixTree(page)
        self.model: dict[Identity, dict[Path, Node]] = {who: {} for who in IDENTITIES}

    def teardown(self) -> None:
        if hasattr(self, "cap"):
            tree_module._RUN_BYTES = self.cap

    def encode(self, path: Path, rest: bytes = b"") -> tuple[bytes, dict[int, bytes] | None]:
        data = b"".join(self.words[word] for word, _ in path) + rest
        extras = {i: extra for i, (_, extra) in enumerate(path) if extra}
        return data, extras or None

    def longest(self, who: Identity, path: Path) -> Path:
        known = self.model[who]
        for end in range(len(path), 0, -1):
            if path[:end] in known:
                return path[:end]
        return ()

    def draw_path(self, data: Any, who: Identity) -> Path:
        """Anything, or something known with its end changed."""
        known = sorted(self.model[who])
        if not known or not data.draw(st.booleans()):
            return data.draw(PATHS)
        path = data.draw(st.sampled_from(known))
        kept = data.draw(st.integers(0, len(path)))
        return (*path[:kept], *data.draw(PATHS))

    def check_walk(self, who: Identity, path: Path, rest: bytes) -> None:
        known = self.model[who]
        root, best = self.tree.root(who), self.longest(who, path)
        data, extras = self.encode(path, rest)
        node = self.tree.walk(root, data, extras)
        assert node is (known[best] if best else root)
        nodes = self.tree.path(node)
        assert nodes == [known[best[: i + 1]] for i in range(len(best))]
        for start in range(len(best) + 1):  # from any page on the way
            above = known[best[:start]] if start else root
            assert self.tree.walk(above, data, extras, start) is node
            assert self.tree.path(node, start) == nodes[start:]

    @rule(data=st.data(), who=st.sampled_from(IDENTITIES))
    def walk(self, data: Any, who: Identity) -> None:
        rest = data.draw(st.integers(0, self.stride // 4 - 1)) * 4
        word = data.draw(st.integers(0, 3))
        self.check_walk(who, self.draw_path(data, who), self.words[word][:rest])

    @rule(data=st.data(), who=st.sampled_from(IDENTITIES))
    def extend(self, data: Any, who: Identity) -> None:
        path = self.draw_path(data, who)
        best = self.longest(who, path)
        start = data.draw(st.integers(0, len(best)))
        above = self.model[who][path[:start]] if start else self.tree.root(who)
        tokens, extras = self.encode(path)
        nodes = self.tree.extend(above, tokens, start, extras)
        assert len(nodes) == len(path) - start
        for end, node in enumerate(nodes, start + 1):
            was = self.model[who].setdefault(path[:end], node)
            assert was is node, "a second node for one page"

    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        """Leaves go, one after the other, towards the root."""
        for _ in range(data.draw(st.integers(1, 6))):
            leaves = [
                (who, path)
                for who, known in self.model.items()
                for path, node in known.items()
                if not node.offspring()
            ]
            if not leaves:
                return
            who, path = data.draw(st.sampled_from(sorted(leaves, key=repr)))
            node = self.model[who].pop(path)
            assert not any(p[: len(path)] == path for p in self.model[who])
            self.tree.remove_leaf(node)
            assert node.dead

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        who = data.draw(st.sampled_from([w for w, known in self.model.items() if known]))
        known = self.model[who]
        path = data.draw(st.sampled_from(sorted(known)))
        gone = self.tree.remove_subtree(known[path])
        below = {p: n for p, n in known.items() if p[: len(path)] == path}
        assert set(gone) == set(below.values())
        assert [n.depth for n in gone][-1] == len(path)
        places = {node: i for i, node in enumerate(gone)}
        for node in gone[:-1]:
            assert node.parent is not None and places[node] < places[node.parent]
        for p in below:
            del known[p]

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "model"):
            return
        tree = self.tree
        assert tree.num_nodes == sum(map(len, self.model.values()))
        for who, known in self.model.items():
            root = tree.root(who)
            listed = list(tree.iterate(root))
            assert set(listed) == set(known.values()) and len(listed) == len(known)
            seen = {root}
            for node in listed:
                assert node.parent in seen, "a page listed before its parent"
                seen.add(node)
            for path, node in known.items():
                word, extra = path[-1]
                assert node.depth == len(path)
                assert node.page(self.stride) == self.words[word]
                assert node.extra == extra
                assert node.parent is (known[path[:-1]] if path[:-1] else root)
                kids = {n for p, n in known.items() if p[:-1] == path}
                assert set(node.offspring()) == kids
            for path in known:
                self.check_walk(who, path, b"")


@pytest.mark.timeout(600)
def test_tree_machine() -> None:
    profile = settings.default
    assert profile is not None
    half = settings(profile, max_examples=max(25, profile.max_examples // 2))
    run_state_machine_as_test(TreeMachine, settings=half)


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_leaves_at_every_page(page: int) -> None:
    """Branches off a long run, and partial matches within it, at every page and token."""
    a, b, c, _ = words(page)
    tree, who, pages = RadixTree(page), Identity(), 12
    root = tree.root(who)
    trunk = tree.extend(root, a * pages, 0)
    for cut in range(pages):
        assert tree.walk(root, a * cut + b * 2).depth == cut
    for tokens in range(0, pages * page, max(1, page // 3)):
        assert tree.walk(root, (a * pages)[: 4 * tokens]).depth == tokens // page
    for cut in range(pages):
        tree.extend(root, a * cut + b + c, 0)
    assert tree.num_nodes == pages * 3
    for cut in range(pages):
        found = tree.path(tree.walk(root, a * cut + b + c + a))
        assert found[:cut] == trunk[:cut] and len(found) == cut + 2
        assert tree.walk(root, a * cut + c).depth == cut
    assert tree.walk(root, a * pages + b).depth == pages


@pytest.mark.parametrize("page", [64, 512])
def test_runs_past_the_cap(page: int) -> None:
    """A sequence that grows page by page, far past what one run holds."""
    a, b, _, _ = words(page)
    tree = RadixTree(page)
    root = node = tree.root(Identity())
    pages = 3 * (1 << 16) // (4 * page)
    data = b""
    for i in range(pages):
        data += b if i % 5 == 0 else a
        (node,) = tree.extend(node, data, i)
    assert tree.num_nodes == pages
    assert len({id(n.run) for n in tree.iterate(root)}) > 1
    assert tree.path(tree.walk(root, data + a)) == tree.path(node)
    for cut in range(1, pages, 7):
        changed = data[: cut * 4 * page] + (a if cut % 5 == 0 else b)
        assert tree.walk(root, changed).depth == cut
    while node.depth > 3:
        above = node.parent
        tree.remove_leaf(node)
        assert above is not None and tree.walk(root, data) is above
        node = above


@given(st.lists(st.integers(0, 200), max_size=400))
def test_identities_without_pages_are_forgotten(numbers: list[int]) -> None:
    """Any number of them may come by; those with pages, and those pinned, stay."""
    tree = RadixTree(1)
    word = words(1)[0]
    for number in (5, 6):
        tree.extend(tree.root(Identity(tenant=str(number))), word, 0)
    pinned = tree.root(Identity(tenant="7"))
    pinned.pins = 1
    for number in numbers:
        tree.root(Identity(tenant=str(number)))
    assert tree.root(Identity(tenant="7")) is pinned
    for number in (5, 6):
        assert tree.walk(tree.root(Identity(tenant=str(number))), word).depth == 1
    assert len(tree.roots) <= 70
