"""The pages of docs/migration against the server: its flags and its routes."""

from __future__ import annotations

import re

import pytest

from rollout.core.args.foreign_flags import (
    ALIASES,
    HARMLESS_VALUES,
    OPPOSITES,
    VALUES_OF_SWITCHES,
    WITHOUT_EFFECT,
    own_words,
)
from tests import migration_tables
from tests.migration_tables import BEGIN, END, NAMES, PAGES
from tests.unit.repository.test_docs import served_paths

PATH = re.compile(r"`(?:(?:GET|POST)(?:`, `POST)? )?(/[\w/]+)[`?]")


def written_part(page: str) -> str:
    _, _, rest = PAGES[page].read_text(encoding="utf-8").partition(BEGIN)
    return rest.partition(END)[0]


def endpoint_rows(text: str) -> list[list[str]]:
    (section,) = re.findall(r"^## Endpoints\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def problems_of_endpoints(text: str, paths: set[str]) -> list[str]:
    """Return the rows whose claim about this server's routes is wrong."""
    problems = []
    for theirs, here, *_ in endpoint_rows(text):
        named = PATH.findall(here if theirs == "-" else theirs)
        should_exist = here != "not there"
        wrong = [path for path in named if (path in paths) is not should_exist]
        if wrong or not named:
            problems.append(f"{theirs} | {here}: {wrong}")
    return problems


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_flags_are_those_of_the_code(page: str) -> None:
    """`python -m tests.migration_tables` writes them."""
    assert written_part(page).strip() == migration_tables.tables(page).strip()


def test_every_foreign_flag_stands_on_a_page() -> None:
    others = {name for names in ALIASES.values() for name in names}
    foreign = others | OPPOSITES.keys() | HARMLESS_VALUES.keys() | WITHOUT_EFFECT | migration_tables.REFUSED.keys()
    foreign |= VALUES_OF_SWITCHES.keys()
    assert not foreign - {name for names in NAMES.values() for name in names}


@pytest.mark.parametrize("page", PAGES)
def test_the_parser_reads_each_flag_as_its_table_states(page: str) -> None:
    renamed, valued, unused, *_ = re.split(r"^### .*$", written_part(page), flags=re.MULTILINE)[1:]
    for flag in re.findall(r"^\| `(--[\w-]+)`", renamed, re.MULTILINE):
        assert own_words(["--model-path", "m", flag]).unknown == [], flag
    for flag in re.findall(r"`(--[\w-]+)`", unused):
        assert own_words(["--model-path", "m", flag]).unused == [flag]
    for flag, values in re.findall(r"^\| `(--[\w-]+)` \| (.*) \|$", valued, re.MULTILINE):
        for value in re.findall(r"`([^`]+)`", values):
            assert own_words(["--model-path", "m", flag, value]).unused == [flag]
        assert own_words(["--model-path", "m", flag, "no-such-value"]).unused == []


@pytest.mark.parametrize("page", PAGES)
def test_the_routes_of_a_page_are_there_or_not_as_it_states(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    assert len(endpoint_rows(text)) > 15
    assert problems_of_endpoints(text, served_paths()) == []


def test_a_wrong_row_is_found() -> None:
    page = (
        "## Endpoints\n| a | b | c |\n|---|---|---|\n| `POST /x`, `/y` | the same | |\n| `/z` | not there | |\n## End\n"
    )
    assert problems_of_endpoints(page, {"/x", "/y"}) == []
    assert problems_of_endpoints(page, {"/x"}) == ["`POST /x`, `/y` | the same: ['/y']"]
    assert problems_of_endpoints(page, {"/x", "/y", "/z"}) == ["`/z` | not there: ['/z']"]
