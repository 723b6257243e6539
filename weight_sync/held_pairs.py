"""Pairs that are held as they came, and pieces of them."""

from __future__ import annotations

from dataclasses import replace

from weight_sync.errors import ContentError
from weight_sync.fp8_blocks import BLOCK, scales_of
from weight_sync.held_format import HeldFormat
from weight_sync.int4_groups import regrouped
from weight_sync.tensor_meta import Pair, Piece

_SCALES_BELOW = 2.0**120


def kept_pair(piece: Piece, wire_name: str, pair: Pair | None, held: HeldFormat | None) -> Pair | None:
    """Return the piece of the pair of a wire tensor, where that is held as it came; else None.

    Raises `ContentError` for blocks that the piece cuts, and for scales that the kernels do not take.
    """
    if pair is None or held is None or not held.keeps(pair):
        return None
    if pair.block[1] % held.block[1]:
        raise ContentError(
            f"{piece.name} has groups of {pair.block[1]}, but {held.flag} holds groups of {held.block[1]}"
        )
    if pair.block != held.block:  # so that a rank's shard cuts no group
        pair = regrouped(pair, held.block[1])
    if piece == Piece(piece.name):
        return _with_scales_that_fit(pair, piece.name, held)
    spans = (*piece.index, *[slice(None)] * (pair.weight.dim() - len(piece.index)))[-2:]
    for span, size in zip(spans, pair.weight.shape[-2:], strict=True):
        rows = range(size)[span] if isinstance(span, slice) else range(0)
        if not (size <= BLOCK or (rows.step == 1 and rows.start % BLOCK == 0)):
            raise ContentError(
                f"{piece.name} begins inside a block of {wire_name}: {held.flag} holds whole blocks. "
                "Send each expert's matrices by themselves."
            )
    return _with_scales_that_fit(piece_of(piece, pair), piece.name, held)


def _with_scales_that_fit(pair: Pair, name: str, held: HeldFormat) -> Pair:
    if bool((pair.scale.float() >= _SCALES_BELOW).any()):
        raise ContentError(f"{name} has a scale of 2**120 or more, which {held.flag} does not hold")
    return pair


def piece_of(piece: Piece, pair: Pair) -> Pair:
    """Return the piece of both halves of an FP8 pair; of scales one for every block that the piece touches.

    No model splits a matrix that comes in another kind.
    """
    assert pair.block == (BLOCK, BLOCK), piece
    of_scale = replace(piece, index=scales_of(piece.index, pair.weight.shape))
    return Pair(piece.of(pair.weight), of_scale.of(pair.scale), pair.block)
