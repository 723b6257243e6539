"""A server with a scheduler that repeats its prompts, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Live]:
    with live_server(folder) as server:
        yield server


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    yield shared
    shared.scheduler.answers.clear()
    shared.scheduler.refusal = None
    shared.scheduler.paused = False
