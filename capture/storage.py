"""How logical expert ids lie in torch tensors on the way from the router to a `RoutedExperts`.

uint8 up to 255 experts, else int16 as a plain bit pattern: torch has few kernels for uint16.  Seen as unsigned, the
bytes are those of `id_dtype`, and MISSING is all ones in either.  Does not know where the tensors are kept.
"""

from __future__ import annotations

import numpy as np
import torch

from capture.routed_experts import id_dtype, narrowest_dtype


def storage_dtype(num_experts: int) -> torch.dtype:
    """`torch.uint8` or `torch.int16`, as wide as `id_dtype(num_experts)`."""
    return torch.uint8 if id_dtype(num_experts).itemsize == 1 else torch.int16


def narrowest(num_experts: int) -> torch.dtype:
    """The narrowest type that holds the ids as numbers: what a step records them in, and ranks exchange."""
    return getattr(torch, narrowest_dtype(num_experts, for_torch=True).name)


def storage_missing(num_experts: int) -> int:
    """MISSING as a value of `storage_dtype(num_experts)`: all bits set."""
    return 255 if id_dtype(num_experts).itemsize == 1 else -1


def rows_to_numpy(rows_TLK: torch.Tensor, num_experts: int) -> np.ndarray:
    """Host rows [T, L, K] of the storage dtype as an array of `id_dtype(num_experts)`; shares memory."""
    assert rows_TLK.dtype == storage_dtype(num_experts), rows_TLK.dtype
    return rows_TLK.numpy().view(id_dtype(num_experts))
