"""Counters by session, for a bounded number of sessions.

Labels come from clients, and series live as long as a server.
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
        self._counters = [
            Counter(f"lockstep:session_{name}", text, ["model_name", "session_id"], registry=registry)
            for name, text in (
                ("requests", "Samples of sessions that finished"),
                ("prompt_tokens", "Their prompt tokens"),
                ("cached_tokens", "Prompt tokens of them from the prefix cache"),
                ("generation_tokens", "Tokens generated for them"),
            )
        ]
        self._series: dict[str, list[Counter]] = {}

    def on_finished(self, record: SampleRecord) -> None:
        if record.session_id is None or record.finished is None:
            return
        amounts = (1, len(record.prompt_ids), record.finished.cached_tokens, len(record.output_ids))
        for counter, amount in zip(self._of(record.session_id), amounts):
            counter.inc(amount)

    def _of(self, session_id: str) -> list[Counter]:
        label = session_id if session_id in self._series or len(self._series) < MAX_LABELS else OTHER
        if label not in self._series:
            self._series[label] = [counter.labels(self._model_name, label) for counter in self._counters]
        return self._series[label]
