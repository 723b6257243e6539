"""The documentation site: places of pages, links, the nav, and what `make docs` builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.tools import site_links
from tests.pages.markdown import ROOT

BUILD_S = 300.0


def test_places_of_files_on_the_site() -> None:
    assert site_links.place("docs/reference/flags.md") == "reference/flags.md"
    assert site_links.place("CONTRIBUTING.md") == "project/contributing.md"
    assert site_links.place("examples/grpo") == site_links.place("examples/grpo/README.md") == "examples/grpo.md"
    assert site_links.place("rollout/client/errors.py") is None


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("docs/index.md", "[a](client.md#b)", "[a](client.md#b)"),
        ("docs/index.md", "[a](../SECURITY.md)", "[a](project/security.md)"),
        ("docs/index.md", "[`a`](../rollout/client/errors.py)", "`a`"),
        ("docs/reference/flags.md", "[a](../../examples/grpo/README.md#c)", "[a](../examples/grpo.md#c)"),
        ("examples/grpo/README.md", "[a](../../docs/models.md)", "[a](../models.md)"),
        ("examples/grpo/README.md", "![a](../../docs/soak.png)", "![a](../soak.png)"),
        ("CONTRIBUTING.md", "[a](README.md#limits)", "a"),
        ("docs/index.md", "[a](https://example.org)", "[a](https://example.org)"),
        ("docs/index.md", "```\n[a](../x.py)\n```\n", "```\n[a](../x.py)\n```\n"),
    ],
)
def test_links_lead_to_the_places_of_the_site(page: str, written: str, shown: str) -> None:
    assert site_links.for_site(written, page) == shown


def test_nested_lists_are_indented_for_the_site() -> None:
    source = "* a\n  b\n  * c\n\n    d\n\ntext\n  e\n"
    assert site_links.with_wide_lists(source) == "* a\n    b\n    * c\n\n        d\n\ntext\n  e\n"


def test_the_nav_takes_the_pages_of_a_pattern_in_order() -> None:
    hooks = pytest.importorskip("docs.tools.hooks", reason="mkdocs is not installed", exc_type=ImportError)
    pages = ["a/c.md", "a/b.md", "a/index.md", "a/d.md", "x.md"]
    nav = ["x.md", {"A": "a/*.md"}, {"B": ["b/*.md"]}]
    assert hooks.expanded(nav, pages, ["a/d"]) == ["x.md", {"A": ["a/index.md", "a/d.md", "a/b.md", "a/c.md"]}]


def test_names_in_sentences_are_marked_and_programs_are_not() -> None:
    hooks = pytest.importorskip("docs.tools.hooks", reason="mkdocs is not installed", exc_type=ImportError)
    long_name = "a" * 41
    shown = f"<code>--dp-size</code> <code>a b</code> <code>{long_name}</code> <code><span>x</span></code>"
    marked = hooks.on_page_content(shown, None, None, None)
    assert marked == shown.replace("<code>--dp-size", '<code class="name">--dp-size')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does: broken links, missing anchors and pages outside the nav are errors."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.mark.full
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\">]*")
    assert [found for page in pages for found in loaded.findall(page.read_text(encoding="utf-8"))] == []


@pytest.mark.full
def test_the_site_has_the_reference_and_can_be_searched(site: Path) -> None:
    flags = (site / "reference" / "flags.html").read_text(encoding="utf-8")
    assert '<code class="name">--max-total-tokens</code>' in flags and "<!-- generated" not in flags
    assert "begin_weight_update" in (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert (site / "project" / "contributing.html").exists() and (site / "examples" / "grpo.html").exists()
