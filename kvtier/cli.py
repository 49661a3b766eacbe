"""The command ``kvtier``: a demo, and tools that look into a disk directory, a trace or a machine.

Owns the parser, the demo and exit statuses; each group of commands has a module of its own.  The
demo is whatever is registered under the entry point group ``kvtier.demos``.  Needs no torch except
through it, and to say with ``doctor`` what torch finds; ``doctor`` needs no package at all.

Exit status: 0 all is well, 1 something was found (damage, a failed demo), 2 the command could not
be carried out.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

import kvtier
from kvtier.cli_doctor import add_doctor
from kvtier.errors import KVTierError

__all__ = ["main"]

OK, FAILED = 0, 2
DEMOS = "kvtier.demos"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.  Usage errors leave through SystemExit(2)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["demo"]:  # the demo parses its own arguments, `--help` among them
            return _demo(arguments[1:])
        options = _parser(arguments[:1] == ["doctor"]).parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        status = run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `kvtier ls ... | head`; nobody reads what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (KVTierError, OSError) as error:
        told = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            told = f"{error.filename}: {error.strerror.lower()}"
        print(f"kvtier: {told}", file=sys.stderr)
        return FAILED
    except ImportError as error:
        print(f"kvtier: {error}; `kvtier doctor` says what is missing", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130


def _parser(doctor: bool) -> argparse.ArgumentParser:
    """Of all commands, or of ``doctor`` alone, which runs where the others do not import."""
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="A KV cache over device, host and disk: a demo, and a look into its directory.",
        epilog="Exit status: 0 all is well, 1 something was found, 2 the command failed.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {kvtier.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser(
        "demo",
        help="serve a conversation from all tiers, across a restart",
        description="Runs a registered demo; `kvtier demo --help` shows its own options.",
        add_help=False,
    )
    if not doctor:
        importlib.import_module("kvtier.cli_disk").add_disk(commands)
        importlib.import_module("kvtier.cli_trace").add_trace(commands)
    add_doctor(commands)
    return parser


def _demo(arguments: Sequence[str]) -> int:
    found = sorted(metadata.entry_points(group=DEMOS), key=lambda entry: entry.name)
    names = [entry.name for entry in found]
    chosen = found[:1]
    if arguments and arguments[0] in names:
        chosen = [entry for entry in found if entry.name == arguments[0]]
        arguments = arguments[1:]
    if not chosen:
        print(
            "kvtier: no demo is installed; in a clone, `make demo` installs and runs one, "
            'and `pip install ".[deepseek]"` installs it into your environment',
            file=sys.stderr,
        )
        return FAILED
    try:
        demo: Callable[[Sequence[str]], int] = chosen[0].load()
    except ImportError as error:
        print(f"kvtier: demo {chosen[0].name!r} does not import: {error}", file=sys.stderr)
        return FAILED
    return demo(arguments)
