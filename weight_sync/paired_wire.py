"""Quantised weights on the wire and in checkpoints: each comes as several tensors, its parts (`pair_kinds`).

Nothing downstream sees the parts: they become values, in the model's dtype, under the name of the weight (`assembly`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from weight_sync.errors import CoverageError, ShapeMismatchError, UnknownTensorError, listed
from weight_sync.pair_kinds import KINDS, PairKind, is_other_fp8, refuse_other_fp8
from weight_sync.tensor_meta import LogicalWeights, TensorMeta

_SUFFIXES = tuple(suffix for kind in KINDS for suffix in kind.suffixes if suffix)
_ELEMENTS = frozenset(kind.element for kind in KINDS)


class WirePart(NamedTuple):
    """A wire tensor that is the part with `suffix` of the weight `name`, in the form `kind`."""

    kind: PairKind
    suffix: str
    name: str

    @property
    def is_first(self) -> bool:
        """True for the part that has the elements."""
        return self.suffix == self.kind.suffixes[0]


def part_of(weights: LogicalWeights, meta: TensorMeta) -> WirePart | None:
    """Return which part of a weight a wire tensor is; None for a plain tensor.

    One that the model does not take, or keeps nothing of, counts as plain.
    """
    for kind in KINDS:
        suffix = kind.suffix_of(meta)
        if suffix is None:
            continue
        name = meta.name.removesuffix(suffix)
        if suffix == "":
            is_part = value_dtype(weights, meta) is not None
        else:
            is_part = meta.name not in weights.metas() and _keeps_some(weights, name)
        return WirePart(kind, suffix, name) if is_part else None
    return None


def parts_in(weights: LogicalWeights, metas: Iterable[TensorMeta]) -> dict[TensorMeta, WirePart]:
    """Return the tensors that are parts of weights, as `part_of` tells.

    Nearly all are none, and a call has thousands: only those are looked at that have a part's name or dtype.
    """
    some = [meta for meta in metas if meta.dtype in _ELEMENTS or meta.name.endswith(_SUFFIXES)]
    return {meta: part for meta in some if (part := part_of(weights, meta)) is not None}


def keeps(weights: LogicalWeights, meta: TensorMeta) -> bool:
    """Return whether these weights keep something of a wire tensor of this name, be it plain or a part of a weight."""
    return _keeps_some(weights, meta.name) or part_of(weights, meta) is not None


def weight_name(name: str) -> str:
    """Return the name of the weight that a tensor of this name would be a part of; else the name itself."""
    by_name = TensorMeta(name, torch.bool, ())  # of a dtype that no part has
    suffixes = (kind.suffix_of(by_name) for kind in KINDS)
    return name.removesuffix(next(filter(None, suffixes), ""))


def with_other_parts(names: Iterable[str]) -> set[str]:
    """Return these names, and the names of all parts of their weights, whether there are any or not."""
    found = set(names)
    wholes = found | set(map(weight_name, found))
    return wholes | {f"{name}{suffix}" for name in wholes for kind in KINDS for suffix in kind.suffixes}


def value_metas(
    weights: LogicalWeights, metas: Sequence[TensorMeta], parts: Mapping[TensorMeta, WirePart] | None = None
) -> list[TensorMeta]:
    """Return the wire tensors of one call as they will be put together: each quantised weight as its values.

    Of the parts of a weight, the first stands for it.  `parts`: what `parts_in` returned, if it was asked.  Raises
    `DtypeMismatchError`, `ShapeMismatchError` for parts that cannot be right.
    """
    found, parts = [], parts_in(weights, metas) if parts is None else parts
    for meta in metas:
        part = parts.get(meta) if parts else None
        if part is None:
            if is_other_fp8(meta.dtype):
                refuse_other_fp8(meta, value_dtype(weights, meta))
            found.append(meta)
            continue
        part.kind.check_part(weights, part.name, part.suffix, meta)
        if part.is_first:
            shape = part.kind.value_shape(meta)
            dtype = value_dtype(weights, TensorMeta(part.name, meta.dtype, shape)) or torch.bfloat16
            box = meta.box if shape == meta.shape else None
            found.append(TensorMeta(part.name, dtype, shape, box))
    return found


def whole_metas(
    weights: LogicalWeights, metas: Sequence[TensorMeta], parts: Mapping[TensorMeta, WirePart] | None = None
) -> list[TensorMeta]:
    """Return `value_metas` of all tensors of a checkpoint or update.

    Raises also `CoverageError` for a weight that lacks a part, or has one twice.
    """
    parts = parts_in(weights, metas) if parts is None else parts
    values = value_metas(weights, metas, parts)
    gathered: GatheredParts[TensorMeta] = GatheredParts()
    complete: list[tuple[WirePart, Mapping[str, TensorMeta]]] = []
    for meta in metas if parts else ():
        part = parts.get(meta)
        if part is not None and (own := gathered.add(part, meta, lambda kept: kept)) is not None:
            complete.append((part, own))
    gathered.settle()
    for last, all_parts in complete:
        last.kind.check_parts(last.name, all_parts)
    return values


def value_dtype(weights: LogicalWeights, meta: TensorMeta) -> torch.dtype | None:
    """Return the floating-point type in which the model holds a quantised tensor of this name and shape.

    None where it takes the tensor as it is, or not at all.
    """
    try:
        held = {weights.metas()[piece.name].dtype for piece in weights.split(meta)}
    except (UnknownTensorError, ShapeMismatchError):
        return None
    dtype = held.pop() if len(held) == 1 else meta.dtype
    return dtype if dtype.is_floating_point and dtype != meta.dtype else None


def _keeps_some(weights: LogicalWeights, name: str) -> bool:
    """Return whether the model has a weight of this name, and keeps something of it."""
    if name in weights.metas():
        return True
    try:
        return bool(weights.split(TensorMeta(name, torch.float8_e4m3fn, ())))  # of no tensor's shape
    except ShapeMismatchError:
        return True
    except UnknownTensorError:
        return False


# --- parts that wait for others ---------------------------------------------------------------------------------------

T = TypeVar("T")


class GatheredParts(Generic[T]):
    """Parts of weights, by the weight's name, until all of a weight are there."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[PairKind, dict[str, T]]] = {}
        self._whole: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Return whether a part of the weight `name` waits for another."""
        return name in self._waiting

    @property
    def is_waiting(self) -> bool:
        """True if a part waits."""
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        """The number of parts that wait."""
        return sum(len(parts) for _, parts in self._waiting.values())

    def waits_for_some(self, names: Collection[str]) -> bool:
        """Return whether a part waits of a weight that is among these names."""
        return any(name in names for name in self._waiting)

    def take_rest(self, present: Mapping[str, tuple[PairKind, Collection[str]]]) -> list[tuple[str, T]]:
        """Return the parts that wait of weights, where no part is missing then; they wait no longer.

        `present`: the kind of each weight, and the suffixes of the parts that are here.
        """
        found = []
        for name, (kind, here) in present.items():
            waiting = self._waiting.get(name)
            if waiting is None or waiting[0] is not kind or not waiting[1].keys().isdisjoint(here):
                continue
            if len(waiting[1]) + len(here) == len(kind.suffixes):
                found += [(f"{name}{suffix}", part) for suffix, part in self._waiting.pop(name)[1].items()]
        return found

    def note(self, names: Iterable[str]) -> None:
        """Note weights of which all parts came in another way."""
        self._whole.update(names)

    def found(self, name: str) -> list[str]:
        """Return the names of the parts that wait of a weight."""
        return [f"{name}{suffix}" for suffix in self._waiting[name][1]]

    def add(self, part: WirePart, value: T, kept: Callable[[T], T]) -> dict[str, T] | None:
        """Add a part; return all of its weight, by suffix in the order of their kind, if it was the last one.

        Of any other, `kept` gives what is kept of it.  Raises `CoverageError` for a part that came before, or in
        another kind.
        """
        kind, parts = self._waiting.get(part.name, (part.kind, {}))
        if kind is not part.kind:
            raise CoverageError(
                f"{part.name}{part.suffix} is part of a weight in {part.kind.label}, but {self.found(part.name)[0]} "
                f"came, which is in {kind.label}"
            )
        if part.name in self._whole or part.suffix in parts:
            raise CoverageError(f"{part.name}{part.suffix} came twice")
        if len(parts) + 1 < len(kind.suffixes):
            parts[part.suffix] = kept(value)
            self._waiting[part.name] = kind, parts
            return None
        del self._waiting[part.name]
        self._whole.add(part.name)
        parts[part.suffix] = value
        return {suffix: parts[suffix] for suffix in kind.suffixes}

    def settle(self) -> None:
        """Raise `CoverageError` for the weights that lack a part; it names them."""
        if self._waiting:
            errors = (kind.missing(name, parts) for name, (kind, parts) in self._waiting.items())
            raise CoverageError(listed(sorted(map(str, errors))))

    def clear(self) -> None:
        """Release what waits."""
        self._waiting.clear()
