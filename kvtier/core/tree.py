"""The radix tree: which token sequences are known.  Fixed stride of one page, no splits.

Pages inserted together share a *run*: their token bytes in one piece and the list of their
nodes.  A walk compares a whole run with one memory compare and bisects on a mismatch.  Within a
run a node's successor is the next in the list; every other child hangs in ``children``, so a
branch can attach to any node and no node ever moves.  Children hang under how their page begins;
that finds a candidate, and the compare of its run decides.

Knows tokens and structure only: what a node's copies mean is ``residency``'s business.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvtier.types import Identity

if TYPE_CHECKING:
    from kvtier.core.copies import Copy

__all__ = ["NEVER", "Node", "RadixTree", "Run"]

NEVER = float("inf")
_HEAD_BYTES = 64
"""How much of a page's beginning children are looked up by: cheaper to hash than a page."""
_RUN_BYTES = 1 << 14
"""A run longer than this is not extended: extending copies its tokens."""


class Run:
    """Pages inserted together.  ``tokens`` may be longer than ``nodes`` after eviction."""

    __slots__ = ("extra", "fork", "held", "nodes", "parent", "tokens")

    def __init__(self, parent: "Node", tokens: bytes, extra: bytes) -> None:
        self.parent = parent
        self.extra = extra
        """What spans add to the key of its first page; a page with spans is a run of its own."""
        self.tokens = tokens
        self.nodes: list[Node] = []
        self.fork = b""
        """Tokens up to where somebody left this run lately.  Many sequences leave a shared prefix
        at the same page, and then one compare takes the place of a bisection."""
        self.held = [0, 0, 0]
        """Per tier: how many of its pages, from the first on, have a history copy there."""

    def hold(self, tier: int, pages: int) -> None:
        """From now on its first ``pages`` pages have a history copy in a tier."""
        before, self.held[tier] = self.held[tier], pages
        if bool(before) != bool(pages):
            if (branches := self.parent.branches) is None:
                branches = self.parent.branches = [0, 0, 0]
            branches[tier] += 1 if pages else -1


class Node:
    """One page.  A root (depth 0) stands for an identity and holds no page."""

    __slots__ = (
        "branches",
        "children",
        "copies",
        "depth",
        "digest",
        "expires",
        "hits",
        "index",
        "keeps",
        "parent",
        "pins",
        "priority",
        "run",
        "tick",
    )

    run: "Run | None"
    """None once the node has left the tree (and for roots)."""
    children: "dict[bytes, Run | dict[bytes, Run]] | None"
    """Other runs that go on from here, by how they begin; where several begin alike, by page."""
    copies: "list[Copy | None]"
    """By ``residency`` slot: history and checkpoint, in each tier."""
    branches: list[int] | None
    """Per tier: how many of the runs in ``children`` have a history copy there."""
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
        self.branches = None
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

    def kids(self, tier: int) -> int:
        """How many children have a history copy in a tier."""
        run, branches = self.run, self.branches
        kids = 0 if branches is None else branches[tier]
        return kids if run is None or run.held[tier] <= self.index + 1 else kids + 1

    def successor(self) -> "Node | None":
        if self.run is not None and self.index + 1 < len(self.run.nodes):
            return self.run.nodes[self.index + 1]
        return None

    def offspring(self) -> "list[Node]":
        """All children, in-run successor first."""
        out = [n] if (n := self.successor()) is not None else []
        if self.children:
            for found in self.children.values():
                runs = found.values() if isinstance(found, dict) else (found,)
                out.extend(run.nodes[0] for run in runs)
        return out

    def page(self, stride: int) -> bytes:
        """The page's own packed tokens."""
        assert self.run is not None
        return self.run.tokens[self.index * stride : (self.index + 1) * stride]

    @property
    def extra(self) -> bytes:
        """What its spans add to the key."""
        assert self.run is not None
        return self.run.extra if self.index == 0 else b""


