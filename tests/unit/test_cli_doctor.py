"""``kvtier doctor``: what it finds, what it advises, and that it needs nothing to be there."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import cli_doctor
from kvtier.cli import main

ROOT = Path(__file__).parents[2]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", *arguments])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, told


def grave(told: dict[str, Any]) -> list[str]:
    return [each["what"] for each in told["findings"] if each["grave"]]


@pytest.mark.parametrize("json_too", [True, False])
def test_without_torch(json_too: bool) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from kvtier.cli import main; "
        f"sys.exit(main(['doctor'{', ' + repr('--json') if json_too else ''}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (1, "")
    if json_too:
        told = json.loads(done.stdout)
        assert grave(told) == ["torch is missing"] and told["kernels"] == []
        assert told["packages"]["torch"] is None and told["packages"]["lmdb"] is not None
        assert told["device"] == {"type": "cpu", "why": "torch does not import"}
    else:
        assert "! torch is missing\n      pip install torch" in done.stdout
        assert "kernels on" not in done.stdout


@pytest.mark.parametrize("package", ["numpy", "lmdb", "zstandard", "xxhash"])
def test_without_a_package(package: str) -> None:
    """doctor says so, with everything else; other commands and uses say what to ask."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None; {code}"],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip

    done = run("from kvtier.cli import main; sys.exit(main(['doctor', '--json']))")
    assert (done.returncode, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    assert grave(told) == [f"{package} is missing"] and told["kernels"] == []
    assert told["packages"]["torch"] is not None and told["limits"]["memory_bytes"] > 0
    done = run("from kvtier.cli import main; sys.exit(main(['ls', '.']))")
    assert done.returncode == 2 and "`kvtier doctor` says what is missing" in done.stderr
    assert package in done.stderr and "Traceback" not in done.stderr
    if package == "numpy":
        done = run("import kvtier; print(kvtier.__version__); from kvtier import Cache")
        assert done.stdout and "ModuleNotFoundError" in done.stderr and "numpy" in done.stderr


def test_a_broken_kvtier_does_not_import() -> None:
    """No package is missing, so there is nothing that doctor could say."""
    code = "import sys; sys.modules['kvtier.cache'] = None; import kvtier"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 1 and "kvtier.cache" in done.stderr


def test_a_package_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.import_module

    def broken(name: str) -> Any:
        if name == "zstandard":
            raise ImportError("libzstd.so.1: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    status, told = report(capsys)
    assert status == 1 and told["kernels"] == []
    (what,) = grave(told)
    assert what.startswith("zstandard does not import (") and "libzstd.so.1" in what


def test_a_torch_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.import_module

    def broken(name: str) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    status, told = report(capsys)
    assert status == 1 and told["kernels"] == []
    (what,) = grave(told)
    assert "libcudart.so.13" in what and told["packages"]["torch"] is not None


@pytest.mark.parametrize(
    "left", [RuntimeError("no symbol"), SyntaxError("invalid syntax"), SimpleNamespace()], ids=str
)
def test_half_a_torch(
    left: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that raises as it loads; a folder that was left when it was removed."""
    real = importlib.import_module

    def load(name: str) -> Any:
        if name != "torch":
            return real(name)
        if isinstance(left, Exception):
            raise left
        return left

    monkeypatch.setattr(importlib, "import_module", load)
    status, told = report(capsys)
    assert status == 1 and told["kernels"] == [] and told["device"]["type"] == "cpu"
    (what,) = grave(told)
    assert what.startswith("torch does not import (")


def test_a_device_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken() -> Any:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore of it")

    cuda = SimpleNamespace(is_available=lambda: True, mem_get_info=taken)
    fake = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"), __version__="2")
    monkeypatch.setattr(cli_doctor, "_torch", lambda: fake)
    status, told = report(capsys)
    assert (status, told["device"]["type"]) == (0, "cpu")
    assert told["device"]["why"].endswith("devices are busy")
    assert told["device"]["why"] in [each["what"] for each in told["findings"]]


def test_here(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = report(capsys, "--device", "cpu")
    assert (status, grave(told)) == (0, [])
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    for name in ("numpy", "torch"):
        assert told["packages"][name] == sys.modules[name].__version__
    assert told["kernels_for"] == "cpu" and told["disk"] is None
    chosen = {(k["operation"], k["record"]): k["chosen"] for k in told["kernels"]}
    assert chosen["mla_absorbed", "dense"] == "torch"
    assert chosen["mla_materialised_whole", "dense"] == "sdpa"
    assert main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "mla_absorbed" in shown and "the only one" in shown
    assert ("worth doing" in shown) is bool(told["findings"])


def test_kernels_of_another_device(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("flashinfer"):
        pytest.skip("it is here")
    assert main(["doctor", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "flashinfer is not available: " in shown
    assert "pip install flashinfer-python" in shown
    lines = [line.split() for line in shown.splitlines() if line.startswith("mla_absorbed")]
    assert lines[0][:4] == ["mla_absorbed", "dense", "bfloat16", "triton"]


@pytest.mark.parametrize("pins", [True, False])
def test_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pins: bool
) -> None:
    def empty(*_: Any, **options: Any) -> None:
        assert options["pin_memory"]
        if not pins:
            raise RuntimeError("out of memory")

    cuda = SimpleNamespace(
        is_available=lambda: True,
        mem_get_info=lambda: (100 << 30, 140 << 30),
        get_device_name=lambda: "NVIDIA H200",
        device_count=lambda: 2,
        get_device_capability=lambda: (9, 0),
    )
    fake = SimpleNamespace(
        cuda=cuda, version=SimpleNamespace(cuda="13.0"), empty=empty, uint8=None, __version__="2"
    )
    monkeypatch.setattr(cli_doctor, "_torch", lambda: fake)
    status, told = report(capsys)
    assert told["kernels_for"] == "cuda" and told["limits"]["pinned"] is pins
    assert told["device"]["name"] == "NVIDIA H200" and told["device"]["capability"] == "9.0"
    assert (status, len(grave(told))) == ((0, 0) if pins else (1, 1))
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "2 x NVIDIA H200, capability 9.0, CUDA 13.0, 100.0 GiB of 140.0 GiB free" in shown
    assert ("pinning works" in shown) is pins


def test_a_device_that_is_not_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: False),
        version=SimpleNamespace(cuda="13.0"),
        __version__="2.11.0+cu130",
    )
    monkeypatch.setattr(cli_doctor, "_torch", lambda: fake)
    status, told = report(capsys)
    assert status == 0 and "built for CUDA 13.0" in told["device"]["why"]
    assert told["packages"]["torch"] == "2.11.0+cu130"
    assert told["findings"][0]["do"].startswith("look at nvidia-smi")


class TestDisk:
    def test_a_directory(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, told = report(capsys, "--disk", str(tmp_path))
        disk = told["disk"]
        assert status == 0 and disk["exists"] and disk["writable"]
        assert disk["free_bytes"] > 0 and disk["direct_io"] in (True, False)
        assert list(tmp_path.iterdir()) == []
        device = os.stat(tmp_path).st_dev
        types = {}  # of the mounts that are there, by device
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            types[fields[2]] = fields[fields.index("-") + 1]
        number = f"{os.major(device)}:{os.minor(device)}"
        if number in types:
            assert disk["filesystem"] == types[number]

    def test_one_that_does_not_exist_yet(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "a" / "b"
        status, told = report(capsys, "--disk", str(path))
        assert status == 0 and told["disk"]["writable"] and not told["disk"]["exists"]
        assert told["disk"]["place"] == str(tmp_path)
        what = [each["what"] for each in told["findings"]]
        assert f"{path} is not there: a cache would make it, in {tmp_path}" in what
        assert main(["doctor", "--disk", str(path)]) == 0
        assert f"{path} (not there; {tmp_path}: " in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "ext4"])
    def test_memory_does_not_survive_a_reboot(
        self,
        kind: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(cli_doctor, "_filesystem", lambda _: kind)
        status, told = report(capsys, "--disk", str(tmp_path))
        what = [each["what"] for each in told["findings"]]
        named = any(f"{kind}, which is memory" in each and "reboot" in each for each in what)
        assert status == 0 and named == (kind != "ext4")
        assert not any("is not there" in each for each in what)

    def test_a_file_in_its_place(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "kv").write_text("")
        status, told = report(capsys, "--disk", str(tmp_path / "kv"))
        assert status == 1 and "is not a directory" in grave(told)[0]
        assert told["disk"]["writable"] is False and told["disk"]["direct_io"] is None

    def test_a_link_that_leads_nowhere(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "gone").symlink_to(tmp_path / "nothing")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        for path in (tmp_path / "gone", tmp_path / "gone" / "kv", tmp_path / "loop"):
            status, told = report(capsys, "--disk", str(path))
            assert status == 1 and "is not a directory" in grave(told)[0]

    def test_what_cannot_be_looked_at(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The rest is told all the same."""
        status, told = report(capsys, "--disk", str(tmp_path / ("x" * 300)))
        assert status == 1 and "cannot be looked at: File name too long" in grave(told)[0]
        assert told["packages"]["numpy"] is not None

        def refused(_: Path) -> Any:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "lstat", refused)
        status, told = report(capsys, "--disk", str(tmp_path / "kv"))
        assert status == 1
        assert grave(told) == [f"{tmp_path / 'kv'} cannot be looked at: Permission denied"]

    def test_mounts_of_any_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Spaces and other bytes; what is in no character set."""
        place = tmp_path / "k v \u00fc"
        place.mkdir()
        written = os.fsencode(os.path.realpath(place)).replace(b" ", rb"\040")
        lines = (
            b"/dev/a / ext4 rw 0 0\nnone /mnt/\xff tmpfs rw 0 0\nhost:/x %s nfs4 rw 0 0\n" % written
        )
        monkeypatch.setattr(Path, "read_bytes", lambda _: lines)
        status, told = report(capsys, "--disk", str(place))
        assert status == 0 and told["disk"]["filesystem"] == "nfs4"

    def test_without_permission(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refused(**_: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(tempfile, "mkstemp", refused)
        status, told = report(capsys, "--disk", str(tmp_path))
        assert status == 1 and grave(told) == [f"{tmp_path} cannot be written: Permission denied"]
        assert told["disk"]["writable"] is False

    def test_without_direct_io_on_a_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = os.open

        def opened(path: Any, flags: int, *more: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real(path, flags, *more)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(cli_doctor, "_filesystem", lambda _: "nfs4")
        assert main(["doctor", "--disk", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "nfs4" in shown and "takes no direct I/O" in shown and "network file" in shown
        assert list(tmp_path.iterdir()) == []


def test_limits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    low = SimpleNamespace(
        RLIMIT_MEMLOCK=1, RLIMIT_NOFILE=2, RLIM_INFINITY=-1, getrlimit=lambda which: (which * 64, 9)
    )
    monkeypatch.setattr(cli_doctor, "resource", low)
    monkeypatch.setattr(
        cli_doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20, free=1 << 20)
    )
    _, told = report(capsys)
    assert told["limits"]["memlock_bytes"] == 64 and told["limits"]["open_files"] == 128
    what = [each["what"] for each in told["findings"]]
    assert any("/dev/shm has 64.0 MiB" in each for each in what)
    assert "only 128 files may be open" in what
    low.getrlimit = lambda _: (-1, -1)
    _, told = report(capsys)
    assert told["limits"]["memlock_bytes"] is told["limits"]["open_files"] is None


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--device", "tpu"])
    assert left.value.code == 2
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--help"])
    assert left.value.code == 0 and "Exit status" in capsys.readouterr().out
