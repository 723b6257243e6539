"""`LoadHistory`: the load that a planner should plan for, from what all ranks counted, one window after the other.

Logical counts describe routers and prompts, not slots, so they outlive every rebalance.  Of each window half is
forgotten when the next one comes.  A refresh changes routers: whether what was counted before it still counts is
measured, by how much further the two sides are apart than chance alone would put them.

Shapes: L MoE layers, E logical experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from eplb.errors import LoadsError
from eplb.load_counter import LoadCounter, VersionCounts

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
    """Counts [L, E] float64 that the next plan is made for.

    `counter`: this rank's own, None where nothing is counted.  `sum_over_ranks`: of counts of ranks with tokens of
    their own; all ranks take sums in the same turn.
    """

    def __init__(
        self,
        num_moe_layers: int,
        num_logical_experts: int,
        counter: LoadCounter | None = None,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda counts_LE: counts_LE,
    ) -> None:
        self._counter, self._sum_over_ranks = counter, sum_over_ranks
        self._postponed_at = 0
        self.counts_LE = torch.zeros((num_moe_layers, num_logical_experts), dtype=torch.float64)
        self.weight_epoch: int | None = None
        self.drift: Drift | None = None

    @property
    def is_counted(self) -> bool:
        return self._counter is not None

    @property
    def num_unseen_passes(self) -> int:
        """Since sums were taken, for a rebalance or a refresh."""
        return 0 if self._counter is None else self._counter.num_passes

    @property
    def num_passes(self) -> int:
        """Since sums were taken, or since that was put off."""
        return self.num_unseen_passes - self._postponed_at

    def postpone(self) -> None:
        """Passes are counted anew; the tokens stay."""
        self._postponed_at = self.num_unseen_passes

    def gather(self) -> None:
        """Add what all ranks counted since the last call."""
        for window in () if self._counter is None else self._counter.take():
            counts_LE = self._sum_over_ranks(window.counts_LE)
            self.add(VersionCounts(window.weight_epoch, counts_LE, window.num_passes))
        self._postponed_at = 0

    def current(self, choices_per_expert: float) -> np.ndarray | None:
        """The counts as of now; None while there are fewer choices than that, or nothing is counted."""
        if self._counter is None:
            return None
        self.gather()
        return None if self.choices_per_expert < choices_per_expert else self.counts_LE.numpy().copy()

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


def total_variation(before_LE: torch.Tensor, after_LE: torch.Tensor) -> torch.Tensor:
    """Share of the choices that would have to move to make one distribution the other: [L] float64 in 0 .. 1.

    NaN for a layer that has no counts on one side.
    """
    return (_shares(before_LE) - _shares(after_LE)).abs().sum(dim=1) / 2


def expected_by_chance(before_LE: torch.Tensor, after_LE: torch.Tensor) -> torch.Tensor:
    """What `total_variation` would be on average if both counts were samples of one distribution: [L] float64.

    The difference of two sampled shares is taken as normal, and the choices of a token as independent.
    """
    totals = before_LE.sum(dim=1, dtype=torch.float64), after_LE.sum(dim=1, dtype=torch.float64)
    pooled_LE = _shares(before_LE.double() + after_LE.double())
    variance_LE = pooled_LE * (1 - pooled_LE) * (1 / totals[0] + 1 / totals[1])[:, None]
    return variance_LE.sqrt().sum(dim=1) / math.sqrt(2 * math.pi)


def _shares(counts_LE: torch.Tensor) -> torch.Tensor:
    counts_LE = counts_LE.double()
    return counts_LE / counts_LE.sum(dim=1, keepdim=True)
