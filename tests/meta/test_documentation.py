"""Python in the documents runs.

A fenced block marked ``python`` is executed, blocks of one document in order and in one namespace.
A block that needs what a test cannot have is marked ``python no-run`` and must still compile.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(path: Path) -> list[tuple[str, str, int]]:
    """(marks, code, line) of each python block."""
    text = path.read_text()
    return [(m[1].strip(), m[2], text[: m.start()].count("\n") + 1) for m in FENCE.finditer(text)]


DOCUMENTS = [
    path
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "adapters").rglob("*.md")),
    ]
    if path.exists() and blocks(path)
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    namespace: dict[str, object] = {"__name__": "documentation"}
    for marks, code, line in blocks(path):
        # Blank lines before it make the traceback point into the document.
        compiled = compile("\n" * line + code, str(path), "exec")
        if "no-run" not in marks.split():
            exec(compiled, namespace)


def test_the_readme_has_a_running_example() -> None:
    assert any("no-run" not in marks for marks, _, _ in blocks(ROOT / "README.md"))
