"""Gauges of the weights that serve, and the age in versions of what samples were made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.core.messages.req_output import VersionSpan
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.http.metrics.tallies import Tallies

_AGE_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 16, 32)
_GAUGES: dict[str, tuple[Callable[[SchedulerState], float | None], str]] = {
    "lockstep:weight_epoch": (lambda state: state.weight_epoch, "Commits of weights since start"),
    "lockstep:weight_version_number": (
        lambda state: _number_of(state.weight_version),
        "The label of the weights in force, if it is a whole number",
    ),
    "lockstep:weight_update_open": (
        lambda state: state.weight_update.open is True,
        "1 while a weight update has begun and not ended",
    ),
    "lockstep:weights_poisoned": (
        lambda state: state.poisoned is not None,
        "1 while the engine has neither the old nor the new weights; only a full refresh or a restart helps",
    ),
    "lockstep:draft_stale": (
        lambda state: None if state.draft is None else state.draft.is_stale,
        "1 while the model that drafts has older weights than the model that it drafts for",
    ),
    "lockstep:withheld": (lambda state: state.withheld is not None, "1 while the engine may compute no request"),
}

_ACCEPT_RATE = (
    "lockstep:draft_accept_rate",
    "Share of a model's drafted tokens that was kept, since these versions of the model and the draft serve",
)


class WeightMetrics(Collector):
    """`state`: the last one of the scheduler, None before the first."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self.state: SchedulerState | None = None
        self._model_name = model_name
        self._newest_epoch = 0
        self._drafts = _DraftsOfVersions()
        ages = Tallies(
            "lockstep:sample_version_age",
            "Commits since the oldest weights that a sample was made of, when it ended",
            ["model_name"],
            _AGE_BUCKETS,
        )
        registry.register(ages)
        self._age = ages.labels(model_name)
        registry.register(self)

    def update(self, state: SchedulerState) -> None:
        """Take the gauges from the scheduler's state."""
        self.state = state
        self._newest_epoch = max(self._newest_epoch, state.weight_epoch)
        self._drafts.update(state)

    def on_finished(self, spans: Sequence[VersionSpan]) -> None:
        """Count a sample by the spans of its output tokens."""
        if spans:
            epochs = [span.weight_epoch for span in spans]
            self._newest_epoch = max(self._newest_epoch, *epochs)
            self._age.observe(self._newest_epoch - min(epochs))

    def collect(self) -> Iterator[Metric]:
        for name, (number, text) in _GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            value = None if self.state is None else number(self.state)
            if value is not None:
                family.add_metric([self._model_name], float(value))
            yield family
        family = GaugeMetricFamily(*_ACCEPT_RATE, labels=["model_name", "weight_version", "draft_version"])
        if (rate := self._drafts.accept_rate) is not None:
            family.add_metric([self._model_name, *self._drafts.versions], rate)
        yield family


class _DraftsOfVersions:
    """The tokens of a model's drafts that were kept since the versions in force are in force, as states show them."""

    def __init__(self) -> None:
        self.versions = ("", "")  # of the model, of the draft
        self._before = (0, 0)  # drafted and kept tokens
        self._now = (0, 0)

    @property
    def accept_rate(self) -> float | None:
        """The kept share of the drafted tokens; None where none were drafted."""
        drafted, kept = (now - before for now, before in zip(self._now, self._before, strict=True))
        return kept / drafted if self.versions[1] and drafted > 0 else None

    def update(self, state: SchedulerState) -> None:
        versions = (state.weight_version, "" if state.draft is None else state.draft.weight_version)
        if versions != self.versions:
            self.versions, self._before = versions, self._now
        self._now = (state.num_draft_tokens, state.num_accepted_draft_tokens)


def _number_of(label: str) -> float | None:
    """Return a label of at most 15 digits as a number: a float holds no more of them exactly."""
    return float(label) if re.fullmatch(r"[0-9]{1,15}", label) else None
