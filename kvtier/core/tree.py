"""The radix tree: which token sequences are known.  Fixed stride of one page, no splits.

Pages inserted together share a *run*: their token bytes in one piece and the list of their
nodes.  A walk compares a whole run with one memory compare and bisects on a mismatch.  Within a
run a node's successor is the next in the list; every other child hangs in ``children``, so a
branch can attach to any node and no node ever moves.

Knows tokens and structure only: what a node's copies mean is ``residency``'s business.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvtier.types import Identity

if TYPE_CHECKING:
    from kvtier.core.copies import Copy

__all__ = ["NEVER", "Node", "RadixTree", "Run"]

NEVER = float("inf")
_RUN_BYTES = 1 << 16
"""A run longer than this is not extended: extending may have to move its tokens."""


class Run:
    """Pages inserted together.  ``tokens`` may be longer than ``nodes`` after eviction."""

    __slots__ = ("fork", "head", "nodes", "parent", "tokens")

    def __init__(self, parent: "Node", head: bytes, tokens: bytes) -> None:
        self.parent = parent
        self.head = head
        """The key under which the first node hangs in ``parent.children``."""
        self.tokens = bytearray(tokens)
        self.nodes: list[Node] = []
        self.fork = b""
        """Tokens up to where somebody left this run lately.  Many sequences leave a shared prefix
        at the same page, and then one compare takes the place of a bisection."""


class Node:
    """One page.  A root (depth 0) stands for an identity and holds no page."""

    __slots__ = (
        "children",
        "copies",
        "depth",
        "digest",
        "expires",
        "hits",
        "index",
        "keeps",
        "kids",
        "parent",
        "pins",
        "priority",
        "run",
        "tick",
    )

    run: "Run | None"
    """None once the node has left the tree (and for roots)."""
    children: "dict[bytes, Node] | None"
    copies: "list[Copy | None]"
    """By ``residency`` slot: history and checkpoint, in each tier."""
    kids: list[int]
    """Per tier: how many children have a history copy there."""
    expires: float
    """When its time to live ends."""
    digest: bytes
    """Chained key, computed when first needed; a root's is its chain root."""

    def __init__(self, parent: "Node | None", run: "Run | None", index: int, depth: int) -> None:
        self.parent = parent
        self.run = run
        self.index = index
        self.depth = depth
        self.children = None
        self.copies = [None, None, None, None, None, None]
        self.kids = [0, 0, 0]
        self.pins = 0
        self.keeps = 0
        self.tick = 0
        self.hits = 0
        self.priority = 0
        self.expires = NEVER
        self.digest = b""

    @property
    def dead(self) -> bool:
        """Left the tree: nothing can match it any more."""
        return self.run is None

    def successor(self) -> "Node | None":
        if self.run is not None and self.index + 1 < len(self.run.nodes):
            return self.run.nodes[self.index + 1]
        return None

    def offspring(self) -> "list[Node]":
        """All children, in-run successor first."""
        out = [n] if (n := self.successor()) is not None else []
        if self.children:
            out.extend(self.children.values())
        return out

    def page(self, stride: int) -> bytes:
        """The page's own packed tokens."""
        assert self.run is not None
        return bytes(self.run.tokens[self.index * stride : (self.index + 1) * stride])

    def extra(self, stride: int) -> bytes:
        """What its spans add to the key; pages with spans are runs of one page."""
        assert self.run is not None
        return self.run.head[stride:] if self.index == 0 else b""


