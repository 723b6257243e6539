"""Whether a token's numbers depend on how it was batched, in the configuration that runs.

Decided from the parts that were chosen, never from settings.  Does not know how the parts were chosen, nor what they
compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def batch_invariance(parts: Mapping[str, bool], reason: str) -> dict[str, Any]:
    """The fields `batch_invariant` and `batch_invariance_note` of /server_info.

    `parts` says of every part that computes numbers, by name, whether a token's result has the same bits in every
    batch, chunking and number of threads; `reason` says why a part is not one of those.  The note is empty where the
    guarantee holds.
    """
    failing = [name for name, holds in parts.items() if not holds]
    note = f"{' and '.join(failing)} on plain torch: {reason}" if failing else ""
    return {"batch_invariant": not failing, "batch_invariance_note": note}
