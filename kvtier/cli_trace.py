"""``kvtier trace``: what a cache of some size would hit on a recorded workload.

Owns the command's arguments and its output; the replay is ``kvtier.trace``'s.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.progress import Bar
from kvtier.trace import PLACEMENTS, V4_FLASH, Outcome, Sizes, clairvoyant, load, replay

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_trace"]

POLICIES = (*PLACEMENTS, "infinite", "belady")
SHIPPED = Path(__file__).parents[1] / "benchmarks" / "traces"
GIB = 1 << 30


def add_trace(commands: "Commands") -> None:
    """Add ``trace`` and its own commands to the parser of ``kvtier``."""
    trace = commands.add_parser(
        "trace", help="replay a recorded workload", description="Works on recorded workloads."
    )
    actions = trace.add_subparsers(metavar="ACTION", required=True)
    simulate = actions.add_parser(
        "simulate",
        help="say what a cache would hit",
        description="Serves every prompt of a trace once, in order, from a cache that moves no "
        "bytes, and says how many prompt tokens need not be computed.  PATH is a file of one of "
        "the forms in benchmarks/traces/README.md, or in a clone the name of a trace there.",
    )
    simulate.add_argument("trace", metavar="PATH|NAME")
    simulate.add_argument(
        "--policy",
        choices=POLICIES,
        default="adaptive",
        help="where checkpoints are kept; history_only: as if none were needed; infinite and "
        "belady: history alone, with room for all, or knowing the future (default: adaptive)",
    )
    simulate.add_argument(
        "--eviction", choices=("adaptive", "lru", "s3fifo"), default="adaptive", help="what leaves"
    )
    simulate.add_argument(
        "--host-gib", type=_gib, default="64", metavar="N", help="host memory in GiB (default: 64)"
    )
    simulate.add_argument("--disk-gib", type=_gib, default="0", metavar="N", help="default: none")
    simulate.add_argument(
        "--page-tokens", type=int, default=V4_FLASH.page_tokens, metavar="N", help="default: 256"
    )
    simulate.add_argument(
        "--page-bytes", default=str(V4_FLASH.page_bytes), metavar="SIZE", help="DeepSeek-V4-Flash's"
    )
    simulate.add_argument(
        "--checkpoint-bytes",
        default=str(V4_FLASH.checkpoint_bytes),
        metavar="SIZE",
        help="0 for a layout without tails (default: DeepSeek-V4-Flash's)",
    )
    simulate.add_argument("--json", action="store_true", help="print JSON")
    simulate.set_defaults(run=_simulate)


def _gib(text: str) -> int:
    try:
        size = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB") from error
    if not 0 <= size < 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size")
    return int(size * GIB)


def _simulate(options: argparse.Namespace) -> int:
    sizes = _sizes(options)
    trace = load(_path(options.trace))
    if options.policy in ("infinite", "belady"):
        pages = 1 << 62
        if options.policy == "belady":
            pages = sizes.frames(options.host_gib) + sizes.frames(options.disk_gib)
        shown: dict[str, object] = {"hit_rate": clairvoyant(trace, pages, sizes.page_tokens)}
    else:
        with Bar(f"{options.policy}") as bar:
            outcome = replay(
                trace,
                host=options.host_gib,
                disk=options.disk_gib,
                sizes=sizes,
                checkpoints=PLACEMENTS[options.policy](),
                eviction=options.eviction,
                tails=options.policy != "history_only",
                progress=lambda done: bar.show(done, len(trace.requests)),
            )
        shown = _figures(outcome)
    about = {
        "trace": options.trace,
        "requests": len(trace.requests),
        "prompt_tokens": trace.prompt_tokens,
    }
    if options.json:
        print(json.dumps(about | shown, indent=1))
        return 0
    for name, value in (about | shown).items():
        text = f"{value:.2f} %" if name == "hit_rate" else f"{value}"
        print(f"{name.replace('_', ' '):18} {text}")
    return 0


def _path(given: str) -> Path:
    """A file, or the one of that name that a clone has."""
    path, shipped = Path(given), SHIPPED / f"{given}.jsonl"
    if path.exists() or given != path.stem:
        return path
    if shipped.is_file():
        return shipped
    if not SHIPPED.is_dir():
        raise ConfigError(
            f"{given}: no such file; traces that go by a name come with a clone, in "
            "benchmarks/traces, not with an installed package"
        )
    names = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.jsonl")))
    raise ConfigError(f"{given}: no such file, and no trace of that name; there are {names}")


def _sizes(options: argparse.Namespace) -> Sizes:
    page = options.page_tokens
    if not 1 <= page <= 512 or page & (page - 1):
        raise ConfigError(f"--page-tokens must be a power of two up to 512, got {page}")
    sizes = Sizes(
        page_tokens=page,
        page_bytes=parse_bytes(options.page_bytes, "--page-bytes"),
        checkpoint_bytes=parse_bytes(options.checkpoint_bytes, "--checkpoint-bytes"),
    )
    if not sizes.page_bytes:
        raise ConfigError("--page-bytes must not be 0")
    if options.disk_gib and not options.host_gib:
        raise ConfigError("--disk-gib needs --host-gib: pages pass through host memory")
    return sizes


def _figures(outcome: Outcome) -> dict[str, object]:
    return {
        "hit_rate": outcome.hit_rate,
        "hit_tokens": outcome.hit_tokens,
        "disk_hit_tokens": outcome.disk_hit_tokens,
        "host_bytes_written": outcome.host_bytes,
        "disk_bytes_written": outcome.disk_bytes,
    }
