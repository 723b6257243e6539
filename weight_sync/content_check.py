"""`check_content`: tensors that came, checked before any of them is stored: finite, with the fingerprints stated.

Buckets that are taken by tables are checked by those (`take_spans`, `take_pairs`); these are the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from weight_sync.errors import ContentError, listed
from weight_sync.fingerprint import wrong_fingerprint
from weight_sync.fingerprint_batch import fingerprints_of

Named = Sequence[tuple[str, torch.Tensor]]


class Fingerprints(Protocol):
    """Fingerprints by name, such as a dict."""

    def get(self, name: str, default: int, /) -> int: ...


def check_content(named: Named, stated: Fingerprints) -> dict[str, int]:
    """Check logical tensors of one bucket against the fingerprints stated of them, where there are any; return theirs.

    Raises `ContentError` for all that are not finite, or for the first whose fingerprint differs.
    """
    not_finite = [name for name, tensor in named if not is_finite(tensor)]
    if not_finite:
        raise ContentError(f"values that are not finite in {listed(not_finite)}")
    values = fingerprints_of((tensor, tensor.dtype, 0) for _, tensor in named)
    return matching(dict(zip((name for name, _ in named), values, strict=True)), stated)


def matching(found: dict[str, int], stated: Fingerprints) -> dict[str, int]:
    """Return the fingerprints found.  Raises `ContentError` for the first that is not the one stated, where one is."""
    for name, actual in found.items():
        expected = stated.get(name, actual)
        if actual != expected:
            raise ContentError(wrong_fingerprint(name, actual, expected))
    return found


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, in one pass without temporaries: NaN propagates through min and max."""
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no min or max
        return all(bool(chunk.to(torch.float32).isfinite().all()) for chunk in tensor.reshape(-1).split(1 << 20))
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
