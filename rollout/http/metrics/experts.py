"""Gauges of the load recorder and of the balancer.

Without a recorder or a balancer its gauges have no samples: nothing old is shown as if it were new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.core.messages.experts import EplbState, ExpertLoadState

State = TypeVar("State")
Numbers = dict[str, tuple[Callable[[State], float | None], str]]
"""Metric -> (its value in a state, help)."""

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
_OF_RECORDER: Numbers[ExpertLoadState] = {
    "lockstep:expert_load_passes": (lambda state: state.num_passes, "Forward passes in the load record"),
}
_OF_BALANCER: Numbers[EplbState] = {
    "lockstep:eplb_evaluations": (
        lambda state: state.num_evaluations,
        "Evaluations of the balance since start",
    ),
    "lockstep:eplb_last_evaluation_age_seconds": (
        lambda state: state.last_evaluation_age_s,
        "Seconds since the last evaluation",
    ),
    "lockstep:eplb_under_way": (
        lambda state: state.stage != "idle",
        "1 while a rebalance is planned or experts are moved",
    ),
    "lockstep:eplb_stuck": (
        lambda state: state.stuck is not None,
        "1 while a rebalance makes no progress within its deadline",
    ),
    "lockstep:eplb_balancedness_before": (
        lambda state: _of_decision(state, "balancedness_before"),
        "Even load of ranks over the largest at the last evaluation, mean over layers",
    ),
    "lockstep:eplb_balancedness_after": (
        lambda state: _of_decision(state, "balancedness_after"),
        "The same as planned at the last evaluation; none where no plan was made",
    ),
}


class ExpertMetrics(Collector):
    """`recorder`, `balancer`: their last states, None where there is none.

    `layer` is the index of the hidden layer.
    """

    def __init__(self, model_name: str) -> None:
        self.recorder: ExpertLoadState | None = None
        self.balancer: EplbState | None = None
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        record = self.recorder
        layers = [] if record is None else [str(layer) for layer in record.moe_layer_ids]
        for name, (key, text) in _BY_WINDOW.items():
            family = GaugeMetricFamily(name, text, labels=["model_name", "layer", "window"])
            for window in [] if record is None else record.windows:
                for layer, value in zip(layers, getattr(window, key), strict=True):
                    family.add_metric([self._model_name, layer, str(window.window)], _number(value))
            yield family
        for name, (key, text) in _DRIFT.items():
            family = GaugeMetricFamily(name, text, labels=["model_name", "layer"])
            if record is not None and record.drift is not None:
                for layer, value in zip(layers, record.drift[key], strict=True):
                    family.add_metric([self._model_name, layer], _number(value))
            yield family
        yield from self._of(record, _OF_RECORDER)
        yield from self._of(self.balancer, _OF_BALANCER)

    def _of(self, state: State | None, numbers: Numbers[State]) -> Iterator[Metric]:
        for name, (number, text) in numbers.items():
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            value = None if state is None else number(state)
            if value is not None:
                family.add_metric([self._model_name], float(value))
            yield family


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _of_decision(state: EplbState, name: str) -> float | None:
    balance = (state.decision or {}).get(name)
    return None if balance is None else balance["mean"]
