"""Check the English of docstrings, comments and documents: `python -m tests.language [FILE ...]`.

It prints each sentence that breaks a rule, and exits with 1 where a folder has more of them than `ALLOWED` grants, or
fewer: the number of exceptions only falls.  With files it judges these alone, without exceptions.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("rollout", "weight_sync", "capture", "eplb", "tests", "examples", "benchmarks", "docs")
MOST_WORDS = 25
"""Words of a sentence in a document."""
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
_PHRASES = re.compile(r"\b(?:" + "|".join(PHRASES) + ")", re.IGNORECASE)
WRITTEN, WRITTEN_END = "<!-- written by", "<!-- end -->"
"""Marks around a part of a document that a command writes.  It joins names of tests."""
ALLOWED: dict[tuple[str, str], int] = {}
"""Exceptions by rule and top-level folder.  They may only fall."""


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"

    @property
    def place(self) -> tuple[str, str]:
        """The key of `ALLOWED`."""
        return self.rule, self.path.split("/")[0]


def python_findings(path: str, source: str) -> Iterator[Finding]:
    """Judge the docstrings and comments of a file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for line, text in _documented(node):
                if text.split() and text.split()[0].strip("`:,.") in FIRST_WORDS:
                    yield Finding(path, line, "first word", text.splitlines()[0])
                yield from _phrases(path, line, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _phrases(path, token.start[0], token.string.lstrip("# "))


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Yield the docstring of a node, and strings that document the constants and fields in it."""
    for child in node.body:
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            yield child.lineno, inspect.cleandoc(child.value.value)


def document_findings(path: str, source: str) -> Iterator[Finding]:
    """Judge the sentences of a Markdown file outside code and tables."""
    for line, paragraph in _paragraphs(source):
        yield from _phrases(path, line, paragraph)
        for sentence in re.split(r"(?<=[.!?:])[*_)]*\s+", paragraph):
            if len(sentence.split()) > MOST_WORDS:
                yield Finding(path, line, "long sentence", sentence)


def _phrases(path: str, line: int, text: str) -> Iterator[Finding]:
    for found in _PHRASES.finditer(text):
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


def findings(paths: Sequence[str]) -> list[Finding]:
    found: list[Finding] = []
    for path in paths:
        source = (ROOT / path).read_text(encoding="utf-8")
        found += python_findings(path, source) if path.endswith(".py") else document_findings(path, source)
    return found


def main(words: Sequence[str]) -> int:
    found = findings(words or [str(path.relative_to(ROOT)) for path in _files()])
    if words:
        print(*found, sep="\n")
        return bool(found)
    counts = Counter(one.place for one in found)
    wrong = {place for place in counts.keys() | ALLOWED.keys() if counts[place] != ALLOWED.get(place, 0)}
    for one in found:
        if one.place in wrong:
            print(one)
    for place in sorted(wrong):
        print(f"{' in '.join(place)}: {counts[place]} found, tests/language.py grants {ALLOWED.get(place, 0)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
