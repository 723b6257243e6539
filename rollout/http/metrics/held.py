"""Gauges of what the HTTP process holds for clients that are away, or that have not read their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.core.errors import Unavailable

_GAUGES: dict[str, tuple[str, str]] = {
    "kept_streams": ("lockstep:kept_streams", "Resumable streams without a reader, which are kept for a while"),
    "kept_stream_bytes": ("lockstep:kept_stream_bytes", "Bytes of these streams, as of the last look at their sizes"),
    "hidden_state_bytes": (
        "lockstep:hidden_state_bytes",
        "The most bytes that hidden states of requests in flight, and of unread answers, may take in a process",
    ),
}


class HeldMetrics(Collector):
    """A gauge for each number; it has no sample before `watch` names what tells the number.

    A teller may raise `Unavailable`, as the server does not admit requests; then there is no sample, either.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._tellers: dict[str, Callable[[], int]] = {}
        registry.register(self)

    def watch(self, **tellers: Callable[[], int]) -> None:
        """Ask these functions from now on, by the names of the gauges."""
        assert tellers.keys() <= _GAUGES.keys(), "there is no such gauge"
        self._tellers |= tellers

    def collect(self) -> Iterator[Metric]:
        for key, (name, text) in _GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            if key in self._tellers:
                with contextlib.suppress(Unavailable):
                    family.add_metric([self._model_name], float(self._tellers[key]()))
            yield family
