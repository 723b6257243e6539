"""`Manifest`: what a sender announces of an update before it sends, and what the model makes of it.

The tensors of a manifest are the same in each refresh, and only the fingerprints change.  What the tensors are to the
model (`ManifestPlan`) is worked out once for the manifests of one key.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weight_sync.content import TensorTable
from weight_sync.errors import ContentError, CoverageError, WeightRequestError, listed
from weight_sync.fingerprint import parse_fingerprint, wrong_fingerprint
from weight_sync.ledger import Numbers, WeightLedger
from weight_sync.paired_wire import parts_in, whole_metas
from weight_sync.splitting import split_wire
from weight_sync.tensor_meta import Lists, LogicalWeights, MetaParser, TensorMeta, parse_metas

_DIGITS = 16
_NOTHING, _SPLIT = -1, -2
"""Targets of a fingerprint that belongs to no logical tensor.  The model keeps nothing of it, or it is of a part such
as scales; or the model splits its tensor."""


Entries = Sequence[tuple[TensorMeta, int | None]]
"""Tensors, each with its F; None: not stated."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """Tensors that are announced, by any names the model accepts.

    `metas()` reads them; it is called if `key` is new, or None.  `fingerprints(count)` returns F, uint64 [count], and
    where it is stated, bool [count].
    """

    metas: Callable[[], Sequence[TensorMeta]]
    fingerprints: Callable[[int], tuple[np.ndarray, np.ndarray]]
    key: Hashable = None

    @classmethod
    def of(cls, entries: Entries, key: Hashable = None) -> Manifest:
        """Return the manifest of these entries.  `key`: equal for entries with the same tensors."""
        metas = [meta for meta, _ in entries]
        values = np.array([value or 0 for _, value in entries], dtype=np.uint64)
        is_stated = np.array([value is not None for _, value in entries], dtype=np.bool_)
        return cls(lambda: metas, lambda _: (values, is_stated), key)

    @classmethod
    def of_lists(cls, lists: Callable[[], Lists], fingerprints: str | None, key: Hashable = None) -> Manifest:
        """Return the manifest of lists of which `key` is a digest.

        `fingerprints`: 16 hex digits for each tensor, end to end; None: not stated.
        """

        def values(count: int) -> tuple[np.ndarray, np.ndarray]:
            if fingerprints is None:
                return np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.bool_)
            return _parsed(fingerprints, count), np.ones(count, dtype=np.bool_)

        return cls(lambda: parse_metas(*lists()), values, key)


def _parsed(fingerprints: str, count: int) -> np.ndarray:
    """Return 64-bit integers written in hex, uint64 [count].  Raises `WeightRequestError`."""
    if len(fingerprints) != _DIGITS * count:
        raise WeightRequestError(
            f"fingerprints must be {_DIGITS} hex digits for each of {count} tensors, got {len(fingerprints)} characters"
        )
    try:
        octets = binascii.unhexlify(fingerprints)
    except ValueError:
        values = [parse_fingerprint(fingerprints[at : at + _DIGITS]) for at in range(0, len(fingerprints), _DIGITS)]
        raise AssertionError(f"one of {len(values)} fingerprints is wrong") from None
    return np.frombuffer(octets, dtype=">u8").astype(np.uint64)


class StatedPart(NamedTuple):
    """A part such as scales.  `whole`: the number of its tensor, if none of the parts has that one's name."""

    name: str
    whole: int | None


