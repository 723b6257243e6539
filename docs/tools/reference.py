"""The reference from the code: `python -m docs.tools.reference NAME` prints a part; without a name it lists them.

A page of docs/reference has the marks `<!-- generated: NAME -->` and `<!-- end -->`.  In the repository the text
between them names this command.  `make docs` puts the part there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache

from docs.tools import endpoints, events, flags, metrics, python_api

MARKED = re.compile(r"<!-- generated: ([\w ./-]+) -->\n.*?<!-- end -->\n?", re.DOTALL)
_FAMILIES: tuple[Callable[[], dict[str, Callable[[], str]]], ...] = (
    flags.parts,
    endpoints.parts,
    metrics.parts,
    events.parts,
    python_api.parts,
)


@cache
def parts() -> dict[str, Callable[[], str]]:
    """Return the function that writes each part."""
    return {name: write for family in _FAMILIES for name, write in family().items()}


@cache
def part(name: str) -> str:
    """Return the text of a part."""
    return parts()[name]()


def filled(source: str) -> str:
    """Return the text of a page with its parts in their places."""
    return MARKED.sub(lambda found: part(found[1]).rstrip("\n") + "\n", source)


def main(words: list[str]) -> int:
    if not words:
        print(*parts(), sep="\n")
        return 0
    unknown = [word for word in words if word not in parts()]
    if unknown:
        print(f"unknown part {unknown[0]!r}: the parts are {', '.join(parts())}", file=sys.stderr)
        return 2
    print(*(part(word) for word in words), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
