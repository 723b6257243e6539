"""The metrics of a server, as its own collectors declare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from docs.tools.tables import code, table
from rollout.http.metrics.metrics import Metrics

OF_ALL = ("model_name", "engine", "dp_rank", "engine_type")


@dataclass(frozen=True)
class Number:
    """One number of a server under one of its names, as Prometheus shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def parts() -> dict[str, Callable[[], str]]:
    return {"metrics": metrics}


def metrics() -> str:
    """Return a table of all metrics, one row for each number with all of its names."""
    names: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for one in numbers():
        names.setdefault((one.help, one.kind, one.labels), []).append(one.name)
    rows = [
        (", ".join(map(code, same)), kind, _labels(labels), meaning) for (meaning, kind, labels), same in names.items()
    ]
    return table(("names", "type", "labels", "meaning"), rows)


def _labels(labels: tuple[str, ...]) -> str:
    if labels[: len(OF_ALL)] == OF_ALL:
        return ", ".join(["the four", *map(code, labels[len(OF_ALL) :])])
    return ", ".join(map(code, labels))


@cache
def numbers() -> tuple[Number, ...]:
    """Return the metrics of a server that has served nothing yet."""
    registry = Metrics("model")._registry
    declared = {
        name: tuple(getattr(collector, "_labelnames", ()))
        for collector, collector_names in registry._collector_to_names.items()
        for name in collector_names
    }
    found = []
    for family in registry.collect():
        labels = getattr(family, "_labelnames", None) or declared.get(family.name) or ()
        if not labels and family.samples:
            labels = tuple(label for label in family.samples[0].labels if label != "le")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.append(Number(name, family.type, tuple(labels), family.documentation))
    return tuple(found)
