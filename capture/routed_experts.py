"""`RoutedExperts`: which logical experts the router chose, per token and MoE layer.  And the dtypes of their ids.

Shapes: T rows, L MoE layers, K top-k.  Row i belongs to the forward that consumed token `start + i`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from capture.errors import RouteValueError

VersionSpan = tuple[str, int, int]

MAX_EXPERTS = int(np.iinfo(np.uint16).max)


def narrowest_dtype(num_ids: int, *, for_torch: bool = False) -> np.dtype:
    """Return the narrowest type that holds ids below `num_ids`: an unsigned one; `for_torch`: uint8 or a signed one."""
    if for_torch and num_ids > 1 << 8:  # torch has few kernels for uint16
        return np.dtype(np.int16 if num_ids <= 1 << 15 else np.int32)
    return np.min_scalar_type(max(0, num_ids - 1))


@lru_cache(maxsize=64)
def id_dtype(num_experts: int) -> np.dtype:
    """Return the narrowest unsigned dtype that holds the expert count, so that its maximum is free to mean MISSING.

    Raises `RouteValueError` outside 1..65535 experts.
    """
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise RouteValueError(f"the number of experts must be in 1..{MAX_EXPERTS}, got {num_experts}")
    return narrowest_dtype(num_experts + 1)


@lru_cache(maxsize=64)
def missing_id(num_experts: int) -> int:
    """Return the value that fills a row which was never recorded: the maximum of `id_dtype(num_experts)`."""
    return int(np.iinfo(id_dtype(num_experts)).max)


def checked_missing_rows(ids_TLK: np.ndarray, num_experts: int, missing: int) -> np.ndarray:
    """Return bool [T], true where a row is MISSING; raise `RouteValueError` if any row breaks the rules.

    The rules: a row is wholly `missing` or wholly valid; valid ids are in [0, num_experts) and no layer of a row names
    an expert twice.  `ids_TLK` may have any integer dtype.
    """
    missing_T: np.ndarray = np.zeros(ids_TLK.shape[0], dtype=bool)
    valid_NLK, (low, high) = ids_TLK, _bounds(ids_TLK)
    if low <= missing <= high:  # seldom, and looking at each row takes ten times as long
        is_missing_TLK = ids_TLK == missing
        missing_T = is_missing_TLK.all(axis=(1, 2))
        partial_T = is_missing_TLK.any(axis=(1, 2)) & ~missing_T
        if partial_T.any():
            raise RouteValueError(f"row {int(partial_T.argmax())} is partly missing; a row must be whole or missing")
        valid_NLK = ids_TLK[~missing_T]
        low, high = _bounds(valid_NLK)
    if valid_NLK.size == 0:
        return missing_T
    if low < 0 or high >= num_experts:
        raise RouteValueError(f"expert ids span {valid_NLK.min()}..{high}, outside 0..{num_experts - 1}")
    # K first makes each comparison one pass over contiguous memory: several times faster than sorting tiny rows.
    by_choice = np.ascontiguousarray(valid_NLK.transpose(2, 0, 1))
    for shift in range(1, by_choice.shape[0]):
        if (by_choice[shift:] == by_choice[:-shift]).any():
            raise RouteValueError("a row names the same expert twice in one layer")
    return missing_T


def _bounds(ids: np.ndarray) -> tuple[int, int]:
    """Return two numbers between which all ids are, the second of them an id; unsigned ones are 0 or more."""
    if ids.size == 0:
        return 0, -1
    return 0 if ids.dtype.kind == "u" else int(ids.min()), int(ids.max())


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Frozen rows of logical expert ids; every row is wholly valid or wholly MISSING (checked once, here).

    `logical_ids_TLK`   [T, L, K] of `id_dtype(num_experts)`; the object holds a read-only view of it.
    `moe_layer_ids`     for each of the L MoE layers its index among the `num_hidden_layers` hidden layers, ascending.
    `start`             token position of row 0.
    `weight_versions`   (version, first row, end row), half-open, ascending, disjoint: which weights computed the rows.

    Raises `RouteValueError` for anything that no model can have produced.
    """

    logical_ids_TLK: np.ndarray
    num_experts: int
    moe_layer_ids: tuple[int, ...]
    num_hidden_layers: int
    start: int = 0
    weight_versions: tuple[VersionSpan, ...] = ()
    _missing_T: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ids_TLK = np.asarray(self.logical_ids_TLK).view()
        ids_TLK.flags.writeable = False
        missing_T = self._check(ids_TLK)
        missing_T.flags.writeable = False
        object.__setattr__(self, "logical_ids_TLK", ids_TLK)
        object.__setattr__(self, "moe_layer_ids", tuple(self.moe_layer_ids))
        object.__setattr__(self, "weight_versions", tuple((v, a, b) for v, a, b in self.weight_versions))
        object.__setattr__(self, "_missing_T", missing_T)

    def _check(self, ids_TLK: np.ndarray) -> np.ndarray:
        dtype = id_dtype(self.num_experts)
        if ids_TLK.dtype != dtype or ids_TLK.ndim != 3:
            raise RouteValueError(
                f"expected {dtype} [T, L, K] for {self.num_experts} experts, got {ids_TLK.dtype} {ids_TLK.shape}"
            )
        num_rows, num_moe_layers, top_k = ids_TLK.shape
        if num_moe_layers < 1 or not 1 <= top_k <= self.num_experts:
            raise RouteValueError(f"{num_moe_layers} MoE layers with top-{top_k} of {self.num_experts} experts")
        if self.start < 0:
            raise RouteValueError(f"start must be at least 0, got {self.start}")
        _check_layers(self.moe_layer_ids, num_moe_layers, self.num_hidden_layers)
        _check_spans(self.weight_versions, num_rows)
        return checked_missing_rows(ids_TLK, self.num_experts, missing_id(self.num_experts))

    def __len__(self) -> int:
        num_rows: int = self.logical_ids_TLK.shape[0]
        return num_rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return self._facts() == other._facts() and np.array_equal(self.logical_ids_TLK, other.logical_ids_TLK)

    def _facts(self) -> tuple[int, tuple[int, ...], int, int, tuple[VersionSpan, ...]]:
        return self.num_experts, self.moe_layer_ids, self.num_hidden_layers, self.start, self.weight_versions

    @property
    def num_moe_layers(self) -> int:
        """The number of layers with experts."""
        num_layers: int = self.logical_ids_TLK.shape[1]
        return num_layers

    @property
    def top_k(self) -> int:
        """The number of experts of a token in a layer."""
        top_k: int = self.logical_ids_TLK.shape[2]
        return top_k

    def missing_rows(self) -> np.ndarray:
        """Return the indices of the rows that are MISSING, int64 [M], ascending."""
        return np.flatnonzero(self._missing_T)

    @property
    def complete(self) -> bool:
        """True if no row is MISSING."""
        return not self._missing_T.any()

    def signed_ids(self) -> np.ndarray:
        """Return a copy as int64 [T, L, K] in which MISSING rows are -1: trainers index with this form."""
        ids_TLK = self.logical_ids_TLK.astype(np.int64)
        ids_TLK[self._missing_T] = -1
        return ids_TLK

    def rows(self, first: int, end: int) -> RoutedExperts:
        """Return rows `first .. end - 1` (row indices, not token positions) with their spans, as views of this memory.

        Raises `RouteValueError` if the range leaves `0 .. len(self)`.
        """
        if not 0 <= first <= end <= len(self):
            raise RouteValueError(f"rows {first}..{end} are outside a record of {len(self)} rows")
        spans = [(v, max(a, first) - first, min(b, end) - first) for v, a, b in self.weight_versions]
        return RoutedExperts(
            self.logical_ids_TLK[first:end],
            self.num_experts,
            self.moe_layer_ids,
            self.num_hidden_layers,
            self.start + first,
            tuple((v, a, b) for v, a, b in spans if a < b),
        )


