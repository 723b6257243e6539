"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table.  A bar or the end of a line in a cell does not end the cell."""
    lines = [_row(head), "|" + "---|" * len(head), *(_row(row) for row in rows)]
    return "\n".join([*lines, ""])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |"


def code(text: object) -> str:
    """Return a text in code font."""
    return f"`{text}`"


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring, without its dot."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    for end in (".  ", ". "):
        paragraph = paragraph.split(end)[0]
    return paragraph.removesuffix(".").removesuffix(":")
