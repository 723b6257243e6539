"""vllm-router: `/inference/v1/generate` goes through untouched, so routes need no switch of the server."""

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
    vllm_generate,
)

FRAMEWORK = Framework(name="vllm-router", packages=("vllm-router",), flags={"enable_return_routed_experts": True})


@pytest.fixture(scope="module")
def behind(framework: Framework, checkpoint: Path) -> Iterator[Fleet]:
    with fleet(
        checkpoint, framework.flags, "vllm_router.launch_router", ["--policy", "consistent_hash"], vllm_generate
    ) as running:
        yield running


def test_routes_come_through_the_router(behind: Fleet) -> None:
    check_routes(vllm_generate, behind.router)


def test_a_session_stays_on_one_server(behind: Fleet) -> None:
    check_sessions(vllm_generate, behind.router)


def test_one_server_drains_and_one_dies(behind: Fleet) -> None:
    check_drain_and_death(vllm_generate, behind)
