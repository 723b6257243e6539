"""Fixtures of the tests of the dashboard in a real browser: a plugin of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chromium import Browser, chromium
from tests.dashboard_browser import SETTINGS
from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, enable_return_routed_experts=True, enable_memory_saver=True, **SETTINGS) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as found:
        found.look(1280)
        yield found


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Browser:
    browser.open(f"{server.url}/dashboard")
    browser.wait_for("!document.getElementById('main').hidden")
    return browser
