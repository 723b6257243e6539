"""The guides by framework: one for each framework, with every step, the versions that were run, and valid flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.serve_commands import serve_commands, settings_of

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "guides"
GUIDES = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "index.md")
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
INTEGRATIONS = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
PINS = (ROOT / "tests" / "integrations" / "requirements.txt").read_text(encoding="utf-8")
MAX_BYTES = 12_000
STEPS = ("Install", "Start the engine", "First rollout", "First refresh", "Check", "Limits", "What was run")
NO_FRAMEWORKS = {"checkpoint-engine", "sglang-router", "smg", "vllm-router"}
"""Rows of docs/integrations.md that do not train."""
OF_PRIME_RL = {"renderers", "verifiers"}
"""Libraries that prime-rl samples with: its guide is theirs."""


def guide(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def frameworks(page: str) -> set[str]:
    """Return the frameworks that docs/integrations.md tells a user how to set."""
    _, _, running = page.partition("## An engine that runs already")
    running, _, started = running.partition("## An engine that the framework starts")
    rows = re.findall(r"^\| ([^|]+) \|", running, re.MULTILINE)[1:]
    bold = re.findall(r"^\*\*([^*,.]+)[.,*]", started, re.MULTILINE)
    return {name.strip() for row in rows for name in row.split(",")} - NO_FRAMEWORKS | set(bold)


def missing_steps(text: str) -> list[str]:
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    return [step for step in STEPS if step not in headings]


def other_versions(text: str) -> list[str]:
    """Return the pins of a guide that are not the versions that were run."""
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", PINS, re.MULTILINE))
    found = re.findall(r"\b([\w-]+)(?:\[\w+\])?==([\d.]+\d)", text)
    return [f"{name}=={version}" for name, version in found if pinned.get(name, version) != version]


def test_every_framework_has_a_guide() -> None:
    names = frameworks(INTEGRATIONS)
    assert {"slime", "miles", "verl", "TRL", "SkyRL", "AReaL", "OpenRLHF", "NeMo-RL", "torchrl"} <= names
    text = INDEX + "".join(guide(name) for name in GUIDES)
    assert not {name for name in names if f"{name}]" not in INDEX and f"`{name}`" not in text}


def test_the_index_leads_to_every_guide() -> None:
    assert set(re.findall(r"\((\w+\.md)[)#]", INDEX)) == set(GUIDES)


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_goes_from_install_to_the_first_refresh(name: str) -> None:
    assert missing_steps(guide(name)) == []
    assert len(guide(name).encode()) <= MAX_BYTES


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_installs_the_versions_that_were_run(name: str) -> None:
    assert other_versions(guide(name)) == []


@pytest.mark.parametrize("name", [name for name in GUIDES if name != "own_loop.md"])
def test_a_guide_links_the_test_of_its_framework(name: str) -> None:
    tests = re.findall(r"\]\(\.\./\.\./(tests/[\w/]+\.py)\)", guide(name))
    assert tests and all((ROOT / path).exists() for path in tests)


@pytest.mark.parametrize("name", GUIDES)
def test_the_server_has_every_flag_of_a_guide(name: str) -> None:
    commands = list(serve_commands(guide(name)))
    assert commands or name in ("verl.md", "nemo_rl.md")  # these start the server themselves
    for words in commands:
        settings_of(words)


def test_steps_of_the_table_are_those_of_the_integration_tests() -> None:
    """The index names how many steps of each framework were run."""
    run = dict(
        re.findall(r"^\| (\w[\w -]*?)(?:, admin client)? \| [^|]+ \| (\d+) of \d+ \|", INTEGRATIONS, re.MULTILINE)
    )
    rows = re.findall(r"^\| \[([\w-]+)\]\(.*\| ([^|]+) \|$", INDEX, re.MULTILINE)
    assert {name for name, _ in rows} == frameworks(INTEGRATIONS) - OF_PRIME_RL
    for name, cell in rows:
        assert re.search(r"\d+", cell)[0] == run[name], name  # type: ignore[index]


def test_a_guide_without_a_step_or_with_another_version_is_found() -> None:
    assert missing_steps("## Install\n## Check it\n") == [step for step in STEPS if step != "Install"]
    assert other_versions('pip install "trl[vllm]==0.1.0" verl==0.9.1') == ["trl==0.1.0"]
    running = "## An engine that runs already\n| a | b |\n|---|---|\n| new, smg | x |\n"
    started = "## An engine that the framework starts\n**other.** text\n"
    assert frameworks(running + started) == {"new", "other"}
