"""The part of Prometheus' query language that dashboards use, over two scrapes of one server.

It covers selectors, `rate` and `increase`, `sum`, `avg` and `max` with `by`, `histogram_quantile` and quotients.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_TOKEN = re.compile(r'\s*([A-Za-z_:][\w:]*|\d+(?:\.\d+)?|"[^"]*"|=~|\[[^\]]*\]|[(){},=/])')
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "avg": lambda values: sum(values) / len(values),
    "max": max,
}


class Scrapes:
    """Two texts of one target, `seconds` apart; `target` are the labels that the scraper adds."""

    def __init__(self, before: str, after: str, seconds: float, target: dict[str, str]) -> None:
        self.seconds = seconds
        self.before, self.after = _samples(before, target), _samples(after, target)

    def evaluate(self, expression: str) -> Vector:
        """Return the value by labels; empty if no series matches.  Raises `ValueError` for an unreadable expression."""
        parser = _Parser(expression, self)
        result = parser.quotient()
        if parser.peek() is not None:
            raise ValueError(f"{expression}: unexpected {parser.peek()}")
        return result


def _samples(text: str, target: dict[str, str]) -> dict[str, Vector]:
    samples: dict[str, Vector] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset((sample.labels | target).items())] = sample.value
    return samples


class _Parser:
    def __init__(self, text: str, scrapes: Scrapes) -> None:
        self._tokens = [match.group(1) for match in _TOKEN.finditer(text)]
        if "".join(self._tokens) != re.sub(r"\s", "", text):
            raise ValueError(f"cannot read {text}")
        self._scrapes = scrapes

    def peek(self) -> str | None:
        return self._tokens[0] if self._tokens else None

    def _take(self, wanted: str | None = None) -> str:
        if wanted is not None and self.peek() != wanted:
            raise ValueError(f"expected {wanted}, found {self.peek()}")
        return self._tokens.pop(0)

    def quotient(self) -> Vector:
        result = self._term()
        while self.peek() == "/":
            self._take()
            result = _divide(result, self._term())
        return result

    def _term(self) -> Vector:
        word = self._take()
        if word == "(":
            inner = self.quotient()
            self._take(")")
            return inner
        if word in _AGGREGATES:
            return self._aggregate(_AGGREGATES[word])
        if word == "histogram_quantile":
            self._take("(")
            quantile = float(self._take())
            self._take(",")
            inner = self.quotient()
            self._take(")")
            return _histogram_quantile(quantile, inner)
        if word in ("rate", "increase"):
            self._take("(")
            name, matchers = self._selector(self._take())
            self._take()  # the range: that of the two scrapes
            self._take(")")
            old, new = _select(self._scrapes.before, name, matchers), _select(self._scrapes.after, name, matchers)
            seconds = self._scrapes.seconds if word == "rate" else 1.0
            return {labels: (value - old.get(labels, 0.0)) / seconds for labels, value in new.items()}
        return _select(self._scrapes.after, *self._selector(word))

    def _aggregate(self, combine: Callable[[list[float]], float]) -> Vector:
        by = self._by()
        self._take("(")
        inner = self.quotient()
        self._take(")")
        by = by or self._by()
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            groups.setdefault(frozenset(item for item in labels if item[0] in by), []).append(value)
        return {labels: combine(values) for labels, values in groups.items()}

    def _by(self) -> set[str]:
        if self.peek() != "by":
            return set()
        self._take()
        names = set()
        while self._take() != ")":
            if self.peek() not in (")", ","):
                names.add(self._tokens[0])
        return names

    def _selector(self, name: str) -> tuple[str, list[tuple[str, str]]]:
        matchers = []
        if self.peek() == "{":
            self._take()
            while self.peek() != "}":
                label, operator, value = self._take(), self._take(), self._take().strip('"')
                matchers.append((label, value if operator == "=~" else re.escape(value)))
                if self.peek() == ",":
                    self._take()
            self._take("}")
        return name, matchers


def _select(samples: dict[str, Vector], name: str, matchers: list[tuple[str, str]]) -> Vector:
    series = samples.get(name, {})
    return {
        labels: value
        for labels, value in series.items()
        if all(re.fullmatch(pattern, dict(labels).get(label, "")) for label, pattern in matchers)
    }


def _divide(above: Vector, below: Vector) -> Vector:
    return {
        labels: value / below[labels] if below[labels] else float("nan")
        for labels, value in above.items()
        if labels in below
    }


def _histogram_quantile(quantile: float, buckets: Vector) -> Vector:
    """Return the quantile of one histogram, linear within a bucket."""
    counts = sorted((float(dict(labels)["le"]), value) for labels, value in buckets.items())
    if not counts:
        return {}
    wanted, lower, below = quantile * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > below:
            inside = (wanted - below) / (count - below)
            return {frozenset(): lower if bound == float("inf") else lower + (bound - lower) * inside}
        lower, below = bound, count
    return {frozenset(): float("nan")}
