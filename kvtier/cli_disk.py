"""``kvtier ls``, ``stat``, ``explain``, ``fsck`` and ``rm``: a look into a disk directory.

Owns these commands' arguments, their output and their exit statuses.  Everything they report comes
from ``kvtier.stores``.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.core.keys import chain_root, checkpoint_key, page_key
from kvtier.errors import StoreError, StoreLocked, TokenError
from kvtier.progress import Bar
from kvtier.stores import FsckReport, LmdbStore, StoreInfo, directory, fsck, list_stores
from kvtier.tokens import TOKEN_BYTES, TokenBuffer, pack
from kvtier.types import Identity

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["FAILED", "FOUND", "OK", "add_disk", "read_tokens"]

OK, FOUND, FAILED = 0, 1, 2
"""Exit statuses."""


def add_disk(commands: "Commands") -> None:
    """Add these commands to the parser of ``kvtier``."""
    for name, (run, short, long, options) in _COMMANDS.items():
        added = commands.add_parser(name, help=short, description=long)
        added.add_argument("path", type=Path, metavar="PATH", help="the cache's disk_path")
        options(added)
        added.set_defaults(run=run)


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        required=True,
        metavar="FILE",
        help="token ids: .npy, or text (JSON list, or ids separated by spaces, commas or lines); "
        "- reads text from standard input",
    )
    parser.add_argument("--tenant", help="identity: tenant")
    parser.add_argument("--adapter", help="identity: adapter (LoRA)")
    parser.add_argument("--salt", type=_hex, metavar="HEX", help="identity: salt, in hex digits")


def _fsck_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repair",
        action="store_true",
        help="drop what is wrong (and what needs it), so that it can be written anew",
    )


def _rm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="its name, as `kvtier ls` shows it")


# ------------------------------------------------------------------ ls, stat


def _ls(options: argparse.Namespace) -> int:
    found = list_stores(options.path)
    if options.json:
        _print_json([_plain(info) for info in found])
        return OK
    if not found:
        print(_no_stores(options.path))
        return OK
    rows = [
        [
            Path(info.path).name,
            _count(info.pages),
            _count(info.checkpoints),
            _size(info.bytes),
            _size(info.frame_bytes) if info.frame_bytes else "?",
            info.state,
        ]
        for info in found
    ]
    _print_table(["store", "pages", "checkpoints", "size", "frame", "state"], rows)
    return OK


def _stat(options: argparse.Namespace) -> int:
    stores = [_details(info) for info in list_stores(options.path)]
    total = sum(int(store["bytes"] or 0) for store in stores)
    if options.json:
        _print_json({"path": str(options.path), "bytes": total, "stores": stores})
        return OK
    if not stores:
        print(_no_stores(options.path))
        return OK
    for store in stores:
        print(store["store"])
        for name, value in store.items():
            if name != "store":
                shown = _size(value) if "bytes" in name and isinstance(value, int) else value
                print(f"  {name.replace('_', ' '):15} {'?' if shown is None else shown}")
        print()
    print(f"{_counted(len(stores), 'store')}, {_size(total)}")
    return OK


def _details(info: StoreInfo) -> dict[str, str | int | None]:
    """What is known of a store; None where it cannot be read."""
    details: dict[str, str | int | None] = {
        "store": Path(info.path).name,
        "rank": f"{info.rank} of {info.world}",
        "state": info.state,
        "pages": info.pages,
        "checkpoints": info.checkpoints,
        "bytes": info.bytes,
        "frame_bytes": info.frame_bytes or None,
        "payload_bytes": None,
        "frames": None,
        "quarantined": None,
        "leaf_pages": None,
        "longest_chain": None,
    }
    if (store := _open(info)) is None:
        return details
    with store:
        counters, entries = store.counters(), store.scan()
    history = entries[entries["checkpoint"] == 0]
    leaves = len(np.setdiff1d(history["key"], history["parent"]))
    return details | {
        "pages": len(history),
        "checkpoints": len(entries) - len(history),
        "payload_bytes": counters.bytes,
        "frames": counters.frames,
        "quarantined": counters.quarantined,
        "leaf_pages": leaves,
        "longest_chain": int(history["depth"].max(initial=0)),
    }


def _open(info: StoreInfo) -> LmdbStore | None:
    """The store for reading, beside whoever writes it; None if it cannot be opened."""
    if not info.frame_bytes:
        return None
    try:
        return LmdbStore(
            Path(info.path).parent,
            fingerprint=info.fingerprint,
            rank=info.rank,
            world=info.world,
            frame_bytes=info.frame_bytes,
            mode="read",
        )
    except StoreError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return None


# ------------------------------------------------------------------ explain


@dataclass(frozen=True, slots=True)
class _Chain:
    """How far a prompt's pages are in one store."""

    page_tokens: int
    pages: int
    checkpoints: tuple[int, ...]
    """Depths (1-based) of the pages that have one."""


