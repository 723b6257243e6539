"""Hooks of mkdocs: the nav from patterns, pages from outside docs, links, and the reference from the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

from docs.tools import reference, site_links  # noqa: E402

WORKER = "https://unpkg.com/iframe-worker/shim"
"""The script that the theme loads from the network for pages that are opened from a folder."""
MESSAGES, BOOST = "troubleshooting/", 2
"""Pages that a search lists before others: most searches there are for the words of a message."""
NAME = re.compile(r"<code>(?=[^<\s]{1,40}</code>)")
"""The begin of a flag, field or other name in a sentence.  It stays on one line: browsers break it at each hyphen."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs, and give the nav its pages."""
    for path in site_links.pages_outside_docs():
        place = site_links.place(path)
        assert place is not None
        source = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=_rendered(source, path, files, config)))
    config.nav = expanded(
        config.nav or [], [file.src_uri for file in files.documentation_pages()], config.extra["order"]
    )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill the generated parts of a page, and change its links and lists."""
    if page.file.src_uri.startswith(MESSAGES):
        page.meta["search"] = {"boost": BOOST}
    if page.file.generated_by is not None:
        return markdown
    return _rendered(markdown, f"docs/{page.file.src_uri}", files, config)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark names in sentences, so that the style keeps each on one line."""
    return NAME.sub('<code class="name">', html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the search of a page that is opened from a folder from here."""
    to_root = "../" * page.file.src_uri.count("/")
    return output.replace(WORKER, f"{to_root}assets/iframe-worker.js")


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for the page of unknown addresses, which may be at any depth."""
    return output.replace(WORKER, "/assets/iframe-worker.js")


def _rendered(source: str, path: str, files: Files, config: MkDocsConfig) -> str:
    def add_picture(picture: str) -> None:
        place = site_links.place(picture)
        if place is not None and files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / picture)))

    return site_links.with_wide_lists(site_links.for_site(reference.filled(source), path, add_picture))


def expanded(nav: list[Any], pages: list[str], order: list[str]) -> list[Any]:
    """Return the nav with the pages of each pattern.  A pattern without pages goes, and so does its section."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            found += matching(entry, pages, order) if "*" in entry else [entry]
            continue
        for title, inside in entry.items():
            if isinstance(inside, list):
                inside = expanded(inside, pages, order)
            elif "*" in inside:
                inside = matching(inside, pages, order)
            if inside:
                found.append({title: inside})
    return found


def matching(pattern: str, pages: list[str], order: list[str]) -> list[str]:
    """Return the pages of a pattern: index.md, then the pages that `order` names, then the others by name."""

    def rank(page: str) -> tuple[int, str]:
        name = page.removesuffix(".md")
        if name.endswith("/index"):
            return -1, name
        return (order.index(name) if name in order else len(order)), name

    wanted = re.compile(re.escape(pattern).replace(r"\*", "[^/]*"))
    return sorted((page for page in pages if wanted.fullmatch(page)), key=rank)
