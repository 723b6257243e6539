"""`LoadWindows`: how evenly the last passes spread their tokens over ranks and over slots, layer by layer.

The time of a pass is that of its busiest rank.  So balancedness of a window is the time that perfect balance would take
over the time that was taken: the sum over passes of the mean load of a rank, over the sum of the largest loads.

Shapes: S passes, L MoE layers, P physical experts (slots), G ranks.
"""

from __future__ import annotations

import torch

WINDOWS = (10, 100, 1000)
_LONGEST = max(WINDOWS)


class LoadWindows:
    """The loads of the last passes in a ring.  Slot p is on rank `p // (P / G)`."""

    def __init__(self, num_moe_layers: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._rank_loads = torch.zeros((_LONGEST, num_moe_layers, num_ranks), dtype=torch.int64)
        self._slot_max = torch.zeros((_LONGEST, num_moe_layers), dtype=torch.int64)
        self._num_slots = torch.ones(_LONGEST, dtype=torch.int64)
        self._num_passes = 0

    def add(self, loads_SLP: torch.Tensor) -> None:
        """Add the tokens that each slot got in each of some further passes, oldest first."""
        loads_SLP = loads_SLP[-_LONGEST:]
        passes, layers, slots = loads_SLP.shape
        places = (self._num_passes + torch.arange(passes)) % _LONGEST
        self._rank_loads[places] = loads_SLP.view(passes, layers, self._num_ranks, -1).sum(dim=3)
        self._slot_max[places] = loads_SLP.amax(dim=2)
        self._num_slots[places] = slots
        self._num_passes += passes

    def num_passes(self, window: int) -> int:
        """Return the number of passes that the window has so far."""
        return min(window, self._num_passes)

    def rank_loads(self, window: int) -> torch.Tensor:
        """Return the tokens of each rank in the last `window` passes [L, G] int64."""
        return self._rank_loads[self._last(window)].sum(dim=0)

    def rank_balancedness(self, window: int) -> torch.Tensor:
        """Return the balancedness of the ranks [L] float64 in 0 .. 1, where 1 is even; NaN without tokens."""
        loads_SLG = self._rank_loads[self._last(window)].double()
        return loads_SLG.mean(dim=2).sum(dim=0) / loads_SLG.amax(dim=2).sum(dim=0)

    def slot_balancedness(self, window: int) -> torch.Tensor:
        """Return the balancedness of the slots [L] float64 in 0 .. 1, where 1 is even; NaN without tokens."""
        places = self._last(window)
        mean_SL = self._rank_loads[places].sum(dim=2).double() / self._num_slots[places, None]
        return mean_SL.sum(dim=0) / self._slot_max[places].double().sum(dim=0)

    def _last(self, window: int) -> torch.Tensor:
        count = self.num_passes(window)
        return (self._num_passes - count + torch.arange(count)) % _LONGEST
