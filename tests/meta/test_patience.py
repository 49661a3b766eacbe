"""Limits that only guard against hanging leave a busy machine ample time."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
AMPLE_S = 300
"""What a guard allows at least; less than ``SHORT_S`` is meant to run out."""
SHORT_S = 10
WAITS = ("exception", "join", "result", "wait")


def test_guards_against_hanging_are_ample() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in (ROOT / "tests").rglob("*.py")
        for node, limit in limits(ast.parse(path.read_text()))
        if SHORT_S <= limit < AMPLE_S
    ]
    assert not found, f"give these {AMPLE_S} s"


def limits(tree: ast.Module) -> Iterator[tuple[ast.expr, float]]:
    """Every number of seconds after which a test gives up, with the expression it stands in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            waits = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
            given = [k.value for k in node.keywords if k.arg in ("timeout", "wait_s")]
            given += [*node.args[:1]] if waits else []
            given += [*node.args[1:2]] if ast.unparse(node.func).endswith("wait_for") else []
            given += [*node.args] if ast.unparse(node.func).endswith("mark.timeout") else []
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("time.monotonic"):
            given = [node.value.right] if isinstance(node.value, ast.BinOp) else []
        else:
            continue
        for each in given:
            if isinstance(each, ast.Constant) and isinstance(each.value, int | float):
                yield (node if isinstance(node, ast.Call) else node.value), each.value
