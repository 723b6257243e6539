"""Fused expert tensors: one of each kind holds a projection of all experts of a layer, as well as the per-expert names.

    layout         gate_up_proj                               down_proj    gate_up_proj_bias, down_proj_bias
    rows           [E, 2I, D], gate rows first                [E, D, I]    none
    interleaved    [E, D, 2I], gate and up columns in turn    [E, I, D]    [E, 2I], [E, D]

The first is transformers 5's for most families, the second its GPT-OSS.

Shapes: E logical experts, I expert width, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from weight_sync.errors import ShapeMismatchError
from weight_sync.tensor_meta import Index, Piece

FusedLayout = Literal["rows", "interleaved"]

_DIMENSIONS = {"gate_up_proj": 3, "down_proj": 3, "gate_up_proj_bias": 2, "down_proj_bias": 2}
_BIASES = ("gate_up_proj_bias", "down_proj_bias")


def is_fused(name: str) -> bool:
    """Return whether `name` is the name of a fused expert tensor."""
    prefix, _, kind = name.rpartition(".")
    return prefix.endswith("experts") and kind in _DIMENSIONS


def layout_of(name: str, names: Collection[str]) -> FusedLayout:
    """Return the layout of fused tensor `name`, that came with `names`: of the two, one has biases."""
    prefix = name.rpartition(".")[0]
    return "interleaved" if any(f"{prefix}.{kind}" in names for kind in _BIASES) else "rows"


def fused_pieces(name: str, shape: Sequence[int], layout: FusedLayout) -> list[Piece]:
    """Return the per-expert tensors inside a fused one, expert by expert.

    `*.experts.gate_up_proj` gives `*.experts.{e}.gate_proj.weight` [I, D] and `.up_proj.weight`, `*.experts.down_proj`
    `*.experts.{e}.down_proj.weight` [D, I], and their biases `.bias`.  Raises `ShapeMismatchError`.
    """
    prefix, _, kind = name.rpartition(".")
    transposed = layout == "interleaved" and kind not in _BIASES
    both = shape[-1 if layout == "interleaved" else 1] if len(shape) == _DIMENSIONS[kind] else 1
    if len(shape) != _DIMENSIONS[kind] or (kind.startswith("gate_up") and both % 2):
        raise ShapeMismatchError(f"{name}: not a fused expert tensor, shape {list(shape)}")
    parts: list[tuple[str, Index]] = [("down_proj", ())]
    if kind.startswith("gate_up"):
        gate, up = slice(0, both // 2), slice(both // 2, both)
        if layout == "interleaved":
            gate, up = slice(0, None, 2), slice(1, None, 2)
        lead: Index = (slice(None),) if transposed else ()
        parts = [("gate_proj", (*lead, gate)), ("up_proj", (*lead, up))]
    what = "bias" if kind in _BIASES else "weight"
    return [
        Piece(f"{prefix}.{logical_expert}.{part}.{what}", (logical_expert, *index), transposed)
        for logical_expert in range(shape[0])
        for part, index in parts
    ]
