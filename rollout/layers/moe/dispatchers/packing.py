"""Rows of several tensors as rows of bytes, so that one collective carries them.

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [T, n] of any dtypes side by side: uint8 [T, bytes of a row]."""
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors], dim=1)


def unpack_rows(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `pack_rows` put together, from as many rows as there are; `like` has the dtypes and widths."""
    widths = [tensor.shape[1] * tensor.dtype.itemsize for tensor in like]
    parts = packed.split(widths, dim=1)
    return [
        part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        for part, tensor in zip(parts, like, strict=True)
    ]
