"""A decision on its way from the rank that planned to the others, which make the same migration of it.

Knows the form.  Nothing that is read is executed; the sizes are checked where the plan is used.

Shapes: L MoE layers, P physical experts (slots over all ranks).
"""

from __future__ import annotations

import msgspec
import numpy as np

from eplb.algorithms.types import Plan, checked_map
from eplb.decision import Balance, Decision, RebalancePolicy, migration_of


class _Message(msgspec.Struct, frozen=True):
    """`facts`: fields of `Decision` but for plan and migration.  Arrays little-endian."""

    facts: dict[str, bool | int | float | str]
    before: tuple[float, float]
    after: tuple[float, float] | None
    plan: tuple[str, str, bytes, bytes] | None  # algorithm, reason, map int64, split float64
    slot_bytes: int
    bytes_per_s: float


_COMPOSED = ("before", "after", "plan", "migration")


def decision_to_bytes(decision: Decision, slot_bytes: int, bytes_per_s: float) -> bytes:
    """`slot_bytes` and `bytes_per_s` as they were when it was decided."""
    plan, after = decision.plan, decision.after
    arrays = None
    if plan is not None:
        located = np.ascontiguousarray(plan.physical_to_logical_LP, dtype="<i8").tobytes()
        arrays = plan.algorithm, plan.reason, located, np.ascontiguousarray(plan.split_LP, dtype="<f8").tobytes()
    return msgspec.msgpack.encode(
        _Message(
            facts={name: getattr(decision, name) for name in decision.__dataclass_fields__ if name not in _COMPOSED},
            before=(decision.before.mean, decision.before.least),
            after=None if after is None else (after.mean, after.least),
            plan=arrays,
            slot_bytes=slot_bytes,
            bytes_per_s=bytes_per_s,
        )
    )


def decision_from_bytes(data: bytes, in_force: Plan, policy: RebalancePolicy) -> Decision:
    """`in_force` and `policy` as on the rank that decided.  Raises `MapError` for a plan of another layout."""
    message = msgspec.msgpack.decode(data, type=_Message)
    plan = migration = None
    if message.plan is not None:
        algorithm, reason, located, split = message.plan
        layers = len(in_force.physical_to_logical_LP)
        map_LP = checked_map(
            np.frombuffer(located, "<i8").reshape(layers, -1), in_force.layout, layers, duplicates=True
        )
        split_LP = np.frombuffer(split, "<f8").reshape(map_LP.shape).copy()
        plan = Plan(algorithm, reason, in_force.layout, map_LP, split_LP)
        migration = migration_of(in_force, plan, message.slot_bytes, message.bytes_per_s, policy)
    return Decision(
        **message.facts,  # type: ignore[arg-type]
        before=Balance(*message.before),
        after=None if message.after is None else Balance(*message.after),
        plan=plan,
        migration=migration,
    )
