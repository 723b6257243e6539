"""sglang-router, SGLang's own: it drops fields that it does not know, so routes need the server's switch."""

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

FRAMEWORK = Framework(
    name="sglang-router", packages=("sglang-router",), flags={"return_routed_experts_by_default": True}
)


@pytest.fixture(scope="module")
def behind(framework: Framework, checkpoint: Path) -> Iterator[Fleet]:
    with fleet(
        checkpoint, framework.flags, "sglang_router.launch_router", ["--policy", "manual"], sglang_generate
    ) as running:
        yield running


def test_all_servers_are_workers(behind: Fleet) -> None:
    def urls() -> set[str]:
        return {worker["url"] for worker in behind.router.get("/workers").json()["workers"]}

    wait_until(lambda: urls() == {engine.url for engine in behind.engines})


def test_routes_come_through(behind: Fleet) -> None:
    check_routes(sglang_generate, behind.router)


def test_sessions_are_sticky(behind: Fleet) -> None:
    check_sessions(sglang_generate, behind.router)


def test_flush_reaches_all_servers(behind: Fleet) -> None:
    assert behind.router.post("/flush_cache").status_code == 200


def test_loads_of_all_servers(behind: Fleet) -> None:
    assert all(load["load"] >= 0 for load in behind.router.get("/get_loads").json()["workers"])


def test_one_server_drains_and_one_dies(behind: Fleet) -> None:
    check_drain_and_death(sglang_generate, behind)
