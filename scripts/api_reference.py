"""Write docs/api.md: every public name with its signature and what its docstring says.

    python scripts/api_reference.py            # writes it
    python scripts/api_reference.py --check    # exit status 1 if it is out of date

Read from the source, so that annotations stay as they were written.
"""

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "api.md"
ADAPTER = ROOT / "adapters" / "deepseek"
MODULES = ("kvtier", "kvtier.layouts", "kvtier.kernels", "kvtier.testing", "kvtier_deepseek")
HEAD = (
    "# API reference\n\n"
    "Every public name: its signature and its docstring; of the members of a class the first "
    "sentence, `help()` has the rest. Written by `scripts/api_reference.py`; a test compares it "
    "with the code.\n"
)
SHOWN = {"__init__", "__call__", "__len__", "__add__", "__getitem__"}

Node = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ADAPTER)]
    text = reference()
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text() == text:
            return 0
        print(f"{TARGET} is out of date: run python {Path(__file__).name}", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


def reference() -> str:
    parts = [HEAD]
    for module in MODULES:
        parts.append(f"\n## `{module}`\n")
        names = importlib.import_module(module).__all__
        parts += [entry(module, name) for name in sorted(names, key=str.lower) if name[0] != "_"]
    return "\n".join(parts)


def entry(module: str, name: str) -> str:
    node = definition(module, name)
    if isinstance(node, ast.FunctionDef):
        return f"### {name}\n\n```text\n{signature(node)}\n```\n\n{whole(node)}\n"
    if isinstance(node, ast.Assign | ast.AnnAssign):
        assert node.value is not None
        return f"### {name}\n\n```text\n{name} = {unquoted(node.value)}\n```\n"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {name}({bases})" if bases else f"class {name}", *members(node)]
    table = [f"| `{member}` | {text} |" for member, text in documented(node) if text]
    listing = "\n| | |\n|---|---|\n" + "\n".join(table) + "\n" if table else ""
    code = "\n    ".join(lines)
    return f"### {name}\n\n{whole(node)}\n\n```text\n{code}\n```\n{listing}"


def definition(module: str, name: str) -> Node:
    """Where a public name is defined, following ``from x import name``."""
    path = Path(str(importlib.import_module(module).__file__))
    tree = ast.parse(path.read_text())
    tried = [part for node in tree.body if isinstance(node, ast.Try) for part in node.body]
    for node in (*tree.body, *tried):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return node
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            assert node.module is not None
            return definition(node.module, name)
    raise AssertionError(f"{module} does not define {name}")


def members(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and public(item.name):
            if is_property(item):
                assert item.returns is not None
                yield f"{item.name}: {unquoted(item.returns)}"
            else:
                yield signature(item)
        elif isinstance(item, ast.AnnAssign) and public(target := ast.unparse(item.target)):
            default = "" if item.value is None else f" = {short(item.value)}"
            yield f"{target}: {unquoted(item.annotation)}{default}"
        elif isinstance(item, ast.Assign) and "__slots__" not in ast.unparse(item):
            yield ast.unparse(item)


def documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.FunctionDef) and public(item.name):
            yield item.name.replace("__init__", node.name), says(item)
        elif (
            isinstance(item, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and public(ast.unparse(item.target))
        ):
            yield ast.unparse(item.target), first_sentence(str(after.value.value))


def public(name: str) -> bool:
    return name in SHOWN or not name.startswith("_")


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d) == "property" for d in node.decorator_list)


def signature(node: ast.FunctionDef) -> str:
    arguments = node.args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None:
            argument.annotation = ast.Name(unquoted(argument.annotation))
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        del arguments.args[0]
    returns = "" if node.returns is None else f" -> {unquoted(node.returns)}"
    if node.name == "__init__":
        returns = ""
    return f"{node.name}({ast.unparse(arguments)}){returns}"


def unquoted(node: ast.expr) -> str:
    """An annotation without the quotes of a forward reference."""
    text = ast.unparse(node)
    return re.sub(r"""(['"])([^'"]*)\1""", r"\2", text) if "Literal" not in text else text


def short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return "..." if text.startswith("field(") else text


def says(node: ast.ClassDef | ast.FunctionDef) -> str:
    return first_sentence(ast.get_docstring(node) or "")


def whole(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring's paragraphs; those that are indented as they stand."""
    parts = []
    for part in (ast.get_docstring(node) or "").split("\n\n"):
        if part.startswith("    "):
            parts.append(f"```text\n{textwrap.dedent(part)}\n```")
        else:
            parts.append(" ".join(part.split()).replace("``", "`"))
    return "\n\n".join(parts)


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.])\s(?=[A-Z`(])", paragraph)[0]
    return sentence.replace("``", "`").replace("|", r"\|")


if __name__ == "__main__":
    sys.exit(main())
