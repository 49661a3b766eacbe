"""``kvtier doctor``: what is installed here, what a cache would run on, and what is in its way.

Owns the command's arguments, its output and what it advises.  Works without any of the packages
that kvtier needs, to say which are missing; whatever else cannot be asked is told as unknown, never
raised.
"""

import argparse
import importlib
import importlib.util
import json
import mmap
import os
import platform
import re
import resource
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvtier
from kvtier.errors import KVTierError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_doctor"]

OK, FOUND = 0, 1
MIB, GIB = 1 << 20, 1 << 30
REQUIRED = ("torch", "numpy", "lmdb", "zstandard", "xxhash")
OPTIONAL: Mapping[str, tuple[str, str]] = {
    "triton": ("the kernels for GPUs", "pip install 'kvtier[triton]'"),
    "transformers": ("the DeepSeek adapter", "pip install 'kvtier[deepseek]'"),
    "flash_mla": (
        "the backend flashmla, which vllm brings too",
        "build it from github.com/deepseek-ai/FlashMLA, or pip install vllm",
    ),
    "vllm": ("the backend flashmla, by the extension in its wheel", "pip install vllm"),
    "flashinfer": ("the backend flashinfer", "pip install flashinfer-python"),
}
"""Module -> what it is good for, how to get it."""
DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
"""Where a module's package has another name."""
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "ceph", "9p", "glusterfs")
"""File systems whose locks and memory maps are not to be relied on."""
VOLATILE = ("tmpfs", "ramfs")
"""File systems that are memory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to do something about."""

    what: str
    do: str
    grave: bool = False
    """Whether a cache cannot run until it is done."""


def add_doctor(commands: "Commands") -> None:
    """Add ``doctor`` to the parser of ``kvtier``."""
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, which kernels would run, and what is in the way",
        description="Looks at packages, the device, the kernels that would run on it and why, "
        "limits of memory and, if one is given, a directory for the disk tier: what file system it "
        "is on, how much is free, whether it takes files and direct I/O, not how fast it is.  "
        "Changes nothing; a file is created in the directory and removed again.",
        epilog="Exit status: 0 a cache can run here, 1 something keeps it from running.",
    )
    doctor.add_argument(
        "--disk", type=Path, metavar="PATH", help="look at this directory as a disk_path too"
    )
    doctor.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if it is here")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    found: list[Finding] = []
    packages = _packages(found)
    if not isinstance(torch := _torch(), str):
        packages["torch"] = str(torch.__version__)  # which tells of what build it is
    device = _device(found)
    kind = options.device or device["type"]
    report: dict[str, Any] = {
        "kvtier": kvtier.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "device": device,
        "kernels_for": kind,
        "kernels": _kernels(kind, packages, found),
        "limits": _limits(device, found),
        "disk": None if options.disk is None else _disk(options.disk, found),
    }
    report["findings"] = [asdict(each) for each in found]
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _show(report, found)
    return FOUND if any(each.grave for each in found) else OK


# ------------------------------------------------------------------ what there is


def _packages(found: list[Finding]) -> dict[str, str | None]:
    """Versions of packages; None where one is not installed."""
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    found += [
        Finding(f"{name} is missing", f"pip install {name}", grave=True)
        for name in REQUIRED
        if versions[name] is None
    ]
    for name in REQUIRED:
        if name != "torch" and versions[name] is not None and (why := _broken(name)):
            found.append(
                Finding(f"{name} does not import ({why})", f"reinstall {name}", grave=True)
            )
    return versions


def _broken(module: str) -> str:
    """Why a package that is there does not import; empty if it does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - half of a package may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _version(module: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return metadata.version(DISTRIBUTIONS.get(module, module))
    except (ImportError, ValueError):  # a module without metadata, or half installed
        return "unknown"


def _torch() -> Any:
    """torch, or why it does not import."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is no numpy, among others
            torch = importlib.import_module("torch")
        _ = torch.__version__, torch.version, torch.cuda  # not there where only a folder is left
    except Exception as error:  # noqa: BLE001 - half of a package may raise anything
        return f"{type(error).__name__}: {error}"
    return torch


def _device(found: list[Finding]) -> dict[str, Any]:
    torch = _torch()
    if isinstance(torch, str):
        if _version("torch") is not None:
            found.append(Finding(f"torch does not import ({torch})", "reinstall torch", grave=True))
        return {"type": "cpu", "why": "torch does not import"}
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return {"type": "cpu", "why": "torch is built without CUDA"}
        why = f"torch is built for CUDA {torch.version.cuda}, but no device is usable"
        found.append(Finding(why, "look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES"))
        return {"type": "cpu", "why": why}
    try:
        return _cuda(torch)
    except RuntimeError as error:  # another process has it for itself, or it is broken
        why = f"the device cannot be used: {str(error).splitlines()[0]}"
        found.append(Finding(why, "look at nvidia-smi, for its mode and for other processes"))
        return {"type": "cpu", "why": why}


