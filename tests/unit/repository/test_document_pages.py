"""The pages of the project: their links, anchors, paths and sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import markdown
from tests.pages.markdown import ROOT, Link

PAGES = [str(path.relative_to(ROOT)) for path in markdown.pages()]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_pages_of_all_folders_are_judged() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/reference/http/index.md", "examples/grpo/README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    found = [(link, markdown.broken(link)) for link in markdown.links(page, read(page))]
    assert [f"{link}: {reason}" for link, reason in found if reason] == []


def test_a_broken_link_of_each_kind_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Two words\n## Two words\n```\n# no heading\n```\n")
    wrong = ["b.md", "a.md#two", "a.md#no-heading", "#two-words-2", "/a.md", "../../etc", "http://", "https://x y"]
    for target in wrong:
        assert markdown.broken(Link("a.md", 1, target), tmp_path), target
    for target in ["a.md", "a.md#two-words", "#two-words-1", "https://example.org/x#y"]:
        assert not markdown.broken(Link("a.md", 1, target), tmp_path), target


def directions_to_other_pages(source: str) -> list[str]:
    """Return links called "below" or "above" that leave their page, as they do once a page is cut in two."""
    return [found for line in markdown.prose(source) for found in re.findall(r"\[(?:below|above)\]\([^#)].*?\)", line)]


@pytest.mark.parametrize("page", PAGES)
def test_a_link_called_below_stays_on_its_page(page: str) -> None:
    assert directions_to_other_pages(read(page)) == []


def test_a_direction_to_another_page_is_found() -> None:
    assert directions_to_other_pages("[below](#a) `[below](b.md)`\n") == []
    assert directions_to_other_pages("x; [below](b.md#a) [above](c.md)\n") == ["[below](b.md#a)", "[above](c.md)"]


def test_links_are_read_outside_code_alone() -> None:
    source = '[a](b.md) `[c](d.md)`\n```\n[e](f.md)\n```\n<!-- [g](h.md) -->\n![i](j.svg "k")\n<img src="l.png">\n'
    assert [(link.line, link.target) for link in markdown.links("p.md", source)] == [
        (1, "b.md"),
        (6, "j.svg"),
        (7, "l.png"),
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_in_code_font_exists(page: str) -> None:
    paths = re.findall(r"`([a-z_]+/[\w/]+\.(?:py|cpp|md)|[a-z_]+/[\w/]+/)`", read(page))
    written = ("build/", "gpu-results/", "grpo-results/")  # by commands
    assert [
        path for path in paths if not path.startswith(written) and "NAME" not in path and not (ROOT / path).exists()
    ] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_no_page_is_longer_than_a_reader_can_hold(page: str) -> None:
    assert (ROOT / page).stat().st_size <= markdown.MAX_PAGE_BYTES


def test_addresses_on_the_network_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Print them for a reader with a network; their form alone is judged here."""
    external = [link for page in PAGES for link in markdown.links(page, read(page)) if markdown.is_external(link)]
    with capsys.disabled():
        print(*("", *external), sep="\n    ")
    assert all(not markdown.broken(link) for link in external)