def add_spans(spans: list[VersionSpan], more: Iterable[VersionSpan], rows: int) -> None:
    """Append spans whose row 0 is row `rows` of `spans`.  One that goes on with the last version extends it."""
    for version, begin, end in more:
        if spans and spans[-1][0] == version and spans[-1][2] == begin + rows:
            spans[-1] = (version, spans[-1][1], end + rows)
        else:
            spans.append((version, begin + rows, end + rows))


def concat(parts: Sequence[RoutedExperts]) -> RoutedExperts:
    """Join records of consecutive token ranges of one model to one record; adjoining spans of one version are merged.

    Raises `RouteValueError` for no parts, different models, or a gap or an overlap between the ranges.
    """
    if not parts:
        raise RouteValueError("there are no records to concatenate")
    first = parts[0]
    spans: list[VersionSpan] = []
    rows = 0
    for part in parts:
        if (part.num_experts, part.moe_layer_ids, part.num_hidden_layers, part.top_k) != (
            first.num_experts,
            first.moe_layer_ids,
            first.num_hidden_layers,
            first.top_k,
        ):
            raise RouteValueError("the records come from different models")
        if part.start != first.start + rows:
            raise RouteValueError(f"a record starts at token {part.start}, expected {first.start + rows}")
        add_spans(spans, part.weight_versions, rows)
        rows += len(part)
    ids_TLK = np.concatenate([part.logical_ids_TLK for part in parts])
    return RoutedExperts(
        ids_TLK, first.num_experts, first.moe_layer_ids, first.num_hidden_layers, first.start, tuple(spans)
    )


def _check_layers(moe_layer_ids: Sequence[int], num_moe_layers: int, num_hidden_layers: int) -> None:
    ascending = all(a < b for a, b in pairwise(moe_layer_ids))
    if len(moe_layer_ids) != num_moe_layers or not ascending:
        raise RouteValueError(f"{num_moe_layers} MoE layers cannot have the hidden layer indices {moe_layer_ids}")
    if moe_layer_ids[0] < 0 or moe_layer_ids[-1] >= num_hidden_layers:
        raise RouteValueError(f"MoE layer indices {moe_layer_ids} are not in a model of {num_hidden_layers} layers")


def _check_spans(spans: Sequence[VersionSpan], num_rows: int) -> None:
    reached = 0
    for version, first, end in spans:
        if not reached <= first < end <= num_rows:
            raise RouteValueError(
                f"version span ({version!r}, {first}, {end}) is out of order or exceeds {num_rows} rows"
            )
        reached = end