def _explain(options: argparse.Namespace) -> int:
    tokens = read_tokens(options.tokens)
    identity = Identity(tenant=options.tenant, adapter=options.adapter, salt=options.salt)
    stores = list_stores(options.path)
    if not stores:
        print(_no_stores(options.path))
        return OK
    print(_counted(len(tokens), "token"))
    status = OK
    for info in stores:
        name = Path(info.path).name
        if (store := _open(info)) is None:
            print(f"{name}: cannot be read")
            status = FAILED
            continue
        with store:
            entries = store.scan()
        found = _follow(tokens, chain_root(info.fingerprint, identity), entries)
        if found is None:
            print(f"{name}: no page of these tokens (for this identity)")
            continue
        held = found.pages * found.page_tokens
        whole = len(tokens) // found.page_tokens
        print(
            f"{name}: {held} tokens, {found.pages} of {whole} pages of {found.page_tokens} tokens"
        )
        if entries["checkpoint"].any():  # a layout with tails, which resumes only at checkpoints
            last = max((c for c in found.checkpoints if c < len(tokens)), default=0)
            listed = ", ".join(map(str, found.checkpoints))
            print(f"  checkpoints at token {listed}" if listed else "  no checkpoint among them")
            print(f"  a request of these tokens resumes at token {last}")
        if found.pages < whole:
            print(f"  the page at token {held} is not here")
    return status


def _follow(tokens: TokenBuffer, root: bytes, entries: npt.NDArray[np.void]) -> _Chain | None:
    """The chain of the prompt's pages in a store.  Stores do not say how long their pages are, but
    a first page's key fits one length only."""
    keys = {bytes(key) for key in entries["key"]}
    data = tokens.data
    for page_tokens in (1 << shift for shift in range(10)):
        stride = page_tokens * TOKEN_BYTES
        key, pages, checkpoints = root, 0, []
        for start in range(0, len(data) - stride + 1, stride):
            key = page_key(key, data[start : start + stride])
            if key not in keys:
                break
            pages += 1
            if checkpoint_key(key) in keys:
                checkpoints.append(pages * page_tokens)
        if pages:
            return _Chain(page_tokens, pages, tuple(checkpoints))
    return None


# ------------------------------------------------------------------ fsck


def _fsck(options: argparse.Namespace) -> int:
    with Bar("verifying") as bar:
        reports = fsck(options.path, repair=options.repair, progress=bar.show)
    if not reports:
        print(_no_stores(options.path))
        return OK
    status = OK
    in_use = failed = 0
    for report in reports:
        name = Path(report.path).name
        if report.state == "open":
            in_use += 1
            status = status or FAILED
            print(f"{name}: in use by another process, not checked")
        elif report.index != "sound" and not (report.repaired or report.repairable):
            failed += 1
            status = FOUND
            print(f"{name}: not checked: {report.index}")
        else:
            wrong = _wrong(report)
            outcome = "; ".join(wrong) or "sound"
            if wrong:
                status = FOUND
                outcome += f" ({_remedy(report)})"
            print(f"{name}: {_counted(report.records, 'record')}, {outcome}")
    totals = [f"{_counted(len(reports) - in_use - failed, 'store')} checked"]
    totals += [f"{in_use} in use"] if in_use else []
    totals += [f"{failed} could not be checked"] if failed else []
    print(", ".join(totals))
    return status


