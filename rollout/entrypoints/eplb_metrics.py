"""Gauges of the balancer: whether it is alive, and what its last look found.

Knows what the scheduler says of it.  Without one there are no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

Status = Mapping[str, Any]

# Metric -> (value in the status, help).
_GAUGES: dict[str, tuple[Callable[[Status], float | None], str]] = {
    "evaluations": (lambda status: status["num_evaluations"], "Looks at the balance of ranks since start"),
    "last_evaluation_age_seconds": (lambda status: status["last_evaluation_age_s"], "Seconds since the last look"),
    "under_way": (lambda status: status["stage"] != "idle", "1 while a rebalance is planned or experts are moved"),
    "stuck": (lambda status: status["stuck"] is not None, "1 while a rebalance makes no progress within its deadline"),
    "balancedness_before": (
        lambda status: _of_decision(status, "balancedness_before"),
        "Even load of ranks over the largest at the last look, mean over layers",
    ),
    "balancedness_after": (
        lambda status: _of_decision(status, "balancedness_after"),
        "The same as planned at the last look; none where no plan was made",
    ),
}


class EplbMetrics:
    """One server's."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._gauges = {
            name: Gauge(f"lockstep:eplb_{name}", text, ["model_name"], registry=registry)
            for name, (_, text) in _GAUGES.items()
        }

    def update(self, status: Status | None) -> None:
        """Take what `EplbControl.status` says; None where there is nothing to balance."""
        for name, gauge in self._gauges.items():
            gauge.clear()
            value = None if status is None else _GAUGES[name][0](status)
            if value is not None:
                gauge.labels(self._model_name).set(float(value))


def _of_decision(status: Status, name: str) -> float | None:
    balance = (status["decision"] or {}).get(name)
    return None if balance is None else balance["mean"]
