"""What routers chose, counted by logical expert.  A pass is copied when it is noted, and counted together with some
others, or when somebody asks: a pass costs next to nothing, and refers to nothing of the step that it was.

Knows routes.  Does not know placements or ranks.

Shapes: S passes, T tokens, L MoE layers, E logical experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

_MOST_PASSES_NOTED = 32
_MOST_TOKENS_NOTED = 4096

Stamp = TypeVar("Stamp")


class PassCounter(Generic[Stamp]):
    """What is common to all who count: passes noted with a stamp, and their counts by layer and expert."""

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
        if len(self._noted) >= _MOST_PASSES_NOTED or self._tokens_noted >= _MOST_TOKENS_NOTED:
            self._count_noted()

    def _count_noted(self) -> None:
        noted, self._noted, self._tokens_noted = self._noted, [], 0
        if noted:
            self._enter([ids_TLK.cpu() for ids_TLK, _ in noted], [stamp for _, stamp in noted])

    def _enter(self, passes: list[torch.Tensor], stamps: list[Stamp]) -> None:
        """Take the ids [T, L, K] of some passes, at least one."""
        raise NotImplementedError

    def _counts(self, passes: Sequence[torch.Tensor]) -> torch.Tensor:
        """[S, L, E] int64."""
        layers, experts = self._shape
        size = layers * experts
        flat = [(ids.long() + self._layer_offsets + index * size).flatten() for index, ids in enumerate(passes)]
        return torch.bincount(torch.cat(flat), minlength=len(passes) * size).view(-1, layers, experts)


@dataclass(frozen=True)
class VersionCounts:
    """Of the passes in a row that ran under one weight epoch: counts [L, E] int64 of logical experts."""

    weight_epoch: int
    counts_LE: torch.Tensor
    num_passes: int


class LoadCounter(PassCounter[int]):
    """Sums by weight epoch since they were last taken: what a balancer plans by.

    Of one rank: every pass that the rank takes part in is noted, also one without tokens of its own.
    """

    def __init__(self, num_moe_layers: int, num_logical_experts: int) -> None:
        super().__init__(num_moe_layers, num_logical_experts)
        self._by_epoch: dict[int, tuple[torch.Tensor, int]] = {}
        self._epoch: int | None = None
        self.num_passes = 0  # since the counts were last taken

    def note(self, ids_TLK: torch.Tensor, weight_epoch: int) -> None:
        """A pass of T tokens: the logical ids that each layer chose, of any integer type, on any device."""
        if weight_epoch != self._epoch:
            self._count_noted()
            self._epoch = weight_epoch
        self.num_passes += 1
        self._note(ids_TLK, weight_epoch)

    def take(self) -> list[VersionCounts]:
        """Everything since the last call, by weight epoch, oldest first."""
        self._count_noted()
        taken = [VersionCounts(epoch, counts, passes) for epoch, (counts, passes) in self._by_epoch.items()]
        self._by_epoch, self.num_passes = {}, 0
        return taken

    def _enter(self, passes: list[torch.Tensor], stamps: list[int]) -> None:
        counts_LE = self._counts([torch.cat(passes)])[0]
        before_LE, num_passes = self._by_epoch.get(stamps[0], (0, 0))
        self._by_epoch[stamps[0]] = (before_LE + counts_LE, num_passes + len(passes))
