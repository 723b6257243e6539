"""Prometheus metrics under SGLang's names, in a registry of their own.

Knows counters and gauges.  Fed by the manager (it is a `RequestObserver`) and by the scheduler's state at each scrape.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rollout.entrypoints.eplb_metrics import EplbMetrics
from rollout.entrypoints.expert_metrics import ExpertMetrics
from rollout.tokenizer_manager.sample import SampleRecord

logger = logging.getLogger(__name__)

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Metric -> (key of the scheduler's state, help).
_GAUGES = {
    "num_running_reqs": ("num_running_reqs", "Requests that hold KV"),
    "num_queue_reqs": ("num_waiting_reqs", "Requests that wait"),
    "num_used_tokens": ("num_used_tokens", "KV slots in use, in tokens"),
    "max_total_num_tokens": ("max_total_num_tokens", "KV slots, in tokens"),
    "token_usage": ("token_usage", "Share of KV slots in use"),
    "gen_throughput": ("gen_throughput", "Generated tokens per second, recent"),
    "cache_hit_rate": ("cache_hit_rate", "Share of prompt tokens taken from the prefix cache"),
    "num_retracted_reqs": ("num_retracted_reqs", "Retractions since start"),
    "paused": ("paused", "1 while generation is paused"),
}


class Metrics:
    """One server's metrics."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._updated_at: float | None = None
        self._gauges = {name: self._gauge(f"sglang:{name}", text) for name, (_, text) in _GAUGES.items()}
        self._age = self._gauge("lockstep:state_age_seconds", "Seconds since the scheduler last gave the gauges")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished samples")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens taken from the prefix cache")
        self._requests = self._counter("num_requests", "Samples finished, aborted ones included")
        self._aborted = self._counter("num_aborted_requests", "Samples aborted")
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to first token")
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to last token")
        self._weight_load = Histogram(
            "sglang:weight_load_duration_seconds",
            "Duration of weight update calls",
            ["model_name", "source"],
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self._experts = ExpertMetrics(model_name, self._registry)
        self._eplb = EplbMetrics(model_name, self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"sglang:{name}", text, ["model_name"], registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(f"sglang:{name}", text, ["model_name"], buckets=_LATENCY_BUCKETS, registry=self._registry)
        return histogram.labels(**self._labels)

    # --- RequestObserver -----------------------------------------------------------------------------------------

    def on_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def on_finished(self, record: SampleRecord) -> None:
        finished = record.finished
        assert finished is not None and record.finished_at is not None
        self._requests.inc()
        self._aborted.inc(finished.reason.type == "abort")
        self._prompt_tokens.inc(len(record.prompt_ids))
        self._generation_tokens.inc(len(record.output_ids))
        self._cached_tokens.inc(finished.cached_tokens)
        self._latency.observe(record.finished_at - record.created_at)

    # --- other sources -------------------------------------------------------------------------------------------

    def on_weight_load(self, source: str, seconds: float) -> None:
        self._weight_load.labels(source=source, **self._labels).observe(seconds)

    def update(self, state: dict[str, Any]) -> None:
        """Take the gauges from the scheduler's state."""
        for name, (key, _) in _GAUGES.items():
            if key in state:
                self._gauges[name].set(float(state[key]))
        self._experts.update(state.get("expert_distribution"))
        self._eplb.update(state.get("eplb"))
        self._updated_at = time.monotonic()

    def note_scrape_failure(self, error: Exception) -> None:
        logger.warning("metrics: no state from the scheduler: %s", error)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        self._age.set(float("nan") if self._updated_at is None else time.monotonic() - self._updated_at)
        return generate_latest(self._registry)
