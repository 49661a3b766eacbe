"""`kvtier trace simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier import cli_trace
from kvtier.cli import main

ROW = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 9, 11]}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"timestamp": 9}) + "\n")
    return str(path)


def simulate(*arguments: str) -> int:
    return main(["trace", "simulate", *arguments])


@pytest.mark.parametrize("policy", ["adaptive", "dense", "sparse", "history_only"])
def test_what_is_asked_for_twice_is_a_hit(
    trace: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(trace, "--policy", policy, "--host-gib", "1", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["prompt_tokens"]) == (2, 2200)
    assert told["hit_tokens"] == 1024 and told["disk_bytes_written"] == 0
    assert told["hit_rate"] == pytest.approx(100 * 1024 / 2200)


@pytest.mark.parametrize(("policy", "gib", "tokens"), [("infinite", "0", 1024), ("belady", "0", 0)])
def test_oracles(
    trace: str, policy: str, gib: str, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(trace, "--policy", policy, "--host-gib", gib, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hit_rate"] == pytest.approx(100 * tokens / 2200)


def test_plain_text_and_a_disk(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--host-gib", "0.02", "--disk-gib", "1", "--eviction", "lru")
    assert simulate(trace, *options) == 0
    out = capsys.readouterr().out
    assert "hit rate           46.55 %" in out
    told = [line for line in out.splitlines() if line.startswith("disk bytes written")]
    (disk,) = (line.split()[-1] for line in told)
    assert int(disk) == 998_208 * (4 + 2 * 4)  # four pages, two checkpoints


def test_layouts_of_ones_own(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--page-tokens", "64", "--page-bytes", "1MiB", "--checkpoint-bytes", "0")
    assert simulate(trace, *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["hit_tokens"] == 1088


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--page-tokens", "100"], "power of two"),
        (["--page-bytes", "0"], "--page-bytes"),
        (["--page-bytes", "some"], "--page-bytes"),
        (["--host-gib", "0", "--disk-gib", "1"], "host memory"),
    ],
)
def test_bad_sizes(
    trace: str, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(trace, *options) == 2
    assert told in capsys.readouterr().err


def test_files_that_are_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(str(tmp_path / "nothing.jsonl")) == 2
    assert "nothing.jsonl: no such file" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"a": 1}\n')
    assert simulate(str(bad)) == 2
    assert "bad.jsonl:1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        simulate(str(bad), "--host-gib", "much")
    with pytest.raises(SystemExit):
        simulate(str(bad), "--policy", "best")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"a": 1}', "it has no 'input_length'"),
        ('{"requests": []}', "it has no 'block_tokens'"),
        ("{'a': 1}", "it is not JSON ("),
        ("[1, 2]", "not an object, [1, 2]"),
        ('{"input_length": 9, "hash_ids": 7}', "object of type 'int' has no len()"),
        ('{"input_length": 9, "hash_ids": []}', "0 blocks of 512 for 9 tokens"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_words(
    line: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(ROW) + "\n" + line + "\n")
    assert simulate(str(bad)) == 2
    said = capsys.readouterr().err
    assert f"bad.jsonl:2 is not of a trace: {told}" in said
    assert "Error" not in said


def test_named_traces_come_with_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("conversations") == 2
    said = capsys.readouterr().err
    assert "conversations: no such file, and no trace of that name" in said
    assert "agentic, conversation" in said
    monkeypatch.setattr(cli_trace, "SHIPPED", tmp_path / "benchmarks" / "traces")
    assert simulate("conversation") == 2
    said = capsys.readouterr().err
    assert "conversation: no such file" in said and "come with a clone" in said
    for path in ("conversation.jsonl", "traces/conversation"):
        assert simulate(path) == 2
        assert capsys.readouterr().err == f"kvtier: {path}: no such file or directory\n"


def test_shipped_traces_go_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("agentic", "--policy", "infinite", "--json") == 0
    assert json.loads(capsys.readouterr().out)["hit_rate"] == pytest.approx(95.19, abs=0.01)
