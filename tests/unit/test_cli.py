"""The command line over real stores: what it prints, and with which status it ends."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtier import Identity, Record, TokenError
from kvtier.cli import main
from kvtier.cli_disk import read_tokens
from kvtier.core.keys import chain_base, chain_root, checkpoint_key, page_key
from kvtier.stores import LmdbStore

PAGE = 16
FRAME = 4096
BASE = chain_base(b"layout", b"model")
TENANT = Identity(tenant="acme")


def chain(tokens: list[int], identity: Identity, checkpoint_at: int = 0) -> Iterator[Record]:
    """Records of all whole pages of these tokens, as the cache would store them."""
    parent = chain_root(BASE, identity)
    for depth in range(1, len(tokens) // PAGE + 1):
        page = np.array(tokens[(depth - 1) * PAGE : depth * PAGE], "<i4").tobytes()
        key = page_key(parent, page)
        yield record(key, parent, depth, "history", page)
        if depth == checkpoint_at:
            yield record(checkpoint_key(key), key, depth, "checkpoint", page)
        parent = key


def record(key: bytes, parent: bytes, depth: int, component: str, page: bytes) -> Record:
    payload = bytes([depth]) * FRAME
    return Record(
        key=key,
        parent=parent,
        depth=depth,
        component=component,
        tokens=page,
        payload=(memoryview(payload),),
        checksum=xxhash.xxh3_128_digest(payload),
        size=FRAME,
    )


@contextmanager
def another_process_writing(path: Path) -> Iterator[None]:
    """The store of ``path`` is held open for writing by a child."""
    code = (
        "import sys; from kvtier.stores import LmdbStore; "
        f"s = LmdbStore(sys.argv[1], fingerprint=bytes.fromhex({BASE.hex()!r}), "
        f"frame_bytes={FRAME}, limit_bytes=16 << 20); print('open', flush=True); "
        "sys.stdin.read(); s.close()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield


PROMPT = list(range(100, 100 + 5 * PAGE))


def open_store(path: Path) -> LmdbStore:
    return LmdbStore(path, fingerprint=BASE, frame_bytes=FRAME, limit_bytes=16 << 20)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with three pages of PROMPT (a checkpoint at the second) for one tenant, and one page
    of it for nobody in particular."""
    path = tmp_path / "kv"
    with open_store(path) as store:
        store.put_group(list(chain(PROMPT[: 3 * PAGE], TENANT, checkpoint_at=2)))
        store.put_group(list(chain(PROMPT[:PAGE], Identity())))
    return path


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.npy"
    np.save(path, np.array(PROMPT))
    return str(path)


def test_ls(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directory)]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["store", "pages", "checkpoints", "size", "frame", "state"]
    assert line.split()[:3] == [f"{BASE.hex()}-0of1", "4", "1"]
    assert line.split()[-1] == "clean"
    assert main(["ls", str(directory), "--json"]) == 0
    (info,) = json.loads(capsys.readouterr().out)
    assert (info["fingerprint"], info["pages"], info["checkpoints"]) == (BASE.hex(), 4, 1)


