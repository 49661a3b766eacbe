"""The radix tree, one scene at a time; ``tests/property/test_tree.py`` adds chance."""

import numpy as np

from kvtier.core.tree import RadixTree
from kvtier.types import Identity


def data(*pages: int) -> bytes:
    """Pages of two tokens each."""
    return np.repeat(np.array(pages, dtype="<i4"), 2).tobytes()


def test_run_extended_after_eviction_forgets_where_it_was_left() -> None:
    tree = RadixTree(2)
    root = tree.root(Identity())
    nodes = tree.extend(root, data(1, 2, 3, 4), 0)
    assert tree.walk(root, data(1, 2, 3, 9)).depth == 3  # somebody leaves the run after page 3
    for node in (nodes[3], nodes[2]):
        tree.remove_leaf(node)
    tree.extend(nodes[1], data(1, 2, 5, 6), 2)
    assert tree.walk(root, data(1, 2, 3, 4)).depth == 2
    assert tree.walk(root, data(1, 2, 5, 7)).depth == 3


def test_identities_come_and_go() -> None:
    """Those with pages or pins stay, whoever else comes by."""
    tree = RadixTree(2)
    kept, pinned = Identity(tenant="kept"), Identity(tenant="pinned")
    (page,) = tree.extend(tree.root(kept), data(1), 0)
    root = tree.root(pinned)
    root.pins = 1
    for i in range(500):
        tree.root(Identity(tenant=str(i)))
        assert len(tree.roots) <= 70
    assert tree.root(pinned) is root
    assert tree.walk(tree.root(kept), data(1)) is page
