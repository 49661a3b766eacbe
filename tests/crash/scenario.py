"""What the crash tests run in a process that is logged or killed: a fixed course of publishing and
deleting, each step announced before it begins and after it ended.

Run as ``python -m tests.crash.scenario ROOT MARKS SEED STEPS``; the same arguments make the same
course.
"""

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.errors import StoreError
from kvtier.seams import Record
from kvtier.stores import LmdbStore
from tests.crash.kit import FRAME, Prefix, checkpoint, key_of, open_store, record

LIMIT = 3 << 20


@dataclass(frozen=True)
class Step:
    kind: str
    """"put" or "delete"."""
    names: tuple[tuple[Prefix, str], ...]
    """In the order of the call."""
    life: int

    def records(self) -> list[Record]:
        make = {"history": record, "checkpoint": checkpoint}
        return [make[kind](prefix, life=self.life) for prefix, kind in self.names]


def course(seed: int, steps: int) -> Iterator[Step]:
    """Groups of pages on a growing and shrinking forest."""
    rng = random.Random(seed)
    alive: list[tuple[Prefix, str]] = []
    for life in range(steps):
        pages = [prefix for prefix, kind in alive if kind == "history"]
        if len(alive) > 60 or (alive and rng.random() < 0.3):
            stem, _ = rng.choice([name for name in alive if name[1] == "history"])
            going = tuple(n for n in alive if n[0][: len(stem)] == stem)
            alive = [name for name in alive if name not in going]
            yield Step("delete", going, life)
            continue
        prefix: Prefix = rng.choice([(), (), *pages])
        names: list[tuple[Prefix, str]] = []
        for _ in range(rng.randint(1, 6)):
            prefix = (*prefix, rng.randint(0, 3))
            for kind in ("history", "checkpoint"):
                name = (prefix, kind)
                if name not in alive and (kind == "history" or rng.random() < 0.2):
                    names.append(name)
        if names:
            alive += names
            yield Step("put", tuple(names), life)


def run(store: LmdbStore, marks: int, seed: int, steps: int) -> None:
    """Go through the course; ``marks`` gets one line before and one after each step."""
    for number, step in enumerate(course(seed, steps)):
        os.write(marks, b"begin %d\n" % number)
        try:
            if step.kind == "put":
                store.put_group(step.records())
            else:
                store.delete([key_of(*name) for name in step.names])
        except StoreError as error:
            os.write(marks, b"failed %d %s\n" % (number, str(error).encode()))
            raise
        os.write(marks, b"done %d\n" % number)


def expected(seed: int, steps: int, done: int) -> dict[tuple[Prefix, str], int]:
    """Record -> life, after the first ``done`` steps."""
    alive: dict[tuple[Prefix, str], int] = {}
    for number, step in enumerate(course(seed, steps)):
        if number == done:
            break
        for name in step.names:
            if step.kind == "put":
                alive[name] = step.life
            else:
                del alive[name]
    return alive


def verify(store: LmdbStore, seed: int, steps: int, done: int, begun: int) -> int:
    """Check a store that was opened after a crash, when ``done`` steps had ended and ``begun`` had
    begun.  Returns the number of steps that took effect.

    The whole of the last step, or nothing of it; every record with the right bytes; nothing else.
    """
    from tests.crash.kit import fetch, keys_in

    store.check()
    there = keys_in(store)
    for steps_in_effect in {done, begun}:
        alive = expected(seed, steps, steps_in_effect)
        if there == {key_of(*name) for name in alive}:
            break
    else:
        wanted = {key_of(*name) for name in expected(seed, steps, done)}
        raise AssertionError(
            f"after {done} to {begun} steps: {len(there - wanted)} records too many, "
            f"{len(wanted - there)} missing"
        )
    make = {"history": record, "checkpoint": checkpoint}
    records = [make[kind](prefix, life=life) for (prefix, kind), life in alive.items()]
    assert fetch(store, records) == [True] * len(records)
    entries = store.scan()
    for row in entries:
        if row["depth"] > 1 or row["checkpoint"]:
            assert bytes(row["parent"]) in there, "I6"
    return steps_in_effect


def open_for_course(root: str) -> LmdbStore:
    return open_store(root, frame_bytes=FRAME, limit_bytes=LIMIT)


def main(argv: list[str]) -> None:
    root, marks_path, seed, steps = argv
    marks = os.open(marks_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open_for_course(root) as store:
        os.write(marks, b"opened\n")
        run(store, marks, int(seed), int(steps))
    os.write(marks, b"closed\n")


if __name__ == "__main__":
    main(sys.argv[1:])
