"""`Tallies` show what `prometheus_client` shows of the same values."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from rollout.http.metrics.tallies import Tallies

BOUNDS = (0, 0.001, 0.5, 1, 2.5, 1_000_000)
VALUES = (0, 0.0005, 0.001, 0.0011, 0.5, 1, 2.5, 2.500001, 1e6, 1e9)


def text_of(registry: CollectorRegistry) -> list[str]:
    """Return the lines, without the times at which the histograms were made."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created{" not in line]


def both(values: tuple[float, ...], observed: tuple[float, ...]) -> tuple[list[str], list[str]]:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("a:seconds", "Help", ["model", "rank"], buckets=BOUNDS, registry=theirs)
    tallies = Tallies("a:seconds", "Help", ["model", "rank"], BOUNDS)
    ours.register(tallies)
    for rank in ("0", "1"):
        histogram.labels("m", rank), tallies.labels("m", rank)
    rng = random.Random(1)
    for value, seen in zip(values, observed):
        rank = rng.choice(("0", "1"))
        histogram.labels("m", rank).observe(value)
        tallies.labels("m", rank).observe(seen)
    return text_of(theirs), text_of(ours)


def test_the_text_is_that_of_prometheus_client() -> None:
    theirs, ours = both(VALUES * 3, VALUES * 3)
    assert theirs == ours and len(ours) > 20


def test_a_value_over_its_bound_would_be_seen() -> None:
    theirs, ours = both(VALUES, (0, 0.0005, 0.00101, *VALUES[3:]))
    assert theirs != ours
