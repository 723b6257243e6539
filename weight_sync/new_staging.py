"""`new_staging`: the staging of one transaction, by the mode that the engine was started with."""

from __future__ import annotations

import torch

from weight_sync.held_memory import Areas
from weight_sync.in_model import InPlaceStaging, JournalStaging
from weight_sync.plan import Homes
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import Staging, StagingMode, queue_of
from weight_sync.tensor_meta import LogicalWeights


def new_staging(
    weights: LogicalWeights,
    mode: StagingMode,
    journal_dir: str | None = None,
    memory: Areas | None = None,
    device: torch.device | str = "cpu",
    homes: Homes | None = None,
) -> Staging:
    """Return the staging of one transaction.

    `journal_dir`: where mode "journal" keeps its file; None: the temporary directory.  `memory`: what stagings take
    from; by default their own.  `device`: where the weights lie.  `homes`: their places, where known.
    """
    queue = queue_of(device)
    if mode == "journal":
        return JournalStaging(weights, journal_dir, queue, memory, homes)
    if mode == "in_place":
        return InPlaceStaging(weights, queue, memory, homes)
    return ShadowStaging(weights, mode, memory, queue, homes)
