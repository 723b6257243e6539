"""The lines that a server may log from the level "info" on, from the calls in the code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.tools.tables import code, table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout", "weight_sync", "capture", "eplb")
LEVELS = ("info", "warning", "error", "exception", "critical")


@dataclass(frozen=True)
class Line:
    level: str
    text: str
    """The format of the line: `%s` and `%d` stand for values."""
    path: str


def parts() -> dict[str, Callable[[], str]]:
    return {"log lines": log_lines}


def log_lines() -> str:
    """Return a table of all lines of the log."""
    rows = sorted((LEVELS.index(one.level), one.text, one.path) for one in lines())
    return table(("level", "line", "module"), [(LEVELS[level], code(text), code(path)) for level, text, path in rows])


def lines() -> Iterator[Line]:
    """Yield each call of a logger in the packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _is_logged(node.func) and node.args:
                    assert isinstance(node.func, ast.Attribute)
                    level = "error" if node.func.attr == "exception" else node.func.attr
                    yield Line(level, text_of(node.args[0]), str(path.relative_to(ROOT)))


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