def test_stat(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", str(directory), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (store,) = shown["stores"]
    assert shown["bytes"] == store["bytes"]
    assert shown["bytes"] >= 5 * FRAME
    expected = {
        "pages": 4, "checkpoints": 1, "frames": 5, "payload_bytes": 5 * FRAME, "quarantined": 0,
        "leaf_pages": 2, "longest_chain": 3, "state": "clean", "rank": "0 of 1",
    }  # fmt: skip
    assert {name: store[name] for name in expected} == expected
    assert main(["stat", str(directory)]) == 0
    assert "longest chain   3" in capsys.readouterr().out


def test_tools_work_beside_a_writer(
    directory: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with another_process_writing(directory):
        assert main(["ls", str(directory)]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[-1] == "open"
        assert main(["explain", str(directory), "--tokens", prompt]) == 0
        assert f"{PAGE} tokens, 1 of 5 pages" in capsys.readouterr().out
        assert main(["fsck", str(directory)]) == 2
        assert capsys.readouterr().out.endswith("\n0 stores checked, 1 in use\n")


def test_explain_follows_the_identity(
    directory: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", str(directory), "--tokens", prompt]
    assert main([*command, "--tenant", "acme"]) == 0
    out = capsys.readouterr().out
    assert f"{3 * PAGE} tokens, 3 of 5 pages of {PAGE} tokens" in out
    assert f"checkpoints at token {2 * PAGE}\n" in out
    assert f"resumes at token {2 * PAGE}\n" in out
    assert f"the page at token {3 * PAGE} is not here" in out
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"{PAGE} tokens, 1 of 5 pages" in out
    assert "no checkpoint among them\n" in out
    assert "resumes at token 0\n" in out
    for other in (["--tenant", ""], ["--adapter", "acme"], ["--salt", "00"]):
        assert main([*command, *other]) == 0
        assert "no page of these tokens" in capsys.readouterr().out


def test_the_last_token_is_always_computed(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint at the very end of a prompt is there and serves longer prompts only."""
    path = tmp_path / "ids"
    for more, stands in ((0, 0), (1, 2 * PAGE)):
        path.write_text(" ".join(map(str, PROMPT[: 2 * PAGE + more])))
        assert main(["explain", str(directory), "--tokens", str(path), "--tenant", "acme"]) == 0
        out = capsys.readouterr().out
        assert f"checkpoints at token {2 * PAGE}\n" in out
        assert f"resumes at token {stands}\n" in out


def test_stores_without_checkpoints_say_nothing_of_them(
    tmp_path: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(tmp_path / "kv") as store:
        store.put_group(list(chain(PROMPT, Identity())))
    assert main(["explain", str(tmp_path / "kv"), "--tokens", prompt]) == 0
    out = capsys.readouterr().out
    assert f"{5 * PAGE} tokens, 5 of 5 pages" in out
    assert "checkpoint" not in out
    assert "resumes" not in out


def test_explain_tells_another_prompt(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.txt"
    path.write_text(json.dumps([*PROMPT[: 2 * PAGE], 7, *PROMPT[2 * PAGE + 1 :]]))
    assert main(["explain", str(directory), "--tokens", str(path), "--tenant", "acme"]) == 0
    assert f"{2 * PAGE} tokens, 2 of 5 pages" in capsys.readouterr().out


def test_fsck_finds_damage_and_repairs_it(
    directory: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fsck", str(directory)]) == 0
    assert "5 records, sound" in capsys.readouterr().out
    damaged = bytes([2]) * 64  # payload of the page at depth 2
    (slab,) = [
        path
        for path in directory.rglob("*")
        if path.is_file() and path.stat().st_size and damaged in path.read_bytes()
    ]
    data = bytearray(slab.read_bytes())
    data[data.index(damaged) + 5] ^= 0x40
    slab.write_bytes(data)
    assert main(["fsck", str(directory)]) == 1
    assert "1 damaged record (--repair removes what is bad)" in capsys.readouterr().out
    assert main(["fsck", str(directory), "--repair"]) == 1
    out = capsys.readouterr().out
    assert "1 damaged record (repaired: 3 records dropped in all)" in out  # page 2, what needs it
    assert out.endswith("\n1 store checked\n")
    assert main(["fsck", str(directory)]) == 0
    capsys.readouterr()
    assert main(["explain", str(directory), "--tokens", prompt, "--tenant", "acme"]) == 0
    assert f"{PAGE} tokens, 1 of 5 pages" in capsys.readouterr().out  # and what hung on it is gone


def test_rm_removes_one_closed_store(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = b"another-model-16"
    with LmdbStore(directory, fingerprint=other, frame_bytes=FRAME, limit_bytes=64 << 20) as store:
        page = record(b"k" * 16, b"r" * 16, 1, "history", b"t")
        store.put_group([page])
    name, kept = f"{BASE.hex()}-0of1", f"{other.hex()}-0of1"
    assert main(["rm", str(directory), "nothing"]) == 2
    assert (
        f"no store 'nothing'; it has {', '.join(sorted([name, kept]))}\n" in capsys.readouterr().err
    )
    with another_process_writing(directory):
        assert main(["rm", str(directory), name]) == 2
        assert "in use" in capsys.readouterr().err
    assert main(["explain", str(directory), "--tokens", "/dev/null"]) == 2
    assert (directory / name).is_dir()
    capsys.readouterr()
    assert main(["rm", str(directory), name]) == 0
    assert f"{name}: removed, " in capsys.readouterr().out
    assert not (directory / name).exists()
    assert main(["fsck", str(directory)]) == 0
    assert f"{kept}: 1 record, sound" in capsys.readouterr().out
    with open_store(directory) as store:  # and it can be made anew
        assert len(store.scan()) == 0


def test_an_interrupted_demo_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    entry = type("Entry", (), {"name": "a", "load": lambda self: interrupted})()
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_store_that_cannot_be_checked(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (about,) = directory.rglob("about.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 999}))
    for more in ([], ["--repair"]):
        assert main(["fsck", str(directory), *more]) == 1
        line, totals = capsys.readouterr().out.splitlines()
        assert ": not checked: " in line
        assert "newer kvtier" in line
        assert "--repair" not in line
        assert totals == "0 stores checked, 1 could not be checked"


def test_empty_directory(tmp_path: Path, prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    line = f"no stores in {empty} (is this the cache's disk_path?)\n"
    for command in (["ls"], ["stat"], ["explain", "--tokens", prompt], ["fsck"]):
        assert main([command[0], str(empty), *command[1:]]) == 0
        assert capsys.readouterr().out == line
    assert main(["rm", str(empty), "x"]) == 2
    assert capsys.readouterr().err == f"kvtier: {line}"


@pytest.mark.parametrize(
    ("text", "said"),
    [("1 x", "'x' is not a token id"), ("", "no token ids"), ("[]", "no token ids")],
)
def test_bad_tokens_on_standard_input(
    text: str, said: str, directory: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["explain", str(directory), "--tokens", "-"]) == 2
    assert capsys.readouterr().err == f"kvtier: standard input: {said}\n"


def test_a_file_of_tokens_that_is_not_there(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("nofile.json", "nofile.npy"):
        assert main(["explain", str(directory), "--tokens", name]) == 2
        assert capsys.readouterr().err.startswith(f"kvtier: {name}: no such file")


@pytest.mark.parametrize("command", ["ls", "stat", "explain", "fsck", "rm"])
def test_what_is_no_directory(
    command: str, tmp_path: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"explain": ["--tokens", prompt], "rm": ["x"]}.get(command, [])
    for path in (tmp_path / "nothing", Path(prompt)):
        assert main([command, str(path), *more]) == 2
        err = capsys.readouterr().err
        assert err.startswith("kvtier: ")
        assert str(path) in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["ls"], "PATH"),
        (["wash"], "wash"),
        (["ls", ".", "--colour"], "--colour"),
        (["explain", "."], "--tokens"),
        (["rm", "."], "STORE"),
        (["explain", ".", "--tokens", "x", "--salt", "xyz"], "hex"),
    ],
)
def test_usage_errors(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "stat", "explain", "fsck", "rm"])
def test_help_is_complete(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "PATH" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert command in out
    assert "demo" in out


@pytest.mark.parametrize("text", ["1 2 3", "[1, 2, 3]", "1,2,3\n", "1\n2\n3\n", " [1 ,2 ,3 ]\n"])
def test_tokens_from_text(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    assert read_tokens(str(path)).array().tolist() == [1, 2, 3]


@pytest.mark.parametrize("text", ["1 two", "1.5", "-1", "{}", "99999999999"])
def test_what_is_no_list_of_ids(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    with pytest.raises(TokenError):
        read_tokens(str(path))


def test_npy_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.npy"
    path.write_bytes(b"not numpy")
    with pytest.raises(TokenError):
        read_tokens(str(path))
    np.save(path, np.array([[1.5]]))
    with pytest.raises(TokenError):
        read_tokens(str(path))
    with pytest.raises(OSError, match="nowhere"):
        read_tokens("nowhere.npy")


def test_demo_takes_its_arguments_and_gives_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    class Entry:
        def __init__(self, name: str, status: int) -> None:
            self.name, self.status = name, status

        def load(self) -> object:
            if self.name == "broken":
                raise ImportError("needs a thing")
            return lambda arguments: seen.append(list(arguments)) or self.status

    entries = [Entry("b", 0), Entry("a", 1), Entry("broken", 0)]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
    assert main(["demo", "--arch", "v2", "--help"]) == 1
    assert main(["demo", "b", "x"]) == 0
    assert seen == [["--arch", "v2", "--help"], ["x"]]
    assert main(["demo", "broken"]) == 2
    assert "needs a thing" in capsys.readouterr().err
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert main(["demo"]) == 2
    assert "make demo" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error(directory: Path) -> None:
    code = f"import sys; from kvtier.cli import main; sys.exit(main(['stat', {str(directory)!r}]))"
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; {sys.executable} -c "$0" | true', code],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
