"""Whether a token's numbers depend on how it was batched, in the configuration that runs.

Decided from the parts that were chosen, never from settings.  Does not know how the parts were chosen, nor what they
compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def batch_invariance(parts: Mapping[str, bool], reason: str, order_of_sums: str | None = None) -> dict[str, Any]:
    """The fields `batch_invariant` and `batch_invariance_note` of /server_info.

    `parts` says of every part that computes numbers, by name, whether a token's result has the same bits in every
    batch, chunking and number of threads; `reason` says why a part is not one of those.  `order_of_sums`: why sums over
    ranks depend on the batch.  The note is empty where the guarantee holds.
    """
    failing = [name for name, holds in parts.items() if not holds]
    notes = [f"{' and '.join(failing)} on plain torch: {reason}"] if failing else []
    notes += [order_of_sums] if order_of_sums is not None else []
    return {"batch_invariant": not notes, "batch_invariance_note": "; ".join(notes)}
