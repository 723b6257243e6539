"""Every block of commands and Python of README and docs runs, page by page, against real servers.

`make test-docs` runs this file and the checks of links and blocks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import markdown, marks
from tests.pages.markdown import ROOT

PAGE_S = 600.0
"""A page's deadline.  A page takes some ten seconds on two idle cores."""


def has_story(path: Path) -> bool:
    found = markdown.blocks(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    return any(marks.is_run(block) for block in found)


PAGES = [str(path.relative_to(ROOT)) for path in markdown.pages() if has_story(path)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the checkpoint of pages that suppose one."""
    folder = tmp_path_factory.mktemp("pages") / "checkpoint"
    command = [sys.executable, "-m", "rollout.cli.main", "make-checkpoint", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PAGE_S)
    return folder


@pytest.mark.full(but="docs/reference/http/generate.md")
@pytest.mark.parametrize("page", PAGES, ids=PAGES)
def test_every_block_of_a_page_runs(page: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.pages.story", page, "--checkpoint", str(checkpoint)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PAGE_S)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    with capsys.disabled():
        ran = [line for line in done.stdout.splitlines() if line.startswith((page, "page:"))]
        print("", *ran, sep="\n    ")