class RadixTree:
    """All known prefixes, by identity."""

    __slots__ = ("_sweep_at", "head", "last", "num_nodes", "roots", "stride")

    def __init__(self, page_tokens: int) -> None:
        self.stride = page_tokens * 4
        self.head = min(_HEAD_BYTES, self.stride)
        """How many bytes of a page children are looked up by."""
        self.roots: dict[Identity, Node] = {}
        self.num_nodes = 0
        self.last: tuple[Identity | None, Node | None] = None, None
        """The identity asked for last, and its root if there is one."""
        self._sweep_at = 64

    def find_root(self, identity: Identity) -> Node | None:
        """The root of an identity, if it is known; the last answer is at hand."""
        last, root = self.last
        if last is not identity:
            root = self.roots.get(identity)
            self.last = identity, root
        return root

    def root(self, identity: Identity) -> Node:
        """The root of an identity.  Those without pages and pins are forgotten now and then."""
        root = self.find_root(identity)
        if root is None:
            if len(self.roots) >= self._sweep_at:
                self.roots = {who: r for who, r in self.roots.items() if r.children or r.pins}
                self._sweep_at = 2 * len(self.roots) + 64
            root = self.roots[identity] = Node(None, None, 0, 0)
            self.last = identity, root
        return root

    # ------------------------------------------------------------------ reading
    def walk(
        self, node: Node, data: bytes, extras: Mapping[int, bytes] | None = None, start: int = 0
    ) -> Node:
        """The last known page of ``data`` (packed tokens), from page ``start`` on, below ``node``,
        which stands before that page.  Changes nothing that can be seen."""
        run, pages = self.reach(node, data, extras, start)
        return run.nodes[pages - 1] if run is not None else node

    def reach(
        self, node: Node, data: bytes, extras: Mapping[int, bytes] | None = None, start: int = 0
    ) -> tuple[Run | None, int]:
        """``walk``, but where it ends is told as a run and how many of its pages belong to the
        path, which spares a look at the node.  None: where it began, at a root."""
        stride, head = self.stride, self.head
        pos = start * stride
        end = len(data) // stride * stride
        at, pages = node.run, node.index + 1  # where the walk stands
        if at is not None and not (extras and start in extras):
            stop = self._common(at, pages, 0, data, pos, end, extras)
            pages += stop
            pos += stop * stride
        forked = False  # whether the last run was left unread behind its fork
        while pos < end:
            children = node.children if at is None else at.nodes[pages - 1].children
            run, stop = None, 0
            if children is not None:
                key = data[pos : pos + head]
                if extras:
                    key += extras.get(pos // stride, b"")
                found = children.get(key)
                run = found.get(data[pos : pos + stride]) if isinstance(found, dict) else found
            if run is not None:
                if extras:
                    stop = self._common(run, 0, 0, data, pos, end, extras)
                elif run.fork and data.startswith(run.fork, pos):
                    stop, forked = len(run.fork) // stride, True
                elif data.startswith(run.tokens, pos):
                    stop, forked = len(run.nodes), False
                elif stop := self._common(run, 0, 0, data, pos, end, None):
                    run.fork, forked = run.tokens[: stop * stride], False
            if stop:
                at, pages = run, stop
            elif forked and at and (stop := self._common(at, pages, 0, data, pos, end, extras)):
                pages += stop
                forked = False
            else:
                break
            pos += stop * stride
        return at, pages

    def path(self, node: Node, above: int = 0) -> list[Node]:
        """The nodes from page ``above`` (0-based) down to ``node``."""
        runs: list[list[Node]] = []
        while node.depth > above:
            run = node.run
            assert run is not None
            head = max(0, node.index + 1 - (node.depth - above))
            runs.append(run.nodes[head : node.index + 1])
            node = run.parent
        out: list[Node] = []
        for nodes in reversed(runs):
            out += nodes
        return out

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
            stop, extra = last, b""
            if extras:
                extra = extras.get(page, b"")
                stop = page + 1 if extra else min([last, *(e for e in extras if e > page)])
            out += self._append(node, data[page * stride : stop * stride], extra)
            node, page = out[-1], stop
        return out

    def _append(self, parent: Node, tokens: bytes, extra: bytes) -> list[Node]:
        stride, run = self.stride, parent.run
        count = len(tokens) // stride
        if (
            run is not None
            and not extra
            and parent.index + 1 == len(run.nodes)
            and not run.extra
            and len(run.tokens) <= _RUN_BYTES
        ):
            kept = len(run.nodes) * stride  # what eviction has left of it
            run.tokens = run.tokens[:kept] + tokens
        else:
            run = Run(parent, tokens, extra)
        nodes, node, depth = run.nodes, parent, parent.depth
        first = len(nodes)
        for i in range(first, first + count):
            depth += 1
            node = Node(node, run, i, depth)
            nodes.append(node)
        if first == 0:
            self._hang(run)
        self.num_nodes += count
        return nodes[first:]

    def _hang(self, run: Run) -> None:
        """Let a new run go on from its parent."""
        if (children := run.parent.children) is None:
            children = run.parent.children = {}
        key = run.tokens[: self.head] + run.extra
        there = children.setdefault(key, run)
        if there is not run:
            if isinstance(there, Run):
                there = children[key] = {there.tokens[: self.stride]: there}
            there[run.tokens[: self.stride]] = run

    def _unhang(self, run: Run) -> None:
        children = run.parent.children
        assert children is not None
        key = run.tokens[: self.head] + run.extra
        alike = children[key]
        if isinstance(alike, dict):
            del alike[run.tokens[: self.stride]]
            if alike:
                return
        del children[key]
        if not children:
            run.parent.children = None

    def cut(self, run: Run, first: int) -> None:
        """Take the nodes of a run from ``first`` on, which nothing hangs on, out of the tree."""
        nodes = run.nodes
        for node in nodes[first:] if first else nodes:
            node.run = None
        self.num_nodes -= len(nodes) - first
        for tier, held in enumerate(run.held):
            if held > first:
                run.hold(tier, first)
        if first == 0:
            self._unhang(run)
        del nodes[first:]
        if len(run.fork) > first * self.stride:
            run.fork = run.fork[: first * self.stride]
        if len(run.tokens) > 2 * first * self.stride > 0:
            run.tokens = run.tokens[: first * self.stride]

    def remove_leaf(self, node: Node) -> None:
        """Take a childless node out of the tree."""
        run = node.run
        assert run is not None and run.nodes[-1] is node and not node.children, "I7"
        self.cut(run, node.index)

    def remove_subtree(self, node: Node) -> list[Node]:
        """Take a node and everything below it out of the tree; children before parents."""
        gone = [node, *self.iterate(node)]
        gone.reverse()
        for n in gone:
            self.remove_leaf(n)
        return gone
