"""The demo: it passes, and its verdict can fail."""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from kvtier import Tier
from kvtier.cli_doctor import OPTIONAL
from kvtier_deepseek import Generation, demo


def test_the_passages_are_the_whole_book_in_order() -> None:
    passages = demo._passages(16)
    book = " ".join(passages)
    assert len(passages) == 16
    assert len(book) > 6000
    assert book.startswith("Alice was beginning to get very tired")
    assert max(map(len, passages)) < 2 * min(map(len, passages))


def test_without_transformers_it_advises_what_doctor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError) as raised:
        demo.make_model("v3")
    _, install = OPTIONAL["transformers"]
    assert str(raised.value).endswith(f": {install}")


@pytest.mark.parametrize("arch", ["v2", "v3", "v32", "v4"])
def test_weights_are_the_same_in_every_process(arch: str) -> None:
    """The disk tier is keyed by the model's name, so its weights must not depend on the run."""
    one, two = demo.make_model(arch).state_dict(), demo.make_model(arch).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one["lm_head.weight"].std() > 0.1


@pytest.mark.parametrize("arch", ["v2", "v3", pytest.param("v32", marks=pytest.mark.slow)])
def test_a_short_conversation_and_a_second_process(arch: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    start = {reader: list(demo.OPENING.encode()) for reader in demo.READERS}
    first = demo.serve(arch, tmp_path, "AAB", start, 0)
    second = demo.serve(arch, tmp_path, "AB", first.transcripts, 3)
    torch.set_num_threads(threads)
    assert all(turn.equal for turn in first.turns + second.turns)
    assert [turn.reader for turn in first.turns] == ["Ann", "Ann", "Ben"]
    assert first.turns[0].result.restored[Tier.GPU] == 0
    assert first.turns[1].result.restored[Tier.GPU] > 400
    assert first.turns[2].result.restored[Tier.GPU] == 64  # what both conversations begin with
    assert second.turns[0].result.restored[Tier.DISK] > 800


def test_a_short_conversation_of_v4_and_a_second_process(tmp_path: Path) -> None:
    """Pages of 256 tokens; a prefix is resumed where a checkpoint is."""
    threads = torch.get_num_threads()
    start = {reader: list(demo.OPENING.encode()) for reader in demo.READERS}
    first = demo.serve("v4", tmp_path, "AAB", start, 0)
    second = demo.serve("v4", tmp_path, "AB", first.transcripts, 3)
    torch.set_num_threads(threads)
    assert all(turn.equal for turn in first.turns + second.turns)
    assert first.turns[0].result.restored[Tier.GPU] == 0
    assert first.turns[1].result.restored[Tier.GPU] == 256
    assert first.turns[2].result.restored[Tier.GPU] == 0  # they share less than a page
    assert second.turns[0].result.restored[Tier.DISK] == 768


def test_both_are_played_and_the_first_failure_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for failing, played in ((None, ["v3", "v4"]), ("v3", ["v3"]), ("v4", ["v3", "v4"])):
        seen: list[str] = []

        def play(arch: str, directory: Path) -> int:
            seen.append(arch)  # noqa: B023
            assert directory == tmp_path
            return int(arch == failing)  # noqa: B023

        monkeypatch.setattr(demo, "_play", play)
        assert demo.main(["--dir", str(tmp_path)]) == (failing is not None)
        assert seen == played
        assert demo.main(["--arch", "v2", "--dir", str(tmp_path)]) == 0
        assert seen == [*played, "v2"]


def served(*, equal: bool = True, process: int = 1, disk: int = 9, evicted: int = 1) -> demo.Served:
    result = Generation(
        tokens=(1,),
        prompt_tokens=3100,
        restored={Tier.GPU: 5, Tier.CPU: 5, Tier.DISK: disk},
        computed=10,
        restore_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )
    return demo.Served([demo.Turn(process, "Ann", result, equal)], {}, evicted, evicted, 0.0)


def test_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    good = served(), served(process=2)
    assert demo._verdict(demo.SCENES["v3"], *good) == 0
    assert "FAILED" not in capsys.readouterr().out
    short = dataclasses.replace(good[0].turns[0].result, prompt_tokens=100)
    shorter = [
        dataclasses.replace(s, turns=[dataclasses.replace(s.turns[0], result=short)]) for s in good
    ]
    for bad in (
        (served(equal=False), served(process=2)),
        (served(), served(process=2, equal=False)),
        (served(), served(process=2, disk=0)),
        (served(), served()),
        (served(evicted=0), served(process=2, evicted=0)),
        tuple(shorter),
    ):
        assert demo._verdict(demo.SCENES["v3"], *bad) == 1
        assert capsys.readouterr().out.count("FAILED") >= 1


def test_a_directory_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert demo.main(["--dir", str(tmp_path / "file")]) == 2
    shown = capsys.readouterr()
    assert "file is not a directory" in shown.err
    assert shown.out == ""  # before anything is said or loaded


def test_help_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--help"])
    assert "`" not in capsys.readouterr().out


def test_the_bar_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(demo.sys.stderr, "isatty", lambda: True, raising=False)
    bar = demo._Bar(2)
    bar.turn(0, "Ann", 10)
    bar.show("comparing with generate()")
    bar.close()
    drawn = capsys.readouterr().err.replace("\x1b[K", "").split("\r")
    assert [len(line) for line in drawn][2:] == [59, 0]
    assert max(map(len, drawn)) == 59


def test_the_bar_without_a_terminal_ends_at_100_percent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = demo._Bar(2)
    bar.turn(0, "Ann", 10)
    bar.turn(1, "Ben", 10)
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "100%  done"


def killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "serve", killed)
        assert demo.main(["--dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "was killed" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["v2", "v32", "v4"])
def test_the_whole_demo(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--arch", arch, "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    scene = demo.SCENES[arch]
    assert shown.out.count(" equal\n") == len(scene.first + scene.second)
