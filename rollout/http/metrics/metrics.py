"""Prometheus metrics: one set of numbers, under the names that SGLang's and vLLM's dashboards and controllers read.

The numbers come from the manager (`Metrics` is a `RequestObserver`), and from the scheduler's state at each scrape.
Each number is kept once, and shown under every one of its names with the labels of both families.  The labels
`engine` (vLLM's) and `dp_rank` (SGLang's) are the same data-parallel rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from rollout.core.messages.scheduler_state import SchedulerState
from rollout.http.metrics.experts import ExpertMetrics
from rollout.http.metrics.held import HeldMetrics
from rollout.http.metrics.tallies import Tallies, Tally
from rollout.http.metrics.weights import WeightMetrics
from rollout.http.sessions import SessionBook
from rollout.tokenizer_manager.sample import SampleRecord

logger = logging.getLogger(__name__)

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_LABELS = ("model_name", "engine", "dp_rank", "engine_type")

# Numbers of the scheduler's state: key, help, names.  The names of counters lack their "_total".
_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("num_running_reqs", "Requests that hold KV", ("sglang:num_running_reqs", "vllm:num_requests_running")),
    ("num_waiting_reqs", "Requests that wait", ("sglang:num_queue_reqs", "vllm:num_requests_waiting")),
    ("num_used_tokens", "KV slots in use, in tokens", ("sglang:num_used_tokens",)),
    ("max_total_num_tokens", "KV slots, in tokens", ("sglang:max_total_num_tokens",)),
    (
        "token_usage",
        "Share of KV slots in use",
        ("sglang:token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    ("gen_throughput", "Generated tokens per second, recent", ("sglang:gen_throughput",)),
    ("cache_hit_rate", "Share of prompt tokens taken from the prefix cache", ("sglang:cache_hit_rate",)),
    ("num_retracted_reqs", "Retractions since start", ("sglang:num_retracted_reqs",)),
    ("spec_accept_length", "Tokens that a step gives a request, by drafts", ("sglang:spec_accept_length",)),
    ("num_running_sessions", "Sessions with requests that hold KV", ("sglang:num_unique_running_routing_keys",)),
    ("num_pinned_tokens", "Cached tokens kept from eviction for sessions", ("lockstep:session_pinned_tokens",)),
    ("num_used_state_rows", "Recurrent states, or pages of windows, in use", ("lockstep:used_state_rows",)),
    ("num_state_rows", "Recurrent states, or pages of windows, that there are", ("lockstep:state_rows",)),
    ("paused", "1 while generation is paused", ("sglang:paused",)),
)
_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "num_prompt_tokens",
        "Prompt tokens of samples whose prompt is computed",
        (
            "sglang:prompt_tokens",
            "vllm:prompt_tokens",
            "vllm:prefix_cache_queries",
            "vllm:gpu_prefix_cache_queries",
        ),
    ),
    (
        "num_prompt_tokens_reused",
        "Prompt tokens taken from the prefix cache",
        (
            "sglang:cached_tokens",
            "vllm:prompt_tokens_cached",
            "vllm:prefix_cache_hits",
            "vllm:gpu_prefix_cache_hits",
        ),
    ),
    ("num_generated_tokens", "Tokens generated", ("sglang:generation_tokens", "vllm:generation_tokens")),
    (
        "num_retracted_reqs",
        "Samples put back for want of KV slots",
        ("sglang:num_retracted_requests", "vllm:num_preemptions"),
    ),
    ("num_drafts", "Drafts that were verified", ("vllm:spec_decode_num_drafts",)),
    ("num_draft_tokens", "Tokens of drafts", ("vllm:spec_decode_num_draft_tokens",)),
    ("num_accepted_draft_tokens", "Tokens of drafts that were kept", ("vllm:spec_decode_num_accepted_tokens",)),
)

# Numbers of each sample that has ended: help, names.  All times but the latency need a first token.
_SECONDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "first_token": (
        "From arrival to first token",
        ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ),
    "latency": (
        "From arrival to last token",
        ("sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    ),
    "queue": ("From arrival to the first KV", ("sglang:queue_time_seconds", "vllm:request_queue_time_seconds")),
    "prefill": ("From the first KV to the first token", ("vllm:request_prefill_time_seconds",)),
    "decode": ("From the first to the last token", ("vllm:request_decode_time_seconds",)),
    "per_token": (
        "Mean time from one token of a sample to the next",
        (
            "sglang:inter_token_latency_seconds",
            "sglang:time_per_output_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:request_time_per_output_token_seconds",
            "vllm:time_per_output_token_seconds",
        ),
    ),
}
_TOKENS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt": ("Prompt tokens of a sample", ("sglang:prompt_tokens_histogram", "vllm:request_prompt_tokens")),
    "generation": (
        "Tokens generated for a sample",
        ("vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens"),
    ),
}


class _OfRank(NamedTuple):
    """The metrics of samples that have the labels of one data-parallel rank."""

    requests: Counter
    aborted: Counter
    success: dict[str, Counter]
    seconds: dict[str, Tally]
    tokens: dict[str, Tally]


class Metrics:
    """One server's metrics; `dp_size` data-parallel ranks."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str, dp_size: int = 1) -> None:
        self._registry = CollectorRegistry()
        self._labels = [(model_name, str(rank), str(rank), "unified") for rank in range(dp_size)]
        self._updated_at: float | None = None
        self._age = Gauge(
            "lockstep:state_age_seconds",
            "Seconds since the scheduler last gave the gauges",
            ["model_name"],
            registry=self._registry,
        ).labels(model_name)
        self._state = _SchedulerState(self._labels)
        self._registry.register(self._state)
        self._requests = Counter("requests", "Samples ended, aborted ones included", _LABELS, registry=None)
        self._aborted = Counter("aborted", "Samples aborted", _LABELS, registry=None)
        self._success = Counter("success", "Samples ended, by the reason", [*_LABELS, "finished_reason"], registry=None)
        self._seconds = {key: Tallies(key, text, _LABELS, _LATENCY_BUCKETS) for key, (text, _) in _SECONDS.items()}
        self._tokens = {key: Tallies(key, text, _LABELS, _TOKEN_BUCKETS) for key, (text, _) in _TOKENS.items()}
        self._registry.register(
            _Named(
                [(self._requests, ["sglang:num_requests"])]
                + [(self._aborted, ["sglang:num_aborted_requests"])]
                + [(self._success, ["vllm:request_success"])]
                + [(self._seconds[key], names) for key, (_, names) in _SECONDS.items()]
                + [(self._tokens[key], names) for key, (_, names) in _TOKENS.items()]
            )
        )
        # Made now, so that a reader sees zeros before the first sample, and no sample has to look for them.
        self._of_rank = [
            _OfRank(
                self._requests.labels(*labels),
                self._aborted.labels(*labels),
                {reason: self._success.labels(*labels, reason) for reason in ("stop", "length", "abort")},
                {key: metric.labels(*labels) for key, metric in self._seconds.items()},
                {key: metric.labels(*labels) for key, metric in self._tokens.items()},
            )
            for labels in self._labels
        ]
        self._model_name = model_name
        self._weight_load = Histogram(
            "sglang:weight_load_duration_seconds",
            "Duration of weight update calls",
            ["model_name", "source"],
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self._experts = ExpertMetrics(model_name)
        self._registry.register(self._experts)
        self._weights = WeightMetrics(model_name, self._registry)
        self.held = HeldMetrics(model_name, self._registry)
        ProcessCollector(registry=self._registry)  # memory, files and start of the process that serves HTTP
        self.sessions = SessionBook(model_name, self._registry)

    # --- RequestObserver -----------------------------------------------------------------------------------------

    def on_first_token(self, record: SampleRecord) -> None:
        assert record.first_token_at is not None
        self._of_rank[record.dp_rank].seconds["first_token"].observe(record.first_token_at - record.created_at)

    def on_finished(self, record: SampleRecord) -> None:
        finished, metrics = record.finished, self._of_rank[record.dp_rank]
        assert finished is not None and record.finished_at is not None
        metrics.requests.inc()
        if finished.reason.type == "abort":
            metrics.aborted.inc()
        metrics.success[finished.reason.type].inc()
        metrics.tokens["prompt"].observe(len(record.prompt_ids))
        metrics.tokens["generation"].observe(len(record.output_ids))
        seconds = {"latency": record.finished_at - record.created_at}
        if record.first_token_at is not None:
            until_first = record.first_token_at - record.created_at
            seconds["queue"] = finished.queue_s
            seconds["prefill"] = max(0.0, until_first - finished.queue_s)
            seconds["decode"] = record.finished_at - record.first_token_at
            if len(record.output_ids) > 1:
                seconds["per_token"] = seconds["decode"] / (len(record.output_ids) - 1)
        for key, value in seconds.items():
            metrics.seconds[key].observe(value)
        self._weights.on_finished(finished.weight_versions)
        self.sessions.on_finished(record)

    # --- other sources -------------------------------------------------------------------------------------------

    def on_weight_load(self, source: str, seconds: float) -> None:
        self._weight_load.labels(self._model_name, source).observe(seconds)

    def bucket_counts(self, key: str) -> tuple[list[float], list[float]]:
        """Return a latency's bucket bounds and how many samples were within each: `first_token`, `latency`, ..."""
        counts: dict[float, float] = {}
        for metric in self._seconds[key].collect():
            for sample in metric.samples:
                if "le" in sample.labels:
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
        return list(counts), list(counts.values())

    def update(self, state: SchedulerState) -> None:
        """Take the gauges from the scheduler's state."""
        self._state.by_rank = state.of_ranks
        self._experts.recorder = state.expert_distribution
        self._experts.balancer = state.eplb
        self._weights.update(state)
        self._updated_at = time.monotonic()

    def note_scrape_failure(self, error: Exception) -> None:
        logger.warning("metrics: no state from the scheduler: %s", error)

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        self._age.set(float("nan") if self._updated_at is None else time.monotonic() - self._updated_at)
        return generate_latest(self._registry)


class _Named(Collector):
    """Metrics that are in no registry, each under all of its names."""

    def __init__(self, metrics: Sequence[tuple[Counter | Tallies, Sequence[str]]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric, names in self._metrics:
            (family,) = metric.collect()
            for name in names:
                named = Metric(name, family.documentation, family.type)
                named.samples = [
                    sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield named


class _SchedulerState(Collector):
    """The last state of each data-parallel rank."""

    def __init__(self, labels: Sequence[tuple[str, ...]]) -> None:
        self.by_rank: list[SchedulerState] = []
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for kind, numbers in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for key, text, names in numbers:
                for name in names:
                    family = kind(name, text, labels=_LABELS)
                    for labels, state in zip(self._labels, self.by_rank):
                        family.add_metric(labels, float(getattr(state, key)))
                    yield family
        yield self._kept_drafts()
        yield self._waiting_by_reason()
        yield from self._cache_config()

    def _kept_drafts(self) -> Metric:
        """Return the number of kept tokens by their place in a draft, from 0."""
        text = "Tokens of drafts that were kept, by the place in the draft"
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, text, labels=[*_LABELS, "position"])
        for labels, state in zip(self._labels, self.by_rank):
            for place, kept in enumerate(state.num_accepted_draft_tokens_per_pos):
                family.add_metric([*labels, str(place)], float(kept))
        return family

    def _waiting_by_reason(self) -> Metric:
        """Return the number of waiting requests by the reason for which they wait.

        `capacity`: KV slots or places in the batch are lacking; `deferred`: nothing may run now.
        """
        text = "Requests that wait, by the reason"
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=[*_LABELS, "reason"])
        for labels, state in zip(self._labels, self.by_rank):
            stands_still = state.paused or state.withheld is not None
            for reason, counts in (("capacity", not stands_still), ("deferred", stands_still)):
                family.add_metric([*labels, reason], float(state.num_waiting_reqs) if counts else 0.0)
        return family

    def _cache_config(self) -> Iterator[Metric]:
        """Yield the size of the KV pool.  A page, or block, is one token: the granularity of the prefix cache."""
        for name, block_size, num_blocks in (
            ("vllm:cache_config_info", "block_size", ("num_gpu_blocks", "kv_cache_size_tokens")),
            ("sglang:cache_config_info", "page_size", ("num_pages",)),
        ):
            family = GaugeMetricFamily(name, "The KV pool, as labels", labels=[*_LABELS, block_size, *num_blocks])
            for labels, state in zip(self._labels, self.by_rank):
                family.add_metric([*labels, "1", *[str(state.max_total_num_tokens)] * len(num_blocks)], 1.0)
            yield family
