"""A pytest plugin: `--row FILE` writes the row of the framework whose tests ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.framework import Row

_ROW = pytest.StashKey[Row]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--row", type=Path, help="file for the row of docs/integrations.md")


def pytest_collection_finish(session: pytest.Session) -> None:
    frameworks = {id(found): found for item in session.items if (found := getattr(_module(item), "FRAMEWORK", None))}
    for framework in frameworks.values():
        session.config.stash[_ROW] = Row.of(framework)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    row = item.config.stash.get(_ROW, None)
    if row is not None and (report.when == "call" or report.failed):
        step = _step(item.name)
        steps = row.passed if report.passed else row.failed
        if step not in steps:
            steps.append(step)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, row = session.config.getoption("--row"), session.config.stash.get(_ROW, None)
    if path is not None and row is not None:
        row.save(path)


def _step(test: str) -> str:
    """`test_some_words[sglang]`: "some words (sglang)"; of a recording its steps are the parameters."""
    name, _, parameter = test.removeprefix("test_").removesuffix("]").partition("[")
    words = parameter if name == "replay" else f"{name} ({parameter})" if parameter else name
    return words.replace("_", " ")


def _module(item: pytest.Item) -> Any:
    return getattr(item, "module", None)
