"""`balanced`: a fresh placement with even splits, and never two slots of an expert on one rank.

    1  slots    each further one to the expert with the most load a slot
    2  place    heaviest first, to the lightest rank that has room and not yet this expert
    3  refine   ranks exchange items in pairs (`exchange`)
    4  retry    layers that do not fit together well, with other numbers of slots

Ranks that hold slots of the same expert are linked: load can later pass from one to the other by dividing tokens
otherwise, without a copy.  So among ranks of about the same load, a slot goes where it links what is not linked yet:

    ranks   A   B   C   D          A---B   C---D   two groups: what drifts apart between them takes copies to mend
    slots   0   0   1   1
            2   ?       ?          the second slot of 2 goes to C or D, though B may be a little lighter

All layers go through each step together, and leave when they are even enough.

Shapes: L MoE layers, E logical experts, P physical experts (slots), G ranks, S slots of a rank, N placements tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from math import comb

import numpy as np

from eplb.algorithms.bounds import even_split_bound
from eplb.algorithms.exchange import refine
from eplb.algorithms.types import (
    ExpertLayout,
    Plan,
    checked_counts,
    even_split,
    greedy_replica_order,
    shares_of,
)
from eplb.expert_location import replica_counts

LINK = 0.1  # load by which a rank may be heavier and still be chosen for the link that it makes
NEARLY_FULL = 0.97  # load of a rank beyond which no link is worth it
RETRIED = 0.9992  # a layer less balanced than this is tried with other numbers of replicas
NEAR_BOUND = 0.0003  # as is one further than this from the bound for even splits
SPREADS = (0.3, 0.3, 0.3, 0.3, 0.6, 1.0)  # standard deviation of the logarithms of the numbers tried, each time
VARIANTS = 12  # numbers tried each time
FEW = 200  # ways to hand out the further slots that are all tried


def balanced(counts_LE: np.ndarray, layout: ExpertLayout) -> Plan:
    """Return a placement for these counts from nothing.  Raises `LoadsError`."""
    shares_LE = shares_of(checked_counts(counts_LE, layout))
    layers, experts = shares_LE.shape
    experts_LGS, loads_LGS = _place(shares_LE, shares_LE, layout)
    refine(experts_LGS, loads_LGS, _replicated(experts_LGS, experts))
    enough_L = np.minimum(RETRIED, even_split_bound(counts_LE, layout) - NEAR_BOUND)
    for factors_VE in _other_numbers(layout):
        (hard,) = np.nonzero(loads_LGS.sum(axis=2).max(axis=1) * enough_L > 1.0)
        if not len(hard):
            break
        other_experts, other_loads = _best_variant(shares_LE[hard], layout, factors_VE)
        better = other_loads.sum(axis=2).max(axis=1) < loads_LGS[hard].sum(axis=2).max(axis=1)
        experts_LGS[hard[better]], loads_LGS[hard[better]] = other_experts[better], other_loads[better]
    physical_to_logical = experts_LGS.reshape(layers, -1)
    reason = "places afresh, as evenly as whole slots allow"
    return Plan("balanced", reason, layout, physical_to_logical, even_split(physical_to_logical, experts))


def _replicated(experts_LGS: np.ndarray, num_logical_experts: int) -> np.ndarray:
    """Return [L, G, S] bool: whether the slot's expert has other slots."""
    flat = experts_LGS.reshape(len(experts_LGS), -1)
    counts_LE = replica_counts(flat, num_logical_experts)
    return np.take_along_axis(counts_LE > 1, flat, axis=1).reshape(experts_LGS.shape)


def _other_numbers(layout: ExpertLayout) -> Iterator[np.ndarray]:
    """Yield other numbers of replicas: random factors on the loads [V, E], or, where there are few, all numbers [V, E]
    int64.

    The least possible load a slot can be the wrong size: too large for two on a rank, too small for one.  Numbers that
    come from loads times random factors (the same in every call) have slots of many sizes.
    """
    experts, extra = layout.num_logical_experts, layout.num_redundant_experts
    if not extra:
        return
    if comb(experts + extra - 1, extra) <= FEW:
        given = combinations_with_replacement(range(experts), extra)
        numbers = 1 + np.array([np.bincount(which, minlength=experts) for which in given])
        yield numbers[numbers.max(axis=1) <= layout.num_ranks]
        return
    for seed, spread in enumerate(SPREADS):
        yield np.exp(np.random.default_rng(seed).normal(0.0, spread, (VARIANTS, experts)))


