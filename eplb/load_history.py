"""`LoadHistory`: the load that a planner should plan for, counted from routes on every rank, window after window.

Logical counts describe routers and prompts, not slots, so they outlive every rebalance.  Of each window half is
forgotten when the next one comes.  A refresh changes routers: whether what was counted before it still counts is
measured, by how much further the two sides are apart than chance alone would put them.

Shapes: S passes, T tokens, L MoE layers, E logical experts, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from eplb.errors import LoadsError

KEPT = 0.5  # share of the past that is kept when a window comes
MAX_DRIFT = 0.05  # share of the choices that a refresh may move, chance aside, without the past being forgotten
_MAX_PASSES_NOTED = 32
_MAX_TOKENS_NOTED = 4096

Stamp = TypeVar("Stamp")


class PassCounter(Generic[Stamp]):
    """Counts what routers chose, by pass, layer and logical expert.

    A pass is copied when it is noted, and counted together with some others, or when counts are asked for: so a pass
    costs next to nothing, and nothing refers to the step's tensors.
    """

    def __init__(self, num_moe_layers: int, num_logical_experts: int) -> None:
        self._shape = (num_moe_layers, num_logical_experts)
        # Choices of different layers count in different places.
        self._layer_offsets = (torch.arange(num_moe_layers) * num_logical_experts)[:, None]
        self._noted: list[tuple[torch.Tensor, Stamp]] = []  # copies, on the device of the pass
        self._tokens_noted = 0

    def _note(self, ids_TLK: torch.Tensor, stamp: Stamp) -> None:
        assert ids_TLK.shape[1] == self._shape[0], tuple(ids_TLK.shape)
        self._noted.append((ids_TLK.clone(), stamp))
        self._tokens_noted += ids_TLK.shape[0]
        if len(self._noted) >= _MAX_PASSES_NOTED or self._tokens_noted >= _MAX_TOKENS_NOTED:
            self._count_noted()

    def _count_noted(self) -> None:
        noted, self._noted, self._tokens_noted = self._noted, [], 0
        if noted:
            self._enter([ids_TLK.cpu() for ids_TLK, _ in noted], [stamp for _, stamp in noted])

    def _enter(self, passes: list[torch.Tensor], stamps: list[Stamp]) -> None:
        """Take the ids [T, L, K] of some passes, at least one."""
        raise NotImplementedError

    def _counts(self, passes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Count choices: [S, L, E] int64."""
        layers, experts = self._shape
        size = layers * experts
        flat = [(ids.long() + self._layer_offsets + index * size).flatten() for index, ids in enumerate(passes)]
        return torch.bincount(torch.cat(flat), minlength=len(passes) * size).view(-1, layers, experts)


@dataclass(frozen=True)
class Drift:
    """Over a refresh: means over MoE layers, and whether the counts from before it were kept."""

    weight_epoch: int
    total_variation: float
    expected_by_chance: float
    kept: bool


