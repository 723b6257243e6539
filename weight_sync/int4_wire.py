"""INT4 weights of checkpoints, in compressed-tensors' form `pack-quantized`, read as pairs.

    X.weight_packed   int32 [R, C / 8]        eight integers a word, the first in the lowest bits, each plus 8
    X.weight_scale    bfloat16 [R, C / group] groups of 32 or 128 neighbouring elements of a row
    X.weight_shape    int64 or int32 [2]      R and C

Shapes: R output features, C input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weight_sync.errors import ContentError, CoverageError, ShapeMismatchError
from weight_sync.int4_groups import dequantise
from weight_sync.tensor_meta import LogicalWeights, Pair, TensorMeta

GROUPS = (32, 128)
_PACKED, _SCALE, _SHAPE = _PARTS = ("_packed", "_scale", "_shape")
_OF_WORD = 8
_OFFSET = 8


def part_of(meta: TensorMeta) -> str:
    """Return which of the three parts of a weight the tensor is; "" if none."""
    found = next((part for part in _PARTS if meta.name.endswith(f".weight{part}")), "")
    is_part = {
        _PACKED: meta.dtype == torch.int32,
        _SCALE: meta.dtype == torch.bfloat16,
        _SHAPE: meta.dtype in (torch.int32, torch.int64) and meta.shape == (2,),
    }
    return found if is_part.get(found, False) else ""


def value_metas(metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    """Return the tensors of a checkpoint as they will be read: each packed one under its own name, in bfloat16.

    Raises `CoverageError` for a part that is missing, `ShapeMismatchError` for parts that do not belong together.
    """
    parts: dict[str, dict[str, TensorMeta]] = {}
    values: list[TensorMeta] = []
    for meta in metas:
        part = part_of(meta)
        if not part:
            values.append(meta)
            continue
        found = parts.setdefault(_weight_name(meta.name, part), {})
        found[part] = meta
        if len(found) == len(_PARTS):
            name = _weight_name(meta.name, part)
            group_of(name, found[_PACKED].shape, found[_SCALE].shape)
            rows, words = found[_PACKED].shape
            values.append(TensorMeta(name, torch.bfloat16, (rows, words * _OF_WORD)))
    for name, found in parts.items():
        missing = [f"{name}{part}" for part in _PARTS if part not in found]
        if missing:
            raise CoverageError(f"{missing[0]} is missing, another part of {next(iter(found.values())).name}")
    return values


def group_of(name: str, packed: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """Return the elements that share a scale.  Raises `ShapeMismatchError` for shapes that are not this form's."""
    if len(packed) == len(scale) == 2 and packed[0] == scale[0] and scale[1] > 0:
        group, rest = divmod(packed[1] * _OF_WORD, scale[1])
        if rest == 0 and group in GROUPS:
            return group
    raise ShapeMismatchError(
        f"{name} is not in INT4: {_PACKED} {list(packed)} and {_SCALE} {list(scale)}, expected [R, C / 8] and "
        "[R, C / 32] or [R, C / 128]"
    )


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the integers of words int32 [R, W]: int8 [R, 8 W]."""
    bytes_RB = packed.contiguous().view(torch.uint8)  # of a word the lowest first
    halves_RB2 = torch.stack((bytes_RB & 15, bytes_RB >> 4), -1).to(torch.int8)
    return halves_RB2.flatten(1) - _OFFSET


class Int4Weights:
    """A converter of a checkpoint's tensors, in any order, to pairs.  `value_metas` has checked them."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, Pair | None]]:
        """Yield the tensor itself; for a part nothing, or if the others came before, the weight's values and pair.

        Parts that came before are kept, as they are.  Raises `ContentError` for a shape that is not that of the words.
        """
        part = part_of(TensorMeta(name, tensor.dtype, tuple(tensor.shape)))
        if not part:
            yield name, tensor, None
            return
        whole = _weight_name(name, part)
        found = self._waiting.setdefault(whole, {})
        found[part] = tensor
        if len(found) == len(_PARTS):
            del self._waiting[whole]
            yield self._weight(whole, found[_PACKED], found[_SCALE], found[_SHAPE].tolist())

    def _weight(
        self, name: str, packed: torch.Tensor, scale: torch.Tensor, shape: list[int]
    ) -> tuple[str, torch.Tensor, Pair | None]:
        rows, columns = packed.shape[0], packed.shape[1] * _OF_WORD
        if shape != [rows, columns]:
            raise ContentError(f"{name}{_SHAPE} is {shape}, but {name}{_PACKED} has {[rows, columns]}")
        pieces = self._weights.split(TensorMeta(name, torch.bfloat16, (rows, columns)))
        if not any(self._weights.places(piece.name) for piece in pieces):
            return name, torch.zeros(1, 1, dtype=torch.bfloat16).expand(rows, columns), None  # on other ranks
        pair = Pair(unpacked(packed), scale, (1, group_of(name, tuple(packed.shape), tuple(scale.shape))))
        return name, dequantise(pair, torch.bfloat16), pair


def _weight_name(name: str, part: str) -> str:
    return name.removesuffix(part)
