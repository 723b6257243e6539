"""The values that an engine holds of a matrix in each format of `--cpu-weight-format`, by definition.

Independent of the engine's code but for `w8`, whose definition `tests/unit/weight_sync/test_held_weights.py` checks in
exact arithmetic.
"""

from __future__ import annotations

import numpy as np
import torch

from tests import fp8_reference
from weight_sync.int8_blocks import held_values

GROUPS = {"int4": 32, "int4-128": 128}


def held_of(weight_format: str, values: torch.Tensor) -> torch.Tensor:
    """Return the values that are held of a matrix or a stack of them, in its dtype."""
    if values.ndim > 2:
        return torch.stack([held_of(weight_format, matrix) for matrix in values])
    if weight_format == "w8":
        return held_values(values)
    if weight_format == "fp8":
        return fp8_reference.dequantise(*fp8_reference.quantise(values), values.dtype)
    group = GROUPS[weight_format]
    return int4_values(*int4(values, group), group, values.dtype)


def int4(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix: integers -8 .. 7, int8 [R, C], and bfloat16 scales [R, groups]."""
    rows, columns = values.shape
    integers = torch.zeros(rows, columns, dtype=torch.int8)
    scales = torch.ones(rows, -(-columns // group), dtype=torch.bfloat16)
    for number, first in enumerate(range(0, columns, group)):
        x = values[:, first : first + group].float().numpy()
        found = torch.from_numpy(np.abs(x).max(1) / np.float32(7.5)).bfloat16()
        scales[:, number] = torch.where(found > 0, found, torch.ones_like(found))
        quotients = x / scales[:, number].float().numpy()[:, None]
        integers[:, first : first + group] = torch.from_numpy(np.clip(np.rint(quotients), -8, 7).astype(np.int8))
    return integers, scales


def int4_values(integers: torch.Tensor, scales: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of integers and scales: the exact product, which float32 holds, rounded once."""
    of_columns = [column // group for column in range(integers.shape[1])]
    return (integers.double() * scales.double()[:, of_columns]).to(torch.float32).to(dtype)


def packed(integers: torch.Tensor) -> torch.Tensor:
    """Pack integers of a matrix as compressed-tensors does: eight to an int32, the first lowest, each plus 8."""
    words = (integers.numpy().astype(np.int64) + 8).reshape(integers.shape[0], -1, 8)
    sums = (words << (4 * np.arange(8))).sum(-1)
    return torch.from_numpy(sums.astype(np.uint32).view(np.int32))


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return the integers of words, int8 [R, C]."""
    sums = words.numpy().view(np.uint32).astype(np.int64)[:, :, None]
    return torch.from_numpy(((sums >> (4 * np.arange(8)) & 15) - 8).reshape(len(sums), -1).astype(np.int8))
