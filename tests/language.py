"""Check the English of docstrings, comments, messages, names and documents: `python -m tests.language [FILE ...]`.

It prints each sentence that breaks a rule as soon as its file is read, and then exits with 1.

A message is any text of two words or more in the code outside `tests`: an error, a line of a log, the help of a flag.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "rollout",
    "weight_sync",
    "capture",
    "eplb",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "deploy",
    "lockstep_rl",
)
MAX_WORDS = 25
"""Words of a sentence in a document."""
MAX_MESSAGE_WORDS = 20
"""Words of a sentence in a message.  A value that an f-string fills in is one word."""
FIRST_WORDS = {
    *("All", "Also", "As", "How", "If", "No", "None", "Of", "Such", "That", "Those", "What", "Whatever", "When"),
    *("Where", "Wherever", "Whether", "Which", "Who", "Whoever", "Whose"),
}
"""A docstring begins with a verb or a noun phrase, and never with one of these."""
PHRASES = (
    r"those (?:of|that|which|who)\b",
    r"(?:that|which|what) (?:is|are|was|were) (?:no|nobody|nothing)\b",
    r"nobody(?:'s)?\b",
    r"who(?:m)?ever\b",
    r"as ever\b",
    r"so many\b",
    r"(?:of|for|to|by) what (?:is|was|it|they)\b",
)
SAID = (r"beside\b", r"(?:says|said|told)\b")
"""Write "next to" or "in addition to".  Code states, returns or refuses; only a document may speak."""
MESSAGE_PHRASES = (
    r"what(?:ever)?\b(?!.*\?)",
    r"(?:those|that) (?:of|on|in|at|by)\b",
    r"those (?:which|with|without)\b",
    r"(?<!there )(?:is|are|was|were|be) (?:no (?!longer\b|more\b)|nothing\b)",
    r"(?:is|are|was|were|be) of\b",
    r"(?:nor|neither|so|only then|never) (?:is|are|was|does|do|did|can|may|must|has|have)\b",
)
MOST = re.compile(r"(?:^|_)most_", re.IGNORECASE)
"""A part of a name that means a maximum, whose word is `max_`."""
MIN_TEST_WORDS = 4
"""Words of a test's name after `test_`: fewer are a riddle."""
VERBS = frozenset((ROOT / "tests" / "verbs.txt").read_text(encoding="utf-8").split())
"""A function's docstring begins with one of these.  Add a verb that is missing."""
NAMED_LIKE_VALUES = ("property", "fixture")
"""Parts of decorators whose functions are named like values: their docstrings may begin with a noun phrase."""
WRITTEN, WRITTEN_END = "<!-- written by", "<!-- end -->"
"""Marks around a part of a document that a command writes.  It joins names of tests."""


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def _pattern(phrases: Sequence[str]) -> re.Pattern[str]:
    return re.compile(r"\b(?:" + "|".join(phrases) + ")", re.IGNORECASE)


_PHRASES, _OF_DOCUMENTS = _pattern((*PHRASES, *SAID)), _pattern((*PHRASES, SAID[0]))
_OF_MESSAGES = _pattern((*PHRASES, *SAID, *MESSAGE_PHRASES))


def python_findings(path: str, source: str) -> Iterator[Finding]:
    """Judge the docstrings, comments, messages and names of a file."""
    tree = ast.parse(source)
    yield from _bad_names(path, tree)
    if not path.startswith("tests/"):
        yield from message_findings(path, tree)
    yield from _prose_findings(path, source, tree)


def message_findings(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Judge the texts of a file that its users may read."""
    for line, text in _texts(tree):
        yield from _phrases(path, line, text, _OF_MESSAGES)
        for sentence in re.split(r"(?<=[.!?:])\s+|\n", text):
            if len(sentence.split()) > MAX_MESSAGE_WORDS:
                yield Finding(path, line, "long message", sentence)


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each text of two words or more with its line; a docstring and the signature of an operator are none."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in parts:
            continue
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if " " in text.strip() and " -> " not in text:
            yield node.lineno, text


def _bad_names(path: str, tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name.startswith("test_"):
            if len(name.split("_")) <= MIN_TEST_WORDS:
                yield Finding(path, node.lineno, "short test name", name)
        elif MOST.search(name):
            yield Finding(path, node.lineno, "name", name)


def _prose_findings(path: str, source: str, tree: ast.AST) -> Iterator[Finding]:
    """Judge docstrings and comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for line, text in _documented(node):
                if text.split() and text.split()[0].strip("`:,.") in FIRST_WORDS:
                    yield Finding(path, line, "first word", text.splitlines()[0])
                yield from _phrases(path, line, text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_called(node):
            docstring = ast.get_docstring(node) or ""
            if docstring and docstring.split()[0].strip("`:,.;") not in VERBS:
                yield Finding(path, node.lineno, "no verb first", docstring.splitlines()[0])
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _phrases(path, token.start[0], token.string.lstrip("# "))


def _is_called(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell a function that a reader calls from a test, a property and a fixture."""
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return not node.name.startswith("test_") and not any(word in decorators for word in NAMED_LIKE_VALUES)


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Yield the docstring of a node, and strings that document the constants and fields in it."""
    for child in node.body:
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            yield child.lineno, inspect.cleandoc(child.value.value)


def document_findings(path: str, source: str) -> Iterator[Finding]:
    """Judge the sentences of a Markdown file outside code and tables."""
    for line, paragraph in _paragraphs(source):
        yield from _phrases(path, line, paragraph, _OF_DOCUMENTS)
        for sentence in re.split(r"(?<=[.!?])[*_)]*\s+", paragraph):
            if len(sentence.split()) > MAX_WORDS:
                yield Finding(path, line, "long sentence", sentence)


def _phrases(path: str, line: int, text: str, pattern: re.Pattern[str] = _PHRASES) -> Iterator[Finding]:
    for found in pattern.finditer(text):
        start, end = max(0, found.start() - 30), found.end() + 30
        yield Finding(path, line, "phrase", " ".join(text[start:end].split()))


def _paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph or item of a list with its first line."""
    in_code = is_written = False
    start, lines = 1, []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        bare = line.strip()
        fence = bare.startswith("```")
        in_code ^= fence
        is_written = bare != WRITTEN_END and (is_written or bare.startswith(WRITTEN))
        is_code = fence or in_code or is_written or (not lines and line.startswith("    "))
        ends = is_code or not bare or bare.startswith(("|", "#", ">", "<", "!["))
        if lines and (ends or re.match(r"([*-]|\d+\.) ", bare)):
            yield start, " ".join(lines)
            lines = []
        if not ends:
            start = start if lines else number
            lines.append(re.sub(r"^([*-]|\d+\.) ", "", bare))


def _files() -> list[Path]:
    inside = [path for folder in FOLDERS for kind in ("py", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return sorted([*inside, *ROOT.glob("*.md")])


def findings(path: str) -> list[Finding]:
    source = (ROOT / path).read_text(encoding="utf-8")
    return list(python_findings(path, source) if path.endswith(".py") else document_findings(path, source))


def main(words: Sequence[str]) -> int:
    is_clean = True
    for path in words or [str(path.relative_to(ROOT)) for path in _files()]:
        for one in findings(path):
            print(one, flush=True)
            is_clean = False
    return int(not is_clean)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
