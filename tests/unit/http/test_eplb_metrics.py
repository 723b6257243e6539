"""The balancer's gauges and its part in /health_generate, from real states of a manager."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from eplb.algorithms.types import ExpertLayout
from eplb.decision import RebalancePolicy
from eplb.load_history import LoadHistory
from eplb.manager import RebalanceManager
from rollout.core.errors import Unavailable
from rollout.core.messages.experts import EplbState
from rollout.http.metrics.experts import ExpertMetrics
from rollout.http.native.info import InfoRoutes

LAYOUT = ExpertLayout(num_logical_experts=4, num_physical_experts=4, num_ranks=2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def manager_at(clock: Clock) -> RebalanceManager:
    return RebalanceManager(RebalancePolicy(deadline_s=5.0), LAYOUT, LoadHistory(1, 4), 100, clock)


def state_of(manager: RebalanceManager) -> EplbState:
    return EplbState(**manager.status(), counts_loads=True)


def test_gauges_follow_the_status() -> None:
    clock, registry = Clock(), CollectorRegistry()
    manager, metrics = manager_at(clock), ExpertMetrics("m")
    registry.register(metrics)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"lockstep:eplb_{name}", {"model_name": "m"})

    metrics.balancer = state_of(manager)
    assert (value("under_way"), value("stuck"), value("evaluations")) == (0.0, 0.0, 0.0)
    assert value("balancedness_before") is None
    manager.start_planning()
    clock.now = 6.0
    metrics.balancer = state_of(manager)
    assert (value("under_way"), value("stuck"), value("last_evaluation_age_seconds")) == (1.0, 1.0, 6.0)
    metrics.balancer = None
    assert value("under_way") is None, "nothing old is shown"


def test_a_stuck_rebalance_is_an_illness(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    manager = manager_at(clock)
    routes: Any = InfoRoutes.__new__(InfoRoutes)

    async def state(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(poisoned=None, paused=True, eplb=state_of(manager))

    monkeypatch.setattr(routes, "_state", state)
    manager.start_planning()
    assert asyncio.run(routes.health_generate()).status_code == 200
    clock.now = 5.1
    with pytest.raises(Unavailable, match=r"a rebalance is stuck: planning for 5\.1 s"):
        asyncio.run(routes.health_generate())