class Stated:
    """The fingerprints that a sender announced: of the tensors of `table`, and of parts such as scales by name."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._is_stated = np.zeros(len(table), dtype=np.bool_)
        self._values = np.zeros(len(table), dtype=np.uint64)
        self._of_parts: dict[str, int] = {}
        self._in_parts: dict[int, str] = {}  # of a tensor with no F of its own, a part that has one

    def put_all(self, numbers: Numbers, values: np.ndarray) -> None:
        """Note F, uint64, of tensors by number.  Raises `WeightRequestError` for a tensor that has two."""
        self._is_stated[numbers] = True
        self._values[numbers] = values
        (wrong,) = (self._values[numbers] != values).nonzero()
        if len(wrong):
            raise _contradicting(self._table.names[numbers[wrong[0]]])

    def put_part(self, part: StatedPart, value: int) -> None:
        """Note F of a part.  Raises as `put_all`."""
        if self._of_parts.setdefault(part.name, value) != value:
            raise _contradicting(part.name)
        if part.whole is not None:
            self._in_parts.setdefault(part.whole, part.name)

    def get(self, name: str, default: int) -> int:
        """Return the fingerprint of a tensor or of a part; `default` where none was stated.

        Raises `ContentError` for a tensor that was to come in parts of other names.
        """
        number = self._table.number_of.get(name)
        if number is None:
            return self._of_parts.get(name, default)
        if number in self._in_parts:
            raise _in_another_form(name, name, self._in_parts[number])
        return int(self._values[number]) if self._is_stated[number] else default

    def require_form(self, name: str, sent: Mapping[str, int]) -> None:
        """Raise `ContentError` for a tensor that came in the parts `sent`, if it was to come under its own name."""
        number = self._table.number_of[name]
        if name not in sent and self._is_stated[number]:
            raise _in_another_form(name, next(iter(sent)), name)

    def require(self, numbers: Numbers, found: np.ndarray) -> None:
        """Raise `ContentError` for the first of these tensors whose F, uint64, is not the one stated, where one is.

        It is raised also for a tensor that was to come in parts.
        """
        for number in self._in_parts.keys() & numbers.tolist() if self._in_parts else ():
            name = self._table.names[number]
            raise _in_another_form(name, name, self._in_parts[number])
        (wrong,) = (self._is_stated[numbers] & (self._values[numbers] != found)).nonzero()
        if len(wrong):
            number = numbers[wrong[0]]
            raise ContentError(
                wrong_fingerprint(self._table.names[number], int(found[wrong[0]]), int(self._values[number]))
            )


def _in_another_form(name: str, came: str, announced: str) -> ContentError:
    return ContentError(f"{name} came as {came}, but the manifest states the fingerprint of {announced}")


def _contradicting(name: str) -> WeightRequestError:
    return WeightRequestError(f"manifest: {name} has two fingerprints")


@dataclass(frozen=True, eq=False)
class ManifestPlan:
    """The relation of a manifest to the model.  `announced`: the numbers of the logical tensors in its tensors.

    `names` [N] of its tensors.  `targets` [N]: the number of the logical tensor that an F is of; negative where it is
    of none.  `parts`: scales and other parts, by place in the manifest.
    """

    names: Sequence[str]
    announced: Numbers
    targets: Numbers
    parts: dict[int, StatedPart]

    @property
    def num_tensors(self) -> int:
        return len(self.names)

    def require_all(self, table: TensorTable) -> None:
        """Raise `CoverageError` unless all tensors of the model are announced."""
        if len(self.announced) < len(table):
            absent = sorted(
                table.names[number] for number in set(range(len(table))).difference(self.announced.tolist())
            )
            raise CoverageError(f"the manifest lacks {len(absent)} tensors: {listed(absent)}")

    def note(self, manifest: Manifest, stated: Stated) -> None:
        """Note the fingerprints of a manifest.

        Raises `WeightRequestError` for one of a tensor that the model splits, and for two that contradict each other.
        """
        values, is_stated = manifest.fingerprints(len(self.names))
        (split,) = (is_stated & (self.targets == _SPLIT)).nonzero()
        if len(split):
            name = self.names[split[0]]
            raise WeightRequestError(f"manifest: the model splits {name}; give fingerprints of its parts")
        (whole,) = (is_stated & (self.targets >= 0)).nonzero()
        stated.put_all(self.targets[whole], values[whole])
        for place, part in self.parts.items():
            if is_stated[place]:
                stated.put_part(part, int(values[place]))


def plan_manifest(weights: LogicalWeights, table: TensorTable, manifest: Manifest, cast: bool) -> ManifestPlan:
    """Return the plan of the manifests with these tensors.

    Raises what `split_wire` and `whole_metas` raise, and `CoverageError` for a tensor twice.
    """
    metas = manifest.metas()
    in_parts = parts_in(weights, metas)
    values = whole_metas(weights, metas, in_parts)
    split = split_wire(weights, values, cast)
    arrivals = [(meta.name, piece.name) for meta, pieces in zip(values, split, strict=True) for piece in pieces]
    if len(set(arrivals)) < len(arrivals):
        raise CoverageError(f"manifest: {listed(WeightLedger(table).refusals(arrivals))}")
    pieces_of = {meta.name: pieces for meta, pieces in zip(values, split, strict=True)}
    targets, parts = [_NOTHING] * len(metas), dict[int, StatedPart]()
    for place, meta in enumerate(metas):
        part = in_parts.get(meta) if in_parts else None
        pieces = pieces_of[meta.name if part is None else part.name]
        if not pieces:
            continue  # the model keeps nothing of it
        if len(pieces) != 1 or pieces[0].index:
            targets[place] = _SPLIT
        elif part is not None and part.suffix:
            whole = None if "" in part.kind.suffixes else table.number_of[pieces[0].name]
            parts[place] = StatedPart(pieces[0].name + part.suffix, whole)
        else:
            targets[place] = table.number_of[pieces[0].name]
    announced = np.array(sorted({table.number_of[name] for _, name in arrivals}), dtype=np.int64)
    return ManifestPlan([meta.name for meta in metas], announced, np.array(targets, dtype=np.int64), parts)


def parse_manifest(entries: Iterable[tuple[str, str, Sequence[int], str | None]]) -> Entries:
    """Parse names, dtypes, shapes and fingerprints (16 hex digits, or None).  Raises `WeightRequestError`."""
    parse = MetaParser()
    return [
        (parse(name, dtype, shape), None if stated is None else parse_fingerprint(stated))
        for name, dtype, shape, stated in entries
    ]
