"""`TrainerLog`: numbers that a trainer posts after its steps, such as its KL divergence and its reward."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping

import msgspec

from rollout.core.errors import BadRequest

MAX_NAMES = 16
MAX_NAME_CHARS = 40
REPORTS_KEPT = 1000


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one step of the trainer.  `at`: seconds since 1970; `weight_version`: served at that time."""

    at: float
    step: int | None
    weight_version: str
    values: dict[str, float]


class TrainerLog:
    """The last `REPORTS_KEPT` reports, with at most `MAX_NAMES` names in all of them."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, TrainerReport]] = deque(maxlen=REPORTS_KEPT)
        self._names: set[str] = set()

    def add(self, number: int, values: Mapping[str, float], step: int | None, weight_version: str) -> TrainerReport:
        """Keep a report.  Raises `BadRequest` for a bad name, a number that is not finite, or too many names."""
        if not values:
            raise BadRequest("values is empty: give at least one number by its name")
        for name, value in values.items():
            if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
                raise BadRequest(f"a name has 1 to {MAX_NAME_CHARS} printable characters, got {name[:80]!r}")
            if not math.isfinite(value):
                raise BadRequest(f"values must be finite, got {value} for {name!r}")
        names = self._names | set(values)
        if len(names) > MAX_NAMES:
            raise BadRequest(f"at most {MAX_NAMES} names are kept, these would be {len(names)}")
        self._names = names
        report = TrainerReport(at=round(time.time(), 3), step=step, weight_version=weight_version, values={**values})
        self._reports.append((number, report))
        return report

    def newer(self, number: int) -> list[TrainerReport]:
        """Return the reports after this number, oldest first."""
        return [report for found, report in self._reports if found > number]
