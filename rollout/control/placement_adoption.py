"""A full refresh can adopt a new expert placement for free: it writes every expert's weights anyway.

    opened   on the scheduler's thread: note the loads so far, if adopting is wanted
    target   on the I/O thread: a fresh placement is planned for them and proposed; staging goes to its slots
    commit   the weights come into force, and with them the placement: no expert is moved

The placement stays as it is without loads, for partial updates, and if staging writes into the model itself.

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from eplb.algorithms.types import Plan, from_bytes, to_bytes
from eplb.errors import EplbError
from eplb.placement import ExpertPlacement
from rollout.core.errors import BadRequest, Conflict
from rollout.distributed.layout import ParallelLayout, RankPosition
from rollout.model.weight_loading import WeightIndex
from weight_sync.ledger import Coverage
from weight_sync.tensor_meta import LogicalWeights


class _SharedPlan(msgspec.Struct):
    """A plan from the rank that made it, or the reason why there is no plan."""

    reason: str
    plan: Plan | None = None


class PlacementAdoption:
    """Plans a placement for a full refresh, and adopts it with the commit.

    `exchange(mine)` returns every rank's bytes, by world rank.  `loads()` returns the logical counts [L, E] of all
    ranks, None if no token was seen; it is the same on all ranks of the engine.  `fresh_plan(counts)` returns a
    placement for them.  `is_possible`: experts are spread over ranks, they have no adapters, which do not come with the
    update, and staging does not write into the model.
    `by_default`: whether updates adopt that do not state it.
    """

    def __init__(
        self,
        weights: WeightIndex,
        placement: ExpertPlacement,
        layout: ParallelLayout,
        position: RankPosition,
        exchange: Callable[[bytes], list[bytes]],
        loads: Callable[[], np.ndarray | None],
        fresh_plan: Callable[[np.ndarray], Plan],
        *,
        is_possible: bool,
        by_default: bool,
    ) -> None:
        self._weights = weights
        self._placement = placement
        self._layout, self._position = layout, position
        self._exchange = exchange
        self._loads = loads
        self._fresh_plan = fresh_plan
        self._is_possible = is_possible
        self._by_default = by_default and is_possible
        self._wants = False
        self._counts_LE: np.ndarray | None = None
        self._outcome = "the placement stays: not asked to adopt one"

    def opening(self, wanted: bool | None = None, epoch: int | None = None) -> None:
        """Prepare for an update that is about to be opened, on the scheduler's thread.

        `epoch`: the placement epoch by which its sender acts.  Raises `Conflict` if another one is in force, and
        `BadRequest` if nothing can be adopted.
        """
        if epoch is not None:
            if epoch != self._placement.epoch:
                in_force = self._placement.epoch
                raise Conflict(
                    f"the expert map in force has placement epoch {in_force}, the sender's {epoch}; ask again"
                )
            if wanted:
                raise BadRequest("placement_epoch keeps the expert map, adopt_placement replaces it: give one of them")
            wanted = False
        if wanted and not self._is_possible:
            raise BadRequest(
                "adopt_placement needs experts spread over ranks (--ep-size) without memory for adapters "
                "(--lora-target-modules), and --weight-staging host or device"
            )
        self._wants = self._by_default if wanted is None else wanted
        self._counts_LE = self._loads() if self._wants else None
        self._outcome = "the placement stays: not asked to adopt one"

    def target(self, coverage: Coverage) -> LogicalWeights:
        """Return the weights in which the update that opens now is staged.  Called on the I/O thread of all ranks."""
        self._placement.withdraw()
        if coverage != "full" or not self._wants:
            return self._weights
        shared = self._shared_plan()
        self._outcome = shared.reason
        if shared.plan is None:
            return self._weights
        self._placement.propose(shared.plan.location(), torch.from_numpy(shared.plan.split_LP))
        return self._weights.under_proposed_placement()

    def adopt(self) -> dict[str, object]:
        """Adopt the placement that was proposed for the committed update.  Returns facts for the reply."""
        adopted = self._placement.has_proposal
        if adopted:
            self._placement.adopt_proposed()
        return {"placement_adopted": adopted, "placement_note": self._outcome}

    def _shared_plan(self) -> _SharedPlan:
        """Return the plan, made on the first rank of each engine."""
        position = self._position
        mine = self._plan() if position.is_tp_leader else _SharedPlan("")
        plans = self._exchange(to_bytes(mine))
        return from_bytes(plans[position.replica * self._layout.tp_size], _SharedPlan)

    def _plan(self) -> _SharedPlan:
        if self._counts_LE is None:
            return _SharedPlan("the placement stays: no loads were counted")
        try:
            plan = self._fresh_plan(self._counts_LE)
        except EplbError as error:
            return _SharedPlan(f"the placement stays: {error}")
        return _SharedPlan(f"adopted by {plan.algorithm}: {plan.reason}", plan)
