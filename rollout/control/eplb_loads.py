"""`EplbLoads`: the load of the experts of one engine, for the plans that are made from it.

Each attention-DP rank counts its own tokens; sums are taken when somebody looks, by all ranks in the same turn.
Knows who counted what.  Does not know what it is for.

Shapes: L MoE layers, E logical experts.
"""

from __future__ import annotations

import numpy as np

from eplb.decision import RebalancePolicy
from eplb.load_counter import LoadCounter, VersionCounts
from eplb.load_history import LoadHistory
from rollout.distributed.communicator import Communicator


class EplbLoads:
    """`counter` is this rank's, noted into by the runner."""

    def __init__(self, counter: LoadCounter, history: LoadHistory, attn_dp: Communicator) -> None:
        self._counter, self.history, self._attn_dp = counter, history, attn_dp
        self._postponed_at = 0

    @property
    def num_passes(self) -> int:
        """Since the last look, or since the last one was put off."""
        return self._counter.num_passes - self._postponed_at

    @property
    def num_unseen_passes(self) -> int:
        """Since anybody looked, for a rebalance or a refresh, put off or not."""
        return self._counter.num_passes

    def postpone(self) -> None:
        """Passes are counted anew; the tokens stay."""
        self._postponed_at = self._counter.num_passes

    def gather(self) -> None:
        """Take what all ranks counted since the last call into the history."""
        for window in self._counter.take():
            counts_LE = self._attn_dp.all_reduce(window.counts_LE)
            self.history.add(VersionCounts(window.weight_epoch, counts_LE, window.num_passes))
        self._postponed_at = 0

    def counts(self, policy: RebalancePolicy) -> np.ndarray | None:
        """[L, E] float64 as of now; None while there are too few to plan for."""
        self.gather()
        if self.history.choices_per_expert < policy.choices_per_expert:
            return None
        return self.history.counts_LE.numpy().copy()