def _cuda(torch: Any) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    return {
        "type": "cuda",
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        "free_bytes": free,
        "total_bytes": total,
    }


def _kernels(
    device: str, packages: Mapping[str, str | None], found: list[Finding]
) -> list[dict[str, Any]]:
    """What ``kvtier.kernels.choices`` tells; nothing where a package that it needs is missing."""
    if any(packages[name] is None for name in REQUIRED) or any(each.grave for each in found):
        return []
    try:
        kernels = importlib.import_module("kvtier.kernels")
        return [{**each, "dims": list(each["dims"])} for each in kernels.choices(device)]
    except (KVTierError, RuntimeError) as error:
        found.append(
            Finding(
                f"no kernel can be chosen: {error}", "install kvtier or torch again", grave=True
            )
        )
        return []


def _limits(device: Mapping[str, Any], found: list[Finding]) -> dict[str, Any]:
    """Memory, what of it may be pinned, files, and the shared memory that processes meet in."""
    locked, files = (_limit(which) for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    told: dict[str, Any] = {
        "memory_bytes": _memory(),
        "pinned": _pins() if device["type"] == "cuda" else None,
        "memlock_bytes": locked,
        "open_files": files,
        "shm_bytes": None,
        "shm_free_bytes": None,
    }
    try:
        usage = shutil.disk_usage("/dev/shm")
        told["shm_bytes"], told["shm_free_bytes"] = usage.total, usage.free
    except OSError:
        found.append(Finding("there is no /dev/shm", "mount a tmpfs there"))
    else:
        if usage.total < GIB:
            found.append(
                Finding(
                    f"/dev/shm has {_size(usage.total)}, too little for ranks to share pages in",
                    "in a container, start it with --shm-size (or --ipc=host)",
                )
            )
    if told["pinned"] is False:
        found.append(
            Finding(
                "host memory cannot be pinned, which the host tier needs for its copies",
                "raise the limit of locked memory (ulimit -l) or the container's memory",
                grave=True,
            )
        )
    if files is not None and files < 1024:
        found.append(Finding(f"only {files} files may be open", "raise it: ulimit -n 4096"))
    return told


def _limit(which: int) -> int | None:
    """A process's limit as it is; None: unlimited."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory() -> int | None:
    """Bytes that this process may use: the machine's, or what its control group leaves of them."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(sizes)


def _pins() -> bool:
    """Whether a MiB of host memory can be pinned."""
    torch = _torch()
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return False
    return True


def _disk(path: Path, found: list[Finding]) -> dict[str, Any]:
    """A directory that a cache might have as its ``disk_path``, which need not exist yet."""
    told: dict[str, Any] = {
        "path": str(path),
        "exists": os.path.exists(path),
        "place": None,
        "filesystem": None,
        "writable": False,
        "direct_io": None,
        "free_bytes": None,
    }
    try:
        place = _nearest(path.absolute())
    except OSError as error:
        why = f"{path} cannot be looked at: {error.strerror}"
        found.append(Finding(why, "give it to this user, or name another disk_path", grave=True))
        return told
    told["place"], told["filesystem"] = str(place), _filesystem(place)
    if not os.path.isdir(place):
        found.append(Finding(f"{place} is not a directory", "name another disk_path", grave=True))
        return told
    told["free_bytes"] = shutil.disk_usage(place).free
    try:
        told["direct_io"] = _direct(place)
        told["writable"] = True
    except OSError as error:
        why = f"{place} cannot be written: {error.strerror}"
        found.append(Finding(why, "give it to this user, or name another disk_path", grave=True))
        return told
    found.extend(_doubts(told))
    return told


def _doubts(disk: Mapping[str, Any]) -> Iterator[Finding]:
    """What speaks against a directory that can be written."""
    place, kind = disk["place"], disk["filesystem"]
    if not disk["exists"]:
        yield Finding(
            f"{disk['path']} is not there: a cache would make it, in {place}",
            "if a disk belongs there, mount it first",
        )
    if kind in VOLATILE:
        yield Finding(
            f"{place} is on {kind}, which is memory: what is stored there does not survive a "
            "reboot",
            "use a local disk",
        )
    if not disk["direct_io"]:
        yield Finding(
            f"{kind or 'the file system'} at {place} takes no direct I/O: the page cache will hold "
            "what the disk tier reads and writes",
            "use a local ext4 or xfs for the disk tier",
        )
    if kind in NETWORK:
        yield Finding(
            f"{place} is on {kind}, a network file system",
            "use a local disk: the index needs working locks and memory maps",
        )


def _nearest(path: Path) -> Path:
    """The path, or what is there of the way to it; a link that leads nowhere is there."""
    while True:
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        else:
            return path


def _direct(place: Path) -> bool:
    """Whether files here can be written past the page cache.  Raises OSError if not at all."""
    fd, name = tempfile.mkstemp(dir=place, prefix=".kvtier-doctor-")
    os.close(fd)
    try:
        fd = os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, 4096) as page:  # aligned, as direct I/O wants it
            try:
                os.pwrite(fd, page, 0)
            finally:
                os.close(fd)
    except OSError:
        return False
    finally:
        os.unlink(name)
    return True


