"""The repository around the code: what is shipped, what the documents say, and in which words."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".toml", ".sh", ".txt", ".yaml", ".c", ""}


def tracked() -> list[Path]:
    """Files of the repository; everything on disk where there is no git."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def test_every_decision_is_listed_and_has_its_parts() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    records = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
    numbers = [int(path.name[:4]) for path in records]
    assert numbers == list(range(1, len(records) + 1)), "one number each, none left out"
    for path in records:
        assert f"({path.name})" in index, f"{path.name} is not listed in docs/adr/README.md"
        text = path.read_text()
        assert text.startswith(f"# {int(path.name[:4])}. ")
        for part in ("## Context", "## Decision", "## What it costs"):
            assert text.count(part) == 1, f"{path.name}: {part}"


def test_links_between_documents_lead_somewhere() -> None:
    """Files that are there, and headings that are in them."""
    broken = []
    for path in documents():
        for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", _prose(path)):
            there = path.parent / target if target else path
            if "://" in target or (there.exists() and _has(there, heading)):
                continue
            broken.append(f"{path.relative_to(ROOT)}: {target}#{heading}")
    assert not broken


def _prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def _has(path: Path, heading: str) -> bool:
    """Whether a heading of a document has this anchor: its words in lower case with dashes between,
    without other punctuation.  Of two equal ones only the first is found."""
    titles = re.findall(r"^#+ (.+)$", _prose(path), re.MULTILINE) if heading else []
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return not heading or heading in anchors


def test_the_project_speaks_of_itself_alone() -> None:
    # Split so that this file does not find itself.
    words = [
        "/wo" + "rk/",
        "sha" + "red/",
        "/tmp/pe" + "ers",
        "helper sess" + "ion",
        "the br" + "ief",
    ]
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path.name in ("LICENSE", ".gitignore"):
            continue
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not found


def test_tables_are_those_of_the_results() -> None:
    script = ROOT / "scripts" / "perf_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT)
    assert done.returncode == 0, "run scripts/perf_table.py"


def test_no_file_past_its_size() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("kvtier", "adapters")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert not long, "split these"


def test_modules_open_with_what_they_own() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for folder in ("kvtier", "adapters", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not bare


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    needed = [*project["dependencies"], *project["optional-dependencies"]["deepseek"]]
    for requirement in needed:
        name, _, least = requirement.partition(">=")
        assert _version(pins[name]) >= _version(least), f"{name}: pinned below its own minimum"
    assert (ROOT / "CHANGELOG.md").read_text().count("## Unreleased") == 1


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_wheel_holds_both_packages_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = next(n for n in names if n.endswith("entry_points.txt"))
        assert "kvtier = kvtier.cli:main" in archive.read(scripts).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvtier", "kvtier_deepseek"}
    for package, folder in (("kvtier", ROOT), ("kvtier_deepseek", ROOT / "adapters/deepseek")):
        assert f"{package}/py.typed" in names
        sources = {str(path.relative_to(folder)) for path in (folder / package).rglob("*.py")}
        assert sources == {n for n in names if n.startswith(f"{package}/") and n.endswith(".py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name]
