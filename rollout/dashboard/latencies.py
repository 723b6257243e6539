"""`LatencyWindow`: percentiles of the last minute, from the histograms of /metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rollout.http.metrics.metrics import Metrics

WINDOW_S = 60.0
PERCENTILES = (0.5, 0.95, 0.99)
KEYS = {"first_token_s": "first_token", "per_token_s": "per_token", "latency_s": "latency"}
"""Field of a `Sample` -> histogram."""


class LatencyWindow:
    """The histograms' counts over the last `WINDOW_S` seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._taken: deque[tuple[float, dict[str, list[float]]]] = deque()

    def percentiles(self, now: float) -> dict[str, tuple[float, float, float] | None]:
        """Take the counts at `now`, and return three percentiles of each latency; None without a sample."""
        found = {field: self._metrics.bucket_counts(key) for field, key in KEYS.items()}
        counts = {field: list(values) for field, (_, values) in found.items()}
        self._taken.append((now, counts))
        while (len(self._taken) > 1 and self._taken[1][0] <= now - WINDOW_S) or self._taken[0][0] > now:
            self._taken.popleft()
        before = self._taken[0][1]
        shown: dict[str, tuple[float, float, float] | None] = {}
        for field, (bounds, _) in found.items():
            within = [new - old for new, old in zip(counts[field], before[field])]
            median, p95, p99 = (quantile(bounds, within, share) for share in PERCENTILES)
            shown[field] = None if median is None or p95 is None or p99 is None else (median, p95, p99)
        return shown


def quantile(bounds: Sequence[float], within: Sequence[float], share: float) -> float | None:
    """Return the value below which `share` of the samples are, as Prometheus' `histogram_quantile` does.

    `within`: how many are up to each of the bounds, the last of which is infinity.  None without samples.
    """
    if not within or within[-1] <= 0:
        return None
    rank, lower, below = share * within[-1], 0.0, 0.0
    for bound, count in zip(bounds, within):
        if count >= rank:
            if bound == float("inf") or count == below:
                return lower
            return round(lower + (bound - lower) * (rank - below) / (count - below), 6)
        lower, below = bound, count
    return lower
