"""A pytest plugin: `--rows FILE` writes the rows of the frameworks whose tests ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.framework import Framework, Row, save_rows

_ROWS = pytest.StashKey[dict[str, Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path, help="file for the rows of docs/integrations.md")


def pytest_collection_finish(session: pytest.Session) -> None:
    frameworks = [framework for item in session.items if (framework := _framework(item)) is not None]
    session.config.stash[_ROWS] = {framework.name: Row.of(framework) for framework in frameworks}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    framework = _framework(item)
    if framework is not None and (report.when == "call" or report.failed):
        row, step = item.config.stash[_ROWS][framework.name], _step(item)
        steps = row.passed if report.passed else row.failed
        if step not in steps:
            steps.append(step)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, rows = session.config.getoption("--rows"), session.config.stash.get(_ROWS, {})
    if path is not None and rows:
        save_rows(path, list(rows.values()))


def _framework(item: pytest.Item) -> Framework | None:
    """Return the framework of a module, or the one of several that a recorded step names."""
    module = getattr(item, "module", None)
    if hasattr(module, "FRAMEWORKS"):
        return module.FRAMEWORKS[_parameters(item)["framework"]]
    return getattr(module, "FRAMEWORK", None)


def _step(item: pytest.Item) -> str:
    """Return the name of a step: "some words (sglang)" for `test_some_words[sglang]`.

    A recording has one test, and its parameter names the step.
    """
    name, _, parameter = item.name.removeprefix("test_").removesuffix("]").partition("[")
    if name == "a_recorded_step_gets_the_expected_answers":
        name, parameter = _parameters(item)["step"], ""
    words = f"{name} ({parameter})" if parameter else name
    return words.replace("_", " ")


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params  # type: ignore[attr-defined, no-any-return]
