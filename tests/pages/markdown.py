"""The Markdown pages of the project: their headings, links and fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(`{3,})(\w*)\s*$")
COMMENT = re.compile(r"^<!-- (.*?) -->$")
LINK = re.compile(r"\]\(<?([^()\s>]*(?:\([^()\s]*\)[^()\s]*)*)>?(?:\s+\"[^\"]*\")?\)")
HTML_LINK = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")
HTML_ANCHOR = re.compile(r"<\w+[^>]*?\b(?:id|name)=\"([^\"]+)\"")
MAX_PAGE_BYTES = 20_000
"""A page of the docs has at most this many bytes."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the mark above it."""

    page: str
    line: int
    """The line of the fence."""
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Link:
    page: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.target}"


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that a reader may open: at the top, in docs, deploy, and the READMEs of examples."""
    found = [
        *root.glob("*.md"),
        *root.glob("docs/**/*.md"),
        *root.glob("deploy/**/*.md"),
        *root.glob("examples/**/*.md"),
    ]
    return sorted(found)


def blocks(page: str, source: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    fence, language, mark, start = "", "", "", 0
    lines: list[str] = []
    before = ""
    for number, line in enumerate(source.splitlines(), 1):
        if fence:
            if line.strip() == fence:
                yield Block(page, start, language, mark, "\n".join([*lines, ""]))
                fence = ""
            else:
                lines.append(line)
        elif opened := FENCE.match(line.strip()):
            comment = COMMENT.match(before)
            fence, language = opened[1], opened[2]
            mark, start, lines = comment[1].strip() if comment else "", number, []
        before = line.strip()
    if fence:
        raise ValueError(f"{page}:{start}: the block has no end")


def page_mark(source: str) -> str:
    """Return the text of the comment `<!-- page: ... -->` of a page, or nothing."""
    found: list[str] = re.findall(r"^<!-- page: (.*?) -->$", source, re.MULTILINE)
    if len(found) > 1:
        raise ValueError(f"the page has {len(found)} marks <!-- page: ... -->, and may have one")
    return found[0] if found else ""


def prose(source: str) -> list[str]:
    """Return the lines of a page, with code and comments as empty text."""
    lines, fence = [], ""
    for line in re.sub(r"<!--.*?-->", _as_empty_lines, source, flags=re.DOTALL).splitlines():
        opened = FENCE.match(line.strip())
        if fence:
            fence = "" if line.strip() == fence else fence
            lines.append("")
        elif opened:
            fence = opened[1]
            lines.append("")
        else:
            lines.append(re.sub(r"(`+)[^`].*?\1", lambda code: "`" * len(code[0]), line))
    return lines


def _as_empty_lines(comment: re.Match[str]) -> str:
    return "\n" * comment[0].count("\n")


def links(page: str, source: str) -> Iterator[Link]:
    """Yield the links and pictures of a page."""
    for number, line in enumerate(prose(source), 1):
        for found in (*LINK.finditer(line), *HTML_LINK.finditer(line)):
            yield Link(page, number, found[1])


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def anchors(source: str) -> set[str]:
    """Return the anchors of a page, of its headings and of its HTML."""
    found: dict[str, int] = {}
    fence = ""
    for line in source.splitlines():
        opened = FENCE.match(line.strip())
        if fence or opened:
            fence = ("" if line.strip() == fence else fence) if fence else (opened[1] if opened else "")
        elif heading := re.match(r"#{1,6} (.*)", line):
            name = slug(heading[1])
            found[name] = found.get(name, -1) + 1
    numbered = {f"{name}-{number}" for name, last in found.items() for number in range(1, last + 1)}
    return set(found) | numbered | set(HTML_ANCHOR.findall(source))


def broken(link: Link, root: Path = ROOT) -> str:
    """Return the reason why a link leads nowhere, or nothing.  An address on the network is judged by its form."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link.target):
        return (
            ""
            if re.fullmatch(r"(https?://[\w.-]+\.[a-z]{2,}(?:[/?#]\S*)?|mailto:\S+@\S+)", link.target)
            else "no address"
        )
    if link.target.startswith("/"):
        return "it starts at the root: write it relative to the page"
    path, _, anchor = link.target.partition("#")
    file = (root / link.page).parent / path if path else root / link.page
    if not file.exists():
        return "there is no such file"
    if not file.resolve().is_relative_to(root.resolve()):
        return "it leads out of the repository"
    if anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
        return "there is no such heading"
    return ""


def is_external(link: Link) -> bool:
    return "://" in link.target
