"""The balancedness of a placement, a bound on it, and the copies that it costs to get there.

Shapes: L MoE layers, E logical experts, P physical experts (slots), G ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.algorithms.types import ExpertLayout, Plan, checked_counts, greedy_replica_counts, shares_of


def rank_loads(counts_LE: np.ndarray, plan: Plan) -> np.ndarray:
    """Return the predicted load of every rank [L, G] float64 as a multiple of the mean.  Raises `LoadsError`."""
    shares_LE = shares_of(checked_counts(counts_LE, plan.layout))
    per_slot_LP = np.take_along_axis(shares_LE, plan.physical_to_logical_LP, axis=1) * plan.split_LP
    ranks = plan.layout.num_ranks
    loads_LR: np.ndarray = per_slot_LP.reshape(len(shares_LE), ranks, plan.layout.slots_per_rank).sum(axis=2) * ranks
    return loads_LR


def balancedness(counts_LE: np.ndarray, plan: Plan) -> np.ndarray:
    """Return the mean load of a rank over the largest, for each layer [L] float64: 1 is perfect, 1/G the worst."""
    return np.asarray(1.0 / rank_loads(counts_LE, plan).max(axis=1))


def even_split_bound(counts_LE: np.ndarray, layout: ExpertLayout) -> np.ndarray:
    """Return an upper bound [L] float64 of balancedness, without duplicates and with tokens split evenly over replicas.

    A rank holds a slot of the expert with the most tokens a slot, which the greedy counts make as small as any counts
    can (an exchange argument: taking a replica from one expert for another never lowers the larger of the two), and
    next to it at least the smallest loads that the other slots can have, were every other expert copied to each rank.
    """
    shares_LE = shares_of(checked_counts(counts_LE, layout))
    max_replicas = min(layout.num_ranks, layout.num_redundant_experts + 1)
    counts = greedy_replica_counts(shares_LE, layout.num_physical_experts, layout.num_ranks)
    largest_L = (shares_LE / counts).max(axis=1)
    smallest = np.sort(shares_LE / max_replicas, axis=1)[:, : layout.slots_per_rank - 1].sum(axis=1)
    return np.asarray(1.0 / np.maximum(1.0, (largest_L + smallest) * layout.num_ranks))


def cross_rank_copies(before_LP: np.ndarray, after_LP: np.ndarray, layout: ExpertLayout) -> np.ndarray:
    """Return [L, G] int64: experts that each rank must receive, because it holds them after and did not before.

    Copies between slots of one rank are not counted; two slots of a rank with the same new expert receive it once.
    """
    layers, experts = before_LP.shape[0], layout.num_logical_experts
    held = [np.zeros((layers, layout.num_ranks, experts), dtype=bool) for _ in range(2)]
    for table, physical_to_logical in zip(held, (before_LP, after_LP), strict=True):
        by_rank = physical_to_logical.reshape(layers, layout.num_ranks, layout.slots_per_rank)
        np.put_along_axis(table, by_rank, True, axis=2)
    return np.asarray((held[1] & ~held[0]).sum(axis=2))