class RadixTree:
    """All known prefixes, by identity."""

    __slots__ = ("_last", "_sweep_at", "num_nodes", "roots", "stride")

    def __init__(self, page_tokens: int) -> None:
        self.stride = page_tokens * 4
        self.roots: dict[Identity, Node] = {}
        self.num_nodes = 0
        self._last: tuple[Identity, Node] | None = None
        self._sweep_at = 64

    def find_root(self, identity: Identity) -> Node | None:
        """The root of an identity that is known; the last one asked for is at hand."""
        if (last := self._last) is not None and last[0] is identity:
            return last[1]
        if (root := self.roots.get(identity)) is not None:
            self._last = identity, root
        return root

    def root(self, identity: Identity) -> Node:
        """The root of an identity.  Those without pages and pins are forgotten now and then."""
        root = self.find_root(identity)
        if root is None:
            if len(self.roots) >= self._sweep_at:
                self.roots = {who: r for who, r in self.roots.items() if r.children or r.pins}
                self._sweep_at, self._last = 2 * len(self.roots) + 64, None
            root = self.roots[identity] = Node(None, None, 0, 0)
        return root

    # ------------------------------------------------------------------ reading
    def walk(
        self, node: Node, data: bytes, extras: Mapping[int, bytes] | None = None, start: int = 0
    ) -> Node:
        """The last known page of ``data`` (packed tokens), from page ``start`` on, below ``node``,
        which stands before that page.  Changes nothing that can be seen."""
        stride = self.stride
        pos = start * stride
        end = len(data) // stride * stride
        if (run := node.run) is not None and not (extras and start in extras):
            index = node.index + 1
            more = self._common(run, index, 0, data, pos, end, extras)
            if more:  # go on in the middle of a run
                node = run.nodes[index + more - 1]
                pos += more * stride
        child = None
        while pos < end:
            if child is None:
                if (children := node.children) is None:
                    break
                key = data[pos : pos + stride]
                if extras:
                    key += extras.get(pos // stride, b"")
                child = children.get(key)
                if child is None:
                    break
            run = child.run
            assert run is not None
            nodes, fork, child = run.nodes, run.fork, None
            if extras:
                stop = self._common(run, 0, 1, data, pos, end, extras)
            elif fork and data.startswith(fork, pos):
                stop = len(fork) // stride
                if stop > len(nodes):
                    stop = len(nodes)
                at = pos + stop * stride
                if (children := nodes[stop - 1].children) is not None:
                    child = children.get(data[at : at + stride])
                if child is None:
                    stop = self._common(run, 0, stop, data, pos, end, None)
            elif data.startswith(run.tokens, pos):
                stop = len(nodes)
            else:
                stop = self._common(run, 0, 1, data, pos, end, None)
                run.fork = bytes(run.tokens[: stop * stride])
            node = nodes[stop - 1]
            pos += stop * stride
        return node

    def path(self, node: Node, above: int = 0) -> list[Node]:
        """The nodes from page ``above`` (0-based) down to ``node``."""
        runs: list[list[Node]] = []
        while node.depth > above:
            run = node.run
            assert run is not None
            head = max(0, node.index + 1 - (node.depth - above))
            runs.append(run.nodes[head : node.index + 1])
            node = run.parent
        runs.reverse()
        return [n for nodes in runs for n in nodes]

    def _common(
        self,
        run: Run,
        index: int,
        known: int,
        data: bytes,
        pos: int,
        end: int,
        extras: Mapping[int, bytes] | None,
    ) -> int:
        """How many pages of ``run`` from ``index`` on equal ``data`` from ``pos`` on, of which
        ``known`` are known to be."""
        stride, tokens = self.stride, run.tokens
        high = min(len(run.nodes) - index, (end - pos) // stride)
        if extras:  # a page with a span is a run of its own: stop before the next
            page = pos // stride
            high = min([high, *(e - page for e in extras if e > page)])
        low, base = known, index * stride
        mid = low + 1  # most often it is the very next page that differs
        while low < high:
            if data.startswith(
                tokens[base + low * stride : base + mid * stride], pos + low * stride
            ):
                low = mid
            else:
                high = mid - 1
            mid = (low + high + 1) // 2
        return low

    def iterate(self, node: Node) -> Iterator[Node]:
        """All nodes below ``node``, parents before children."""
        stack = node.offspring()
        while stack:
            n = stack.pop()
            yield n
            stack.extend(n.offspring())

    # ------------------------------------------------------------------ writing
    def extend(
        self, node: Node, data: bytes, start: int, extras: Mapping[int, bytes] | None = None
    ) -> list[Node]:
        """The nodes of pages ``start`` .. end of ``data`` below ``node``; makes those missing."""
        node = self.walk(node, data, extras, start)
        out = self.path(node, start)
        stride = self.stride
        page, last = node.depth, len(data) // stride
        while page < last:
            stop = page + 1
            if not extras or page not in extras:
                stop = last if not extras else min([e for e in extras if e > page], default=last)
                stop = min(stop, last)
            out.extend(
                self._append(
                    node,
                    data[page * stride : stop * stride],
                    extras.get(page, b"") if extras else b"",
                )
            )
            node, page = out[-1], stop
        return out

    def _append(self, parent: Node, tokens: bytes, extra: bytes) -> list[Node]:
        stride, run = self.stride, parent.run
        count = len(tokens) // stride
        if (
            run is not None
            and not extra
            and parent.index + 1 == len(run.nodes)
            and len(run.head) == stride
            and len(run.tokens) <= _RUN_BYTES
        ):
            kept = len(run.nodes) * stride  # what eviction has left of it
            del run.tokens[kept:]
            run.tokens += tokens
            run.fork = run.fork[:kept]
        else:
            head = tokens[:stride] + extra
            run = Run(parent, head, tokens)
            if parent.children is None:
                parent.children = {}
            assert head not in parent.children
        first, depth = len(run.nodes), parent.depth
        nodes, node = run.nodes, parent
        for i in range(count):
            node = Node(node, run, first + i, depth + 1 + i)
            nodes.append(node)
        if first == 0:
            assert parent.children is not None
            parent.children[run.head] = nodes[0]
        self.num_nodes += count
        return nodes[first:]

    def remove_leaf(self, node: Node) -> None:
        """Take a childless node out of the tree."""
        run = node.run
        assert run is not None and run.nodes[-1] is node and not node.children, "I7"
        run.nodes.pop()
        node.run = None
        self.num_nodes -= 1
        self.shrunk(run)

    def shrunk(self, run: Run) -> None:
        """Tidy up a run that has lost its last nodes."""
        if not run.nodes:
            siblings = run.parent.children
            assert siblings is not None
            del siblings[run.head]
            if not siblings:
                run.parent.children = None
        elif len(run.tokens) > 2 * len(run.nodes) * self.stride:
            del run.tokens[len(run.nodes) * self.stride :]

    def remove_subtree(self, node: Node) -> list[Node]:
        """Take a node and everything below it out of the tree; children before parents."""
        gone = [node, *self.iterate(node)]
        gone.reverse()
        for n in gone:
            self.remove_leaf(n)
        return gone
