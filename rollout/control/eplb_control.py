"""`POST /eplb_rebalance`, and the evaluations that an engine starts by itself: from counts to experts that moved.

    asked, or N passes     counts of all ranks -> history
    planning               a thread of rank 0 during the steps; every turn asks whether it is done
    decided                the decision goes to all ranks
    moving                 a chunk of layers between two steps: move, put the map in force, agree that it is one map

All ranks do all of this in the same turn.  A weight update goes first: while one is open nothing is moved, and moves
that were not made yet are dropped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from eplb.algorithms.registry import require_planner
from eplb.algorithms.types import Plan, from_bytes, to_bytes
from eplb.decision import Decision, RebalancePolicy, Situation, decide, given_plan
from eplb.errors import EplbError, EplbRequestError, RebalanceRefused, TornTransferError
from eplb.manager import RebalanceManager, Stage
from eplb.transfer import ExpertTransfer
from rollout.control.rank_consensus import PeerRankError
from rollout.core.console import say
from rollout.core.errors import Conflict, UnsupportedFeature, status_of
from rollout.core.messages.experts import EplbRebalanceReply, EplbRebalanceReqInput, EplbState
from rollout.core.messages.message import ControlReqOutput, failure
from rollout.scheduler.agenda import Work
from rollout.scheduler.scheduler import Scheduler, VerbHandler

logger = logging.getLogger(__name__)
_OVERDUE = 10
"""Evaluations that may be missed, as while a weight update is open, before the balancer is reported as stuck."""


class _Planned(msgspec.Struct):
    """The outcome of planning on rank 0: a decision, or an error and its status."""

    decision: Decision | None = None
    error: str = ""
    status_code: int = 200


class EplbControl:
    """Expert balancing of an engine whose experts are spread over ranks.

    If the manager's history is not counted, a placement must be given.  `weight_update()` returns the reason why
    weights and slots must stay as they are, if this rank knows one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        manager: RebalanceManager,
        transfer: ExpertTransfer,
        weight_update: Callable[[], str | None],
        wake: Callable[[], None],
    ) -> None:
        self._scheduler, self._manager, self._transfer = scheduler, manager, transfer
        self._history, self._weight_update, self._wake = manager.history, weight_update, wake
        self._state, self._parallel = scheduler.runner.state, scheduler.parallel
        self._verb: EplbRebalanceReqInput | None = None  # it asked for the current rebalance; None: the engine did
        self._planning: Future[_Planned] | None = None  # on rank 0
        self._plans = scheduler.parallel.position.is_tp_leader
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="eplb-planner") if self._plans else None
        self._timed = (0, 0.0)  # steps and their seconds at the last evaluation
        self._history.watch(manager.policy.every_steps, self._call)

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        return {EplbRebalanceReqInput: self._on_verb}

    @property
    def work(self) -> Sequence[Work]:
        """The work between steps."""
        return (self.advance,)

    def status(self) -> EplbState:
        """Return the state of the balancer, for metrics and health."""
        state = EplbState(**self._manager.status(), counts_loads=self._history.is_counted)
        state.stuck = state.stuck or self._overdue()
        return state

    def _overdue(self) -> str | None:
        """Return the objection if steps run and no evaluation is made."""
        every, unseen = self._manager.policy.every_steps, self._history.num_unseen_passes
        if unseen <= _OVERDUE * every:
            return None
        return f"the balance of ranks was not evaluated for {unseen} steps, due every {every}"

    # --- an evaluation --------------------------------------------------------------------------------------------

    def _on_verb(self, verb: EplbRebalanceReqInput) -> None:
        """Evaluate the balance.  The answer comes after a decision not to move, or when moving has ended."""
        if self._manager.stage is not Stage.IDLE:
            raise RebalanceRefused(f"another rebalance is running ({self._manager.stage.value}); one at a time")
        policy, given = self._wanted(verb)
        if not self._history.is_counted and given is None:
            raise UnsupportedFeature("no loads are counted: start with --enable-eplb, or give physical_to_logical_map")
        self._scheduler.serving.require_weights()
        refresh = None if verb.dry_run else self._reason_to_stay()
        if refresh is not None:
            raise RebalanceRefused(f"experts cannot be moved now: {refresh}")
        self._evaluate(verb, policy, given)

    def _wanted(self, verb: EplbRebalanceReqInput) -> tuple[RebalancePolicy, Plan | None]:
        """Return the policy that the verb asks for, and its placement if it has one.

        Raises `EplbRequestError`, `MapError`.
        """
        policy = self._manager.policy
        asked: dict[str, Any] = {
            "algorithm": verb.algorithm,
            "layers_per_chunk": verb.layers_per_chunk,
            "max_stall_s": verb.max_stall_s,
        }
        policy = replace(policy, **{name: value for name, value in asked.items() if value is not None})
        require_planner(policy.algorithm)
        if verb.physical_to_logical_map is None:
            if verb.split is not None:
                raise EplbRequestError("split needs physical_to_logical_map")
            return policy, None
        location = _array("physical_to_logical_map", verb.physical_to_logical_map, np.int64)
        split = None if verb.split is None else _array("split", verb.split, np.float64)
        if len(location) != self._manager.num_layers:
            raise EplbRequestError(f"the map has {len(location)} layers, but the model has {self._manager.num_layers}")
        return policy, given_plan(location, split, self._manager.layout)

    def _evaluate(self, verb: EplbRebalanceReqInput | None, policy: RebalancePolicy, given: Plan | None) -> None:
        """Start planning on a thread of rank 0, while steps go on."""
        self._history.gather()
        placement, epoch, manager = self._state.placement, self._state.epoch, self._manager
        in_force = placement.plan(manager.layout)
        manager.note_loads(in_force)
        situation = Situation(
            counts_LE=self._history.counts_LE.numpy(),
            in_force=in_force,
            placement_epoch=placement.epoch,
            weight_epoch=epoch.weight_epoch,
            weight_version=epoch.weight_version,
            seconds_per_step=self._seconds_per_step(),
            slot_bytes=manager.slot_bytes,
            bytes_per_s=manager.bytes_per_s,
        )
        manager.start_planning()
        self._verb = verb
        self._call()
        if self._planner is not None:
            work = partial(decide, situation, policy, asked=verb is not None, given=given)
            self._planning = self._planner.submit(_planned, work)
            self._planning.add_done_callback(lambda _: self._wake())

    def _seconds_per_step(self) -> float:
        """Return the seconds a step since the last evaluation, on this rank."""
        stats = self._scheduler.stats
        before, self._timed = self._timed, (stats.num_steps, sum(stats.seconds.values()))
        return (self._timed[1] - before[1]) / max(1, self._timed[0] - before[0])

    def _reason_to_stay(self) -> str | None:
        """Return why no expert may be moved now, the same for all ranks; every rank asks in the same turn."""
        serving = self._scheduler.serving
        if serving.content_lost:
            return "the weights' memory is released"
        if serving.poisoned is not None:
            return f"the weights are poisoned: {serving.poisoned}"
        reasons = self._parallel.tp.gather_bytes((self._weight_update() or "").encode())
        return next((reason.decode() for reason in reasons if reason), None)

    # --- between steps --------------------------------------------------------------------------------------------

    def _call(self) -> None:
        self._scheduler.agenda.call(self.advance)

    def advance(self) -> None:
        """Start an evaluation that is due, take a plan that is done, and move the next chunk."""
        manager = self._manager
        if manager.stage is Stage.IDLE:
            if not manager.is_due(self._history.num_passes):
                return
            if self._reason_to_stay() is not None:
                self._history.postpone()
                return
            self._evaluate(None, manager.policy, None)
        if manager.stage is Stage.PLANNING and not self._take_decision():
            self._call()
            return
        if manager.stage is Stage.MOVING:
            self._move()
        if manager.stage is Stage.IDLE:
            self._end()
        else:
            self._call()
            self._wake()

    def _take_decision(self) -> bool:
        """Return whether rank 0 is done planning; if so, give its decision to the manager on all ranks."""
        planning, verb = self._planning, self._verb
        if not self._parallel.tp.any_of(planning is not None and planning.done()):
            return False
        mine = b"" if planning is None else to_bytes(planning.result())
        planned = from_bytes(self._parallel.tp.gather_bytes(mine)[0], _Planned)
        decision = planned.decision
        if decision is None:
            self._manager.planning_failed(PeerRankError(planned.error, planned.status_code))
            return True
        self._manager.planned(decision, move=verb is None or not verb.dry_run)
        if verb is None and decision.rebalances and self._plans:
            if decision.num_experts_moved or decision.num_local_copies:
                say(f"rebalance: {decision.reason}")
            else:  # only the shares of an expert's copies changed, as often as loads do
                logger.debug("rebalance without a move: %s", decision.reason)
        return True

    def _move(self) -> None:
        """Move one chunk, or end the moving."""
        manager, state = self._manager, self._state
        placement, decision = state.placement, manager.decision
        chunk = manager.next_chunk(state.epoch.weight_epoch, placement.epoch, self._reason_to_stay())
        if chunk is None:
            return
        assert decision is not None and decision.plan is not None and decision.migration is not None
        try:
            with state.mutate("rebalance"):
                if not manager.num_chunks_done:
                    self._transfer.prepare(decision.migration, placement.epoch)
                seconds = self._transfer.run(chunk, placement.epoch)
                self._publish_map(decision.plan, chunk.layers)
        except EplbError as error:
            manager.drop(error)
            if isinstance(error, TornTransferError):
                self._scheduler.poison(str(error))
            return
        manager.chunk_done(seconds, placement.epoch)

    def _publish_map(self, plan: Plan, layers: range) -> None:
        """Adopt the map of the slots' content.  Raises `TornTransferError` if ranks would route by different maps."""
        placement = self._state.placement
        try:
            placement.adopt(plan.location(), torch.from_numpy(plan.split_LP), list(layers))
        except EplbError as error:
            raise TornTransferError(f"experts were moved to a map that cannot be used: {error}") from error
        self._state.publish_placement()
        table = placement.split()
        content = hashlib.sha256(str(placement.epoch).encode())
        for tensor in (placement.metadata.physical_to_logical_map, table.slots_LRE, table.ends_LRE):
            content.update(tensor.numpy().tobytes())
        if len(set(self._parallel.tp.gather_bytes(content.digest()))) > 1:
            raise TornTransferError("the ranks have different expert maps in force")

    # --- the end --------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        verb, self._verb, self._planning = self._verb, None, None
        self._transfer.close()
        if verb is not None:
            self._scheduler.reply(self._answer(verb))
        elif self._manager.error is not None and self._plans:
            say(f"no rebalance: {self._manager.error}", "WARNING")

    def _answer(self, verb: EplbRebalanceReqInput) -> ControlReqOutput[EplbRebalanceReply]:
        decision, outcome, error = self._manager.decision, self._manager.outcome, self._manager.error
        if error is not None:
            return failure(verb.request_id, error)
        assert decision is not None
        moved = decision.rebalances and not verb.dry_run
        if moved and outcome is not None and outcome.dropped is not None:
            done = f"{outcome.chunks_done} of {outcome.num_chunks} chunks were moved"
            return failure(verb.request_id, Conflict(f"{done}; {outcome.dropped}"))
        reply = EplbRebalanceReply(
            rebalanced=moved,
            dry_run=verb.dry_run,
            decision=decision.facts(),
            placement_epoch=self._state.placement.epoch,
        )
        if moved and outcome is not None:
            reply.outcome = outcome.facts()
        if verb.dry_run and decision.plan is not None:
            reply.physical_to_logical_map = decision.plan.physical_to_logical_LP.tolist()
            reply.split = decision.plan.split_LP.tolist()
        return verb.answer(reply, decision.reason)


class NoExpertsToMove:
    """`POST /eplb_rebalance` of an engine without experts to balance.  `reason`: one line."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        return {EplbRebalanceReqInput: self._on_verb}

    @property
    def work(self) -> Sequence[Work]:
        """Nothing."""
        return ()

    def status(self) -> None:
        """Show nothing."""

    def _on_verb(self, verb: EplbRebalanceReqInput) -> None:
        raise UnsupportedFeature(self._reason)


def _planned(work: Callable[[], Decision]) -> _Planned:
    """Plan in the planner's thread.  Never raises: errors are returned."""
    try:
        return _Planned(decision=work())
    except Exception as error:
        return _Planned(error=str(error) or type(error).__name__, status_code=status_of(error))


def _array(name: str, rows: list[list[Any]], dtype: type) -> np.ndarray:
    """Return the rows as an array.  Raises `EplbRequestError` for rows of different lengths."""
    if len({len(row) for row in rows}) != 1:
        raise EplbRequestError(f"{name} must have rows of one length")
    return np.array(rows, dtype=dtype)
