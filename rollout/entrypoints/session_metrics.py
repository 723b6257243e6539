"""Counters by session, for a bounded number of sessions: labels come from clients, and series live as long as a server.

Knows finished samples.  Does not know who reads it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from rollout.tokenizer_manager.sample import SampleRecord

MAX_LABELS = 64
OTHER = "other"


class SessionMetrics:
    """The first `MAX_LABELS` sessions have series of their own; all others share `session_id="other"`."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._labels: set[str] = set()
        self._requests = self._counter("requests", "Samples of sessions that finished", registry)
        self._prompt = self._counter("prompt_tokens", "Their prompt tokens", registry)
        self._cached = self._counter("cached_tokens", "Prompt tokens of them from the prefix cache", registry)
        self._generation = self._counter("generation_tokens", "Tokens generated for them", registry)

    @staticmethod
    def _counter(name: str, text: str, registry: CollectorRegistry) -> Counter:
        return Counter(f"lockstep:session_{name}", text, ["model_name", "session_id"], registry=registry)

    def on_finished(self, record: SampleRecord) -> None:
        if record.session_id is None or record.finished is None:
            return
        label = record.session_id
        if label not in self._labels:
            if len(self._labels) < MAX_LABELS:
                self._labels.add(label)
            else:
                label = OTHER
        self._requests.labels(self._model_name, label).inc()
        self._prompt.labels(self._model_name, label).inc(len(record.prompt_ids))
        self._cached.labels(self._model_name, label).inc(record.finished.cached_tokens)
        self._generation.labels(self._model_name, label).inc(len(record.output_ids))
