"""Servers with a stand-in scheduler, for the tests of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard_harness import HOSTILE
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Live]:
    """A server for tests that do not change it."""
    with live_server(folder) as server:
        yield server


@pytest.fixture
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder) as server:
        yield server


@pytest.fixture
def hostile(folder: Path) -> Iterator[Live]:
    """A server whose weight version is markup."""
    with live_server(folder, weight_version=HOSTILE) as server:
        server.scheduler.version = HOSTILE
        yield server
