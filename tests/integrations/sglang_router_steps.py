"""The steps of sglang-router, and of smg, its successor: classes for modules with `FRAMEWORK` and `LAUNCHER`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.framework import Framework
from tests.integrations.routers import (
    Fleet,
    check_drain_and_death,
    check_routes,
    check_sessions,
    fleet,
    sglang_generate,
    wait_until,
)


@pytest.fixture(scope="module")
def behind(request: pytest.FixtureRequest, framework: Framework, checkpoint: Path) -> Iterator[Fleet]:
    launcher = request.module.LAUNCHER
    with fleet(checkpoint, framework.flags, launcher, ["--policy", "manual"], sglang_generate) as running:
        yield running


class RouterSteps:
    """The steps that leave all servers alive."""

    def test_all_servers_are_workers(self, behind: Fleet) -> None:
        def urls() -> set[str]:
            return {worker["url"] for worker in behind.router.get("/workers").json()["workers"]}

        wait_until(lambda: urls() == {engine.url for engine in behind.engines})

    def test_routes_come_through_the_router(self, behind: Fleet) -> None:
        check_routes(sglang_generate, behind.router)

    def test_a_session_stays_on_one_server(self, behind: Fleet) -> None:
        check_sessions(sglang_generate, behind.router)

    def test_flush_reaches_all_servers(self, behind: Fleet) -> None:
        assert behind.router.post("/flush_cache").status_code == 200


class LastStep:
    """The step after which one server is left."""

    def test_one_server_drains_and_one_dies(self, behind: Fleet) -> None:
        check_drain_and_death(sglang_generate, behind)
