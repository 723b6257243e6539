"""The entries of docs/troubleshooting, and the comparison with the messages of the code.

An entry is a heading of the third level, a `text` block and an explanation.  Each line of the block is the pattern of a
message; `…` stands for a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.error_messages import ROOT, VALUE, Message

FOLDER = ROOT / "docs" / "troubleshooting"
FOREIGN = frozenset(
    {
        "Aborted",
        "Method Not Allowed",
        "Not Found",
        "…: Field required",
        "…: Input should be …",
        "…: String should have …",
    }
)
"""Patterns of messages that libraries make, and of one word."""
MIN_WORDS = 8
"""Words of the explanation of an entry."""
FILLER = frozenset({"this", "that", "the", "a", "it", "is", "was", "error", "message", "means", "value", "because"})
"""Words that explain nothing."""
MIN_LETTERS = 4
"""Letters of a pattern by which a message can be recognised."""


class Entry(NamedTuple):
    page: str
    title: str
    patterns: tuple[str, ...]
    explanation: str


def entries_of(page: str, text: str) -> list[Entry]:
    found = []
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, rest = section.partition("\n")
        rest = re.split(r"^## ", rest, flags=re.MULTILINE)[0]
        blocks = re.findall(r"^```text\n(.*?)^```$", rest, flags=re.MULTILINE | re.DOTALL)
        patterns = tuple(line for block in blocks for line in block.splitlines())
        explanation = re.sub(r"^```.*?^```$", "", rest, flags=re.MULTILINE | re.DOTALL)
        found.append(Entry(page, title.strip(), patterns, explanation.strip()))
    return found


@cache
def entries(folder: Path = FOLDER) -> tuple[Entry, ...]:
    pages = sorted(path for path in folder.glob("*.md") if path.name != "index.md")
    return tuple(entry for path in pages for entry in entries_of(path.name, path.read_text(encoding="utf-8")))


def faults(messages: Iterable[Message], found: Sequence[Entry]) -> list[str]:
    """Return what is wrong: messages without an entry, entries without a message, and entries that explain nothing."""
    listed = {pattern: entry for entry in found for pattern in entry.patterns}
    stated = {" ".join(message.pattern.split()): message for message in messages}
    titles = [entry.title for entry in found]
    return [
        *(f"{one.path}:{one.line}: no entry for: {text}" for text, one in stated.items() if text not in listed),
        *(
            f"{entry.page}: {entry.title}: no message of the code: {pattern}"
            for pattern, entry in listed.items()
            if pattern not in stated and pattern not in FOREIGN
        ),
        *(f"no entry for: {pattern}" for pattern in sorted(FOREIGN - listed.keys())),
        *(f"{one.page}: {one.title}: no text block of messages" for one in found if not one.patterns),
        *(
            f"{one.page}: {one.title}: no explanation"
            for one in found
            if len(one.explanation.split()) < MIN_WORDS or _is_filler(one)
        ),
        *(f"two entries are called {title}" for title in sorted({one for one in titles if titles.count(one) > 1})),
    ]


def _is_filler(entry: Entry) -> bool:
    """Tell an explanation that only repeats a message."""
    words = _words(entry.explanation) - FILLER
    return any(len(words - _words(pattern)) < MIN_WORDS // 2 for pattern in entry.patterns)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def entries_for(message: str, folder: Path = FOLDER) -> list[Entry]:
    """Return the entries for a message, as a reader would find them, the longest pattern first."""
    text = " ".join(message.split())
    found = [(pattern, entry) for regex, pattern, entry in _regexes(folder) if regex.fullmatch(text)]
    found.sort(key=lambda one: -len(one[0]))
    return list(dict.fromkeys(entry for _, entry in found))


def require_entry(message: str) -> None:
    """Raise `AssertionError` for a message, of a real server, that has no entry."""
    assert entries_for(message), f"docs/troubleshooting has no entry for: {message}"


@cache
def _regexes(folder: Path) -> list[tuple[re.Pattern[str], str, Entry]]:
    """Return the patterns by which a message can be found.  A pattern may stand behind a path or a rank."""
    return [
        (re.compile("(?:.*: )?" + ".*".join(map(re.escape, pattern.split(VALUE))), re.DOTALL), pattern, entry)
        for entry in entries(folder)
        for pattern in entry.patterns
        if sum(map(str.isalpha, pattern)) >= MIN_LETTERS
    ]
