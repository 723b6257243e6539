"""Gauges of the load recorder: balancedness and drift by MoE layer.

Knows what the scheduler says of it.  Without a recorder there are no samples: nothing old is shown as if it were new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

_NAN = float("nan")


class ExpertMetrics:
    """`layer` is the index of the hidden layer."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        by_window = ["model_name", "layer", "window"]
        self._ranks = Gauge(
            "sglang:eplb_balancedness",
            "Even load of ranks over the largest, in the last passes; 1 is even",
            by_window,
            registry=registry,
        )
        self._slots = Gauge(
            "lockstep:expert_slot_balancedness",
            "Even load of expert slots over the largest, in the last passes; 1 is even",
            by_window,
            registry=registry,
        )
        self._drift = Gauge(
            "lockstep:expert_load_drift",
            "Total variation distance of the experts' load before and after the last refresh",
            ["model_name", "layer"],
            registry=registry,
        )
        self._chance = Gauge(
            "lockstep:expert_load_drift_by_chance",
            "Expected lockstep:expert_load_drift if the refresh had changed nothing",
            ["model_name", "layer"],
            registry=registry,
        )
        self._passes = Gauge(
            "lockstep:expert_load_passes", "Forward passes in the load record", ["model_name"], registry=registry
        )

    def update(self, status: Mapping[str, Any] | None) -> None:
        """Take what `LoadRecorder.status` says; None before anything is recorded."""
        for gauge in (self._ranks, self._slots, self._drift, self._chance, self._passes):
            gauge.clear()
        if status is None:
            return
        self._passes.labels(self._model_name).set(status["num_passes"])
        layers = status["moe_layer_ids"]
        for window in status["windows"]:
            for gauge, name in ((self._ranks, "rank_balancedness"), (self._slots, "slot_balancedness")):
                for layer, value in zip(layers, window[name], strict=True):
                    self._set(gauge.labels(self._model_name, layer, window["window"]), value)
        drift = status["drift"]
        if drift is not None:
            for gauge, name in ((self._drift, "total_variation"), (self._chance, "expected_by_chance")):
                for layer, value in zip(layers, drift[name], strict=True):
                    self._set(gauge.labels(self._model_name, layer), value)

    @staticmethod
    def _set(gauge: Gauge, value: float | None) -> None:
        gauge.set(_NAN if value is None else value)
