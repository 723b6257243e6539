"""From wire tensors to the logical tensors inside them: what a sender may call a tensor, and in which dtype it comes.

A tensor of another dtype than the model's is cast: always where that loses nothing, else only where its sender asks for
it, or where a checkpoint is read.  What is wrong with the tensors of a call is one short error, however many they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weight_sync.errors import (
    SHOWN,
    DtypeMismatchError,
    ShapeMismatchError,
    UnknownTensorError,
    WeightRequestError,
    shown,
    unquoted,
)
from weight_sync.paired_wire import weight_name
from weight_sync.tensor_meta import LogicalWeights, Piece, TensorMeta, dtype_name

Announced = Mapping[TensorMeta, list[Piece]]
"""Wire tensors that were split before, and checked."""
_WIDER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
CAST_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Between which a cast can be asked for.  Eight bits have no meaning without their scales."""
_ADVICE = '; send the model\'s dtype, or ask for the cast ("cast": true, or --cast-weight-updates)'


def split_wire(
    weights: LogicalWeights, metas: Sequence[TensorMeta], cast: bool, announced: Announced | None = None
) -> list[list[Piece]]:
    """Return the logical tensors inside each wire tensor; the tensors `announced` before are not checked again.

    A tensor of another dtype than the model's is taken where a cast loses nothing, and with `cast` where both are
    floating-point types.

    Raises one error that states how many tensors are wrong, and shows the first: `UnknownTensorError`,
    `ShapeMismatchError`, `DtypeMismatchError`, or `WeightRequestError` for more than one kind.
    """
    expected = weights.metas()
    problems = _Problems(weights)
    split: list[list[Piece]] = []
    for meta in metas:
        if announced is not None and meta in announced:
            split.append(announced[meta])
            continue
        try:
            pieces = weights.split(meta)
        except (UnknownTensorError, ShapeMismatchError) as error:
            problems.add(meta, _part_error(meta, error))
            continue
        for dtype in {held for piece in pieces if (held := expected[piece.name].dtype) != meta.dtype}:
            if not (is_exact_cast(meta.dtype, dtype) or (cast and _is_float_cast(meta, dtype))):
                problems.add(meta, DtypeMismatchError(_other_dtype(meta, dtype)))
        split.append(pieces)
    problems.settle()
    return split


class _Problems:
    """The errors of the tensors of a call: all are counted, and the first of each kind are kept."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights
        self._counts: dict[type[WeightRequestError], int] = {}
        self._first: dict[type[WeightRequestError], list[tuple[TensorMeta, WeightRequestError]]] = {}

    def add(self, meta: TensorMeta, error: WeightRequestError) -> None:
        kind = type(error)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        first = self._first.setdefault(kind, [])
        if len(first) < SHOWN:
            first.append((meta, error))

    def settle(self) -> None:
        """Raise one error for all problems, if there are any."""
        if not self._counts:
            return
        kind = next(iter(self._counts)) if len(self._counts) == 1 else WeightRequestError
        raise kind("; ".join(self._described(each) for each in self._counts))

    def _described(self, kind: type[WeightRequestError]) -> str:
        count, first = self._counts[kind], self._first[kind]
        if kind is DtypeMismatchError:  # mostly of all in the same way
            first = first[:1]
        texts = [str(error) + self._hint(meta, error) for meta, error in first]
        if count == 1:
            return texts[0]
        more = f"; and {count - len(texts)} more" if count > len(texts) else ""
        return f"{count} tensors are refused: {'; '.join(texts)}{more}"

    def _hint(self, meta: TensorMeta, error: WeightRequestError) -> str:
        """Return what the sender may have meant, or what it can do."""
        if isinstance(error, DtypeMismatchError):
            return _ADVICE if meta.dtype in CAST_DTYPES else ""
        if not isinstance(error, UnknownTensorError) or error.name is None:
            return ""
        near = self._weights.nearest(error.name)
        return "" if near is None else f"; the nearest that it has is {near!r}"


def _part_error(meta: TensorMeta, error: WeightRequestError) -> WeightRequestError:
    """Return the error; of scales and other parts it is their weight that the model does not have."""
    name = weight_name(meta.name)
    if not isinstance(error, UnknownTensorError) or name == meta.name:
        return error
    return UnknownTensorError(
        f"{unquoted(meta.name)} has no matching weight: the model has no tensor {shown(name)}", name
    )


def _other_dtype(meta: TensorMeta, dtype: torch.dtype) -> str:
    return f"{unquoted(meta.name)}: the model has {dtype_name(dtype)}, got {dtype_name(meta.dtype)}"


def is_exact_cast(sent: torch.dtype, held: torch.dtype) -> bool:
    """Return whether every value of `sent` is one of `held`."""
    return held in _WIDER.get(sent, ())


def _is_float_cast(meta: TensorMeta, dtype: torch.dtype) -> bool:
    return meta.dtype in CAST_DTYPES and dtype in CAST_DTYPES
