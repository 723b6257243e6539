"""The lines that a server may log from the level "info" on, from the calls in the code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.tools.tables import code, table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout", "weight_sync", "capture", "eplb")
CONSOLE = "rollout.core.console"
LEVELS = ("info", "warning", "error", "exception", "critical")


@dataclass(frozen=True)
class Line:
    level: str
    text: str
    """The format of the line: `%s`, `%d` and `...` stand for values."""
    path: str


def parts() -> dict[str, Callable[[], str]]:
    return {"log lines": log_lines}


def log_lines() -> str:
    """Return a table of the lines of the log whose text stands in their call."""
    rows = sorted((LEVELS.index(one.level), one.text, one.path) for one in lines())
    return table(("level", "line", "module"), [(LEVELS[level], code(text), code(path)) for level, text, path in rows])


def lines() -> Iterator[Line]:
    """Yield the lines that the packages may write: calls of a logger, and of `say`, which prints a line of the log."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for level, text in lines_of(path.read_text(encoding="utf-8")):
                yield Line(level, text, str(path.relative_to(ROOT)))


def lines_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield level and text of each line of a file.  A line that is all values has no text of its own."""
    nodes = list(ast.walk(ast.parse(source)))
    has_say = any(
        isinstance(node, ast.ImportFrom) and node.module == CONSOLE and any(name.name == "say" for name in node.names)
        for node in nodes
    )
    for node in nodes:
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if isinstance(node.func, ast.Attribute) and _is_logged(node.func):
            yield "error" if node.func.attr == "exception" else node.func.attr, text_of(node.args[0])
        elif has_say and isinstance(node.func, ast.Name) and node.func.id == "say":
            message, *level = node.args
            forms = [message.body, message.orelse] if isinstance(message, ast.IfExp) else [message]
            for text in map(text_of, forms):
                if any(map(str.isalpha, text)):
                    yield text_of(level[0]).lower() if level else "info", text


def _is_logged(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in LEVELS
        and isinstance(function.value, ast.Name)
        and function.value.id in ("logger", "log", "logging")
    )


def text_of(message: ast.expr) -> str:
    """Return the text of a message; a value in it is `...`."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "..." for part in message.values)
    if isinstance(message, ast.BinOp):
        return text_of(message.left) + text_of(message.right)
    return "..."
