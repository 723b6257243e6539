"""Operators over many parts of memory at once: a storage has few bytes, and a model has hundreds of storages.

An engine on a CPU computes them by a compiled kernel (`rollout/kernels/csrc/exchanges.cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def fold(into: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    """Compute `into[i] ^= other[i]`, int64 or uint8 [n] each, contiguous and on one device.

    Parts that do not fit each other are refused before any is written.
    """
    torch.ops.weight_sync.fold(into, other)


def word_sums(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the words of each part, int64 [parts], which wraps.  int64 or uint8 [n] each, contiguous."""
    found: torch.Tensor = torch.ops.weight_sync.word_sums(parts)
    return found


def fold_plainly(into: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    """Compute `fold` without a kernel."""
    forms = [[(part.shape, part.dtype) for part in parts] for parts in (into, other)]
    assert forms[0] == forms[1], "the parts to fold differ in number, size or dtype"
    for one, two in zip(into, other, strict=True):
        one.bitwise_xor_(two)


def word_sums_plainly(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute `word_sums` without a kernel."""
    return torch.stack([part.sum() for part in parts]) if parts else torch.zeros(0, dtype=torch.int64)


torch.library.define("weight_sync::fold", "(Tensor(a!)[] into, Tensor[] other) -> ()")
torch.library.impl("weight_sync::fold", "CompositeExplicitAutograd", fold_plainly)
torch.library.define("weight_sync::word_sums", "(Tensor[] parts) -> Tensor")
torch.library.impl("weight_sync::word_sums", "CompositeExplicitAutograd", word_sums_plainly)
