"""`WeightLedger`: which logical tensors of one load or one refresh came, and under which names.

Tensors have numbers, by their place in the model's list of them.  A bucket that was planned (`plan`) is recorded as an
array of numbers, whatever its length.

A tensor may come in boxes: it came once they have as many elements as it has, and at the end no two may overlap.

Shapes: P boxes of a bucket.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weight_sync.boxes import Box, box_text, first_gap, overlapping
from weight_sync.errors import CoverageError, listed

Coverage = Literal["full", "partial"]
Numbers = npt.NDArray[np.int64]
"""Numbers of logical tensors."""
_LOOK_AT = 256
"""The number of tensors that are looked at together, for the first that are missing."""


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


@dataclass(frozen=True, eq=False)
class PlannedBoxes:
    """The boxes of one bucket: `boxes` of the tensors `numbers`, which came under `wire_names`.

    `edges` int64 [P, 4]: first and last row, first and last column, each last one plus 1, of the tensor as a matrix.
    `numels` [P]: of the whole tensors.  `forms` [P]: equal for boxes of one wire name and dtype.
    """

    numbers: Numbers
    names: Sequence[str]
    wire_names: Sequence[str]
    boxes: Sequence[Box]
    shapes: Sequence[tuple[int, ...]]
    edges: Numbers
    numels: Numbers
    forms: Numbers

    @property
    def counts(self) -> Numbers:
        """The elements of each box."""
        return (self.edges[:, 1] - self.edges[:, 0]) * (self.edges[:, 3] - self.edges[:, 2])


class BoxLedger:
    """The boxes of logical tensors that came, where plans take them.  `count`: of logical tensors."""

    def __init__(self, count: int) -> None:
        self._num_elements = np.zeros(count, dtype=np.int64)
        self._forms = np.zeros(count, dtype=np.int64)
        self._taken: list[PlannedBoxes] = []

    def has_some(self, numbers: Numbers) -> bool:
        """Return whether a box of any of these tensors came."""
        return bool(self._taken) and bool(self._num_elements[numbers].any())

    def has_one(self, number: int) -> bool:
        """Return whether a box of this tensor came."""
        return bool(self._taken) and bool(self._num_elements[number])

    def record(self, planned: PlannedBoxes) -> Numbers:
        """Note boxes; return the numbers of the tensors of which all came by now.

        Raises `CoverageError` for boxes of one tensor under two names or in two dtypes, or with too many elements.
        """
        numbers = planned.numbers
        is_new = self._num_elements[numbers] == 0
        self._forms[numbers[is_new]] = planned.forms[is_new]
        (other,) = (self._forms[numbers] != planned.forms).nonzero()
        if len(other):
            name, wire_name = planned.names[other[0]], planned.wire_names[other[0]]
            raise CoverageError(
                f"{name}: its boxes come under two names, or in two dtypes; the last one as {wire_name}"
            )
        np.add.at(self._num_elements, numbers, planned.counts)
        self._taken.append(planned)
        came = self._num_elements[numbers]
        (more,) = (came > planned.numels).nonzero()
        if len(more):
            raise self._overlap(int(numbers[more[0]]))
        return np.unique(numbers[came == planned.numels])

    def settle(self) -> None:
        """Raise `CoverageError` for two boxes of a tensor that overlap, and for a tensor of which a box is missing."""
        if not self._taken:
            return
        numbers = np.concatenate([planned.numbers for planned in self._taken])
        edges = np.concatenate([planned.edges for planned in self._taken])
        numels = np.concatenate([planned.numels for planned in self._taken])
        order = np.argsort(numbers, kind="stable")
        numbers, edges = numbers[order], edges[order]
        for distance in range(1, len(numbers)):
            same = numbers[:-distance] == numbers[distance:]
            if not same.any():
                break
            one, other = edges[:-distance], edges[distance:]
            starts, ends = np.maximum(one[:, ::2], other[:, ::2]), np.minimum(one[:, 1::2], other[:, 1::2])
            (both,) = (same & (starts < ends).all(1)).nonzero()
            if len(both):
                raise self._overlap(int(numbers[both[0]]))
        (short,) = (self._num_elements[numbers] < numels[order]).nonzero()
        if len(short):
            incomplete = np.unique(numbers[short])
            raise CoverageError(f"{len(incomplete)} tensors came in part: {self._gap(int(incomplete[0]))}")

    def _overlap(self, number: int) -> CoverageError:
        name, _, boxes = self._boxes_of(number)
        one, other = overlapping(boxes) or (boxes[0], boxes[-1])
        return CoverageError(f"{name}: the boxes {box_text(one)} and {box_text(other)} overlap")

    def _gap(self, number: int) -> str:
        name, shape, boxes = self._boxes_of(number)
        return f"{name} lacks {box_text(first_gap(shape, boxes) or ())}"

    def _boxes_of(self, number: int) -> tuple[str, tuple[int, ...], list[Box]]:
        """Return the name and shape of a tensor, and the boxes of it that came."""
        name, shape, boxes = "", tuple[int, ...](), list[Box]()
        for planned in self._taken:
            for place in np.flatnonzero(planned.numbers == number).tolist():
                name, shape = planned.names[place], planned.shapes[place]
                boxes.append(planned.boxes[place])
        return name, shape, boxes


class WeightLedger:
    """Arrivals of one load or one refresh.

    `tensors`: all that may come, by number or name.  `expected`: the ones that are announced; None: all of them.
    `coverage="full"`: all of these must come.  `"partial"`: what came is the subset, and may be empty.  `kept`, bool
    [T]: the tensors that must come on this rank, if they are announced; None: all.  `sizes` [T]: their bytes.

    Counts and first names cost as much for many tensors as for few: between two steps an engine asks for them.
    """

    def __init__(
        self,
        tensors: TensorNumbers | Iterable[str],
        coverage: Coverage = "full",
        expected: Numbers | None = None,
        kept: npt.NDArray[np.bool_] | None = None,
        sizes: Numbers | None = None,
    ) -> None:
        self.coverage = coverage
        self.numbers = tensors if isinstance(tensors, TensorNumbers) else TensorNumbers(tensors)
        self._is_expected = np.full(len(self.numbers), expected is None, dtype=np.bool_)
        if expected is not None:
            self._is_expected[expected] = True
        self._is_due = self._is_expected if kept is None else self._is_expected & kept
        self._came = np.zeros(len(self.numbers), dtype=np.bool_)
        self._arrivals: list[Numbers] = []
        self._planned: list[tuple[Numbers, Sequence[str]]] = []
        self._wire_names: dict[int, set[str]] = {}  # names under which tensors came, outside of plans
        self._boxes = BoxLedger(len(self.numbers))
        self._sizes = np.zeros(len(self.numbers), dtype=np.int64) if sizes is None else sizes
        self._missing_first = np.zeros(0, dtype=np.int64)  # of the first `_looked_at` by name; some may have come
        self._looked_at = 0
        self.num_received = 0
        self.num_bytes = 0  # of tensors that came
        self.num_missing = int(np.count_nonzero(self._is_due))  # tensors that must come here, and have not

    def __contains__(self, logical_name: str) -> bool:
        """Return whether the tensor came."""
        number = self.numbers.number_of.get(logical_name)
        return number is not None and bool(self._came[number])

    @property
    def received(self) -> list[str]:
        """Logical names in order of first arrival."""
        return list(map(self.numbers.names.__getitem__, self._in_order()))

    @property
    def missing(self) -> list[str]:
        """Logical names of tensors that must come here and have not, sorted."""
        order = self.numbers.by_name
        return [self.numbers.names[number] for number in order[self._is_missing(order)]]

    def first_received(self, count: int) -> list[str]:
        """Return the first names of `received`."""
        first = itertools.chain.from_iterable(numbers[:count].tolist() for numbers in self._arrivals)
        return [self.numbers.names[number] for number in itertools.islice(first, count)]

    def first_missing(self, count: int) -> list[str]:
        """Return the first names of `missing`."""
        order, found = self.numbers.by_name, self._missing_first
        found = found[self._is_missing(found)]
        while len(found) < count and self._looked_at < len(order):
            part = order[self._looked_at : self._looked_at + _LOOK_AT]
            found = np.concatenate([found, part[self._is_missing(part)]])
            self._looked_at += _LOOK_AT
        self._missing_first = found
        return [self.numbers.names[number] for number in found[:count]]

    def is_clear(self, numbers: Numbers) -> bool:
        """Return whether all these tensors are expected, and none came, nor a box of one."""
        is_free = self._is_expected[numbers].all() and not self._came[numbers].any()
        return bool(is_free) and not self._boxes.has_some(numbers)

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
            elif not self._came[number] and self._boxes.has_one(number):
                problems.append(f"{logical_name} came whole, as {wire_name}, while boxes of it come")
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

    def record_boxes(self, planned: PlannedBoxes | None) -> Numbers:
        """Note the boxes of a planned bucket, if it has any; return the numbers of the tensors that came by it.

        Raises `CoverageError` for a box of a tensor that was not announced or came, and as `BoxLedger.record`.
        """
        if planned is None:
            return np.zeros(0, dtype=np.int64)
        numbers = planned.numbers
        (wrong,) = (~self._is_expected[numbers] | self._came[numbers]).nonzero()
        if len(wrong):
            name, wire_name = planned.names[wrong[0]], planned.wire_names[wrong[0]]
            if self._came[numbers[wrong[0]]]:
                raise CoverageError(f"{name} came twice: a box of it comes, as {wire_name}, after all of it")
            raise CoverageError(f"{name} was not announced")
        complete = self._boxes.record(planned)
        self._planned.append((numbers, planned.wire_names))
        self._note(complete)
        return complete

    def record_elsewhere(self, numbers: Numbers) -> None:
        """Note tensors that came on any rank."""
        self._note(numbers[~self._came[numbers]])

    def settle(self) -> None:
        """Raise `CoverageError` if something is missing, and as `BoxLedger.settle`."""
        self._boxes.settle()
        if self.coverage == "full" and self.num_missing:
            raise CoverageError(
                f"{self.num_missing} of {np.count_nonzero(self._is_due)} tensors missing: {listed(self.missing)}"
            )

    def _is_missing(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        return self._is_due[numbers] & ~self._came[numbers]

    def _note(self, numbers: Numbers) -> None:
        self.num_missing -= int(np.count_nonzero(self._is_missing(numbers)))
        self.num_bytes += int(self._sizes[numbers].sum())
        self.num_received += len(numbers)
        self._came[numbers] = True
        if len(numbers):
            self._arrivals.append(numbers)

    def _in_order(self) -> Iterator[int]:
        return itertools.chain.from_iterable(numbers.tolist() for numbers in self._arrivals)

    def _names_of(self, number: int) -> set[str]:
        """Return the names under which a tensor came."""
        found = set(self._wire_names.get(number, ()))
        if self._came[number]:
            for numbers, wire_names in self._planned:
                found.update(wire_names[at] for at in np.flatnonzero(numbers == number).tolist())
        return found
