"""smg, the successor of sglang-router: it passes the fields for routes on."""

from __future__ import annotations

from tests.integrations.framework import Framework
from tests.integrations.sglang_router_steps import LastStep, RouterSteps, behind  # noqa: F401

FRAMEWORK = Framework(name="smg", packages=("smg",), flags={"enable_return_routed_experts": True})
LAUNCHER = "smg.launch_router"


class TestSmg(RouterSteps):
    pass


class TestSmgAtLast(LastStep):
    pass
