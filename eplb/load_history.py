"""`LoadHistory`: the load that a planner should plan for, from the windows that were counted one after the other.

Logical counts describe routers and prompts, not slots, so they outlive every rebalance.  Of each window half is
forgotten when the next one comes.  A refresh changes routers: whether what was counted before it still counts is
measured, by how much further the two sides are apart than chance alone would put them.

Knows counts and weight epochs.  Does not know placements.

Shapes: L MoE layers, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eplb.drift import expected_by_chance, total_variation
from eplb.errors import LoadsError
from eplb.load_counter import VersionCounts

KEPT = 0.5  # of what was known, when a window comes
MOST_DRIFT = 0.05  # share of the choices that a refresh may move, chance aside, without the past being forgotten


@dataclass(frozen=True)
class Drift:
    """Over a refresh: means over MoE layers, and whether the counts from before it were kept."""

    weight_epoch: int
    total_variation: float
    expected_by_chance: float
    kept: bool


class LoadHistory:
    """Counts [L, E] float64 that the next plan is made for."""

    def __init__(self, num_moe_layers: int, num_logical_experts: int) -> None:
        self.counts_LE = torch.zeros((num_moe_layers, num_logical_experts), dtype=torch.float64)
        self.weight_epoch: int | None = None
        self.drift: Drift | None = None

    @property
    def choices_per_expert(self) -> float:
        """Mean over experts, of the layer that has fewest."""
        return float(self.counts_LE.mean(dim=1).min()) if self.counts_LE.numel() else 0.0

    def add(self, window: VersionCounts) -> None:
        """Raises `LoadsError` for counts of another shape, negative ones, or a weight epoch older than the last."""
        counts_LE = window.counts_LE
        if counts_LE.shape != self.counts_LE.shape or bool((counts_LE < 0).any()):
            raise LoadsError(f"counts of shape {list(self.counts_LE.shape)} and not negative are wanted")
        if self.weight_epoch is not None and window.weight_epoch < self.weight_epoch:
            raise LoadsError(f"counts of weight epoch {window.weight_epoch} after those of {self.weight_epoch}")
        if not bool(counts_LE.any()):
            return
        kept = KEPT
        if self.weight_epoch is not None and window.weight_epoch != self.weight_epoch:
            self.drift = self._drift(window)
            kept = KEPT if self.drift.kept else 0.0
        self.counts_LE = self.counts_LE * kept + counts_LE
        self.weight_epoch = window.weight_epoch

    def _drift(self, window: VersionCounts) -> Drift:
        measured = float(total_variation(self.counts_LE, window.counts_LE).nanmean())
        by_chance = float(expected_by_chance(self.counts_LE, window.counts_LE).nanmean())
        return Drift(window.weight_epoch, measured, by_chance, kept=not measured - by_chance > MOST_DRIFT)