def _filesystem(place: Path) -> str | None:
    """The type of the file system that a path is on."""
    try:
        lines = Path("/proc/self/mounts").read_bytes().splitlines()
    except OSError:
        return None
    best, kind = b"", None
    real = os.fsencode(os.path.realpath(place))
    for line in lines:
        _, written, type_, *_ = line.split(b" ")
        # Spaces are written \040; the rest is whatever bytes the path has.
        mount = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), written)
        inside = os.path.commonpath((mount, real)) == mount
        if inside and len(mount) >= len(best):
            best, kind = mount, os.fsdecode(type_)
    return kind


# ------------------------------------------------------------------ how it is shown


def _show(report: Mapping[str, Any], found: Sequence[Finding]) -> None:
    print(f"kvtier {report['kvtier']}, Python {report['python']}, {report['platform']}\n")
    rows = []
    for name, version in report["packages"].items():
        use, install = OPTIONAL.get(name, ("required", ""))
        rows.append([name, version or "-", use if version else f"{use}: {install}".strip(": ")])
    _table(["package", "version", "for"], rows)
    print(f"\ndevice   {_told(report['device'])}")
    limits = report["limits"]
    locked = limits["memlock_bytes"]
    print(
        f"memory   {_size(limits['memory_bytes'])}, limit of locked memory (ulimit -l) "
        f"{'none' if locked is None else _size(locked)}{_pinned(limits['pinned'])}\n"
        f"/dev/shm {_size(limits['shm_bytes'])}, {_size(limits['shm_free_bytes'])} free\n"
        f"files    {limits['open_files'] or 'any number'} may be open"
    )
    if report["disk"] is not None:
        print(f"disk     {_disk_told(report['disk'])}")
    if report["kernels"]:
        print(f"\nkernels on {report['kernels_for']}, for the widest rows that each is made for\n")
        _show_kernels(report["kernels"])
    if found:
        print("\nworth doing")
    for each in found:
        print(f"  {'! ' if each.grave else '- '}{each.what}\n      {each.do}")


def _show_kernels(kernels: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in kernels:
        others = [name for name in each["available"] if name != each["chosen"]]
        rows.append(
            [
                each["operation"],
                each["record"],
                each["dtype"],
                each["chosen"] or "-",
                each["why"],
                " ".join(others),
            ]
        )
        for backend, reason in each["missing"].items():
            reasons.setdefault((backend, reason), []).append(each["operation"])
    _table(["operation", "record", "type", "backend", "because", "also there"], rows)
    for (backend, reason), operations in reasons.items():
        print(f"\n{backend} is not available: {reason}\n  ({', '.join(dict.fromkeys(operations))})")


def _told(device: Mapping[str, Any]) -> str:
    if device["type"] == "cpu":
        return f"cpu ({device['why']})"
    return (
        f"{device['count']} x {device['name']}, capability {device['capability']}, CUDA "
        f"{device['cuda']}, {_size(device['free_bytes'])} of {_size(device['total_bytes'])} free"
    )


def _pinned(pinned: bool | None) -> str:
    return {None: "", True: "; pinning works", False: "; pinning fails"}[pinned]


def _disk_told(disk: Mapping[str, Any]) -> str:
    where = disk["filesystem"] or "unknown file system"
    if not disk["exists"] and disk["place"] is not None:
        where = f"not there; {disk['place']}: {where}"
    parts = [
        f"{disk['path']} ({where})",
        f"{_size(disk['free_bytes'])} free",
        "writable" if disk["writable"] else "not writable",
        {None: "direct I/O unknown", True: "direct I/O", False: "no direct I/O"}[disk["direct_io"]],
    ]
    return ", ".join(parts)


def _size(value: int | None) -> str:
    if value is None:
        return "?"
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip())
