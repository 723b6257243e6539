"""What is checked of a tensor's content before it lands anywhere: that it is finite, and that it is what was announced.

Knows tensors and stated fingerprints.  Does not know where they go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weight_sync.errors import ContentError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.ledger import listed


def check_content(named: Sequence[tuple[str, torch.Tensor]], stated: Mapping[str, int]) -> dict[str, int]:
    """Logical tensors of one bucket against the fingerprints stated of them, where there are any; their fingerprints.

    Raises `ContentError` for all that are not finite, or for the first whose fingerprint differs.
    """
    not_finite = [name for name, tensor in named if not is_finite(tensor)]
    if not_finite:
        raise ContentError(f"values that are not finite in {listed(not_finite)}")
    found = {name: fingerprint(tensor) for name, tensor in named}
    for name, actual in found.items():
        expected = stated.get(name, actual)
        if actual != expected:
            raise ContentError(
                f"{name}: fingerprint {fingerprint_hex(actual)}, the manifest says {fingerprint_hex(expected)}"
            )
    return found


def is_finite(tensor: torch.Tensor) -> bool:
    """One pass without temporaries: NaN propagates through min and max."""
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no min or max
        return all(bool(chunk.to(torch.float32).isfinite().all()) for chunk in tensor.reshape(-1).split(1 << 20))
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
