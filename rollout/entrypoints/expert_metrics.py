"""Gauges of the load recorder and of the balancer.

Without one there are no samples: nothing old is shown as if it were new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Status = Mapping[str, Any]

# Metric -> (value in the status, help).
_BY_WINDOW = {
    "sglang:eplb_balancedness": (
        "rank_balancedness",
        "Even load of ranks over the largest, in the last passes; 1 is even",
    ),
    "lockstep:expert_slot_balancedness": (
        "slot_balancedness",
        "Even load of expert slots over the largest, in the last passes; 1 is even",
    ),
}
_DRIFT = {
    "lockstep:expert_load_drift": (
        "total_variation",
        "Total variation distance of the experts' load before and after the last refresh",
    ),
    "lockstep:expert_load_drift_by_chance": (
        "expected_by_chance",
        "Expected lockstep:expert_load_drift if the refresh had changed nothing",
    ),
}
_OF_RECORDER: dict[str, tuple[Callable[[Status], float | None], str]] = {
    "lockstep:expert_load_passes": (lambda status: status["num_passes"], "Forward passes in the load record"),
}
_OF_BALANCER: dict[str, tuple[Callable[[Status], float | None], str]] = {
    "lockstep:eplb_evaluations": (
        lambda status: status["num_evaluations"],
        "Evaluations of the balance of ranks since start",
    ),
    "lockstep:eplb_last_evaluation_age_seconds": (
        lambda status: status["last_evaluation_age_s"],
        "Seconds since the last evaluation",
    ),
    "lockstep:eplb_under_way": (
        lambda status: status["stage"] != "idle",
        "1 while a rebalance is planned or experts are moved",
    ),
    "lockstep:eplb_stuck": (
        lambda status: status["stuck"] is not None,
        "1 while a rebalance makes no progress within its deadline",
    ),
    "lockstep:eplb_balancedness_before": (
        lambda status: _of_decision(status, "balancedness_before"),
        "Even load of ranks over the largest at the last evaluation, mean over layers",
    ),
    "lockstep:eplb_balancedness_after": (
        lambda status: _of_decision(status, "balancedness_after"),
        "The same as planned at the last evaluation; none where no plan was made",
    ),
}


class ExpertMetrics(Collector):
    """`recorder`, `balancer`: what `LoadRecorder` and `EplbControl` last reported, None where there is none.

    `layer` is the index of the hidden layer.
    """

    def __init__(self, model_name: str) -> None:
        self.recorder: Status | None = None
        self.balancer: Status | None = None
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        record = self.recorder
        layers = [] if record is None else [str(layer) for layer in record["moe_layer_ids"]]
        for name, (key, text) in _BY_WINDOW.items():
            family = GaugeMetricFamily(name, text, labels=["model_name", "layer", "window"])
            for window in [] if record is None else record["windows"]:
                for layer, value in zip(layers, window[key], strict=True):
                    family.add_metric([self._model_name, layer, str(window["window"])], _number(value))
            yield family
        for name, (key, text) in _DRIFT.items():
            family = GaugeMetricFamily(name, text, labels=["model_name", "layer"])
            if record is not None and record["drift"] is not None:
                for layer, value in zip(layers, record["drift"][key], strict=True):
                    family.add_metric([self._model_name, layer], _number(value))
            yield family
        for status, numbers in ((record, _OF_RECORDER), (self.balancer, _OF_BALANCER)):
            for name, (number, text) in numbers.items():
                family = GaugeMetricFamily(name, text, labels=["model_name"])
                value = None if status is None else number(status)
                if value is not None:
                    family.add_metric([self._model_name], float(value))
                yield family


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _of_decision(status: Status, name: str) -> float | None:
    balance = (status["decision"] or {}).get(name)
    return None if balance is None else balance["mean"]
