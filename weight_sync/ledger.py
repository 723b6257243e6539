"""`WeightLedger`: which logical tensors are expected, and which came.

Every logical tensor arrives exactly once.  One exception: a model may map two wire names to one logical tensor (tied
embeddings: `lm_head.weight` and `model.embed_tokens.weight`), and a tensor that came under one name may come again
under another; whether the two are equal is for the caller to check, who holds the content.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from weight_sync.errors import CoverageError

Coverage = Literal["full", "partial"]


class WeightLedger:
    """Arrivals of one load or one refresh.

    `coverage="full"`: all of `expected` must come.  `"partial"`: what came is the subset, and may be empty.
    """

    def __init__(self, expected: Iterable[str], coverage: Coverage = "full") -> None:
        self.coverage = coverage
        self._expected = frozenset(expected)
        self._wire_names: dict[str, set[str]] = {}  # logical name -> wire names it came under

    def __contains__(self, logical_name: str) -> bool:
        """Whether it came."""
        return logical_name in self._wire_names

    @property
    def received(self) -> list[str]:
        """Logical names in order of first arrival."""
        return list(self._wire_names)

    @property
    def missing(self) -> list[str]:
        """Expected logical names that have not come, sorted."""
        return sorted(self._expected - self._wire_names.keys())

    def refusals(self, arrivals: Iterable[tuple[str, str]]) -> list[str]:
        """Why the (wire name, logical name) pairs of one call cannot be recorded; empty when they can."""
        seen: set[tuple[str, str]] = set()
        problems = []
        for wire_name, logical_name in arrivals:
            if logical_name not in self._expected:
                problems.append(f"{logical_name} was not announced")
            elif (wire_name, logical_name) in seen or wire_name in self._wire_names.get(logical_name, ()):
                problems.append(f"{logical_name} came twice" + _under(wire_name, logical_name))
            seen.add((wire_name, logical_name))
        return problems

    def record(self, wire_name: str, logical_name: str) -> bool:
        """Note an arrival.  True: the first of this logical tensor.  False: it came before, under another wire name.

        Raises `CoverageError` as `refusals` says.
        """
        if logical_name not in self._expected or wire_name in self._wire_names.get(logical_name, ()):
            raise CoverageError("; ".join(self.refusals([(wire_name, logical_name)])))
        names = self._wire_names.setdefault(logical_name, set())
        names.add(wire_name)
        return len(names) == 1

    def settle(self) -> list[str]:
        """The logical names that make up this version.  Raises `CoverageError` when something is missing."""
        if self.coverage == "full" and self.missing:
            raise CoverageError(f"{len(self.missing)} of {len(self._expected)} tensors missing: {listed(self.missing)}")
        return self.received


def listed(items: list[str], limit: int = 20) -> str:
    """The items for an error message; beyond `limit` only their number."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _under(wire_name: str, logical_name: str) -> str:
    return "" if wire_name == logical_name else f" as {wire_name}"
