#!/usr/bin/env python3
"""Injects bugs into kvtier/core, one at a time, and sees that the core's tests notice.

    scripts/mutate.py [--list] [--jobs N] [WORD ...]

Each bug is a replacement in a copy of the sources; its pattern must occur exactly once, else the
script fails before it runs anything.  The tests are those of the core: first the quick ones, then
the state machines without shrinking.  Prints CAUGHT or MISSED and the time, and exits with 1 if
any bug was missed.  WORDs select bugs whose name contains one of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = Path("kvtier/core")
LIMIT_S = 600
UNIT = sorted(path.stem for path in (ROOT / "tests/unit").glob("test_core_*.py"))
SLOWER = ("test_core_eviction", "test_core_replay", "test_core_disk")
STAGES = (
    [f"tests/unit/{name}.py" for name in UNIT if name not in SLOWER],
    [f"tests/unit/{name}.py" for name in SLOWER],
    ["tests/property/test_core_machine.py"],
    ["tests/property/test_tree.py"],
)
"""Quick ones first."""


@dataclass(frozen=True, slots=True)
class Bug:
    """``old`` in ``kvtier/core/<module>.py`` becomes ``new``."""

    name: str
    module: str
    old: str
    new: str


BUGS = [
    # ---------------------------------------------------------------- steps that fail
    Bug(
        "a failed step is taken for harmless to a tail",
        "machine",
        "if most is not None and n > most and",
        "if most is not None and n > 64 and",
    ),
    # ---------------------------------------------------------------- speculation
    Bug(
        "speculation: windows go by what is scheduled",
        "writing",
        "below = max(0, rec.length - self._reach_back)",
        "below = max(0, rec.capacity - self._reach_back)",
    ),
    Bug(
        "speculation: captures of rejected page ends stay taken",
        "writing",
        "                self.return_captures(rec)\n                self._free_windows(rec)",
        "                self._free_windows(rec)",
    ),
    Bug(
        "speculation: a pause loses the window page that is being filled",
        "parking",
        "min(tail.windows, default=0)), reach.stop)",
        "min(tail.windows, default=0)), rec.length // (g.window_page or 1 << 30))",
    ),
    Bug(
        "speculation: a fork takes windows of rejected tokens",
        "branching",
        "            held = self.geometry.windows_at(rec.length, self.geometry.max_draft)",
        "            held = range(1 << 30)",
    ),
    Bug(
        "speculation: what was reserved for drafts never comes back",
        "branching",
        "            self.writing.cut_windows(rec)\n",
        "",
    ),
    Bug(
        "speculation: a failed step commits what was accepted",
        "machine",
        "        self.writing.abandon(recs)\n",
        "        self.writing.abandon(recs)\n"
        "        for rec, n in zip(recs, counts, strict=True):\n"
        "            rec.length += n\n"
        "            rec.tokens += bytes(4 * n)\n",
    ),
    # ---------------------------------------------------------------- leases and restore
    Bug(
        "an opened lease does not pin its prefix",
        "restore",
        "        res.pin(path[:limit])  # all along",
        "        pass  # all along",
    ),
    Bug(
        "host pages on the way up push out their own parent",
        "restore",
        "        with res.held(guard, *(res.best(n) for n in missing)):",
        "        with res.held(*(res.best(n) for n in missing)):",
    ),
    Bug(
        "resume without a checkpoint",
        "restore",
        "(self.geometry.has_tails and self.residency.best(path[n - 1], CHECKPOINT) is None)",
        "False",
    ),
    Bug(
        "resume inside a span",
        "restore",
        "(spans and inside_span(n * page, spans))",
        "False",
    ),
    Bug(
        "a cold lease's tail is not cleared",
        "restore",
        "ops.append(operations.in_order(OpKind.CLEAR, part))\n        rec.waits.update(",
        "pass\n        rec.waits.update(",
    ),
    Bug(
        "pages that are nearer than the disk wait with it",
        "restore",
        "nearer = [n for n in missing if (c := n.copies[CPU]) is not None and c.ready]",
        "nearer: list[Node] = []",
    ),
    Bug(
        "a prefetch that was given up keeps its pages",
        "waiting",
        "            self._end_prefetch(rec)\n            return []",
        "            self.prefetches.pop(rec.id)\n            return []",
    ),
    Bug(
        "a lease settles on pages that did not arrive",
        "restore",
        "if alive and rec.tail_ok and all(c is not None and c.ready for c in copies):",
        "if alive and rec.tail_ok:",
    ),
    Bug(
        "a lease settles on a tail that did not arrive",
        "restore",
        "if alive and rec.tail_ok and all(",
        "if alive and all(",
    ),
    Bug(
        "a lease settles on pages that were cleared",
        "restore",
        "if alive and rec.tail_ok and all(",
        "if rec.tail_ok and all(",
    ),
    Bug(
        "planning again leaks the tail",
        "restore",
        "            self.tails.disown(rec.tail)\n            rec.tail = None\n        self.tables",
        "            rec.tail = None\n        self.tables",
    ),
    Bug(
        "hits are counted at every activation",
        "restore",
        "        if not rec.counted:",
        "        if True:",
    ),
    Bug(
        "restored pages are counted as device hits",
        "restore",
        "for tier in (rec.origins.get(n, Tier.GPU) for n in rec.nodes) if rec.origins else ():",
        "for tier in ():",
    ),
    Bug(
        "a checkpoint that served stays expendable",
        "restore",
        "        checkpoint.expendable = False",
        "        pass",
    ),
    Bug(
        "a lease is active before all it waits for has ended",
        "waiting",
        "            if not rec.waits:\n                ops += self.parking.settle",
        "            if True:\n                ops += self.parking.settle",
    ),
    Bug(
        "an undelivered tail is trusted",
        "waiting",
        "any(m.tail is rec.tail for m in run.delivered)",
        "any(m.tail is rec.tail for m in run.moves)",
    ),
    Bug(
        "max_reuse is ignored",
        "machine",
        "            limit = min(limit, max(0, max_reuse) // page)",
        "            pass",
    ),
    Bug(
        "a cancelled prefetch keeps its pins",
        "waiting",
        "        rec.done = True\n        self._end_prefetch(rec)",
        "        rec.done = True\n        self.prefetches.pop(rec.id)",
    ),
    Bug(
        "pins know no limit",
        "pinning",
        "        held = list(path[:room])",
        "        held = list(path)",
    ),
    Bug(
        "children that arrived first are not stored",
        "machine",
        "[*arrived, *self.lower.waiting_below(arrived)]",
        "arrived",
    ),
    Bug(
        "match makes recent",
        "lookup",
        "    limit = ((len(data) >> 2) - 1) // page\n",
        "    limit = ((len(data) >> 2) - 1) // page\n"
        "    if run:\n        run.nodes[pages - 1].tick = res.tick = res.tick + 1\n",
    ),
    Bug(
        "a miss is told by another identity's root",
        "lookup",
        "    if who is not identity or res.disk is not None:",
        "    if res.disk is not None:",
    ),
    Bug(
        "a miss is told without asking the disk",
        "lookup",
        "    if who is not identity or res.disk is not None:",
        "    if who is not identity:",
    ),
    Bug(
        "a full hit is told of pages the device has lost",
        "lookup",
        " and run.held[GPU] >= pages:",
        ":",
    ),
    Bug(
        "a run forgets what a tier has of it",
        "tree",
        "            branches[tier] += 1 if pages else -1",
        "            pass",
    ),
    # ---------------------------------------------------------------- writing
    Bug(
        "pages of a span are published early",
        "writing",
        "s.start < last * page and s.stop > rec.length for s in rec.spans",
        "False for s in rec.spans",
    ),
    Bug(
        "a no-write lease publishes",
        "writing",
        "        if not rec.write or last <= first:",
        "        if last <= first:",
    ),
    Bug(
        "window pages are freed a page too early",
        "writing",
        "rec.length - self._reach_back) // g.window_page",
        "rec.length - self._reach_back) // g.window_page + 1",
    ),
    Bug(
        "windows forget the drafts",
        "writing",
        "self.geometry.window_kept - 1 + self.geometry.max_draft",
        "self.geometry.window_kept - 1",
    ),
    Bug(
        "a checkpoint is attached to the page before",
        "writing",
        "frame = captured.get((i + 1) * page, -1)",
        "frame = captured.get((i + 2) * page, -1)",
    ),
    Bug(
        "a batch reserves room for its largest lease only",
        "writing",
        "        total = sum(needs)",
        "        total = max(needs)",
    ),
    Bug(
        "a restore in flight is not superseded",
        "writing",
        "            res.supersede(there, (rec.frames[i],))\n",
        "            return\n",
    ),
    # ---------------------------------------------------------------- branching, parking
    Bug(
        "truncate writes to a shared page",
        "branching",
        "        if part and not (",
        "        if False and not (",
    ),
    Bug(
        "truncate keeps its pins",
        "branching",
        "        res.unpin(gone)\n        return n, ops",
        "        return n, ops",
    ),
    Bug(
        "a fork forgets to hold private pages",
        "branching",
        "                private.hold(frame)",
        "                pass",
    ),
    Bug(
        "forks share pages that both will publish",
        "branching",
        "full = len(rec.nodes) if rec.write else rec.length // page",
        "full = rec.length // page",
    ),
    Bug(
        "a fork's partial page is not copied in full",
        "branching",
        "ops.append(self.operations.in_order(OpKind.COPY, copy, valid))",
        "self.operations.in_order(OpKind.COPY, copy, valid)",
    ),
    Bug(
        "a paused lease does not keep its pages",
        "parking",
        "        self.residency.keep(parked.nodes, 1)",
        "        pass",
    ),
    Bug(
        "resume trusts a pause that failed",
        "waiting",
        "                rec.parked.ok = False",
        "                pass",
    ),
    Bug(
        "a refused resume forgets what was parked",
        "parking",
        "            rec.length, rec.parked = parked.length, parked",
        "            rec.length = parked.length",
    ),
    # ---------------------------------------------------------------- operations
    Bug(
        "what is stored again stays quarantined",
        "operations",
        "                    if copy.tier == DISK:\n"
        "                        self._overwritten(copy)\n",
        "",
    ),
    Bug(
        "what was packed is released twice",
        "operations",
        "            if not run.packed:\n                self._release_sources(m)",
        "            if True:\n                self._release_sources(m)",
    ),
    Bug(
        "a store that failed half-way counts as half done",
        "operations",
        "        if kind in (OpKind.STORE, OpKind.DROP) and delivered < len(moves):",
        "        if kind is OpKind.DROP and delivered < len(moves):",
    ),
    Bug(
        "a bad record is offered again",
        "operations",
        "            self.residency.quarantine.add(row)\n        self.residency.lose(source)",
        "            self.residency.quarantine.add(row)",
    ),
    Bug(
        "quarantined frames count as free",
        "operations",
        "            self.residency.quarantine.add(row)",
        "            pass",
    ),
    Bug(
        "a confirmed deletion does not end the quarantine",
        "operations",
        "                disk.quarantined -= self.bad_keys.pop(key, 0)",
        "                self.bad_keys.pop(key, 0)",
    ),
    Bug(
        "a failed read condemns its source",
        "operations",
        "if shortfall is Shortfall.SOURCE:\n",
        "if True:\n",
    ),
    Bug(
        "what was left out condemns its source",
        "operations",
        "if shortfall is Shortfall.SOURCE:\n",
        "if shortfall is not Shortfall.FAULT:\n",
    ),
    Bug(
        "reads that others wait for are left out",
        "waiting",
        "set(op_ids).difference(*others)",
        "set(op_ids)",
    ),
    Bug(
        "a failed deletion is forgotten",
        "operations",
        "                self.undeleted[key] = frames",
        "                pass",
    ),
    # ---------------------------------------------------------------- residency and eviction
    Bug(
        "eviction ignores pins",
        "candidates",
        "        if slot == GPU and node.pins:",
        "        if False:",
    ),
    Bug(
        "eviction ignores readers",
        "candidates",
        "        if node is None or not copy.ready or copy.readers:",
        "        if node is None or not copy.ready:",
    ),
    Bug(
        "eviction takes inner pages",
        "candidates",
        "        if node.kids(slot) != gone:\n            return False",
        "        if False:\n            return False",
    ),
    Bug(
        "a page leaves before its host copy is confirmed",
        "candidates",
        "        if promised(node.copies, slot):",
        "        if False:",
    ),
    Bug(
        "a page leaves before the disk has what the host has lost",
        "copies",
        "            return below.writer > 0",
        "            return below.slot == CPU and below.writer > 0",
    ),
    Bug(
        "a page that the host has waits for the disk",
        "copies",
        "            return below.writer > 0",
        "            if below.writer:\n                return True",
    ),
    Bug(
        "the line above a victim ignores other tiers",
        "evictor",
        "                or (copies.count(None) == _ONE_COPY) != alone\n",
        "",
    ),
    Bug(
        "children that begin alike are one",
        "tree",
        "            if isinstance(there, Run):",
        "            if False:",
    ),
    Bug(
        "the line above a victim ignores what is still being made",
        "evictor",
        "is not None or promised(copies, slot)",
        "is not None",
    ),
    Bug(
        "kept pages leave their last tier",
        "candidates",
        "        return not node.keeps or any(",
        "        return True or any(",
    ),
    Bug(
        "kept checkpoints leave their last tier",
        "candidates",
        "        return node not in self._kept_tails or any(",
        "        return True or any(",
    ),
    Bug(
        "what was held a moment is never evicted again",
        "residency",
        "                self.candidates.offer(c)  # an order that",
        "                pass  # an order that",
    ),
    Bug(
        "frames still read are given away",
        "residency",
        "        elif copy.readers or copy.writer:\n            self.orphans[copy] = None\n"
        "        else:\n            self.pools[slot]",
        "        elif copy.writer:\n            self.orphans[copy] = None\n"
        "        else:\n            self.pools[slot]",
    ),
    Bug(
        "what arrives after a clear is announced",
        "residency",
        "            if copy.node.run is not None:  # what",
        "            if True:  # what",
    ),
    Bug(
        "disk-only pages go unannounced",
        "residency",
        "if self.events is not None and not self.disk.is_checkpoint(row):",
        "if False:",
    ),
    Bug(
        "pages that left the tree still count as children",
        "tree",
        "                run.hold(tier, first)\n",
        "                pass\n",
    ),
    Bug(
        "time to live ends when a page is on disk only",
        "residency",
        "                if node.expires < NEVER:\n                    return",
        "                if False:\n                    return",
    ),
    Bug(
        "all identities share one root on disk",
        "residency",
        "        return chain_root(self.chain, identity)",
        "        return chain_root(self.chain, Identity())",
    ),
    Bug(
        "victims that did not suffice are lost",
        "evictor",
        "            candidates.orders[slot].extend(",
        "            list(",
    ),
    Bug(
        "the line above a victim ignores branches",
        "evictor",
        "                or ((branches := above.branches) is not None and branches[slot])\n",
        "",
    ),
    Bug(
        "the line above a victim ignores recency",
        "evictor",
        "                or above.tick != tick\n",
        "",
    ),
    Bug(
        "least recently used goes last",
        "eviction",
        "        return kind, self._policy.rank(tick, node.hits)",
        "        return kind, -self._policy.rank(tick, node.hits)",
    ),
    Bug(
        "a queued page keeps its old rank",
        "eviction",
        "            elif fresh > rank:",
        "            elif False:",
    ),
    Bug(
        "priority is ignored",
        "eviction",
        "        kind = node.priority, self._weighed",
        "        kind = 0, self._weighed",
    ),
    Bug(
        "queues are never compacted",
        "eviction",
        "            if self._entries > self._limit:",
        "            if False:",
    ),
    Bug(
        "expiry ignores holders",
        "lifetimes",
        "            if busy or node.pins or node.keeps or node.offspring():",
        "            if busy or node.offspring():",
    ),
    Bug(
        "the last to ask decides how long a page lives",
        "lifetimes",
        "            if node.expires < rec.expires:",
        "            if True:",
    ),
    # ---------------------------------------------------------------- downwards
    Bug(
        "a store reads a host copy that is not there yet",
        "lower",
        "        if source is None or not source.ready:\n            return False\n        full",
        "        if source is None:\n            return False\n        full",
    ),
    Bug(
        "a pack reads a page that is not there yet",
        "lower",
        "            if node.run is None or source is None or not source.ready:",
        "            if node.run is None or source is None:",
    ),
    Bug(
        "a page is pushed out of the host for its own child",
        "lower",
        "        fits = self._make_room((guard, self._last_checkpoint(path, first)), len(todo))",
        "        fits = self._make_room((), len(todo))",
    ),
    Bug(
        "pages are stored whatever their hits",
        "lower",
        "        if node.hits < self.store_after_hits or not",
        "        if not",
    ),
    Bug(
        "a prompt longer than the host loses its last checkpoint",
        "lower",
        "        return next((c for c in tails if c is not None), None)",
        "        return None",
    ),
    Bug(
        "a checkpoint pushes out pages of its own path",
        "lower",
        "self.residency.held(page, leaf):",
        "self.residency.held(page):",
    ),
    Bug(
        "where a turn ends nothing is kept",
        "machine",
        "        ops = self.lower.turn_end(rec.nodes) if ends else []",
        "        ops: list[Op] = []",
    ),
    Bug(
        "what was passed keeps its worth",
        "lower",
        "                    self.residency.candidates.weigh_again(passed)",
        "                    pass",
    ),
    Bug(
        "history without a checkpoint waits its turn",
        "checkpoints",
        "        not node.pins\n",
        "        False\n",
    ),
    Bug(
        "what became the deepest checkpoint keeps its worth",
        "candidates",
        "            self.weigh_again(tail)\n        else:",
        "            pass\n        else:",
    ),
    Bug(
        "what came back teaches nothing",
        "residency",
        "            self.policy.returned(*back)",
        "            pass",
    ),
    Bug(
        "expendable checkpoints are written to disk",
        "lower",
        " or source.expendable or page is None:",
        " or page is None:",
    ),
    # ---------------------------------------------------------------- tree, keys, tables
    Bug(
        "a run remembers where its evicted pages were left",
        "tree",
        "            run.fork = run.fork[: first * self.stride]",
        "            pass",
    ),
    Bug(
        "a walk passes a page with a span inside a run",
        "tree",
        "            high = min([high, *(e - page for e in extras if e > page)])",
        "            pass",
    ),
    Bug(
        "the last identity asked for is taken for any",
        "tree",
        "        if last is not identity:",
        "        if last is None:",
    ),
    Bug(
        "identities with leases are forgotten",
        "tree",
        "if r.children or r.pins}",
        "if r.children}",
    ),
    Bug(
        "fields of a key run together",
        "keys",
        'b"+" + struct.pack("<Q", len(field))',
        'b"+"',
    ),
    Bug(
        "a page's key ignores what stands before it",
        "keys",
        "    h.update(parent)\n",
        "",
    ),
    Bug(
        "a span's place is not part of the key",
        "keys",
        '"<qqQ", span.start - page * page_tokens,',
        '"<qqQ", 0,',
    ),
    Bug(
        "the disk table compares half of a key",
        "disk",
        "                if keys.startswith(key, row * KEY_BYTES):",
        "                if keys.startswith(key[:8], row * KEY_BYTES):",
    ),
    Bug(
        "disk eviction ignores holders",
        "disk",
        "bool(self.live[row] and not self.busy[row])",
        "bool(self.live[row])",
    ),
    Bug(
        "disk eviction ignores what was used since",
        "disk",
        " or self.tick[row] != tick:",
        ":",
    ),
    Bug(
        "a frame may be given back twice",
        "frames",
        '            assert taken[f], "I1: a frame given back twice"',
        "            pass",
    ),
]


def misfits() -> list[str]:
    """What is wrong with the list itself: patterns must occur exactly once, names differ."""
    out = []
    for bug in BUGS:
        count = (ROOT / CORE / f"{bug.module}.py").read_text().count(bug.old)
        if count != 1:
            out.append(f"{bug.name!r}: its pattern occurs {count} times in {bug.module}.py")
    names = [bug.name for bug in BUGS]
    out += [f"{name!r} is there twice" for name in set(names) if names.count(name) > 1]
    return out


def snapshot(copy: Path) -> None:
    """What the tests need, as it is now: whoever edits meanwhile changes nothing."""
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
    shutil.copytree(ROOT / "kvtier", copy / "kvtier", ignore=ignore)
    shutil.copytree(ROOT / "tests/property", copy / "tests/property", ignore=ignore)
    (copy / "tests/unit").mkdir()
    for path in ("tests/__init__.py", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / path, copy / path)
    for found in (ROOT / "tests/unit").glob("test_core_*.py"):
        shutil.copy(found, copy / "tests/unit")


def caught(clean: Path, bug: Bug | None) -> tuple[bool, float, str]:
    """Whether the tests notice, after how many seconds, and which does.  None: no bug at all."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-mutate-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(clean, copy)
        if bug is not None:
            target = copy / CORE / f"{bug.module}.py"
            target.write_text(target.read_text().replace(bug.old, bug.new))
        for stage in STAGES:
            failed, reason = run_tests(copy, stage)
            if failed:
                return True, time.monotonic() - began, reason
    return False, time.monotonic() - began, ""


