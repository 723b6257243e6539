"""`WeightLedger`: which logical tensors of one load or one refresh came, and under which names.

Tensors have numbers, by their place in the model's list of them.  A bucket that was planned (`plan`) is recorded as an
array of numbers, whatever its length.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from weight_sync.errors import CoverageError, listed

Coverage = Literal["full", "partial"]
Numbers = npt.NDArray[np.int64]
"""Numbers of logical tensors."""


class TensorNumbers:
    """The numbers of a model's logical tensors: their places in `names`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.number_of: Mapping[str, int] = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def by_name(self) -> Numbers:
        """The numbers of all tensors, in the order of their names."""
        return np.array(sorted(range(len(self.names)), key=self.names.__getitem__), dtype=np.int64)


class WeightLedger:
    """Arrivals of one load or one refresh.

    `tensors`: those that may come, by number or name.  `expected`: the ones that are announced; None: all of them.
    `coverage="full"`: all of these must come.  `"partial"`: what came is the subset, and may be empty.
    """

    def __init__(
        self, tensors: TensorNumbers | Iterable[str], coverage: Coverage = "full", expected: Numbers | None = None
    ) -> None:
        self.coverage = coverage
        self.numbers = tensors if isinstance(tensors, TensorNumbers) else TensorNumbers(tensors)
        self._is_expected = np.full(len(self.numbers), expected is None, dtype=np.bool_)
        if expected is not None:
            self._is_expected[expected] = True
        self._came = np.zeros(len(self.numbers), dtype=np.bool_)
        self._arrivals: list[Numbers] = []
        self._planned: list[tuple[Numbers, Sequence[str]]] = []
        self._wire_names: dict[int, set[str]] = {}  # names under which tensors came, outside of plans
        self.num_received = 0

    def __contains__(self, logical_name: str) -> bool:
        """Return whether the tensor came."""
        number = self.numbers.number_of.get(logical_name)
        return number is not None and bool(self._came[number])

    @property
    def received(self) -> list[str]:
        """Logical names in order of first arrival."""
        return list(map(self.numbers.names.__getitem__, self._in_order()))

    @property
    def num_expected(self) -> int:
        """The number of tensors that were announced."""
        return int(np.count_nonzero(self._is_expected))

    @property
    def num_missing(self) -> int:
        """The number of expected tensors that have not come."""
        return int(np.count_nonzero(self._is_expected & ~self._came))

    @property
    def missing(self) -> list[str]:
        """Expected logical names that have not come, sorted."""
        return self.first_missing(len(self.numbers))

    def first_received(self, count: int) -> list[str]:
        """Return the first names of `received`."""
        return [self.numbers.names[number] for number in itertools.islice(self._in_order(), count)]

    def first_missing(self, count: int) -> list[str]:
        """Return the first names of `missing`."""
        order = self.numbers.by_name
        is_missing = (self._is_expected & ~self._came)[order]
        return [self.numbers.names[number] for number in order[np.flatnonzero(is_missing)[:count]]]

    def came(self) -> npt.NDArray[np.bool_]:
        """Return, by number, whether a tensor came: a view."""
        return self._came

    def is_clear(self, numbers: Numbers) -> bool:
        """Return whether all these tensors are expected, and none came."""
        return bool(self._is_expected[numbers].all()) and not bool(self._came[numbers].any())

    def refusals(self, arrivals: Iterable[tuple[str, str]]) -> list[str]:
        """Return why the (wire name, logical name) pairs of one call cannot be recorded; empty when they can."""
        seen: set[tuple[str, str]] = set()
        problems = []
        for wire_name, logical_name in arrivals:
            number = self.numbers.number_of.get(logical_name)
            if number is None or not self._is_expected[number]:
                problems.append(f"{logical_name} was not announced")
            elif (wire_name, logical_name) in seen or wire_name in self._names_of(number):
                under = "" if wire_name == logical_name else f" as {wire_name}"
                problems.append(f"{logical_name} came twice{under}")
            seen.add((wire_name, logical_name))
        return problems

    def record(self, wire_name: str, logical_name: str) -> bool:
        """Note an arrival.  True: the first of this logical tensor.  False: it came before, under another wire name.

        Raises `CoverageError` as `refusals` states.
        """
        refusals = self.refusals([(wire_name, logical_name)])
        if refusals:
            raise CoverageError("; ".join(refusals))
        number = self.numbers.number_of[logical_name]
        self._wire_names.setdefault(number, set()).add(wire_name)
        if self._came[number]:
            return False
        self._note(np.array([number]))
        return True

    def record_all(self, numbers: Numbers, wire_names: Sequence[str]) -> None:
        """Note the arrivals of a planned bucket, of which `is_clear` is true, under the names of the same place."""
        self._planned.append((numbers, wire_names))
        self._note(numbers)

    def settle(self) -> None:
        """Raise `CoverageError` if something is missing."""
        if self.coverage == "full" and self.num_missing:
            raise CoverageError(f"{self.num_missing} of {self.num_expected} tensors missing: {listed(self.missing)}")

    def _note(self, numbers: Numbers) -> None:
        self._came[numbers] = True
        self._arrivals.append(numbers)
        self.num_received += len(numbers)

    def _in_order(self) -> Iterator[int]:
        return itertools.chain.from_iterable(numbers.tolist() for numbers in self._arrivals)

    def _names_of(self, number: int) -> set[str]:
        """Return the names under which a tensor came."""
        found = set(self._wire_names.get(number, ()))
        if self._came[number]:
            for numbers, wire_names in self._planned:
                found.update(wire_names[at] for at in np.flatnonzero(numbers == number).tolist())
        return found