class LoadHistory(PassCounter[int]):
    """Counts [L, E] float64 that the next plan is made for.

    Each rank notes every pass that it takes part in, with tokens of its own or without.  `sum_over_ranks`: of counts
    of ranks with tokens of their own; all ranks `gather` in the same turn.  `is_counted` False: no pass is ever noted.
    """

    def __init__(
        self,
        num_moe_layers: int,
        num_logical_experts: int,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda counts_LE: counts_LE,
        *,
        is_counted: bool = False,
    ) -> None:
        super().__init__(num_moe_layers, num_logical_experts)
        self.is_counted = is_counted
        self._sum_over_ranks = sum_over_ranks
        self._mine: dict[int, torch.Tensor] = {}  # since the last `gather`, by weight epoch, oldest first
        self._noted_epoch: int | None = None
        self._postponed_at = 0
        self._watched: float = math.inf
        self._watcher: Callable[[], None] = lambda: None
        self.num_unseen_passes = 0  # since the last `gather`, for a rebalance or a refresh
        self.counts_LE = torch.zeros((num_moe_layers, num_logical_experts), dtype=torch.float64)
        self.window_LE = torch.zeros_like(self.counts_LE)  # of what the last `gather` added
        self.weight_epoch: int | None = None
        self.drift: Drift | None = None

    def note(self, ids_TLK: torch.Tensor, weight_epoch: int) -> None:
        """Note a pass of T tokens: the logical ids that each layer chose, of any integer type, on any device."""
        if weight_epoch != self._noted_epoch:
            self._count_noted()
            self._noted_epoch = weight_epoch
        self.num_unseen_passes += 1
        self._note(ids_TLK, weight_epoch)
        if self.num_unseen_passes - self._postponed_at >= self._watched:
            self._watcher()

    def _enter(self, passes: list[torch.Tensor], stamps: list[int]) -> None:
        counts_LE = self._counts([torch.cat(passes)])[0]
        self._mine[stamps[0]] = self._mine.get(stamps[0], 0) + counts_LE

    def watch(self, num_passes: int, watcher: Callable[[], None]) -> None:
        """Call `watcher()` with each pass that is noted from `num_passes` on."""
        self._watched, self._watcher = num_passes, watcher

    @property
    def num_passes(self) -> int:
        """Since the last `gather` or `postpone`."""
        return self.num_unseen_passes - self._postponed_at

    def postpone(self) -> None:
        """Start counting passes anew, as an evaluation was put off; the tokens stay."""
        self._postponed_at = self.num_unseen_passes

    def gather(self) -> None:
        """Add what all ranks counted since the last call."""
        self._count_noted()
        mine, self._mine = self._mine, {}
        self.num_unseen_passes = self._postponed_at = 0
        self.window_LE = torch.zeros_like(self.counts_LE)
        for weight_epoch, mine_LE in mine.items():
            counts_LE = self._sum_over_ranks(mine_LE)
            self.window_LE += counts_LE
            self.add(weight_epoch, counts_LE)

    def current(self, choices_per_expert: float) -> np.ndarray | None:
        """Return the counts as of now; None while there are fewer choices than that, or nothing is counted."""
        if not self.is_counted:
            return None
        self.gather()
        return None if self.choices_per_expert < choices_per_expert else self.counts_LE.numpy().copy()

    @property
    def choices_per_expert(self) -> float:
        """Mean over experts, of the layer that has fewest."""
        return float(self.counts_LE.mean(dim=1).min()) if self.counts_LE.numel() else 0.0

    def add(self, weight_epoch: int, counts_LE: torch.Tensor) -> None:
        """Take the counts [L, E] of all ranks, of passes in a row under one weight epoch.

        Raises `LoadsError` for counts of another shape, negative ones, or a weight epoch older than the last.
        """
        if counts_LE.shape != self.counts_LE.shape or bool((counts_LE < 0).any()):
            raise LoadsError(f"counts must have shape {list(self.counts_LE.shape)} and must not be negative")
        if self.weight_epoch is not None and weight_epoch < self.weight_epoch:
            raise LoadsError(f"counts of weight epoch {weight_epoch} came after counts of epoch {self.weight_epoch}")
        if not bool(counts_LE.any()):
            return
        kept = KEPT
        if self.weight_epoch is not None and weight_epoch != self.weight_epoch:
            self.drift = self._drift_to(weight_epoch, counts_LE)
            kept = KEPT if self.drift.kept else 0.0
        self.counts_LE = self.counts_LE * kept + counts_LE
        self.weight_epoch = weight_epoch

    def _drift_to(self, weight_epoch: int, counts_LE: torch.Tensor) -> Drift:
        measured = float(total_variation(self.counts_LE, counts_LE).nanmean())
        by_chance = float(expected_by_chance(self.counts_LE, counts_LE).nanmean())
        return Drift(weight_epoch, measured, by_chance, kept=not measured - by_chance > MAX_DRIFT)


def total_variation(before_LE: torch.Tensor, after_LE: torch.Tensor) -> torch.Tensor:
    """Return the share of the choices that would have to move to make one distribution the other.

    [L] float64 in 0 .. 1.

    NaN for a layer that has no counts on one side.
    """
    return (_shares(before_LE) - _shares(after_LE)).abs().sum(dim=1) / 2


def expected_by_chance(before_LE: torch.Tensor, after_LE: torch.Tensor) -> torch.Tensor:
    """Return the mean `total_variation` [L] float64 that both counts would have as samples of one distribution.

    The difference of two sampled shares is taken as normal, and the choices of a token as independent.
    """
    totals = before_LE.sum(dim=1, dtype=torch.float64), after_LE.sum(dim=1, dtype=torch.float64)
    pooled_LE = _shares(before_LE.double() + after_LE.double())
    variance_LE = pooled_LE * (1 - pooled_LE) * (1 / totals[0] + 1 / totals[1])[:, None]
    return variance_LE.sqrt().sum(dim=1) / math.sqrt(2 * math.pi)


def _shares(counts_LE: torch.Tensor) -> torch.Tensor:
    counts_LE = counts_LE.double()
    return counts_LE / counts_LE.sum(dim=1, keepdim=True)