def _best_variant(shares_LE: np.ndarray, layout: ExpertLayout, factors_VE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best refined placement with other numbers of replicas; judge random ones before they are refined."""
    layers, experts = shares_LE.shape
    variants = len(factors_VE)
    exact = factors_VE.dtype.kind == "i"
    wanted = np.tile(factors_VE, (layers, 1)) if exact else (shares_LE[:, None] * factors_VE).reshape(-1, experts)
    experts_NGS, loads_NGS = _place(np.repeat(shares_LE, variants, axis=0), wanted.astype(np.float64), layout)
    if exact:
        refine(experts_NGS, loads_NGS, _replicated(experts_NGS, experts))
    best = loads_NGS.sum(axis=2).max(axis=1).reshape(layers, variants).argmin(axis=1)
    chosen = np.arange(layers) * variants + best
    experts_LGS, loads_LGS = experts_NGS[chosen], loads_NGS[chosen]
    refine(experts_LGS, loads_LGS, _replicated(experts_LGS, experts))
    return experts_LGS, loads_LGS


def _items(shares_LE: np.ndarray, wanted_LE: np.ndarray, layout: ExpertLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return experts [L, P] and loads [L, P], in multiples of a rank's mean, of all slots by falling load.

    Slots are given to experts in proportion to `wanted_LE`; if it has whole numbers of slots, exactly so.
    """
    layers, experts = shares_LE.shape
    extra = greedy_replica_order(wanted_LE, layout.num_redundant_experts, layout.num_ranks)
    copies = np.concatenate((np.broadcast_to(np.arange(experts), (layers, experts)), extra), axis=1)
    copies = np.sort(copies, axis=1)
    loads = np.take_along_axis(shares_LE, copies, axis=1) * even_split(copies, experts) * layout.num_ranks
    order = np.argsort(-loads, axis=1, kind="stable")
    return np.take_along_axis(copies, order, axis=1), np.take_along_axis(loads, order, axis=1)


def _place(shares_LE: np.ndarray, wanted_LE: np.ndarray, layout: ExpertLayout) -> tuple[np.ndarray, np.ndarray]:
    """Place the slots, heaviest first, each on the lightest rank; return experts and loads of all ranks [L, G, S].

    `links_LG` numbers the groups of linked ranks.
    """
    experts_LP, loads_LP = _items(shares_LE, wanted_LE, layout)
    layers, ranks, slots = len(experts_LP), layout.num_ranks, layout.slots_per_rank
    placed = np.full((layers, ranks, slots), -1, dtype=np.int64)
    placed_loads = np.zeros((layers, ranks, slots))
    holds = np.zeros((layers, layout.num_logical_experts, ranks), dtype=bool)
    rank_loads = np.zeros((layers, ranks))  # infinite when full
    filled = np.zeros((layers, ranks), dtype=np.int64)
    every = np.arange(layers)
    links_LG = np.broadcast_to(np.arange(ranks), (layers, ranks)).copy()
    first_rank = np.full((layers, layout.num_logical_experts), -1)
    for expert, load in zip(experts_LP.T, loads_LP.T, strict=True):
        open_loads = np.where(holds[every, expert], np.inf, rank_loads)
        first = first_rank[every, expert]
        again = first >= 0
        if again.any():
            own = np.where(again, links_LG[every, first], -1)[:, None]
            full = open_loads + load[:, None] > NEARLY_FULL
            rank = (open_loads + LINK * (links_LG == own) + full).argmin(axis=1)
        else:
            rank = open_loads.argmin(axis=1)
        for layer in np.flatnonzero(np.isinf(open_loads[every, rank])):
            rank[layer] = _make_room(
                int(expert[layer]), placed[layer], placed_loads[layer], holds[layer], filled[layer]
            )
            rank_loads[layer] = np.where(filled[layer] == slots, np.inf, placed_loads[layer].sum(axis=1))
        if again.any():
            joined = again[:, None] & (links_LG == links_LG[every, rank][:, None])
            links_LG = np.where(joined, own, links_LG)
        first_rank[every, expert] = np.where(again, first, rank)
        slot = filled[every, rank]
        placed[every, rank, slot] = expert
        placed_loads[every, rank, slot] = load
        holds[every, expert, rank] = True
        filled[every, rank] = slot + 1
        grown = rank_loads[every, rank] + load
        rank_loads[every, rank] = np.where(slot + 1 == slots, np.inf, grown)
    return placed, placed_loads


def _make_room(
    expert: int, placed_GS: np.ndarray, loads_GS: np.ndarray, holds_EG: np.ndarray, filled_G: np.ndarray
) -> int:
    """Return a full rank without `expert`, after one of its items went to a rank with room; all ranks with room hold
    `expert`.

    There is such an item: the full rank holds more experts than the other, which also holds `expert`.
    """
    taker = int(np.flatnonzero(filled_G < placed_GS.shape[1])[0])
    giver = int(np.flatnonzero(~holds_EG[expert])[0])
    slot = int(np.flatnonzero(~holds_EG[placed_GS[giver], taker])[-1])
    moved, last = placed_GS[giver, slot], filled_G[giver] - 1
    placed_GS[taker, filled_G[taker]], loads_GS[taker, filled_G[taker]] = moved, loads_GS[giver, slot]
    holds_EG[moved, taker], holds_EG[moved, giver] = True, False
    placed_GS[giver, slot], loads_GS[giver, slot] = placed_GS[giver, last], loads_GS[giver, last]
    placed_GS[giver, last], loads_GS[giver, last] = -1, 0.0
    filled_G[taker] += 1
    filled_G[giver] -= 1
    return giver
