"""Weights in 8 bits: integers with a power of two for each 32 neighbouring elements of a row.

    value = integer * 2^e, |integer| <= 127       e: the largest with which the largest magnitude is below 128

Seven bits are exact in bfloat16, so what is held has exact bfloat16 values; quotients are rounded to nearest even, and
128 becomes 127.  Values that are quantised again stay as they are.  The blocks are the OCP's MXINT8 blocks.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from weight_sync.errors import ContentError

BLOCK = 32
LARGEST = 127
_LEAST_EXPONENT = -126
_BAND = 1 << 20  # elements worked on at a time: a few float32 temporaries of 4 MiB


def held_values(values: torch.Tensor) -> torch.Tensor:
    """Return floating-point values [..., C] as they are held, blocks along the last dimension; same shape and dtype.

    Raises `ContentError` for a value that is not finite.
    """
    columns = values.shape[-1]
    held = torch.empty_like(values, memory_format=torch.contiguous_format)
    rows_RC, target_RC = values.reshape(-1, columns), held.view(-1, columns)
    step = max(1, _BAND // max(1, columns))
    for first in range(0, rows_RC.shape[0], step):
        x_RbB = pad(rows_RC[first : first + step].float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        largest_Rb1 = x_RbB.abs().amax(2, keepdim=True)
        if not bool(largest_Rb1.isfinite().all()):
            raise ContentError("values that are not finite cannot be quantised")
        _, exponent_Rb1 = torch.frexp(largest_Rb1)  # largest = mantissa in [0.5, 1) times a power of two
        power_Rb1 = torch.ldexp(torch.ones_like(largest_Rb1), (exponent_Rb1 - 7).clamp_(min=_LEAST_EXPONENT))
        integers_RbB = (x_RbB / power_Rb1).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        target_RC[first : first + step] = (integers_RbB * power_Rb1).flatten(1)[:, :columns]
    return held
