"""sglang-router, SGLang's own: it drops fields that it does not know, so routes need the server's switch."""

from __future__ import annotations

from tests.integrations.framework import Framework
from tests.integrations.routers import Fleet
from tests.integrations.sglang_router_steps import LastStep, RouterSteps, behind  # noqa: F401

FRAMEWORK = Framework(
    name="sglang-router", packages=("sglang-router",), flags={"return_routed_experts_by_default": True}
)
LAUNCHER = "sglang_router.launch_router"


class TestSglangRouter(RouterSteps):
    def test_loads_of_all_servers(self, behind: Fleet) -> None:  # noqa: F811
        assert all(load["load"] >= 0 for load in behind.router.get("/get_loads").json()["workers"])


class TestSglangRouterAtLast(LastStep):
    pass
