"""MXFP4 weights of experts in checkpoints of GPT-OSS, read as their values.

    experts.gate_up_proj_blocks    uint8 [E, R, C / 32, 16]    two elements a byte, the first in the low half
    experts.gate_up_proj_scales    uint8 [E, R, C / 32]        of 32 elements: 2 ** (scale - 127)

are `experts.gate_up_proj` [E, C, R] in the interleaved layout of `fused_experts`; `down_proj` likewise.  Elements are
E2M1, scales E8M0 (OCP Microscaling Formats 1.0): a sign, two bits of exponent and one of mantissa; a power of two, of
which 255 is no number.  Every value is one of bfloat16 as well.

Shapes: E logical experts, R output features, C input features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from weight_sync.errors import ContentError, CoverageError, ShapeMismatchError
from weight_sync.fused_experts import fused_pieces, is_fused
from weight_sync.tensor_meta import LogicalWeights, Piece, TensorMeta

BLOCK = 32
_HALVES = ("_blocks", "_scales")
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_mxfp4(meta: TensorMeta) -> bool:
    """Return whether the tensor is half of a quantised fused tensor."""
    return meta.dtype == torch.uint8 and meta.name.endswith(_HALVES) and is_fused(_whole_name(meta.name))


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [..., C / 32, 16] and uint8 [..., C / 32] to bfloat16 [..., C].  NaN where a scale is 255."""
    pairs = scales.to(torch.int32).mul_(256).unsqueeze(-1) + blocks
    values = _pairs_of_values().index_select(0, pairs.flatten()).view(torch.bfloat16)
    return values.view(*blocks.shape[:-2], -1)


@functools.cache
def _pairs_of_values() -> torch.Tensor:
    """Return both values of every byte under every scale: two bfloat16 as one int32, at scale * 256 + byte."""
    halves = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), dtype=torch.float64)
    numbers = torch.arange(256)
    of_byte = torch.stack((halves[numbers % 16], halves[numbers // 16]), -1)
    powers = torch.pow(2.0, numbers.double() - 127)
    powers[255] = torch.nan
    return (powers[:, None, None] * of_byte).to(torch.bfloat16).view(-1, 2).view(torch.int32).flatten()


def value_metas(metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    """Return the tensors of a checkpoint as they will be read: each quantised one under its own name, in bfloat16.

    Raises `CoverageError` for half of one, `ShapeMismatchError` for halves that do not belong together.
    """
    halves: dict[str, dict[str, TensorMeta]] = {}
    values: list[TensorMeta] = []
    for meta in metas:
        if not is_mxfp4(meta):
            values.append(meta)
            continue
        name, half = _whole_name(meta.name), meta.name[-len(_HALVES[0]) :]
        found = halves.setdefault(name, {})
        found[half] = meta
        if len(found) == len(_HALVES):
            values.append(_value_meta(name, *(found[half].shape for half in _HALVES)))
    for name, found in halves.items():
        missing = [f"{name}{half}" for half in _HALVES if half not in found]
        if missing:
            raise CoverageError(f"{missing[0]} is missing, the other half of {next(iter(found.values())).name}")
    return values


def _value_meta(name: str, blocks: tuple[int, ...], scales: tuple[int, ...]) -> TensorMeta:
    if len(blocks) != 4 or blocks[:-1] != scales or 2 * blocks[-1] != BLOCK:
        raise ShapeMismatchError(
            f"{name} is not in MXFP4: blocks {list(blocks)} and scales {list(scales)}, expected [E, R, C / 32, 16] and "
            "[E, R, C / 32]"
        )
    return TensorMeta(name, torch.bfloat16, (blocks[0], blocks[2] * BLOCK, blocks[1]))


class Mxfp4Experts:
    """A converter of a checkpoint's tensors, in any order, to the tensors that `weights` takes.

    `value_metas` has checked them.
    """

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights
        self._waiting: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensor itself; for a half nothing, or if the other came before, the tensors of each expert.

        The half that came first is kept, as it is.  Raises `ContentError` for values that are not finite.
        """
        if not is_mxfp4(TensorMeta(name, tensor.dtype, tuple(tensor.shape))):
            yield name, tensor
            return
        whole = _whole_name(name)
        other = self._waiting.pop(whole, None)
        if other is None:
            self._waiting[whole] = tensor
            return
        blocks, scales = (other, tensor) if name.endswith("_scales") else (tensor, other)
        shape = _value_meta(whole, tuple(blocks.shape), tuple(scales.shape)).shape
        pieces = fused_pieces(whole, shape, "interleaved")
        each = len(pieces) // len(blocks)
        for first in range(0, len(pieces), each):
            yield from self._of_expert(pieces[first : first + each], blocks[first // each], scales[first // each])

    def _of_expert(
        self, pieces: Sequence[Piece], blocks: torch.Tensor, scales: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if any(self._weights.places(piece.name) for piece in pieces):
            values = dequantise(blocks, scales)
        else:  # on other ranks: only its shape is of use here
            values = torch.empty(len(blocks), scales.shape[-1] * BLOCK, dtype=torch.bfloat16, device="meta")
        if values.device.type != "meta" and not bool(values.isfinite().all()):
            raise ContentError(f"values that are not finite in {', '.join(piece.name for piece in pieces)}")
        for piece in pieces:
            yield piece.name, Piece(piece.name, piece.index[1:], piece.transposed).of(values.mT)


def _whole_name(name: str) -> str:
    return name[: -len(_HALVES[0])]