def _wrong(report: FsckReport) -> list[str]:
    wrong = [] if report.index == "sound" else [f"index: {report.index}"]
    if report.damaged:
        wrong.append(_counted(len(report.damaged), "damaged record"))
    if report.quarantined:
        wrong.append(_counted(report.quarantined, "quarantined frame"))
    return wrong


def _remedy(report: FsckReport) -> str:
    """What repairing did, or would do."""
    if not report.repaired:
        return "--repair removes what is bad"
    if report.index != "sound":  # what it had lost cannot be counted
        return "repaired"
    return f"repaired: {_counted(report.dropped, 'record')} dropped in all"


# ------------------------------------------------------------------ rm


def _rm(options: argparse.Namespace) -> int:
    root = os.path.abspath(options.path)
    if not os.path.isdir(root):
        raise StoreError(f"{root} is not a directory")
    stores = {Path(names.directory).name: names for names in directory.names_in(root)}
    names = stores.get(options.store)
    if names is None:
        if not stores:
            raise StoreError(_no_stores(options.path))
        held = ", ".join(sorted(stores))
        raise StoreError(f"{root} has no store {options.store!r}; it has {held}")
    # Both locks for as long as it takes: nobody opens it, or counts its bytes, half way.
    with directory.directory_lock(root, create=False):
        gate = directory.gate(names, shared=False)
        try:
            if directory.is_written(names):
                raise StoreLocked(f"{options.store} is in use by another process; stop that first")
            size = directory.directory_bytes(names.directory)
            shutil.rmtree(names.directory)
        finally:
            gate.release()
    print(f"{options.store}: removed, {_size(size)}")
    return OK


# ------------------------------------------------------------------ printing


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip())


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def _plain(info: StoreInfo) -> dict[str, object]:
    return asdict(info) | {"fingerprint": info.fingerprint.hex()}


def _no_stores(path: Path) -> str:
    return f"no stores in {path} (is this the cache's disk_path?)"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _size(value: int) -> str:
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# ------------------------------------------------------------------ tokens


def read_tokens(source: str) -> TokenBuffer:
    """Token ids from a ``.npy`` file, or from text: a JSON list, or ids with anything of spaces,
    commas and line ends between them; "-" is standard input.

    Raises TokenError for what is not a list of ids or has none, OSError for what cannot be read.
    """
    name = "standard input" if source == "-" else source
    try:
        if source.endswith(".npy"):
            tokens = pack(np.load(source, allow_pickle=False))
        else:
            text = sys.stdin.read() if source == "-" else Path(source).read_text(errors="replace")
            words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
            tokens = pack([_token(word) for word in words])
    except (ValueError, EOFError) as error:  # TokenError is a ValueError
        raise TokenError(f"{name}: {error}") from error
    if not len(tokens):
        raise TokenError(f"{name}: no token ids")
    return tokens


def _token(word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise TokenError(f"{word!r} is not a token id") from error


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not hex digits") from error


_COMMANDS: Mapping[
    str,
    tuple[Callable[[argparse.Namespace], int], str, str, Callable[[argparse.ArgumentParser], None]],
] = {
    "ls": (
        _ls,
        "list the stores in a directory",
        "One line a store: there is one for each layout, model and rank.  Opens nothing for "
        "writing; a store in use may be listed.",
        _json_option,
    ),
    "stat": (
        _stat,
        "show what the stores hold",
        "Records, frames, bytes and quarantined records of each store, and of the directory.",
        _json_option,
    ),
    "explain": (
        _explain,
        "say which pages of a prompt are on disk",
        "Walks the prompt's keys through every store.  Says how many tokens a restart would find "
        "there, and where the chain ends.  Prompts with spans (images) are not supported.",
        _explain_options,
    ),
    "fsck": (
        _fsck,
        "verify every record on disk",
        "Inspects the index and compares every record's bytes with its checksum.  Tokens and "
        "parent are compared when the cache loads a record.  Exits 1 if anything is wrong, also "
        "after repairing it.  A store in use cannot be checked.",
        _fsck_options,
    ),
    "rm": (
        _rm,
        "remove a store",
        "Deletes one store with all its records, such as that of a model no longer served.  A "
        "store in use cannot be removed.",
        _rm_options,
    ),
}
"""Name -> what runs it, its line in the list, its description, its options."""
