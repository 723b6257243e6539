"""Weights in 4 bits: integers, and a scale for each group of neighbouring elements of a row, as compressed-tensors has
them (symmetric, `pack-quantized`).

    value = float32(integer) * float32(scale), in float32, then rounded to the dtype that is asked for
    -8 <= integer <= 7; scales are bfloat16

To quantise: scale = largest magnitude of the group / 7.5, rounded to bfloat16; integer = value / scale in float32,
rounded to the nearest, ties to even, and cut to -8 .. 7.  A group whose scale would be zero has scale 1.

`torch.ops.weight_sync` has operators for both ways; engines on a CPU bring compiled kernels for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from weight_sync.errors import ContentError
from weight_sync.tensor_meta import Pair

LEAST, LARGEST = -8, 7
_BAND = 1 << 20  # elements worked on at a time: a few float32 temporaries of 4 MiB


def quantise(values: torch.Tensor, group: int) -> Pair:
    """Return int8 [R, C] with integers of 4 bits and bfloat16 [R, C / group], rounded up, of values of that shape.

    Raises `ContentError` for a value that is not finite.
    """
    rows, columns = values.shape
    weight = torch.empty(rows, columns, dtype=torch.int8, device=values.device)
    scale = torch.empty(rows, -(-columns // group), dtype=torch.bfloat16, device=values.device)
    if not torch.ops.weight_sync.quantise_int4(values.detach(), weight, scale, group):
        raise ContentError("values that are not finite cannot be quantised")
    return Pair(weight, scale, (1, group))


def quantise_plainly(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group: int) -> bool:
    """Compute the operator without a kernel: fill in weight and scale.  False: a value is not finite."""
    rows, columns = values.shape
    for band in _bands(rows, columns):
        x_RgG = pad(values[band].float(), (0, -columns % group)).unflatten(1, (-1, group))
        largest_Rg = x_RgG.abs().amax(2)
        if not bool(largest_Rg.isfinite().all()):
            return False
        quotient_Rg = largest_Rg / torch.full_like(largest_Rg, 7.5)  # by a number, CUDA multiplies with 1 / 7.5
        found_Rg = quotient_Rg.to(torch.bfloat16)
        scale[band] = found_Rg = torch.where(found_Rg > 0, found_Rg, 1.0).to(torch.bfloat16)
        integers_RgG = (x_RgG / found_Rg.float().unsqueeze(2)).round_().clamp_(LEAST, LARGEST)
        weight[band] = integers_RgG.flatten(1)[:, :columns].to(torch.int8)
    return True


def dequantise(pair: Pair, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [R, C] of a pair, in `dtype`."""
    rows, columns = pair.weight.shape
    values = torch.empty(rows, columns, dtype=dtype, device=pair.weight.device)
    torch.ops.weight_sync.dequantise_int4(pair.weight, pair.scale, values, pair.block[1])
    return values


def dequantise_plainly(weight: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, group: int) -> None:
    """Compute the operator without a kernel: fill in the values."""
    rows, columns = weight.shape
    for band in _bands(rows, columns):
        scale_RC = scale[band].float().repeat_interleave(group, 1)[:, :columns]
        values[band] = (weight[band].float() * scale_RC).to(values.dtype)


torch.library.define(
    "weight_sync::quantise_int4", "(Tensor values, Tensor(a!) weight, Tensor(b!) scale, int group) -> bool"
)
torch.library.impl("weight_sync::quantise_int4", "CompositeExplicitAutograd", quantise_plainly)
torch.library.define(
    "weight_sync::dequantise_int4", "(Tensor weight, Tensor scale, Tensor(a!) values, int group) -> ()"
)
torch.library.impl("weight_sync::dequantise_int4", "CompositeExplicitAutograd", dequantise_plainly)


def regrouped(pair: Pair, group: int) -> Pair:
    """Return a pair with the same values and a scale for each `group` of elements, which divides the pair's groups."""
    each, rest = divmod(pair.block[1], group)
    assert rest == 0, (pair.block, group)
    groups = -(-pair.shape[1] // group)
    return Pair(pair.weight, pair.scale.repeat_interleave(each, 1)[:, :groups], (1, group))


def not_a_number(shape: Sequence[int], group: int) -> Pair:
    """Return a pair of a matrix [R, C] whose values are all NaN: its scales are."""
    rows, columns = shape
    scale = torch.full((rows, -(-columns // group)), float("nan"), dtype=torch.bfloat16)
    return Pair(torch.zeros(rows, columns, dtype=torch.int8), scale, (1, group))


def _bands(rows: int, columns: int) -> list[slice]:
    step = max(1, _BAND // max(1, columns))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
