"""Places of the repository's files on the site, and the links between its pages."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_PROJECT = {
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "README.md": "index.md",
}
"""Pages outside docs that the site shows, with their places.  The site has a front page of its own for README.md."""
PICTURES = (".png", ".svg", ".jpg", ".gif")
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`|!?\[[^\]]*\](?:\([^)]*\))?)*)\]\(([^()\s]+)\)")


def place(path: str, root: Path = ROOT) -> str | None:
    """Return the path on the site of a file of the repository, or None."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in OF_PROJECT:
        return OF_PROJECT[path]
    found = re.fullmatch(r"(examples|deploy)/(?:(.*)/)?README\.md", path)
    if found:
        return f"{found[1]}/{(found[2] or 'index').replace('/', '_')}.md"
    if path.endswith(PICTURES) and (root / path).is_file():
        return f"pictures/{path.replace('/', '_')}"
    folder = root / path
    if folder.is_dir() and (folder / "README.md").is_file():
        return place(os.path.normpath(f"{path}/README.md"), root)
    return None


def pages_outside_docs(root: Path = ROOT) -> list[str]:
    """Return the paths of the pages outside docs that have a place on the site."""
    readmes = [
        str(path.relative_to(root)) for kind in ("examples", "deploy") for path in root.glob(f"{kind}/**/README.md")
    ]
    return sorted([*(path for path in OF_PROJECT if path != "README.md" and (root / path).is_file()), *readmes])


def for_site(source: str, path: str, picture: Callable[[str], None] = lambda _: None, root: Path = ROOT) -> str:
    """Return the text of a page of the repository with its links as they must be on the site.

    A link to a file that the site does not show becomes plain text.  `picture` hears of each picture outside docs.
    """

    def linked(found: re.Match[str]) -> str:
        mark, text, target = found[1], found[2], found[3]
        text = LINK.sub(linked, text)
        if "://" in target or target.startswith(("#", "mailto:")):
            return f"{mark}[{text}]({target})"
        file, _, anchor = target.partition("#")
        full = os.path.normpath(str(Path(path).parent / file))
        to = place(full, root)
        if to is None or (full == "README.md" and anchor):
            return text
        if to.startswith("pictures/"):
            picture(full)
        here = place(path, root) or ""
        return f"{mark}[{text}]({os.path.relpath(to, Path(here).parent)}{'#' + anchor if anchor else ''})"

    return outside_code(source, lambda line: LINK.sub(linked, line))


def outside_code(source: str, change: Callable[[str], str]) -> str:
    """Change the paragraphs of a page outside fenced blocks."""
    parts = re.split(r"(?ms)(^ *(`{3,}).*?^ *\2 *$)", source)
    kept: list[str] = []
    for index in range(0, len(parts), 3):
        kept.append(change(parts[index]))
        kept += parts[index + 1 : index + 2]
    return "".join(kept)


def with_wide_lists(source: str) -> str:
    """Indent nested lists by four spaces, as Python's Markdown wants them; GitHub takes two."""
    lines: list[str] = []
    unit = 0
    for line in source.splitlines():
        item = re.match(r"([*-]|\d+\.) +", line)
        if item:
            unit = len(item[0])
        elif line and not line.startswith(" "):
            unit = 0
        elif unit and line.strip():
            indent = len(line) - len(line.lstrip(" "))
            levels = indent // unit
            line = " " * (4 * levels) + line[levels * unit :]
        lines.append(line)
    return "\n".join([*lines, ""])