def run_tests(copy: Path, stage: list[str]) -> tuple[bool, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += ["--timeout=120", "--hypothesis-profile=mutate", *stage]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True, "ran into the time limit"
    if done.returncode not in (0, 1):  # a test that hangs is ended by the timeout plugin: 1 too
        raise SystemExit(f"the tests did not run:\n{done.stdout}\n{done.stderr}")
    return done.returncode == 1, next(_failures(done.stdout), "")


def _failures(output: str) -> Iterator[str]:
    for line in output.splitlines():
        if line.startswith("FAILED "):
            yield line.removeprefix("FAILED ").split(" - ")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", action="store_true", help="print the bugs and end")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if wrong := misfits():
        print("\n".join(wrong))
        return 1
    bugs = [b for b in BUGS if not given.words or any(w in b.name for w in given.words)]
    if given.list:
        print("\n".join(f"{b.module:12}{b.name}" for b in bugs))
        return 0
    missed = 0
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-clean-") as folder,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        clean = Path(folder)
        snapshot(clean)
        failed, seconds, reason = caught(clean, None)
        if failed:
            print(f"the tests fail without any bug: {reason}")
            return 1
        print(f"clean {seconds:7.1f} s", flush=True)
        for bug, (seen, seconds, reason) in zip(
            bugs, pool.map(partial(caught, clean), bugs), strict=True
        ):
            missed += not seen
            word = "CAUGHT" if seen else "MISSED"
            print(f"{word}{seconds:7.1f} s  {bug.module}: {bug.name}  {reason}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} caught")
    return 1 if missed or not bugs else 0


if __name__ == "__main__":
    sys.exit(main())
