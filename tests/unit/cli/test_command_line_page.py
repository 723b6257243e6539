"""The page of the command line against the tables in the code."""

from __future__ import annotations

import re
from pathlib import Path

from rollout.cli.main import COMMANDS
from rollout.core.args.config_file import _READERS
from rollout.core.args.foreign_flags import (
    ALIASES,
    HARMLESS_VALUES,
    OPPOSITES,
    REFUSED,
    SHORT,
    VALUES_OF_SWITCHES,
    WITHOUT_EFFECT,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def table(header: str) -> list[tuple[list[str], str]]:
    """Return the flags in the first column of a table, and the second column."""
    rows = PAGE.partition(f"| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [(re.findall(r"`([^`]+)`", first), second) for first, second in cells]


def test_the_page_begins_with_every_command() -> None:
    first = PAGE.partition("```\n")[2].partition("```")[0]
    assert sorted(set(re.findall(r"[a-z][a-z-]+", first)) - {"lockstep", "flags"}) == sorted(COMMANDS)


def test_the_page_has_every_other_spelling() -> None:
    found = {name: second for names, second in table("other spelling | flag here") for name in names}
    expected = {flag(other): f"`{flag(setting)}`" for setting, others in ALIASES.items() for other in others}
    expected |= {short: f"`{whole}`" for short, whole in SHORT.items()}
    expected |= {
        flag(other): f"`{flag(setting.replace('disable_', 'enable_'))}`" for other, setting in OPPOSITES.items()
    }
    expected |= {flag(other): f"`{flag(setting)} {value}`" for other, (setting, value) in VALUES_OF_SWITCHES.items()}
    expected |= {"--speculative-config": "`--speculative-algorithm` and its kin"}
    assert found == expected | {"--enable-expert-parallel": "`--ep-size` of all ranks"}


def test_the_page_has_every_flag_that_is_refused_and_its_reason() -> None:
    found = {name: reason for names, reason in table("refused | reason") for name in names}
    assert found == {flag(name): reason for name, reason in REFUSED.items()}


def test_the_page_has_every_flag_that_is_taken_without_effect() -> None:
    found = {names[0]: set(re.findall(r"`([^`]+)`", values)) for names, values in table("taken with | as")}
    assert found == {flag(name): values for name, values in HARMLESS_VALUES.items()}
    listed = PAGE.rpartition("**Taken without effect,**")[2]
    assert re.findall(r"--\S+", listed) == sorted(flag(name) for name in WITHOUT_EFFECT)


def test_the_page_names_every_ending_of_a_file() -> None:
    assert all(f"`{ending}`" in PAGE for ending in _READERS)
