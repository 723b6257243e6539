"""The documents and settings for contributors against the repository: links, targets, commits, parts of the CI."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rollout.core.version import VERSION

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")
WORKFLOW = ROOT / ".github/workflows/ci.yml"


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def listed_targets() -> set[str]:
    return {line.split()[0] for line in output("make", "--no-print-directory", "help").splitlines()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", text):
        assert (ROOT / target).exists(), target
        assert not anchor or anchor in anchors(ROOT / target), f"{target}#{anchor}"
    paths = re.findall(r"`((?:\.?[a-z_]+/)+[\w.*]*)`", text)
    assert not [path for path in paths if not list(ROOT.glob(path.rstrip("/").replace("NAME", "*")))]


def test_the_changelog_begins_with_unreleased_changes_and_the_version() -> None:
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", VERSION]


def test_make_help_lists_every_target() -> None:
    lines = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for line in lines for word in line.replace("\\\n", " ").split()} == listed_targets()


def test_targets_that_are_named_exist() -> None:
    texts = [(ROOT / name).read_text() for name in (*DOCUMENTS, ".github/PULL_REQUEST_TEMPLATE.md")]
    named = {name for text in texts for name in re.findall(r"`make ([a-z-]+)", text)}
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    runs = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    named |= {name for run in runs for name in re.findall(r"^make ([a-z-]+)", run, re.MULTILINE)}
    named |= set(jobs["nightly"]["strategy"]["matrix"]["suite"])
    assert {"lint", "test-part", "soak"} < named
    assert not named - listed_targets()


def test_every_test_file_is_in_one_part_of_the_hosted_ci() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert set(jobs) == {"lint", "unit", "servers", "ranks", "nightly"}
    parts = jobs["unit"]["strategy"]["matrix"]["part"]
    (total,) = re.findall(r"\.ci/files unit \$\{\{ matrix\.part \}\} (\d+)", jobs["unit"]["steps"][-1]["run"])
    calls = [("unit", str(part), total) for part in parts] + [("servers",), ("ranks",)]
    found = [output(".ci/files", *call).split() for call in calls]
    assert all(found)
    every = [str(path.relative_to(ROOT)) for name in ("unit", "integration") for path in files_of(name)]
    assert sorted(path for part in found for path in part) == sorted(every)


def files_of(name: str) -> list[Path]:
    return list((ROOT / "tests" / name).rglob("test_*.py"))


def test_hooks_of_git_download_nothing() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {repository["repo"] for repository in repositories} == {"local"}
    assert {hook["language"] for repository in repositories for hook in repository["hooks"]} == {"system"}
