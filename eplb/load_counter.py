"""`LoadCounter`: tokens of each logical expert since somebody last took the counts, by weight epoch.

What a balancer plans by: no history, no modes, no placement; a pass costs next to nothing until the counts are taken.
Knows routes and weight epochs.  Does not know ranks or why it is asked.

Shapes: S passes, T tokens, L MoE layers, E logical experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST_PASSES_NOTED = 32
_MOST_TOKENS_NOTED = 4096


@dataclass(frozen=True)
class VersionCounts:
    """Of the passes in a row that ran under one weight epoch: counts [L, E] int64 of logical experts."""

    weight_epoch: int
    counts_LE: torch.Tensor
    num_passes: int


class LoadCounter:
    """Of one rank: every pass that the rank takes part in is noted, also one without tokens of its own."""

    def __init__(self, num_moe_layers: int, num_logical_experts: int) -> None:
        self._shape = (num_moe_layers, num_logical_experts)
        self._layer_offsets = (torch.arange(num_moe_layers) * num_logical_experts)[:, None]
        self._noted: list[torch.Tensor] = []  # copies, on the device of the pass
        self._tokens_noted = 0
        self._by_epoch: dict[int, tuple[torch.Tensor, int]] = {}
        self._epoch: int | None = None
        self.num_passes = 0  # since the counts were last taken

    def note(self, ids_TLK: torch.Tensor, weight_epoch: int) -> None:
        """A pass of T tokens: the logical ids that each layer chose, of any integer type, on any device."""
        if weight_epoch != self._epoch:
            self._count_noted()
            self._epoch = weight_epoch
        self._noted.append(ids_TLK.clone())
        self._tokens_noted += ids_TLK.shape[0]
        self.num_passes += 1
        if len(self._noted) >= _MOST_PASSES_NOTED or self._tokens_noted >= _MOST_TOKENS_NOTED:
            self._count_noted()

    def take(self) -> list[VersionCounts]:
        """Everything since the last call, by weight epoch, oldest first."""
        self._count_noted()
        taken = [VersionCounts(epoch, counts, passes) for epoch, (counts, passes) in self._by_epoch.items()]
        self._by_epoch, self.num_passes = {}, 0
        return taken

    def _count_noted(self) -> None:
        noted, self._noted, self._tokens_noted = self._noted, [], 0
        if not noted:
            return
        assert self._epoch is not None
        before, passes = self._by_epoch.get(self._epoch, (torch.zeros(self._shape, dtype=torch.int64), 0))
        flat = (torch.cat(noted).to("cpu", torch.int64) + self._layer_offsets).flatten()
        counts_LE = torch.bincount(flat, minlength=before.numel()).view(self._shape)
        self._by_epoch[self._epoch] = (before + counts_LE, passes + len(noted))
