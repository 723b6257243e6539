"""Decides whether to move experts, and why: a pure function of loads, placement, speed and policy.

    too few tokens seen              no    noise would be planned for
    balanced enough as it is         no
    a planner finds nothing better   no
    it takes longer than it saves    no    seconds of the moves against seconds saved until the next evaluation
    otherwise                        yes

An evaluation that a request asks for skips the first, second and fourth test.  Every decision carries its numbers, so
that a dry run, a reply and a log line say the same.

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks), G ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from eplb.algorithms import TARGET
from eplb.algorithms.bounds import balancedness
from eplb.algorithms.registry import make_plan
from eplb.algorithms.types import ExpertLayout, Plan, checked_map, even_split
from eplb.errors import EplbRequestError, MapError, RebalanceRefused
from eplb.migration import Migration, plan_migration

LEAST_GAIN = 1e-3  # in mean balancedness: less is not measurable, and a new split costs an epoch


@dataclass(frozen=True, kw_only=True)
class RebalancePolicy:
    """`threshold`: mean balancedness from which on nothing is done; 1 to plan every time.

    `layers_per_chunk`, `max_stall_s`: bounds of the moves between two steps.  `expert_share`: part of a step's
    time that waits for the busiest rank's experts; not measured, half is a guess that favours staying put on engines
    where attention is the smaller part.  `deadline_s`: for every stage of an operation.  Raises `EplbRequestError`.
    """

    every_steps: int = 1000
    threshold: float = 1.0
    algorithm: str = "auto"
    target: float = TARGET
    layers_per_chunk: int | None = None
    max_stall_s: float | None = 0.1
    expert_share: float = 0.5
    choices_per_expert: float = 8.0
    deadline_s: float = 10.0

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise EplbRequestError(f"every_steps must be at least 1, got {self.every_steps}")
        for name in ("threshold", "expert_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise EplbRequestError(f"{name} must be in 0..1, got {getattr(self, name)}")
        for name in ("layers_per_chunk", "max_stall_s", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise EplbRequestError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The inputs of a decision.

    `counts_LE`: logical, of one weight version or of versions that are alike.  `bytes_per_s`: at which the busiest
    rank handled experts so far.
    """

    counts_LE: np.ndarray
    in_force: Plan
    placement_epoch: int
    weight_epoch: int
    weight_version: str
    seconds_per_step: float
    slot_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class Balance:
    """Over MoE layers."""

    mean: float
    least: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decision and its `reason`, one line.  `plan` and `migration` are set if there is something to move.

    `predicted_seconds`: of all moves; `longest_chunk_s`: of the longest stall; `predicted_gain_s`: saved until the next
    evaluation.
    """

    rebalances: bool
    reason: str
    algorithm: str
    placement_epoch: int
    weight_epoch: int
    weight_version: str
    before: Balance
    after: Balance | None = None
    num_experts_moved: int = 0
    num_local_copies: int = 0
    num_changed_slots: int = 0
    num_bytes: int = 0
    num_chunks: int = 0
    predicted_seconds: float = 0.0
    longest_chunk_s: float = 0.0
    predicted_gain_s: float = 0.0
    plan: Plan | None = None
    migration: Migration | None = None

    def facts(self) -> dict[str, Any]:
        """Return plain values for a reply; without the plan itself."""
        names = [name for name in self.__dataclass_fields__ if name not in ("plan", "migration", "before", "after")]
        after = None if self.after is None else asdict(self.after)
        balance = {"balancedness_before": asdict(self.before), "balancedness_after": after}
        return {name: getattr(self, name) for name in names} | balance


def decide(
    situation: Situation, policy: RebalancePolicy, *, asked: bool = False, given: Plan | None = None
) -> Decision:
    """Decide.  `asked`: a request wants a rebalance.  `given`: the placement to move to, in place of a planned one.

    Raises `RebalanceRefused` where it is asked for and no token was counted; `EplbRequestError` as `make_plan`, and
    `MapError` for a placement that has an expert twice on a rank.
    """
    counts_LE, in_force = situation.counts_LE, situation.in_force
    if asked and given is None and not counts_LE.any():
        raise RebalanceRefused("no tokens have been counted yet, so there is no load to plan for")
    before_L = balancedness(counts_LE, in_force)
    per_expert = float(counts_LE.mean(axis=1).min())
    staying = Decision(
        rebalances=False,
        reason="",
        algorithm=policy.algorithm,
        placement_epoch=situation.placement_epoch,
        weight_epoch=situation.weight_epoch,
        weight_version=situation.weight_version,
        before=_balance(before_L),
    )
    if not asked and per_expert < policy.choices_per_expert:
        wanted = f"{policy.choices_per_expert:g} are wanted"
        reason = f"too few tokens to plan for: {per_expert:.1f} choices an expert, {wanted}"
        return replace(staying, reason=reason)
    if not asked and before_L.mean() >= policy.threshold:
        reason = f"balanced enough: {before_L.mean():.4f}, the threshold is {policy.threshold:g}"
        return replace(staying, reason=reason)
    plan = given or make_plan(
        policy.algorithm, counts_LE, in_force.layout, in_force.physical_to_logical_LP, target=policy.target
    )
    checked_map(plan.physical_to_logical_LP, in_force.layout, len(counts_LE))
    after_L = balancedness(counts_LE, plan)
    if given is None and after_L.mean() < before_L.mean() + LEAST_GAIN:
        reason = f"nothing better found: {before_L.mean():.4f} now, {after_L.mean():.4f} by {plan.algorithm}"
        return replace(staying, reason=reason)
    return _weighed(staying, situation, policy, plan, before_L, after_L, asked)


def _weighed(
    staying: Decision,
    situation: Situation,
    policy: RebalancePolicy,
    plan: Plan,
    before_L: np.ndarray,
    after_L: np.ndarray,
    asked: bool,
) -> Decision:
    """Weigh the gain until the next evaluation against the cost of the moves."""
    most = None if policy.max_stall_s is None else max(1, int(policy.max_stall_s * situation.bytes_per_s))
    migration = plan_migration(
        situation.in_force.physical_to_logical_LP,
        plan.physical_to_logical_LP,
        situation.in_force.layout,
        situation.slot_bytes,
        layers_per_chunk=policy.layers_per_chunk,
        max_handled_bytes=most,
    )
    seconds = [migration.handled_bytes(chunk) / situation.bytes_per_s for chunk in migration.chunks]
    # The time of a layer's experts is that of its busiest rank: one over its balancedness.
    saved = 1.0 - float((1.0 / after_L).mean() / (1.0 / before_L).mean())
    gain_s = saved * policy.expert_share * situation.seconds_per_step * policy.every_steps
    moves = f"{migration.num_received} experts between ranks and {migration.num_local_copies} within"
    change = f"{before_L.mean():.4f} to {after_L.mean():.4f}, {moves}, {sum(seconds):.3g} s"
    pays = asked or gain_s > sum(seconds)
    if asked:
        reason = f"asked for: {change}; {plan.reason}"
    else:
        relation = "more than" if pays else "no more than"
        reason = f"saves {gain_s:.3g} s until the next evaluation, {relation} it takes: {change}; {plan.reason}"
    return replace(
        staying,
        rebalances=pays,
        reason=reason,
        algorithm=plan.algorithm,
        after=_balance(after_L),
        num_experts_moved=migration.num_received,
        num_local_copies=migration.num_local_copies,
        num_changed_slots=migration.num_changed_slots,
        num_bytes=migration.num_bytes,
        num_chunks=len(migration.chunks),
        predicted_seconds=sum(seconds),
        longest_chunk_s=max(seconds),
        predicted_gain_s=gain_s,
        plan=plan,
        migration=migration,
    )


def measured_balance(counts_LE: np.ndarray, in_force: Plan, least_per_expert: float) -> Balance | None:
    """Return the balance of loads that were counted under a placement; None of too few choices an expert."""
    if float(counts_LE.mean(axis=1).min()) < least_per_expert:
        return None
    return _balance(balancedness(counts_LE, in_force))


def _balance(values_L: np.ndarray) -> Balance:
    return Balance(float(values_L.mean()), float(values_L.min()))


def given_plan(physical_to_logical_LP: np.ndarray, split_LP: np.ndarray | None, layout: ExpertLayout) -> Plan:
    """Return the plan of a placement that a request brings.  Without `split_LP` an expert's tokens are divided evenly.

    Raises `MapError`.
    """
    located = checked_map(physical_to_logical_LP, layout, len(physical_to_logical_LP))
    even = even_split(located, layout.num_logical_experts)
    if split_LP is None:
        return Plan("given", "the placement was given", layout, located, even)
    split = np.asarray(split_LP, dtype=np.float64)
    if split.shape != located.shape or not np.isfinite(split).all() or (split < 0).any():
        raise MapError(f"split weights must be finite, not negative and of the map's shape {list(located.shape)}")
    totals_LE = np.zeros((len(located), layout.num_logical_experts))
    np.add.at(totals_LE, (np.arange(len(located))[:, None], located), split)
    totals_LP = np.take_along_axis(totals_LE, located, axis=1)
    shares = np.where(totals_LP > 0, np.divide(split, totals_LP, out=even.copy(), where=totals_LP > 0), even)
    return Plan("given", "the placement was given", layout, located, shares)
