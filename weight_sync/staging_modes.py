"""Which staging a mode's name means.

Knows the modes.  Does not know transactions.
"""

from __future__ import annotations

from weight_sync.held_memory import ShadowMemory
from weight_sync.in_model import InPlaceStaging, JournalStaging
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import Staging, StagingMode
from weight_sync.tensor_meta import LogicalWeights


def new_staging(
    weights: LogicalWeights,
    mode: StagingMode,
    journal_dir: str | None = None,
    memory: ShadowMemory | None = None,
) -> Staging:
    """For one transaction.

    `journal_dir`: where mode "journal" keeps its file; None: the temporary directory.  `memory`: what "host" and
    "device" take from; by default their own.
    """
    if mode == "journal":
        return JournalStaging(weights, journal_dir)
    if mode == "in_place":
        return InPlaceStaging(weights)
    return ShadowStaging(weights, mode, memory)
